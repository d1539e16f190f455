"""Command line and ini → one frozen Config. Imports nothing heavy: every run that has us installed pays."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest

from .claims.units import parse_bytes, parse_duration
from .names import NOT_REQUIRABLE, REHEARSED, REQUIRABLE, SIMULATED
from .stack_options import parse_stacks

if TYPE_CHECKING:
    from pathlib import Path

    from .containers.image import ContainerSettings
    from .ledger.record import Kind

T = TypeVar("T")

FAIL_ON: Final = ("worse", "changed", "better")


@dataclass(frozen=True, slots=True)
class Config:
    """How this run evaluates claims. Times in seconds, ``baseline_bytes`` in bytes.

    ``stacks`` are (name, reference) pairs, empty when the running Python is the stack.
    """

    rig: str
    stacks: tuple[tuple[str, str], ...]
    wait_s: float
    require: tuple[str, ...]
    fail_on: tuple[str, ...]
    strict: bool
    ports: tuple[int, int]
    log_dir: Path
    models: tuple[tuple[str, str], ...]
    stall_s: float
    grace_s: float
    baseline_bytes: int
    reclaim_s: float
    signatures: tuple[str, ...] = ()
    #: Seconds for the whole run, None without a budget.
    budget_s: float | None = None
    pack: bool = False
    #: The commands that stop and start the unit that normally owns the GPUs: both or neither.
    vacate: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    hook_timeout_s: float = 600.0
    fresh_jit: bool = False
    #: What containers are given; None: nothing but what they need.
    containers: ContainerSettings | None = None
    #: The ledger's URL or file; None: nothing is remembered.
    ledger: str | None = None
    #: Fresh boots on which a flip must come out again.
    confirm: int = 0

    @property
    def simulated(self) -> bool:
        """Whether the rig is simulated."""
        return self.rig.startswith(SIMULATED)

    @property
    def kind(self) -> Kind:
        """What the ledger is told that this run's verdicts are."""
        return "rehearsed" if self.simulated else "verified"

    @property
    def label(self) -> str | None:
        """What every result of this run is labelled: REHEARSED on a simulated rig, else nothing."""
        return REHEARSED if self.simulated else None


@dataclass(frozen=True, slots=True)
class _Option:
    """One setting: ``--gpuguard-NAME`` with the ini twin ``gpuguard_NAME``; ``flag`` False means ini only."""

    name: str
    help: str
    default: str | None = None
    metavar: str | None = None
    kind: str = "string"  # string, bool, lines
    flag: bool = True


_OPTIONS: Final = (
    _Option("rig", "the GPUs: auto (NVML), or simulated ones: sim:<card>:<n>, sim:<size>GiB:<n>", "auto", "RIG"),
    _Option(
        "stack",
        "the software under test: NAME=PYTHON, the python of the environment that the engine is installed in "
        "(default: the python that runs pytest); NAME=docker:IMAGE or NAME=podman:IMAGE; on a simulated rig "
        "NAME=sim:sglang==RELEASE. Repeated, every claim is evaluated on each, and the first is what the others are "
        "compared with",
        None,
        "NAME=PYTHON",
        "lines",
    ),
    _Option("wait", "how long to wait for GPUs and for the CPU server slot: 90, 20m, 2h", "30m", "TIME"),
    _Option(
        "require",
        "fail the run when claims were not evaluated for these reasons, which this runner should have met: "
        + ", ".join(REQUIRABLE),
        "",
        "REASONS",
    ),
    _Option("fail-on", "verdicts that fail the run: worse, changed, better", ",".join(FAIL_ON), "VERDICTS"),
    _Option(
        "budget",
        "evaluate the most valuable claims that fit this time, measured from pytest's start: 90s, 25m, 2h",
        None,
        "TIME",
    ),
    _Option(
        "pack",
        "under pytest-xdist (-n auto: as many workers as GPUs) start each claim when its GPUs are free, the longest "
        "first, and share boots; without -n claims run one after the other",
        None,
        None,
        "bool",
    ),
    _Option(
        "ledger",
        "where verdicts are remembered: a SQLite file, sqlite:///FILE, postgresql://…, or none "
        "(default: .gpuguard/ledger.sqlite in the root folder)",
        "",
        "URL",
    ),
    _Option("confirm", "evaluate a flip again on so many fresh boots before it is reported", "0", "N"),
    _Option("strict", "an INCONCLUSIVE claim fails the run", None, None, "bool"),
    _Option("ports", "the range that servers take their ports from", "20000-32767", "FIRST-LAST"),
    _Option("log-dir", "where server logs are written (default: .gpuguard/logs in the root folder)", "", "DIR"),
    _Option(
        "signatures",
        "a file with failure signatures of your own, for the reading of server logs (repeatable)",
        None,
        "FILE",
        "lines",
    ),
    _Option("fresh-jit", "each stack begins with empty caches of compiled kernels, its own", None, None, "bool"),
    _Option("mounts", "what containers see of this machine, one HOST:CONTAINER[:ro] a line", kind="lines", flag=False),
    _Option("container-env", "variables for containers, one NAME or NAME=VALUE a line", kind="lines", flag=False),
    _Option("container-args", "more words for docker run or podman run", "", flag=False),
    _Option("models", "names for model folders, one NAME = FOLDER a line", kind="lines", flag=False),
    _Option(
        "stall-timeout",
        "a boot with no log line and flat memory for this long has hung",
        "300s",
        "TIME",
        flag=False,
    ),
    _Option("grace", "how long a server may take to stop after SIGTERM", "30s", "TIME", flag=False),
    _Option("baseline", "used memory that a clean GPU may show", "1GiB", "SIZE", flag=False),
    _Option("reclaim", "how long to wait for the driver to give GPU memory back", "180s", "TIME", flag=False),
    _Option("vacate", "the command that stops the production unit which normally owns the GPUs", "", flag=False),
    _Option("restore", "the command that starts it again after the last run", "", flag=False),
    _Option("hook-timeout", "how long each of these commands may take", "10m", "TIME", flag=False),
)


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini twin."""
    group = parser.getgroup("gpuguard", "claims about serving hardware")
    for option in _OPTIONS:
        ini = f"gpuguard_{option.name.replace('-', '_')}"
        if option.flag:
            arguments: dict[str, Any] = {"dest": ini, "default": None, "help": option.help + f" (ini: {ini})"}
            if option.kind == "bool":
                arguments["action"] = "store_true"
            else:
                arguments |= {"metavar": option.metavar, "action": "append" if option.kind == "lines" else "store"}
            group.addoption(f"--gpuguard-{option.name}", **arguments)
        kinds = {"string": "string", "bool": "bool", "lines": "linelist"}
        parser.addini(ini, option.help, type=kinds[option.kind], default=None)  # type: ignore[arg-type]


def read_config(config: pytest.Config) -> Config:
    """The settings of this run. Raises pytest.UsageError that names the option and what it takes."""
    values = {option.name: _value(config, option) for option in _OPTIONS}
    root = config.rootpath
    log_dir = values["log-dir"]
    rig = _rig(values["rig"])
    vacate, restore = _hooks(values["vacate"], values["restore"])
    return Config(
        rig=rig,
        stacks=parse_stacks(values["stack"] or [], rig),
        wait_s=_parsed("wait", values["wait"], lambda text: 0.0 if text in ("0", "0s") else _duration(text)),
        require=_choices("require", values["require"], REQUIRABLE, NOT_REQUIRABLE),
        fail_on=_choices("fail-on", values["fail-on"], FAIL_ON),
        strict=bool(values["strict"]),
        ports=_parsed("ports", values["ports"], _port_range),
        log_dir=(root / log_dir) if log_dir else root / ".gpuguard" / "logs",
        models=tuple((name, _path(root, folder)) for name, folder in _pairs("models", values["models"] or [])),
        stall_s=_parsed("stall-timeout", values["stall-timeout"], _duration),
        grace_s=_parsed("grace", values["grace"], _duration),
        baseline_bytes=_parsed("baseline", values["baseline"], parse_bytes),
        reclaim_s=_parsed("reclaim", values["reclaim"], _duration),
        signatures=_signatures(root, values["signatures"] or []),
        pack=bool(values["pack"]),
        budget_s=_parsed("budget", values["budget"], _duration) if values["budget"] is not None else None,
        vacate=vacate,
        restore=restore,
        hook_timeout_s=_parsed("hook-timeout", values["hook-timeout"], _duration),
        fresh_jit=bool(values["fresh-jit"]),
        containers=_containers(values["mounts"] or [], values["container-env"] or [], values["container-args"]),
        ledger=_ledger(root, values["ledger"]),
        confirm=_parsed("confirm", values["confirm"], _number_of_boots),
    )


def _value(config: pytest.Config, option: _Option) -> Any:
    ini = f"gpuguard_{option.name.replace('-', '_')}"
    given = getattr(config.option, ini, None)
    if given is None:
        given = config.getini(ini)
    return option.default if given is None or given == [] else given


def _duration(text: str) -> float:
    bare = text.strip()
    return parse_duration(float(bare) if bare.replace(".", "", 1).isdigit() else bare)


def _parsed(name: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise pytest.UsageError(f"--gpuguard-{name}: {error}") from None


def is_simulated(config: pytest.Config) -> bool:
    """Whether this run's rig is simulated, by command line or ini: for a conftest that has a stack or models for it."""
    return str(_value(config, _OPTIONS[0])).startswith(SIMULATED)


def is_packed(config: pytest.Config) -> bool:
    """Whether command line or ini asks for packing: needed before the run is configured."""
    return bool(_value(config, next(option for option in _OPTIONS if option.name == "pack")))


def names_a_stack(config: pytest.Config) -> bool:
    """Whether command line or ini names the stack, so that a conftest should not."""
    return bool(_value(config, _OPTIONS[1]))


def _rig(text: str) -> str:
    if text == "auto":
        return text
    if text.startswith("replay:"):
        raise pytest.UsageError(
            f"--gpuguard-rig {text}: replayed rigs are not available in this version; use auto or sim:<card>:<n>"
        )
    if not text.startswith(SIMULATED):
        raise pytest.UsageError(
            f"--gpuguard-rig {text!r} is no rig: it takes auto (the GPUs that NVML reports) or sim:<card>:<n>, "
            f"such as sim:rtx-pro-6000-server:8"
        )
    from .facts.choice import parse_rig
    from .facts.simulated import simulated_rig

    try:
        choice = parse_rig(text)
        simulated_rig(choice)
    except ValueError as error:
        raise pytest.UsageError(f"--gpuguard-rig {text}: {error}") from None
    return str(choice)


def _path(root: Path, text: str) -> str:
    """A folder as written in an ini: ``~`` is home, and what is relative starts at the root folder. Hub ids stay."""
    path = os.path.expanduser(text)
    inside = root / path
    return str(inside) if not os.path.isabs(path) and inside.is_dir() else path


def _ledger(root: Path, text: str) -> str | None:
    """A URL as it is; a file as an ini says it, from the root folder on."""
    if text == "none":
        return None
    if "://" in text:
        return text
    return str(root / os.path.expanduser(text)) if text else str(root / ".gpuguard" / "ledger.sqlite")


def _number_of_boots(text: str) -> int:
    if not text.isdecimal() or int(text) > 20:
        raise ValueError(f"{text!r} is no number of boots: write 0 (off) to 20")
    return int(text)


def _signatures(root: Path, texts: list[str]) -> tuple[str, ...]:
    """Files of signatures, checked here so that a run does not begin with a wrong one."""
    if not texts:
        return ()
    from .diagnose.signatures import SignatureError, read_signature_files

    paths = tuple(str(root / os.path.expanduser(text)) for text in texts)
    try:
        read_signature_files(paths)
    except SignatureError as error:
        raise pytest.UsageError(f"--gpuguard-signatures: {error}") from None
    return paths


def _hooks(*texts: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words of the commands ``vacate`` and ``restore``. One without the other would take the unit down for good."""
    found = []
    for name, text in zip(("vacate", "restore"), texts, strict=True):
        try:
            found.append(tuple(shlex.split(text)))
        except ValueError as error:
            raise pytest.UsageError(f"gpuguard_{name}: {text!r} is no command: {error}") from None
    vacate, restore = found
    if vacate and not restore:
        raise pytest.UsageError(
            "gpuguard_restore: gpuguard_vacate stops the production unit, so add the command that starts it again, "
            "such as gpuguard_restore = sudo systemctl start sglang.service"
        )
    if restore and not vacate:
        raise pytest.UsageError(
            "gpuguard_vacate: gpuguard_restore starts the production unit, so add the command that stops it before, "
            "such as gpuguard_vacate = sudo systemctl stop sglang.service"
        )
    return vacate, restore


def _pairs(name: str, texts: list[str]) -> tuple[tuple[str, str], ...]:
    found = []
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals and value):
            raise pytest.UsageError(f"gpuguard_{name}: {text!r} is not NAME = VALUE")
        found.append((key, value))
    return tuple(found)


def _containers(mounts: list[str], env: list[str], args: str) -> ContainerSettings | None:
    if not (mounts or env or args):
        return None
    from .container_options import read_settings

    return read_settings(mounts, env, args)


def _port_range(text: str) -> tuple[int, int]:
    first, dash, last = (part.strip() for part in text.partition("-"))
    if not (dash and first.isdigit() and last.isdigit() and 1024 <= int(first) <= int(last) <= 65535):
        raise ValueError(f"{text!r} is not a port range: write 20000-32767 (1024 to 65535)")
    return int(first), int(last)


def _choices(name: str, text: str, known: tuple[str, ...], refused: tuple[str, ...] = ()) -> tuple[str, ...]:
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in found:
        if word in refused:
            raise pytest.UsageError(
                f"--gpuguard-{name}: {word!r} is never a fault of this runner; it takes {', '.join(known)}"
            )
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise pytest.UsageError(f"--gpuguard-{name}: {word!r} is not known; {hint}")
    return tuple(dict.fromkeys(found))

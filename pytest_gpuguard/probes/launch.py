"""How a probe's script is started in the python under test: the text after ``-c``, and the order in its environment.

The script and ``kit`` travel as text, so that they also run in a container. It must never need anything of ours there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

#: The variable that carries the order.
ORDER: Final = "GPUGUARD_PROBE"
#: Linux takes no single argument above 128 KiB.
MOST_TEXT: Final = 120_000
_FOLDER: Final = Path(__file__).parent
_NOT_SCRIPTS: Final = ("__init__", "kit", "launch")

_LAUNCHER: Final = """\
import sys
if sys.path and sys.path[0] == "":
    del sys.path[0]  # nothing of the current directory must be taken for a module
import faulthandler, linecache, types
faulthandler.enable()
def load(name, file, source):
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = file
    return module, compile(source, file, "exec")
for name in ("pytest_gpuguard", "pytest_gpuguard.probes"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
kit, code = load("pytest_gpuguard.probes.kit", "probes/kit.py", {kit!r})
exec(code, kit.__dict__)
sys.modules["pytest_gpuguard.probes"].kit = kit
sys.modules["pytest_gpuguard"].probes = sys.modules["pytest_gpuguard.probes"]
script, code = load("__main__", {file!r}, {script!r})
exec(code, script.__dict__)
"""


class ProbeError(ValueError):
    """A script cannot be run as a probe; the text names the cause and the cure."""


@dataclass(frozen=True, slots=True)
class Script:
    """A probe's script: its name for people, and its text."""

    name: str
    text: str


def shipped() -> tuple[str, ...]:
    """The names of the probes that come with the plugin."""
    return tuple(sorted(one.stem for one in _FOLDER.glob("*.py") if one.stem not in _NOT_SCRIPTS))


def find_script(named: str | Path, folder: Path | None) -> Script:
    """A shipped probe by its name, or a file: beside the test first, then where pytest runs. Raises ProbeError."""
    if isinstance(named, str) and re.fullmatch(r"\w+", named):
        if named not in shipped():
            raise ProbeError(
                f"there is no probe {named!r}: shipped are {', '.join(shipped())}; "
                f"a script of your own is named by its path, such as probe('{named}.py')"
            )
        path = _FOLDER / f"{named}.py"
    else:
        beside = folder / named if folder is not None else Path(named)
        path = beside if beside.exists() else Path(named)
    try:
        return Script(path.stem, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProbeError(f"the probe {str(named)!r} cannot be read: {error}") from None


def command(python: str, script: Script) -> list[str]:
    """What runs the script in that python. Raises ProbeError for one that is too long."""
    kit = (_FOLDER / "kit.py").read_text(encoding="utf-8")
    text = _LAUNCHER.format(kit=kit, file=f"probes/{script.name}.py", script=script.text)
    if len(text.encode()) > MOST_TEXT:
        raise ProbeError(f"the probe {script.name!r} is too long: a script and what it runs with may have 100 kB")
    return [python, "-c", text]


def order(
    args: Mapping[str, Any],
    gpus: Sequence[str],
    rig: Sequence[Mapping[str, Any]],
    driver: str | None,
    driver_cuda: str | None,
    nonce: str,
) -> str:
    """What the script is told, as the value of its variable. Raises ProbeError when ``args`` is no JSON data."""
    whole = {
        "args": dict(args),
        "gpus": list(gpus),
        "rig": [dict(one) for one in rig],
        "driver": driver,
        "driver_cuda": driver_cuda,
        "nonce": nonce,
        "launched": True,
    }
    try:
        text = json.dumps(whole)
    except (TypeError, ValueError) as error:
        raise ProbeError(f"args of a probe must be JSON data: {error}") from None
    if len(text) > MOST_TEXT:
        raise ProbeError("args of a probe may have 100 kB as JSON")
    return text

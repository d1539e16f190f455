"""The decorators that people write. Each is one function whose signature is the contract and whose body validates.

Calling a decorator only makes a pytest mark; the arguments are checked at collection, where an error can name file
and line. ``pytest.mark.fits(...)`` and ``@fits(...)`` are the same thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import date

import pytest

from . import arguments
from .architectures import SM_ARCHITECTURES
from .claim import ENGINES, About, Serves
from .errors import ClaimError, suggest
from .expect import Compare, ExpectToks, Fails, Fits, Ignores, MaxMem, Ooms, Unsupported, Uses, Works
from .layout import parse_layout, resolve
from .marker import MARKERS, Marker, marker
from .needs import LINKS, Needs, vram_needs
from .outcome import HOST_FAULTS, OOM_PHASES, STACK_FAILURES
from .units import parse_comparison, parse_duration, parse_percent
from .window import canonical

__all__ = ["MARKERS", "Marker", "architectures"]


# ---------------------------------------------------------------------------------------------------------- needs


@marker
def needs_sm(*sms: str) -> Needs:
    """Needs GPUs of one of these compute capabilities: ``needs_sm("120", "121")``.

    SM numbers are families, not an order: name each one that the claim is about.
    """
    if not sms:
        raise ClaimError('name at least one, such as needs_sm("120")')
    found = []
    for one in sms:
        number = str(one).upper().removeprefix("SM").removeprefix("_").replace(".", "")
        if number not in SM_ARCHITECTURES:
            known = ", ".join(SM_ARCHITECTURES)
            raise ClaimError(
                f"{one!r} is no compute capability that is known{suggest(number, SM_ARCHITECTURES)} ({known})"
            )
        found.append(number)
    return Needs(sms=tuple(dict.fromkeys(found)))


@marker
def needs_arch(name: str) -> Needs:
    """Needs GPUs of an architecture: ``needs_arch("blackwell")``."""
    archs = sorted(set(SM_ARCHITECTURES.values()))
    if not isinstance(name, str) or name.lower() not in archs:
        raise ClaimError(
            f"{name!r} is no architecture that is known{suggest(str(name).lower(), archs)} ({', '.join(archs)})"
        )
    return Needs(archs=(name.lower(),))


@marker
def needs_gpus(n: int, vram: str | None = None, link: str | None = None, exclusive: bool = False) -> Needs:
    """Needs ``n`` GPUs: ``needs_gpus(8, vram="96GB", link="pcie")``.

    ``vram="96GB"`` is met by every card sold as 96 GB (NVML total ≥ 96·10⁹ bytes); ``"89.4GiB"`` is exact. ``link``
    is ``nvlink``, ``pcie`` (no NVLink) or ``pix`` (one PCIe switch). ``exclusive`` keeps other claims off the box.
    """
    if not arguments.count(n):
        raise ClaimError(f"{n!r} is not a count of GPUs")
    if link is not None and link not in LINKS:
        raise ClaimError(f"link={link!r} is none of {', '.join(LINKS)}{suggest(str(link), LINKS)}")
    arguments.boolean("exclusive", exclusive)
    return Needs(gpus=n, link=link, exclusive=exclusive).merge(vram_needs(vram))


@marker
def needs_driver(spec: str) -> Needs:
    """Needs an NVIDIA driver in a range: ``needs_driver(">=580")``."""
    return Needs(versions=(("driver", "driver", arguments.version_range(spec)),))


@marker
def needs_cuda(spec: str) -> Needs:
    """Needs a stack whose torch was built for a CUDA in a range: ``needs_cuda(">=13")``."""
    return Needs(versions=(("cuda", "cuda", arguments.version_range(spec)),))


@marker
def needs_package(requirement: str) -> Needs:
    """Needs a package in the stack: ``needs_package("flashinfer-python>=0.6.9")``."""
    match = re.match(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*?)\s*((?:===|==|~=|!=|<=|>=|<|>).*)?$", str(requirement))
    if match is None:
        raise ClaimError(f'{requirement!r} is not a requirement: write needs_package("flashinfer-python>=0.6.9")')
    spec = arguments.version_range(match[2]) if match[2] else ""
    return Needs(versions=(("package", canonical(match[1]), spec),))


def _exact_sm(number: str) -> Marker[[], Needs]:
    def build() -> Needs:
        return Needs(sms=(number,))

    build.__name__ = f"needs_sm{number}"
    build.__doc__ = f"Needs GPUs of compute capability SM{number} exactly ({SM_ARCHITECTURES[number]})."
    return marker(build)


needs_sm70 = _exact_sm("70")
needs_sm75 = _exact_sm("75")
needs_sm80 = _exact_sm("80")
needs_sm86 = _exact_sm("86")
needs_sm87 = _exact_sm("87")
needs_sm89 = _exact_sm("89")
needs_sm90 = _exact_sm("90")
needs_sm100 = _exact_sm("100")
needs_sm101 = _exact_sm("101")
needs_sm103 = _exact_sm("103")
needs_sm110 = _exact_sm("110")
needs_sm120 = _exact_sm("120")
needs_sm121 = _exact_sm("121")


# --------------------------------------------------------------------------------------------------------- server


#: Variables that say what a lease gives, and that nothing is downloaded inside one.
LEASED = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@marker
def serves(
    engine: str,
    model: str,
    *flags: str,
    layout: str | None = None,
    env: Mapping[str, str] | None = None,
    wrapper: str | None = None,
    boot_timeout: str | float = "20m",
    portable: bool = False,
    measured: Mapping[str, float] | None = None,
) -> Serves:
    """Boots a server for the claim: ``serves("sglang", "qwen3-8b", "--context-length 32768", layout="TP2")``.

    ``flags`` are strings, split as a shell would. ``layout`` such as ``"TP8 DP8 EP8"`` adds the parallel sizes (dp as
    dp-attention). ``wrapper`` is a command prefix (``"prlimit --as=14000000000"``). ``measured`` replaces a rule of
    the predictor by a known number, in predictions and rehearsals only.
    """
    if engine not in ENGINES:
        raise ClaimError(f"{engine!r} is no engine that is known{suggest(str(engine), ENGINES)} ({', '.join(ENGINES)})")
    if not isinstance(model, str) or not model.strip():
        raise ClaimError(f"{model!r} is not a model: give a folder, a hub id or a name from gpuguard_models")
    if model.lstrip().startswith("-"):
        raise ClaimError(f"the model comes before the flags, got {model!r}")
    words: list[str] = []
    for flag in flags:
        words += arguments.words("flags", flag)
    parsed_layout = parse_layout(layout) if layout is not None else None
    resolve(parsed_layout, words)
    arguments.boolean("portable", portable)
    for name in env or ():
        if name in LEASED:
            raise ClaimError(f"env may not set {name}: it belongs to the lease ({', '.join(LEASED)})")
    return Serves(
        engine=engine,
        model=model,
        flags=tuple(words),
        layout=parsed_layout,
        env=arguments.strings("env", env),
        wrapper=tuple(arguments.words("wrapper", wrapper)) if wrapper is not None else (),
        boot_timeout_s=arguments.parsed("boot_timeout", parse_duration, boot_timeout),
        portable=portable,
        measured=arguments.amounts("measured", measured),
    )


# --------------------------------------------------------------------------------------------------- expectations


@marker
def fits(*, margin: str | None = None, kv_tokens: str | int | None = None, when: str | None = None) -> Fits:
    """The server comes up: ``fits(margin="2GiB", kv_tokens=">=262144")``.

    ``margin`` is the least free GPU memory over the ranks once it is ready; ``kv_tokens`` bounds the size of the KV
    pool that it really has, not the one that was asked for.
    """
    bound = arguments.parsed("kv_tokens", parse_comparison, kv_tokens) if kv_tokens is not None else None
    return Fits(arguments.gib("margin", margin) if margin is not None else None, bound, when=arguments.window(when))


@marker
def works(
    level: str = "short",
    accuracy: str | None = None,
    questions: str | None = None,
    *,
    reference: str | None = None,
    when: str | None = None,
) -> Works:
    """The server answers sensibly once it is ready: ``works("full", accuracy=">=0.85", questions="gsm8k.jsonl")``.

    ``short`` asks a handful of questions; ``full``, which a file implies, also those of a local one, and compares
    log-probabilities with a ``reference`` that ``gpuguard reference`` wrote. Files are looked for beside the test, then
    in the current folder.
    """
    arguments.choice("level", level, ("short", "full"))
    for name, file in (("questions", questions), ("reference", reference)):
        if file is not None:
            arguments.text(name, file)
            level = "full"
    if accuracy is not None and questions is None:
        raise ClaimError("accuracy needs questions=FILE to be measured on")
    if level == "full" and questions is None and reference is None:
        raise ClaimError('level "full" needs a file to be more than "short": questions=FILE or reference=FILE')
    bound = arguments.parsed("accuracy", parse_comparison, accuracy) if accuracy is not None else None
    return Works(level, bound, questions, reference, when=arguments.window(when))


@marker
def ooms(*phases: str, when: str | None = None) -> Ooms:
    """Memory runs out, in one of the named phases: ``ooms("kv_pool")``.

    Phases: weights, kv_pool, graph_capture, runtime (GPU memory), host. Without one: any phase of GPU memory.
    """
    for phase in phases:
        arguments.choice("phase", phase, OOM_PHASES)
    return Ooms(tuple(dict.fromkeys(phases)), when=arguments.window(when))


@marker
def unsupported(what: str, how: str | None = None, match: str | None = None, *, when: str | None = None) -> Unsupported:
    """A feature is unsupported: ``unsupported("flashinfer allreduce fusion", how="rejected", match="requires SM90")``.

    ``how`` is ``rejected`` (refused with a message), ``crashes``, or ``falls_back`` (runs without it). ``match`` is a
    regular expression that the decisive log line must contain.
    """
    if not isinstance(what, str) or not what.strip():
        raise ClaimError("say what is unsupported, in a few words")
    if how is not None:
        arguments.choice("how", how, ("rejected", "falls_back", "crashes"))
    return Unsupported(what, how, arguments.pattern(match), when=arguments.window(when))


@marker
def fails(outcome: str, match: str | None = None, *, when: str | None = None) -> Fails:
    """The boot fails with this outcome: ``fails("hang.timeout")``. ``match`` must be found in the decisive line."""
    if outcome in sorted(HOST_FAULTS):
        raise ClaimError(f"{outcome!r} is a fault of the host or the test, which no claim can be about")
    arguments.choice("outcome", outcome, tuple(sorted(STACK_FAILURES)))
    return Fails(outcome, arguments.pattern(match), when=arguments.window(when))


@marker
def uses(feature: str, *, when: str | None = None) -> Uses:
    """The running server shows positive evidence of a feature: ``uses("custom_allreduce")``."""
    return Uses(arguments.text("feature", feature), when=arguments.window(when))


@marker
def ignores(flag: str, *, when: str | None = None) -> Ignores:
    """The running server shows positive evidence that a flag had no effect: ``ignores("--enable-x")``."""
    if not isinstance(flag, str) or not flag.startswith("-"):
        raise ClaimError(f"{flag!r} is not a flag")
    return Ignores(flag, when=arguments.window(when))


@marker
def max_mem(limit: str, of: str = "static", *, when: str | None = None) -> MaxMem:
    """At most so much GPU memory, in GiB: ``max_mem("75GiB", of="weights")``.

    ``of`` is weights, graph, static (weights and KV pool), as the engine reports them, or peak: the most that was
    seen in use on one GPU, sampled. "GB" is refused: engines print GiB and say GB.
    """
    arguments.choice("of", of, ("weights", "graph", "static", "peak"))
    return MaxMem(arguments.gib("limit", limit), of, when=arguments.window(when))


@marker
def expect_toks(
    min: float | Mapping[str, float] | None = None,
    *,
    about: float | Mapping[str, float] | None = None,
    tolerance: str | float = "5%",
    concurrency: int = 1,
    input_len: int = 128,
    output_len: int = 64,
    per: str = "total",
    limit: str | float = "5m",
    when: str | None = None,
) -> ExpectToks:
    """Output tokens per second: ``expect_toks(min=60)`` or ``expect_toks(about=65, tolerance="5%", concurrency=8)``.

    Either may be given by card: ``about={"rtx-pro-6000-server": 65, "h200": 120}``. ``per="total"`` counts all
    requests together, ``"request"`` one of them. Lengths are in tokens; ``limit`` is the time for all samples.
    """
    if (min is None) == (about is None):
        raise ClaimError("give either min=… or about=…")
    name, asked = ("about", about) if min is None else ("min", min)
    shape = arguments.load(concurrency, input_len, output_len, per, limit)
    share = arguments.parsed("tolerance", parse_percent, tolerance)
    window = arguments.window(when)
    if isinstance(asked, Mapping):
        cards = arguments.by_card(name, asked)
        return ExpectToks(tolerance=share, cards=cards, by=name, when=window, **shape)
    if not arguments.amount(asked):
        raise ClaimError(f"{name}={asked!r} is not a rate in tokens per second")
    floor, reference = (asked, None) if name == "min" else (None, asked)
    return ExpectToks(floor, reference, share, when=window, **shape)


@marker
def compare(
    other: pytest.MarkDecorator | pytest.Mark,
    ratio: str,
    *,
    concurrency: int = 1,
    input_len: int = 128,
    output_len: int = 64,
    per: str = "total",
    limit: str | float = "10m",
    together: bool = True,
    when: str | None = None,
) -> Compare:
    """Output tok/s of this server over another's: ``compare(other=serves("sglang", …), ratio=">2", concurrency=8)``.

    The load is as in ``expect_toks``. ``together=False``: one server after the other on the same GPUs, even where both
    would fit. ``limit`` is the time for all samples, without the boots.
    """
    mark = getattr(other, "mark", other)
    if not isinstance(mark, pytest.Mark) or mark.name != "serves":
        raise ClaimError('other must be a server: compare(other=serves("sglang", …), ratio=">2")')
    bound = arguments.parsed("ratio", parse_comparison, ratio)
    if bound.op == "==" or bound.value <= 0:
        raise ClaimError(f'ratio={ratio!r}: no measured ratio is exact; write a bound such as ">0.95", ">2" or "<0.5"')
    arguments.boolean("together", together)
    shape = arguments.load(concurrency, input_len, output_len, per, limit)
    return Compare(serves.parse(mark), bound, together, when=arguments.window(when), **shape)


@marker
def claim(
    *,
    title: str | None = None,
    id: str | None = None,
    source: str | None = None,
    recheck: str | None = None,
    minutes: float | None = None,
    status: str | None = None,
) -> About:
    """Who says so: ``claim(title=…, id=…, source=…, recheck="2027-03-01", minutes=12, status="hearsay")``.

    ``status="hearsay"``: reported, never red. ``minutes`` is the expected run time.
    """
    if status is not None:
        arguments.choice("status", status, ("hearsay",))
    for name, text in (("title", title), ("id", id), ("source", source)):
        if text is not None:
            arguments.text(name, text)
    if recheck is not None:
        try:
            same = date.fromisoformat(recheck).isoformat() == recheck  # newer Pythons also read "20270301"
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ClaimError(f'recheck={recheck!r} is not a date: write "2027-03-01"')
    if minutes is not None and not arguments.amount(minutes):
        raise ClaimError(f"minutes={minutes!r} is not a time")
    return About(title, id, source, recheck, minutes, status)


def architectures(needs: Needs) -> Iterator[str]:
    """The architecture marks that a claim's needs imply: ``needs_sm120`` → ``blackwell``."""
    seen = {SM_ARCHITECTURES[sm] for sm in needs.sms} | set(needs.archs)
    yield from sorted(seen)

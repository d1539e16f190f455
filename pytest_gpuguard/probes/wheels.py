"""Finds out whether what is installed together belongs together, by the packages' own metadata.

``args`` ``part``: which of PARTS is judged; without it all are answered by their names, each as {"said": text},
{"defect": [outcome, text]} or {"absent": [what, text]}. Must never import any of the packages, nor judge what serving
does not use.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import os
import re
from importlib import metadata
from typing import Any, NamedTuple

from pytest_gpuguard.probes import kit

ENGINES = ("sglang", "vllm")
#: The distributions that decide whether a server runs, by the beginnings of their names.
SERVING = re.compile(
    r"(?:sglang|sgl-|vllm|torch|triton|nvidia-|cuda-|flashinfer|flash-attn|flash-mla|deep-gemm|deep-ep|quack-kernels|"
    r"apache-tvm-ffi|xgrammar|compressed-tensors|transformers|tokenizers|safetensors|xformers|tilelang|humming-kernels|b12x|"
    r"mooncake|nixl|llguidance|outlines|numba|kernels$)"
)
CUDA_WHEELS = re.compile(r"(?:nvidia-|cuda-)")
#: Wheels of which a newer one of the same major may stand in for the pinned one: SGLang asks for a newer cuDNN than its
#: torch pins (pytorch/pytorch#168167), and its images bring a newer NCCL, NVSHMEM and cuBLAS (docker/Dockerfile).
MAY_BE_NEWER = re.compile(r"nvidia-(?:nccl|cudnn|nvshmem|cublas)(?:-cu\d+)?$")
#: The bindings of CUDA itself: right are those of torch's CUDA, whatever major an engine's metadata name.
BINDINGS = ("cuda-python", "cuda-bindings")
#: What is compiled for one torch, one CUDA, or each other. Of all else an engine may meet a newer one than it pins.
COMPILED = re.compile(
    r"(?:sgl-|sglang|vllm|torch|triton|nvidia-|cuda-|flashinfer|flash-|deep-|quack-kernels|apache-tvm-ffi|tilelang|xformers|"
    r"humming-kernels|b12x)"
)
#: Wheels that write other files to the same paths (NVIDIA/cutlass#3170, sgl-project/sglang#27707).
OVERLAID = ("nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13")
#: From this SM major on the files for CUDA 13 are needed; on Hopper SGLang keeps the others (sgl-project/sglang#25938).
OVERLAY_NEEDED = 10
#: The largest file whose hash is taken, in bytes; of larger ones only the size is compared.
MOST_HASHED = 1 << 20
FLASHINFER = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
#: What an engine cannot serve on a GPU without.
NEEDED = ("sglang-kernel", "sgl-kernel", "flashinfer-python", "triton", "transformers")
PARTS = ("torch", "engine", "nvidia", "flashinfer", "others")


class Asked(NamedTuple):
    """One requirement of an installed distribution: who asks, for what, in its own words, and what is installed."""

    owner: str
    name: str
    text: str
    installed: str | None
    fits: bool | None


def run() -> None:
    """One of the parts, or all."""
    part = kit.args.get("part")
    if part is not None and part not in PARTS:
        raise ValueError(f"args part {part!r}: one of {', '.join(PARTS)}")
    packages = installed()
    asked = requirements(packages)
    if part is None:
        found = {one: judge(one, asked, packages) for one in PARTS}
        holds = [f"{one}: {told['said']}" for one, told in found.items() if "said" in told]
        kit.answer(said="; ".join(holds) or "none holds")
        kit.answer(**{one: {how: told[how] for how in told if how != "data"} for one, told in found.items()})
        return
    told = judge(part, asked, packages)
    kit.answer(part=part, **told.get("data", {}))
    for how, end in (("defect", kit.defect), ("absent", kit.absent)):
        if how in told:
            end(*told[how])
    kit.answer(said=told["said"])


def judge(part: str, asked: list[Asked], packages: dict[str, metadata.Distribution]) -> dict[str, Any]:
    """What is to be said of one part."""
    if part == "flashinfer":
        return _flashinfer(packages)
    if part in ("torch", "engine") and not any(one in packages for one in ENGINES):
        return {"absent": ["package", "neither sglang nor vllm is installed in this stack"]}
    if part == "nvidia" and "torch" not in packages:
        return {"absent": ["package", "torch is not installed in this stack"]}
    return _requirements(part, [one for one in asked if part_of(one) == part], packages)


def installed() -> dict[str, metadata.Distribution]:
    """Every distribution on the path by its canonical name; the first wins, as it does on import."""
    found: dict[str, metadata.Distribution] = {}
    for one in metadata.distributions():
        name = one.metadata["Name"]
        if name:  # None of a half-removed one
            found.setdefault(canonical(name), one)
    return found


def canonical(name: str) -> str:
    """A distribution's name as PEP 503 spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def part_of(one: Asked) -> str:
    """Which part a requirement belongs to: each belongs to one, so that one defect breaks one claim."""
    if one.owner in ENGINES:
        return "torch" if one.name == "torch" else "engine"
    if CUDA_WHEELS.match(one.name) and (one.owner == "torch" or CUDA_WHEELS.match(one.owner)):
        return "nvidia"
    return "others"


def requirements(packages: dict[str, metadata.Distribution]) -> list[Asked]:
    """What serving distributions ask of each other, with the extras that are asked for."""
    read = reader()
    todo = [(name, "") for name in packages if SERVING.match(name)]
    done = set(todo)
    found: dict[tuple[str, str], Asked] = {}
    while todo:
        owner, extra = todo.pop()
        for text in packages[owner].requires or ():
            requirement = read(text, extra)
            if requirement is None or not SERVING.match(requirement.name):
                continue
            there = packages.get(requirement.name)
            version = there.version if there is not None else None
            fits = None if version is None else requirement.fits(version)
            found[owner, text] = Asked(owner, requirement.name, text, version, fits)
            if there is None:
                continue
            for one in requirement.extras:
                if (requirement.name, one) not in done:
                    done.add((requirement.name, one))
                    todo.append((requirement.name, one))
    return sorted(found.values())


def _requirements(part: str, asked: list[Asked], packages: dict[str, metadata.Distribution]) -> dict[str, Any]:
    newer = [one for one in asked if one.fits is False and may_be_newer(one)]
    wrong = [one for one in asked if one.fits is False and one not in newer]
    missing = [one for one in asked if one.installed is None]
    unread = [one for one in asked if one.installed is not None and one.fits is None]
    data = {
        "asked": len(asked),
        "wrong": [f"{one.owner}: {one.text}, installed {one.installed}" for one in wrong],
        "missing": [f"{one.owner}: {one.text}" for one in missing],
        "newer": [f"{one.owner}: {one.text}, installed {one.installed}" for one in newer],
        "not_compared": [f"{one.owner}: {one.text}" for one in unread],
    }
    told = [
        f"{one.owner} {packages[one.owner].version} requires {_spec(one)}, installed is {one.name} {one.installed}"
        for one in wrong
    ]
    needed = [one for one in missing if one.owner in ENGINES and one.name in NEEDED and cuda_of_torch() is not None]
    told += [
        f"{one.owner} {packages[one.owner].version} requires {_spec(one)}, which is not installed" for one in needed
    ]
    if part == "nvidia":
        told += overwritten(packages, {one.name for one in asked} - set(OVERLAID)) + overlaid(packages)
    if told:
        more = f" (and {len(told) - 4} more)" if len(told) > 4 else ""
        specs = sorted({f'"{_spec(one)}"' for one in wrong + needed}) if part in ("engine", "nvidia") else []
        install = f": pip install {' '.join(specs[:8])}" if specs else ""
        return {"data": data, "defect": ["import.abi", "; ".join(told[:4]) + more + install]}
    said = [f"{len(asked) - len(missing) - len(unread) - len(newer)} requirements fit"]
    if newer:
        said.append(_list([f"{one.name} {one.installed} instead of the pinned {_spec(one)}" for one in newer]))
    if missing:
        said.append(f"{len(missing)} not installed: {_list([_spec(one) for one in missing])}")
    if unread:
        said.append(f"{len(unread)} could not be compared without packaging: {_list([_spec(one) for one in unread])}")
    if part == "nvidia" and not asked:
        return {"data": data, "absent": ["cuda", f"torch {packages['torch'].version} requires no NVIDIA wheels"]}
    return {"data": data, "said": ", ".join(said)}


def _spec(one: Asked) -> str:
    return one.text.partition(";")[0].strip()


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def may_be_newer(one: Asked) -> bool:
    """Whether what is installed may stand in for the pinned one: a newer one that keeps its interface, mostly."""
    pinned = re.search(r"==\s*(\d[\d.]*)", one.text)
    if pinned is None or one.installed is None:
        return False
    asked, there = ([int(part) for part in re.findall(r"\d+", text)] for text in (pinned.group(1), one.installed))
    if one.name in BINDINGS and there[:1] != asked[:1]:
        return str(there[0] if there else None) == (cuda_of_torch() or "").partition(".")[0]
    if one.owner in ENGINES and not COMPILED.match(one.name):
        return there > asked
    keeps = MAY_BE_NEWER.match(one.name) is not None or one.name in BINDINGS
    return keeps and asked[:1] == there[:1] and there > asked


def overwritten(packages: dict[str, metadata.Distribution], wanted: set[str]) -> list[str]:
    """Libraries of wheels that torch asks for which have another size than their wheel says.

    The wheels of two CUDA majors put NCCL, cuDNN and others at the same place: the last one installed wins. Only where
    both are there is looked, and only at sizes.
    """
    found = []
    for name in sorted(wanted & set(packages)):
        base = re.sub(r"-cu\d+$", "", name)
        others = [one for one in packages if one != name and re.match(re.escape(base) + r"(?:-cu\d+)?$", one)]
        files = (packages[name].files or ()) if others else ()
        sized = [(one, _size(one)) for one in files if ".so" in one.name and one.size is not None]
        wrong = [one for one, size in sized if size is not None and size != one.size]
        if wrong:
            own = f"{wrong[0]} is not that of {name} {packages[name].version}"
            found.append(f"{own}: {' or '.join(others)} wrote over it")
    return found


def overlaid(packages: dict[str, metadata.Distribution]) -> list[str]:
    """A mixture of two wheels at the paths where they differ; on newer cards also all files of the wrong one."""
    if any(one not in packages for one in OVERLAID):
        return []
    base, newer = ({str(file): file for file in packages[one].files or ()} for one in OVERLAID)
    shared = [one for one in sorted(set(base) & set(newer)) if _recorded(base[one]) != _recorded(newer[one])]
    lost = [one for one in shared if _is_recorded(base[one]) and not _is_recorded(newer[one])]
    whole = [one for one in shared if one not in lost and _is_recorded(newer[one])]
    if not lost or not (whole or any(int(sm[:-1]) >= OVERLAY_NEEDED for sm in kit.sms())):
        return []
    told = f"{len(lost)} of {len(lost) + len(whole)} files of {OVERLAID[1]} are those of {OVERLAID[0]} ({lost[0]})"
    return [f'{told}: pip install --force-reinstall --no-deps "{OVERLAID[1]}=={packages[OVERLAID[1]].version}"']


def _size(file: metadata.PackagePath) -> int | None:
    path = str(file.locate())
    return os.path.getsize(path) if os.path.exists(path) else None


def _recorded(file: metadata.PackagePath) -> str | None:
    return file.hash.value if file.hash is not None and file.hash.mode == "sha256" else None


def _is_recorded(file: metadata.PackagePath) -> bool:
    """Whether the file there is the recorded one, by its size, and by its hash where it is small."""
    size = _size(file)
    if size is None or size > MOST_HASHED or size != file.size:
        return size is not None and size == file.size
    with open(str(file.locate()), "rb") as content:
        digest = hashlib.sha256(content.read()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == _recorded(file)


def cuda_of_torch() -> str | None:
    """The CUDA that torch is built for; None for another build. A CPU stack goes without its engine's kernels."""
    spec = importlib.util.find_spec("torch")
    path = os.path.join(os.path.dirname(spec.origin), "version.py") if spec and spec.origin else os.devnull
    try:
        with open(path, encoding="utf-8") as file:
            found = re.search(r"""^cuda(?:: [^=\n]*)? = ["'](\d[\d.]*)""", file.read(), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def _flashinfer(packages: dict[str, metadata.Distribution]) -> dict[str, Any]:
    versions = {name: packages[name].version for name in FLASHINFER if name in packages}
    if FLASHINFER[0] not in versions:
        return {"absent": ["package", "flashinfer-python is not installed in this stack"]}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    if len({version.partition("+")[0] for version in versions.values()}) == 1:
        return {"said": told}
    # flashinfer/jit/env.py refuses to be imported.
    off = " (FLASHINFER_DISABLE_VERSION_CHECK hides it)" if os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK") else ""
    return {"defect": ["import.abi", f"{told}: all must be of one version{off}"]}


# ------------------------------------------------------------------------------------------------ reading requirements


class Simple(NamedTuple):
    """A requirement as it can be read without ``packaging``: only names and single versions."""

    name: str
    extras: tuple[str, ...]
    clauses: str

    def fits(self, version: str) -> bool | None:
        """Whether the version is the asked one; None where that takes more than a comparison of equals."""
        if not self.clauses:
            return True
        exact = re.match(r"^===?\s*([\w.!+-]+)$", self.clauses)
        if exact is None:
            return None
        asked = exact.group(1)
        return (version if "+" in asked else version.partition("+")[0]) == asked


def simple(text: str, extra: str) -> Simple | None:
    """A requirement read by hand; None when its marker asks for another extra. Other markers are taken to hold."""
    plain, _, marker = text.partition(";")
    found = re.match(r"^\s*([\w.-]+)\s*(?:\[([^\]]*)\])?\s*\(?\s*([^)]*?)\s*\)?\s*$", plain)
    if found is None or any(one != extra for one in re.findall(r"""extra\s*==\s*["']([^"']+)["']""", marker)):
        return None
    if re.search(r"""(?:sys_platform|platform_system)\s*(?:!=\s*["'][lL]inux|==\s*["'](?![lL]inux))""", marker):
        return None
    extras = tuple(one.strip() for one in (found.group(2) or "").split(",") if one.strip())
    return Simple(canonical(found.group(1)), extras, found.group(3))


class _Full(NamedTuple):
    name: str
    extras: tuple[str, ...]
    parsed: Any

    def fits(self, version: str) -> bool | None:
        try:
            return bool(self.parsed.specifier.contains(version, prereleases=True))
        except ValueError:
            return None  # a version that PEP 440 does not know


def reader() -> Any:
    """What reads a requirement for an extra: with ``packaging``, pip's copy of it, or by hand."""
    try:
        module = importlib.import_module("packaging.requirements")
    except ImportError:
        try:
            module = importlib.import_module("pip._vendor.packaging.requirements")
        except ImportError:
            return simple

    def read(text: str, extra: str) -> _Full | Simple | None:
        try:
            one = module.Requirement(text)
        except ValueError:  # InvalidRequirement is one
            return simple(text, extra)
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            return None
        return _Full(canonical(one.name), tuple(sorted(one.extras)), one)

    return read


if __name__ == "__main__":
    kit.main(run)

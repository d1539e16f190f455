"""Finds out whether what is installed together belongs together, by the packages' own metadata.

``args`` ``part``: which of PARTS is judged. Must never import any of the packages, nor judge what serving does not use.
"""

from __future__ import annotations

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
#: torch pins (pytorch/pytorch#168167), and its images bring a newer NCCL.
MAY_BE_NEWER = re.compile(r"nvidia-(?:nccl|cudnn)-cu")
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
    """One of the parts."""
    part = kit.args.get("part")
    if part not in PARTS:
        raise ValueError(f"args part {part!r}: one of {', '.join(PARTS)}")
    packages = installed()
    if part == "flashinfer":
        _flashinfer(packages)
        return
    if part in ("torch", "engine") and not any(one in packages for one in ENGINES):
        kit.absent("package", "neither sglang nor vllm is installed in this stack")
    if part == "nvidia" and "torch" not in packages:
        kit.absent("package", "torch is not installed in this stack")
    asked = [one for one in requirements(packages) if part_of(one) == part]
    _judge(part, asked, packages)


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


def _judge(part: str, asked: list[Asked], packages: dict[str, metadata.Distribution]) -> None:
    newer = [one for one in asked if one.fits is False and may_be_newer(one)]
    wrong = [one for one in asked if one.fits is False and one not in newer]
    missing = [one for one in asked if one.installed is None]
    unread = [one for one in asked if one.installed is not None and one.fits is None]
    kit.answer(
        part=part,
        asked=len(asked),
        wrong=[f"{one.owner}: {one.text}, installed {one.installed}" for one in wrong],
        missing=[f"{one.owner}: {one.text}" for one in missing],
        newer=[f"{one.owner}: {one.text}, installed {one.installed}" for one in newer],
        not_compared=[f"{one.owner}: {one.text}" for one in unread],
    )
    told = [
        f"{one.owner} {packages[one.owner].version} requires {_spec(one)}, installed is {one.name} {one.installed}"
        for one in wrong
    ]
    if built_for_cuda():
        needed = [one for one in missing if one.owner in ENGINES and one.name in NEEDED]
        told += [
            f"{one.owner} {packages[one.owner].version} requires {_spec(one)}, which is not installed" for one in needed
        ]
    if part == "nvidia":
        told += overwritten(packages, {one.name for one in asked})
    if told:
        more = f" (and {len(told) - 4} more)" if len(told) > 4 else ""
        kit.defect("import.abi", "; ".join(told[:4]) + more)
    said = [f"{len(asked) - len(missing) - len(unread) - len(newer)} requirements fit"]
    if newer:
        said.append(_list([f"{one.name} {one.installed} is newer than the pinned {_spec(one)}" for one in newer]))
    if missing:
        said.append(f"{len(missing)} not installed: {_list([_spec(one) for one in missing])}")
    if unread:
        said.append(f"{len(unread)} could not be compared without packaging: {_list([_spec(one) for one in unread])}")
    if part == "nvidia" and not asked:
        kit.absent("cuda", f"torch {packages['torch'].version} requires no NVIDIA wheels")
    kit.answer(said=", ".join(said))


def _spec(one: Asked) -> str:
    return one.text.partition(";")[0].strip()


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def may_be_newer(one: Asked) -> bool:
    """Whether a library that keeps its interface within a major is newer than the pinned one."""
    pinned = re.search(r"==\s*(\d[\d.]*)", one.text)
    if not MAY_BE_NEWER.match(one.name) or pinned is None or one.installed is None:
        return False
    asked, there = ([int(part) for part in re.findall(r"\d+", text)] for text in (pinned.group(1), one.installed))
    return asked[0] == there[0] and there > asked


def overwritten(packages: dict[str, metadata.Distribution], wanted: set[str]) -> list[str]:
    """Libraries of wheels that torch asks for which have another size than their wheel says.

    The wheels of two CUDA majors put NCCL, cuDNN and others at the same place: the last one installed wins. Only where
    both are there is looked, and only at sizes.
    """
    found = []
    for name in sorted(wanted & set(packages)):
        base = re.sub(r"-cu\d+$", "", name)
        others = [one for one in packages if one != name and re.match(re.escape(base) + r"(?:-cu\d+)?$", one)]
        for file in (packages[name].files or ()) if others else ():
            path = str(file.locate())
            if ".so" not in file.name or file.size is None or not os.path.exists(path):
                continue
            if os.path.getsize(path) != file.size:
                found.append(
                    f"{file} is not that of {name} {packages[name].version}: {' or '.join(others)} wrote over it"
                )
                break
    return found


def built_for_cuda() -> bool:
    """Whether torch is a CUDA build: a CPU stack goes without its engine's kernels."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
                return re.search(r"""^cuda(?:: [^=\n]*)? = ["']\d""", file.read(), re.MULTILINE) is not None
        except OSError:
            continue
    return False


def _flashinfer(packages: dict[str, metadata.Distribution]) -> None:
    versions = {name: packages[name].version for name in FLASHINFER if name in packages}
    kit.answer(versions=versions)
    if FLASHINFER[0] not in versions:
        kit.absent("package", "flashinfer-python is not installed in this stack")
    public = {version.partition("+")[0] for version in versions.values()}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    if len(public) > 1:  # flashinfer/jit/env.py refuses to be imported then
        off = (
            " (FLASHINFER_DISABLE_VERSION_CHECK hides it)" if os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK") else ""
        )
        kit.defect("import.abi", f"{told}: all must be of one version{off}")
    kit.answer(said=told)


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

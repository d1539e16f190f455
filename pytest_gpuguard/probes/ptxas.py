"""Finds out which ptxas Triton would take for the GPUs of this machine, and whether it assembles for them.

Nothing but a kernel of no instructions is assembled. Must never fall back to another ptxas than Triton would.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import tempfile

from pytest_gpuguard.probes import kit

#: Old enough for every ptxas, and of an architecture that all of them take as a source.
PTX = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry gpuguard() { ret; }\n"


def run() -> None:
    """Ask Triton, then that ptxas."""
    if importlib.util.find_spec("triton") is None:
        kit.absent("package", "triton is not installed in this stack")
    if not kit.sms():
        kit.absent("gpus", "no GPU here for whose architecture Triton would compile")
    said = []
    for sm in kit.sms():
        kit.stage(f"ask Triton for its ptxas for sm_{sm}")
        path, how = of_triton(int(sm))
        target = f"sm_{sm}a" if int(sm) >= 90 else f"sm_{sm}"  # triton third_party/nvidia/backend/compiler.py
        kit.answer(path=path, found_by=how, target=target)
        if path is None:
            kit.defect("jit.compile", f"Triton has no ptxas for {target}: {how}")
        kit.stage(f"assemble for {target} with {path}")
        code, text, version = _assemble(path, target)
        if code != 0:
            print(text)
            result = "did not end within 30 s" if code is None else _first(text) or f"ended with exit status {code}"
            kit.defect("jit.compile", f"ptxas {version} for {target}: {result} ({path}, {how})")
        said.append(f"ptxas {version} ({how}) assembles for {target}")
    kit.answer(said=", ".join(said))


def of_triton(sm: int) -> tuple[str | None, str]:
    """Path and way, as Triton's own code has it; where that cannot be asked, by its files."""
    try:
        tool = importlib.import_module("triton.backends.nvidia.compiler").get_ptxas(sm)
        path = getattr(tool, "path", None) or tool[0]
        return str(path), "Triton's choice" + _by_environment(str(path))
    except (ImportError, AttributeError, TypeError, IndexError):
        pass  # another release: the rule below is the one of all
    except RuntimeError as error:  # "Cannot find ptxas"
        return None, str(error)
    names = ("ptxas-blackwell", "ptxas") if sm >= 100 else ("ptxas",)
    for name in names:
        given = os.environ.get(f"TRITON_{name.upper().replace('-', '_')}_PATH")
        if given and os.access(given, os.X_OK):
            return given, f"by TRITON_{name.upper().replace('-', '_')}_PATH"
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for name in names:
            for below in (("backends", "nvidia", "bin"), ("common", "..", "third_party", "cuda", "bin")):
                path = os.path.join(folder, *below, name)
                if os.access(path, os.X_OK):
                    return path, "bundled with Triton"
    return None, "neither TRITON_PTXAS_PATH nor a bundled one"


def _by_environment(path: str) -> str:
    for name in ("TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH"):
        if os.environ.get(name) == path:
            return f", by {name}"
    return ""


def _assemble(path: str, target: str) -> tuple[int | None, str, str]:
    """Exit status, output, and the version that the tool says it has."""
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "gpuguard.ptx")
        with open(source, "w") as file:
            file.write(PTX)
        try:
            _, told = kit.run_tool([path, "--version"], 10.0)
            code, text = kit.run_tool([path, f"--gpu-name={target}", source, "-o", source + ".cubin"], 30.0)
        except OSError as error:
            return 127, str(error), "no program"
    found = re.search(r"release (\d+\.\d+)", told)
    return code, text, found.group(1) if found else "of unknown version"


def _first(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ([line for line in lines if "fatal" in line or "error" in line] or lines or [""])[0][:300]


if __name__ == "__main__":
    kit.main(run)

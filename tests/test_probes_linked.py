"""The probe about linking: what files were linked against, and which CUDA runtimes are in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpuguard.probes import linked

from .fake_wheels import FakeStack, link, needing, outcome
from .needs import need_tool

#: A package that loads libraries when it is imported.
LOADS = "import ctypes\nfor path in {}:\n    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)\n"


@pytest.fixture
def stack(tmp_path: Path) -> FakeStack:
    need_tool("gcc")
    return FakeStack(tmp_path / "stack")


def test_a_file_tells_what_it_needs(stack: FakeStack, tmp_path: Path) -> None:
    flags = needing(tmp_path / "gone", "libnvrtc.so.12")
    path = stack.library("sgl_kernel/common_ops.abi3.so", "int unused;", *flags)
    assert "libnvrtc.so.12" in linked.needed_by(str(path))
    (tmp_path / "text.so").write_text("GROUP ( libreal.so )")
    (tmp_path / "cut.so").write_bytes(path.read_bytes()[:100])
    assert linked.needed_by(str(tmp_path / "text.so")) == []
    assert linked.needed_by(str(tmp_path / "cut.so")) == []
    assert linked.needed_by(str(tmp_path)) == []


def test_libraries_without_a_cuda_build_of_torch_are_not_held_against_it(stack: FakeStack) -> None:
    assert (stack.probe("linked", {"part": "needed"}).absent or [""])[0] == "cuda"
    stack.torch("2.14.1+cpu", None)
    assert (stack.probe("linked", {"part": "mapped"}).absent or [""])[0] == "cuda"


def test_a_library_of_no_cuda_runtime_fits(stack: FakeStack, tmp_path: Path) -> None:
    stack.torch()
    stack.file("sgl_kernel/__init__.py")
    stack.library("sgl_kernel/common_ops.abi3.so", "int unused;", *needing(tmp_path / "gone", "libcudart.so.13"))
    answer = stack.probe("linked", {"part": "needed"})
    assert answer.ok
    assert answer.data["files"] == 1


def test_a_library_that_cannot_be_imported_is_only_named_by_the_claim_about_runtimes(stack: FakeStack) -> None:
    stack.torch()
    stack.file("sgl_kernel/__init__.py", 'raise ImportError("undefined symbol: x")\n')
    answer = stack.probe("linked", {"part": "mapped"})
    assert answer.ok
    assert answer.data["failed"] == ["sgl_kernel"]
    assert "(sgl_kernel cannot be imported)" in answer.data["said"]


def test_a_runtime_that_is_only_loaded_is_named_and_no_defect(stack: FakeStack, tmp_path: Path) -> None:
    """sgl_kernel loads that of the toolkit that it finds (sgl_kernel/load_utils.py); nothing is linked against it."""
    other = link(tmp_path / "libcudart.so.12", "int twelve;")
    own = stack.library("torch/lib/libcudart.so.13", "int thirteen;")
    at = (f"-L{own.parent}", f"-Wl,-rpath,{own.parent}", f"-Wl,-rpath,{tmp_path}", f"-L{tmp_path}")
    links = ("-Wl,--no-as-needed", *at, "-l:libcudart.so.13")
    stack.library("torch/lib/libtorch_cuda.so", "int unused;", *links)
    stack.torch(source=LOADS.format([str(own.parent / "libtorch_cuda.so")]))
    stack.file("sgl_kernel/__init__.py", LOADS.format([str(other)]))
    answer = stack.probe("linked", {"part": "mapped"})
    assert answer.ok
    assert answer.data["runtimes"] == [str(own)]
    assert f"loaded, and nothing is linked against it: {other}" in answer.data["said"]
    library = stack.library("sgl_kernel/common_ops.so", "int unused;", "-Wl,--no-as-needed", *at, "-l:libcudart.so.12")
    stack.file("sgl_kernel/__init__.py", LOADS.format([str(library)]))
    answer = stack.probe("linked", {"part": "mapped"})
    outcome(answer, "import.abi", "2 CUDA runtimes in one process", str(other), str(own))


def test_one_run_answers_both_parts_and_an_import_that_dies_takes_no_answer_along(
    stack: FakeStack, tmp_path: Path
) -> None:
    stack.torch()
    stack.file("sgl_kernel/__init__.py")
    answer = stack.probe("linked")
    assert answer.data["needed"] == {"said": "0 compiled files ask for CUDA 13 or none"}
    assert answer.data["mapped"] == {"said": "a runtime linked in after torch, sgl_kernel"}
    stack.file("sgl_kernel/__init__.py", "import ctypes\nctypes.string_at(0)\n")
    answer = stack.probe("linked")
    assert answer.ok
    assert "said" in answer.data["needed"]
    assert "SIGSEGV" in answer.data["mapped"]["told"]
    stack.library("sgl_kernel/common_ops.so", "int unused;", *needing(tmp_path / "gone", "libnvrtc.so.12"))
    stack.file("sgl_kernel/__init__.py")
    answer = stack.probe("linked")
    assert answer.data["needed"]["defect"][0] == "import.abi"
    assert "said" in answer.data["mapped"]
    assert "args part 'neither'" in stack.probe("linked", {"part": "neither"}).text

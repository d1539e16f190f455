"""The probes about kernel libraries: what imports, and what was compiled for which GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpuguard.probes import cubins, torch_gpus

from .fake_wheels import EXTENSION, FakeStack, fat_binary, link, outcome, run_probe, with_code
from .needs import need_tool

#: Target → the SMs of the catalogue that its code runs on (CUDA's rules of binary and family compatibility).
RUNS = {
    "sm_80": {"80", "86", "87", "89"},
    "sm_86": {"86", "87", "89"},
    "sm_90": {"90"},
    "sm_90a": {"90"},
    "sm_100": {"100", "101", "103"},
    "sm_100a": {"100"},
    "sm_100f": {"100", "101", "103"},
    "sm_103f": {"103"},
    "sm_120": {"120", "121"},
    "sm_120a": {"120"},
    "sm_120f": {"120", "121"},
    "sm_121": {"121"},
    "compute_80": {"80", "86", "87", "89", "90", "100", "101", "103", "110", "120", "121"},
    "compute_90a": {"90"},
    "compute_120": {"120", "121"},
    "compute_100f": {"100", "101", "103"},
    "sass_120": set(),
    "": set(),
}
SMS = ("70", "75", "80", "86", "87", "89", "90", "100", "101", "103", "110", "120", "121")


@pytest.fixture
def stack(tmp_path: Path) -> FakeStack:
    need_tool("gcc")
    return FakeStack(tmp_path / "stack")


@pytest.mark.parametrize("target", RUNS)
def test_code_runs_where_cuda_says(target: str) -> None:
    assert {sm for sm in SMS if cubins.runs_on(target, sm)} == RUNS[target]
    assert {sm for sm in SMS if torch_gpus.runs_on(target, int(sm[:-1]), int(sm[-1]))} == RUNS[target]


def test_the_code_of_a_library_is_read_from_its_containers(tmp_path: Path) -> None:
    need_tool("gcc")
    source = with_code(fat_binary("sm_90a", "sm_100", "compute_80"), bytes(24), fat_binary("sm_120f", "compute_120a"))
    found = cubins.code_of(str(link(tmp_path / "libcode.so", source)))
    assert found == {"sm_90a", "sm_100", "compute_80", "sm_120f", "compute_120a"}


def test_headers_that_nvcc_wrote_are_read(tmp_path: Path) -> None:
    """The first 48 bytes of an entry that nvcc 13.0.88 made for sm_120f, and of one for PTX of compute_120a."""
    need_tool("gcc")
    cubin = """02000101 70000000 88130000 00000000 00000000 40000000 08000100 78000000 00000000 00000000
        11002001 00000000"""
    ptx = """01000101 50000000 d8000000 00000000 d5000000 40000000 00000900 78000000 00000000 00000000
        11801000 00000000"""
    body = b""
    for text, header, payload in ((cubin, 0x70, 0x1388), (ptx, 0x50, 0xD8)):
        body += bytes.fromhex(text) + bytes(header - 48 + payload)
    container = bytes.fromhex("50ed55ba01001000") + len(body).to_bytes(8, "little") + body
    assert cubins.code_of(str(link(tmp_path / "libcode.so", with_code(container)))) == {"sm_120f", "compute_120a"}


def test_containers_that_end_too_early_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    need_tool("gcc")
    whole = fat_binary("sm_90", "sm_100")
    for length in range(0, len(whole), 7):
        found = cubins.code_of(str(link(tmp_path / "libcode.so", with_code(whole[:length] or b"\0"))))
        assert found <= {"sm_90", "sm_100"}
    (tmp_path / "no.so").write_bytes(b"\x7fELF\x02\x01" + bytes(range(200)))
    assert cubins.code_of(str(tmp_path / "no.so")) == set()


def test_a_library_with_ptx_alone_is_said_to_be_compiled_at_first_use(stack: FakeStack) -> None:
    stack.file("sgl_kernel/__init__.py")
    stack.library("sgl_kernel/sm100/common_ops.abi3.so", with_code(fat_binary("sm_90a", "compute_90")))
    answer = stack.probe("cubins", {"name": "sgl_kernel"}, ["120"])
    assert answer.ok
    assert "only PTX for sm_120 (compute_90)" in answer.data["said"]


def test_a_library_that_lacks_one_of_two_cards_is_broken(stack: FakeStack) -> None:
    stack.file("sgl_kernel/__init__.py")
    stack.library("sgl_kernel/common_ops.abi3.so", with_code(fat_binary("sm_90a")))
    answer = stack.probe("cubins", {"name": "sgl_kernel"}, ["90", "120"])
    assert answer.defect is not None
    assert answer.defect[0] == "unsupported.arch"
    assert "no code for sm_120: common_ops.abi3.so carries sm_90a" in answer.defect[1]


def test_files_whose_code_cannot_be_read_are_left_to_cuobjdump(stack: FakeStack) -> None:
    stack.file("sgl_kernel/__init__.py")
    stack.library("sgl_kernel/common_ops.abi3.so")
    tool = stack.tool(
        "bin/cuobjdump", 'case $1 in --list-elf) echo "ELF file    1: common_ops.1.sm_120a.cubin";; esac\n'
    )
    without = stack.probe("cubins", {"name": "sgl_kernel"}, ["120"], PATH="/nowhere", CUDA_HOME="/nowhere")
    assert without.absent is not None
    assert without.absent[0] == "tools"
    answer = stack.probe("cubins", {"name": "sgl_kernel"}, ["120"], PATH=str(tool.parent))
    assert answer.data["targets"] == ["sm_120a"]


def test_without_a_gpu_the_code_of_a_library_is_not_judged(stack: FakeStack) -> None:
    stack.file("sgl_kernel/__init__.py")
    stack.library("sgl_kernel/common_ops.abi3.so", with_code(fat_binary("sm_90a")))
    answer = stack.probe("cubins", {"name": "sgl_kernel"})
    assert answer.absent is not None
    assert answer.absent[0] == "gpus"


def test_a_library_that_is_not_installed_is_absent(stack: FakeStack) -> None:
    for name, args in (("cubins", {"name": "vllm"}), ("libraries", {"name": "vllm"})):
        answer = stack.probe(name, args, ["120"])
        assert answer.absent is not None
        assert answer.absent[0] == "package"


def test_a_library_that_nobody_knows_is_a_mistake_that_is_named(stack: FakeStack) -> None:
    assert "args name 'sgl-kernel': one of" in stack.probe("libraries", {"name": "sgl-kernel"}).text
    assert "args name None: one of" in stack.probe("cubins").text
    assert "args part 'nothing': one of" in stack.probe("wheels", {"part": "nothing"}).text


def test_a_stand_in_without_a_compiled_file_is_found(stack: FakeStack) -> None:
    stack.file("sgl_kernel/__init__.py", '__version__ = "0.0.0+stub"\n')
    stack.file("sgl_kernel/common_ops.abi3.so", "not a library\n")
    answer = stack.probe("libraries", {"name": "sgl_kernel"})
    assert answer.defect is not None
    assert answer.defect[0] == "import.abi"
    assert "0.0.0+stub" in answer.defect[1]
    assert "no compiled library common_ops" in answer.defect[1]


def test_a_compiled_part_beside_its_package_counts(stack: FakeStack) -> None:
    stack.file("deep_ep/__init__.py")
    outcome = stack.probe("libraries", {"name": "deep_ep"}).defect
    assert outcome is not None
    assert "has no compiled library: a stand-in" in outcome[1]
    stack.library("deep_ep_cpp.cpython-311-x86_64-linux-gnu.so", with_code(fat_binary("sm_90a")))
    assert stack.probe("libraries", {"name": "deep_ep"}).ok
    assert stack.probe("cubins", {"name": "deep_ep"}, ["90"]).ok


def test_a_library_that_registers_no_operator_is_found(stack: FakeStack) -> None:
    stack.torch()
    stack.wheel("sglang-kernel", "0.4.10")
    stack.file("sgl_kernel/__init__.py", "import torch\n")
    stack.library("sgl_kernel/sm100/common_ops.abi3.so")
    answer = stack.probe("libraries", {"name": "sgl_kernel"})
    assert answer.defect is not None
    assert "registers no operator sgl_kernel::" in answer.defect[1]
    stack.file("sgl_kernel/__init__.py", 'import torch\ntorch.OPS += ["sgl_kernel::rmsnorm", "aten::add"]\n')
    answer = stack.probe("libraries", {"name": "sgl_kernel"})
    assert answer.data["said"] == "sgl_kernel 0.4.10 imports, 1 operators"


def test_a_distribution_without_its_module_is_broken(stack: FakeStack) -> None:
    stack.wheel("quack-kernels", "0.6.5")
    answer = stack.probe("libraries", {"name": "quack"})
    assert answer.defect is not None
    assert "quack-kernels 0.6.5 is installed, its module quack is not there" in answer.defect[1]


def test_a_library_that_wants_the_driver_is_not_judged_without_a_gpu(stack: FakeStack) -> None:
    stack.file("quack/__init__.py", 'import ctypes\nctypes.CDLL("libcuda.so.1.of.nowhere")\n')
    answer = stack.probe("libraries", {"name": "quack"})
    assert answer.absent is not None
    assert answer.absent[0] == "gpus"
    assert "cannot open shared object file" in answer.absent[1]


def test_the_fourth_flash_attention_is_not_taken_for_the_second(stack: FakeStack) -> None:
    stack.file("flash_attn/__init__.py")
    absent = stack.probe("libraries", {"name": "flash_attn_4"}).absent
    assert absent is not None
    assert absent[0] == "package"
    # flash-attn 2.8.3 brings that folder along, and not what it imports.
    stack.file("flash_attn/cute/__init__.py", "import cuda.bindings.driver\n")
    stack.wheel("flash-attn", "2.8.3")
    absent = stack.probe("libraries", {"name": "flash_attn_4"}).absent
    assert absent is not None
    assert absent[0] == "package"
    stack.wheel("flash-attn-4", "4.0.0")
    assert "No module named 'cuda'" in stack.probe("libraries", {"name": "flash_attn_4"}).text
    stack.file("flash_attn/cute/__init__.py")
    assert stack.probe("libraries", {"name": "flash_attn_4"}).ok


def test_a_release_of_deep_gemm_that_has_only_sources_is_no_stand_in(stack: FakeStack) -> None:
    stack.wheel("deep-gemm", "1.0.0")
    stack.file("deep_gemm/__init__.py")
    outcome(stack.probe("libraries", {"name": "deep_gemm"}), "import.abi", "a stand-in")
    stack.file("deep_gemm/jit_kernels/__init__.py")
    assert stack.probe("libraries", {"name": "deep_gemm"}).ok


def test_deep_gemm_that_finds_no_toolkit_says_so(stack: FakeStack) -> None:
    """Its own words are a bare AssertionError (deep_gemm/__init__.py)."""
    source = "def {}():\n    assert None is not None\n\n\n{}()\n"
    stack.library("deep_gemm/_C.so")
    stack.file("deep_gemm/__init__.py", source.format(*["_find_cuda_home"] * 2))
    answer = stack.probe("libraries", {"name": "deep_gemm"})
    outcome(answer, "jit.compile", "deep_gemm finds no CUDA toolkit on import: set CUDA_HOME")
    stack.file("deep_gemm/__init__.py", source.format(*["_look_at_the_sky"] * 2))
    answer = stack.probe("libraries", {"name": "deep_gemm"})
    assert answer.defect is None
    assert "AssertionError" in answer.text


def test_a_release_that_renamed_its_compiled_part_is_found(stack: FakeStack) -> None:
    stack.torch()
    stack.wheel("vllm", "0.27.0")
    stack.file("vllm/__init__.py", 'import torch\ntorch.OPS.append("_C::rms_norm")\n')
    absent = stack.probe("libraries", {"name": "vllm"})
    assert absent.defect is not None
    assert "vllm 0.27.0 is installed, its module vllm._C is not there" in absent.defect[1]
    stack.library("vllm/_C_stable_libtorch.abi3.so", EXTENSION.replace("PyInit__C", "PyInit__C_stable_libtorch"))
    assert stack.probe("libraries", {"name": "vllm"}).data["module"] == "vllm._C_stable_libtorch"


def test_a_launch_without_a_lease_is_not_made(stack: FakeStack) -> None:
    stack.file("triton/__init__.py")
    stack.library("triton/_C/libtriton.so")
    answer = stack.probe("libraries", {"name": "triton", "launch": True}, ["120"])
    assert answer.absent == ["gpus", "no GPU is leased"]


def test_a_launch_with_a_cpu_build_of_torch_is_not_made(stack: FakeStack) -> None:
    """That the build is the wrong one is one defect, and one claim's."""
    stack.torch("2.14.1+cpu", None)
    stack.file("triton/__init__.py")
    stack.library("triton/_C/libtriton.so")
    answer = run_probe(stack.python, "libraries", {"name": "triton", "launch": True}, (), ["GPU-0"])
    assert answer.absent is not None
    assert answer.absent[0] == "cuda"


def test_flashinfer_that_would_build_for_no_gpu_has_too_old_a_toolkit(stack: FakeStack) -> None:
    """flashinfer-ai/flashinfer#2577: its own message speaks of architectures."""
    stack.torch()
    stack.file("flashinfer/__init__.py")
    source = "class CompilationContext:\n    TARGET_CUDA_ARCHS = {}\n"
    rig = [{"uuid": "GPU-0", "name": "a card", "sm": "120"}]
    args = {"name": "flashinfer", "launch": True}
    assert "does not tell" in run_probe(stack.python, "libraries", args, rig, ["GPU-0"]).data["said"]
    for targets, broken in (("set()", True), ('{(12, "0f")}', False)):
        stack.file("flashinfer/compilation_context.py", source.format(targets))
        answer = run_probe(stack.python, "libraries", args, rig, ["GPU-0"])
        assert (answer.defect is not None) is broken
        if answer.defect is not None:
            assert answer.defect[0] == "jit.compile"


def test_several_libraries_are_looked_at_at_once_and_one_that_dies_takes_no_other_along(stack: FakeStack) -> None:
    stack.file("quack/__init__.py")
    stack.file("b12x/__init__.py", "import ctypes\nctypes.string_at(0)\n")
    stack.file("cutlass/__init__.py", "raise ImportError('undefined symbol: x')\n")
    stack.file("cutlass/cute/__init__.py")
    answer = stack.probe("libraries", {"all": ["quack", "b12x", "cutlass", "vllm"]})
    assert answer.ok
    assert answer.data["installed"] == ["quack", "b12x", "cutlass"]
    assert answer.data["holds"] == ["quack"]
    assert "args name 'nothing': one of" in stack.probe("libraries", {"all": ["nothing"]}).text


def test_an_import_sees_no_gpu_that_is_not_leased(stack: FakeStack) -> None:
    stack.file("quack/__init__.py", 'import os\nprint("SEES", repr(os.environ.get("CUDA_VISIBLE_DEVICES")))\n')
    assert "SEES ''" in stack.probe("libraries", {"name": "quack"}, ["120"]).text
    leased = run_probe(stack.python, "libraries", {"name": "quack"}, (), ["GPU-0"], CUDA_VISIBLE_DEVICES="GPU-0")
    assert "SEES 'GPU-0'" in leased.text

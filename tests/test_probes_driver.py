"""The probes about the driver and torch: the number of cuInit, and what torch makes of the leased GPUs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from .fake_wheels import Answer, FakeStack, link, run_probe
from .needs import need_tool

RIG = [{"uuid": "GPU-0", "name": "a card", "sm": "120"}]
#: A libcuda with nothing but what is asked for; its numbers come from the environment.
LIBCUDA = """\
#include <stdlib.h>
static int of(const char* name) { const char* text = getenv(name); return text ? atoi(text) : 0; }
int cuInit(unsigned flags) { return of("FAKE_CUINIT"); }
int cuDeviceGetCount(int* count) { *count = of("FAKE_COUNT"); return of("FAKE_COUNT_RETURNS"); }
int cuDriverGetVersion(int* version) { *version = 12080; return 0; }
"""


@pytest.fixture
def libcuda(tmp_path: Path) -> Path:
    """A folder with a libcuda.so.1 that has no words for its errors, as drivers before 6.0."""
    need_tool("gcc")
    folder = tmp_path / "driver"
    folder.mkdir()
    link(folder / "libcuda.so.1", LIBCUDA)
    return folder


def cuinit(folder: Path, *gpus: str, driver: str = "580.105.08", **env: str) -> Answer:
    return run_probe(sys.executable, "cuinit", None, RIG, gpus, driver, LD_LIBRARY_PATH=str(folder), **env)


def test_a_driver_that_comes_up_answers_count_and_version(libcuda: Path) -> None:
    answer = cuinit(libcuda, "GPU-0", "GPU-1", FAKE_COUNT="2")
    assert answer.ok
    assert answer.data["number"] == 0
    assert answer.data["count"] == 2
    assert answer.data["cuda"] == "12.8"
    assert answer.data["libcuda"] == str(libcuda / "libcuda.so.1")


@pytest.mark.parametrize(
    ("number", "outcome", "words"),
    [
        (802, "driver.mismatch", "Error 802: system not yet initialized (CUDA_ERROR_SYSTEM_NOT_READY)"),
        (803, "driver.mismatch", "Error 803: system has unsupported display driver / cuda driver combination"),
        (804, "driver.mismatch", "Error 804: forward compatibility was attempted on non supported HW"),
        (100, "driver.mismatch", "Error 100: no CUDA-capable device is detected"),
        (34, "driver.mismatch", "CUDA_ERROR_STUB_LIBRARY"),
        (214, "hardware", "uncorrectable ECC error"),
        (4711, "driver.mismatch", "Error 4711: no words for it (not a number that is known)"),
    ],
)
def test_the_number_is_kept_and_said_in_words(libcuda: Path, number: int, outcome: str, words: str) -> None:
    answer = cuinit(libcuda, "GPU-0", FAKE_CUINIT=str(number))
    assert answer.defect is not None
    assert answer.defect[0] == outcome
    assert words in answer.defect[1]
    assert answer.data["number"] == number


def test_802_says_what_is_known_of_the_fabric_manager(libcuda: Path) -> None:
    answer = cuinit(libcuda, FAKE_CUINIT="802")
    assert answer.defect is not None
    assert "NVSwitch device files, nv-fabricmanager " in answer.defect[1]
    assert answer.data["fabric_manager"] in (True, False)
    without = cuinit(libcuda, FAKE_CUINIT="802", PATH="/nowhere")
    assert without.defect is not None
    assert "no systemctl here to ask" in without.defect[1]


def test_803_names_a_libcuda_of_another_driver(libcuda: Path) -> None:
    (libcuda / "libcuda.so.1").rename(libcuda / "libcuda.so.575.57.08")
    (libcuda / "libcuda.so.1").symlink_to("libcuda.so.575.57.08")
    answer = cuinit(libcuda, FAKE_CUINIT="803")
    assert answer.defect is not None
    assert "it is of driver 575.57.08, the kernel's is 580.105.08" in answer.defect[1]


def test_a_count_that_is_not_that_of_the_lease_is_no_finding_about_the_stack(libcuda: Path) -> None:
    answer = cuinit(libcuda, "GPU-0", "GPU-1", FAKE_COUNT="1")
    assert answer.defect is not None
    assert answer.defect[0] == "infra.device"


def test_a_later_call_that_fails_is_told_by_its_name(libcuda: Path) -> None:
    answer = cuinit(libcuda, "GPU-0", FAKE_COUNT_RETURNS="999")
    assert answer.defect is not None
    assert "cuDeviceGetCount: Error 999" in answer.defect[1]


def test_a_machine_with_gpus_and_without_libcuda_is_broken(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")  # what the loader says of it is its own
    order = {"LD_LIBRARY_PATH": str(tmp_path)}
    answer = run_probe(sys.executable, "cuinit", None, RIG, ("GPU-0",), **order)
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a driver")
    assert answer.defect is not None
    assert answer.defect[0] == "driver.mismatch"
    assert "NVML sees 1 GPU(s)" in answer.defect[1]
    nothing = run_probe(sys.executable, "cuinit", None, (), (), **order)
    assert nothing.absent is not None
    assert nothing.absent[0] == "gpus"


# ------------------------------------------------------------------------------------------------------------- torch


@pytest.fixture
def stack(tmp_path: Path) -> FakeStack:
    made = FakeStack(tmp_path / "stack")
    made.torch()
    made.computes()
    return made


def torch_gpus(stack: FakeStack, *gpus: str, driver_cuda: str = "13.0", **like: object) -> Answer:
    env = {"FAKE_TORCH": json.dumps(like), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return run_probe(stack.python, "torch_gpus", None, RIG, gpus, "580.105.08", driver_cuda, **env)


def test_torch_that_computes_right_on_every_gpu_holds(stack: FakeStack) -> None:
    answer = torch_gpus(stack, "GPU-0", "GPU-1")
    assert answer.ok, answer.text
    assert answer.data["count"] == 2
    assert answer.data["said"] == "2 GPU(s) compute with torch 2.14.1+cu130"


def test_one_wrong_element_is_found(stack: FakeStack) -> None:
    answer = torch_gpus(stack, "GPU-0", wrong=True)
    assert answer.defect is not None
    assert answer.defect[0] == "numerics"
    assert "GPU 0: 1 of 4096 elements" in answer.defect[1]


def test_torch_without_code_for_the_card_is_found(stack: FakeStack) -> None:
    answer = torch_gpus(stack, "GPU-0", built_for=["sm_80", "sm_90", "sm_100"])
    assert answer.defect is not None
    assert answer.defect[0] == "unsupported.arch"
    assert "GPU 0 is sm_120" in answer.defect[1]
    assert torch_gpus(stack, "GPU-0", built_for=["sm_80", "compute_90"]).ok


def test_torch_that_sees_fewer_gpus_than_are_leased_is_no_finding_about_the_stack(stack: FakeStack) -> None:
    answer = torch_gpus(stack, "GPU-0", "GPU-1", count=1)
    assert answer.defect is not None
    assert answer.defect[0] == "infra.device"


def test_a_driver_too_old_for_torch_is_named(stack: FakeStack) -> None:
    answer = torch_gpus(stack, "GPU-0", driver_cuda="12.8", init="The NVIDIA driver on your system is too old")
    assert answer.defect is not None
    assert answer.defect[0] == "driver.mismatch"
    assert "torch is built for CUDA 13.0, driver 580.105.08 knows CUDA 12.8" in answer.defect[1]


def test_torch_that_runs_on_an_older_driver_holds_and_says_so(stack: FakeStack) -> None:
    answer = torch_gpus(stack, "GPU-0", driver_cuda="12.8")
    assert "a newer major needs a newer driver" in answer.data["said"]
    stack.torch("2.14.1+cu134", "13.4")
    stack.computes()
    assert "minor version compatibility" in torch_gpus(stack, "GPU-0").data["said"]


def test_an_error_of_torch_that_the_driver_does_not_explain_is_left_to_the_classifier(stack: FakeStack) -> None:
    answer = torch_gpus(stack, "GPU-0", init="Unexpected error from cudaGetDeviceCount(): Error 802")
    assert not answer.told
    assert "RuntimeError: Unexpected error from cudaGetDeviceCount(): Error 802" in answer.text


def test_a_cpu_build_of_torch_on_leased_gpus_is_broken(stack: FakeStack) -> None:
    stack.file("torch/version.py", "__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\n")
    answer = torch_gpus(stack, "GPU-0")
    assert answer.defect is not None
    assert answer.defect[0] == "import.abi"
    without = torch_gpus(stack)
    assert without.absent == ["cuda", "torch 2.13.0+cpu is a CPU build"]
    stack.file("torch/version.py", "__version__ = '2.13.0+rocm7'\ncuda = None\nhip = '7.0.1'\n")
    assert torch_gpus(stack, "GPU-0").absent == ["cuda", "torch 2.13.0+rocm7 is a ROCm build (7.0.1)"]


def test_a_stack_without_torch_is_not_judged(tmp_path: Path) -> None:
    bare = FakeStack(tmp_path / "bare")
    answer = run_probe(bare.python, "torch_gpus", None, RIG, ("GPU-0",))
    assert answer.absent is not None
    assert answer.absent[0] == "package"

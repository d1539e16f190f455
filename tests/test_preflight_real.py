"""The shipped pre-flight on the real CPU stack: it finds what that stack truly lacks, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from .fake_wheels import run_suite
from .needs import need
from .test_real_server import STACK


@pytest.mark.real_server
@pytest.mark.timeout(180)
def test_the_cpu_stack_lacks_its_torch_and_its_kernels_and_nothing_else(pytester: pytest.Pytester) -> None:
    python = STACK / "venv" / "bin" / "python"
    need(python.exists(), f"the CPU stack is not built at {STACK}: python tools/cpu_stack.py")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU, on which that stack lacks more")
    told = run_suite(pytester, python, "test_driver.py", "test_libraries.py", "test_toolchain.py")
    kernels = "test_libraries.py::test_the_library_imports[sgl_kernel]"
    torch = "test_toolchain.py::test_torch_is_the_pinned_one"
    assert {test for test, said in told.items() if not said.startswith(("HOLDS", "NOT_EVALUATED"))} == {kernels, torch}
    assert "import.abi sgl_kernel 0.0.0+stub (of no distribution) has no compiled library common_ops" in told[kernels]
    assert "import.abi sglang 0.5.23 requires torch==2.14.1, installed is torch 2.13.0+cpu" in told[torch]
    holds = {test.partition("::")[2] for test, said in told.items() if said.startswith("HOLDS")}
    pins = {"test_the_pins_of_the_engine_are_kept", "test_the_kernel_packages_fit_each_other"}
    assert holds == {*pins, "test_the_library_imports[triton]"}

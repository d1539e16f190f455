"""The probes about compilers: which nvcc and which ptxas would be taken, and what they can."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pytest_gpuguard.probes import kit
from pytest_gpuguard.probes import nvcc as nvcc_probe

from .fake_wheels import Answer, FakeStack, outcome

NVCC = """\
for argument; do last=$argument; done
case $1 in
--version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
--list-gpu-arch) for one in {known}; do echo compute_$one; done ;;
*) {compile} ;;
esac
"""


@pytest.fixture
def stack(tmp_path: Path) -> FakeStack:
    made = FakeStack(tmp_path / "stack")
    made.torch()
    return made


def nvcc(stack: FakeStack, release: str, known: str = "90 100 120", compile: str = ":") -> str:
    """A folder of a toolkit with such an nvcc."""
    script = NVCC.format(release=release, known=known, compile=compile)
    return str(stack.tool(f"cuda-{release}/bin/nvcc", script).parents[1])


def ask_nvcc(stack: FakeStack, *sms: str, **env: str) -> Answer:
    """Ask where neither this machine's PATH nor its environment names one."""
    return stack.probe("nvcc", None, sms or ("120",), **{"PATH": "/bin:/usr/bin", **env})


# -------------------------------------------------------------------------------------------------------------- nvcc


def test_the_way_to_nvcc_is_that_of_the_builders(stack: FakeStack) -> None:
    home, other, path = nvcc(stack, "13.0"), nvcc(stack, "13.1"), nvcc(stack, "13.2")
    on_path = f"{path}/bin:/bin:/usr/bin"
    answer = ask_nvcc(stack, CUDA_HOME=home, CUDA_PATH=other, PATH=on_path)
    assert (answer.data["version"], answer.data["found_by"]) == ("13.0", "CUDA_HOME")
    answer = ask_nvcc(stack, CUDA_PATH=other, PATH=on_path)
    assert (answer.data["version"], answer.data["found_by"]) == ("13.1", "CUDA_PATH")
    answer = ask_nvcc(stack, PATH=on_path)
    assert (answer.data["version"], answer.data["found_by"]) == ("13.2", "PATH")


def test_a_home_without_an_nvcc_is_not_passed_over(stack: FakeStack) -> None:
    good = nvcc(stack, "13.0")
    answer = ask_nvcc(stack, CUDA_HOME="/opt/gone", PATH=f"{good}/bin:/bin:/usr/bin")
    outcome(answer, "jit.compile", "/opt/gone/bin/nvcc (CUDA_HOME), which is no program")


def test_a_runtime_image_without_nvcc_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has /usr/local/cuda: FlashInfer goes by torch's CUDA there, and serves from precompiled kernels."""
    ends: list[str] = []
    for name in ("defect", "absent"):

        def end(*told: str, how: str = name) -> None:
            ends.append(f"{how} {told[0]}")
            raise SystemExit

        monkeypatch.setattr(kit, name, end)
    for path, how in (("/usr/local/cuda/bin/nvcc", "default"), ("/opt/cuda/bin/nvcc", "CUDA_HOME")):
        with pytest.raises(SystemExit):
            nvcc_probe._missing(path, how)
    assert ends == ["absent tools", "defect jit.compile"]


def test_an_nvcc_that_deep_gemm_refuses_is_told_where_it_has_kernels(stack: FakeStack) -> None:
    home = nvcc(stack, "12.2")
    told = "DeepGEMM refuses it: it requires nvcc >= 12.3"
    assert told not in ask_nvcc(stack, "90", CUDA_HOME=home).data["said"]
    stack.wheel("sgl-deep-gemm", "0.1.3")
    assert told in ask_nvcc(stack, "90", CUDA_HOME=home).data["said"]
    assert told not in ask_nvcc(stack, "120", CUDA_HOME=home).data["said"]
    assert told not in ask_nvcc(stack, "90", CUDA_HOME=nvcc(stack, "12.3")).data["said"]


def test_a_missing_ninja_is_told_where_something_builds_with_it(stack: FakeStack) -> None:
    home, tools = nvcc(stack, "13.0"), stack.site / "tools"
    tools.mkdir()
    for one in ("sh", "echo"):
        (tools / one).symlink_to(f"/bin/{one}")
    asked = {"CUDA_HOME": home, "PATH": str(tools)}
    assert "no ninja" not in ask_nvcc(stack, **asked).data["said"]
    stack.wheel("sglang", "0.5.23")
    assert "no ninja in the PATH" in ask_nvcc(stack, **asked).data["said"]
    stack.tool("tools/ninja", "")
    assert "no ninja" not in ask_nvcc(stack, **asked).data["said"]


def test_a_compiler_that_only_one_builder_takes_is_named(stack: FakeStack) -> None:
    home = nvcc(stack, "13.0")
    said = ask_nvcc(stack, CUDA_HOME=home, FLASHINFER_NVCC="/opt/other/nvcc").data["said"]
    assert said.endswith("FLASHINFER_NVCC makes its builder take /opt/other/nvcc instead, which is not judged")
    assert "PYTORCH_NVCC makes" in ask_nvcc(stack, CUDA_HOME=home, PYTORCH_NVCC="ccache nvcc").data["said"]


def test_an_nvcc_of_another_major_than_torch_is_named(stack: FakeStack) -> None:
    answer = ask_nvcc(stack, CUDA_HOME=nvcc(stack, "12.9"))
    assert answer.ok
    assert "it is of another major than torch's CUDA 13.0" in answer.data["said"]
    stack.torch("2.9.1+cu128", "12.8")
    assert "another major" not in ask_nvcc(stack, CUDA_HOME=nvcc(stack, "12.9")).data["said"]


def test_flashinfer_wants_a_newer_nvcc_for_sm120_than_the_first_that_knows_it(stack: FakeStack) -> None:
    stack.torch("2.9.1+cu128", "12.8")
    home = nvcc(stack, "12.8")
    assert ask_nvcc(stack, CUDA_HOME=home).ok
    stack.wheel("flashinfer-python", "0.6.12")
    outcome(ask_nvcc(stack, CUDA_HOME=home), "jit.compile", "SM 12.x requires CUDA >= 12.9")
    plain = ask_nvcc(stack, CUDA_HOME=home, FLASHINFER_CUDA_ARCH_LIST="12.0")
    outcome(plain, "jit.compile", "SM 12.x requires CUDA >= 12.9")
    assert ask_nvcc(stack, "100", CUDA_HOME=home).ok


def test_a_flashinfer_before_that_rule_or_told_the_suffix_builds_with_the_older_nvcc(stack: FakeStack) -> None:
    """Releases before 0.6.7 build for 12.0a, and so does every one that is told a suffix."""
    home = nvcc(stack, "12.8")
    for version in ("0.3.1", "0.6.3", "0.6.6.post1"):
        stack.wheel("flashinfer-python", version)
        assert ask_nvcc(stack, CUDA_HOME=home).ok
    stack.wheel("flashinfer-python", "0.6.7+cu128")
    outcome(ask_nvcc(stack, CUDA_HOME=home), "jit.compile", "SM 12.x requires CUDA >= 12.9")
    assert ask_nvcc(stack, CUDA_HOME=home, FLASHINFER_CUDA_ARCH_LIST="9.0a 12.0a").ok


def test_each_card_of_the_rig_must_be_known(stack: FakeStack) -> None:
    home = nvcc(stack, "13.0", known="90 100")
    outcome(ask_nvcc(stack, "90", "120", CUDA_HOME=home), "jit.compile", "does not know compute_120")
    hide = "no longer knows compute_61", "take an older toolkit, or hide that GPU (CUDA_VISIBLE_DEVICES)"
    outcome(ask_nvcc(stack, "61", "90", CUDA_HOME=home), "jit.compile", *hide)


def test_an_nvcc_that_lists_the_card_and_cannot_compile_is_found(stack: FakeStack) -> None:
    refuses = 'echo "fatal error: cuda_runtime.h: No such file or directory" >&2; echo done; exit 1'
    answer = ask_nvcc(stack, CUDA_HOME=nvcc(stack, "13.0", compile=refuses))
    outcome(answer, "jit.compile", "nvcc for sm_120a fails: fatal error: cuda_runtime.h")


def test_the_kernel_is_compiled_for_the_whole_card_from_90_on(stack: FakeStack) -> None:
    tells = 'echo "$1" >> "$(dirname "$0")/asked"'
    home = nvcc(stack, "13.0", known="86 120", compile=tells)
    assert ask_nvcc(stack, "86", "120", CUDA_HOME=home).ok
    asked = (Path(home) / "bin" / "asked").read_text().split()
    assert asked == ["-gencode=arch=compute_86,code=sm_86", "-gencode=arch=compute_120a,code=sm_120a"]


def test_an_nvcc_that_says_nonsense_is_broken(stack: FakeStack) -> None:
    home = stack.tool("cuda/bin/nvcc", "echo segmentation fault; exit 139\n").parents[1]
    outcome(ask_nvcc(stack, CUDA_HOME=str(home)), "jit.compile", "segmentation fault (exit status 139)")
    (home / "bin" / "nvcc").write_bytes(b"\x7fELF of another machine")
    outcome(ask_nvcc(stack, CUDA_HOME=str(home)), "jit.compile", "cannot be started: Exec format error")


def test_without_a_gpu_nvcc_is_named_and_not_judged(stack: FakeStack) -> None:
    home = nvcc(stack, "11.5", known="86")
    answer = stack.probe("nvcc", None, (), CUDA_HOME=home)
    assert answer.absent is not None
    assert answer.absent[0] == "gpus"
    assert answer.data["path"] == f"{home}/bin/nvcc"


def test_the_toolkit_of_a_wheel_is_named_as_a_cure(stack: FakeStack) -> None:
    stack.file("nvidia/__init__.py")
    wheel = stack.tool("nvidia/cu13/bin/nvcc", "exit 0\n")
    answer = ask_nvcc(stack, CUDA_HOME=nvcc(stack, "11.5", known="86"))
    outcome(answer, "jit.compile", str(wheel.parents[1]))


# ------------------------------------------------------------------------------------------------------------- ptxas


def ptxas(said: str = "exit 0") -> str:
    return f'case $1 in --version) echo "release 12.8, V12.8.93" ;; *) {said} ;; esac\n'


def test_the_choice_of_triton_itself_counts(stack: FakeStack) -> None:
    stack.file("triton/__init__.py")
    stack.file("triton/backends/__init__.py")
    stack.tool("triton/backends/nvidia/bin/ptxas", ptxas("exit 1"))
    chosen = stack.tool("bin/chosen", ptxas())
    stack.file("triton/backends/nvidia/__init__.py")
    for result in (f"type('Tool', (), {{'path': {str(chosen)!r}}})", f"({str(chosen)!r}, '12.8')"):
        stack.file("triton/backends/nvidia/compiler.py", f"def get_ptxas(arch):\n    return {result}\n")
        shutil.rmtree(stack.site / "triton/backends/nvidia/__pycache__", ignore_errors=True)
        answer = stack.probe("ptxas", None, ("120",))
        assert answer.data["path"] == str(chosen), answer.text
        assert answer.ok


def test_a_card_from_100_on_takes_the_ptxas_for_blackwell(stack: FakeStack) -> None:
    stack.file("triton/__init__.py")
    old = stack.tool("triton/backends/nvidia/bin/ptxas", ptxas())
    new = stack.tool("triton/backends/nvidia/bin/ptxas-blackwell", ptxas())
    assert stack.probe("ptxas", None, ("120",)).data["path"] == str(new)
    answer = stack.probe("ptxas", None, ("89",))
    assert answer.data["path"] == str(old)
    assert answer.data["target"] == "sm_89"


def test_a_triton_without_a_ptxas_is_broken(stack: FakeStack) -> None:
    stack.file("triton/__init__.py")
    outcome(stack.probe("ptxas", None, ("120",)), "jit.compile", "Triton has no ptxas for sm_120a")


def test_a_ptxas_that_is_no_program_is_broken(stack: FakeStack) -> None:
    stack.file("triton/__init__.py")
    tool = stack.file("triton/backends/nvidia/bin/ptxas", "\x7fELF of another machine")
    tool.chmod(0o755)
    outcome(stack.probe("ptxas", None, ("120",)), "jit.compile", "Exec format error")


def test_without_triton_or_a_gpu_ptxas_is_not_judged(stack: FakeStack) -> None:
    assert (stack.probe("ptxas", None, ("120",)).absent or [""])[0] == "package"
    stack.file("triton/__init__.py")
    assert (stack.probe("ptxas").absent or [""])[0] == "gpus"

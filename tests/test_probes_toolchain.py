"""The probes about compilers and wheels: which nvcc and ptxas, and what packages say of each other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pytest_gpuguard.probes import wheels

from .fake_wheels import Answer, FakeStack

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


def outcome(answer: Answer, kind: str, *texts: str) -> None:
    assert answer.defect is not None, answer.text
    assert answer.defect[0] == kind
    for text in texts:
        assert text in answer.defect[1], answer.defect


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
    assert ask_nvcc(stack, "100", CUDA_HOME=home).ok


def test_each_card_of_the_rig_must_be_known(stack: FakeStack) -> None:
    home = nvcc(stack, "13.0", known="90 100")
    outcome(ask_nvcc(stack, "90", "120", CUDA_HOME=home), "jit.compile", "does not know compute_120")


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


# ------------------------------------------------------------------------------------------------------------ wheels


def ask(stack: FakeStack, part: str) -> Answer:
    return stack.probe("wheels", {"part": part})


def with_packaging(stack: FakeStack) -> None:
    """What reads ranges and markers, as nearly every stack has it."""
    import packaging

    (folder,) = packaging.__path__
    shutil.copytree(folder, stack.site / "packaging", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture(params=["packaging", "by hand"])
def reader(request: pytest.FixtureRequest, stack: FakeStack) -> str:
    """The same must come out of both, for what engines pin."""
    if request.param == "packaging":
        with_packaging(stack)
    return str(request.param)


@pytest.mark.usefixtures("reader")
def test_another_torch_than_the_pinned_one_is_found_and_the_pin_is_quoted(stack: FakeStack) -> None:
    stack.torch("2.13.0+cpu", None)
    stack.wheel("sglang", "0.5.23", "torch==2.14.1", "aiohttp")
    told = "sglang 0.5.23 requires torch==2.14.1, installed is torch 2.13.0+cpu"
    outcome(ask(stack, "torch"), "import.abi", told)
    stack.wheel("sglang", "0.5.23", "torch==2.13.0", 'torch==9; extra == "all"', "torch==8; sys_platform != 'linux'")
    assert ask(stack, "torch").ok


@pytest.mark.usefixtures("reader")
def test_pins_of_the_engine_are_told_from_its_torch(stack: FakeStack) -> None:
    stack.wheel("vllm", "0.26.0", "torch==1.0", "flashinfer_python==0.7.2", "numpy==1.0", "xgrammar==0.2.7")
    stack.wheel("flashinfer-python", "0.6.12")
    stack.wheel("xgrammar", "0.2.7")
    stack.wheel("numpy", "2.3.5")
    answer = ask(stack, "engine")
    outcome(
        answer, "import.abi", "vllm 0.26.0 requires flashinfer_python==0.7.2, installed is flashinfer-python 0.6.12"
    )
    assert len(answer.data["wrong"]) == 1
    assert answer.data["asked"] == 2


def test_what_a_cpu_stack_goes_without_is_a_defect_of_a_cuda_stack(stack: FakeStack) -> None:
    stack.wheel("sglang", "0.5.23", "sglang-kernel==0.4.10", "torchaudio==2.11.0")
    outcome(ask(stack, "engine"), "import.abi", "requires sglang-kernel==0.4.10, which is not installed")
    stack.torch("2.14.1+cpu", None)
    answer = ask(stack, "engine")
    assert answer.ok
    assert "2 not installed: sglang-kernel==0.4.10, torchaudio==2.11.0" in answer.data["said"]


@pytest.mark.usefixtures("reader")
def test_pins_behind_an_extra_are_followed(stack: FakeStack) -> None:
    """Newer releases of torch ask for cuda-toolkit[cublas,…], which has no files and pins the wheels."""
    stack.torch("2.11.0+cu130", "13.0", "", "cuda-toolkit[cublas]==13.0.2; platform_system == 'Linux'")
    stack.wheel("cuda-toolkit", "13.0.2", 'nvidia-cublas==13.1.0.3; extra == "cublas"', 'nvidia-npp==9; extra == "npp"')
    stack.wheel("nvidia-cublas", "13.0.2.14")
    stack.wheel("nvidia-npp", "12")
    told = "cuda-toolkit 13.0.2 requires nvidia-cublas==13.1.0.3, installed is nvidia-cublas 13.0.2.14"
    answer = ask(stack, "nvidia")
    outcome(answer, "import.abi", told)
    assert len(answer.data["wrong"]) == 1


def test_a_newer_nccl_or_cudnn_of_the_same_major_is_said_and_no_defect(stack: FakeStack) -> None:
    """SGLang with torch 2.9.1 refuses to start with the cuDNN that this torch pins (pytorch/pytorch#168167)."""
    stack.torch("2.9.1", "12.8", "", "nvidia-cudnn-cu12==9.10.2.21", "nvidia-nccl-cu12==2.27.5")
    stack.wheel("nvidia-cudnn-cu12", "9.16.0.29")
    stack.wheel("nvidia-nccl-cu12", "2.27.5")
    answer = ask(stack, "nvidia")
    assert answer.ok
    assert "nvidia-cudnn-cu12 9.16.0.29 is newer than the pinned nvidia-cudnn-cu12==9.10.2.21" in answer.data["said"]
    for version in ("9.9.0", "10.1.0"):
        stack.wheel("nvidia-cudnn-cu12", version)
        outcome(ask(stack, "nvidia"), "import.abi", f"installed is nvidia-cudnn-cu12 {version}")


def test_a_library_that_the_wheel_of_another_cuda_wrote_over_is_found(stack: FakeStack) -> None:
    stack.torch("2.14.1", "13.0", "", "nvidia-nccl-cu13==2.29.7")
    stack.wheel("nvidia-nccl-cu13", "2.29.7")
    stack.file("nvidia_nccl_cu13-2.29.7.dist-info/RECORD", "nvidia/nccl/lib/libnccl.so.2,sha256=x,9\n")
    stack.file("nvidia/nccl/lib/libnccl.so.2", "of cu12")
    assert ask(stack, "nvidia").ok  # alone, another size is another matter
    stack.wheel("nvidia-nccl-cu12", "2.27.5")
    outcome(ask(stack, "nvidia"), "import.abi", "libnccl.so.2 is not that of nvidia-nccl-cu13 2.29.7: nvidia-nccl-cu12")
    stack.file("nvidia/nccl/lib/libnccl.so.2", "that of 9")
    assert ask(stack, "nvidia").ok


def test_ranges_are_compared_where_they_can_be(stack: FakeStack) -> None:
    stack.wheel("quack-kernels", "0.4.1", "nvidia-cutlass-dsl<4.6,>=4.4.1")
    stack.wheel("nvidia-cutlass-dsl", "4.6.0")
    answer = ask(stack, "others")
    assert answer.ok
    assert "1 could not be compared without packaging: nvidia-cutlass-dsl<4.6,>=4.4.1" in answer.data["said"]
    with_packaging(stack)
    outcome(ask(stack, "others"), "import.abi", "requires nvidia-cutlass-dsl<4.6,>=4.4.1, installed is")


def test_a_copy_of_packaging_in_pip_will_do(stack: FakeStack) -> None:
    with_packaging(stack)
    (stack.site / "pip" / "_vendor").mkdir(parents=True)
    stack.file("pip/__init__.py")
    stack.file("pip/_vendor/__init__.py")
    (stack.site / "packaging").rename(stack.site / "pip" / "_vendor" / "packaging")
    stack.wheel("quack-kernels", "0.4.1", "nvidia-cutlass-dsl<4.6")
    stack.wheel("nvidia-cutlass-dsl", "4.6.0")
    outcome(ask(stack, "others"), "import.abi", "nvidia-cutlass-dsl<4.6")


@pytest.mark.usefixtures("reader")
def test_metadata_that_cannot_be_read_hides_nothing_else(stack: FakeStack) -> None:
    stack.file("half_removed-1.0.dist-info/RECORD")
    stack.file("broken-1.0.dist-info/METADATA", "\x00\x01 no headers\n")
    stack.wheel("triton", "not a version", "torch === nonsense ;;", "torch (==1.0)")
    answer = ask(stack, "others")
    outcome(answer, "import.abi", "triton not a version requires torch (==1.0)")


def test_the_three_wheels_of_flashinfer_must_be_of_one_version(stack: FakeStack) -> None:
    assert (ask(stack, "flashinfer").absent or [""])[0] == "package"
    stack.wheel("flashinfer-python", "0.7.2")
    assert ask(stack, "flashinfer").ok
    stack.wheel("flashinfer-jit-cache", "0.7.2+cu130")
    stack.wheel("flashinfer-cubin", "0.6.12")
    outcome(ask(stack, "flashinfer"), "import.abi", "flashinfer-cubin 0.6.12", "all must be of one version")
    hidden = stack.probe("wheels", {"part": "flashinfer"}, FLASHINFER_DISABLE_VERSION_CHECK="1")
    outcome(hidden, "import.abi", "FLASHINFER_DISABLE_VERSION_CHECK hides it")
    stack.wheel("flashinfer-cubin", "0.7.2")
    assert ask(stack, "flashinfer").ok


def test_parts_without_their_packages_are_not_judged(tmp_path: Path, stack: FakeStack) -> None:
    assert (ask(stack, "torch").absent or [""])[0] == "package"
    assert ask(stack, "nvidia").absent == ["cuda", "torch 2.14.1+cu130 requires no NVIDIA wheels"]
    bare = FakeStack(tmp_path / "bare")
    assert (ask(bare, "nvidia").absent or [""])[0] == "package"
    assert ask(bare, "others").ok


@pytest.mark.parametrize(
    ("text", "extra", "expected"),
    [
        ("torch", "", ("torch", (), "")),
        ("Flashinfer_Python[cu13]==0.7.2", "", ("flashinfer-python", ("cu13",), "==0.7.2")),
        ("nvidia-cublas (==13.1)", "", ("nvidia-cublas", (), "==13.1")),
        ('a==1; extra == "x"', "", None),
        ('a==1; extra == "x"', "x", ("a", (), "==1")),
        ("a==1; platform_system == 'Linux'", "", ("a", (), "==1")),
        ("a==1; sys_platform == 'darwin'", "", None),
        ("=== nonsense", "", None),
        ("", "", None),
    ],
)
def test_a_requirement_is_read_by_hand(text: str, extra: str, expected: tuple[object, ...] | None) -> None:
    found = wheels.simple(text, extra)
    assert (tuple(found) if found is not None else None) == expected


@pytest.mark.parametrize(
    ("clauses", "version", "fits"),
    [
        ("", "1", True),
        ("==2.13.0", "2.13.0+cpu", True),
        ("==2.13.0+cu130", "2.13.0+cpu", False),
        ("== 2.14.1", "2.13.0", False),
        (">=2", "1", None),
        ("==2.*", "2.1", None),
    ],
)
def test_a_single_version_is_compared_by_hand(clauses: str, version: str, fits: bool | None) -> None:
    assert wheels.Simple("a", (), clauses).fits(version) is fits

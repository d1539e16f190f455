"""The probe about wheels: what packages say of each other, and whose files lie where two write to the same place."""

from __future__ import annotations

import base64
import hashlib
import shutil
from pathlib import Path

import pytest

from pytest_gpuguard.probes import wheels

from .fake_wheels import Answer, FakeStack, node_of, outcome, run_suite
from .standin.fixtures import FakeRigFactory


@pytest.fixture
def stack(tmp_path: Path) -> FakeStack:
    made = FakeStack(tmp_path / "stack")
    made.torch()
    return made


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
    assert "nvidia-cudnn-cu12 9.16.0.29 instead of the pinned nvidia-cudnn-cu12==9.10.2.21" in answer.data["said"]
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


def test_the_recipe_of_the_image_for_cuda_13_is_no_defect(stack: FakeStack) -> None:
    """docker/Dockerfile of SGLang 0.5.9: newer NVIDIA wheels than torch pins, and the bindings of torch's CUDA."""
    pins = "nvidia-cublas==13.0.0.19", "nvidia-nvshmem-cu13==3.3.24", "nvidia-cusparselt-cu13==0.8.0"
    stack.torch("2.9.1+cu130", "13.0", "", *pins)
    stack.wheel("nvidia-cublas", "13.1.0.3")
    stack.wheel("nvidia-nvshmem-cu13", "3.4.5")
    stack.wheel("nvidia-cusparselt-cu13", "0.8.0")
    stack.wheel("sglang", "0.5.9", "cuda-python==12.9", "transformers==4.57.1", "triton==3.5.1")
    stack.wheel("cuda-python", "13.1.1")
    stack.wheel("transformers", "4.58.0")
    stack.wheel("triton", "3.5.1")
    answer = ask(stack, "nvidia")
    assert answer.ok
    assert "nvidia-cublas 13.1.0.3 instead of the pinned nvidia-cublas==13.0.0.19" in answer.data["said"]
    answer = ask(stack, "engine")
    assert answer.ok
    assert "cuda-python 13.1.1 instead of the pinned cuda-python==12.9" in answer.data["said"]
    assert "transformers 4.58.0 instead of the pinned transformers==4.57.1" in answer.data["said"]


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("cuda-python", "11.8.7"),  # neither the pinned CUDA nor torch's
        ("transformers", "4.40.0"),  # older
        ("triton", "3.6.0"),  # compiled for another torch
    ],
)
def test_what_may_not_stand_in_for_a_pin_of_the_engine_has_its_cure(stack: FakeStack, name: str, version: str) -> None:
    pins = {"cuda-python": "12.9", "transformers": "4.57.1", "triton": "3.5.1"}
    stack.wheel("sglang", "0.5.9", *(f"{one}=={pin}" for one, pin in pins.items()))
    for one, pin in pins.items():
        stack.wheel(one, version if one == name else pin)
    cure = f'pip install "{name}=={pins[name]}"'
    outcome(ask(stack, "engine"), "import.abi", f"installed is {name} {version}: {cure}")


def test_an_nvidia_wheel_that_is_not_torchs_has_its_cure(stack: FakeStack) -> None:
    stack.torch("2.14.1", "13.0", "", "nvidia-cufft==12.0.0.15; platform_system == 'Linux'")
    stack.wheel("nvidia-cufft", "12.1.0.0")
    outcome(ask(stack, "nvidia"), "import.abi", 'nvidia-cufft 12.1.0.0: pip install "nvidia-cufft==12.0.0.15"')


def test_two_wheels_at_one_place_must_not_be_mixed(stack: FakeStack) -> None:
    """NVIDIA/cutlass#3170, sgl-project/sglang#27707: both are installed, and the last one of each file wins."""
    names = "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13"
    stack.torch("2.14.1", "13.0", "", "nvidia-nccl-cu13==2.29.7")
    stack.wheel("nvidia-nccl-cu13", "2.29.7")
    paths = [f"nvidia_cutlass_dsl/python_packages/cutlass/{one}.py" for one in ("mma", "same", "copy")]
    for name, text in zip(names, ("base", "cu13"), strict=True):
        stack.wheel(name, "4.5.1")
        digests = [_digest("same" if "same" in path else text) for path in paths]
        record = "".join(f"{path},sha256={digest},4\n" for path, digest in zip(paths, digests, strict=True))
        stack.file(f"{name.replace('-', '_')}-4.5.1.dist-info/RECORD", record)

    def lies_there(*texts: str) -> None:
        for path, text in zip(paths, texts, strict=True):
            stack.file(path, text)

    lies_there("cu13", "same", "cu13")
    assert stack.probe("wheels", {"part": "nvidia"}, ["120"]).ok
    lies_there("cu13", "same", "base")
    told = f"1 of 2 files of {names[1]} are those of {names[0]} ({paths[2]})", f'--no-deps "{names[1]}==4.5.1"'
    outcome(stack.probe("wheels", {"part": "nvidia"}, ["90"]), "import.abi", *told)
    lies_there("base", "same", "base")  # what SGLang keeps on Hopper
    assert stack.probe("wheels", {"part": "nvidia"}, ["90"]).ok
    outcome(stack.probe("wheels", {"part": "nvidia"}, ["120"]), "import.abi", "2 of 2 files")


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def test_one_run_answers_every_part_as_the_part_alone_does(stack: FakeStack) -> None:
    stack.wheel("sglang", "0.5.9", "torch==2.14.1", "triton==3.5.1")
    stack.wheel("triton", "3.6.0")
    answer = stack.probe("wheels")
    assert answer.ok
    for part in wheels.PARTS:
        alone = ask(stack, part)
        ended = {"said": alone.data.get("said"), "defect": alone.defect, "absent": alone.absent}
        assert answer.data[part] == {how: told for how, told in ended.items() if told is not None}
    assert answer.data["engine"]["defect"][0] == "import.abi"
    assert answer.data["said"] == "torch: 1 requirements fit; others: 0 requirements fit"


def test_the_claims_share_one_run_and_a_broken_one_has_a_log_of_its_own(
    stack: FakeStack, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    stack.wheel("sglang", "0.5.9", "torch==2.14.1", "triton==3.5.1")
    stack.wheel("triton", "3.6.0")
    torch, engine, others = map(node_of, ("preflight.torch_pin", "preflight.engine_pins", "preflight.other_pins"))
    told = run_suite(pytester, stack.python, torch, engine, others)
    assert told[torch].startswith("HOLDS")
    assert told[others].startswith("HOLDS")
    broken = "CONTRADICTED (worse) import.abi sglang 0.5.9 requires triton==3.5.1, installed is triton 3.6.0"
    assert told[engine].startswith(broken)
    logs = list((pytester.path / ".gpuguard" / "logs").glob("*probe-wheels*"))
    assert len(logs) == 2


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

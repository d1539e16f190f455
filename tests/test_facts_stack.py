"""Stacks: what a python says about itself, whatever surrounds it, and what the cache keeps of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_gpuguard.facts import stack as stack_module
from pytest_gpuguard.facts.stack import Stack, StackError, probe_stack
from pytest_gpuguard.facts.stack_probe import redact
from tests.needs import need, need_tool

pytestmark = pytest.mark.skipif(os.name != "posix", reason="stacks are asked on POSIX systems only")


class Venv:
    """A real, empty virtual environment that tests install things in by writing files."""

    def __init__(self, folder: Path, home: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True)
        self.python = str(folder / "bin" / "python")
        (self.site,) = folder.glob("lib/python*/site-packages")
        keep = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if key in os.environ}
        self.env = {**keep, "HOME": str(home), "GPUGUARD_CACHE_DIR": str(home / "cache")}

    def install(self, name: str, version: str) -> None:
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def torch(self, version: str, *lines: str) -> None:
        self.install("torch", version.partition("+")[0])
        (self.site / "torch").mkdir()
        (self.site / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
        (self.site / "torch" / "version.py").write_text("\n".join([f"__version__ = '{version}'", *lines]))

    def sitecustomize(self, text: str) -> None:
        (self.site / "sitecustomize.py").write_text(text)

    def probe(self, *, cache: bool = False, deadline_s: float = 60.0, **env: str) -> Stack:
        return probe_stack("test", self.python, {**self.env, **env}, cache=cache, deadline_s=deadline_s)


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    (tmp_path / "home").mkdir()
    return Venv(tmp_path / "venv", tmp_path / "home")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each probe was asked for: "all", or "volatile" when the cache had the rest."""
    seen: list[str] = []
    real = stack_module._ask

    def spy(name: str, python: str, script: str, what: str, *rest: object) -> object:
        seen.append(what)
        return real(name, python, script, what, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(stack_module, "_ask", spy)
    return seen


def test_a_serving_stack(venv: Venv) -> None:
    venv.torch("2.9.1+cu128", "debug = False", "cuda: Optional[str] = '12.8'", "hip: Optional[str] = None")
    for name, version in {
        "sglang": "0.5.23",
        "sgl_kernel": "0.3.5",
        "flashinfer-python": "0.6.9",
        "flashinfer-cubin": "0.6.9",
        "flashinfer_jit_cache": "0.6.9+cu128",
        "triton": "3.5.1",
        "nvidia-nccl-cu12": "2.27.5",
        "nvidia-cudnn-cu12": "9.10.2.21",
        "transformers": "4.57.1",
    }.items():
        venv.install(name, version)
    stack = venv.probe()
    version = ".".join(map(str, sys.version_info[:3]))
    assert stack.describe() == f"sglang 0.5.23, torch 2.9.1+cu128 (CUDA 12.8), python {version}"
    assert (stack.torch_cuda, stack.torch_version) == ("12.8", "2.9.1+cu128")
    assert stack.package("Flashinfer.JIT_cache") == "0.6.9+cu128"
    assert stack.package("vllm") is None
    fingerprint = stack.fingerprint()
    assert {key: fingerprint[key] for key in ("sgl_kernel", "flashinfer_cubin", "nccl", "cudnn", "transformers")} == {
        "sgl_kernel": "0.3.5",
        "flashinfer_cubin": "0.6.9",
        "nccl": "2.27.5",
        "cudnn": "9.10.2.21",
        "transformers": "4.57.1",
    }
    assert fingerprint["kernel"].split()[1] == os.uname().release
    assert Stack.from_dict(json.loads(json.dumps(stack.to_dict()))) == stack
    assert stack.with_driver("580.1").driver == "580.1"
    json.dumps(fingerprint)


@pytest.mark.parametrize(
    ("lines", "described"),
    [
        (["cuda = None", "hip = None"], "torch 2.13.0+x (CPU)"),
        (["cuda: Optional[str] = None", "hip: Optional[str] = '6.4'"], "torch 2.13.0+x (ROCm 6.4)"),
        (["from somewhere import cuda"], "torch 2.13.0+x,"),
        (["((("], "torch 2.13.0,"),
    ],
)
def test_torch_builds_are_read_and_not_imported(venv: Venv, lines: list[str], described: str) -> None:
    venv.torch("2.13.0+x", *lines)
    assert described in venv.probe().describe()


@pytest.mark.parametrize("release", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14"])
def test_any_python_from_3_8_on_can_be_asked(release: str, tmp_path: Path) -> None:
    python = shutil.which(f"python{release}") or ""
    said = subprocess.run([python, "-c", "import sys; print(sys.version)"], capture_output=True) if python else None
    if said is None or said.returncode != 0:
        pytest.skip(f"there is no Python {release} here")  # also in CI: which ones there are is not ours to say
    stack = probe_stack("default", python, {**os.environ, "GPUGUARD_CACHE_DIR": str(tmp_path)})
    assert stack.python_version == said.stdout.decode().split()[0]
    assert stack.describe().endswith(f"python {stack.python_version}")


def test_the_running_python_has_what_we_have(tmp_path: Path) -> None:
    stack = probe_stack("default", sys.executable, cache=False)
    assert stack.package("pytest") == pytest.__version__


@pytest.mark.parametrize(
    "text",
    [
        "print('hello'); import sys; sys.stdout.flush()",
        "import os; [os.write(fd, b'noise {\"volatile\": {}}\\n') for fd in (1, 2)]",
        "import sys; sys.stdout.buffer.write(bytes(range(128, 256))); sys.stderr.buffer.write(b'\\xff\\xfe')",
        "import sys; sys.stdout = None",
        "import os; os.environ['SGLANG_FROM_SITE'] = '1'",
    ],
)
def test_a_sitecustomize_that_prints_does_not_disturb(venv: Venv, text: str) -> None:
    venv.sitecustomize(text)
    venv.install("sglang", "0.5.23")
    stack = venv.probe(PYTHONIOENCODING="ascii")
    assert stack.package("sglang") == "0.5.23"
    # what it sets is part of the stack: a server would have it too
    assert ("SGLANG_FROM_SITE" in stack.facts["environment"]) == ("FROM_SITE" in text)


def test_a_background_process_of_sitecustomize_does_not_hold_up_the_answer(venv: Venv) -> None:
    venv.sitecustomize("import os, time\nif os.fork() == 0:\n    time.sleep(20)\n    os._exit(0)\n")
    start = time.monotonic()
    venv.probe()
    assert time.monotonic() - start < 10


def test_modules_in_the_current_folder_do_not_shadow_the_standard_library(
    venv: Venv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not the real json')")
    monkeypatch.chdir(tmp_path)
    assert venv.probe().python_version


def test_pythonpath_counts_as_it_does_for_a_server(venv: Venv, tmp_path: Path) -> None:
    info = tmp_path / "extra" / "sglang-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n")
    venv.install("sglang", "0.5.23")
    assert venv.probe(PYTHONPATH=str(info.parent)).package("sglang") == "9.9"
    assert venv.probe().package("sglang") == "0.5.23"


def test_broken_metadata_is_passed_over(venv: Venv) -> None:
    (venv.site / "half-1.0.dist-info").mkdir()
    (venv.site / "odd-1.0.dist-info").mkdir()
    (venv.site / "odd-1.0.dist-info" / "METADATA").write_bytes(b"\xff\xfe\x00 nonsense")
    venv.install("sglang", "0.5.23")
    assert dict(venv.probe().packages) == {"sglang": "0.5.23"}


# --- errors ---------------------------------------------------------------------------------------------------------


def test_pythons_that_are_none(venv: Venv, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("text")
    broken = tmp_path / "broken"
    broken.write_text("#!/nowhere/at/all\n")
    broken.chmod(0o755)
    for python, cause in [
        (str(tmp_path / "absent"), "there is no"),
        ("python-that-nobody-has", "there is no python-that-nobody-has"),
        (str(tmp_path / "venv"), "is a directory"),
        (str(plain), "is not executable"),
        (str(broken), "cannot be started"),
        (need_tool("true"), "ended with status 0 instead of answering"),
        (need_tool("false"), "ended with status 1 instead of answering"),
    ]:
        with pytest.raises(StackError, match=cause) as caught:
            probe_stack("new", python, venv.env)
        assert str(caught.value).startswith("stack 'new': ")
        assert caught.value.cure
    with pytest.raises(StackError) as caught:
        probe_stack("new", str(tmp_path / "venv"), venv.env)
    assert str(tmp_path / "venv" / "bin" / "python") in caught.value.cure


def test_a_python_that_dies_says_how_without_secrets(venv: Venv) -> None:
    venv.sitecustomize("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(StackError, match="was killed by signal 9"):
        venv.probe()
    venv.sitecustomize("import sys; sys.stderr.write('cannot reach https://me:hunter2@proxy/\\n'); sys.exit(3)")
    with pytest.raises(StackError, match="ended with status") as caught:
        venv.probe()
    venv.sitecustomize("import os; os.write(2, b'cannot reach https://me:hunter2@proxy/\\n'); os._exit(3)")
    with pytest.raises(StackError, match=r"ended with status 3 .*cannot reach https://<redacted>@proxy/") as caught:
        venv.probe()
    assert "hunter2" not in str(caught.value)


def test_a_python_that_hangs_is_ended_with_all_it_started(venv: Venv, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    venv.sitecustomize(
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    start = time.monotonic()
    with pytest.raises(StackError, match=r"did not answer within 4 s"):
        venv.probe(deadline_s=4)
    assert time.monotonic() - start < 12
    pid = int(note.read_text())
    end = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)


# --- the cache ------------------------------------------------------------------------------------------------------


def test_packages_are_remembered_until_something_is_installed(venv: Venv, asked: list[str]) -> None:
    venv.install("sglang", "0.5.22")
    first = venv.probe(cache=True)
    again = venv.probe(cache=True)
    assert asked == ["all", "volatile"]
    assert again == first
    shutil.rmtree(venv.site / "sglang-0.5.22.dist-info")
    venv.install("sglang", "0.5.23")
    assert venv.probe(cache=True).package("sglang") == "0.5.23"
    assert asked == ["all", "volatile", "all"]
    venv.probe(cache=True)
    assert asked[-1] == "volatile"


def test_torch_rebuilt_in_place_and_an_edited_path_file_are_noticed(
    venv: Venv, asked: list[str], tmp_path: Path
) -> None:
    venv.torch("2.9.1+cu128", "cuda = '12.8'")
    (venv.site / "extra.pth").write_text("")
    assert venv.probe(cache=True).torch_cuda == "12.8"
    (venv.site / "torch" / "version.py").write_text("__version__ = '2.9.1+cu130'\ncuda = '13.0'\n")
    assert venv.probe(cache=True).torch_cuda == "13.0"
    info = tmp_path / "elsewhere" / "vllm-0.11.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.11\n")
    (venv.site / "extra.pth").write_text(str(info.parent) + "\n")
    assert venv.probe(cache=True).package("vllm") == "0.11"
    assert asked == ["all"] * 3


def test_another_environment_or_venv_is_another_entry(venv: Venv, asked: list[str], tmp_path: Path) -> None:
    other = Venv(tmp_path / "other", tmp_path / "home")  # the same real python
    shutil.copy2(tmp_path / "venv" / "pyvenv.cfg", tmp_path / "other")  # nor does its description tell it apart
    venv.install("sglang", "1.0")
    assert os.path.realpath(venv.python) == os.path.realpath(other.python)
    assert venv.probe(cache=True).package("sglang") == "1.0"
    assert other.probe(cache=True).package("sglang") is None
    venv.probe(cache=True, PYTHONPATH=str(tmp_path))
    assert asked == ["all"] * 3


def test_what_surrounds_a_stack_is_never_remembered(venv: Venv, asked: list[str], tmp_path: Path) -> None:
    assert venv.probe(cache=True).facts["jit_caches"]["triton"]["state"] == "cold"
    kernel = tmp_path / "home" / ".triton" / "cache" / "abc" / "kernel.cubin"
    kernel.parent.mkdir(parents=True)
    (kernel.parent / "only.lock").write_text("")
    (kernel.parent / "build.log").write_text("")
    assert venv.probe(cache=True).facts["jit_caches"]["triton"]["state"] == "cold"
    kernel.write_text("")
    warm = venv.probe(cache=True, SGLANG_NEW="1")
    assert asked == ["all", "volatile", "volatile"]
    assert warm.fingerprint()["jit_caches"]["triton"] == "warm"
    assert warm.fingerprint()["environment"] == {"SGLANG_NEW": "1"}
    remembered = (tmp_path / "home" / "cache" / "stacks.json").read_text()
    assert "SGLANG_NEW" not in remembered
    assert "triton" not in remembered


def test_a_cache_that_cannot_be_used_is_no_error(venv: Venv, asked: list[str], tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    assert venv.probe(cache=True, GPUGUARD_CACHE_DIR=str(blocked)).python_version
    garbage = tmp_path / "garbage"
    garbage.mkdir()
    for text in ("{not json", "[]", '{"x": 1}'):
        (garbage / "stacks.json").write_text(text)
        assert venv.probe(cache=True, GPUGUARD_CACHE_DIR=str(garbage)).python_version
    assert asked == ["all"] * 4
    venv.probe(cache=True, GPUGUARD_CACHE_DIR=str(garbage))
    assert asked[-1] == "volatile"


def test_where_the_cache_is() -> None:
    assert stack_module.cache_dir({"GPUGUARD_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert stack_module.cache_dir({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/gpuguard")
    assert stack_module.cache_dir({"HOME": "/c"}) == Path("/c/.cache/gpuguard")


# --- what surrounds it ----------------------------------------------------------------------------------------------


def test_secrets_never_leave_the_stacks_process(venv: Venv) -> None:
    stack = venv.probe(
        NCCL_DEBUG="INFO",
        SGLANG_API_KEY="hunter2",
        VLLM_auth_token="hunter2",
        CUDA_DB_PASSWORD="hunter2",
        SGL_PROXY="https://me:hunter2@proxy:8080/x?a=1&access_token=hunter2&b=2",
        PATH_NOT_OURS="hunter2",
        HF_TOKEN="hunter2",
    )
    assert stack.facts["environment"] == {
        "CUDA_DB_PASSWORD": "<redacted>",
        "NCCL_DEBUG": "INFO",
        "SGLANG_API_KEY": "<redacted>",
        "SGL_PROXY": "https://<redacted>@proxy:8080/x?a=1&access_token=<redacted>&b=2",
        "VLLM_auth_token": "<redacted>",
    }
    assert "hunter2" not in json.dumps(stack.to_dict())


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("NCCL_SOCKET_IFNAME", "eth0", "eth0"),
        ("X_SECRET", "v", "<redacted>"),
        ("x_credentials", "v", "<redacted>"),
        ("URL", "http://host/a@b", "http://host/a@b"),
        ("URL", "redis://:pw@host", "redis://<redacted>@host"),
    ],
)
def test_redaction(name: str, value: str, kept: str) -> None:
    assert redact(name, value) == kept


def fake_nvcc(folder: Path, release: str) -> Path:
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release[:4]}, V{release}'\n")
    nvcc.chmod(0o755)
    return nvcc


def test_the_nvcc_that_jit_builds_would_find(venv: Venv, tmp_path: Path) -> None:
    home = fake_nvcc(tmp_path / "cuda" / "bin", "12.8.93")
    path = fake_nvcc(tmp_path / "path", "13.0.88")
    search = f"{path.parent}{os.pathsep}{venv.env['PATH']}"
    by_path = venv.probe(PATH=search)
    assert by_path.facts["nvcc"] == {"path": str(path), "release": "13.0.88", "missing": None}
    by_home = venv.probe(PATH=search, CUDA_HOME=str(tmp_path / "cuda"))
    assert by_home.facts["nvcc"] == {"path": str(home), "release": "12.8.93", "missing": None}
    assert venv.probe(PATH=search, CUDA_PATH=str(tmp_path / "cuda")).fingerprint()["nvcc"] == "12.8.93"
    wrong = venv.probe(PATH=search, CUDA_HOME=str(tmp_path)).facts["nvcc"]
    assert wrong == {"path": None, "release": None, "missing": str(tmp_path / "bin" / "nvcc")}


@pytest.mark.parametrize(
    ("cache", "variable", "inside"),
    [
        ("flashinfer", "FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer"),
        ("triton", "TRITON_CACHE_DIR", "."),
        ("torch_extensions", "TORCH_EXTENSIONS_DIR", "."),
        ("inductor", "TORCHINDUCTOR_CACHE_DIR", "."),
        ("deep_gemm", "DG_JIT_CACHE_DIR", "."),
        ("deep_gemm", "SGLANG_DG_CACHE_DIR", "."),
        ("tvm_ffi", "TVM_FFI_CACHE_DIR", "."),
    ],
)
def test_jit_caches_are_looked_for_where_the_variables_say(
    venv: Venv, tmp_path: Path, cache: str, variable: str, inside: str
) -> None:
    folder = tmp_path / "jit" / inside
    folder.mkdir(parents=True)
    venv.env |= {variable: str(tmp_path / "jit"), "TMPDIR": str(tmp_path)}
    assert venv.probe().facts["jit_caches"][cache]["state"] == "cold"
    (folder / "kernel.so").write_text("")
    found = venv.probe().facts["jit_caches"]
    assert {name for name, one in found.items() if one["state"] == "warm"} == {cache}
    assert Path(found[cache]["path"]) == folder


def test_the_libcuda_that_a_server_would_load(venv: Venv, tmp_path: Path) -> None:
    need(sys.platform == "linux", "libcuda.so.1 is Linux's")
    gcc = need_tool("gcc")
    source = tmp_path / "libcuda.c"
    source.write_text("int cuInit(unsigned flags) { return flags; }\n")
    library = tmp_path / "libcuda.so.1"
    subprocess.run([gcc, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert venv.probe(LD_LIBRARY_PATH=f"{tmp_path}:{venv.env.get('LD_LIBRARY_PATH', '')}").facts["libcuda"] == str(
        library
    )

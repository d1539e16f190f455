"""suites/hopper: claims with sources about SM90, and the rehearsal of each as it is stated here."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from pytest_gpuguard.claims.claim import About, Claim, Serves, build_claim
from pytest_gpuguard.claims.expect import Expectation
from pytest_gpuguard.claims.markers import MARKERS
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.facts.models import read_models
from pytest_gpuguard.sim.gates import Scene, fired
from pytest_gpuguard.sim.release import load_release

from .conftest import own_ports
from .log_evidence import STAMP, on_off, read

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "suites" / "hopper"
BLACKWELL = ROOT / "suites" / "blackwell"


@dataclass(frozen=True)
class Written:
    """One claim as it is written."""

    claim: Claim
    doc: str

    @property
    def id(self) -> str:
        return str(self.claim.about.id)


def written() -> Iterator[Written]:
    for file in sorted(SUITE.glob("test_*.py")):
        spec = spec_from_file_location(f"hopper_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, test in vars(module).items():
            if name.startswith("test_"):
                parsed = [MARKERS[mark.name].parse(mark) for mark in test.pytestmark if mark.name in MARKERS]
                needs = [one for one in parsed if isinstance(one, Needs)]
                serves = next((one for one in parsed if isinstance(one, Serves)), None)
                (about,) = (one for one in parsed if isinstance(one, About))
                claim = build_claim(needs, serves, [one for one in parsed if isinstance(one, Expectation)], about)
                assert claim is not None
                yield Written(claim, test.__doc__ or "")


CLAIMS = tuple(written())


@pytest.mark.parametrize("one", CLAIMS, ids=lambda one: one.id)
def test_a_claim_says_what_it_is_who_says_so_and_why(one: Written) -> None:
    about, needs, serves = one.claim.about, one.claim.needs, one.claim.serves
    assert about.title
    assert len(about.title) <= 70
    assert about.source
    assert about.minutes
    assert len(one.doc.split()) >= 3
    assert (needs.sms, one.claim.gpus >= 1) == (("90",), True)
    if serves is not None:
        flags = set(serves.flags)
        assert {"--mem-fraction-static", "--context-length", "--chunked-prefill-size", "--cuda-graph-max-bs"} <= flags
        assert "dummy" in flags, "the gates look at the card, and need no weights"
        assert serves.portable, "spellings drift"


def test_ids_are_used_once_and_models_are_those_of_blackwell() -> None:
    ids = [one.id for one in CLAIMS]
    assert sorted(set(ids)) == sorted(ids)
    assert {f"H{number}" for number in range(1, 13)} <= {one.partition(".")[0] for one in ids}
    used = {one.claim.serves.model for one in CLAIMS if one.claim.serves is not None}
    assert used <= set(read_models(BLACKWELL / "models.toml"))
    assert used <= {folder.name for folder in (BLACKWELL / "architectures").iterdir()}
    assert not list(SUITE.rglob("models.toml")), "gpuguard fetch takes the one file that there is in suites"


@pytest.mark.parametrize(
    ("name", "release", "expected"),
    [
        ("H2", "0.5.18", ["unsupported(trtllm_mha)"]),
        ("H2", "0.5.19", ["fits"]),
        ("H7", "0.5.13", ["fits"]),
        ("H7", "0.5.14", ["uses(flashinfer_allreduce_fusion)"]),
        ("H8", "0.5.13", ["uses(custom_allreduce)"]),
        ("H8", "0.5.14", ["fits"]),
        ("H8", "0.5.15", ["fits"]),
        ("H8", "0.5.16", ["uses(custom_allreduce)"]),
    ],
)
def test_what_is_expected_of_a_release_is_what_it_can_show(name: str, release: str, expected: list[str]) -> None:
    (one,) = (one for one in CLAIMS if one.id == name)
    found = one.claim.stated(lambda package: release if package == "sglang" else None)
    assert [each.label for each in found] == expected


@pytest.mark.parametrize("major", [9, 12])
def test_trtllm_mha_is_refused_up_to_0_5_18_and_admitted_since(major: int) -> None:
    def refused(release: str) -> bool:
        given = {"--attention-backend": "trtllm_mha"}
        scene = Scene(given, {}, "Qwen3ForCausalLM", major, True, 1, frozenset({"sglang"}))
        return "trtllm_mha.rejected" in {each.rule.id for each in fired(load_release(release), scene)}

    assert (refused("0.5.18"), refused("0.5.19")) == (True, False)


def test_0_5_14_shows_the_fusion_on_sm90_by_its_log() -> None:
    line = "FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank=0, world_size=2"
    shown = read(STAMP + line, version="0.5.14", majors=(9,))
    assert on_off(shown) == {("flashinfer_allreduce_fusion", True)}


def rehearsed(rig: str, *args: str) -> dict[str, tuple[str, str | None]]:
    """id → verdict and reason of every claim of the suite on a simulated rig."""
    junit = Path(args[0])
    command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-p", "no:cacheprovider", f"--junitxml={junit}"]
    options = [f"--gpuguard-rig=sim:{rig}", "--gpuguard-ledger=none", f"--gpuguard-ports={own_ports()}"]
    done = subprocess.run([*command, *options, *args[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    names = {name: one.id for name, one in zip(_names(), CLAIMS, strict=True)}
    found = {}
    for case in ET.parse(junit).iter("testcase"):
        told = {one.get("name"): one.get("value") for one in case.iter("property")}
        found[names[case.get("name", "")]] = (str(told["gpuguard_verdict"]), told.get("gpuguard_reason"))
    return found


def _names() -> list[str]:
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(SUITE.glob("test_*.py")))
    return re.findall(r"^def (test_\w+)", text, re.MULTILINE)


HOLDS, OPEN = ("HOLDS", None), ("INCONCLUSIVE", None)
SIMULATED, NO_TORCH = ("NOT_EVALUATED", "simulated"), ("NOT_EVALUATED", "package")
#: What comes of each on eight H200. A rehearsal knows no line that shows DeepGEMM or custom allreduce.
REHEARSAL = {
    **{"H1": HOLDS, "H1.latent": HOLDS, "H2": SIMULATED, "H3": HOLDS, "H4": HOLDS, "H4.mxfp8": HOLDS},
    **{"H5": HOLDS, "H6": OPEN, "H7": HOLDS, "H8": OPEN, "H9": SIMULATED},
    **{"H10.load": NO_TORCH, "H10.capture": NO_TORCH, "H10.run": NO_TORCH, "H11": NO_TORCH, "H12": NO_TORCH},
}


def _plain(found: dict[str, tuple[str, str | None]]) -> dict[str, tuple[str, str | None]]:
    return {name: (verdict.removeprefix("REHEARSED ").split(" (")[0], why) for name, (verdict, why) in found.items()}


def test_the_rehearsal_on_eight_h200_is_as_stated(tmp_path: Path) -> None:
    assert _plain(rehearsed("h200:8", str(tmp_path / "junit.xml"))) == REHEARSAL


def test_one_h200_and_older_h100_evaluate_what_they_can(tmp_path: Path) -> None:
    one = _plain(rehearsed("h200:1", str(tmp_path / "one.xml")))
    assert {name for name, (_, why) in one.items() if why == "gpus"} == {"H1.latent", "H7", "H8", "H9"}
    h100 = _plain(rehearsed("h100:8", str(tmp_path / "h100.xml"), "--gpuguard-stack=old=sim:sglang==0.5.9"))
    assert h100["H1.latent"] == ("NOT_EVALUATED", "vram")
    assert (h100["H1"], h100["H2"], h100["H4"]) == (HOLDS, HOLDS, ("NOT_EVALUATED", "package"))


def test_other_cards_are_not_asked(tmp_path: Path) -> None:
    found = _plain(rehearsed("rtx-pro-6000-server:8", str(tmp_path / "junit.xml")))
    assert set(found.values()) == {("NOT_EVALUATED", "sm")}


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("load_model", "oom.weights"), ("capture_graphs", "oom.graph_capture"), ("execute_model", "oom.runtime")],
)
def test_the_scripts_functions_have_the_names_by_which_the_phase_is_told(name: str, outcome: str) -> None:
    text = (SUITE / "torch_memory.py").read_text(encoding="utf-8")
    assert f"def {name}(" in text
    log = (
        "Traceback (most recent call last):\n"
        f'  File "/suites/hopper/torch_memory.py", line 40, in {name}\n    take(torch, 8 * GIB)\n'
        '  File "/suites/hopper/torch_memory.py", line 22, in take\n    return torch.empty(nbytes)\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity\n"
    )
    assert classify_text(log, engine="command").outcome == outcome

"""suites/blackwell: every line of the notes is a claim with its standing, and the rehearsal is as stated here."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from pytest_gpuguard.claims.claim import About, Claim, Serves, build_claim
from pytest_gpuguard.claims.expect import Compare, Expectation, ExpectToks, Fails, Fits, MaxMem, Ooms, Unsupported
from pytest_gpuguard.claims.markers import MARKERS
from pytest_gpuguard.claims.needs import Needs
from pytest_gpuguard.claims.window import satisfies
from pytest_gpuguard.facts.catalogue import Card, cards
from pytest_gpuguard.facts.models import ModelMissing, find_model, read_models
from pytest_gpuguard.predict import Box, Prediction, predict

from .conftest import own_ports

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "suites" / "blackwell"
ARCHITECTURES = SUITE / "architectures"
#: Lines that stand as they are; all others were only told, or hold more than was measured.
STANDING = {"F1", "F5", "F7", "F8", "F9", "F13", "F14", "F17"}
#: Claims of a line that are not the line itself: what its standing is, and why, says each one's docstring.
ASIDE = {"F1.cause": True, "F10.gate": False}


@dataclass(frozen=True)
class Written:
    """One claim as it is written."""

    name: str
    claim: Claim
    doc: str

    @property
    def id(self) -> str:
        return str(self.claim.about.id)

    @property
    def serves(self) -> Serves:
        assert self.claim.serves is not None
        return self.claim.serves


def load(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"blackwell_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written() -> Iterator[Written]:
    for file in sorted(SUITE.glob("test_*.py")):
        for name, test in vars(load(file)).items():
            if name.startswith("test_"):
                parsed = [MARKERS[mark.name].parse(mark) for mark in test.pytestmark if mark.name in MARKERS]
                needs = [one for one in parsed if isinstance(one, Needs)]
                (serves,) = (one for one in parsed if isinstance(one, Serves))
                (about,) = (one for one in parsed if isinstance(one, About))
                expectations = [one for one in reversed(parsed) if isinstance(one, Expectation)]
                claim = build_claim(needs, serves, expectations, about)
                assert claim is not None
                yield Written(f"{file.name}::{name}", claim, test.__doc__ or "")


CLAIMS = tuple(written())
each_claim = pytest.mark.parametrize("written", CLAIMS, ids=lambda one: one.id)


def box(count: int = 8) -> Box:
    card = cards()["rtx-pro-6000-server"]
    assert card.total_mib is not None
    return Box(card.name, count, card.total_mib, card.reserved_mib, card.sm, card.nvlink)


def predicted(one: Written, version: str = "0.5.9", on: Box | None = None) -> Prediction:
    serves = one.serves
    return predict(
        ARCHITECTURES / serves.model,
        on or box(),
        engine=serves.engine,
        version=version,
        flags=serves.flags,
        env=serves.env,
        measured=serves.measured,
        layout=serves.layout,
    )


def named(name: str) -> Written:
    (found,) = [one for one in CLAIMS if one.id == name]
    return found


# ------------------------------------------------------------------------------------------------- as written


def test_every_line_of_the_notes_is_a_claim_and_no_id_is_used_twice() -> None:
    ids = [one.id for one in CLAIMS]
    assert {f"F{number}" for number in range(1, 18)} <= set(ids)
    assert sorted(ids) == sorted(set(ids))


@each_claim
def test_hearsay_is_what_the_notes_call_so(written: Written) -> None:
    line = re.match(r"(F\d+)(\..+)?$", written.id)
    if line is None:
        assert not written.claim.about.hearsay, "a claim with a public source of its own stands"
    else:
        assert written.claim.about.hearsay == ASIDE.get(written.id, line[1] not in STANDING)


@each_claim
def test_a_claim_says_what_it_is_who_says_so_and_why(written: Written) -> None:
    about = written.claim.about
    assert about.title
    assert len(about.title) <= 70
    assert about.source
    assert about.minutes
    assert len(written.doc.split()) >= 8
    assert written.claim.needs.sms == ("120",)
    assert written.claim.gpus >= 1


@each_claim
def test_what_takes_memory_is_pinned_and_a_fraction_is_left_out_only_where_it_is_the_claim(written: Written) -> None:
    flags = written.serves.flags
    if written.serves.engine != "sglang":
        return
    default_fraction = {"F7", "F7.number", "F8.without-ep"}
    assert ("--mem-fraction-static" in flags) == (written.id not in default_fraction)
    assert {"--context-length", "--chunked-prefill-size", "--max-running-requests"} <= set(flags)
    assert "--cuda-graph-max-bs" in flags or "--disable-cuda-graph" in flags
    assert written.serves.portable, "spellings drift"


@each_claim
def test_random_weights_answer_no_question_about_speed_or_answers(written: Written) -> None:
    dummy = "dummy" in written.serves.flags
    speed = any(isinstance(one, (ExpectToks, Compare)) for one in written.claim.expectations)
    assert not (dummy and speed)
    if any(isinstance(one, (MaxMem, Ooms)) for one in written.claim.expectations):
        assert dummy, "memory alone needs no weights"


@each_claim
def test_no_claim_knows_a_path_or_a_host(written: Written) -> None:
    words = [written.serves.model, *written.serves.flags, *written.serves.wrapper, *written.serves.env.values()]
    assert [word for word in words if word.startswith(("/", "~", ".")) or ":" in word] == []


def test_the_layout_that_cannot_be_told_is_said_to_be_another() -> None:
    assert (named("F6").serves.layout, named("F6.fits").serves.layout) == (named("F6").serves.layout,) * 2
    assert str(named("F6").serves.layout) == "TP8 EP4"
    assert "TP2 EP4" in named("F6.fits").doc
    assert str(named("F5").serves.resolved_layout) == "TP4 EP2"
    assert named("F5").claim.gpus == 4


def test_the_services_environment_is_exactly_that_of_its_unit() -> None:
    assert dict(named("F17").serves.env) == {"NCCL_IB_DISABLE": "1", "NCCL_P2P_LEVEL": "5", "NCCL_ALGO": "Ring"}


def test_measured_inputs_are_those_of_the_notes() -> None:
    with_ep = {"avail_before_gib": 94.0, "weights_gib": 94.0 - 16.3}
    without = {"avail_before_gib": 94.0, "weights_gib": 94.0 - 21.7}
    for one in CLAIMS:
        expected = with_ep if "--moe-a2a-backend" in one.serves.flags else {}
        expected = without if one.id == "F8.without-ep" else expected
        assert dict(one.serves.measured) == pytest.approx(expected)


# ------------------------------------------------------------------------------------------------- by the arithmetic


def test_f7_is_the_rules_own_number_and_leaves_nothing() -> None:
    found = predicted(named("F7"))
    assert found.mem_fraction_static == 0.778734296875
    assert found.verdict == "oom.kv_pool"
    assert found.rest_gib == pytest.approx(94.0 * 0.778734296875 - 77.7, abs=1e-3)
    assert predicted(named("F7"), "0.5.7").verdict == "rejected", "flashinfer is no all-to-all backend of 0.5.7"
    assert predicted(named("F8.without-ep"), "0.5.7").mem_fraction_static == 0.778734296875, "the rule is"


def test_f8_has_a_window() -> None:
    assert [predicted(named(name)).verdict for name in ("F8.below", "F8.low", "F8", "F8.without-ep")] == [
        "oom.kv_pool",
        "fits",
        "fits",
        "fits",
    ]
    assert predicted(named("F8")).f_min == pytest.approx(77.7 / 94.0, abs=1e-3)
    assert predicted(named("F8.without-ep")).rest_gib == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("release", ["0.5.9", "0.5.12", "0.5.15", "0.5.16", "0.5.18", "0.5.20", "0.5.23"])
@pytest.mark.parametrize("one", [one for one in CLAIMS if one.serves.measured], ids=lambda one: one.id)
def test_a_claim_about_the_pool_states_what_the_rules_of_every_release_say(one: Written, release: str) -> None:
    found = predicted(one, release)
    if not all(satisfies(release, window) for _, name, window in one.claim.needs.versions if name == "sglang"):
        assert found.verdict == "rejected", "what a release refuses is what the claim leaves out"
        return
    stated = [each for each in one.claim.expectations if each.when is None or each.when.matches(lambda _: release)]
    assert stated
    for each in stated:
        if isinstance(each, Fits):
            assert found.verdict == "fits"
            assert each.kv_tokens is None or each.kv_tokens.holds(found.kv_tokens or 0)
        elif isinstance(each, Unsupported):
            assert found.verdict == "rejected"
            assert each.match is not None
            assert re.search(each.match, found.rejections[0].text)
        else:
            assert found.verdict == "oom.kv_pool"
        if isinstance(each, Fails):
            assert each.match is not None
            assert re.search(each.match, f"mem_fraction_static={found.mem_fraction_static}")


def test_f5_is_about_four_gpus() -> None:
    found = predicted(named("F5"))
    assert (found.verdict, found.gpus_used) == ("oom.weights", 4)


def test_ep_changes_no_weight_bytes() -> None:
    weights = {predicted(named(name)).weights_gib for name in ("tp8-fits", "tp8-ep8-fits", "F6.fits")}
    assert len(weights) == 1


@pytest.mark.parametrize("one", [one for one in CLAIMS if one.id in ("F4.fits", "F3.fits", "F6.fits", "tp8-fits")])
def test_a_layout_that_is_claimed_to_fit_has_room_for_the_tokens_that_are_claimed(one: Written) -> None:
    found = predicted(one)
    assert found.verdict == "fits"
    (fits,) = [each for each in one.claim.expectations if isinstance(each, Fits)]
    assert fits.kv_tokens is not None
    assert found.kv_tokens is not None
    assert fits.kv_tokens.holds(found.kv_tokens)


# ------------------------------------------------------------------------------------------- architectures and models


def test_the_architectures_are_small_and_hold_numbers_and_kinds_only() -> None:
    files = sorted(ARCHITECTURES.rglob("*"))
    assert sum(file.stat().st_size for file in files if file.is_file()) < 30_000
    assert {file.name for file in files if file.is_file()} == {"config.json"}
    for file in ARCHITECTURES.glob("*/config.json"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(
            r"auto_map|_name_or_path|token_id|transformers_version|producer|https?:|<\||modeling_", text
        )
        assert all(len(word) <= 60 for word in strings(json.loads(text)))


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for one in value.values():
            yield from strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)
    elif isinstance(value, str):
        yield value


def test_every_model_has_an_architecture_and_a_place_on_a_real_rig() -> None:
    used = {one.serves.model for one in CLAIMS}
    assert used == {folder.name for folder in ARCHITECTURES.iterdir()}
    places = read_models(SUITE / "models.toml")
    assert used <= set(places)
    drafts = {
        one.serves.flags[one.serves.flags.index("--speculative-draft-model-path") + 1]
        for one in CLAIMS
        if "--speculative-draft-model-path" in one.serves.flags
    }
    assert drafts <= set(places.values()), "gpuguard fetch must know the drafts too"


#: The first release with each of these architectures (classes in sglang/srt/models); the others are older than F9.
BROUGHT_BY = {"kimi-k2.5": "0.5.9", "kimi-k2.6": "0.5.9", "glm-5.2-nvfp4": "0.5.9", "qwen3.6-27b": "0.5.9"}


@each_claim
def test_a_release_without_the_model_is_not_asked_about_it(written: Written) -> None:
    needed = [SpecifierSet(wanted) for kind, name, wanted in written.claim.needs.versions if name == "sglang"]
    first = BROUGHT_BY.get(written.serves.model)
    if first is not None:
        assert needed, "a claim about what a release does not have is red there, or rehearses nonsense"
        assert not any(one.contains(older) for one in needed for older in ("0.5.7", "0.5.8"))


@pytest.mark.parametrize(
    ("one", "card"),
    [
        pytest.param(one, card, id=f"{one.id}-{card.slug}")
        for one in CLAIMS
        for card in cards().values()
        if one.serves.engine == "sglang"
        and any(isinstance(each, Fits) for each in one.claim.expectations)
        and card.sm == "120"
        and (card.total_mib or 0) * (1 << 20) >= one.claim.needs.vram_bytes
    ],
)
def test_what_is_claimed_to_fit_does_on_every_card_that_its_needs_take(one: Written, card: Card) -> None:
    assert card.total_mib is not None
    rig = Box(card.name, one.claim.gpus, card.total_mib, card.reserved_mib, card.sm, nvlink=False)
    # With what was measured on one card, the arithmetic is about that card.
    if not one.serves.measured:
        assert predicted(one, "0.5.12", rig).verdict == "fits"


def test_k26_is_k25_by_architecture() -> None:
    k25, k26 = (json.loads((ARCHITECTURES / name / "config.json").read_text()) for name in ("kimi-k2.5", "kimi-k2.6"))
    assert k25 == k26
    assert k25["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4


def settings(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"simulated": False, "stacks": (), "models": ()} | changes)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The suite's conftest, with the settings of a run as ``hooks.settings``."""
    module = load(SUITE / "conftest.py")
    state = SimpleNamespace(module=module, settings=settings())
    monkeypatch.setattr(module, "_settings", lambda item: state.settings)
    return state


def item(name: str) -> Any:
    return SimpleNamespace(name=name)


def test_a_rehearsal_runs_the_releases_of_the_notes_unless_a_stack_is_given(hooks: Any) -> None:
    ask = hooks.module.pytest_gpuguard_stack
    assert ask(item("test_tp8_fits")) is None, "a real rig runs the command line's stack"
    hooks.settings = settings(simulated=True)
    assert ask(item("test_tp8_fits")).python == "sim:sglang==0.5.9"
    assert ask(item(named("F9").name.rpartition("::")[2])).python == "sim:sglang==0.5.7"
    hooks.settings = settings(simulated=True, stacks=(("new", "sim:sglang==0.5.20"),))
    assert ask(item("test_tp8_fits")) is None


def test_a_rehearsal_reads_architectures_and_a_real_rig_the_models_toml_or_the_users_own(hooks: Any) -> None:
    ask = hooks.module.pytest_gpuguard_model
    assert ask(item("x"), "qwen3-8b") == "Qwen/Qwen3-8B"
    hooks.settings = settings(models=(("qwen3-8b", "/models/mine"),))
    assert ask(item("x"), "qwen3-8b") is None, "gpuguard_models is asked next, and has it"
    hooks.settings = settings(simulated=True, models=(("qwen3-8b", "/models/mine"),))
    assert ask(item("x"), "qwen3-8b") == str(ARCHITECTURES / "qwen3-8b")
    assert ask(item("x"), "none") is None


def test_on_a_real_rig_a_model_that_is_not_there_is_told_with_its_path_and_its_cure(hooks: Any, tmp_path: Path) -> None:
    name = hooks.module.pytest_gpuguard_model(item("x"), "kimi-k2.5")
    with pytest.raises(ModelMissing, match=r"looked for .*models--moonshotai--Kimi-K2\.5.*gpuguard fetch moonshotai/"):
        find_model("kimi-k2.5", {"kimi-k2.5": name}, {"HF_HUB_CACHE": str(tmp_path)})


def test_the_suite_imports_the_public_names_only() -> None:
    for file in SUITE.glob("test_*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert modules <= {"__future__", "typing", "pytest_gpuguard"}, file.name


# ---------------------------------------------------------------------------------------------------- the rehearsal

#: id → verdict, and the reason of what is not evaluated. One line for each claim; nothing else may come out.
REHEARSAL = {
    # the notes
    "F1": ("NOT_EVALUATED", "simulated"),
    "F1.cause": ("NOT_EVALUATED", "simulated"),
    "F2": ("NOT_EVALUATED", "simulated"),
    "F3": ("NOT_EVALUATED", "simulated"),
    "F3.fits": ("HOLDS", None),
    "F4": ("NOT_EVALUATED", "simulated"),
    "F4.fits": ("HOLDS", None),
    "F5": ("HOLDS", None),
    "F6": ("NOT_EVALUATED", "simulated"),
    "F6.fits": ("HOLDS", None),
    "F7": ("HOLDS", None),
    "F7.number": ("HOLDS", None),
    "F8": ("HOLDS", None),
    "F8.below": ("HOLDS", None),
    "F8.low": ("HOLDS", None),
    "F8.without-ep": ("HOLDS", None),
    "F9": ("HOLDS", None),
    "F10": ("NOT_EVALUATED", "simulated"),
    "F10.gate": ("HOLDS", None),
    "F11": ("NOT_EVALUATED", "simulated"),
    "F11.eager": ("NOT_EVALUATED", "simulated"),
    "F12": ("NOT_EVALUATED", "simulated"),
    "F13": ("NOT_EVALUATED", "simulated"),
    "F14": ("HOLDS", None),
    "F15": ("NOT_EVALUATED", "simulated"),
    "F16": ("NOT_EVALUATED", "cuda"),
    "F16.symm-mem": ("NOT_EVALUATED", "cuda"),
    "F16.eagle3": ("NOT_EVALUATED", "cuda"),
    "F17": ("HOLDS", None),
    # layouts, and what upgrades broke
    "tp8-fits": ("HOLDS", None),
    "tp8-ep8-fits": ("HOLDS", None),
    "sglang-7249": ("HOLDS", None),
    "sglang-15650": ("HOLDS", None),
    "sglang-24633": ("HOLDS", None),
    "sglang-14311": ("HOLDS", None),
    "sglang-37105.mla": ("HOLDS", None),
    "sglang-37105.asked": ("INCONCLUSIVE", None),
    "sglang-37105.mha": ("HOLDS", None),
    "sglang-8879": ("HOLDS", None),
    "sglang-29562": ("HOLDS", None),
    "sglang-29562.cure": ("HOLDS", None),
    "sglang-34629": ("NOT_EVALUATED", "simulated"),
    "sglang-34629.accuracy": ("NOT_EVALUATED", "simulated"),
    "rtx6kpro.mtp": ("NOT_EVALUATED", "simulated"),
    "rtx6kpro.long": ("NOT_EVALUATED", "simulated"),
    "rtx6kpro.kld": ("NOT_EVALUATED", "skip"),
    "sglang-35080": ("NOT_EVALUATED", "package"),
    "flashinfer-2577": ("NOT_EVALUATED", "package"),
    "vllm-32109": ("NOT_EVALUATED", "engine"),
}


@dataclass(frozen=True)
class Rehearsal:
    """One rehearsal of the whole suite: verdict, reason and fact by the claim's id."""

    code: int
    out: str
    found: dict[str, tuple[str, str | None]]
    facts: dict[str, str]


def rehearse(folder: Path, *arguments: str) -> Rehearsal:
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "suites/blackwell", "-p", "no:cacheprovider", "-q"]
    command += ["--gpuguard-rig", "sim:rtx-pro-6000-server:8", f"--gpuguard-log-dir={folder}/logs"]
    command += [f"--gpuguard-ports={own_ports()}", f"--junitxml={report}", *arguments]
    # Said here too: a fixture of a whole module is set up before the one that gives each test folders of its own.
    env = {**os.environ, "GPUGUARD_LOCK_DIR": str(folder / "locks"), "GPUGUARD_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180)
    ids = {one.name.partition("::")[2]: one.id for one in CLAIMS}
    found: dict[str, tuple[str, str | None]] = {}
    facts = {}
    for case in ElementTree.parse(report).iter("testcase"):
        told = {one.get("name"): one.get("value") for one in case.iter("property")}
        name = ids[str(case.get("name"))]
        found[name] = (str(told["gpuguard_verdict"]).removeprefix("REHEARSED "), told.get("gpuguard_reason"))
        facts[name] = str(told.get("gpuguard_fact"))
    return Rehearsal(done.returncode, done.stdout, found, facts)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    return rehearse(tmp_path_factory.mktemp("rehearsal"))


def test_the_rehearsal_says_of_each_line_what_the_notes_say(rehearsal: Rehearsal) -> None:
    others = {name: (told, rehearsal.facts[name]) for name, told in rehearsal.found.items() if REHEARSAL[name] != told}
    assert others == {}, rehearsal.out
    assert set(rehearsal.found) == set(REHEARSAL)
    assert rehearsal.code == 0, rehearsal.out


def test_the_rehearsal_shows_the_number_of_the_notes(rehearsal: Rehearsal) -> None:
    assert "mem_fraction_static=0.778734296875" in rehearsal.facts["F7"]
    assert "94.97 GiB" in rehearsal.facts["F5"]
    assert "KeyError: 12" in rehearsal.facts["F14"]
    assert "No supported CUDA architectures" in rehearsal.facts["F9"]


def test_the_readme_shows_the_table_of_this_rehearsal() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^REHEARSED (hearsay: )?([A-Z_]+) +(test_\w+) \[([^\]]+)\] +(.*)$", text, re.MULTILINE)
    hearsay = {one.id for one in CLAIMS if one.claim.about.hearsay}
    assert {(own, verdict) for _, verdict, _, own, _ in rows} == {(own, told[0]) for own, told in REHEARSAL.items()}
    assert {own for told, _, _, own, _ in rows if told} == hearsay
    assert {(own, name) for _, _, name, own, _ in rows} == {(one.id, one.name.rpartition("::")[2]) for one in CLAIMS}


def test_everything_that_was_rehearsed_says_so(rehearsal: Rehearsal) -> None:
    assert "REHEARSED" in rehearsal.out.splitlines()[-2] + rehearsal.out.splitlines()[-1]


def test_without_gpus_and_without_a_rehearsal_nothing_is_evaluated_and_nothing_is_red(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--gpuguard-rig", "auto", "--gpuguard-stack", f"here={sys.executable}")
    verdicts = {verdict for verdict, _ in done.found.values()}
    if verdicts == {"NOT_EVALUATED"}:
        assert done.code == 0
    assert len(done.found) == len(CLAIMS)


def test_the_whole_folder_is_blackwell_and_besides_it_only_checks_before_a_flight_are() -> None:
    command = [sys.executable, "-m", "pytest", "suites/", "-m", "blackwell", "--co", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    found = re.findall(r"^suites/(\w+)/(test_\w+\.py::test_\w+)$", done.stdout, re.MULTILINE)
    assert {folder for folder, _ in found} <= {"blackwell", "preflight"}
    assert {name for folder, name in found if folder == "blackwell"} == {one.name for one in CLAIMS}

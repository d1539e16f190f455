"""Suites on a simulated rig, end to end: what is judged and what not, the label, and what the stand-in is told."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from .sim_models import DENSE, LATENT, write_model

Run = Any
RIG = "--gpuguard-rig=sim:rtx-pro-6000-server:8"
OLD = "--gpuguard-stack=old=sim:sglang==0.5.7"


@pytest.fixture
def rehearse(claims: Run, tmp_path: Path) -> Run:
    """Runs a file of claims on a simulated rig; DENSE and LATENT are models of it."""
    dense = write_model(tmp_path / "dense", DENSE)
    # Some releases turn allreduce fusion on by themselves for DeepSeek's own architecture: another test's subject.
    latent = write_model(tmp_path / "latent", LATENT, architectures=["ModelForCausalLM"])
    head = f"DENSE = {str(dense)!r}\nLATENT = {str(latent)!r}\n"

    def run(source: str, *args: str, rig: str = RIG, **more: Any) -> pytest.RunResult:
        import textwrap

        result: pytest.RunResult = claims(head + textwrap.dedent(source), rig, *args, stack="", **more)
        return result

    return run


def outcomes(xml: Path) -> dict[str, dict[str, str]]:
    """Test name → its gpuguard properties."""
    found = {}
    for case in ET.parse(xml).getroot().iter("testcase"):
        found[case.attrib["name"]] = {
            one.attrib["name"].removeprefix("gpuguard_"): one.attrib["value"]
            for one in case.iter("property")
            if one.attrib["name"].startswith("gpuguard_")
        }
    return found


SUITE = """
    @needs_sm120
    @needs_gpus(8)
    @serves("sglang", LATENT, "--mem-fraction-static 0.93 --context-length 32768", layout="TP8 EP8")
    @{fits}
    def test_fits(): ...

    @needs_sm120
    @serves("sglang", LATENT, "--tp-size 4 --ep-size 2 --mem-fraction-static 0.9")
    @{weights}
    def test_weights(): ...

    @serves("sglang", LATENT, "--tp-size 8 --mem-fraction-static 0.7")
    @{pool}
    def test_pool(): ...

    @serves("sglang", DENSE, "--enable-flashinfer-allreduce-fusion", layout="TP2")
    @{crash}
    def test_crash(): ...

    @serves("sglang", DENSE, "--enable-ep-moe")
    @{removed}
    def test_removed(): ...
"""
TRUE = {
    "fits": 'fits(kv_tokens=">=32768")',
    "weights": 'ooms("weights")',
    "pool": 'ooms("kv_pool")',
    "crash": 'unsupported("flashinfer allreduce fusion", how="crashes", match="No supported CUDA")',
    "removed": 'fails("args.removed")',
}
ROUND = {
    "fits": 'ooms("weights")',
    "weights": "fits",
    "pool": 'fits(kv_tokens=">=1")',
    "crash": "fits",
    "removed": "fits",
}


def test_turning_every_expectation_round_changes_no_observed_outcome(rehearse: Run, pytester: pytest.Pytester) -> None:
    """The stand-in cannot know what is claimed: only the verdicts turn round."""
    straight = rehearse(SUITE.format(**TRUE), OLD, "--junitxml=a.xml", "--gpuguard-log-dir=a")
    assert straight.ret == 0, straight.stdout.str()
    turned = rehearse(SUITE.format(**ROUND), OLD, "--junitxml=b.xml", "--gpuguard-log-dir=b")
    assert turned.ret == 1
    first, second = outcomes(pytester.path / "a.xml"), outcomes(pytester.path / "b.xml")
    assert {name: one["outcome"] for name, one in first.items()} == {
        "test_fits": "ready",
        "test_weights": "oom.weights",
        "test_pool": "oom.kv_pool",
        "test_crash": "unsupported.arch",
        "test_removed": "args.removed",
    }
    for name, one in second.items():
        assert one["outcome"] == first[name]["outcome"], name
    assert {one["verdict"] for one in first.values()} == {"REHEARSED HOLDS"}
    assert {name: one["verdict"] for name, one in second.items()} == {
        name: "REHEARSED CONTRADICTED (better)" if name == "test_fits" else "REHEARSED CONTRADICTED (worse)"
        for name in second
    }
    assert logs(pytester.path / "a") == logs(pytester.path / "b")


def logs(folder: Path) -> dict[str, str]:
    """The stand-in's logs by test, without what the clock and the leases put into them."""
    found = {}
    for file in folder.glob("*.log"):
        text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "NOW", file.read_text())
        found[file.stem.partition("-test_")[2]] = re.sub(r"(port=|:)2\d{4}\b", "PORT", text)
    assert found
    return found


def test_everything_is_labelled(rehearse: Run, pytester: pytest.Pytester) -> None:
    result = rehearse(SUITE.format(**{**TRUE, "pool": "fits"}), OLD, "--junitxml=a.xml", "-rA", "-v")
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "REHEARSED: sim:rtx-pro-6000-server:8 is simulated: what follows shows what these claims do, and not *",
            "rig: simulated: 8× NVIDIA RTX PRO 6000 Blackwell Server Edition*",
            "stack old: simulated: sglang 0.5.7",
            "*test_fits REHEARSED HOLDS *",
            "REHEARSED CONTRADICTED (worse) *test_pool *",
            "REHEARSED HOLDS *test_fits *",
            "gpuguard: REHEARSED: 1 CONTRADICTED (worse), 4 HOLDS",
            "*1 failed, 4 rehearsed*",
        ]
    )
    for line in text.splitlines():
        said = re.search(r"\b(HOLDS|CONTRADICTED|CHANGED)\b", line)
        if said and not line.startswith("gpuguard: REHEARSED: "):
            assert "REHEARSED" in line[: said.start()], line
    assert " passed" not in text
    found = outcomes(pytester.path / "a.xml")
    assert {one["label"] for one in found.values()} == {"REHEARSED"}


def test_speed_answers_and_settings_without_a_rule_are_not_evaluated(rehearse: Run) -> None:
    result = rehearse(
        """
        @serves("sglang", DENSE)
        @fits
        @expect_toks(min=5, concurrency=1, input_len=16, output_len=16)
        def test_speed(): ...

        @serves("sglang", DENSE)
        @works
        def test_answers(): ...

        @serves("sglang", DENSE, env={"NCCL_ALGO": "Tree"})
        @fails("graph.incompatible")
        def test_tree(): ...

        @serves("sglang", DENSE, "--enable-torch-compile")
        @fits
        def test_compile(): ...

        @serves("sglang", DENSE)
        @fits
        def test_body(server):
            assert "simulated" in server.generate("What is the capital of France?", max_new_tokens=8)
            assert server.info["max_total_num_tokens"] > 1000
            assert "Paris" in server.generate("What is the capital of France?")

        @serves("sglang", DENSE)
        @fits
        def test_memory_in_the_body(server):
            assert server.info["max_total_num_tokens"] > 1000
        """
    )
    result.stdout.fnmatch_lines(
        [
            "REHEARSED NOT_EVALUATED *test_answers *a simulated rig gives no answers worth checking (its server: *",
            "REHEARSED NOT_EVALUATED *test_body *a simulated rig gives no answers worth checking: *Paris*",
            "REHEARSED NOT_EVALUATED *test_compile *a simulated rig has no rule for --enable-torch-compile",
            "REHEARSED NOT_EVALUATED *test_speed *a simulated rig has no speed (its server: ready*",
            "*HOLDS: fits: ready*",
            "REHEARSED NOT_EVALUATED *test_tree *a simulated rig has no rule for NCCL_ALGO=Tree",
            "REHEARSED HOLDS *test_memory_in_the_body*",
        ],
        consecutive=False,
    )
    assert result.ret == 0


def test_stacks_of_a_suite_that_do_not_go_with_the_rig(rehearse: Run, pytester: pytest.Pytester) -> None:
    """A pinned real stack is not evaluated, a pinned simulated one is; a hook can ask which rig it is."""
    pytester.makeconftest(
        """
        import sys
        from pytest_gpuguard.facts.stackref import StackRef
        from pytest_gpuguard.options import is_simulated, names_a_stack

        def pytest_gpuguard_stack(item):
            if "real" in item.name:
                return StackRef("pinned", sys.executable)
            if "odd" in item.name:
                return StackRef("odd", "sim:nothing")
            own = is_simulated(item.config) and not names_a_stack(item.config)
            return StackRef("suite", "sim:sglang==0.5.10") if own else None
        """
    )
    source = """
        @serves("sglang", DENSE)
        @fits
        def test_real(): ...

        @serves("sglang", DENSE)
        @fits(when="sglang>=0.5.10,<0.5.11")
        def test_suite(): ...

        @serves("sglang", DENSE, "--device cpu")
        @fits
        def test_cpu(): ...

        @serves("sglang", DENSE)
        @fits
        def test_odd(): ...
    """
    result = rehearse(source)
    result.stdout.fnmatch_lines(
        [
            "REHEARSED INFRA *test_odd *is no PACKAGE==VERSION*",
            "REHEARSED NOT_EVALUATED *test_cpu *a simulated rig has no server on the CPU",
            "REHEARSED NOT_EVALUATED *test_real *a simulated rig cannot run a real stack*",
            "REHEARSED HOLDS *test_suite *",
        ],
        consecutive=False,
    )
    named = rehearse(source, "--gpuguard-stack=mine=sim:sglang==0.5.23")
    named.stdout.fnmatch_lines(
        ["stack mine: simulated: sglang 0.5.23", "REHEARSED UNSTATED *test_suite *"], consecutive=False
    )
    real = rehearse(source, rig="--gpuguard-rig=auto")
    real.stdout.fnmatch_lines(["NOT_EVALUATED *test_odd *"])
    assert "REHEARSED" not in real.stdout.str()


def test_a_simulated_stack_of_a_hook_on_a_real_rig_is_not_evaluated(rehearse: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        from pytest_gpuguard.facts.stackref import StackRef

        def pytest_gpuguard_stack(item):
            return StackRef("suite", "sim:sglang==0.5.10")
        """
    )
    result = rehearse('@serves("sglang", DENSE, "--device cpu")\n@fits\ndef test_it(): ...', rig="--gpuguard-rig=auto")
    result.stdout.fnmatch_lines(["NOT_EVALUATED *test_it *sim:sglang==0.5.10 runs on a simulated rig only*"])


def test_needs_are_checked_against_the_simulated_cards(rehearse: Run) -> None:
    source = """
        @needs_sm120
        @serves("sglang", DENSE)
        @fits
        def test_sm120(): ...

        @needs_sm90
        @serves("sglang", DENSE)
        @fits
        def test_sm90(): ...

        @needs_gpus(2, link="nvlink")
        @serves("sglang", DENSE, layout="TP2")
        @fits
        def test_nvlink(): ...

        @needs_cuda(">=13")
        @serves("sglang", DENSE)
        @fits
        def test_cuda(): ...

        @needs_gpus(9)
        @serves("sglang", DENSE)
        @fits
        def test_nine(): ...
    """
    here = rehearse(source)
    here.stdout.fnmatch_lines(
        [
            "REHEARSED NOT_EVALUATED *test_cuda *needs CUDA >=13, which nobody said of this simulated stack or rig",
            "REHEARSED NOT_EVALUATED *test_nine *needs 9 GPUs, this rig has 8",
            "REHEARSED NOT_EVALUATED *test_nvlink *joined by nvlink*",
            "REHEARSED NOT_EVALUATED *test_sm90 *needs SM90, this rig has 8× SM120",
            "REHEARSED HOLDS *test_sm120*",
        ],
        consecutive=False,
    )
    stack = "--gpuguard-stack=new=sim:sglang==0.5.23,cuda==13.0"
    other = rehearse(source, stack, rig="--gpuguard-rig=sim:h200:8")
    other.stdout.fnmatch_lines(["REHEARSED HOLDS *test_nvlink*", "REHEARSED HOLDS *test_sm90*"], consecutive=False)


def test_hearsay_and_required_reasons_keep_their_exit_codes(rehearse: Run) -> None:
    source = """
        @serves("sglang", LATENT, "--tp-size 4")
        @fits
        @claim(status="hearsay")
        def test_hearsay(): ...
    """
    result = rehearse(source)
    result.stdout.fnmatch_lines(["REHEARSED hearsay: CONTRADICTED (worse) *test_hearsay*"])
    assert result.ret == 0
    missing = rehearse('@serves("sglang", "/no/model")\n@fits\ndef test_it(): ...', "--gpuguard-require=models")
    assert missing.ret == 1


def test_a_rehearsal_leaves_nothing_and_asks_no_driver(rehearse: Run) -> None:
    import tempfile

    before = set(Path(tempfile.gettempdir()).glob("gpuguard-sim-*"))
    result = rehearse(
        """
        import psutil

        @serves("sglang", DENSE, "--context-length 4096")
        @fits
        def test_it(server, rig):
            own = psutil.Process()
            words = [" ".join(one.cmdline()) for one in own.children(recursive=True)]
            assert any("pytest_gpuguard/sim/__main__.py" in one for one in words), words
            assert not any("nvml_child" in one or "xid_child" in one for one in words), words
            assert rig.kind == "simulated"
        """
    )
    result.stdout.fnmatch_lines(["REHEARSED HOLDS *test_it*"])
    assert set(Path(tempfile.gettempdir()).glob("gpuguard-sim-*")) <= before


def test_the_stand_in_is_told_nothing_of_the_claim(rehearse: Run, pytester: pytest.Pytester) -> None:
    """Its argv and environment as the kernel has them: engine, model, flags, rig, release, declared variables."""
    result = rehearse(
        """
        import psutil

        @serves("sglang", DENSE, "--context-length 4096", env={"NCCL_DEBUG": "INFO"}, measured={"weights_gib": 15.25})
        @fits(kv_tokens=">=987654")
        @claim(title="a title that is nowhere else", id="the-id-of-it", status="hearsay")
        def test_a_name_that_is_nowhere_else(server):
            (child,) = [
                one
                for one in psutil.Process().children(recursive=True)
                if any(word.endswith("sim/__main__.py") for word in one.cmdline())
            ]
            told = " ".join(child.cmdline()) + " " + repr(child.environ())
            for secret in ("987654", "fits", "nowhere else", "nowhere_else", "the-id-of-it", "hearsay", "kv_tokens"):
                assert secret not in told, (secret, told)
            assert "weights_gib=15.25" in told
            assert "'NCCL_DEBUG': 'INFO'" in told
            assert server.info["internal_states"][0]["memory_usage"]["weight"] == 15.25
            raise SystemError("seen")
        """
    )
    assert "SystemError: seen" in result.stdout.str(), result.stdout.str()


def test_gpus_of_a_test_without_a_server_are_not_there(rehearse: Run) -> None:
    result = rehearse(
        """
        @needs_gpus(1)
        def test_own_code(gpus):
            raise AssertionError("never run")
        """
    )
    result.assert_outcomes(skipped=1)
    result = rehearse("@needs_gpus(1)\ndef test_own_code(gpus): ...", "-rs")
    result.stdout.fnmatch_lines(["*a simulated rig has no GPUs that a test's own code could use*"])


def test_workers_share_the_simulated_gpus(rehearse: Run, pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    result = rehearse(
        """
        @pytest.mark.parametrize("n", range(3))
        @serves("sglang", DENSE, layout="TP8")
        @fits
        def test_it(n, server): ...
        """,
        "-n2",
    )
    result.stdout.fnmatch_lines(["REHEARSED: sim:*", "rig: simulated: 8× *", "gpuguard: REHEARSED: 3 HOLDS"])
    assert result.ret == 0


def test_the_usage_of_rig_and_stack(rehearse: Run) -> None:
    plain = "def test_plain(): ..."
    for args, said in (
        (["--gpuguard-rig=sim:h2000:8"], "'h2000' is no card of the catalogue; did you mean h200"),
        (["--gpuguard-rig=sim:h200:0"], "a rig with 0 GPUs cannot be simulated"),
        (
            [RIG, "--gpuguard-stack=x=/usr/bin/python3"],
            "cannot run a real stack, there being no GPU for it: write x=sim:",
        ),
        ([RIG, "--gpuguard-stack=x=sim:sglang"], "is no PACKAGE==VERSION"),
        (["--gpuguard-stack=x=sim:sglang==0.5.7"], "a simulated stack runs on a simulated rig only"),
    ):
        result = rehearse(plain, *args[1:], rig=args[0])
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert said in result.stderr.str(), (args, result.stderr.str())

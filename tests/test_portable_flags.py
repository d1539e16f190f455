"""``serves(portable=True)``: the flags of one release in the words of another, and nothing else."""

from __future__ import annotations

import pytest

from pytest_gpuguard.engines.flags import FlagSet, load_releases
from pytest_gpuguard.engines.portable import load_same, translate

from .conftest import Run
from .laws import given, settings, st

RELEASES = load_releases()


def known(release: str) -> FlagSet:
    return FlagSet(RELEASES.known_in(release))


def booted(release: str, flags: str) -> str:
    return " ".join(translate(flags.split(), known(release))[0])


@pytest.mark.parametrize(
    ("release", "given", "becomes"),
    [
        ("0.5.20", "--cuda-graph-max-bs 128", "--cuda-graph-max-bs-decode 128"),
        ("0.5.23", "--cuda-graph-max-bs=128", "--cuda-graph-max-bs-decode 128"),
        ("0.5.7", "--cuda-graph-max-bs-decode 128", "--cuda-graph-max-bs 128"),
        ("0.5.7", "--cuda-graph-bs-decode 1 2 4 --tp-size 2", "--cuda-graph-bs 1 2 4 --tp-size 2"),
        ("0.5.7", "--flashinfer-allreduce-fusion-backend auto", "--enable-flashinfer-allreduce-fusion"),
        ("0.5.7", "--attn-dp-size 8 --tp-size 8", "--dp-size 8 --enable-dp-attention --tp-size 8"),
        ("0.5.7", "--attention-data-parallel-size 8", "--dp-size 8 --enable-dp-attention"),
        ("0.5.20", "--stream-output --tp-size 2", "--incremental-streaming-output --tp-size 2"),
        ("0.4.6", "--data-parallel-size 2 --expert-parallel-size 2", "--data-parallel-size 2 --expert-parallel-size 2"),
        ("0.4.6", "--model m", "--model m"),
    ],
)
def test_a_spelling_that_this_release_does_not_know_becomes_the_one_that_it_does(
    release: str, given: str, becomes: str
) -> None:
    assert booted(release, given) == becomes


@pytest.mark.parametrize(
    ("release", "flags"),
    [
        ("0.5.7", "--cuda-graph-max-bs 128"),
        ("0.5.16", "--cuda-graph-max-bs 128 --enable-flashinfer-allreduce-fusion"),  # deprecated, still taken
        ("0.5.23", "--dp-size 8 --enable-dp-attention"),
        ("0.5.7", "--flashinfer-allreduce-fusion-backend trtllm"),  # the old flag cannot say that
        ("0.5.20", "--enable-ep-moe --n-share-experts-fusion 8"),  # no exact successor: args.removed, as ever
        ("0.5.20", "--cuda-graph-max-bs 128 --cuda-graph-max-bs-decode 64"),  # both given: not ours to choose
        ("0.5.20", "--cuda-graph-max-bs 128 --cuda-graph-max-bs 64"),
        ("0.5.20", "--cuda-graph-max-bs"),  # a value is missing: argparse will say so
        ("0.5.20", "--json-model-override-args x -- --cuda-graph-max-bs 128"),
        ("0.5.7", "--dp-size 2"),  # whole replicas are another thing than dp-attention
    ],
)
def test_what_is_taken_as_it_is_or_has_no_exact_name_here_stays(release: str, flags: str) -> None:
    assert translate(flags.split(), known(release)) == (tuple(flags.split()), ())


def test_a_plain_dp_size_never_becomes_dp_attention() -> None:
    here = FlagSet(frozenset({"--attn-dp-size", "--tp-size"}))
    assert translate(["--dp-size", "8"], here)[0] == ("--dp-size", "8")
    both = ["--enable-dp-attention", "--tp-size", "8", "--dp-size", "8"]
    assert translate(both, here)[0] == ("--attn-dp-size", "8", "--tp-size", "8")


def test_an_abbreviation_of_something_else_is_not_the_flag_that_was_meant() -> None:
    here = FlagSet(frozenset({"--stream-output-interval", "--incremental-streaming-output"}))
    assert translate(["--stream-output"], here)[0] == ("--incremental-streaming-output",)
    alone = FlagSet(frozenset({"--cuda-graph-max-bs-decode"}))
    assert translate(["--cuda-graph-max-bs", "8"], alone)[0] == ("--cuda-graph-max-bs", "8"), "argparse takes it"


def test_every_change_is_told() -> None:
    flags = ["--tp-size", "8", "--cuda-graph-max-bs", "128", "--nsa-decode-backend", "flashmla_kv"]
    _, changes = translate(flags, known("0.5.20"))
    assert [str(one) for one in changes] == [
        "--cuda-graph-max-bs 128 -> --cuda-graph-max-bs-decode 128",
        "--nsa-decode-backend flashmla_kv -> --dsa-decode-backend flashmla_kv",
    ]


def test_both_names_of_every_pair_are_flags_of_some_release_and_their_ranges_follow_each_other() -> None:
    for same in load_same():
        old, new = same.forms
        assert [part.flag for part in (*old, *new) if part.flag not in RELEASES.flags] == []
        shared = [
            release
            for release in RELEASES.releases
            if {part.flag for part in old} <= RELEASES.known_in(release)
            or {part.flag for part in new} <= RELEASES.known_in(release)
        ]
        first = RELEASES.releases.index(shared[0])
        assert shared == list(RELEASES.releases[first:]), f"{same.forms} leaves a gap"


SPELLINGS = st.sampled_from(
    [
        " ".join(f"{part.flag} {(part.takes or '').replace('{*}', '1 2').replace('{}', '8')}".strip() for part in form)
        for same in load_same()
        for form in same.forms
    ]
)


@given(SPELLINGS, st.sampled_from(RELEASES.releases), st.sampled_from(RELEASES.releases))
@settings(max_examples=200)
def test_what_one_release_takes_is_taken_again_after_a_way_through_another(flags: str, first: str, second: str) -> None:
    def names(words: tuple[str, ...]) -> set[str]:
        return {word for word in words if word.startswith("-")}

    here = translate(flags.split(), known(first))[0]
    there = translate(here, known(second))[0]
    assert translate(there, known(second)) == (there, ()), "twice is once"
    back = translate(there, known(first))[0]
    if names(here) <= known(first).options:
        assert names(back) <= known(first).options
        assert [word for word in back if word.isdigit()] == [word for word in here if word.isdigit()]


def test_forms_that_carry_different_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_gpuguard.diagnose import data

    entry = {"forms": ["--a {}", "--b"], "source": "x"}
    monkeypatch.setattr(data, "package_toml", lambda path: {"same": [entry]})
    with pytest.raises(ValueError, match="both forms must carry the same values"):
        load_same.__wrapped__()


OLD_NAME = "--device cpu --enable-flashinfer-allreduce-fusion"


def test_a_portable_claim_boots_in_this_releases_words_and_says_so(claims: Run) -> None:
    result = claims(
        f"""
        @serves("sglang", MODEL, "{OLD_NAME}", portable=True)
        @fits
        def test_fusion(): ...
        """,
        "-v",
    )
    result.assert_outcomes(passed=1)
    change = "--enable-flashinfer-allreduce-fusion -> --flashinfer-allreduce-fusion-backend auto"
    result.stdout.fnmatch_lines([f"test_fusion: portable: {change}"])
    result.stdout.fnmatch_lines([f" *portable: {change}"])


def test_without_portable_the_flags_are_the_claims_own_and_an_old_name_is_a_finding(claims: Run) -> None:
    result = claims(
        f"""
        @serves("sglang", MODEL, "{OLD_NAME}")
        @fits
        def test_fusion(): ...

        @serves("sglang", MODEL, "--device cpu --enable-ep-moe", portable=True)
        @fails("args.removed")
        def test_no_exact_successor(): ...
        """,
        "-v",
    )
    result.stdout.fnmatch_lines(["CONTRADICTED (worse)*args.removed*--enable-flashinfer-allreduce-fusion*0.4.10*"])
    result.stdout.fnmatch_lines(["HOLDS *test_no_exact_successor*args.removed*"])
    assert "portable:" not in result.stdout.str()


def test_the_payload_holds_what_was_translated(claims: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        def pytest_runtest_logreport(report):
            if hasattr(report, "gpuguard"):
                print("TRANSLATED", report.gpuguard["translated"], "ARGV", "auto" in report.gpuguard["argv"])
        """
    )
    result = claims(
        f"""
        @serves("sglang", MODEL, "{OLD_NAME}", portable=True)
        @fits
        def test_fusion(): ...
        """,
        "-s",
    )
    result.stdout.fnmatch_lines(["*TRANSLATED ?*enable-flashinfer-allreduce-fusion -> *auto?? ARGV True*"])

"""Laws of the reading: what healthy logs hold changes nothing, ranks interleave at will, a cut log proves no more."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pytest_gpuguard.claims.observation import LogReading
from pytest_gpuguard.diagnose import classify_text
from tests.laws import example, given, settings, st
from tests.log_decoys import DECOYS, OTHERS, REQUESTS, SURVIVED
from tests.log_failures import FAILING, TROUBLE
from tests.log_samples import HEALTHY
from tests.test_classify_outcomes import CASES

ENGINES = st.booleans()


def read(lines: Sequence[str], engine: str | None) -> LogReading:
    return classify_text("\n".join(lines) + "\n", engine=engine)


def ready_at(log: Sequence[str]) -> int:
    """How many lines it takes until the server is ready."""
    last = max(n for n, line in enumerate(log) if "ready to roll" in line or "Application startup complete" in line)
    return last + 1


def insert(log: Sequence[str], texts: Sequence[tuple[int, str]]) -> list[str]:
    """The log with each text put in before the line of its number."""
    found = list(log)
    for at, text in sorted(texts, key=lambda one: -one[0]):
        found[at:at] = text.split("\n")
    return found


def healthy(reading: LogReading) -> tuple[str, bool, object]:
    return reading.outcome, reading.fatal, reading.decisive


READY = ("ready", False, None)
STARTING = ("starting", False, None)


# --- healthy logs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_is_starting_until_it_is_ready(name: str) -> None:
    engine, log = HEALTHY[name]
    for end in range(len(log) + 1):
        for asked in (engine, None):
            reading = read(log[:end], asked)
            assert healthy(reading) == (READY if end >= ready_at(log) else STARTING), log[:end]
    assert read(log, None).engine == engine


@pytest.mark.parametrize("decoy", DECOYS)
def test_what_healthy_logs_hold_changes_nothing_wherever_it_stands(decoy: str) -> None:
    text = DECOYS[decoy]
    for engine, log in HEALTHY.values():
        everywhere = insert(log, [(at, text) for at in range(len(log) + 1)])
        assert healthy(read(everywhere, engine)) == READY
    for name in ("sglang 0.5.23", "vllm v1"):
        engine, log = HEALTHY[name]
        for end in (0, ready_at(log) // 2, ready_at(log) - 1, len(log)):
            cut = read([*log[:end], *text.split("\n")], engine)
            assert healthy(cut) == (READY if end == len(log) else STARTING)


@settings(derandomize=True, max_examples=120)
@given(
    st.sampled_from(sorted(HEALTHY)),
    st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(sorted(DECOYS))), max_size=12),
    st.integers(0, 10_000),
    ENGINES,
)
def test_any_of_them_together_change_nothing(name: str, decoys: list[tuple[int, str]], end: int, known: bool) -> None:
    engine, log = HEALTHY[name]
    end %= len(log) + 1
    cut = insert(log[:end], [(at % (end + 1), DECOYS[decoy]) for at, decoy in decoys])
    assert healthy(read(cut, engine if known else None)) == (READY if end >= ready_at(log) else STARTING)


@settings(derandomize=True, max_examples=60)
@given(
    st.sampled_from(sorted(HEALTHY)),
    st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(sorted(SURVIVED | OTHERS))), min_size=1, max_size=4),
    ENGINES,
)
def test_what_the_boot_lived_on_with_changes_nothing(name: str, texts: list[tuple[int, str]], known: bool) -> None:
    engine, log = HEALTHY[name]
    before = ready_at(log) - 1
    lived = insert(log, [(at % before, (SURVIVED | OTHERS)[text]) for at, text in texts])
    assert healthy(read(lived, engine if known else None)) == READY


@settings(derandomize=True, max_examples=60)
@given(
    st.sampled_from(sorted(HEALTHY)),
    st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(sorted(SURVIVED | REQUESTS))), min_size=1, max_size=4),
    ENGINES,
)
def test_a_failed_request_changes_nothing(name: str, texts: list[tuple[int, str]], known: bool) -> None:
    engine, log = HEALTHY[name]
    ready = ready_at(log)
    after = [(ready + at % (len(log) + 1 - ready), (SURVIVED | REQUESTS)[text]) for at, text in texts]
    assert healthy(read(insert(log, after), engine if known else None)) == READY


# --- ranks ------------------------------------------------------------------------------------------------------------


def interleave(processes: Sequence[Sequence[list[str]]], seed: int) -> list[str]:
    """What the processes print, mixed: each keeps its own order, and what must stay together does."""
    rng = random.Random(seed)
    speeds = [rng.random() ** 3 + 0.01 for _ in processes]
    left = [list(blocks) for blocks in processes]
    found: list[str] = []
    while any(left):
        talking = [number for number, blocks in enumerate(left) if blocks]
        chosen = rng.choices(talking, [speeds[number] for number in talking])[0]
        for _ in range(rng.choice((1, 1, 1, 4))):
            if left[chosen]:
                found += left[chosen].pop(0)
    return found


@pytest.mark.parametrize("name", FAILING)
@settings(derandomize=True, max_examples=15)
@given(seed=st.integers(0, 1 << 32), known=ENGINES)
def test_the_lines_of_ranks_interleave_at_will(name: str, seed: int, known: bool) -> None:
    failing = FAILING[name]
    reading = read(interleave(failing.processes, seed), failing.engine if known else None)
    assert (reading.outcome, reading.fatal) == (failing.outcome, True)
    assert reading.decisive is not None
    assert failing.proof in reading.decisive.text


#: They are read with a failure: a phase that a process reached, and what explains a failure that nothing else does.
SAYING = {"vllm's capture", "sm_120", "prose"}


@settings(derandomize=True, max_examples=100)
@given(
    st.sampled_from(sorted(FAILING)),
    st.lists(st.sampled_from(sorted(set(DECOYS) - SAYING)), min_size=1, max_size=4),
    st.integers(0, 1 << 32),
)
def test_what_healthy_logs_hold_hides_no_failure(name: str, decoys: list[str], seed: int) -> None:
    failing = FAILING[name]
    own = "(EngineCore"  # a process does not log into its own traceback
    texts = [[DECOYS[decoy].split("\n")] for decoy in decoys if failing.engine == "sglang" or own not in DECOYS[decoy]]
    reading = read(interleave([*failing.processes, *texts], seed), failing.engine)
    assert (reading.outcome, reading.fatal) == (failing.outcome, True)


# --- cut logs ---------------------------------------------------------------------------------------------------------

#: What a log says before its cause has come: nothing, or that somebody died.
UNPROVEN = {"starting", "unknown", "indeterminate.peer_died"}


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_cut_log_says_no_more_than_it_proves(name: str, seed: int) -> None:
    failing = FAILING[name]
    log = interleave(failing.processes, seed)
    died = next(n for n, line in enumerate(log) if any(word in line for word in TROUBLE))
    for end in range(len(log) + 1):
        reading = read(log[:end], failing.engine)
        if end <= died:
            assert healthy(reading) == STARTING
        elif failing.outcome != "jit.compile" and not any(failing.proof in line for line in log[:end]):
            assert reading.outcome in UNPROVEN, log[:end]  # (what calls a compiler fails with it)
        assert reading.outcome in UNPROVEN | {failing.outcome}, log[:end]


@pytest.mark.parametrize("name", CASES)
def test_no_log_of_another_failure_ever_looks_like_a_full_gpu(name: str) -> None:
    outcome, _, log = CASES[name]
    lines = log.splitlines()
    said = {read(lines[:end], "sglang").outcome for end in range(len(lines))}
    claimed = {one for one in said if one.startswith(("oom.", "unsupported."))}
    assert claimed <= {outcome}


# --- what these laws have found ---------------------------------------------------------------------------------------

PLATFORM = "INFO 02-20 18:36:00 __init__.py:190] Automatically detected platform cuda."


@pytest.mark.parametrize("name", HEALTHY)
def test_a_line_of_an_imported_package_does_not_say_whose_log_it_is(name: str) -> None:
    engine, log = HEALTHY[name]
    first = PLATFORM if engine == "sglang" else DECOYS["kv retracted"]
    up = next(n for n, line in enumerate(log) if "Application startup complete" in line or "Uvicorn" in line)
    reading = read([first, *log[: up + (engine == "sglang")]], None)
    assert (reading.engine, reading.outcome) == (engine, "starting")
    assert read([first, *log], None).outcome == "ready"


def test_one_rank_that_goes_on_says_nothing_of_another() -> None:
    failing = FAILING["vllm v0 oom.weights"]
    driver, worker = failing.processes
    loaded = "INFO 01-15 10:00:09 model_runner.py:1099] Loading model weights took 14.9 GB"
    lines = [line for block in driver for line in block]
    assert read([*lines, f"(VllmWorkerProcess pid=1897) {loaded}"], "vllm").outcome == "oom.weights"
    assert read([*worker[0], *lines, f"(VllmWorkerProcess pid=1897) {loaded}"], None).outcome == "oom.weights"
    assert read([*lines, loaded], "vllm").outcome == "starting"


def test_a_failure_of_equal_weight_is_not_lost_with_one_that_was_survived() -> None:
    stamp = "(Worker_TP0 pid=1350) ERROR 01-15 10:00:09 [x.py:1] "
    survived = stamp + "Error while creating shared memory segment /dev/shm/nccl-a (size 7)"
    core = "(EngineCore_DP0 pid=1310) ERROR 01-15 10:00:10 [core.py:708] "
    died, cause = f"{core}EngineCore failed to start.", f"{core}RuntimeError: CUDA error: no kernel image is available"
    went_on = "(Worker_TP0 pid=1350) INFO 01-15 10:00:11 [x.py:1] Model loading took 55.67 GiB memory and 44.5 seconds"
    reading = read([survived, died, cause, went_on], "vllm")
    assert (reading.outcome, reading.fatal) == ("unsupported.arch", True)


def test_a_traceback_that_a_terminal_broke_is_read_to_its_end() -> None:
    core = "(EngineCore pid=316) "
    log = [
        f'{core}  File "/x/vllm/v1/core/kv_cache_utils.py", line 758, in _check_enough_kv_cache_memory',
        f"{core}ValueError: To serve at least one request with the model's max seq len (100000), (4.26 GiB KV cach",
        "e is needed, which is larger than the available KV cache memory (4.25 GiB).",
    ]
    assert read(log, "vllm").outcome == "oom.kv_pool"
    assert read([*log[:2], "some other program's line, which is larger than the available KV cache memory"], None).fatal


@example(0)
@example(200)
@given(st.integers(0, 60_000))
@settings(derandomize=True, max_examples=10)
def test_a_line_is_judged_on_its_first_64_kib(before: int) -> None:
    head = HEALTHY["sglang 0.5.6"][1][:5]
    died = "[2026-01-02 03:04:06 TP0] Scheduler hit an exception: Traceback (most recent call last):"
    cause = "RuntimeError: " + "x" * before + " CUDA error: no kernel image is available for execution on the device"
    assert read([*head, died, cause + " " + "y" * 90_000], "sglang").outcome == "unsupported.arch"

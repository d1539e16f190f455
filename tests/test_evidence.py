"""What kernel messages, counters and NVML events do to an outcome: the table of rules, row by row."""

from __future__ import annotations

import pytest

from pytest_gpuguard.claims.outcome import HOST_FAULTS, OUTCOMES, READY, STARTING, UNDECIDED
from pytest_gpuguard.diagnose.evidence import kernel_lines_of, weigh
from pytest_gpuguard.diagnose.kernel_lines import pci_address, xid_kind
from pytest_gpuguard.facts.kernel import Counter, Evidence, GpuEvent
from tests.laws import given, st

OURS, THEIRS = "GPU-a0000000-0000-4000-8000-000000000000", "GPU-b0000000-0000-4000-8000-000000000001"
GPUS = {OURS: "00000000:16:00.0"}
PID = 4242
OFF_BUS = "NVRM: Xid (PCI:0000:16:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
KILLED = f"Out of memory: Killed process {PID} (python3) total-vm:181200000kB, anon-rss:62914560kB, file-rss:0kB"
KILLED_CGROUP = f"Memory cgroup out of memory: Killed process {PID} (sglang::schedul) total-vm:1kB, anon-rss:1kB"
SUMMARY = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=docker-0.scope,mems_allowed=0,oom_memcg=/a,"
    f"task_memcg=/a/b,task=python3,pid={PID},uid=0"
)


def xid(number: int, bus: str = "0000:16:00", rest: str = ", pid=77, name=python, something") -> str:
    return f"NVRM: Xid (PCI:{bus}): {number}{rest}"


def evidence(*lines: str, **changes: object) -> Evidence:
    values: dict[str, object] = {"lines": lines, "gpus": GPUS, "pids": frozenset({PID}), **changes}
    return Evidence(**values)  # type: ignore[arg-type]


def grown(by: int, where: str = "/proc/vmstat", shared: bool = False) -> Counter:
    return Counter(where, 7, 7 + by, shared)


OWN, ABOVE = "/sys/fs/cgroup/docker/a/memory.events", "/sys/fs/cgroup/user.slice/memory.events"


# ------------------------------------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize(
    ("line", "number", "bus", "pid", "name"),
    [
        (OFF_BUS, 79, (0, 0x16, 0), None, None),
        ("kernel: NVRM: Xid (PCI:0000:01:00): 8, pid=1694, name=python3, channel 0x8", 8, (0, 1, 0), 1694, "python3"),
        ("[  388.56] NVRM: Xid (PCI:0008:01:00): 119, pid=11, name=nvidia-smi", 119, (8, 1, 0), 11, "nvidia-smi"),
        ("Nov 22 18:29:55 host kernel: [966.5] NVRM: Xid (0000:01:00): 31, Ch 0000000b", 31, (0, 1, 0), None, None),
        ("NVRM: Xid (PCI:0000:65:00 GPU-I:05): 94, pid=12, name=VLLM::Worker", 94, (0, 0x65, 0), 12, "VLLM::Worker"),
        ("NVRM: Xid (PCI:0000:41:00): 74, NVLink: fatal error detected on link 2(0x0)", 74, (0, 0x41, 0), None, None),
        ("NVRM: GPU 0000:09:00.0: GPU has fallen off the bus.", 79, (0, 9, 0), None, None),
    ],
)  # fmt: skip
def test_an_xid_is_read_whatever_stands_before_it(
    line: str, number: int, bus: tuple[int, int, int], pid: int | None, name: str | None
) -> None:
    (found,) = kernel_lines_of([line]).xids
    assert (found.number, found.bus, found.pid, found.name) == (number, bus, pid, name)
    assert found.text.startswith("NVRM: ")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (KILLED, "python3"),
        (f"[12.5] {KILLED_CGROUP}", "sglang::schedul"),
        (f"kernel: {SUMMARY}", "python3"),
        (f"Killed process {PID} (tmux: server) total-vm:1kB, anon-rss:1kB", "tmux: server"),
        (f"Out of memory: Killed process {PID} (python3), UID 1000, total-vm:1kB", "python3"),
    ],
)
def test_a_kill_is_read_in_each_of_its_forms(line: str, name: str) -> None:
    (kill,) = kernel_lines_of([line]).kills
    assert (kill.pid, kill.name) == (PID, name)


def test_the_two_messages_of_one_kill_are_one_kill() -> None:
    (kill,) = kernel_lines_of([SUMMARY, KILLED]).kills
    assert kill.text == KILLED


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: loading NVIDIA UNIX Open Kernel Module  580.105.08",
        "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.",
        "./entrypoint.sh: line 48: 28 Killed python3 -m sglang.launch_server",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB.",
        "Xid",
        "",
    ],
)
def test_what_only_looks_like_it_is_nothing(line: str) -> None:
    found = kernel_lines_of([line])
    assert (found.xids, found.kills) == ((), ())


@given(st.lists(st.text(max_size=300), max_size=20))
def test_any_text_can_be_read(lines: list[str]) -> None:
    kernel_lines_of(lines)


def test_pci_addresses_of_nvml_and_of_the_kernel_are_the_same() -> None:
    assert pci_address("00000000:C1:00.0") == pci_address("0000:c1:00") == (0, 0xC1, 0)
    assert pci_address("") is pci_address("unknown") is None


@pytest.mark.parametrize("number", [48, 61, 62, 64, 74, 79, 94, 95, 119, 120, 140, 143])
def test_the_catalogue_knows_faults_of_the_hardware(number: int) -> None:
    assert xid_kind(number)[0] == "hardware"


@pytest.mark.parametrize("number", [8, 13, 31, 43, 109])
def test_the_catalogue_knows_what_is_usually_the_applications(number: int) -> None:
    assert xid_kind(number)[0] == "application"


# ------------------------------------------------------------------------------------------------------------ hardware


@pytest.mark.parametrize("outcome", sorted(OUTCOMES - {READY, STARTING}))
@pytest.mark.parametrize("explained", [True, False])
def test_a_hardware_fault_of_a_leased_gpu_decides_every_failure(outcome: str, explained: bool) -> None:
    weighed = weigh(outcome, evidence(OFF_BUS), explained=explained, note="said before")
    assert weighed.outcome == "hardware"
    assert weighed.note is not None
    assert OFF_BUS in weighed.note
    assert OURS in weighed.note
    if explained and outcome not in UNDECIDED | {"hardware"}:
        assert f"the log alone says {outcome}" in weighed.note


@pytest.mark.parametrize("outcome", [READY, STARTING])
def test_nothing_changes_a_boot_that_did_not_fail(outcome: str) -> None:
    found = evidence(OFF_BUS, KILLED, host_kills=grown(1), events=(GpuEvent(OURS, "xid", 79),))
    weighed = weigh(outcome, found, explained=True, note=None)
    assert (weighed.outcome, weighed.note) == (outcome, None)


def test_a_fault_of_a_gpu_that_is_not_leased_is_told_and_decides_nothing() -> None:
    weighed = weigh("unknown", evidence(xid(79, "0000:41:00")), explained=True, note="said before")
    assert weighed.outcome == "unknown"
    assert weighed.note is not None
    assert weighed.note.startswith("said before; Xid 79 (GPU has fallen off the bus) on a GPU that is not leased")


def test_a_gpu_whose_bus_is_unknown_is_known_by_what_the_driver_prints() -> None:
    line = xid(79)
    unknown = {OURS: ""}
    assert weigh("unknown", evidence(line, gpus=unknown), explained=True).outcome == "unknown"
    named = f"NVRM: GPU at PCI:0000:16:00: {OURS}"
    assert weigh("unknown", evidence(named, line, gpus=unknown), explained=True).outcome == "hardware"
    strange = f"NVRM: GPU at PCI:0000:16:00: {THEIRS}"
    assert weigh("unknown", evidence(strange, line, gpus=unknown), explained=True).outcome == "unknown"


@pytest.mark.parametrize("number", [8, 13, 31, 43, 109])
@pytest.mark.parametrize("outcome", ["illegal_memory", "unknown", "hang.timeout"])
def test_an_xid_of_the_application_is_told_and_makes_no_hardware_fault(number: int, outcome: str) -> None:
    weighed = weigh(outcome, evidence(xid(number)), explained=True, note=None)
    assert weighed.outcome == outcome
    assert weighed.note is not None
    assert f"Xid {number} (" in weighed.note
    assert "usually the application's" in weighed.note


@pytest.mark.parametrize("number", [45, 154])
def test_a_consequence_is_not_even_told(number: int) -> None:
    assert weigh("illegal_memory", evidence(xid(number)), explained=True).note is None


def test_a_number_that_nobody_knows_is_told_and_decides_nothing() -> None:
    weighed = weigh("unknown", evidence(xid(9999)), explained=True)
    assert (weighed.outcome, "Xid 9999 on " in (weighed.note or "")) == ("unknown", True)


@pytest.mark.parametrize("number", [63, 92, 121])
@pytest.mark.parametrize(
    ("outcome", "after"),
    [
        ("unknown", "hardware"),
        ("indeterminate.peer_died", "hardware"),
        ("illegal_memory", "hardware"),
        ("nccl.timeout", "hardware"),
        ("oom.kv_pool", "oom.kv_pool"),
        ("unsupported.config", "unsupported.config"),
        ("model.missing", "model.missing"),
    ],
)
def test_a_fault_that_the_gpu_dealt_with_explains_only_what_has_no_cause_of_its_own(
    number: int, outcome: str, after: str
) -> None:
    weighed = weigh(outcome, evidence(xid(number)), explained=True)
    assert weighed.outcome == after
    assert f"Xid {number} (" in (weighed.note or "")


def test_a_grave_fault_is_quoted_before_a_mild_one() -> None:
    weighed = weigh("unknown", evidence(xid(63), xid(95)), explained=True)
    assert (weighed.note or "").startswith("the driver logged Xid 95 (uncontained memory error)")


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (GpuEvent(OURS, "xid", 79), "hardware"),
        (GpuEvent(OURS, "ecc"), "hardware"),
        (GpuEvent(OURS, "lost"), "hardware"),
        (GpuEvent(OURS, "xid", 31), "illegal_memory"),
        (GpuEvent(OURS, "xid", 45), "illegal_memory"),
        (GpuEvent(THEIRS, "xid", 79), "illegal_memory"),
    ],
)
def test_events_of_nvml_decide_as_kernel_messages_do(event: GpuEvent, outcome: str) -> None:
    assert weigh("illegal_memory", evidence(events=(event,)), explained=True).outcome == outcome


def test_a_kernel_message_and_its_event_are_told_once() -> None:
    weighed = weigh("illegal_memory", evidence(xid(31), events=(GpuEvent(OURS, "xid", 31),)), explained=True)
    assert (weighed.note or "").count("Xid 31 ") == 1


# ------------------------------------------------------------------------------------------------------------ OOM kills


@pytest.mark.parametrize("line", [KILLED, KILLED_CGROUP, SUMMARY])
@pytest.mark.parametrize("outcome", sorted(UNDECIDED))
def test_a_kill_of_a_process_of_the_boot_makes_oom_host(line: str, outcome: str) -> None:
    weighed = weigh(outcome, evidence(line), explained=True, note="said before")
    assert weighed.outcome == "oom.host"
    assert line in (weighed.note or "")


@pytest.mark.parametrize("outcome", sorted(OUTCOMES - UNDECIDED - {READY, STARTING, "oom.host"}))
def test_a_kill_never_overrules_a_failure_that_the_log_explains(outcome: str) -> None:
    weighed = weigh(outcome, evidence(KILLED), explained=True)
    assert weighed.outcome == outcome
    assert KILLED in (weighed.note or "")


def test_a_kill_confirms_what_the_log_says() -> None:
    weighed = weigh("oom.host", evidence(KILLED), explained=True, signature="host.alloc")
    assert (weighed.outcome, KILLED in (weighed.note or "")) == ("oom.host", True)
    assert weigh("oom.host", evidence(), explained=True, signature="host.alloc").outcome == "oom.host"


@pytest.mark.parametrize("explained", [True, False])
def test_a_server_that_hangs_because_a_rank_was_killed_is_out_of_memory(explained: bool) -> None:
    expected = "hang.timeout" if explained else "oom.host"
    assert weigh("hang.timeout", evidence(KILLED), explained=explained).outcome == expected


def test_somebody_elses_kill_is_told_and_decides_nothing() -> None:
    found = evidence(KILLED, pids=frozenset({1}), host_kills=grown(1))
    weighed = weigh("unknown", found, explained=True, note="said before")
    assert weighed.outcome == "unknown"
    assert weighed.note == f"said before; the OOM killer ended process {PID} (python3), which is not of this boot"


ANYBODYS = {
    "the host's counter": evidence(host_kills=grown(1)),
    "an ancestor's counter": evidence(cgroup_kills=(grown(1, ABOVE, shared=True),)),
    "a name": evidence(KILLED, pids_differ=True, host_kills=grown(1)),
    "a name, and an ancestor's counter": evidence(
        KILLED, pids_differ=True, cgroup_kills=(grown(1, ABOVE, shared=True),)
    ),
}


@pytest.mark.parametrize("outcome", sorted(UNDECIDED))
@pytest.mark.parametrize("whose", ANYBODYS)
def test_a_kill_of_anybody_decides_only_where_sigkill_ended_a_process_of_the_boot(whose: str, outcome: str) -> None:
    weighed = weigh(outcome, ANYBODYS[whose], explained=True, note="said before")
    assert weighed.outcome == outcome
    assert (weighed.note or "").startswith("said before; the kernel's OOM killer ")
    assert (weighed.note or "").endswith(", which may have been anybody's process")
    weighed = weigh(outcome, ANYBODYS[whose], explained=True, note="said before", killed=True)
    assert weighed.outcome == "oom.host"
    assert (weighed.note or "").endswith("; a process of this boot ended by SIGKILL")
    assert weigh(outcome, evidence(), explained=True, killed=True).outcome == outcome


@pytest.mark.parametrize("whose", ANYBODYS)
@pytest.mark.parametrize("outcome", sorted(OUTCOMES - UNDECIDED - {READY, STARTING, "oom.host"}))
def test_a_kill_of_anybody_never_overrules_a_failure_that_has_a_name(whose: str, outcome: str) -> None:
    assert weigh(outcome, ANYBODYS[whose], explained=False, killed=True).outcome == outcome
    assert weigh(outcome, ANYBODYS[whose], explained=True, killed=True, weak=True).outcome == outcome


@pytest.mark.parametrize(
    "found",
    [
        evidence(KILLED),
        evidence(cgroup_kills=(grown(1, OWN),)),
        evidence(KILLED, pids_differ=True, cgroup_kills=(grown(1, OWN),)),
    ],
    ids=["pid", "own cgroup", "name and own cgroup"],
)
def test_a_kill_that_is_known_to_be_this_boots_decides_without_anything_else(found: Evidence) -> None:
    assert weigh("unknown", found, explained=True).outcome == "oom.host"
    weighed = weigh("oom.kv_pool", found, explained=True, weak=True)
    assert weighed.outcome == "oom.host"
    assert "; the log alone says oom.kv_pool" in (weighed.note or "")
    assert weigh("oom.kv_pool", found, explained=True).outcome == "oom.kv_pool"


def test_a_kill_more_than_the_messages_give_to_others_counts() -> None:
    others = evidence(KILLED, pids=frozenset(), host_kills=grown(2))
    assert weigh("unknown", others, explained=True, killed=True).outcome == "oom.host"
    known = evidence(KILLED, pids=frozenset(), host_kills=grown(1))
    assert weigh("unknown", known, explained=True, killed=True).outcome == "unknown"


@pytest.mark.parametrize(("by", "outcome"), [(0, "unknown"), (1, "oom.host")])
def test_the_servers_own_cgroup_knows_better_than_the_whole_host(by: int, outcome: str) -> None:
    found = evidence(host_kills=grown(3), cgroup_kills=(grown(by, "/sys/fs/cgroup/a/memory.events"),))
    assert weigh("unknown", found, explained=True).outcome == outcome


@pytest.mark.parametrize(
    ("name", "counters", "outcome"),
    [
        ("python3", (1,), "oom.host"),
        ("VLLM::EngineCor", (1,), "oom.host"),
        ("sglang::schedul", (1,), "oom.host"),
        ("ray::IDLE", (1,), "oom.host"),
        ("python3", (), "unknown"),  # a name alone is anybody's
        ("python3", (0,), "unknown"),  # our cgroups counted nothing: it was another container's
        ("postgres", (), "unknown"),
    ],
)
def test_in_a_container_a_kill_is_known_by_its_name(name: str, counters: tuple[int, ...], outcome: str) -> None:
    line = f"Memory cgroup out of memory: Killed process 99 ({name}) total-vm:1kB, anon-rss:1kB"
    found = evidence(line, pids_differ=True, cgroup_kills=tuple(grown(by, "memory.events") for by in counters))
    weighed = weigh("unknown", found, explained=True)
    assert weighed.outcome == outcome
    if outcome == "oom.host":
        assert "by its name: kernel messages name the host's pids" in (weighed.note or "")


@pytest.mark.parametrize(
    ("counter", "words"),
    [(grown(0), "the kernel's OOM killer did not strike during this boot"), (None, "by whom is not known")],
)
def test_a_guess_at_the_oom_killer_needs_its_trace(counter: Counter | None, words: str) -> None:
    weighed = weigh("oom.host", evidence(host_kills=counter), explained=True, signature="sglang.rank_died")
    assert weighed.outcome == "indeterminate.peer_died"
    assert words in (weighed.note or "")
    for found in (evidence(KILLED, host_kills=counter), *ANYBODYS.values()):
        assert weigh("oom.host", found, explained=True, signature="sglang.rank_died").outcome == "oom.host"


def test_hardware_comes_before_a_kill_and_the_kill_is_not_lost() -> None:
    weighed = weigh("unknown", evidence(KILLED, OFF_BUS, pids=frozenset()), explained=True)
    assert weighed.outcome == "hardware"
    assert f"the OOM killer ended process {PID}" in (weighed.note or "")


@pytest.mark.parametrize("outcome", sorted(HOST_FAULTS | {"unknown", "oom.weights"}))
def test_without_evidence_nothing_changes(outcome: str) -> None:
    weighed = weigh(outcome, Evidence(), explained=True, note="said before")
    assert (weighed.outcome, weighed.note) == (outcome, "said before")


def test_secrets_of_a_command_line_are_not_quoted() -> None:
    line = xid(31, rest=", pid=77, name=python, --api-key=sk-verysecretkey0123456789")
    assert "verysecretkey" not in (weigh("unknown", evidence(line), explained=True).note or "")

"""Two servers compared: at once where there is room, in turns elsewhere, and what may go wrong on the way."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.measured import QUICK, Boots, Run, fact, gpus_of, lines, loaded
from tests.standin.fixtures import FakeRigFactory


@pytest.fixture(autouse=True)
def _short_samples(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(QUICK)


COMPARED = """
    @needs_gpus(1)
    @at(400)
    @fits
    @compare(other=at(50), ratio=">1.1", **LOAD)
    def test_faster(server):
        assert server.generate("still up")

    @needs_gpus(1)
    @at(50)
    @compare(other=at(400), ratio=">0.9", **LOAD)
    def test_slower(): ...
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_two_servers_are_compared_at_once_where_there_is_room_and_in_turns_elsewhere(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, boots: Boots, gpus: int
) -> None:
    fake_rig(n=gpus).apply(monkeypatch)
    result = loaded(claims, COMPARED, "-v")
    lines(result, "CONTRADICTED (worse) *test_slower *× the other's tok/s (*, claimed >0.9")
    lines(result, "HOLDS *test_faster*", "*HOLDS: compare(ratio>1.1, *× the other's tok/s (*, claimed >1.1")
    assert len(gpus_of(boots())) == (4 if gpus == 2 else 6)  # in turns A B A
    assert len(set(gpus_of(boots()))) == gpus
    how = "both up at once" if gpus == 2 else "one after the other on the same GPUs"
    lines(result, f"*the two servers: {how}*")


def test_a_comparison_that_must_be_alone_is_made_in_turns(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, boots: Boots
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @at(400)
        @compare(other=at(50), ratio=">1.1", together=False, **LOAD)
        def test_alone(): ...
        """,
    )
    lines(result, "HOLDS *test_alone *")
    assert len(gpus_of(boots())) == 3


def test_a_comparison_with_a_server_that_fails_or_is_not_here(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @serves("sglang", MODEL)
        @compare(other=serves("sglang", MODEL, env={"FAKE_SGLANG": "weights_oom"}), ratio=">2", **LOAD)
        def test_fails(): ...

        @needs_gpus(1)
        @serves("sglang", MODEL)
        @fits
        @compare(other=serves("sglang", "no-such-model"), ratio=">2", **LOAD)
        def test_absent(): ...
        """,
    )
    lines(result, "CONTRADICTED (worse) *test_fails *the other server: oom.weights: *")
    lines(result, "NOT_EVALUATED *test_absent *the other server cannot be booted here: *no-such-model*")
    lines(result, "*HOLDS: fits: ready*")


def test_others_that_differ_by_their_environment_are_other_servers(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @at(200)
        @compare(other=at(25), ratio=">1.1", **LOAD)
        def test_slow_other(): ...

        @needs_gpus(1)
        @at(200)
        @compare(other=at(2000), ratio=">1.1", **LOAD)
        def test_fast_other(): ...
        """,
    )
    assert fact(result, "test_slow_other").startswith("HOLDS")
    assert fact(result, "test_fast_other").startswith("CONTRADICTED (worse)")


KILLED = """
    import os, signal
    from pathlib import Path
    from tests.standin import standin
    from pytest_gpuguard.loaded import Loaded
    sample, done = Loaded.sample, []

    def dies(self, most_s):
        if not done:
            done.append(self)
            card = standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"])).gpu[0]
            card.xid, card.xids = 79, card.xids + 1
            for pid in list(self._live.boot.processes):
                os.kill(pid, signal.SIGKILL)
        return sample(self, most_s)

    Loaded.sample = dies
"""


@pytest.mark.parametrize("together", [True, False])
def test_a_gpu_that_is_lost_in_a_comparison_is_the_hosts_fault(
    claims: Run,
    fake_rig: FakeRigFactory,
    monkeypatch: pytest.MonkeyPatch,
    pytester: pytest.Pytester,
    together: bool,
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    pytester.makeconftest(QUICK + dedent(KILLED))
    result = loaded(
        claims,
        f"""
        @needs_gpus(1)
        @at(400)
        @compare(other=at(50), ratio=">1.1", together={together}, **LOAD)
        def test_lost(): ...
        """,
    )
    assert fact(result, "test_lost").startswith("INFRA")
    assert "Xid 79" in fact(result, "test_lost")


def test_in_turns_it_is_the_same_gpu_or_nothing(
    claims: Run,
    fake_rig: FakeRigFactory,
    monkeypatch: pytest.MonkeyPatch,
    pytester: pytest.Pytester,
    boots: Boots,
) -> None:
    """A stranger takes the GPU between the boots: the other card is not what is compared."""
    fake_rig(n=2).apply(monkeypatch)
    pytester.makeconftest(
        QUICK
        + dedent(
            """
            import os, subprocess
            from pathlib import Path
            from tests.standin import standin
            from pytest_gpuguard.boots import BootPool
            stop, strangers = BootPool.stop, []

            def stops(self, live, keep=False):
                had = live.boot is not None
                stop(self, live, keep)
                if had and not strangers:
                    strangers.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
                    slot = standin.open_rig(Path(os.environ["GPUGUARD_FAKE_RIG"])).gpu[0].process[3]
                    slot.sticky, slot.bytes, slot.pid = 0, 30 << 30, strangers[0].pid
                    slot.start = standin.start_time(slot.pid)

            BootPool.stop = stops

            def pytest_unconfigure():
                for one in strangers:
                    one.kill()
            """
        )
    )
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @at(400)
        @compare(other=at(50), ratio="<1.5", together=False, **LOAD)
        def test_taken(): ...
        """,
        "-o",
        "gpuguard_reclaim=2",
    )
    assert fact(result, "test_taken").startswith("INFRA")
    assert "infra.dirty_gpu" in fact(result, "test_taken")
    assert gpus_of(boots()) == ["0"]


def test_a_limit_that_cannot_be_met_is_told_before_any_further_boot(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, boots: Boots
) -> None:
    fake_rig(n=1).apply(monkeypatch)
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @at(16)
        @compare(other=at(8), ratio=">1.2", **{**LOAD, "limit": "9s"})
        def test_short(): ...
        """,
        "-v",
    )
    assert fact(result, "test_short").startswith("INCONCLUSIVE")
    lines(result, "*one sample takes * s, the least that can decide, 7 blocks of 4, * s: write limit=*")
    assert len(gpus_of(boots())) == 1


def test_the_server_that_is_not_measured_is_idle(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester, tmp_path: Path
) -> None:
    fake_rig(n=2).apply(monkeypatch)
    pytester.makeconftest(
        QUICK
        + dedent(
            f"""
            from pytest_gpuguard.measure.meter import Meter
            meters, begin, sample = [], Meter.__init__, Meter.sample

            def begins(self, *args, **named):
                meters.append(self)
                begin(self, *args, **named)

            def samples(self, *args, **named):
                window = sample(self, *args, **named)
                with open({str(tmp_path / "idle")!r}, "a") as file:
                    file.write(" ".join(str(one._running) for one in meters if one is not self) + "\\n")
                return window

            Meter.__init__, Meter.sample = begins, samples
            """
        )
    )
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @at(400)
        @compare(other=at(50), ratio=">1.1", **LOAD)
        def test_quiet(): ...
        """,
    )
    assert fact(result, "test_quiet").startswith("HOLDS")
    assert set((tmp_path / "idle").read_text().split()) == {"False"}


def test_cards_of_another_kind_are_no_room(
    claims: Run, fake_rig: FakeRigFactory, monkeypatch: pytest.MonkeyPatch, boots: Boots
) -> None:
    rig = fake_rig(n=2)
    rig.shared.gpu[1].name = b"NVIDIA H200"
    rig.apply(monkeypatch)
    result = loaded(
        claims,
        """
        @needs_gpus(1)
        @at(400)
        @compare(other=at(50), ratio=">1.1", **LOAD)
        def test_mixed(): ...
        """,
    )
    assert fact(result, "test_mixed").startswith("HOLDS")
    assert gpus_of(boots()) == ["0", "0", "0"]

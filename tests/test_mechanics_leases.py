"""What a lease keeps others from, and when a boot may stand for two claims, on the NVML stand-in."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpuguard.lease.flocks import Locks
from pytest_gpuguard.lease.quarantine import put

Run = Any
FakeRigs = Any


def test_exclusive_keeps_the_whole_box(claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_rig(n=4).apply(monkeypatch)
    result = claims(
        """
        from pytest_gpuguard.lease.flocks import LeaseTimeout
        from pytest_gpuguard.lease.gpus import lease_gpus

        def others(rig, server):
            return [gpu.uuid for gpu in rig.gpus if gpu.uuid not in server.observation.gpus]

        @needs_gpus(2, exclusive=True)
        @serves("sglang", MODEL)
        def test_alone(rig, server):
            assert len(server.observation.gpus) == 2
            for uuid in others(rig, server):
                with pytest.raises(LeaseTimeout):
                    lease_gpus([uuid], 1)

        @needs_gpus(2)
        @serves("sglang", MODEL)
        def test_beside_others(rig, server):
            with lease_gpus(others(rig, server), 2) as lease:
                assert len(lease.uuids) == 2
        """
    )
    result.assert_outcomes(passed=2)


def test_a_gpu_in_quarantine_does_not_keep_the_rest_from_being_the_whole_box(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=3)
    rig.apply(monkeypatch)
    put(Locks(), rig.uuid(1), "hardware", "it fell off the bus")
    result = claims(
        """
        @needs_gpus(2, exclusive=True)
        @serves("sglang", MODEL)
        def test_alone(rig, server):
            assert server.observation.gpus == (rig.gpus[0].uuid, rig.gpus[2].uuid)

        @needs_gpus(3, exclusive=True)
        @serves("sglang", MODEL)
        def test_more_than_are_left(): ...
        """
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["INFRA *test_more_than_are_left *hardware: *is in quarantine since *fell off the bus*"]
    )


def test_equal_servers_on_other_cards_are_other_boots(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    boots = tmp_path / "boots"
    monkeypatch.setenv("FAKE_SGLANG_BOOTS", str(boots))
    rig = fake_rig(n=4)
    for index in (2, 3):
        rig.shared.gpu[index].cc_major = 9
    rig.apply(monkeypatch)
    result = claims(
        """
        @needs_sm120
        @serves("sglang", MODEL)
        def test_blackwell(): ...

        @needs_sm90
        @serves("sglang", MODEL)
        def test_hopper(): ...

        @needs_sm90
        @serves("sglang", MODEL)
        @fits
        def test_hopper_again(): ...
        """
    )
    result.assert_outcomes(passed=3)
    assert [line.rpartition("CUDA_VISIBLE_DEVICES=")[2][0] for line in boots.read_text().splitlines()] == ["0", "2"]


def test_gpus_that_mig_has_split_are_not_leased(
    claims: Run, fake_rig: FakeRigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fake_rig(n=1)
    rig.shared.gpu[0].mig = 1
    rig.apply(monkeypatch)
    result = claims(
        """
        @needs_gpus(1)
        @serves("sglang", MODEL)
        def test_it(): ...
        """
    )
    result.stdout.fnmatch_lines(["NOT_EVALUATED *test_it *needs a GPU, this rig's GPUs are all split by MIG"])

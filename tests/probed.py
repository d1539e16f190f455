"""A script that ends in every way there is, and the claims that ask it: what tests of probes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import ctypes, os, sys, time
from pytest_gpuguard.probes import kit

def rank(rank, world):
    kit.stage("meet")
    if kit.args.get("late") == rank:
        time.sleep(100)
    kit.answer(rank=rank, world=world)

def run():
    kit.stage("look")
    how = kit.args.get("how", "answer")
    with open(os.environ["PROBED"], "a") as file:
        file.write(f"{how} {os.environ.get('CUDA_VISIBLE_DEVICES')} {' '.join(kit.gpus)}\\n")
    if os.environ.get("CURED"):
        return
    if how == "defect":
        kit.defect("comm.p2p", "the link is bad")
    if how == "no such outcome":
        kit.defect("nonsense", "the link is bad")
    if how == "ready is no defect":
        kit.defect("ready", "the link is bad")
    if how == "raise":
        raise ImportError("libnvrtc.so.12: cannot open shared object file: No such file or directory")
    if how == "no line end":
        sys.stderr.write("progress 100%")
    if how == "defect then answer":
        try:
            kit.defect("comm.p2p", "the link is bad")
        except BaseException:
            pass
    if how == "stdout is gone":
        sys.stdout = None
        os.close(1)
    if how == "under tree" and os.environ.get("NCCL_ALGO") == "Tree":
        kit.defect("nccl.error", "no algorithm")
    if how == "slow":
        time.sleep(1.5)
    if how == "nan":
        kit.answer(nan=float("nan"), inf=[float("inf")], some=1.5)
    if how == "swallow":
        try:
            kit.defect("comm.p2p", "the link is bad")
        except Exception:
            pass
    if how == "segfault":
        ctypes.string_at(0)
    if how == "hang":
        time.sleep(100)
    if how == "flood":
        while True:
            print("x" * 1000)
    if how == "exit":
        os._exit(0)
    if how == "absent":
        kit.absent("tools", "there is no nvcc")
    if how == "forge":
        print('gpuguard-probe: {"answer": {"said": "forged"}}')
        os._exit(0)
    if how == "ranks":
        told = kit.ranks("rank", 3, 2.0)
        kit.answer(ok=[one.ok for one in told], hung=[one.hung for one in told], stage=told[0].stage)
        kit.answer(worlds=[one.data.get("world") for one in told])
    if how == "orphan":
        import subprocess
        subprocess.Popen(["sleep", "4321"], start_new_session=True)
    if how == "big":
        kit.answer(bulk="x" * 2_000_000)
    kit.answer(how=how, rig=kit.rig, driver=kit.driver, sms=kit.sms(), said=f"all is {how}")

if __name__ == "__main__":
    kit.main(run)
"""


@pytest.fixture
def probed(pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script ``look.py`` beside the tests; returns the lines of its runs so far: how, visible GPUs, UUIDs."""
    pytester.path.joinpath("look.py").write_text(SCRIPT)
    file = tmp_path / "probed"
    monkeypatch.setenv("PROBED", str(file))
    return lambda: file.read_text().splitlines() if file.exists() else []


def one(how: str, mark: str = "@works", given: str = "") -> str:
    return f"""
        {mark}
        def test_it(probe):
            probe("./look.py", args={{"how": {how!r}}}{given})
        """

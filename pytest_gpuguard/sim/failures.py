"""How a boot of SGLang fails and ends: tracebacks in its form, then the end that it puts to itself.

The outcome is decided elsewhere; here is only how it looks. None of these functions returns.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final, NoReturn

from .log import Log, Rank

_RUNNER: Final = "srt/model_executor/model_runner.py"
#: Frames of a traceback, by the phase that it is in: file within sglang, and function. Lines are not known.
_FRAMES: Final = {
    "init": (("srt/managers/tp_worker.py", "__init__"), (_RUNNER, "init_torch_distributed")),
    "weights": (("srt/managers/tp_worker.py", "__init__"), (_RUNNER, "load_model")),
    "kv_pool": (("srt/managers/tp_worker.py", "__init__"), (_RUNNER, "init_memory_pool")),
    "graph_capture": ((_RUNNER, "init_device_graphs"), ("srt/model_executor/cuda_graph_runner.py", "__init__")),
    "warmup": (("srt/managers/scheduler.py", "run_batch"), (_RUNNER, "forward")),
}
_HEAD = "Traceback (most recent call last):"


def refused(log: Log, text: str) -> NoReturn:
    """What argparse refuses: usage on stderr, status 2."""
    log.raw(f"usage: launch_server.py [-h] --model-path MODEL_PATH [...]\nlaunch_server.py: error: {text}")
    _exit(2)


def rejected(log: Log, exception: str) -> NoReturn:
    """Arguments that are refused before any process is forked: a plain traceback, status 1."""
    log.raw("\n".join([_HEAD, *_frame("srt/server_args.py", "__post_init__"), exception]))
    _exit(1)


def died(log: Log, rank: Rank, phase: str, exception: str) -> NoReturn:
    """An exception in a scheduler: told by its rank, then everything is killed, the main process too."""
    lines = [f"Scheduler hit an exception: {_HEAD}", *_frame("srt/managers/scheduler.py", "run_scheduler_process")]
    for file, function in _FRAMES.get(phase, ()):
        lines += _frame(file, function)
    log.line("\n".join([*lines, exception, ""]), rank)
    log.say("sigquit")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _frame(file: str, function: str) -> list[str]:
    return [f'  File "/simulated/sglang/{file}", line 1, in {function}']


def _exit(status: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(status)

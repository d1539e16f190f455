"""Small logs in the wording and with the prefixes of the programs that print them, for the tests of the signatures.

Each helper gives what one program prints around a failure; it must never add words that a signature looks for.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpuguard.claims.observation import LogReading
from pytest_gpuguard.diagnose import classify_text
from pytest_gpuguard.diagnose.lines import peel

HEADER = "Traceback (most recent call last):\n"
SITE = "/x/lib/python3.12/site-packages/"
RUNNER = "sglang/srt/model_executor/model_runner.py initialize"
CORE = "vllm/v1/engine/core.py __init__"

# --- SGLang ---
RANK0 = "[2026-01-02 03:04:05 TP0] "
RANK1 = "[2026-01-02 03:04:06 TP1] "
MAIN = "[2026-01-02 03:04:05] "
SIGQUIT = MAIN + "Received sigquit from a child process. It usually means the child failed.\n"
INIT = RANK0 + "Init torch distributed begin.\n"
LOADING = RANK0 + "Load weight begin. avail mem=94.00 GB\n"
LOADED = LOADING + RANK0 + "Load weight end. elapsed=9.00 s, type=M, avail mem=10.00 GB, mem usage=84.00 GB.\n"
POOLED = LOADED + RANK0 + "Memory pool end. avail mem=5.00 GB\n"
CAPTURING = POOLED + RANK0 + "Capture cuda graph begin. This can take up to several minutes. avail mem=5.00 GB\n"
SERVING = POOLED + MAIN + "The server is fired up and ready to roll!\n"

# --- vLLM ---
CORE0 = "(EngineCore_DP0 pid=1002) "
API = "(APIServer pid=1) "
V1 = API + "INFO 01-02 03:04:01 [api_server.py:1034] vLLM API server version 0.11.0\n"
V1_LOADING = V1 + CORE0 + "INFO 01-02 03:04:02 [gpu_model_runner.py:2602] Starting to load model m...\n"
V1_SERVING = V1_LOADING + API + "INFO:     Application startup complete.\n"
V0 = "INFO 01-02 03:04:01 api_server.py:651] vLLM API server version 0.6.4\n"
V0_LOADING = V0 + "INFO 01-02 03:04:02 model_runner.py:1014] Starting to load model m...\n"


@dataclass(frozen=True, slots=True)
class Example:
    """A log, and what must be read from it: the signature, its outcome, and words of the decisive line.

    ``phase``: where the signature or the log tells one.
    """

    signature: str
    outcome: str
    words: str
    log: str
    phase: str | None = None

    @property
    def engine(self) -> str | None:
        """Whose log it is: sglang, vllm, or None for every other program's."""
        engines = {peel(line).engine for line in self.log.splitlines()}
        return next((name for name in ("sglang", "vllm") if name in engines), None)


def frames(*where: str) -> str:
    """Stack frames, each given as ``path function`` or ``path function | line of code``."""
    text = ""
    for number, frame in enumerate(where, 1):
        place, _, code = frame.partition(" | ")
        path, function = place.rsplit(" ", 1)
        text += f'  File "{SITE}{path}", line {number}, in {function}\n    {code or function + "()"}\n'
    return text


def raised(exception: str, *where: str) -> str:
    """A traceback that nobody announced, as Python prints it."""
    return HEADER + frames(*(where or ("app/main.py run",))) + exception + "\n"


def sglang(exception: str, *where: str, before: str = LOADING) -> str:
    """A scheduler of SGLang dies of an exception."""
    head = RANK0 + "Scheduler hit an exception: "
    return before + head + raised(exception, *(where or (RUNNER,))) + "\n" + SIGQUIT


def capture(text: str, before: str = CAPTURING) -> str:
    """SGLang's graph capture fails, with the wrapper and the advice that it adds."""
    advice = "Possible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
    return sglang(f"Exception: Capture cuda graph failed: {text}\n{advice}", before=before)


def vllm(exception: str, *where: str, before: str = V1_LOADING) -> str:
    """The core of a vLLM V1 server dies while it starts."""
    each = CORE0 + "ERROR 01-02 03:04:05 [core.py:708] "
    core = "EngineCore failed to start.\n" + raised(exception, *(where or (CORE,)))
    parent = raised("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    return before + prefixed(each, core) + prefixed(API, parent)


def v0(exception: str, *where: str, before: str = V0_LOADING) -> str:
    """A vLLM V0 server dies while it starts."""
    head = "ERROR 01-02 03:04:05 engine.py:366] " + exception.splitlines()[0].split(": ", 1)[-1] + "\n"
    return before + head + raised(exception, *(where or ("vllm/engine/multiprocessing/engine.py run_mp_engine",)))


def prefixed(prefix: str, text: str) -> str:
    """Every line of the text behind a prefix."""
    return "".join(prefix + line + "\n" for line in text.splitlines())


def readings(example: Example) -> list[LogReading]:
    """What the log says to a reader that knows the engine, and to one that does not."""
    engines = dict.fromkeys((example.engine, None))
    return [classify_text(example.log, engine=engine) for engine in engines]


def check(example: Example) -> None:
    """Assert that the log is read as the example says, whether the engine is known or not."""
    for reading in readings(example):
        assert (reading.signature, reading.outcome) == (example.signature, example.outcome), reading
        assert reading.decisive is not None
        assert example.words in reading.decisive.text, reading
        assert example.phase in (None, reading.phase), reading

"""Cut an engine's byte stream into lines, and say of each line who wrote it and at which level.

Memory is constant however long a line is, and no byte sequence makes it fail.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Final

from .spellings import load_spellings

#: A line is judged on its first 64 KiB.
LINE_LIMIT: Final = 64 * 1024
#: So many pieces of a line that carriage returns overwrote are judged, and its last one.
PIECES: Final = 500

_SEPARATOR: Final = re.compile(rb"[\r\n]")
#: Also as syslog writes it.
ANSI: Final = re.compile(r"(?:\x1b|#033)\[[0-9;?]{0,16}[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Line:
    """One piece of output. ``number`` counts from 1; ``final`` is False for what a carriage return overwrote."""

    number: int
    text: str
    final: bool = True


class LineSplitter:
    r"""Bytes in any chunks → lines. ``\r\n`` ends a line; a lone ``\r`` ends a piece of it (a progress bar)."""

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._held: bytes | None = None
        self._number = 1
        self._pieces = self._piece_of = 0

    def feed(self, data: bytes) -> list[Line]:
        """The lines and pieces that this chunk completes."""
        lines: list[Line] = []
        start = 0
        for match in _SEPARATOR.finditer(data):
            self._append(data, start, match.start(), lines)
            start = match.end()
            if match[0] == b"\n":
                text = self._held if self._held is not None and not self._buffer else bytes(self._buffer)
                self._held = None
                self._buffer.clear()
                lines.append(Line(self._number, _decode(text)))
                self._number += 1
            else:
                self._release(lines)
                self._held = bytes(self._buffer)
                self._buffer.clear()
        self._append(data, start, len(data), lines)
        return lines

    @property
    def at_start(self) -> bool:
        """Whether the next byte begins a line."""
        return not self._buffer and self._held is None

    @property
    def number(self) -> int:
        """The number of the line that the next byte belongs to."""
        return self._number

    def skip(self, count: int) -> None:
        """Count lines that somebody else has read."""
        self._number += count

    def close(self) -> list[Line]:
        """What was written after the last line end, if anything."""
        lines: list[Line] = []
        if self._buffer:
            self._release(lines)
            lines.append(Line(self._number, _decode(bytes(self._buffer))))
        elif self._held:
            lines.append(Line(self._number, _decode(self._held)))
        if lines:
            self._number += 1
        self._buffer.clear()
        self._held = None
        return lines

    def _append(self, data: bytes, start: int, end: int, lines: list[Line]) -> None:
        if start == end:
            return
        self._release(lines)
        room = self._limit - len(self._buffer)
        if room > 0:
            self._buffer += data[start : min(end, start + room)]

    def _release(self, lines: list[Line]) -> None:
        self._pieces = 0 if self._piece_of != self._number else self._pieces + 1
        self._piece_of = self._number
        if self._held and self._pieces < PIECES:
            lines.append(Line(self._number, _decode(self._held), final=False))
        self._held = None


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class Peeled:
    """A line without its prefix.

    ``source``: rank, worker or process as the prefix names it ("" if it names none). ``level``: error, warning, info,
    nccl (an NCCL WARN line) or "" where the format has none. ``logged``: it began with a logger's time stamp or level,
    so it does not continue the line before. ``engine``: whose prefix it was, if that is certain. ``worker``: a prefix
    that a launcher (Ray) put in front of the engine's own.
    ``place``: the file that logged it, where the prefix says so.
    """

    source: str
    level: str
    logged: bool
    body: str
    engine: str | None = None
    worker: str = ""
    place: str = ""


_LEVELS: Final = {
    "DEBUG": "info",
    "INFO": "info",
    "I": "info",
    "WARN": "warning",
    "WARNING": "warning",
    "W": "warning",
    "ERROR": "error",
    "CRITICAL": "error",
    "FATAL": "error",
    "E": "error",
    "F": "error",
    "ERR": "error",
    "PANIC": "error",
    "EMERGENCY": "error",
    "ALERT": "error",
    "WRN": "warning",
    "40": "warning",
    "50": "error",
    "60": "error",
}
#: What a log collector put in front: compose, a container runtime, ``[name]: ``, the journal or syslog.
_LEVEL: Final = "DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL"
_ISO: Final = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
#: A time with a level behind it is the program's own (Rust's tracing), unless vLLM's own time follows.
_CONTAINER: Final = re.compile(
    r"[\w.\-/]{1,64} {1,40}\| "
    rf"|{_ISO}(?:\.\d{{1,9}})?(?:Z|[+-]\d\d:?\d\d) [\w.\-]{{1,64}} [\w.@\-/()]{{1,64}}\[\d{{1,9}}\]: "
    rf"|{_ISO}\.\d{{1,9}}(?:Z|[+-]\d\d:\d\d) (?! {{0,3}}(?:{_LEVEL}) (?!\d\d-\d\d ))(?:std(?:out|err) [FP] )?"
    r"|\[(?!rank\d)[A-Za-z][\w.\-/]{0,64}\]: "
    rf"|\[pod/[\w.\-/]{{1,200}}\] (?:{_ISO}(?:\.\d{{1,9}})?Z )?"
    rf"|(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{{1,6}})?|{_ISO}(?:Z|[+-]\d\d:?\d\d)) "
    rf"(?!(?:{_LEVEL}) )[\w.\-]{{1,64}} [\w.@\-/()]{{1,64}}(?:\[\d{{1,9}}\])?: "
)
_SGLANG: Final = load_spellings().prefix
_WORKER: Final = re.compile(r"(?:\([A-Za-z_]\w{0,40}(?:[ ,] ?(?:rank|pid|ip)=[\w.:]{1,40}){0,3}\) ){1,4}")
_VLLM: Final = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d "
    r"(?:\[(?P<place>[^\]\s]{1,80})\]|(?P<old>[\w.]{1,60}):\d{1,6}\]) ?"
)
#: Where an engine's own prefix begins, behind whatever a launcher or log collector of another format put in front.
_INNER: Final = re.compile(
    r"\((?:EngineCore|Worker|APIServer|VllmWorker|RayWorker|SGLang)[^)\n]{0,60}\) "
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d "
    r"|\[(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?(?: [A-Z_]{2,12}\d{1,5}){0,8}\] |\[rank\d{1,5}\]:"
    r"|\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] \[TRT"
)
_INNER_WITHIN: Final = 100
_RANK: Final = re.compile(r"\[(?P<rank>rank\d{1,5})\]: ?|\[(?P<gpu>gpu(?:_id)?=\d{1,5})\] ?")
_C10D: Final = re.compile(r"\[(?P<level>[EWIF])(?:\d{3,4})? [^\]\n]{0,120}\] ?")
_GLOG: Final = re.compile(r"(?P<level>[IWEF])\d{4} \d\d:\d\d:\d\d\.\d{1,9} {1,8}\d{1,9} [\w./]{1,80}:\d{1,6}\] ?")
_UVICORN: Final = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL): {1,10}")
_STANDARD: Final = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d{0,9}Z? {1,4}(?:- )?(?:[\w.]{1,80} - )?"
    rf"(?P<level>{_LEVEL})\b(?: - )? ?"
)
_LOGURU: Final = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]?\d{0,6} {0,2}\| {0,2}"
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) {0,9}\| {0,2}(?:[^|\n]{1,120}\| )?"
)
_TRTLLM: Final = re.compile(
    r"(?:\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] )?(?:\[TensorRT-LLM\]\[(?P<long>[A-Z]{4,8})\] ?"
    r"|\[TRT-LLM\] (?:\[RANK (?P<rank>\d{1,5})\] )?\[(?P<short>[EWIF])\] ?){1,3}"
)
#: One JSON object a line: the keys that loggers use for the level and for the text.
_JSON_LEVEL: Final = re.compile(r'"(?:level|levelname|severity|lvl)" ?: ?"?(?P<level>[A-Za-z]{3,9}|\d\d)\b')
_JSON_TEXT: Final = ("message", "msg", "event", "text", "log")
_JSON_TRACE: Final = ("exc_info", "exception", "exc_text", "traceback", "stack_trace")
_PYTHON_WARNING: Final = re.compile(r"\S{1,300}\.py:\d{1,6}: \w{0,40}Warning: ")
#: A warning without a time stamp, also one that names its program (``libibverbs: Warning: …``).
_PLAIN_WARNING: Final = re.compile(r"(?:[\w.+-]{1,40}: )?(?:WARN|WARNING|Warning): ?")


def inner(text: str, start: int = 0) -> int:
    """Where an engine's own prefix begins near ``start``; -1 if none does."""
    match = _INNER.search(text, start, start + _INNER_WITHIN + 80)
    return match.start() if match is not None and match.start() - start <= _INNER_WITHIN else -1


def peel(text: str) -> Peeled:
    """Take the prefix off a line; a line in no known format comes back whole, without level."""
    peeled = _peel(text)
    if not peeled.level and not peeled.logged and not peeled.source:
        begin = inner(text)
        if begin > 0:
            found = _peel(text[begin:])
            if found.logged or found.source:
                return found
    return peeled


def _peel(text: str) -> Peeled:
    if "\x1b" in text or "#033[" in text:
        text = ANSI.sub("", text)
    if text[:1].isspace() or not text:
        return Peeled("", "", False, text)
    outer = _CONTAINER.match(text)
    if outer is not None and outer.end() < len(text):
        text = text[outer.end() :]
    source = ""
    match = _WORKER.match(text)
    if match is not None:
        source, text = match[0].strip(), text[match.end() :]
    match = _SGLANG.match(text)
    if match is not None:
        body = text[match.end() :]
        inner = _UVICORN.match(body)
        level = _LEVELS[inner["level"]] if inner else ""
        if inner is None and (nccl := _nccl(body)):
            return Peeled(match["ranks"].strip(), nccl, True, body, None, source)
        return Peeled(match["ranks"].strip(), level, True, body[inner.end() :] if inner else body, "sglang", source)
    match = _VLLM.match(text)
    if match is not None:
        place = match["place"] or match["old"]
        return Peeled(source, _LEVELS[match["level"]], True, text[match.end() :], "vllm", place=place)
    match = _RANK.match(text)
    if match is not None:
        source, text = source or match["rank"] or match["gpu"], text[match.end() :]
    for prefix in (_C10D, _GLOG, _UVICORN, _STANDARD, _LOGURU):
        match = prefix.match(text)
        if match is not None:
            level, rest = _LEVELS[match["level"]], text[match.end() :]
            if prefix is _STANDARD and (_SGLANG.match(rest) or _VLLM.match(rest)):
                return _peel(rest)  # a launcher's logger around the engine's own
            return Peeled(source, level, True, rest)
    match = _TRTLLM.match(text)
    if match is not None:
        level = _LEVELS.get(match["short"] or match["long"] or "", "info")
        rank = f"rank{match['rank']}" if match["rank"] else ""
        return Peeled(source or rank, level, True, text[match.end() :], "trtllm")
    if text[:1] == "{" and (record := _record(text)) is not None:
        return replace(record, source=source or record.source)
    if " NCCL " in text[:300]:
        return Peeled(source, _nccl(text), False, text)
    if _PYTHON_WARNING.match(text) or _PLAIN_WARNING.match(text):
        return Peeled(source, "warning", False, text)
    return Peeled(source, "", False, text)


def _nccl(text: str) -> str:
    """The level of a line of NCCL's own log."""
    head = text[:300]
    if " NCCL WARN " in head:
        return "nccl"
    return "info" if " NCCL INFO " in head or " NCCL TRACE " in head else ""


def _record(text: str) -> Peeled | None:
    """A log record that is one JSON object; None when the line is none."""
    found = _JSON_LEVEL.search(text)
    collected = found is None and '"stream"' in text and '"log"' in text  # Docker's own files
    if found is None and not collected:
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if found is None:
        said = record.get("log")
        return _peel(said.rstrip("\r\n")) if isinstance(said, str) else None
    level = _LEVELS.get(found["level"].upper(), "info")
    for holder in (record, record.get("fields")):
        if isinstance(holder, dict):
            said = next((holder[key] for key in _JSON_TEXT if isinstance(holder.get(key), str)), None)
            if said is not None:
                trace = next((holder[key] for key in _JSON_TRACE if isinstance(holder.get(key), str)), "")
                return Peeled("", level, True, f"{said}\n{trace}" if trace else said)
    return None

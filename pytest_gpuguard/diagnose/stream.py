"""Read an engine's log in one pass: which phase it is in, whether it is ready, what ended it, what its memory was.

Constant memory, any chunking, any bytes. It must never call advice, a warning, an argument dump or an exit code a
failure, and never a consequence a cause; what it does not know is ``unknown``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from ..claims.observation import Decisive, LogReading
from ..claims.outcome import READY, STARTING, UNKNOWN
from ..names import STAND_IN
from .blocks import HEADER, Block, Spoken, is_exception_line
from .boot import Boot, Event, Progress, match_bar
from .failures import Failures, matching
from .findings import Findings
from .lines import Line, Peeled, inner, peel
from .redact import redact
from .resolved import Collector
from .signature import BY_PHASE, SignatureFile
from .signatures import load_signatures
from .skim import Skim
from .spellings import load_spellings
from .tracebacks import MOST, Tracebacks
from .whose import Whose

_LEFT_OUT: Final = "Ignore import error when loading"
_WHAT: Final = re.compile(r"\s{0,8}what\(\):\s{0,8}(?P<text>.{1,4000})", re.DOTALL)
#: An error that is not the last word: the program says that it tries again.
_AGAIN: Final = re.compile(r"\b[Rr]etrying (?:\d{1,3} of \d{1,3}|in \d|after \d|\(|without )")
_TEXT_LIMIT: Final = 4000
#: What the main process logs when it begins to boot, and what shows that it does.
_BEGINNINGS: Final = ("server_args=", "vLLM API server version ")
_LOADS: Final = ("Load weight begin.", "Starting to load model")
#: So many lines of one record are read.
_PARTS: Final = 200


class Classifier:
    """Lines in, events out; ``reading()`` at any time. Use ``engines.log.LogReader`` for a byte stream."""

    def __init__(
        self,
        engine: str | None = "sglang",
        version: str | None = None,
        majors: Collection[int] = (),
        extra: tuple[SignatureFile, ...] = (),
    ) -> None:
        """``majors``: the compute capabilities' majors of the GPUs, if known (they tell two JIT failures apart).

        ``extra``: signature files of the user's.
        """
        self._majors = frozenset(majors)
        self.lines = 0
        self._set = load_signatures(engine, version, extra)
        self._fatal_lines = tuple(signature for signature in self._set.lines if signature.fatal)
        self._certain = tuple(signature for signature in self._set.lines if signature.fatal or signature.hard)
        self._boot = Boot(self._set, load_spellings())
        self._whose = Whose(engine, version)
        self._collector = Collector(engine, version, self._majors)
        self._failures = Failures(self._set, self._boot, self._majors)
        self._tracebacks = Tracebacks(self._boot, self._set.advice, self._ended)
        self._worker_rank: dict[str, str] = {}
        self._usage = False
        self._simulated = False
        #: The failure counts only because nothing came after it.
        self._weak = False
        #: Arguments that were printed after the end of a boot: another one may begin.
        self._again: tuple[int, Peeled] | None = None
        #: How many boots the log holds so far.
        self.boots = 1
        self._skim = Skim(self._set, self._collector.by_digits)
        #: Counts lines of a launcher's workers, each of which may name another rank.
        self._launched = 0

    @property
    def _findings(self) -> Findings:
        return self._failures.findings

    @property
    def progress(self) -> Progress:
        """The phase, with the last progress bar if it was drawn in this phase."""
        bar = self._boot.progress
        return bar if bar is not None and bar.phase == self._boot.phase else Progress(self._boot.phase)

    @property
    def phase(self) -> str:
        """The phase that the boot is in."""
        return self._boot.phase

    @property
    def in_traceback(self) -> bool:
        """Whether a traceback has begun whose exception has not been printed yet."""
        return self._tracebacks.in_frames

    def feed(self, line: Line) -> list[Event]:
        """Take the next line, or the next piece of a line that a carriage return overwrote."""
        self.lines = max(self.lines, line.number)
        text = line.text
        bar = match_bar(text) if self._boot.spellings.prefix.match(text) is None else None
        if bar is not None:
            self._boot.bar(bar, line.number)
            # Another process may have written right behind the bar, without a line end between.
            embedded = self._boot.spellings.prefix.search(text, bar.end())
            begin = embedded.start() if embedded is not None else inner(text, bar.end())
            text = text[begin:] if begin > 0 else ""
        if text:
            self._judge(line.number, text)
        return self._boot.drain()

    def skim(self, data: bytes, start: int) -> tuple[int, int]:
        """Pass over lines that say nothing new; returns where the next line begins, and how many were passed.

        ``data[start:]`` must begin a line.
        """
        return self._skim.over(data, start)

    def passed(self, number: int) -> None:
        """Lines up to this number were passed over (``skim``)."""
        self.lines = max(self.lines, number)

    def judged(self, raw: bytes) -> None:
        """A whole line was fed (b"": a piece of one); what says nothing need not be judged again."""
        boot, findings = self._boot, self._findings
        state = (
            boot.moves,
            boot.ready,
            findings.revision,
            findings.hint is None,
            findings.left_out is None,
            findings.peers_died,
            self._collector.revision,
            self._whose.revision,
            self._launched,
            self._failures.stopping,
            self.boots,
            self._again is None,
            self._usage,
            self._tracebacks.state,
        )
        self._skim.judged(raw, state, self._settled)

    @property
    def _settled(self) -> bool:
        """Whether nothing is open that one more healthy line could change, for whichever rank prints it."""
        if self._tracebacks.any_open or self._usage or self._findings.undecided:
            return False
        return self._boot.ready or self._boot.in_step

    def close(self) -> list[Event]:
        """The log is complete: what was printed last and not survived has ended the engine."""
        self._tracebacks.end_all()
        decisive = self._findings.decisive()
        if decisive is not None and not self._boot.ready and not self._failures.fatal:
            self._failures.fatal = self._weak = True
            self._boot.announce(Event("fatal", decisive.phase, decisive.line, redact(decisive.text)))
        return self._boot.drain()

    def become_ready(self) -> None:
        """The server is known to be ready by other means than its log."""
        self._boot.become_ready(self.lines)

    def reading(self) -> LogReading:
        """What the lines so far say."""
        decisive = self._findings.decisive()
        boot = self._boot
        reading = LogReading(
            outcome=READY if boot.ready else STARTING,
            phase=boot.phase,
            engine=self._whose.engine,
            engine_version=self._whose.version,
            memory=boot.memory(),
            ready_line=boot.ready,
            lines=self.lines,
            boots=self.boots,
            clipped=boot.clipped,
            fullest_rank=boot.store.fullest(),
            ranks=boot.store.each(),
            loaded=boot.loaded,
            simulated=self._simulated,
            evidence=self._collector.evidence(),
        )
        if decisive is None or (boot.ready and not self._failures.fatal):
            return reading
        decisive = self._failures.placed(decisive)
        return replace(
            reading,
            outcome=decisive.outcome,
            phase=decisive.phase,
            decisive=Decisive(decisive.line, redact(decisive.text)),
            signature=decisive.signature,
            why=decisive.why,
            cure=decisive.cure,
            fatal=self._failures.fatal,
            weak=self._weak,
            consequences=tuple(redact(text) for text in self._findings.consequences(decisive)),
        )

    # --- one line ---------------------------------------------------------------------------------------------------

    def _judge(self, number: int, text: str) -> None:
        peeled = peel(text)
        self._tracebacks.end_old(number)
        if peeled.worker and len(self._worker_rank) < MOST:
            self._worker_rank[peeled.worker] = peeled.source
            self._launched += 1
        elif peeled.source in self._worker_rank:
            peeled = replace(peeled, source=self._worker_rank[peeled.source])
        if number == 1:
            self._simulated = peeled.body.startswith(STAND_IN)
        self._whose.line(peeled)
        self._boot.one_by_one = self._whose.one_by_one
        self._collector.line(number, peeled)
        if "\n" in peeled.body:  # a record that holds a whole traceback
            for part in filter(str.strip, peeled.body.split("\n", _PARTS)[:_PARTS]):
                self._judge_peeled(number, part, replace(peeled, body=part))
        else:
            self._judge_peeled(number, text, peeled)

    def _judge_peeled(self, number: int, text: str, peeled: Peeled) -> None:
        body = peeled.body
        if self._usage and not peeled.logged and (text[:1].isspace() or text.startswith("usage: ")):
            return
        self._usage = not peeled.logged and text.startswith("usage: ")
        if self._usage:
            return
        if peeled.logged:
            self._tracebacks.separate(peeled)
        if body.startswith(self._set.dumps):
            self._boot.arguments(body)
            self._go_on(number, peeled)
            return
        if peeled.level in ("info", "warning"):
            self._go_on(number, peeled)
            self._warning(number, text, peeled)
            self._tracebacks.warned(peeled)
            return
        if peeled.level != "nccl" and self._traceback(number, body, peeled):
            return
        self._go_on(number, peeled)
        if not self._line(number, body, peeled):
            self._plain(number, body, peeled)

    def _go_on(self, number: int, peeled: Peeled) -> None:
        self._begin_again(number, peeled)
        if self._boot.line(number, peeled, self._whose.engine):
            self._findings.forget_survived(peeled.source)
            self._findings.forget_hint(self._boot.furthest)
            self._failures.fatal = self._findings.fatal
        elif peeled.engine == "sglang" and peeled.source and self._findings.undecided:
            # A rank that died of it prints nothing more.
            self._findings.forget_weak(peeled.source)

    def _begin_again(self, number: int, peeled: Peeled) -> None:
        """One log may hold several boots, one after the other: what the ones before said is not of the last one.

        Arguments are printed when a boot begins; that it does is shown by the first rank that loads.
        """
        if peeled.logged and not peeled.source and peeled.body.startswith(_BEGINNINGS):
            over = self._boot.ready or self._failures.stopping or bool(self._findings.by_weight)
            self._again = (number, peeled) if over else None
        elif self._again is not None and any(words in peeled.body for words in _LOADS):
            events = self._boot.drain()
            self._boot = Boot(self._set, load_spellings())
            for event in events:
                self._boot.announce(event)
            self._boot.one_by_one = self._whose.one_by_one
            self._boot.arguments(self._again[1].body)
            self._failures = Failures(self._set, self._boot, self._majors, self._findings.revision + 1)
            self._tracebacks = Tracebacks(self._boot, self._set.advice, self._ended)
            self._collector.reset()
            self._collector.line(*self._again)
            self._worker_rank.clear()
            self._again = None
            self.boots += 1

    def _traceback(self, number: int, body: str, peeled: Peeled) -> bool:
        """Follow tracebacks; True when the line is part of one and says nothing else."""
        aborted = body.startswith("terminate called after throwing")
        announced = aborted or (peeled.logged and any(word in body for word in self._set.deaths))
        header = HEADER in body
        if announced or header:
            block = self._tracebacks.begin(number, body, peeled, announced)
            self._findings.peers_died = self._findings.peers_died or announced
            head = body.split(HEADER)[0]
            found = matching(head, "", (self._set.exceptions,)) if peeled.level == "error" or announced else None
            if found is not None:
                self._failures.found(found, Spoken(number, body), block)
                block.spoken = True
            elif not header:
                # "X hit an exception: ValueError: …" on one line; an announcement alone waits for its traceback.
                tail = body.rsplit("exception: ", 1)[-1].strip()
                if tail != body.strip() and is_exception_line(tail):
                    for spoken in block.feed(number, tail, self._set.advice):
                        self._speak(block, spoken)
            return True
        taken = self._tracebacks.take(number, body, peeled)
        if taken is None:
            return not (peeled.logged and peeled.level != "error") and self._what(number, body, peeled)
        block, spoken_lines = taken
        for spoken in spoken_lines:
            self._speak(block, spoken)
        return bool(spoken_lines) or block.in_frames or block.in_advice

    def _what(self, number: int, body: str, peeled: Peeled) -> bool:
        match = _WHAT.match(body)
        text = match["text"] if match is not None else body if peeled.level == "error" else None
        if text is None or _AGAIN.search(text) is not None:
            return False
        if match is None and any(word in text for word in self._set.around):
            return False
        # What the engine does not survive comes first: a watcher must not wait for the end of such a log.
        signature = matching(text, "", (self._fatal_lines, self._set.exceptions, self._set.lines))
        if signature is not None:
            # A line of code says what would be said; the line that says it may follow.
            code = body[:1].isspace() and body.lstrip().startswith("raise ")
            # Logged as an error, it may have been survived: an exception that ended the engine says more.
            strong = None if signature.fatal else False
            self._failures.found(
                signature, Spoken(number, body), None, peeled.source, False if code else strong, peeled.place
            )
        return signature is not None

    def _speak(self, block: Block, spoken: Spoken) -> None:
        text = spoken.text[:_TEXT_LIMIT]
        if spoken.name in self._set.ignored or (spoken.name and spoken.name.endswith("Warning")):
            block.died = block.died and spoken.name.endswith("Warning")
            return
        if not spoken.more:
            for wrapper in self._set.wrappers:
                if wrapper.pattern.search(text) is not None:
                    block.wrapper_phase = wrapper.phase or block.wrapper_phase
        frames = block.frames_text()
        self._failures.note_phase(frames)
        if not block.died and any(request.matches(text, frames) for request in self._set.requests):
            return
        signature = matching(spoken.text, frames, (self._set.exceptions, self._set.lines))
        if signature is None and spoken.asserted is not None:
            line, code = spoken.asserted
            signature = matching(code, frames, (self._set.exceptions,))
            spoken = Spoken(line, code, spoken.name) if signature is not None else spoken
        if signature is not None:
            self._failures.found(signature, spoken, block)
            if signature.outcome == "oom.kv_pool":
                self._boot.error_numbers(text)
        elif not spoken.more:
            tier = "probe" if spoken.name in self._set.probes else "unknown"
            named = bool(block.place)
            where = block.wrapper_phase
            self._failures.add(
                UNKNOWN, tier, spoken, block, None, None, where, block.source, fatal=block.died, named=named
            )

    def _line(self, number: int, body: str, peeled: Peeled) -> bool:
        """A line outside any traceback; True when it says something by itself."""
        if peeled.logged and body.startswith(self._set.stops):
            self._failures.stopping = True
            return True
        if self._boot.clip(body):
            self._warning(number, body, peeled)
            return True
        # SGLang prints no level: what it merely mentions in a line of its log may be a warning.
        certain = self._certain if peeled.engine == "sglang" and not peeled.level else self._set.lines
        signature = matching(body, "", (certain,))
        if signature is not None:
            if signature.id == "sglang.child_died" and "sigquit" in body[:_TEXT_LIMIT].lower():
                self._findings.peers_died = True
            self._failures.found(signature, Spoken(number, body), None, peeled.source)
        return signature is not None

    def _plain(self, number: int, body: str, peeled: Peeled) -> None:
        """A failure's own words on a line that nobody marked as an error: believed unless the engine goes on."""
        if _LEFT_OUT in body:
            text = body[:_TEXT_LIMIT]
            found = matching(text, "", (self._set.exceptions, self._set.lines))
            if self._findings.left_out is None:
                outcome = found.outcome if found is not None and found.outcome != BY_PHASE else "import.abi"
                why = f"a module of the engine was left out: {found.why if found is not None else 'its import failed'}"
                self._findings.left_out = self._failures.said(outcome, "cause", number, text, why, None, peeled)
            return
        if peeled.engine == "sglang":
            # SGLang's own log mentions failures that it gets around; those that it does not it raises.
            self._warning(number, body, peeled)
            return
        # Torch ends its report of a full GPU with advice.
        head = body.split(" If reserved", 1)[0]
        if any(word in head for word in (*self._set.around, *self._set.mild)):
            return
        signature = matching(body, "", (self._set.plain,))
        if signature is not None:
            # What is merely mentioned counts less than an exception of whatever kind.
            tier = "mention" if signature.tier == "symptom" else None
            self._failures.found(signature, Spoken(number, body), None, peeled.source, strong=False, tier=tier)
        else:
            self._warning(number, body, peeled)

    def _warning(self, number: int, text: str, peeled: Peeled) -> None:
        """A line that is no failure, but may explain one, or show that somebody else failed."""
        signature = matching(text, "", (self._set.warnings,))
        if signature is None:
            return
        text = text[:_TEXT_LIMIT]
        if signature.tier == "consequence":
            self._failures.found(signature, Spoken(number, text), None, peeled.source, strong=False)
        elif self._findings.hint is None:
            self._findings.hint = self._failures.said(
                signature.outcome, "symptom", number, text, signature.why, signature.id, peeled
            )

    # --- findings ---------------------------------------------------------------------------------------------------

    def _ended(self, block: Block) -> None:
        """A traceback is over: what it said counts already; what it left unsaid is judged here."""
        if not block.spoken:
            self._failures.note_phase(block.frames_text())
        if (raised := block.raised) is not None:
            self._speak(block, raised)
        if block.died and not block.spoken:
            spoken = Spoken(block.line, block.header)
            self._failures.add(UNKNOWN, "silent", spoken, block, None, None, None, block.source, fatal=True)

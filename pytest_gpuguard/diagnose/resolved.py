"""What was asked against what runs: from an engine's log as it streams by, its command line, and its server_info.

Memory is bounded whatever the log is, and ordinary lines cost a look at their first characters. What is not said is
not known: an argument that was given is no evidence that it had an effect.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ..claims.layout import flag_value
from ..claims.outcome import HOST_FAULTS, READY
from ..claims.resolved import FeatureEvidence, LogEvidence, Pick, Resolved, Setting, Vocabulary, normal
from .data import has_digit
from .dump import fields, look_up
from .features import EMPTY, HEAD, DumpRule, FeatureRule, FeatureTable, LineRule, SettingRule, load_features, release
from .lines import Peeled
from .redact import redact

#: So much of a line is looked at and quoted, and so many lines are kept that say the same of a feature.
_LINE_CHARS: Final = 4000
_QUOTE_CHARS: Final = 240
_KEPT: Final = 4
_WORDS_OFF: Final = frozenset({"none", "disabled", "disable", "off", "false", "no", "0"})


class Collector:
    """Takes the peeled lines of one log; ``evidence()`` at any time."""

    def __init__(self, engine: str | None, version: str | None = None, majors: Collection[int] = ()) -> None:
        self._heads: dict[str, list[LineRule | DumpRule]] = {}
        self._tables: dict[int, FeatureTable] = {}
        for name in (engine,) if engine is not None else ("sglang", "vllm"):
            table = load_features(name)
            for rule in table.lines:
                if rule.covers(release(version), frozenset(majors)):
                    self._heads.setdefault(rule.starts[:HEAD], []).append(rule)
            for dump in table.dumps:
                self._heads.setdefault(dump.starts[:HEAD], []).append(dump)
                self._tables[id(dump)] = table
        self._picks: dict[str, Pick] = {}
        self._features: dict[tuple[str, bool], list[FeatureEvidence]] = {}
        self._final: dict[str, bool] = {}
        self._done: set[int] = set()
        self._dump: tuple[tuple[str, str], ...] = ()
        self._dump_line = 0
        self._ready = LogEvidence()
        #: Counts what was learnt.
        self.revision = 0

    def line(self, number: int, peeled: Peeled) -> None:
        """Take a line. Only what a logger printed counts: a request's text may say anything."""
        rules = self._heads.get(peeled.body[:HEAD])
        if rules is None or not peeled.logged:
            return
        body = peeled.body
        for rule in rules:
            if id(rule) in self._done or not body.startswith(rule.starts) or rule.contains not in body:
                continue
            if isinstance(rule, DumpRule):
                self._arguments(number, body, rule)
            else:
                self._said(number, body[:_LINE_CHARS], rule)

    @property
    def by_digits(self) -> tuple[str, ...]:
        """What the lines begin with whose digits decide whether they are evidence."""
        rules = [rule for rules in self._heads.values() for rule in rules]
        return tuple({rule.starts for rule in rules if has_digit(rule.starts, rule.contains, _pattern(rule))})

    def reset(self) -> None:
        """Another boot begins in the same log: forget what was learnt of the one before."""
        for known in (self._picks, self._features, self._final, self._done):
            known.clear()
        self._dump, self._dump_line = (), 0
        self._ready = _STALE
        self.revision += 1

    def evidence(self) -> LogEvidence:
        """What the lines so far show."""
        if self._ready is _STALE:
            features = tuple(one for kept in self._features.values() for one in kept)
            self._ready = LogEvidence(tuple(self._picks.values()), features, self._dump, self._dump_line)
        return self._ready

    def _arguments(self, number: int, body: str, rule: DumpRule) -> None:
        if self._dump_line:
            return  # every rank prints them; what a later line says of them is another boot's, or a quotation
        found = fields(body.partition(rule.after)[2], self._tables[id(rule)].keys)
        self._dump, self._dump_line = tuple(found.items()), number
        self._ready = _STALE
        self.revision += 1

    def _said(self, number: int, body: str, rule: LineRule) -> None:
        match = rule.pattern.search(body) if rule.pattern is not None else None
        if rule.pattern is not None and match is None:
            return
        if rule.keep == "first":
            self._done.add(id(rule))
        if rule.setting is not None:
            if rule.keep == "first" and rule.setting in self._picks:
                return
            value = match[1] if match is not None else rule.value or ""
            self._picks[rule.setting] = Pick(rule.setting, value[:_QUOTE_CHARS], _quote(number, body))
        elif rule.feature is not None:
            if rule.final:
                self._final[rule.feature] = rule.on
                self._features.pop((rule.feature, not rule.on), None)
            elif self._final.get(rule.feature, rule.on) is not rule.on:
                return  # another rank's line of before
            kept = self._features.setdefault((rule.feature, rule.on), [])
            # One kind of line is kept once: ranks repeat it, batches with other numbers.
            if len(kept) >= _KEPT or any(_same(one.text.partition(": ")[2], _cut(body)) for one in kept):
                return
            kept.append(FeatureEvidence(rule.feature, rule.on, _quote(number, body), rule.requested))
        self._ready = _STALE
        self.revision += 1


_STALE: Final = LogEvidence(line=-1)
_DIGITS: Final = str.maketrans("", "", "0123456789")


def _pattern(rule: LineRule | DumpRule) -> str:
    return rule.pattern.pattern if isinstance(rule, LineRule) and rule.pattern is not None else ""


def _same(first: str, second: str) -> bool:
    return first.translate(_DIGITS) == second.translate(_DIGITS)


def resolve(
    engine: str,
    flags: Sequence[str],
    evidence: LogEvidence,
    info: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> Resolved:
    """Join the command line's ``flags``, what the log says, and a server's ``/server_info`` (raw), for one boot."""
    table = load_features(engine)
    if table is EMPTY:
        return Resolved()
    sources = _Sources(evidence, info or {})
    settings = [one for rule in table.settings if (one := _setting(rule, flags, sources, table.vocabulary))]
    features, rows = [], []
    for feature in table.features:
        asked = _asked(feature, flags, env or {})
        found = _feature(feature, asked, sources)
        features += found
        row = _row(feature.name, asked, found)
        rows += [row] if row is not None else []
    settings = _attention(settings)
    on_cpu = any(one.name == "device" and one.runs == "cpu" for one in settings)
    allreduce = _allreduce(table, rows, features) if not on_cpu else None
    rows += [allreduce] if allreduce is not None else []
    return Resolved((*settings, *rows), tuple(features), table.vocabulary)


def off_gpus(outcome: str, note: str | None, resolved: Resolved, gpus: int) -> tuple[str, str | None]:
    """Outcome and note of a boot that has ``gpus`` leased: ``infra.device`` where the server runs on the CPU.

    It is no finding about the stack: a claim about GPUs is neither shown nor refuted by a server that used none, and
    neither is a failure of such a server the claimed one. The fault is in the installation, or in what it can see.
    """
    device = resolved.setting("device")
    if not gpus or device.runs != "cpu" or device.asked == "cpu" or outcome in HOST_FAULTS:
        return outcome, note
    ended = "" if outcome == READY else f"; it ended as {outcome}" + (f" ({note})" if note else "")
    cause = "this stack's torch is a CPU build, or sees no CUDA device"
    cure = "install a CUDA build of torch there, or see what `gpuguard facts` says of driver and stack"
    leased = f"{gpus} GPU{'s are' if gpus > 1 else ' is'} leased to it"
    said = f"the server runs on the CPU although {leased} ({device.evidence}){ended}: {cause}: {cure}"
    return "infra.device", said


class _Sources:
    """Where a resolved value may stand, in the order in which it is believed."""

    def __init__(self, evidence: LogEvidence, info: Mapping[str, Any]) -> None:
        self.log = evidence
        self.picks = {pick.setting: pick for pick in evidence.picks}
        self._dump = dict(evidence.dump)
        states = info.get("internal_states")
        first = states[0] if isinstance(states, (list, tuple)) and states else None
        # The scheduler resolves on its own what the main process may still hold as it was asked.
        self._scheduler = first if isinstance(first, Mapping) else {}
        self._info = info

    def scheduler(self, key: str) -> tuple[str, str] | None:
        """A value of the scheduler's own state, and how to quote it."""
        value = _dig(self._scheduler, key)
        return (value, f"server_info {key}") if value is not None else None

    def stated(self, key: str) -> tuple[str, str] | None:
        """A value of server_info, else of the dumped arguments, and how to quote it."""
        value = _dig(self._info, key)
        if value is not None:
            return value, f"server_info {key}"
        value = look_up(self._dump, key)
        return (value[:_QUOTE_CHARS], f"line {self.log.line}: server_args {key}") if value is not None else None

    def number(self, key: str) -> int | None:
        """A whole number."""
        found = self.scheduler(key) or self.stated(key)
        return int(found[0]) if found is not None and found[0].isdecimal() else None


def _dig(values: Mapping[str, Any], key: str) -> str | None:
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return str(found)[:_QUOTE_CHARS] if found is None or isinstance(found, (str, int, float, bool)) else None


# --------------------------------------------------------------------------------------------------------- settings


def _setting(rule: SettingRule, flags: Sequence[str], sources: _Sources, words: Vocabulary) -> Setting | None:
    asked = flag_value(flags, rule.flags)
    found = _runs(rule, sources)
    if asked is None and found is None:
        return None
    asked = asked[:_QUOTE_CHARS] if asked is not None else None  # as what runs is cut
    usual = words.usual(rule.name, asked) if asked is not None else None
    if asked in rule.unresolved:
        asked = usual = None  # "auto" asks for nothing in particular
    if found is None:
        return Setting(rule.name, asked) if asked is not None else None
    value = found[0] if rule.compare == "text" else found[0].replace(",", "")
    runs, evidence = words.usual(rule.name, value), found[1]
    differs = usual is not None and not _equal(rule, usual, runs, sources.number("page_size") or 1)
    # Tokens are counted by the scheduler; every other value that the main process holds is an argument.
    echo = usual is not None and not differs and found[2] and rule.compare != "tokens"
    return Setting(rule.name, asked, runs, evidence, differs, echo)


def _runs(rule: SettingRule, sources: _Sources) -> tuple[str, str, bool] | None:
    """What a setting became, how to quote it, and whether only the server's arguments say so."""
    stated = [found for key in rule.keys if (found := sources.stated(key)) and found[0] not in rule.unresolved]
    inner = [found for key in rule.keys if (found := sources.scheduler(key)) and found[0] not in rule.unresolved]
    if rule.most:
        counts = [found for found in (*inner, *stated) if found[0].isdecimal()]
        best = max(counts, key=lambda found: int(found[0])) if counts else None
        return (*best, best not in inner) if best is not None else None
    pick = sources.picks.get(rule.name)
    picked = [(pick.value, pick.text)] if pick is not None and pick.value not in rule.unresolved else []
    shown = next(iter((*inner, *picked)), None)
    return (*shown, False) if shown is not None else (*stated[0], True) if stated else None


def _equal(rule: SettingRule, asked: str, runs: str, page: int) -> bool:
    if rule.compare == "text":
        return normal(asked) == normal(runs)
    try:
        first, second = float(asked), float(runs)
    except ValueError:
        return normal(asked) == normal(runs)
    if rule.compare == "tokens":
        return first - second < max(page, 1)
    return first == second


def _attention(settings: list[Setting]) -> list[Setting]:
    """Where prefill or decode has a backend of its own, one name does not say what runs."""
    found = {one.name: one for one in settings}
    base = found.get("attention_backend")
    parts = [found.get(f"{phase}_attention_backend") for phase in ("prefill", "decode")]
    own = [part.runs if part is not None and part.runs is not None else None for part in parts]
    if base is None or base.runs is None or not any(own):
        return settings
    prefill, decode = (name or base.runs for name in own)
    if prefill == decode:
        return settings
    evidence = next(part.evidence for part in parts if part is not None and part.runs is not None)
    # Where a phase's own flag asks for it, two backends are what was asked.
    split = any(part is not None and part.asked is not None for part in parts)
    differs = base.asked is not None and not split
    echo = not differs and any(part is not None and part.echo for part in (base, *parts))
    mixed = Setting(base.name, base.asked, f"{prefill} (prefill), {decode} (decode)", evidence, differs, echo)
    return [mixed if one is base else one for one in settings]


# --------------------------------------------------------------------------------------------------------- features


def _asked(rule: FeatureRule, flags: Sequence[str], env: Mapping[str, str]) -> bool | None:
    """True asked for, False refused, None neither."""
    given = {word.partition("=")[0] for word in flags[: flags.index("--") if "--" in flags else None]}
    for names, meaning in ((rule.refuse, False), (rule.ask, True)):
        for name in names:
            if name in given:
                value = flag_value(flags, (name,))
                return not meaning if value is not None and value.lower() in _WORDS_OFF else meaning
    for name in rule.ask_env:
        if name in env:
            return env[name].lower() not in _WORDS_OFF
    return None


def _feature(rule: FeatureRule, asked: bool | None, sources: _Sources) -> list[FeatureEvidence]:
    found = [one for one in sources.log.features if one.feature == rule.name]
    for pairs, on in ((rule.on, True), (rule.off, False)):
        keys = dict.fromkeys(key for key, _ in pairs)
        stated = {key: value for key in keys if (value := sources.scheduler(key) or sources.stated(key)) is not None}
        shown = [(key, value) for key, value in stated.items() if (key, value[0]) in pairs]
        if shown and (not rule.every or len(shown) == len(stated)):
            key, (said, where) = shown[0]
            echo = asked is on and sources.scheduler(key) is None
            found.append(FeatureEvidence(rule.name, on, f"{where} is {said}", not on and asked is not True, echo))
    return [replace(one, requested=one.requested or not one.on) for one in found] if asked is False else found


def _row(name: str, asked: bool | None, found: Sequence[FeatureEvidence]) -> Setting | None:
    shown = {one.on for one in found}
    words = None if asked is None else "on" if asked else "off"
    if asked is None and all(one.requested for one in found):
        return None
    if len(shown) != 1:
        return Setting(name, words) if words is not None else None
    runs = "on" if shown.pop() else "off"
    return Setting(name, words, runs, found[0].text, words is not None and words != runs)


def _allreduce(table: FeatureTable, rows: Sequence[Setting], features: Sequence[FeatureEvidence]) -> Setting | None:
    """One line for what sums over GPUs: the ways shown on, or NCCL where the custom one is shown off and none is on."""
    ways = [rule.name for rule in table.features if rule.allreduce]
    by_name = {row.name: row for row in rows}
    on = [name for name in ways if name in by_name and by_name[name].runs == "on"]
    asked = " + ".join(name for name in ways if name in by_name and by_name[name].asked == "on") or None
    if on:
        return Setting("allreduce", asked, " + ".join(on), by_name[on[0]].evidence)
    off = [one.text for one in features if one.feature == "custom_allreduce" and not one.on]
    open_ways = any(one.on for one in features if one.feature in ways)
    open_ways = open_ways or any(row.asked == "on" and row.runs is None for row in rows if row.name in ways)
    return Setting("allreduce", asked, "nccl", off[0]) if off and not open_ways else None


def _quote(number: int, body: str) -> str:
    return f"line {number}: {_cut(body)}"


def _cut(body: str) -> str:
    text = redact(re.sub(r"\s+", " ", body.strip()))
    return text if len(text) <= _QUOTE_CHARS else text[: _QUOTE_CHARS - 1] + "…"

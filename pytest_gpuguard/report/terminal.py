"""The terminal: rig and stack before the claims, a word per claim while they run, a line each at the end, every count.

Nothing is skipped without being counted here, with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from ..claims.rehearsal import NO_ANSWERS, NO_PEAKS, NO_SPEED
from ..claims.resolved import Setting
from ..claims.verdict import Verdict
from ..names import OUT_OF_BUDGET
from .payload import REPORT_KEY, labelled, spoken

_COLOURS: Final = {
    Verdict.HOLDS: "green",
    Verdict.INFRA: "red",
    Verdict.WORSE: "red",
    Verdict.BETTER: "red",
    Verdict.CHANGED: "red",
}
#: Columns that a fact must have beside its claim; with fewer, on a terminal, it has a line of its own.
_LEAST: Final = 40
_FAILS: Final = {Verdict.WORSE, Verdict.BETTER, Verdict.CHANGED, Verdict.INFRA}


def status(report: Any, verbose: bool) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """Pytest's category, letter and word for a report that carries a verdict; None leaves it to pytest."""
    data = getattr(report, REPORT_KEY, None)
    if data is None:
        return None
    verdict = Verdict(data["verdict"])
    word = spoken(data) + (f" {data['fact']}" if verbose else "")
    if data["hearsay"] and not report.failed:
        return "hearsay", "h", (f"HEARSAY {word}", {"yellow": True})
    if verdict is Verdict.INFRA and report.failed:
        return "error", "E", (word, {"red": True})
    if verdict is Verdict.INCONCLUSIVE and not report.failed:
        return "inconclusive", "i", (word, {"yellow": True})
    if report.failed:
        return "failed", "F", (word, {"red": True})
    if report.outcome not in ("passed", "skipped"):
        return None  # such as "rerun", which is another plugin's
    if report.skipped:
        letters = {Verdict.UNSTATED: "u", Verdict.CHANGED: "c", Verdict.WORSE: "c", Verdict.BETTER: "c"}
        letter = letters.get(verdict, "s")
        return "skipped", letter, (word, {"yellow": True})
    if data.get("label"):
        return data["label"].lower(), "r", (word, {"green": True})
    return "passed", ".", (word, {"green": True})


class Summary:
    """Collects verdicts as reports come in (also from xdist workers) and writes the closing section."""

    def __init__(self, require: Sequence[str]) -> None:
        self._require = tuple(require)
        self.results: dict[str, dict[str, Any]] = {}
        self._by_worker: dict[str, dict[str, dict[str, Any]]] = {}

    def add(self, report: Any) -> None:
        """Take a report's verdict, if it carries one."""
        data = getattr(report, REPORT_KEY, None)
        if data is None:
            return
        # Under --dist=each several workers judge the same claim: the worst of them is told.
        worker = getattr(getattr(getattr(report, "node", None), "gateway", None), "id", "")
        before = self._by_worker.get(data["nodeid"], {})
        before[worker] = data
        self._by_worker[data["nodeid"]] = before
        self.results[data["nodeid"]] = min(before.values(), key=lambda one: Verdict(one["verdict"]).severity)

    def missed(self) -> dict[str, list[str]]:
        """Reasons of NOT_EVALUATED that ``--gpuguard-require`` insists on, with their texts."""
        found: dict[str, list[str]] = {}
        for data in self.results.values():
            if data["verdict"] == Verdict.NOT_EVALUATED.value and data["reason"] in self._require:
                found.setdefault(data["reason"], []).append(data["fact"])
        return found

    def write(self, reporter: Any, verbosity: int) -> None:
        """The section at the end: a line per claim, then the counts. Under ``-q`` only the counts and what fails."""
        if not self.results:
            return
        if verbosity >= 0:
            reporter.write_sep("=", "claims")
        ordered = sorted(self.results.values(), key=_rank)
        width = max(len(_called(data)) for data in ordered)
        words = max(len(_word(data)) for data in ordered)
        narrow = reporter.isatty and words + width + _LEAST > reporter._tw.fullwidth
        indent = " " * (0 if narrow else words)
        for data in ordered:
            if verbosity < 0 and Verdict(data["verdict"]) not in _FAILS:
                continue
            verdict = Verdict(data["verdict"])
            reporter.write(f"{_word(data):<{0 if narrow else words}}  ", **{_COLOURS.get(verdict, "yellow"): True})
            if narrow:
                reporter.write_line(_called(data))
                reporter.write_line(_fitted(reporter, f"    {data['fact']}", 0, verbosity))
            else:
                line = f"{_called(data):<{width}}  {data['fact']}".rstrip()
                reporter.write_line(_fitted(reporter, line, words + 2, verbosity))
            others = [one for one in data["judgements"] if len(data["judgements"]) > 1]
            for one in others:
                line = f"{indent}    {one['verdict']}: {one['expectation']}: {one['fact']}"
                reporter.write_line(_fitted(reporter, line, 0, verbosity))
            for said in _figures(data) if verbosity > 0 else ():
                reporter.write_line(f"{indent}    {said}")
            for said in data["warnings"]:
                reporter.write_line(_fitted(reporter, f"{indent}    warning: {said}", 0, verbosity), yellow=True)
            if verbosity > 0 and data.get("translated"):
                reporter.write_line(f"{indent}    portable: {', '.join(data['translated'])}")
            for said in [*_differences(data), *_prediction(data, verbosity)]:
                reporter.write_line(_fitted(reporter, f"{indent}    {said}", 0, verbosity))
        reporter.write_line(counts(ordered))
        for reason, texts in self.missed().items():
            claims = "claim was" if len(texts) == 1 else "claims were"
            reporter.write_line(
                f"FAILED --gpuguard-require={reason}: {len(texts)} {claims} not evaluated: {texts[0]}", red=True
            )


def _figures(data: dict[str, Any]) -> list[str]:
    """What else was found of what went as claimed, or was not decided; a failure tells its own."""
    told = {one["fact"] for one in data["judgements"]} | set(_differences(data))
    shown = (Verdict.HOLDS.value, Verdict.INCONCLUSIVE.value)
    lines = [line for one in data["judgements"] if one["verdict"] in shown for line in one["details"]]
    return [line for line in dict.fromkeys(lines) if line not in told]


def _differences(data: dict[str, Any]) -> list[str]:
    """What runs otherwise than asked, where the claim's own line does not say so already."""
    settings = (data.get("resolved") or {}).get("settings", ())
    said = [f"{one['name']}: {Setting(**one)}" for one in settings if one["differs"]]
    return [text for text in said if text not in data["fact"]]


def _prediction(data: dict[str, Any], verbosity: int) -> tuple[str, ...]:
    """What was predicted beside what was measured: with ``-v`` all of it, else what is beyond its error bar."""
    if not data.get("prediction"):
        return ()
    from ..predict.beside import lines_of

    return lines_of(data["prediction"], verbosity > 0)


def counts(results: Iterable[dict[str, Any]]) -> str:
    """``gpuguard: 5 HOLDS, 1 CHANGED, 3 NOT_EVALUATED (2 gpus: needs SM120, this rig has no GPUs; 1 models: …)``."""
    results = list(results)
    parts = []
    for verdict in Verdict:
        chosen = [one for one in results if one["verdict"] == verdict.value]
        if not chosen:
            continue
        hearsay = sum(one["hearsay"] for one in chosen)
        notes = [f"{hearsay} hearsay"] if hearsay else []
        if verdict is Verdict.NOT_EVALUATED:
            reasons = Counter((one["reason"] or "other", _gist(one)) for one in chosen)
            kinds: dict[str, Counter[str]] = {}
            for (reason, fact), number in reasons.items():
                kinds.setdefault(reason, Counter())[fact] += number
            notes += [_reason(reason, facts) for reason, facts in kinds.items()]
        parts.append(f"{len(chosen)} {verdict.value}" + (f" ({'; '.join(notes)})" if notes else ""))
    labels = sorted({one["label"] for one in results if one.get("label")})
    return f"gpuguard: {''.join(f'{label}: ' for label in labels)}{', '.join(parts)}"


def _gist(data: dict[str, Any]) -> str:
    """A fact without what is this claim's own, so that equal reasons are counted as one."""
    fact = str(data["fact"])
    shared = [one for one in (NO_SPEED, NO_ANSWERS, NO_PEAKS, OUT_OF_BUDGET) if fact.startswith(one)]
    return shared[0] if shared else fact


def _reason(reason: str, facts: Counter[str]) -> str:
    most, number = facts.most_common(1)[0]
    rest = sum(facts.values()) - number
    return f"{sum(facts.values())} {reason}: {most}" + (f", and {rest} for other reasons of that kind" if rest else "")


def _fitted(reporter: Any, line: str, used: int, verbosity: int) -> str:
    """On a terminal the end of a long fact is cut, unless ``-v`` asks for all of it."""
    room = reporter._tw.fullwidth - used
    if verbosity > 0 or not reporter.isatty or len(line) <= room or room < 60:
        return line
    return line[: room - 1] + "…"


def _word(data: dict[str, Any]) -> str:
    return labelled(data.get("label"), ("hearsay: " if data["hearsay"] else "") + str(data["verdict"]))


def _called(data: dict[str, Any]) -> str:
    """The test, and the claim's own id where it has one."""
    own = f" [{data['claim']}]" if data["claim"] != data["nodeid"] else ""
    return f"{data['nodeid']}{own}"


def _rank(data: dict[str, Any]) -> tuple[bool, int, str]:
    verdict = Verdict(data["verdict"])
    return (verdict is not Verdict.UNSTATED, verdict.severity, data["nodeid"])

"""The page of one run, in a real Chromium without a network: what is seen first, what opens, and what never runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuguard.report import curves
from pytest_gpuguard.report.document import document
from pytest_gpuguard.report.html import html

from .browser import Browser, browser
from .report_runs import HOSTILE, LOAD, OLD, OOM, RAW, START, earlier, evidence, failed, flip, record, run


def page(kind: Any = "verified") -> str:
    """A run with two stacks, two flips and a history."""
    bad = failed("ep8", kind=kind)
    speed = record("speed", evidence=evidence(2), kind=kind)
    records = [
        bad,
        speed,
        record("ep8", stack="old", components=OLD, kind=kind),
        record("x", "NOT_EVALUATED", reason="sm"),
    ]
    steps = {10: {"driver": "575.51"}, 30: {"sglang": "0.5.20", "torch": "2.10"}}
    found = document(
        run(kind, ended=START + 900),
        records,
        [flip(bad), flip(speed, sort="better", ranked=False)],
        [flip(bad, records[2])],
        lambda claim: earlier(speed, 45, steps),
        {"vanished": ["gone::claim"]},
    )
    return html(found)


def hostile() -> str:
    said = {
        **evidence(1),
        "title": HOSTILE,
        "decisive": {"line": 1, "text": HOSTILE + "A" * 1_000_000},
        "argv": [HOSTILE],
    }
    said |= {
        "rates": {HOSTILE: evidence()["rates"][LOAD]},
        "peak_phases": {HOSTILE: 3.0},
        "log": HOSTILE,
        "remedies": [HOSTILE],
    }
    more: dict[str, Any] = {
        "fact": HOSTILE,
        "stack": HOSTILE,
        "expectation": HOSTILE,
        "outcome": HOSTILE,
        "nodeid": HOSTILE,
    }
    now = record(HOSTILE, HOSTILE, evidence=said, components={HOSTILE: HOSTILE}, **more)
    before = record(HOSTILE, "HOLDS", evidence=said, run="r", when=START - 9e5, components={HOSTILE: "1"}, **more)
    found = document(
        run(host=HOSTILE, rig=HOSTILE, suite=HOSTILE),
        [now, record(HOSTILE, stack="new"), record("b", "NOT_EVALUATED", reason=HOSTILE, fact=HOSTILE)],
        [flip(now, before)],
        [flip(now, before)],
        lambda claim: [before],
        {HOSTILE: [HOSTILE]},
    )
    return html(found)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path) -> Iterator[Browser]:
    """The browser with the page open, as on a desk; the console must have stayed silent at the end."""
    file = tmp_path / "report.html"
    file.write_text(page(), encoding="utf-8")
    chromium.without_scripts(False)
    chromium.size(1280, 900)
    chromium.prefers("light")
    chromium.console()
    chromium.open(file)
    chromium.js("localStorage.clear()")
    chromium.open(file)
    chromium.requests()
    yield chromium
    assert chromium.console() == []


def background(chromium: Browser) -> str:
    return str(chromium.js("return getComputedStyle(document.body).backgroundColor"))


def visible(chromium: Browser, selector: str) -> bool:
    return bool(chromium.js("return document.querySelector(arguments[0]).checkVisibility()", selector))


def test_the_page_loads_nothing_but_itself(opened: Browser, tmp_path: Path) -> None:
    opened.open(tmp_path / "report.html")
    asked = [one for one in opened.requests() if not one.startswith(("data:", "about:"))]
    assert asked == [(tmp_path / "report.html").as_uri()]
    assert (
        opened.js("return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length")
        == 0
    )


def test_flips_are_first_in_view(opened: Browser) -> None:
    tops = opened.js(
        "return [...document.querySelectorAll('main > section')].map(s => [s.id, s.getBoundingClientRect().top])"
    )
    assert tops[0][0] == "flips"
    assert 0 < tops[0][1] < 300
    assert opened.js("return document.querySelectorAll('#flips article').length") == 2
    first = opened.js("return document.querySelector('#flips article').innerText")
    for said in (
        "worse",
        "ep8",
        "HOLDS",
        "CONTRADICTED (worse)",
        OOM,
        "sglang 0.5.18 → 0.5.23",
        "held under every sglang",
    ):
        assert said in first
    assert opened.js("return document.title") == "gpuguard 20260130-130455-3f2a: 2 flipped"


def test_a_click_on_a_claim_opens_its_evidence(opened: Browser) -> None:
    assert not visible(opened, "#c1 .body")
    opened.click("#c1 > summary")
    assert visible(opened, "#c1 .body")
    said = opened.js("return document.querySelector('#c1 .body').innerText")
    for part in (
        OOM,
        "--mem-fraction-static 0.95",
        "sglang.launch_server",
        "'kimi k2.6'",
        "sglang-ep8.log",
        "free before the weights",
    ):
        assert part in said


def test_the_evidence_of_a_flip_is_one_click_away(opened: Browser) -> None:
    opened.click("#flips article a")
    assert visible(opened, "#c1 .body")
    assert opened.js("return Math.abs(document.querySelector('#c1').getBoundingClientRect().top) < 200")


def test_charts_show_phases_intervals_and_changes_of_the_stack(opened: Browser) -> None:
    opened.click("#c2 > summary")
    assert opened.js("return document.querySelectorAll('#c2 svg').length") == 2
    assert opened.js("return document.querySelectorAll('#c2 svg .bar').length") == 5
    assert opened.js("return document.querySelectorAll('#c2 svg .change').length") == 3
    drawn = opened.js("return document.querySelector('#c2 svg .interval').getAttribute('d')")
    assert drawn.count("M") == drawn.count("V") == 46
    inside = """const box = e => e.getBoundingClientRect(), svg = [...document.querySelectorAll('#c2 svg')];
        return svg.every(s => [...s.querySelectorAll('text')].every(t =>
            box(t).left >= box(s).left - 1 && box(t).right <= box(s).right + 1
            && box(t).bottom <= box(s).bottom + 1))"""
    assert opened.js(inside) is True
    said = opened.js("return document.querySelector('#c2 .cols').innerText")
    assert "driver 570.86.15 → 575.51" in said
    assert "rate over 46 runs" in said.lower()


def test_the_toggle_switches_the_theme_and_is_remembered(opened: Browser, tmp_path: Path) -> None:
    light = background(opened)
    opened.click("#theme")
    dark = background(opened)
    assert light != dark
    opened.open(tmp_path / "report.html")
    assert background(opened) == dark
    opened.click("#theme")
    assert background(opened) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_systems_theme_is_taken_and_every_text_can_be_read(opened: Browser, scheme: str) -> None:
    opened.prefers(scheme)
    opened.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    unreadable = """
        const rgb = c => (c.match(/[\\d.]+/g) || []).map(Number);
        const part = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
        const lum = c => { const [r, g, b] = c.map(v => part(v / 255));
                           return .2126 * r + .7152 * g + .0722 * b };
        const behind = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
                              if (c.length === 3 || c[3] > 0) return c } return [255, 255, 255] };
        const bad = [];
        for (const e of document.querySelectorAll('body *')) {
            if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || e.closest('script')) continue;
            const style = getComputedStyle(e), own = rgb(e.closest('svg') ? style.fill : style.color);
            const [a, b] = [lum(own.slice(0, 3)), lum(behind(e).slice(0, 3))].sort((x, y) => y - x);
            if ((a + .05) / (b + .05) < 4.5) bad.push(e.className.baseVal ?? e.className, e.textContent.slice(0, 40));
        }
        return bad"""
    assert opened.js(unreadable) == []
    dark = sum(map(int, re.findall(r"\d+", background(opened))[:3])) < 150
    assert dark == (scheme == "dark")


def test_words_and_verdicts_filter_the_claims(opened: Browser) -> None:
    shown = "return [...document.querySelectorAll('details.claim')].filter(d => !d.hidden).length"
    assert opened.js(shown) == 4
    opened.type("#search", "EP8 old")
    assert opened.js(shown) == 1
    assert opened.js("return document.querySelector('#count').innerText") == "1 of 4"
    opened.js("const s = document.querySelector('#search'); s.value = ''; s.dispatchEvent(new Event('input'))")
    opened.click("button[data-only='HOLDS']")
    assert opened.js(shown) == 2


@pytest.mark.parametrize("content", [page, hostile])
def test_a_phone_needs_no_sideways_scroll(opened: Browser, tmp_path: Path, content: Any) -> None:
    (tmp_path / "phone.html").write_text(content(), encoding="utf-8")
    opened.size(375, 800, phone=True)
    opened.open(tmp_path / "phone.html")
    opened.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert opened.js("return [innerWidth, document.documentElement.scrollWidth]") == [375, 375]
    if content is page:
        assert opened.js("return document.querySelector('#flips').getBoundingClientRect().top") < 420


def test_hostile_text_is_shown_and_runs_nothing(opened: Browser, tmp_path: Path) -> None:
    (tmp_path / "hostile.html").write_text(hostile(), encoding="utf-8")
    opened.open(tmp_path / "hostile.html")
    opened.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert opened.js("return typeof window.pwned") == "undefined"
    assert opened.js("return document.querySelectorAll('script').length") == 1
    assert opened.js("return document.querySelectorAll('img, a[href^=javascript], iframe').length") == 0
    text = opened.js("return document.body.innerText")
    assert "<script>window.pwned=1</script>" in text
    assert "{{ 7*7 }}" in text
    assert opened.js("return document.querySelectorAll('.claim').length") == 3


def test_a_script_that_got_into_the_page_is_refused(chromium: Browser, tmp_path: Path) -> None:
    injected = page().replace("<footer>", "<script>window.pwned = 1</script><footer>")
    (tmp_path / "injected.html").write_text(injected, encoding="utf-8")
    chromium.open(tmp_path / "injected.html")
    assert chromium.js("return typeof window.pwned") == "undefined"
    assert any("Content Security Policy" in one for one in chromium.console())


def test_it_works_without_javascript(opened: Browser, tmp_path: Path) -> None:
    opened.without_scripts()
    opened.open(tmp_path / "report.html")
    opened.click("#c1 > summary")
    assert visible(opened, "#c1 .body")
    assert not visible(opened, "#search")
    assert not visible(opened, "#theme")
    opened.without_scripts(False)


def test_hostile_text_is_harmless_in_the_source_and_cut() -> None:
    found = hostile()
    assert not [one for one in RAW if one in found]
    assert found.count("<script") == 1
    assert "<img" not in found
    assert len(found) < 300_000
    found.encode("utf-8")


def test_a_document_that_somebody_else_wrote_is_cleaned_too() -> None:
    given = document(run(), [record(evidence=evidence())], history=lambda name: earlier(record(), 3))
    claim = given["claims"][0]
    claim["fact"] = claim["title"] = HOSTILE + "B" * 1_000_000
    claim["history"] = {HOSTILE: next(iter(claim["history"].values()))}
    claim["peak_phases"] = {HOSTILE: 4.0}
    found = html(given)
    assert not [one for one in RAW if one in found]
    assert found.count("<script") == 1
    assert len(found) < 200_000


@pytest.mark.parametrize("kind", ["rehearsed", "replayed"])
def test_what_verifies_nothing_says_so_on_top_and_at_every_verdict(kind: str) -> None:
    found = page(kind)
    label = kind.upper()
    assert f'<p class="notice">{label}: ' in found
    assert f"<title>{label} gpuguard" in found
    told = re.findall(
        r'(<span class="tag LABEL">\w+</span> )?<span class="tag \w+">(?:HOLDS|CONTRADICTED \(worse\))</span>', found
    )
    assert len(told) > 8
    assert all(told)


def test_an_empty_run_is_a_page() -> None:
    found = html(document(run(stacks=[]), []))
    assert "0 claims, none flipped" in found
    assert "This run judged no claim." in found
    assert "it never came to its end" in found


@pytest.mark.parametrize(
    "values", [[0.001, 0.0011], [1e12, 1e12], [5.0, 5.0], [1e-300, 1e300], [65.0, 65.1, 64.9], [1.0, 1e9]]
)
def test_any_rates_and_sizes_can_be_drawn(values: list[float]) -> None:
    points: list[dict[str, Any]] = [
        {"when": None, "low": one, "center": one, "high": one, "changes": []} for one in values
    ]
    for drawn in (curves.trend(points, "x"), curves.memory(dict(zip("abcdef", values, strict=False)), values[0], "x")):
        assert "nan" not in drawn
        assert "inf" not in drawn
        numbers = [float(one) for one in re.findall(r'\b[xy][12]?="(-?[\d.e+]+)"', drawn)]
        assert max(map(abs, numbers)) < 600


@pytest.mark.parametrize("lacks", ["jinja2", "leather", "markupsafe"])
def test_a_missing_extra_is_named_with_its_cure(lacks: str) -> None:
    code = (
        f"import sys; sys.modules[{lacks!r}] = None\n"
        "from tests.report_runs import *\n"
        "from pytest_gpuguard.report.document import document\n"
        "from pytest_gpuguard.report.html import html, MissingExtra\n"
        "found = document(run(), [record(evidence=evidence())], history=lambda name: earlier(record(), 3))\n"
        "try:\n    html(found)\nexcept MissingExtra as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True
    )
    assert lacks in done.stdout
    assert "pip install 'pytest-gpuguard[report]'" in done.stdout


def test_reports_import_neither_templates_nor_charts_before_a_page_is_made() -> None:
    code = (
        "import sys\nfrom pytest_gpuguard.report import curves, document, flips, github, html, markdown\n"
        "print([one for one in ('jinja2', 'leather', 'markupsafe', 'sqlalchemy') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_when_it_last_held_is_told_where_neither_side_held() -> None:
    found = replace(flip(failed("x"), before=failed("x", run="run-7")), held=record("x", run="run-3"))
    said = html(document(run(), [found.now], [found]))
    assert '<dt>held</dt><dd>last on 2026-01-30 <span class="small">run run-3 · stack new</span></dd>' in said
    assert '<div class="small">since it held</div>' in said

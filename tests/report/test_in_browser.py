"""Pages as their readers have them: on a phone and a desk, dark and light, by keyboard, by ear, on paper."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.browser import CHROMIUM, OVERFLOWING, Chromium, browser
from kit.failures import gives
from kit.pages import evaluated, interval, logged, make_run, resumed, saved, write_intervals

from lockstep.core.media import LoggedImage, LoggedTable
from lockstep.monitor.metric_log import Logged
from lockstep.report import write_report
from lockstep.report.comparison import compare, write_comparison

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
NASTY = "\"</script><b>'" + "Ünïcödé-名前" * 16
MEDIA: dict[str, LoggedImage | LoggedTable] = {
    "wide": LoggedImage(2048, 8, 3, bytes(range(256)) * 192),
    "attention-" * 12: LoggedImage(8, 8, 1, bytes(range(0, 256, 4))),
    "errors": LoggedTable(("text", "label", "share"), (("def f(): " * 60, NASTY, 0.5), ("x" * 900, "y", None)) * 20),
    "confused " * 12: LoggedTable(tuple(NASTY + str(n) for n in range(40)), (tuple(range(40)),) * 3),
}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all pages."""
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def report_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 64 ranks with everything that can happen, and names that no program expects."""
    happenings = {
        step: [
            evaluated("held-out", step, loss=2.0 - step / 300, accuracy=step / 300),
            evaluated(NASTY, step, loss=3.0, **{NASTY: 0.1}),
            saved(step, NASTY if step == 150 else None),
            logged(step, **{NASTY: NASTY}),
            lambda log, step=step: log.logged(step, Logged(media=MEDIA)),
        ]
        for step in range(50, 301, 50)
    }
    happenings[100].append(resumed(100, 4))
    run = make_run(tmp_path_factory.mktemp("run"), steps=300, happenings=happenings)
    write_intervals(run, [interval(step, ranks=64, slow=37 if step > 150 else None) for step in range(10, 301, 10)])
    (run / "earlier" / "1").mkdir(parents=True)
    (run / "earlier" / "1" / "metrics.jsonl").write_text(json.dumps({"step": 130, "loss": 1.0}) + "\n")
    return write_report(run)


@pytest.fixture(scope="module")
def comparison_page(report_page: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, and eight more: three seeds of two configs, and two with names that no program expects."""
    folder = tmp_path_factory.mktemp("compared")
    runs = [report_page.parent]
    for number, (lr, seed) in enumerate([(0.1, 1), (0.1, 2), (0.1, 3), (0.2, 1), (0.2, 2), (0.2, 3), (9, 9), (8, 8)]):
        place = folder / (NASTY.replace("/", "-")[:60] if number > 5 else f"lr-{lr}-seed-{seed}") / str(number)
        runs.append(shutil.copytree(report_page.parent, place))
        (place / "config.yaml").write_text(
            f"optim: {{lr: {lr}, {json.dumps(NASTY)}: {json.dumps(NASTY)}}}\nrun: {{seed: {seed}}}"
        )
    return write_comparison(compare(runs), folder / "compare.html")


@pytest.fixture(params=["report", "comparison"])
def any_page(request: pytest.FixtureRequest) -> Path:
    page: Path = request.getfixturevalue(f"{request.param}_page")
    return page


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_overflows(chromium: Chromium, any_page: Path, width: int, dark: bool) -> None:
    page = chromium.open(any_page, width, dark=dark)
    assert page.value(OVERFLOWING) == []
    page.value("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert page.value(OVERFLOWING) == []
    paper, ink = (page.value(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    assert (sum(map(int, paper[4:-1].split(", "))) < sum(map(int, ink[4:-1].split(", ")))) == dark


def test_the_check_finds_what_overflows(chromium: Chromium, tmp_path: Path) -> None:
    (tmp_path / "wide.html").write_text("<p style='width: 2000px'>wide</p><p style='width: 50px'>" + "x" * 100 + "</p>")
    wide, *others = chromium.open(tmp_path / "wide.html", 400).value(OVERFLOWING)
    assert wide.startswith("page: 2")
    assert len(others) == 2


def test_every_value_is_reached_by_keyboard_and_told(chromium: Chromium, report_page: Path) -> None:
    page = chromium.open(report_page)
    focused = "document.activeElement"
    page.press("Tab")
    assert page.value(f"{focused}.getAttribute('role')") == "slider"
    assert page.value(f"getComputedStyle({focused}).outlineStyle") == "solid"
    page.press("Home")
    assert page.value(f"{focused}.getAttribute('aria-valuetext')").startswith("step 1: training 2, held-out 1.833, ")
    page.press("ArrowRight")
    assert page.value(f"{focused}.getAttribute('aria-valuetext')").startswith("step 3: training 1.333")
    page.press("End")
    assert page.value("document.querySelector('.at').textContent") == "step 300"
    page.press("Tab")
    assert page.value(f"{focused}.tagName") == "SUMMARY"
    page.press("Enter")
    page.press("Tab")
    assert page.value(f"[{focused}.getAttribute('role'), {focused}.ariaLabel].join()") == "region,Loss"
    stops = page.value("[...document.querySelectorAll('[tabindex], summary')].every(e => e.tabIndex === 0)")
    assert stops


def test_a_comparison_is_read_by_keyboard_and_by_ear(chromium: Chromium, comparison_page: Path) -> None:
    page = chromium.open(comparison_page)
    heard = page.accessible()
    assert not [role for role, name, _ in heard if role in ("slider", "image", "table", "region") and not name]
    names = {name for _, name, _ in heard}
    assert {"Runs", "Over seeds", "Final figures, a column each run", "Curves"} <= names
    page.value("document.querySelector('svg.chart').focus()")
    page.press("Home")
    told = page.value("document.activeElement.getAttribute('aria-valuetext')")
    assert told.count(" 2") >= 9  # the loss of each run


def test_a_screen_reader_hears_what_the_charts_show(chromium: Chromium, report_page: Path) -> None:
    heard = chromium.open(report_page).accessible()
    names = [name for role, name, _ in heard if role == "slider"]
    assert names[0].startswith("Loss. From 2 to 1.003")
    assert any(gives(name, "Time of an update by rank", "Slowest: rank 37") for name in names)
    assert not [role for role, name, _ in heard if role in ("slider", "image", "table", "region") and not name]
    headings = [name for role, name, _ in heard if role == "heading"]
    assert {"run", "Curves", "Ranks", "Last evaluation"} <= set(headings)


def test_paper_has_all_that_a_wide_page_shows(chromium: Chromium, any_page: Path) -> None:
    page = chromium.open(any_page, 720)
    chromium.call("Emulation.setEmulatedMedia", page.session, media="print")
    assert page.value(OVERFLOWING) == []
    assert page.value("getComputedStyle(document.querySelector('details')).display") == "none"
    assert page.pdf().count(b"/Type /Page\n") > 2

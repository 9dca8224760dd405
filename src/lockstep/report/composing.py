"""A finished, stopped or broken run as one page to read: RUN/report.html.

    recorded.read(run) --> what to show (here, and `curves`) --> page.document --> one file, written whole

    masthead       what it is, and whether it came to its end
    flaws          what is missing or damaged
    figures        loss, evaluation, time, throughput; then steps, ranks, strategy, ...
    curves         loss, evaluations, gradient norm, learning rate, throughput, what users logged
    evaluation     the last of each set, in full
    events         restarts, saves, discarded updates
    samples        what the model wrote
    config, environment

Needs no torch. Whatever stands in the files is shown as text, never taken as markup.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import __version__
from lockstep.core import formatting
from lockstep.core.errors import RunFailed
from lockstep.core.secrets import hidden_setting, hidden_variable, without_secrets
from lockstep.monitor.folder import CONFIG, EARLIER, is_run, refuse_escaping_links, write_atomically
from lockstep.report import page
from lockstep.report.charts import Chart
from lockstep.report.curves import MOST_LOGGED, charts, unit_of
from lockstep.report.headline import big_figures, facts, last_values
from lockstep.report.markup import Markup, element
from lockstep.report.recorded import Recorded, Save, Text, read
from lockstep.report.scales import said
from lockstep.report.wording import count, date, described, in_words, term

REPORT = "report.html"

_SAMPLES = 6
_LISTED = 20
_LONGEST_CONFIG = 100_000
_NEAR_RUNS = 3
_REASONS = {"overflow": "fp16 overflow", "non_finite": "gradient not finite"}
_ENVIRONMENT = ("command_line", "created", "host", "platform", "cpu", "cpus", "memory_bytes", "gpus", "git")


def write_report(run: Path, output: Path | None = None) -> Path:
    """Writes RUN/report.html, or `output`, and returns where it is. What is damaged in the run is said in it.

    Raises:
        RunFailed: `run` is no run, or the system won't let a file be read or written.
    """
    folder = Path(os.path.abspath(run))
    target = Path(os.path.abspath(output or folder / REPORT))
    try:
        text = compose(read(_checked(folder)))
    except OSError as error:
        raise RunFailed(f"can't read {error.filename or folder}: {error.strerror or error}") from error
    try:
        write_atomically(target, text)
    except OSError as error:
        raise RunFailed(f"can't write {target}: {error.strerror or error}") from error
    return target


def compose(recorded: Recorded) -> str:
    """The page."""
    drawn = charts(recorded)
    parts = [
        _masthead(recorded),
        _flaws(recorded),
        page.big_figures(big_figures(recorded)),
        page.facts(facts(recorded)),
        _curves(recorded, drawn),
        _evaluation(recorded),
        _happened(recorded),
        _samples(recorded.events.texts),
        _config(recorded.config_text),
        _environment(recorded.environment),
        _footer(recorded),
    ]
    return page.document(f"{recorded.folder.name}: training report", element("main", *parts))


def _checked(folder: Path) -> Path:
    """The folder of a run; otherwise RunFailed, with the run that may have been meant."""
    if is_run(folder):
        refuse_escaping_links(folder)
        return folder
    if not folder.exists():
        raise RunFailed(f"there is no folder {folder}")
    if not folder.is_dir():
        near = f"; its run is {folder.parent}" if is_run(folder.parent) else ""
        raise RunFailed(f"{folder} is a file, not the folder of a run{near}")
    runs = sorted((entry for entry in folder.iterdir() if is_run(entry)), key=lambda entry: entry.stat().st_mtime)
    near = f"; the newest runs in it are {', '.join(str(entry) for entry in runs[-_NEAR_RUNS:])}" if runs else ""
    raise RunFailed(f"{folder} is not the folder of a run: it has no {CONFIG}{near}")


# --- the top --------------------------------------------------------------------------------------------------------


def _masthead(recorded: Recorded) -> Markup:
    description = in_words(recorded.config.get("description"))
    return element(
        "header",
        element("p", "Training report", class_="kicker"),
        element("h1", recorded.folder.name),
        element("p", description, class_="standfirst") if description else Markup(),
        element("p", element("b", _state(recorded)), *_when(recorded), class_="byline"),
    )


def _state(recorded: Recorded) -> str:
    return "Not finished" if recorded.summary is None else "Finished"


def _when(recorded: Recorded) -> list[str]:
    created = date(recorded.environment.get("created"))
    verb = "last started" if recorded.events.restarts else "started"
    return [f" · {verb} {created}"] if created else []


def _flaws(recorded: Recorded) -> Markup:
    """What a reader must know before trusting the rest."""
    flaws = [*_unfinished(recorded), *_absent(recorded), *recorded.flaws]
    return element("div", *(element("p", flaw) for flaw in flaws), class_="flaws") if flaws else Markup()


def _unfinished(recorded: Recorded) -> list[str]:
    if recorded.summary is not None:
        return []
    asked = recorded.asked("run", "steps")
    of = f" of {count(asked)}" if asked else ""
    steps = recorded.updates.columns["loss"].steps
    saved = [save.step for save in recorded.events.saves if save.failure is None]
    ahead = f"lockstep train {shlex.quote(str(recorded.folder))}"
    rest = f"{ahead} goes on from the save of step {max(saved):,}." if saved else "No save is recorded."
    got = f": step {steps[-1]:,.0f}{of} is the last recorded" if len(steps) else ""
    return [f"This run was not finished when the report was made{got}. {rest}"]


def _absent(recorded: Recorded) -> list[str]:
    absent = []
    if not recorded.updates.last:
        absent.append("No update is recorded: metrics.jsonl is missing or has no whole line.")
    if not recorded.events.evaluations:
        absent.append("No evaluation is recorded.")
    return absent


# --- the middle -----------------------------------------------------------------------------------------------------


def _curves(recorded: Recorded, drawn: Sequence[Chart]) -> Markup:
    if not drawn:
        return page.section("Curves", element("p", "There is no curve: no finite value is recorded."))
    first, *others = map(page.figure, drawn)
    grid = element("div", first, page.key(_key(drawn)), *others, class_="curves")
    hidden = len(recorded.events.values) - MOST_LOGGED
    more = element("p", f"{hidden:,} more logged values are in events.jsonl.") if hidden > 0 else Markup()
    return page.section("Curves", grid, more)


def _key(drawn: Sequence[Chart]) -> list[tuple[str, str]]:
    """Only of marks that there are."""
    marks = drawn[0].marks
    has_gap = any(not series.finite.all() for chart in drawn for series in chart.series)
    entries = [
        ("head", "restart", marks.restarts),
        ("discarded", "update discarded (above)", marks.discarded),
        ("save", "save (below)", marks.saves),
        ("failed", "failed save (below)", marks.failed_saves),
        ("gap", "not finite", has_gap),
    ]
    return [(kind, words) for kind, words, there in entries if there]


def _evaluation(recorded: Recorded) -> Markup:
    found = last_values(recorded)
    if not found:
        return Markup()
    metrics = list(dict.fromkeys(metric for values in found.values() for metric in values))
    head = ["Set", "step", *(metric.replace("_", " ") for metric in metrics)]
    rows = [[name, f"{_latest(values):,}", *_row(values, metrics)] for name, values in found.items()]
    return page.section("Last evaluation", page.table(head, rows))


def _latest(values: Mapping[str, tuple[int, float]]) -> int:
    return max((step for step, _ in values.values()), default=0)


def _row(values: Mapping[str, tuple[int, float]], metrics: Iterable[str]) -> list[str]:
    return [said(values[metric][1], unit_of(metric)) if metric in values else "" for metric in metrics]


def _happened(recorded: Recorded) -> Markup:
    saves = recorded.events.saves
    failed = [save for save in saves if save.failure is not None]
    listed = [f"Step {save.step:,}: not saved: {save.failure}" for save in failed[:_LISTED]]
    sentences = [*_restarts(recorded), *_saves(saves), *listed, *_discarded(recorded)]
    return page.section("Restarts, saves, discarded updates", *(element("p", words) for words in sentences))


def _restarts(recorded: Recorded) -> list[str]:
    restarts = recorded.events.restarts
    aside = recorded.put_aside
    again = f"What earlier attempts wrote and later ones made anew lies in {EARLIER}/ ({aside:,})." if aside else ""
    if not restarts:
        return ["The run was never resumed. " + again]
    listed = ", ".join(_restart(step, ranks) for step, ranks in restarts[:_LISTED])
    more = f", and {len(restarts) - _LISTED:,} more" if len(restarts) > _LISTED else ""
    return [f"Resumed {_times(len(restarts))}: {listed}{more}. {again}"]


def _restart(step: int, ranks: int) -> str:
    on = f" on {ranks:,} rank{'s' if ranks != 1 else ''}" if ranks else ""
    return f"from step {step:,}{on}"


def _saves(saves: Sequence[Save]) -> list[str]:
    made = [save for save in saves if save.failure is None]
    if not made:
        return ["No save was made." if not saves else f"No save was made; {len(saves):,} failed:"]
    size, seconds = (float(np.median([getattr(save, name) for save in made])) for name in ("size", "seconds"))
    waited = sum(save.lost for save in saves)
    failed = f" {len(saves) - len(made):,} failed:" if len(saves) > len(made) else ""
    each = f"{formatting.size(size)} in {formatting.duration(seconds)} each" + (" (median)" if len(made) > 1 else "")
    return [
        f"Saved {_times(len(made))}, last after step {max(save.step for save in made):,}: {each}. "
        f"Training waited {formatting.duration(waited)} in all.{failed}"
    ]


def _discarded(recorded: Recorded) -> list[str]:
    discarded = recorded.updates.discarded
    if not discarded:
        return ["No update was discarded."]
    by_verdict = Counter(verdict for _, verdict in discarded)
    reasons = ", ".join(f"{number:,} × {_REASONS.get(verdict, verdict)}" for verdict, number in by_verdict.items())
    first, last = discarded[0][0], discarded[-1][0]
    when = f"at step {first:,}" if first == last else f"between step {first:,} and {last:,}"
    return [f"Discarded updates: {reasons}, {when}."]


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


# --- the end --------------------------------------------------------------------------------------------------------


def _samples(texts: Sequence[Text]) -> Markup:
    """From the first to the last, if they are many evenly spaced ones."""
    if not texts:
        return Markup()
    chosen = np.unique(np.linspace(0, len(texts) - 1, min(_SAMPLES, len(texts))).round().astype(int))
    shown = element("div", *(_sample(texts[index]) for index in chosen), class_="samples")
    left = len(texts) - len(chosen)
    more = element("p", f"{left:,} more are in events.jsonl.") if left else Markup()
    return page.section("Samples", shown, more)


def _sample(text: Text) -> Markup:
    caption = element("figcaption", f"step {text.step:,} · {text.name}")
    return element("figure", caption, element("pre", text.text), class_="sample")


def _config(text: str) -> Markup:
    if not text.strip():
        return Markup()
    text = "\n".join(_without_secret(line) for line in text[: _LONGEST_CONFIG + 1].splitlines())
    cut = text if len(text) <= _LONGEST_CONFIG else text[:_LONGEST_CONFIG] + "\n# cut here: the rest is in config.yaml"
    return page.section("Configuration, as resolved", page.yaml(cut))


def _without_secret(line: str) -> str:
    """A line of a config that was written before secrets were hidden in it."""
    key, colon, value = line.partition(": ")
    return f"{key}{colon}{hidden_setting(key.strip(), value)}" if colon else without_secrets(line)


def _environment(environment: Mapping[str, Any]) -> Markup:
    if not environment:
        return Markup()
    if isinstance(variables := environment.get("variables"), Mapping):
        shown = {str(name): hidden_variable(str(name), str(value)) for name, value in variables.items()}
        environment = {**environment, "variables": shown}
    names = dict.fromkeys((*(name for name in _ENVIRONMENT if name in environment), *environment))
    entries = [(term(name), described(name, environment[name])) for name in names]
    return page.section("Environment", page.facts([entry for entry in entries if entry[1]], "rows"))


def _footer(recorded: Recorded) -> Markup:
    now = date(time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    return element("footer", element("p", f"{recorded.folder}. Made by Lockstep {__version__} on {now}."))

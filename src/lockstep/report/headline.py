"""The figures that stand above the curves, each from the best source that there is.

summary.json, if the run is finished   >   the last line of metrics.jsonl   >   what the config asked for
"""

from __future__ import annotations

import numpy as np

from lockstep.core import formatting
from lockstep.report.curves import capitalised, throughput, unit_of
from lockstep.report.recorded import Recorded
from lockstep.report.scales import said
from lockstep.report.wording import count, in_words, is_amount

_MOST_EVALUATIONS = 3


def big_figures(recorded: Recorded) -> list[tuple[str, str, str]]:
    """(what, value, more about it): what people want to know first."""
    loss = recorded.updates.columns["loss"]
    ends = zip(loss.steps[-1:].tolist(), loss.values[-1:].tolist(), strict=True)
    trained = [("Training loss", said(value, "plain"), f"at step {step:,.0f}") for step, value in ends]
    return [*trained, *_final_evaluations(recorded), *_time(recorded), *_speed(recorded)]


def _final_evaluations(recorded: Recorded) -> list[tuple[str, str, str]]:
    """All metrics of a single set; of several sets, their losses."""
    found = last_values(recorded)
    only_loss = len(found) > 1
    entries = [
        (capitalised(f"{name} {metric}"), said(value, unit_of(metric)), f"at step {step:,}")
        for name, metrics in found.items()
        for metric, (step, value) in metrics.items()
        if metric == "loss" or not only_loss
    ]
    return entries[:_MOST_EVALUATIONS]


def last_values(recorded: Recorded) -> dict[str, dict[str, tuple[int, float]]]:
    """Step and value of the last evaluation, by set and metric; the loss first."""
    return {
        name: {metric: max(metrics[metric].items()) for metric in sorted(metrics, key=lambda metric: metric != "loss")}
        for name, metrics in recorded.events.evaluations.items()
    }


def _time(recorded: Recorded) -> list[tuple[str, str, str]]:
    seconds, restarts = _of_end(recorded, "seconds"), len(recorded.events.restarts)
    attempts = f"over {restarts + 1} attempts" if restarts else ""
    return [("Time", formatting.duration(float(seconds)), attempts)] if is_amount(seconds) else []


def _speed(recorded: Recorded) -> list[tuple[str, str, str]]:
    series = throughput(recorded)
    if not len(series.known):
        return []
    return [("Throughput", said(float(np.median(series.known)), "rate"), f"{series.name}/s, median")]


def facts(recorded: Recorded) -> list[tuple[str, str]]:
    """What isn't known is left out."""
    tokens, samples = _of_end(recorded, "tokens"), _of_end(recorded, "samples")
    summary = recorded.summary or {}
    parameters, trainable = summary.get("parameters"), summary.get("trainable")
    entries = [
        ("Steps", count(_of_end(recorded, "steps"))),
        ("Samples", count(samples)),
        ("Tokens", count(tokens) if tokens != samples else ""),
        ("Parameters", count(parameters)),
        ("Trained parameters", count(trainable) if trainable != parameters else ""),
        ("Global batch", _batch(recorded)),
        ("Ranks", _ranks(recorded)),
        ("Strategy", _strategy(recorded)),
        ("Device", _resolved(recorded, "device", "launch", "device")),
        ("Precision", _resolved(recorded, "precision", "precision", "compute")),
        ("Restarts", f"{len(recorded.events.restarts):,}"),
        ("Discarded updates", f"{len(recorded.updates.discarded):,}"),
    ]
    return [(term, value) for term, value in entries if value]


def _batch(recorded: Recorded) -> str:
    size = _resolved(recorded, "global_size", "batch", "global_size")
    return f"{size} samples" if size else ""


def _ranks(recorded: Recorded) -> str:
    """Of the last attempt."""
    restarts = recorded.events.restarts
    if recorded.summary is None and restarts and restarts[-1][1]:
        return f"{restarts[-1][1]:,}"
    return _resolved(recorded, "ranks", "launch", "ranks")


def _strategy(recorded: Recorded) -> str:
    summary = recorded.summary or {}
    backend = in_words(summary.get("backend"))
    over = f" over {backend}" if backend and summary.get("ranks") != 1 else ""
    return _resolved(recorded, "strategy", "parallel", "strategy") + over


def _resolved(recorded: Recorded, name: str, section: str, key: str) -> str:
    """What the run came to; while it isn't finished, what was asked."""
    if recorded.summary and name in recorded.summary:
        return in_words(recorded.summary[name])
    asked = recorded.asked(section, key)
    return "auto (as asked)" if asked == "auto" else in_words(asked)


def _of_end(recorded: Recorded, name: str) -> object:
    """From the summary, or the last line of metrics.jsonl."""
    last = recorded.updates.last
    return (recorded.summary or {}).get(name, last.get("step" if name == "steps" else name))

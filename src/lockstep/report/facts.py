"""Figures and sentences of a report: from summary.json, else the last line of metrics.jsonl, else the config."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from lockstep.core import formatting
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.secrets import hidden_variable
from lockstep.core.terminal import command_line
from lockstep.launch.ends_file import LaunchEnds, decided_ends
from lockstep.monitor.folder import EARLIER, held_by
from lockstep.monitor.goodput import RestartCost, restart_costs, saved_steps
from lockstep.report.charts import value_text
from lockstep.report.curves import capitalized, median_speed, throughput, unit_of
from lockstep.report.run_data import RunData

_MAX_EVALUATIONS = 3  # among the large figures
MAX_LISTED = 20
_MOST_STEPS = 5
_UNRECORDED = "No record: the launcher was killed, or its machine stopped"
_FINISHED = "It was finished, and was started again"
_LARGEST = 10**18  # larger integers aren't shown
_REASONS = {"overflow": "fp16 overflow", "non_finite": "gradient not finite"}
_ENVIRONMENT = ("command_line", "created", "host", "platform", "cpu", "cpus", "memory_bytes", "gpus", "git")
_LONGEST = 4000  # characters


def state(run: RunData) -> str:
    if run.summary is not None:
        return "Finished"
    return "Running" if held_by(run.folder) is not None else "Not finished"


def flaws(run: RunData, ended: str = "") -> list[str]:
    """Return warnings about the rest of the report; `ended` says how the run ended, if that is known."""
    unfinished = []
    early = as_text((run.summary or {}).get("stopped_early"))
    if early and not ended:
        ended = f"It ended early: {early}."
    if run.summary is None:
        steps, configured = run.columns["loss"].steps, run.configured("run", "steps")
        of = f" of {count_text(configured)}" if configured else ""
        last = f": step {steps[-1]:,.0f}{of} is the last recorded" if len(steps) else ""
        saved = list(saved_steps(run.folder))  # a failed rank's is no event
        command = command_line("lockstep", "train", run.folder)
        rest = f" {command} resumes it from the save of step {max(saved):,}." if saved else " No save is recorded."
        is_running = held_by(run.folder) is not None
        was = "was training" if is_running else "was not finished"
        unfinished = [f"This run {was} when the report was made{last}.{'' if is_running else rest}"]
    return [
        *unfinished,
        *([ended] if ended else []),
        *(["No update is recorded: metrics.jsonl is missing or has no whole line."] if not run.last else []),
        *(["No evaluation is recorded."] if not run.evaluations else []),
        *run.flaws,
    ]


def large_figures(run: RunData) -> list[tuple[str, str, str]]:
    """Return (name, value, remark) of what people want to know first."""
    figures = []
    loss, unit, seconds = run.trained_loss, throughput(run).name, _at_end(run, "seconds")
    if len(loss.steps):
        figures.append(("Training loss", value_text(loss.values[-1], "plain"), f"at step {loss.steps[-1]:,.0f}"))
    evaluations = last_evaluations(run)
    figures += [
        (capitalized(f"{name} {metric}"), value_text(value, unit_of(metric)), f"at step {step:,}")
        for name, metrics in evaluations.items()
        for metric, (step, value) in metrics.items()
        if metric == "loss" or len(evaluations) == 1  # of several sets, only their losses
    ][:_MAX_EVALUATIONS]
    if isinstance(seconds, int | float) and 0 <= seconds < _LARGEST:
        attempts = f"over {run.num_attempts} attempts" if run.num_attempts > 1 else ""
        figures.append(("Time", formatting.duration(float(seconds)), attempts))
    if (speed := median_speed(run, unit)) is not None:
        figures.append(("Throughput", value_text(speed, "rate"), f"{unit}/s, median"))
    return figures


def last_evaluations(run: RunData) -> dict[str, dict[str, tuple[int, float]]]:
    """Return step and value of the last evaluation, by set and metric; the loss first."""
    return {
        name: {metric: max(metrics[metric].items()) for metric in sorted(metrics, key=lambda metric: metric != "loss")}
        for name, metrics in run.evaluations.items()
    }


def evaluation_table(run: RunData) -> list[list[str]]:
    """Return a table of the last evaluations, the head first; empty if there are none."""
    evaluations = last_evaluations(run)
    metrics = list(dict.fromkeys(metric for values in evaluations.values() for metric in values))
    rows = [["Set", "step", *(metric.replace("_", " ") for metric in metrics)]]
    for name, values in evaluations.items():
        texts = [value_text(values[metric][1], unit_of(metric)) if metric in values else "" for metric in metrics]
        rows.append([name, f"{max((step for step, _ in values.values()), default=0):,}", *texts])
    return rows if evaluations else []


def facts(run: RunData) -> list[tuple[str, str]]:
    """Return (name, value); unknown ones are left out."""
    summary = run.summary or {}
    parameters, trainable = summary.get("parameters"), summary.get("trainable")
    batch, ranks = _resolved(run, "global_size", "batch"), _resolved(run, "ranks", "launch")
    if run.summary is None and run.restarts and run.restarts[-1][1]:
        ranks = f"{run.restarts[-1][1]:,}"  # of the last attempt
    backend = _resolved(run, "backend", "launch") if ranks != "1" else ""
    entries = [
        ("Steps", count_text(_at_end(run, "steps"))),
        ("Samples", count_text(_at_end(run, "samples"))),
        ("Tokens", count_text(_at_end(run, "tokens")) if throughput(run).name == "tokens" else ""),
        ("Parameters", count_text(parameters)),
        ("Trained parameters", count_text(trainable) if trainable != parameters else ""),
        ("Global batch", f"{batch} samples" if batch else ""),
        ("Ranks", ranks),
        ("Strategy", _resolved(run, "strategy", "parallel") + (f" over {backend}" if backend else "")),
        ("Device", _resolved(run, "device", "launch")),
        ("Precision", _resolved(run, "precision", "precision", "compute")),
        ("Restarts", f"{run.num_attempts - 1:,}"),
        ("Discarded updates", f"{len(run.discarded):,}"),
    ]
    return [(name, value) for name, value in entries if value]


def events(run: RunData) -> list[str]:
    """Return a sentence each about restarts, saves and discarded updates."""
    return [sentence for sentence in (_restarts(run), _saves(run), _discarded(run)) if sentence]


def left_out(samples: Mapping[int, str], most: int = MAX_LISTED) -> list[str]:
    """Return a sentence about the samples that could not be used, if any."""
    if not samples:
        return []
    by_reason: dict[str, list[str]] = {}
    for index, reason in samples.items():
        by_reason.setdefault(reason, []).append(str(index))
    shown = list(by_reason.items())[:most]
    listed = "; ".join(f"{formatting.listed(indices, most)}: {reason}" for reason, indices in shown)
    hidden = len(samples) - sum(len(indices) for _, indices in shown)
    more = f"; and {hidden:,} more" if hidden else ""
    return [f"Left out {formatting.counted(len(samples), 'sample')} of the training data: {listed}{more}."]


def bad_numbers(run: RunData, most: int = MAX_LISTED) -> list[str]:
    """Return a sentence about updates with bad numbers and the suspected samples, if any."""
    if not run.bad_numbers:
        return []
    updates = [f"update {update:,}: {clause}" for update, clause in run.bad_numbers]
    return [f"Bad numbers: {formatting.listed(updates, most)}."]


def _restarts(run: RunData) -> str:
    earlier = f" Lines that later attempts replaced are in {EARLIER}/ ({run.earlier:,})." if run.earlier else ""
    resumptions = restarts(run)
    if not resumptions:
        return earlier.strip()
    listed = formatting.listed([f"{restart.step:,}" for restart in resumptions], _MOST_STEPS)
    return f"The ranks were started again {_times(len(resumptions))}, from step {listed}.{earlier}"


def _saves(run: RunData) -> str:
    saved, failed = ([save for save in run.saves if (save.failure is None) == is_whole] for is_whole in (True, False))
    sentences = []
    if saved:
        size = formatting.size(float(np.median([save.size for save in saved])))
        seconds = formatting.duration(float(np.median([save.seconds for save in saved])))
        lost = formatting.duration(sum(save.lost for save in run.saves))
        last = f"last after step {max(save.step for save in saved):,}"
        sentences.append(
            f"Saved {_times(len(saved))}, {last}: {size} in {seconds} each (median). Training waited {lost}."
        )
    if failed:
        last = f"the last at step {failed[-1].step:,}: {failed[-1].failure}"
        sentences.append(f"{len(failed):,} of {formatting.counted(len(run.saves), 'save')} failed, {last}.")
    return " ".join(sentences)


def _discarded(run: RunData) -> str:
    if not run.discarded:
        return ""
    numbers = Counter(verdict for _, verdict in run.discarded)
    reasons = ", ".join(f"{number:,} × {_REASONS.get(verdict, verdict)}" for verdict, number in numbers.items())
    first, last = run.discarded[0][0], run.discarded[-1][0]
    when = f"at step {first:,}" if first == last else f"between step {first:,} and {last:,}"
    return f"Discarded updates: {reasons}, {when}."


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def environment(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and value of environment.json, without secrets, the interesting ones first."""
    if isinstance(variables := values.get("variables"), Mapping):
        shown = {str(name): hidden_variable(str(name), str(value)) for name, value in variables.items()}
        values = {**values, "variables": shown}
    names = dict.fromkeys((*(name for name in _ENVIRONMENT if name in values), *values))
    return [(name.replace("_", " "), text) for name in names if (text := as_text(values[name]))]


def _resolved(run: RunData, name: str, section: str, key: str = "") -> str:
    resolved = run.summary or (run.attempts[-1].facts if run.attempts else {})
    if resolved.get(name) is not None:
        return as_text(resolved[name])
    configured = run.configured(section, key or name)
    return "auto (as configured)" if configured == "auto" else as_text(configured)


def _at_end(run: RunData, name: str) -> object:
    return (run.summary or {}).get(name, run.last.get("step" if name == "steps" else name))


def as_text(value: object) -> str:
    """Return a string as it is, other values as JSON, cut if they are long; empty for None."""
    try:
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    except (ValueError, TypeError, RecursionError):  # an absurd number, or nesting
        return "…"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def count_text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and abs(value) <= _LARGEST else as_text(value)


def date(value: object) -> str:
    """Return a date such as 21 November 2026, 11:09 UTC+01:00; empty if it is none."""
    try:
        moment = datetime.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        return ""
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment:%Z}".rstrip()


# --- restarts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart of a run's ranks, from `step`; `cause` says what had ended them. 0, empty or None: unknown."""

    step: int
    ranks: int
    cause: str = ""
    cost: RestartCost | None = None


def restarts(run: RunData) -> list[Restart]:
    if len(run.attempts) <= len(run.restarts):
        return [Restart(step, ranks) for step, ranks in run.restarts]
    ends, resumptions = decided_ends(run.folder), []
    costs = restart_costs(run.attempts)
    for before, attempt, cost in zip(run.attempts, run.attempts[1:], costs, strict=False):
        between = [end for end in ends if before.began <= end.time < attempt.began]
        cause = "; then ".join(map(_cause, between)) or (_UNRECORDED if ends else "")
        ranks = sum(number for _, number in attempt.hosts)
        resumptions.append(Restart(attempt.step, ranks, cause, cost))
    return resumptions


def _cause(end: LaunchEnds) -> str:
    if end.text:
        return formatting.first_sentence(end.text)
    return _FINISHED if end.kind is FailureKind.DONE else f"The ranks ended: {end.kind.title}"


def restart_table(resumptions: Sequence[Restart]) -> list[list[str]]:
    """Return a table of the last restarts, the head first; empty if there are none."""
    rows = [["What had ended the ranks", "from step", "ranks", "lost", "down", "startup"]]
    for restart in resumptions[-MAX_LISTED:]:
        cost = restart.cost
        parts = (cost.lost, cost.downtime, cost.startup) if cost is not None else ()
        times = [formatting.duration(part) for part in parts] or ["", "", ""]
        ranks = f"{restart.ranks:,}" if restart.ranks else ""
        rows.append([restart.cause or "Not recorded", f"{restart.step:,}", ranks, *times])
    return rows if resumptions else []

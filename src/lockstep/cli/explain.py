"""The verb `explain`: lockstep explain RUN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lockstep.cli.arguments import Parser, add_json, run_path
from lockstep.core.json_output import emit
from lockstep.core.near_runs import not_a_run
from lockstep.core.terminal import echo

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.report.limits import Limit


def run(arguments: Sequence[str]) -> int:
    """Explain how fast a run is, what limits it, what happened, and what to do next."""
    parser = Parser("explain", "Explains a run in ten sentences: its speed, what limits it, what to do next.")
    parser.add_argument("run", type=run_path, metavar="RUN", help="the run's folder")
    text = "compare the measured time of a step with the plan's for these GPUs, such as H100:8; auto: the run's own"
    parser.add_argument("--gpus", metavar="auto|NAME:N", help=text)
    add_json(parser)
    args = parser.parse_args(arguments)

    from lockstep.looking.states import status_of
    from lockstep.monitor.folder import is_run, refuse_escaping_links
    from lockstep.report.explanation import explain

    if not is_run(args.run):
        raise not_a_run(args.run)
    refuse_escaping_links(args.run)
    planned = partial(_planned, args.run, args.gpus)
    explanation = explain(args.run, _profiled(args.run), status_of(args.run).sentence, planned)
    if args.json:
        useful, names = explanation.goodput, ("name", "share", "gain", "fact", "remedy")
        share, wall, lost = (useful.share, useful.wall, useful.losses()) if useful is not None else (None, None, None)
        values = {name: getattr(explanation, name) for name in ("sentences", "notes", "mfu")}
        values["limits"] = [{name: getattr(each, name) for name in names} for each in explanation.limits]
        emit({"run": str(args.run), **values, "goodput": share, "wall_seconds": wall, "lost_seconds": lost})
        return 0
    for sentence in explanation.sentences:
        echo(sentence)
    for note in explanation.notes:
        echo(f"note: {note}")
    return 0


_COMPARED = ("device", "ranks", "micro_size", "strategy", "global_size", "precision")


def _planned(run: Path, gpus: str | None, split: Mapping[str, float]) -> str:
    """Return the time of a step beside the plan's, if it is asked for. Raises ConfigError for GPUs of another run."""
    if gpus is None:
        return ""
    from lockstep.cli.profile import predicted_step
    from lockstep.core.errors import ConfigError
    from lockstep.monitor.attempts import read_attempts
    from lockstep.profiling.planned import beside_plan, cluster_of_run

    attempts = read_attempts(run)
    if not split or not attempts:
        return "There is no measured step to compare with the plan's."
    if len({tuple(map(attempt.facts.get, _COMPARED)) for attempt in attempts}) > 1:
        return "Measured and predicted times aren't compared: the attempts had other ranks, sizes or strategies."
    cluster = cluster_of_run(attempts[-1], None if gpus == "auto" else gpus)
    if cluster is None:
        device, known = attempts[-1].facts.get("device"), "H100:8, or the file of lockstep plan --calibrate"
        raise ConfigError(f"--gpus auto: {device} isn't known; name it, such as {known}")
    step = predicted_step(run, attempts[-1], cluster)
    return f"There is {step}." if isinstance(step, str) else beside_plan(split, step, cluster)


def _profiled(run: Path) -> list[Limit] | None:
    """Return the findings of a run's traces; None if it has no readable ones."""
    from lockstep.core.errors import RunFailed
    from lockstep.profiling.findings import findings_of
    from lockstep.profiling.traces import read_trace, trace_files

    traces = []
    for path in trace_files(run):
        with suppress(RunFailed):  # `lockstep profile` says what is wrong with it
            traces.append(read_trace(path))
    if not traces:
        return None
    return [replace(finding, fact=f"A profile shows that {finding.fact}") for finding in findings_of(traces)]

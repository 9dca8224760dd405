"""The verb `profile`: lockstep profile RUN [--steps 3] [--ranks 0,3], and lockstep profile data | memory RECIPE."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.cli.arguments import CONFIG_EPILOG, Command, Parser, add_json, add_run, approved_config, run_path, whole
from lockstep.core.errors import Failure, RunFailed
from lockstep.core.json_output import emit
from lockstep.core.near_runs import not_a_run
from lockstep.core.terminal import command_line, echo, muted_stderr

if TYPE_CHECKING:
    from lockstep.monitor.attempts import Attempt
    from lockstep.plan.gpus import GPUCluster
    from lockstep.profiling.traces import Trace
    from lockstep.simulation.timing import StepTime

_EPILOG = """\
The ranks of a running run, under any launcher, record the next updates. For an ended run, the
summary of its traces is printed. They are in RUN/profile: open them in https://ui.perfetto.dev, or with TensorBoard's
plugin torch-tb-profiler. To trace given updates, set profile.steps: 10..13 in the config.

lockstep profile data RECIPE      only the data loader
lockstep profile memory RECIPE    what holds the memory of a rank"""
_DATA_EPILOG = f"""{CONFIG_EPILOG}
Reads the samples of the run's first rank without training, with 0, 1, 2, 4 and more workers, while that helps.
RECIPE may be a run's folder: then the speed is compared with what its updates need."""
_MEMORY_EPILOG = f"""{CONFIG_EPILOG}
Makes three updates in new ranks of this machine, and shows what held the memory at the peak, by category and module,
beside the plan's prediction. RECIPE may be a run's folder: its config is measured, and the run isn't touched."""


def run(arguments: Sequence[str]) -> int:
    """Run a command, or trace a run."""
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]].run(arguments[1:])
    return plain(arguments)


def plain(arguments: Sequence[str]) -> int:
    """Trace a run that trains, and explain where its time goes."""
    parser = Parser("profile", "Records where the time of a running run goes, and explains it.", _EPILOG)
    parser.add_argument("run", type=run_path, metavar="RUN", help="the run's folder")
    parser.add_argument("--steps", type=whole, default=3, metavar="N", help="updates to record; default %(default)s")
    parser.add_argument("--ranks", type=_ranks, default=(0,), metavar="all|0,3", help="ranks that record; default 0")
    parser.add_argument("--stacks", action="store_true", help="record Python lines, too: larger, slower")
    parser.add_argument("--show", action="store_true", help="record nothing: only the summary of existing traces")
    text = "the run's, as of lockstep plan: show the predicted parts, too; GPUs that plan knows need no flag"
    parser.add_argument("--gpus", metavar="NAME:N", help=text)
    parser.add_argument("--timeout", type=whole, default=600, metavar="S", help="seconds to wait; default %(default)s")
    add_json(parser)
    args = parser.parse_args(arguments)

    from lockstep.monitor.attempts import read_attempts
    from lockstep.monitor.folder import is_run
    from lockstep.profiling.findings import findings_of, summary_lines
    from lockstep.profiling.planned import cluster_of_run
    from lockstep.profiling.traces import read_trace

    if not is_run(args.run):
        raise not_a_run(args.run)
    attempts = read_attempts(args.run)
    cluster = cluster_of_run(attempts[-1], args.gpus) if attempts else None  # wrong GPUs are refused before a recording
    traces = [read_trace(path) for path in _recorded(args)]
    for line in summary_lines(traces):
        echo(line)
    planned = {} if cluster is None else _planned(args.run, attempts[-1], cluster, traces[-1])
    if args.json:
        findings = [asdict(finding) for finding in findings_of(traces)]
        emit({"run": str(args.run), "traces": [_record(trace) for trace in traces], "findings": findings, **planned})
    return 0


def _planned(run: Path, attempt: Attempt, cluster: GPUCluster, trace: Trace) -> dict[str, object]:
    """Print the parts of a traced update beside the plan's; return both."""
    from lockstep.profiling.planned import measured_parts, planned_lines

    step = predicted_step(run, attempt, cluster)
    if isinstance(step, str):
        echo(step)
        return {}
    for line in planned_lines(trace, step):
        echo(line)
    return {"measured": measured_parts(trace), "predicted": dict(step.parts)}


def predicted_step(run: Path, attempt: Attempt, cluster: GPUCluster) -> StepTime | str:
    """Return the plan's time of a run's step; or why there is none."""
    from lockstep.profiling.planned import planned_time
    from lockstep.simulation.failing import Unpredictable

    try:
        loaded, _ = approved_config([str(run)], (), trusted=False)
        with muted_stderr():  # of torch's remarks on a device that it doesn't know
            return planned_time(loaded, attempt, cluster)
    except (Failure, Unpredictable) as why:
        return f"no prediction to compare with: {str(why).splitlines()[0].rstrip('.:')}"


def _recorded(args: argparse.Namespace) -> list[Path]:
    """Return the traces: of a run that trains, new ones."""
    from lockstep.config.training_sections import ProfileConfig
    from lockstep.monitor.attempts import is_running
    from lockstep.profiling.requesting import request_traces
    from lockstep.profiling.traces import trace_files

    if is_running(args.run) and not args.show:
        options = ProfileConfig(steps=f"1..{args.steps}", ranks=args.ranks, stacks=args.stacks)
        return request_traces(args.run, options, float(args.timeout))
    files = trace_files(args.run)
    if not files:
        remedy = f"resume it ({command_line('lockstep', 'train', args.run)}), or set profile.steps in its config"
        raise RunFailed(f"the run in {args.run} is not running, and has no traces; {remedy}")
    return files


def _ranks(text: str) -> tuple[int, ...] | Literal["all"]:
    if text == "all":
        return "all"
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is neither all nor ranks such as 0,3")
    return tuple(sorted({int(word) for word in words}))


def _record(trace: Trace) -> dict[str, object]:
    operators = [asdict(operator) for operator in trace.operators[:10]]
    return {**asdict(trace), "path": str(trace.path), "facts": dict(trace.facts), "operators": operators}


# --- commands -----------------------------------------------------------------------------------------------------


def _data(arguments: Sequence[str]) -> int:
    summary = "Measures the data loader without the model: what a sample costs, samples a second by number of workers."
    parser = Parser("profile data", summary, _DATA_EPILOG, "[RECIPE ...] [options] [overrides]")
    add_run(parser, "ranks of this machine, which share its CPUs")
    parser.add_argument("--seconds", type=whole, default=20, metavar="S", help="of measurements; default %(default)s")
    parser.add_argument("--update-ms", type=whole, metavar="MS", help="time of an update; default: the run's")
    args, overrides = parser.parse(arguments)
    loaded, _ = approved_config(args.config, overrides, trusted=args.trust_run)

    from lockstep.profiling.loading import data_lines, profile_data, update_seconds

    update = args.update_ms / 1000 if args.update_ms is not None else update_seconds(map(Path, args.config))
    profile = profile_data(loaded, float(args.seconds), update, trust_remote_code=args.trust_remote_code)
    for line in data_lines(profile):
        echo(line)
    emit(asdict(profile))
    return 0


def _memory(arguments: Sequence[str]) -> int:
    summary = "Shows what holds the memory of a rank at its peak, by category and module, beside the plan."
    parser = Parser("profile memory", summary, _MEMORY_EPILOG, "[RECIPE ...] [options] [overrides]")
    add_run(parser, "ranks of this machine")
    args, overrides = parser.parse(arguments)
    for place in map(Path, args.config):
        _refuse_beside_gpus(place)
    loaded, _ = approved_config(args.config, overrides, trusted=args.trust_run)

    from lockstep.profiling.memory import memory_lines, memory_of_recipe, memory_record

    profile = memory_of_recipe(loaded, trust_remote_code=args.trust_remote_code)
    for line in memory_lines(profile):
        echo(line)
    emit(memory_record(profile))
    return 0


def _refuse_beside_gpus(run: Path) -> None:
    """Raise RunFailed for a run that trains on GPUs of this host: new ranks beside it would take its memory."""
    from lockstep.monitor.attempts import read_attempts
    from lockstep.monitor.folder import held_by

    attempts = read_attempts(run)
    if attempts and attempts[-1].facts.get("device") != "cpu" and held_by(run) is not None:
        raise RunFailed(
            f"the run in {run} trains on the GPUs that would be measured; `{command_line('lockstep', 'profile', run)}` "
            "leaves a snapshot of their memory (RUN/profile/*.memory.pickle) for https://pytorch.org/memory_viz"
        )


COMMANDS = {
    "data": Command("measure only the data loader", _data),
    "memory": Command("show what holds the memory of a rank", _memory),
}

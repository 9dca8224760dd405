"""The verb `profile`: lockstep profile RUN [--steps 3] [--ranks 0,3]."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.arguments import Parser, add_json, run_path, whole
from lockstep.core.command_lines import command_line
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo

if TYPE_CHECKING:
    from lockstep.profiling.traces import Trace

_EPILOG = """\
A run that trains, started by whatever launcher, also on other hosts that share its folder: its ranks record the next
updates, without being stopped; the summary follows. A run that has ended: the summary of the traces that it has.

The traces are in RUN/profile. Open them in https://ui.perfetto.dev, in chrome://tracing, or with TensorBoard's plugin
torch-tb-profiler: tensorboard --logdir RUN. To trace given updates, set profile.steps: 10..13 in the config."""


def run(arguments: Sequence[str]) -> int:
    """Trace a run that trains, and explain where its time goes."""
    parser = Parser("profile", "Records where the time of a running run goes, and explains it.", _EPILOG)
    parser.add_argument("run", type=run_path, metavar="RUN", help="the run's folder, or its address")
    parser.add_argument("--steps", type=whole, default=3, metavar="N", help="updates to record; default %(default)s")
    parser.add_argument("--ranks", type=_ranks, default=(0,), metavar="all|0,3", help="ranks that record; default 0")
    parser.add_argument("--stacks", action="store_true", help="record Python lines, too: larger, slower")
    parser.add_argument("--show", action="store_true", help="record nothing: the summary of the traces that are there")
    parser.add_argument("--timeout", type=whole, default=600, metavar="S", help="seconds to wait; default %(default)s")
    add_json(parser)
    args = parser.parse_args(arguments)

    from lockstep.monitor.folder import is_run
    from lockstep.profiling.findings import findings_of, summary_lines
    from lockstep.profiling.traces import read_trace

    if not is_run(args.run):
        raise ConfigError(f"{args.run} is not the folder of a run")
    traces = [read_trace(path) for path in _recorded(args)]
    for line in summary_lines(traces):
        echo(line)
    if args.json:
        findings = [asdict(finding) for finding in findings_of(traces)]
        emit({"run": str(args.run), "traces": [_record(trace) for trace in traces], "findings": findings})
    return 0


def _recorded(args: argparse.Namespace) -> list[Path]:
    """Return the traces: of a run that trains, new ones."""
    from lockstep.monitor.profile_spans import TraceOptions
    from lockstep.monitor.trace_requests import TraceAnswer
    from lockstep.profiling.requesting import is_running, request_traces
    from lockstep.profiling.traces import trace_files

    def show(answer: TraceAnswer) -> None:
        ranks = ", ".join(map(str, answer.ranks))
        echo(f"rank {ranks} records updates {answer.first:,} to {answer.last:,}")

    if is_running(args.run) and not args.show:
        return request_traces(
            args.run, args.steps, TraceOptions(args.ranks, stacks=args.stacks), float(args.timeout), show
        )
    files = trace_files(args.run)
    if not files:
        remedy = f"resume it ({command_line('lockstep', 'train', args.run)}), or set profile.steps in its config"
        raise RunFailed(f"the run in {args.run} is not running, and has no traces; {remedy}")
    return files


def _ranks(text: str) -> tuple[int, ...] | None:
    """Return ranks for `0,3`; None for `all`."""
    if text == "all":
        return None
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is neither all nor ranks such as 0,3")
    return tuple(sorted({int(word) for word in words}))


def _record(trace: Trace) -> dict[str, object]:
    return {**asdict(trace), "path": str(trace.path), "facts": dict(trace.facts), "operators": _operators(trace)}


def _operators(trace: Trace) -> list[dict[str, object]]:
    return [asdict(operator) for operator in trace.operators[:10]]

"""The verb `chaos`: lockstep chaos RECIPE [--faults kill,raise] [--rounds N] [overrides]."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from lockstep.cli.arguments import CONFIG_EPILOG, Parser, Prepared, add_run, approved_config, path, whole
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, VerificationError
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo
from lockstep.resilience.faults import KINDS, ON_REQUEST, OOM
from lockstep.resilience.number_faults import BAD_SAMPLE

if TYPE_CHECKING:
    from lockstep.chaos.rounds import ChaosRow
    from lockstep.config.loading import LoadedConfig

_EPILOG = f"""{CONFIG_EPILOG}
Trains a short run of the recipe, then the same run once a round with a fault at random: a rank is killed (SIGKILL),
exits, raises an exception, is stopped (SIGSTOP), hangs, holds the interpreter's lock, or calls a collective that the
others don't, at a phase of an update; its disk is full, readonly, gone for a while, or slow in a save; a sample can't
be read, once; a byte of the newest checkpoint is flipped, and all ranks are killed. Each run must recover by itself
(recovery.restarts), and end as the undisturbed one: bitwise the same losses and state. With --faults oom memory runs
out instead: the run must end bitwise as the one that is resumed at that update with smaller micro-batches; with
--faults badsample a sample is NaN: the run must end as the one that leaves out the same. Exit codes: 0 all rounds did,
3 one did not."""
_OTHERS = {
    OOM: ", after oom to the one resumed with smaller micro-batches",
    BAD_SAMPLE: ", after badsample to the one that leaves out the same samples",
}
_COLUMNS = "{:>5}  {:<10} {:>4} {:>5}  {:<13} {:>9} {:>6}  {}"


def run(arguments: Sequence[str]) -> int:
    """Disturb a recipe's run with faults, and compare how it ends."""
    return prepare(arguments).execute()


def prepare(arguments: Sequence[str]) -> Prepared:
    """Read and check the arguments."""
    summary = "Proves that a run recovers from faults by itself, and ends as the undisturbed one."
    parser = Parser("chaos", summary, _EPILOG, "[RECIPE ...] [options] [overrides]")
    add_run(parser, "train on N ranks of this machine")
    kinds = f"kinds; default {','.join(KINDS)}; also {','.join(ON_REQUEST)}"
    parser.add_argument("--faults", type=_faults, default=KINDS, metavar="A,B", help=kinds)
    parser.add_argument("--rounds", type=whole, default=10, metavar="N", help="runs with a fault; default %(default)s")
    parser.add_argument("--steps", type=_steps, default=12, metavar="N", help="updates of a run; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults; default %(default)s")
    parser.add_argument(
        "--folder", type=path, metavar="PATH", help="for the runs; by default runs/chaos-RECIPE-DATE-TIME"
    )
    args, overrides = parser.parse(arguments)
    loaded, name = approved_config(args.config, overrides, trusted=args.trust_run)
    return Prepared(partial(_disturb, args, loaded, name), loaded.config, f"chaos-{name}")


def _disturb(args: argparse.Namespace, loaded: LoadedConfig, name: str) -> int:
    from lockstep.chaos.rounds import free_folder, run_rounds
    from lockstep.training.job import Job
    from lockstep.training.user_objects import UserObjects, refuse_given

    refuse_given(loaded)
    if loaded.config.launch.nodes != 1:
        raise ConfigError("chaos disturbs runs on one host; leave out launch.nodes")
    folder = free_folder(args.folder, name)
    job = Job(loaded.config, name, given=UserObjects(trust_remote_code=args.trust_remote_code))
    echo(f"{name}: {args.rounds} runs of {args.steps} updates with a fault each, in {folder}\n", flush=True)
    echo(_COLUMNS.format("round", "fault", "rank", "step", "phase", "recovery", "redone", "result"), flush=True)
    shown: list[ChaosRow] = []

    def show(row: ChaosRow) -> None:
        shown.append(row)
        seconds = "-" if row.recovery_seconds is None else f"{row.recovery_seconds:.2f} s"
        redone = "-" if row.steps_redone is None else str(row.steps_redone)
        cells = (len(shown), row.fault, row.rank, row.step, row.phase, seconds, redone, _result(row))
        echo(_COLUMNS.format(*cells), flush=True)

    rows = run_rounds(job, args.faults, args.rounds, args.steps, args.seed, folder, show)
    failed = [row for row in rows if not row.passed]
    if args.json:
        emit([{**asdict(row), "passed": row.passed} for row in rows])
    if failed:
        text = f"{len(failed)} of {len(rows)} rounds didn't end as the undisturbed run; the first one's output: "
        raise VerificationError(f"{text}{failed[0].output}")
    others = "".join(text for kind, text in _OTHERS.items() if kind in args.faults)
    echo(f"\nall {len(rows)} runs recovered by themselves, and ended bitwise identical to the undisturbed one{others}")
    return 0


def _result(row: ChaosRow) -> str:
    if not row.fired:
        return "the fault didn't fire"
    if row.code:
        return f"ended with exit code {row.code}"
    if not row.equal:
        return "ended with another state or other losses"
    if row.updates_unrecorded:
        return f"equal, but metrics.jsonl lacks {row.updates_unrecorded} updates"
    if not row.ledger_complete:
        return "missed or repeated samples"
    return f"equal; losses within {row.distance:.0e} of the undisturbed" if row.fault == OOM else "equal"


def _faults(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        known = (*KINDS, *ON_REQUEST)
        if name not in known:
            nearest = closest_match(name, known)
            meant = f"; did you mean {nearest}?" if nearest else ""
            raise argparse.ArgumentTypeError(f"{name!r} is no kind of fault; there are {', '.join(known)}{meant}")
    return names


def _steps(text: str) -> int:
    number = whole(text)
    if number < 2:
        raise argparse.ArgumentTypeError("a run has 2 updates at least: the first one is never disturbed")
    return number

"""The verb `chaos`: lockstep chaos RECIPE [--faults kill,raise] [--rounds N] [overrides]."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from lockstep.cli.arguments import CONFIG_EPILOG, Parser, Prepared, add_run, approved_config, path, whole
from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError, Stopped, VerificationError
from lockstep.core.json_output import emit
from lockstep.core.stopping import handled_signals, no_effect
from lockstep.core.terminal import echo
from lockstep.resilience.faults import KINDS, OOM
from lockstep.resilience.number_faults import NAN

if TYPE_CHECKING:
    from lockstep.chaos.rounds import ChaosRow
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config

_EPILOG = f"""{CONFIG_EPILOG}
Trains a short run of the recipe, then the same run once a round with a fault at a random update, phase and rank:
  kill, exit, raise, stop   a rank is killed (SIGKILL), exits, raises an exception, is stopped (SIGSTOP)
  hang, gil, collective     it hangs, holds the interpreter's lock, calls a collective that the others don't
  sample, flip              a sample can't be read; a byte of a checkpoint is flipped
  full, readonly, gone, slow      the disk in a save
  oom, nan, diverge         memory runs out; a NaN in an update; a bit of a parameter on one rank
Each run must recover by itself, and end bitwise equal to the undisturbed run; after oom, to a run
resumed there with smaller micro-batches; after nan, to a run that leaves out the same samples.
Exit code 3: a round failed."""
_COLUMNS = "{:>5}  {:<10} {:>4} {:>5}  {:<13} {:>9} {:>6}  {}"


def run(arguments: Sequence[str]) -> int:
    """Disturb a recipe's run with faults, and compare how it ends."""
    return prepare(arguments).execute()


def prepare(arguments: Sequence[str]) -> Prepared:
    """Read and check the arguments."""
    summary = "Proves that a run recovers from faults, and ends like an undisturbed run."
    parser = Parser("chaos", summary, _EPILOG, "[RECIPE ...] [options] [overrides]")
    add_run(parser, "train on N ranks of this machine", "list, an object for each round,")
    kinds = "kinds of faults; by default all that apply to the recipe and its ranks"
    parser.add_argument("--faults", type=_faults, default=(), metavar="A,B", help=kinds)
    parser.add_argument("--rounds", type=whole, default=10, metavar="N", help="runs with a fault; default %(default)s")
    parser.add_argument("--steps", type=_steps, default=12, metavar="N", help="updates of a run; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults; default %(default)s")
    parser.add_argument("--folder", type=path, metavar="PATH", help="default: runs/chaos-RECIPE-DATE-TIME")
    parser.add_argument("--keep", action="store_true", help="keep the runs of rounds that passed, too")
    args, overrides = parser.parse(arguments)
    loaded, name = approved_config(args.config, overrides, trusted=args.trust_run)
    return Prepared(partial(_disturb, args, loaded, name), loaded.config, f"chaos-{name}")


def _notes(loaded: LoadedConfig, of_round: Config) -> Iterator[str]:
    """Yield a note on flags that rounds don't follow."""
    from lockstep.config.loading import values

    used = values(of_round)
    changed = [key for key, value in values(loaded.config).items() if used.get(key) != value]
    if flags := [f"--{key}" for key in changed if loaded.origins[key].startswith("--")]:
        yield f"note: rounds have settings of their own, and not {', '.join(flags)}; --steps is the length of one"


def _disturb(args: argparse.Namespace, loaded: LoadedConfig, name: str) -> int:
    from lockstep.assembly.user_objects import UserObjects, refuse_given
    from lockstep.chaos.kinds import applicable
    from lockstep.chaos.launchers import StopRequest
    from lockstep.chaos.rounds import Settings, config_of_round, free_folder, run_rounds
    from lockstep.launch.devices import choose_ranks
    from lockstep.training.job import Job

    refuse_given(loaded)
    launch = loaded.config.launch
    if launch.nodes != 1:
        raise ConfigError("chaos trains on this machine; leave out launch.nodes")
    ranks = choose_ranks(launch) if launch.ranks == "auto" else launch.ranks
    applicable(loaded.config, args.faults, ranks, args.steps)
    folder = free_folder(args.folder, name)
    job = Job(loaded.config, name, given=UserObjects(trust_remote_code=args.trust_remote_code))
    settings = Settings(args.faults, args.rounds, args.steps, args.seed, ranks, folder, args.keep)
    for note in _notes(loaded, config_of_round(loaded.config, folder, args.steps)):
        echo(note, file=sys.stderr)
    echo(f"{name}: {args.rounds} runs of {args.steps} updates with a fault each, in {folder}\n", flush=True)
    echo(_COLUMNS.format("round", "fault", "rank", "step", "phase", "recovery", "redone", "result"), flush=True)
    rows: list[ChaosRow] = []
    stop, stopped = StopRequest(), None
    try:
        with handled_signals(stop, no_effect):
            for row in run_rounds(job, settings, stop):
                rows.append(row)
                _show(row, len(rows))
    except Stopped as failure:
        stopped = failure
    emit([{**asdict(row), "passed": row.passed} for row in rows])
    failed = [row.output for row in rows if not row.passed]
    text = "\n  ".join([f"{len(failed)} of {len(rows)} rounds didn't end like the undisturbed run", *failed])
    if stopped is not None:
        raise Stopped(f"{stopped} in round {len(rows) + 1} of {args.rounds}; {text}")
    if failed:
        raise VerificationError(text)
    but = ", or as its reference" if {row.fault for row in rows} & {OOM, NAN} else ""
    echo(f"\nall {len(rows)} runs recovered by themselves, bitwise equal to the undisturbed run{but}")
    return 0


def _show(row: ChaosRow, number: int) -> None:
    seconds = "-" if row.recovery_seconds is None else f"{row.recovery_seconds:.2f} s"
    redone = "-" if row.steps_redone is None else str(row.steps_redone)
    cells = (number, row.fault, row.rank, row.step, row.phase, seconds, redone, _result(row))
    echo(_COLUMNS.format(*cells), flush=True)


def _result(row: ChaosRow) -> str:
    if row.failure:
        return f"failed: {row.failure}"
    if row.code:
        return f"ended with exit code {row.code}"
    if not row.fired:
        return "the fault had no effect"
    if not row.equal:
        return "ended with another state or other losses"
    if row.updates_unrecorded:
        return f"equal, but metrics.jsonl lacks {row.updates_unrecorded} updates"
    if not row.ledger_complete:
        return "missed or repeated samples"
    return f"equal; losses within {row.distance:.0e} of the undisturbed" if row.distance else "equal"


def _faults(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in KINDS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a kind of fault; {did_you_mean(name, KINDS)}")
    return names


def _steps(text: str) -> int:
    number = whole(text)
    if number < 2:
        raise argparse.ArgumentTypeError("a run has 2 updates at least: the first one is never disturbed")
    return number

"""The verb `train`: lockstep train RECIPE [overrides], lockstep train RUN."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.arguments import (
    CONFIG_EPILOG,
    Parser,
    Prepared,
    add_hosts,
    add_run,
    approved_config,
    refuse_hosts_without_number,
    run_path,
)
from lockstep.config.init_templates import CONFIG
from lockstep.config.override import Override
from lockstep.core.errors import ConfigError
from lockstep.core.json_output import emit
from lockstep.core.near_runs import peer_checkpoint
from lockstep.core.process_settings import keep_freed_memory
from lockstep.stores.addresses import is_address

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig

_EPILOG = f"""{CONFIG_EPILOG}
RUN is the folder of a run: it resumes from its newest checkpoint that verifies. So does a RECIPE with
a run's folder as run.folder. Exit codes: 0 done, 1 failed, 2 fix your config, 75 stopped and saved (start it again),
130 stopped.
SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1 save and stop, SIGUSR2 saves and continues."""

_NOTHING_TO_TRAIN = f"""train needs a recipe, a config file or the folder of a run
usage: lockstep train [RECIPE ...|RUN] [options] [overrides]
  lockstep init                 writes {CONFIG}, a first config with comments, for your data
  lockstep train {CONFIG:<14} trains it
  lockstep train stdlib-lm      trains a recipe that needs no data; lockstep recipes lists all"""


def run(arguments: Sequence[str]) -> int:
    """Check the config before any process exists, then train."""
    return prepare(arguments).execute()


def prepare(arguments: Sequence[str]) -> Prepared:
    """Read and check the arguments."""
    parser = Parser("train", "Trains a recipe or a config file.", _EPILOG, "[RECIPE ...|RUN] [options] [overrides]")
    add_run(parser, "processes on this machine; auto: one per GPU")
    add_hosts(parser)
    parser.add_argument("--fresh", action="store_true", help="start over, whatever was saved before")
    parser.add_argument("--from", type=_step, metavar="STEP", dest="step", help="resume from this step's checkpoint")
    text = "start a new run in FOLDER from RUN's checkpoint"
    parser.add_argument("--fork", type=run_path, metavar="FOLDER", help=text)
    text = "resume although data, model or seed have changed"
    parser.add_argument("--accept-changes", action="store_true", help=text)
    args, overrides = parser.parse(arguments)
    named = args.config[0] if args.config else ""
    if is_address(named):
        why = f"{named} is no recipe and no run's folder, which are on a disk; checkpoint.folder may be an address"
        raise ConfigError(why)
    first = Path(named)
    origin = first if named and (first / "config.yaml").is_file() else None
    if args.fork is not None and origin is None:
        raise ConfigError("--fork starts from another run: lockstep train RUN --fork FOLDER")
    if args.fresh and (args.step is not None or args.fork is not None):
        raise ConfigError("--fresh starts over, but --from and --fork start from a checkpoint; use one of them")
    if origin is not None:
        overrides = [*_run_folder(named, args.fork), *overrides]
        args.config[0] = str(origin)
    loaded, name = approved_config(args.config, overrides, trusted=args.trust_run, writes=True)
    if not named:  # after the words of other tools, which have better answers
        raise ConfigError(_NOTHING_TO_TRAIN)
    refuse_hosts_without_number(args, loaded.config.launch.nodes)
    folder = None if loaded.config.run.folder is None else Path(loaded.config.run.folder)
    restart, trust = _restart(arguments, named, args.fork), args.trust_remote_code
    execute = partial(_train, args, loaded, name, origin)
    return Prepared(
        execute, loaded.config, name, folder, starts_run=True, nodes=True, restart=restart, trust_remote_code=trust
    )


def _train(args: argparse.Namespace, loaded: LoadedConfig, name: str, origin: Path | None) -> int:
    keep_freed_memory()  # before torch is imported, and inherited by the ranks
    from lockstep.monitor.folder import read_summary, recipe_of
    from lockstep.resuming.locations import find
    from lockstep.resuming.resuming import Resume
    from lockstep.training.start_run import train

    forked = find(origin, trusted=args.trust_run).storage if origin is not None and args.fork is not None else None
    resume = Resume(args.fresh, args.step, forked, accept_changes=args.accept_changes)
    recipe = name if origin is None else recipe_of(origin)
    code, folder = train(loaded, recipe, resume, trust_remote_code=args.trust_remote_code)
    if args.json and folder is not None:
        emit(read_summary(folder))
    return code


def _step(text: str) -> int:
    """Return a step; another tool's flag takes a checkpoint."""
    if not text.isdecimal():
        remedy = "`lockstep ckpt import CHECKPOINT RUN --config FILE` makes a run of another program's checkpoint"
        what = peer_checkpoint(Path(text)) or f"is not a number; {remedy}"
        raise argparse.ArgumentTypeError(f"takes a step, which is a whole number, and {text!r} {what}")
    return int(text)


def _restart(arguments: Sequence[str], run: str, fork: Path | str | None) -> tuple[str, ...]:
    """Return the arguments that resume what these have started: without flags that start over, and a fork by itself."""
    words, kept = iter(arguments), list[str]()
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag in ("--from", "--fork"):
            if not equals:
                next(words)
        elif word != "--fresh":
            kept.append(word)
    if fork is not None:
        kept[kept.index(run)] = str(fork)
    return tuple(kept)


def _run_folder(run: str, fork: Path | str | None) -> list[Override]:
    """Return the run's folder as overrides: the config of a run doesn't contain it if Lockstep named the folder."""
    if fork is None:
        return [Override("run.folder", run)]
    return [Override("run.folder", str(fork), "--fork"), Override("checkpoint.folder", "null", "--fork")]

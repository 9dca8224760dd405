"""lockstep train RECIPE [overrides]; lockstep train RUN"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.words import (
    CONFIG_EPILOG,
    Parser,
    add_config,
    add_json,
    add_trust,
    add_untested,
    approved_config,
    path,
    ranks,
    short_overrides,
    split,
    step,
)
from lockstep.config.override import Override
from lockstep.core.arguments import TrainArguments
from lockstep.core.errors import ConfigError

_EPILOG = f"""{CONFIG_EPILOG}
RUN is the folder of a run: it goes on from its newest checkpoint that verifies. So does a RECIPE whose run.folder is
that of a run. Exit codes: 0 done, 1 failed, 2 fix your config, 75 stopped and saved (start it again), 130 stopped.
SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1 save and stop, SIGUSR2 saves and continues."""


def run(words: Sequence[str]) -> int:
    """Checks the config before any process exists."""
    parser = Parser("train", "Trains a recipe or a config file.", _EPILOG, "[RECIPE ...|RUN] [options] [overrides]")
    add_config(parser)
    parser.add_argument("--ranks", type=ranks, metavar="N|auto", help="processes on this machine; auto: one a GPU")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever was saved before")
    parser.add_argument("--from", type=step, metavar="STEP", dest="step", help="go on from this step's checkpoint")
    parser.add_argument("--fork", type=path, metavar="FOLDER", help="go on from RUN's checkpoint as a run of its own")
    parser.add_argument(
        "--accept-changes", action="store_true", help="go on although data, model or seed are others than before"
    )
    add_json(parser)
    add_trust(parser)
    add_untested(parser)
    own, overrides = split(words, parser.flags())
    asked = parser.parse_args(own)
    origin = _run_folder(asked.config)
    if asked.fork is not None and origin is None:
        raise ConfigError("--fork goes on from another run: lockstep train RUN --fork FOLDER")
    if asked.fresh and (asked.step is not None or asked.fork is not None):
        raise ConfigError("--fresh begins anew; --from and --fork go on from a checkpoint: give one of them")
    overrides = [*_place(origin, asked.fork), *overrides, *short_overrides(asked)]
    loaded, name = approved_config(asked.config, overrides, parser.flags(), trusted=asked.trust_run, writes=True)

    from lockstep.monitor.folder import recipe_of
    from lockstep.training.command import train

    arguments = TrainArguments(
        json=asked.json,
        trust_remote_code=asked.trust_remote_code,
        trust_run=asked.trust_run,
        fresh=asked.fresh,
        step=asked.step,
        origin=origin if asked.fork is not None else None,
        accept_changes=asked.accept_changes,
    )
    return train(loaded, name if origin is None else recipe_of(origin), arguments)


def _run_folder(names: Sequence[str]) -> Path | None:
    """The run that is named in place of a recipe, if there is one."""
    first = Path(names[0]) if names else None
    return first if first is not None and (first / "config.yaml").is_file() else None


def _place(origin: Path | None, fork: Path | None) -> list[Override]:
    """Where the run lies: its own folder is not in a config that left it to be made up."""
    if origin is None:
        return []
    if fork is None:
        return [Override("run.folder", str(origin))]
    return [Override("run.folder", str(fork), "--fork"), Override("checkpoint.folder", "null", "--fork")]

"""The proof from Python, on a model and data that are handed over.

lockstep.verify(config, model=Net, train_dataset=points, ranks=(1, 2)) --> [Row(strategy="ddp", passed=True, ...), ...]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Unpack

from lockstep.core.errors import ConfigError
from lockstep.core.ranks import names_a_rank
from lockstep.launch.devices import count_gpus
from lockstep.launch.local import refuse_import_of_script
from lockstep.proof.cases import Proof, plan_proof, selected_layouts
from lockstep.proof.conducting import Outcome, Show, conduct
from lockstep.proof.rows import Row
from lockstep.strategies.fsdp import Precise
from lockstep.strategies.registry import AUTO, find_strategy
from lockstep.training.api import ConfigLike, resolved
from lockstep.training.user_objects import Objects, UserObjects, user_objects

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.proof.trial import Tamper


def verify(
    config: ConfigLike,
    *,
    strategies: str | Sequence[str] = "all",
    ranks: int | Sequence[int] = (1, 2, 4),
    steps: int = 8,
    precision: Precise = "fp32",
    tamper: Tamper | None = None,
    trust_run: bool = False,
    **objects: Unpack[Objects],
) -> list[Row]:
    """Runs `config` under each strategy on each number of ranks, beside one process on the same samples.

    Ranks are processes of their own: what is handed over stays as it is. It goes to them by forking, or, where this
    process has threads or uses CUDA, by pickling: then define it at the top of a module.

    Args:
        config: as of `lockstep.train`.
        strategies: names, or `all`.
        ranks: on how many, one number or several.
        steps: updates of each run.
        precision: of forward and backward.
        trust_run: as of `lockstep.train`.
        tamper: called with each session before its first update, but not with the single process's: a fault of your
            making, to see that it is found.
        **objects: `model`, `train_dataset`, ...: see `lockstep.Objects`.

    Returns:
        A row a run, whose `passed` is None where the strategy refuses.

    Raises:
        ConfigError: something asked for can't be had, or there is no such strategy.
        RunFailed: the single process failed.
    """
    refuse_import_of_script()
    given = user_objects(objects)
    numbers = [ranks] if isinstance(ranks, int) else ranks
    outcome, _ = prove(
        resolved(config, given, trusted=trust_run), given, strategies, numbers, steps, precision, tamper=tamper
    )
    return list(outcome.rows)


def prove(
    config: Config,
    given: UserObjects,
    strategies: str | Sequence[str],
    ranks: Sequence[int],
    steps: int,
    precision: Precise,
    *,
    tamper: Tamper | None = None,
    show: Show | None = None,
    begin: Callable[[Proof], None] = lambda proof: None,
) -> tuple[Outcome, Proof]:
    """What `verify` and the command share.

    Args:
        show: told each row as soon as it is there, by whichever process has it.
        begin: told what is going to be run.
    """
    if names_a_rank(os.environ):
        raise ConfigError(
            "verify starts ranks of its own, and this process is one already; start it without a launcher"
        )
    if steps < 1 or not ranks or min(ranks) < 1:
        raise ConfigError(f"{steps} steps on {list(ranks)} ranks prove nothing: give whole numbers above 0")
    gpus = 0 if config.launch.device == "cpu" else count_gpus()
    if config.parallel.strategy != AUTO:
        find_strategy(config.parallel.strategy)  # so that a user's own is one of them
    proof = plan_proof(config, selected_layouts(strategies), list(ranks), precision, gpus)
    if not proof.cases and not proof.refused:
        raise ConfigError("there is nothing to run: " + "; ".join(proof.left_out))
    begin(proof)
    return conduct(proof, given, steps, precision, tamper=tamper, show=show), proof

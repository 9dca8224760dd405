"""Verification from Python, with a model and data as objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from lockstep.assembly.user_objects import Objects, UserObjects, user_objects
from lockstep.core.errors import ConfigError
from lockstep.core.ranks import names_a_rank
from lockstep.launch.devices import count_accelerators
from lockstep.launch.local import refuse_import_of_script
from lockstep.proof.cases import VerificationPlan, plan_verification, selected_layouts
from lockstep.proof.rows import Row
from lockstep.proof.runner import run_plan
from lockstep.strategies.fsdp import Precise
from lockstep.strategies.registry import AUTO, find_strategy
from lockstep.training.api import ConfigLike, resolved

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.proof.comparison import Tamper


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """Rows of all runs, with what to know about them.

    Attributes:
        notes: What was changed, what depends on ranks by design, and what wasn't run.
        not_covered: How the config partitions its model or sequences, if no run does.
    """

    rows: Sequence[Row]
    notes: Sequence[str]
    not_covered: str | None


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
    """Run `config` under each strategy on each number of ranks, and compare with one process on the same samples.

    Ranks are processes, so your objects stay unchanged. They are forked; where this process has threads or uses an
    accelerator, objects are pickled: then define them at the top level of a module.

    Args:
        config: As in `lockstep.train`.
        strategies: Names, or `all`.
        ranks: One or several numbers of ranks.
        steps: Of each run.
        precision: Of forward and backward.
        tamper: Called with each session except the reference's before its first step, to inject a fault.
        trust_run: As in `lockstep.train`.
        **objects: As in `lockstep.train`.

    Returns:
        A row for each run; its `passed` is None where the strategy refuses.

    Raises:
        ConfigError: The config can't be run, or a strategy doesn't exist.
        RunFailed: The single process failed.
    """
    refuse_import_of_script()
    checked = user_objects(objects)
    numbers = [ranks] if isinstance(ranks, int) else ranks
    loaded = resolved(config, checked, trusted=trust_run)
    return list(compare_strategies(loaded, checked, strategies, numbers, steps, precision, tamper=tamper).rows)


def compare_strategies(
    config: Config,
    objects: UserObjects,
    strategies: str | Sequence[str],
    ranks: Sequence[int],
    steps: int,
    precision: Precise,
    *,
    tamper: Tamper | None = None,
    show: Callable[[Row], None] | None = None,
    introduce: Callable[[VerificationPlan], None] = lambda plan: None,
) -> ComparedRuns:
    """Run what `verify` and the command share.

    Args:
        show: Called with each row as soon as it is known.
        introduce: Called with the plan before anything runs.
    """
    if names_a_rank(os.environ):
        raise ConfigError(
            "verify starts its own ranks, and this process already is a rank; start it without a launcher"
        )
    if steps < 1 or not ranks or min(ranks) < 1:
        raise ConfigError(f"{steps} steps on {list(ranks)} ranks can't be compared; use whole numbers above 0")
    _, gpus = count_accelerators(config.launch)
    if config.parallel.strategy != AUTO:
        find_strategy(config.parallel.strategy)  # registers a user's own
    plan = plan_verification(config, selected_layouts(strategies), ranks, precision, gpus)
    if not plan.cases and not plan.refused:
        raise ConfigError("there is nothing to run: " + "; ".join(plan.left_out))
    introduce(plan)
    rows, notes = run_plan(plan, objects, steps, precision, tamper=tamper, show=show)
    return ComparedRuns(
        rows, [*plan.notes, *notes, *(f"not run: {reason}" for reason in plan.left_out)], plan.not_covered
    )

"""Selects the kinds of faults that apply to a recipe on its ranks, and the settings that they need."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from lockstep.chaos.drawing import first_flip
from lockstep.core.errors import ConfigError
from lockstep.plan.choosing import choose_strategy
from lockstep.plan.mesh import mesh_of
from lockstep.resilience.disk_faults import FLIP
from lockstep.resilience.faults import KINDS, OOM
from lockstep.resilience.number_faults import DIVERGE, NAN

if TYPE_CHECKING:
    from lockstep.config.schema import Config

ONE_SAMPLE = "halves micro-batches, and this run's have one sample; leave it out, or set a larger batch.micro_size"
_ROLLBACK_STEPS = 2
_STATE_BYTES = 4  # of an element: the state is fp32


def applicable(config: Config, chosen: Collection[str], ranks: int, steps: int) -> tuple[str, ...]:
    """Return the chosen kinds; if none are chosen, all that apply. Raises ConfigError if a chosen one doesn't."""
    reasons = dict(_reasons(config, ranks, steps))
    for kind in chosen:
        if kind in reasons:
            raise ConfigError(f"--faults {kind} {reasons[kind]}")
    return tuple(chosen) or tuple(kind for kind in KINDS if kind not in reasons)


def prepared(config: Config, kinds: Collection[str]) -> Config:
    """Return the config with the keys that the kinds of faults need."""
    recovery = config.recovery
    if NAN in kinds and recovery.bad_numbers.nonfinite != "rollback":
        numbers = {"nonfinite": "rollback", "rollback_steps": _ROLLBACK_STEPS}
        recovery = recovery.model_copy(update={"bad_numbers": recovery.bad_numbers.model_copy(update=numbers)})
    if DIVERGE in kinds:
        recovery = recovery.model_copy(update={"compare_every": 1})
    return config.model_copy(update={"recovery": recovery})


def _reasons(config: Config, ranks: int, steps: int) -> Iterator[tuple[str, str]]:
    """Yield the kinds that don't apply, each with what follows its name in a message."""
    if ranks == 1:
        yield "collective", "is a collective that other ranks don't call; start 2 ranks at least"
    if not _has_copies(config, ranks):
        yield DIVERGE, "changes one of several copies of a parameter, as ddp has on 2 ranks"
    if config.model.compile:
        for kind in (OOM, NAN):
            yield kind, "needs a model that isn't compiled; leave it out, or set model.compile: false"
    if config.batch.micro_size == 1:
        yield OOM, ONE_SAMPLE
    if config.precision.compute == "fp16":
        yield NAN, "is an overflow under precision.compute: fp16, which is skipped; leave it out"
    if first_flip(steps) > steps:
        yield FLIP, f"changes the newer of two checkpoints; give --steps {first_flip(steps)} at least"


def _has_copies(config: Config, ranks: int) -> bool:
    """Return whether several ranks hold the same parameters, in the state's dtype."""
    strategy = choose_strategy(config, ranks).strategy
    mesh = mesh_of(config.parallel, strategy, ranks)
    is_whole = not strategy.variant(config.parallel).state.parameters
    gathered_bytes, _ = strategy.memory.element_bytes(strategy.options_of(config.parallel))
    return mesh.data > 1 or (mesh.shard > 1 and is_whole and gathered_bytes == _STATE_BYTES)

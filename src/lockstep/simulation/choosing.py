"""The choices of `auto`: the first strategy that fits, with the largest micro-batch that does, by simulated updates.

ddp, then fsdp    whole share of the global batch -- it fits: taken
                  one sample                      -- it doesn't fit: next strategy
                  in between                      -- about where the peak reaches a rank's memory, then smaller
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError
from lockstep.core.formatting import size
from lockstep.plan.choosing import USABLE, Decision
from lockstep.simulation.estimate import Estimator, under
from lockstep.strategies.registry import AUTO, REFERENCE, strategies

if TYPE_CHECKING:
    from lockstep.config.schema import Config


def decide(estimator: Estimator) -> Decision:
    """Return the strategy and the micro-batch that `auto` takes; what the config sets stays.

    Raises:
        ConfigError: The run is refused under every strategy that `auto` may take.
        Unpredictable: It can't be simulated.
    """
    assert estimator.memory is not None, "without a limit everything fits"
    usable, refusal = int(USABLE * estimator.memory), None
    decision: Decision | None = None
    for name, config in _candidates(estimator.config, estimator.ranks):
        try:
            decision, fits = _largest(estimator, name, config, usable)
        except ConfigError as error:
            refusal = refusal or error
            continue
        if fits:
            return decision
    if decision is not None:
        return replace(decision, why=f"{decision.why}, and nothing that auto may choose takes less")
    assert refusal is not None, "there is a candidate"
    raise refusal


def _candidates(config: Config, ranks: int) -> Iterator[tuple[str, Config]]:
    if config.parallel.strategy != AUTO:
        yield config.parallel.strategy, config
    elif ranks == 1:
        yield REFERENCE.name, under(config, REFERENCE, REFERENCE.variants[0])
    else:
        for strategy in strategies():
            if strategy.automatic:
                yield strategy.name, under(config, strategy, strategy.variants[0])


def _largest(estimator: Estimator, strategy: str, config: Config, usable: int) -> tuple[Decision, bool]:
    """Return the strategy with the largest micro-batch that fits, or with the smallest; and whether it fits."""
    peaks: dict[int, int] = {}

    def fits(samples: int) -> bool:
        batch = config.batch.model_copy(update={"micro_size": samples})
        peaks[samples] = estimator.peak(config.model_copy(update={"batch": batch})).bytes
        return peaks[samples] <= usable

    def decision(samples: int) -> Decision:
        assert estimator.memory is not None, "`decide` asserts it"
        limit = f"the {size(estimator.memory)} that a rank has"
        larger = min((other for other in peaks if other > samples), default=None)
        than = f"; {larger} samples would take {size(peaks[larger])}" if larger is not None else ""
        why = f"with micro-batches of {samples} a simulated update takes {size(peaks[samples])} of {limit}{than}"
        return Decision(strategy, samples, why)

    share = estimator.planned(config).batch.micro_size
    if fits(share):
        return decision(share), True
    if config.batch.micro_size != "auto" or share == 1:
        return decision(share), False
    if not fits(1):
        return decision(1), False
    fraction = (usable - peaks[1]) / max(peaks[share] - peaks[1], 1)
    samples = _even(share, max(1, int(1 + fraction * (share - 1))))
    while samples not in peaks and not fits(samples):
        samples = _even(share, max(1, samples * 3 // 4))
    return decision(samples), True


def _even(share: int, samples: int) -> int:
    """Return a size of at most N samples with which all micro-batches of a share are about as large."""
    samples = min(samples, share)
    return -(-share // -(-share // samples))

r"""Computes learning rates, intervals and the end of a run from progress. Nothing here has state.

rate     peak |    ________________                warmup      (step + 1) / (warmup steps + 1), or of logarithms
              |   /                \_              curve       of the kind, over what is left after the warmup
              |  /                   \__           final       final_ratio x peak, at the end of the run
              | /                       \ final
              +-------------------------- done
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

from lockstep.config.every import Every
from lockstep.config.schema import Optim, Run, Schedule
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.progress import Progress
from lockstep.core.records import DataFacts

_TIMESCALE = 10_000  # updates of inverse-sqrt without a warmup, as in transformers

# --- learning rate ------------------------------------------------------------------------------------------------


def learning_rate(optim: Optim, schedule: Schedule, done: float, step: int, steps: int | None) -> float:
    """Return the learning rate of update `step` (counted from 0), in [0, optim.lr].

        rate = optim.lr x min(rise, 1, curve(x))

        linear    rise = (step + 1) / (W + 1)
        log       rise = log(step + 2) / log(W + 2)        DeepSpeed's warmup_type "log"

    W is the number of warmup updates: `warmup_steps`, or `warmup_ratio` of all. No warmup update has rate 0, and
    update W has the peak. x is the fraction of the time after the warmup that is over, (done - w) / (1 - w), where w
    is the warmup's fraction of the run; with f = `final_ratio`:

        constant, plateau      1; evaluations lower `optim.lr` of a plateau (`loop.plateau`)
        linear                 1 - (1 - f) x
        cosine                 f + (1 - f) (1 + cos(pi x)) / 2      Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5
        polynomial             f + (1 - f) (1 - x)^power                    as transformers' schedules of these names
        cosine-restarts        the cosine at (x cycles) mod 1; f at the end
        inverse-sqrt           sqrt(T / (step - W + T)), T = W, or 10,000 without a warmup
        piecewise              the factor of the last of `milestones` that `done` has reached    torch's MultiStepLR
        warmup-stable-decay    1, then linear to f over the last `decay_ratio` of the whole run
                                                                    Hu et al. 2024, arXiv:2404.06395, section 4

    Args:
        done: Fraction of the run that was over before this update (`fraction_done`).
        steps: Updates of the whole run; None if unknown in advance. The warmup's fraction is then estimated from
            `done` and `step`, which is exact at both of its ends.
    """
    warms_up = schedule.warmup_steps or schedule.warmup_ratio
    warmup_steps, warmup_share = _warmup(schedule, done, step, steps) if warms_up else (0.0, 0.0)
    start = 1.0 - schedule.decay_ratio if schedule.kind == "warmup-stable-decay" else warmup_share
    over = min(1.0, max(0.0, (done - start) / (1.0 - start))) if start < 1.0 else 0.0
    factor = _curve(schedule, over, done, step - warmup_steps, warmup_steps or _TIMESCALE)
    if step < warmup_steps:
        linear = schedule.warmup_type == "linear"
        rise = (step + 1) / (warmup_steps + 1) if linear else math.log(step + 2) / math.log(warmup_steps + 2)
        factor = min(factor, rise)
    return optim.lr * factor


def _warmup(schedule: Schedule, done: float, step: int, steps: int | None) -> tuple[float, float]:
    """Return the warmup in updates, and as a fraction of the run (at most 1)."""
    if steps is not None:
        updates = schedule.warmup_steps if schedule.warmup_ratio is None else round(schedule.warmup_ratio * steps)
        return float(updates or 0), min(1.0, (updates or 0) / steps)
    if schedule.warmup_ratio is not None:
        return (schedule.warmup_ratio * step / done if done else math.inf), schedule.warmup_ratio
    assert schedule.warmup_steps is not None
    return float(schedule.warmup_steps), (min(1.0, done / step * schedule.warmup_steps) if step else 0.0)


def _curve(schedule: Schedule, over: float, done: float, later: float, timescale: float) -> float:
    """Return the factor after the warmup; `later` is updates since its end."""
    final = schedule.final_ratio
    match schedule.kind:
        case "constant" | "plateau":
            return 1.0
        case "inverse-sqrt":
            return math.sqrt(timescale / (later + timescale)) if later > 0 else 1.0
        case "piecewise":
            return next((factor for share, factor in reversed(schedule.milestones) if done >= share), 1.0)
        case "polynomial":
            return final + (1.0 - final) * math.pow(1.0 - over, schedule.power)
        case "cosine-restarts":
            over = over * schedule.cycles % 1.0 if over < 1.0 else 1.0
    if schedule.kind.startswith("cosine"):
        return final + (1.0 - final) * (1.0 + math.cos(math.pi * over)) / 2
    return 1.0 - (1.0 - final) * over


# --- intervals ----------------------------------------------------------------------------------------------------


def is_due(every: Every, before: Progress, after: Progress, epoch_samples: int) -> bool:
    """Return whether the step from `before` to `after` reached a multiple of the interval.

    False for minutes, since ranks could disagree about them: the loop requests those through the vote.
    """
    if every.unit == "minutes":
        return False
    if every.unit == "steps":
        return after.steps // int(every.number) > before.steps // int(every.number)
    if every.unit == "tokens":
        return after.tokens // int(every.number) > before.tokens // int(every.number)
    interval, scale = (int(every.number), 1) if every.unit == "samples" else _epochs(every.number, epoch_samples)
    return after.samples * scale // interval > before.samples * scale // interval


def updates_until(every: Every, now: Progress, epoch_samples: int, most: int) -> float:
    """Return how many further updates, of at most `most` samples, it takes at least to a multiple of the interval."""
    match every.unit:
        case "minutes":
            return math.inf
        case "steps":
            return int(every.number) - now.steps % int(every.number)
        case "tokens":
            return 1
    interval, scale = (int(every.number), 1) if every.unit == "samples" else _epochs(every.number, epoch_samples)
    return max(1, (interval - now.samples * scale % interval) // (scale * most))


@lru_cache(maxsize=64)
def _epochs(number: float, epoch_samples: int) -> tuple[int, int]:
    """Return `number` epochs as samples over a scale: 0.3 epochs of 7 samples are 21 / 10."""
    interval = Fraction(str(number)) * epoch_samples
    return interval.numerator, interval.denominator


# --- length of a run ----------------------------------------------------------------------------------------------

LENGTHS = ("steps", "samples", "tokens", "epochs")
"""The keys of `run` that set its length; exactly one is set."""


def epoch_length(facts: DataFacts, global_size: int, drop_last: bool) -> tuple[int, int]:
    """Return the steps in an epoch, and their samples.

    Raises:
        ConfigError: `drop_last` leaves nothing to train on.
    """
    if not drop_last:
        return -(-facts.samples // global_size), facts.samples
    updates = facts.samples // global_size
    if updates == 0:
        why = (
            f"{global_size} is more than the {facts.samples} samples of an epoch, and data.drop_last drops incomplete "
            f"batches: nothing is left. Set it to {facts.samples} or less, or data.drop_last: false"
        )
        raise ConfigError(Problem("", "batch.global_size", why))
    return updates, updates * global_size


def horizon(run: Run, global_size: int, facts: DataFacts, drop_last: bool = False) -> int | None:
    """Return the steps of the whole run, rounded up; None for tokens over samples of different lengths."""
    if run.steps is not None:
        return run.steps
    updates, epoch_samples = epoch_length(facts, global_size, drop_last)
    samples = _sample_budget(run, epoch_samples)
    if samples is None:
        assert run.tokens is not None
        if facts.tokens_per_sample is None:
            return None
        samples = -(-run.tokens // facts.tokens_per_sample)
    epochs, rest = divmod(samples, epoch_samples)
    return epochs * updates + -(-rest // global_size)


def fraction_done(run: Run, progress: Progress, epoch_samples: int) -> float:
    """Return the fraction of the run's budget that is used, in [0, 1], in the unit of the budget."""
    used, budget = used_of_budget(run, progress, epoch_samples)
    return min(1.0, used / budget)


def is_finished(run: Run, progress: Progress, epoch_samples: int) -> bool:
    """Return whether the run's budget is used."""
    used, budget = used_of_budget(run, progress, epoch_samples)
    return used >= budget


def used_of_budget(run: Run, progress: Progress, epoch_samples: int) -> tuple[int, int]:
    """Return (used, budget) in the unit of the budget; the last step may exceed it."""
    if run.steps is not None:
        return progress.steps, run.steps
    if run.tokens is not None:
        return progress.tokens, run.tokens
    samples = _sample_budget(run, epoch_samples)
    assert samples is not None, "the schema requires exactly one budget"
    return progress.samples, samples


def _sample_budget(run: Run, epoch_samples: int) -> int | None:
    if run.epochs is None:
        return run.samples
    interval, scale = _epochs(run.epochs, epoch_samples)
    return -(-interval // scale)

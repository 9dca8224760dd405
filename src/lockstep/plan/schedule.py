"""Time is a value, and what follows from it is arithmetic: the learning rate, what is due, and when a run is over.

    rate     peak |    ________________                warm-up     (step + 1) / (warm-up steps + 1), or of logarithms
                  |   /                \\_              curve       of the kind, over what is left after the warm-up
                  |  /                   \\__           final       final_ratio x peak, when all is done
                  | /                       \\ final
                  +-------------------------- done
    due      before |--*------*----| after              a multiple was crossed, so it is due, once

Nothing here has state, so nothing needs saving and nothing can get out of step.
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

# --- learning rate ------------------------------------------------------------------------------------------------


def learning_rate(optim: Optim, schedule: Schedule, done: float, step: int, steps: int | None) -> float:
    """The learning rate of update `step` (counted from 0), in [0, optim.lr].

        rate = optim.lr x min(rise, 1, curve(x))

        linear    rise = (step + 1) / (W + 1)
        log       rise = log(step + 2) / log(W + 2)        DeepSpeed's warmup_type "log"

    W is the number of warm-up updates: `warmup_steps`, or `warmup_ratio` of all. No warm-up update has rate 0, and
    update W has the peak. x is how much of the time after the warm-up is over, (done - w) / (1 - w), where w is
    the warm-up's share of the run; with f = `final_ratio`:

        constant               1
        linear                 1 - (1 - f) x
        cosine                 f + (1 - f) (1 + cos(pi x)) / 2      Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5
        warmup-stable-decay    1, then linear to f over the last `decay_ratio` of the whole run
                                                                    Hu et al. 2024, arXiv:2404.06395, section 4

    Args:
        done: share of the run that was over before this update (`fraction_done`).
        steps: of the whole run; None if only running tells. What a warm-up is a share of is then estimated from
            `done` and `step`, which is exact at both of its ends.
    """
    warmup_steps, warmup_share = _warmup(schedule, done, step, steps)
    factor = _CURVES[schedule.kind](schedule, done, warmup_share)
    if step < warmup_steps:
        factor = min(factor, _rise(schedule, step, warmup_steps))
    return optim.lr * factor


def _rise(schedule: Schedule, step: int, warmup_steps: float) -> float:
    """The share of the peak that the warm-up has reached."""
    if schedule.warmup_type == "linear":
        return (step + 1) / (warmup_steps + 1)
    return math.log(step + 2) / math.log(warmup_steps + 2)


def _warmup(schedule: Schedule, done: float, step: int, steps: int | None) -> tuple[float, float]:
    """The warm-up in updates, and as a share of the run (at most 1)."""
    if not schedule.warmup_steps and not schedule.warmup_ratio:
        return 0.0, 0.0
    if steps is not None:
        wanted = schedule.warmup_steps if schedule.warmup_ratio is None else round(schedule.warmup_ratio * steps)
        return float(wanted or 0), min(1.0, (wanted or 0) / steps)
    if schedule.warmup_ratio is not None:
        return (schedule.warmup_ratio * step / done if done else math.inf), schedule.warmup_ratio
    assert schedule.warmup_steps is not None
    return float(schedule.warmup_steps), (min(1.0, done / step * schedule.warmup_steps) if step else 0.0)


def _constant(schedule: Schedule, done: float, warmup: float) -> float:
    return 1.0


def _linear(schedule: Schedule, done: float, warmup: float) -> float:
    return 1.0 - (1.0 - schedule.final_ratio) * _after(done, warmup)


def _cosine(schedule: Schedule, done: float, warmup: float) -> float:
    final = schedule.final_ratio
    return final + (1.0 - final) * (1.0 + math.cos(math.pi * _after(done, warmup))) / 2


def _stable_then_decay(schedule: Schedule, done: float, warmup: float) -> float:
    return 1.0 - (1.0 - schedule.final_ratio) * _after(done, 1.0 - schedule.decay_ratio)


def _after(done: float, start: float) -> float:
    """How much of the time after `start` is over, in [0, 1]; there is none if start is 1."""
    return min(1.0, max(0.0, (done - start) / (1.0 - start))) if start < 1.0 else 0.0


_CURVES = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "warmup-stable-decay": _stable_then_decay,
}

# --- what is due --------------------------------------------------------------------------------------------------


def is_due(every: Every, before: Progress, after: Progress, epoch_samples: int) -> bool:
    """Whether the update from `before` to `after` reached or passed a multiple of the interval.

    An update that passes several multiples is due once. Minutes are not arithmetic, so that ranks could disagree
    about them: for them the answer is always False, and the loop asks by a request that goes through the vote.
    """
    if every.unit == "minutes":
        return False
    if every.unit == "steps":
        return after.steps // int(every.number) > before.steps // int(every.number)
    if every.unit == "tokens":
        return after.tokens // int(every.number) > before.tokens // int(every.number)
    interval, scale = (int(every.number), 1) if every.unit == "samples" else _epochs(every.number, epoch_samples)
    return after.samples * scale // interval > before.samples * scale // interval


@lru_cache(maxsize=64)
def _epochs(number: float, epoch_samples: int) -> tuple[int, int]:
    """`number` epochs as a whole number of samples, over a scale: 0.3 epochs of 7 samples are 21 / 10."""
    interval = Fraction(str(number)) * epoch_samples
    return interval.numerator, interval.denominator


# --- how long a run is --------------------------------------------------------------------------------------------


def epoch_length(facts: DataFacts, global_size: int, drop_last: bool) -> tuple[int, int]:
    """Updates in an epoch, and the samples that they see: those of incomplete batches only without `drop_last`.

    Raises:
        ConfigError: `drop_last` leaves nothing to train on.
    """
    if not drop_last:
        return -(-facts.samples // global_size), facts.samples
    updates = facts.samples // global_size
    if updates == 0:
        raise ConfigError(
            Problem(
                "",
                "batch.global_size",
                f"{global_size} is more than the {facts.samples} samples of an epoch, and data.drop_last leaves out "
                f"what doesn't fill a batch: nothing is left. Set it to {facts.samples} or less, or "
                f"data.drop_last: false",
            )
        )
    return updates, updates * global_size


def horizon(run: Run, global_size: int, facts: DataFacts, drop_last: bool = False) -> int | None:
    """Updates of the whole run; None if only running tells (a budget of tokens over samples of unequal length).

    A budget of samples, tokens or epochs, fractions of epochs too, is rounded up to whole updates.
    """
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
    """Share of the run's budget that is used up, in [0, 1], in the unit of the budget.

    Counted in samples where the budget is, so that a run that goes on with another global batch still ends where
    it should.
    """
    used, budget = used_of_budget(run, progress, epoch_samples)
    return min(1.0, used / budget)


def is_finished(run: Run, progress: Progress, epoch_samples: int) -> bool:
    """Whether the run's budget is used up."""
    used, budget = used_of_budget(run, progress, epoch_samples)
    return used >= budget


def used_of_budget(run: Run, progress: Progress, epoch_samples: int) -> tuple[int, int]:
    """In the unit of the budget; the last update may go beyond it."""
    if run.steps is not None:
        return progress.steps, run.steps
    if run.tokens is not None:
        return progress.tokens, run.tokens
    samples = _sample_budget(run, epoch_samples)
    assert samples is not None, "the schema asks for exactly one budget"
    return progress.samples, samples


def _sample_budget(run: Run, epoch_samples: int) -> int | None:
    if run.epochs is None:
        return run.samples
    interval, scale = _epochs(run.epochs, epoch_samples)
    return -(-interval // scale)

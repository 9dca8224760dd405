"""Learning rates, intervals and lengths of runs."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kit.failures import fails

from lockstep.config.every import Every
from lockstep.config.loading import validate
from lockstep.config.schema import Optim, Run, Schedule
from lockstep.core.errors import ConfigError
from lockstep.core.progress import Progress
from lockstep.core.records import DataFacts
from lockstep.plan.schedule import epoch_length, fraction_done, horizon, is_due, is_finished, learning_rate

KINDS = ["constant", "linear", "cosine", "warmup-stable-decay"]
PEAK = Optim(lr=0.5)

share = st.floats(0, 1)
schedules = st.builds(
    lambda kind, warmup_type, warmup, decay, final: Schedule(
        kind=kind,
        warmup_ratio=min(warmup, 1 - decay),
        warmup_type=warmup_type,
        decay_ratio=decay,
        final_ratio=final,
    ),
    st.sampled_from(KINDS),
    st.sampled_from(["linear", "log"]),
    share,
    share,
    share,
)


def rates(schedule, steps):
    return [learning_rate(PEAK, schedule, step / steps, step, steps) for step in range(steps + 1)]


@given(schedules, st.integers(1, 200))
def test_a_rate_is_never_negative_nor_above_the_peak(schedule, steps):
    assert all(0 <= rate <= PEAK.lr for rate in rates(schedule, steps))


@given(schedules, st.integers(1, 200))
def test_a_rate_has_no_jumps(schedule, steps):
    """Between two updates the rate changes by no more than its steepest part allows."""
    warmup = round(schedule.warmup_ratio * steps)
    left = schedule.decay_ratio * steps if schedule.kind == "warmup-stable-decay" else steps - warmup
    assume(left >= 1)
    steepest = 1 / (warmup + 1) if schedule.warmup_type == "linear" else math.log(1.5) / math.log(warmup + 2)
    bound = PEAK.lr * (steepest + math.pi / 2 / left) + 1e-9
    assert all(abs(after - before) <= bound for before, after in pairwise(rates(schedule, steps)))


@given(schedules, st.integers(2, 200))
def test_a_rate_ends_at_its_final_ratio(schedule, steps):
    assume(schedule.kind != "constant")
    warmup = round(schedule.warmup_ratio * steps)
    assume(warmup < steps)
    assume(schedule.kind != "warmup-stable-decay" or schedule.decay_ratio > 1e-9)
    assert rates(schedule, steps)[-1] == pytest.approx(PEAK.lr * schedule.final_ratio, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_warmup_climbs_evenly_from_above_zero_to_the_peak(kind):
    by_steps = rates(Schedule(kind=kind, warmup_steps=4), 20)
    assert by_steps[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert by_steps == pytest.approx(rates(Schedule(kind=kind, warmup_ratio=0.2), 20))


def test_a_logarithmic_warmup_rises_as_the_logarithm_of_the_update():
    logarithmic = rates(Schedule(kind="constant", warmup_steps=6, warmup_type="log"), 20)
    assert logarithmic[:7] == pytest.approx([0.5 * math.log(2 + step) / math.log(8) for step in range(7)])
    assert logarithmic[2] == pytest.approx(0.5 * 2 / 3)
    assert logarithmic[6:] == [0.5] * 15


@pytest.mark.parametrize("warmup_type", ["linear", "log"])
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_rates_are_those_of_deepspeed_s_own_scheduler(kind, warmup_type):
    """Two updates later; with the same numbers, approximately."""
    import torch

    schedulers = pytest.importorskip("deepspeed.runtime.lr_schedules")
    steps, warmup = 200, 20
    section = {"kind": kind, "warmup_steps": warmup, "warmup_type": warmup_type}
    shared = {"warmup_num_steps": warmup + (2 if warmup_type == "log" else 1), "warmup_type": warmup_type}
    rated = {"warmup_min_lr": 0.0, "warmup_max_lr": PEAK.lr, **shared}
    written = {
        "constant": {"type": "WarmupLR", "params": rated},
        "linear": {"type": "WarmupDecayLR", "params": {"total_num_steps": steps, **rated}},
        "cosine": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0, **shared},
        },
    }[kind]
    expected = rates(Schedule(**section), steps)

    def deepspeed_rates(number):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK.lr)
        scheduler = getattr(schedulers, written["type"])(optimizer, **written["params"] | {"warmup_num_steps": number})
        return [(scheduler.step(), optimizer.param_groups[0]["lr"])[1] for _ in range(steps + 2)]

    exact = deepspeed_rates(written["params"]["warmup_num_steps"])[1:]
    assert expected[:warmup] == pytest.approx(exact[:warmup])
    assert expected == pytest.approx(exact[: len(expected)], abs=PEAK.lr * math.pi / (steps - warmup))
    assert expected == pytest.approx(deepspeed_rates(warmup)[1 : len(expected) + 1], abs=PEAK.lr * 1.5 / warmup)


@pytest.mark.parametrize(
    ("kind", "middle", "late"),
    [
        ("constant", 0.5, 0.5),
        ("linear", 0.275, 0.1625),
        ("cosine", 0.275, 0.05 + 0.45 * (1 + math.cos(0.75 * math.pi)) / 2),
    ],
)
def test_curves_without_warmup(kind, middle, late):
    schedule = Schedule(kind=kind, final_ratio=0.1)
    assert learning_rate(PEAK, schedule, 0.5, 5, 10) == pytest.approx(middle)
    assert learning_rate(PEAK, schedule, 0.75, 7, 10) == pytest.approx(late)


def test_stable_until_the_decay():
    stable = rates(Schedule(kind="warmup-stable-decay", decay_ratio=0.25), 8)
    assert stable == pytest.approx([0.5] * 7 + [0.25, 0.0])


def test_without_a_known_length_both_ends_of_the_curve_are_right():
    """100 tokens an update at first, 50 later: 1,000 tokens in 15 updates, unknown in advance."""
    schedule = Schedule(kind="cosine", warmup_steps=3)
    used = [0, 100, 200, 300, 400, *range(500, 1001, 50)]
    estimated = [learning_rate(PEAK, schedule, tokens / 1000, step, None) for step, tokens in enumerate(used)]
    assert estimated[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert estimated[-1] == pytest.approx(0.0)
    assert all(0 <= rate <= 0.5 for rate in estimated)
    by_ratio = Schedule(kind="cosine", warmup_ratio=0.3)
    assert learning_rate(PEAK, by_ratio, 0.3, 3, None) == pytest.approx(0.5)
    assert learning_rate(PEAK, by_ratio, 1.0, 15, None) == pytest.approx(0.0)


# --- intervals ----------------------------------------------------------------------------------------------------

updates = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 999)), min_size=1, max_size=60)
intervals = st.one_of(
    st.builds(
        lambda n, unit: Every(float(n), unit), st.integers(1, 90), st.sampled_from(["steps", "samples", "tokens"])
    ),
    st.builds(lambda n: Every(n / 10, "epochs"), st.integers(1, 30)),
)


@given(updates, intervals, st.integers(1, 50))
def test_an_interval_is_due_once_for_each_update_that_passes_multiples(steps, every, epoch_samples):
    """The oracle counts: an update is due if a multiple is in (before, after]."""
    before = Progress()
    for samples, tokens in steps:
        after = before.advance(samples, tokens)
        if every.unit == "epochs":  # in tenths of a sample, so that the oracle is whole numbers too
            low, high = before.samples * 10, after.samples * 10
            interval = round(every.number * 10) * epoch_samples
        else:
            low, high = getattr(before, every.unit), getattr(after, every.unit)
            interval = int(every.number)
        passed = [place for place in range(low + 1, high + 1) if place % interval == 0]
        assert is_due(every, before, after, epoch_samples) == bool(passed)
        before = after


@given(st.integers(1, 7), st.integers(1, 40))
def test_the_size_of_updates_does_not_change_how_often_one_is_due(size, number):
    every = Every(float(number), "samples")
    cursor = [Progress(k, k * size, 0) for k in range(421)]
    due = sum(is_due(every, before, after, 100) for before, after in pairwise(cursor))
    assert due == (420 * size // number if number >= size else 420)


def test_tenths_of_an_epoch_are_exact():
    """As a float, 0.1 is a little more than a tenth, and the multiple would be reached one sample late."""
    due = [is_due(Every(0.1, "epochs"), Progress(k, k), Progress(k + 1, k + 1), 100) for k in range(100)]
    assert [k + 1 for k in range(100) if due[k]] == list(range(10, 101, 10))
    assert horizon(Run(epochs=0.1), 10, DataFacts(100, None)) == 1


def test_minutes_are_never_due_by_arithmetic():
    assert not is_due(Every(1.0, "minutes"), Progress(0, 0, 0), Progress(10**9, 10**9, 10**9), 1)


# --- lengths ------------------------------------------------------------------------------------------------------

FACTS = DataFacts(samples=100, tokens_per_sample=8)
RAGGED = DataFacts(samples=100, tokens_per_sample=None)


@pytest.mark.parametrize(
    ("run", "drop_last", "steps"),
    [
        (Run(steps=7), False, 7),
        (Run(epochs=3.0), False, 12),  # 32 + 32 + 32 + 4 samples an epoch
        (Run(epochs=3.0), True, 9),
        (Run(epochs=0.5), False, 2),
        (Run(epochs=1.1), False, 5),
        (Run(samples=100), False, 4),
        (Run(samples=101), False, 5),
        (Run(samples=96), True, 3),
        (Run(tokens=8 * 100 + 1), False, 5),
    ],
)
def test_horizon(run, drop_last, steps):
    assert horizon(run, 32, FACTS, drop_last) == steps


def test_the_length_of_a_token_budget_over_ragged_samples_is_unknown():
    assert horizon(Run(tokens=1000), 32, RAGGED) is None
    assert horizon(Run(epochs=2.0), 32, RAGGED) == 8


@given(
    st.integers(1, 90),
    st.integers(1, 120),
    st.booleans(),
    st.one_of(
        st.builds(lambda n: Run(epochs=n / 10), st.integers(1, 40)),
        st.builds(lambda n: Run(samples=n), st.integers(1, 400)),
        st.builds(lambda n: Run(tokens=n), st.integers(1, 3000)),
        st.builds(lambda n: Run(steps=n), st.integers(1, 40)),
    ),
)
def test_a_run_is_finished_after_as_many_updates_as_its_horizon(global_size, samples, drop_last, run):
    facts = DataFacts(samples, 8)
    assume(not drop_last or samples >= global_size)
    _, epoch_samples = epoch_length(facts, global_size, drop_last)
    progress, fractions = Progress(), []
    while not is_finished(run, progress, epoch_samples):
        fractions.append(fraction_done(run, progress, epoch_samples))
        position = progress.samples % epoch_samples
        taken = min(global_size, epoch_samples - position)
        progress = progress.advance(taken, taken * 8)
    assert progress.steps == horizon(run, global_size, facts, drop_last)
    assert fractions == sorted(fractions)
    assert fractions[0] == 0
    assert fractions[-1] < 1 == fraction_done(run, progress, epoch_samples)


def test_a_run_resumed_with_another_global_batch_still_ends_after_its_epochs():
    run, half = Run(epochs=2.0), Progress(steps=50, samples=100, tokens=0)
    assert fraction_done(run, half, 100) == 0.5
    assert not is_finished(run, Progress(steps=10**6, samples=199), 100)
    assert is_finished(run, Progress(steps=51, samples=200), 100)


def test_drop_last_that_leaves_nothing_is_refused():
    with fails(ConfigError, 128, 100, "data.drop_last", "data.drop_last: false", key="batch.global_size"):
        epoch_length(FACTS, 128, True)


def _of_transformers(name, steps, **options):
    import torch
    import transformers

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK.lr)
    scheduler = transformers.get_scheduler(name, optimizer, **options)
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize(
    ("name", "keys", "options"),
    [
        ("cosine_with_restarts", {"kind": "cosine-restarts", "cycles": 3}, {"num_cycles": 3}),
        ("polynomial", {"kind": "polynomial", "power": 2.0, "final_ratio": 0.2}, {"power": 2.0, "lr_end": 0.1}),
        ("inverse_sqrt", {"kind": "inverse-sqrt"}, None),
    ],
)
def test_curves_after_the_warmup_are_those_of_transformers(name, keys, options, warmup):
    length = {} if options is None else {"num_training_steps": 50, "scheduler_specific_kwargs": options}
    expected = _of_transformers(name, 50, num_warmup_steps=warmup, **length)
    found = rates(Schedule(warmup_steps=warmup, **keys), 50)[:50]
    assert found[warmup:] == pytest.approx(expected[warmup:], rel=1e-6)


def test_a_piecewise_rate_is_that_of_torch():
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK.lr)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 16], gamma=0.1)
    expected = []
    for _ in range(20):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    schedule = Schedule(kind="piecewise", milestones=((0.5, 0.1), (0.8, 0.01)))
    assert rates(schedule, 20)[:20] == pytest.approx(expected)
    written = {"kind": "piecewise", "milestones": [[0.5, 0.1], [0.8, 0.01]]}
    sections = {"model": {"kind": "image-classifier"}, "data": {"train": {"kind": "digits"}}, "run": {"steps": 20}}
    assert validate({**sections, "schedule": written}).config.schedule == schedule


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "linear", "power": 2.0}, ["power", "polynomial"]),
        ({"kind": "cosine", "cycles": 2}, ["cycles", "cosine-restarts"]),
        ({"kind": "piecewise"}, ["milestones"]),
        ({"kind": "piecewise", "milestones": ((0.8, 0.1), (0.5, 0.01))}, ["milestones", "rising"]),
        ({"kind": "inverse-sqrt", "final_ratio": 0.1}, ["final_ratio"]),
    ],
)
def test_options_of_other_curves_are_refused(values, words):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        Schedule(**values)
    assert all(word in str(refused.value) for word in words)

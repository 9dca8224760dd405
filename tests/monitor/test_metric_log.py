"""What user code logs: any split over ranks and micro-batches gives the same figures; no graph is kept."""

from __future__ import annotations

import gc
import itertools
import math
import pickle
import re
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.reports import FACTS, report

from lockstep.core.phase_clock import Phase, UpdateTimes
from lockstep.monitor import metric_log as log
from lockstep.monitor.histogram import EDGES
from lockstep.monitor.meters import Rates, update_values
from lockstep.monitor.metric_log import LogEntries, MetricLog, merge, recording
from lockstep.monitor.rank_meters import MeterReport, RankInterval, RankNotice, meter_values

numbers = st.floats(-1e6, 1e6)
samples = st.lists(numbers, min_size=1, max_size=40)


def _split(values: list[float], cuts: list[int], ranks: int) -> list[list[list[float]]]:
    """`values` in micro-batches, dealt to ranks."""
    edges = [0, *sorted(cut % (len(values) + 1) for cut in cuts), len(values)]
    micro_batches = [values[start:stop] for start, stop in itertools.pairwise(edges)]
    return [micro_batches[rank::ranks] for rank in range(ranks)]


@given(samples, st.lists(st.integers(0, 100), max_size=6), st.integers(1, 5), st.booleans())
def test_a_mean_is_the_same_however_it_is_split(values, cuts, ranks, as_tensors) -> None:
    entries = []
    for micro_batches in _split(values, cuts, ranks):
        metric_log = MetricLog()
        for part in micro_batches:
            total = torch.tensor(part, dtype=torch.float64).sum()
            metric_log.mean("x", total if as_tensors else float(total), len(part))
        entries.append(metric_log.drain())
    assert merge(entries).values["x"] == pytest.approx(sum(values) / len(values), rel=1e-9, abs=1e-6)


@given(samples, st.lists(st.integers(0, 100), max_size=6), st.integers(1, 5))
def test_a_histogram_is_the_same_however_it_is_split(values, cuts, ranks) -> None:
    entries = []
    for micro_batches in _split(values, cuts, ranks):
        metric_log = MetricLog()
        for part in micro_batches:
            metric_log.histogram("x", torch.tensor(part, dtype=torch.float64))
        entries.append(metric_log.drain())
    whole = MetricLog()
    whole.histogram("x", torch.tensor(values, dtype=torch.float64))
    merged, expected = merge(entries).histograms["x"], whole.drain().histograms["x"]
    assert merged.counts == expected.counts
    assert (merged.low, merged.high, merged.count) == (min(values), max(values), len(values))
    assert merged.total == pytest.approx(sum(values), abs=1e-6)


@given(samples)
def test_every_value_is_within_its_bin(values) -> None:
    metric_log = MetricLog()
    metric_log.histogram("x", torch.tensor(values, dtype=torch.float64))
    bins = metric_log.drain().histograms["x"].bins()
    for value in values:
        assert any(low <= value <= high for low, high, _ in bins)
    assert sum(count for *_, count in bins) == len(values)


def test_bins_are_an_eighth_of_a_decade() -> None:
    assert list(EDGES) == sorted(set(EDGES))
    positive = [edge for edge in EDGES if edge > 0]
    assert all(later / earlier == pytest.approx(10**0.125) for earlier, later in itertools.pairwise(positive))


def test_what_is_not_finite_is_counted_apart() -> None:
    metric_log = MetricLog()
    metric_log.histogram("x", torch.tensor([1.0, math.nan, math.inf, -math.inf, 2.0]))
    metric_log.histogram("none", torch.tensor([math.nan]))
    metric_log.histogram("empty", torch.tensor([]))
    entries = metric_log.drain()
    histogram = entries.histograms["x"]
    assert (histogram.count, histogram.not_finite) == (2, 3)
    assert (histogram.low, histogram.high, histogram.total) == (1.0, 2.0, 3.0)
    assert (entries.histograms["none"].count, entries.histograms["none"].not_finite) == (0, 1)
    assert math.isnan(entries.histograms["empty"].low)
    assert merge([entries, entries]).histograms["x"].count == 4


def test_scalars_are_the_last_value_and_the_mean_over_ranks_that_logged() -> None:
    first, second = MetricLog(), MetricLog()
    first.scalar("t", 1.0)
    first.scalar("t", torch.tensor(3.0))
    second.scalar("t", 5)
    second.scalar("only here", 7.0)
    merged = merge([first.drain(), second.drain(), LogEntries()])
    assert merged.values == {"t": 4.0, "only here": 7.0}


def test_texts_are_those_of_the_first_rank_that_has_one() -> None:
    entries = [LogEntries(texts={}), LogEntries(texts={"a": "1"}), LogEntries(texts={"a": "2", "b": "2"})]
    assert merge(entries).texts == {"a": "1", "b": "2"}


def test_long_texts_are_cut() -> None:
    metric_log = MetricLog()
    metric_log.text("x", "y" * 100_000)
    assert len(metric_log.drain().texts["x"]) == 65536


def test_a_mean_without_weight_is_left_out() -> None:
    metric_log = MetricLog()
    metric_log.mean("x", 0.0, 0)
    assert merge([metric_log.drain()]).values == {}


def test_draining_empties() -> None:
    metric_log = MetricLog()
    assert metric_log.empty
    metric_log.scalar("x", 1.0)
    assert not metric_log.empty
    assert metric_log.drain()
    assert metric_log.empty
    assert not metric_log.drain()


def test_no_graph_and_no_large_tensor_is_kept() -> None:
    metric_log = MetricLog()
    weight = torch.ones(1000, requires_grad=True)
    outputs = weight * 2
    metric_log.scalar("s", outputs.sum())
    metric_log.mean("m", outputs.sum(), 1)
    metric_log.histogram("h", outputs)

    def hook(gradient: torch.Tensor) -> None:
        """Lives as long as the graph does."""

    outputs.register_hook(hook)
    graph, tensor = weakref.ref(hook), weakref.ref(outputs)
    del outputs, hook
    gc.collect()
    assert graph() is None
    assert tensor() is None
    assert metric_log.drain().scalars == {"s": 2000.0}


def test_a_value_changed_in_place_later_keeps_what_it_was() -> None:
    metric_log = MetricLog()
    value = torch.tensor(1.0)
    metric_log.scalar("x", value)
    value.add_(5)
    assert metric_log.drain().scalars == {"x": 1.0}


def test_entries_are_small_when_pickled() -> None:
    metric_log = MetricLog()
    metric_log.histogram("x", torch.randn(100_000))
    metric_log.mean("m", 1.0, 2)
    entries = metric_log.drain()
    data = pickle.dumps(entries)
    assert len(data) < 4000
    assert pickle.loads(data) == entries


def test_one_name_is_of_one_kind() -> None:
    metric_log = MetricLog()
    metric_log.scalar("x", 1.0)
    with pytest.raises(ValueError, match=r"log.mean\('x'\): 'x' was logged by log.scalar before; give it another name"):
        metric_log.mean("x", 1.0, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda j: j.scalar("x", torch.zeros(3)),
            "log.scalar('x'): expected one number, got a tensor of shape [3]; use",
        ),
        (lambda j: j.scalar("x", torch.ones((), dtype=torch.complex64)), "log.scalar('x'): complex numbers can't be"),
        (lambda j: j.text("x", 3), "log.text('x'): expected a str, got int; log.scalar takes numbers"),
        (
            lambda j: j.scalar("train/loss", 1),
            "log.scalar('train/loss'): the run itself writes train/loss; give it another name",
        ),
        (lambda j: j.mean("evaluation/held-out/f1", 1, 1), "log.mean('evaluation/held-out/f1'): the run itself writes"),
        (
            lambda j: j.scalar("step", 1),
            "log.scalar('step'): the run itself writes step; give it another name, such as",
        ),
        (lambda j: j.text(" ", "x"), "log.text(' '): the name is empty; give it one, such as 'accuracy'"),
    ],
)
def test_what_can_t_be_logged_is_named_with_its_type(call: Callable[[MetricLog], None], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        call(MetricLog())


def test_the_runs_own_names_are_those_that_are_refused() -> None:
    own = {**update_values(report(1), Rates(1, 1, 1), replace(FACTS, flops_per_token=1.0, peak_flops=1.0))}
    notice = RankNotice(0, "a", 1, 0.0, 1, Phase.DATA, 0.0, UpdateTimes())
    own |= meter_values(MeterReport(1, 1.0, (RankInterval(notice, 1, 1.0, 1.0, {"data": 1.0}),)))
    assert len(own) > 10
    for name in own:
        with pytest.raises(ValueError, match="the run itself writes"):
            MetricLog().scalar(name, 1.0)
    for name in ("loss", "train/accuracy", "memory_bank/mean", "gpu_power", "step_bytes/max"):
        MetricLog().scalar(name, 1.0)


@pytest.mark.parametrize("value", ["0.5", None, {"loss": 1.0}])
def test_what_is_no_number_is_an_error(value: object) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        MetricLog().scalar("x", value)


def test_numbers_of_other_kinds_are_numbers() -> None:
    metric_log = MetricLog()
    metric_log.scalar("a", np.float32(0.5))
    metric_log.scalar("b", np.array([2]))
    metric_log.histogram("c", [1.0, 2.0])
    entries = metric_log.drain()
    assert (entries.scalars, entries.histograms["c"].count) == ({"a": 0.5, "b": 2.0}, 2)


def test_the_functions_write_to_the_run_that_is_recording() -> None:
    log.scalar("lost", 1.0)  # outside of a run: nothing
    with recording(MetricLog()) as outer:
        log.scalar("a", 1.0)
        with recording(MetricLog()) as inner:
            log.mean("b", 1.0, 2)
            log.histogram("c", torch.ones(3))
            log.text("d", "e")
        log.scalar("f", 2.0)
    log.scalar("lost", 1.0)
    assert outer.drain().scalars == {"a": 1.0, "f": 2.0}
    entries = inner.drain()
    assert (entries.means, entries.texts, entries.histograms["c"].count) == ({"b": (1.0, 2.0)}, {"d": "e"}, 3)

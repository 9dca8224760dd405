"""Curves: nothing that matters is thinned away, scales hold what they show, and a gap is a gap."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core import formatting
from lockstep.report.charts import (
    Chart,
    Marks,
    Scale,
    Unit,
    draw,
    fitted,
    step_ticks,
    tick_labels,
    ticks,
    value_text,
)
from lockstep.report.series import Series, gaps, running_median, thin

NAN = math.nan
FINITE = st.floats(-1e150, 1e150, allow_nan=False)


def series(values: Sequence[float], *, noisy: bool = False, name: str = "training") -> Series:
    """At steps 10, 20, ..."""
    made = Series.of(name, [10.0 * number for number in range(1, len(values) + 1)], values)
    return Series(made.name, made.steps, made.values, noisy)


def chart(*curves: Series, marks: Marks | None = None, is_large: bool = False) -> Chart:
    values = np.concatenate([curve.known for curve in curves])
    last = int(max(curve.steps[-1] for curve in curves))
    return Chart("Loss", "It falls", curves, fitted(values), 0, last, marks or Marks(), is_large=is_large)


def curve_paths(svg: str) -> list[str]:
    return re.findall(r'<path class="line[^"]*" d="([^"]*)"', svg)


# --- thinning -------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(FINITE, st.just(NAN)), min_size=1, max_size=400), st.integers(1, 12))
def test_what_is_thinned_keeps_the_ends_the_extremes_and_the_gaps(values: list[float], buckets: int) -> None:
    whole = series(values)
    kept = thin(whole.steps, whole.values, buckets)
    left = whole.values[kept]
    assert len(kept) <= max(4 * buckets, 5 * buckets + 5)
    assert all(a < b for a, b in pairwise(kept.tolist()))
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    assert np.isnan(left).any() == np.isnan(whole.values).any()
    if whole.finite.any():
        assert np.nanmin(left) == np.nanmin(whole.values)
        assert np.nanmax(left) == np.nanmax(whole.values)


@given(st.lists(FINITE, min_size=200, max_size=200))
def test_each_bucket_keeps_its_own_extremes(listed: list[float]) -> None:
    values = np.array(listed)
    left = thin(np.arange(200.0), values, 10)
    for start in range(0, 200, 20):  # 199 steps make 10 buckets, each of which holds one of these stretches
        inner = values[start + 1 : start + 19]
        there = values[left[(start <= left) & (left < start + 20)]]
        assert there.min() <= inner.min()
        assert there.max() >= inner.max()


def test_one_spike_and_one_gap_among_a_million_stay() -> None:
    values = np.full(1_000_000, 2.0)
    values[123_456], values[777_777] = 50.0, NAN
    kept = thin(np.arange(1e6), values, 400)
    assert {123_456, 777_777} <= set(kept.tolist())
    assert len(kept) <= 2_005


def test_few_values_are_all_kept() -> None:
    assert thin(np.arange(40.0), np.ones(40), 10).tolist() == list(range(40))


def test_the_running_median_begins_and_ends_with_the_values_and_ignores_a_spike() -> None:
    values = [1.0 + (number % 2) / 100 for number in range(300)]
    values[0], values[150], values[-1] = 9.0, 1e6, 3.0
    median = running_median(series(values, noisy=True))
    assert (median.values[0], median.values[-1]) == (9.0, 3.0)
    assert median.values[1:-1].max() <= 1.01


def test_values_out_of_order_are_sorted_and_the_last_of_a_step_counts() -> None:
    made = Series.of("loss", [10, 20, 30, 20], [1.0, 2.0, 3.0, 4.0])
    assert made.steps.tolist() == [10, 20, 30]
    assert made.values.tolist() == [1.0, 4.0, 3.0]


def test_stretches_without_values_are_found() -> None:
    assert gaps(series([NAN, 1.0, NAN, math.inf, 2.0, NAN])) == [(10, 10), (30, 40), (60, 60)]
    assert gaps(series([1.0, 2.0])) == []


# --- scales ---------------------------------------------------------------------------------------------------------


CLOSE = st.builds(lambda base, more: [base + value for value in more], FINITE, st.lists(st.floats(0, 100), min_size=1))


@given(st.lists(FINITE, min_size=1, max_size=30) | CLOSE, st.booleans(), st.booleans())
def test_a_scale_holds_all_values_and_its_ticks(values: list[float], from_zero: bool, logarithmic: bool) -> None:
    known = series(values).known
    scale = fitted(known, from_zero=from_zero, may_be_logarithmic=logarithmic)
    heights = scale.heights(known)
    assert ((heights >= 0) & (heights <= 1)).all()
    room = 1e-6 * (scale.high - scale.low)
    lowest_shown = scale.high * 1e-12 if scale.is_logarithmic else known.min()
    assert scale.low - room <= max(known.min(), lowest_shown)
    assert known.max() <= scale.high + room
    if from_zero and not scale.is_logarithmic:
        assert scale.low <= 0
    marked = ticks(scale)
    assert 1 <= len(marked) <= 12
    assert all(scale.low - room <= tick <= scale.high + room for tick in marked)
    assert len(set(tick_labels(marked, "plain"))) == len(marked)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.6, 6.5], [0, 2, 4, 6]),
        ([98.1, 99.4], [98.0, 98.5, 99.0, 99.5]),
        ([5.0], [2, 3, 4, 5, 6, 7]),
        ([0.0, 0.0], [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(values: list[float], expected: list[float]) -> None:
    assert ticks(fitted(np.array(values))) == pytest.approx(expected)


def test_steep_values_get_a_logarithmic_scale_where_that_makes_sense() -> None:
    steep = np.array([500.0, *[1.0] * 20])
    assert ticks(fitted(steep, may_be_logarithmic=True)) == pytest.approx([1, 10, 100])
    assert not fitted(steep).is_logarithmic
    assert not fitted(np.array([500.0, *[1.0] * 20, 0.0]), may_be_logarithmic=True).is_logarithmic


def test_steps_are_whole_and_round() -> None:
    assert step_ticks(0, 69) == [0, 10, 20, 30, 40, 50, 60]
    assert step_ticks(0, 1) == [0, 1]
    assert step_ticks(7, 7) == [7]
    assert step_ticks(470, 1000) == [500, 600, 700, 800, 900, 1000]


@pytest.mark.parametrize(
    ("values", "unit", "labels"),
    [
        ([0.0, 0.5, 1.0], "plain", ["0", "0.5", "1"]),
        ([0.0, 1e-5, 2e-5], "plain", ["0", "1e-05", "2e-05"]),
        ([0.01, 0.1, 1.0, 10.0], "plain", ["0.01", "0.1", "1", "10"]),
        ([0, 2000, 4000], "plain", ["0", "2,000", "4,000"]),
        ([0, 500_000, 1_000_000], "plain", ["0", "500k", "1M"]),
        ([10_020, 10_040], "plain", ["10,020", "10,040"]),
        ([0.001, 0.0010000005], "plain", ["0.001", "0.0010000005"]),
        ([0.98, 0.99], "percent", ["98 %", "99 %"]),
    ],
)
def test_labels_are_short_and_alike(values: list[float], unit: str, labels: list[str]) -> None:
    assert tick_labels(values, unit) == labels


def test_values_are_formatted_as_in_the_console() -> None:
    assert value_text(2.34567, "plain") == formatting.value(2.34567) == "2.346"
    assert f"accuracy {value_text(0.972, 'percent')}" == formatting.metric("accuracy", 0.972)
    assert value_text(24_512.0, "rate") == "24.5k"
    assert value_text(NAN, "plain") == "not finite"


# --- drawing --------------------------------------------------------------------------------------------------------


def test_a_curve_runs_over_the_whole_width_and_height() -> None:
    scale = Scale(0.0, 4.0, 1.0)
    svg = draw(Chart("Loss", "", [series([4.0, 2.0, 0.0])], scale, 10, 30))
    assert curve_paths(svg) == ["M0 0h0L500 79L1000 158"]
    assert 'data-points="10 4,10 2,10 0"' in svg


@pytest.mark.parametrize("unit", ["plain", "percent", "rate"])
@given(
    st.lists(st.one_of(st.floats(0, 1e6), st.just(NAN)), min_size=2).filter(
        lambda values: not all(map(math.isnan, values))
    )
)
def test_each_point_of_a_curve_has_its_step_and_its_value_as_text(unit: Unit, values: list[float]) -> None:
    """The script of the page pairs the points of the path with their texts, and formats nothing itself."""
    curve = series(values)
    (path, points), *_ = re.findall(r'd="([^"]*)" data-points="([^"]*)"', draw(replace(chart(curve), unit=unit)))
    entries = [entry.split(" ", 1) for entry in points.split(",")]
    assert len(re.findall(r"[ML][\d.]+ [\d.]+", path)) == len(entries)
    assert np.cumsum([int(since) for since, _ in entries]).tolist() == curve.known_steps.tolist()
    assert [text for _, text in entries] == [value_text(value, unit) for value in curve.known]


def test_a_value_that_is_not_finite_lifts_the_pen_and_is_shaded() -> None:
    svg = draw(chart(series([4.0, NAN, NAN, 2.0, 3.0])))
    (path,) = curve_paths(svg)
    assert path.count("M") == 2
    (shade,) = re.findall(r'class="gap" d="([^"]*)"', svg)
    assert shade.startswith("M400 0H600v")
    assert 'class="gap"' not in draw(chart(series([4.0, 2.0])))


def test_a_value_between_two_gaps_is_still_seen() -> None:
    (path,) = curve_paths(draw(chart(series([4.0, NAN, 3.0, NAN, 2.0]))))
    assert re.fullmatch(r"(M[\d.]+ [\d.]+h0){3}", path)


def test_many_noisy_values_get_a_median_and_are_thinned() -> None:
    noisy = series([2 + number % 7 for number in range(100_000)], noisy=True)
    svg = draw(chart(noisy))
    assert svg.count('class="line s0 d0 thin"') == 1
    assert svg.count('class="line s0 d0"') == 1
    assert len(svg) < 60_000
    assert 'class="line s0 d0 thin"' not in draw(chart(series([2.0, 3.0, 4.0], noisy=True)))


def test_events_are_marked_at_their_steps() -> None:
    marks = Marks([25], discarded=[50], saves=[20, 40], failed_saves=[60])
    svg = draw(chart(series([1.0] * 10), marks=marks, is_large=True))
    assert 'class="restart" x1="25%" x2="25%"' in svg
    assert 'class="discarded" x1="50%"' in svg
    assert re.findall(r'class="save" x1="([^"]*)"', svg) == ["20%", "40%"]
    assert re.findall(r'class="failed" x1="([^"]*)"', svg) == ["60%"]


def test_marks_in_the_same_place_are_one() -> None:
    marks = Marks(range(0, 100_000, 1000), saves=range(1, 100_000))
    svg = draw(chart(series([1.0] * 10_000), marks=marks, is_large=True))
    assert svg.count('class="save"') <= 501
    assert svg.count('class="restart"') == 100


def test_a_chart_has_a_label_for_screen_readers() -> None:
    assert 'role="img" aria-label="Loss. It falls"' in draw(chart(series([1.0, 2.0])))


def test_no_two_of_seven_curves_look_alike() -> None:
    curves = [replace(series([number, number + 1.0]), color=number) for number in range(1, 8)]
    classes = re.findall(r'<path class="(line[^"]*)"', draw(chart(*curves)))
    assert len(set(classes)) == 7


def test_a_single_value_is_a_dot() -> None:
    (path,) = curve_paths(draw(chart(series([1.0]))))
    assert path.endswith("h0")

"""Rates, remaining time and utilization."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.reports import FACTS, report

from lockstep.monitor import meters
from lockstep.monitor.meters import Rates, Throughput, model_flops_utilization, peak_flops


def test_rates_are_known_from_the_first_update_on() -> None:
    meter = Throughput()
    assert meter.moving == Rates(0, 0, 0)
    meter.add(report(1, seconds=0.5))
    assert meter.moving == meter.overall == Rates(2, 128, 32768)


def test_the_first_update_of_a_resumed_run_gives_no_rate() -> None:
    meter = Throughput()
    meter.add(report(501, seconds=80.0))
    assert meter.moving == Rates(0, 0, 0)
    assert meter.remaining(501, 1000) is None
    meter.add(report(502, seconds=80.1))
    assert meter.moving.steps == pytest.approx(10)


def test_moving_forgets_and_overall_does_not_count_the_first_update() -> None:
    meter = Throughput(window=10)
    meter.add(report(1, seconds=30.0))  # compilation
    for step in range(2, 102):
        meter.add(report(step, seconds=30 + (step - 1) * 0.2))
    for step in range(102, 302):
        meter.add(report(step, seconds=50 + (step - 101) * 0.1))
    assert meter.moving.steps == pytest.approx(10)
    assert meter.overall.steps == pytest.approx(300 / 40)
    assert meter.overall.samples == pytest.approx(64 * 300 / 40)
    assert meter.remaining(301, 401) == pytest.approx(10)
    assert meter.remaining(301, None) is None


@given(st.lists(st.tuples(st.integers(1, 99), st.floats(0, 1e4)), max_size=5))
def test_pauses_do_not_change_the_rate(pauses: list[tuple[int, float]]) -> None:
    meter = Throughput(window=1)
    for step in range(1, 101):
        paused = sum(seconds for after, seconds in pauses if after < step)
        meter.add(report(step, seconds=step / 10 + paused))
        for after, seconds in pauses:
            if after == step:
                meter.pause(step, seconds)
    assert meter.overall.steps == pytest.approx(10, rel=1e-6)
    assert meter.moving.steps == pytest.approx(10, rel=1e-6)


def test_a_report_that_comes_after_its_pause_is_not_shifted() -> None:
    meter = Throughput()
    meter.add(report(1))
    meter.pause(30, 5.0)  # an evaluation after update 30, whose report was not looked at before
    meter.add(report(30))
    assert meter.overall.steps == pytest.approx(10)


def test_utilization_is_of_all_ranks_peaks() -> None:
    facts = replace(FACTS, ranks=2, peak_flops=1e12, flops_per_token=1e6)
    assert model_flops_utilization(facts, 1e6) == pytest.approx(0.5)
    assert model_flops_utilization(replace(facts, peak_flops=None), 1e6) is None
    assert model_flops_utilization(replace(facts, flops_per_token=None), 1e6) is None


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L4", "fp16", 121),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "tf32", 8.1),
        ("NVIDIA B200", "tf32", 1100),
        ("NVIDIA GB200", "bf16", 2500),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "tf32", 653.7),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", None),
        ("AMD EPYC", "fp32", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name: str, dtype: str, teraflops: float | None) -> None:
    peak = peak_flops(name, dtype)
    assert peak == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_peaks_are_dense_in_each_dtype() -> None:
    """A figure with sparsity would be twice as large as the others of its GPU allow."""
    for name, (fp32, tf32, bf16, fp16) in meters._PEAKS.items():
        if bf16 is not None:
            assert fp16 == bf16, name
            if tf32 is not None:
                assert bf16 == pytest.approx(2 * tf32, rel=0.05), name
                assert fp32 <= tf32, name


def test_an_unknown_dtype_is_a_programmers_error() -> None:
    with pytest.raises(KeyError):
        peak_flops("NVIDIA H200", "bfloat16")

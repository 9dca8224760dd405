"""The speeds of this machine: what is measured, the file, and the time of a step on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.failures import gives
from simulation.test_peak_memory import NOTHING, decoder

from lockstep.config.schema import Config, Launch
from lockstep.core.errors import ConfigError
from lockstep.plan.gpus import GPUCluster, parse_cluster
from lockstep.simulation import calibration
from lockstep.simulation.estimate import estimator_of
from lockstep.simulation.timing import StepTime, measured_seconds, step_time
from lockstep.simulation.trace import Entry, Operation, Order, Sent, StepTrace, operation_of

ROW = """
[cpu]
device = "cpu"
memory = 4
tf32 = 0.1
bf16 = 0.2
fp8 = 0.2
bandwidth = 10
multiprocessors = 1
link = 1
network = 1
watts = 0
[cpu.reached]
matmul = 1.0
attention = 1.0
memory = 1.0
link = 1.0
network = 1.0
[cpu.ranks.1.measured]
"mul 4" = [[1000, 1e-3]]
[cpu.ranks.1.seconds]
step = 0.5
call = 0.1
[cpu.ranks.2.measured]
"mul 4" = [[1000, 2e-3]]
"all_reduce 2" = [[1000, 1.0]]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "calibrated.toml"
    path.write_text(ROW)
    return path


def of(config: Config, cluster: GPUCluster) -> StepTime:
    return estimator_of(config, cluster.ranks, None, NOTHING, cluster).step_time(config, cluster)


def test_the_row_for_a_number_of_ranks_is_what_was_measured_with_them(file: Path) -> None:
    one, two = (parse_cluster(f"{file}:{ranks}").gpu for ranks in (1, 2))
    assert (one.name, one.device) == ("cpu", "cpu")
    assert one.measured["mul 4"] != two.measured["mul 4"]
    assert parse_cluster(f"{file}:cpu:2").gpu == two
    with pytest.raises(ConfigError) as refusal:
        parse_cluster(f"{file}:3")
    assert gives(str(refusal.value), "1 and 2", "--ranks 3")


def test_on_a_cpu_everything_is_done_one_after_the_other(file: Path) -> None:
    operation = Operation(0, "memory", 0, 1000, None, 4, 0.0, "mul 4", (1000,), 3)
    entries: list[Entry] = [Order("forward"), operation, operation]
    one = step_time(StepTrace(entries=[*entries]), parse_cluster(f"{file}:1"), 1)
    assert one.seconds == pytest.approx(0.5 + 2 * (0.1 + 3e-3))
    assert one.parts["memory"] == pytest.approx(6e-3)
    assert one.parts["host"] == pytest.approx(0.7)
    sent = Sent(0, "all_reduce", (0, 1), 1000, asynchronous=True)
    two = step_time(StepTrace(entries=[*entries, sent, operation, Order("join")]), parse_cluster(f"{file}:2"), 1)
    assert two.seconds == pytest.approx(1.0 + 9 * 2e-3, rel=0.01)
    assert sum(two.parts.values()) == pytest.approx(two.seconds)


def test_ranks_on_a_cpu_wait_for_the_late_ones_where_they_need_the_result(file: Path) -> None:
    cluster = parse_cluster(f"{file}:2")
    late = replace(cluster, gpu=replace(cluster.gpu, seconds={**cluster.gpu.seconds, "late": 0.25}))
    operation = Operation(0, "memory", 0, 1000, None, 4, 0.0, "mul 4", (1000,), 500)
    for asynchronous, more in ((False, 0.25), (True, 0.0)):
        sent = Sent(0, "all_reduce", (0, 1), 1000, asynchronous)
        trace = StepTrace(entries=[Order("forward"), operation, sent, sent])
        before, after = (step_time(trace, each, 1).seconds for each in (cluster, late))
        assert after - before == pytest.approx(more, rel=1e-3, abs=1e-6)


POINTS = [[16, 64, 1e-5], [64, 64, 2e-5], [256, 256, 4e-4], [16, 256, 3e-5]]


def test_a_measured_size_has_its_measured_time() -> None:
    for *sizes, seconds in POINTS:
        assert measured_seconds(POINTS, sizes) == pytest.approx(seconds, rel=1e-3)


@given(st.integers(1, 10**5), st.integers(1, 10**5))
def test_between_measured_sizes_the_rate_is_between_theirs(m: int, n: int) -> None:
    rates = [a * b / seconds for a, b, seconds in POINTS]
    seconds = measured_seconds(POINTS, (m, n))
    assert seconds >= 1e-5
    assert seconds == 1e-5 or min(rates) * 0.999 <= m * n / seconds <= max(rates) * 1.001


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_step_on_a_cpu_is_made_of_the_operations_of_a_cpu(strategy: str, ranks: int, file: Path) -> None:
    config = decoder(parallel={"strategy": strategy}, run={"steps": 10})
    step = of(config, parse_cluster(f"{file}:{ranks}"))
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert step.parts["attention"] > 0 < step.parts["optimizer"]
    assert (step.parts["communication"] > 1e-9) == (ranks > 1)


def test_the_update_of_a_model_of_small_tensors_is_kept(file: Path) -> None:
    """Small tensors have values, such as the contents of memory that nothing has written: NaN at times."""
    for config in calibration._tiny(Launch(), 1).values():
        traces: list[StepTrace] = []
        estimator_of(config, 1, None, NOTHING, parse_cluster(f"{file}:1", 1)).peak(config, traces)
        assert any("adamw" in entry.name for entry in traces[0].entries if isinstance(entry, Operation))


@pytest.mark.drill
def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in {
        "_SIDES": (16, 64),
        "_LENGTHS": (32,),
        "_HEADS": (16, 32, 64),
        "_ROWS": (64, 128, 256),
    }.items():
        monkeypatch.setattr(calibration, name, values)
    monkeypatch.setattr(calibration, "_STEPS", 10)
    monkeypatch.setattr(calibration, "_PARAMETERS", (2**10, 2**12, 2**14))
    path = tmp_path / "here.toml"
    path.write_text(calibration.calibrate(Launch.model_validate({"device": "cpu", "ranks": 1})))
    cluster = parse_cluster(f"{path}:1")
    assert 1e8 < cluster.gpu.flops[4] < 1e14
    assert cluster.gpu.memory > 1 << 28
    config = decoder(run={"steps": 10})
    assert 1e-4 < of(config, cluster).seconds < 10
    estimator = estimator_of(config, 1, None, NOTHING, cluster)
    traces: list[StepTrace] = []
    estimator.peak(config, traces)
    unmeasured = {each.name for each in traces[0].entries if isinstance(each, Operation)} - cluster.gpu.measured.keys()
    assert not any(name.startswith(("mm", "_scaled", "_fused", "_log_softmax", "embedding")) for name in unmeasured)


def test_a_size_takes_no_longer_than_a_larger_one() -> None:
    points: dict[tuple[int, ...], float] = {(16, 16): 9.0, (16, 64): 2.0, (64, 16): 5.0, (64, 64): 3.0}
    assert calibration.smoothed(points) == {(16, 16): 2.0, (16, 64): 2.0, (64, 16): 3.0, (64, 64): 3.0}


def test_operations_are_named_alike_on_data_and_in_a_trace() -> None:
    timed = calibration.Timed(torch.device("cpu"))
    left, right = torch.randn(32, 16), torch.randn(8, 16)
    several, scaled = [torch.ones(8) for _ in range(3)], torch.randn(4, 3, 8)
    whole = operation_of(torch.ops.aten._fused_rms_norm.default, (scaled, [8], None, 1e-5), {}, [scaled])
    with timed:
        left @ right.t()
        torch._foreach_mul_(several, 2.0)
    assert [*timed.points] == ["mm nt 4", "_foreach_mul_ 4"]
    assert [*timed.points["_foreach_mul_ 4"]] == [(2 * 8 * 4,)]  # of one of the tensors
    assert (whole.times, whole.sizes) == (1, (2 * 4 * 3 * 8 * 4,))  # all rows at once: read, and written
    assert [*timed.points["mm nt 4"]] == [(32, 8, 16)]

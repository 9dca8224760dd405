"""The parts of a traced update beside the plan's: what is counted where, and what is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.failures import fails, gives

from lockstep.core.errors import ConfigError
from lockstep.monitor.attempts import Attempt
from lockstep.plan.gpus import GPUCluster, parse_cluster
from lockstep.profiling.planned import beside_plan, cluster_of_run, measured_parts, planned_lines
from lockstep.profiling.traces import DeviceUse, Operator, Trace
from lockstep.simulation.timing import SHARES, Share, StepTime

OPERATORS = {
    "aten::mm": 0.4,
    "aten::_flash_attention_forward": 0.1,
    "aten::mul": 0.2,
    "aten::_fused_adamw_": 0.05,
    "c10d::allreduce_": 0.3,
}


def traced(device: DeviceUse | None) -> Trace:
    split = {"forward": 0.3, "backward": 0.5, "optimizer": 0.06, "communication": 0.14}
    operators = [Operator(name, 1, seconds) for name, seconds in OPERATORS.items()]
    facts = {"rank": 0, "first": 1, "last": 1, "host": "here", "ranks": 2}
    return Trace(Path("t"), facts, 1, 1.0, split, operators, 5, 0.0, {"forward": 0.1}, 0, [], device, None)


def step(**parts: float) -> StepTime:
    seconds: dict[Share, float] = dict.fromkeys(SHARES, 0.0)
    seconds.update(parts)  # type: ignore[arg-type]
    return StepTime(sum(seconds.values()), seconds, 0.0, 1.0, 0.5)


def test_a_gpus_parts_are_its_kernels_and_what_it_waits_for() -> None:
    parts = measured_parts(traced(DeviceUse(0.8, 0.1, 0.04, 0.14, 1e-5, 0, 0.0)))
    assert parts == pytest.approx(
        {
            "matmul": 0.4,
            "attention": 0.1,
            "memory": 0.2,
            "optimizer": 0.05,
            "communication": 0.14,
            "host": 0.06,
            "bubble": 0.0,
        }
    )


def test_a_cpus_parts_are_its_phases() -> None:
    parts = measured_parts(traced(None))
    assert (parts["optimizer"], parts["communication"], parts["host"]) == (0.06, 0.14, 0.1)
    assert parts["memory"] == pytest.approx(0.8 - 0.1 - 0.4 - 0.1)


def test_the_part_that_is_slower_than_predicted_is_named() -> None:
    trace = traced(DeviceUse(0.8, 0.1, 0.04, 0.14, 1e-5, 0, 0.0))
    *_, slow = planned_lines(trace, step(matmul=0.4, attention=0.1, memory=0.2, communication=0.01))
    assert slow.startswith("communication takes 130 ms longer")
    trace.operators[1] = Operator("aten::mul", 1, 0.1)
    *rows, fine = planned_lines(trace, step(matmul=0.39, memory=0.28, optimizer=0.04, communication=0.12, host=0.05))
    assert "no part" in fine
    assert rows[-1].split()[0] == "all"


def test_an_update_is_set_beside_its_plan() -> None:
    split = {"forward": 0.3, "backward": 0.5, "communication": 0.1, "optimizer": 0.06, "host": 0.04}
    gpus = GPUCluster(parse_cluster("H100:8").gpu, 8, 2)
    near = beside_plan(split, step(matmul=0.8, communication=0.09, optimizer=0.05), gpus)
    assert gives(near, "1.00 s", "16 x H100", "940 ms")
    assert "Most" not in near
    slow = beside_plan(split, step(matmul=0.4, communication=0.05, optimizer=0.05), gpus)
    assert gives(slow, "1.00 s", "500 ms", "communication", "+450 ms")
    fast = beside_plan(split, step(matmul=0.9, optimizer=0.5), gpus)
    assert gives(fast, "1.00 s", "1.40 s", "optimizer", "-440 ms")


def attempt(**facts: Any) -> Attempt:
    return Attempt(0.0, 0.0, hosts=(("a", 8), ("b", 8)), facts={"ranks": 16, **facts})


def test_the_gpus_of_a_run_are_known_by_name_or_named() -> None:
    known = cluster_of_run(attempt(device="NVIDIA H100 80GB HBM3"), None)
    assert known is not None
    assert (known.gpu.name, known.per_node, known.nodes) == ("H100", 8, 2)
    assert cluster_of_run(attempt(device="cpu"), None) is None
    assert cluster_of_run(attempt(device="an accelerator"), "L4:8") is not None
    with fails(ConfigError, "cpu"):
        cluster_of_run(attempt(device="cpu"), "H100:8")
    with fails(ConfigError, "16 ranks"):
        cluster_of_run(attempt(device="an accelerator"), "H100:4")

"""The predicted time of a step: what is counted, what bounds it, what overlaps."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.commands import run_lockstep
from kit.failures import gives
from simulation.test_peak_memory import NOTHING, decoder

from lockstep.config.schema import Config
from lockstep.core.errors import ConfigError
from lockstep.plan.gpus import GPU, GPUCluster, parse_cluster, parse_clusters, parse_price
from lockstep.simulation.estimate import estimator_of
from lockstep.simulation.repeats import Call
from lockstep.simulation.timing import (
    SHARES,
    StepTime,
    collective_seconds,
    operation_seconds,
    shape_efficiency,
    step_time,
)
from lockstep.simulation.trace import OnHost, Operation, Order, Sent, StepTrace, operation_of

H100 = parse_cluster("H100:8").gpu
WIDTH, LAYERS, LENGTH, VOCABULARY = 1024, 4, 512, 4096


def large(ranks: int, strategy: str = "fsdp", micro_batches: int = 2, **sections: Any) -> Config:
    """Return a decoder that is large enough for its products to take most of the time."""
    return Config.model_validate(
        {
            "model": {"kind": "transformer", "vocabulary": VOCABULARY, "layers": LAYERS, "heads": 8, "width": WIDTH},
            "data": {"train": {"kind": "tokens", "folder": "not-on-this-machine", "length": LENGTH}},
            "batch": {"global_size": 16 * ranks * micro_batches, "micro_size": 16},
            "optim": {"name": "adamw", "lr": 1e-3},
            "precision": {"compute": "bf16"},
            "parallel": {"strategy": strategy},
            "run": {"steps": 10},
            **sections,
        }
    )


def time_of(config: Config, cluster: GPUCluster) -> StepTime:
    return estimator_of(config, cluster.ranks, None, NOTHING).step_time(config, cluster)


def cluster(nodes: int = 1, per_node: int = 8, **figures: Any) -> GPUCluster:
    return GPUCluster(replace(H100, **figures), per_node, nodes)


def test_the_products_of_experts_are_counted() -> None:
    tokens, experts = torch.empty(64, 8), torch.empty(4, 8, 16)
    of = torch.ops.aten._grouped_mm.default
    forward = operation_of(of, (tokens, experts), {}, [torch.empty(64, 16)])
    weights = operation_of(of, (tokens.t(), torch.empty(64, 16)), {}, [torch.empty(4, 8, 16)])
    inputs = operation_of(of, (torch.empty(4, 16, 8), torch.empty(8, 64)), {}, [torch.empty(16, 64)])
    assert {each.flops for each in (forward, weights, inputs)} == {2 * 64 * 8 * 16}
    assert {each.part for each in (forward, weights, inputs)} == {"matmul"}
    assert [each.shape for each in (forward, weights, inputs)] == [(4, 16, 16, 8), (4, 8, 16, 16), (4, 16, 16, 8)]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_flops_are_those_of_the_model(mode: str) -> None:
    memory = {"activation_checkpointing": {"mode": mode}}
    step = time_of(large(1, "single", memory=memory), cluster(per_node=1))
    tokens = 2 * 16 * LENGTH
    products = 6 * tokens * (LAYERS * 12 * WIDTH**2 + WIDTH * VOCABULARY)
    attention = 3 * LAYERS * tokens * 2 * LENGTH * WIDTH  # half of all pairs
    assert step.flops == pytest.approx(products + attention, rel=0.01)
    assert step.mfu == pytest.approx(step.flops / step.seconds / 989.4e12)


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 8), ("fsdp", 8), ("zero3", 8)])
def test_the_parts_are_the_step(strategy: str, ranks: int) -> None:
    parallel = (
        {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3}} if strategy == "zero3" else {"strategy": strategy}
    )
    step = time_of(large(ranks, parallel=parallel), cluster(per_node=ranks))
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert set(step.parts) == set(SHARES)
    assert step.parts["matmul"] > step.parts["attention"] > 0
    assert (step.parts["communication"] + step.hidden > 1e-5) == (ranks > 1), "more than the copy of a batch"
    assert 0.05 < step.mfu < 0.6


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    config = large(1, "single")
    frozen = config.model_copy(update={"model": config.model.model_copy(update={"freeze": ("blocks.*",)})})
    part = time_of(frozen, cluster(per_node=1)).flops / time_of(config, cluster(per_node=1)).flops
    assert 0.6 < part < 0.8


def test_images_need_no_gradient() -> None:
    operation = torch.ops.aten.convolution_backward.default
    images, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    out = torch.randn(2, 4, 8, 8)
    options = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def flops(wanted: list[bool]) -> int:
        args = (out, images, weight, *options, wanted)
        outputs = [each for each in operation(*args) if each is not None]
        return operation_of(operation, args, {}, outputs).flops

    assert flops([False, True, True]) == flops([True, False, True]) == flops([True, True, False]) / 2 > 0


def test_micro_batches_that_are_not_simulated_take_as_long_as_those_that_are() -> None:
    two, eight = (time_of(large(8, micro_batches=number), cluster()) for number in (2, 8))
    once = (eight.seconds - two.seconds) / 6
    assert two.seconds / 2 == pytest.approx(once, rel=0.2)
    assert eight.flops == pytest.approx(4 * two.flops)
    assert eight.parts["optimizer"] == two.parts["optimizer"]


def test_a_fast_link_hides_what_a_slow_one_shows() -> None:
    fast, slow = (time_of(large(8), cluster(link=link)) for link in (450e9, 4e9))
    assert fast.parts["communication"] < 0.1 * fast.seconds < 0.5 * slow.seconds < slow.parts["communication"]
    assert fast.parts["matmul"] == slow.parts["matmul"]


def test_copies_to_the_host_and_updates_there_take_time() -> None:
    options = {"zero_stage": 3, "offload_optimizer": "cpu"}
    config = large(1, parallel={"strategy": "deepspeed", "deepspeed": options})
    fast, slow, far = (
        time_of(config, cluster(per_node=1, **figures)) for figures in ({}, {"host": 6e9}, {"pcie": 5e9})
    )
    assert slow.parts["optimizer"] == pytest.approx(10 * fast.parts["optimizer"], rel=0.1)
    assert slow.seconds - fast.seconds == pytest.approx(slow.parts["optimizer"] - fast.parts["optimizer"], rel=0.1)
    elements = sum(each.elements for each in estimator_of(config, 1, None, NOTHING).parameters)
    assert fast.parts["optimizer"] > 28 * elements / 60e9, "AdamW reads four values of fp32, and writes three"
    assert far.parts["communication"] - fast.parts["communication"] > 4 * elements / 5e9, "a gradient, or more"


def test_a_copy_waits_for_its_stream_and_the_host_waits_for_a_copy() -> None:
    work = Operation(0, "memory", 0, int(335e6), None, 4, 0.0)
    seconds = operation_seconds(work, H100)

    def of(*entries: Any) -> float:
        return step_time(StepTrace(entries=[Order("forward"), *entries]), cluster(per_node=1), 1).seconds

    copy, added = OnHost(1, True, int(50e6), False), OnHost(0, False, int(60e6), False)
    assert of(work, OnHost(0, True, int(50e6), False)) == pytest.approx(seconds + 1e-3, rel=0.05)
    assert of(copy, work) == pytest.approx(1e-3, rel=0.05), "beside each other"
    assert of(copy, Order("read", 1), work) == pytest.approx(1e-3 + seconds, rel=0.05)
    assert of(added, work) == pytest.approx(1e-3 + seconds, rel=0.05)


def test_a_copy_hides_no_collective() -> None:
    work = Operation(0, "memory", 0, int(1.4e10), None, 4, 0.0)
    beside = Sent(1, "all_reduce", tuple(range(8)), int(5e8), asynchronous=True)
    copy = OnHost(0, True, int(1e9), False)
    without, with_copy = (
        step_time(StepTrace(entries=[Order("forward"), beside, work, *more, Order("join")]), cluster(), 1)
        for more in ([], [copy])
    )
    assert without.hidden == pytest.approx(with_copy.hidden, rel=0.01)
    assert with_copy.seconds - without.seconds == pytest.approx(1e9 / H100.pcie, rel=0.01)


def test_what_an_operation_changes_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = StepTrace(device_type="meta")
    monkeypatch.setattr(StepTrace, "_stream", lambda self: 0)
    here, there = [torch.zeros(8)], [torch.empty(8, device="meta")]
    scaled, copied = torch.ops.aten._foreach_mul_.Tensor, torch.ops.aten._foreach_copy_.default
    for func, args in ((scaled, (there, torch.tensor(2.0))), (copied, (there, here)), (scaled, (here, there[0]))):
        trace.see(Call(func, args, {}, [], {}))
    kernel, copy, waits, own = trace.entries
    assert isinstance(kernel, Operation)
    assert isinstance(copy, OnHost)
    assert isinstance(own, OnHost)
    assert (copy.copies, copy.bytes, own.copies) == (True, 32, False)
    assert waits == Order("read")


def test_a_network_between_nodes_takes_longer_than_a_link_within_one() -> None:
    one = time_of(large(16), cluster(per_node=16))
    two = time_of(large(16), cluster(2, network=2e9))
    assert two.parts["communication"] > 5 * one.parts["communication"]


def test_a_slow_host_is_what_small_operations_wait_for() -> None:
    small = decoder(launch={"device": "auto"}, run={"steps": 10})
    step = time_of(small, cluster(per_node=1))
    assert step.parts["host"] > 0.5 * step.seconds


def test_stages_wait_for_each_other() -> None:
    piped = large(
        2, micro_batches=4, parallel={"strategy": "ddp", "pipeline": 2}, batch={"global_size": 64, "micro_size": 16}
    )
    step = time_of(piped, cluster(per_node=2))
    assert 0.1 < step.parts["bubble"] / step.seconds < 0.35  # (stages - 1) / (micro-batches + stages - 1) = 1 / 5
    assert sum(step.parts.values()) == pytest.approx(step.seconds)


# --- the replay ---------------------------------------------------------------------------------------------------


def product(stream: int = 0, size: int = 4096) -> Operation:
    return Operation(stream, "matmul", 2 * size**3, 3 * 2 * size**2, (1, size, size, size), 2, 0.0)


def replayed(*entries: Any) -> StepTime:
    return step_time(StepTrace(entries=[Order("forward"), *entries]), cluster(), 1)


def test_a_collective_runs_beside_operations_until_something_waits() -> None:
    sent = Sent(0, "all_reduce", tuple(range(8)), 10**9, asynchronous=True)
    alone, reduce = replayed(product()).seconds, collective_seconds(sent, cluster())
    beside, before = replayed(sent, product()), replayed(sent, Order("join"), product())
    assert beside.seconds < before.seconds == pytest.approx(alone + reduce, rel=0.01)
    assert beside.hidden > 0 == pytest.approx(before.hidden, abs=1e-5)


def test_an_event_orders_two_streams() -> None:
    ordered = replayed(product(1), Order("record", 1, 7), Order("wait", 0, 7), product(0))
    assert ordered.seconds == pytest.approx(2 * replayed(product()).seconds, rel=0.05)


@given(st.integers(1, 8192), st.integers(1, 8192), st.integers(1, 8192), st.integers(1, 64))
def test_no_product_is_faster_than_the_gpu(m: int, n: int, k: int, batch: int) -> None:
    shape = (batch, m, n, k)
    flops, moved = 2 * batch * m * n * k, 2 * batch * (m * k + k * n + m * n)
    assert 0 < shape_efficiency(shape, H100) <= 1
    seconds = operation_seconds(Operation(0, "matmul", flops, moved, shape, 2, 0.0), H100)
    assert seconds >= flops / H100.flops[2]
    assert seconds >= moved / H100.bandwidth


@given(st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]), st.integers(1, 10**10), st.integers(1, 32))
def test_no_collective_is_faster_than_its_links(name: str, size: int, nodes: int) -> None:
    sent = Sent(0, name, tuple(range(8 * nodes)), size, asynchronous=True)
    within = collective_seconds(sent, GPUCluster(H100, 8 * nodes, 1))
    assert (
        collective_seconds(sent, GPUCluster(H100, 8, nodes))
        >= within
        >= size * (8 * nodes - 1) / (8 * nodes) / H100.link
    )


# --- what people ask ----------------------------------------------------------------------------------------------


def test_the_gpus_by_name(tmp_path: Path) -> None:
    assert str(parse_cluster("h100:8", 4)) == "32 x H100 (4 nodes)"
    assert parse_cluster("H200:1").gpu.flops == H100.flops
    own = tmp_path / "own.toml"
    own.write_text('[MINE]\nlike = "H100"\nmemory = 20\n')
    mine = parse_cluster(f"{own}:MINE:2")
    assert (mine.gpu.memory, mine.gpu.bandwidth, mine.ranks) == (20 << 30, H100.bandwidth, 2)
    own.write_text('[MINE]\nlike = "H100"\n[MINE.reached]\nmatmul = 0.5\n[LESS]\nmemory = 20\n[LOST]\nlike = "NONE"\n')
    assert parse_cluster(f"{own}:MINE:1").gpu.reached == {**H100.reached, "matmul": 0.5}
    for name, missing in (("LESS", "tf32"), ("LOST", "NONE")):
        with pytest.raises(ConfigError, match=missing):
            parse_cluster(f"{own}:{name}:1")


@pytest.mark.parametrize(
    "name", ["H100", "H200", "B200", "A100-80GB", "A100-40GB", "L4", "L40S", "A10G", "RTX4090", "RTX5090", "MI300X"]
)
def test_each_gpu_has_its_figures(name: str) -> None:
    gpu: GPU = parse_cluster(f"{name}:1").gpu
    assert gpu.flops[4] < gpu.flops[2] <= gpu.flops[1]
    assert all(0 < share <= 1 for share in gpu.reached.values())
    assert 1e10 < gpu.memory < 1e12 < 10 * gpu.bandwidth < 1e14


def test_the_instance_types_of_clouds() -> None:
    instances = tomllib.loads((files("lockstep.plan") / "instances.toml").read_text())
    for name, (gpu, number, gigabits) in instances.items():
        cluster = parse_cluster(name)
        assert (cluster.gpu.name, cluster.per_node, cluster.nodes) == (gpu, number, 1)
        assert cluster.gpu.network * number * 8 == pytest.approx(gigabits * 1e9)
    assert [str(parse_cluster("P5.48xlarge", nodes)) for nodes in (1, 4)] == [
        "8 x H100 (p5.48xlarge)",
        "32 x H100 (4 p5.48xlarge)",
    ]
    assert parse_cluster("nd96asr_v4:8").instance == "Standard_ND96asr_v4"
    assert parse_cluster("p5.48xlarge").gpu == parse_cluster("H100:8").gpu, "both have 400 Gbit/s for a GPU"
    tcpx, whole = (parse_cluster(name, 2).gpu for name in ("a3-highgpu-8g", "a3-megagpu-8g"))
    assert tcpx.network == whole.network / 2
    [(_, price)] = parse_clusters("p5.48xlarge", "1", "98USD")
    assert price is not None
    assert price.per_hour == 98 / 8, "of a GPU, where the cloud names the instance's"


def test_a_range_of_gpus_or_nodes_doubles() -> None:
    of = parse_clusters("L4:1..4,p5.48xlarge", "1..6", "1USD,98USD")
    sizes = [(cluster.per_node, cluster.nodes, price and price.per_hour) for cluster, price in of]
    assert sizes == [(gpus, nodes, 1) for gpus in (1, 2, 4) for nodes in (1, 2, 4, 6)] + [
        (8, nodes, 98 / 8) for nodes in (1, 2, 4, 6)
    ]
    assert [cluster.nodes for cluster, _ in parse_clusters("H100:8", "3..3")] == [3]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("--gpus", "H100:8", "--nodes", "4..2"), ("4..2", "1..8")),
        (("--gpus", "H100:0..8"), ("H100:0..8", "H100:8")),
        (("--gpus", "H10:8"), ("H10", "H100")),
        (("--gpus", "H100"), ("H100", "H100:8")),
        (("--gpus", "g6"), ("g6", "H100:8", "g6.xlarge", "g6.2xlarge")),
        (("--gpus", "p5.48xlrge"), ("p5.48xlrge", "p5.48xlarge")),
        (("--gpus", "p5.48xlrge:8"), ("p5.48xlrge", "p5.48xlarge")),
        (("--gpus", "p5.48xlarge:4"), ("p5.48xlarge:4", "8 x H100")),
        (("--gpus", "H100:0"), ("H100:0", "H100:8")),
        (("--gpus", "H100:8", "--nodes", "0"), ("--nodes 0", "1 node")),
        (("--gpus", "H100:8", "--price", "2.5"), ("2.5", "2.5USD")),
        (("--gpus", "H100:8", "--price", "2.5euro"), ("2.5euro", "2.5USD")),
        (("--gpus", "H100:8,p5.48xlarge", "--price", "2.5USD"), ("2.5USD", "H100:8,p5.48xlarge")),
        (("--price", "2.5USD"), ("--gpus", "H100:8")),
        (("--gpus", "no-file.toml:MINE:8"), ("no-file.toml",)),
    ],
)
def test_bad_input_gets_the_nearest_right_value(
    words: tuple[str, ...], values: tuple[str, ...], tmp_path: Path
) -> None:
    done = run_lockstep("plan", "digits", "--peak", "none", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert gives(done.stderr, *values)


def test_prices() -> None:
    texts = ("2.5usd", "$2", "€ 1.20", "£3", "250 JPY")
    assert [parse_price(text).currency for text in texts] == ["USD", "USD", "EUR", "GBP", "JPY"]
    assert parse_price("$2").text(1000.5) == "1,000.50 USD"
    with pytest.raises(ConfigError):
        parse_price("$2.5EUR")


def test_the_command_shows_hours_and_cost(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(large(16).model_dump(mode="json", exclude_unset=True)))
    words = ("plan", "run.json", "--gpus", "H100:8", "--nodes", "2", "--price", "2USD", "--peak", "planned")
    shown = run_lockstep(*words, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert gives(shown.stdout, "16 x H100 (2 nodes)", "tokens/s", "hours", "cost")
    assert gives(shown.stdout, "fsdp", "USD")
    [row] = json.loads(run_lockstep(*words, "--json", cwd=tmp_path).stdout)["strategies"]
    assert row["hours"] == pytest.approx(10 * row["step_seconds"] / 3600)
    assert row["cost"] == pytest.approx(row["hours"] * 16 * 2)
    assert row["tokens_per_second"] == pytest.approx(16 * 16 * 2 * LENGTH / row["step_seconds"])
    assert row["kwh"] == pytest.approx(row["hours"] * 16 * 0.7)
    assert row["mfu"] > 0

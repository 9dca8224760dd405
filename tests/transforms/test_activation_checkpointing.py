"""Activation checkpointing: bitwise identical gradients, for less memory, under the same names."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from kit.families import FAMILIES, family
from kit.runs import Trajectory, recorded_all
from kit.worlds import in_world
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lockstep
from lockstep.config.schema import ActivationCheckpointing, TransformerModel
from lockstep.core.records import DataFacts
from lockstep.loop.session import components_of
from lockstep.models.blocks import repeated_blocks
from lockstep.models.build import build_model
from lockstep.transforms.activation_checkpointing import RecomputeBlocks
from lockstep.transforms.compiling import Compile
from lockstep.transforms.order import apply_transforms, split_at

FULL = {"activation_checkpointing": {"mode": "full"}}
CPU = torch.device("cpu")


def recomputing(model: nn.Module, every: int = 1) -> nn.Module:
    options = ActivationCheckpointing(mode="full", every=every)
    return apply_transforms(model, [RecomputeBlocks(options, repeated_blocks(model))], CPU)


# --- a run is the same run ------------------------------------------------------------------------------------------

RAGGED = {"kind": "custom", "target": "kit.ragged:Ragged", "collate": "kit.ragged:collate"}
OWN = {"kind": "transformer", "layers": 3, "width": 32, "heads": 4, "vocabulary": 64, "dropout": 0.2}
LLAMA = {
    "kind": "huggingface",
    "task": "causal-lm",
    "architecture": {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.2,
    },
}  # fmt: skip


def config(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    data = RAGGED if model is OWN else {**RAGGED, "collate": "kit.ragged:collate_aligned"}
    return {
        "model": model,
        "data": {"train": data, "evaluation": {"held-out": {**data, "arguments": {"samples": 7}}}},
        "batch": {"global_size": 13, "micro_size": 4},
        "optim": {"lr": 1e-3, "clip_norm": 0.5},
        "precision": {"compute": "fp32"},
        "run": {"steps": 3},
        **sections,
    }


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (1, {"strategy": "single"}),
        (2, {"strategy": "ddp"}),
        (2, {"strategy": "fsdp"}),
        (2, {"strategy": "fsdp", "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}),
        (2, {"strategy": "fsdp", "fsdp": {"wrap": ["attention"]}}),  # units inside of blocks that are computed again
    ],
)
def test_a_run_is_bitwise_identical(ranks: int, parallel: dict[str, Any]) -> None:
    configs = []
    for model, attention, compute in (
        (OWN, "Attention", "fp32"),
        (OWN, "Attention", "bf16"),
        (LLAMA, "LlamaAttention", "fp32"),
    ):
        options = copy.deepcopy(parallel)
        if "wrap" in options.get("fsdp", {}):
            options["fsdp"]["wrap"] = [attention]
        for memory in ({}, FULL, {"activation_checkpointing": {"mode": "full", "every": 2}}):
            configs.append(config(model, parallel=options, precision={"compute": compute}, memory=memory))
    runs = recorded_all(configs, ranks, updates=2)
    for kept, *recomputed in (runs[:3], runs[3:6], runs[6:]):
        for run in recomputed:
            _assert_identical(run, kept)


def _assert_identical(run: Trajectory, kept: Trajectory) -> None:
    assert (run.losses, run.norms, run.evaluations) == (kept.losses, kept.norms, kept.evaluations)
    for tensors, expected in zip((*run.gradients, run.weights), (*kept.gradients, kept.weights), strict=True):
        assert list(tensors) == list(expected)
        for name, values in expected.items():
            assert np.array_equal(tensors[name], values), name


def test_models_of_every_family_are_computed_again() -> None:
    """Under fsdp: further outputs of blocks, such as T5's biases and a router's choice, are the same again."""
    names = [name for name in FAMILIES if name != "own"]  # it has no blocks
    sections = {"parallel": {"strategy": "fsdp"}, "batch": {"global_size": 9, "micro_size": 3}}
    configs = [{**config(OWN), **family(name), **sections, "memory": memory} for name in names for memory in ({}, FULL)]
    runs = recorded_all(configs, ranks=2, updates=1)
    for kept, recomputed in zip(runs[::2], runs[1::2], strict=True):
        _assert_identical(recomputed, kept)


def forwards_in_a_session(parallel: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return how often each block was computed in an update of one micro-batch, and in an evaluation of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    counts: Counter[str] = Counter()
    chosen = config(OWN, parallel=parallel, memory={"activation_checkpointing": {"mode": "full", "every": 2}})
    chosen["batch"] = {"global_size": 8}
    try:
        with lockstep.session(chosen) as session:
            model = components_of(session).sharding.state.model
            assert all("checkpoint" not in name for name, _ in model.named_modules())
            for name in repeated_blocks(model):
                counted(model.get_submodule(f"{name}.attention"), name, counts)
            for batch in session.batches():
                session.accumulate(batch)
                session.commit()
                break
            trained = dict(counts)
            counts.clear()
            session.evaluate()
            return trained, dict(counts)
    finally:
        dist.destroy_process_group()


def counted(module: nn.Module, name: str, counts: Counter[str]) -> None:
    module.register_forward_hook(lambda *_: counts.update([name]))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_chosen_blocks_are_computed_twice_and_only_in_training(strategy: str) -> None:
    for trained, evaluated in in_world(2, forwards_in_a_session, {"strategy": strategy}):
        assert trained == {"blocks.0": 2, "blocks.1": 1, "blocks.2": 2}
        assert evaluated == {"blocks.0": 1, "blocks.1": 1, "blocks.2": 1}


# --- memory ---------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Records every storage that is made."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return results

    @property
    def bytes(self) -> int:
        return sum(size for reference, size in self._storages.values() if not reference.expired())


def held_for_the_backward(model: nn.Module) -> int:
    """Return the bytes alive between forward and backward."""
    tokens = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(0))
    with Alive() as alive:
        outputs = model(tokens)
        held = alive.bytes
    outputs.sum().backward()
    return held


def test_fewer_bytes_are_held_for_the_backward() -> None:
    section = TransformerModel(kind="transformer", layers=8, width=32, heads=4)
    facts = DataFacts(100, 64, vocabulary=64)
    held = {
        every: held_for_the_backward(recomputing(build_model(section, facts, 1), every))
        if every
        else held_for_the_backward(build_model(section, facts, 1))
        for every in (0, 2, 1)
    }
    inputs = 4 * 64 * 32 * 4  # bytes of a block's input
    assert held[1] < held[2] < held[0]
    a_block = (held[0] - held[1]) / 8
    assert a_block > 8 * inputs
    assert held[0] - held[2] == pytest.approx(4 * a_block, rel=0.15)
    assert held[1] < 8 * inputs + (held[0] - 8 * a_block)


# --- any block ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Takes its inputs by name, draws, and returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor, debug: str, use_reentrant: bool) -> tuple[Tensor, Tensor]:
        assert (debug, use_reentrant) == ("on", True)
        lockstep.log.mean("seen", 1.0, 1.0)
        hidden = torch.tanh(self.linear(x)) * scale
        return x + torch.nn.functional.dropout(hidden, 0.3, self.training), hidden.sum()


class Stack(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        if norm is not None:
            self.layers[1].norm = norm

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            x, part = layer(x, scale=self.scale, debug="on", use_reentrant=True)
            total = total + part
        return x.sum() + total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(torch.ones(2, 4)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_names_keyword_arguments_and_draws_are_preserved() -> None:
    kept = Stack()
    recomputed = recomputing(copy.deepcopy(kept))
    assert list(recomputed.state_dict()) == list(kept.state_dict())
    again, expected = gradients(recomputed), gradients(kept)
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_a_copy_computes_with_its_own_weights() -> None:
    original = recomputing(Stack())
    other = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    assert all(grad.abs().sum() > 0 for grad in gradients(other).values())


def test_a_block_s_logging_is_recorded_once() -> None:
    from lockstep.assembly.parallelize import muted_logging
    from lockstep.monitor.metric_log import MetricLog, recording

    model = Stack()
    options = ActivationCheckpointing(mode="full")
    apply_transforms(model, [RecomputeBlocks(options, repeated_blocks(model), muted_logging)], CPU)
    with recording(MetricLog()) as log:
        gradients(model)
        assert log.drain().means["seen"] == (3.0, 3.0)


def test_activation_checkpointing_comes_before_compiling() -> None:
    first = RecomputeBlocks(ActivationCheckpointing(mode="full"), ["layers.0"])
    for order in ([Compile(None), first], [first, Compile(None)]):
        assert [step.name for step in split_at("parallel.pipeline", order)[0]] == [
            "memory.activation_checkpointing",
            "model.compile",
        ]


# --- refused --------------------------------------------------------------------------------------------------------


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(lockstep.ConfigError, match=r"^memory.activation_checkpointing: a Linear has no repeated block"):
        recomputing(nn.Linear(2, 2))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_running_means_are_refused(norm: nn.Module) -> None:
    with pytest.raises(lockstep.ConfigError, match=r"layers\.1\.norm keeps running means"):
        recomputing(Stack(norm))


def test_a_norm_without_running_means_is_allowed() -> None:
    recomputing(Stack(nn.InstanceNorm1d(4)))

"""Context parallelism: however many ranks share a sequence, the run is the single process's."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.failures import fails
from kit.families import family
from kit.runs import Trajectory, differences, recorded, recorded_all, unnoticed
from kit.worlds import in_world
from torch.nn import functional as F
from training.test_same_run import config

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.distributed.forward_mode import chunks_of, padded_length, positions_of
from lockstep.loop.session import components_of
from lockstep.plan.plan import make_plan
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume
from lockstep.transforms.attention_kernels import (
    AttentionOutput,
    Visibility,
    attend,
    attend_backward,
    attend_by_formula,
    attend_by_formula_backward,
    causal_mask,
)

SGD = {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5}}  # it doesn't blow rounding up


def text(model: dict[str, Any] | None = None, **parallel: Any) -> dict[str, Any]:
    """Ragged text, in micro-batches of unequal sizes and lengths, which no number of ranks divides."""
    asked = config(13, 3, parallel={"strategy": "ddp", **parallel}, **SGD)
    return {**asked, "model": {**asked["model"], **(model or {})}}


@cache
def oracle(updates: int = 4) -> Trajectory:
    return recorded(text(strategy="single"), updates=updates)


# --- who has what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 30])
def test_each_position_is_one_ranks_and_all_see_as_much(ranks: int, length: int) -> None:
    places = [positions_of(rank, ranks, length) for rank in range(ranks)]
    assert sorted(torch.cat(places).tolist()) == list(range(padded_length(length, ranks)))
    assert all((one.diff() > 0).all() for one in places)
    assert len({sum(chunks_of(rank, ranks)) for rank in range(ranks)}) == 1


# --- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_kernel_is_its_formula(dtype: torch.dtype, masked: bool) -> None:
    draws = torch.Generator().manual_seed(1)
    query, key, value, gradient = (torch.randn(2, 3, 6, 8, generator=draws, dtype=dtype) for _ in range(4))
    seen = Visibility(0.3, causal=not masked, mask=causal_mask(6, dtype, query.device)[None, None] if masked else None)
    expected = attend_by_formula(query.double(), key.double(), value.double(), _wide(seen))
    found = attend(query, key, value, seen)
    off = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=off, atol=off)
    backward = attend_backward(gradient, query, key, value, found, seen)
    right = attend_by_formula_backward(
        gradient.double(), query.double(), key.double(), value.double(), expected, _wide(seen)
    )
    for one, other in zip(backward, right, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=off, atol=4 * off)


def _wide(seen: Visibility) -> Visibility:
    return Visibility(
        seen.scale, seen.causal, None if seen.mask is None else causal_mask(6, torch.float64, torch.device("cpu"))
    )


def test_the_formula_is_autograds() -> None:
    draws = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, 2, 5, 4, generator=draws, dtype=torch.float64) for _ in range(3))
    for one in (query, key, value):
        one.requires_grad_()
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
    expected.square().sum().backward()
    with torch.no_grad():
        found = attend_by_formula(query, key, value, Visibility(0.5, causal=True))
        backward = attend_by_formula_backward(
            2 * found.values, query, key, value, AttentionOutput(found.values, found.lse), Visibility(0.5, causal=True)
        )
    torch.testing.assert_close(found.values, expected)
    for one, other in zip(backward, (query.grad, key.grad, value.grad), strict=True):
        torch.testing.assert_close(one, other)


LENGTHS, GROUPS, KINDS = (1, 5, 12, 17), (1, 3), ("causal", "everything", "some hidden", "causal, some hidden")


def _rings() -> list[str]:
    """What is another attention than that of whole sequences."""
    import torch.distributed as dist

    from lockstep.distributed.collectives import Ring
    from lockstep.distributed.forward_mode import ForwardMode, SequencePartition
    from lockstep.transforms.context_parallel import ContextParallel

    dist.init_process_group("gloo")
    ring, found = Ring(dist.group.WORLD), []
    attention = ContextParallel(ring.size, ForwardMode(), allow_untested=False)
    attention.apply(torch.nn.Module())
    for length, group, kind in itertools.product(LENGTHS, GROUPS, KINDS):
        draws = torch.Generator().manual_seed(length)
        query, key, value, gradient = (
            torch.randn(2, heads, length, 4, generator=draws, dtype=torch.float64)
            for heads in (2 * group, 2, 2, 2 * group)
        )
        real = torch.rand(2, length, generator=draws) < 0.7
        real[:, 0] = True
        whole = [one.clone().requires_grad_() for one in (query, key, value)]
        hidden, causal = "hidden" in kind, kind.startswith("causal")
        mask = real[:, None, None, :].expand(-1, -1, length, -1) if hidden else None
        if mask is not None and causal:
            mask = mask.tril()
        expected = F.scaled_dot_product_attention(
            *whole, attn_mask=mask, is_causal=causal and not hidden, enable_gqa=group > 1
        )
        (expected * gradient).sum().backward()
        places = positions_of(ring.rank, ring.size, length)
        at, more = places.clamp(max=length - 1), padded_length(length, ring.size) - length
        inside = places < length
        seen = F.pad(real if hidden else torch.ones_like(real), (0, more))
        own = [one[:, :, at].clone().requires_grad_() for one in (query, key, value)]
        with attention.active():
            attention.divide(SequencePartition(ring, length, at, None if kind == "causal" else seen))
            mixed = F.scaled_dot_product_attention(*own, is_causal=causal, enable_gqa=group > 1)
            (mixed * gradient[:, :, at])[:, :, inside].sum().backward()
        pairs_ = [(mixed, expected), *((one.grad, other.grad) for one, other in zip(own, whole, strict=True))]
        for what, (one, other) in zip(("values", "query", "key", "value"), pairs_, strict=True):
            off = (one[:, :, inside] - other[:, :, places[inside]]).abs().max() if inside.any() else torch.tensor(0.0)
            if not off < 1e-12:
                found.append(f"{length} positions, groups of {group}, {kind}: {what} off by {off:.1e}")
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_is_attention_to_whole_sequences(ranks: int) -> None:
    assert in_world(ranks, _rings) == [[]] * ranks


# --- the same run -------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "x ddp": text(context="auto"),
    "x fsdp": text(context=2, strategy="fsdp"),
    "x fsdp, nothing divided": text(context=2, strategy="fsdp", fsdp={"sharding_strategy": "NO_SHARD"}),
    "a loss in chunks": {**text(context=2), "memory": {"loss_chunk": 5}},
    "recomputed blocks": {**text(context=2), "memory": {"activation_checkpointing": {"mode": "full"}}},
}
PRODUCTS: dict[str, dict[str, Any]] = {
    "x ddp": text(context=2),
    "x fsdp": text(context=2, strategy="fsdp"),
    "x hybrid": text(context=2, strategy="fsdp", data=2, fsdp={"sharding_strategy": "HYBRID_SHARD"}),
    "four to a sequence": text(context=4),
}


def test_on_two_ranks() -> None:
    for name, run in zip(WAYS, recorded_all(list(WAYS.values()), 2, updates=1), strict=True):
        assert differences(run, oracle(1)) == [], name


def test_an_epoch_ends_with_a_smaller_update() -> None:
    assert differences(recorded(text(context=2), 2), oracle()) == []


def test_products_on_four_ranks() -> None:
    for name, run in zip(PRODUCTS, recorded_all(list(PRODUCTS.values()), 4, updates=2), strict=True):
        assert differences(run, oracle(2)) == [], name


def hidden_words() -> dict[str, Any]:
    """An encoder that sees both ways, of texts with padding."""
    bert = {**family("bert"), "data": family("gpt2")["data"]}
    return {**bert, "model": {**{k: v for k, v in bert["model"].items() if k != "classes"}, "task": "masked-lm"}}


OWN = {"model": {"kind": "custom", "target": "training.context_models:Attending"}}
MODELS = {
    **{name: family(name) for name in ("llama", "gpt2", "qwen", "mixtral")},
    "bert": hidden_words(),
    "own": {**OWN, "objective": {"kind": "next-token"}},
}


def test_models_of_other_families() -> None:
    alone = recorded_all([{**text(strategy="single"), **model} for model in MODELS.values()], updates=2)
    runs = recorded_all([{**text(context=2), **model} for model in MODELS.values()], 2, updates=2)
    for name, run, expected in zip(MODELS, runs, alone, strict=True):
        assert differences(run, expected) == [], name


def test_planted_faults_are_noticed() -> None:
    faults = ("a mean of means", "one swapped sample", "a clip norm of one rank")
    assert unnoticed(faults, text(context=2), oracle(2), ranks=4, updates=2) == []


def _drawn() -> np.ndarray:
    """What dropout leaves of ones on this rank's positions."""
    with lockstep.session(text({"dropout": 0.5}, context=2)) as session:
        dropped: list[Any] = []
        first: Any = components_of(session).sharding.state.model.get_submodule("dropout")
        first.register_forward_hook(lambda module, inputs, output: dropped.append(output != 0))
        for _ in zip(session, range(1), strict=False):
            pass
    return dropped[0].numpy()  # type: ignore[no-any-return]


def test_each_rank_drops_other_elements() -> None:
    here, there = in_world(2, _drawn)
    assert here.shape == there.shape
    assert 0.3 < np.mean(here != there) < 0.7


def _goes_on(asked: dict[str, Any], folder: str, to: int) -> list[float]:
    """From where the checkpoints in the folder stop, and saved again."""
    with small.in_group(), lockstep.session(asked) as session:
        checkpoints = Checkpoints(session, LocalStorage(Path(folder)), {})
        checkpoints.begin(Resume())
        losses = []
        for report in session:
            losses.append(report.loss)
            if report.step == to:
                checkpoints.save()
                break
        assert all(ended.failure is None for ended in checkpoints.finish())
    return losses


def test_checkpoints_go_anywhere(tmp_path: Path) -> None:
    """Save with sequences sharded over two ranks, twice, and resume on one rank; and the other way around."""
    divided, alone = text(context=2, strategy="fsdp"), text(strategy="single")
    for number, (first, ranks, then, others) in enumerate([(divided, 4, alone, 1), (alone, 1, divided, 4)]):
        folder = str(tmp_path / f"{number}")
        before = in_world(ranks, _goes_on, first, folder, 2)[0]
        after = in_world(others, _goes_on, then, folder, 4)[0]
        assert before + after == pytest.approx(oracle().losses, rel=1e-6)


# --- what it can't do ---------------------------------------------------------------------------------------------


def of(name: str) -> dict[str, Any]:
    model = {"kind": "custom", "target": f"training.context_models:{name}"}
    return {**text(context=2), "model": model, "objective": {"kind": "next-token"}}


def architecture(name: str, **changes: Any) -> dict[str, Any]:
    model = family(name)["model"]
    return {
        **text(context=2),
        **family(name),
        "model": {**model, "architecture": {**model["architecture"], **changes}},
    }


def test_a_model_that_counts_its_calls_is_not_rehearsed_into_another() -> None:
    asked = of("Changing")
    expected = recorded({**asked, "parallel": {"strategy": "ddp"}, "batch": {"global_size": 13, "micro_size": 3}})
    assert differences(recorded(asked, 2), expected) == []


def _counted() -> list[float]:
    """Forwards that a model has counted, after each of two updates of three micro-batches; drawn numbers thereafter."""
    import random

    with lockstep.session(of("Jittering")) as session:
        model: Any = components_of(session).sharding.state.model
        found = [float(model.forwards), random.random(), float(torch.rand(()))]
        for report, _ in zip(session, range(2), strict=False):
            found.append(float(model.forwards) / report.step)
    random.seed(components_of(session).config.run.seed)
    return [*found, random.random()]


def test_a_rehearsal_leaves_no_trace_and_lets_models_draw() -> None:
    for forwards, drawn, _, *counted, expected in in_world(2, _counted):
        assert forwards == 0
        assert drawn == expected
        assert len(set(counted)) == 1
        assert counted[0] > 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a model that counts for itself": (of("Unaware"), "place has another output at a position"),
    "a model that counts for itself in training": (of("UnawareInTraining"), "place has another output at a position"),
    "a model that looks aside": (of("Neighbours"), "before has another output at a position"),
    "dropped attention": (architecture("gpt2", attn_pdrop=0.1), "drops 0.1 of its attention"),
    "a window": (
        architecture("llama", model_type="mistral", sliding_window=3),
        "lets tokens see 3 tokens back",
    ),
    "one class a sample": ({**text(context=2), **family("bert")}, "divides one sequence of tokens"),
    "two sequences": ({**text(context=2), **family("t5")}, "divides one sequence of tokens"),
    "deepspeed": (text(context=2, strategy="deepspeed"), "deepspeed doesn't go with parallel.context 2"),
    "sums in one order": (
        {**text(context=2), "run": {"steps": 8, "determinism": "invariant"}},
        "with parallel.context 2 take deterministic",
    ),
    "a mesh that doesn't multiply out": (text(context=3), "Start 3 ranks"),
}


@pytest.mark.parametrize("axis", ["pipeline", "tensor"])
def test_a_model_that_is_cut_has_whole_sequences(axis: str) -> None:
    asked = validate(text(**{"context": 2, axis: 2})).config
    with fails(ConfigError, f"parallel.{axis}", key="parallel.context"):
        make_plan(asked, 4, DataFacts(40, None), [ParameterFacts("weight", (8, 8), 4, True)])


def _refusals(configs: list[dict[str, Any]]) -> list[str]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for asked in configs:
        try:
            with lockstep.session(asked) as session:
                next(iter(session))
        except (ConfigError, RunFailed) as refusal:
            found.append(str(refusal))
        else:
            found.append("it ran")
    dist.destroy_process_group()
    return found


def test_what_it_cant_do_is_refused() -> None:
    everywhere = in_world(2, _refusals, [asked for asked, _ in REFUSED.values()])
    for (name, (_, message)), *found in zip(REFUSED.items(), *everywhere, strict=True):
        for said in found:
            assert message in said, name


def _asked_of_padding() -> str:
    from compatibility import cells

    asked, _ = cells.config_of("llama-left", "context")
    asked["data"]["train"]["collate"] = "compatibility.families:causal_left_predicted"
    with small.in_group(), lockstep.session(asked) as session:
        try:
            for _ in session:
                pass
        except RunFailed as failure:
            return str(failure)
    return ""


def test_targets_predicted_from_padding_are_refused() -> None:
    """The outputs for padding that attends to nothing follow no rule that a sharded sequence could reproduce."""
    for said in in_world(2, _asked_of_padding):
        assert "has padding before its tokens" in said
        assert "targets are predicted from padding" in said

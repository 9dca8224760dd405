"""A forward of a transformers model never reads a mask's values, and full sequences are attended to without a mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from kit.families import family
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

import lockstep
from lockstep.loop.session import components_of
from lockstep.models import attention_masks
from lockstep.training import assemble

SMALL = LlamaConfig(
    vocab_size=64, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
"""Operations whose result the host waits for."""


class Reads(TorchDispatchMode):
    """Records the operations that read values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in READS:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, bool]]]:
    """Yield (has a mask, is causal) of each attention in the block."""
    calls: list[tuple[bool, bool]] = []
    original = F.scaled_dot_product_attention

    def record(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((kwargs.get("attn_mask") is not None, bool(kwargs.get("is_causal"))))
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", record)
        yield calls


def config(name: str, samples: int, **arguments: Any) -> dict[str, Any]:
    sections = family(name)
    sections["data"] = (
        {"train": {**sections["data"]["train"], "arguments": arguments}} if arguments else sections["data"]
    )
    return {**sections, "batch": {"global_size": samples}, "run": {"steps": 4}, "precision": {"compute": "fp32"}}


def forwards(session: Any) -> Iterator[tuple[bool, Reads, float]]:
    """Run all updates' forwards; yield whether the batch has padding, what was read, and the loss."""
    components = components_of(session)
    for batch in session.batches():
        (micro_batch,) = batch.micro_batches
        ids = micro_batch.inputs["input_ids"]
        with Reads() as reads:
            outputs = components.engine.outputs(micro_batch.inputs)
        loss = float(components.objective.loss_sum(outputs, micro_batch))
        yield bool((ids == 0).any()), reads, loss
        session.accumulate(batch)
        session.commit()


# What mixtral and t5 read beside masks is their own: the experts' tokens, and nothing
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen", "bert", "t5"])
@pytest.mark.parametrize("samples", [1, 5])
def test_no_forward_reads_a_mask(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with lockstep.session(config(name, samples)) as session, recorded_attention(monkeypatch) as calls:
        for padded, reads, _ in forwards(session):
            assert not reads.names
            assert calls
            if not padded and name != "t5":  # whose bias of positions is a mask
                causal = name != "bert"
                assert set(calls) == {(False, causal)}
            elif padded and name != "t5":
                assert all(has_mask for has_mask, _ in calls)
            calls.clear()


def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "decide_masks", lambda model, sample, **_: (False, nullcontext))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen", "bert", "t5"])
@pytest.mark.parametrize("samples", [1, 5])
def test_losses_are_those_of_the_library(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with lockstep.session(config(name, samples)) as session:
        losses = [report.loss for report in session]
    with monkeypatch.context() as patch:
        _as_before(patch)
        with lockstep.session(config(name, samples)) as session:
            assert [report.loss for report in session] == losses


def test_the_library_itself_reads_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the library decides without the device, and `attention_masks` isn't needed."""
    _as_before(monkeypatch)
    with lockstep.session(config("llama", 1)) as session:
        assert all(reads.names for _, reads, _ in forwards(session))


def test_positions_of_several_sequences_in_a_row_stay_apart() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(SMALL).eval()
    ids = torch.randint(1, 64, (1, 8))
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    removed, context = attention_masks.decide_masks(model, lambda: packed, keeps_masks=False)
    assert removed
    with torch.no_grad(), context(), Reads() as reads:
        together = model(**packed).logits
        alone = model(input_ids=ids[:, 3:]).logits
    assert not reads.names
    torch.testing.assert_close(together[:, 3:], alone)


def test_a_users_model_keeps_its_masks() -> None:
    class Pooled(LlamaForCausalLM):
        pass

    removed, _ = attention_masks.decide_masks(Pooled(SMALL), dict, keeps_masks=False)
    assert not removed

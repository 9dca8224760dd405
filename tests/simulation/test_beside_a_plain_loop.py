"""What an update costs on an accelerator beside a plain loop's: operations, bytes that they move, and peak memory.

The plain loop is what its author would write: autocast, fused AdamW, `cross_entropy`, clipping, torch's DDP and FSDP2.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from kit.worlds import in_process
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from lockstep.assembly.user_objects import user_objects
from lockstep.simulation import device
from lockstep.simulation.memory import MemoryLedger, resizes_seen
from lockstep.simulation.ranks import simulated_rank
from lockstep.simulation.repeats import Call
from lockstep.training.api import resolved
from lockstep.training.assemble import assemble

Model = Callable[[int], nn.Module]
SAMPLES, LENGTH, CLASSES = 4, 256, 1000
NOT_COUNTED = ("aten.empty", "aten.new_empty", "aten.detach", "aten.alias", "aten._unsafe_view")
STEADY = 5  # updates before may do what is done once


@dataclass
class Cost:
    operations: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    peak: int = 0
    counts: bool = False

    def see(self, call: Call) -> None:
        operation, args, kwargs, outputs, _ = call
        if not self.counts or operation.is_view or str(operation).startswith(NOT_COUNTED):
            return
        tensors = {id(leaf): leaf for leaf in [*pytree.tree_leaves((args, kwargs)), *outputs] if _is_there(leaf)}
        self.operations[str(operation)] += bool(tensors)
        self.moved += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _is_there(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == device.NAME


# --- the models -------------------------------------------------------------------------------------------------------


def gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, vocab_size=32000, **heads)
    )


def resnet(layers: int) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(depths=[layers] * 4, num_labels=CLASSES))


class Made(Dataset[Any]):
    """Tokens, or images."""

    def __init__(self, is_text: bool) -> None:
        self.is_text = is_text

    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        if self.is_text:
            return {"input_ids": (ids := torch.arange(LENGTH) + at), "labels": ids}
        return {"pixel_values": torch.full((3, 64, 64), at / 64), "labels": torch.tensor(at)}


# --- the two loops ----------------------------------------------------------------------------------------------------


def own(make: Model, layers: int, strategy: str, ranks: int) -> Cost:
    is_text, cost = make is not resnet, Cost()
    config = {
        "parallel": {"strategy": strategy},
        "precision": {"compute": "bf16"},
        "batch": {"global_size": SAMPLES * ranks, "micro_size": SAMPLES},
        "run": {"steps": STEADY + 3},
        "objective": {"kind": "next-token" if is_text else "classification"},
    }
    with simulated_rank(0, ranks) as rank:
        ledger = MemoryLedger(device.NAME)
        rank.execution.watchers += [cost.see, ledger.see]
        given = user_objects({"model": make(layers), "train_dataset": Made(is_text)})
        with resizes_seen(ledger):
            session = assemble(resolved(config, given), rank.world, given)
            ledger.restart()
            for batch in session.batches():
                cost.counts = session.progress.steps == STEADY
                session.accumulate(batch)
                session.commit()
                if cost.counts:
                    break
            session.close()
        cost.peak = ledger.peak().bytes
    return cost


def plain(make: Model, layers: int, strategy: str, ranks: int) -> Cost:
    is_text, cost = make is not resnet, Cost()
    samples = Made(is_text)
    with simulated_rank(0, ranks) as rank:
        ledger = MemoryLedger(device.NAME)
        rank.execution.watchers += [cost.see, ledger.see]
        with resizes_seen(ledger):
            place = torch.device(device.NAME, 0)
            model = make(layers).to(place)
            module: nn.Module = model
            if strategy == "ddp":
                module = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)
            if strategy == "fsdp":
                for block in _blocks(model):
                    fully_shard(block)
                module = fully_shard(model)
            decayed = [each for each in model.parameters() if each.dim() > 1]
            others = {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0}
            optimizer = torch.optim.AdamW([{"params": decayed}, others], lr=1e-3, fused=True)
            ledger.restart()
            for step in range(STEADY + 1):
                cost.counts = step == STEADY
                batch = torch.utils.data.default_collate([samples[at] for at in range(SAMPLES)])
                batch = {name: value.to(place, non_blocking=True) for name, value in batch.items()}
                labels = batch.pop("labels")
                with torch.autocast(device.NAME, torch.bfloat16):
                    logits = module(**batch, **({"use_cache": False} if is_text else {})).logits
                    if is_text:
                        logits, labels = logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
                    loss = functional.cross_entropy(logits.float(), labels)
                del logits
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
                optimizer.step()
                optimizer.zero_grad()
                del loss, batch, labels
        cost.peak = ledger.peak().bytes
    return cost


def _blocks(model: nn.Module) -> Sequence[nn.Module]:
    with contextlib.suppress(AttributeError):
        return list(model.get_submodule("transformer.h").children())
    with contextlib.suppress(AttributeError):
        return list(model.get_submodule("model.layers").children())
    return list(model.get_submodule("resnet.encoder.stages").children())


# --- beside each other ------------------------------------------------------------------------------------------------

OF_THE_VOTE = 60
"""Operations on single numbers: the loss's sum, the vote of the ranks, what is kept, the report's copy."""
OF_THE_NEXT_BATCH = 2 << 20
"""Bytes: the next batch, which arrives while this one is computed, shifted targets, and copies of buffers."""


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (gpt2, 2),
        pytest.param(llama, 2, marks=pytest.mark.drill),
        pytest.param(resnet, 1, marks=pytest.mark.drill),
        pytest.param(gpt2, 12, marks=pytest.mark.drill),
        pytest.param(llama, 8, marks=pytest.mark.drill),
        pytest.param(resnet, 3, marks=pytest.mark.drill),
    ],
)
def test_an_update_costs_no_more_than_a_plain_loop(
    make: Callable[[int], nn.Module], layers: int, strategy: str
) -> None:
    ranks = 1 if strategy == "single" else 4
    ours, theirs = (in_process(loop, make, layers, strategy, ranks) for loop in (own, plain))
    more = {name: (count, theirs.operations[name]) for name, count in (ours.operations - theirs.operations).items()}
    assert ours.moved <= theirs.moved, more
    assert ours.operations.total() <= theirs.operations.total() + OF_THE_VOTE, more
    assert ours.peak <= theirs.peak + OF_THE_NEXT_BATCH

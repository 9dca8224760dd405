"""Samples in a row, with positions that restart, have the losses and gradients that they have alone, or are refused."""

from __future__ import annotations

import pytest
import torch
from compatibility.families import FAMILIES
from kit.failures import fails
from torch.nn import functional as F

from lockstep.core.errors import ConfigError
from lockstep.models.attention_masks import KEEP_APART, masks_of_host, refuse_packed

CAUSAL = [name for name, (head, _) in FAMILIES.items() if head in ("causal", "causal-left")]
LENGTHS = (9, 13, 5)


def _model(name: str, attention: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    kind = name.removesuffix("-left").removesuffix("-alibi").removesuffix("-window").removesuffix("-normed")
    config = transformers.AutoConfig.for_model(kind, **FAMILIES[name][1])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)  # else attention hardly matters
    return (model if any("expert" in key for key in FAMILIES[name][1]) else model.double()).eval()


def _gradient(model: torch.nn.Module, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = torch.zeros(())
    for ids, positions in rows:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1]
        targets = torch.where(positions == 0, -100, ids)[:, 1:]
        loss = loss + F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    loss.backward()
    grads = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), torch.cat(grads)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CAUSAL)
def test_packed_samples_train_as_if_alone_or_are_refused(name: str, attention: str) -> None:
    try:
        model = _model(name, attention)
    except ValueError as unsupported:  # the family has no such attention
        pytest.skip(str(unsupported)[:80])
    if model.config.model_type not in KEEP_APART:
        with fails(ConfigError, model.config.model_type, key="data.train.packed"):
            refuse_packed(model, "data.train.packed", divided=False)
        return
    refuse_packed(model, "data.train.packed", divided=False)
    ids = [torch.randint(4, 60, (1, length)) for length in LENGTHS]
    alone = [(each, torch.arange(each.shape[1])[None]) for each in ids]
    packed = [(torch.cat(ids, 1), torch.cat([positions for _, positions in alone], 1))]
    expected, wanted = _gradient(model, alone)
    with masks_of_host(removed=False, packed=True):
        loss, gradient = _gradient(model, packed)
    assert loss == pytest.approx(expected, rel=1e-6)
    tolerance = 1e-6 if gradient.dtype == torch.float64 else 1e-5  # the library's experts aren't computed in float64
    assert (gradient - wanted).norm() <= tolerance * wanted.norm()


def test_divided_sequences_are_refused() -> None:
    with fails(ConfigError, "parallel.context", key="data.train.packed"):
        refuse_packed(_model("llama", "sdpa"), "data.train.packed", divided=True)

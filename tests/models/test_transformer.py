"""The transformer: shapes, causality, grouped queries, positions, and short attention compared with torch's."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from lockstep.config.schema import ImageClassifierModel, TransformerModel
from lockstep.core.records import DataFacts
from lockstep.models import transformer
from lockstep.models.build import build_model
from lockstep.models.transformer import causal_attention, flops_per_token, rotary_angles, rotate

FACTS = DataFacts(100, 24, vocabulary=50, classes=3)


def _section(**changes):
    return TransformerModel(**{"kind": "transformer", "layers": 2, "width": 32, "heads": 4, **changes})


def _tokens(samples=2, length=24):
    return torch.randint(0, 50, (samples, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1}, {"kv_heads": 2, "tie_embeddings": False}, {"dropout": 0.5}])
def test_logits_have_a_row_for_each_token(changes):
    model = build_model(_section(**changes), FACTS, 1)
    assert model(_tokens()).shape == (2, 24, 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_future_token_changes_no_earlier_logit(dtype, kv_heads):
    model = build_model(_section(kv_heads=kv_heads), FACTS, 1)
    tokens = _tokens()
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 50
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_grouped_queries_are_full_attention_with_repeated_keys_and_values():
    grouped = build_model(_section(kv_heads=2), FACTS, 1)
    full = build_model(_section(), FACTS, 1)
    state = grouped.state_dict()
    for name, value in state.items():
        if ".key." in name or ".value." in name:
            state[name] = value.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(_tokens()), full(_tokens()))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_short_attention_is_the_same_as_torchs(kv_heads):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 4, 37, 8, generator=generator).requires_grad_()
    key, value = (torch.randn(2, kv_heads, 37, 8, generator=generator).requires_grad_() for _ in range(2))
    attention = transformer._short_attention(query, key, value)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention, expected)
    weights = torch.randn(attention.shape, generator=generator)
    for our, their in zip(
        torch.autograd.grad(attention, (query, key, value), weights),
        torch.autograd.grad(expected, (query, key, value), weights),
        strict=True,
    ):
        torch.testing.assert_close(our, their)


def test_bf16_attention_is_near_fp32():
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 4, 64, 8, generator=generator) for _ in range(3))
    exact = causal_attention(query, key, value)
    rough = causal_attention(query.bfloat16(), key.bfloat16(), value.bfloat16())
    assert rough.dtype is torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, atol=0.05, rtol=0.05)


def test_rotated_products_depend_only_on_distance():
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(8, generator=generator).expand(1, 1, 20, 8) for _ in range(2))
    rotation = rotary_angles(torch.arange(20), 8, 10000.0)
    products = (rotate(query, rotation) @ rotate(key, rotation).transpose(-1, -2))[0, 0]
    for distance in range(5):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(products[5, 0], products[5, 1])


def test_a_tied_head_is_the_embedding():
    model = build_model(_section(), FACTS, 1)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
    untied = build_model(_section(tie_embeddings=False), FACTS, 1)
    assert not torch.equal(untied.head.weight, untied.embedding.weight)


def test_the_initial_loss_is_that_of_a_uniform_guess():
    logits = build_model(_section(), FACTS, 1)(_tokens(8))
    loss = F.cross_entropy(logits.flatten(0, 1), _tokens(8).roll(-1).flatten())
    assert abs(loss.item() - math.log(50)) < 0.3


def test_flops_are_those_of_the_formula():
    for tied in (True, False):
        model = build_model(_section(kv_heads=2, mlp_width=64, tie_embeddings=tied), FACTS, 1)
        block = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64
        weights = 2 * block + 50 * 32
        assert flops_per_token(model, FACTS) == 6 * weights + 12 * 2 * 32 * 24
    image = build_model(ImageClassifierModel(kind="image-classifier", width=8), FACTS, 1)
    assert flops_per_token(image, FACTS) is None

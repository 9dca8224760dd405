"""For each class of the transformers library, the sum over the count is `model(**batch).loss`.

Classes that can't be built or run with a small config are skipped; a minimum number of classes must be compared.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config import schema
from lockstep.core.records import DataFacts
from lockstep.data.custom import as_batch
from lockstep.models.building_objectives import build_objective
from lockstep.models.heads import head_of, preparation
from lockstep.models.objectives import ModelLoss

pytestmark = [pytest.mark.drill, pytest.mark.filterwarnings("ignore")]

VOCABULARY, SAMPLES, LENGTH = 50, 4, 16
MOST = 30_000_000  # parameters
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embedding_size"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_attention_heads", "num_key_value_heads", "n_head"), 2),
    **dict.fromkeys(("n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("d_inner", "n_inner", "image_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("d_kv", "head_dim", "patch_size", "q_lora_rank", "kv_lora_rank", "v_head_dim"), 8),
    "vocab_size": VOCABULARY,
    "num_labels": 3,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
}
REGISTRIES: dict[str, int] = {
    "CAUSAL_LM": 140, "MASKED_LM": 44, "SEQ_TO_SEQ_CAUSAL_LM": 18, "TOKEN_CLASSIFICATION": 85,
    "QUESTION_ANSWERING": 60, "SEQUENCE_CLASSIFICATION": 100, "MULTIPLE_CHOICE": 30, "IMAGE_CLASSIFICATION": 18,
    "CTC": 9, "AUDIO_CLASSIFICATION": 9,
}  # fmt: skip
"""The minimum number of classes to compare."""


def _tiny(kind: str, registry: str) -> Any:
    from transformers import CONFIG_MAPPING

    make = CONFIG_MAPPING[kind]
    usual = make()
    keys = {name: size for name, size in _SIZES.items() if name in vars(usual) or name == "num_labels"}
    keys |= {name: size for name, size in _SIZES.items() if name in make.attribute_map}
    for part in getattr(make, "sub_configs", {}) or {}:
        inner = getattr(usual, part, None)
        if inner is not None:
            sizes = {name: size for name, size in _SIZES.items() if name in vars(inner)}
            keys[part] = {**sizes, "model_type": inner.model_type}
    config = make(**keys)
    config.use_cache = False
    if registry == "QUESTION_ANSWERING":
        config.num_labels = 2
    return config


def _batch(model: Any, registry: str) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)

    def drawn(*shape: int, low: int = 3, high: int = VOCABULARY) -> Tensor:
        return torch.randint(low, high, shape, generator=draws)

    ids = drawn(SAMPLES, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, 12:], mask[2, 9:] = 0, 0
    text, classes = {"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 2, 1, 1])
    match registry:
        case "CAUSAL_LM":
            return {**text, "labels": ids.masked_fill(mask == 0, -100)}
        case "MASKED_LM":
            chosen = torch.rand(ids.shape, generator=draws) < 0.4
            return {**text, "labels": ids.masked_fill(~chosen, -100)}
        case "SEQ_TO_SEQ_CAUSAL_LM":
            answers = drawn(SAMPLES, 10)
            answers[2, 6:] = -100
            return {**text, "labels": answers}
        case "TOKEN_CLASSIFICATION":
            return {**text, "labels": drawn(*ids.shape, low=0, high=3).masked_fill(mask == 0, -100)}
        case "QUESTION_ANSWERING":
            places = {"start_positions": torch.tensor([1, 2, 3, 40]), "end_positions": torch.tensor([2, 5, 6, 40])}
            return {**text, **places}
        case "SEQUENCE_CLASSIFICATION":
            return {**text, "labels": classes}
        case "MULTIPLE_CHOICE":
            choices = {name: value[:, None].repeat(1, 2, 1) for name, value in text.items()}
            return {**choices, "labels": classes % 2}
        case "IMAGE_CLASSIFICATION":
            channels = getattr(model.config, "num_channels", 3) or 3
            return {"pixel_values": torch.randn(SAMPLES, channels, 32, 32, generator=draws), "labels": classes}
    sound = torch.randn(SAMPLES, 4000, generator=draws)
    if model.main_input_name != "input_values":
        width = getattr(model.config, "feature_projection_input_dim", None) or 80
        sound = torch.randn(SAMPLES, 200, width, generator=draws)
    labels = drawn(SAMPLES, 3, low=1) if registry == "CTC" else classes
    return {model.main_input_name: sound, "labels": labels}


def _built(kind: str, name: str, registry: str) -> tuple[nn.Module, dict[str, Tensor], float] | None:
    """Return the model, a batch and the library's loss; None if the model doesn't work with these sizes."""
    import transformers

    make: Any = getattr(transformers, name)
    try:
        config = _tiny(kind, registry)
        with torch.device("meta"):
            if sum(parameter.numel() for parameter in make(copy.deepcopy(config)).parameters()) > MOST:
                return None
        torch.manual_seed(0)
        model = make(config).eval()
        batch = _batch(model, registry)
        with torch.no_grad():
            return model, batch, model(**batch).loss.item()
    except Exception:
        return None


@torch.no_grad()
def _loss(model: Any, inputs: dict[str, Tensor]) -> float:
    head = head_of(model)
    assert head is not None
    given = schema.GivenModel(kind="given")
    objective = build_objective(schema.ObjectiveConfig(), given, DataFacts(1, None), head, aligned=head.shifts)
    prepare = preparation(head, with_labels=isinstance(objective, ModelLoss))
    batch = as_batch(dict(inputs), SAMPLES)
    batch = prepare(batch) if prepare is not None else batch
    loss = objective.loss_sum(model(**batch.inputs), batch).item() / objective.count(batch)
    return loss * SAMPLES if head.summed else loss


@pytest.mark.timeout(900)
@pytest.mark.parametrize("registry", REGISTRIES)
def test_a_loss_is_the_same_as_the_librarys(registry: str) -> None:
    from transformers.models.auto import modeling_auto

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seen, off = set(), []
    for kind, names in getattr(modeling_auto, f"MODEL_FOR_{registry}_MAPPING_NAMES").items():
        for name in [names] if isinstance(names, str) else names:
            built = None if name in seen else _built(kind, name, registry)
            if built is None:
                continue
            seen.add(name)
            model, batch, expected = built
            loss = _loss(model, batch)
            if not abs(loss - expected) <= 1e-5 * abs(expected):
                off.append(f"{name}: {loss}, not {expected}")
    assert off == []
    assert len(seen) >= REGISTRIES[registry], len(seen)

"""Attention masks of transformers models, decided on the host, so that no forward waits for the device.

    batch on the CPU: are all tokens real?   yes --> no mask: attention runs with `is_causal`, on its fastest kernel
                                             no  --> the mask stays, and the library expands it to [B, 1, T, T]

The library (5.x) decides that on the device in each forward. Results are bitwise identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import Batch, Inputs
from lockstep.models.transformers_models import is_transformers_model

_MASK = "attention_mask"
_POSITIONS = "position_ids"
KEEP_APART = frozenset({
    "codegen", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite",
    "granitemoe", "helium", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "stablelm", "starcoder2",
})  # fmt: skip
"""Types of models that see where samples in a row begin, by their positions: tests compare each with lone samples."""
Context = Callable[[], AbstractContextManager[object]]


def refuse_packed(model: nn.Module, key: str, *, divided: bool) -> None:
    """Raise ConfigError for a model that would see several samples in a row as one.

    Args:
        divided: Ranks divide sequences.
    """
    if divided:
        why = "true, but ranks that divide sequences (parallel.context) don't keep the samples in them apart"
        raise ConfigError(Problem("", key, f"{why}; remove one of both"))
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in KEEP_APART or not type(model).__module__.startswith("transformers.models."):
        raise ConfigError(Problem("", key, f"true, but {kind} isn't known to keep samples in a row apart; remove it"))


def decide_masks(
    model: nn.Module, sample: Callable[[], Inputs], *, keeps_masks: bool, packs: bool = False
) -> tuple[bool, Context]:
    """Return whether batches are to pass `without_full_mask`, and what makes the context of each forward.

    Args:
        sample: Returns the inputs of a sample. Positions among them may be of several sequences in a row.
        keeps_masks: Whether something else than the model reads masks.
        packs: Whether training or evaluation data has several samples in a row.
    """
    if not is_transformers_model(model):
        return False, nullcontext
    removed = not keeps_masks and _masks_can_be_removed(model)
    inputs = sample()
    return removed, partial(
        masks_of_host, removed=removed, packed=packs or (isinstance(inputs, Mapping) and _POSITIONS in inputs)
    )


def _masks_can_be_removed(model: nn.Module) -> bool:
    """Return whether the model's forward does the same without a mask as with one of ones.

    True of the library's models; a user's subclass may read the mask itself. Eager attention always needs one.
    """
    if not type(model).__module__.startswith("transformers.models."):
        return False
    return getattr(model.config, "_attn_implementation", "eager") != "eager"


def without_full_mask(batch: Batch) -> Batch:
    """Return a batch on the CPU without its mask if all of its tokens are real."""
    inputs = batch.inputs
    if not isinstance(inputs, Mapping):
        return batch
    mask = inputs.get(_MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not bool(mask.all()):
        return batch
    return replace(batch, inputs={name: value for name, value in inputs.items() if name != _MASK})


@contextmanager
def masks_of_host(*, removed: bool, packed: bool) -> Iterator[None]:
    """Run forwards of transformers models within the block, without a look at the values of masks and positions.

    Args:
        removed: Batches have passed `without_full_mask`, so that a mask has zeros.
        packed: Batches have positions. Otherwise the model makes them, and there is one sequence in a row.
    """
    from transformers import PreTrainedModel, masking_utils

    is_tracing, find = masking_utils.is_tracing, masking_utils.find_packed_sequence_indices
    warn = PreTrainedModel.warn_if_padding_and_no_attention_mask
    if removed:
        masking_utils.is_tracing = lambda *_, **__: True  # as if values were unknown
        PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *_, **__: None
    if not packed:
        masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.is_tracing, masking_utils.find_packed_sequence_indices = is_tracing, find
        PreTrainedModel.warn_if_padding_and_no_attention_mask = warn

"""The heads of transformers models: the tasks they are made for, and how their forward uses labels.

class of the model              kind                    labels of `model(**batch).loss`
...ForCausalLM                  next-token              the input ids, which most losses shift
...ForMaskedLM                  masked-lm               ids at their own positions
...ForConditionalGeneration     seq2seq                 the target text; the decoder's inputs are it, shifted right
...ForSequenceClassification    classification          classes, numbers, or several classes a sample
...ForTokenClassification       token-classification    a class for each position
...ForQuestionAnswering         question-answering      start_positions and end_positions, among the inputs
any other                       model                   passed to the model, which computes the loss
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

from torch import Tensor, nn

from lockstep.core.records import TARGETS, Batch
from lockstep.models.transformers_models import is_transformers_model

Kind = Literal[
    "next-token",
    "masked-lm",
    "seq2seq",
    "classification",
    "token-classification",
    "multiple-choice",
    "question-answering",
    "model",
]
Prepare = Callable[[Batch], Batch]

_KINDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("question-answering", ("QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING")),
    ("token-classification", ("TOKEN_CLASSIFICATION",)),
    ("classification", tuple(f"{kind}_CLASSIFICATION" for kind in ("SEQUENCE", "IMAGE", "AUDIO", "VIDEO"))),
    ("multiple-choice", ("MULTIPLE_CHOICE",)),
    ("seq2seq", ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")),
    ("masked-lm", ("MASKED_LM",)),
    ("next-token", ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")),
)
"""Kinds and the library's registries of classes, in the order of look-up, since a class may be in several."""

_UNSHIFTED = frozenset(
    (
        "BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM",
        "CpmAntForCausalLM", "MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM",
        "PegasusForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM", "XLNetLMHeadModel",
    )
)  # fmt: skip
"""Language models with labels at their own positions; all others shift them."""

_OWN_LOSS = frozenset(("ProphetNetForConditionalGeneration", "ProphetNetForCausalLM"))
"""Models in a registry with a loss that is more than a cross-entropy of their logits."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a transformers model.

    Attributes:
        kind: Kind of its objective; `model`: the loss that its forward returns.
        labels: Kind of its labels, which differs from `kind` if the loss is more than their cross-entropy.
        shifts: Whether labels of next-token are aligned with the input ids, and the loss shifts them.
    """

    model: Any
    kind: Kind
    labels: Kind
    shifts: bool

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def summed(self) -> bool:
        """Return whether the loss that the forward returns is the sum of its samples' losses, not their mean."""
        return _named(self.model, ("CTC",)) and getattr(self.config, "ctc_loss_reduction", "mean") == "sum"

    @property
    def by_samples(self) -> bool:
        """Return whether the loss that the forward returns is a mean over samples."""
        return _named(self.model, ("CTC",))


def head_of(module: nn.Module | None) -> Head | None:
    """Return the head of a transformers model; None for any other model."""
    model: Any = module
    if model is None or not is_transformers_model(model):
        return None
    labels = _kind(model)
    balanced = bool(getattr(model.config, "output_router_logits", False))  # experts have an auxiliary loss
    has_own_loss = balanced or any(name in _OWN_LOSS for name in _names(model))
    shifts = labels == "next-token" and not any(name in _UNSHIFTED for name in _names(model))
    return Head(model, "model" if has_own_loss else labels, labels, shifts)


def preparation(head: Head, *, with_labels: bool) -> Prepare | None:
    """Return what adds labels (for the forward's loss) or the decoder's inputs to a batch; None: neither is needed."""
    if with_labels:
        return _with_labels
    if head.labels != "seq2seq":
        return None
    derive = getattr(head.model, "prepare_decoder_input_ids_from_labels", None)
    return _with_labels if derive is None else partial(_with_decoder_inputs, derive)


def taking_targets(module: nn.Module) -> Prepare | None:
    """Return the function that adds targets to a batch for a forward that takes them; None if it takes none."""
    parameters = list(inspect.signature(module.forward).parameters)
    name = next((name for name in TARGETS if name in parameters), None)
    return None if name is None else partial(_with_targets, name, parameters)


def _with_targets(name: str, parameters: list[str], batch: Batch) -> Batch:
    if batch.targets is None or (isinstance(batch.inputs, Mapping) and name in batch.inputs):
        return batch
    inputs = batch.inputs
    named = inputs if isinstance(inputs, Mapping) else dict(zip(parameters, inputs, strict=False))
    return replace(batch, inputs={**named, name: batch.targets})


def _with_decoder_inputs(derive: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Add the decoder's inputs: the target text, shifted right by the model's own rule."""
    if not isinstance(batch.inputs, Mapping):
        return batch
    inputs = dict(batch.inputs)
    labels = inputs.pop("labels", batch.targets)
    if isinstance(labels, Tensor) and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
        inputs["decoder_input_ids"] = derive(labels)
    return replace(batch, inputs=inputs)


def _with_labels(batch: Batch) -> Batch:
    """Add the targets as labels, so that the model computes its loss, or its decoder's inputs."""
    if batch.targets is None or not isinstance(batch.inputs, Mapping) or "labels" in batch.inputs:
        return batch
    return replace(batch, inputs={**batch.inputs, "labels": batch.targets})


def _kind(model: Any) -> Kind:
    if _named(model, ("CTC",)):
        return "model"
    decodes = bool(getattr(model.config, "is_encoder_decoder", False))
    for kind, registries in _KINDS:
        if not _named(model, registries):
            continue
        if kind == "seq2seq" and not decodes:  # a language model that also takes speech
            return "next-token"
        if kind in ("next-token", "masked-lm") and decodes:
            return "seq2seq"
        return kind
    return "model"


def _named(model: Any, registries: tuple[str, ...]) -> bool:
    return any(name in _registered(registry) for registry in registries for name in _names(model))


def _names(model: Any) -> list[str]:
    names = [kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models")]
    return names or [type(model).__name__]


@cache
def _registered(registry: str) -> Collection[str]:
    from transformers.models.auto import modeling_auto

    entries = getattr(modeling_auto, f"MODEL_FOR_{registry}_MAPPING_NAMES").values()
    return frozenset(name for entry in entries for name in ([entry] if isinstance(entry, str) else entry))

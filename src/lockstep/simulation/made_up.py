"""Batches instead of data that isn't on this machine: the shapes and dtypes that its task has, with made-up values.

task                       inputs                                   targets
causal-lm, masked-lm       input_ids, attention_mask [B, T]         ids [B, T]
seq2seq                    the same                                 ids of the target text [B, T]
sequence-classification    the same                                 classes [B], numbers [B] or [B, outputs]
token-classification       the same                                 classes [B, T]
question-answering         the same, start_ and end_positions [B]   none
multiple-choice            input_ids, attention_mask [B, C, T]      choices [B]
none, with a label         tokens, mask [B, T]                      classes [B]
tokens, packed text        input_ids or tokens [B, T], no mask      the same ids, or the next ones
packed, each for itself    input_ids, position_ids [B, T]           ids [B, T]
pairs, rated answers       two rows for each sample                 the same; rated: also what is desirable [B]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.assembly.sources import task_of
from lockstep.config.schema import CustomData, HuggingFaceData, HuggingFaceModel, Tokens
from lockstep.config.training_sections import PAIRS
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import LANGUAGE_MODEL, Batch, DataFacts
from lockstep.data.sources import check_task
from lockstep.models.heads import head_of

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.data.order import Indices

_NUMBERS = ("regression", "multi_label_classification")
_ENOUGH = 2**20  # samples, for an update of any size
_TARGET = f"{__name__}:MadeUp"


class MadeUp:
    """A source of equal samples; `own`: in the form of Lockstep's own models.

    Args:
        outputs: Numbers that are a sample's target; 0: its class; None: ids.
        rows: Of a batch, for each sample.
        rated: Their answers are desirable or not.
        tags: The targets are classes of the tokens.
        spans: The targets are positions, among the inputs.
        choices: Rows of a sample; 0: it has one.
    """

    draws = False
    fingerprint = "made up"

    def __init__(
        self,
        samples: int,
        length: int,
        vocabulary: int | None,
        own: bool,
        masked: bool,
        outputs: int | None = None,
        *,
        positions: bool = False,
        rows: int = 1,
        rated: bool = False,
        tags: bool = False,
        spans: bool = False,
        choices: int = 0,
    ) -> None:
        self._tags, self._spans, self._choices = tags, spans, choices
        self._length = length
        self._ids = vocabulary or 2
        self._own = own
        self._masked = masked
        self._positions = positions
        self._outputs = outputs
        self._rows = rows
        self._rated = rated
        self.facts = DataFacts(samples, length, vocabulary=vocabulary, pairs=rows > 1)

    def fetch(self, indices: Indices) -> Batch:
        samples = len(indices) * self._rows
        ids = (torch.arange(self._length + 1) % self._ids).repeat(samples, 1)
        inputs, following = ids[:, :-1].clone(), ids[:, 1:].clone()
        inputs_by_name = {"tokens" if self._own else "input_ids": inputs}
        if self._masked:
            mask = torch.ones_like(inputs)
            inputs_by_name |= {"mask": mask.bool()} if self._own else {"attention_mask": mask}
        if self._positions:
            inputs_by_name["position_ids"] = torch.arange(self._length).repeat(samples, 1)
        targets: Any = following if self._own else torch.zeros_like(inputs) if self._tags else inputs.clone()
        if self._rated:
            targets = {"answers": targets, "desirable": torch.ones(len(indices), dtype=torch.bool)}
        if self._choices:
            inputs_by_name = {name: x[:, None].repeat(1, self._choices, 1) for name, x in inputs_by_name.items()}
        if self._spans:
            inputs_by_name |= dict.fromkeys(("start_positions", "end_positions"), inputs.new_zeros(samples))
            targets = None
        if self._outputs is not None:
            targets = self._classes_or_numbers(samples)
        return Batch(inputs_by_name, targets, len(indices), samples * self._length)

    def _classes_or_numbers(self, samples: int) -> Tensor:
        assert self._outputs is not None, "the targets are no ids"
        if self._outputs == 0:
            return torch.zeros(samples, dtype=torch.int64)
        return torch.zeros((samples, self._outputs)[: 1 + (self._outputs > 1)])


def made_up_data(config: Config, facts: DataFacts) -> CustomData:
    """Return a section of made-up data with the batches of `data.train`."""
    train, task = config.data.train, task_of(config, None)[0]
    check_task(train, task)
    own = task in (None, LANGUAGE_MODEL)
    vocabulary = _stated_vocabulary(config) or facts.vocabulary
    arguments: dict[str, Any] = {"samples": facts.samples, "vocabulary": vocabulary, "own": own}
    match train:
        case Tokens(length=length) | HuggingFaceData(packed=True | "whole", max_length=length):
            apart = isinstance(train, HuggingFaceData) and train.keeps_apart
            arguments |= {"length": length, "masked": False, "positions": apart}
        case HuggingFaceData(image=None, max_length=length, label=label, text_pair=pair) if (
            task != "multiple-choice" or isinstance(pair, tuple)
        ):
            arguments |= {"tags": task == "token-classification", "spans": task == "question-answering"}
            arguments["choices"] = len(pair) if isinstance(pair, tuple) else 0
            single = ("sequence-classification", "multiple-choice")
            has_classes = task in single or (task is None and label is not None)
            paired, rated = train.rejected is not None, train.desirable is not None
            arguments |= {"length": length, "masked": not own or has_classes}
            arguments |= {"rows": 1 + (paired or rated), "rated": rated}
            if has_classes:
                arguments["outputs"] = _outputs(config)
        case _:
            why = "is not on this machine, and its batches are not known in advance"
            raise ConfigError(Problem("", "data.train", f"{why}; fetch it first (lockstep data fetch)"))
    return CustomData(kind="custom", target=_TARGET, arguments=arguments)


def made_up_texts(config: Config, model: object, length: int) -> MadeUp:
    """Return texts of `length` tokens for a language model, the config's or a module that was passed in Python."""
    head = head_of(model) if isinstance(model, nn.Module) else None
    own = config.model.kind == "transformer"
    if head is None and not own and config.model.kind != "huggingface":
        why = "is known for language models of transformers and of Lockstep only; pass train_dataset=[sample] * 64"
        raise ConfigError(Problem("", "length", why))
    vocabulary = _stated_vocabulary(config) or getattr(getattr(head, "config", None), "vocab_size", None)
    rows, rated = 1 + (config.objective.kind in (*PAIRS, "kto")), config.objective.kind == "kto"
    return MadeUp(_ENOUGH, length, vocabulary, own, masked=False, rows=rows, rated=rated)


def _outputs(config: Config) -> int:
    if not isinstance(config.model, HuggingFaceModel):
        return 0
    keys = config.model.architecture or {}
    numbers = keys.get("problem_type") in _NUMBERS
    return int(config.model.num_classes or keys.get("num_labels") or 1) if numbers else 0


def _stated_vocabulary(config: Config) -> int | None:
    model: Any = config.model
    if isinstance(model, HuggingFaceModel):
        size = (model.architecture or {}).get("vocab_size")
        return size if isinstance(size, int) else None
    return getattr(model, "vocabulary", None)

"""Shows the samples of the first step, as a run fetches them, for `lockstep data show`.

sample 17: 57 tokens, 21 targets, 12 of padding
<|im_start|>user Hi<|im_end|><|im_start|>assistant [[Hello!<|im_end|>]]           targets are marked

sample 3: 2 packed, 120 tokens, 40 targets, 8 of padding                          packed: each text with its row
row 18: 57 tokens, 21 targets
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.assembly.sources import open_sources
from lockstep.core.errors import ConfigError
from lockstep.core.hub import at_revision
from lockstep.core.progress import Progress
from lockstep.core.records import IGNORED
from lockstep.data.loader import TrainingLoader
from lockstep.data.rendered import RenderedSource
from lockstep.data.sources import PreparedSource, ReferencedSource
from lockstep.loop.text import Decode, codec_of
from lockstep.plan.batch import plan_batch

if TYPE_CHECKING:
    from lockstep.assembly.user_objects import UserObjects
    from lockstep.config.schema import Config
    from lockstep.core.records import Batch

_SHIFTED = "tokens"
_IDS = ("input_ids", _SHIFTED)
_POSITIONS = "position_ids"
Part = tuple[str, bool]
"""A piece of text, and whether its tokens are targets."""


def shown_data(config: Config, given: UserObjects, samples: int) -> Iterator[list[Part]]:
    """Yield lines, as parts, of the first `samples` and of the first step. Raises ConfigError."""
    source = open_sources(config.with_values(data={"evaluation": {}}), given)[0]
    model, opened, decode, tokenizer, named = config.model, source, None, None, None
    if model.kind == "huggingface" and config.data.train.kind == "custom":
        tokenizer = at_revision(model.pretrained, model.revision)
    with suppress(ConfigError):  # it isn't known
        decode = codec_of(model, config.data.train, tokenizer, answers=False).whole
    if model.kind == "huggingface" and model.task == "token-classification":
        names = source.facts.class_names
        named = lambda tags: " ".join(names[tag] if names else str(tag) for tag in tags)  # noqa: E731
    shifts = model.kind == "huggingface" and model.task == "causal-lm"
    while isinstance(opened, PreparedSource | ReferencedSource):
        opened = opened.source
    size = min(config.batch.global_size, source.facts.samples)
    plan = plan_batch(size, config.batch.micro_size, 1)
    loader = TrainingLoader(source, plan, 0, config.run.seed, config.data, torch.device("cpu"), lambda batch: 0.0)
    progress = Progress()
    batches = loader.micro_batches(progress)
    numbers, tokens, places, targets = loader.own_samples(progress), 0, 0, 0
    for indices in numbers:
        batch, rated = _rated(next(batches))
        if shifts and isinstance(batch.targets, Tensor):  # the first id of a text isn't predicted
            batch = replace(batch, targets=batch.targets.index_fill(1, torch.tensor([0]), IGNORED))
        batch = _with_span(batch)
        tokens, places = tokens + batch.tokens, places + _places(batch)
        targets += _num_targets(batch.targets)
        for number, index in enumerate(indices[: max(samples, 0)]):
            rows = opened.rows_of(index) if isinstance(opened, RenderedSource) else []
            parts = (", chosen", ", rejected") if source.facts.pairs else ("",)
            if rated:
                parts = (", desirable" if rated[number] else ", undesirable", ", with another's answer")
            for row, part in enumerate(parts, number * len(parts)):
                yield from _sample(batch, row, f"sample {index:,}", part, rows, decode, named)
        samples -= len(indices)
    loader.close()
    yield _line(f"{config.data.train.kind}: {source.facts.samples:,} samples")
    yield from map(_line, opened.changes if isinstance(opened, RenderedSource) else ())
    yield _line(f"first step: {size:,} samples, {_sizes(tokens, places, targets, plan.micro_size)}")


def _rated(batch: Batch) -> tuple[Batch, list[bool]]:
    """Return a batch with its answers as targets, and which of them are desirable; empty: they aren't rated."""
    if not isinstance(batch.targets, Mapping) or "desirable" not in batch.targets:
        return batch, []
    return replace(batch, targets=batch.targets["answers"]), batch.targets["desirable"].tolist()


def _sizes(tokens: int, places: int, targets: int, micro_size: int) -> str:
    if not places:
        return f"{targets:,} targets"
    padding = f"{1 - tokens / places:.1%} padding in micro-batches of {micro_size}"
    return f"{tokens:,} tokens, {targets:,} targets, {padding}"


def _with_span(batch: Batch) -> Batch:
    """Return the batch with the tokens of answers as targets, if it has answers."""
    inputs = _named(batch.inputs)
    if not {"start_positions", "input_ids"} <= inputs.keys():
        return batch
    places = torch.arange(inputs["input_ids"].shape[1])
    inside = (places >= inputs["start_positions"][:, None]) & (places <= inputs["end_positions"][:, None])
    return replace(batch, targets=torch.where(inside, inputs["input_ids"], IGNORED))


def _sample(
    batch: Batch, row: int, name: str, part: str, rows: list[int], decode: Decode | None, named: Decode | None
) -> Iterator[list[Part]]:
    """Yield the lines of a sample; `rows` of the dataset, if they are known: several if they are packed."""
    inputs = _named(batch.inputs)
    packed = _POSITIONS in inputs and bool(rows)
    name += (f" (row {rows[0] + 1:,})" if rows and not packed else "") + part
    ids = next((key for key in _IDS if _is_ids(inputs.get(key))), None)
    if ids is None or decode is None:
        yield _line(f"{name}: " + ", ".join(f"{key} {_described(value[row])}" for key, value in inputs.items()))
        yield from _target(batch.targets, row)
        return
    values = inputs[ids][row]
    mask = inputs.get("attention_mask", inputs.get("mask"))
    size = len(values) if mask is None else int(mask[row].sum())
    targets = batch.targets[row] if isinstance(batch.targets, Tensor) else None
    if targets is None or targets.shape != values.shape:
        yield _line(f"{name}: {size:,} tokens")
        yield _line(decode(values[:size].tolist()))
        yield from _target(batch.targets, row)
        return
    marks = targets != IGNORED
    if ids == _SHIFTED:  # the target of a place is the next id
        marks = torch.cat([torch.zeros(1, dtype=torch.bool), marks[:-1]])
        size = int(marks.nonzero().max()) + 1 if mask is None and marks.any() else size
    borders = [*(inputs[_POSITIONS][row] == 0).nonzero().flatten().tolist(), len(values)] if packed else []
    size = borders[len(rows)] if packed else size
    how = f"{len(rows):,} packed, " if packed else ""
    yield _line(f"{name}: {how}{size:,} tokens, {_num_targets(targets):,} targets, {len(values) - size:,} of padding")
    for number, begin, end in zip(rows, borders, borders[1:], strict=False) if packed else [(0, 0, size)]:
        if packed:
            yield _line(f"row {number + 1:,}: {end - begin:,} tokens, {int(marks[begin:end].sum()):,} targets")
        pairs = zip(values[begin:end].tolist(), marks[begin:end].tolist(), strict=True)
        parts = groupby(pairs, key=lambda pair: bool(pair[1]))
        yield [(decode([token for token, _ in group]), marked) for marked, group in parts]
    if ids != _SHIFTED and (named or not torch.equal(values[marks], targets[marks])):  # tags, or some are masked
        yield _line(f"targets: {(named or decode)(targets[marks].tolist())}")


def _target(targets: Any, row: int) -> Iterator[list[Part]]:
    for name, value in _named(targets).items() if targets is not None else ():
        yield [(f"  {name or 'target'}: ", False), (_described(value[row]), True)]


def _described(value: Any) -> str:
    """Return the shape, dtype and range of a tensor; a single number, or a few, as they are."""
    if not isinstance(value, Tensor):
        return repr(value)[:80]
    if value.numel() <= 8:
        return str(value.tolist())
    shape, dtype = " x ".join(map(str, value.shape)), str(value.dtype).removeprefix("torch.")
    return f"[{shape}] {dtype} from {value.min().item():.4g} to {value.max().item():.4g}"


def _named(values: Any) -> Mapping[str, Any]:
    if isinstance(values, Mapping):
        return values
    return {str(n): value for n, value in enumerate(values)} if isinstance(values, tuple) else {"": values}


def _is_ids(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 2


def _places(batch: Batch) -> int:
    inputs = _named(batch.inputs)
    return next((inputs[key].numel() for key in _IDS if _is_ids(inputs.get(key))), 0)


def _num_targets(targets: Any) -> int:
    return sum(int((each != IGNORED).sum()) for each in _named(targets).values() if isinstance(each, Tensor))


def _line(text: str) -> list[Part]:
    return [(text, False)]

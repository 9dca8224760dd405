"""A checkpoint that DeepSpeed wrote, assembled to whole tensors with names.

stages 1, 2    the parameters of a group end to end, with padding | sharded as a whole: a stretch for each rank
stage 3        each parameter, with padding, sharded by itself    | a rank's shards end to end
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.interop.zero_files import MOMENTS, ModelFile, OptimizerFile, read_files, tag_folder
from lockstep.models.weight_files import check_plain, readable, unwrapped

_KNOWN_KEYS = (
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "optimizer",
)  # fmt: skip
"""Keys of the model's file that are read, or reported under another name."""
_MAX_UNRECORDED_PADDING = 2  # elements per rank: DeepSpeed's padding of a group, where a file doesn't record it


@dataclass(frozen=True, slots=True)
class ZeroCheckpoint:
    """The contents of a checkpoint.

    Attributes:
        place: The tag's folder.
        stage: The ZeRO stage.
        ranks: The number of ranks that it was sharded over.
        tensors: Whole fp32 values of trained parameters; buffers and frozen parameters as they are; tied parameters
            under each of their names.
        skipped: Other contents of the files, by key.
        moments: Adam's moments, if requested: by entry and the parameter's name.
        steps: Steps of the optimizer.
        global_steps, global_samples: How far the engine was; None: not recorded.
    """

    place: Path
    stage: int
    ranks: int
    tensors: Mapping[str, Tensor]
    skipped: tuple[str, ...]
    moments: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    steps: int = 0
    global_steps: int | None = None
    global_samples: int | None = None


def read_zero(place: Path, *, moments: bool = False) -> ZeroCheckpoint:
    """Read a checkpoint.

    Args:
        place: The folder of a tag, or the one above, whose `latest` names the tag.
        moments: Read Adam's moments, too.

    Raises:
        ConfigError: Files are missing, damaged, in another format, or name unknown classes; or `moments` of another
            optimizer than Adam or AdamW.
    """
    try:
        return _read(tag_folder(place), moments)
    except OSError as error:
        raise ConfigError(f"{error.filename or place} can't be read: {error.strerror or error}") from error


def _read(folder: Path, moments: bool) -> ZeroCheckpoint:
    optimizers, models = read_files(folder)
    if not optimizers:
        if moments:
            raise ConfigError(f"{folder} has no *_optim_states.pt; optimizer state is read from ZeRO stages 1, 2 and 3")
        if models[0].contents.get("param_shapes") is not None:
            raise ConfigError(
                f"{folder} has no *_optim_states.pt, where ZeRO keeps the fp32 values: was the save interrupted, or "
                f"only a part of it copied? Copy all files of the folder"
            )
        return _with_model(folder, 0, 1, models[0], {})
    first = optimizers[0]
    assemble = _by_parameter if first.stage == 3 else _by_group
    trained = assemble(optimizers, models[0], [optimizer.values() for optimizer in optimizers])
    frozen = _frozen(models[: first.num_ranks] if first.stage == 3 else models[:1])
    checkpoint = _with_model(folder, first.stage, first.num_ranks, models[0], {**trained, **frozen})
    if not moments:
        return checkpoint
    entries = {
        entry: unwrapped(assemble(optimizers, models[0], [optimizer.moments(entry) for optimizer in optimizers]))
        for entry in MOMENTS
    }
    steps = {step for optimizer in optimizers for step in optimizer.steps()}
    if len(steps) != 1:
        numbers = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"{folder}: its ranks or groups have made different numbers of steps: {numbers}")
    return replace(checkpoint, moments=entries, steps=steps.pop())


def _with_model(folder: Path, stage: int, ranks: int, model: ModelFile, values: Mapping[str, Tensor]) -> ZeroCheckpoint:
    """Return the checkpoint with these values and whatever else the model's file holds."""
    tensors, skipped = dict(values), []
    tied = model.tied()
    for name, tensor in model.module().items():
        if name in tensors:
            continue
        if tied.get(name) in tensors:
            tensors[name] = tensors[tied[name]]
        elif tensor.numel() == 0 and stage == 3 and name not in model.buffers():
            skipped.append(f"{readable(name)} (without values)")
        else:
            check_plain(model.file, name, tensor)
            tensors[name] = tensor.detach()
    others = [
        readable(str(key)) for key, value in model.contents.items() if key not in _KNOWN_KEYS and value is not None
    ]
    return ZeroCheckpoint(
        folder,
        stage,
        ranks,
        unwrapped(tensors),
        (*skipped, "the optimizer's state", *others),
        global_steps=model.count("global_steps"),
        global_samples=model.count("global_samples"),
    )


def _by_group(
    optimizers: Sequence[OptimizerFile], model: ModelFile, values: Sequence[Sequence[Tensor]]
) -> dict[str, Tensor]:
    """Assemble parameters of stages 1 and 2."""
    groups, tensors = model.shapes(), {}
    for optimizer, shards in zip(optimizers, values, strict=True):
        if len(shards) != len(groups):
            raise ConfigError(
                f"{optimizer.file} has {len(shards)} groups of values, but {model.file.name} has {len(groups)}"
            )
    for group, shapes in enumerate(groups):
        shards = [of_rank[group] for of_rank in values]
        start = 0
        for (name, shape), padding in zip(shapes.items(), optimizers[0].paddings(group, len(shapes)), strict=True):
            numel = math.prod(shape)
            _check_places(optimizers, group, name, shards, start, numel)
            tensors[name] = _joined(_elements(shards, start, numel), shape, model.file, name)
            start += numel + padding
        total = sum(shard.numel() for shard in shards)
        paddings = [optimizer.final_padding(group) for optimizer in optimizers]
        known = [padding for padding in paddings if padding is not None]
        most = sum(known) if len(known) == len(paddings) else _MAX_UNRECORDED_PADDING * len(paddings)
        if not start <= total <= start + most:
            raise _wrong_total(model.file, f"of group {group}", start, total)
    return tensors


def _check_places(
    optimizers: Sequence[OptimizerFile], group: int, name: str, shards: Sequence[Tensor], start: int, numel: int
) -> None:
    """Raise ConfigError if a rank's file records another place for its elements of the parameter."""
    shard_start = 0
    for optimizer, shard in zip(optimizers, shards, strict=True):
        shard_stop = shard_start + shard.numel()
        first, last = max(start, shard_start), min(start + numel, shard_stop)
        if first < last:
            optimizer.check_place(group, name, first - shard_start, last - first)
        shard_start = shard_stop


def _by_parameter(
    optimizers: Sequence[OptimizerFile], model: ModelFile, values: Sequence[Sequence[Tensor]]
) -> dict[str, Tensor]:
    """Assemble parameters of stage 3."""
    tensors, start = {}, 0
    for name, shape in ((name, shape) for group in model.shapes() for name, shape in group.items()):
        per_rank = -(-math.prod(shape) // len(optimizers))
        pieces = [piece for shards in values for piece in _elements(shards, start, per_rank)]
        tensors[name] = _joined(pieces, shape, model.file, name)
        start += per_rank
    for optimizer, shards in zip(optimizers, values, strict=True):
        total = sum(shard.numel() for shard in shards)
        if total != start:
            raise _wrong_total(optimizer.file, "of this rank", start, total)
    return tensors


def _frozen(models: Sequence[ModelFile]) -> dict[str, Tensor]:
    """Assemble frozen parameters, which the model's files hold; at stage 3 in shards."""
    files = [(model.file, *model.frozen()) for model in models]
    tensors = {}
    for name, shape in files[0][1].items():
        pieces = []
        for file, _, shards in files:
            if name not in shards:
                raise ConfigError(f"{file} isn't in DeepSpeed's format: it lacks {readable(name)}")
            check_plain(file, name, shards[name])
            pieces.append(shards[name].detach().flatten())
        tensors[name] = _joined(pieces, shape, files[0][0], name)
    return tensors


def _elements(tensors: Sequence[Tensor], start: int, numel: int) -> Iterator[Tensor]:
    """Yield a range of the elements of tensors that are stored end to end; fewer, if they end before it."""
    for tensor in tensors:
        first, last = max(start, 0), min(start + numel, tensor.numel())
        if first < last:
            yield tensor[first:last]
        start -= tensor.numel()


def _joined(pieces: Iterable[Tensor], shape: tuple[int, ...], file: Path, name: str) -> Tensor:
    flat, numel = list(pieces), math.prod(shape)
    available = sum(piece.numel() for piece in flat)
    if available < numel:
        values = f"only {available:,} of its {numel:,} values exist"
        raise ConfigError(f"{file}: {readable(name)} is {list(shape)}, but {values}")
    return torch.cat(flat)[:numel].view(shape) if flat else torch.empty(shape)


def _wrong_total(file: Path, whose: str, expected: int, total: int) -> ConfigError:
    return ConfigError(
        f"{file}: the shapes {whose} add up to {expected:,} values, but there are {total:,}: the files are of "
        f"different saves, or of a DeepSpeed version with another layout"
    )

"""A checkpoint that DeepSpeed itself has written, as named tensors. Reading it executes nothing and needs no DeepSpeed.

    FOLDER/latest                                         the tag to take
    FOLDER/TAG/mp_rank_00_model_states.pt                 names, shapes, buffers, frozen parameters: stages 0, 1, 2
               zero_pp_rank_N_mp_rank_00_model_states.pt  the same, a file a rank: stage 3
               zero_pp_rank_N_mp_rank_00_optim_states.pt  rank N's part of the fp32 values (bf16_zero_pp_...: so too)

    stages 1, 2    a group's parameters end to end, filled up at the end     | cut into one stretch a rank
    stage 3        each parameter filled up and cut into one stretch a rank  | a rank's stretches end to end

The files pickle a few records of DeepSpeed's beside tensors. Those are named in STAND_INS, and what is made in their
place holds numbers at most; a file that asks for anything else is refused, with the name of what it asks for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.models.weight_files import check_plain, holds_weights, read_torch, readable, unwrapped

_LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>[0-9]{1,6})_)?mp_rank_(?P<tensor>[0-9]{2,6})_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>[0-9]{1,6})_mp_rank_(?P<tensor>[0-9]{2,6})_optim_states\.pt")
_OF_OTHERS = re.compile(r"(?:layer_[0-9]|expp_rank_|.*expert_).*[-_](?:model|optim)_states\.pt")
_WAY_OUT = (
    "These of DeepSpeed's are known, and replaced by records without code: {known}. Where you trust the checkpoint, "
    "DeepSpeed's own program makes weights of it, which `lockstep ckpt import` reads:\n"
    "  python -m deepspeed.utils.zero_to_fp32 {folder} WEIGHTS --safe_serialization -t {tag}"
)
_OWN = (
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "optimizer",
)  # fmt: skip
"""What is taken from the model's file, or is told of apart from its other keys."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_DIVIDED = "ds_zero_partition_groups"
_Kind = TypeVar("_Kind")
_PERHAPS_FILLED = 2  # elements a rank: what DeepSpeed fills groups up to, where a file doesn't say by how many


# --- stand-ins ----------------------------------------------------------------------------------------------------


class Forgotten:
    """In place of a record that nobody needs: forgets what the file says of it."""

    __slots__ = ()

    def __new__(cls, *said: object) -> Forgotten:
        return super().__new__(cls)

    def __init__(self, *said: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class Number(int):
    """In place of a kind of DeepSpeed's with a number."""

    __slots__ = ()


class Stretch:
    """In place of a record of where a part of a parameter lies.

    Attributes:
        start, numel: elements, of a rank's stretch of the group; -1: the file doesn't say.
    """

    __slots__ = ("numel", "start")

    def __init__(self) -> None:
        self.start = self.numel = -1

    def __setstate__(self, state: object) -> None:
        said = state if isinstance(state, Mapping) else {}
        self.start, self.numel = (
            value if isinstance(value := said.get(key), int) else -1 for key in ("start", "numel")
        )


STAND_INS: Mapping[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Forgotten,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Forgotten,
    "deepspeed.runtime.zero.config.ZeroStageEnum": Number,
    "deepspeed.utils.tensor_fragment.fragment_address": Stretch,
}
"""All that a file may name besides tensors."""


# --- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ZeroCheckpoint:
    """Attributes:
    place: the tag's folder.
    stage: of ZeRO.
    ranks: that it was divided by.
    tensors: fp32 values of what was trained, whole; buffers and frozen parameters as they are; tied ones under each
        of their names.
    skipped: what else the files hold, by key.
    moments: where they were asked for: by what they are, and the parameter's name.
    steps: that the optimizer has made.
    """

    place: Path
    stage: int
    ranks: int
    tensors: Mapping[str, Tensor]
    skipped: tuple[str, ...]
    moments: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    steps: int = 0


def is_zero(place: Path) -> bool:
    """Whether it looks like DeepSpeed's: the folder that was given to `save_checkpoint`, or a tag's in it."""
    if not place.is_dir():
        return False
    if _is_tag(place):
        return True
    # a folder of transformers' Trainer has both
    return (place / _LATEST).is_file() and (not holds_weights(place) or any(map(_is_tag, place.iterdir())))


def read_zero(place: Path, *, moments: bool = False) -> ZeroCheckpoint:
    """Args:
        place: the folder of a tag, or the one above, whose `latest` says which.
        moments: read Adam's too.

    Raises:
        ConfigError: files are missing, damaged, not what they should be, or ask for code to be run; or the moments of
            another optimizer than Adam or AdamW are asked for.
    """
    try:
        return _read(_tag(place), moments)
    except OSError as error:
        raise ConfigError(f"{error.filename or place} can't be read: {error.strerror or error}") from error


def _read(folder: Path, moments: bool) -> ZeroCheckpoint:
    _refuse_what_is_not_data_parallel(folder)
    parts = [_Part(file, _mapping(file, _load(file), "optimizer_state_dict")) for file in _rank_files(folder, _OPTIM)]
    if not parts:
        if moments:
            raise ConfigError(f"{folder} has no *_optim_states.pt: the optimizer's state is taken from ZeRO 1, 2 and 3")
        return _undivided(folder)
    count = parts[0].count
    for part in parts:
        if part.count != count or part.stage != parts[0].stage:
            raise ConfigError(f"{part.file} and {parts[0].file.name} are of different saves: {part} and {parts[0]}")
        if _DIVIDED in part.found:
            raise ConfigError(f"{part.file}: parameters are divided in groups of experts, which can't be imported")
    _refuse_other_ranks([part.file for part in parts], count, _OPTIM)
    stage3 = parts[0].stage == 3
    models = [_Model(file, _load(file)) for file in _rank_files(folder, _MODEL)]
    if not models:
        raise ConfigError(f"{folder} has the ranks' parts but no *mp_rank_00_model_states.pt, which says what they are")
    if stage3:
        _refuse_other_ranks([model.file for model in models], count, _MODEL)
    put_together = _by_parameter if stage3 else _by_group
    trained = put_together(parts, models[0], [part.flats for part in parts])
    frozen = _frozen(models, count if stage3 else 1)
    found = _named(folder, parts[0].stage, count, models[0], {**trained, **frozen})
    if not moments:
        return found
    entries = {
        entry: unwrapped(put_together(parts, models[0], [part.moments(entry) for part in parts])) for entry in _MOMENTS
    }
    return replace(found, moments=entries, steps=_steps(parts))


def _steps(parts: Sequence[_Part]) -> int:
    steps = {step for part in parts for step in part.steps}
    if len(steps) != 1:
        said = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"{parts[0].file.parent}: its ranks or groups have made different numbers of steps: {said}")
    return steps.pop()


def _undivided(folder: Path) -> ZeroCheckpoint:
    """Stage 0: the model's own tensors, as they are."""
    files = _rank_files(folder, _MODEL)
    model = _Model(files[0], _load(files[0]))
    if model.found.get("param_shapes") is not None:
        raise ConfigError(
            f"{folder} has no *_optim_states.pt, where ZeRO keeps the fp32 values: was the save cut short, or was only "
            f"a part of it copied? Copy all files of the folder"
        )
    return _named(folder, 0, 1, model, {})


def _named(folder: Path, stage: int, ranks: int, model: _Model, taken: Mapping[str, Tensor]) -> ZeroCheckpoint:
    """With all that the model's file holds itself."""
    tensors, empty = dict(taken), []
    tied = model.tied
    for name, tensor in model.module.items():
        if name in tensors:
            continue
        if tied.get(name) in tensors:
            tensors[name] = tensors[tied[name]]
        elif tensor.numel() == 0 and stage == 3 and name not in model.buffers:
            empty.append(readable(name))
        else:
            check_plain(model.file, name, tensor)
            tensors[name] = tensor.detach()
    others = [readable(str(key)) for key, value in model.found.items() if key not in _OWN and value is not None]
    skipped = [f"{name} (of which there are no values)" for name in empty]
    return ZeroCheckpoint(folder, stage, ranks, unwrapped(tensors), (*skipped, "the optimizer's state", *others))


# --- which files --------------------------------------------------------------------------------------------------


def _tag(place: Path) -> Path:
    latest = place / _LATEST
    if not latest.is_file():
        return place
    with latest.open("rb") as file:
        tag = file.read(4096).decode(errors="replace").strip()
    if tag in ("", ".", "..") or Path(tag).name != tag or not tag.isprintable():
        raise ConfigError(f"{latest} doesn't name a folder beside it: {tag!r}")
    folder = place / tag
    if _is_tag(folder):
        return folder
    there = sorted(entry.name for entry in place.iterdir() if _is_tag(entry))
    others = f"give one of {', '.join(map(readable, there))} by its name" if there else "no other is there either"
    what = "has no checkpoint of DeepSpeed's in it" if folder.is_dir() else "isn't there"
    raise ConfigError(f"{latest} names {tag}, and {folder} {what}; {others}")


def _is_tag(folder: Path) -> bool:
    return folder.is_dir() and any(_files(folder, _MODEL) or _files(folder, _OPTIM))


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [entry for entry in folder.iterdir() if pattern.fullmatch(entry.name)]


def _rank(file: Path, pattern: re.Pattern[str]) -> int:
    """0 where a file is of all."""
    return int(cast("re.Match[str]", pattern.fullmatch(file.name))["rank"] or 0)


def _rank_files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """In the order of their ranks."""
    files = sorted(_files(folder, pattern), key=lambda file: _rank(file, pattern))
    for file in files:
        twin = next((one for one in files if one != file and _rank(one, pattern) == _rank(file, pattern)), None)
        if twin is not None:
            raise ConfigError(f"{file} and {twin.name} are both rank {_rank(file, pattern)}'s: of which save?")
    return files


def _refuse_what_is_not_data_parallel(folder: Path) -> None:
    for pattern in (_MODEL, _OPTIM):
        for file in _files(folder, pattern):
            if int(cast("re.Match[str]", pattern.fullmatch(file.name))["tensor"]) > 0:
                raise ConfigError(f"{file}: tensor-parallel checkpoints (mp_rank above 00) can't be imported")
    other = next(iter(_files(folder, _OF_OTHERS)), None)
    if other is not None:
        raise ConfigError(f"{other}: checkpoints of DeepSpeed's pipelines and experts can't be imported")


def _refuse_other_ranks(files: Sequence[Path], count: int, pattern: re.Pattern[str]) -> None:
    there = {_rank(file, pattern) for file in files}
    lost = [rank for rank in range(count) if rank not in there]
    if lost:
        name = re.sub(r"rank_[0-9]+_mp", f"rank_{lost[0]}_mp", files[0].name, count=1)
        more = f" and those of {len(lost) - 1} more ranks" if len(lost) > 1 else ""
        raise ConfigError(
            f"{files[0].parent} lacks {name}{more}: it was saved by {count} ranks, and each has written a part. "
            f"Copy them from the disks of their hosts"
        )
    if len(there) > count:
        raise ConfigError(
            f"{files[0].parent} was saved by {count} ranks but has files of {len(there)}: those from rank {count} on "
            f"are left over from another save; move them away"
        )


def _load(file: Path) -> Mapping[str, Any]:
    known = ", ".join(name.removeprefix("deepspeed.") for name in STAND_INS)
    way_out = _WAY_OUT.format(known=known, folder=file.parent.parent, tag=file.parent.name)
    return _of_kind(file, "its contents", read_torch(file, STAND_INS, way_out), dict)


# --- what they say ------------------------------------------------------------------------------------------------


def _of_kind(file: Path, key: str, value: object, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, kind):
        raise ConfigError(f"{file} is not as DeepSpeed writes it: {key} is a {type(value).__name__}")
    return value


def _mapping(file: Path, found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return _of_kind(file, key, found.get(key), dict)


def _sequence(file: Path, found: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = found.get(key)
    return cast("Sequence[Any]", value) if isinstance(value, tuple) else _of_kind(file, key, value, list)


def _whole_number(file: Path, key: str, value: object) -> int:
    number = _of_kind(file, key, value, int)
    if not 0 <= number < 2**48:
        raise ConfigError(f"{file} is not as DeepSpeed writes it: {key} is {number}")
    return number


def _shapes(file: Path, key: str, value: object) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, shape in _of_kind(file, key, value, dict).items():
        dims = _of_kind(file, f"{key} of {readable(str(name))}", shape, tuple)
        found[_of_kind(file, key, name, str)] = tuple(_whole_number(file, key, dim) for dim in dims)
    return found


def _tensors(file: Path, key: str, value: object) -> dict[str, Tensor]:
    return {
        _of_kind(file, key, name, str): _of_kind(file, f"{key} of {readable(str(name))}", tensor, Tensor)
        for name, tensor in _of_kind(file, key, value, dict).items()
    }


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's file of optimizer state.

    Attributes:
        found: what is under its one key.
    """

    file: Path
    found: Mapping[str, Any]

    def __str__(self) -> str:
        return f"stage {self.stage} on {self.count} ranks"

    @property
    def stage(self) -> int:
        """1 where DeepSpeed doesn't write it: its optimizer for bf16 is one of stage 1."""
        if "fp32_flat_groups" in self.found:
            return 3
        if "single_partition_of_fp32_groups" not in self.found:
            raise ConfigError(f"{self.file} has no fp32 values of ZeRO's: {', '.join(map(str, self.found))}")
        return _whole_number(self.file, "zero_stage", self.found.get("zero_stage", 1))

    @property
    def count(self) -> int:
        """Ranks."""
        said = self.found.get("partition_count")
        counts = said if isinstance(said, list) and said else [said]
        if len(set(map(str, counts))) > 1:
            raise ConfigError(f"{self.file}: its groups are divided by different ranks, which can't be imported")
        return _whole_number(self.file, "partition_count", counts[0])

    @property
    def flats(self) -> list[Tensor]:
        """This rank's fp32 values: one a group; at stage 3 one or more."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return [self._flat(key, tensor) for tensor in _sequence(self.file, self.found, key)]

    def moments(self, entry: str) -> list[Tensor]:
        """As `flats`."""
        found = []
        for state in self._states:
            others = sorted(str(key) for key in state if key not in ("step", *_MOMENTS))
            if others or entry not in state:
                keys = ", ".join(map(readable, map(str, state))) or "nothing"
                raise ConfigError(f"{self.file}: its optimizer is not Adam or AdamW: it keeps {keys}")
            found.append(self._flat(entry, state[entry]))
        return found

    @property
    def steps(self) -> set[int]:
        """That the optimizer has made; one number, unless something is wrong."""
        said = [state["step"] for state in self._states if "step" in state]
        groups = self._optimizer.get("param_groups") if isinstance(self._optimizer, dict) else None
        if not said and isinstance(groups, list):
            said = [group["step"] for group in groups if isinstance(group, dict) and "step" in group]
        if not said and "base_optimizer_state_step" in self.found:
            said = [self.found["base_optimizer_state_step"]]
        plain = [step.item() if isinstance(step, Tensor) and step.numel() == 1 else step for step in said]
        whole = [int(step) if isinstance(step, float) and step.is_integer() else step for step in plain]
        return {_whole_number(self.file, "step", step) for step in whole}

    @property
    def _optimizer(self) -> object:
        return self.found.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")

    @property
    def _states(self) -> list[dict[str, Any]]:
        """Of each of `flats`."""
        said = self._optimizer
        if isinstance(said, list):  # with `elastic_checkpoint`
            return [_of_kind(self.file, "base_optimizer_state", one, dict) for one in said]
        found = _of_kind(self.file, "the optimizer's state", said, dict)
        states: Mapping[Any, Any] = _mapping(self.file, found, "state")
        groups = [_of_kind(self.file, "param_groups", one, dict) for one in _sequence(self.file, found, "param_groups")]
        keys = [key for group in groups for key in _sequence(self.file, group, "params")]
        if any(not isinstance(key, int) or key not in states for key in keys):
            raise ConfigError(
                f"{self.file} has no optimizer's state of some parameters: was it saved before any update?"
            )
        return [_of_kind(self.file, "state", states[key], dict) for key in keys]

    def _flat(self, key: str, tensor: object) -> Tensor:
        found = _of_kind(self.file, key, tensor, Tensor)
        check_plain(self.file, key, found)
        if found.dim() != 1 or not found.is_floating_point():
            raise ConfigError(f"{self.file}: {key} holds a {found.dtype} of shape {list(found.shape)}")
        return found.detach()


@dataclass(frozen=True, slots=True)
class _Model:
    """A file of the model's."""

    file: Path
    found: Mapping[str, Any]

    @property
    def module(self) -> dict[str, Tensor]:
        return _tensors(self.file, "module", self.found.get("module"))

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Of what is trained, a group of the optimizer each, in the order in which it lies."""
        groups = _sequence(self.file, self.found, "param_shapes")
        return [_shapes(self.file, "param_shapes", group) for group in groups]

    @property
    def buffers(self) -> Sequence[Any]:
        return _sequence(self.file, self.found, "buffer_names")

    @property
    def frozen(self) -> tuple[dict[str, tuple[int, ...]], dict[str, Tensor]]:
        """Shapes, and this rank's parts."""
        key, parts = "frozen_param_shapes", "frozen_param_fragments"
        if self.found.get(key) is None or self.found.get(parts) is None:  # a save may leave them out
            return {}, {}
        return _shapes(self.file, key, self.found[key]), _tensors(self.file, parts, self.found[parts])

    @property
    def tied(self) -> Mapping[str, str]:
        """Other names --> the first."""
        said = _of_kind(self.file, "shared_params", self.found.get("shared_params") or {}, dict)
        return {name: _of_kind(self.file, "shared_params", first, str) for name, first in said.items()}


# --- putting together ---------------------------------------------------------------------------------------------


def _by_group(parts: Sequence[_Part], model: _Model, flats: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Stages 1 and 2."""
    groups, taken = model.shapes, {}
    for part, held in zip(parts, flats, strict=True):
        if len(held) != len(groups):
            raise ConfigError(f"{part.file} has {len(held)} groups of values, and {model.file.name} {len(groups)}")
    for group, shapes in enumerate(groups):
        line = [held[group] for held in flats]
        at = 0
        for (name, shape), filler in zip(shapes.items(), _filler(parts[0], group, shapes), strict=True):
            numel = math.prod(shape)
            _refuse_another_place(parts, group, name, line, at, numel)
            taken[name] = _joined(_cut(line, at, numel), shape, model.file, name)
            at += numel + filler
        there = sum(tensor.numel() for tensor in line)
        if not at <= there <= at + _tail(parts, group):
            raise _wrong_sum(model.file, f"of group {group}", at, there)
    return taken


def _filler(part: _Part, group: int, shapes: Mapping[str, object]) -> list[int]:
    """Elements after each parameter that are nobody's."""
    if "param_alignment_paddings" not in part.found:
        return [0] * len(shapes)
    key = "param_alignment_paddings"
    every = _sequence(part.file, part.found, key)
    found = [_whole_number(part.file, key, one) for one in (every[group] if group < len(every) else ())]
    if len(found) != len(shapes):
        raise ConfigError(f"{part.file} is not as DeepSpeed writes it: {len(found)} of {key} for {len(shapes)}")
    return found


def _tail(parts: Sequence[_Part], group: int) -> int:
    """How many elements may follow the last parameter."""
    found = 0
    for part in parts:
        said = part.found.get("group_paddings")
        if not isinstance(said, list) or group >= len(said):
            return _PERHAPS_FILLED * len(parts)
        found += _whole_number(part.file, "group_paddings", said[group])
    return found


def _refuse_another_place(
    parts: Sequence[_Part], group: int, name: str, line: Sequence[Tensor], at: int, numel: int
) -> None:
    """Each rank's file says which elements of its stretch are whose: that must be where they are looked for."""
    start = 0
    for part, held in zip(parts, line, strict=True):
        stop = start + held.numel()
        first, last = max(at, start), min(at + numel, stop)
        said = part.found.get("param_slice_mappings")
        if isinstance(said, list) and group < len(said) and first < last:
            address = said[group].get(name) if isinstance(said[group], Mapping) else None
            there = (address.start, address.numel) if isinstance(address, Stretch) else None
            if there != (first - start, last - first):
                raise ConfigError(
                    f"{part.file}: {readable(name)} is not where its shape and those before it put it "
                    f"({there} for {(first - start, last - first)}): its parts are of different saves, or it was "
                    f"written by a DeepSpeed that lays them out in another way"
                )
        start = stop


def _by_parameter(parts: Sequence[_Part], model: _Model, flats: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Stage 3."""
    taken, at = {}, 0
    for name, shape in ((name, shape) for group in model.shapes for name, shape in group.items()):
        each = -(-math.prod(shape) // len(parts))
        taken[name] = _joined([cut for held in flats for cut in _cut(held, at, each)], shape, model.file, name)
        at += each
    for part, held in zip(parts, flats, strict=True):
        there = sum(tensor.numel() for tensor in held)
        if there != at:
            raise _wrong_sum(part.file, "of this rank", at, there)
    return taken


def _frozen(models: Sequence[_Model], ranks: int) -> dict[str, Tensor]:
    """What isn't trained is in the model's files; at stage 3 in parts."""
    shapes, _ = models[0].frozen
    held = [model.frozen[1] for model in models[:ranks]]
    taken = {}
    for name, shape in shapes.items():
        cuts = []
        for model, fragments in zip(models, held, strict=False):
            if name not in fragments:
                raise ConfigError(f"{model.file} is not as DeepSpeed writes it: it lacks {readable(name)}")
            check_plain(model.file, name, fragments[name])
            cuts.append(fragments[name].detach().flatten())
        taken[name] = _joined(cuts, shape, models[0].file, name)
    return taken


def _cut(line: Sequence[Tensor], at: int, numel: int) -> Iterator[Tensor]:
    """Elements of tensors that lie end to end; fewer, where they end."""
    start = 0
    for tensor in line:
        first, last = max(at - start, 0), min(at + numel - start, tensor.numel())
        if first < last:
            yield tensor[first:last]
        start += tensor.numel()


def _joined(cuts: Sequence[Tensor] | Iterator[Tensor], shape: tuple[int, ...], file: Path, name: str) -> Tensor:
    pieces, numel = list(cuts), math.prod(shape)
    there = sum(piece.numel() for piece in pieces)
    if there < numel:
        raise ConfigError(f"{file}: {readable(name)} is {list(shape)}, and of its {numel:,} values {there:,} are there")
    if not pieces:
        return torch.empty(shape)
    return torch.cat(pieces)[:numel].view(shape)


def _wrong_sum(file: Path, whose: str, said: int, there: int) -> ConfigError:
    return ConfigError(
        f"{file}: the shapes {whose} add up to {said:,} values, and there are {there:,}: its files are of different "
        f"saves, or it was written by a DeepSpeed that lays them out in another way"
    )

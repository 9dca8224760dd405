"""Read the files of a checkpoint that DeepSpeed wrote. Reading executes nothing, and DeepSpeed isn't needed.

    FOLDER/latest                                         the tag of the newest checkpoint
    FOLDER/TAG/mp_rank_00_model_states.pt                 names, shapes, buffers, frozen parameters: stages 0, 1, 2
               zero_pp_rank_N_mp_rank_00_model_states.pt  the same, one file per rank: stage 3
               zero_pp_rank_N_mp_rank_00_optim_states.pt  rank N's shard of the fp32 values (also with bf16_ before it)

The files pickle a few DeepSpeed objects beside tensors. STAND_INS replaces their classes with records that hold numbers
at most; a file that names any other class is refused, with the name of the class. Every value is checked before use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.models.weight_files import check_plain, holds_weights, read_torch, readable

Shapes = dict[str, tuple[int, ...]]
MOMENTS = ("exp_avg", "exp_avg_sq")
_LATEST = "latest"
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(?P<rank>[0-9]{1,6})_)?mp_rank_(?P<tensor>[0-9]{2,6})_model_states\.pt")
_OPTIM_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>[0-9]{1,6})_mp_rank_(?P<tensor>[0-9]{2,6})_optim_states\.pt")
_PIPELINE_OR_EXPERT_FILE = re.compile(r"(?:layer_[0-9]|expp_rank_|.*expert_).*[-_](?:model|optim)_states\.pt")
_EXPERT_GROUPS = "ds_zero_partition_groups"
_REMEDY = (
    "These classes of DeepSpeed are known, and replaced by records without code: {known}. If you trust the checkpoint, "
    "DeepSpeed's own script converts it to weights, which `lockstep ckpt import` reads:\n"
    "  python -m deepspeed.utils.zero_to_fp32 {folder} WEIGHTS --safe_serialization -t {tag}"
)
_Kind = TypeVar("_Kind")


# --- stand-ins ----------------------------------------------------------------------------------------------------


class Ignored:
    """Stand-in for a class whose contents aren't needed; it keeps nothing."""

    __slots__ = ()

    def __new__(cls, *arguments: object) -> Ignored:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class Number(int):
    """Stand-in for an integer enumeration."""

    __slots__ = ()


class FragmentAddress:
    """Stand-in for the record of where a parameter's fragment is.

    Attributes:
        start, numel: Elements within a rank's shard of the group; -1: not in the file.
    """

    __slots__ = ("numel", "start")

    def __init__(self) -> None:
        self.start = self.numel = -1

    def __setstate__(self, state: object) -> None:
        values = state if isinstance(state, Mapping) else {}
        self.start, self.numel = (
            value if isinstance(value := values.get(key), int) else -1 for key in ("start", "numel")
        )


STAND_INS: Mapping[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Ignored,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Ignored,
    "deepspeed.runtime.zero.config.ZeroStageEnum": Number,
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
}
"""Everything that a file may name in addition to tensors."""


def _of_type(file: Path, key: str, value: object, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, kind):
        raise ConfigError(f"{file} isn't in DeepSpeed's format: {key} is a {type(value).__name__}")
    return value


def _sequence(file: Path, key: str, value: object) -> Sequence[Any]:
    return cast("Sequence[Any]", value) if isinstance(value, tuple) else _of_type(file, key, value, list)


def _integer(file: Path, key: str, value: object) -> int:
    number = _of_type(file, key, value, int)
    if not 0 <= number < 2**48:
        raise ConfigError(f"{file} isn't in DeepSpeed's format: {key} is {number}")
    return number


def _shapes(file: Path, key: str, value: object) -> Shapes:
    shapes = {}
    for name, shape in _of_type(file, key, value, dict).items():
        dims = _of_type(file, f"{key} of {readable(str(name))}", shape, tuple)
        shapes[_of_type(file, key, name, str)] = tuple(_integer(file, key, dim) for dim in dims)
    return shapes


def _tensors(file: Path, key: str, value: object) -> dict[str, Tensor]:
    return {
        _of_type(file, key, name, str): _of_type(file, f"{key} of {readable(str(name))}", tensor, Tensor)
        for name, tensor in _of_type(file, key, value, dict).items()
    }


@dataclass(frozen=True)
class OptimizerFile:
    """The optimizer state of one rank.

    Attributes:
        contents: The contents of `optimizer_state_dict`, unchecked.
    """

    file: Path
    contents: Mapping[str, Any]

    def __str__(self) -> str:
        return f"stage {self.stage} on {self.num_ranks} ranks"

    @cached_property
    def stage(self) -> int:
        """The ZeRO stage; 1 if the file has none, since DeepSpeed's bf16 optimizer is one of stage 1."""
        if "fp32_flat_groups" in self.contents:
            return 3
        if "single_partition_of_fp32_groups" not in self.contents:
            raise ConfigError(f"{self.file} has no fp32 values of ZeRO, only {', '.join(map(str, self.contents))}")
        return _integer(self.file, "zero_stage", self.contents.get("zero_stage", 1))

    @cached_property
    def num_ranks(self) -> int:
        """The number of ranks that share the state."""
        count = self.contents.get("partition_count")
        counts = count if isinstance(count, list) and count else [count]
        if len(set(map(str, counts))) > 1:
            raise ConfigError(f"{self.file}: its groups are sharded over different ranks, which can't be imported")
        return _integer(self.file, "partition_count", counts[0])

    def values(self) -> list[Tensor]:
        """Return this rank's fp32 values: one tensor per group; at stage 3 one or more."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return [self._flat(key, tensor) for tensor in _sequence(self.file, key, self.contents.get(key))]

    def moments(self, entry: str) -> list[Tensor]:
        """Return an entry of Adam's state, in the layout of `values`."""
        moments = []
        for state in self._states():
            others = sorted(str(key) for key in state if key not in ("step", *MOMENTS))
            if others or entry not in state:
                keys = ", ".join(map(readable, map(str, state))) or "nothing"
                raise ConfigError(f"{self.file}: its optimizer is not Adam or AdamW: its state has {keys}")
            moments.append(self._flat(entry, state[entry]))
        return moments

    def steps(self) -> set[int]:
        """Return the number of optimizer steps: one number, unless groups differ."""
        steps = [state["step"] for state in self._states() if "step" in state]
        groups = self._optimizer.get("param_groups") if isinstance(self._optimizer, dict) else None
        if not steps and isinstance(groups, list):
            steps = [group["step"] for group in groups if isinstance(group, dict) and "step" in group]
        if not steps and "base_optimizer_state_step" in self.contents:
            steps = [self.contents["base_optimizer_state_step"]]
        plain = [step.item() if isinstance(step, Tensor) and step.numel() == 1 else step for step in steps]
        whole = [int(step) if isinstance(step, float) and step.is_integer() else step for step in plain]
        return {_integer(self.file, "step", step) for step in whole}

    def paddings(self, group: int, num_parameters: int) -> list[int]:
        """Return the number of padding elements after each parameter of a group."""
        key = "param_alignment_paddings"
        if key not in self.contents:
            return [0] * num_parameters
        groups = _sequence(self.file, key, self.contents[key])
        paddings = [_integer(self.file, key, padding) for padding in (groups[group] if group < len(groups) else ())]
        if len(paddings) != num_parameters:
            raise ConfigError(f"{self.file} isn't in DeepSpeed's format: {len(paddings)} of {key} for {num_parameters}")
        return paddings

    def final_padding(self, group: int) -> int | None:
        """Return the number of padding elements at the end of this rank's shard of a group; None: not in the file."""
        paddings = self.contents.get("group_paddings")
        if not isinstance(paddings, list) or group >= len(paddings):
            return None
        return _integer(self.file, "group_paddings", paddings[group])

    def check_place(self, group: int, name: str, start: int, numel: int) -> None:
        """Raise ConfigError if the file has another place for the parameter's fragment in this rank's shard."""
        addresses = self.contents.get("param_slice_mappings")
        if not isinstance(addresses, list) or group >= len(addresses):
            return
        address = addresses[group].get(name) if isinstance(addresses[group], Mapping) else None
        place = (address.start, address.numel) if isinstance(address, FragmentAddress) else None
        if place != (start, numel):
            raise ConfigError(
                f"{self.file}: {readable(name)} is not where its shape and those before it put it ({place} instead of "
                f"{(start, numel)}): the files are of different saves, or of a DeepSpeed version with another layout"
            )

    @property
    def _optimizer(self) -> object:
        return self.contents.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")

    def _states(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer
        if isinstance(optimizer, list):  # with `elastic_checkpoint`
            return [_of_type(self.file, "base_optimizer_state", state, dict) for state in optimizer]
        contents = _of_type(self.file, "the optimizer's state", optimizer, dict)
        states: Mapping[Any, Any] = _of_type(self.file, "state", contents.get("state"), dict)
        groups = _sequence(self.file, "param_groups", contents.get("param_groups"))
        keys: list[Any] = []
        for group in groups:
            keys += _sequence(self.file, "params", _of_type(self.file, "param_groups", group, dict).get("params"))
        if any(not isinstance(key, int) or key not in states for key in keys):
            raise ConfigError(
                f"{self.file} has no optimizer state for some parameters: was it saved before any update?"
            )
        return [_of_type(self.file, "state", states[key], dict) for key in keys]

    def _flat(self, key: str, tensor: object) -> Tensor:
        flat = _of_type(self.file, key, tensor, Tensor)
        check_plain(self.file, key, flat)
        if flat.dim() != 1 or not flat.is_floating_point():
            raise ConfigError(f"{self.file}: {key} holds a {flat.dtype} of shape {list(flat.shape)}")
        return flat.detach()


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The model of all ranks or, at stage 3, of one rank.

    Attributes:
        contents: All keys of the file, unchecked.
    """

    file: Path
    contents: Mapping[str, Any]

    def module(self) -> dict[str, Tensor]:
        return _tensors(self.file, "module", self.contents.get("module"))

    def shapes(self) -> list[Shapes]:
        """Return the shapes of the trained parameters, for each optimizer group, in the order of the values."""
        groups = _sequence(self.file, "param_shapes", self.contents.get("param_shapes"))
        return [_shapes(self.file, "param_shapes", group) for group in groups]

    def buffers(self) -> Sequence[Any]:
        return _sequence(self.file, "buffer_names", self.contents.get("buffer_names"))

    def frozen(self) -> tuple[Shapes, dict[str, Tensor]]:
        """Return the shapes of the frozen parameters, and this rank's shards of them."""
        key, shards = "frozen_param_shapes", "frozen_param_fragments"
        if self.contents.get(key) is None or self.contents.get(shards) is None:  # a save may leave them out
            return {}, {}
        shapes = _shapes(self.file, key, self.contents[key])
        return shapes, _tensors(self.file, shards, self.contents[shards])

    def count(self, key: str) -> int | None:
        return _integer(self.file, key, self.contents[key]) if isinstance(self.contents.get(key), int) else None

    def tied(self) -> Mapping[str, str]:
        """Return the first name of each parameter by its other names."""
        names = _of_type(self.file, "shared_params", self.contents.get("shared_params") or {}, dict)
        return {name: _of_type(self.file, "shared_params", first, str) for name, first in names.items()}


# --- files --------------------------------------------------------------------------------------------------------


def is_zero_checkpoint(place: Path) -> bool:
    """Return whether DeepSpeed wrote it: the folder that `save_checkpoint` was given, or that of a tag in it."""
    if not place.is_dir():
        return False
    if _is_tag(place):
        return True
    # a folder of transformers' Trainer has both
    return (place / _LATEST).is_file() and (not holds_weights(place) or any(map(_is_tag, place.iterdir())))


def tag_folder(place: Path) -> Path:
    """Return the folder that `latest` names, or `place` if it has no such file.

    Raises:
        ConfigError: `latest` doesn't name a folder with a checkpoint.
    """
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
    tags = sorted(entry.name for entry in place.iterdir() if _is_tag(entry))
    others = f"name one of {', '.join(map(readable, tags))}" if tags else "there is no other either"
    what = "has no DeepSpeed checkpoint in it" if folder.is_dir() else "doesn't exist"
    raise ConfigError(f"{latest} names {tag}, but {folder} {what}; {others}")


def read_files(folder: Path) -> tuple[list[OptimizerFile], list[ModelFile]]:
    """Read all files of a tag, each list in the order of ranks. Without ZeRO there are no optimizer files.

    Raises:
        ConfigError: Files are missing, damaged, from several saves, name unknown classes, or are not data-parallel.
    """
    _refuse_model_parallel(folder)
    optimizers = []
    for file in _files_by_rank(folder, _OPTIM_FILE):
        contents = _of_type(file, "optimizer_state_dict", _load(file).get("optimizer_state_dict"), dict)
        optimizers.append(OptimizerFile(file, contents))
    if not optimizers:
        return [], [ModelFile(file, _load(file)) for file in _files_by_rank(folder, _MODEL_FILE)[:1]]
    first = optimizers[0]
    for other in optimizers:
        if (other.num_ranks, other.stage) != (first.num_ranks, first.stage):
            raise ConfigError(f"{other.file} and {first.file.name} are of different saves: {other} and {first}")
        if _EXPERT_GROUPS in other.contents:
            raise ConfigError(f"{other.file}: parameters are sharded in groups of experts, which can't be imported")
    _check_ranks([optimizer.file for optimizer in optimizers], first.num_ranks, _OPTIM_FILE)
    models = [ModelFile(file, _load(file)) for file in _files_by_rank(folder, _MODEL_FILE)]
    if not models:
        raise ConfigError(f"{folder} has shards of the ranks but no *mp_rank_00_model_states.pt with their shapes")
    if first.stage == 3:
        _check_ranks([model.file for model in models], first.num_ranks, _MODEL_FILE)
    return optimizers, models


def _is_tag(folder: Path) -> bool:
    return folder.is_dir() and any(_files(folder, _MODEL_FILE) or _files(folder, _OPTIM_FILE))


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [entry for entry in folder.iterdir() if pattern.fullmatch(entry.name)]


def _rank(file: Path, pattern: re.Pattern[str]) -> int:
    """Return the rank in the file's name; 0 for the file of all ranks."""
    return int(cast("re.Match[str]", pattern.fullmatch(file.name))["rank"] or 0)


def _files_by_rank(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    by_rank: dict[int, Path] = {}
    for file in sorted(_files(folder, pattern), key=lambda file: _rank(file, pattern)):
        rank = _rank(file, pattern)
        if rank in by_rank:
            raise ConfigError(f"{by_rank[rank]} and {file.name} are both of rank {rank}; keep those of one save")
        by_rank[rank] = file
    return list(by_rank.values())


def _refuse_model_parallel(folder: Path) -> None:
    for pattern in (_MODEL_FILE, _OPTIM_FILE):
        for file in _files(folder, pattern):
            if int(cast("re.Match[str]", pattern.fullmatch(file.name))["tensor"]) > 0:
                raise ConfigError(f"{file}: tensor-parallel checkpoints (mp_rank above 00) can't be imported")
    other = next(iter(_files(folder, _PIPELINE_OR_EXPERT_FILE)), None)
    if other is not None:
        raise ConfigError(f"{other}: DeepSpeed checkpoints of pipelines and experts can't be imported")


def _check_ranks(files: Sequence[Path], num_ranks: int, pattern: re.Pattern[str]) -> None:
    ranks = {_rank(file, pattern) for file in files}
    missing = [rank for rank in range(num_ranks) if rank not in ranks]
    folder = files[0].parent
    if missing:
        name = re.sub(r"rank_[0-9]+_mp", f"rank_{missing[0]}_mp", files[0].name, count=1)
        more = f" and those of {len(missing) - 1} more ranks" if len(missing) > 1 else ""
        raise ConfigError(
            f"{folder} lacks {name}{more}: it was saved by {num_ranks} ranks, and each wrote a part. Copy them from "
            f"the disks of their hosts"
        )
    if len(ranks) > num_ranks:
        raise ConfigError(
            f"{folder} was saved by {num_ranks} ranks but has files of {len(ranks)}: those from rank {num_ranks} up "
            f"are left from another save; move them away"
        )


def _load(file: Path) -> Mapping[str, Any]:
    known = ", ".join(name.removeprefix("deepspeed.") for name in STAND_INS)
    remedy = _REMEDY.format(known=known, folder=file.parent.parent, tag=file.parent.name)
    return _of_type(file, "its contents", read_torch(file, STAND_INS, remedy), dict)

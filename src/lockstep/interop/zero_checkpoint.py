"""Read a checkpoint that DeepSpeed wrote, as whole tensors with names. Nothing is executed, and DeepSpeed isn't needed.

    FOLDER/latest                                         the tag of the newest checkpoint
    FOLDER/TAG/mp_rank_00_model_states.pt                 names, shapes, buffers, frozen parameters: stages 0, 1, 2
               zero_pp_rank_N_mp_rank_00_model_states.pt  the same, one file per rank: stage 3
               zero_pp_rank_N_mp_rank_00_optim_states.pt  rank N's shard of the fp32 values (also with bf16_ before it)

stages 1, 2    the parameters of a group end to end, cut into a stretch for each rank; its file has each one's address
stage 3        each parameter, with padding, sharded by itself; a rank's shards end to end

The files pickle a few DeepSpeed objects beside tensors. STAND_INS replaces their classes with records of numbers; a
file that names any other class is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.interop.peer_optimizer import PeerCheckpoint, PeerOptimizer
from lockstep.models.weight_files import Weights, check_plain, holds_weights, read_torch, readable, unwrapped

_MOMENTS = ("exp_avg", "exp_avg_sq")
_LATEST = "latest"
_PROGRESS = ("global_steps", "global_samples")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(?P<rank>[0-9]{1,6})_)?mp_rank_(?P<tensor>[0-9]{2,6})_model_states\.pt")
_OPTIM_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>[0-9]{1,6})_mp_rank_(?P<tensor>[0-9]{2,6})_optim_states\.pt")
_PIPELINE_OR_EXPERT_FILE = re.compile(r"(?:layer_[0-9]|expp_rank_|.*expert_).*[-_](?:model|optim)_states\.pt")
_EXPERT_GROUPS = "ds_zero_partition_groups"
_REMEDY = (
    "These classes of DeepSpeed are known, and replaced by records without code: {known}. If you trust the checkpoint, "
    "DeepSpeed's own script converts it to weights, which `lockstep ckpt import` reads:\n"
    "  python -m deepspeed.utils.zero_to_fp32 {folder} WEIGHTS --safe_serialization -t {tag}"
)
_KNOWN_KEYS = (
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "optimizer",
)  # fmt: skip
"""Keys of the model's file that are read, or reported under another name."""
_OTHER_SAVE = "the files are of different saves, or of a DeepSpeed version with another layout"


class Ignored:
    """Stand-in for a class without needed contents; it keeps nothing."""

    __slots__ = ()

    def __new__(cls, *arguments: object) -> Ignored:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class Number(int):
    """Stand-in for an integer enumeration."""

    __slots__ = ()


class FragmentAddress:
    """Stand-in for the record of where a parameter's fragment is in a rank's shard: first element, number."""

    __slots__ = ("place",)

    def __setstate__(self, state: Mapping[str, int]) -> None:
        self.place = int(state["start"]), int(state["numel"])


STAND_INS: Mapping[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Ignored,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Ignored,
    "deepspeed.runtime.zero.config.ZeroStageEnum": Number,
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
}
"""Everything that a file may name in addition to tensors."""

_Contents = dict[str, Any]
_Files = dict[Path, _Contents]
"""Contents of the files of ranks, in the order of ranks."""


def read_zero(place: Path, *, moments: bool = False) -> PeerCheckpoint:
    """Read a checkpoint: the folder of a tag, or the one above; with `moments` also Adam's. Raises ConfigError.

    Trained parameters are fp32; buffers and frozen parameters are as they are; tied ones have each of their names.
    """
    try:
        return _read(_tag_folder(place), moments)
    except OSError as error:
        raise ConfigError(f"{error.filename or place} can't be read: {error.strerror or error}") from error
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {readable(str(error)[:200])}"
        raise ConfigError(f"{place} isn't in DeepSpeed's format: {reason}") from error


def _read(folder: Path, moments: bool) -> PeerCheckpoint:
    _refuse_model_parallel(folder)
    optim_files, model_files = _files_by_rank(folder, _OPTIM_FILE), _files_by_rank(folder, _MODEL_FILE)
    shards = {file: _load(file)["optimizer_state_dict"] for file in optim_files.values()}
    models = {file: _load(file) for file in model_files.values()}
    if not models:
        raise ConfigError(f"{folder} has shards of the ranks but no *mp_rank_00_model_states.pt with their shapes")
    model_file, model = next(iter(models.items()))
    if not shards:
        if moments:
            raise ConfigError(f"{folder} has no *_optim_states.pt; optimizer state is read from ZeRO stages 1, 2 and 3")
        if model.get("param_shapes") is not None:
            raise ConfigError(f"{folder} has no *_optim_states.pt, where ZeRO keeps the fp32 values; copy all files")
        return _with_model(folder, 0, 1, False, model_file, model, {})
    stage, ranks = _stage_and_ranks(shards)
    _check_ranks(optim_files, ranks)
    if stage == 3:
        _check_ranks(model_files, ranks)
    assemble = _by_parameter if stage == 3 else _by_group
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    values = [[_flat(file, key, tensor) for tensor in contents[key]] for file, contents in shards.items()]
    tensors = assemble(shards, model_file, model, values) | _frozen(models)
    checkpoint = _with_model(folder, stage, ranks, moments, model_file, model, tensors)
    if not moments:
        return checkpoint
    states = {file: _adam_states(file, contents, stage) for file, contents in shards.items()}
    steps = {step for file, contents in shards.items() for step in _steps(contents, states[file], stage)}
    if len(steps) != 1:
        numbers = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"{folder}: its ranks or groups have made different numbers of steps: {numbers}")
    by_name: dict[str, dict[str, Any]] = {}
    for entry in _MOMENTS:
        values = [[_flat(file, entry, state[entry]) for state in of_file] for file, of_file in states.items()]
        for name, tensor in unwrapped(assemble(shards, model_file, model, values)).items():
            by_name.setdefault(name, {"step": min(steps)})[entry] = tensor
    return replace(checkpoint, optimizer=PeerOptimizer(folder, by_name, [[*by_name]]))


def _with_model(
    folder: Path, stage: int, ranks: int, moments: bool, file: Path, model: _Contents, values: Mapping[str, Tensor]
) -> PeerCheckpoint:
    tensors, skipped, tied = dict(values), [], model.get("shared_params") or {}
    for name, tensor in model["module"].items():
        if name in tensors:
            continue
        if tied.get(name) in tensors:
            tensors[name] = tensors[tied[name]]
        elif tensor.numel() == 0 and stage == 3 and name not in model["buffer_names"]:
            skipped.append(f"{readable(name)} (without values)")
        else:
            check_plain(file, name, tensor)
            tensors[name] = tensor.detach()
    skipped += [] if moments else ["the optimizer's state"]
    skipped += [readable(str(key)) for key, value in model.items() if key not in _KNOWN_KEYS and value is not None]
    step, samples = (int(model[key]) if model.get(key) is not None else None for key in _PROGRESS)
    of_ranks = f" ZeRO stage {stage} on {ranks} rank{'s' * (ranks != 1)}" if stage else ""
    weights = Weights(folder, unwrapped(tensors), tuple(skipped))
    return PeerCheckpoint(weights, f"{folder}: DeepSpeed{of_ranks}", step=step, samples=samples)


# --- shards to tensors --------------------------------------------------------------------------------------------


def _by_group(
    shards: _Files, model_file: Path, model: _Contents, values: Sequence[Sequence[Tensor]]
) -> dict[str, Tensor]:
    groups: Sequence[Mapping[str, Sequence[int]]] = model["param_shapes"]
    tensors: dict[str, Tensor] = {}
    for file, contents in shards.items():
        for mapping in contents.get("param_slice_mappings", [None]):
            places = sorted(address.place for address in mapping.values()) if mapping is not None else None
            if places is None or any(start + count > after for (start, count), (after, _) in pairwise(places)):
                raise ConfigError(f"{file} doesn't say where each of its parameters is (param_slice_mappings)")
    for file, of_rank in zip(shards, values, strict=True):
        if len(of_rank) != len(groups):
            raise ConfigError(f"{file} has {len(of_rank)} groups of values, but {model_file.name} has {len(groups)}")
    for group, shapes in enumerate(groups):
        for name, shape in shapes.items():
            pieces: list[Tensor] = []
            for contents, of_rank in zip(shards.values(), values, strict=True):
                if (address := contents["param_slice_mappings"][group].get(name)) is not None:
                    pieces += _elements([of_rank[group]], *address.place)
            numel = sum(piece.numel() for piece in pieces)
            if numel != math.prod(shape):
                raise ConfigError(f"{model_file}: {readable(name)} is {list(shape)}, but {numel:,} values of it exist")
            tensors[name] = _joined(pieces, shape, model_file, name)
    return tensors


def _by_parameter(
    shards: _Files, model_file: Path, model: _Contents, values: Sequence[Sequence[Tensor]]
) -> dict[str, Tensor]:
    tensors, start = {}, 0
    for name, shape in ((name, shape) for group in model["param_shapes"] for name, shape in group.items()):
        per_rank = -(-math.prod(shape) // len(shards))
        pieces = [piece for of_rank in values for piece in _elements(of_rank, start, per_rank)]
        tensors[name] = _joined(pieces, shape, model_file, name)
        start += per_rank
    for file, of_rank in zip(shards, values, strict=True):
        total = sum(tensor.numel() for tensor in of_rank)
        if total != start:
            raise ConfigError(f"{file}: {start:,} values of this rank, and not {total:,}: {_OTHER_SAVE}")
    return tensors


def _frozen(models: _Files) -> dict[str, Tensor]:
    first, model = next(iter(models.items()))
    if model.get("frozen_param_fragments") is None:
        return {}
    tensors = {}
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        pieces = [contents["frozen_param_fragments"][name] for contents in models.values()]
        for file, piece in zip(models, pieces, strict=True):
            check_plain(file, name, piece)
        tensors[name] = _joined([piece.detach().flatten() for piece in pieces], shape, first, name)
    return tensors


def _elements(tensors: Sequence[Tensor], start: int, numel: int) -> Iterator[Tensor]:
    """Yield a range of the elements of tensors that are stored end to end; fewer, if they end before it."""
    for tensor in tensors:
        first, last = max(start, 0), min(start + numel, tensor.numel())
        if first < last:
            yield tensor[first:last]
        start -= tensor.numel()


def _joined(pieces: Iterable[Tensor], shape: Sequence[int], file: Path, name: str) -> Tensor:
    flat, numel = list(pieces), math.prod(shape)
    available = sum(piece.numel() for piece in flat)
    if available < numel:
        raise ConfigError(f"{file}: {readable(name)} is {list(shape)}, but {available:,} values of it exist")
    return torch.cat(flat)[:numel].view(tuple(shape)) if flat else torch.empty(tuple(shape))


def _flat(file: Path, key: str, tensor: Tensor) -> Tensor:
    check_plain(file, key, tensor)
    if tensor.dim() != 1 or not tensor.is_floating_point():
        raise ConfigError(f"{file}: {key} holds a {tensor.dtype} of shape {list(tensor.shape)}")
    return tensor.detach()


# --- optimizer ----------------------------------------------------------------------------------------------------


def _stage_and_ranks(shards: _Files) -> tuple[int, int]:
    kinds: dict[tuple[int, int], str] = {}
    for file, contents in shards.items():
        count = contents["partition_count"]
        ranks = set(count) if isinstance(count, list) else {count}
        if _EXPERT_GROUPS in contents or len(ranks) > 1:
            raise ConfigError(f"{file}: parameters sharded over different ranks, as of experts, can't be imported")
        if "fp32_flat_groups" not in contents and "single_partition_of_fp32_groups" not in contents:
            raise ConfigError(f"{file} has no fp32 values of ZeRO, only {', '.join(map(str, contents))}")
        # DeepSpeed's bf16 optimizer is one of stage 1
        stage = 3 if "fp32_flat_groups" in contents else contents.get("zero_stage", 1)
        kinds.setdefault((int(stage), int(ranks.pop())), file.name)
    if len(kinds) > 1:
        saves = " and ".join(f"{name} (stage {stage} on {ranks} ranks)" for (stage, ranks), name in kinds.items())
        raise ConfigError(f"{next(iter(shards)).parent} has files of different saves: {saves}")
    return next(iter(kinds))


def _optimizer_of(contents: _Contents, stage: int) -> Any:
    return contents["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]


def _adam_states(file: Path, contents: _Contents, stage: int) -> list[_Contents]:
    states = optimizer = _optimizer_of(contents, stage)
    if not isinstance(optimizer, list):  # it is one with `elastic_checkpoint`
        states = [optimizer["state"][key] for group in optimizer["param_groups"] for key in group["params"]]
    for state in states:
        if {*state} - {"step"} != {*_MOMENTS}:
            entries = ", ".join(map(readable, map(str, state))) or "nothing"
            raise ConfigError(f"{file}: its optimizer is not Adam or AdamW: its state has {entries}")
    return cast("list[_Contents]", states)


def _steps(contents: _Contents, states: Sequence[_Contents], stage: int) -> set[int]:
    optimizer = _optimizer_of(contents, stage)
    groups = optimizer["param_groups"] if isinstance(optimizer, dict) else []
    steps = [record["step"] for record in states if "step" in record]
    steps = steps or [group["step"] for group in groups if "step" in group]
    if not steps and "base_optimizer_state_step" in contents:
        steps = [contents["base_optimizer_state_step"]]
    return {int(step) for step in steps}


# --- files --------------------------------------------------------------------------------------------------------


def is_zero_checkpoint(place: Path) -> bool:
    """Return whether DeepSpeed wrote it: the folder that `save_checkpoint` was given, or a tag's folder in it."""
    if not place.is_dir():
        return False
    if _is_tag(place):
        return True
    # a folder of transformers' Trainer has both
    return (place / _LATEST).is_file() and (not holds_weights(place) or any(map(_is_tag, place.iterdir())))


def _tag_folder(place: Path) -> Path:
    latest = place / _LATEST
    if not latest.is_file():
        return place
    with latest.open("rb") as file:
        tag = file.read(4096).decode(errors="replace").strip()
    if tag in ("", ".", "..") or Path(tag).name != tag or not tag.isprintable():
        raise ConfigError(f"{latest} doesn't name a folder beside it: {tag!r}")
    if not _is_tag(place / tag):
        tags = ", ".join(readable(entry.name) for entry in sorted(place.iterdir()) if _is_tag(entry)) or "none"
        raise ConfigError(f"{latest} names {tag}, which isn't there or has no checkpoint; those there: {tags}")
    return place / tag


def _is_tag(folder: Path) -> bool:
    return folder.is_dir() and any(_files(folder, _MODEL_FILE) or _files(folder, _OPTIM_FILE))


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [entry for entry in folder.iterdir() if pattern.fullmatch(entry.name)]


def _files_by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    by_rank: dict[int, Path] = {}
    for file in _files(folder, pattern):
        rank = int(cast("re.Match[str]", pattern.fullmatch(file.name))["rank"] or 0)
        other = by_rank.setdefault(rank, file)
        if other != file:
            raise ConfigError(f"{other} and {file.name} are both of one rank; keep the files of one save")
    return dict(sorted(by_rank.items()))


def _refuse_model_parallel(folder: Path) -> None:
    for file in folder.iterdir():
        match = _MODEL_FILE.fullmatch(file.name) or _OPTIM_FILE.fullmatch(file.name)
        if (match and int(match["tensor"]) > 0) or _PIPELINE_OR_EXPERT_FILE.fullmatch(file.name):
            raise ConfigError(f"{file}: checkpoints of tensor parallelism, pipelines and experts can't be read")


def _check_ranks(files: Mapping[int, Path], num_ranks: int) -> None:
    first = next(iter(files.values()))
    saved = f"{first.parent} was saved by {num_ranks} ranks"
    missing = [rank for rank in range(num_ranks) if rank not in files]
    if missing:
        name = re.sub(r"rank_[0-9]+_mp", f"rank_{missing[0]}_mp", first.name, count=1)
        raise ConfigError(f"{saved} and lacks {name}; copy the files of all their hosts")
    if len(files) > num_ranks:
        raise ConfigError(f"{saved} but has files of {len(files)}; move the files of another save away")


def _load(file: Path) -> _Contents:
    known = ", ".join(name.removeprefix("deepspeed.") for name in STAND_INS)
    remedy = _REMEDY.format(known=known, folder=file.parent.parent, tag=file.parent.name)
    return cast("_Contents", read_torch(file, STAND_INS, remedy))

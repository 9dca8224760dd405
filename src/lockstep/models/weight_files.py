"""Weights as files have them, of whatever program: named tensors, and nothing else. Reading them executes nothing.

    folder     model.safetensors | model.safetensors.index.json      of transformers, or RUN/model
               pytorch_model.bin | pytorch_model.bin.index.json
    RUN        its folder `model`
    file       .safetensors | .pt .pth .bin .ckpt                    what torch.save wrote

    {"epoch": 3, "state_dict": {"module.head.weight": tensor}}  -->  {"head.weight": tensor}, epoch skipped

Tensors are mapped from the file where it can be, so that a rank copies only what it needs. A file that a list of hashes
beside it names (what Lockstep has published) is first read whole, and compared.
"""

from __future__ import annotations

import difflib
import json
import pickle
import re
import shlex
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lockstep.core import checksums
from lockstep.core.errors import ConfigError, RunFailed

_IN_FOLDERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_INDEX = ".index.json"
_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_NESTS = ("model_state_dict", "MODEL_STATE", "state_dict", "model")
"""Keys of a model's tensors in files that hold an optimizer's as well."""
_DEEPEST = 4
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to names."""
_MOST_INDEX = 2**25  # bytes
_MOST_HEADER = 2**24  # bytes, of a safetensors file
_MOST_UNPACKED = 20  # times a compressed file's size
_SMALL = 2**25  # bytes that any file may unpack to


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a file or folder.

    Attributes:
        place: the file or folder that was read.
        tensors: on the CPU, dense, by name.
        skipped: keys of other values in the files.
    """

    place: Path
    tensors: Mapping[str, Tensor]
    skipped: tuple[str, ...] = ()


def read_weights(place: Path) -> Weights:
    """Read a file, or all of a folder's.

    Raises:
        ConfigError: nothing is there, it holds no tensors, or more than tensors would have to be unpickled.
        RunFailed: a file differs from its hash.
    """
    try:
        where = _main_file(place.expanduser())
        tensors, skipped = _read_sharded(where) if where.name.endswith(_INDEX) else _read(where)
    except OSError as error:
        raise ConfigError(f"{place} can't be read: {error.strerror or error}") from error
    return Weights(where, unwrapped(tensors), skipped)


def refuse_damaged(folder: Path) -> None:
    """Raise RunFailed if a file that the folder's list of hashes names differs from its hash."""
    for file in checksums.listed(folder):
        _refuse_damaged(file)


def holds_weights(folder: Path) -> bool:
    """Return whether one of the usual files is in it."""
    return any((folder / name).is_file() for name in _IN_FOLDERS)


def readable(name: str) -> str:
    """Return a name from a file, which may hold anything, in a form that is safe on a terminal."""
    return name if name.isprintable() else repr(name)


# --- the place ----------------------------------------------------------------------------------------------------


def _main_file(place: Path) -> Path:
    """Return the file that holds or indexes the weights."""
    if place.is_file():
        return place
    if not place.is_dir():
        raise ConfigError(_not_there(place))
    for folder in (place, place / "model"):
        for name in _IN_FOLDERS:
            if (folder / name).is_file():
                return folder / name
    raise ConfigError(_no_weights_in(place))


def _not_there(place: Path) -> str:
    if place.parent.is_dir():
        could_be = [entry.name for entry in place.parent.iterdir() if entry.is_file() or holds_weights(entry)]
        near = difflib.get_close_matches(place.name, could_be, n=1)
        if near:
            return f"there is no {place}; did you mean {place.parent / near[0]}?"
    hub = "" if place.is_absolute() or len(place.parts) > 2 else "; a name of the hub goes into model.pretrained"
    return f"there is no {place}{hub}"


def _no_weights_in(folder: Path) -> str:
    if (folder / "manifest.json").is_file():
        return f"{folder} is a checkpoint; `lockstep export {folder} --to FILE.safetensors` takes the weights out of it"
    if any((entry / "manifest.json").is_file() for entry in folder.iterdir()):
        return (
            f"{folder} holds checkpoints; `lockstep export {folder} --to FILE.safetensors` takes the newest's weights"
        )
    if (folder / "config.yaml").is_file():
        return (
            f"the run in {folder} has left no weights yet (there is no {folder / 'model'}); "
            f"`lockstep export {folder}` takes those of its newest checkpoint"
        )
    if (folder / "latest").is_file() or any(folder.glob("*_model_states.pt")):
        return f"{folder} is a checkpoint of DeepSpeed; `lockstep ckpt import {folder} WEIGHTS` makes weights of it"
    files = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".safetensors", *_OF_TORCH))
    holds = f"; it holds {', '.join(files[:4])}: give one of them by its name" if files else ""
    return f"{folder} has none of {', '.join(_IN_FOLDERS)}{holds}"


# --- files --------------------------------------------------------------------------------------------------------

TensorsAndOthers = tuple[dict[str, Tensor], tuple[str, ...]]
"""Tensors by name, and the keys of all other values."""


def _read(file: Path) -> TensorsAndOthers:
    _refuse_damaged(file)
    if file.suffix == ".safetensors":
        return _read_safetensors(file), ()
    if file.suffix in _OF_TORCH:
        return _state_dict(file, read_torch(file))
    raise ConfigError(
        f"{file} is no file of weights, by its name: these are folders, .safetensors, "
        f"and what torch.save wrote: {' '.join(_OF_TORCH)}"
    )


def _refuse_damaged(file: Path) -> None:
    fault = checksums.fault(file)
    if fault is not None:
        raise RunFailed(
            f"{file} is damaged: {fault}. Take it from a checkpoint of its run again (lockstep export RUN --to "
            f"{file.parent} --force), or, if it was changed on purpose, delete that list"
        )


def _read_sharded(index: Path) -> TensorsAndOthers:
    """Read all files that an index names, which must lie beside it."""
    tensors: dict[str, Tensor] = {}
    skipped: list[str] = []
    names = _index(index)
    for file in sorted(set(names.values())):
        if file != Path(file).name or not (index.parent / file).is_file():
            raise ConfigError(f"{index} names a file {readable(file)} that is not beside it")
        part, others = _read(index.parent / file)
        twice = next((name for name in part if name in tensors), None)
        if twice is not None:
            raise ConfigError(f"{index.parent}: {readable(twice)} is in {file} and in a file before it")
        tensors.update(part)
        skipped += others
    lost = [name for name in names if name not in tensors]
    if lost:
        raise ConfigError(f"{index} names {readable(lost[0])}, which is in none of its files ({len(lost)} such names)")
    return tensors, tuple(skipped)


def _index(file: Path) -> dict[str, str]:
    try:
        if file.stat().st_size > _MOST_INDEX:
            raise ConfigError(f"{file} has {file.stat().st_size:,} bytes: that is no index")
        names = json.loads(file.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is no index of weights: {type(error).__name__}: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(value, str) for value in names.values()):
        raise ConfigError(f"{file} is no index of weights: weight_map doesn't map names to files")
    return names


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
    if _MOST_HEADER < size < file.stat().st_size:  # the library states what one beyond the file's end is
        raise ConfigError(  # to parse a header takes many times its size
            f"{file} states that its header has {size:,} bytes, where {_MOST_HEADER:,} name all tensors of a large "
            "model: it is damaged, or made to fill memory"
        )
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file} is no safetensors file, or a damaged one: {error}") from error


def _refuse_bomb(file: Path) -> None:
    """Raise ConfigError if a zip archive unpacks to far more than it holds. torch.save doesn't compress."""
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return  # read_torch explains it
    size = file.stat().st_size
    if unpacked > _MOST_UNPACKED * size + _SMALL:
        raise ConfigError(
            f"{file} has {size:,} bytes and states that they unpack to {unpacked:,}, more than {_MOST_UNPACKED} times "
            "as many: weights don't compress like that, so it is damaged, or made to fill memory"
        )


def read_torch(file: Path, stand_ins: Mapping[str, type] = MappingProxyType({}), way_out: str | None = None) -> object:
    """Return what torch.save wrote; nothing of it is executed.

    Args:
        stand_ins: replacements for classes of other programs, by their full names.
        way_out: the remedy where more is needed; None: how to make it a file of tensors alone.

    Raises:
        ConfigError: it is no such file, is damaged, or needs more than tensors and classes with stand-ins.
    """
    _refuse_bomb(file)
    try:
        known: list[Any] = [(stand_in, name) for name, stand_in in stand_ins.items()]
        with warnings.catch_warnings(), torch.serialization.safe_globals(known):
            warnings.simplefilter("ignore")  # of formats that it then refuses
            return torch.load(file, map_location="cpu", weights_only=True, mmap=_can_be_mapped(file))
    except pickle.UnpicklingError as error:
        raise ConfigError(_refused(file, str(error), way_out)) from error
    except Exception as error:  # damaged bytes make torch raise anything
        raise ConfigError(_unreadable(file, error)) from error


def _can_be_mapped(file: Path) -> bool:
    """Return False for the older format, and for a compressed archive: torch would map the compressed bytes."""
    try:
        with zipfile.ZipFile(file) as archive:
            return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile):
        return False


def _refused(file: Path, message: str, way_out: str | None) -> str:
    needed = re.search(r"GLOBAL (\S+)", message)
    if needed is None:
        return f"{file} is no file of tensors that torch.save wrote: {_looks(file)}"
    return (
        f"{file} asks for {readable(needed[1])} to be unpickled, which is more than tensors. Unpickling can run any "
        f"code, so it is refused. "
        + (way_out or f"Where you trust the file, this turns it into one of tensors alone:\n  {_conversion(file)}")
    )


def _looks(file: Path) -> str:
    if zipfile.is_zipfile(file):
        return "what is pickled in it is malformed"
    with file.open("rb") as opened:
        return f"it is no zip archive; its first bytes are {opened.read(8)!r}"


def _conversion(file: Path) -> str:
    """Return a line for a shell."""
    program = (
        "import torch; from safetensors.torch import save_file; "
        f'found = torch.load({json.dumps(str(file))}, map_location="cpu", weights_only=False); '
        "found = found.state_dict() if isinstance(found, torch.nn.Module) else found; "
        f"found = next((found[key] for key in {json.dumps(_NESTS)} if key in found), found); "
        "save_file({name: value.clone().contiguous() for name, value in found.items() "
        f"if isinstance(value, torch.Tensor)}}, {json.dumps(str(file.with_suffix('.safetensors')))})"
    )
    return f"python -c {shlex.quote(program)}"


def _unreadable(file: Path, error: Exception) -> str:
    if "TorchScript" in str(error):
        return f"{file} is a TorchScript archive, which holds code; save the module's state_dict() in its place"
    if not zipfile.is_zipfile(file):
        return f"{file} is no file that torch.save wrote, or a damaged one: {_looks(file)}"
    reason = ": ".join(part for part in (type(error).__name__, str(error).partition(". ")[0][:200]) if part)
    return f"{file} is no file that torch.save wrote, or a damaged one: {reason}"


# --- what is in them ----------------------------------------------------------------------------------------------


def _state_dict(file: Path, content: object) -> TensorsAndOthers:
    """Return the tensors of one model in what was read, and the keys of all else."""
    skipped: list[str] = []
    for _ in range(_DEEPEST):
        nest = _nest(content)
        if nest is None or not isinstance(content, Mapping):
            break
        skipped += [readable(str(key)) for key in content if key != nest]
        content = content[nest]
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file} holds a {type(content).__name__}, not tensors by name")
    tensors = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if not tensors:
        keys = ", ".join(readable(str(key)) for key in list(content)[:8]) or "none"
        nests = f"{', '.join(_NESTS[:-1])} or {_NESTS[-1]}"
        raise ConfigError(f"{file} holds no tensors by name, neither at its top nor under {nests}: it has {keys}")
    for name, tensor in tensors.items():
        check_plain(file, name, tensor)
    skipped += [readable(str(key)) for key in content if key not in tensors]
    return {name: tensor.detach() for name, tensor in tensors.items()}, tuple(skipped)


def _nest(content: object) -> str | None:
    if not isinstance(content, Mapping):
        return None
    return next((key for key in _NESTS if isinstance(content.get(key), Mapping) and content[key]), None)


def check_plain(file: Path, name: str, tensor: Tensor) -> None:
    """Raise ConfigError unless it is a plain tensor whose elements are all in the file."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or tensor.device.type != "cpu":
        kind = "quantized" if tensor.is_quantized else f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}"
        raise ConfigError(f"{file}: {readable(name)} is no plain tensor ({kind})")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        shape = list(tensor.shape)
        raise ConfigError(f"{file}: {readable(name)} has shape {shape}, for which its bytes are too few")


def unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the prefixes that wrappers add to all names."""
    for wrapper in _WRAPPERS:
        if tensors and all(name.startswith(wrapper) and name != wrapper for name in tensors):
            return unwrapped({name.removeprefix(wrapper): tensor for name, tensor in tensors.items()})
    return tensors

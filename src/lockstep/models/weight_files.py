"""Read the named tensors in files of weights of any program, without executing code.

    folder     model.safetensors | model.safetensors.index.json      of transformers, or RUN/model
               pytorch_model.bin | pytorch_model.bin.index.json
    file       .safetensors | .pt .pth .bin .ckpt                    written by torch.save

    {"epoch": 3, "state_dict": {"module.head.weight": tensor}}  -->  {"head.weight": tensor}, epoch skipped

If possible, tensors are memory-mapped. A file in a list of hashes is first read completely to verify its hash.
"""

from __future__ import annotations

import difflib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lockstep.core import checksums
from lockstep.core.adapters import ADAPTER_FILE
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.near_runs import IN_FOLDERS, part_of_checkpoint, peer_checkpoint
from lockstep.core.terminal import command_line

_INDEX = ".index.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_NESTS = ("model_state_dict", "MODEL_STATE", "state_dict", "model")
"""Keys of a model's tensors in files that also contain an optimizer's."""
_DEEPEST = 4
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to names."""
_OLDER = b"\x80\x02\x8a"  # torch.save's format before zip archives
_MOST_INDEX = 2**25  # bytes
_MOST_HEADER = 2**24  # bytes, of a safetensors file
_MOST_UNPACKED = 20  # times a compressed file's size
_SMALL = 2**25  # bytes that any file may unpack to


@dataclass(frozen=True, slots=True)
class Weights:
    """The dense tensors of a file or folder, on the CPU, by name; and the keys of other values, which are skipped."""

    place: Path
    tensors: Mapping[str, Tensor]
    skipped: tuple[str, ...] = ()


def read_weights(place: Path, *, adapters: bool = False) -> Weights:
    """Read a file, or all files of a folder; raise RunFailed if one differs from its hash, else ConfigError.

    Args:
        adapters: Read an adapter's file, if the folder has one, instead of refusing it.
    """
    try:
        adapter = place.expanduser() / ADAPTER_FILE
        file = adapter if adapters and adapter.is_file() else _main_file(place.expanduser())
        tensors, skipped = _read_sharded(file) if file.name.endswith(_INDEX) else _read(file)
    except OSError as error:
        raise ConfigError(f"{error.filename or place} can't be read: {error.strerror or error}") from error
    return Weights(file, unwrapped(tensors), skipped)


def refuse_damaged(folder: Path) -> None:
    """Raise RunFailed if a file beside the weights differs from its hash in the folder's list."""
    for file in checksums.listed(folder):
        if file.suffix not in (".safetensors", *TORCH_SUFFIXES):
            _refuse_damaged(file)


def refuse_part(file: Path) -> None:
    """Raise ConfigError for a file that has a checkpoint's other parts beside it, or in another file."""
    if file.is_file() and (what := part_of_checkpoint(file)) is not None:
        raise ConfigError(f"{file} {what}")


def holds_weights(folder: Path) -> bool:
    """Return whether the folder contains a file of weights, or of an adapter, under a usual name."""
    return any((folder / name).is_file() for name in (*IN_FOLDERS, ADAPTER_FILE))


def readable(name: str) -> str:
    """Return a name from an untrusted file in a form that is safe on a terminal."""
    return name if name.isprintable() else repr(name)


# --- the place ----------------------------------------------------------------------------------------------------


def _main_file(place: Path) -> Path:
    if place.is_file():
        refuse_part(place)
        return place
    if place.is_dir():
        for folder in (place, place / "model"):
            for name in IN_FOLDERS:
                if (folder / name).is_file():
                    return folder / name
        raise ConfigError(_no_weights_in(place))
    if place.parent.is_dir():
        candidates = [entry.name for entry in place.parent.iterdir() if entry.is_file() or holds_weights(entry)]
        near = difflib.get_close_matches(place.name, candidates, n=1)
        if near:
            raise ConfigError(f"there is no {place}; did you mean {place.parent / near[0]}?")
    hub = "" if place.is_absolute() or len(place.parts) > 2 else "; set a name of the hub in model.pretrained"
    raise ConfigError(f"there is no {place}{hub}")


def _no_weights_in(folder: Path) -> str:
    places = (folder, *folder.iterdir())
    if (folder / "config.yaml").is_file() or any((place / "manifest.json").is_file() for place in places):
        export = command_line("lockstep", "export", folder, "--to", "FILE.safetensors")
        return f"{folder} has checkpoints or their run, and no weights yet; export the newest's with `{export}`"
    if (foreign := peer_checkpoint(folder, "WEIGHTS")) is not None:
        return f"{folder} {foreign}"
    files = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".safetensors", *TORCH_SUFFIXES))
    names = f"; give one of its files by name: {', '.join(files[:4])}" if files else ""
    return f"{folder} has none of {', '.join(IN_FOLDERS)}{names}"


# --- files --------------------------------------------------------------------------------------------------------

TensorsAndOthers = tuple[dict[str, Tensor], tuple[str, ...]]
"""Tensors by name, and the keys of all other values."""


def _read(file: Path) -> TensorsAndOthers:
    _refuse_damaged(file)
    if file.suffix == ".safetensors":
        return _read_safetensors(file), ()
    if file.suffix in TORCH_SUFFIXES:
        return model_in(file, read_torch(file))
    raise ConfigError(
        f"{file} doesn't have the suffix of a file of weights; give a folder, .safetensors, or a file of torch.save "
        f"({' '.join(TORCH_SUFFIXES)})"
    )


def _refuse_damaged(file: Path) -> None:
    fault = checksums.fault(file)
    if fault is not None:
        again = command_line("lockstep", "export", "RUN", "--to", file.parent, "--force")
        raise RunFailed(
            f"{file} is damaged: {fault}. Export it from a checkpoint of its run again ({again}), or delete that "
            "list if the file was changed on purpose"
        )


def _read_sharded(index: Path) -> TensorsAndOthers:
    try:
        if index.stat().st_size > _MOST_INDEX:
            raise ConfigError(f"{index} has {index.stat().st_size:,} bytes, too many for an index")
        names = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} isn't an index of weights: {type(error).__name__}: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(value, str) for value in names.values()):
        raise ConfigError(f"{index} isn't an index of weights: weight_map doesn't map names to files")
    tensors: dict[str, Tensor] = {}
    skipped: list[str] = []
    for file in sorted(set(names.values())):
        if file != Path(file).name or not (index.parent / file).is_file():
            raise ConfigError(f"{index} names a file {readable(file)} that isn't in the same folder")
        part, others = _read(index.parent / file)
        repeated = next((name for name in part if name in tensors), None)
        if repeated is not None:
            raise ConfigError(f"{index.parent}: {readable(repeated)} is in {file} and in a previous file")
        tensors.update(part)
        skipped += others
    missing = [name for name in names if name not in tensors]
    if missing:
        number = f"{len(missing)} such names"
        raise ConfigError(f"{index} names {readable(missing[0])}, which is in none of its files ({number})")
    return tensors, tuple(skipped)


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
    if _MOST_HEADER < size < file.stat().st_size:  # the library refuses a header beyond the end of the file
        raise ConfigError(  # parsing a header takes many times its size
            f"{file} claims a header of {size:,} bytes, but {_MOST_HEADER:,} are enough for a large model: it "
            "is damaged, or made to exhaust memory"
        )
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file} isn't a safetensors file, or is damaged or cut: {error}") from error


def read_torch(file: Path, stand_ins: Mapping[str, type] = MappingProxyType({}), remedy: str | None = None) -> object:
    """Return the content of a file of torch.save, without executing code.

    Args:
        stand_ins: Replacements for classes of other programs, by their full names.
        remedy: What to do if more has to be unpickled; None: convert it to a file of tensors.

    Raises:
        ConfigError: It isn't such a file, is damaged, or needs more than tensors and classes with stand-ins.
    """
    can_be_mapped = _can_be_mapped(file)
    try:
        allowed: list[Any] = [(stand_in, name) for name, stand_in in stand_ins.items()]
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")  # about formats that it then refuses
            return torch.load(file, map_location="cpu", weights_only=True, mmap=can_be_mapped)
    except pickle.UnpicklingError as error:
        raise ConfigError(_refused(file, str(error), remedy)) from error
    except Exception as error:  # for damaged bytes torch raises any type
        raise ConfigError(_unreadable(file, error)) from error


def _can_be_mapped(file: Path) -> bool:
    """Return False for the older format, and for a compressed archive: torch would map the compressed bytes."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False  # torch.load raises
    unpacked, size = sum(entry.file_size for entry in entries), file.stat().st_size
    if unpacked > _MOST_UNPACKED * size + _SMALL:
        raise ConfigError(
            f"{file} has {size:,} bytes, but claims that they unpack to {unpacked:,}, more than {_MOST_UNPACKED} times "
            "as many; weights don't compress like that: it is damaged, or made to exhaust memory"
        )
    return all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def _refused(file: Path, message: str, remedy: str | None) -> str:
    name = re.search(r"GLOBAL (\S+)", message)
    if name is None:
        return f"{file} isn't a file of tensors by torch.save: {_first_bytes(file) or 'its pickled data is malformed'}"
    return (
        f"{file} needs {readable(name[1])} to be unpickled, which is more than tensors; that is refused, since "
        "unpickling can run any code. "
        + (
            remedy
            or "If you trust the file, load it in Python by torch.load(..., weights_only=False), and save its "
            f"state_dict() by safetensors.torch.save_file as {file.with_suffix('.safetensors').name}"
        )
    )


def _first_bytes(file: Path) -> str | None:
    with file.open("rb") as opened:
        first = opened.read(8)
    if zipfile.is_zipfile(file) or first.startswith(_OLDER):
        return None
    if first.startswith(b"PK"):
        return "it is cut: the end of the zip archive is missing"
    return f"it isn't a zip archive; its first bytes are {first!r}"


def _unreadable(file: Path, error: Exception) -> str:
    if "TorchScript" in str(error):
        return f"{file} is a TorchScript archive, which contains code; save the module's state_dict() instead"
    parts = (type(error).__name__, str(error).partition(". ")[0][:200])
    reason = _first_bytes(file) or ": ".join(part for part in parts if part)
    return f"{file} isn't a file of torch.save, or is damaged: {reason}"


# --- contents -----------------------------------------------------------------------------------------------------


def model_in(file: Path, content: object, key: str | None = None) -> TensorsAndOthers:
    """Return the tensors of a model in the file's content, and the keys of all other values.

    Args:
        key: Where they are, with dots between nested keys; None: at a usual place, or the only one with tensors by
        name.

    Raises:
        ConfigError: It has no tensors by name, or several models.
    """
    skipped: list[str] = []
    keys: list[str | None] = [None] * _DEEPEST if key is None else [*key.split(".")]
    for wanted in keys:
        if not isinstance(content, Mapping):
            break
        nest = wanted if wanted is not None else _nest(file, content)
        if nest is None:
            break
        if nest not in content:
            raise ConfigError(f"{file} has no {readable(nest)}; its keys: {_shown(content)}")
        skipped += [readable(str(other)) for other in content if other != nest]
        content = content[nest]
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file} contains a {type(content).__name__}, not tensors by name")
    tensors = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if not tensors:
        nests = f"{', '.join(_NESTS[:-1])} or {_NESTS[-1]}"
        lack = f"{file} has no tensors by name, at its top level or under {nests}"
        raise ConfigError(f"{lack}; its keys: {_shown(content)}")
    for name, tensor in tensors.items():
        check_plain(file, name, tensor)
    skipped += [readable(str(key)) for key in content if key not in tensors]
    return {name: tensor.detach() for name, tensor in tensors.items()}, tuple(skipped)


def _nest(file: Path, content: Mapping[Any, Any]) -> str | None:
    usual = next((key for key in _NESTS if isinstance(content.get(key), Mapping) and content[key]), None)
    if usual is not None or any(isinstance(value, Tensor) and value.dim() for value in content.values()):
        return usual
    models = [
        key
        for key, value in content.items()
        if isinstance(value, Mapping) and value and all(isinstance(tensor, Tensor) for tensor in value.values())
    ]
    if len(models) > 1:
        convert = command_line("lockstep", "ckpt", "import", file, "WEIGHTS", "--key", readable(str(models[0])))
        raise ConfigError(f"{file} has tensors under {_shown(models)}; choose one: `{convert}`")
    return models[0] if models and isinstance(models[0], str) else None


def _shown(keys: Iterable[object]) -> str:
    return ", ".join(readable(str(key)) for key in list(keys)[:8]) or "none"


def check_plain(file: Path, name: str, tensor: Tensor) -> None:
    """Raise ConfigError if it isn't a plain tensor, or some of its elements aren't in the file."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or tensor.device.type != "cpu":
        kind = "quantized" if tensor.is_quantized else f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}"
        raise ConfigError(f"{file}: {readable(name)} isn't a plain tensor ({kind})")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ConfigError(f"{file}: {readable(name)} has shape {list(tensor.shape)}, but too few bytes for it")


def unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the prefixes that wrappers add to all names."""
    for wrapper in _WRAPPERS:
        if tensors and all(name.startswith(wrapper) and name != wrapper for name in tensors):
            return unwrapped({name.removeprefix(wrapper): tensor for name, tensor in tensors.items()})
    return tensors

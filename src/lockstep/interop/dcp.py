"""Read a checkpoint of torch.distributed.checkpoint (DCP), of any number of ranks, without executing code.

    FOLDER/.metadata        a pickle: names, shapes, and where each part is; only DCP's own records are unpickled
    FOLDER/__0_0.distcp     parts of tensors and other values, each as torch.save writes it

torch assembles the tensors. This module replaces its two calls that unpickle anything, and checks that no part is
missing, which torch would leave uninitialized.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
from torch.distributed._shard.sharded_tensor import metadata as older
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lockstep.core.errors import ConfigError
from lockstep.models.weight_files import readable

METADATA = ".metadata"
_MOST_METADATA = 2**28  # bytes
_MOST_LIST = 2**20  # items, which torch would make for one index
_OLDER = (older.TensorProperties, older.MEM_FORMAT_ENCODING)  # up to torch 2.2
_RECORDS = (*(getattr(records, name) for name in records.__all__), records._MEM_FORMAT_ENCODING, _StorageInfo, *_OLDER)
ALLOWED: Mapping[str, Any] = {
    **{f"{kind.__module__}.{kind.__name__}": kind for kind in _RECORDS},
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "pathlib.PosixPath": PurePosixPath,
    "collections.OrderedDict": dict,
}
"""Everything that the metadata may name, beside dtypes."""


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if f"{module}.{name}" in ALLOWED:
            return ALLOWED[f"{module}.{name}"]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name}")


class _DcpReader(FileSystemReader):
    def read_metadata(self, *arguments: Any, **options: Any) -> records.Metadata:
        file = Path(self.path) / METADATA
        if file.stat().st_size > _MOST_METADATA:
            raise ConfigError(f"{file} has {file.stat().st_size:,} bytes, too many for a checkpoint's metadata")
        try:
            metadata = _RecordUnpickler(io.BytesIO(file.read_bytes())).load()
        except pickle.UnpicklingError as error:
            why = "which isn't a record of DCP; unpickling can run any code"
            raise ConfigError(f"{file} needs {readable(str(error))} to be unpickled, {why}") from error
        _check(Path(self.path), metadata)
        return cast("records.Metadata", metadata)


class _PlainValuesPlanner(_EmptyStateDictLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            loaded = None  # an object of the program
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


def _check(folder: Path, metadata: Any) -> None:
    for place in metadata.storage_data.values():
        name = str(place.relative_path)
        if name != Path(name).name or not (folder / name).is_file():
            raise ConfigError(f"{folder} lacks {readable(name)}: each rank wrote its part. Copy the files of all hosts")
        if place.offset + place.length > (folder / name).stat().st_size:
            raise ConfigError(f"{folder / name} is cut: it should have {place.offset + place.length:,} bytes or more")
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, records.TensorStorageMetadata):
            values = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if values != math.prod(entry.size):
                has = f"only {values:,} of its {math.prod(entry.size):,} values are there"
                raise ConfigError(f"{folder}: {readable(name)} is {list(entry.size)}, but {has}")
    if any(
        isinstance(key, int) and key > _MOST_LIST for path in (metadata.planner_data or {}).values() for key in path
    ):
        raise ConfigError(f"{folder / METADATA} has a list of more than {_MOST_LIST:,} items: it is damaged")


def is_dcp(folder: Path) -> bool:
    """Return whether torch.distributed.checkpoint wrote the folder."""
    return (folder / METADATA).is_file()


def read_dcp(folder: Path) -> dict[Any, Any]:
    """Return what was saved, as nested mappings; values that aren't tensors or plain are None. Raises ConfigError."""
    content: dict[Any, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = _DcpReader(folder)
            reader.read_metadata()  # torch logs the traceback of an error
            _load_state_dict(content, reader, no_dist=True, planner=_PlainValuesPlanner())  # type: ignore[no-untyped-call]
    except BaseException as error:  # torch's CheckpointException isn't an Exception, and holds the ranks' exceptions
        causes = [*getattr(error, "failures", {}).values()]
        cause = causes[0][0] if causes else error
        if isinstance(cause, ConfigError | KeyboardInterrupt | SystemExit):
            raise cause from None
        why = f"{type(cause).__name__}: {str(cause)[:200]}"
        raise ConfigError(f"{folder} isn't a checkpoint of DCP, or is damaged: {why}") from error
    return content

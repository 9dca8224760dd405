"""What ranks have found of the shapes that operations on DTensors have, kept for the ranks of later worlds.

Each process asks fake tensors for the shape, stride and dtype of every operation's result: a sixth of the time of ranks
that live for a second. The answer depends on the operation and its arguments' shapes alone, neither on the mesh nor on
the placements, so a file has it for all of a test run.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_PLAIN = (int, float, bool, str, type(None))
_known: dict[str, Any] = {}
_new: dict[str, Any] = {}  # as the file has them: numbers and names, which are read in no time
_kept: dict[str, Any] = {}
_is_read = False


def _file() -> Path | None:
    folder = os.environ.get("XDG_STATE_HOME")
    return Path(folder, "sharding-memory") if folder else None


def remember_results() -> None:
    """Let torch ask here first, in this process and those that are forked from it."""
    from torch._guards import detect_fake_mode
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    asks: Callable[[Any, Any], Any] = ShardingPropagator._propagate_tensor_meta_non_cached

    def _propagate_tensor_meta_non_cached(self: Any, schema: Any) -> Any:
        key = None if detect_fake_mode() else _key(schema)
        if key is None:
            return asks(self, schema)
        if key not in _known:
            _read()
            if key in _kept:
                _known[key] = _decoded(_kept[key])
            else:
                _known[key] = asks(self, schema)
                with suppress(TypeError):
                    _new[key] = _encoded(_known[key])
        return _known[key]

    ShardingPropagator._propagate_tensor_meta_non_cached = _propagate_tensor_meta_non_cached  # type: ignore[method-assign]


def keep_new_results() -> None:
    """Let the ranks of later worlds read them; a rank calls this at its end."""
    file = _file()
    if _new and file is not None:
        with suppress(OSError), open(file, "ab", buffering=0) as kept:
            kept.write(marshal.dumps(_new))  # one call: ranks that end together don't mix


def _read() -> None:
    global _is_read
    file = _file()
    if _is_read or file is None or not file.exists():
        return
    _is_read = True
    with open(file, "rb") as kept, suppress(EOFError, ValueError, TypeError):
        while True:
            _kept.update(marshal.load(kept))


def _encoded(result: Any) -> Any:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    if isinstance(result, TensorMeta):
        if not all(type(size) is int for size in (*result.shape, *result.stride)):
            raise TypeError
        return (tuple(result.shape), tuple(result.stride), str(result.dtype).removeprefix("torch."))
    if isinstance(result, list):
        return list(map(_encoded, result))
    if isinstance(result, tuple):
        return {"tuple": list(map(_encoded, result))}
    if result is None:
        return None
    raise TypeError


def _decoded(kept: Any) -> Any:
    import torch
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    if isinstance(kept, tuple):
        shape, stride, dtype = kept
        return TensorMeta(torch.Size(shape), stride, getattr(torch, dtype))
    if isinstance(kept, dict):
        return tuple(map(_decoded, kept["tuple"]))
    return kept if kept is None else list(map(_decoded, kept))


def _key(schema: Any) -> str | None:
    """The operation and what its arguments are but for their placements; None: that isn't known."""
    try:
        arguments = tuple(map(_shape, schema.args_schema))
        options = tuple((name, _shape(value)) for name, value in sorted(schema.kwargs_schema.items()))
    except TypeError:
        return None
    return repr((str(schema.op), arguments, options))


def _shape(value: Any) -> Any:
    import torch
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    if isinstance(value, DTensorSpec):
        if value.tensor_meta is None:
            raise TypeError
        return ("tensor", value.mesh.device_type, *map(_shape, value.tensor_meta))
    if isinstance(value, torch.Size | tuple | list):
        return (type(value).__name__, *map(_shape, value))
    if type(value) in _PLAIN or isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return value
    raise TypeError

"""Buffers that are state, such as running means: each rank's forwards change its own.

As under DistributedDataParallel, forwards start from the first rank's buffers, which are also evaluated and saved.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.distributed.collectives import group_or_all
from lockstep.distributed.shard_boxes import TensorInfo, dtype_name

if TYPE_CHECKING:
    from torch import Tensor, nn


_Spec = tuple["torch.Size", "torch.dtype"]
"""Shape and dtype of a buffer."""
_SMALL = 2**20  # bytes that are copied in 0.1 ms


class SyncedBuffers:
    """The saved buffers of a model, without tables that every rank computes alike.

    Args:
        group: The ranks that hold the same model; None: all.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._owners = buffer_owners(model)
        self._devices: dict[str, torch.device] = {}
        self._specs = _specs(current_buffers(self._owners))
        self._update_begins = True

    def __bool__(self) -> bool:
        return bool(self._owners)

    def before_forward(self, last: bool) -> None:
        """Synchronize before the first micro-batch of an update; `last`: the micro-batch is the update's last."""
        if self.begins_update(last):
            self.synchronize()

    def begins_update(self, last: bool) -> bool:
        """Return whether a micro-batch is an update's first, to be called for each; `last`: it is the update's last."""
        begins, self._update_begins = self._update_begins, last
        return begins

    def synchronize(self) -> None:
        """Copy the first rank's buffers to all ranks of the group.

        Raises:
            ConfigError: Forwards have given them other shapes or dtypes on some ranks.
        """
        if not self._owners:
            return
        self.prepare()
        ranks = group_or_all(self._group)
        for buffer in current_buffers(self._owners):
            if buffer is not None:
                ranks.copy_first(buffer.detach())

    def prepare(self) -> None:
        """Let the modules hold buffers that can be copied from rank to rank. All ranks together.

        Raises:
            ConfigError: Forwards have given them other shapes or dtypes on some ranks.
        """
        buffers = current_buffers(self._owners)
        for (name, owner), buffer in zip(self._owners.items(), buffers, strict=True):
            if buffer is not None:
                device = self._devices.setdefault(name, buffer.device)
                if buffer.device != device or _is_expanded(buffer):
                    owner[_key(name)] = buffer.to(device).contiguous()
        specs = _specs(buffers)
        if specs != self._specs:
            self._refuse_differences(specs)
            self._specs = specs

    def _refuse_differences(self, own: Sequence[_Spec | None]) -> None:
        ranks = group_or_all(self._group)
        try:
            gathered = ranks.gather_if_all((dist.get_rank(), own))
        except RunFailed as error:
            changes = zip(self._owners, self._specs, own, strict=True)
            name, before, now = next(change for change in changes if change[1] != change[2])
            why = f"was {_text(before)}, and is {_text(now)} on rank {dist.get_rank()}, but not on all: {error}"
            raise _not_alike(name, why) from error
        (first, of_first), *others = cast("list[tuple[int, Sequence[_Spec | None]]]", gathered)
        for rank, specs in others:
            for name, spec, expected in zip(self._owners, specs, of_first, strict=True):
                if spec != expected:
                    raise _not_alike(name, f"is {_text(expected)} on rank {first} and {_text(spec)} on rank {rank}")


def buffer_owners(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the `_buffers` that hold each saved buffer, by its name: forwards may replace it."""
    saved = set(model.state_dict())
    owners: dict[str, dict[str, Any]] = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}".lstrip(".")
            if name in saved or (buffer is None and key not in module._non_persistent_buffers_set):
                owners[name] = module._buffers
    return owners


def current_buffers(owners: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Return the buffers that the modules hold now, None where there is none."""
    return [owner.get(_key(name)) for name, owner in owners.items()]


def _key(name: str) -> str:
    """Return the name of a buffer in its module."""
    return name.rpartition(".")[2]


def _specs(buffers: Sequence[Any]) -> list[_Spec | None]:
    return [None if buffer is None else (buffer.shape, buffer.dtype) for buffer in buffers]


def _text(spec: _Spec | None) -> str:
    return "None" if spec is None else str(TensorInfo(dtype_name(spec[1]), tuple(spec[0])))


def _not_alike(name: str, why: str) -> ConfigError:
    message = (
        f"forwards have given the buffer {name} another shape or dtype: it {why}. All ranks continue with the first "
        "rank's buffers; give it the same shape and dtype on all ranks, or register it with persistent=False"
    )
    return ConfigError(Problem("", "model", message))


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether elements share memory, so that nothing can be written to them."""
    return not tensor.is_contiguous() and any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


class BufferSnapshot:
    """Saved buffers as they were before an update, whose forwards may change them.

    Buffers are left out if they are too large to be copied in every update at no cost.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = buffer_owners(model)
        allowed = max(_SMALL, sum(parameter.nbytes for parameter in model.parameters()) // 100)
        if sum(buffer.nbytes for buffer in current_buffers(self._owners) if buffer is not None) > allowed:
            self._owners = {}
        self._sources: list[Any] = []
        self._specs: list[_Spec | None] = []
        self._copies: list[Any] = []

    @property
    def names(self) -> frozenset[str]:
        """Names of the buffers that are copied."""
        return frozenset(self._owners)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers as they are now."""
        if not self._owners:
            return
        now = current_buffers(self._owners)
        specs = _specs(now)
        if specs == self._specs and all(map(operator.is_, now, self._sources)):
            copies, buffers = ([tensor for tensor in each if tensor is not None] for each in (self._copies, now))
            if copies:
                torch._foreach_copy_(copies, buffers)
        else:
            self._sources, self._specs = now, specs
            self._copies = [None if buffer is None else buffer.detach().clone() for buffer in now]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the model's buffers to the values of the last `take`, where forwards have replaced them, too."""
        copied: Any = zip(self._owners.items(), self._sources, self._copies, strict=True)
        for (name, owner), source, copy in copied:
            key = _key(name)
            if copy is None:
                owner[key] = None
            elif owner.get(key) is source and source.shape == copy.shape and not _is_expanded(source):
                source.copy_(copy)
            else:
                owner[key] = copy.clone()

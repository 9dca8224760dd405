"""Buffers that are state, such as running means.

As under DistributedDataParallel, forwards start from the first rank's buffers, which are also evaluated and saved.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.distributed.collectives import group_or_all
from lockstep.distributed.shard_boxes import TensorInfo, dtype_name, is_sharded, live_part

if TYPE_CHECKING:
    from torch import nn


_Spec = tuple["torch.Size", "torch.dtype"]
"""Shape and dtype of a buffer."""
_OF_NORMS = {"running_mean", "num_batches_tracked"}
_SMALL = 2**20  # bytes that are copied in 0.1 ms


class SyncedBuffers:
    """The saved buffers of a model that the ranks of `group` hold alike; None: all ranks."""

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
        """Copy the first rank's buffers to the group; raise ConfigError if some ranks' have other shapes or dtypes."""
        if not self._owners:
            return
        self.prepare()
        ranks = group_or_all(self._group)
        for buffer in current_buffers(self._owners):
            if buffer is not None:
                ranks.copy_first(buffer.detach())

    def prepare(self) -> None:
        """Let the modules hold buffers that can be copied from rank to rank. All ranks together."""
        buffers = current_buffers(self._owners)
        for (name, owner), buffer in zip(self._owners.items(), buffers, strict=True):
            if buffer is not None:
                device = self._devices.setdefault(name, buffer.device)
                if buffer.device != device or is_expanded(buffer):
                    owner[_key(name)] = buffer.to(device).contiguous()
        specs = _specs(buffers)
        if specs != self._specs:
            self._refuse_differences(specs)
            self._specs = specs

    def _refuse_differences(self, own: Sequence[_Spec | None]) -> None:
        changes = zip(self._owners, self._specs, own, strict=True)
        name, before, now = next(change for change in changes if change[1] != change[2])
        message = (
            f"forwards have given the buffer {name} another shape or dtype on some ranks: {_text(now)} on rank "
            f"{dist.get_rank()}, {_text(before)} before. All ranks continue with the first rank's buffers; give it the "
            "same shape and dtype on all, or register it with persistent=False"
        )
        refusal = ConfigError(Problem("", "model", message))
        try:
            everywhere = group_or_all(self._group).gather_if_all(own)
        except RunFailed as error:
            raise refusal from error
        if any(specs != own for specs in everywhere):
            raise refusal


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
    return name.rpartition(".")[2]


def _specs(buffers: Sequence[Any]) -> list[_Spec | None]:
    return [None if buffer is None else (buffer.shape, buffer.dtype) for buffer in buffers]


def _text(spec: _Spec | None) -> str:
    return "None" if spec is None else str(TensorInfo(dtype_name(spec[1]), tuple(spec[0])))


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements share memory, so that nothing can be written to them."""
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    return not tensor.is_contiguous() and any(step == 0 and size > 1 for step, size in dims)


class BufferSnapshot:
    """Saved buffers as they were before an update.

    The largest are left out if all are too many bytes to be copied in every update at no cost.
    """

    def __init__(self, model: nn.Module) -> None:
        owners = buffer_owners(model)
        buffers = dict(zip(owners, current_buffers(owners), strict=True))
        sizes = {name: 0 if buffer is None else buffer.nbytes for name, buffer in buffers.items()}
        by_size = sorted(owners, key=sizes.__getitem__)
        allowed = max(_SMALL, sum(parameter.nbytes for parameter in model.parameters()) // 100)
        totals = zip(by_size, accumulate(sizes[name] for name in by_size), strict=True)
        copied = {name for name, total in totals if total <= allowed}
        self._owners = {name: owner for name, owner in owners.items() if name in copied}
        self._sources: list[Any] = []
        self._specs: list[_Spec | None] = []
        self._parts: list[Any] = []  # what this rank holds of the sources
        self._copies: list[Any] = []
        self._groups: list[list[int]] = []  # indices of buffers of one device and dtype: a kernel copies them together

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
        if self._are_sources(now):
            for group in self._groups:
                torch._foreach_copy_(_of(group, self._copies), _of(group, self._parts))
            return
        self._sources, self._specs, self._parts = now, _specs(now), _parts(now)
        self._copies = [None if part is None else part.detach().clone() for part in self._parts]
        self._groups = _groups(self._parts, self._copies)

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return the buffers that forwards have changed since the last `take`, without torch's norms'."""
        names, parts = [], _parts(current_buffers(self._owners))
        for (name, owner), now, copy in zip(self._owners.items(), parts, self._copies, strict=True):
            if now is None or copy is None or _OF_NORMS & owner.keys():
                continue
            if now.dtype != copy.dtype or not torch.equal(now, copy):
                names.append(name)
        return names

    @torch.no_grad()
    def put_back(self, *, unless: bool | Tensor = False) -> None:
        """Restore the buffers of the last `take`, also those that forwards have replaced.

        Args:
            unless: Leave them as they are if this is true. If it is a tensor, the host doesn't wait, and a buffer that
            is now
                None, sharded, or of another shape or dtype stays as it is.
        """
        if isinstance(unless, Tensor):
            self._put_back_on_device(unless)
        elif not unless:
            specs = _specs(self._sources)
            for index, (name, owner) in enumerate(self._owners.items()):
                source, part, copy = self._sources[index], self._parts[index], self._copies[index]
                if copy is not None and specs[index] == self._specs[index] and _fits(part, copy):
                    part.copy_(copy)
                elif copy is not None:
                    source = copy.clone()
                owner[_key(name)] = source

    def _put_back_on_device(self, unless: Tensor) -> None:
        now, groups = current_buffers(self._owners), self._groups
        if not self._are_sources(now):
            kept = [index for index, buffer in enumerate(now) if buffer is self._sources[index]]
            groups = _groups(self._parts, self._copies, kept)
            for index, (name, owner) in enumerate(self._owners.items()):
                if now[index] is not self._sources[index]:  # not written to: it may be a view of another tensor
                    owner[_key(name)] = _chosen(unless, now[index], self._copies[index])
        for group in groups:
            buffers, copies = _of(group, self._parts), _of(group, self._copies)
            after, before = (torch.cat([part.reshape(-1) for part in of_group]) for of_group in (buffers, copies))
            chosen = torch.where(unless.to(after.device), after, before)
            flat = torch.split(chosen, [part.numel() for part in buffers])
            values = [value.view(part.shape) for value, part in zip(flat, buffers, strict=True)]
            torch._foreach_copy_(buffers, values)

    def _are_sources(self, buffers: Sequence[Any]) -> bool:
        same = len(buffers) == len(self._sources) and all(map(operator.is_, buffers, self._sources))
        return same and _specs(buffers) == self._specs


def _of(indices: Sequence[int], tensors: Sequence[Any]) -> list[Tensor]:
    return [tensors[index] for index in indices]


def _parts(buffers: Sequence[Any]) -> list[Any]:
    return [None if buffer is None else live_part(buffer) for buffer in buffers]


def _groups(parts: Sequence[Any], copies: Sequence[Any], indices: Sequence[int] | None = None) -> list[list[int]]:
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index in range(len(parts)) if indices is None else indices:
        part, copy = parts[index], copies[index]
        if part is not None and copy is not None and _fits(part, copy):
            groups.setdefault((copy.device, copy.dtype), []).append(index)
    return [*groups.values()]


def _chosen(unless: Tensor, buffer: Any, copy: Any) -> Any:
    if buffer is None or copy is None or is_sharded(buffer) or not _alike(buffer, copy):
        return buffer
    return torch.where(unless.to(buffer.device), buffer, copy)


def _fits(part: Tensor, copy: Tensor) -> bool:
    return not is_expanded(part) and _alike(part, copy)


def _alike(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)

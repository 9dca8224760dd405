"""Values and optimizer state of stage 3 in files on NVMe, which DeepSpeed reads and writes group by group.

A group of parameters (`zero_optimization.sub_group_size` elements) is in memory while it is updated. Groups of less
than 1 MiB stay there, and so do gradients, which DeepSpeed would write twice.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError, Problem

_KEY = "parallel.deepspeed.offload_optimizer"
_PREFIX = "lockstep-"


def swap_folder(parent: str) -> Path:
    """Make a folder for the files of this process; those of processes that have ended are deleted."""
    _load_async_io()
    place, own = Path(parent), f"{_PREFIX}{socket.gethostname()}-"
    try:
        place.mkdir(parents=True, exist_ok=True)
        for folder in place.glob(f"{own}*"):
            process = folder.name.removeprefix(own).partition("-")[0]
            if process.isdecimal() and not Path("/proc", process).exists():
                shutil.rmtree(folder, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{own}{os.getpid()}-", dir=place))
    except OSError as error:
        why = f"{place} can't be written: {error.strerror or error}"
        raise ConfigError(Problem("", "parallel.deepspeed.nvme_path", why)) from error


def _load_async_io() -> None:
    """Load DeepSpeed's extension for files, which compiles it the first time on a machine."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder: Any = AsyncIOBuilder()
    reason = "libaio is missing (on Debian: apt-get install libaio-dev)"
    try:
        if builder.is_compatible():
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                builder.load()
            return
    except Exception as error:  # of a compiler, of ninja
        reason = str(error).partition("\n")[0]
    raise ConfigError(Problem("", _KEY, f"nvme needs DeepSpeed's async_io, which can't be built: {reason}; take cpu"))


class SwappedGroups:
    """The groups of a ZeRO-3 optimizer, by index, that are in files between updates; `folder` holds nothing else."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._flats: Sequence[Tensor] = zero.fp32_partitioned_groups_flat
        self.groups = frozenset(group for group in range(len(self._flats)) if zero._swappable_optimizer_subgroup(group))
        self.folder = Path(zero.optimizer_swapper.swap_folder)
        zero._swap_out_offload_fp32_gradients = lambda gradients, offsets: None
        zero.unscale_and_clip_grads = lambda group, norm: self._take_gradient(group)

    @contextlib.contextmanager
    def in_memory(self, group: int) -> Iterator[None]:
        """Hold a group's values and state in memory while the block runs. What it changes is not written."""
        if group not in self.groups:
            yield
            return
        self._zero._optimizer_states_and_gradient_swap_in(group)
        try:
            yield
        finally:
            self._zero._release_swap_buffers(group)

    def make_state(self, group: int, entries: Sequence[str]) -> None:
        """Write a group's optimizer state, all zeros."""
        self._zero._optimizer_states_and_gradient_swap_in(group)
        state = self._zero.optimizer.state[self._flats[group]]
        for entry in entries:
            state[entry] = torch.zeros_like(self._flats[group], requires_grad=False)
        self._zero._optimizer_states_and_gradient_swap_out(group)

    def file(self, group: int, entry: str | None = None) -> Path:
        """Return the file of a group's values, or of an entry of its optimizer state."""
        name = self._flats[group].ds_id  # type: ignore[attr-defined]
        return self.folder / f"{name if entry is None else f'{entry}-{name}'}.tensor.swp"

    def gradients(self, group: int) -> list[Tensor]:
        """Return this rank's part of the gradient of each of a group's parameters."""
        parts = self._zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        return [parts[parameter.ds_id] for parameter in self._zero.fp16_groups[group]]

    def delete(self) -> None:
        """Delete the files: DeepSpeed has released them."""
        shutil.rmtree(self.folder.parents[2], ignore_errors=True)  # made by `swap_folder`

    def _take_gradient(self, group: int) -> None:
        if group in self.groups:
            self._flats[group].grad = torch.cat([part.reshape(-1) for part in self.gradients(group)])

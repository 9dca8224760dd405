"""DistributedDataParallel: every rank holds everything; gradients are reduced while backward goes on.

rank 0   model, gradient ---.                      .--> optimizer     the same update everywhere
rank 1   model, gradient ---+-- bucket by bucket --+--> optimizer
                                mean over ranks
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.core.errors import ConfigError, Problem
from lockstep.sharding.buffers import SharedBuffers
from lockstep.sharding.single import NO_WINDOW, SquaredNorm, gradients, trainable_parameters
from lockstep.sharding.state import (
    live_state,
    restore_state,
    unused_parameters,
    whole_gradients,
    whole_weights,
    without_gradient,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.config.schema import DDP
    from lockstep.core.protocols import Optimizer
    from lockstep.core.records import TrainingState


_LACKING = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
"""In torch's message, of the trained parameters in their order."""


class ReplicatedByDDP:
    """Args:
    ranks: of the data axis.
    device: where the model already lies.
    backend: of the collectives; some compressions don't run on some.
    """

    norm_is_whole = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        squared_norm: SquaredNorm,
        options: DDP,
        *,
        ranks: int,
        device: torch.device,
        backend: str,
    ) -> None:
        self.bare = model
        self.averages_over = ranks
        self._optimizer = optimizer
        self._parameters = trainable_parameters(model)
        self._squared_norm = squared_norm
        self._buffers = SharedBuffers(model)
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            bucket_cap_mb=options.bucket_mb,
            **_buffer_option(bool(self._buffers)),  # type: ignore[arg-type]
        )
        self._after_discard = _compress(self._ddp, options, backend)
        self._learns_graph = options.static_graph
        self._before_unused = "leave parallel.ddp.static_graph out and " if options.static_graph else ""
        self._reduces = True

    @property
    def module(self) -> nn.Module:
        return self._ddp

    def window(self, last: bool) -> AbstractContextManager[object]:
        self._reduces = last
        if last or self._learns_graph:
            # A static graph is learned in the first backward, which must reduce (torch 2.13 asserts it). Gradients
            # that are reduced already are the same on all ranks: the mean that comes with the last leaves them be.
            self._learns_graph = False
            return NO_WINDOW
        return self._ddp.no_sync()

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        loss.backward(seed)  # type: ignore[no-untyped-call]
        if self._reduces:
            self._refuse_unreduced()

    def unreached(self) -> list[str]:
        return without_gradient(self.bare)

    def _refuse_unreduced(self) -> None:
        """Raises ConfigError: this rank's backward left parameters out, whose reduction other ranks are waiting for."""
        try:
            self._ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]  # torch's own words come in the next forward, after the hang
        except RuntimeError as error:
            found = _LACKING.search(str(error))
            trained = [name for name, one in self.bare.named_parameters() if one.requires_grad]
            names = [trained[int(place)] for place in found[1].split()] if found else self.unreached()
            where = f"in the last micro-batch of an update on rank {dist.get_rank()}, and others may wait for it"
            raise unused_parameters(names or trained, where=where, before=self._before_unused) from error

    def squared_norm(self) -> Tensor:
        return self._squared_norm(gradients(self._parameters))

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._optimizer.update(rate, divisor, keep)
        if self._after_discard is not None and not keep:
            self._after_discard()

    def synchronize(self) -> None:
        self._buffers.synchronize()

    def weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return whole_weights(self.bare, wanted)

    def gradients(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return whole_gradients(self.bare, wanted)

    def close(self) -> None:
        """A DDP module that outlives its group keeps the group: see `Together.close`."""
        self._ddp = cast("DistributedDataParallel", None)

    def state(self) -> TrainingState:
        return live_state(self.bare, self._optimizer)

    def restore(self, state: TrainingState) -> None:
        restore_state(self.bare, self._optimizer, state)


def _buffer_option(synchronise: bool) -> dict[str, bool]:
    """Whether a forward starts from the first rank's buffers, in the words of this torch (renamed in 2.13)."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": synchronise}


def _compress(module: DistributedDataParallel, options: DDP, backend: str) -> Callable[[], None] | None:
    """Registers the compression asked for; returns what must happen when an update is discarded, if anything."""
    if options.compression == "none":
        return None
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if options.compression == "fp16":
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return None
    if options.compression == "bf16":
        if backend == "gloo":
            message = "gloo has no bf16 all-reduce; fp16 and powersgd run on it, bf16 on nccl"
            raise ConfigError(Problem("", "parallel.ddp.compression", message))
        module.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return None
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=options.powersgd.rank,
        start_powerSGD_iter=options.powersgd.start_step,
    )
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def forget() -> None:
        """What PowerSGD remembers of a gradient that was not finite would poison all later ones."""
        state.error_dict.clear()
        state.p_memory_dict.clear()
        state.q_memory_dict.clear()

    return forget

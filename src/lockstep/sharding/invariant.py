"""Replicas that sum gradients in one order: the sum is bitwise identical on any number of ranks.

    rank 0   backward  backward  backward         rank 1   backward  backward      each into a buffer of its own:
                0         1         2                         3         4          gradient | which there are | loss
                '----+----'         |                         |         |
                                    '------------+------------'         |          the tree is `plan.summation`'s

Each rank receives one slice of every node that a rank can't add itself, adds them in the tree's order, and sends the
sum to all. The sum of the losses is reduced the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import iadd
from typing import TYPE_CHECKING

import torch

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import GradientStep
from lockstep.plan.batch import Share, share_of
from lockstep.plan.summation import FixedSum, Node, nodes_of, total
from lockstep.sharding.buffers import buffer_owners, current_buffers
from lockstep.sharding.context import Builder, Sharding, ShardingContext
from lockstep.sharding.model_state import ModelState
from lockstep.sharding.single import (
    named_gradients,
    present_gradients,
    refuse_other_than_fp32,
    run_backward,
    trainable_parameters,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Optimizer


class InvariantStep(GradientStep):
    """The step with a sum of gradients that is bitwise identical on any number of ranks.

    `parallel.ddp.bucket_mb` is the size of the part of the gradient that ranks exchange at a time.

    Raises:
        ConfigError: Parameters have another precision than fp32.
    """

    def __init__(self, context: ShardingContext, optimizer: Optimizer) -> None:
        model, axis = context.model, context.world.axis
        trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
        refuse_other_than_fp32(trained, "run.determinism", "invariant adds gradients")
        self.module = model
        self._optimizer = optimizer
        self._squared_norm = context.squared_norm
        self._axis = axis
        self._share_of = partial(context.plan.batch.share, rank=context.position.share)  # of an update of N samples
        self._parameters = trainable_parameters(model)
        self._buffer_owners = buffer_owners(model)
        self._free: list[_FlatGradient] = []  # memory of earlier terms
        slice_bytes = int(context.config.parallel.ddp.bucket_mb * 2**20)
        self._width = max(1, slice_bytes // 4 // axis.size)
        self._share = Share(0, 0, 0)
        self._terms = FixedSum[_FlatGradient](0, self._add)
        self._next = 0
        self._missing: set[int] = set()
        self._whole: _FlatGradient | None = None
        for tensor in (*model.parameters(), *model.buffers()):
            axis.copy_first(tensor.detach())

    # --- an update ------------------------------------------------------------------------------------------------

    def begin_update(self, samples: int) -> None:
        self._release()
        for parameter in self._parameters:
            parameter.grad = None
        self._share = share = self._share_of(samples)
        self._next = share.first
        self._terms = FixedSum(share.terms, self._add)
        self._missing = set(range(len(self._parameters)))

    @contextmanager
    def sync_context(self, last: bool) -> Iterator[None]:
        before = current_buffers(self._buffer_owners)
        versions = [_version(buffer) for buffer in before]
        yield
        pairs = zip(self._buffer_owners, before, versions, current_buffers(self._buffer_owners), strict=True)
        changed = [name for name, old, version, new in pairs if new is not old or _version(new) != version]
        if changed:
            message = (
                f"invariant, but the model's forward changes {', '.join(changed)}, which is part of its state: each "
                "rank would change its own, by its own samples; set deterministic, or use a model without running state"
            )
            raise ConfigError(Problem("", "run.determinism", message))
        if last:
            self._reduce()

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        if self._next == self._share.stop:  # padding samples, after a rank's other micro-batches, are no term
            return
        run_backward(loss, seed)
        term = self._buffer()
        self._missing &= term.fill(self._parameters, loss.detach())
        self._terms.put(Node(0, self._next), term)
        self._next += 1

    def squared_norm(self) -> Tensor:
        return self._squared_norm(present_gradients(self._parameters))

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return named_gradients(self.module)

    def loss_sum(self) -> Tensor:
        """Return the sum of losses of the whole update, 0-dim, once the last `sync_context` is closed."""
        assert self._whole is not None, "the last sync_context closes first"
        return self._whole.loss

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._optimizer.update(rate, divisor, keep)
        self._release()

    # --- the sum --------------------------------------------------------------------------------------------------

    def _add(self, left: _FlatGradient, right: _FlatGradient) -> _FlatGradient:
        left.flat.add_(right.flat)
        self._free.append(right)
        return left

    def _buffer(self) -> _FlatGradient:
        return self._free.pop() if self._free else _FlatGradient(self._parameters, self._axis.size)

    def _reduce(self) -> None:
        held = self._terms.values
        whole = held[0] if held else self._buffer()
        own = [buffer.flat for buffer in held]
        terms, ranks = self._share.terms, self._axis.size
        shares = [share_of(terms, rank, ranks) for rank in range(ranks)]
        nodes = [nodes_of(share.first, share.stop, terms) for share in shares]
        numbers = [len(of_rank) for of_rank in nodes]
        in_order = [node for of_rank in nodes for node in of_rank]
        for start in range(0, whole.flat.numel(), self._width * ranks):
            part = slice(start, start + self._width * ranks)
            rows = _rows([flat[part] for flat in own], whole.flat[part], ranks)
            width = rows.shape[2]
            taken = [number * width for number in numbers]
            received = self._axis.start_all_to_all(rows.view(-1), [rows[0].numel()] * ranks, taken)()
            values = received.to(rows.device).view(-1, width)
            self._axis.concatenate(total(in_order, values, terms, iadd), whole.flat[part])
        self._free.extend(held[1:])
        self._terms = FixedSum(terms, self._add)
        self._whole = whole
        whole.set_gradients(self._parameters, self._missing)

    def _release(self) -> None:
        self._free.extend(self._terms.values)
        if self._whole is not None:
            self._free.append(self._whole)
        self._terms = FixedSum(self._share.terms, self._add)
        self._whole = None


def build(context: ShardingContext) -> Sharding:
    """Return the sharding of an invariant run, under single or ddp."""
    optimizer = context.optimizer(context.model.named_parameters())
    step = InvariantStep(context, optimizer)
    return Sharding(step, ModelState(context.model, optimizer), loss_sum=step.loss_sum)


BUILDER = Builder(build)


def _version(buffer: Tensor | None) -> int:
    return 0 if buffer is None else buffer._version


class _FlatGradient:
    """A contiguous gradient, then a 1 for each parameter that has one, then the sum of losses; padded."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        elements = sum(sizes)
        length = elements + len(sizes) + 1
        self.flat = torch.zeros(-(-length // ranks) * ranks, device=parameters[0].device)
        parts = self.flat[:elements].split(sizes)  # type: ignore[no-untyped-call]
        self._views = [_like(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]
        self._present = self.flat[elements : elements + len(sizes)]
        self.loss = self.flat[elements + len(sizes)]

    @torch.no_grad()
    def fill(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> set[int]:
        """Move the parameters' gradients here; return the indices of those that have none, which counts as zero."""
        missing = {index for index, parameter in enumerate(parameters) if parameter.grad is None}
        present = [view for index, view in enumerate(self._views) if index not in missing]
        if present:
            torch._foreach_copy_(present, present_gradients(parameters))
        self._present.fill_(1.0)
        for index in missing:
            self._views[index].zero_()
            self._present[index] = 0.0
        self.loss.copy_(loss)
        for parameter in parameters:
            parameter.grad = None
        return missing

    def set_gradients(self, parameters: Sequence[nn.Parameter], missing: set[int]) -> None:
        """Set the gradients, except those that had none in any term; `missing` had none in this rank's terms."""
        present = self._present.tolist() if missing else []
        for index, (parameter, view) in enumerate(zip(parameters, self._views, strict=True)):
            parameter.grad = view if index not in missing or present[index] else None


def _like(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return the part in the parameter's strides, if these are dense: optimizers' kernels need equal strides."""
    size, stride = parameter.size(), parameter.stride()
    reach = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if reach == math.prod(size) and 0 not in stride:
        return part.as_strided(size, stride, part.storage_offset())
    return part.view(size)


def _rows(own: Sequence[Tensor], like: Tensor, ranks: int) -> Tensor:
    """Return [ranks, nodes, width] of flat parts [ranks x width]."""
    if not own:
        return like.new_empty(ranks, 0, like.numel() // ranks)
    if len(own) == 1:
        return own[0].view(ranks, 1, -1)
    return torch.stack([flat.view(ranks, -1) for flat in own], dim=1)

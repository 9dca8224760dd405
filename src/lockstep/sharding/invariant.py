"""Replicas whose gradients are added in one order, so that the sum has the same bits on any number of ranks.

    rank 0   backward  backward  backward         rank 1   backward  backward      each into a buffer of its own:
                0         1         2                         3         4          gradient | which there are | loss
                '----+----'         |                         |         |
                                    '------------+------------'         |          the tree is `plan.summation`'s

What a rank can't add by itself, a few nodes, is cut in as many slices as there are ranks; each rank is given all nodes'
parts of one slice, adds them in the tree's order, and hands the sum to all: as many bytes as an all-reduce, if a
rank's micro-batches are a whole node. The sum of the losses travels the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lockstep.core.errors import ConfigError, Problem
from lockstep.plan.batch import Share, share_of
from lockstep.plan.summation import FixedSum, Node, nodes_of, total
from lockstep.sharding.single import SquaredNorm, gradients, trainable_parameters
from lockstep.sharding.state import live_state, restore_state, whole_gradients, whole_weights, without_gradient

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Axis, Optimizer
    from lockstep.core.records import TrainingState


class Invariant:
    """Args:
    axis: the data axis.
    slice_bytes: of the gradient, how much all ranks exchange at a time.

    Raises:
        ConfigError: parameters in another precision than fp32.
    """

    averages_over = 1
    norm_is_whole = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        squared_norm: SquaredNorm,
        axis: Axis,
        slice_bytes: int,
    ) -> None:
        _refuse_other_precisions(model)
        self.bare = self.module = model
        self._optimizer = optimizer
        self._squared_norm = squared_norm
        self._axis = axis
        self._parameters = trainable_parameters(model)
        self._slots = _saved_slots(model)
        self._buffers = _Buffers(self._parameters, axis.size)
        self._width = max(1, slice_bytes // 4 // axis.size)
        self._share = Share(0, 0, 0)
        self._terms = FixedSum[_Buffer](0, self._add)
        self._next = 0
        self._lacking: set[int] = set()
        self._whole: _Buffer | None = None
        for tensor in (*model.parameters(), *model.buffers()):
            axis.copy_first(tensor.detach())

    # --- an update ------------------------------------------------------------------------------------------------

    def begin(self, share: Share) -> None:
        """Before the first window of an update: which of its micro-batches are this rank's."""
        self._let_go()
        for parameter in self._parameters:
            parameter.grad = None
        self._share, self._next = share, share.first
        self._terms = FixedSum(share.terms, self._add)
        self._lacking = set(range(len(self._parameters)))

    @contextmanager
    def window(self, last: bool) -> Iterator[None]:
        before = [slot.now for slot in self._slots]
        yield
        changed = [
            slot.name
            for slot, (tensor, version) in zip(self._slots, before, strict=True)
            if slot.differs(tensor, version)
        ]
        if changed:
            raise _changes_in_forward(changed)
        if last:
            self._reduce()

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        """Of a micro-batch without weight, which comes after a rank's others, none: it is no term of the sum."""
        if self._next == self._share.stop:
            return
        loss.backward(seed)  # type: ignore[no-untyped-call]
        term = self._buffers.take()
        self._lacking &= term.fill(self._parameters, loss.detach())
        self._terms.put(Node(0, self._next), term)
        self._next += 1

    def unreached(self) -> list[str]:
        return without_gradient(self.bare)

    def squared_norm(self) -> Tensor:
        return self._squared_norm(gradients(self._parameters))

    def loss_sum(self) -> Tensor:
        """Of the whole update, 0-dim, once the last window is closed."""
        assert self._whole is not None, "the last window closes first"
        return self._whole.loss

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        self._optimizer.update(rate, divisor, keep)
        self._let_go()

    # --- the sum --------------------------------------------------------------------------------------------------

    def _add(self, left: _Buffer, right: _Buffer) -> _Buffer:
        left.flat.add_(right.flat)
        self._buffers.give_back(right)
        return left

    def _reduce(self) -> None:
        """From this rank's nodes to the whole sum, which the parameters are then given parts of."""
        held = self._terms.values
        whole = held[0] if held else self._buffers.take()
        own = [buffer.flat for buffer in held]
        terms, ranks = self._share.terms, self._axis.size
        shares = [share_of(terms, rank, ranks) for rank in range(ranks)]
        nodes = [nodes_of(share.first, share.stop, terms) for share in shares]
        numbers = [len(one) for one in nodes]
        in_order = [node for one in nodes for node in one]
        for at in range(0, whole.flat.numel(), self._width * ranks):
            part = slice(at, at + self._width * ranks)
            found = self._axis.exchange(_rows([flat[part] for flat in own], whole.flat[part], ranks), numbers)
            self._axis.concatenate(total(in_order, found, terms, _added), whole.flat[part])
        for buffer in held[1:]:
            self._buffers.give_back(buffer)
        self._terms = FixedSum(terms, self._add)
        self._whole = whole
        whole.hand_out(self._parameters, self._lacking)

    def _let_go(self) -> None:
        """Of what the last update was given, or left behind when it was cut short."""
        for buffer in (*self._terms.values, *([] if self._whole is None else [self._whole])):
            self._buffers.give_back(buffer)
        self._terms = FixedSum(self._share.terms, self._add)
        self._whole = None

    # --- state ----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        pass

    def weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return whole_weights(self.bare, wanted)

    def gradients(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        return whole_gradients(self.bare, wanted)

    def close(self) -> None:
        pass

    def state(self) -> TrainingState:
        return live_state(self.bare, self._optimizer)

    def restore(self, state: TrainingState) -> None:
        restore_state(self.bare, self._optimizer, state)


class _Slot:
    """Where a module keeps a buffer that belongs to the model's state."""

    def __init__(self, name: str, buffers: dict[str, Tensor | None], key: str) -> None:
        self.name = name
        self._buffers = buffers
        self._key = key

    @property
    def now(self) -> tuple[Tensor | None, int]:
        """What is there, and how often it was written to."""
        tensor = self._buffers[self._key]
        return tensor, 0 if tensor is None else tensor._version

    def differs(self, tensor: Tensor | None, version: int) -> bool:
        there, count = self.now
        return there is not tensor or count != version


class _Buffer:
    """A gradient in one piece, then a 1 for each parameter that has one, then the sum of losses.

    Attributes:
        flat: all of it.
        views: of the parameters' parts, in their shapes and strides.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        elements = sum(sizes)
        length = elements + len(sizes) + 1
        self.flat = torch.zeros(-(-length // ranks) * ranks, device=parameters[0].device)
        pieces = self.flat[:elements].split(sizes)  # type: ignore[no-untyped-call]
        self.views = [_like(piece, parameter) for piece, parameter in zip(pieces, parameters, strict=True)]
        self._there = self.flat[elements : elements + len(sizes)]
        self.loss = self.flat[elements + len(sizes)]

    @torch.no_grad()
    def fill(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> set[int]:
        """Takes the parameters' gradients; the numbers of those that have none, which counts as zero."""
        lacking = {number for number, parameter in enumerate(parameters) if parameter.grad is None}
        there = [number for number in range(len(parameters)) if number not in lacking]
        if there:
            torch._foreach_copy_([self.views[number] for number in there], gradients(parameters))
        self._there.fill_(1.0)
        for number in lacking:
            self.views[number].zero_()
            self._there[number] = 0.0
        self.loss.copy_(loss)
        for parameter in parameters:
            parameter.grad = None
        return lacking

    def hand_out(self, parameters: Sequence[nn.Parameter], lacking: set[int]) -> None:
        """Gives the parameters their gradients, but those that had none in any term.

        Args:
            lacking: had none in this rank's terms; only about these is it asked what others had.
        """
        there = self._there.tolist() if lacking else []
        for number, (parameter, view) in enumerate(zip(parameters, self.views, strict=True)):
            parameter.grad = view if number not in lacking or there[number] else None


class _Buffers:
    """Made when they are needed, and used again."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._free: list[_Buffer] = []

    def take(self) -> _Buffer:
        return self._free.pop() if self._free else _Buffer(self._parameters, self._ranks)

    def give_back(self, buffer: _Buffer) -> None:
        self._free.append(buffer)


def _like(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """In the parameter's strides, if it is as dense as the piece: the kernels of optimizers want them alike."""
    size, stride = parameter.size(), parameter.stride()
    reach = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if reach == math.prod(size) and 0 not in stride:
        return piece.as_strided(size, stride, piece.storage_offset())
    return piece.view(size)


def _added(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)


def _rows(own: Sequence[Tensor], like: Tensor, ranks: int) -> Tensor:
    """[ranks, nodes, width] of flat parts [ranks x width]."""
    if not own:
        return like.new_empty(ranks, 0, like.numel() // ranks)
    if len(own) == 1:
        return own[0].view(ranks, 1, -1)
    return torch.stack([flat.view(ranks, -1) for flat in own], dim=1)


def _saved_slots(model: nn.Module) -> list[_Slot]:
    saved = set(model.state_dict())
    found = (
        _Slot(f"{prefix}.{key}".lstrip("."), module._buffers, key)
        for prefix, module in model.named_modules()
        for key in module._buffers
    )
    return [slot for slot in found if slot.name in saved]


def _changes_in_forward(names: Sequence[str]) -> ConfigError:
    message = (
        f"invariant, but the model's forward changes {', '.join(names)}, which is part of its state: each rank would "
        f"change its own, by its own samples; take deterministic, or a model without running state"
    )
    return ConfigError(Problem("", "run.determinism", message))


def _refuse_other_precisions(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            message = f"invariant adds gradients in fp32, and {name} is {str(parameter.dtype).removeprefix('torch.')}"
            raise ConfigError(Problem("", "run.determinism", f"{message}; convert the model with .float()"))

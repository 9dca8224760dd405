"""The work of a step in the order in which a rank issues it: operations, collectives, and what waits for what.

    host       issues everything, one thing after the other, and waits where it reads a value
    streams    run operations in order; events let one wait for another
    network    runs collectives, beside the streams

A trace is recorded once, on the simulated device, and holds for every GPU; `lockstep.simulation.timing` replays it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lockstep.simulation import device, groups
from lockstep.simulation.repeats import Call, tensors_in

Part = Literal["matmul", "attention", "memory", "optimizer"]
"""Products of matrices and convolutions; attention; what only moves bytes; the optimizer's step."""

aten = torch.ops.aten
NO_KERNEL = {
    aten.detach, aten.alias, aten._unsafe_view, aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty,
    aten.new_empty_strided, aten.set_, aten.resize_, aten.lift_fresh, aten._reshape_alias, aten.is_same_size,
}  # fmt: skip
_GATHERS = {aten.embedding, aten.index, aten.gather, aten.index_select, aten.nll_loss_forward}
"""Operations that read as many elements of a tensor as they write."""
_ADDED = {aten.addmm, aten.baddbmm}
_AGAIN = 4 / 5  # of flash attention's backward: one of its five products computes the scores again
_COPIES = {aten.copy_, aten._to_copy, aten._foreach_copy_}
_WRITES = {aten.copy_, aten.fill_, aten.zero_, aten._foreach_copy_, aten._foreach_zero_}
"""Operations that don't read their first argument."""


class Operation(NamedTuple):
    """A kernel, or several.

    Attributes:
        flops: Of matrix products and attention.
        bytes: Read and written.
        shape: [batch, m, n, k] of a matrix product.
        width: Bytes of an element.
        model_flops: Those of the model: not what is computed again, nor of a frozen second model.
        name: Of the operation and the layout of its products, for which speeds may have been measured.
        sizes: What its measured time depends on: [m, n, k] of a product, [length, width] of attention, or bytes.
        times: How many such are computed: products of a batch, heads of attention.
    """

    stream: int
    part: Part
    flops: int
    bytes: int
    shape: tuple[int, int, int, int] | None
    width: int
    model_flops: float
    name: str = ""
    sizes: tuple[int, ...] = ()
    times: int = 1


class Sent(NamedTuple):
    """A collective of a group of global ranks: the bytes of the whole tensor; or a send or receive."""

    stream: int
    name: str
    ranks: tuple[int, ...]
    bytes: int
    asynchronous: bool


class OnHost(NamedTuple):
    """An operation of the host, or a copy between it and the device, and the bytes that it moves."""

    stream: int
    copies: bool
    bytes: int
    in_optimizer: bool


class Order(NamedTuple):
    """Something that takes no time by itself.

    record, wait   of an event by a stream
    issue          an operation without a kernel, such as a view
    read           the host waits for an event, or for all that was issued
    join           the stream waits for all collectives
    forward        of a micro-batch begins
    """

    what: Literal["record", "wait", "issue", "read", "join", "forward"]
    stream: int = 0
    event: int = 0


Entry = Operation | Sent | OnHost | Order


class Change(NamedTuple):
    """A storage gets memory or, with 0 bytes, loses it, on a stream."""

    storage: int
    bytes: int
    stream: int


@dataclass(slots=True)
class StepTrace:
    """The work of one rank's step of some micro-batches; `allocations` are those of all steps before it, too."""

    micro_batches: int = 1
    device_type: str = device.NAME
    entries: list[Entry] = field(default_factory=list)
    allocations: list[Change] = field(default_factory=list)
    in_optimizer: bool = False
    _streams: dict[int, int] = field(default_factory=dict)
    _held: list[Any] = field(default_factory=list)  # streams and events, which are named by their addresses
    _ranks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _in_collective: bool = False

    def begin_forward(self, *unused: object) -> None:
        self.entries.append(Order("forward", self._stream()))

    def end_backward(self) -> None:
        """Let the stream wait for all collectives, as DDP's reducer and FSDP do; the optimizer's step comes next."""
        self.entries.append(Order("join", self._stream()))
        self.in_optimizer = True

    def see(self, call: Call) -> None:
        """Record an operation: a watcher of `Execution`."""
        func, args, kwargs, outputs, facts = call
        places = {tensor.device.type for tensor in outputs or tensors_in(args[:1])}
        if self._in_collective:
            return
        packet, stream = func._overloadpacket, self._stream()
        if packet in _COPIES:
            places |= {tensor.device.type for tensor in tensors_in(args)}
        if "cpu" in places and self.device_type != "cpu":
            if not func.is_view and packet not in NO_KERNEL:
                self._see_host(call, stream, copies=len(places) > 1)
            return
        if self.device_type not in places:
            return
        if func.namespace == "_c10d_functional":
            self.entries.append(Order("join", stream))
            return
        if func.is_view or packet in NO_KERNEL:
            self.entries.append(Order("issue", stream))
            return
        operation, in_backward = facts.get("operation"), torch._C._current_graph_task_id() != -1
        if operation is None:
            operation = facts["operation"] = operation_of(func, args, kwargs, outputs)
        part = "optimizer" if self.in_optimizer and not operation.flops else operation.part
        counts = not self.in_optimizer and torch.is_grad_enabled() != in_backward  # on again: a forward again
        share = _AGAIN if operation.part == "attention" and in_backward else 1.0
        flops = share * operation.flops if counts else 0.0
        self.entries.append(operation._replace(stream=stream, part=part, model_flops=flops))

    def _see_host(self, call: Call, stream: int, *, copies: bool) -> None:
        func, args, kwargs, outputs, _ = call
        moved = _size(outputs or tensors_in(args[0])) if copies else _bytes(func, args, kwargs, outputs)
        self.entries.append(OnHost(stream, copies, moved, self.in_optimizer))
        if copies and not (kwargs.get("non_blocking") or args[2:] == (True,)):
            self.entries.append(Order("read", stream))

    def ordered(self, what: Literal["record", "wait", "read"], stream: device.Stream, event: device.Event) -> None:
        self._held.append(event)
        self.entries.append(Order(what, self._stream(stream), id(event)))

    def read(self, call: str) -> None:
        """Record that the host waits for all that was issued."""
        if call != "Event.synchronize":  # which `ordered` gets
            self.entries.append(Order("read", self._stream()))

    def issue(self, group: Any, name: str, size: int, options: Any) -> None:
        """Record a collective; the operations until `issued` only make its result."""
        ranks = self._ranks.get(id(group))
        if ranks is None:
            ranks = self._ranks[id(group)] = tuple(dist.distributed_c10d._world.pg_group_ranks[group])
            self._held.append(group)
        if len(ranks) > 1:
            waits = getattr(options, "asyncOp", True)
            self.entries.append(Sent(self._stream(), name, ranks, size, waits))
        self._in_collective = True

    def issued(self) -> None:
        self._in_collective = False

    def _stream(self, stream: device.Stream | None = None) -> int:
        stream = stream or device.register().current_stream()
        if id(stream) not in self._streams:
            self._streams[id(stream)] = len(self._streams)
            self._held.append(stream)
        return self._streams[id(stream)]


@contextmanager
def recorded(trace: StepTrace, execution: Any, model: nn.Module) -> Iterator[Callable[[], None]]:
    """Record what the simulated rank does while the block runs; yield what is to be called after the backward."""
    module = device.register()
    on_wait = module.on_wait

    def wait(call: str) -> None:
        on_wait(call)
        trace.read(call)

    note_sync = execution.note_sync

    def read(operation: str) -> None:
        note_sync(operation)
        trace.read(operation)

    execution.watchers.append(trace.see)
    with (
        patch.object(module, "on_wait", wait),
        patch.object(module, "on_order", trace.ordered),
        patch.object(execution, "note_sync", read),
        patch.object(groups, "listener", trace),
    ):
        forwards = model.register_forward_pre_hook(trace.begin_forward)
        try:
            yield trace.end_backward
        finally:
            forwards.remove()
            execution.watchers.remove(trace.see)


def operation_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> Operation:
    """Return an operation with its floating-point operations, bytes, and sizes."""
    packet, moved = func._overloadpacket, _bytes(func, args, kwargs, outputs)
    result: Any = outputs[0] if len(outputs) == 1 else tuple(outputs)
    if packet is aten.convolution_backward:  # None for what needs no gradient
        result = tuple(next(gradients) if wanted else None for gradients in [iter(outputs)] for wanted in args[-1])
    flops, shape = 0, _shape(packet, args, outputs)
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
    elif shape is not None:
        flops = 2 * math.prod(shape)
    width = min((tensor.element_size() for tensor in tensors_in(args) if tensor.is_floating_point()), default=4)
    name = f"{packet._qualified_op_name.partition('::')[2]} {width}"
    part: Part = "matmul" if flops else "memory"
    sizes, times = (moved,), 1
    if "attention" in name:
        query, key = (args[1:] if "backward" in name else args)[:2]
        sizes, times = (query.shape[-2], key.shape[-2], query.shape[-1]), math.prod(query.shape[:-2])
        flops = flops or (10 if "backward" in name else 4) * times * math.prod(sizes)  # of a CPU's: torch has none
        if _is_causal(func, args, kwargs):
            flops, name = flops // 2, f"{name} causal"
        part = "attention"
    elif shape is not None:
        left, right = (args[1:] if packet in _ADDED else args)[:2]
        layout = "".join("nt"[matrix.stride(-1) > matrix.stride(-2)] for matrix in (left, right))
        name, sizes, times = f"{'bmm' if left.dim() > 2 else 'mm'} {layout} {width}", shape[1:], shape[0]
    elif packet in (aten.convolution, aten.convolution_backward):  # as a product: positions, inputs of each, channels
        output, weight = (args[0], args[2]) if packet is aten.convolution_backward else (outputs[0], args[1])
        channels = output.shape[1]
        sizes = (output.numel() // channels, weight.numel() // channels, channels)
        kind = "conv" if packet is aten.convolution else "conv backward" if args[-1][0] else "conv backward first"
        name = f"{kind} {width}"
    elif flops:
        sizes = (flops,)
    elif name.startswith("_f") and isinstance(args[0], list | tuple):  # _foreach and _fused: one tensor after the other
        times, sizes = len(args[0]), (moved // len(args[0]),)
    return Operation(0, part, flops, moved, shape, width, 0.0, name, sizes, times)


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def _shape(packet: Any, args: tuple[Any, ...], outputs: Sequence[Tensor]) -> tuple[int, int, int, int] | None:
    if packet is aten._grouped_mm:  # a mixture's experts, as if each had as many rows
        left, right = args[:2]
        rows, inner, columns, dims = left.shape[-2], left.shape[-1], right.shape[-1], (left.dim(), right.dim())
        groups = next((each.shape[0] for each in (left, right, *outputs) if each.dim() == 3), 1)
        match dims:
            case (2, 3):
                rows //= groups
            case (2, 2):
                inner //= groups
            case (3, 2):
                columns //= groups
        return groups, rows, columns, inner
    if packet in (aten.mm, aten.addmm):
        left, right = args[-2:] if packet is aten.mm else args[1:3]
        return 1, left.shape[0], right.shape[1], left.shape[1]
    if packet in (aten.bmm, aten.baddbmm):
        left, right = args[:2] if packet is aten.bmm else args[1:3]
        return left.shape[0], left.shape[1], right.shape[2], left.shape[2]
    return None


def _bytes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> int:
    packet = func._overloadpacket
    written = _size(outputs) + _size(tensors_in(kwargs.get("out")))
    if packet in _GATHERS:
        return 2 * written
    if func.name().startswith("fsdp::all_gather_copy_in"):
        return 2 * _size(tensors_in(args[0]))
    read = _size(tensors_in(args[1:] if packet in _WRITES else args))
    return read + (written or _size(tensors_in(args)))


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)

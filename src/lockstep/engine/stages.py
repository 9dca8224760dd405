"""The stages of a model that this rank runs, by the model's own forward.

The code before a stage's first block makes masks and positions; blocks of other stages return their input; the first
block takes the received activation; and after the last block the forward is abandoned. A dry run checks before
training, alike on every rank, that blocks form a chain: each is called once, in order, with the output of the one
before.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.core.errors import ConfigError, Failure, Problem
from lockstep.core.out_of_memory import note_location
from lockstep.core.records import Inputs
from lockstep.distributed.forward_mode import ALL_SIDES, ForwardMode, Side
from lockstep.engine.chain_check import ChainCheck, PassedThrough, first_argument, in_form, something_between
from lockstep.engine.dry_run import entered_modules, failed, first_line, raises_itself, unchanged
from lockstep.engine.eager import Context, call
from lockstep.engine.partitioning import PartitionSpec, empty_block, first_blocks, refuse_no_chain
from lockstep.engine.placeholders import (
    no_chain,
    outer_modules,
    placeholder,
    refuse_tied_blocks,
    remove_sides,
    shadowed,
    tied_over_sides,
)
from lockstep.engine.usage import Use, sides_of_use
from lockstep.plan.stages import owner


class LayerShapes:
    """Shapes of the outputs of a Sequential's layers on a device. The model, which is whole, isn't changed."""

    def __init__(self, model: nn.Sequential, device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [*model.parameters(), *model.buffers()]
        memo: dict[int, Any] = {id(tensor): self._fake(tensor, device) for tensor in tensors}
        self._layers = list(copy.deepcopy(model, memo))

    def _fake(self, tensor: Tensor, device: torch.device) -> Tensor:
        with self._mode:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return nn.Parameter(empty) if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else empty

    @torch.no_grad()
    def outputs(self, given: Any) -> list[Tensor]:
        """Return each layer's output for what the first is given, a tensor without values; in the caller's autocast."""
        outputs = []
        with self._mode:
            hidden = tree_map(_empty_like, given)
            for layer in self._layers:
                hidden = layer(hidden)
                outputs.append(hidden)
        return outputs


def _empty_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


Handler = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Replaces a block's call; gets the block's index and its arguments."""


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """Shape and dtype of one micro-batch's activation at a stage boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PartitionedModel:
    """A model with some stages on this rank.

    Args:
        model: Partitioned in place, before it is moved to `device` or sharded.
        inputs: Inputs of a few samples, on the CPU: they show which side of the blocks uses other modules.

    Attributes:
        blocks: Names of the blocks that are kept.
        own: Numbers of this rank's stages, in order.
        count: Number of stages of the whole model.
        owners: The rank of each stage, by its coordinate on the pipeline.
        shared: Names of the tied parameters that the first and the last stage both hold.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        spec: PartitionSpec,
        device: torch.device,
        inputs: Inputs,
        muted: Context,
        mode: ForwardMode,
    ) -> None:
        refuse_no_chain(model, blocks)
        with muted():
            use = sides_of_use(model, blocks, inputs)
            outer = outer_modules(model, blocks, use.sides)
        self._failed_whole = use.failed
        self._muted = muted
        self._mode = mode
        self._firsts = first_blocks(model, blocks, spec, outer)
        outputs = use.outputs
        self._forms = [_form(outputs[at], name) if at in outputs else "tensor" for at, name in enumerate(blocks)]
        self._layer_shapes = self._shapes_of_layers(model, blocks, use, device)
        self.model = model
        self.count = spec.stages
        self.owners = [owner(stage, spec.ranks, spec.schedule) for stage in range(spec.stages)]
        self.own = [stage for stage, rank in enumerate(self.owners) if rank == spec.rank]
        ends = [*self._firsts[1:], len(blocks)]
        self._spans = {stage: range(self._firsts[stage], ends[stage]) for stage in self.own}
        self._device = device
        self._names = list(blocks)
        self._modules = [model.get_submodule(name) for name in blocks]
        self._handler: Handler | None = None
        self._dtype: torch.dtype | None = None
        self._specs: dict[Any, list[ActivationSpec]] = {}
        kept = {index for span in self._spans.values() for index in span}
        self.blocks = [name for index, name in enumerate(blocks) if index in kept]
        refuse_tied_blocks(model, blocks)
        self.shared = tied_over_sides(model, outer) if self.owners[0] != self.owners[-1] else []
        self._outer = outer
        kept_sides: set[Side] = set()
        if self.own[0] == 0:
            kept_sides.add("before")
        if self.own[-1] == self.count - 1:
            kept_sides.add("after")
        remove_sides(outer, kept_sides, device, mode)
        self._calls: list[Callable[..., Any]] = []  # with their hooks, which a block of another stage doesn't run
        for index, module in enumerate(self._modules):
            if index not in kept:
                empty_block(blocks[index], module)
            self._calls.append(cast("Any", module)._call_impl)
            cast("Any", module)._call_impl = partial(self._in_block, index)
        cast("Any", model).forward = _until_abandoned(model.forward)

    @property
    def first_module(self) -> nn.Module:
        """The first module with outputs that this rank uses: the model, or the first block of a later stage.

        A module before the blocks may be called on a later stage, too, if a weight is tied to its own: in vain.
        """
        return self.model if self.own[0] == 0 else self._modules[self._spans[self.own[0]][0]]

    def parameters_of(self, stage: int) -> Iterator[nn.Parameter]:
        """Yield the parameters of a stage's blocks; of the first and last stage also those outside of blocks."""
        in_blocks = {
            id(parameter): number
            for number, span in self._spans.items()
            for index in span
            for parameter in self._modules[index].parameters()
        }
        outside = stage if stage in (0, self.count - 1) else None
        return (item for item in self.model.parameters() if in_blocks.get(id(item), outside) == stage)

    def run(self, stage: int, activation: Tensor | None, inputs: Inputs) -> Any:
        """Run a stage's part of a forward on a micro-batch, from the activation that the stage before has sent.

        Returns the activation for the next stage; of the last, the model's output.
        """
        span, last = self._spans[stage], len(self._modules) - 1
        passed: PassedThrough | None = None
        others = ExitStack()  # another stage logs what is logged before this one's blocks

        def handle(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal passed
            if index not in span:
                passed = PassedThrough.of(first_argument(args, kwargs))
                return in_form(self._forms[index], passed.value)
            if index == span[0] and index > 0:
                if passed is None or not passed.is_unchanged(first_argument(args, kwargs)):  # training may do more
                    raise something_between(self._names[index - 1], self._names[index])
                received = cast("Tensor", cast("Any", _Received).apply(activation))
                args, kwargs = _with_first(received, args, kwargs)
                self._mode.refused_sides = ALL_SIDES
                others.close()
            output = self._calls[index](*args, **kwargs)
            if index == span[-1] and index < last:
                raise _Abandoned(self._to_send(output))
            return output

        with others, self._handling(handle, ALL_SIDES if stage == 0 else frozenset()):
            if stage > 0:
                others.enter_context(self._muted())
            return call(self.model, inputs)

    def activation_specs(self, inputs: Inputs) -> list[ActivationSpec]:
        """Return the spec of the activation that each stage receives; the first stage's means nothing.

        No weights are used for it, except in the first call. To be called in the autocast of the run.
        """
        key = tuple((tuple(item.shape), item.dtype) for item in tree_leaves(inputs) if isinstance(item, Tensor))
        if key not in self._specs:
            self._specs[key] = self._new_specs(inputs)
        return self._specs[key]

    def _new_specs(self, inputs: Inputs) -> list[ActivationSpec]:
        example = self._first_input(inputs)
        if self._layer_shapes is not None:
            outputs = self._layer_shapes.outputs(example)
            specs = [_spec(output, name) for output, name in zip(outputs, self._names, strict=True)]
        else:
            self._dtype = self._dtype or self._own_dtype(inputs, example)
            specs = [ActivationSpec(tuple(example.shape), self._dtype)] * len(self._names)
        if not self._specs:
            self._check_chain(inputs, specs)
        return [specs[max(0, first - 1)] for first in self._firsts]

    # --- the check ------------------------------------------------------------------------------------------------

    def _shapes_of_layers(
        self, model: nn.Module, blocks: Sequence[str], use: Use, device: torch.device
    ) -> LayerShapes | None:
        """Return what computes the shapes between the layers of a Sequential; None: all blocks pass on one shape."""
        outputs = [_first_tensor(use.outputs[at]).shape for at in sorted(use.outputs)]
        is_one_kind = len(outputs) == len(blocks) and len({id(item) for item in use.outputs.values()}) == 1
        parent = model.get_submodule(blocks[0].rpartition(".")[0])
        if type(parent).forward is nn.Sequential.forward and not (is_one_kind and outputs[0] == use.given.shape):
            return LayerShapes(cast("nn.Sequential", parent), device)
        for first in self._firsts[1:]:
            if first <= len(outputs) and outputs[first - 1] != use.given.shape:
                shapes = f"{list(outputs[first - 1])}, and {blocks[0]} takes {list(use.given.shape)}"
                raise no_chain(f"{blocks[first - 1]} makes {shapes}: stages pass on one shape")
        return None

    @torch.no_grad()
    def _own_dtype(self, inputs: Inputs, example: Tensor) -> torch.dtype:
        """Return the precision of what this rank's first block makes of zeros."""
        own = self._spans[self.own[0]][0]

        def handle(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index != own:
                return in_form(self._forms[index], first_argument(args, kwargs))
            zeros = torch.zeros(example.shape, dtype=example.dtype, device=self._device)
            args, kwargs = _with_first(zeros, args, kwargs)
            raise _Abandoned(_first_tensor(self._calls[own](*args, **kwargs)).dtype)

        with self._without_effects(), self._handling(handle):
            dtype = self._dry_forward(inputs, hooks=True)
        return dtype if isinstance(dtype, torch.dtype) else example.dtype  # not called: `_check_chain` refuses it

    @torch.no_grad()
    def _check_chain(self, inputs: Inputs, specs: Sequence[ActivationSpec]) -> None:
        """Run the whole forward with placeholders for all weights, the same on every rank."""
        zeros = [torch.zeros((), dtype=spec.dtype, device=self._device).expand(spec.shape) for spec in specs]
        check = ChainCheck(self._names, frozenset(self._firsts[1:]), self._forms, zeros, self._mode)
        with self._without_effects(), self._without_weights(), self._handling(check.handle, frozenset(("after",))):
            self._dry_forward(inputs)
        check.end()

    def _first_input(self, inputs: Inputs) -> Tensor:
        def handle(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise _Abandoned(first_argument(args, kwargs))

        with torch.no_grad(), self._without_effects(), self._without_weights(), self._handling(handle):
            return cast("Tensor", self._dry_forward(inputs))

    def _dry_forward(self, inputs: Inputs, *, hooks: bool = False) -> object:
        """Run a forward where blocks return their inputs, or are left out."""
        with entered_modules(self.model) as inside:
            try:
                with self._refusing_sums_over_weights():
                    return call(self.model, inputs, hooks=hooks)
            except Failure:
                raise
            except Exception as error:
                if raises_itself(error) or (self._failed_whole is not None and failed(error) == self._failed_whole):
                    note_location(error, "forward", "in a check of the first forward, before the start")
                    raise
                where = inside[-1] if inside and inside[-1] else "the model"
                raise no_chain(
                    f"the forward of {where} fails where blocks are on other ranks ({first_line(error)}): it needs "
                    "more of them than the tensor that each passes on"
                ) from error

    @contextmanager
    def _refusing_sums_over_weights(self) -> Iterator[None]:
        """Refuse a forward that takes all parameters of a module with blocks: a stage has only some."""
        blocks = set(map(self.model.get_submodule, self._names))
        around = [module for module in self.model.modules() if blocks & {*module.modules()} and module not in blocks]

        def to_the_end(module: nn.Module, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
            yield from nn.Module.named_parameters(module, *args, **options)
            if sys.exc_info()[1] is None:  # else Lockstep looks for a reason
                why = "the forward takes all parameters, as for a penalty, and a stage has only its own; take ddp"
                raise ConfigError(Problem("", "parallel.pipeline", why))

        for module in around:
            vars(module)["named_parameters"] = partial(to_the_end, module)
        try:
            yield
        finally:
            for module in around:
                del vars(module)["named_parameters"]

    @contextmanager
    def _without_effects(self) -> Iterator[None]:
        """Restore draws, running means and all other changes of forwards in the block, and drop their logging."""
        on_host = self._device.type == "cpu"
        devices, kind = ([], "cuda") if on_host else ([self._device.index or 0], self._device.type)
        with self._muted(), unchanged(self.model), torch.random.fork_rng(devices, device_type=kind):
            self.model.eval()
            yield

    def _without_weights(self) -> AbstractContextManager[None]:
        """Compute outside of the blocks with placeholders, so with shapes only."""
        shared = {id(parameter) for name, parameter in self.model.named_parameters() if name in self.shared}

        def placeholders() -> Iterator[tuple[nn.Module, str, Tensor]]:
            for name, module, side in self._outer:
                for key, item in module._parameters.items():
                    if item is not None:
                        own_side, full_name = None if id(item) in shared else side, f"{name}.{key}".lstrip(".")
                        yield module, key, placeholder(item, self._device, full_name, own_side, self._mode)

        return shadowed(placeholders())

    # --- blocks ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _handling(self, handler: Handler, refused: frozenset[Side | None] = frozenset()) -> Iterator[None]:
        assert self._handler is None, "one forward runs at a time"
        self._handler = handler
        self._mode.refused_sides = refused
        try:
            yield
        finally:
            self._handler = None
            self._mode.refused_sides = frozenset()

    def _in_block(self, index: int, *args: Any, **kwargs: Any) -> Any:
        assert self._handler is not None, "a partitioned model runs only by PartitionedModel.run"
        return self._handler(index, args, kwargs)

    def _to_send(self, output: Any) -> Tensor:
        activation = _first_tensor(output)
        if self._dtype is not None and activation.dtype != self._dtype:
            raise no_chain(f"blocks return {activation.dtype} and {self._dtype}: stages pass on one precision")
        return activation.contiguous()


class _Received(torch.autograd.Function):
    """Receives an activation, not as a view, which a block may change in place; its gradient is sent contiguous."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor) -> Tensor:
        return activation.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class _Abandoned(BaseException):
    """Ends a forward after the stage's last block. It isn't an `Exception`, which a model might catch."""

    def __init__(self, output: Any) -> None:
        self.output = output


def _until_abandoned(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except _Abandoned as abandoned:
            return abandoned.output

    return run


# --- what blocks take and return ----------------------------------------------------------------------------------


def _with_first(value: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if args:
        return (value, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): value}


def _spec(output: object, name: str) -> ActivationSpec:
    if not isinstance(output, Tensor):
        raise no_chain(f"{name} returns a {type(output).__name__}, and stages pass on a tensor")
    return ActivationSpec(tuple(output.shape), output.dtype)


def _form(output: Any, name: str) -> str | int:
    if isinstance(output, Tensor):
        return "tensor"
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        if any(isinstance(item, Tensor) for item in tree_leaves(output[1:])):
            raise no_chain(f"{name} returns more than one tensor, and stages pass on one")
        return len(output)
    raise no_chain(f"{name} returns a {type(output).__name__}, and stages pass on a tensor")


def _first_tensor(output: Any) -> Tensor:
    return cast("Tensor", output if isinstance(output, Tensor) else output[0])

"""Models whose parameters have shapes and no memory yet: values come later, part by part.

    construct                divide             fill
    parameters: meta   -->   over ranks   -->   a block at a time: draw it whole, keep this rank's part of it
    buffers: real

For models that no rank could hold whole. The values are those of `build_model`, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.distributed.shard_boxes import copy_from_full
from lockstep.models.initialization import Draws, generators_keyed


@dataclass(frozen=True, slots=True)
class Blank:
    """Attributes:
    model: its parameters on the meta device.
    values: of all parameters, and of the buffers that come with weights, whole, on the CPU, by their names; those of
        one piece of the model at a time.
    """

    model: nn.Module
    values: Callable[[], Iterator[tuple[str, Tensor]]]

    def fill(self, device: torch.device) -> None:
        """Gives the model memory there, and its values. It may have been divided: each rank keeps what it holds."""
        _give_memory(self.model, device)
        lacking = dict(self.model.named_parameters())
        tensors = {**lacking, **dict(self.model.named_buffers())}
        for name, value in self.values():
            if name in tensors:
                copy_from_full(tensors[name], value)
                lacking.pop(name, None)
        assert not lacking, f"without values: {', '.join(lacking)}"


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """To its parameters, which stay the objects that they are: two modules may share one, FSDP knows them."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    for module, name, buffer in buffers:  # they have their values
        module._buffers[name] = None if buffer is None else buffer.to(device)


@contextmanager
def parameters_without_values() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device, and their buffers where they always are."""
    original = nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # a parameter that two modules share is one afterwards too

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            if parameter not in made:
                made[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = made[parameter]

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        with Draws():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


_UNSET = float("nan")

Resets = Mapping[str, Callable[[], object]]
"""By the qualified name of the module."""


@torch.no_grad()
def reset_in_pieces(
    module: nn.Module, seed: int, resets: Resets, pieces: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """What `initialization.reset_modules` would make of a module without values: each parameter, under its first name.
    One that no reset sets is NaN (`is_unset`): its value is that of a constructor.

    Args:
        module: its parameters on the meta device; it is as before afterwards.
        pieces: names of submodules that are given memory one after the other; then all the rest is. No reset may
            reach from one into another: `stays_in_pieces`.
    """
    parts = _parts(module, pieces)
    names = dict(module.named_parameters())
    modules = dict(module.named_modules(remove_duplicate=False))
    for part in parts:
        with _memory(module, {name: names[name] for name in names if _owner(name) in part}) as values:
            done: set[Tensor] = set()
            for name in part:
                own = set(modules[name].parameters(recurse=False))
                if name in resets:
                    kept = {parameter: parameter.detach().clone() for parameter in own & done}
                    with generators_keyed(seed, "module", name):
                        resets[name]()
                    for parameter, value in kept.items():  # a parameter that modules share is set by the first
                        parameter.copy_(value)
                    done |= own
            yield from values.items()


def is_unset(value: Tensor) -> bool:
    """Whether no reset has set a value of `reset_in_pieces`."""
    return bool(value.numel()) and bool(value.flatten()[0].isnan()) and bool(value.isnan().all())


@torch.no_grad()
def stays_in_pieces(module: nn.Module, resets: Resets, pieces: Sequence[str]) -> bool:
    """Whether no reset changes a parameter outside of the piece that its module belongs to. Tried without memory."""
    names = dict(module.named_parameters())
    for part in _parts(module, pieces):
        others = [parameter for name, parameter in names.items() if _owner(name) not in part]
        before = [parameter._version for parameter in others]
        with Draws() as draws:
            for name in part:
                resets.get(name, lambda: None)()
        if [parameter._version for parameter in others] != before or any(draws.was_drawn(one) for one in others):
            return False
    return True


def _parts(module: nn.Module, pieces: Sequence[str]) -> list[list[str]]:
    """Names of the modules of each piece, and of those in none, children first."""
    found: dict[str | None, list[str]] = {piece: [] for piece in (*pieces, None)}
    for name in _children_first("", module):
        found[next((piece for piece in pieces if f"{name}.".startswith(f"{piece}.")), None)].append(name)
    return list(found.values())


@contextmanager
def _memory(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Gives the parameters memory, wherever a module holds them, and takes it back."""
    holders = [
        (holder, key, name)
        for name, parameter in parameters.items()
        for holder in module.modules()
        for key, held in holder._parameters.items()
        if held is parameter
    ]
    values = {
        name: nn.Parameter(torch.full_like(parameter, _UNSET, device="cpu"), requires_grad=parameter.requires_grad)
        for name, parameter in parameters.items()
    }
    for holder, key, name in holders:
        holder._parameters[key] = values[name]
    try:
        yield {name: value.detach() for name, value in values.items()}
    finally:
        for holder, key, name in holders:
            holder._parameters[key] = parameters[name]


def _children_first(name: str, module: nn.Module) -> Iterator[str]:
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}" if name else child_name, child)
    yield name


def _owner(name: str) -> str:
    return name.rpartition(".")[0]

"""Meta-device models: parameters have shapes and no memory until they are divided; values come later, block by block.

    construct                shard              materialize
    parameters: meta   -->   over ranks   -->   a block at a time: draw it whole, keep this rank's part of it
    buffers: real

For models that no rank could hold whole. The values are bitwise those of `build_model`.
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
class MetaModel:
    """A model whose parameters are on the meta device.

    Attributes:
        values: Yields the values of all parameters, and of the buffers that come with weights, whole, on the CPU, by
            their names; those of one block of the model at a time.
    """

    model: nn.Module
    values: Callable[[], Iterator[tuple[str, Tensor]]]

    def materialize(self, device: torch.device) -> None:
        """Give the model memory on a device, and its values. It may have been divided: each rank keeps what it
        holds."""
        _allocate(self.model, device)
        missing = dict(self.model.named_parameters())
        tensors = {**missing, **dict(self.model.named_buffers())}
        for name, value in self.values():
            if name in tensors:
                copy_from_full(tensors[name], value)
                missing.pop(name, None)
        assert not missing, f"without values: {', '.join(missing)}"


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Give parameters memory. They stay the same objects: two modules may share one, FSDP keeps references."""
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
    """Have modules made inside get their parameters on the meta device, and their buffers where they always are."""
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
"""Functions that draw modules' initial values, by qualified name."""


@torch.no_grad()
def reset_by_block(module: nn.Module, seed: int, resets: Resets, blocks: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the values that `initialization.reset_modules` would give a module: each parameter, under its first name.
    One that no reset sets is NaN (`is_unset`): its value is that of a constructor.

    Args:
        module: Its parameters are on the meta device; it is as before afterwards.
        blocks: Names of submodules that get memory one after the other; then all the rest does. No reset may reach from
            one into another: `resets_stay_in_blocks`.
    """
    parts = _modules_by_block(module, blocks)
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
    """Return whether no reset has set a value of `reset_by_block`."""
    return bool(value.numel()) and bool(value.flatten()[0].isnan()) and bool(value.isnan().all())


@torch.no_grad()
def resets_stay_in_blocks(module: nn.Module, resets: Resets, blocks: Sequence[str]) -> bool:
    """Return whether no reset changes a parameter outside of the block that its module is in. Tried without memory."""
    names = dict(module.named_parameters())
    for part in _modules_by_block(module, blocks):
        others = [parameter for name, parameter in names.items() if _owner(name) not in part]
        before = [parameter._version for parameter in others]
        with Draws() as draws:
            for name in part:
                resets.get(name, lambda: None)()
        if [parameter._version for parameter in others] != before or any(draws.was_drawn(other) for other in others):
            return False
    return True


def _modules_by_block(module: nn.Module, blocks: Sequence[str]) -> list[list[str]]:
    """Return the names of the modules of each block, and of those in none, children first."""
    modules: dict[str | None, list[str]] = {block: [] for block in (*blocks, None)}
    for name in _children_first("", module):
        modules[next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)].append(name)
    return list(modules.values())


@contextmanager
def _memory(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Give the parameters memory, wherever a module holds them, while the block runs."""
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

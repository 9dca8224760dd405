"""Meta-device models: parameters have no memory until they are sharded; values are then set block by block.

    construct                shard              materialize
    parameters: meta   -->   over ranks   -->   a block at a time: draw its full values, keep this rank's shards
    buffers: real

For models that don't fit into a rank's memory. The values are bitwise those of `build_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.distributed.shard_boxes import copy_from_full
from lockstep.models.initialization import Draws, children_first, reset_module


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A model whose parameters are on the meta device.

    Attributes:
        values: Yields the full values, on the CPU, of all parameters and of the buffers in pretrained weights, by name;
            one block of the model after the other.
    """

    model: nn.Module
    values: Callable[[], Iterator[tuple[str, Tensor]]]

    def materialize(self, device: torch.device, *, offloaded: bool = False) -> None:
        """Give the model, which may have been sharded, memory on a device, and its values.

        Args:
            offloaded: Whether the host holds the parameters; buffers are on the device.
        """
        _allocate(self.model, torch.device("cpu") if offloaded else device, device)
        missing = dict(self.model.named_parameters())
        tensors = {**missing, **dict(self.model.named_buffers())}
        for name, value in self.values():
            if name in tensors:
                copy_from_full(tensors[name], value)
                missing.pop(name, None)
        assert not missing, f"without values: {', '.join(missing)}"


def _allocate(model: nn.Module, device: torch.device, of_buffers: torch.device) -> None:
    """Give parameters memory. They stay the same objects: two modules may share one, and FSDP keeps references."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    for module, name, buffer in buffers:  # they have values already
        module._buffers[name] = None if buffer is None else buffer.to(of_buffers)


@contextmanager
def parameters_without_values() -> Iterator[None]:
    """Construct modules within the block with their parameters on the meta device and their buffers as usual."""
    original = nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # keeps a parameter shared that two modules share

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


Resets = Mapping[str, Callable[[], object]]
"""Functions that draw the initial values of modules, by qualified name."""


@torch.no_grad()
def reset_by_block(module: nn.Module, seed: int, resets: Resets, blocks: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the values that `initialization.reset_modules` would give each parameter, under its first name.

    A parameter that no reset sets, since its constructor does, is NaN (`is_unset`).

    Args:
        module: Its parameters are on the meta device, also afterwards.
        blocks: Names of submodules that get memory one after the other; the other modules follow. No reset may change
            parameters of another block: see `resets_stay_in_blocks`.
    """
    parameters = dict(module.named_parameters())
    modules = dict(module.named_modules(remove_duplicate=False))
    for names in _modules_by_block(module, blocks):
        of_block = {name: parameter for name, parameter in parameters.items() if _owner(name) in names}
        with _memory(module, of_block) as values:
            done: set[Tensor] = set()
            for name in names:
                if name in resets:
                    reset_module(modules[name], seed, name, resets[name], done)
            yield from values.items()


def is_unset(value: Tensor) -> bool:
    """Return whether no reset has set this value of `reset_by_block`."""
    return bool(value.numel()) and bool(value.flatten()[0].isnan()) and bool(value.isnan().all())


@torch.no_grad()
def resets_stay_in_blocks(module: nn.Module, resets: Resets, blocks: Sequence[str]) -> bool:
    """Run the resets of a meta-device module; return whether each changes only parameters of its module's block."""
    parameters = dict(module.named_parameters())
    for names in _modules_by_block(module, blocks):
        others = [parameter for name, parameter in parameters.items() if _owner(name) not in names]
        before = [parameter._version for parameter in others]
        with Draws() as draws:
            for name in names:
                resets.get(name, lambda: None)()
        drawn = {id(tensor) for tensor in draws.skipped}
        if [other._version for other in others] != before or any(id(other) in drawn for other in others):
            return False
    return True


def _modules_by_block(module: nn.Module, blocks: Sequence[str]) -> list[list[str]]:
    """Return the names of the modules of each block, then of the others, children first."""
    modules: dict[str | None, list[str]] = {block: [] for block in (*blocks, None)}
    for name, _ in children_first("", module):
        modules[next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)].append(name)
    return list(modules.values())


@contextmanager
def _memory(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Give the parameters memory in all modules that hold them, within the block; yield their values by name."""
    holders = [
        (holder, key, name)
        for name, parameter in parameters.items()
        for holder in module.modules()
        for key, held in holder._parameters.items()
        if held is parameter
    ]
    values = {
        name: nn.Parameter(torch.full_like(parameter, torch.nan, device="cpu"), requires_grad=parameter.requires_grad)
        for name, parameter in parameters.items()
    }
    for holder, key, name in holders:
        holder._parameters[key] = values[name]
    try:
        yield {name: value.detach() for name, value in values.items()}
    finally:
        for holder, key, name in holders:
            holder._parameters[key] = parameters[name]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]

"""Meta-device models: parameters have no memory until they are sharded; values are then set block by block.

    construct                shard              allocate     draw, unless other values follow
    parameters: meta   -->   over ranks   -->   memory  -->  each rank makes whole values, and keeps what it holds
    buffers: real

The values are bitwise equal to `build_model`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.distributed.shard_boxes import copy_from_full
from lockstep.models.initialization import Draws, Values, children_first, reset_module

Resets = Mapping[str, Callable[[], object]]
"""Functions that draw the initial values of modules, by qualified name."""


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A model with its parameters on the meta device.

    Attributes:
        values: Yields the values of the named parameters, and of the named buffers in pretrained weights, block after
            block. A value is valid until the next one is yielded.
    """

    model: nn.Module
    values: Values

    def allocate(self, device: torch.device, *, offloaded: bool = False) -> None:
        """Give the model, which may have been sharded, memory on a device; `offloaded`: parameters are on the host."""
        buffers = [dict(module._buffers) for module in self.model.modules()]
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # they stay the same objects: FSDP keeps references
        try:
            self.model.to_empty(device=torch.device("cpu") if offloaded else device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
        for module, own in zip(self.model.modules(), buffers, strict=True):
            module._buffers.update(own)
        self.move_buffers(device)

    def move_buffers(self, device: torch.device) -> None:
        """Move the buffers, which have values, to a device; the parameters stay without memory."""
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)

    @torch.no_grad()
    def draw(self, overwritten: Collection[str] = (), shards: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Set this rank's parameters to their values.

        Args:
            overwritten: Names of tensors that get other values afterwards.
            shards: Tensors to set instead of the parameters, by name.
        """
        parameters = {name for name, _ in self.model.named_parameters()} - set(overwritten)
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers()), **shards}
        for name, value in self.values(tensors.keys() - set(overwritten)):
            copy_from_full(tensors[name], value)
            parameters.discard(name)
        assert not parameters, f"without values: {', '.join(parameters)}"


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


@torch.no_grad()
def reset_by_block(
    module: nn.Module, seed: int, resets: Resets, blocks: Sequence[str], wanted: Collection[str]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the values that `initialization.reset_modules` would give the wanted parameters, under their first names.

    The value is None for a parameter that no reset sets. The module stays on the meta device.

    Args:
        blocks: Submodules that are reset one after the other, before the other modules: see `resets_stay_in_blocks`.
    """
    parameters = dict(module.named_parameters())
    modules = dict(module.named_modules(remove_duplicate=False))
    for names in _modules_by_block(module, blocks):
        of_block = {name: parameter for name, parameter in parameters.items() if _owner(name) in names}
        if not any(name in wanted for name in of_block):
            continue
        with in_memory(module, of_block) as values:
            done: set[Tensor] = set()
            for name in names:
                if name in resets:
                    reset_module(modules[name], seed, name, resets[name], done)
            for name, value in values.items():
                if name in wanted:
                    is_unset = value.numel() and value.flatten()[0].isnan() and value.isnan().all()
                    yield name, None if is_unset else value


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
        if [other._version for other in others] != before or any(other in draws.skipped for other in others):
            return False
    return True


def _modules_by_block(module: nn.Module, blocks: Sequence[str]) -> list[list[str]]:
    modules: dict[str | None, list[str]] = {block: [] for block in (*blocks, None)}
    for name, _ in children_first("", module):
        modules[next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)].append(name)
    return list(modules.values())


@contextmanager
def in_memory(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Yield the values, NaN at first, that these parameters of a meta-device module have while the block runs."""
    holders = [
        (holder, own_name, name)
        for name, parameter in parameters.items()
        for holder in module.modules()
        for own_name, held in holder._parameters.items()
        if held is parameter
    ]
    values = {
        name: nn.Parameter(torch.full_like(parameter, torch.nan, device="cpu"), requires_grad=parameter.requires_grad)
        for name, parameter in parameters.items()
    }
    for holder, own_name, name in holders:
        holder._parameters[own_name] = values[name]
    try:
        yield {name: value.detach() for name, value in values.items()}
    finally:
        for holder, own_name, name in holders:
            holder._parameters[own_name] = parameters[name]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]

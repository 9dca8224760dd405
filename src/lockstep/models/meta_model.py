"""Meta-device models: parameters have no memory until they are sharded; values are then set block by block.

    construct                shard              allocate     draw, unless other values follow
    parameters: meta   -->   over ranks   -->   memory  -->  each rank the elements that it holds
    buffers: real

The values are bitwise those of `build_model`. Resets that only draw normal values and set constants are recorded rather
than run, so that a rank draws only its part:

    Linear      init.normal_(weight, std=0.02), init.zeros_(bias)      -->  weight: Normal, bias: Constant
    Embedding   init.normal_(weight), init.zeros_(weight[padding])     -->  weight: ConstantRow
    another     anything else                                          -->  not known: the reset has to be run
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.core.keys import key
from lockstep.models.initial_values import BLOCK, Constant, ConstantRow, InitialValue, Known, Normal, draws_of, put
from lockstep.models.initialization import ASKS_FOR_MEMORY, Draws, children_first, generators_keyed, reset_module


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A model whose parameters are on the meta device.

    Attributes:
        values: Yields the values of the named parameters, and of the named buffers that are in pretrained weights, one
            block of the model after the other. A value is valid until the next one is yielded.
    """

    model: nn.Module
    values: Callable[[Collection[str]], Iterator[tuple[str, InitialValue]]]

    def allocate(self, device: torch.device, *, offloaded: bool = False) -> None:
        """Give the model, which may have been sharded, memory on a device.

        Args:
            offloaded: Whether the host holds the parameters; buffers are on the device.
        """
        _allocate(self.model, torch.device("cpu") if offloaded else device, device)

    def move_buffers(self, device: torch.device) -> None:
        """Move the buffers, which have values, to a device; the parameters stay without memory."""
        _set_buffers(_buffers(self.model), device)

    def draw(self, overwritten: Collection[str] = (), shards: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Set this rank's parameters to their values.

        Args:
            overwritten: Names of tensors that get other values afterwards.
            shards: Tensors to set instead of the parameters, by name.
        """
        parameters = {name for name, _ in self.model.named_parameters()} - set(overwritten)
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers()), **shards}
        for name, value in self.values(tensors.keys() - set(overwritten)):
            put(tensors[name], value)
            parameters.discard(name)
        assert not parameters, f"without values: {', '.join(parameters)}"


def _allocate(model: nn.Module, device: torch.device, of_buffers: torch.device) -> None:
    """Give parameters memory. They stay the same objects: two modules may share one, and FSDP keeps references."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    buffers = _buffers(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    _set_buffers(buffers, of_buffers)  # they have values already


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor | None]]:
    return [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]


def _set_buffers(buffers: Iterable[tuple[nn.Module, str, Tensor | None]], device: torch.device) -> None:
    for module, name, buffer in buffers:
        module._buffers[name] = None if buffer is None else buffer.to(device)


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
) -> Iterator[tuple[str, InitialValue | None]]:
    """Yield the values that `initialization.reset_modules` would give the wanted parameters, under their first names.

    The value of a parameter that no reset sets, since its constructor does, is None.

    Args:
        module: Its parameters are on the meta device, also afterwards.
        blocks: Names of submodules whose parameters are set one block after the other; the other modules follow. No
            reset may change parameters of another block: see `resets_stay_in_blocks`.
    """
    parameters = dict(module.named_parameters())
    modules = dict(module.named_modules(remove_duplicate=False))
    for names in _modules_by_block(module, blocks):
        of_block = {name: parameter for name, parameter in parameters.items() if _owner(name) in names}
        if not any(name in wanted for name in of_block):
            continue
        recorded = record_resets(of_block, modules, names, seed, resets)
        if recorded is not None:
            yield from ((name, recorded.get(name)) for name in of_block if name in wanted)
            continue
        with _memory(module, of_block) as values:
            done: set[Tensor] = set()
            for name in names:
                if name in resets:
                    reset_module(modules[name], seed, name, resets[name], done)
            for name, value in values.items():
                if name in wanted:
                    yield name, None if _is_unset(value) else Known(value)


def _is_unset(value: Tensor) -> bool:
    """Return whether no reset has set a value of `_memory`."""
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
        if [other._version for other in others] != before or any(other in draws.skipped for other in others):
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


Resets = Mapping[str, Callable[[], object]]
"""Functions that draw the initial values of modules, by qualified name."""

_NORMAL = (Tensor.normal_, nn.init.normal_)
_CONSTANT = {Tensor.zero_: 0.0, nn.init.zeros_: 0.0, nn.init.ones_: 1.0}
_VALUE = (Tensor.fill_, nn.init.constant_)


class NotRecorded(Exception):
    """A reset does something else than to draw normal values and set constants."""


def record_resets(
    parameters: Mapping[str, nn.Parameter],
    modules: Mapping[str, nn.Module],
    names: Sequence[str],
    seed: int,
    resets: Resets,
) -> dict[str, InitialValue] | None:
    """Return what the resets of the named modules, one after the other, do to parameters on the meta device.

    A parameter without an entry has no reset. Parameters that an earlier module owns, too, stay as they are.

    Returns:
        None if a reset does more than can be recorded, or doesn't set all of its module's parameters.
    """
    recorder = _Recorder(parameters)
    done: set[int] = set()
    versions = [parameter._version for parameter in parameters.values()]
    try:
        for name in names:
            if name not in resets:
                continue
            own = [id(parameter) for parameter in modules[name].parameters(recurse=False)]
            kept = {number: recorder.values.get(number) for number in own if number in done}
            with generators_keyed(seed, "module", name), torch.no_grad():
                recorder.begin(key(seed, "module", name))
                before = torch.default_generator.get_state()
                with recorder:
                    resets[name]()
                if not torch.equal(torch.default_generator.get_state(), before):
                    return None
            if not all(number in recorder.values for number in own):
                return None  # some functions, such as trunc_normal_, do nothing on the meta device
            recorder.values.update({number: value for number, value in kept.items() if value is not None})
            done.update(own)
    except (NotRecorded, RuntimeError, NotImplementedError):  # the meta device has no values
        return None
    if [parameter._version for parameter in parameters.values()] != versions:
        return None
    return {
        name: recorder.values[id(parameter)]
        for name, parameter in parameters.items()
        if id(parameter) in recorder.values
    }


class _Recorder(TorchFunctionMode):
    """Records in-place functions of parameters, which are not run."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._parameters = {id(parameter): parameter for parameter in parameters.values()}
        self._rows: dict[int, tuple[Tensor, int, int]] = {}
        self._seed = self._drawn = 0
        self.values: dict[int, InitialValue] = {}

    def begin(self, seed: int) -> None:
        """Begin a module, whose generator has this seed."""
        self._seed, self._drawn = seed, 0
        self._rows.clear()

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and not args[0].is_meta:  # a buffer, which has memory
            return func(*args, **kwargs)
        if func == ASKS_FOR_MEMORY:
            raise NotRecorded("is_meta")
        if func in _NORMAL:
            return self._normal(*args, **kwargs)
        if func in _CONSTANT:
            return self._constant(args[0] if args else kwargs["tensor"], _CONSTANT[func])
        if func in _VALUE:
            return self._constant(*args, **kwargs)
        if func is Tensor.__getitem__ and id(args[0]) in self._parameters and isinstance(args[1], int):
            row = func(*args)
            self._rows[id(row)] = row, id(args[0]), args[1]
            return row
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise NotRecorded(name)
        return func(*args, **kwargs)

    def _normal(self, tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: object = None) -> Tensor:
        elements = tensor.numel()
        plain = tensor.is_contiguous() and tensor.dtype is torch.float32 and generator is None
        if id(tensor) not in self._parameters or not plain or elements < BLOCK:
            raise NotRecorded("normal_")
        self.values[id(tensor)] = Normal(tuple(tensor.shape), mean, std, self._seed, self._drawn)
        self._drawn += draws_of(elements)
        return tensor

    def _constant(self, tensor: Tensor, val: float = 0.0, value: float | None = None) -> Tensor:
        constant = float(val if value is None else value)
        if id(tensor) in self._parameters:
            self.values[id(tensor)] = Constant(tuple(tensor.shape), constant)
        elif id(tensor) in self._rows:
            _, owner, index = self._rows[id(tensor)]
            if owner not in self.values:
                raise NotRecorded("a row of a parameter without a value")
            rows = self._parameters[owner].shape[0]
            self.values[owner] = ConstantRow(self.values[owner], index % rows, constant)
        else:
            raise NotRecorded("a constant in a part of a parameter")
        return tensor

"""Record resets of modules on the meta device, instead of running them.

Linear      init.normal_(weight, std=0.02), init.zeros_(bias)      -->  weight: Normal, bias: Constant
Embedding   init.normal_(weight), init.zeros_(weight[padding])     -->  weight: ConstantRow
another     anything else                                          -->  not known: the reset has to be run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.core.keys import key
from lockstep.models.initial_values import BLOCK, Constant, ConstantRow, InitialValue, Normal, draws_of
from lockstep.models.initialization import ASKS_FOR_MEMORY, generators_keyed

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

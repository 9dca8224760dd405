"""The state of model and optimizer as named tensors, and back; the same under every strategy.

    model.layers.0.weight                 parameters and saved buffers, tied ones once
    optimizer.exp_avg.layers.0.weight     state entry, then the parameter it belongs to
    evaluated.layers.0.weight             the parameter as an optimizer with modes evaluates it, for readers of weights
    values: {"optimizer": {PARAMETER: {ENTRY: number}}, "groups": [...], "tied": {NAME: NAME}}
            and "own": {...} of a user's optimizer that keeps other state, if it does,
            and "recast": [NAME, ...] of buffers that forwards have given another dtype, if any

A tensor is plain if this rank holds it whole, else a DTensor or a `FlatShard`, which know their place in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lockstep.core.adapters import adapter_of, quantized_of
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.records import TrainingState
from lockstep.distributed.extra_states import set_extra_states
from lockstep.distributed.shard_boxes import FlatShard, full_tensor, is_sharded, local_shape, local_tensor, shard_of
from lockstep.sharding.buffers import buffer_owners, current_buffers
from lockstep.sharding.partition import specs_of

if TYPE_CHECKING:
    from torch import nn

    from lockstep.core.protocols import Optimizer
    from lockstep.sharding.buffers import SyncedBuffers
    from lockstep.sharding.deepspeed_shards import ZeroShard
    from lockstep.sharding.parameter_shards import ParameterShard
    from lockstep.sharding.partition import ModelPartition, Spec

_MODEL, _OPTIMIZER, _EVALUATED = "model.", "optimizer.", "evaluated."
_AVERAGE = f"{_OPTIMIZER}averaged_weight."  # of an optimizer with an average, which needs no second copy
_PLAIN = (str, int, float, bool, type(None))


@dataclass(eq=False)
class ModelState:
    """The parameters, saved buffers and optimizer state that this rank holds.

    Attributes:
        model: The module without wrappers; parameters have the model's own names.
        partition: Which rank holds which parts of the model; None: this rank holds the whole model.
        shards: How optimizer state is sharded, by parameter; it is whole for parameters that aren't named.
        flat: Parameters that are sharded element by element, by name.
        before_read: Called before parameters are read.
        after_restore: Lets what is kept beside the parameters follow them, after they were set.
        held: Returns tensors that the rank holds for its state and that have no names, by category.
    """

    model: nn.Module
    optimizer: Optimizer
    _: KW_ONLY
    buffers: SyncedBuffers | None = None
    partition: ModelPartition | None = None
    shards: Mapping[str, ParameterShard] | Mapping[str, ZeroShard] = field(default_factory=dict)
    flat: Mapping[str, Any] = field(default_factory=dict)
    before_read: Callable[[], None] = lambda: None
    after_restore: Callable[[], None] = lambda: None
    held: Callable[[], Mapping[str, Sequence[Tensor]]] = dict

    def __post_init__(self) -> None:
        self._specs = {name: (buffer.dtype, buffer.shape) for name, (_, buffer) in self._saved_buffers().items()}

    def synchronize(self) -> None:
        """Copy the first rank's buffers (running means) to all ranks. All ranks together."""
        if self.buffers is not None:
            self.buffers.synchronize()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Give parameters the values that the optimizer has for evaluation while the block runs."""
        train = self._evaluate()
        try:
            yield
        finally:
            if train is not None:
                self.before_read()  # a gathered copy would stay as it is
                train()

    def end_training(self) -> None:
        """Give parameters the values that the optimizer has for evaluation, for good."""
        self._evaluate()

    @torch.no_grad()
    def _evaluate(self) -> Callable[[], None] | None:
        self.before_read()
        return self.optimizer.evaluate()

    def weights(
        self, *, wanted: bool | Callable[[str], bool] = True, names: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and saved buffers by name, whole, on the CPU, tied ones once. All ranks exhaust it together.

        Args:
            wanted: Whether this rank yields a tensor, or only takes part in the gathering; False: it yields none.
            names: Those to gather, in their order; the same on all ranks. None: all, in the order of the model.
        """
        own = self._saved()[0]
        if self.partition is not None and self.partition.is_divided:
            return self.partition.whole(own, wanted, names)
        return _gathered(own.items() if names is None else ((name, own[name]) for name in names), wanted)

    def specs(self) -> dict[str, Spec]:
        """Return shape and dtype of each tensor that `weights` yields. All ranks together."""
        own = specs_of(self._saved()[0])
        return own if self.partition is None else self.partition.specs(own)

    def whole(self, pairs: Iterable[tuple[str, Tensor]], *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield named tensors of this rank, such as `GradientStep.gradients`, in the way of `weights`."""
        if self.partition is None or not self.partition.is_divided:
            return _gathered(pairs, wanted)
        return self.partition.whole(dict(pairs), wanted)

    @torch.no_grad()
    def live_state(self) -> TrainingState:
        """Return the live state of model and optimizer. All ranks together."""
        self.before_read()
        tensors, tied = self._saved()
        parameters = {name for name, _ in self.model.named_parameters()}
        changing = frozenset(f"{_MODEL}{name}" for name in tensors if name not in parameters)
        entries = {f"{_MODEL}{name}": tensor for name, tensor in tensors.items()}
        saved = cast("Any", self.optimizer.state_dict())
        numbers: dict[str, dict[str, Any]] = {}
        for name, of_parameter in saved["parameters"].items():
            shard = self.shards.get(name)
            for entry, value in cast("dict[str, Any]", of_parameter).items():
                if isinstance(value, Tensor | FlatShard):
                    held: Any = value
                    entries[f"{_OPTIMIZER}{entry}.{name}"] = held if shard is None else shard.as_shard(entry, held)
                else:
                    numbers.setdefault(name, {})[entry] = _plain(f"the optimizer's {entry} of {name}", value)
        own_groups = (group.items() for group in saved["groups"])
        groups = [{key: _plain(f"the optimizer's {key}", value) for key, value in items} for items in own_groups]
        values = {"optimizer": numbers, "groups": groups, "tied": tied}
        if own := saved.get("own"):
            values["own"] = {
                kind: {key: _plain(f"the optimizer's own {key}", value) for key, value in kept.items()}
                for kind, kept in own.items()
            }
        begun = {name: (*spec, tensors[name]) for name, spec in self._specs.items() if name in tensors}
        if grown := [name for name, (_, shape, now) in begun.items() if now.shape != shape]:
            why = f"a forward has given the buffer {grown[0]} another shape, so that no checkpoint could be loaded"
            raise ConfigError(Problem("", "model", f"{why}: register it in its last shape, or with persistent=False"))
        if recast := [name for name, (dtype, _, now) in begun.items() if now.dtype != dtype]:
            values["recast"] = recast
        if not any(key.startswith(_AVERAGE) for key in entries) and (train := self.optimizer.evaluate()) is not None:
            entries |= {f"{_EVALUATED}{name}": tensors[name].detach().clone() for name in parameters & tensors.keys()}
            train()
        state = TrainingState(entries, values, changing)
        return state if self.partition is None else self.partition.gather_state(state)

    @torch.no_grad()
    def not_finite(self, state: TrainingState) -> str | None:
        """Return the name of a tensor of this rank that no update can make good; None: there is none.

        A trained parameter with a NaN or an infinity, or a NaN in what the optimizer keeps for one.
        """
        trained = {f"{_MODEL}{name}" for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        held = {key: tensor for key, tensor in state.tensors.items() if key in trained or key.startswith(_OPTIMIZER)}
        name = _first_not_finite(held, trained)
        return name and name.removeprefix(_MODEL)

    @torch.no_grad()
    def weights_not_finite(self) -> str | None:
        """Return the name of a parameter of this rank with a NaN or an infinity; None: there is none."""
        packed = quantized_of(self.model)  # bits, no numbers
        names = {name for name, _ in self.model.named_parameters() if name not in packed}
        held = {name: tensor for name, tensor in self._tensors()[0].items() if name in names}
        return _first_not_finite(held, names)

    @torch.no_grad()
    def restore(self, state: TrainingState) -> None:
        """Set model and optimizer to `state`, whole or this rank's shards; raise RunFailed if it is another model's."""
        if self.partition is not None:
            state = self.partition.own_state(state)
        self._cast_buffers(state)
        own = self._saved()[0]
        for name, tensor in own.items():
            saved = _saved(state, name, tensor)
            if isinstance(tensor, FlatShard):
                tensor.memory.copy_(saved)
            else:
                local_tensor(tensor).copy_(saved)
        set_extra_states(self.model, own)
        entries: dict[str, dict[str, Any]]
        entries = {name: dict(numbers) for name, numbers in state.values["optimizer"].items()}
        for key, value in state.tensors.items():
            if key.startswith(_OPTIMIZER):
                entry, _, name = key.removeprefix(_OPTIMIZER).partition(".")
                shard = self.shards.get(name)
                entries.setdefault(name, {})[entry] = value if shard is None else shard.as_local(entry, value)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                entries.setdefault(name, {})
        kept = {"own": state.values["own"]} if "own" in state.values else {}
        self.optimizer.load_state_dict({"parameters": entries, "groups": list(state.values["groups"]), **kept})
        self.after_restore()

    def _cast_buffers(self, state: TrainingState) -> None:
        """Give buffers the dtypes that they had when `state` was saved: a forward may have changed them."""
        recast = state.values.get("recast", ())
        for name, (owner, buffer) in self._saved_buffers().items():
            saved, (dtype, _) = state.tensors.get(f"{_MODEL}{name}"), self._specs.get(name, (buffer.dtype, None))
            if name in recast and saved is not None:
                dtype = saved.dtype
            if buffer.dtype != dtype:
                owner[name.rpartition(".")[2]] = buffer.to(dtype)

    def _saved_buffers(self) -> dict[str, tuple[dict[str, Any], Tensor]]:
        owners = buffer_owners(self.model)
        buffers = zip(owners.items(), current_buffers(owners), strict=True)
        return {name: (owner, buffer) for (name, owner), buffer in buffers if buffer is not None}

    def _saved(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return `_tensors` without those of an adapter's base, which aren't saved."""
        tensors, tied = self._tensors()
        adapter = adapter_of(self.model)
        if adapter is None:
            return tensors, tied
        saved = {name: tensor for name, tensor in tensors.items() if name not in adapter.frozen}
        return saved, {name: first for name, first in tied.items() if first in saved}

    def _tensors(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return parameters and saved buffers, each under its first name; and the other names of tied ones."""
        tensors: dict[str, Any] = {}
        tied: dict[str, str] = {}
        first_names: dict[int, str] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise RunFailed(f"the model's {name} is a {type(value).__name__}: only tensors can be saved")
            first = first_names.setdefault(id(value), name)
            if first == name:
                tensors[name] = self.flat.get(name, value)
            else:
                tied[name] = first
        return tensors, tied


def _first_not_finite(tensors: Mapping[str, Any], finite: Container[str]) -> str | None:
    parts = {key: part for key, tensor in tensors.items() if (part := local_tensor(tensor)).is_floating_point()}
    names = [key for key, part in parts.items() if part.numel()]
    if not names:
        return None
    bounds = [torch.stack(parts[name].aminmax()) for name in names]  # on a CPU 17 times as fast as the largest norm
    device = next((value.device for value in bounds if value.device.type != "cpu"), bounds[0].device)
    values = torch.stack([value.to(device, torch.float64) for value in bounds]).tolist()  # the host waits once
    for key, pair in zip(names, values, strict=True):
        if math.isnan(pair[0]) or (key in finite and any(map(math.isinf, pair))):
            return key
    return None


def _gathered(
    pairs: Iterable[tuple[str, Tensor]], wanted: bool | Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    with torch.no_grad():
        for name, tensor in pairs:
            whole = full_tensor(tensor) if is_sharded(tensor) else tensor  # every rank receives a sharded one
            if wanted if isinstance(wanted, bool) else wanted(name):
                yield name, whole.detach().cpu()
            del whole


def _saved(state: TrainingState, name: str, tensor: Tensor) -> Tensor:
    if f"{_MODEL}{name}" not in state.tensors:
        raise RunFailed(f"the saved state has no {name}")
    value = cast("Tensor", state.tensors[f"{_MODEL}{name}"])
    if value.shape == local_shape(tensor):
        return value
    if value.shape != torch.Size(tensor.shape):
        raise RunFailed(f"{name} is {list(tensor.shape)} here, but {list(value.shape)} in the saved state")
    return shard_of(tensor, value)


def _plain(what: str, value: object) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_plain(what, item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(what, item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        raise RunFailed(
            f"{what} holds a tensor where it can't be saved: give each tensor a key of its own in the optimizer's "
            "state[parameter], of the parameter that it belongs to"
        )
    raise RunFailed(f"{what} is a {type(value).__name__}: it can't be saved; tensors, numbers and strings can")

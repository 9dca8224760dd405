"""Refuses what changes parameters outside of the optimizer's step, or replaces modules: a forward, a hook, other code.

    update k          sums of bits | forwards, backwards | sums of bits | optimizer's step | sums of bits
    update k + 1      sums of bits | ...                                                      compared with these
    where parameters are gathered      and around a forward of each module, while they are whole

Such a change is lost when a gathered parameter is freed, and in a run that resumes. Updates 1, 2, 3, 5, 9, 17, ... are
watched, so that a steady update costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from torch import Tensor, float64, nn, tensor

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.formatting import listed
from lockstep.distributed.shard_boxes import local_tensor
from lockstep.loop.replicas import bit_sums
from lockstep.strategies.registry import find_strategy

if TYPE_CHECKING:
    from lockstep.loop.components import Components

_NAMED = 3
REQUIRES_GRAD = attrgetter("requires_grad")
_Mark = tuple[Tensor, object, int]
"""A parameter, the shape of what this rank holds of it, and the sum of its bits."""


class ParameterWatch:
    """Watches the parameters of a run on this rank.

    Attributes:
        held: The parameters, and those that they are gathered into.
        trained: Whether each was trained when the run began.
    """

    def __init__(self, components: Components) -> None:
        config, sharding = components.config, components.sharding
        gathers = find_strategy(components.plan.strategy).variant(config.parallel).state.parameters
        self._model = sharding.state.model
        self._ranks = components.world.axis
        self._looks_inside = gathers and not config.model.compile  # hooks would be compiled
        self._names = [name for name, _ in self._model.named_parameters()]
        self.held: list[Tensor] = list(self._model.parameters())
        self.trained = list(map(REQUIRES_GRAD, self.held))
        self._modules = _with_parameters(self._model)
        self._at_rest = dict(self._model.named_parameters(remove_duplicate=False))
        self._after_step: dict[str, _Mark] = {}

    def accumulate(self, accumulate: Callable[[], None]) -> None:
        """Run forwards and backwards of an update.

        Raises:
            ConfigError: They, or something since the update before, have changed parameters, or replaced modules.
        """
        before = _marks(self._model)
        written = _changed(self._after_step, before)
        self._after_step = {}
        whole: dict[str, Tensor] = {}
        with _around_forwards(self._model, self._at_rest, written, whole) if self._looks_inside else nullcontext():
            accumulate()
        self._hold(whole)
        written |= _changed(before, _marks(self._model))
        self.refuse(written)

    def updated(self) -> None:
        """Remember the parameters after the step before a watched update."""
        self._after_step = _marks(self._model)

    def forget(self) -> None:
        """Forget them: others may take their place."""
        self._after_step = {}

    def refuse(self, written: Set[str] = frozenset()) -> None:
        """Raise ConfigError, on all ranks, if one has written to parameters, or has replaced modules that have some."""
        replaced = {name for name, now in _with_parameters(self._model).items() if self._modules.get(name) is not now}
        if not self._ranks.sum(tensor(len(replaced) + len(written), dtype=float64)).item():
            return
        everywhere = cast("list[tuple[set[str], Set[str]]]", self._ranks.gather((replaced, written)))
        all_replaced, all_written = (sorted(set().union(*names)) for names in zip(*everywhere, strict=True))
        if all_replaced:
            raise _replaced(all_replaced, [rank for rank, (names, _) in enumerate(everywhere) if names])
        raise _written(all_written)

    def thawed(self) -> ConfigError:
        """Return the error if `requires_grad` of a parameter has changed since the start."""
        flags = zip(self._names, self.held, self.trained, strict=True)
        changed = list(dict.fromkeys(name for name, held, trained in flags if held.requires_grad is not trained))
        why = (
            f"requires_grad of {listed(changed, _NAMED)} has changed since the start; end this run, and start another "
            "from its weights (model.init_from), with other frozen parameters"
        )
        return ConfigError(Problem("", "model", why))

    def _hold(self, whole: Mapping[str, Tensor]) -> None:
        known, trained = set(map(id, self.held)), dict(zip(self._names, self.trained, strict=True))
        for name, parameter in whole.items():
            if name in trained and id(parameter) not in known:  # a tied one has one name
                self._names.append(name)
                self.held.append(parameter)
                self.trained.append(trained[name])


@contextmanager
def _around_forwards(
    model: nn.Module, at_rest: Mapping[str, Tensor], written: set[str], whole: dict[str, Tensor]
) -> Iterator[None]:
    """Look at parameters around the first forward of each module, when they are whole.

    Args:
        at_rest: Those outside of forwards, under all their names.
        written: Gets the names of those that a forward changes.
        whole: Gets the parameters by name.
    """
    handles = []
    names = {module: name for name, module in _with_parameters(model).items()}
    before: dict[nn.Module, dict[str, _Mark]] = {}
    done: set[nn.Module] = set()
    passed: dict[str, Tensor] = {}

    def named(module: nn.Module) -> dict[str, Tensor]:
        # not by the module: a pipeline replaces its method, to refuse a forward that calls it
        return dict(nn.Module.named_parameters(module, names[module], remove_duplicate=False))

    def enter(module: nn.Module, *unused: object) -> None:
        passed.update(named(module))

    def begin(module: nn.Module, *unused: object) -> None:
        gathered = {name: parameter for name, parameter in named(module).items() if passed[name] is not parameter}
        if lost := [name for name in gathered if passed[name] is not at_rest[name]]:
            raise _overridden(lost)
        whole.update(gathered)
        if module not in done:
            before[module] = _marks(module)

    def end(module: nn.Module, *unused: object) -> None:
        if module not in done:
            done.add(module)
            prefix = f"{names[module]}." if names[module] else ""
            now = _marks(module)
            written.update(prefix + name for name in _changed(before.pop(module), now))

    for module in names:  # a strategy's hooks gather before, and free after
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_pre_hook(begin))
        handles.append(module.register_forward_hook(end, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with_parameters(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if next(module.parameters(), None) is not None}


def _marks(module: nn.Module) -> dict[str, _Mark]:
    named = [
        (name, parameter) for name, parameter in nn.Module.named_parameters(module) if not parameter.is_inference()
    ]
    held = [local_tensor(parameter) for _, parameter in named]
    sums = bit_sums(held).tolist() if held else []
    marks = zip(named, held, sums, strict=True)
    return {name: (parameter, part.shape, bits) for (name, parameter), part, bits in marks}


def _changed(before: dict[str, _Mark], now: dict[str, _Mark]) -> set[str]:
    """Return the names of parameters with other values on this rank; a strategy may have gathered one."""
    return {
        name
        for name, (parameter, shape, bits) in now.items()
        if name in before and before[name][0] is parameter and before[name][1] == shape and before[name][2] != bits
    }


def _replaced(names: list[str], ranks: list[int]) -> ConfigError:
    why = (
        f"a forward, or code of your own, has replaced {listed(names, _NAMED)} since the start, on rank "
        f"{', '.join(map(str, ranks))}: the run would depend on which rank gets which batch; keep the model's modules"
    )
    return ConfigError(Problem("", "model", why))


def _overridden(names: list[str]) -> ConfigError:
    why = (
        f"the forward calls a module with other tensors instead of {listed(names, _NAMED)} (functional_call), and fsdp "
        "gathers its own there; set parallel.fsdp.wrap: root, or parallel.strategy: ddp"
    )
    return ConfigError(Problem("", "parallel.strategy", why))


def _written(names: list[str]) -> ConfigError:
    why = (
        f"{listed(names, _NAMED)} changed outside of the optimizer's step, in a forward or by code of your own: it is "
        "lost with sharded parameters, and in a run that resumes. If a first batch sets them, run one batch before; "
        "make what follows the weights buffers; normalize or clip weights where they are used"
    )
    return ConfigError(Problem("", "model", why))

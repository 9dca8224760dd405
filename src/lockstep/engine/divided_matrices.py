"""Whether a model whose matrices are divided still computes what it did whole; seen on a few samples, beforehand.

    the same samples --> undivided --> outputs of modules, gradients --.
                    \\-> divided   --> outputs of modules, gradients --+--> the first that differ are named

A plan is words about modules, and whether they are true of a forward is known when it has run: a Linear that holds
queries, keys and values in one may be cut, but not into whole heads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.core.errors import ConfigError, Failure, Problem
from lockstep.distributed.shard_boxes import as_shard_of, full_tensor, is_sharded, local_tensor
from lockstep.engine.rehearsing import outputs_of_modules, rehearsal

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis
    from lockstep.core.records import Batch

_Forward = Callable[[], object]
_KEY = "parallel.tensor_parallel.plan"
_MIXED = "mixed torch.Tensor and DTensor"  # in what torch says
_LOOKED_AT = 4096  # elements of a gradient
_NAMED = 3  # words of the plan
_APART = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""Relative, of what rounds so: a wrong plan is off by more than rounding by far."""
_SEVERAL_IN_ONE = (
    "One reason may be a Linear that holds several matrices in one (queries, keys and values; gate and up), which "
    "isn't divided into pieces of each"
)
_NOISE = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Of the largest gradient: to some parameters outputs are indifferent, and theirs is the rounding of others'."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What is rehearsed.

    Attributes:
        model: divided.
        undivided: makes a context in which it computes what it did before.
        plan: styles, by the names of modules.
        alike: names of parameters that each rank holds whole.
        partial: of these, whose gradients are the sums of all ranks'.
        axis: the ranks that the matrices are divided over.
        world: all ranks, which agree on what they found.
        device: of this rank.
    """

    model: nn.Module
    undivided: Callable[[nn.Module], AbstractContextManager[object]]
    plan: Mapping[str, str]
    alike: frozenset[str]
    partial: frozenset[str]
    axis: Axis
    world: Axis
    device: torch.device


@dataclass(slots=True)
class _Seen:
    """Attributes:
    outputs: of modules, by name, in the order in which they were done; whole, if the forward came to its end.
    gradients: some elements of this rank's part of each, and its norm behind them, by parameter.
    inside: names of the modules that the forward is in, from outside in.
    """

    whole: bool
    weighed: float = 0.0
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)


def rehearse(what: Rehearsed, forward: Callable[[Batch], object], batches: Sequence[Batch]) -> None:
    """All ranks together. No objective is asked, which may count how often it is.

    Args:
        forward: makes outputs.
        batches: of few samples, the same on all ranks; the first that the whole model takes is used.

    Raises:
        ConfigError: the model's forward doesn't compute as the plan divides it.
    """
    forwards = [partial(forward, batch) for batch in batches]
    chosen, evaluated, whole = _whole(what, forwards)
    divided = _Seen(whole=False)
    with rehearsal(what.model, what.device):
        try:
            with _torch_silent():
                _look(what, chosen, evaluated, divided)
        except Failure:
            raise
        except Exception as error:  # whatever a forward runs into that is given parts; on all ranks alike
            raise _refused(_failure(what, whole, divided, error)) from error
    told = what.world.gather(_difference(what, whole, divided))
    first = next((one for one in told if isinstance(one, str)), None)
    if first is not None:
        raise _refused(first)


@contextmanager
def _torch_silent() -> Iterator[None]:
    """torch tells of a product that doesn't fit by its log, too: a screen long, on each rank."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _whole(what: Rehearsed, forwards: Sequence[_Forward]) -> tuple[_Forward, bool, _Seen]:
    """Of the first forward that works: it, whether it is an evaluation's, and what is seen of it.

    Modules that draw numbers when they train may do so for a rank's columns alone: that can't be compared.
    """
    *short, last = forwards
    for forward in short:
        try:
            return forward, *_trained_or_evaluated(what, forward)
        except Failure:
            raise
        except Exception:  # its sequences have to be of one length
            continue
    return last, *_trained_or_evaluated(what, last)


def _trained_or_evaluated(what: Rehearsed, forward: _Forward) -> tuple[bool, _Seen]:
    for evaluated in (False, True):
        seen = _Seen(whole=True)
        with rehearsal(what.model, what.device) as drawn, what.undivided(what.model):
            _look(what, forward, evaluated, seen)
            if evaluated or not any(what.world.gather(drawn())):
                break
    return evaluated, seen


def _refused(why: str) -> ConfigError:
    return ConfigError(Problem("", _KEY, f"{why}. Change the plan, or take fsdp, which divides any model"))


# --- looking ------------------------------------------------------------------------------------------------------


def _look(what: Rehearsed, forward: _Forward, evaluated: bool, seen: _Seen) -> None:
    if evaluated:
        what.model.eval()
    with outputs_of_modules(what.model) as outputs, _parameters_in_use(what.model, seen.inside) as used:
        try:
            sum_ = _weighed(forward())
        except Exception:
            seen.outputs = {name: local_tensor(one) for name, one in outputs.items()}
            raise
    seen.weighed = float(sum_.detach())
    seen.outputs = {name: (full_tensor(one) if is_sharded(one) else one).cpu() for name, one in outputs.items()}
    trained = {name: one for name, one in used.items() if one.requires_grad}
    if not sum_.requires_grad or not trained:
        return
    hooks = [cast("Any", one).register_hook(partial(_look_at, what, seen, name, one)) for name, one in trained.items()]
    torch.autograd.grad(sum_, list(trained.values()), allow_unused=True)
    for hook in hooks:
        hook.remove()


def _weighed(outputs: object) -> Tensor:
    """A number that each element of what a forward has made changes otherwise, wherever it lies in it."""
    if is_dataclass(outputs):
        outputs = [getattr(outputs, one.name) for one in fields(outputs)]
    leaves = tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    found = [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point() and one.numel()]
    noise, total = torch.Generator().manual_seed(0), torch.zeros(())
    for one in found:
        whole: Tensor = (cast("Any", one).full_tensor() if is_sharded(one) else one).float()
        total = total.to(whole.device) + (whole * (whole + torch.randn(whole.shape, generator=noise).to(whole))).mean()
    return total


@contextmanager
def _parameters_in_use(model: nn.Module, inside: list[str]) -> Iterator[dict[str, Tensor]]:
    """By their names, each once: those that a forward computes with, as FSDP puts them together for a while."""
    found: dict[int, tuple[str, Tensor]] = {}

    def enter(name: str, module: nn.Module, inputs: object) -> None:
        inside.append(name)

    def note(name: str, module: nn.Module, inputs: object) -> None:
        found.update((id(one), (own, one)) for own, one in module.named_parameters(prefix=name))

    def leave(name: str, module: nn.Module, inputs: object, outputs: object) -> None:
        inside.pop()

    used: dict[str, Tensor] = {}
    modules = list(model.named_modules())
    hooks = [one.register_forward_pre_hook(partial(enter, name), prepend=True) for name, one in modules]
    hooks += [one.register_forward_pre_hook(partial(note, name)) for name, one in modules]
    hooks += [one.register_forward_hook(partial(leave, name)) for name, one in modules]
    try:
        yield used
    finally:
        used.update(found.values())
        for hook in hooks:
            hook.remove()


def _look_at(what: Rehearsed, seen: _Seen, name: str, parameter: Any, gradient: Any) -> Tensor:
    """Gives nothing in its place, so that all of them are never there at once."""
    if is_sharded(gradient) and gradient.placements != parameter.placements:  # each rank has a summand
        gradient = gradient.redistribute(placements=parameter.placements)
    mine = local_tensor(gradient)
    if name in what.partial and not seen.whole:
        mine = what.axis.sum(mine.clone())
    flat = mine.reshape(-1)
    step = flat.numel() // _LOOKED_AT | 1  # odd, so as not to see one column alone
    seen.gradients[name] = torch.cat([flat[::step], flat.norm()[None]]).float()
    nothing = torch.zeros((), dtype=mine.dtype, device=mine.device).expand(mine.shape)
    return as_shard_of(gradient, nothing)


# --- comparing ----------------------------------------------------------------------------------------------------


def _difference(what: Rehearsed, whole: _Seen, divided: _Seen) -> str | None:
    """What differs first on this rank; None: nothing does, as far as the roughest precision can tell."""
    if not isfinite(whole.weighed):
        return None
    kinds = {one.dtype for one in divided.outputs.values()} or {torch.float32}
    rough = max(_APART.get(kind, 0.0) for kind in kinds)
    gradient = _first_apart(whole.gradients, divided.gradients, rough, max(_NOISE.get(kind, 0.0) for kind in kinds))
    if gradient is None and abs(whole.weighed - divided.weighed) <= rough * abs(whole.weighed):
        return None
    return (
        _of_end(whole, divided)
        or _of_module(what, whole, divided, rough)
        or _of_gradient(what, divided, gradient)
        or "the model gives something else where matrices are divided than whole"
    )


def _is_near(one: Tensor, other: Tensor, rough: float, noise: float = 0.0) -> bool:
    return bool((one - other).float().norm() <= rough * one.float().norm() + noise)


def _first_apart(whole: Mapping[str, Tensor], divided: Mapping[str, Tensor], rough: float, noise: float) -> str | None:
    """The parameter with the first gradient that is, on the way back."""
    noise *= max((float(one[-1]) for one in whole.values()), default=0.0)
    for name, one in whole.items():
        other = divided.get(name, torch.zeros_like(one))
        norms = one[-1], other[-1]
        if not _is_near(*norms, rough, noise) or not _is_near(one[:-1], other[:-1], rough, noise):
            return name
    return None


# --- saying it ----------------------------------------------------------------------------------------------------


def _of_module(what: Rehearsed, whole: _Seen, divided: _Seen, rough: float) -> str | None:
    """The first whose outputs are of one shape, so that they should be the same; a rank's columns aren't."""
    for name, one in divided.outputs.items():
        there = whole.outputs.get(name)
        if there is not None and there.shape == one.shape and not _is_near(there, one, rough):
            return (
                f"{name or 'the model'} gives something else where matrices are divided than whole"
                f"{_on_the_way(what, divided, name)}. {_SEVERAL_IN_ONE}"
            )
    return None


def _of_gradient(what: Rehearsed, divided: _Seen, name: str | None) -> str | None:
    if name is None:
        return None
    said = f"the gradient of {name} is another one where matrices are divided than whole"
    if name in what.partial:
        return f"{said}: sum_gradient is for weights that each rank uses for its own columns alone"
    if name in what.alike:
        return f"{said}: weights that each rank uses for its own columns alone take sum_gradient, in a module of theirs"
    return f"{said}{_on_the_way(what, divided, name.rpartition('.')[0])}. {_SEVERAL_IN_ONE}"


def _failure(what: Rehearsed, whole: _Seen, divided: _Seen, error: Exception) -> str:
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    if _MIXED in said:
        said = "it is given what lies on several ranks; gather_sequence, or a style of its own, says how it takes that"
    if divided.inside:
        name = divided.inside[-1] or "the model"
        return f"{name} fails where matrices are divided: {said}{_on_the_way(what, divided, name)}"
    return f"what the model gives can't be put together where matrices are divided: {said}"


def _of_end(whole: _Seen, divided: _Seen) -> str | None:
    """The last module gives something of another shape."""
    name, one = next(reversed(divided.outputs.items()), ("", None))
    there = whole.outputs.get(name)
    if one is None or there is None or there.shape == one.shape:
        return None
    return (
        f"{name or 'the model'} gives {list(one.shape)} where matrices are divided, and {list(there.shape)} whole; "
        "colwise_gather_output puts a head's columns together"
    )


def _on_the_way(what: Rehearsed, divided: _Seen, name: str) -> str:
    """The last words of the plan on the way to a module."""
    names = list(divided.outputs)
    done = names[: names.index(name) + 1] if name in names else names
    words = [f"{one} ({what.plan[one]})" for one in done if one in what.plan][-_NAMED:]
    return f", behind {', '.join(words)}" if words else ""

"""A check that a tensor-parallel model computes what it did whole, on a few samples, before training.

    the same samples --> whole weights --> outputs of modules, gradients --.
                    \\-> divided       --> outputs of modules, gradients --+--> the first that differ are named

A plan is words about modules, and whether they are right for a forward is known when it has run: a Linear that holds
queries, keys and values in one may be divided, but not into whole heads.
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
from lockstep.engine.dry_run import dry_run, outputs_of_modules

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis
    from lockstep.core.records import Batch
    from lockstep.distributed.mesh_position import TensorParallelGroup

_Forward = Callable[[], object]
_KEY = "parallel.tensor_parallel.plan"
_MIXED = "mixed torch.Tensor and DTensor"  # in torch's message
_SAMPLED = 4096  # elements of a gradient
_NAMED = 3  # entries of the plan
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""Relative, of what rounds so: a wrong plan differs by more than rounding by far."""
_SEVERAL_IN_ONE = (
    "One reason may be a Linear that holds several matrices in one (queries, keys and values; gate and up), which "
    "isn't divided into pieces of each"
)
_NOISE = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Relative to the largest gradient: outputs don't depend on some parameters, whose gradient is the rounding of
others'."""


@dataclass(slots=True)
class _Observed:
    """Observations of a forward and its gradients.

    Attributes:
        whole: Whether it was computed with whole weights.
        weighted: A number that depends on each element of the outputs.
        outputs: Of modules, by name, in the order in which they ended; whole, if the forward came to its end.
        gradients: Some elements of this rank's part of each, and its norm after them, by parameter.
        inside: Names of the modules that the forward is in, from outside in.
    """

    whole: bool
    weighted: float = 0.0
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """A check of a tensor plan.

    Attributes:
        model: Tensor parallel.
        whole_weights: Makes a context in which it computes with whole weights.
        plan: Styles, by the names of modules.
        group: The ranks that the matrices are divided over.
        world: All ranks, which share what they find.
        device: This rank's.
    """

    model: nn.Module
    whole_weights: Callable[[nn.Module], AbstractContextManager[object]]
    plan: Mapping[str, str]
    group: TensorParallelGroup
    world: Axis
    device: torch.device

    def run(self, forward: Callable[[Batch], object], batches: Sequence[Batch]) -> None:
        """Compare the forward with its own on whole weights. All ranks together. No objective is called, which may
        count its calls.

        Args:
            batches: Of few samples, the same on all ranks; the first that the whole model takes is used.

        Raises:
            ConfigError: The model's forward doesn't compute as the plan divides it.
        """
        chosen, evaluated, whole = self._observe_whole([partial(forward, batch) for batch in batches])
        divided = _Observed(whole=False)
        with dry_run(self.model, self.device):
            try:
                with _torch_log_off():
                    self._observe(chosen, evaluated, divided)
            except Failure:
                raise
            except Exception as error:  # whatever a forward runs into that is given parts; on all ranks alike
                raise _refused(self._failure(divided, error)) from error
        differences = self.world.gather(self._difference(whole, divided))
        first = next((item for item in differences if isinstance(item, str)), None)
        if first is not None:
            raise _refused(first)

    def _observe_whole(self, forwards: Sequence[_Forward]) -> tuple[_Forward, bool, _Observed]:
        """Return the first forward that works, whether it is an evaluation's, and what is observed of it.

        Modules that draw numbers when they train may do so for a rank's columns alone: that can't be compared.
        """
        *short, last = forwards
        for forward in short:
            try:
                return forward, *self._train_or_evaluate(forward)
            except Failure:
                raise
            except Exception:  # its sequences have to be of one length
                continue
        return last, *self._train_or_evaluate(last)

    def _train_or_evaluate(self, forward: _Forward) -> tuple[bool, _Observed]:
        for evaluated in (False, True):
            observed = _Observed(whole=True)
            with dry_run(self.model, self.device) as drawn, self.whole_weights(self.model):
                self._observe(forward, evaluated, observed)
                if evaluated or not any(self.world.gather(drawn())):
                    break
        return evaluated, observed

    def _observe(self, forward: _Forward, evaluated: bool, observed: _Observed) -> None:
        if evaluated:
            self.model.eval()
        with outputs_of_modules(self.model) as outputs, _parameters_in_use(self.model, observed.inside) as used:
            try:
                sum_ = _weighted_sum(forward())
            except Exception:
                observed.outputs = {name: local_tensor(item) for name, item in outputs.items()}
                raise
        observed.weighted = float(sum_.detach())
        observed.outputs = {
            name: (full_tensor(item) if is_sharded(item) else item).cpu() for name, item in outputs.items()
        }
        trained = {name: item for name, item in used.items() if item.requires_grad}
        if not sum_.requires_grad or not trained:
            return
        hooks = [
            cast("Any", item).register_hook(partial(self._sample_gradient, observed, name, item))
            for name, item in trained.items()
        ]
        torch.autograd.grad(sum_, list(trained.values()), allow_unused=True)
        for hook in hooks:
            hook.remove()

    def _sample_gradient(self, observed: _Observed, name: str, parameter: Any, gradient: Any) -> Tensor:
        """Return zeros without memory in its place, so that all gradients never exist at once."""
        if is_sharded(gradient) and gradient.placements != parameter.placements:  # each rank has an addend
            gradient = gradient.redistribute(placements=parameter.placements)
        own = local_tensor(gradient)
        if name in self.group.partial and not observed.whole:
            own = self.group.axis.sum(own.clone())
        flat = own.reshape(-1)
        step = flat.numel() // _SAMPLED | 1  # odd, so as not to sample one column alone
        observed.gradients[name] = torch.cat([flat[::step], flat.norm()[None]]).float()
        nothing = torch.zeros((), dtype=own.dtype, device=own.device).expand(own.shape)
        return as_shard_of(gradient, nothing)

    # --- comparing ------------------------------------------------------------------------------------------------

    def _difference(self, whole: _Observed, divided: _Observed) -> str | None:
        """Return what differs first on this rank; None: nothing does, as far as the roughest precision shows."""
        if not isfinite(whole.weighted):
            return None
        dtypes = {item.dtype for item in divided.outputs.values()} or {torch.float32}
        tolerance = max(_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
        noise = max(_NOISE.get(dtype, 0.0) for dtype in dtypes)
        gradient = _first_different(whole.gradients, divided.gradients, tolerance, noise)
        if gradient is None and abs(whole.weighted - divided.weighted) <= tolerance * abs(whole.weighted):
            return None
        return (
            _of_last_module(whole, divided)
            or self._of_module(whole, divided, tolerance)
            or self._of_gradient(divided, gradient)
            or "the model gives something else where matrices are divided than whole"
        )

    def _of_module(self, whole: _Observed, divided: _Observed, tolerance: float) -> str | None:
        """Describe the first whose outputs are of one shape, so that they should be the same; a rank's columns
        aren't."""
        for name, output in divided.outputs.items():
            expected = whole.outputs.get(name)
            if expected is not None and expected.shape == output.shape and not _is_near(expected, output, tolerance):
                return (
                    f"{name or 'the model'} gives something else where matrices are divided than whole"
                    f"{self._on_the_way(divided, name)}. {_SEVERAL_IN_ONE}"
                )
        return None

    def _of_gradient(self, divided: _Observed, name: str | None) -> str | None:
        if name is None:
            return None
        fact = f"the gradient of {name} is another one where matrices are divided than whole"
        if name in self.group.partial:
            return f"{fact}: sum_gradient is for weights that each rank uses for its own columns alone"
        if name in self.group.replicated:
            why = "weights that each rank uses for its own columns alone take sum_gradient, in a module of theirs"
            return f"{fact}: {why}"
        return f"{fact}{self._on_the_way(divided, name.rpartition('.')[0])}. {_SEVERAL_IN_ONE}"

    def _failure(self, divided: _Observed, error: Exception) -> str:
        message = str(error).strip().partition("\n")[0] or type(error).__name__
        if _MIXED in message:
            message = (
                "it is given what lies on several ranks; gather_sequence, or a style of its own, says how it takes that"
            )
        if divided.inside:
            name = divided.inside[-1] or "the model"
            return f"{name} fails where matrices are divided: {message}{self._on_the_way(divided, name)}"
        return f"what the model gives can't be put together where matrices are divided: {message}"

    def _on_the_way(self, divided: _Observed, name: str) -> str:
        """Describe the last entries of the plan on the way to a module."""
        names = list(divided.outputs)
        done = names[: names.index(name) + 1] if name in names else names
        entries = [f"{item} ({self.plan[item]})" for item in done if item in self.plan][-_NAMED:]
        return f", behind {', '.join(entries)}" if entries else ""


@contextmanager
def _torch_log_off() -> Iterator[None]:
    """Silence torch's log, which shows a product that doesn't fit on a screen long, on each rank."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _refused(why: str) -> ConfigError:
    return ConfigError(Problem("", _KEY, f"{why}. Change the plan, or take fsdp, which divides any model"))


def _weighted_sum(outputs: object) -> Tensor:
    """Return a number that each element of the outputs changes differently, wherever it lies."""
    if is_dataclass(outputs):
        outputs = [getattr(outputs, item.name) for item in fields(outputs)]
    leaves = tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    tensors = [item for item in leaves if isinstance(item, Tensor) and item.is_floating_point() and item.numel()]
    noise, total = torch.Generator().manual_seed(0), torch.zeros(())
    for item in tensors:
        whole: Tensor = (cast("Any", item).full_tensor() if is_sharded(item) else item).float()
        total = total.to(whole.device) + (whole * (whole + torch.randn(whole.shape, generator=noise).to(whole))).mean()
    return total


@contextmanager
def _parameters_in_use(model: nn.Module, inside: list[str]) -> Iterator[dict[str, Tensor]]:
    """Yield a mapping that is filled with the parameters that a forward computes with, each once, by name: those that
    FSDP gathers for a while."""
    seen: dict[int, tuple[str, Tensor]] = {}

    def enter(name: str, module: nn.Module, inputs: object) -> None:
        inside.append(name)

    def note(name: str, module: nn.Module, inputs: object) -> None:
        seen.update((id(item), (own, item)) for own, item in module.named_parameters(prefix=name))

    def leave(name: str, module: nn.Module, inputs: object, outputs: object) -> None:
        inside.pop()

    used: dict[str, Tensor] = {}
    modules = list(model.named_modules())
    hooks = [item.register_forward_pre_hook(partial(enter, name), prepend=True) for name, item in modules]
    hooks += [item.register_forward_pre_hook(partial(note, name)) for name, item in modules]
    hooks += [item.register_forward_hook(partial(leave, name)) for name, item in modules]
    try:
        yield used
    finally:
        used.update(seen.values())
        for hook in hooks:
            hook.remove()


def _is_near(expected: Tensor, other: Tensor, tolerance: float, noise: float = 0.0) -> bool:
    return bool((expected - other).float().norm() <= tolerance * expected.float().norm() + noise)


def _first_different(
    whole: Mapping[str, Tensor], divided: Mapping[str, Tensor], tolerance: float, noise: float
) -> str | None:
    """Return the parameter of the first gradient that differs, on the way back."""
    noise *= max((float(item[-1]) for item in whole.values()), default=0.0)
    for name, expected in whole.items():
        other = divided.get(name, torch.zeros_like(expected))
        if not _is_near(expected[-1], other[-1], tolerance, noise):
            return name
        if not _is_near(expected[:-1], other[:-1], tolerance, noise):
            return name
    return None


def _of_last_module(whole: _Observed, divided: _Observed) -> str | None:
    """Describe the last module, if it gives another shape."""
    name, output = next(reversed(divided.outputs.items()), ("", None))
    expected = whole.outputs.get(name)
    if output is None or expected is None or expected.shape == output.shape:
        return None
    return (
        f"{name or 'the model'} gives {list(output.shape)} where matrices are divided, and {list(expected.shape)} "
        "whole; colwise_gather_output puts a head's columns together"
    )

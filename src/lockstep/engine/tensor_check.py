"""A check that a tensor-parallel model computes the same as with whole weights, on a few samples, before training.

Only a forward shows whether a plan's styles fit: a Linear that holds queries, keys and values in one can be sharded,
but not into whole heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.core.errors import ConfigError, Failure, Problem
from lockstep.distributed.shard_boxes import as_shard_of, is_sharded, local_tensor
from lockstep.engine.dry_run import dry_run, entered_modules, outputs_of_modules, quiet_fakes

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis
    from lockstep.core.records import Batch
    from lockstep.distributed.mesh_position import TensorParallelGroup

_Forward = Callable[[], object]
_KEY = "parallel.tensor_parallel.plan"
_MIXED = "mixed torch.Tensor and DTensor"  # in torch's message
_SAMPLED = 4096  # elements of a gradient
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""Relative tolerance by precision: a wrong plan differs by far more than rounding does."""
_REASONS = (
    "Usual reasons: a Linear that holds several matrices in one (queries, keys and values; gate and up) isn't divided "
    "into pieces of each; a head's columns need colwise_gather_output; weights that each rank uses for its own "
    "columns, and only those, need sum_gradient"
)
_NOISE = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Relative to the largest gradient: a parameter without effect on outputs has a gradient of rounding errors."""


@dataclass(slots=True)
class _Observed:
    """Observations of a forward and its gradients: some elements of each, then its norm; `inside`: where it failed."""

    whole: bool
    weighted: float = 0.0
    dtypes: frozenset[torch.dtype] = frozenset()
    gradients: dict[str, Tensor] = field(default_factory=dict)
    inside: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """A check of a tensor plan.

    Attributes:
        whole_weights: Makes a context where the model computes with whole weights.
        group: The ranks that hold shards of the matrices.
        world: All ranks, which share their results.
    """

    model: nn.Module
    whole_weights: Callable[[nn.Module], AbstractContextManager[object]]
    group: TensorParallelGroup
    world: Axis
    device: torch.device

    def run(self, forward: Callable[[Batch], object], batches: Sequence[Batch]) -> None:
        """Compare the forward with the same on whole weights, without an objective. All ranks together.

        Args:
            batches: The same on all ranks; the first that the whole model takes is used.

        Raises:
            ConfigError: The model's forward computes something else under the plan.
        """
        chosen, evaluated, whole = self._observe_whole([partial(forward, batch) for batch in batches])
        sharded = _Observed(whole=False)
        try:
            with quiet_fakes(), dry_run(self.model, self.device):
                self._observe(chosen, evaluated, sharded)
        except Failure:
            raise
        except Exception as error:  # on all ranks alike
            raise _refused(_failure(sharded.inside, error)) from error
        differences = self.world.gather(self._difference(whole, sharded))
        first = next((item for item in differences if isinstance(item, str)), None)
        if first is not None:
            raise _refused(first)

    def _observe_whole(self, forwards: Sequence[_Forward]) -> tuple[_Forward, bool, _Observed]:
        *short, last = forwards
        for forward in short:
            try:
                return forward, *self._train_or_evaluate(forward)
            except Failure:
                raise
            except Exception:  # the model may need sequences of one length
                continue
        return last, *self._train_or_evaluate(last)

    def _train_or_evaluate(self, forward: _Forward) -> tuple[bool, _Observed]:
        """Observe it in training or, if modules draw numbers then, which may differ between ranks, in evaluation."""
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
        model = self.model
        with entered_modules(model) as observed.inside, outputs_of_modules(model) as outputs, _used(model) as used:
            sum_ = _weighted_sum(forward())
        observed.weighted = float(sum_.detach())
        observed.dtypes = frozenset(item.dtype for item in outputs.values())
        trained = {name: item for name, item in used.items() if item.requires_grad}
        if not sum_.requires_grad or not trained:
            return
        with ExitStack() as hooks:
            for name, item in trained.items():
                sample = partial(self._sample_gradient, observed, name, item)
                hooks.enter_context(cast("Any", item).register_hook(sample))
            torch.autograd.grad(sum_, list(trained.values()), allow_unused=True)

    def _sample_gradient(self, observed: _Observed, name: str, parameter: Any, gradient: Any) -> Tensor:
        """Keep a sample of the gradient; replace it by zeros without memory, so that all never exist at once."""
        if is_sharded(gradient) and gradient.placements != parameter.placements:  # it is partial
            gradient = gradient.redistribute(placements=parameter.placements)
        own = local_tensor(gradient)
        if name in self.group.partial and not observed.whole:
            own = self.group.axis.sum(own.clone())
        flat = own.reshape(-1)
        step = flat.numel() // _SAMPLED | 1  # odd, so as not to sample only one column
        observed.gradients[name] = torch.cat([flat[::step], flat.norm()[None]]).float()
        nothing = torch.zeros((), dtype=own.dtype, device=own.device).expand(own.shape)
        return as_shard_of(gradient, nothing)

    # --- comparing ------------------------------------------------------------------------------------------------

    def _difference(self, whole: _Observed, sharded: _Observed) -> str | None:
        """Describe the first difference on this rank; None: there is none beyond the lowest precision's tolerance."""
        if not isfinite(whole.weighted):
            return None
        dtypes = sharded.dtypes or {torch.float32}
        tolerance = max(_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
        noise = max(_NOISE.get(dtype, 0.0) for dtype in dtypes)
        name = _first_different(whole.gradients, sharded.gradients, tolerance, noise)
        if name is None and abs(whole.weighted - sharded.weighted) <= tolerance * abs(whole.weighted):
            return None
        what = "the model's output" if name is None else f"the gradient of {name}"
        return f"{what} differs between tensor-parallel and whole matrices. {_REASONS}"


def _failure(inside: Sequence[str], error: Exception) -> str:
    message = str(error).strip().partition("\n")[0] or type(error).__name__
    if _MIXED in message:
        message = "its input is sharded over ranks; give it gather_sequence, or another style that takes such input"
    if inside:
        return f"{inside[-1] or 'the model'} fails with tensor-parallel matrices: {message}"
    return f"the model's output can't be gathered with tensor-parallel matrices: {message}"


def _refused(why: str) -> ConfigError:
    return ConfigError(Problem("", _KEY, f"{why}. Change the plan, or use fsdp, which shards any model"))


def _weighted_sum(outputs: object) -> Tensor:
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
def _used(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield a mapping that collects the parameters that a forward uses, by name, also those that FSDP gathers."""
    used: dict[str, Tensor] = {}
    seen: dict[int, tuple[str, Tensor]] = {}

    def note(prefix: str, module: nn.Module, inputs: object) -> None:
        parameters = nn.Module.named_parameters(module, prefix=prefix)  # of a stage, the module's own watches for sums
        seen.update((id(item), (name, item)) for name, item in parameters)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(note, name)))
        yield used
    used.update(seen.values())  # tied ones once


def _is_near(expected: Tensor, other: Tensor, tolerance: float, noise: float) -> bool:
    return bool((expected - other).float().norm() <= tolerance * expected.float().norm() + noise)


def _first_different(
    whole: Mapping[str, Tensor], divided: Mapping[str, Tensor], tolerance: float, noise: float
) -> str | None:
    noise *= max((float(item[-1]) for item in whole.values()), default=0.0)
    for name, expected in whole.items():
        other = divided.get(name, torch.zeros_like(expected))
        norms, samples = (expected[-1], other[-1]), (expected[:-1], other[:-1])
        if not all(_is_near(*pair, tolerance, noise) for pair in (norms, samples)):
            return name
    return None

"""Compare tensors of a run with those of its reference, one parameter in memory at a time.

run: (name, tensor), one after the other ---.
                                            +--> TensorComparison
reference: a safetensors file, by name -----'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lockstep.proof.evidence import ParameterDeviation, PublishedComparison, TensorComparison

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors = Iterable[tuple[str, "Tensor"]]
Measure = Callable[[str, "Tensor", "Tensor"], tuple[float, bool]]
"""Maps (name, run's tensor, reference's tensor), both float64, to their difference and whether that is too much."""


def write_tensors(pairs: NamedTensors, path: Path) -> None:
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in pairs}, path)


def compare(
    pairs: NamedTensors, path: Path, order: Mapping[str, int], measure: Measure, base: Path | None = None
) -> TensorComparison:
    """Compare all tensors of a run with a file of the reference.

    Args:
        order: Position of each name in the model; other names are ignored.
        base: File of the values that both started from; None: zeros.
    """
    comparison = TensorComparison()
    totals = (0.0, 0.0, 0.0)
    with ExitStack() as files:
        reference = files.enter_context(cast("Any", safe_open)(path, framework="pt"))
        before = files.enter_context(cast("Any", safe_open)(base, framework="pt")) if base else None
        missing = {name for name in reference.keys() if name in order}  # noqa: SIM118
        for name, tensor in pairs:
            if name not in order:
                continue
            if name not in missing:
                comparison.extra.append(name)
                continue
            missing.discard(name)
            run, expected = tensor.double(), reference.get_tensor(name).double()
            difference, too_much = measure(name, run, expected)
            comparison.total += 1
            comparison.worst = _larger(comparison.worst, difference)
            comparison.largest = _larger(comparison.largest, (run - expected).abs().max().item() if run.numel() else 0)
            origin = before.get_tensor(name).double() if before else torch.zeros_like(expected)
            products = _products(run - origin, expected - origin)
            totals = (totals[0] + products[0], totals[1] + products[1], totals[2] + products[2])
            if too_much:
                comparison.deviating += 1
                if comparison.first is None or order[name] < order[comparison.first.name]:
                    comparison.first = ParameterDeviation(name, difference, *_fit(*products))
        comparison.missing = sorted(missing, key=order.__getitem__)
    comparison.factor, comparison.residual = _fit(*totals)
    return comparison


def compare_published(
    run: Mapping[str, Tensor], expected: Mapping[str, Tensor], measure: Measure
) -> PublishedComparison:
    """Compare names, shapes and values of two published models."""
    comparison = PublishedComparison(
        missing=[name for name in expected if name not in run], extra=[name for name in run if name not in expected]
    )
    for name, reference in expected.items():
        if name not in run:
            continue
        if run[name].shape != reference.shape:
            comparison.reshaped.append(name)
        elif measure(name, run[name].double(), reference.double())[1]:
            comparison.deviating.append(name)
    return comparison


def _larger(first: float, second: float) -> float:
    """Return the larger number; NaN is the largest of all."""
    return second if math.isnan(second) or second > first else first


def _products(run: Tensor, expected: Tensor) -> tuple[float, float, float]:
    return (run * expected).sum().item(), run.square().sum().item(), expected.square().sum().item()


def _fit(dot: float, run_square: float, reference_square: float) -> tuple[float, float]:
    """Return the factor c that brings c x reference nearest to the run, and what remains, relative to the reference."""
    if not reference_square > 0 or not math.isfinite(dot):
        return 1.0, math.inf if run_square or not math.isfinite(dot) else 0.0
    factor = dot / reference_square
    return factor, math.sqrt(max(0.0, run_square - factor * dot) / reference_square)

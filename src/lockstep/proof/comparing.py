"""Tensors of a run beside those of its reference, one parameter in memory at a time.

run: (name, tensor), one after the other ---.
                                            +--> Compared
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

from lockstep.proof.evidence import Compared, Off, Published

if TYPE_CHECKING:
    from torch import Tensor

Pairs = Iterable[tuple[str, "Tensor"]]
Measure = Callable[[str, "Tensor", "Tensor"], tuple[float, bool]]
"""The difference of (name, run's, reference's), both float64, and whether that is too much."""


def write(pairs: Pairs, path: Path) -> None:
    """In fp32 or what they are in; ties were told once by whoever gives the pairs."""
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in pairs}, path)


def compare(pairs: Pairs, path: Path, order: Mapping[str, int], measure: Measure, base: Path | None = None) -> Compared:
    """Args:
    pairs: all are used up.
    order: place of each name in the model; names that are not in it are left out.
    base: what both moved away from; None: from 0.
    """
    found = Compared()
    dot = own = theirs = 0.0
    with ExitStack() as files:
        reference = files.enter_context(cast("Any", safe_open)(path, framework="pt"))
        before = files.enter_context(cast("Any", safe_open)(base, framework="pt")) if base else None
        left = {name for name in reference.keys() if name in order}  # noqa: SIM118
        for name, tensor in pairs:
            if name not in order:
                continue
            if name not in left:
                found.extra.append(name)
                continue
            left.discard(name)
            run, expected = tensor.double(), reference.get_tensor(name).double()
            difference, too_much = measure(name, run, expected)
            found.number += 1
            found.worst = _larger(found.worst, difference)
            found.largest = _larger(found.largest, _largest(run - expected))
            origin = before.get_tensor(name).double() if before else torch.zeros_like(expected)
            products = _products(run - origin, expected - origin)
            dot, own, theirs = dot + products[0], own + products[1], theirs + products[2]
            if too_much:
                found.off += 1
                if found.first is None or order[name] < order[found.first.name]:
                    found.first = Off(name, difference, *_fit(*products))
        found.missing = sorted(left, key=order.__getitem__)
    found.factor, found.rest = _fit(dot, own, theirs)
    return found


def compare_published(run: Mapping[str, Tensor], expected: Mapping[str, Tensor], measure: Measure) -> Published:
    """Compare names, shapes and values of two published models."""
    found = Published(
        missing=[name for name in expected if name not in run], extra=[name for name in run if name not in expected]
    )
    for name, there in expected.items():
        if name not in run:
            continue
        if run[name].shape != there.shape:
            found.reshaped.append(name)
        elif measure(name, run[name].double(), there.double())[1]:
            found.off.append(name)
    return found


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _larger(one: float, other: float) -> float:
    """NaN is the largest of all."""
    return other if math.isnan(other) or other > one else one


def _products(run: Tensor, expected: Tensor) -> tuple[float, float, float]:
    return (run * expected).sum().item(), run.square().sum().item(), expected.square().sum().item()


def _fit(dot: float, own: float, theirs: float) -> tuple[float, float]:
    """The factor c for which c x reference is nearest to the run, and what is left, in units of the reference."""
    if not theirs > 0 or not math.isfinite(dot):
        return 1.0, math.inf if own or not math.isfinite(dot) else 0.0
    factor = dot / theirs
    return factor, math.sqrt(max(0.0, own - factor * dot) / theirs)

"""Runs to compare: what a training did at every update, recorded through the same session that users get.

record(config, updates) --> losses, gradient norms, gradients, weights, samples    on one rank
recorded(config, ranks, updates) --> the same from a world of `ranks`              the oracle: ranks = 1
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lockstep
from kit.worlds import in_world
from lockstep.loop.session import components_of

Arrays = dict[str, np.ndarray]


@dataclass
class Trajectory:
    """Attributes:
    losses, norms: one an update.
    gradients: of each update, by parameter, of the mean loss, before clipping.
    weights: by parameter, at the end.
    samples, counts: consumed and valid targets, one an update.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    gradients: list[Arrays] = field(default_factory=list)
    weights: Arrays = field(default_factory=dict)
    evaluations: list[dict[str, float]] = field(default_factory=list)


def recorded(config: dict[str, Any], ranks: int = 1, updates: int = 4) -> Trajectory:
    """One run in a world of its own."""
    return recorded_all([config], ranks, updates)[0]


def recorded_all(configs: list[dict[str, Any]], ranks: int = 1, updates: int = 4) -> list[Trajectory]:
    """Several runs, one after the other, in one world; the first rank's, after seeing that all ranks have the same."""
    everywhere = in_world(ranks, record_all, configs, updates)
    for others in everywhere[1:]:
        for first, other in zip(everywhere[0], others, strict=True):
            _same_on_ranks(first, other, weights=True)
    return everywhere[0]


def unnoticed(
    faults: Iterable[str], config: dict[str, Any], oracle: Trajectory, ranks: int, updates: int = 4
) -> list[str]:
    """Which of the faults, planted in a run of its own each, leave it the oracle's."""
    faults = list(faults)
    everywhere = in_world(ranks, record_all, [config] * len(faults), updates, faults)
    for others in everywhere[1:]:
        for first, other in zip(everywhere[0], others, strict=True):
            _same_on_ranks(first, other, weights=False)
    return [fault for fault, run in zip(faults, everywhere[0], strict=True) if not differences(run, oracle)]


def _same_on_ranks(first: Trajectory, other: Trajectory, *, weights: bool) -> None:
    assert repr(other.losses) == repr(first.losses), "ranks report different losses"
    assert repr(other.norms) == repr(first.norms), "ranks report different gradient norms"
    for name, values in first.weights.items() if weights else ():
        assert np.array_equal(values, other.weights[name]), f"ranks hold different weights of {name}"


def record_all(configs: list[dict[str, Any]], updates: int, faults: list[str] | None = None) -> list[Trajectory]:
    """On one rank, all in one process group; with a fault in each, if any are named."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        planted = faults or [None] * len(configs)
        return [record(config, updates, fault) for config, fault in zip(configs, planted, strict=True)]
    finally:
        dist.destroy_process_group()


def record(config: dict[str, Any], updates: int, fault: str | None = None) -> Trajectory:
    import lockstep
    from kit.faults import FAULTS, OF_PIECES

    with lockstep.session(config) as session:
        if fault is not None:
            (FAULTS | OF_PIECES)[fault](session)
        return recorded_session(session, updates)


def recorded_session(session: Any, updates: int) -> Trajectory:
    """What an open session does in its next updates."""
    found = Trajectory()
    for batch in session.batches():
        scale = float(components_of(session).update.scaler.scale)
        session.accumulate(batch)
        found.gradients.append(
            {name: _array(grad) / scale for name, grad in components_of(session).sharding.gradients()}
        )
        report = session.commit().result()
        found.losses.append(report.loss)
        found.norms.append(report.grad_norm)
        found.samples.append(report.samples)
        found.counts.append(report.count)
        if report.step == updates:
            break
    components_of(session).sharding.state.synchronize()  # buffers are the first rank's
    found.weights = {name: _array(value) for name, value in components_of(session).sharding.state.weights()}
    found.evaluations = [dict(report.metrics) for report in session.evaluate()]
    return found


def _array(tensor: Any) -> np.ndarray:
    tensor = tensor.cpu().clone()
    return tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


# --- comparing ----------------------------------------------------------------------------------------------------

LOSS_TOLERANCE = 1e-6  # relative; 2e-7 was the largest difference seen in fp32 over 20 updates
GRADIENT_TOLERANCE = 1e-5  # of the parameter's gradient norm; 3e-7 was seen
NOISE = 1e-9  # of the whole gradient's norm: what rounding leaves of a gradient that is zero, such as that of a key's
# bias, which moves all that a softmax compares alike; 2e-11 was seen


def differences(run: Trajectory, oracle: Trajectory, noise: float = NOISE, slack: float = 1) -> list[str]:
    """What a run does otherwise than the oracle, the first update first; empty if it is the same run.

    Args:
        noise: of the whole gradient's norm; what a gradient may be off by if it is zero but for rounding.
        slack: how many times each tolerance, where another processor computes.
    """
    found = []
    for update in range(len(oracle.losses)):
        if run.samples[update] != oracle.samples[update]:
            found.append(f"update {update}: {run.samples[update]} samples consumed, not {oracle.samples[update]}")
        if run.counts[update] != oracle.counts[update]:
            found.append(f"update {update}: {run.counts[update]} valid targets, not {oracle.counts[update]}")
        found += _difference(
            f"update {update}: loss", run.losses[update], oracle.losses[update], slack * LOSS_TOLERANCE
        )
        found += _difference(
            f"update {update}: norm", run.norms[update], oracle.norms[update], slack * GRADIENT_TOLERANCE
        )
        for name, expected in oracle.gradients[update].items():
            off = np.linalg.norm(run.gradients[update][name] - expected)
            size = np.linalg.norm(expected)
            if not off <= slack * max(GRADIENT_TOLERANCE * size, noise * oracle.norms[update]):
                found.append(f"update {update}: gradient of {name} is off by {off / size:.1e} of its norm")
    for mine, theirs in zip(run.evaluations, oracle.evaluations, strict=True):
        for name, value in theirs.items():
            found += _difference(f"evaluation: {name}", mine[name], value, slack * 1e-5)
    return found


def _difference(what: str, value: float, expected: float, tolerance: float) -> list[str]:
    if abs(value - expected) <= tolerance * abs(expected):
        return []
    return [f"{what} is {value!r}, not {expected!r}"]


def state_after(config: dict[str, Any], folder: Path, steps: int) -> dict[str, Any]:
    """Train on one rank, from the newest checkpoint in a folder; save there, and return tensors and values."""
    with lockstep.session(config) as session:
        checkpoints = session.checkpoints(folder)
        for batch in session.batches():
            session.accumulate(batch)
            if session.commit().result().step == steps:
                break
        checkpoints.save()
        checkpoints.finish()
        state = components_of(session).sharding.state.live_state()
        return {key: tensor.clone() for key, tensor in state.tensors.items()} | {"values": dict(state.values)}

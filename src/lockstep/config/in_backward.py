"""Refusals of `optim.in_backward`: what needs a gradient that is whole, or an update that can still be discarded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.config.schema import Config


def refusal_in_backward(config: Config) -> str | None:
    """Return why the config can't update in the backward; None if it can, or doesn't."""
    if not config.optim.in_backward:
        return None
    if config.precision.compute == "fp16":
        return (
            "optim.in_backward applies gradients before it is known whether they are finite, and fp16 discards updates "
            "that overflow; write precision.compute: bf16, or in_backward: false"
        )
    if config.run.determinism == "invariant":
        return (
            "optim.in_backward applies gradients before they are added over ranks, in the order that run.determinism "
            "invariant is about; leave one out"
        )
    histograms, numbers = config.monitor.histograms, config.recovery.bad_numbers
    if histograms is not None and histograms.of != "weights":
        return (
            "optim.in_backward frees each gradient in the backward, before monitor.histograms can count it; write "
            "monitor.histograms.of: weights"
        )
    if numbers.nonfinite == "rollback":
        return (
            "optim.in_backward applies gradients before it is known whether they are finite, so that "
            "recovery.bad_numbers.nonfinite: rollback can't discard an update; write skip, or in_backward: false"
        )
    if numbers.bisect:
        return (
            "optim.in_backward applies gradients as soon as they are there, so that recovery.bad_numbers.bisect can't "
            "compute an update again; write false, or in_backward: false"
        )
    if numbers.spike not in ("ignore", "warn"):
        return (
            f"optim.in_backward applies gradients before their norm is known, and recovery.bad_numbers.spike: "
            f"{numbers.spike} discards updates; write warn, or in_backward: false"
        )
    return None

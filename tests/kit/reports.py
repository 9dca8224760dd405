"""A feed of reports for the monitor's tests."""

from __future__ import annotations

from dataclasses import replace

from lockstep.core.records import RunInfo, StepReport, Verdict

FACTS = RunInfo(
    recipe="stdlib-lm",
    folder="/runs/stdlib-lm-20261121-093000",
    strategy="ddp",
    backend="gloo",
    precision="bf16",
    device="cpu",
    ranks=2,
    steps=30,
    global_size=64,
    micro_size=16,
    accumulation=2,
    parameters=313_216,
    trainable=313_216,
    epoch_samples=0,
)


def report(step: int, seconds: float | None = None, **changes: object) -> StepReport:
    """Update `step` of a run that makes ten updates a second, of 64 samples of 256 tokens each."""
    plain = StepReport(
        step=step,
        samples=64 * step,
        tokens=64 * 256 * step,
        epoch=0,
        loss=1.0 + 1.0 / step,
        count=100.0,
        grad_norm=0.5,
        lr=0.001,
        verdict=Verdict.KEPT,
        loss_scale=1.0,
        discarded=0,
        seconds=step / 10 if seconds is None else seconds,
        update_samples=64,
        update_tokens=64 * 256,
    )
    return replace(plain, **changes)

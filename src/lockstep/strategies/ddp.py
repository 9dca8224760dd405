"""torch's DistributedDataParallel: every rank holds everything, gradients are all-reduced during the backward.

For a partitioned model `sharding.replicas` sums gradients instead, and the options have no effect.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lockstep.strategies.record import (
    CPU,
    Combinations,
    Exactness,
    MemoryUse,
    StateSharding,
    Strategy,
    Variant,
)
from lockstep.strategies.section import Positive, Section


class PowerSGD(Section):
    """PowerSGD gradient compression (Vogels et al. 2019, arXiv:1905.13727)."""

    rank: Positive = 4
    """Rank of the approximation; higher is more exact and sends more."""
    start_step: Annotated[int, Field(ge=2)] = 10
    """Steps of plain all-reduce before it starts."""


class DDP(Section):
    """Options of DistributedDataParallel."""

    find_unused_parameters: bool = False
    """Allow parameters that a batch doesn't use, such as experts; under fsdp also whole modules, such as skipped
    layers."""
    gradient_as_bucket_view: bool = True
    """Gradients are views of the buckets, which saves a copy of all gradients."""
    static_graph: bool = False
    """Every step uses the same parameters in the same order, so that DDP can reduce more at once."""
    bucket_mb: Annotated[float, Field(gt=0)] = 25.0
    """MiB of gradients per all-reduce."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Lossy compression of gradients between ranks: the run differs from a single process."""
    powersgd: PowerSGD = PowerSGD()
    sync_batchnorm: bool = False
    """Batch norm over all ranks' samples; needs GPUs."""


_NOT_SAVED = (
    "powersgd's error feedback is not saved: a resumed run is not bitwise identical to one that was never stopped"
)
STRATEGY = Strategy(
    name="ddp",
    build="lockstep.sharding.ddp:BUILDER",
    options=DDP,
    combines=Combinations(
        axes=("pipeline", "context", "tensor"),
        automatic=True,
        whole_model="DDP's own reduction",
        finds_unused=True,
    ),
    cells={"bf16 parameters": CPU},
    exactness=Exactness(
        invariant=True,
        varying_options={
            "compression": "{value} rounds what each rank sends, so that the sum depends on the ranks; {why} take none",
            "sync_batchnorm": "adds over ranks in their order, which is not available {why}: take false",
            "static_graph": "is for DDP's own reduction, which {why} is not used: take false",
            "gradient_as_bucket_view": "false is for DDP's own reduction, which {why} is not used; gradients are one "
            "flat tensor: take true",
        },
        lossy=lambda options: (
            None
            if options.compression == "none"
            else f"parallel.ddp.compression {options.compression} loses bits of each gradient"
        ),
    ),
    memory=MemoryUse(holds_everything=True),
    remarks=lambda options: (_NOT_SAVED,) if options.compression == "powersgd" else (),
    variants=(
        Variant(
            name="ddp",
            mesh="replicas",
            state=StateSharding(
                "every rank holds everything",
                gradient_copies=lambda options: 1 if options.gradient_as_bucket_view else 2,
            ),
            implied=True,
        ),
    ),
)

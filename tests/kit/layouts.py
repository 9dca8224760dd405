"""The layouts that strategies and partitions give, as tests enumerate them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.strategies.record import Strategy, Variant
from lockstep.strategies.registry import layouts

LAYOUTS = layouts()
VARIANTS: Mapping[str, dict[str, Any]] = {name: layout.parallel for name, layout in LAYOUTS.items()}
"""By name, the keys of section `parallel` that ask for each."""
STATE_VARIANTS = tuple(name for name, layout in LAYOUTS.items() if not layout.partitions)
DRILLED = {
    "fsdp-no-shard", "fsdp-grad-op", "fsdp-hybrid-grad-op", "zero0", "zero2", "pipeline-gpipe",
    "pipeline-interleaved-1f1b", "pipeline-zero-bubble", "pipeline-1f1b+fsdp", "tensor-sequence",
}  # fmt: skip
"""Variants of a strategy that has a row in `make test`: their own rows of large tables are run by `make drill`."""
HYBRID = {name for name, layout in LAYOUTS.items() if layout.variant.mesh == "hybrid"}


def variant_of(name: str) -> tuple[Strategy, Variant]:
    """Return a strategy and its variant of this name."""
    return LAYOUTS[name].strategy, LAYOUTS[name].variant


def is_partitioned(name: str) -> bool:
    """Return whether no rank computes all of a sample."""
    return bool(LAYOUTS[name].partitions)


def asking_for(name: str, ranks: int) -> dict[str, Any]:
    """Return section `parallel` for a layout, with two replicas of a hybrid where ranks allow it."""
    return {**VARIANTS[name], **({"data": 2} if name in HYBRID and ranks % 2 == 0 else {})}

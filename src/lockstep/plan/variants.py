"""The strategies there are, by one name each, with their degrees left to the number of ranks.

fsdp-grad-op   -->   parallel: {strategy: fsdp, fsdp: {sharding_strategy: SHARD_GRAD_OP}}

What plans, compares or lists "every strategy" goes through these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.schema import Parallel

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "single": {"strategy": "single"},
    "dp": {"strategy": "dp"},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp", "fsdp": {"sharding_strategy": "FULL_SHARD"}},
    "fsdp-grad-op": {"strategy": "fsdp", "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
    "fsdp-no-shard": {"strategy": "fsdp", "fsdp": {"sharding_strategy": "NO_SHARD"}},
    "fsdp-hybrid": {"strategy": "fsdp", "fsdp": {"sharding_strategy": "HYBRID_SHARD"}},
    "fsdp-hybrid-grad-op": {"strategy": "fsdp", "fsdp": {"sharding_strategy": "_HYBRID_SHARD_ZERO2"}},
    "zero0": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 0}},
    "zero1": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 1}},
    "zero2": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 2}},
    "zero3": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3}},
}
"""Keys of the section `parallel` that make each; what else a user has said there stays as it is."""

_BY_SHARDING = {one["fsdp"]["sharding_strategy"]: name for name, one in VARIANTS.items() if one["strategy"] == "fsdp"}


def variant_of(parallel: Parallel, strategy: str) -> str:
    """The name of what is asked, given the strategy that `auto` came to."""
    if strategy == "deepspeed":
        return f"zero{parallel.deepspeed.zero_stage}"
    return _BY_SHARDING[parallel.fsdp.sharding_strategy] if strategy == "fsdp" else strategy

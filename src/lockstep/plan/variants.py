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
    "pipeline-gpipe": {"strategy": "ddp", "pipeline": "auto", "pipeline_parallel": {"schedule": "gpipe"}},
    "pipeline-1f1b": {"strategy": "ddp", "pipeline": "auto", "pipeline_parallel": {"schedule": "1f1b"}},
    **{
        f"pipeline-{schedule}": {"strategy": "ddp", "pipeline": 2, "pipeline_parallel": {"schedule": schedule}}
        for schedule in ("interleaved-1f1b", "zero-bubble", "zbv")  # of two stages a rank
    },
    "pipeline-1f1b+fsdp": {"strategy": "fsdp", "pipeline": 2, "pipeline_parallel": {"schedule": "1f1b"}},
    "context": {"strategy": "ddp", "context": 2},
    "context+fsdp": {"strategy": "fsdp", "context": 2},
    "tensor": {"strategy": "ddp", "tensor": 2, "tensor_parallel": {"sequence_parallel": False}},
    "tensor-sequence": {"strategy": "ddp", "tensor": 2, "tensor_parallel": {"sequence_parallel": True}},
    "tensor+fsdp": {"strategy": "fsdp", "tensor": 2, "tensor_parallel": {"sequence_parallel": False}},
    "pipeline-1f1b+tensor": {
        "strategy": "ddp",
        "pipeline": 2,
        "pipeline_parallel": {"schedule": "1f1b"},
        "tensor": 2,
        "tensor_parallel": {"sequence_parallel": False},
    },
}
"""Keys of the section `parallel` that make each; what else a user has said there stays as it is."""

CUTS = ("pipeline", "context", "tensor")
"""Axes along which the model or its sequences are cut; names of strategies that do so begin with them."""
_BY_SHARDING = {one["fsdp"]["sharding_strategy"]: name for name, one in VARIANTS.items() if name.startswith("fsdp")}


def variant_of(parallel: Parallel, strategy: str) -> str:
    """The name of what is asked, given the strategy that `auto` came to. A product is named after its factors, of which
    ddp goes without saying."""
    cuts = [f"pipeline-{parallel.pipeline_parallel.schedule}"] if parallel.pipeline != 1 else []
    if parallel.context != 1:
        cuts.append("context")
    if parallel.tensor != 1:
        cuts.append("tensor-sequence" if parallel.tensor_parallel.sequence_parallel else "tensor")
    state = _state_variant(parallel, strategy)
    return "+".join(cuts if cuts and state == "ddp" else [*cuts, state])


def is_cut(variant: str) -> bool:
    """Whether the model itself is, or its sequences, so that no rank computes all of a sample."""
    return variant.startswith(CUTS)


def factors(variant: str) -> tuple[str, ...]:
    """What it is a product of: how the model or its sequences are cut, if they are, and, last, who holds the state."""
    names = tuple(variant.split("+"))
    return (*names, "ddp") if is_cut(names[-1]) else names


def _state_variant(parallel: Parallel, strategy: str) -> str:
    if strategy == "deepspeed":
        return f"zero{parallel.deepspeed.zero_stage}"
    return _BY_SHARDING[parallel.fsdp.sharding_strategy] if strategy == "fsdp" else strategy

"""torch's fully sharded data parallelism, FSDP2: parameters, gradients and optimizer state are sharded.

             gathered                reduced            in units of (N - 1) / N, as rings do it
fsdp         M (2 P - P root)          G                P: bytes of all parameters, P root: of those in no block
fsdp-grad-op M P                       G                G: bytes of all gradients, M: micro-batches of a step
hybrids      among the shards of a replica; then each shard's gradients are all-reduced among the replicas
"""

from __future__ import annotations

from typing import Literal

from lockstep.core.errors import Problem
from lockstep.strategies.record import (
    CPU,
    ELEMENT_BYTES,
    WHOLE_MATRICES,
    Cell,
    Combinations,
    Exactness,
    Hooks,
    MemoryUse,
    MeshKind,
    StateSharding,
    Strategy,
    Variant,
    refused,
)
from lockstep.strategies.section import Positive, Section

Precise = Literal["fp32", "bf16", "fp16"]


class FSDPPrecision(Section):
    """Dtypes of FSDP's gathers, reductions and computation.

    Parameters and optimizer state stay as they are, and `precision.compute` still selects autocast. With fp16,
    `precision.loss_scale` applies.
    """

    param_dtype: Precise | None = None
    """Type of gathered parameters; null: `precision.compute` for weights that autocast would cast, fp32 for others
    (norms, embeddings)."""
    reduce_dtype: Precise = "fp32"
    """Dtype of gradient reductions."""
    output_dtype: Precise | None = None
    """Dtype of outputs of wrapped modules; null: no cast."""
    buffer_dtype: Precise | None = None
    """Dtype of floating-point buffers; null: no cast."""
    cast_forward_inputs: bool = True
    """Cast inputs of wrapped modules to `param_dtype`."""

    @property
    def rounds_to_fp16(self) -> bool:
        """True if gradients pass through fp16, which needs a loss scale."""
        return "fp16" in (self.param_dtype, self.reduce_dtype, self.output_dtype)


class FSDP(Section):
    """Options of fully sharded data parallelism (FSDP2), under FSDP's own names."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] = (
        "FULL_SHARD"
    )
    """FULL_SHARD: shard parameters, gradients and optimizer state; SHARD_GRAD_OP: keep parameters gathered from forward
    to backward; NO_SHARD: shard nothing; HYBRID_SHARD: FULL_SHARD over `parallel.shard` ranks, in each of
    `parallel.data` replicas; _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP in each replica."""
    wrap: Literal["blocks", "size", "root"] | tuple[str, ...] = "blocks"
    """Unit to gather: the repeated blocks; modules of `min_num_params` or more (size); the whole model (root); or these
    classes, such as `[LlamaDecoderLayer]`."""
    min_num_params: Positive = 100_000_000
    """`wrap: size`: parameters of a unit, without modules wrapped inside."""
    mixed_precision: FSDPPrecision = FSDPPrecision()
    reduce_every: Literal["update", "micro-batch"] = "update"
    """update: reduce gradients once per step; micro-batch: after each backward, which saves memory and sends more."""
    backward_prefetch: Literal["BACKWARD_PRE"] = "BACKWARD_PRE"
    """Gather the next block during this block's backward; FSDP2 has no other way."""
    forward_prefetch: bool = False
    """Gather the next block before this block's forward."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and update there; for GPUs."""


_SETTINGS: dict[str, tuple[MeshKind, bool]] = {  # and whether parameters stay gathered until the backward
    "FULL_SHARD": ("shards", False),
    "SHARD_GRAD_OP": ("shards", True),
    "NO_SHARD": ("replicas", False),
    "HYBRID_SHARD": ("hybrid", False),
    "_HYBRID_SHARD_ZERO2": ("hybrid", True),
}


def _variant(name: str, setting: str, note: str, replicated: str = "") -> Variant:
    """Return the variant of a `sharding_strategy`; `replicated`: the one that does the same in several replicas."""
    mesh, stays = _SETTINGS[setting]
    shards = mesh != "replicas"
    return Variant(
        name=name,
        title="" if mesh == "hybrid" else f"fsdp with {setting}",
        options={"sharding_strategy": setting},
        mesh=mesh,
        state=StateSharding(note, parameters=shards, gradients=shards, optimizer=shards, stays_gathered=stays),
        replicated=replicated and f"parallel.fsdp.sharding_strategy: {replicated}",
    )


_LATE_GRADIENTS = (
    "parallel.pipeline_parallel.schedule",
    "{schedule} computes gradients of weights outside of a backward, where FSDP doesn't see them; "
    "take interleaved-1f1b or 1f1b, or parallel.strategy: ddp",
)

STRATEGY = Strategy(
    name="fsdp",
    build="lockstep.sharding.fsdp:BUILDER",
    hooks=Hooks(check_model="lockstep.sharding.fsdp:check"),
    options=FSDP,
    family="FSDP",
    combines=Combinations(
        axes=("pipeline", "context", "tensor"),
        verified_axes=("pipeline", "context", "tensor"),
        conflicts={"pipeline-zero-bubble": _LATE_GRADIENTS, "pipeline-zbv": _LATE_GRADIENTS},
        automatic=True,
        finds_unused=True,
        heeds={"ddp": "find_unused_parameters"},
    ),
    memory=MemoryUse(
        offloads=lambda options: options.cpu_offload,
        accumulates_whole=lambda options: options.reduce_every == "update",
        saves_memory={"reduce_every": "micro-batch"},
        rounds={"mixed_precision.param_dtype": "bf16"},
        element_bytes=lambda options: (
            ELEMENT_BYTES.get(options.mixed_precision.param_dtype),
            ELEMENT_BYTES[options.mixed_precision.reduce_dtype],
        ),
    ),
    exactness=Exactness(
        rounding=("mixed_precision",),
        rounds_to_fp16=lambda options: options.mixed_precision.rounds_to_fp16,
    ),
    cells={
        "bf16 parameters": CPU,
        "adamw-8bit": refused("its moments are quantized in blocks of whole parameters; take adamw, or ddp"),
        "int8 base": refused("bitsandbytes keeps whole matrices of 8 bits beside the shards; take nf4, or ddp"),
        WHOLE_MATRICES: CPU,  # gathered one at a time, or summed over the shards
        "offload": Cell(
            "untested",
            "FSDP2 offloads only from a GPU, and wasn't tried there",
            on_cpu=Problem(
                "", "parallel.fsdp.cpu_offload", "on the CPU parameters are already; it is for GPUs: leave it out"
            ),
        ),
    },
    variants=(
        _variant("fsdp", "FULL_SHARD", "everything is sharded; a block is gathered while it is used", "HYBRID_SHARD"),
        _variant(
            "fsdp-grad-op",
            "SHARD_GRAD_OP",
            "as fsdp, but all blocks are gathered from forward to backward",
            "_HYBRID_SHARD_ZERO2",
        ),
        _variant("fsdp-no-shard", "NO_SHARD", "every rank holds everything"),
        _variant("fsdp-hybrid", "HYBRID_SHARD", "as fsdp, in each replica"),
        _variant("fsdp-hybrid-grad-op", "_HYBRID_SHARD_ZERO2", "as fsdp-grad-op, in each replica"),
    ),
)

"""DeepSpeed ZeRO, stages 0 to 3.

                 gathered                reduced            in units of (N - 1) / N, as rings do it
    zero1          P                      2 G               P: bytes of all parameters, G: of all gradients
    zero2          P                      2 M G             M: micro-batches of an update
    zero3        2 M P                     M G

Where P = G and M = 1, ddp's 2 G and the 3 G of fsdp and zero3 are those of Rajbhandari et al. 2020, "ZeRO: Memory
optimizations toward training trillion parameter models" (arXiv:1910.02054), section 7. Its 2 G of stages 1 and 2 would
need gradients to be scattered; DeepSpeed 0.19 all-reduces them (`use_multi_rank_bucket_allreduce`), which makes it 3 G.

The row of zero3 holds for a model of more than `stage3_max_live_parameters` (10^9 elements): a smaller one stays
gathered from forward to backward, which saves up to M P.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.strategies.record import CPU, NONE, StateSharding, Strategy, Variant, gradients_all_reduced, refused
from lockstep.strategies.section import PathText, Section


class DeepSpeed(Section):
    """Options of DeepSpeed ZeRO. Batch, optimizer, schedule, clipping and precision have sections of their own."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 2
    """ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """cpu: keep optimizer state in host memory and update there."""
    offload_param: Literal["none", "cpu"] = "none"
    """cpu: keep parameters in host memory between uses (stage 3)."""
    pin_memory: bool = False
    """Page-locked memory for what is offloaded to the host."""
    bf16_weights: bool = False
    """Keep the model in bf16 beside the fp32 values that are updated, as DeepSpeed's own bf16 mode does, for stages 2
    and 3 with precision.compute: bf16. It halves the memory of parameters; activations that nothing casts are bf16."""
    config: PathText | dict[str, Any] | None = None
    """An existing DeepSpeed config, as a JSON file or a mapping: `auto` is filled in from this config, what contradicts
    it is refused, every other key is passed to DeepSpeed or refused by name."""


STRATEGY = Strategy(
    name="deepspeed",
    build="lockstep.sharding.deepspeed:BUILDER",
    options=DeepSpeed,
    family="DeepSpeed ZeRO",
    element_bytes=lambda options: (2, 2) if options.bf16_weights else (None if options.zero_stage == 3 else 4, 4),
    offloads=lambda options: options.offload_optimizer != "none" or options.offload_param != "none",
    cells={
        "offload": CPU,
        "compile": refused("DeepSpeed's hooks in the forward are not tested compiled; write false, or take ddp"),
    },
    needs_optimizer=True,
    check="lockstep.config.deepspeed:check_plan",
    check_alone="lockstep.config.deepspeed_check:check_alone",
    values="lockstep.config.deepspeed_check:left_to_deepspeed",
    import_on_cpu="lockstep.sharding.deepspeed:import_deepspeed",
    variants=(
        Variant(
            name="zero0",
            options={"zero_stage": 0},
            mesh="replicas",
            state=StateSharding("every rank holds everything"),
            sends=gradients_all_reduced,
            cells={"offload": NONE},
            title="deepspeed with zero_stage 0",
        ),
        Variant(
            name="zero1",
            options={"zero_stage": 1},
            mesh="shards",
            state=StateSharding(
                "optimizer state is sharded, with the values that it updates", optimizer=True, masters=True
            ),
            sends=lambda update: update.traffic(gathers=1, reduces=2),
            title="deepspeed with zero_stage 1",
        ),
        Variant(
            name="zero2",
            options={"zero_stage": 2},
            mesh="shards",
            state=StateSharding("also gradients", gradients=True, optimizer=True, masters=True),
            sends=lambda update: update.traffic(gathers=1, reduces=2 * update.micro_batches),
            title="deepspeed with zero_stage 2",
        ),
        Variant(
            name="zero3",
            options={"zero_stage": 3},
            mesh="shards",
            state=StateSharding(
                "also parameters, of which each rank also holds the small ones whole",
                parameters=True,
                gradients=True,
                optimizer=True,
                masters=True,
                kept_whole="lockstep.config.deepspeed:kept_whole",
            ),
            sends=lambda update: update.traffic(gathers=2 * update.micro_batches, reduces=update.micro_batches),
            title="deepspeed with zero_stage 3",
        ),
    ),
)

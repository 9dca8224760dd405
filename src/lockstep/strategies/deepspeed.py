"""DeepSpeed ZeRO, stages 0 to 3.

                 gathered                reduced            in units of (N - 1) / N, as rings do it
    zero1          P                      2 G               P: bytes of all parameters, G: of all gradients
    zero2          P                      2 M G             M: micro-batches of a step
    zero3        2 M P                     M G

See Rajbhandari et al. 2020 (arXiv:1910.02054), section 7; its 2 G of stages 1 and 2 need gradients to be scattered, and
DeepSpeed 0.19 all-reduces them. zero3 sends less for a model below `stage3_max_live_parameters` (10^9 elements).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.strategies.record import (
    CPU,
    NONE,
    PACKAGED,
    Hooks,
    MemoryUse,
    StateSharding,
    Strategy,
    Variant,
    refused,
)
from lockstep.strategies.section import PathText, Section


class DeepSpeed(Section):
    """Options of DeepSpeed ZeRO. Batch, optimizer, schedule, clipping and precision have sections of their own."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 2
    """0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """cpu: keep optimizer state in host memory and update there."""
    offload_param: Literal["none", "cpu"] = "none"
    """cpu: keep parameters in host memory between uses (stage 3)."""
    pin_memory: bool = False
    """Page-locked memory for what is offloaded."""
    bf16_weights: bool = False
    """Keep the model in bf16 beside the fp32 weights that are updated, for stages 2 and 3 with `precision.compute:
    bf16`. It halves the memory of parameters."""
    config: PathText | dict[str, Any] | None = None
    """An existing DeepSpeed config, as a JSON file or a mapping. `auto` is filled in, contradictions are refused, other
    keys are passed on or refused by name."""


_ENGINE = refused("DeepSpeed's engine updates, and nothing averages beside it; take fsdp, or leave it out")


def _zero(stage: int, note: str) -> Variant:
    sharded = (stage > 2, stage > 1, stage > 0, stage > 0)  # parameters, gradients, optimizer, masters
    return Variant(
        name=f"zero{stage}",
        title=f"deepspeed with zero_stage {stage}",
        options={"zero_stage": stage},
        mesh="shards" if stage else "replicas",
        state=StateSharding(note, *sharded, kept_whole="lockstep.config.deepspeed:kept_whole" if stage == 3 else ""),
        cells={"averaged weights": _ENGINE} if stage else {"offload": NONE},
    )


STRATEGY = Strategy(
    name="deepspeed",
    build="lockstep.sharding.deepspeed:BUILDER",
    options=DeepSpeed,
    family="DeepSpeed ZeRO",
    memory=MemoryUse(
        element_bytes=lambda options: (2, 2) if options.bf16_weights else (None if options.zero_stage == 3 else 4, 4),
        in_fp32=True,
        offloads=lambda options: options.offload_optimizer != "none" or options.offload_param != "none",
        offloading={
            "optimizer on the host": {"offload_optimizer": "cpu", "pin_memory": True},
            "parameters on the host": {"offload_optimizer": "cpu", "offload_param": "cpu", "pin_memory": True},
        },
    ),
    cells={
        "offload": CPU,
        **dict.fromkeys(PACKAGED, refused("DeepSpeed passes it flat parts of parameters; take adamw, or ddp")),
        **dict.fromkeys(
            ("nf4 base", "int8 base"), refused("DeepSpeed's engine casts and divides packed bits; take fsdp")
        ),
        "compile": refused("DeepSpeed's hooks in the forward are not tested compiled; write false, or take ddp"),
    },
    needs_optimizer=True,
    hooks=Hooks(
        check="lockstep.config.deepspeed:check_plan",
        check_alone="lockstep.config.deepspeed_check:check_alone",
        values="lockstep.config.deepspeed_check:left_to_deepspeed",
        import_on_cpu="lockstep.sharding.deepspeed:import_deepspeed",
    ),
    variants=(
        _zero(0, "every rank holds everything"),
        _zero(1, "optimizer state is sharded, with the values that it updates"),
        _zero(2, "also gradients"),
        _zero(3, "also parameters; each rank also holds the small ones whole"),
    ),
)

"""Makes the config of the run's DeepSpeed engine, which only reduces, shards and updates.

`Derived`, from the plan, has the numbers that depend on the number of ranks. `deepspeed_check` checks the user's
DeepSpeed config first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config.deepspeed_check import AUTO, Derived, check, is_number_of_elements, read_deepspeed
from lockstep.config.deepspeed_keys import deepspeed_keys, keys_of

if TYPE_CHECKING:
    from lockstep.config.schema import Config, DeepSpeed
    from lockstep.plan.plan import Plan

_BUCKET = 500_000_000  # DeepSpeed's default: elements reduced at a time
_KEPT_WHOLE = 100_000  # DeepSpeed's default: elements of the largest parameter that stage 3 keeps whole

_BF16 = {
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}
"""DeepSpeed's own bf16 mode; gradients of micro-batches and ranks are summed in fp32."""


def engine_config(config: Config, derived: Derived) -> dict[str, Any]:
    """Return the config for `deepspeed.initialize`, without schedule, clipping, loss scale and accumulation."""
    section = config.parallel.deepspeed
    given, _ = read_deepspeed(section)
    zero: dict[str, Any] = {"stage": section.zero_stage, "reduce_bucket_size": max(1, min(_BUCKET, derived.trainable))}
    zero |= _passed(given.get("zero_optimization") or {}, "zero_optimization")
    for key in ("offload_optimizer", "offload_param"):
        device = getattr(section, key)
        if device != "none":
            zero[key] = {"device": device, "pin_memory": section.pin_memory}
    return {
        "train_micro_batch_size_per_gpu": derived.micro_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "timers": {"throughput": {"enabled": False}},  # it makes the host wait for the device in each forward and step
        **(_BF16 if section.bf16_weights else {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **_passed(given, ""),
        "zero_optimization": zero,
    }


def kept_whole(section: DeepSpeed, elements: Sequence[int]) -> list[bool]:
    """Return which parameters, given by their sizes, stage 3 leaves whole on every rank to save a gather."""
    zero = read_deepspeed(section)[0].get("zero_optimization")
    given = zero if isinstance(zero, Mapping) else {}
    largest, budget = (
        next((given[key] for key in (f"stage3_{name}", name) if is_number_of_elements(given.get(key))), default)
        for name, default in (("param_persistence_threshold", _KEPT_WHOLE), ("model_persistence_threshold", math.inf))
    )
    kept = []
    for number in elements:
        kept.append(number <= min(largest, budget))
        budget -= number if kept[-1] else 0
    return kept


def not_carried_out(config: Config) -> list[str]:
    """Return a sentence about each request of the DeepSpeed config that is ignored without changing any result."""
    key = "activation_checkpointing.cpu_checkpointing"
    section = read_deepspeed(config.parallel.deepspeed)[0].get("activation_checkpointing")
    requested = isinstance(section, Mapping) and section.get("cpu_checkpointing")
    if not requested or config.memory.activation_offload == "cpu":
        return []
    return [f"parallel.deepspeed.config.{key}: {deepspeed_keys()[key].note}."]


def derived_of(plan: Plan) -> Derived:
    """Return the numbers of a plan that appear in a DeepSpeed config."""
    return Derived(plan.ranks, plan.batch.micro_size, plan.batch.accumulation, plan.steps, plan.trainable)


def check_plan(config: Config, plan: Plan) -> list[str]:
    """Check the DeepSpeed config of a planned run, and return warnings.

    Raises:
        ConfigError: See `check`.
    """
    check(config, derived_of(plan))
    return not_carried_out(config)


def _passed(given: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key: given[key] for key in keys_of(section, ["pass"]) if given.get(key, AUTO) != AUTO}

"""Makes DeepSpeed's config for a run.

    engine_config    for the run's engine, which only reduces, shards and updates
    plain_config     for DeepSpeed without Lockstep, to make the same run

`Derived`, from the plan, has the numbers that depend on the number of ranks. `deepspeed_check` checks the user's
DeepSpeed config first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config.deepspeed_check import (
    AUTO,
    Derived,
    check,
    is_number_of_elements,
    read_deepspeed,
    warmup_num_steps,
    warmup_steps,
)
from lockstep.config.deepspeed_keys import deepspeed_keys, keys_of
from lockstep.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from lockstep.config.schema import Config, DeepSpeed, Optim
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
    """Return the config for `deepspeed.initialize`, without schedule, clipping, loss scale and accumulation.

    Raises:
        ConfigError: See `check`.
    """
    check(config, derived)
    return {
        "train_micro_batch_size_per_gpu": derived.micro_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "timers": {"throughput": {"enabled": False}},  # it makes the host wait for the device in each forward and step
        **(_BF16 if config.parallel.deepspeed.bf16_weights else {}),
        **_shared(config.parallel.deepspeed, derived.trainable),
    }


def plain_config(config: Config, derived: Derived) -> dict[str, Any]:
    """Return the same run as DeepSpeed's own JSON, every number filled in.

    Raises:
        ConfigError: See `check`; or DeepSpeed has no such optimizer, schedule or batch.
    """
    check(config, derived)
    train_batch = derived.micro_size * derived.accumulation * derived.ranks
    if problems := [*_inexpressible(config, derived, train_batch)]:
        raise ConfigError(problems)
    scheduler = _scheduler(config, derived)
    compute = config.precision.compute
    # DeepSpeed's autocast leaves parameters in fp32, as Lockstep does
    autocast = {"enabled": True, "dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(compute)}
    return {
        "train_batch_size": train_batch,
        "train_micro_batch_size_per_gpu": derived.micro_size,
        "gradient_accumulation_steps": derived.accumulation,
        "gradient_clipping": config.optim.clip_norm or 0.0,
        "optimizer": _optimizer(config.optim),
        **({} if scheduler is None else {"scheduler": scheduler}),
        **(
            _BF16
            if config.parallel.deepspeed.bf16_weights
            else {"torch_autocast": autocast}
            if autocast["dtype"]
            else {}
        ),
        **_shared(config.parallel.deepspeed, derived.trainable),
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


def _shared(section: DeepSpeed, trainable: int) -> dict[str, Any]:
    given, _ = read_deepspeed(section)
    zero: dict[str, Any] = {"stage": section.zero_stage, "reduce_bucket_size": max(1, min(_BUCKET, trainable))}
    zero |= _passed(given.get("zero_optimization") or {}, "zero_optimization")
    for key in ("offload_optimizer", "offload_param"):
        device = getattr(section, key)
        if device != "none":
            zero[key] = {"device": device, "pin_memory": section.pin_memory}
    own = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {**own, **_passed(given, ""), "zero_optimization": zero}


def _passed(given: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key: given[key] for key in keys_of(section, ["pass"]) if given.get(key, AUTO) != AUTO}


def _optimizer(optim: Optim) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if optim.name in ("adamw", "adam"):
        adam = {"betas": list(optim.betas), "eps": optim.eps, "torch_adam": True, "adam_w_mode": optim.name == "adamw"}
        return {"type": "AdamW" if optim.name == "adamw" else "Adam", "params": params | adam}
    if optim.name == "sgd":
        return {"type": "SGD", "params": params | {"momentum": optim.momentum, "nesterov": optim.nesterov}}
    return {"type": "Lion", "params": params | {"betas": list(optim.betas)}}


def _scheduler(config: Config, derived: Derived) -> dict[str, Any] | None:
    """Return DeepSpeed's scheduler, whose warmup and curve come two updates later than Lockstep's."""
    schedule, steps = config.schedule, derived.steps
    if schedule.kind == "constant" and not warmup_steps(schedule, steps):
        return None
    shared = {"warmup_num_steps": warmup_num_steps(schedule, steps), "warmup_type": schedule.warmup_type}
    if schedule.kind == "cosine":
        cosine = {"total_num_steps": steps, "warmup_min_ratio": 0.0, "cos_min_ratio": schedule.final_ratio}
        return {"type": "WarmupCosineLR", "params": {**cosine, **shared}}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": config.optim.lr, **shared}
    if schedule.kind == "constant":
        return {"type": "WarmupLR", "params": rates}
    return {"type": "WarmupDecayLR", "params": {"total_num_steps": steps, **rates}}


def _inexpressible(config: Config, derived: Derived, train_batch: int) -> Iterator[Problem]:
    global_size, schedule = config.batch.global_size, config.schedule
    if train_batch != global_size:
        yield Problem(
            "",
            "batch.global_size",
            f"{global_size} is not micro x accumulation x ranks = {derived.micro_size} x {derived.accumulation} x "
            f"{derived.ranks} = {train_batch}, and DeepSpeed has only those; write `batch.global_size: {train_batch}`",
        )
    if config.optim.name in ("muon", "adafactor"):
        yield Problem("", "optim.name", f"{config.optim.name} has no counterpart in DeepSpeed; take adamw")
    if schedule.kind == "warmup-stable-decay":
        yield Problem("", "schedule.kind", "DeepSpeed has no warmup-stable-decay; take linear, cosine or constant")
    if schedule.kind == "linear" and schedule.final_ratio:
        yield Problem("", "schedule.final_ratio", f"{schedule.final_ratio:g}, but DeepSpeed's linear decay ends at 0")
    if config.precision.compute == "auto":
        yield Problem("", "precision.compute", "auto depends on the machine; write fp32, bf16 or fp16")
    if derived.steps is None and schedule.kind != "constant":
        yield Problem("", "run", "the number of steps is unknown in advance, and DeepSpeed's schedule needs it")

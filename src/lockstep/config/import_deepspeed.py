"""A DeepSpeed config, key by key, as settings of ours.

    "zero_optimization": {"stage": 3,                parallel.deepspeed.zero_stage: 3
                          "overlap_comm": true}      parallel.deepspeed.config, handed on
    "scheduler": {"type": "WarmupLR", ...}           schedule.kind: constant
    "wandb": {"enabled": true}                       not needed, and why

`deepspeed` and `deepspeed_words` know the same keys from the other side: what a config of ours may have beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config import deepspeed_words as words
from lockstep.config import import_answers as answers
from lockstep.config.foreign_files import Said, plain
from lockstep.config.import_answers import NOTHING, Answer, Facts, derived, is_off, not_needed, not_there, taken, to_do

_CONFIG = "parallel.deepspeed.config"
_MAKES_ANOTHER_RUN = {
    "communication_data_type", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op",
    "sparse_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
    "mics_shard_size", "zero_hpz_partition_size", "data_efficiency", "curriculum_learning", "compression_training",
    "weight_quantization", "quantize_training", "progressive_layer_drop", "eigenvalue", "sparse_attention",
    "hybrid_engine", "pipeline", "tensor_parallel", "expert_parallel", "use_data_before_expert_parallelism",
    "sequence_parallel_size", "data_parallel_size", "amp", "data_types", "zenflow", "ratio", "super_offload",
    "wandb", "comet", "elasticity", "autotuning", "compile",
}  # fmt: skip
"""Of what is not taken: whoever leaves it out trains another run, needs another machine, or lacks what it leaves."""
_CURVES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}


def stage_of(said: Sequence[Said]) -> int:
    """The ZeRO stage that these keys of one config say."""
    found = next((one.value for one in said if one.word == "stage"), 0)
    return found if isinstance(found, int) else 0


def answer(keys: Sequence[str], said: Said, facts: Facts) -> Answer | None:
    """Args:
        keys: of DeepSpeed's config, without what may stand around it.

    Returns:
        None: DeepSpeed has no such key.
    """
    first, rest, word = keys[0], keys[1:], said.word
    if said.value == "auto":
        return _auto(keys, facts)
    if said.word == "enabled" and not isinstance(said.value, bool | None):
        return answers.no_switch(said.value)
    if first == "zero_optimization" and rest:
        return _zero(rest, said, facts)
    if first in _SECTIONS and rest:
        return _SECTIONS[first](rest, said, facts)
    if first in _ALONE:
        return _ALONE[first](said, facts)
    if first == "torch_autocast" and rest:
        return _autocast(word, said, facts)
    if first in words.HANDED_ON:
        return Answer("taken", {".".join((_CONFIG, *keys)): said.value}, "handed on to DeepSpeed")
    return _by_words(first, said, facts, words.ONE_VALUE, words.REFUSED)


def _auto(keys: Sequence[str], facts: Facts) -> Answer:
    """What HF Trainer fills in from its arguments, which are in the same file or nowhere."""
    ours = _FROM_ARGUMENTS.get(keys[0] if len(keys) == 1 else keys[-1])
    if ours is not None and facts.kind == "deepspeed":
        return to_do(f"HF Trainer's arguments say it there: write {ours}")
    if keys[-1] in words.ZERO_HANDED_ON or keys[0] in words.HANDED_ON:
        return not_needed("DeepSpeed's own default is taken")
    return not_needed("left to HF Trainer there; here it follows from the rest of the config")


_FROM_ARGUMENTS = {
    "train_batch_size": "batch.global_size", "gradient_clipping": "optim.clip_norm", "lr": "optim.lr",
    "weight_decay": "optim.weight_decay", "betas": "optim.betas", "eps": "optim.eps", "momentum": "optim.momentum",
    "warmup_num_steps": "schedule.warmup_steps, or schedule.warmup_ratio", "total_num_steps": "run.steps or run.epochs",
    "enabled": "precision.compute", "cos_min_ratio": "schedule.final_ratio",
}  # fmt: skip


def keys_near(path: Sequence[str]) -> list[str]:
    """Among which a misspelt one was meant."""
    if path[0] == "zero_optimization":
        return ["stage", "offload_optimizer", "offload_param", *words.ZERO_HANDED_ON, *words.ZERO_ONE_VALUE]
    return sorted(words.TOP)


def _by_words(
    key: str, said: Said, facts: Facts, one_value: Mapping[str, tuple[Any, str]], refused: Mapping[str, str]
) -> Answer | None:
    if key in one_value:
        wanted, why = one_value[key]
        same = said.value in (wanted, None) or key not in _MAKES_ANOTHER_RUN
        return not_needed(why) if same else not_there(why)
    if key in refused:
        off = is_off(said.value) or _switched_off(key, facts)
        return NOTHING if off else not_there(refused[key]) if key in _MAKES_ANOTHER_RUN else not_needed(refused[key])
    return None


def _switched_off(section: str, facts: Facts) -> bool:
    return facts.value((f"{section}.enabled",)) is False


# --- sections -----------------------------------------------------------------------------------------------------


def _zero(keys: Sequence[str], said: Said, facts: Facts) -> Answer | None:
    key = keys[0]
    if key == "stage":
        return Answer("taken", {"parallel.strategy": "deepspeed", "parallel.deepspeed.zero_stage": said.value})
    if key in ("offload_optimizer", "offload_param"):
        return _offload(key, keys[1:], said, facts)
    if key in ("cpu_offload", "cpu_offload_params", "cpu_offload_param"):
        which = "offload_optimizer" if key == "cpu_offload" else "offload_param"
        return taken(**{f"parallel__deepspeed__{which}": "cpu"}) if said.value else NOTHING
    if key == "cpu_offload_use_pin_memory":
        return taken(parallel__deepspeed__pin_memory=said.value)
    if key in words.ZERO_HANDED_ON:
        stage = facts.value(("zero_optimization.stage", "zero_stage", "stage"))
        beside = {} if stage is None else {f"{_CONFIG}.zero_optimization.stage": stage}
        place = ".".join((_CONFIG, "zero_optimization", *keys))
        return Answer("taken", {**beside, place: said.value}, "handed on to DeepSpeed")
    return _by_words(key, said, facts, words.ZERO_ONE_VALUE, words.ZERO_REFUSED)


def _offload(which: str, keys: Sequence[str], said: Said, facts: Facts) -> Answer | None:
    if not keys:
        return NOTHING if said.value in (None, {}) else not_there("a mapping with a device")
    key = keys[0]
    device = facts.value((f"{which}.device",))
    if key == "device":
        return answers.offload(said, facts)
    if key == "pin_memory":
        return (
            taken(parallel__deepspeed__pin_memory=said.value) if device == "cpu" else not_needed("nothing is offloaded")
        )
    if key in words.OFFLOAD_OF_NVME:
        return not_needed("it is of NVMe, where no checkpoint can read state")
    return _by_words(key, said, facts, words.OFFLOAD_ONE_VALUE, {})


def _optimizer(keys: Sequence[str], said: Said, facts: Facts) -> Answer | None:
    word = said.word
    if keys[0] == "type":
        return answers.optimizer(said, facts)
    if keys[0] == "legacy_fusion":
        return not_needed("updates are made by torch's optimizer")
    if keys[0] != "params" or len(keys) < 2:
        return NOTHING if keys[0] == "params" else None
    if word == "lr" and (peak := _peak(facts)) is not None:
        return not_needed(f"the scheduler's warmup_max_lr, {peak}, is the peak")
    if word in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov"):
        return Answer("taken", {f"optim.{word}": said.value})
    return _of_optimizers(word, said)


def _peak(facts: Facts) -> object:
    """To which the scheduler sets the rate, whatever the optimizer was given; None: to that."""
    said = facts.value(("scheduler.params.warmup_max_lr",))
    left = unsaid_by_scheduler(facts).get("warmup_max_lr")
    return said if left is None else left["optim.lr"]


def _of_optimizers(word: str, said: Said) -> Answer | None:
    if word == "adam_w_mode":
        return derived("a part of the optimizer's name", {})
    if word == "bias_correction":
        return NOTHING if said.value in (True, None) else not_there("moments are always corrected")
    if word in ("torch_adam", "fused", "set_grad_none", "adagrad"):
        return not_needed("updates are made by torch's optimizer")
    if word in ("amsgrad", "maximize", "dampening", "freeze_step", "cuda_aware", "comm_backend_name", "max_grad_norm"):
        return not_there("torch's plain optimizer has no part of it") if said.value else NOTHING
    return None


def _scheduler(keys: Sequence[str], said: Said, facts: Facts) -> Answer | None:
    word = said.word
    if keys[0] == "type":
        kind = _CURVES.get(plain(str(said.value)))
        if kind is None:
            return not_there("WarmupLR, WarmupDecayLR and WarmupCosineLR have counterparts")
        return Answer("taken", {"schedule.kind": kind}, f"for {said.value}")
    match word:
        case "warmup_num_steps":
            return answers.warmup(said, facts)
        case "total_num_steps":
            return answers.length(said, facts)
        case "warmup_max_lr":
            return taken(optim__lr=said.value)
        case "cos_min_ratio":
            return taken(schedule__final_ratio=said.value)
        case "warmup_type":
            known = said.value in ("linear", "log")
            return taken(schedule__warmup_type=said.value) if known else not_there("linear and log are")
        case "warmup_min_lr" | "warmup_min_ratio":
            return not_there("warm-ups begin just above 0; write 0") if said.value else NOTHING
    return NOTHING if word == "params" else None


def unsaid_by_scheduler(facts: Facts) -> Mapping[str, Mapping[str, object]]:
    """By parameter of DeepSpeed's scheduler that the file leaves to its default: what it is in our words."""
    kind = facts.find(("scheduler.type",))
    said = {plain(one.path[-1]) for one in facts.said if "scheduler" in map(plain, one.path)}
    if kind is None or any(one.word == "params" and one.value == "auto" for one in facts.said):
        return {}
    defaults = words.SCHEDULER_DEFAULTS.get(str(kind.value), {})
    return {one: {_SCHEDULED[one]: value} for one, value in defaults.items() if one not in said}


_SCHEDULED = {
    "warmup_num_steps": "schedule.warmup_steps",
    "warmup_type": "schedule.warmup_type",
    "warmup_max_lr": "optim.lr",
    "cos_min_ratio": "schedule.final_ratio",
}


def _fp16(keys: Sequence[str], said: Said, facts: Facts) -> Answer | None:
    key, on = keys[0], facts.value(("fp16.enabled",)) is True
    if key == "enabled":
        return answers.precision(said, facts)
    if key not in _FP16:
        return None
    if not on:
        return not_needed("fp16 is not on")
    if key == "initial_scale_power":
        return answers.renamed(key, said, facts)
    if key == "loss_scale_window":
        return taken(precision__loss_scale__growth_interval=said.value)
    if key == "loss_scale" and said.value:
        return not_there("the loss scale is dynamic: write 0")
    return not_needed("the loss scale is dynamic, and lowered at each overflow")


_FP16 = ("initial_scale_power", "loss_scale_window", "loss_scale", "hysteresis", "consecutive_hysteresis",
         "min_loss_scale", "auto_cast", "fp16_master_weights_and_grads")  # fmt: skip


def _bf16(keys: Sequence[str], said: Said, facts: Facts) -> Answer | None:
    if keys[0] == "enabled":
        return answers.precision(said, facts)
    known = ("bf16_master_weights_and_grads", "bf16_optimizer_states", "check_grad_overflow", "immediate_grad_update")
    return not_needed("parameters, gradients and optimizer state are fp32") if keys[0] in known else None


def _activations(keys: Sequence[str], said: Said, facts: Facts) -> Answer | None:
    """DeepSpeed's own is for models that call its functions; ours is for any."""
    key = keys[0]
    if key == "profile":
        return not_there("blocks are not timed one by one") if said.value else NOTHING
    if key not in words.ACTIVATIONS:
        return None
    if is_off(said.value):
        return NOTHING
    on = {"memory.activation_checkpointing.mode": "full"}
    if key == "cpu_checkpointing":
        return Answer("to do", on, f"mode: full, but {words.ACTIVATIONS[key]}")
    return derived(words.ACTIVATIONS[key], on)


_SECTIONS = {
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "fp16": _fp16,
    "bf16": _bf16,
    "bfloat16": _bf16,
    "activation_checkpointing": _activations,
}


# --- keys that stand alone ------------------------------------------------------------------------------------------


def _clipping(said: Said, facts: Facts) -> Answer:
    return taken(optim__clip_norm=said.value or None)


def _empty(said: Said, facts: Facts) -> Answer:
    return NOTHING if said.value in (None, {}) else not_there("it is a mapping")


def _drop_last(said: Said, facts: Facts) -> Answer:
    return taken(data__drop_last=said.value)


def _untested(said: Said, facts: Facts) -> Answer:
    return not_needed("Lockstep's own tests say which optimizer goes with ZeRO")


def _autocast(word: str, said: Said, facts: Facts) -> Answer | None:
    if word == "enabled":
        return NOTHING if not said.value else derived("dtype says the arithmetic", {})
    if word == "dtype":
        on = facts.value(("torch_autocast.enabled",)) is True
        return answers.renamed("dtype", said, facts) if on else not_needed("torch_autocast is not on")
    return not_needed("torch's autocast has a list of its own") if word == "lower_precision_safe_modules" else None


_ALONE = {
    "train_batch_size": answers.batch,
    "train_micro_batch_size_per_gpu": answers.batch,
    "gradient_accumulation_steps": answers.batch,
    "gradient_clipping": _clipping,
    "dataloader_drop_last": _drop_last,
    "zero_allow_untested_optimizer": _untested,
    **dict.fromkeys(("zero_optimization", "optimizer", "scheduler", "torch_autocast"), _empty),
    "activation_checkpointing": _empty,
    **dict.fromkeys(("fp16", "bf16", "bfloat16"), _empty),
}

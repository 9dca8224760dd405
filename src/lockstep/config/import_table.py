"""Which of another tool's words is answered how, where more than a new name is needed.

    "eval_steps"          often("evaluation.every", ...)
    "scheduler.type"      curve                              a word in its section goes before the word alone
    "deepspeed"           the JSON it names is read, and answered key by key

All other words are answered by `import_words` and `foreign_words`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.config import import_answers as ways
from lockstep.config import import_deepspeed
from lockstep.config.foreign_files import Said, plain, read_foreign
from lockstep.config.import_answers import NOTHING, Answer, Facts, not_needed, not_there
from lockstep.config.import_words import NOT_THERE, TO_DO

Answering = Callable[[Said, Facts], Answer]


def _clip(said: Said, facts: Facts) -> Answer:
    return ways.renamed("max_grad_norm", said, facts)


def _checkpoint_kwargs(said: Said, facts: Facts) -> Answer:
    return not_needed("activation checkpointing is never reentrant here, and keeps what was drawn")


def _deepspeed(said: Said, facts: Facts) -> Answer:
    """A path to DeepSpeed's own JSON, or a switch."""
    if said.value in (None, False, "", {}):
        return NOTHING
    if isinstance(said.value, bool):
        return ways.taken(parallel__strategy="deepspeed")
    path = next((one for one in (facts.folder / str(said.value), Path(str(said.value))) if one.is_file()), None)
    if path is None:
        return not_there(f"there is no file {said.value}; import it by itself: lockstep config import FILE")
    inner = read_foreign(path, "deepspeed")
    stage = import_deepspeed.stage_of(inner.said)
    settings = {"parallel.strategy": "deepspeed", "parallel.deepspeed.zero_stage": stage}
    handed: dict[str, object] = {}
    for one in inner.said:
        found = import_deepspeed.answer(
            [plain(part) for part in one.path], one, Facts("deepspeed", inner.said, facts.ranks, path.parent)
        )
        if found is None or found.standing == "not there":
            return not_there(f"{one.where}: {one.key} {found.why if found else 'is no key of DeepSpeed'}")
        handed |= found.settings
    return ways.derived(f"from {path}", {**handed, **settings})


def _sampling(said: Said, facts: Facts) -> Answer:
    if said.value in ("random", "sequential"):
        return ways.taken(data__shuffle=said.value == "random")
    return not_there("samples are taken at random or in their own order")


def _memory_metrics(said: Said, facts: Facts) -> Answer:
    return NOTHING if said.value else not_there(f"{NOT_THERE['log_memory']}; write true")


def _compile_option(said: Said, facts: Facts) -> Answer:
    if said.value in (None, "inductor", "default", "INDUCTOR", "NO", "no", False, ""):
        return not_needed("torch's default")
    return not_there("model.compile is torch.compile with its defaults")


def _dynamo(said: Said, facts: Facts) -> Answer:
    return NOTHING if plain(str(said.value)) in ("no", "false") else ways.taken(model__compile=True)


def _backend(said: Said, facts: Facts) -> Answer:
    named = plain(str(said.value))
    if named == "nccl":
        return ways.derived("follows from the device: nccl on GPUs, gloo on the CPU", {})
    if named in ("gloo", "auto"):
        return ways.taken(launch__backend=named)
    return not_there("nccl and gloo are")


def _as_a_mapping(said: Said, facts: Facts) -> Answer:
    return NOTHING if said.value in (None, {}, "") else not_there("write it as a mapping, so that its keys can be read")


def _decay_steps(said: Said, facts: Facts) -> Answer:
    steps = facts.value(ways.STEPS)
    if isinstance(steps, int) and isinstance(said.value, int) and steps > 0:
        return ways.derived(f"{said.value} of {steps} steps", {"schedule.decay_ratio": said.value / steps})
    return ways.to_do("write schedule.decay_ratio: the share of the run that decays")


def _total_limit(said: Said, facts: Facts) -> Answer:
    return ways.taken(checkpoint__keep_last=said.value)


def _split(said: Said, facts: Facts) -> Answer:
    return ways.of_dataset("split")(said, facts)


def _recompute(said: Said, facts: Facts) -> Answer:
    """A switch, or a mode; under the key of the section, `enabled`."""
    if ways.is_off(said.value):
        return NOTHING
    if said.value in ("full", "selective"):
        return ways.taken(memory__activation_checkpointing__mode=said.value)
    if said.value is not True:
        return ways.no_switch(said.value)
    return ways.taken(memory__activation_checkpointing__mode="full")


def _every_layers(said: Said, facts: Facts) -> Answer:
    """Each so-many-th block; of whose mode nothing is said, that is full."""
    switch = facts.find(_RECOMPUTING)
    if switch is not None and ways.is_off(switch.value):
        return not_needed(f"{switch.key} is off")
    if said.value in (0, False):
        return NOTHING
    beside = {} if switch is not None else {"memory.activation_checkpointing.mode": "full"}
    return Answer("taken", {**beside, "memory.activation_checkpointing.every": said.value})


def _activations_to_host(said: Said, facts: Facts) -> Answer:
    return NOTHING if ways.is_off(said.value) else ways.taken(memory__activation_offload="cpu")


_RECOMPUTING_SECTIONS = ("activation_checkpointing", "activation_checkpoint", "gradient_checkpointing")


def _in_recomputing(*words: str) -> tuple[str, ...]:
    return tuple(f"{section}.{word}" for section in _RECOMPUTING_SECTIONS for word in words)


_RECOMPUTING = (
    "gradient_checkpointing",
    "activation_checkpointing",
    "fsdp_activation_checkpointing",
    "use_activation_checkpointing",
    "enable_gradient_checkpointing",
    "use_gradient_checkpointing",
    "enable_activation_checkpointing",
    *_in_recomputing("enabled", "enable", "mode"),
)

ANSWERS: Mapping[str, Answering] = {
    **dict.fromkeys((*ways.GLOBAL, *ways.MICRO_HERE, *ways.ACCUMULATION_HERE), ways.batch),
    **dict.fromkeys((*ways.STEPS, *ways.EPOCHS, *ways.TOKENS), ways.length),
    **dict.fromkeys((*ways.WARMUP_STEPS, *ways.WARMUP_RATIO), ways.warmup),
    "warmup_epochs": ways.warmup_epochs,
    **dict.fromkeys(("lr_decay_iters", "lr_decay_steps", "decay_iters", "t_max"), ways.decay_length),
    "decay_lr": ways.decays,
    "init_from": ways.begins_from,
    "bias": ways.biases,
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_schedule", "schedule"), ways.curve),
    **dict.fromkeys(("scheduler.type", "scheduler.name", "lr_scheduler.type", "lr_scheduler.name"), ways.curve),
    **dict.fromkeys(("min_lr", "eta_min", "lr_end", "lr_min", "final_lr"), ways.least_rate),
    **dict.fromkeys(
        ("min_lr_ratio", "min_lr_rate", "lr_min_ratio"),
        lambda said, facts: ways.taken(schedule__final_ratio=said.value),
    ),
    **dict.fromkeys(
        ("lr_scheduler_kwargs", "accelerator_config", "fsdp_config", "fsdp_plugin", "dynamo_config"), _as_a_mapping
    ),
    "num_decay_steps": _decay_steps,
    "lr_scheduler_kwargs.num_cycles": lambda said, facts: (
        NOTHING if said.value == 0.5 else not_there("cosine curves are of half a period")
    ),
    **dict.fromkeys(
        ("optimizer.type", "optimizer.name", "optimizer", "optim", "optimizer_name", "optimizer_type"), ways.optimizer
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), ways.betas),
    **dict.fromkeys(
        ("max_grad_norm", "gradient_clip_val", "gradient_clipping", "clip_grad_norm", "grad_clip", "clip_grad"), _clip
    ),
    **dict.fromkeys(
        ("precision", "mixed_precision", "torch_dtype", "dtype", "amp_dtype", "amp", "use_amp", "fp16", "bf16"),
        ways.precision,
    ),
    **dict.fromkeys(("fp16.enabled", "bf16.enabled", "mixed_precision.enabled", "amp.enabled"), ways.precision),
    **dict.fromkeys(
        ("fp16.initial_scale_power",), lambda said, facts: ways.renamed("initial_scale_power", said, facts)
    ),
    "fsdp.mixed_precision": ways.fsdp_precision,
    "fsdp_config.mixed_precision": ways.fsdp_precision,
    **dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"), ways.dtype),
    **dict.fromkeys(("sharding_strategy", "fsdp_sharding_strategy"), ways.sharding),
    **dict.fromkeys(("backward_prefetch", "fsdp_backward_prefetch", "fsdp_backward_prefetch_policy"), ways.prefetch),
    **dict.fromkeys(("auto_wrap_policy", "fsdp_auto_wrap_policy", "wrap_policy"), ways.wrap_policy),
    **dict.fromkeys(
        (
            "fsdp_transformer_layer_cls_to_wrap",
            "transformer_layer_cls_to_wrap",
            "transformer_layer_cls",
            "module_classes_to_wrap",
        ),
        ways.wrap,
    ),
    **dict.fromkeys(("min_num_params", "fsdp_min_num_params", "fsdp_config.min_num_params"), ways.least_wrapped),
    "fsdp": ways.fsdp,
    **dict.fromkeys(
        (
            "deepspeed",
            "deepspeed_config",
            "deepspeed_config_file",
            "ds_config",
            "deepspeed.config",
            "deepspeed.config_file",
            "zero.config",
        ),
        _deepspeed,
    ),
    **dict.fromkeys(
        (
            "offload_optimizer_device",
            "offload_param_device",
            "offload_optimizer",
            "offload_param",
            "offload_optimizer.device",
            "offload_param.device",
        ),
        ways.offload,
    ),
    **dict.fromkeys(
        ("deepspeed_config.offload_optimizer_nvme_path", "deepspeed_config.offload_param_nvme_path"),
        lambda said, facts: not_needed("it is of NVMe"),
    ),
    "deepspeed_moe_layer_cls_names": lambda said, facts: not_there("experts are not spread over ranks"),
    "stage": lambda said, facts: Answer("taken", {"parallel.deepspeed.zero_stage": said.value}),
    **dict.fromkeys(("strategy", "distributed_type", "accelerator", "parallel"), ways.strategy),
    **dict.fromkeys(("num_processes", "world_size", "nproc_per_node", "devices", "gpus", "num_gpus"), ways.processes),
    **dict.fromkeys(("pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size", "num_stages"), ways.stages),
    **dict.fromkeys(("use_cpu", "no_cuda", "device"), ways.device),
    **dict.fromkeys(_RECOMPUTING, _recompute),
    **dict.fromkeys(
        (
            "checkpoint_every_n_layers",
            "checkpoint_every_n_blocks",
            *_in_recomputing("every", "every_n", "every_n_layers", "checkpoint_every", "frequency", "freq", "interval"),
        ),
        _every_layers,
    ),
    **dict.fromkeys(
        ("offload_activations", *_in_recomputing("cpu_offload", "offload", "offload_to_cpu", "cpu_checkpointing")),
        _activations_to_host,
    ),
    "preserve_rng_state": _checkpoint_kwargs,
    **dict.fromkeys(
        (
            "gradient_checkpointing_kwargs",
            "activation_checkpointing_kwargs",
            "use_reentrant",
            "gradient_checkpointing_kwargs.use_reentrant",
            "activation_checkpointing_kwargs.use_reentrant",
        ),
        _checkpoint_kwargs,
    ),
    **dict.fromkeys(
        ("eval_steps", "eval_interval", "eval_every"),
        ways.often("evaluation.every", ("eval_strategy", "evaluation_strategy")),
    ),
    **dict.fromkeys(
        (
            "save_steps",
            "save_interval",
            "save_every",
            "save_every_n_steps",
            "checkpoint_every",
            "checkpoint_freq",
            "checkpoint_frequency",
            "checkpoint_steps",
            "ckpt_every",
            "ckpt_interval",
            "checkpoint.freq",
            "checkpoint.frequency",
        ),
        ways.often("checkpoint.every", ("save_strategy",)),
    ),
    **dict.fromkeys(
        ("save_every_n_epochs", "save_every_epochs", "checkpoint_every_n_epochs"),
        ways.epochs_between("checkpoint.every"),
    ),
    **dict.fromkeys(
        ("eval_every_n_epochs", "eval_every_epochs", "val_every_n_epochs"), ways.epochs_between("evaluation.every")
    ),
    **dict.fromkeys(
        (
            "checkpoint.dir",
            "checkpoint.directory",
            "checkpoint.path",
            "checkpoints.dir",
            "checkpointing.dir",
            "checkpoint.save_path",
            "checkpoint_path",
        ),
        lambda said, facts: ways.taken(checkpoint__folder=said.value),
    ),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), ways.eval_strategy),
    "save_strategy": ways.save_strategy,
    **dict.fromkeys(
        (
            "save_total_limit",
            "total_limit",
            "keep_last_n",
            "keep_last_k",
            "keep_latest_k",
            "max_checkpoints",
            "max_checkpoints_to_keep",
            "max_to_keep",
            "checkpoint.keep",
            "checkpoints.keep",
        ),
        _total_limit,
    ),
    **dict.fromkeys(
        (
            "logging_steps",
            "log_every",
            "log_interval",
            "log_freq",
            "log_frequency",
            "print_freq",
            "log_steps",
            "logging.steps",
            "logging.every",
            "logging.interval",
            "logging.freq",
            "logging.frequency",
            "log_every_steps",
            "print_every",
            "print_interval",
        ),
        ways.log_every,
    ),
    **dict.fromkeys(
        ("save_freq", "save_frequency", "checkpoint.interval", "checkpoint.steps", "checkpointing.interval"),
        ways.often("checkpoint.every", ("save_strategy",)),
    ),
    **dict.fromkeys(
        (
            "eval_freq",
            "eval_frequency",
            "eval_every_n_steps",
            "evaluation_interval",
            "evaluation.interval",
            "evaluation.steps",
            "val_interval",
            "val_every",
            "val_freq",
            "val_steps",
            "validation_interval",
            "validate_every",
        ),
        ways.often("evaluation.every", ("eval_strategy",)),
    ),
    **dict.fromkeys(("report_to", "logger", "trackers", "log_with", "use_tensorboard", "tensorboard"), ways.trackers),
    **dict.fromkeys(
        (
            "output_dir",
            "default_root_dir",
            "save_dir",
            "out_dir",
            "logging_dir",
            "log_dir",
            "tensorboard_dir",
            "logging.dir",
        ),
        ways.folder,
    ),
    **dict.fromkeys(("run_name", "experiment_name", "exp_name", "job_name", "project_name"), ways.run_name),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), ways.narrow_evaluation),
    "val_check_interval": ways.validation_interval,
    "check_val_every_n_epoch": ways.validation_epochs,
    "cpu_offload": ways.to_host,
    **dict.fromkeys(("optimizer.class_path", "optimizer._target_"), ways.of_class(ways.optimizer)),
    **dict.fromkeys(
        tuple(f"{section}.{word}" for section in ("scheduler", "lr_scheduler") for word in ("class_path", "_target_")),
        ways.of_class(ways.curve),
    ),
    **dict.fromkeys(
        tuple(f"{section}.{word}" for section in ("model", "data", "dataset") for word in ("class_path", "_target_")),
        lambda said, facts: ways.to_do(TO_DO["model_class"]),
    ),
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), ways.attention),
    **dict.fromkeys(
        ("gradient_accumulation_kwargs.num_steps", "gradient_accumulation_plugin.num_steps"),
        lambda said, facts: NOTHING if ways.is_off(said.value) else ways.to_do(TO_DO["gradient_accumulation_kwargs"]),
    ),
    **dict.fromkeys(("seed", "random_seed", "manual_seed", "data_seed", "seed_everything"), ways.seed),
    **dict.fromkeys(ways.MODEL, ways.model),
    **dict.fromkeys(("task", "task_type", "model.type", "model_class", "model.task", "model.class"), ways.task),
    **dict.fromkeys(("num_labels", "num_classes"), ways.labels),
    **{
        word: ways.shape_of_model(f"model.{key}")
        for key, words_ in {
            "layers": ("n_layer", "n_layers", "num_layers", "num_hidden_layers"),
            "heads": ("n_head", "n_heads", "num_heads", "num_attention_heads"),
            "width": ("n_embd", "hidden_size", "d_model", "hidden_dim"),
            "mlp_width": ("intermediate_size", "ffn_dim", "d_ff"),
            "kv_heads": ("n_kv_heads", "num_key_value_heads"),
            "vocabulary": ("vocab_size",),
            "dropout": ("dropout",),
        }.items()
        for word in words_
    },
    "model_type": ways.model_type,
    **dict.fromkeys(ways.DATASET, ways.dataset),
    **dict.fromkeys(ways.CONFIGURATION, ways.of_dataset("configuration")),
    **dict.fromkeys(ways.TEXT, ways.of_dataset("text")),
    **dict.fromkeys(ways.LABEL, ways.of_dataset("label")),
    **dict.fromkeys(ways.LENGTH, ways.of_dataset("max_length")),
    "block_size": ways.packed,
    **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path", "tokenizer"), ways.of_dataset("tokenizer")),
    **dict.fromkeys(("split", "train_split", "dataset_train_split"), _split),
    **dict.fromkeys(("eval_split", "validation_split", "test_split", "dataset_test_split"), ways.evaluation_split),
    **dict.fromkeys(("backend", "ddp_backend", "dist_backend"), _backend),
    "train_sampling_strategy": _sampling,
    "skip_memory_metrics": _memory_metrics,
    **dict.fromkeys(
        (
            "torch_compile_backend",
            "torch_compile_mode",
            "dynamo_mode",
            "dynamo_use_dynamic",
            "dynamo_use_fullgraph",
            "dynamo_use_regional_compilation",
        ),
        _compile_option,
    ),
    "dynamo_backend": _dynamo,
    "logging_dir": ways.folder,
}

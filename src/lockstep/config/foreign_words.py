"""Words of other tools, answered with ours and, where it can be computed, the value.

    max_grad_norm: 0.5                      ->   Lockstep's word is optim.clip_norm: write `optim.clip_norm: 0.5`
    gradient_accumulation_steps: 4          ->   write `batch.global_size: 64` and `batch.micro_size: 16`
      beside per_device_train_batch_size: 16

Three tables: words that are only renamed, words whose value changes too, words for what doesn't exist here. They come
from transformers' TrainingArguments and model configs, Accelerate, Lightning, DeepSpeed, torchrun and common scripts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from lockstep.config.reading import Leaf, Node

Context: TypeAlias = Mapping[str, object]
"""All values of the config, by dotted key and by last word."""

Meaning: TypeAlias = Mapping[str, object] | str
"""Keys of ours with the values that say the same; or a sentence, where no value can be said."""

Answer: TypeAlias = Callable[[object, Context], Meaning]

_RENAMED: dict[str, tuple[str, ...]] = {
    "batch.global_size": ("train_batch_size", "global_batch_size", "total_batch_size"),
    "batch.micro_size": ("train_micro_batch_size_per_gpu", "micro_batch_size", "device_batch_size"),
    "evaluation.micro_size": ("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_batch_size"),
    "optim.lr": ("learning_rate", "max_lr", "peak_lr", "base_lr"),
    "optim.eps": ("adam_epsilon", "epsilon"),
    "optim.weight_decay": ("wd", "l2"),
    "run.tokens": ("max_tokens", "num_tokens"),
    "schedule.warmup_steps": ("num_warmup_steps", "warmup_num_steps", "warmup_iters", "warmup"),
    "schedule.warmup_ratio": ("warmup_fraction", "warmup_proportion"),
    "objective.label_smoothing": ("label_smoothing_factor",),
    "precision.loss_scale.growth_interval": ("loss_scale_window",),
    "data.loader.workers": ("dataloader_num_workers", "num_workers"),
    "data.loader.pin_memory": ("dataloader_pin_memory",),
    "data.loader.persistent_workers": ("dataloader_persistent_workers",),
    "data.loader.prefetch": ("dataloader_prefetch_factor", "prefetch_factor"),
    "data.drop_last": ("dataloader_drop_last",),
    "data.train.name": ("dataset_name", "dataset"),
    "data.train.configuration": ("dataset_config_name", "dataset_config"),
    "data.train.tokenizer": ("tokenizer_name", "tokenizer_name_or_path"),
    "monitor.every": ("logging_steps", "log_every", "log_every_n_steps", "log_interval", "steps_per_print"),
    "evaluation.every": ("eval_steps", "eval_interval", "eval_every", "val_check_interval"),
    "run.seed": ("random_seed", "data_seed", "manual_seed", "seed_everything"),
    "run.folder": (
        "output_dir",
        "default_root_dir",
        "save_dir",
        "out_dir",
        "out",
        "logging_dir",
        "log_dir",
        "exp_dir",
        "work_dir",
        "workdir",
        "run_name",
        "experiment",
        "experiment_name",
    ),
    "launch.ranks": ("num_processes", "world_size", "n_gpu", "n_gpus"),
    "launch.timeout": ("ddp_timeout",),
    "launch.backend": ("ddp_backend", "dist_backend"),
    "launch.port": ("main_process_port", "master_port"),
    "parallel.ddp.find_unused_parameters": ("ddp_find_unused_parameters",),
    "parallel.ddp.bucket_mb": ("ddp_bucket_cap_mb", "bucket_cap_mb"),
    "parallel.ddp.sync_batchnorm": ("sync_bn", "use_sync_bn"),
    "model.pretrained": ("model_name_or_path", "pretrained_model_name_or_path", "model_name"),
    "model.layers": ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "depth"),
    "model.heads": ("n_head", "n_heads", "num_heads", "num_attention_heads"),
    "model.kv_heads": ("n_kv_heads", "num_key_value_heads"),
    "model.width": ("n_embd", "hidden_size", "d_model", "hidden_dim"),
    "model.mlp_width": ("intermediate_size", "ffn_dim", "d_ff"),
    "model.vocabulary": ("vocab_size",),
    "model.tie_embeddings": ("tie_word_embeddings", "tie_weights"),
    "model.rope_base": ("rope_theta",),
    "model.compile": ("torch_compile",),
    "parallel.fsdp.backward_prefetch": ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy"),
    "parallel.fsdp.forward_prefetch": ("fsdp_forward_prefetch",),
    "parallel.fsdp.cpu_offload": ("fsdp_offload_params", "offload_params"),
    "parallel.fsdp.min_num_params": ("fsdp_min_num_params",),
    "parallel.deepspeed.zero_stage": ("zero_stage", "zero"),
    "parallel.deepspeed.offload_optimizer": ("offload_optimizer_device",),
    "parallel.deepspeed.offload_param": ("offload_param_device",),
    "parallel.pipeline": (
        "pipeline_parallel_size",
        "pipeline_model_parallel_size",
        "pipeline_parallel_degree",
        "pp_size",
        "pp",
    ),
    "parallel.context": (
        "context_parallel_size",
        "context_parallel_degree",
        "sequence_parallel_size",
        "cp_size",
        "cp",
        "ulysses_sequence_parallel_size",
    ),
    "parallel.tensor": (
        "tensor_parallel_size",
        "tensor_model_parallel_size",
        "tensor_parallel_degree",
        "tp_size",
        "tp",
    ),
    "checkpoint.every": (
        "save_steps",
        "save_interval",
        "save_every",
        "checkpoint_interval",
        "checkpoint_every",
        "every_n_train_steps",
    ),
    "checkpoint.keep_last": ("save_total_limit", "total_limit"),
    "checkpoint.best": ("metric_for_best_model", "monitor_metric"),
    "checkpoint.folder": ("checkpoint_dir", "ckpt_dir", "checkpoint_folder"),
}

_ABSENT: dict[str, tuple[str, ...]] = {
    "checkpoints are always written; `checkpoint.every: null` leaves those when the run is stopped or done": (
        "checkpointing", "enable_checkpointing", "save_strategy",
    ),
    "a run goes on by itself when it is started again with the same run.folder": (
        "resume_from_checkpoint", "resume", "resume_from", "resume_path", "auto_resume", "ckpt_path",
        "overwrite_output_dir",
    ),
    "write `run.end_with: best`, with `checkpoint.best` naming a metric, such as held-out.loss": (
        "load_best_model_at_end",
    ),
    "activation checkpointing has no such options: it is never reentrant, and keeps what was drawn; leave it out": (
        "gradient_checkpointing_kwargs",
    ),
    "it always holds under FSDP2: parameters keep their names, shapes and groups; leave it out": (
        "use_orig_params", "fsdp_use_orig_params",
    ),
    "it always holds: each rank's part is cut from the same first weights; leave it out": (
        "sync_module_states", "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading",
    ),
    "it always holds under FSDP2: at most two blocks are gathered at a time; leave it out": (
        "limit_all_gathers", "fsdp_limit_all_gathers",
    ),
    "checkpoints are always sharded, and load anywhere; `lockstep export` writes whole weights; leave it out": (
        "fsdp_state_dict_type", "state_dict_type",
    ),
    "it is FSDP2 in any case; leave it out": ("fsdp_version",),
    "write `parallel.strategy: ddp` and what is special about it under `parallel.ddp`": ("ddp",),
    "write `--ranks auto`, one process a GPU; parallel.strategy is ddp, fsdp or deepspeed": (
        "multi_gpu", "distributed",
    ),
    "write `model.architecture.attn_implementation`, of a model of kind huggingface": ("attn_implementation",),
    "write `parallel.strategy: fsdp` and what is special about it under `parallel.fsdp`": (
        "fsdp", "fsdp_config", "fsdp_plugin",
    ),
    "write `parallel.strategy: deepspeed`, and the stage as `parallel.deepspeed.zero_stage`": ("zero_optimization",),
    "write `parallel.strategy: deepspeed`, and a DeepSpeed config as `parallel.deepspeed.config`": (
        "deepspeed", "deepspeed_config", "deepspeed_config_file", "deepspeed_plugin",
    ),
    "the hub is never written to; leave it out": ("push_to_hub", "hub_model_id", "hub_strategy", "hub_token"),
    "start one process a rank with torchrun on every machine; lockstep starts those of one": (
        "num_nodes", "nnodes", "num_machines", "machine_rank", "node_rank",
    ),
    "it is said on the command line, for every run anew: --trust-remote-code": ("trust_remote_code",),
}  # fmt: skip


def translate(word: str, node: Node, context: Context) -> str | None:
    """What to write instead of another tool's word; None if it is nobody's."""
    word = _plain(word)
    value = node.value if isinstance(node, Leaf) else None
    if word in _TARGETS and isinstance(node, Leaf) and node.text and value is not None:
        value = node.text  # as typed
    found = meaning(word, value, context)
    return found if found is None or isinstance(found, str) else _sentence(found)


def meaning(word: str, value: object, context: Context) -> Meaning | None:
    """What another tool's word says, with this value, in ours; None if it is nobody's."""
    word = _plain(word)
    if word in _TARGETS:
        return _word(_TARGETS[word]) if value is None else {_TARGETS[word]: value}
    if word in _REASONS:
        return _REASONS[word]
    return _COMPUTED[word](value, context) if word in _COMPUTED else None


def words() -> Iterator[str]:
    """All of them."""
    yield from (*_TARGETS, *_REASONS, *_COMPUTED)


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


def absent_value(word: str, node: Node) -> str | None:
    """Why another tool's value for a word of ours has no counterpart; None if nothing is known of it."""
    value = node.value if isinstance(node, Leaf) else None
    return _ABSENT_VALUES.get((word, str(value).upper()))


_ABSENT_VALUES = {
    ("backward_prefetch", "BACKWARD_POST"): (
        "BACKWARD_POST is a way of FSDP1 alone: FSDP2 asks for the next block's parameters while the backward of this "
        "one runs; leave it out, or write BACKWARD_PRE"
    ),
    ("backward_prefetch", "NONE"): (
        "FSDP2 always asks for the next block's parameters while the backward of this one runs; leave it out"
    ),
    ("backward_prefetch", "NO_PREFETCH"): (
        "FSDP2 always asks for the next block's parameters while the backward of this one runs; leave it out"
    ),
}
_TARGETS = {word: key for key, words in _RENAMED.items() for word in words}
_REASONS = {word: reason for reason, words in _ABSENT.items() for word in words}


def _word(key: str) -> str:
    return f"Lockstep's word is {key}"


def _sentence(settings: Mapping[str, object]) -> str:
    written = " and ".join(f"`{key}: {_yaml(value)}`" for key, value in settings.items())
    return f"{_word(next(iter(settings)))}: write {written}"


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _ranks(value: object, context: Context) -> Meaning:
    """torchrun and Lightning have words for all GPUs of the machine."""
    if value is None:
        return _word("launch.ranks")
    return {"launch.ranks": "auto" if value in ALL_GPUS else value}


ALL_GPUS = ("gpu", "auto", "-1", -1)


# --- batch sizes --------------------------------------------------------------------------------------------------

MICRO = ("per_device_train_batch_size", "per_gpu_train_batch_size", "train_micro_batch_size_per_gpu",
          "micro_batch_size", "device_batch_size", "batch.micro_size", "batch_size")  # fmt: skip
ACCUMULATION = ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accumulation_steps", "grad_accum")
_RANKS = ("launch.ranks", "devices", "num_processes", "nproc_per_node", "num_gpus", "gpus", "world_size")


def _batch(value: object, context: Context) -> str:
    """Micro-batch, accumulation and ranks, of which one may be unknown, to the global batch."""
    micro, accumulation = _number(context, MICRO), _number(context, ACCUMULATION)
    ranks = _number(context, _RANKS)
    if micro is None:
        factor = f"{accumulation or 'accumulation'} x samples per forward x ranks"
        return f"Lockstep derives accumulation from the global batch: write `batch.global_size` = {factor}"
    factors = [micro, accumulation or 1] + ([ranks] if ranks else [])
    product, total = " x ".join(map(str, factors)), math.prod(factors)
    missing = "" if ranks else ", times the number of ranks it was made for"
    return (
        f"Lockstep derives accumulation from the global batch: write `batch.global_size: {total}` ({product}{missing}) "
        f"and `batch.micro_size: {micro}`"
    )


def _number(context: Context, names: tuple[str, ...]) -> int | None:
    values = (context.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


# --- everything else whose value changes --------------------------------------------------------------------------


def _clip(value: object, context: Context) -> Meaning:
    return {"optim.clip_norm": None if value in (0, False, -1) else value}


def _length(unit: str) -> Answer:
    def answer(value: object, context: Context) -> Meaning:
        key = f"run.{unit}"
        if isinstance(value, int | float) and value < 0:
            return f"Lockstep's word is {key}; for no limit by it leave it out, and give another length of the run"
        return {key: value} if value is not None else _word(key)

    return answer


def _betas(value: object, context: Context) -> Meaning:
    first, second = context.get("adam_beta1", context.get("beta1")), context.get("adam_beta2", context.get("beta2"))
    return {"optim.betas": [0.9 if first is None else first, 0.999 if second is None else second]}


_CURVES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "warmup_stable_decay": "warmup-stable-decay", "wsd": "warmup-stable-decay", "warmuplr": "constant",
    "warmupdecaylr": "linear", "warmupcosinelr": "cosine", "cosineannealinglr": "cosine", "none": "constant",
}  # fmt: skip


def _curve(value: object, context: Context) -> Meaning:
    if not isinstance(value, str):
        return "Lockstep's word is schedule.kind: constant, linear, cosine or warmup-stable-decay"
    kind = _CURVES.get(value.lower().replace("-", "_"))
    if kind is None:
        return f"there is no {value} schedule; `schedule.kind` is constant, linear, cosine or warmup-stable-decay"
    return {"schedule.kind": kind}


_OPTIMIZERS = ("adamw", "adafactor", "muon", "lion", "adam", "sgd")
_FEWER_BITS = ("8bit", "4bit", "8_bit", "4_bit", "paged", "int8", "fp8")


def _optimizer(value: object, context: Context) -> Meaning:
    said = str(value).lower()
    if any(sign in said for sign in _FEWER_BITS):
        return f"there is no {value}: optimizer state is fp32; `optim.name` is one of {', '.join(sorted(_OPTIMIZERS))}"
    name = next((name for name in _OPTIMIZERS if said.startswith((name, f"fused{name}"))), None)
    return {"optim.name": name} if name else f"`optim.name` is one of {', '.join(sorted(_OPTIMIZERS))}"


_ARITHMETIC = (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"), ("float16", "fp16"), ("16", "fp16"),
               ("fp32", "fp32"), ("float32", "fp32"), ("32", "fp32"), ("no", "fp32"), ("auto", "auto"))  # fmt: skip


def _compute(value: object, context: Context) -> Meaning:
    said = str(value).lower().removeprefix("torch.")
    compute = next((ours for theirs, ours in _ARITHMETIC if said.startswith(theirs)), None)
    return {"precision.compute": compute} if compute else "`precision.compute` is auto, fp32, bf16 or fp16"


def _switch(arithmetic: str) -> Answer:
    return lambda value, context: {"precision.compute": "fp32" if str(value).lower() in _OFF else arithmetic}


_OFF = ("false", "no", "off")


def _loss_scale(value: object, context: Context) -> Meaning:
    key = "precision.loss_scale.initial"
    return {key: 2**value} if isinstance(value, int) and 0 <= value < 64 else _word(key)


def _strategy(value: object, context: Context) -> Meaning:
    said = str(value).lower()
    if said.startswith("ddp"):
        unused = {"parallel.ddp.find_unused_parameters": True} if "unused_parameters_true" in said else {}
        return {"parallel.strategy": "ddp", **unused}
    if said.startswith("fsdp"):
        return {"parallel.strategy": "fsdp"}
    if said.startswith("deepspeed"):
        stage = next((one for one in "0123" if f"stage_{one}" in said), None)
        beside = {"parallel.deepspeed.zero_stage": int(stage)} if stage else {}
        return {"parallel.strategy": "deepspeed", **beside}
    if said in ("dp", "auto", "single", "single_device"):
        return {"parallel.strategy": said.removesuffix("_device")}
    if said in ("cpu", "gpu", "cuda"):
        return {"launch.device": "cpu" if said == "cpu" else "cuda"}
    return strategy_hint(said) or f"{value} is not a strategy; they are auto, single, dp, ddp, fsdp and deepspeed"


def strategy_hint(said: str) -> str | None:
    """What to write for a way of dividing work that is a key of its own here; None: nothing is known of that name."""
    for word, key in (("pipeline", "pipeline"), ("tensor", "tensor"), ("context", "context"), ("ring", "context")):
        if said.startswith(word):
            return f"write `parallel.{key}: 2`, for two ranks, beside `parallel.strategy: ddp` or fsdp"
    if stage := re.fullmatch(r"(?:deepspeed_?)?zero_?(?:stage_?)?([0-3])", said):
        return f"write `parallel.strategy: deepspeed` and `parallel.deepspeed.zero_stage: {stage[1]}`"
    return None


def _recomputing(value: object, context: Context) -> Meaning:
    key = "memory.activation_checkpointing"
    if isinstance(value, bool):
        return {f"{key}.mode": "full" if value else "none"}
    return f"Lockstep's word is {key}: write `{key}: {{mode: full, every: 1}}`"


def _on_cpu(value: object, context: Context) -> Meaning:
    return {"launch.device": "auto" if value is False else "cpu"}


def _final_rate(value: object, context: Context) -> Meaning:
    """Ours is a share of the peak."""
    peak = context.get("optim.lr", context.get("learning_rate", context.get("lr")))
    if isinstance(value, int | float) and isinstance(peak, int | float) and 0 <= value <= peak and peak:
        return {"schedule.final_ratio": float(f"{value / peak:.4g}")}
    return "write `schedule.final_ratio`, a share of the peak optim.lr"


def _wrap_policy(value: object, context: Context) -> Meaning:
    said = str(value).upper()
    if said.startswith("SIZE"):
        return {"parallel.fsdp.wrap": "size"}
    if said.startswith("NO"):
        return {"parallel.fsdp.wrap": "root"}
    return "Lockstep's word is parallel.fsdp.wrap: blocks, size, root, or a list of module classes"


_SHARDING = {
    "1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "_HYBRID_SHARD_ZERO2",
}  # fmt: skip
"""The numbers that torch gives them."""


def _sharding(value: object, context: Context) -> Meaning:
    return {"parallel.fsdp.sharding_strategy": _SHARDING.get(str(value), str(value))}


def _wrapped(value: object, context: Context) -> Meaning:
    names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
    return {"parallel.fsdp.wrap": names}


_SECTIONS = {
    "model": "a name or folder goes into model: {{kind: huggingface, task: causal-lm, pretrained: {0}}}",
    **dict.fromkeys(
        ("data", "data.train"),
        "a name goes into data.train: {{kind: huggingface, name: {0}}}, a folder of tokens into data.train: {{kind: "
        "tokens, folder: {0}}}",
    ),
    "checkpoint": "a folder goes into checkpoint.folder; `lockstep train RUN` resumes the run in a folder",
}
"""Sections that other tools have as a single text."""


def instead(key: str, node: Node) -> str | None:
    """What to write for a value that means something else here, as the end of a sentence."""
    if not isinstance(node, Leaf) or not isinstance(node.value, str):
        return None
    if key == "parallel.strategy" and (hint := strategy_hint(node.value.lower())):
        return f"; {hint}"
    if key in _SECTIONS:
        return f"; {_SECTIONS[key].format(node.value)}"
    if key == "parallel.fsdp.wrap" and node.value[:1].isupper():
        return f"; classes are a list: write [{node.value}]"
    return None


def _reshard(value: object, context: Context) -> Meaning:
    strategy = {"FALSE": "SHARD_GRAD_OP", "TRUE": "FULL_SHARD"}.get(str(value).upper(), str(value))
    return {"parallel.fsdp.sharding_strategy": strategy}


def _eval_strategy(value: object, context: Context) -> Meaning:
    if value in ("epoch", "epochs"):
        return {"evaluation.every": "1 epoch"}
    if value in ("no", False):
        return {"evaluation.every": None}
    steps = context.get("eval_steps")
    return {"evaluation.every": steps} if steps is not None else _word("evaluation.every")


def _eval_epochs(value: object, context: Context) -> Meaning:
    return {"evaluation.every": f"{value} epoch{'' if value == 1 else 's'}"}


def _progress(shows: bool) -> Answer:
    return lambda value, context: {"monitor.progress": "auto" if value is shows else "plain"}


def _trackers(value: object, context: Context) -> Meaning:
    if value in ("none", False, None):
        return {"monitor.tensorboard": False}
    if value in ("tensorboard", "all", True):
        return {"monitor.tensorboard": True}
    return f"there is no {value} yet; `monitor.tensorboard` and metrics.jsonl are"


def _deterministic(value: object, context: Context) -> Meaning:
    return {"run.determinism": "default" if value is False else "deterministic"}


def _sequence_length(value: object, context: Context) -> Meaning:
    key = "max_length" if context.get("data.train.kind") == "huggingface" else "length"
    return {f"data.train.{key}": value} if value is not None else _word(f"data.train.{key}")


_COMPUTED: dict[str, Answer] = {
    **dict.fromkeys(("per_device_train_batch_size", "per_gpu_train_batch_size", "batch_size"), _batch),
    **dict.fromkeys(ACCUMULATION, _batch),
    **dict.fromkeys(
        ("max_grad_norm", "gradient_clip_val", "gradient_clipping", "clip_grad_norm", "grad_clip", "clip"), _clip
    ),
    **dict.fromkeys(("num_train_epochs", "max_epochs", "num_epochs", "n_epochs"), _length("epochs")),
    **dict.fromkeys(("max_steps", "max_train_steps", "total_steps", "num_training_steps"), _length("steps")),
    **dict.fromkeys(
        ("train_steps", "max_iters", "num_steps", "total_num_steps", "iters", "iterations"), _length("steps")
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), _betas),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_schedule", "schedule"), _curve),
    **dict.fromkeys(("optimizer", "optim", "optimizer_name", "optimizer_type"), _optimizer),
    **dict.fromkeys(("precision", "mixed_precision", "torch_dtype", "dtype", "amp"), _compute),
    **dict.fromkeys(("devices", "nproc_per_node", "num_gpus", "gpus"), _ranks),
    "fp16": _switch("fp16"),
    "bf16": _switch("bf16"),
    "initial_scale_power": _loss_scale,
    **dict.fromkeys(("strategy", "distributed_type", "accelerator", "parallel"), _strategy),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), _eval_strategy),
    **dict.fromkeys(("auto_wrap_policy", "fsdp_auto_wrap_policy"), _wrap_policy),
    **dict.fromkeys(
        (
            "fsdp_transformer_layer_cls_to_wrap",
            "transformer_layer_cls_to_wrap",
            "transformer_layer_cls",
            "module_classes_to_wrap",
        ),
        _wrapped,
    ),
    **dict.fromkeys(("reshard_after_forward", "fsdp_reshard_after_forward"), _reshard),
    "fsdp_sharding_strategy": _sharding,
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), _recomputing),
    **dict.fromkeys(("fsdp_activation_checkpointing", "use_activation_checkpointing"), _recomputing),
    **dict.fromkeys(("remat", "checkpoint_activations", "recompute"), _recomputing),
    **dict.fromkeys(("cpu", "use_cpu", "no_cuda"), _on_cpu),
    **dict.fromkeys(("min_lr", "final_lr"), _final_rate),
    "quiet": lambda value, context: {"monitor.progress": "auto" if value is False else "none"},
    **dict.fromkeys(("enable_gradient_checkpointing", "use_gradient_checkpointing"), _recomputing),
    "check_val_every_n_epoch": _eval_epochs,
    "disable_tqdm": _progress(False),
    "enable_progress_bar": _progress(True),
    **dict.fromkeys(("report_to", "logger", "trackers", "log_with"), _trackers),
    **dict.fromkeys(("deterministic", "full_determinism"), _deterministic),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "seq_len", "seq_length", "block_size"), _sequence_length),
    **dict.fromkeys(("sequence_length", "context_length"), _sequence_length),
}

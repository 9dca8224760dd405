"""Words of scripts, HF Trainer and Accelerate that need no counterpart here, and those that have none.

    logging_nan_inf_filter    not needed   a NaN is never averaged: its update is discarded
    neftune_noise_alpha       not there    noise on embeddings is a matter of the model
    train_file                to do        lockstep data prepare FILE --output FOLDER, then data.train: ...

What is merely renamed or computed stands in `foreign_words`; a word is in one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

_NOT_NEEDED: dict[str, tuple[str, ...]] = {
    "training keeps no cache of keys and values": ("use_cache",),
    "it costs time to save memory, and changes no result": ("torch_empty_cache_steps", "empty_cache_every"),
    "the first update is always recorded": ("logging_first_step",),
    "the first rank speaks for all": ("log_on_each_node",),
    "a NaN is never averaged: its update is discarded, and said": ("logging_nan_inf_filter",),
    "tokens and samples are counted in any case": (
        "include_num_input_tokens_seen", "include_tokens_per_second", "log_throughput",
    ),
    "messages have no levels here": ("log_level", "log_level_replica", "logging.level", "verbose", "verbosity"),
    "parameters are counted when a run starts": ("enable_model_summary",),
    "evaluation adds up sums per sample, so that nothing has to be gathered": (
        "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps",
        "batch_eval_metrics", "inference_mode",
    ),
    "`lockstep eval` and `lockstep generate` judge a run's model at any time": (
        "limit_test_batches", "limit_predict_batches",
    ),
    "a checkpoint holds all that a run needs to go on; `lockstep export` writes the model alone": (
        "save_only_model", "save_optimizer", "save_optimizer_state", "save_scheduler",
    ),
    "checkpoints come at every checkpoint.every, whatever an evaluation says; checkpoint.best keeps the best besides": (
        "always_save_checkpoint",
    ),
    "signals are always heard: the run saves and leaves with exit code 75": ("enable_jit_checkpoint",),
    "the next sample is arithmetic: nothing is skipped through": ("ignore_data_skip",),
    "there are no callbacks with state": ("restore_callback_states_from_checkpoint",),
    "samples are cut evenly by arithmetic; batches are neither split nor repeated to fill up": (
        "even_batches", "dispatch_batches", "use_seedable_sampler", "non_blocking", "sync_with_dataloader",
        "adjust_scheduler",
    ),
    "workers of the loader give samples in order": ("dataloader_in_order",),
    "samples are not sorted by length, so no column of lengths is read": ("length_column_name",),
    "padding counts for nothing, however long it is": ("pad_to_max_length",),
    "buffers are the first rank's when they are saved or judged": ("ddp_broadcast_buffers", "broadcast_buffers"),
    "verbs say what is done: lockstep train, lockstep eval": (
        "do_train", "do_eval", "do_predict", "do_test", "mode", "eval_only", "test_only",
    ),
    "a run without early stopping is as long as it says": ("min_epochs", "min_steps"),
    "whoever starts the ranks says it, by environment variables": (
        "local_rank", "rank", "node_rank", "machine_rank", "master_addr", "main_process_ip", "init_method",
        "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "same_network", "main_training_function",
        "compute_environment", "deepspeed_hostfile", "deepspeed_multinode_launcher", "deepspeed_inclusion_filter",
        "deepspeed_exclusion_filter", "mpirun_config", "mpirun_hostfile", "mpirun_ccl", "commands", "command_file",
    ),
    "its library has given it up": (
        "fp16_backend", "half_precision_backend", "fp16_opt_level", "ray_scope", "jit_mode_eval", "use_ipex", "ipex",
        "use_mps_device", "eval_use_ipex",
    ),
    "text becomes tokens as it is read, or once (lockstep data prepare), and what was made is kept by its library": (
        "preprocessing_num_workers", "overwrite_cache", "download",
    ),
    "the loader of transformers is always frugal here: a model is made without memory where it is divided": (
        "low_cpu_mem_usage", "zero3_init_flag", "fsdp_init_on_meta",
    ),
    "a run always leaves whole weights": ("zero3_save_16bit_model", "fsdp_full_state_dict"),
    "gradients are set to none after each update": ("zero_grad_set_to_none", "set_to_none"),
    "metrics.jsonl has the gradient's norm, the rate and the speed in any case": (
        "flush_logs", "log_grad_norm", "log_lr", "benchmark_steps",
    ),
    "it is a remark": ("comment", "_comment", "comments", "$schema", "description", "notes", "tags", "tag"),
}  # fmt: skip
"""What is asked for holds in any case, or nothing is lost that a run leaves."""

_NOT_THERE: dict[str, tuple[str, ...]] = {
    "metrics.jsonl and TensorBoard are written; other trackers are not there yet": (
        "wandb", "use_wandb", "wandb_log", "wandb_project", "wandb_entity", "wandb_run_name", "wandb_run_id",
        "wandb_mode", "wandb_name", "mlflow", "use_mlflow", "comet", "project", "trackio_space_id",
        "trackio_bucket_id", "trackio_static_space_id", "model_registry", "enable_autolog_hparams",
    ),
    "the hub is never written to; `lockstep export` writes a folder that its own tools upload": (
        "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push",
        "hub_revision", "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token",
    ),
    "a loss is always the mean over all valid targets of the update, on all ranks": ("average_tokens_across_devices",),
    "a micro-batch that doesn't fit in memory isn't tried again smaller; write a batch.micro_size that fits": (
        "auto_find_batch_size",
    ),
    "the newest revision is loaded; for another write its folder as model.pretrained": ("model_revision", "revision"),
    "lines come at every monitor.every steps": ("logging_strategy",),
    "evaluations come at every evaluation.every, from the first on": ("eval_delay",),
    "the first evaluation comes at evaluation.every, after training has begun": (
        "eval_on_start", "num_sanity_val_steps",
    ),
    "weights are written as safetensors": ("save_safetensors",),
    "one checkpoint is written by all ranks together, into a folder that all can see": ("save_on_each_node",),
    "workers of the loader are started in torch's usual way": ("dataloader_multiprocessing_context",),
    "what isn't finite is discarded with its update; where it came from isn't traced": ("debug", "detect_anomaly"),
    "training isn't profiled": ("profiler", "profile"),
    "a run that fails isn't started again by itself": ("max_restarts",),
    "ranks aren't bound to cores": ("enable_cpu_affinity", "enable_numa_affinity"),
    "TPUs are not there": (
        "downcast_bf16", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_num_cores", "tpu_metrics_debug", "tpu_name",
        "tpu_zone", "tpu_vm", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings",
    ),
    "its library has given it up; write parallel.strategy: fsdp": ("sharded_ddp", "mp_parameters"),
    "hidden states of earlier batches are not handed on": ("past_index",),
    "its library has given it up; write model.compile: true": ("torchdynamo",),
    "tokenizers are the fast ones where there are any": ("use_fast_tokenizer", "use_fast"),
    "text is read with its line breaks": ("keep_linebreaks",),
    "gradients are clipped by their norm, not by value": ("gradient_clip_algorithm", "clip_grad_value"),
    "cuDNN chooses kernels as torch leaves it to": ("benchmark", "cudnn_benchmark"),
    "the order of samples is Lockstep's own": ("use_distributed_sampler", "replace_sampler_ddp"),
    "a data set is opened once": ("reload_dataloaders_every_n_epochs",),
    "a run ends by its length; no clock ends it": ("max_time", "max_train_time"),
    "there are no plugins": ("plugins", "barebones"),
    "there are no callbacks: `for report in session` gives a custom loop the report of each update": ("callbacks",),
    "the model's kernels are not replaced; leave it out": ("use_liger_kernel", "liger_kernel_config"),
    "noise on embeddings would be a matter of the model: write one of your own": ("neftune_noise_alpha",),
    "the optimizer has no further options of that kind; optim has all there are": (
        "optim_args", "optim_target_modules", "foreach", "amsgrad", "maximize", "dampening", "lr_decay",
    ),
    "experts have no axis of their own yet; others are `parallel.pipeline`, `tensor`, `context`, `shard` and `data`": (
        "parallelism_config", "megatron_lm_config", "cp_size", "context_parallel_size", "sp_size",
        "sequence_parallel_size", "expert_parallel_size", "dp_shard_size", "dp_replicate_size",
    ),
    "8-bit arithmetic is not there yet": (
        "fp8_config", "fp8", "load_in_8bit", "load_in_4bit", "quantization_config",
        "quantization", "quantize",
    ),
    "adapters are not there yet": ("lora", "peft", "lora_config", "peft_config", "use_lora", "use_peft", "lora_r"),
    "a batch that is split among the ranks would be the global one: write batch.global_size": ("split_batches",),
    "samples are taken in an order that is random or the set's own: data.shuffle": ("group_by_length",),
    "memory is not measured; `lockstep plan` says what the state takes": (
        "log_memory", "profile_memory", "track_memory",
    ),
    "an average of weights is not there yet": ("ema", "use_ema", "ema_decay", "swa"),
    "a run ends by its length; stopping early is not there yet": (
        "early_stopping", "early_stopping_patience", "patience",
    ),
    "a rate that falls in steps is not there; schedule.kind is constant, linear, cosine or warmup-stable-decay": (
        "gamma", "lr_gamma", "step_size", "lr_step_size", "milestones", "lr_milestones",
    ),
    "only cosine curves of half a period, linear and constant ones are there": ("num_cycles", "power", "lr_end"),
    "AWS SageMaker's launcher is not there": ("ec2_instance_type", "image_uri", "iam_role_name", "sagemaker"),
}  # fmt: skip

_TO_DO: dict[str, tuple[str, ...]] = {
    "turn text into tokens once (lockstep data prepare FILE --output FOLDER), then write "
    "data.train: {kind: tokens, folder: FOLDER}": (
        "train_file", "train_files", "validation_file", "eval_file", "test_file", "data_path", "data_dir", "train_path",
        "val_path", "validation_path", "eval_path", "data_folder", "dataset_path", "data_files", "train_data",
        "eval_data", "val_data",
    ),
    "write a slice of the split, such as data.train.split: train[:1000]": (
        "max_train_samples", "max_eval_samples", "max_samples", "validation_split_percentage", "train_samples",
    ),
    "an evaluation goes over all of its set; for a part write a slice, such as "
    "data.evaluation.NAME.split: validation[:1000]": (
        "eval_iters", "val_iters", "eval_batches", "val_batches", "max_eval_batches", "limit_val_batches",
    ),
    "it is said when the run is started: --from CHECKPOINT; the same run goes on by itself in its run.folder": (
        "resume_from_checkpoint", "resume_from", "resume_path", "ckpt_path", "resume", "auto_resume",
    ),
    "a run goes on in a folder that has one; --fresh begins anew, and puts aside what is there": (
        "overwrite_output_dir",
    ),
    "start one process a rank with torchrun on every machine; lockstep starts those of one": (
        "num_nodes", "nnodes", "num_machines",
    ),
    "start it with CUDA_VISIBLE_DEVICES, which says which GPUs": ("gpu_ids",),
    "start it with OMP_NUM_THREADS, which says it": ("num_cpu_threads_per_process",),
    "start it with HF_TOKEN, which the hub's library reads": ("use_auth_token", "token"),
    "start it with HF_HOME, which says where the hub's library keeps what it has fetched": (
        "cache_dir", "hf_cache_dir",
    ),
    "write model.architecture.attn_implementation: flash_attention_2, if its package is there": (
        "use_flash_attention", "flash_attention", "use_flash_attn",
    ),
    "your objective's metric_sums and metrics say what is judged, and see the batch": (
        "include_for_metrics", "include_inputs_for_metrics",
    ),
    "your own Dataset gives what your model reads": ("remove_unused_columns",),
    "write run.steps, and a slice of the split such as data.train.split: train[:1000]": (
        "fast_dev_run", "overfit_batches", "limit_train_batches",
    ),
    "write parallel.fsdp.reduce_every: micro-batch": ("sync_each_batch",),
    "it is another word for gradient_accumulation_steps: write that": (
        "gradient_accumulation_kwargs", "gradient_accumulation_plugin",
    ),
    "your own Dataset gets it, by data.train.arguments": ("root", "data_root", "transform", "transforms", "augment"),
    "name the column as data.train.label (huggingface), or let your Dataset give the target last": ("label_names",),
    "write run.end_with: best, and checkpoint.best: SET.METRIC for a set of data.evaluation": (
        "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "save_best", "save_best_only",
        "monitor_metric",
    ),
    "it is said on the command line, for every run anew: --trust-remote-code": ("trust_remote_code",),
    "write memory.activation_checkpointing.mode: full if the script calls DeepSpeed's functions for it": (
        "partition_activations", "cpu_checkpointing",
    ),
    "an own model or data set goes in as {kind: custom, target: 'file.py:Name', arguments: {...}}": (
        "model_class", "model_args", "model_kwargs", "dataset_class", "dataset_args", "input_size", "input_dim",
        "output_size", "output_dim", "num_samples", "dataset_size", "train_size", "val_size", "image_size",
    ),
}  # fmt: skip

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("average_tokens_across_devices", "save_safetensors", "use_fast_tokenizer", "use_fast", "keep_linebreaks",
         "remove_unused_columns", "use_distributed_sampler", "replace_sampler_ddp"),
        (True,),
    ),
    **dict.fromkeys(("eval_delay", "max_restarts", "reload_dataloaders_every_n_epochs"), (0, 0.0)),
    "logging_strategy": ("steps", "no", False),
    "hub_strategy": ("every_save",),
    "hub_token": ("<HUB_TOKEN>",),
    "push_to_hub_token": ("<PUSH_TO_HUB_TOKEN>",),
    "project": ("huggingface",),
    "wandb_mode": ("disabled",),
    "model_revision": ("main",),
    "revision": ("main",),
    "past_index": (-1,),
    "num_sanity_val_steps": (0,),
    "dataloader_multiprocessing_context": ("fork",),
    "gradient_clip_algorithm": ("norm",),
    "gpu_ids": ("all",),
    "limit_train_batches": (1.0,),
    "fast_dev_run": (False, 0),
    **dict.fromkeys(
        ("resume_from_checkpoint", "resume_from", "resume_path", "ckpt_path", "resume", "auto_resume"),
        (True, False, "", "latest", "last", "auto"),
    ),
    "debug": (False, "", []),
}  # fmt: skip
"""Of words that something is lost or to do of: the values that ask for nothing, where they are others than usual."""

OF_SWITCH: Mapping[str, tuple[str, ...]] = {
    **{word: ("push_to_hub",) for words in _NOT_THERE.values() for word in words if word.startswith("hub_")},
    **dict.fromkeys(
        ("wandb_project", "wandb_entity", "wandb_run_name", "wandb_mode", "wandb_name", "wandb"),
        ("use_wandb", "wandb_log", "wandb.enabled"),
    ),
}
"""What asks for nothing while one of these switches is off."""
_OFF_UNLESS_SAID = ("push_to_hub",)


def switched_off(word: str, value_of: Callable[[str], object]) -> str | None:
    """The switch that is off, of which the word is a part."""
    for switch in OF_SWITCH.get(word, ()):
        value = value_of(switch)
        if value is False or (value is None and switch in _OFF_UNLESS_SAID):
            return switch
    return None


NOT_NEEDED: Mapping[str, str] = {word: why for why, words in _NOT_NEEDED.items() for word in words}
NOT_THERE: Mapping[str, str] = {word: why for why, words in _NOT_THERE.items() for word in words}
TO_DO: Mapping[str, str] = {word: why for why, words in _TO_DO.items() for word in words}

OWN: Mapping[str, str] = {
    **{word: f"optim.{word}" for word in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "clip_norm")},
    **{word: f"schedule.{word}" for word in ("warmup_steps", "warmup_ratio", "decay_ratio", "final_ratio")},
    **{word: f"run.{word}" for word in ("seed", "steps", "samples", "tokens", "epochs")},
    **{word: f"data.{word}" for word in ("shuffle", "drop_last")},
    **{word: f"data.loader.{word}" for word in ("workers", "pin_memory", "persistent_workers")},
    **{word: f"launch.{word}" for word in ("backend", "timeout", "device")},
    **{word: f"precision.{word}" for word in ("tf32",)},
    **{word: f"checkpoint.{word}" for word in ("keep_last", "asynchronous")},
    **{
        word: f"parallel.ddp.{word}"
        for word in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_mb", "sync_batchnorm")
    },
    **{word: f"parallel.fsdp.{word}" for word in ("forward_prefetch", "cpu_offload", "min_num_params", "reduce_every")},
    **{
        word: f"parallel.fsdp.mixed_precision.{word}"
        for word in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "cast_forward_inputs")
    },
    "zero_stage": "parallel.deepspeed.zero_stage",
    "label_smoothing": "objective.label_smoothing",
    "freeze": "model.freeze",
    "dropout": "model.dropout",
    "compile": "model.compile",
    "ddp_static_graph": "parallel.ddp.static_graph",
}
"""Words that many tools share with us, wherever in a file they stand."""

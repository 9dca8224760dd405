"""Words of scripts, HF Trainer and Accelerate that need no counterpart here, and those that have none.

    logging_nan_inf_filter    not needed   a NaN is never averaged: its update is discarded
    neftune_noise_alpha       not there    noise on embeddings is a matter of the model
    train_file                to do        lockstep data prepare FILE --output FOLDER, then data.train: ...

What is merely renamed or computed stands in `foreign_words`; a word is in one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping

_NOT_NEEDED: dict[str, tuple[str, ...]] = {
    "a loss is always the mean over all valid targets of the update, on all ranks": ("average_tokens_across_devices",),
    "evaluation computes in precision.compute, as training does": ("bf16_full_eval", "fp16_full_eval"),
    "training keeps no cache of keys and values": ("use_cache",),
    "it costs time to save memory, and changes no result": ("torch_empty_cache_steps", "empty_cache_every"),
    "batch.micro_size can be lowered at any time without making another run of it": ("auto_find_batch_size",),
    "monitor.every says how often, counted in steps": ("logging_strategy",),
    "every line stands at a multiple of monitor.every": ("logging_first_step",),
    "the first rank speaks for all": ("log_on_each_node",),
    "a NaN is never averaged: its update is discarded, and said": ("logging_nan_inf_filter",),
    "tokens and samples are counted in any case": (
        "include_num_input_tokens_seen", "include_tokens_per_second", "log_throughput",
    ),
    "messages have no levels here": ("log_level", "log_level_replica", "logging.level", "verbose", "verbosity"),
    "a run is called after its recipe and the time; run.folder names its folder": (
        "run_name", "experiment_name", "exp_name", "job_name", "project_name",
    ),
    "metrics.jsonl and TensorBoard are written; other trackers are not there": (
        "wandb", "use_wandb", "wandb_log", "wandb_project", "wandb_entity", "wandb_run_name", "wandb_run_id",
        "wandb_mode", "wandb_name", "mlflow", "comet", "project", "trackio_space_id", "trackio_bucket_id",
        "trackio_static_space_id",
    ),
    "the hub is never written to": (
        "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push",
        "hub_revision", "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token",
    ),
    "evaluations come at every evaluation.every, from the first on": ("eval_delay",),
    "`lockstep eval` judges a model at any time": ("eval_on_start",),
    "evaluation adds up sums per sample, so that nothing has to be gathered": (
        "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps",
        "include_for_metrics", "include_inputs_for_metrics", "batch_eval_metrics",
    ),
    "a checkpoint holds all that a run needs to go on; `lockstep export` writes the model alone": (
        "save_only_model", "save_safetensors", "save_optimizer", "save_optimizer_state", "save_scheduler",
    ),
    "checkpoints come at every checkpoint.every, whatever an evaluation says; checkpoint.best keeps the best besides": (
        "always_save_checkpoint",
    ),
    "one checkpoint is written by all ranks together": ("save_on_each_node",),
    "signals are always heard: the run saves and leaves with exit code 75": ("enable_jit_checkpoint",),
    "the next sample is arithmetic: nothing is skipped through": ("ignore_data_skip",),
    "there are no callbacks with state": ("restore_callback_states_from_checkpoint",),
    "samples are cut evenly by arithmetic; batches are neither split nor repeated to fill up": (
        "even_batches", "dispatch_batches", "use_seedable_sampler", "non_blocking", "gradient_accumulation_kwargs",
        "sync_with_dataloader", "sync_each_batch", "adjust_scheduler",
    ),
    "workers of the loader are started in torch's usual way, and give samples in order": (
        "dataloader_multiprocessing_context", "dataloader_in_order",
    ),
    "columns that nobody reads are never fetched": ("remove_unused_columns",),
    "samples are not sorted by length, so no column of lengths is read": ("length_column_name",),
    "buffers are the first rank's when they are saved or judged": ("ddp_broadcast_buffers", "broadcast_buffers"),
    "every gradient is judged, and what isn't finite is discarded": ("debug", "detect_anomaly"),
    "verbs say what is done: lockstep train, lockstep eval": (
        "do_train", "do_eval", "do_predict", "do_test", "mode", "eval_only", "test_only",
    ),
    "whoever starts the ranks says it, by environment variables": (
        "local_rank", "rank", "node_rank", "machine_rank", "master_addr", "main_process_ip", "init_method",
        "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "same_network", "main_training_function",
        "compute_environment",
        "deepspeed_hostfile", "deepspeed_multinode_launcher", "deepspeed_inclusion_filter",
        "deepspeed_exclusion_filter", "mpirun_hostfile", "mpirun_ccl", "gpu_ids", "num_cpu_threads_per_process",
        "commands", "command_file", "tpu_name", "tpu_zone", "max_restarts",
    ),
    "it is of TPUs": (
        "downcast_bf16", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_num_cores", "tpu_metrics_debug", "xla",
        "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings",
    ),
    "the operating system places the ranks": ("enable_cpu_affinity", "enable_numa_affinity"),
    "its library has given it up": (
        "fp16_backend", "half_precision_backend", "fp16_opt_level", "sharded_ddp", "mp_parameters", "past_index",
        "ray_scope", "torchdynamo", "jit_mode_eval", "use_ipex", "ipex", "use_mps_device", "eval_use_ipex",
    ),
    "text becomes tokens as it is read, or once (lockstep data prepare), and the hub's cache is the hub's": (
        "preprocessing_num_workers", "overwrite_cache", "use_fast_tokenizer", "use_fast", "cache_dir", "hf_cache_dir",
        "model_revision", "use_auth_token", "token", "download", "keep_linebreaks", "pad_to_max_length",
    ),
    "the model's attention is chosen by its library": ("attn_implementation", "use_flash_attention", "flash_attention"),
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

_NOT_THERE: dict[str, tuple[str, ...]] = {
    "the model's kernels are not replaced; leave it out": ("use_liger_kernel", "liger_kernel_config"),
    "noise on embeddings would be a matter of the model: write one of your own": ("neftune_noise_alpha",),
    "the optimizer has no further options of that kind; optim has all there are": (
        "optim_args", "optim_target_modules", "foreach", "amsgrad", "maximize", "dampening", "lr_decay",
    ),
    "experts have no axis of their own yet; others are `parallel.pipeline`, `tensor`, `context`, `shard` and `data`": (
        "parallelism_config", "megatron_lm_config", "cp_size", "context_parallel_size", "sp_size",
        "sequence_parallel_size", "expert_parallel_size", "dp_shard_size", "dp_replicate_size",
    ),
    "8-bit arithmetic is not there yet": ("fp8_config", "fp8", "load_in_8bit", "load_in_4bit", "quantization_config"),
    "adapters are not there yet": ("lora", "peft", "lora_config", "peft_config", "use_lora", "use_peft", "lora_r"),
    "a batch that is split among the ranks would be the global one: write batch.global_size": ("split_batches",),
    "samples are taken in an order that is random or the set's own: data.shuffle": ("group_by_length",),
    "memory is not measured; `lockstep plan` says what the state takes": (
        "log_memory", "profile_memory", "track_memory",
    ),
    "an average of weights is not there yet": ("ema", "use_ema", "ema_decay", "swa"),
    "a run ends by its length; stopping early is not there yet": ("early_stopping", "early_stopping_patience"),
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

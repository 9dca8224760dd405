"""DeepSpeed's own words: which keys its config has, and why some of them are not taken.

    handed on     DeepSpeed does it, as asked
    one value     it does it in one way here, for the reason given
    refused       something of Lockstep's does it, or it would make another run of it

Every key that DeepSpeed 0.19 reads is in here or compared in `deepspeed`; a key that is in neither is misspelt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HANDED_ON = (
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "log_level",
    "comms_logger",
    "flops_profiler",
    "disable_python_gc",
    "vocabulary_size",
)
"""What DeepSpeed says and measures of itself."""

ZERO_HANDED_ON = (
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "memory_efficient_linear",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "leaf_module",
)

ONE_VALUE: Mapping[str, tuple[Any, str]] = {
    "communication_data_type": ("fp32", "gradients are summed in fp32, so that the run is the single process's"),
    "prescale_gradients": (False, "a gradient is divided once, by the count of the whole update"),
    "gradient_predivide_factor": (1.0, "a gradient is divided once, by the count of the whole update"),
    "gradient_allreduce_op": ("mean", "the loss is scaled for a mean over the ranks"),
    "sparse_gradients": (False, "sparse gradients have no whole norm to clip by"),
    "disable_allgather": (False, "every rank needs the parameters that the others have updated"),
    "zero_force_ds_cpu_optimizer": (False, "updates are made by torch's optimizer, whose state any strategy can read"),
    "managed_gradient_accumulation": (True, "Lockstep says which micro-batch is an update's last"),
}
"""The value that is taken, and why."""

ZERO_ONE_VALUE: Mapping[str, tuple[Any, str]] = {
    "round_robin_gradients": (False, "DeepSpeed's map of partitions, by which state is saved, doesn't follow it"),
    "parameter_alignment": (False, "flat parts have no gaps here"),
    "compute_grad_norm": (True, "DeepSpeed takes its own norm of what is already clipped"),
    "ignore_unused_parameters": (True, "Lockstep itself refuses a parameter that no gradient reaches"),
    "legacy_stage1": (False, "DeepSpeed has given it up"),
    "elastic_checkpoint": (False, "Lockstep's checkpoints load on any number of ranks"),
    "load_from_fp32_weights": (True, "Lockstep's checkpoints hold fp32 values"),
    "stage3_gather_16bit_weights_on_model_save": (True, "a run always leaves whole weights"),
    "gather_16bit_weights_on_model_save": (True, "a run always leaves whole weights"),
    "stage3_gather_fp16_weights_on_model_save": (True, "a run always leaves whole weights"),
    "zero_hpz_partition_size": (1, "a second division of parameters has not been tried here"),
    "zero_quantized_weights": (False, "it loses bits of each parameter"),
    "zero_quantized_nontrainable_weights": (False, "it loses bits of each parameter"),
    "zero_quantized_gradients": (False, "it loses bits of each gradient"),
    "pipeline_loading_checkpoint": (False, "Lockstep loads checkpoints"),
    "save_muon_momentum_buffer_in_memory": (False, "muon needs whole matrices, which DeepSpeed divides"),
    "mics_shard_size": (-1, "a division within groups of ranks is fsdp's HYBRID_SHARD"),
    "mics_hierarchical_params_gather": (False, "a division within groups of ranks is fsdp's HYBRID_SHARD"),
}  # fmt: skip

REFUSED: Mapping[str, str] = {
    "tensorboard": "Lockstep writes its own: monitor.tensorboard",
    "wandb": "Lockstep writes metrics.jsonl and TensorBoard",
    "csv_monitor": "Lockstep writes metrics.jsonl",
    "comet": "Lockstep writes metrics.jsonl and TensorBoard",
    "amp": "apex's mixed precision is not here; precision.compute is",
    "torch_autocast": "precision.compute says in which arithmetic, under every strategy",
    "checkpoint": "the section checkpoint says when and where state is saved",
    "data_efficiency": "the order of samples is a function of the seed here",
    "curriculum_learning": "the order of samples is a function of the seed here",
    "data_types": "gradients are accumulated in fp32",
    "elasticity": "batch.global_size holds on any number of ranks",
    "autotuning": "it starts runs by itself; batch.micro_size is the machine's business",
    "compression_training": "it makes another model of it",
    "weight_quantization": "it makes another model of it",
    "quantize_training": "it makes another model of it",
    "progressive_layer_drop": "it makes another model of it",
    "eigenvalue": "it is of quantised training",
    "sparse_attention": "it makes another model of it",
    "hybrid_engine": "it is for generating in between, as reinforcement learning does",
    "pipeline": "pipelines are not of DeepSpeed here",
    "tensor_parallel": "tensor parallelism is not of DeepSpeed here",
    "expert_parallel": "expert parallelism is not there yet",
    "use_data_before_expert_parallelism": "expert parallelism is not there yet",
    "sequence_parallel_size": "sequence parallelism is not of DeepSpeed here",
    "data_parallel_size": "all ranks share the data here",
    "seq_parallel_communication_data_type": "sequence parallelism is not of DeepSpeed here",
    "compile": "model.compile says whether the model is compiled",
    "datastates_ckpt": "the section checkpoint says how state is saved",
    "nebula": "the section checkpoint says how state is saved",
    "aio": "it is for NVMe, which is refused: see parallel.deepspeed.offload_optimizer",
    "timers": "Lockstep measures throughput itself",
}
"""A section that says `enabled: false`, or nothing, asks for nothing, and is taken."""

ZERO_REFUSED: Mapping[str, str] = {
    "cpu_offload": 'it is an old word: write "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_params": 'it is an old word: write "offload_param": {"device": "cpu"}',
    "cpu_offload_param": 'it is an old word: write "offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": 'it is an old word: write "pin_memory": true in offload_optimizer or offload_param',
    "zenflow": "it updates some parameters later than others",
}

OFFLOAD_OF_NVME = (
    "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init",
)  # fmt: skip
OFFLOAD_ONE_VALUE: Mapping[str, tuple[Any, str]] = {
    "ratio": (1.0, "either all optimizer state is offloaded or none"),
    "super_offload": (False, "it has an optimizer of its own"),
}

SCHEDULER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {"warmup_num_steps": 1000, "warmup_type": "log", "warmup_max_lr": 0.001},
    "WarmupCosineLR": {"warmup_num_steps": 1000, "warmup_type": "log", "cos_min_ratio": 0.0001},
}
"""By type: what its params are where the file leaves them out, and the run would be another."""

ACTIVATIONS: Mapping[str, str] = {
    "partition_activations": "it divides what blocks keep among tensor-parallel ranks, and DeepSpeed has one here",
    "cpu_checkpointing": "block inputs stay on the device; on a GPU memory.activation_offload: cpu moves them to the "
    "host",
    "contiguous_memory_optimization": "it is a layout in memory, and changes no result",
    "number_checkpoints": "it is the size of contiguous_memory_optimization's buffer",
    "synchronize_checkpoint_boundary": "it is for timing, and changes no result",
}
"""Of its activation checkpointing, beside `memory.activation_checkpointing`, which does it: what becomes of each."""

COMPARED = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "zero_optimization", "activation_checkpointing",
    "dataloader_drop_last", "zero_allow_untested_optimizer",
)  # fmt: skip
"""What our config says too."""

TOP = frozenset((*COMPARED, *HANDED_ON, *ONE_VALUE, *REFUSED))
"""Every key that stands outside a section."""

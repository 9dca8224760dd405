"""DeepSpeed configs: what agrees is accepted, every contradiction is refused with both values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import deepspeed_check
from lockstep.config.deepspeed import engine_config, not_carried_out
from lockstep.config.deepspeed_check import Derived, check, check_alone
from lockstep.config.deepspeed_keys import deepspeed_keys, keys_of
from lockstep.config.loading import load, validate
from lockstep.core.errors import ConfigError

DERIVED = Derived(ranks=2, micro_size=4, accumulation=2, steps=100, trainable=1000)


def config(given: Any = None, zero: dict[str, Any] | None = None, **sections: Any) -> Any:
    parallel = {"strategy": "deepspeed", "deepspeed": {"config": given, **(zero or {})}}
    plain = {
        "model": {"kind": "transformer"},
        "data": {"train": {"kind": "stdlib-text"}},
        "batch": {"global_size": 16},
        "precision": {"compute": "fp32"},
        "run": {"steps": 100},
        "parallel": parallel,
        **sections,
    }
    return validate(plain).config


def config_set_by_user(given: Any, zero: dict[str, Any] | None = None, **sections: Any) -> Any:
    """Return a config with every key set."""
    whole = config(None, zero, **sections).model_dump()
    whole["parallel"]["deepspeed"]["config"] = given
    return validate(whole).config


def refusal(given: Any, zero: dict[str, Any] | None = None, **sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check(config_set_by_user(given, zero, **sections), DERIVED)
    return str(error.value).replace("parallel.deepspeed.config.", "")


USUAL = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
            "cos_min_ratio": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 10000,
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "tensorboard": {"enabled": False},
}
OFFLOADED = {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "pin_memory": True}


def test_a_usual_config_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(USUAL))
    for given in (USUAL, str(path)):
        assert engine_config(config(given, OFFLOADED), DERIVED) == {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "timers": {"throughput": {"enabled": False}},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 1000,
                "contiguous_gradients": True,
                "overlap_comm": True,
                "sub_group_size": 1e9,
                "stage3_param_persistence_threshold": 10000,
                "stage3_max_live_parameters": 1e9,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
            },
        }


GUIDES = {
    "train_batch_size": "auto",
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 20}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "bf16": {"enabled": True},
    "activation_checkpointing": {"partition_activations": True},
}


def test_what_the_user_leaves_at_defaults_is_taken_from_deepspeeds_config(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(GUIDES))
    for given in (GUIDES, str(path)):
        taken = config(given, precision={})
        check(taken, DERIVED)
        optim, schedule, zero = taken.optim, taken.schedule, taken.parallel.deepspeed
        assert (optim.lr, optim.betas, optim.eps, optim.weight_decay, optim.clip_norm) == (
            config().optim.lr, (0.9, 0.95), 1e-7, 0.1, 0.5,
        )  # fmt: skip
        assert (schedule.kind, schedule.warmup_steps, schedule.warmup_type) == ("linear", 20, "log")
        assert (zero.zero_stage, zero.offload_optimizer, zero.pin_memory) == (3, "cpu", True)
        assert taken.precision.compute == "bf16"
        assert taken.memory.activation_checkpointing.mode == "full"


def test_a_runs_config_reads_no_file_of_deepspeed_before_it_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(GUIDES))
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    sections = {"model": {"kind": "transformer"}, "data": {"train": {"kind": "stdlib-text"}}, "run": {"steps": 1}}
    parallel = {"strategy": "deepspeed", "deepspeed": {"config": str(tmp_path / "ds.json")}}
    for folder, stage in ((tmp_path, 3), (run, 2)):
        path = folder / "config.yaml"
        path.write_text(json.dumps({**sections, "batch": {"global_size": 16}, "parallel": parallel}))
        assert load([path]).config.parallel.deepspeed.zero_stage == stage


def test_a_key_that_the_user_has_set_and_that_differs_is_refused_by_name() -> None:
    set_by_user = {"optim": {"betas": [0.9, 0.99]}, "schedule": {"warmup_ratio": 0.5}, "precision": {"compute": "fp32"}}
    with pytest.raises(ConfigError) as error:
        check(config(GUIDES, {"zero_stage": 2}, **set_by_user), DERIVED)
    refused = [problem.key.removeprefix("parallel.deepspeed.config.") for problem in error.value.problems]
    assert refused == [
        "optimizer.params.betas", "scheduler.params.warmup_num_steps", "zero_optimization.stage", "bf16.enabled",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        config({"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}})


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "global batch": (
        {"train_batch_size": 64},
        'train_batch_size: 64, but batch.global_size is 16; write `batch.global_size: 64`, or "auto" here',
    ),
    "micro-batch": (
        {"train_micro_batch_size_per_gpu": 8},
        'train_micro_batch_size_per_gpu: 8, but batch.micro_size is 4; write `batch.micro_size: 8`, or "auto" here',
    ),
    "accumulation": (
        {"gradient_accumulation_steps": 4},
        'gradient_accumulation_steps: 4, but it is 2 here; write `batch.micro_size: 2`, or "auto" here',
    ),
    "clipping": (
        {"gradient_clipping": 0.5},
        'gradient_clipping: 0.5, but optim.clip_norm is 1.0; write `optim.clip_norm: 0.5`, or "auto" here',
    ),
    "no clipping": (
        {"gradient_clipping": 0},
        'gradient_clipping: 0, but optim.clip_norm is 1.0; write `optim.clip_norm: null`, or "auto" here',
    ),
    "optimizer": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        'optimizer.type: "SGD", but optim.name is adamw; write `optim.name: sgd`, or "auto" here\n'
        'optimizer.params.lr: 0.1, but optim.lr is 0.001; write `optim.lr: 0.1`, or "auto" here',
    ),
    "an Adam that is not AdamW": (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "betas": [0.9, 0.95]}}},
        'optimizer.type: "Adam", but optim.name is adamw; write `optim.name: adam`, or "auto" here\n'
        "optimizer.params.betas: [0.9, 0.95], but optim.betas is [0.9, 0.999]; write `optim.betas: [0.9, 0.95]`, or "
        '"auto" here',
    ),
    "an optimizer that is not there": (
        {"optimizer": {"type": "OneBitAdam"}},
        "optimizer.type: OneBitAdam is not supported; `optim.name` is adamw, adam, sgd or lion",
    ),
    "schedule": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "warmup_type": "log"}}},
        'scheduler.type: "WarmupDecayLR", but schedule.kind is cosine; write `schedule.kind: linear`, or "auto" here\n'
        "scheduler.params.warmup_num_steps: 10, but schedule.warmup_steps is 0; write `schedule.warmup_steps: 10`, "
        'or "auto" here\n'
        'scheduler.params.warmup_type: "log", but schedule.warmup_type is linear; write '
        '`schedule.warmup_type: log`, or "auto" here',
    ),
    "what a scheduler leaves to DeepSpeed": (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}},
        "scheduler.params.warmup_num_steps: not given, so DeepSpeed takes 1000, but schedule.warmup_steps is 0; "
        'write `schedule.warmup_steps: 1000`, or "auto" here\n'
        "scheduler.params.cos_min_ratio: not given, so DeepSpeed takes 0.0001, but schedule.final_ratio is 0.0; "
        'write `schedule.final_ratio: 0.0001`, or "auto" here',
    ),
    "a rate to begin with": (
        {"scheduler": {"params": {"warmup_min_lr": 1e-6, "warmup_tpye": 3}}},
        "scheduler.params.warmup_min_lr: 1e-06 is not accepted: warmups begin above 0; write 0, or leave it out\n"
        "scheduler.params.warmup_tpye: DeepSpeed has no such key; did you mean warmup_type?",
    ),
    "precision": (
        {"bf16": {"enabled": True}},
        'bf16.enabled: true, but precision.compute is fp32; write `precision.compute: bf16`, or "auto" here',
    ),
    "stage": (
        {"zero_optimization": {"stage": 3}},
        "zero_optimization.stage: 3, but parallel.deepspeed.zero_stage is 2; write `parallel.deepspeed.zero_stage: "
        '3`, or "auto" here',
    ),
    "what stage 3 keeps whole": (
        {
            "zero_optimization": {
                "stage": 2,
                "stage3_param_persistence_threshold": 1e5,
                "param_persistence_threshold": -1,
                "stage3_model_persistence_threshold": True,
                "model_persistence_threshold": "many",
            }
        },
        "zero_optimization.param_persistence_threshold: -1 is not a whole number of 0 or more\n"
        "zero_optimization.stage3_model_persistence_threshold: true is not a whole number of 0 or more\n"
        'zero_optimization.model_persistence_threshold: "many" is not a whole number of 0 or more',
    ),
    "offload": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        'zero_optimization.offload_optimizer.device: "cpu", but parallel.deepspeed.offload_optimizer is none; '
        'write `parallel.deepspeed.offload_optimizer: cpu`, or "auto" here',
    ),
    "activation checkpointing": (
        {"activation_checkpointing": {"partition_activations": True}},
        "activation_checkpointing: DeepSpeed checkpoints activations only of models that call its functions, and "
        "memory.activation_checkpointing.mode is none; write `memory.activation_checkpointing.mode: full`, or leave it "
        "out",
    ),
    "what would lose bits": (
        {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}, "communication_data_type": "fp16"},
        "zero_optimization.zero_quantized_gradients: true is not accepted: it loses bits of each gradient; write "
        "false, or leave it out\n"
        'communication_data_type: "fp16" is not accepted: gradients are summed in fp32, so that the run is the single '
        'process\'s; write "fp32", or leave it out',
    ),
    "what Lockstep does": (
        {"tensorboard": {"enabled": True}, "elasticity": {"enabled": True}},
        "tensorboard: Lockstep writes its own: monitor.tensorboard; leave it out\n"
        "elasticity: batch.global_size holds on any number of ranks; leave it out",
    ),
    "misspelt": (
        {"zero_optimisation": {"stage": 2}, "zero_optimization": {"stage": 2, "overlap_com": True}},
        "zero_optimisation: DeepSpeed has no such key; did you mean zero_optimization?\n"
        "zero_optimization.overlap_com: DeepSpeed has no such key; did you mean overlap_comm?",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_states_both_values(case: str) -> None:
    given, expected = CONTRADICTIONS[case]
    assert refusal(given) == expected
    if not given.keys() & {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "scheduler"}:
        with pytest.raises(ConfigError) as error:  # the check without ranks finds it, too
            check_alone(config_set_by_user(given))
        assert str(error.value).replace("parallel.deepspeed.config.", "") == expected


def test_lockstep_does_deepspeed_s_activation_checkpointing() -> None:
    """Options that request nothing are accepted; the plan warns of ignored ones."""
    section = {
        "partition_activations": True, "cpu_checkpointing": True, "contiguous_memory_optimization": True,
        "number_checkpoints": 4, "synchronize_checkpoint_boundary": True, "profile": False,
    }  # fmt: skip
    full = {"activation_checkpointing": {"mode": "full"}}
    full_mode = config({"activation_checkpointing": section}, memory=full)
    check(full_mode, DERIVED)
    assert [text.partition(": ")[0] for text in not_carried_out(full_mode)] == [
        "parallel.deepspeed.config.activation_checkpointing.cpu_checkpointing"
    ]
    moved = config({"activation_checkpointing": section}, memory=full | {"activation_offload": "cpu"})
    assert not_carried_out(moved) == []
    check(config({"activation_checkpointing": dict.fromkeys(section, False)}), DERIVED)
    assert refusal({"activation_checkpointing": {"profile": True}}, memory=full).startswith(
        "activation_checkpointing.profile: true is not accepted: Lockstep doesn't time each block"
    )


def test_an_accumulation_that_means_another_global_batch_is_refused() -> None:
    derived = Derived(ranks=4, micro_size=1, accumulation=4, steps=100, trainable=1000)
    with pytest.raises(ConfigError, match=r"steps: 8, but it is 4; write `batch.global_size: 32`"):
        check(config_set_by_user({"gradient_accumulation_steps": 8}), derived)


def test_loss_scaling_of_fp16_must_agree() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 1000, "hysteresis": 2}
    assert refusal({"fp16": fp16}, precision={"compute": "fp16"}) == (
        "fp16.initial_scale_power: 12, but precision.loss_scale.initial is 65536.0; write "
        '`precision.loss_scale.initial: 4096.0`, or "auto" here\n'
        "fp16.loss_scale_window: 1000, but precision.loss_scale.growth_interval is 2000; write "
        '`precision.loss_scale.growth_interval: 1000`, or "auto" here\n'
        "fp16.hysteresis: 2 is not accepted: the loss scale is lowered at each overflow; write 1, or leave it out"
    )


def test_files_that_are_not_a_config(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    place = "parallel.deepspeed.config"
    assert (
        refusal(str(tmp_path / "none.json")) == f"{place}: can't read {tmp_path}/none.json: No such file or directory"
    )
    assert refusal(str(tmp_path / "list.json")) == f"{place}: {tmp_path}/list.json is not a JSON object"
    assert refusal(str(tmp_path / "broken.json")).startswith(f"{place}: {tmp_path}/broken.json is not JSON: ")


def test_offloading_fits_the_stage() -> None:
    assert refusal(None, {"offload_optimizer": "cpu", "zero_stage": 0}).startswith(
        "parallel.deepspeed.offload_optimizer"
    )
    assert refusal(None, {"offload_param": "cpu"}) == (
        "parallel.deepspeed.offload_param: cpu requires zero_stage 3, and it is 2"
    )


def test_bf16_weights_fit_stage_and_precision() -> None:
    assert refusal(None, {"bf16_weights": True, "zero_stage": 1}) == (
        "parallel.deepspeed.bf16_weights: true, but precision.compute is fp32; write `precision.compute: bf16`\n"
        "parallel.deepspeed.bf16_weights: true requires zero_stage 2 or 3, and it is 1"
    )


def test_problems_of_both_configs_are_reported_together() -> None:
    assert refusal({"gradient_clipping": 2.0}, {"offload_param": "cpu"}) == (
        "parallel.deepspeed.offload_param: cpu requires zero_stage 3, and it is 2\n"
        'gradient_clipping: 2.0, but optim.clip_norm is 1.0; write `optim.clip_norm: 2.0`, or "auto" here'
    )


def test_every_key_that_must_agree_has_a_value_of_lockstep() -> None:
    for row in deepspeed_keys().values():
        if row.rule == "same":
            deepspeed_check._ours(config(), DERIVED, row)


def test_every_key_that_deepspeed_reads_is_answered() -> None:
    """A newer DeepSpeed may have new keys."""
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    answered = set(keys_of("zero_optimization"))
    fields = zero.DeepSpeedZeroConfig.model_fields
    assert {key for name, field in fields.items() for key in (name, field.alias) if key} <= answered

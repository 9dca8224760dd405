"""Other tools' configs are imported: every key has an answer, and the result is a valid config."""

from __future__ import annotations

import dataclasses
import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.failures import fails, gives

from lockstep.cli.main import main
from lockstep.config import shape
from lockstep.config.deepspeed_keys import deepspeed_keys, keys_of
from lockstep.config.loading import load, validate
from lockstep.config.override import Override
from lockstep.config.reading import leaves, read_file
from lockstep.config.wording import OPEN
from lockstep.core.errors import ConfigError
from lockstep.interop.answers import RULES
from lockstep.interop.foreign import ForeignKind, read_foreign
from lockstep.interop.importing import ImportedConfig, import_config, import_file, listed, nested
from lockstep.interop.keys import key_rows

ROOT = Path(__file__).parents[2]
OWN = sorted([*ROOT.glob("examples/guide/configs/*.yaml"), *ROOT.glob("recipes/*.yaml")])
WHOLE = {"model.kind": "transformer", "data.train.kind": "stdlib-text"}


def imported(tmp_path: Path, values: Any, kind: ForeignKind | None = None, ranks: int | None = 8) -> ImportedConfig:
    file = tmp_path / "foreign.json"
    file.write_text(json.dumps(values))
    return import_file(file, kind, ranks)


def statuses(result: ImportedConfig) -> dict[str, str]:
    return {finding.key: finding.answer.status for finding in result.findings}


def error_message(tmp_path: Path, values: Any, ranks: int | None = 8) -> str:
    with pytest.raises(ConfigError) as error:
        imported(tmp_path, values, ranks=ranks)
    return str(error.value)


# --- what a file doesn't say ------------------------------------------------------------------------------------------

SCRIPT = {"training": {"batch_size": 8, "learning_rate": 2e-5, "num_epochs": 3, "warmup_ratio": 0.1}}


@pytest.mark.parametrize(
    ("values", "open_keys"),
    [
        (SCRIPT, {"schedule.kind"}),
        ({"training": {"batch_size": 8, "lr_scheduler": "linear"}}, {"optim.lr"}),
        ({"training": {"learning_rate": 1e-3, "lr_scheduler": "linear", "gradient_accumulation_steps": 4}},
         {"batch.global_size"}),
        ({"training": {**SCRIPT["training"], "lr_scheduler": "cosine", "min_lr": 1e-6}}, set()),
        ({"training": {"epochs": 1}}, set()),  # an excerpt, to be merged over a config
        ({"optim": {"lr": 0.1}, "batch": {"global_size": 8}}, set()),  # Lockstep's own keys, and so its defaults
        ({"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}},
         {"batch.global_size", "optim.lr", "schedule.warmup_steps"}),
        ({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}}}, set()),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 2}}, {"optim.lr", "schedule.kind"}),
        ({"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": "auto"},
          "optimizer": {"type": "AdamW"}}, set()),
    ],
)  # fmt: skip
def test_what_changes_the_run_and_is_not_in_the_file_is_asked_for(
    values: dict[str, Any], open_keys: set[str], tmp_path: Path
) -> None:
    result = imported(tmp_path, values)
    assert {key for key, value in result.settings.items() if value == OPEN} == open_keys
    assert not result.unanswered
    written = tmp_path / "written.yaml"
    written.write_text(yaml.safe_dump(nested({**result.settings, **WHOLE, "run.epochs": 1})))
    if open_keys:
        with pytest.raises(ConfigError) as error:
            load([written], environ={})
        assert {problem.key for problem in error.value.problems} == open_keys
    else:
        load([written], environ={})


def test_a_script_has_pytorch_s_defaults(tmp_path: Path) -> None:
    settings_ = imported(tmp_path, SCRIPT).settings
    assert (settings_["precision.compute"], settings_["optim.clip_norm"]) == ("fp32", None)
    assert settings_["optim.decay"] == "all"


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_config_of_lockstep_is_imported_as_it_is(path: Path) -> None:
    assert validate(import_config(path)).config == load([path], environ={}).config


def test_an_override_answers_a_question(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    params = {"warmup_num_steps": "auto", "warmup_max_lr": 0.1}
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    scheduler = {"type": "WarmupLR", "params": params}
    file.write_text(json.dumps({"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler}))
    result = import_file(file, also=[Override("schedule.warmup_ratio", "0.1")])
    assert OPEN not in result.settings.values()
    assert "to do" not in statuses(result).values()


# --- other trainers' files --------------------------------------------------------------------------------------------

AXOLOTL = """\
base_model: gpt2
datasets: [{path: wikitext, type: completion}]
adapter:
load_in_4bit: false
sequence_len: 512
sample_packing: true
train_on_inputs: false
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 2e-4
bf16: true
output_dir: out
"""
TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 2
seq_len = 2048
max_norm = 0.5
steps = 100
[parallelism]
tensor_parallel_degree = 1
"""


def test_axolotl_s_yaml_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text(AXOLOTL)
    result = import_file(file, ranks=2)
    assert not result.unanswered
    assert result.settings["batch.global_size"] == 16
    assert (result.settings["optim.lr"], result.settings["schedule.kind"]) == (2e-4, "cosine")
    assert result.settings["model.pretrained"] == "gpt2"
    assert [statuses(result)[key] for key in ("sample_packing", "train_on_inputs")] == ["to do"] * 2
    automatic = AXOLOTL.replace("bf16: true", "bf16: auto")
    file.write_text(f"{automatic}\nevals_per_epoch: 4\nspecial_tokens: {{pad_token: x}}\n")
    result = import_file(file, ranks=2)
    assert result.settings["precision.compute"] == "auto"
    assert [statuses(result)[key] for key in ("evals_per_epoch", "special_tokens.pad_token")] == ["to do"] * 2


def test_torchtitan_s_toml_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "titan.toml"
    file.write_text(TORCHTITAN)
    result = import_file(file, ranks=4)
    assert not result.unanswered
    expected = {
        "batch.global_size": 8,
        "optim.lr": 3e-4,
        "optim.clip_norm": 0.5,
        "run.steps": 100,
        "schedule.kind": OPEN,
    }
    assert {key: result.settings[key] for key in expected} == expected


@pytest.mark.parametrize(
    "text", [AXOLOTL, json.dumps({"train_batch_size": 8, "optimizer": {}, "bf16": {}}), TORCHTITAN]
)
def test_another_tool_s_file_is_told_to_be_imported(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix = "toml" if text == TORCHTITAN else "yaml"
    file = tmp_path / f"theirs.{suffix}"
    file.write_text(text)
    assert main(["train", "digits", str(file)]) == 2
    message = capsys.readouterr().err
    assert f"lockstep config import {file}" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("word", "answer"),
    [("sample_packing", "data.train.packed"), ("adapter", "model.adapter.kind"), ("class_weights", "CrossEntropyLoss"),
     ("compute_metrics", "metric_sums"), ("assistant_only_loss", "data.train.messages"),
     ("load_in_4bit", "model.quantization.kind")],
)  # fmt: skip
def test_flags_of_other_trainers_have_an_answer(word: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "digits", f"--{word}=true"]) == 2
    assert answer in capsys.readouterr().err


# --- HF TrainingArguments --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def training_arguments() -> dict[str, Any]:
    from transformers import TrainingArguments

    arguments = json.loads(TrainingArguments(output_dir="out", use_cpu=True, report_to="none").to_json_string())
    assert {field.name for field in dataclasses.fields(TrainingArguments)} <= {*arguments, "_n_gpu"}
    return arguments  # type: ignore[no-any-return]


def test_every_field_of_training_arguments_has_an_answer(tmp_path: Path, training_arguments: dict[str, Any]) -> None:
    result = imported(tmp_path, training_arguments)
    assert result.file.kind == "trainer"
    assert not result.unanswered
    assert nested(result.settings)["optim"] == {
        "lr": 5e-5, "name": "adamw", "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8, "clip_norm": 1.0,
    }  # fmt: skip
    assert result.settings["batch.global_size"] == 64
    assert result.settings["precision.compute"] == "fp32"
    assert result.settings["run.epochs"] == 3.0
    assert "run.steps" not in result.settings


def test_each_field_has_an_answer_for_unusual_values(tmp_path: Path, training_arguments: dict[str, Any]) -> None:
    for name in training_arguments:
        for value in (True, 7, "cosine", ["x"], {"a_key": 1}):
            file = tmp_path / "one.json"
            file.write_text(json.dumps({"output_dir": "out", "save_steps": 5, name: value}))
            for finding in listed(read_foreign(file, "trainer"), 8):
                assert finding.answer.status != "not known" or finding.key.endswith("a_key"), (finding, value)


def test_defaults_of_the_trainer_are_imported(tmp_path: Path) -> None:
    result = imported(tmp_path, {"output_dir": "out", "num_train_epochs": 1, "save_steps": 10, "bf16": True})
    assert result.settings["optim.lr"] == 5e-5
    assert result.settings["schedule.kind"] == "linear"
    assert result.settings["batch.micro_size"] == 8
    assert result.settings["precision.compute"] == "bf16"
    assert statuses(result)["(learning_rate)"] == "derived"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"warmup_steps": 0.1}, {"schedule.warmup_ratio": 0.1}),
        ({"warmup_ratio": 0.1, "warmup_steps": 0}, {"schedule.warmup_ratio": 0.1}),
        ({"max_steps": 100, "num_train_epochs": 3}, {"run.steps": 100}),
        ({"max_steps": -1, "num_train_epochs": 2}, {"run.epochs": 2}),
        ({"eval_steps": 0.25, "eval_strategy": "steps", "num_train_epochs": 2}, {"evaluation.every": "0.5 epochs"}),
        ({"eval_strategy": "steps", "logging_steps": 20}, {"evaluation.every": 20}),
        ({"eval_strategy": "epoch", "eval_steps": 3}, {"evaluation.every": "1 epoch"}),
        ({"save_strategy": "no", "save_steps": 3}, {"checkpoint.every": None}),
        ({"save_strategy": "epoch"}, {"checkpoint.every": "1 epoch"}),
        ({"optim": "sgd"}, {"optim.name": "sgd", "optim.momentum": 0.0}),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}, "learning_rate": 1e-4},
         {"schedule.kind": "cosine", "schedule.final_ratio": 0.1}),
        ({"fsdp": "shard_grad_op auto_wrap offload", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"]}},
         {"parallel.strategy": "fsdp", "parallel.fsdp.sharding_strategy": "SHARD_GRAD_OP",
          "parallel.fsdp.cpu_offload": True, "parallel.fsdp.wrap": ["Block"]}),
        ({"deepspeed": {"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}},
         {"parallel.strategy": "deepspeed", "parallel.deepspeed.zero_stage": 3}),
        ({"gradient_checkpointing": True}, {"memory.activation_checkpointing.mode": "full"}),
        ({"max_grad_norm": 0}, {"optim.clip_norm": None}),
        ({"train_sampling_strategy": "sequential"}, {"data.shuffle": False}),
    ],
)  # fmt: skip
def test_several_keys_become_one_setting(words: dict[str, Any], expected: dict[str, object], tmp_path: Path) -> None:
    result = imported(tmp_path, {"output_dir": "out", **words}, "trainer")
    for key, value in expected.items():
        assert result.settings[key] == (pytest.approx(value) if isinstance(value, float) else value)
    assert not result.unanswered


@pytest.mark.parametrize(
    "words",
    [{"neftune_noise_alpha": 5}, {"use_liger_kernel": True}, {"optim": "paged_adamw_8bit"}, {"optim_args": "a=1"},
     {"lr_scheduler_type": "reduce_lr_on_plateau"}, {"accelerator_config": {"split_batches": True}},
     {"group_by_length": True},
     {"parallelism_config": {"tp_size": 2}}, {"fsdp": "half_shard"}],
)  # fmt: skip
def test_keys_without_a_counterpart_are_listed(words: dict[str, Any], tmp_path: Path) -> None:
    result = imported(tmp_path, {"output_dir": "out", **words}, "trainer")
    assert [finding.key.partition(".")[0] for finding in result.unanswered] == list(words)


NOT_NEEDED = {
    "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "use_cache", "torch_empty_cache_steps",
    "logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level",
    "log_level_replica", "run_name", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object",
    "eval_accumulation_steps", "batch_eval_metrics", "save_only_model", "enable_jit_checkpoint", "ignore_data_skip",
    "restore_callback_states_from_checkpoint", "dataloader_in_order", "length_column_name", "ddp_broadcast_buffers",
    "do_train", "do_eval", "do_predict", "local_rank", "output_dir", "auto_find_batch_size", "skip_memory_metrics",
}  # fmt: skip
"""Fields whose reason was reviewed: Lockstep does what they request, or no result and no output is lost."""


def test_a_field_that_requests_something_is_not_called_unneeded(
    tmp_path: Path, training_arguments: dict[str, Any]
) -> None:
    for name, usual in training_arguments.items():
        if name in NOT_NEEDED or name == "use_cpu":
            continue
        beside = {"push_to_hub": True} if name.startswith("hub_") else {}
        asking = not usual if isinstance(usual, bool) else usual + 7 if isinstance(usual, int | float) else ["zzz"]
        file = tmp_path / "one.json"
        file.write_text(json.dumps({"output_dir": "out", "save_steps": 5, **beside, name: asking}))
        answers = {finding.key: finding.answer for finding in listed(read_foreign(file, "trainer"), 8)}
        assert answers[name].status != "not needed", (name, asking, answers[name])


LIGHTNING = {
    "accelerator": "gpu", "strategy": "ddp", "devices": 4, "num_nodes": 2, "precision": "bf16-mixed", "logger": True,
    "callbacks": ["x"], "fast_dev_run": True, "max_epochs": 3, "min_epochs": 1, "max_steps": 10, "min_steps": 1,
    "max_time": "00:12:00:00", "limit_train_batches": 0.5, "limit_val_batches": 10, "limit_test_batches": 10,
    "limit_predict_batches": 10, "overfit_batches": 2, "val_check_interval": 0.25, "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 2, "log_every_n_steps": 50, "enable_checkpointing": True, "enable_progress_bar": True,
    "enable_model_summary": True, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0,
    "gradient_clip_algorithm": "value", "deterministic": True, "benchmark": True, "inference_mode": True,
    "use_distributed_sampler": False, "profiler": "simple", "detect_anomaly": True, "barebones": True,
    "plugins": ["x"], "sync_batchnorm": True, "reload_dataloaders_every_n_epochs": 1, "default_root_dir": "out",
    "enable_autolog_hparams": True, "model_registry": "x",
}  # fmt: skip
LOST_OF_LIGHTNING = [
    "callbacks", "max_time", "num_sanity_val_steps", "gradient_clip_algorithm", "benchmark", "use_distributed_sampler",
    "detect_anomaly", "barebones", "plugins", "reload_dataloaders_every_n_epochs",
    "enable_autolog_hparams", "model_registry",
]  # fmt: skip


def test_each_argument_of_lightning_s_trainer_has_an_answer(tmp_path: Path) -> None:
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.5}}
    result = imported(tmp_path, {"trainer": LIGHTNING, "optimizer": optimizer, "seed_everything": 7}, "yaml", None)
    assert [finding.key.removeprefix("trainer.") for finding in result.unanswered] == LOST_OF_LIGHTNING
    assert (result.settings["optim.name"], result.settings["optim.momentum"]) == ("sgd", 0.5)
    assert (result.settings["evaluation.every"], result.settings["run.seed"]) == ("0.25 epochs", 7)
    to_do = {finding.key.removeprefix("trainer.") for finding in result.findings if finding.answer.status == "to do"}
    assert {"num_nodes", "fast_dev_run", "limit_train_batches", "limit_val_batches", "overfit_batches"} <= to_do


def test_each_field_of_accelerate_s_config_has_an_answer(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    file = tmp_path / "default_config.json"
    for field in dataclasses.fields(config_args.ClusterConfig):
        for value in (True, 7, "x", ["x"]):
            file.write_text(json.dumps({"compute_environment": "LOCAL_MACHINE", field.name: value}))
            assert all(
                finding.answer.status != "not known" for finding in listed(read_foreign(file, "accelerate"), 8)
            ), field


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        ({"push_to_hub": True}, "to do", "--push-to-hub"),
        ({"hub_model_id": "me/x", "push_to_hub": True}, "to do", "--push-to-hub"),
        ({"hub_model_id": "me/x", "push_to_hub": False}, "not needed", "push_to_hub is off"),
        ({"report_to": ["wandb", "tensorboard"]}, "to do", "write monitor.trackers: [{target: wandb}]"),
        ({"report_to": "none"}, "taken", ""),
        ({"use_wandb": False}, "not needed", "requests nothing"),
        ({"use_wandb": True}, "to do", "write monitor.trackers: [{target: wandb"),
        ({"wandb_project": "x", "use_wandb": False}, "not needed", "use_wandb is off"),
        ({"wandb_project": "x"}, "to do", "arguments: {project: NAME}"),
        ({"report_to": ["comet_ml"]}, "to do", "write monitor.trackers"),
        ({"early_stopping_patience": 3}, "to do", "write monitor.early_stopping"),
        ({"profiler": "simple"}, "to do", "write profile.steps"),
        ({"max_restarts": 3}, "taken", ""),
        ({"wandb": {"project": "x", "enabled": False}}, "not needed", "wandb.enabled is off"),
        ({"optim": "adamw_bnb_8bit"}, "taken", ""),
        ({"auto_find_batch_size": True}, "not needed", "continues with smaller micro-batches"),
        ({"model_revision": "v2"}, "taken", ""),
        ({"eval_delay": 1}, "not there", "from the first on"),
        ({"save_safetensors": False}, "not there", "as safetensors"),
        ({"save_safetensors": True}, "not needed", "requests nothing"),
        ({"debug": ["underflow_overflow"]}, "not there", "isn't traced"),
        ({"bf16_full_eval": True}, "to do", "evaluation computes in precision.compute"),
        ({"run_name": "a"}, "to do", "write run.folder: runs/a"),
        ({"run_name": "a", "output_dir": "b"}, "not needed", "output_dir decides"),
        ({"resume_from_checkpoint": True}, "not needed", "requests nothing"),
        ({"resume_from_checkpoint": "out/checkpoint-5"}, "to do", "lockstep ckpt import CHECKPOINT RUN"),
        ({"overwrite_output_dir": True}, "to do", "--fresh starts from scratch"),
        ({"nnodes": 2}, "to do", "write launch.nodes: 2"),
        ({"attn_implementation": "sdpa", "model_name": "gpt2"}, "taken", ""),
        ({"attn_implementation": "sdpa", "n_layer": 2}, "to do", "of kind huggingface"),
        ({"gradient_accumulation_kwargs": {"num_steps": 4}}, "to do", "another name for gradient_accumulation_steps"),
        ({"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}, "zero_optimization": {"stage": 1}},
         "not there", "moments are always corrected"),
        ({"val_check_interval": 8, "accumulate_grad_batches": 4}, "derived", "8 micro-batches, 4 an update"),
    ],
)  # fmt: skip
def test_a_lost_effect_is_not_called_unneeded(words: dict[str, Any], status: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps(words))
    findings = listed(read_foreign(file, "deepspeed" if "zero_optimization" in words else "yaml"), 1)
    finding = next(finding.answer for finding in findings if finding.key != "optimizer.type")
    assert (finding.status, why in finding.why) == (status, True), finding


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        ({"sharding_strategy": "FULL_SHARD", "cpu_offload": False, "use_orig_params": True}, "fsdp"),
        ({"zero_stage": 2, "cpu_offload": True, "overlap_comm": True, "steps_per_print": 9}, "deepspeed"),
        ({"static_graph": True, "bucket_cap_mb": 50}, "ddp"),
        ({"find_unused_parameters": True}, None),
        ({"distributed": {"static_graph": False}, "fsdp": {"cpu_offload": False}}, "fsdp"),
        ({"zero_stage": 3, "strategy": "ddp"}, "ddp"),
    ],
)
def test_options_of_one_strategy_select_it(words: dict[str, Any], strategy: str | None, tmp_path: Path) -> None:
    result = imported(tmp_path, words, "yaml")
    assert (result.settings.get("parallel.strategy"), result.unanswered) == (strategy, ())


def test_options_of_several_strategies_ask_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "both.json"
    file.write_text(json.dumps({"sharding_strategy": "FULL_SHARD", "zero_stage": 2}))
    assert main(["config", "import", str(file)]) == 0
    question = "write parallel.strategy: the file has options of fsdp and deepspeed"
    assert f"# To do: (strategy): {question}\n" in capsys.readouterr().out
    import_config(file)
    assert question in capsys.readouterr().err


def test_deepspeed_keys_outside_their_section_are_imported(tmp_path: Path) -> None:
    words = {"zero_stage": 3, "offload_param": True, "reduce_bucket_size": 10, "wall_clock_breakdown": True}
    result = imported(tmp_path, words, "yaml")
    section: Any = nested(result.settings)["parallel"]
    assert section["deepspeed"] == {
        "zero_stage": 3, "offload_param": "cpu",
        "config": {"zero_optimization": {"stage": 3, "reduce_bucket_size": 10}, "wall_clock_breakdown": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ({"fsdp": "", "fsdp_config": {"min_num_params": 9, "xla": False}, "output_dir": "o", "save_steps": 1}, None),
        ({"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"},
          "deepspeed_config": {"zero_stage": 3}}, "ddp"),
    ],
)  # fmt: skip
def test_options_of_an_unused_strategy_are_not_taken(file: dict[str, Any], kind: str | None, tmp_path: Path) -> None:
    result = imported(tmp_path, file)
    assert result.settings.get("parallel.strategy") == kind
    assert not [key for key in result.settings if key.startswith(("parallel.fsdp", "parallel.deepspeed"))]


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def test_every_known_deepspeed_key_has_an_answer(tmp_path: Path) -> None:
    settings = {row.path: 1 for row in deepspeed_keys().values() if row.rule != "section"}
    del settings["torch_autocast"]  # a section with rows for some of its keys
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(nested(settings)))
    for finding in listed(read_foreign(file, "deepspeed"), 1):
        assert finding.answer.status != "not known", finding


def test_an_auto_batch_that_follows_from_other_keys_is_not_needed(tmp_path: Path) -> None:
    words = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    result = statuses(imported(tmp_path, words))
    assert result["train_batch_size"] == "not needed"
    assert result["train_micro_batch_size_per_gpu"] == "derived"
    del words["train_micro_batch_size_per_gpu"]
    assert statuses(imported(tmp_path, words))["train_batch_size"] == "to do"


@pytest.mark.parametrize(
    ("section", "kind"),
    [({}, "trainer"), ({"lora": {"r": 8}}, "trainer"), ({"model": {"name": "gpt2"}, "data": {"path": "x"}}, "yaml")],
)
def test_training_arguments_are_recognized_with_one_further_section(
    section: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    file = tmp_path / "args.yaml"
    file.write_text(
        yaml.safe_dump({"output_dir": "o", "num_train_epochs": 2, "logging_steps": 5, "lr": 0.1, **section})
    )
    assert read_foreign(file, None).kind == kind


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 1000}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "csv_monitor": {"enabled": True},
}


def test_an_imported_deepspeed_json_gives_the_same_deepspeed_config(tmp_path: Path) -> None:
    from lockstep.config.deepspeed import engine_config
    from lockstep.config.deepspeed_check import Derived

    result = imported(tmp_path, DEEPSPEED)
    assert (result.file.kind, result.unanswered) == ("deepspeed", ())
    assert result.settings["optim.name"] == "adamw"
    assert result.settings["optim.decay"] == "all"
    assert result.settings["precision.loss_scale.initial"] == 4096
    whole = tmp_path / "whole.yaml"
    whole.write_text(yaml.safe_dump(nested({**result.settings, **WHOLE})))
    plain = engine_config(load([whole], environ={}).config, Derived(8, 4, 8, 1000, 1_000_000))
    assert plain["zero_optimization"]["overlap_comm"] is True
    assert plain["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


def test_auto_values_set_no_defaults(tmp_path: Path) -> None:
    open_ = {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}
    optimizer = {"type": "AdamW", "params": {"weight_decay": "auto"}}
    result = imported(
        tmp_path, {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": optimizer} | open_
    )
    assert [key for key in statuses(result) if key.startswith("(")] == [
        "(scheduler)",
        "(optimizer.params.weight_decay)",
    ]
    open_keys = {key for key, value in result.settings.items() if value == OPEN}
    assert open_keys == {"optim.clip_norm", "precision.compute", "optim.weight_decay"}


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("WarmupLR", {"warmup_num_steps": 10}, {"warmup_steps": 10, "warmup_type": "log"}),
        ("WarmupLR", {"warmup_num_steps": "auto"}, {"warmup_steps": OPEN, "warmup_type": "log"}),
        ("WarmupLR", {}, {"warmup_steps": 1000, "warmup_type": "log"}),
        ("WarmupLR", "auto", {}),
        ("WarmupDecayLR", {"warmup_num_steps": 10, "warmup_type": "linear"},
         {"warmup_steps": 10, "warmup_type": "linear"}),
        ("WarmupCosineLR", {"warmup_num_steps": 10, "warmup_type": "log", "cos_min_ratio": 0.1},
         {"warmup_steps": 10, "warmup_type": "log", "final_ratio": 0.1}),
        ("WarmupCosineLR", {"warmup_num_steps": 10},
         {"warmup_steps": 10, "warmup_type": "log", "final_ratio": 0.0001}),
    ],
)  # fmt: skip
def test_defaults_of_deepspeed_s_schedulers_are_imported(
    kind: str, params: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    result = imported(tmp_path, {"train_batch_size": 8, "scheduler": {"type": kind, "params": params}})
    schedule = dict(nested(result.settings)["schedule"])  # type: ignore[call-overload]
    assert schedule.pop("kind") in ("constant", "linear", "cosine")
    assert (schedule, result.unanswered) == (expected, ())


@pytest.mark.parametrize(
    ("kind", "params", "peak"),
    [
        ("WarmupLR", {}, 0.5),
        ("WarmupLR", {"warmup_max_lr": 0.25}, 0.25),
        ("WarmupLR", {"warmup_max_lr": "auto"}, 0.5),
        ("WarmupDecayLR", {"warmup_max_lr": 0.25}, 0.25),
        ("WarmupDecayLR", {}, 0.001),
        ("WarmupCosineLR", {}, 0.5),
    ],
)
def test_the_peak_is_that_of_deepspeed_s_scheduler(
    kind: str, params: dict[str, Any], peak: float, tmp_path: Path
) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.5}}
    result = imported(tmp_path, {"optimizer": optimizer, "scheduler": {"type": kind, "params": params}}, "deepspeed")
    assert (result.settings["optim.lr"], result.unanswered) == (peak, ())


@pytest.mark.parametrize("params", [{"warmup_min_lr": 1e-6}, {"warmup_type": "cubic"}])
def test_a_scheduler_value_without_a_counterpart_is_listed(params: dict[str, Any], tmp_path: Path) -> None:
    result = imported(tmp_path, {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": params}})
    assert [finding.key for finding in result.unanswered] == [f"scheduler.params.{next(iter(params))}"]


@pytest.mark.parametrize(
    ("section", "expected", "lost"),
    [
        ({"partition_activations": True, "number_checkpoints": None}, {"mode": "full"}, []),
        ({"partition_activations": False, "cpu_checkpointing": False}, None, []),
        ({"number_checkpoints": 4, "contiguous_memory_optimization": True}, {"mode": "full"}, []),
        ({"cpu_checkpointing": True}, {"mode": "full"}, []),
        ({"profile": True}, None, ["profile"]),
    ],
)
def test_deepspeed_s_activation_checkpointing_becomes_lockstep_s(
    section: dict[str, Any], expected: dict[str, Any] | None, lost: list[str], tmp_path: Path
) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    values = {"train_batch_size": 8, "optimizer": optimizer, "activation_checkpointing": section}
    result = imported(tmp_path, values)
    memory: Any = nested(result.settings).get("memory", {})
    assert memory.get("activation_checkpointing") == expected
    assert [finding.key.rpartition(".")[2] for finding in result.unanswered] == lost
    to_do = [finding.key for finding in result.findings if finding.answer.status == "to do"]
    assert to_do == ["activation_checkpointing.cpu_checkpointing"] * bool(section.get("cpu_checkpointing"))


def test_a_deepspeed_json_is_read_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_comm": True}}))
    result = imported(tmp_path, {"output_dir": "out", "deepspeed": "ds.json"}, "trainer")
    assert result.settings["parallel.deepspeed.zero_stage"] == 2
    assert result.settings["parallel.deepspeed.config.zero_optimization.overlap_comm"] is True
    missing = imported(tmp_path, {"output_dir": "out", "deepspeed": "none.json"}, "trainer")
    assert gives(missing.unanswered[0].answer.why, "none.json")


# --- scripts and Accelerate -------------------------------------------------------------------------------------------

GUIDE = """
model: {name: gpt2, task: causal_lm, torch_dtype: bfloat16}
data: {dataset: wikitext, dataset_config: wikitext-2-raw-v1, max_length: 512, validation_split: validation}
training:
  epochs: 3
  batch_size: 4
  gradient_accumulation_steps: 2
  learning_rate: 2e-5
  weight_decay: 0.01
  warmup_ratio: 0.1
  max_grad_norm: 1.0
  gradient_checkpointing: true
  seed: 7
  output_dir: out
  logging_steps: 10
  save_steps: 500
  save_total_limit: 2
fsdp:
  sharding_strategy: shard_grad_op
  backward_prefetch: BACKWARD_PRE
  mixed_precision: {param_dtype: bf16, reduce_dtype: torch.float32}
  use_orig_params: true
distributed: {backend: gloo, world_size: 4}
"""


def test_a_guide_s_yaml_becomes_a_config(tmp_path: Path) -> None:
    file, expected = tmp_path / "guide.yaml", tmp_path / "lockstep.yaml"
    file.write_text(GUIDE)
    result = import_file(file, also=[Override("schedule.kind", "linear")])
    assert (result.file.kind, result.missing, result.unanswered) == ("yaml", {}, ())
    assert [key for key, status in statuses(result).items() if status == "to do"] == ["data.validation_split"]
    expected.write_text(yaml.safe_dump(nested(result.settings)))
    config = load([expected], environ={}).config
    assert (config.batch.global_size, config.batch.micro_size) == (32, 4)
    assert config.parallel.strategy == "fsdp"
    assert config.parallel.fsdp.sharding_strategy == "SHARD_GRAD_OP"
    assert config.parallel.fsdp.mixed_precision.param_dtype == "bf16"
    assert config.parallel.fsdp.mixed_precision.reduce_dtype == "fp32"
    assert config.precision.compute == "bf16"
    assert config.memory.activation_checkpointing.mode == "full"
    assert (config.run.epochs, config.run.seed, config.run.folder) == (3, 7, "out")


def test_accelerate_s_config_is_recognized_by_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "default_config.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 2, "
        "fsdp_transformer_layer_cls_to_wrap: 'A,B'}\nmixed_precision: 'no'\nnum_machines: 2\nnum_processes: 8\n"
    )
    result = import_file(file)
    assert (result.file.kind, result.unanswered) == ("accelerate", ())
    assert result.settings["parallel.fsdp.sharding_strategy"] == "SHARD_GRAD_OP"
    assert result.settings["parallel.fsdp.wrap"] == ["A", "B"]
    assert result.settings["launch.ranks"] == 4
    assert result.settings["precision.compute"] == "fp32"
    assert set(result.missing) == {"model", "data.train", "run.epochs"}


NANOGPT = """
learning_rate: 6e-4
max_iters: 600
lr_decay_iters: 600
warmup_iters: 20
min_lr: 6e-5
decay_lr: True
eval_interval: 200
eval_iters: 20
eval_only: False
always_save_checkpoint: True
init_from: scratch
bias: False
n_layer: 12
n_head: 12
n_embd: 768
batch_size: 12
wandb_log: False
backend: nccl
checkpoint: {dir: saves, keep: 2, resume_from: null, save_every_n_epochs: 2}
logging: {level: INFO}
"""


@pytest.mark.parametrize("ranks", [None, 1, 2])
def test_nanogpt_s_accumulation_is_that_of_all_ranks(ranks: int | None, tmp_path: Path) -> None:
    file = tmp_path / "nanogpt.yaml"
    file.write_text(NANOGPT + "gradient_accumulation_steps: 4\n")
    result = import_file(file, ranks=ranks)
    assert (result.settings["batch.global_size"], result.settings["batch.micro_size"]) == (48, 12)
    why = {finding.key: finding.answer.why for finding in result.findings}
    assert gives(why["batch_size"], "nanoGPT", "ranks")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"batch_size": 2}, {"batch_size": "2 samples of each rank x 1 micro-batches x 4 ranks"}),
        ({"batch_size": 2, "train_batch_size": 8}, {"batch_size": "of each rank", "train_batch_size": "of all ranks"}),
    ],
)
def test_the_scope_of_a_script_s_batch_size_is_reported(
    words: dict[str, Any], why: dict[str, str], tmp_path: Path
) -> None:
    result = imported(tmp_path, words, "yaml", ranks=4)
    assert {finding.key: finding.answer.why for finding in result.findings if finding.where} == why


def test_keys_of_nanogpt_are_imported_by_their_meaning(tmp_path: Path) -> None:
    file = tmp_path / "nanogpt.yaml"
    file.write_text(NANOGPT)
    result = import_file(file, ranks=1)
    assert result.unanswered == ()
    for key, value in {
        "schedule.kind": "cosine", "schedule.final_ratio": 0.1, "run.steps": 600, "evaluation.every": 200,
        "checkpoint.folder": "saves", "checkpoint.keep_last": 2, "checkpoint.every": "2 epochs",
    }.items():  # fmt: skip
        assert result.settings[key] == pytest.approx(value) if isinstance(value, float) else value, key
    assert "launch.backend" not in result.settings
    why = {finding.key: finding.answer.why for finding in result.findings}
    assert gives(why["backend"], "nccl", "gloo")
    assert gives(why["lr_decay_iters"], "whole run")
    assert statuses(result)["eval_iters"] == "to do"


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        ({"lr_decay_iters": 50, "max_iters": 100}, "not there", "the whole run, which is 100 long"),
        ({"lr_decay_iters": 50}, "to do", "write the same number as run.steps"),
        ({"decay_lr": False}, "taken", ""),
        ({"decay_lr": "x"}, "not there", "'x' has no counterpart; true or false"),
        ({"decay_lr": True, "lr_scheduler_type": "linear"}, "not needed", "lr_scheduler_type decides"),
        ({"init_from": "gpt2-xl"}, "to do", "pretrained: gpt2-xl"),
        ({"bias": True, "n_layer": 2}, "to do", "transformer has no biases"),
        ({"step_size": 30}, "not there", "piecewise"),
        ({"gradient_checkpointing": "often"}, "not there", "'often' has no counterpart; true or false"),
        ({"amp_dtype": "bfloat16"}, "taken", ""),
        ({"amp_dtype": "bf16", "use_amp": False}, "not needed", "automatic mixed precision is off"),
        ({"fp16": "O1"}, "not there", "'O1' is not true or false"),
        ({"eval_onyl": True}, "not known", "did you mean eval_only?"),
        ({"batch": {"global_sise": 3}}, "not known", "did you mean global_size?"),
        ({"dir": "x"}, "not known", "no known tool has this key"),
    ],
)
def test_the_value_decides_what_becomes_of_a_key(words: dict[str, Any], status: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps(words))
    first = listed(read_foreign(file, "yaml"), 1)[0].answer
    assert (first.status, why in first.why) == (status, True), first


def test_unquoted_words_are_read_as_in_yaml_1_1(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("fp16: no\nbf16: yes\ngradient_checkpointing: off\nepochs: 1\nmodel: {task: 'no'}\n")
    result = import_file(file, "yaml", 1)
    assert result.settings["precision.compute"] == "bf16"
    assert "memory.activation_checkpointing.mode" not in result.settings
    assert [finding.value for finding in result.file.keys][-1] == "no"
    file.write_text("compute_environment: X\ndistributed_type: NO\ndynamo_config: {dynamo_backend: NO}\n")
    assert import_file(file).settings["parallel.strategy"] == "single"
    assert "model.compile" not in import_file(file).settings


@pytest.mark.parametrize("value", ["yes", 1, "true", []])
def test_a_switch_of_deepspeed_is_true_or_false(value: object, tmp_path: Path) -> None:
    narrow = {"fp16": {"enabled": value}, "bf16": {"enabled": True}, "torch_autocast": {"enabled": value}}
    result = imported(tmp_path, {"train_batch_size": 8, **narrow})
    shown = f"{value!r} is not true or false"
    assert [(finding.key, finding.answer.why) for finding in result.unanswered] == [
        ("fp16.enabled", shown), ("torch_autocast.enabled", shown)
    ]  # fmt: skip


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_product_without_the_number_of_ranks_asks_for_it(tmp_path: Path) -> None:
    assert "--ranks N" in error_message(tmp_path, {"batch_size": 4, "epochs": 1}, ranks=None)
    assert "--ranks N" in error_message(tmp_path, {"output_dir": "o", "save_steps": 1}, ranks=None)


def test_import_config_uses_the_number_of_started_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "foreign.yaml"
    file.write_text("batch_size: 2\ngradient_accumulation_steps: 2\nepochs: 1\n")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="ranks=N in Python"):
        import_config(file)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert import_config(file)["batch"] == {"global_size": 16, "micro_size": 2}
    assert import_config(file, ranks=2)["batch"] == {"global_size": 8, "micro_size": 2}
    file.write_text("batch_size: 2\nepochs: 1\nworld_size: 3\n")
    assert import_config(file)["batch"] == {"global_size": 6, "micro_size": 2}
    with fails(ConfigError, "3 ranks", 2):
        import_config(file, ranks=2)


def test_an_invalid_value_is_reported_with_its_position(tmp_path: Path) -> None:
    message = error_message(tmp_path, {"learning_rate": "fast", "epochs": 1})
    assert gives(message, "foreign.json: learning_rate: optim.lr: 'fast'")


def test_contradicting_keys_are_listed(tmp_path: Path) -> None:
    result = imported(tmp_path, {"training": {"max_length": 5, "lr": 0.1}, "optimizer": {"lr": 0.2}, "epochs": 1})
    assert [finding.key for finding in result.unanswered] == ["optimizer.lr"]
    product = imported(tmp_path, {"train_batch_size": 10, "micro_batch_size": 2, "gradient_accumulation_steps": 2})
    assert "2 x 2 x 8 = 32" in product.unanswered[0].answer.why


@pytest.mark.parametrize(
    ("whole", "ranks", "why"),
    [
        (16, 3, "16 / (2 micro-batches x 3 ranks) is not a whole number of samples"),
    ],
)
def test_a_batch_that_is_not_divisible_by_the_ranks_is_refused(
    whole: int, ranks: int, why: str, tmp_path: Path
) -> None:
    words = {"train_batch_size": whole, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    result = imported(tmp_path, words, ranks=ranks)
    assert [(finding.key, why in finding.answer.why) for finding in result.unanswered] == [
        ("gradient_accumulation_steps", True)
    ]
    assert imported(tmp_path, words | {"train_batch_size": 2 * ranks}, ranks=ranks).settings["batch.micro_size"] == 1


@pytest.mark.parametrize("stray", ["seed", "zero_optimisation"])
def test_a_deepspeed_config_is_recognized_with_one_further_key(stray: str, tmp_path: Path) -> None:
    """The defaults stay DeepSpeed's: no clipping, and a logarithmic warmup."""
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}
    words = {"train_batch_size": 16, "bf16": {"enabled": True}, "scheduler": schedule}
    plain, strayed = imported(tmp_path, words), imported(tmp_path, {**words, stray: 7})
    assert strayed.settings == plain.settings
    assert strayed.settings["optim.clip_norm"] is None
    assert strayed.settings["schedule.warmup_type"] == "log"


def test_all_errors_are_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = {"zero_optimization": {"stage": 2, "offload_param": True}, "zero_optimisation": {}}
    script = {"lr": 0.1, "epochs": 2}
    (tmp_path / "ds.json").write_text(json.dumps({"scheduler": [], "steps_per_print": "often", **zero, **script}))
    words = ["config", "import", str(tmp_path / "ds.json")]
    lost = ("scheduler", "zero_optimization.offload_param", "zero_optimisation")
    assert main(words) == 2
    output = capsys.readouterr().err
    assert [key for key in ("steps_per_print", *lost) if f": {key}: " not in output] == []
    assert main([*words, "--lenient"]) == 2
    output = capsys.readouterr().err
    assert [key for key in ("steps_per_print", *lost) if f": {key}: " in output] == ["steps_per_print"]


def test_a_pickle_is_never_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "training_args.bin"
    file.write_bytes(pickle.dumps(_TouchesFile(tmp_path / "ran")))
    assert main(["config", "import", str(file)]) == 2
    assert "to_json_string" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


class _TouchesFile:
    """An object that touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_the_command_lists_every_key_and_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, expected = tmp_path / "guide.yaml", tmp_path / "lockstep.yaml"
    file.write_text(GUIDE + "lerning_rate: 1\n")
    assert main(["config", "import", str(file), "--to", str(expected)]) == 2
    output = capsys.readouterr()
    assert gives(output.out, "learning_rate?")
    assert gives(output.err, "lerning_rate")
    assert not expected.exists()
    assert main(["config", "import", str(file), "--to", str(expected), "--lenient"]) == 0
    assert main(["config", "check", str(expected)]) == 2
    assert gives(capsys.readouterr().err, "schedule.kind:")
    assert main(["config", "check", str(expected), "schedule.kind=linear"]) == 0
    assert main(["config", "import", str(file), "--to", str(expected), "--lenient"]) == 2
    assert "--force overwrites" in capsys.readouterr().err
    assert main(["config", "import", str(file), "--to", str(expected), "--lenient", "--force"]) == 0


def test_missing_keys_come_from_overrides_or_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, expected = tmp_path / "ds.json", tmp_path / "lockstep.yaml"
    file.write_text(json.dumps(DEEPSPEED))
    words = ["config", "import", str(file), "--ranks", "8", "--to", str(expected)]
    assert main(words) == 0
    assert "to be added: model:" in capsys.readouterr().out
    assert main(["config", "check", str(expected)]) == 2
    assert main(["config", "check", "stdlib-lm", str(expected)]) == 0
    assert main([*words, "--force", "model.kind=transformer", "data.train={kind: stdlib-text}"]) == 0
    assert main(["config", "check", str(expected)]) == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modle.kind=x", "--modle: unknown key; did you mean model?"),
        ("optim.lr=abc", "--optim.lr: 'abc' is not a number of 0 or more"),
        ("model.kind=transfomer", "--model.kind: 'transfomer' is not a kind of model; did you mean transformer?"),
        ("model.compil=true", "--model.compil: unknown key; did you mean compile?"),
    ],
)
def test_a_wrong_override_is_named(
    override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))
    assert main(["config", "import", str(file), "--ranks", "8", override]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "just words"])
def test_a_file_without_a_mapping_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        import_file(file)
    with pytest.raises(ConfigError, match="can't be read"):
        import_file(tmp_path / "nowhere.yaml")


# --- arbitrary files --------------------------------------------------------------------------------------------------

WORDS = sorted({word.split(".")[-1] for word in key_rows()})


def test_every_row_has_a_rule_and_every_rule_a_row() -> None:
    assert {row.rule for row in key_rows().values()} == set(RULES)
    assert all(row.target or row.note or row.rule == "decay length" for row in key_rows().values())
    expected = {".".join(key) for key in shape.all_keys()}
    sections = {key.rpartition(".")[0] for key in expected}
    named = {
        row.target for row in key_rows().values() if row.target and not row.target.startswith("model.architecture.")
    }
    assert named <= expected | sections | {"data.evaluation"}


def test_every_key_has_an_answer(tmp_path: Path) -> None:
    for word in WORDS:
        file = tmp_path / "one.json"
        file.write_text(json.dumps({word: 3}))
        for finding in listed(read_foreign(file, "yaml"), 8):
            known = finding.answer.status != "not known"
            assert known or word not in key_rows(), word


SECTIONS = [
    "training",
    "fsdp",
    "ddp",
    "deepspeed",
    "optimizer",
    "scheduler",
    "zero_optimization",
    "fp16",
]
VALUES = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        0.1,
        1e-5,
        "",
        "auto",
        "cosine",
        "adamw",
        "bf16",
        "no",
        "steps",
        [],
        [1],
        ["a"],
        {},
    ]
)
FLAT = st.dictionaries(st.sampled_from([*WORDS, "unknown", "Un-Known"]), VALUES, max_size=6)
OWN = ["optim", "data", "parallel", "run", "model", "batch", "memory", "launch", "checkpoint", "precision", "schedule"]
FILES = st.dictionaries(
    st.sampled_from([*WORDS, *SECTIONS, *OWN, *sorted(keys_of(""))]), VALUES | FLAT, min_size=1, max_size=8
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=FILES, kind=st.sampled_from(["yaml", "deepspeed", "trainer", "accelerate"]))
def test_every_key_is_listed(values: dict[str, Any], kind: ForeignKind, tmp_path: Path) -> None:
    file = tmp_path / "any.json"
    file.write_text(json.dumps(values))
    tree, _ = read_file(file)
    assert tree is not None
    findings = listed(read_foreign(file, kind), 4)
    assert [finding.key for finding in findings if finding.where] == [".".join(path) for path, _ in leaves(tree)]
    assert all(finding.answer.settings or finding.answer.why for finding in findings)
    with suppress(ConfigError):  # a valid config or its errors, never another exception
        import_file(file, kind, 4)


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (
            {"num_processes": 4},
            ["--ranks", "2"],
            "is for 4 ranks, and not 2",
        ),
        ({"bf16": True, "fp16": True}, ["--ranks", "2"], "would be lost"),
        ({"num_processes": 4}, ["--to", ".", "--force"], "--force overwrites a file"),
    ],
)
def test_contradictions_are_refused(content, words, message, tmp_path, monkeypatch, capsys):
    from lockstep.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "args.json").write_text(json.dumps(content))
    assert main(["config", "import", "args.json", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("word", "value"), [("nproc_per_node", "gpu"), ("nproc_per_node", "auto"), ("devices", "-1")])
def test_all_gpus_of_the_machine_are_ranks_auto(
    word: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "foreign.yaml"
    file.write_text(f"{word}: {value}\n")
    assert main(["config", "import", str(file), "--lenient"]) == 0
    assert "ranks: auto" in capsys.readouterr().out
    assert main(["train", "digits", f"--{word}={value}"]) == 2
    assert "write `--launch.ranks auto`" in capsys.readouterr().err


def test_an_override_replaces_a_key_that_sets_the_same(tmp_path: Path) -> None:
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"output_dir": "out", "num_train_epochs": 3, "warmup_steps": 5, "learning_rate": 0.1}))
    also = [Override.parse("run.steps=5"), Override.parse("schedule.warmup_ratio=0.1")]
    settings = import_file(file, None, 2, also).settings
    assert settings["run.steps"] == 5
    assert settings["schedule.warmup_ratio"] == 0.1
    assert not {"run.epochs", "schedule.warmup_steps"} & set(settings)

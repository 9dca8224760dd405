"""Wrong configs with the exact message of each: the file is /run.yaml in all messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.loading import load
from lockstep.core.errors import ConfigError

GOOD = """\
model: {kind: transformer, width: 64}
data: {train: {kind: stdlib-text}}
run: {steps: 10}
"""

HUGGING_FACE = """\
learning_rate: 5e-5
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
max_grad_norm: 1.0
num_train_epochs: 3
lr_scheduler_type: constant_with_warmup
fp16: true
save_steps: 500
"""

DERIVES = (
    "Lockstep derives accumulation: write `batch.global_size`, the samples of an update on all ranks, and "
    "`batch.micro_size`, the samples of one forward"
)

WRONG: dict[str, tuple[str, list[str], str]] = {
    "text for a number, by flag": (
        GOOD,
        ["--batch.global_size=abc", "--optim.lr=fast"],
        "--batch.global_size: 'abc' is not a whole number above 0\n--optim.lr: 'fast' is not a number of 0 or more",
    ),
    "a value that is gone": (
        GOOD + "recovery: {bad_numbers: {nonfinite: retry}}\n",
        [],
        "/run.yaml:4:37: recovery.bad_numbers.nonfinite: 'retry' is not one of skip, rollback, stop",
    ),
    "a key that is gone": (
        GOOD + "recovery: {grow_after: 1000}\n",
        [],
        "/run.yaml:4:12: recovery.grow_after: sizes that were halved stay so until the next start of the run, which "
        "begins with `batch.micro_size`: leave this key out",
    ),
    "out of range": (
        GOOD + "batch: {global_size: 0}\nschedule: {warmup_ratio: 1.5}\nprecision: {loss_scale: {initial: -1}}\n",
        [],
        "/run.yaml:4:22: batch.global_size: 0 is not a whole number above 0; the nearest is 1\n"
        "/run.yaml:5:26: schedule.warmup_ratio: 1.5 is not a number from 0 to 1, or null; the nearest is 1\n"
        "/run.yaml:6:35: precision.loss_scale.initial: -1 is not a number above 0",
    ),
    "other words for a value, and durations with a unit": (
        GOOD + "launch: {device: gpu, timeout: 30s}\nrecovery: {host_wait: 2m, watchdog: {end_after: 1.5h}}\n"
        "checkpoint: {best_is: max, async: true}\n",
        [],
        "/run.yaml:4:18: launch.device: 'gpu' is not one of auto, cpu, cuda, xpu, mps, mtia, npu, hpu, mlu, musa; did "
        "you mean cuda?\n"
        "/run.yaml:4:32: launch.timeout: '30s' is not a number above 0\n"
        "/run.yaml:5:49: recovery.watchdog.end_after: '1.5h' is not a number of 0 or more, or null\n"
        "/run.yaml:5:23: recovery.host_wait: '2m' is not a number of 0 or more\n"
        "/run.yaml:6:23: checkpoint.best_is: 'max' is not one of auto, lowest, highest\n"
        "/run.yaml:6:28: checkpoint.async: unknown key; did you mean asynchronous?",
    ),
    "where and how many hosts meet": (
        GOOD + "launch: {nodes: '3:2', rendezvous: abc}\n",
        [],
        "/run.yaml:4:17: launch.nodes: 3:2 ends below its beginning; write 2:3\n"
        "/run.yaml:4:36: launch.rendezvous: 'abc' is not HOST:PORT, such as 10.0.0.1:29500",
    ),
    "limits of which the later one comes first": (
        GOOD + "recovery: {watchdog: {least: 3, end_after: 1}}\n",
        [],
        "/run.yaml:4:12: recovery.watchdog: end_after 1 is less than least: write 6 or more, or null",
    ),
    "misspelled keys and values": (
        GOOD + "optim:\n  namee: adam\n  name: adamv\n  momentun: 0.9\nbach: {global_size: 3}\n",
        [],
        "/run.yaml:6:9: optim.name: 'adamv' is not one of adamw, adam, sgd, muon, adafactor, lion, adamw-8bit, "
        "schedule-free, custom, given; did "
        "you mean adam?\n"
        "/run.yaml:5:3: optim.namee: unknown key; did you mean name?\n"
        "/run.yaml:7:3: optim.momentun: unknown key; did you mean momentum?\n"
        "/run.yaml:8:1: bach: unknown key; did you mean batch?",
    ),
    "units where an interval is wanted": (
        GOOD + "evaluation: {minutes: 2.5}\ncheckpoint: {steps: 5}\n",
        [],
        "/run.yaml:4:14: evaluation.minutes: a unit, not a key; write `evaluation.every: N minutes`\n"
        "/run.yaml:5:14: checkpoint.steps: a unit, not a key; write `checkpoint.every: N steps`",
    ),
    "a wrong kind, a key of another kind, a kind forgotten": (
        "model: {kind: transformr, width: 64}\n"
        "data:\n  train: {kind: digits, length: 3}\n  evaluation: {test: {split: held-out}}\n"
        "run: {steps: 10}\n",
        [],
        "/run.yaml:1:15: model.kind: 'transformr' is not a kind of model; did you mean transformer?\n"
        "/run.yaml:3:25: data.train.length: only other kinds have this key\n"
        "/run.yaml:4:16: data.evaluation.test.kind: is missing; one of stdlib-text, stdlib-functions, digits, tokens, "
        "huggingface, custom, given",
    ),
    "YAML 1.1's booleans": (
        GOOD + "monitor: {tensorboard: no}\ndata: {shuffle: off}\n",
        [],
        "/run.yaml:5:1: data: given twice, first at /run.yaml:2:1; keep one\n"
        "/run.yaml:4:24: monitor.tensorboard: 'no' is not true or false",
    ),
    "a seed beside an argument of that name": (
        GOOD + "monitors: [{target: 'm:N', arguments: {seed: 1}}]\nseed: 3\n",
        [],
        "/run.yaml:5:1: seed: Lockstep's key is run.seed: write `run.seed: 3`",
    ),
    "words of transformers": (
        GOOD + HUGGING_FACE,
        [],
        "/run.yaml:4:1: learning_rate: Lockstep's key is optim.lr: write `optim.lr: 5e-5`\n"
        f"/run.yaml:5:1: per_device_train_batch_size: {DERIVES}\n"
        f"/run.yaml:6:1: gradient_accumulation_steps: {DERIVES}\n"
        "/run.yaml:7:1: max_grad_norm: Lockstep's key is optim.clip_norm: write `optim.clip_norm: 1.0`\n"
        "/run.yaml:8:1: num_train_epochs: Lockstep's key is run.epochs: write `run.epochs: 3`\n"
        "/run.yaml:9:1: lr_scheduler_type: Lockstep's key is schedule.kind: write `schedule.kind: constant`\n"
        "/run.yaml:10:1: fp16: Lockstep's key is precision.compute: write `precision.compute: fp16`\n"
        "/run.yaml:11:1: save_steps: Lockstep's key is checkpoint.every: write `checkpoint.every: 500`",
    ),
    "words of Lightning and DeepSpeed": (
        GOOD + "trainer:\n  devices: 4\n  strategy: fsdp\n  precision: bf16-mixed\n  gradient_clip_val: 0\n"
        "zero_optimization: {stage: 2}\n",
        [],
        "/run.yaml:5:3: trainer.devices: Lockstep's key is launch.ranks: write `launch.ranks: 4`\n"
        "/run.yaml:6:3: trainer.strategy: Lockstep's key is parallel.strategy: write `parallel.strategy: fsdp`\n"
        "/run.yaml:7:3: trainer.precision: Lockstep's key is precision.compute: write `precision.compute: bf16`\n"
        "/run.yaml:8:3: trainer.gradient_clip_val: Lockstep's key is optim.clip_norm: write `optim.clip_norm: null`\n"
        "/run.yaml:9:1: zero_optimization: write `parallel.strategy: deepspeed`, and the stage as "
        "`parallel.deepspeed.zero_stage`",
    ),
    "words for activation checkpointing": (
        GOOD + "gradient_checkpointing: true\nactivation_checkpointing: {partition_activations: true}\n"
        "parallel: {fsdp: {fsdp_activation_checkpointing: false}}\nmemory: {activation_checkpointing: {every: 2}}\n"
        "gradient_checkpointing_kwargs: {use_reentrant: false}\n",
        [],
        "/run.yaml:6:19: parallel.fsdp.fsdp_activation_checkpointing: Lockstep's key is "
        "memory.activation_checkpointing.mode: write `memory.activation_checkpointing.mode: none`\n"
        "/run.yaml:7:10: memory.activation_checkpointing: every 2 is an option of mode full or "
        "selective; none would ignore it\n"
        "/run.yaml:4:1: gradient_checkpointing: Lockstep's key is memory.activation_checkpointing.mode: write "
        "`memory.activation_checkpointing.mode: full`\n"
        "/run.yaml:5:1: activation_checkpointing: Lockstep's key is memory.activation_checkpointing.mode; true "
        "or false, full or selective\n"
        "/run.yaml:8:1: gradient_checkpointing_kwargs: activation checkpointing is never reentrant in "
        "Lockstep, and restores random numbers",
    ),
    "a switch of another tool that is off": (
        GOOD + "fp16: no\n",
        [],
        "/run.yaml:4:1: fp16: Lockstep's key is precision.compute: write `precision.compute: fp32`",
    ),
    "no length of the run, or two": (
        "model: {kind: transformer}\ndata: {train: {kind: stdlib-text}}\nrun: {steps: 10, epochs: 2}\n",
        [],
        "/run.yaml:3:1: run: steps and epochs contradict each other; give exactly one of steps, samples, tokens, "
        "epochs",
    ),
    "numbers that don't fit together": (
        "model: {kind: transformer, width: 100, heads: 6}\ndata: {train: {kind: stdlib-text}}\nrun: {steps: 10}\n"
        "schedule: {warmup_steps: 10, warmup_ratio: 0.1}\n",
        [],
        "/run.yaml:1:1: model: width 100 must be an even multiple of heads 6 (rotary embedding turns pairs); the "
        "nearest width is 96\n"
        "/run.yaml:4:1: schedule: warmup_steps and warmup_ratio set the same thing; keep one",
    ),
    "everything forgotten": (
        "",
        [],
        "/run.yaml: model.kind: is missing; one of transformer, text-classifier, image-classifier, huggingface, "
        "custom, given\n"
        "/run.yaml: data.train.kind: is missing; one of stdlib-text, stdlib-functions, digits, tokens, huggingface, "
        "custom, given\n"
        "/run.yaml: run: the length of the run is missing; give exactly one of steps, samples, tokens, epochs",
    ),
    "a range that ends before it begins": (
        GOOD,
        ["data.leave_out=[[5, 3]]"],
        "--data.leave_out: [5, 3] ends before its first sample; write [3, 5]",
    ),
    "lists and mappings": (
        GOOD + "optim: adamw_torch\n",
        [
            "model.freeze=head.*",
            "data.leave_out=17",
            "--data.loader=3",
            "--launch.ranks",
            "--evaluation.every=often",
        ],
        "--launch.ranks: has no value; write --launch.ranks=VALUE\n"
        "--model.freeze: 'head.*' is not a list of text; write [head.*]\n"
        "--data.leave_out: 17 is not a list of lists of 2 whole numbers from 0 to 4611686018427387903\n"
        "--data.loader: 3 is not a mapping; its keys are workers, prefetch, persistent_workers, pin_memory\n"
        "/run.yaml:4:8: optim: Lockstep's key is optim.name: write `optim.name: adamw`\n"
        "--evaluation.every: 'often' is not an interval; write a number of steps (100), or '100 steps', '64k samples', "
        "'1M tokens', '5 minutes', '0.5 epochs'",
    ),
    "a list for a plan": (
        GOOD,
        ["parallel.tensor_parallel.plan=[a]", "parallel.deepspeed.config=[a]"],
        "--parallel.tensor_parallel.plan: ['a'] is not a mapping of names to values, or auto\n"
        "--parallel.deepspeed.config: ['a'] is not text, or a mapping of names to values, or null",
    ),
    "a mapping for a style": (
        GOOD + "parallel: {tensor_parallel: {plan: {str: {a: colwise}, b: rowwise}}}\n",
        [],
        "/run.yaml:4:37: parallel.tensor_parallel.plan.str: a mapping is not text",
    ),
    "a quote that is never closed": (
        GOOD + 'description: "a run\n',
        [],
        "/run.yaml:4:14: this quote is never closed",
    ),
    "a pattern without quotes": (
        GOOD + "optim: {rules: [{match: [*.bias]}]}\n",
        [],
        "/run.yaml:4:26: `*` begins an alias in YAML; quote the text, as in '*.bias'",
    ),
    "a tab": (
        "model:\n\tkind: transformer\n",
        [],
        "/run.yaml:2:1: a tab; YAML is indented with spaces",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_message_is_exact(case: str, tmp_path: Path) -> None:
    text, overrides, expected = WRONG[case]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load([path], overrides, environ={})
    assert str(caught.value).replace(str(tmp_path), "") == expected
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("recovery.max_restarts=3", "write `--recovery.restarts 3`"),
        ("max_restarts=3", "write `--recovery.restarts 3`"),
        ("launch.max_restarts=3", "write `--recovery.restarts 3`"),
        ("recovery.retries=3", "write `--recovery.restarts 3`"),
        ("batch=abc", "'abc' is not a mapping; its keys are global_size, micro_size"),
        ("recovery.budget.transient=3", "recovery.budget: unknown key; did you mean budgets?"),
        ("recovery.budgets.oom=3", "write `--recovery.budgets.memory 3`"),
        ("recovery.watchdog.timeout=5", "write `--recovery.watchdog.end_after 5`"),
        ("recovery.bad_numbers.rollback=10", "unknown key; did you mean rollback_steps?"),
        ("recovery.bad_numbers.nan=skip", "write `--recovery.bad_numbers.nonfinite skip`"),
        ("recovery.snapshot=3", "unknown key; did you mean snapshot_every?"),
        ("data.bad_samples.max=3", "write `--data.bad_samples.limit 3`"),
        ("launch.time_out=3", "unknown key; did you mean timeout?"),
        ("optim.weight_deca=3", "unknown key; did you mean weight_decay?"),
        ("optim.learning_rat=3", "did you mean learning_rate? Lockstep's key is optim.lr: write `--optim.lr 3`"),
        ("optim.warmup_stepz=3", "Lockstep's key is schedule.warmup_steps: write `--schedule.warmup_steps 3`"),
    ],
)
def test_a_wrong_key_of_a_section_gets_a_key_of_that_section(override: str, answer: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    with pytest.raises(ConfigError) as error:
        load([str(tmp_path / "run.yaml")], [f"--{override}"])
    assert str(error.value).endswith(answer)


def test_a_section_of_another_tool_is_not_reported_beside_its_keys(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    with pytest.raises(ConfigError) as error:
        load([str(tmp_path / "run.yaml")], ["--train.steps=3"])
    assert str(error.value) == "--train.steps: Lockstep's key is run.steps: write `--run.steps 3`"
    with pytest.raises(ConfigError, match="train: there is no such section"):
        load([str(tmp_path / "run.yaml")], ["--train.steps=3", "--train.other=3"])

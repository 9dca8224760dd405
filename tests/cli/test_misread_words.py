"""Words of other tools and near misses on the command line, with the exact message for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kit.failures import gives

from lockstep.cli.main import main

TRACKERS = "write monitor.trackers: [{target: wandb, arguments: {project: NAME}}]"
MESSAGES: dict[str, tuple[str, str]] = {
    "a size without a unit": (
        "plan stdlib-lm --memory 80",
        "--memory: '80' is not a size; write 80GiB, 80GB, or a number with B for bytes",
    ),
    "a rehearsal": ("train --dry-run", "--dry-run: `lockstep plan` shows what a run will be, and starts none"),
    "a file behind a flag": (
        "train --config x.yaml",
        "--config: name the file without a flag",
    ),
    "a tracker": ("train --wandb", f"--wandb: {TRACKERS}"),
    "a tracker's project": ("train --wandb-project x", f"--wandb-project: {TRACKERS}"),
    "a tracker as a key": ("train monitor.wandb=true", f"--monitor.wandb: {TRACKERS}"),
    "an average": ("train --ema 0.99", "--ema: write optim.ema: {decay: 0.999}"),
    "a launcher": (
        "launch train.py",
        "'train.py' is no place to launch at, which are aws, docker, kubernetes, ray, slurm, ssh, or module:Name; "
        "lockstep train --ranks N starts N ranks here",
    ),
    "another's verb": ("predict x", "there is no verb 'predict'; lockstep generate RUN continues a text"),
    "a near verb": ("trian", "there is no verb 'trian'; did you mean train?"),
    "a strategy's name": (
        "train --ddp",
        "--ddp: write `parallel.strategy: ddp`, and its options under `parallel.ddp`",
    ),
    "a stage": (
        "train --zero 3",
        "--zero: Lockstep's key is parallel.deepspeed.zero_stage: write `--parallel.deepspeed.zero_stage 3`",
    ),
    "the CPU": ("train --use_cpu", "--use_cpu: Lockstep's key is launch.device: write `--launch.device cpu`"),
    "all GPUs": (
        "train --multi_gpu",
        "--multi_gpu: write `--ranks auto`, one process a GPU; parallel.strategy is ddp, fsdp or deepspeed",
    ),
    "the last rate": (
        "train --optim.lr 1e-3 --min_lr 1e-4",
        "--min_lr: Lockstep's key is schedule.final_ratio: write `--schedule.final_ratio 0.1`",
    ),
    "a warm-up": (
        "train --warmup 10",
        "--warmup: Lockstep's key is schedule.warmup_steps: write `--schedule.warmup_steps 10`",
    ),
    "a name, which is the folder's": (
        "train --run_name x", "--run_name: write run.folder: runs/x, since a run's name is its folder",
    ),
    "an interval of saves": (
        "train --checkpoint_every 5",
        "--checkpoint_every: Lockstep's key is checkpoint.every: write `--checkpoint.every 5`",
    ),
    "a data set": (
        "train --dataset wikitext",
        "--dataset: Lockstep's key is data.train.name: write `--data.train.name wikitext`",
    ),
    "a model by name": (
        "train --model gpt2",
        "--model: Lockstep's key is model.kind: write `--model.kind huggingface` and `--model.pretrained gpt2`",
    ),
    "patience": ("train --patience 3", "--patience: write monitor.early_stopping: {metric: SET.METRIC, patience: N}"),
    "TOML": (
        "train {folder}/a.toml",
        "a.toml: is TOML, and a config is YAML or JSON: sections, with lines `key: value`",
    ),
    "a metric misspelt": (
        "config check stdlib-lm --checkpoint.best held-out.los",
        "--checkpoint.best: checkpoint.best: no evaluation has the metric 'los'; did you mean loss?",
    ),
    "a set misspelt": (
        "config check stdlib-lm --checkpoint.best held-ot.loss",
        "--checkpoint.best: checkpoint.best held-ot.loss is not in data.evaluation, which has: held-out",
    ),
    "a flag against the recipe": (
        "config check stdlib-lm --optim.nesterov true",
        "--optim.nesterov: optim: nesterov is an option of sgd; adamw would ignore it",
    ),
    "a flag against the recipe, in another section": (
        "config check stdlib-lm --memory.activation_checkpointing.mode budget",
        "--memory.activation_checkpointing.mode: memory.activation_checkpointing.mode budget needs model.compile",
    ),
    "two flags": (
        "config check stdlib-lm --schedule.warmup_steps 5 --schedule.warmup_ratio 0.1",
        "schedule: warmup_steps and warmup_ratio set the same thing; keep one",
    ),
    "a class that the model lacks": (
        "plan stdlib-lm --ranks 2 --parallel.strategy fsdp --parallel.fsdp.wrap [Blocc]",
        "parallel.fsdp.wrap: the model has no module of class Blocc; did you mean Block?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MESSAGES)
def test_the_message(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = MESSAGES[case]
    (tmp_path / "a.toml").write_text("[optim]\nlr = 1e-3\n")
    assert main(words.format(folder=tmp_path).split()) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "recipes/" not in printed


def test_a_contradicting_environment_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_MODEL__WIDTH", "100")
    assert main(["config", "check", "stdlib-lm"]) == 2
    assert gives(capsys.readouterr().err, "LOCKSTEP_MODEL__WIDTH:", "width 100")


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_missing_torch_is_reported_in_one_line(verb: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from lockstep.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, verb, "stdlib-lm"], capture_output=True, text=True)
    assert done.returncode == 2
    assert gives(done.stderr, "torch", "pip install torch")
    assert done.stderr.count("\n") == 1

"""The guide's script, configs and launch scripts in examples/guide, with tiny models."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.commands import run_script
from safetensors.numpy import save_file

import lockstep
from lockstep.config.deepspeed import engine_config
from lockstep.config.deepspeed_check import Derived
from lockstep.config.loading import load, validate

GUIDE = Path(__file__).parents[2] / "examples" / "guide"
MODES = {"ddp": "ddp.yaml", "fsdp": "fsdp.yaml", "deepspeed": "deepspeed.json"}
STEPS = 3
SMALLER = [
    (r"length: 256", "length: 32"),
    (r"samples: 256", "samples: 32"),
    (r"steps: 500", f"steps: {STEPS}"),
    (r"(global_size|\"train_batch_size\"): 32", r"\1: 8"),
    (r"(micro_size|_gpu\"): \d", r"\1: 2"),
    (r"total_num_steps\": 500", f'total_num_steps": {STEPS}'),
    (r"warmup_num_steps\": 50", 'warmup_num_steps": 1'),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama, each config made smaller, and the commands that the scripts call."""
    folder = tmp_path_factory.mktemp("guide")
    write_llama(folder / "model")
    for name in MODES.values():
        (folder / name).write_text(smaller((GUIDE / "configs" / name).read_text()))
    for name, module in {"torchrun": "torch.distributed.run", "lockstep": "lockstep"}.items():
        command(folder, name, f'exec {sys.executable} -m {module} "$@"')
    return folder


def write_llama(folder: Path, width: int = 32, vocabulary: int = 256) -> None:
    """Write what the library would write, without its import time."""
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": width,
        "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (vocabulary, width), "lm_head": (vocabulary, width), "model.norm": (width,)}
    for layer in (f"model.layers.{number}" for number in range(2)):
        shapes |= {f"{layer}.self_attn.{part}_proj": (width, width) for part in "qkvo"}
        shapes |= {f"{layer}.mlp.{part}_proj": (2 * width, width) for part in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (width, 2 * width)}
        shapes |= {f"{layer}.{part}_layernorm": (width,) for part in ("input", "post_attention")}
    draws = np.random.default_rng(0)
    weights = {
        f"{name}.weight": np.ones(shape, np.float32) if len(shape) == 1 else draws.normal(0, 0.02, shape)
        for name, shape in shapes.items()
    }
    save_file({name: value.astype(np.float32) for name, value in weights.items()}, folder / "model.safetensors")


def smaller(text: str) -> str:
    for pattern, replacement in SMALLER:
        text = re.sub(pattern, replacement, text)
    return text


def command(folder: Path, name: str, body: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / "bin" / name).chmod(0o755)


def start(place: Path, script: str, mode: str, output: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "MODEL_NAME": str(place / "model"),
        "CONFIG": str(place / MODES.get(mode, "none")),
        "OUTPUT_DIR": str(output),
        **variables,
    }
    return subprocess.Popen(
        ["bash", str(GUIDE / "scripts" / script), mode],
        cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def done(process: subprocess.Popen[str], output: Path) -> dict[str, Any]:
    printed, _ = process.communicate(timeout=140)
    assert process.returncode == 0, printed
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["ranks"] == 2
    return summary  # type: ignore[no-any-return]


def test_train_py_is_short() -> None:
    assert len((GUIDE / "train.py").read_text().splitlines()) < 70


@pytest.mark.parametrize("name", ["ddp.yaml", "fsdp.yaml"])
def test_the_yaml_files_are_complete_configs(name: str) -> None:
    assert load([GUIDE / "configs" / name], environ={}).config.run.steps == 500


def test_every_key_of_the_deepspeed_json_has_a_counterpart() -> None:
    values = lockstep.import_config(GUIDE / "configs" / "deepspeed.json")
    assert values["batch"] == {"global_size": 32, "micro_size": 4}
    assert values["parallel"]["deepspeed"]["zero_stage"] == 2  # type: ignore[index]
    assert values["run"] == {"steps": 500}


@pytest.mark.drill
def test_launchers_on_one_node_give_the_same_run(place: Path, tmp_path: Path) -> None:
    """`train.py` under torchrun and the command give the same run."""
    script = done(start(place, "one_node.sh", "ddp", tmp_path / "script"), tmp_path / "script")
    own = done(start(place, "own_launcher.sh", "ddp", tmp_path / "own"), tmp_path / "own")
    assert script["evaluation"] == own["evaluation"]


@pytest.mark.drill
def test_on_many_nodes(place: Path, tmp_path: Path) -> None:
    """Run two nodes with one rank each on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        head = f"127.0.0.1:{probe.getsockname()[1]}"
    variables = {"NODES": "2", "RANKS": "1", "HEAD": head}
    nodes = [start(place, "many_nodes.sh", "fsdp", tmp_path / "out", **variables) for _ in range(2)]
    done(nodes[0], tmp_path / "out")
    assert nodes[1].wait(timeout=60) == 0


@pytest.mark.drill
def test_deepspeed_runs_from_its_json(place: Path, tmp_path: Path) -> None:
    done(start(place, "one_node.sh", "deepspeed", tmp_path / "out"), tmp_path / "out")
    result = load([tmp_path / "out" / "config.yaml"], environ={}).config
    assert (result.parallel.strategy, result.parallel.deepspeed.zero_stage) == ("deepspeed", 2)
    assert (result.batch.global_size, result.batch.micro_size) == (8, 2)


def test_the_custom_launcher_accepts_the_json(place: Path, tmp_path: Path) -> None:
    """Check the arguments that `lockstep train` gets."""
    command(
        tmp_path,
        "lockstep",
        f"""\
if [[ $1 == train ]]; then shift; set -- config check "${{@:1:2}}" "${{@:5}}"; fi
{sys.executable} -m lockstep "$@" """,
    )
    process = start(
        place, "own_launcher.sh", "deepspeed", tmp_path / "out",
        BASE=str(place / "ddp.yaml"), PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    )  # fmt: skip
    printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed.splitlines()[-1]) == (0, "ok"), printed


def test_the_custom_launcher_s_mode_selects_the_strategy(place: Path, tmp_path: Path) -> None:
    """The config has no strategy; an unknown mode is named."""
    command(tmp_path, "lockstep", 'echo "$@"')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    printed, _ = start(place, "own_launcher.sh", "fsdp", tmp_path / "out", PATH=path).communicate(timeout=60)
    assert f"train {place / 'fsdp.yaml'} --ranks 2 --parallel.strategy fsdp" in printed
    wrong = start(place, "own_launcher.sh", "foo", tmp_path / "out", PATH=path, CONFIG="")
    printed, _ = wrong.communicate(timeout=60)
    assert (wrong.returncode, "no mode foo; which mode: ddp, fsdp or deepspeed" in printed) == (2, True), printed


def test_slurm_passes_the_rendezvous_endpoint_to_each_node(place: Path, tmp_path: Path) -> None:
    """Run what srun would start on each node; Slurm is simulated."""
    command(tmp_path, "scontrol", "echo node0; echo node1")
    command(tmp_path, "srun", 'shift; exec "$@"')
    command(tmp_path, "torchrun", 'echo "$@"')
    process = start(
        place, "slurm.sh", "fsdp", tmp_path / "out", SLURM_SUBMIT_DIR=str(GUIDE), SLURM_JOB_NODELIST="node[0-1]",
        SLURM_NNODES="2", SLURM_JOB_ID="7", RANKS="8", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    )  # fmt: skip
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id 7" in printed
    assert "--mode fsdp" in printed


@pytest.mark.parametrize("script", sorted(path.name for path in (GUIDE / "scripts").glob("*.sh")))
def test_scripts_stop_at_missing_parts(script: str, place: Path) -> None:
    text = (GUIDE / "scripts" / script).read_text()
    assert "set -euo pipefail" in text
    environment = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", str(GUIDE / "scripts" / script)], env=environment, capture_output=True, text=True)
    assert run.returncode != 0
    assert "which mode" in run.stderr or "to be started by sbatch" in run.stderr


def test_torchrun_s_report_ends_with_the_message(place: Path, tmp_path: Path) -> None:
    alone = {"RANKS": "1", "MODEL_NAME": "gpt2", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    process = start(place, "one_node.sh", "ddp", tmp_path / "out", **alone)
    printed, _ = process.communicate(timeout=140)
    assert process.returncode == 1, "torchrun turns every exit code into it"
    sentence = "model gpt2 is neither a folder here nor in the cache, and the hub does not answer"
    assert f"train.py: {sentence}" in printed
    *_, cause, _border = printed.strip().splitlines()
    assert cause.strip().startswith(f"traceback : {sentence}")


def test_a_config_error_is_reported_without_a_traceback(place: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("batch: {global_sise: 3}\nrun: {steps: 1}\n")
    words = ["--mode", "ddp", "--config", str(tmp_path / "wrong.yaml"), "--model_name", str(place / "model")]
    run = run_script(GUIDE / "train.py", *words, cwd=tmp_path)
    assert run.returncode == 2
    assert "global_sise: did you mean" in run.stderr
    assert "Traceback" not in run.stderr


# --- files as guides have them ----------------------------------------------------------------------------------------

FILES = {
    "ddp": """\
training:
  model_name: "some/encoder"
  batch_size_per_gpu: 2
  gradient_accumulation_steps: 2
  learning_rate: 3e-5
  num_epochs: 0.0003
  warmup_ratio: 0.2
  weight_decay: 0.02
  max_grad_norm: 0.5
distributed:
  backend: "nccl"
  find_unused_parameters: false
  gradient_as_bucket_view: true
  static_graph: true
checkpointing:
  save_every_n_steps: 100
  checkpoint_dir: "./checkpoints"
  keep_last_n: 2
logging:
  log_every_n_steps: 1
  use_tensorboard: true
  use_wandb: false
""",
    "fsdp": """\
training:
  model_name: "some/decoder"
  batch_size_per_gpu: 2
  gradient_accumulation_steps: 2
  learning_rate: 2e-5
  num_epochs: 0.0003
  max_length: 64
fsdp:
  sharding_strategy: "FULL_SHARD"
  cpu_offload: false
  backward_prefetch: "BACKWARD_PRE"
  forward_prefetch: true
  auto_wrap_policy: "transformer_based"
  min_num_params: 1000000
  use_orig_params: true
  sync_module_states: true
activation_checkpointing:
  enabled: true
  checkpoint_every_n_layers: 2
mixed_precision:
  param_dtype: "bfloat16"
  reduce_dtype: "float32"
  buffer_dtype: "float32"
""",
    "deepspeed": json.dumps({
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {
            "type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": STEPS,
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
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
        "activation_checkpointing": {
            "partition_activations": True, "cpu_checkpointing": True, "contiguous_memory_optimization": True,
            "number_checkpoints": None,
        },
    }, indent=2),
}  # fmt: skip
NAMED = {"ddp": "ddp_config.yaml", "fsdp": "fsdp_config.yaml", "deepspeed": "deepspeed_config.json"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for mode, name in NAMED.items():
        (tmp_path / name).write_text(FILES[mode])
    return tmp_path


@pytest.mark.parametrize("mode", NAMED)
def test_every_key_of_a_guide_s_file_has_a_counterpart(
    mode: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    values: dict[str, Any] = lockstep.import_config(files / NAMED[mode])
    to_do = re.findall(r"to do: (?:\S+:\d+:\d+: |\S+\.json: )?(.+?): ", capsys.readouterr().err)
    assert to_do == {
        "ddp": ["(schedule)"],
        "fsdp": ["training.max_length", "(schedule)"],
        "deepspeed": ["train_batch_size", "optimizer.params.lr", "optimizer.params.weight_decay",
                      "scheduler.params.warmup_num_steps", "activation_checkpointing.cpu_checkpointing"],
    }[mode]  # fmt: skip
    if mode == "ddp":
        assert values["checkpoint"] == {"every": 100, "folder": "./checkpoints", "keep_last": 2}
        assert values["batch"] == {"global_size": 8, "micro_size": 2}
    if mode == "fsdp":
        assert values["memory"] == {"activation_checkpointing": {"mode": "full", "every": 2}}
    if mode == "deepspeed":
        assert values["memory"] == {"activation_checkpointing": {"mode": "full"}}
        assert values["schedule"] == {"kind": "linear", "warmup_steps": "???", "warmup_type": "log"}


def test_a_guide_s_deepspeed_json_agrees_with_its_config(files: Path) -> None:
    whole = {
        "model": {"kind": "transformer"}, "data": {"train": {"kind": "stdlib-text"}}, "run": {"steps": STEPS},
        "optim": {"betas": [0.9, 0.98], "eps": 1e-7, "clip_norm": 0.5},
        "schedule": {"kind": "linear", "warmup_steps": 2, "warmup_type": "log"}, "precision": {"compute": "bf16"},
        "memory": {"activation_checkpointing": {"mode": "full"}},
        "parallel": {"strategy": "deepspeed", "deepspeed": {
            "zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "pin_memory": True,
            "config": str(files / NAMED["deepspeed"]),
        }},
    }  # fmt: skip
    handed = engine_config(validate(whole).config, Derived(2, 16, 1, STEPS, 1000))
    assert handed["zero_optimization"]["overlap_comm"] is True
    assert "activation_checkpointing" not in handed


@pytest.mark.drill
def test_a_guide_s_three_files_train_one_after_the_other_in_one_folder(place: Path, files: Path) -> None:
    """Run `train.py` under torchrun, as in the guide."""
    for mode, name in NAMED.items():
        words = ["--mode", mode, "--config", name, "--model_name", str(place / "model"), "--output_dir", f"out/{mode}"]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(GUIDE / "train.py")]
        run = subprocess.run(
            [*command, *words], cwd=files, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        summary = json.loads((files / "out" / mode / "summary.json").read_text())
        assert (summary["ranks"], summary["steps"] > 0) == (2, True)
        assert load([files / "out" / mode / "config.yaml"], environ={}).config.parallel.strategy == mode


# --- trainer classes, and scripts that watch and debug ----------------------------------------------------------------


def under_torchrun(script: str, *words: object, cwd: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", GUIDE / script, *words]
    run = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=140)
    assert run.returncode == 0, run.stderr
    return run.stdout


def losses(printed: str) -> list[dict[str, float]]:
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    return [ast.literal_eval(line[line.index("{") :]) for line in lines]


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_the_trainer_classes_train_the_same_run_and_resume_it(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    printed = {mode: under_torchrun("own_trainer.py", mode, tmp_path / mode, cwd=tmp_path) for mode in MODES}
    ddp, *others = map(losses, printed.values())
    assert len(ddp) == 3
    for other in others:
        for epoch, expected in zip(other, ddp, strict=True):
            assert epoch == pytest.approx(expected, rel=1e-5)
    assert ddp[-1]["eval/loss"] < ddp[0]["eval/loss"]
    assert "effective batch 64 = 16 x 2 x 2" in printed["fsdp"]
    assert losses(under_torchrun("own_trainer.py", "ddp", tmp_path / "fsdp", cwd=tmp_path)) == [], "it was finished"


@pytest.mark.drill
def test_the_monitoring_script_writes_a_log_and_a_trace_for_each_rank(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    under_torchrun("monitoring.py", tmp_path / "out", cwd=tmp_path)
    for rank in range(2):
        assert "train accuracy" in (tmp_path / "out" / f"rank-{rank}.log").read_text()
        assert json.loads((tmp_path / "out" / f"rank{rank}.json").read_text())["traceEvents"]


def test_the_debugging_script_shows_ranks_and_compares_copies(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    printed = under_torchrun("debugging.py", cwd=tmp_path)
    assert re.search(r"rank 0: .* pid \d+.*\nrank 1: ", printed)
    assert "parameters that differ: none" in printed
    assert re.search(r"rank [01]: [\d.]+ ms a step", printed)


def test_the_config_of_bert_is_complete() -> None:
    config = load([GUIDE / "configs" / "bert.yaml"], environ={}).config
    assert config.model.kind == "huggingface"
    assert (config.model.task, config.batch.global_size) == ("sequence-classification", 32)

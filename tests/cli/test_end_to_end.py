"""The command line: complete runs in separate processes."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.commands import Done, processes_of_group, run_lockstep, start_lockstep
from kit.failures import gives
from kit.waiting import UNHURRIED

LOCKSTEP = [sys.executable, "-m", "lockstep"]
OWN_PARTS = Path(__file__).with_name("own_parts.py")
QUIET = ["--monitor.tensorboard", "false", "--monitor.progress", "plain", "--launch.device", "cpu"]


def _environment(**variables: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    return {**plain, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **variables}


def output_of(done: Done) -> Any:
    """Return the JSON on stdout of a command that succeeded."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def metrics(run: Path) -> list[dict[str, Any]]:
    names = ("metrics.jsonl", "events.jsonl")
    return [json.loads(line) for name in names for line in (run / name).read_text().splitlines()]


# --- a recipe, from training to what is left ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two ranks, and its JSON output."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    words = ["--run.steps", "12", "--monitor.every", "5", "--evaluation.every", "6", "--run.folder", "run"]
    words += ["--batch.global_size", "50", "--launch.device", "cpu", "--precision.compute", "fp32"]
    words += ["--ranks", "2", "--run.epochs", "null", "--model.width", "8", "--json"]
    done = run_lockstep("train", "digits", *words, cwd=folder)
    return folder / "run", output_of(done)


def test_the_summary(digits: tuple[Path, dict[str, Any]]) -> None:
    run, summary = digits
    assert summary["run"] == str(run)
    assert (summary["steps"], summary["samples"], summary["tokens"]) == (12, 600, 600)
    assert summary["seconds"] > 0
    assert set(summary["evaluation"]["held-out"]) == {"loss", "accuracy"}
    assert (summary["ranks"], summary["strategy"], summary["backend"]) == (2, "ddp", "gloo")
    assert json.loads((run / "summary.json").read_text()) == summary


def test_the_run_folder(digits: tuple[Path, dict[str, Any]]) -> None:
    run, _ = digits
    result = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert {"config.yaml", "environment.json", "metrics.jsonl", "summary.json", "model/model.safetensors"} <= result
    assert {"logs/rank-0.log", "logs/rank-1.log"} <= result
    assert any(path.startswith("tensorboard/events") for path in result)


def test_the_metrics(digits: tuple[Path, dict[str, Any]]) -> None:
    run, summary = digits
    lines = metrics(run)
    steps = [line for line in lines if "lr" in line]
    assert [line["step"] for line in steps] == [1, 5, 10, 12]
    assert [line["samples"] for line in steps] == [50, 250, 500, 600]
    assert all(line["loss"] > 0 and line["grad_norm"] > 0 and line["lr"] >= 0 for line in steps)
    evaluations = [line for line in lines if "evaluation" in line]
    assert [(line["evaluation"], line["step"]) for line in evaluations] == [("held-out", 6), ("held-out", 12)]
    assert evaluations[-1]["accuracy"] == summary["evaluation"]["held-out"]["accuracy"]


def test_a_finished_run_is_not_trained_again(digits: tuple[Path, dict[str, Any]]) -> None:
    run, summary = digits
    done = run_lockstep("train", run, "--json", cwd=run.parent)
    assert "is finished" in done.stderr
    assert output_of(done) == summary


@pytest.mark.parametrize("ranks", [1, 2])
def test_eval_reproduces_the_last_evaluation_of_the_run(digits: tuple[Path, dict[str, Any]], ranks: int) -> None:
    run, summary = digits
    result = output_of(run_lockstep("eval", run, "--json", "--ranks", ranks, cwd=run.parent))
    of_eval, of_train = (each["evaluation"]["held-out"] for each in (result, summary))
    assert of_eval == pytest.approx(of_train, rel=1e-6)


def test_generate_refuses_a_classifier(digits: tuple[Path, dict[str, Any]]) -> None:
    run, _ = digits
    done = run_lockstep("generate", run, "def ", cwd=run.parent)
    assert done.returncode == 2
    assert gives(done.stderr, "image-classifier")


def test_generate_continues_a_text(tmp_path: Path) -> None:
    words = ["--model.layers", "1", "--model.width", "32", "--data.train.length", "32", "--run.steps", "3"]
    words += [
        "--batch.global_size",
        "8",
        "--data.evaluation.held-out.samples",
        "8",
        "--data.evaluation.held-out.length",
        "32",
    ]
    summary = output_of(
        run_lockstep("train", "stdlib-lm", "--json", "--run.folder", "run", *words, *QUIET, cwd=tmp_path)
    )
    assert summary["tokens"] == 3 * 8 * 32
    assert summary["evaluation"]["held-out"]["bits_per_byte"] > 0
    done = run_lockstep("generate", "run", "def ", "--tokens", "7", "--temperature", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")
    result = output_of(
        run_lockstep("generate", "run", "def ", "--tokens", "7", "--temperature", "0", "--json", cwd=tmp_path)
    )
    assert "def " + result["text"] + "\n" == done.stdout


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_a_wrong_config_starts_nothing(tmp_path: Path) -> None:
    done = run_lockstep(
        "train", "digits", "--optim.lr", "fast", "--batch.globalsize", "8", "--ranks", "2", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "--optim.lr" in done.stderr
    assert "global_size" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_config_error_on_a_rank_has_exit_code_2(tmp_path: Path) -> None:
    words = ["--parallel.strategy", "single", "--run.folder", "run"]
    done = run_lockstep("train", "digits", "--ranks", "2", *words, *QUIET, cwd=tmp_path)
    assert done.returncode == 2
    assert gives(done.stderr, "parallel.strategy: single")
    assert "Traceback" not in done.stderr


# --- own parts, Hugging Face, other launchers -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the package with a user's file and config."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copy(OWN_PARTS, folder / "mine.py")
    config = {
        "model": {"kind": "custom", "target": "mine.py:Net", "arguments": {"width": 5}},
        "objective": {"kind": "classification"},
        "data": {
            "train": {"kind": "custom", "target": "mine.py:Points"},
            "evaluation": {"few": {"kind": "custom", "target": "mine.py:Points", "arguments": {"samples": 7}}},
        },
        "batch": {"global_size": 8},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "monitor": {"tensorboard": False, "every": 1, "progress": "plain"},
        "run": {"steps": 4},
    }
    (folder / "own.json").write_text(json.dumps(config))
    return folder


def test_a_custom_model_and_dataset(own: Path) -> None:
    summary = output_of(run_lockstep("train", "own.json", "--ranks", "2", "--json", "--run.folder", "cli", cwd=own))
    assert (summary["steps"], summary["samples"], summary["ranks"]) == (4, 32, 2)
    assert summary["parameters"] == 4 * 5 + 5 + 5 * 3 + 3
    assert set(summary["evaluation"]["few"]) == {"loss", "accuracy"}


def test_an_inserted_local_rank(own: Path) -> None:
    """`python -m torch.distributed.launch` and `deepspeed` insert the flag before the verb."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for flag in ("--local-rank=0", "--local_rank=0"):
        words = [flag, "train", "own.json", "--json", "--run.folder", flag.strip("-=0")]
        assert output_of(run_lockstep(*words, cwd=own, **place))["ranks"] == 1
    done = run_lockstep("--local-rank=1", "train", "own.json", cwd=own, **place)
    assert done.returncode == 2
    assert "--local-rank=1" in done.stderr
    assert "LOCAL_RANK" in done.stderr


def test_sigterm_stops_all_ranks(own: Path) -> None:
    words = ["train", "own.json", "--ranks", "2", UNHURRIED, "--run.steps", "100000000", "--run.folder", "stopped"]
    command = start_lockstep(*words, cwd=own)
    command.wait_for((own / "stopped" / "metrics.jsonl").exists)
    ranks = command.ranks
    assert len(ranks) in (2, 4)  # those of the next round may wait already
    command.send(signal.SIGTERM)
    assert command.end() == 75, command.output
    assert re.search(r"stopped at step [\d,]+, .*saved", command.output)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert not (own / "stopped" / "summary.json").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_closing_the_terminal_saves_and_stops_the_run(own: Path, ranks: int) -> None:
    folder = own / f"closed-{ranks}"
    words = ["train", "own.json", "--ranks", ranks, UNHURRIED, "--run.steps", 100_000_000, "--run.folder", folder]
    master, terminal = pty.openpty()
    command = start_lockstep(*words, cwd=own, terminal=os.ttyname(terminal))
    command.wait_for((folder / "metrics.jsonl").exists)
    os.close(terminal)
    os.close(master)
    assert command.end() == 75
    assert len(list((folder / "checkpoints").glob("step-*"))) == 1


def test_a_run_whose_standard_streams_are_closed_is_trained(own: Path) -> None:
    words = shlex.join([*LOCKSTEP, "train", "own.json", "--ranks", "2", "--run.folder", "mute"])
    done = subprocess.run(["sh", "-c", f"{words} <&- >&- 2>&-"], cwd=own, env=_environment(), timeout=180)
    assert done.returncode == 0
    assert json.loads((own / "mute" / "summary.json").read_text())["steps"] == 4
    assert "step 4/4" in (own / "mute" / "logs" / "rank-0.log").read_text()


def test_no_orphans_when_the_launcher_is_killed(own: Path) -> None:
    words = ["train", "own.json", "--ranks", "2", UNHURRIED, "--run.steps", "100000000", "--run.folder", "killed"]
    command = start_lockstep(*words, cwd=own)
    command.wait_for((own / "killed" / "metrics.jsonl").exists)
    ranks = command.ranks
    assert len(ranks) in (2, 4)  # those of the next round may wait already
    assert set(ranks) < set(processes_of_group(command.pid))
    command.send(signal.SIGKILL)
    assert command.end() == -signal.SIGKILL  # and none of its group is left


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of text with classes, and a tokenizer of ten words."""
    pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("texts")
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat"]
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(["<eos>", "<unk>", *words])}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(folder / "tokenizer")
    rows = [{"text": " ".join(words[n % 3 : 3 + n % 6]), "label": n % 2} for n in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2}
BERT = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


def huggingface(folder: Path, task: str, architecture: dict[str, Any], **data: Any) -> dict[str, Any]:
    source = {"kind": "huggingface", "name": str(folder / "rows.jsonl"), "tokenizer": str(folder / "tokenizer"), **data}
    return {
        "model": {"kind": "huggingface", "task": task, "architecture": architecture},
        "data": {"train": source, "evaluation": {"same": source}},
        "batch": {"global_size": 8},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "monitor": {"tensorboard": False, "every": 1, "progress": "plain"},
        "run": {"steps": 3},
    }


def test_a_hugging_face_model_through_the_command(texts: Path) -> None:
    (texts / "gpt2.json").write_text(json.dumps(huggingface(texts, "causal-lm", GPT2)))
    summary = output_of(run_lockstep("train", "gpt2.json", "--ranks", "2", "--json", "--run.folder", "gpt2", cwd=texts))
    assert (summary["steps"], summary["samples"], summary["ranks"]) == (3, 20, 2)
    assert {"loss", "perplexity"} <= set(summary["evaluation"]["same"])
    done = run_lockstep("generate", "gpt2", "the cat", "--tokens", "3", cwd=texts)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the cat")


def test_a_hugging_face_model_through_the_library(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lockstep

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    architecture = {**BERT, "intermediate_size": 32}
    config = huggingface(texts, "sequence-classification", architecture, label="label")
    config["run"]["folder"] = str(texts / "bert")
    config["model"]["freeze"] = ["*pooler*"]
    summary = lockstep.train(config).summary
    assert summary["steps"] == 3
    assert 0 < summary["trainable"] < summary["parameters"]
    assert set(summary["evaluation"]["same"]) == {"loss", "accuracy"}


# --- going back to a step -----------------------------------------------------------------------------------------


def test_from_a_step(own: Path) -> None:
    words = ["--run.steps", "6", "--checkpoint.every", "2 steps", "--checkpoint.keep_last", "9", *QUIET]
    assert run_lockstep("train", "own.json", "--run.folder", "steps", *words, cwd=own).returncode == 0
    absent = run_lockstep("train", "steps", "--from", "5", cwd=own)
    assert absent.returncode == 2
    assert gives(absent.stderr, "step 5", "step 4")
    fork = run_lockstep("train", "steps", "--fork", "fork", "--from", "44", cwd=own)
    assert fork.returncode == 2
    assert not (own / "fork").exists()
    back = run_lockstep("train", "steps", "--from", "2", cwd=own)  # although it is finished
    assert back.returncode == 0, back.stderr
    assert "resumes from step 2 " in back.stdout + back.stderr


def test_a_run_beyond_its_steps_is_not_changed(own: Path) -> None:
    words = ["--run.steps", "4", *QUIET]
    assert run_lockstep("train", "own.json", "--run.folder", "further", *words, cwd=own).returncode == 0
    before = {path: path.read_bytes() for path in (own / "further").rglob("*") if path.is_file()}
    shorter = run_lockstep("train", "further", "--run.steps", "2", "--json", cwd=own)
    assert output_of(shorter)["steps"] == 4
    assert gives(shorter.stderr, "step 4", "run.steps 2")
    as_long = run_lockstep("train", "further", "--run.steps", "null", "--run.samples", "1", cwd=own)
    assert (as_long.returncode, "past run.samples 1;" in as_long.stdout) == (0, True)
    assert {path: path.read_bytes() for path in (own / "further").rglob("*") if path.is_file()} == before
    (own / "further" / "summary.json").unlink()
    unfinished = run_lockstep("train", "further", "--run.steps", "3", cwd=own)
    assert unfinished.returncode == 2
    assert gives(unfinished.stderr, "step 4", "run.steps 3")
    assert run_lockstep("train", "further", cwd=own).returncode == 0
    assert (own / "further" / "summary.json").is_file()


def test_a_fork_starts_a_new_run(own: Path) -> None:
    words = ["--run.steps", "2", "--checkpoint.every", "1 step", "--checkpoint.keep_last", "9", *QUIET]
    assert run_lockstep("train", "own.json", "--run.folder", "origin", *words, cwd=own).returncode == 0
    shutil.copytree(own / "origin", own / "other")
    (own / "full").mkdir()
    (own / "full" / "notes").touch()
    before = sorted(own.rglob("*"))
    elsewhere = ["--checkpoint.folder", "other/checkpoints"]
    for fork in (["origin/../origin"], [str(own / "origin")], ["other"], ["full"], ["nothere", *elsewhere]):
        refused = run_lockstep("train", "origin", "--from", "1", "--fork", *fork, cwd=own)
        assert refused.returncode == 2, refused.stderr
        assert "name a" in refused.stderr
    assert sorted(own.rglob("*")) == before
    short = run_lockstep("train", "origin", "--fork", "nothere", cwd=own)
    assert (short.returncode, sorted(own.rglob("*"))) == (2, before)
    assert gives(short.stderr, "step 2", "run.steps 2")
    (own / "empty").mkdir()
    assert run_lockstep("train", "origin", "--from", "1", "--fork", "empty", cwd=own).returncode == 0


def test_a_refused_run_creates_no_folder(own: Path) -> None:
    refused = run_lockstep(
        "train", "own.json", "--run.folder", "nothere", "--model.init_from", "nothere.pt", *QUIET, cwd=own
    )
    assert refused.returncode == 2
    assert gives(refused.stderr, "nothere.pt")
    assert "did you mean" not in refused.stderr
    assert not (own / "nothere").exists()


def test_the_plan_of_a_run(own: Path) -> None:
    run_lockstep("train", "own.json", "--run.folder", "planned", "--run.steps", "1", *QUIET, cwd=own)
    assert run_lockstep("plan", "planned", "--peak", "none", cwd=own).stdout.splitlines()[0] == "planned"

"""The commands of the page on fine-tuning work, one after the other, in an empty folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from docs.test_docs import ROOT, blocks
from kit.commands import run_lockstep, run_script
from kit.failures import gives

from lockstep.config.loading import load
from lockstep.config.schema import HuggingFaceData

PAGE = ROOT / "docs" / "finetune.md"
CPU = ("--launch.device", "cpu", "--monitor.tensorboard", "false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("finetune")
    assert run_script(ROOT / "examples" / "chat_data.py", cwd=folder).returncode == 0
    (folder / "chats.jsonl").write_text((folder / "chat" / "chats.jsonl").read_text())
    return folder


def test_the_commands_of_the_page(folder: Path) -> None:
    lines = [shlex.split(line) for block in blocks(PAGE, "") for line in block.splitlines()]
    printed = {}
    for program, *words in lines:
        if program != "lockstep" or (words[:2] == ["data", "show"] and "run.yaml" in words):
            continue
        named = () if "--run.folder" in words else ("--run.folder", f"run-{lines.index([program, *words])}")
        more = (*named, *CPU) if words[0] == "train" else ()
        done = run_lockstep(*words, *more, cwd=folder)
        assert done.returncode == 0, (words, done.stderr)
        printed[" ".join(words[:2])] = done.stdout
    assert "<|im_start|>assistant\n[[" in printed["data show"]
    assert printed["data show"].count("<|im_end|>]]") == printed["data show"].count("[[")
    assert gives(printed["data show"], "331 samples")
    assert gives(printed["data show"], "64 samples", "padding")
    assert printed["verify chat"].count("passed") >= 2
    assert gives(printed["train dpo"], "accuracy", "margin", "rewards chosen")
    assert gives(printed["train distill"], "perplexity", "divergence")
    assert gives(printed["train kto"], "margin", "rewards chosen", "kl")
    assert len(list(folder.glob("run-*/model/tokenizer_config.json"))) == 6
    assert printed["generate first"].startswith("What does json.dump do?")


def test_the_config_that_init_writes_shows_its_conversations(folder: Path) -> None:
    written = yaml.safe_load((folder / "run.yaml").read_text())
    assert (written["data"]["train"]["name"], written["data"]["train"]["messages"]) == ("chats.jsonl", "messages")
    tiny = yaml.safe_load((ROOT / "recipes" / "tiny" / "chat.yaml").read_text())
    overlay = {"model": tiny["model"], "data": {"train": {"tokenizer": "chat/tokenizer"}}}
    (folder / "tiny.yaml").write_text(json.dumps(overlay))
    shown = run_lockstep("data", "show", "run.yaml", "tiny.yaml", "--samples", "1", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("sample ") == 1


def test_the_config_of_the_page_is_one(tmp_path: Path) -> None:
    for block in blocks(PAGE, "yaml"):
        (tmp_path / "run.yaml").write_text(block)
        train = load([tmp_path / "run.yaml"], environ={}).config.data.train
        assert isinstance(train, HuggingFaceData)
        assert (train.messages, train.rejected) in (
            ("messages", None),
            ("chosen", "rejected"),
            ("prompt", None),
            (None, None),
        )


def test_the_template_of_the_page_is_the_example_s() -> None:
    [template] = [block for block in blocks(PAGE, "text") if "generation" in block]
    assert template.replace("\\n", "\\\\n") in (ROOT / "examples" / "chat_data.py").read_text()


def test_packed_conversations_have_the_losses_of_separate_ones(folder: Path) -> None:
    """One step over all conversations, packed and not: the same targets, so the same loss and gradient."""
    keys = ("--data.train.packed", "true", "--samples", "1")
    shown = run_lockstep("data", "show", "chat", "tiny/chat", *keys, cwd=folder).stdout
    samples = int(shown.split("huggingface: ")[1].split()[0])
    first, count = next(iter(shown.splitlines())), shown.count("\nrow ")
    assert gives(first, f"{count} packed")
    sizes = [int(line.split()[2]) for line in shown.splitlines() if line.startswith("row ")]
    assert gives(first, f"{sum(sizes)} tokens", f"{128 - sum(sizes)} of padding")
    assert gives(shown, "331 conversations", f"{samples} samples")
    losses = []
    for packed, size in (("false", 331), ("true", samples)):
        run = ("--run.folder", f"packed-{packed}", "--run.steps", "1", "--precision.compute", "fp32", *CPU)
        batch = ("--data.train.packed", packed, "--batch.global_size", str(size), "--batch.micro_size", "8")
        done = run_lockstep("train", "chat", "tiny/chat", *run, *batch, "--evaluation.every", "null", cwd=folder)
        assert done.returncode == 0, done.stderr
        [row] = [json.loads(line) for line in (folder / f"packed-{packed}" / "metrics.jsonl").read_text().splitlines()]
        losses.append((row["loss"], row["grad_norm"]))
    assert samples < 331 / 1.5
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)

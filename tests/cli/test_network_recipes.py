"""Recipes that need a network: their message without one, and runs with a tiny model and local text."""

from __future__ import annotations

import io
import json
import time
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.commands import Done, run_lockstep, run_script
from kit.failures import gives
from kit.worlds import in_process

from lockstep.cli.main import main
from lockstep.config.loading import load
from lockstep.config.recipes import resolve_all, resolve_recipe
from lockstep.config.schema import Config

TINY = {"bert-imdb": "tiny/bert", "llama2-wikitext": "tiny/llama2", "llama2-wikitext-zero3": "tiny/llama2"}
TINY |= {
    "chat": "tiny/chat",
    "chat-full-bf16": "tiny/chat",
    "chat-lora": "tiny/chat",
    "chat-qlora": "tiny/chat",
    "distill": "tiny/distill",
    "dpo": "tiny/dpo",
    "kto": "tiny/kto",
    "llama2-lora-wikitext": "tiny/llama2",
    "token-classification": "tiny/token-classification",
    "image-classification": "tiny/vit",
}
CLASSES = {"bert-imdb": "BertForSequenceClassification", "llama2-wikitext": "LlamaForCausalLM"}
CLASSES["llama2-wikitext-zero3"] = CLASSES["chat"] = CLASSES["dpo"] = CLASSES["distill"] = CLASSES["llama2-wikitext"]
CLASSES |= {
    "chat-full-bf16": "LlamaForCausalLM",
    "kto": "LlamaForCausalLM",
    "token-classification": "BertForTokenClassification",
}
CLASSES["image-classification"] = "ViTForImageClassification"
ADAPTERS = ("llama2-lora-wikitext", "chat-lora", "chat-qlora")
ROOT = Path(__file__).parents[2]
SCRIPTS = dict.fromkeys(("tiny/chat", "tiny/distill", "tiny/dpo", "tiny/kto"), "chat_data.py")
SCRIPTS["tiny/token-classification"] = "task_data.py"
KEPT = ("objective", "batch", "optim", "schedule", "precision", "parallel", "memory", "evaluation", "checkpoint")
CPU = ["--launch.device", "cpu", "--monitor.progress", "plain", "--monitor.tensorboard", "false"]

with_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
RECIPES = [name if "zero" not in name else pytest.param(name, marks=with_deepspeed) for name in TINY]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tiny_model_trains_with_the_settings_of_the_recipe(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if (script := SCRIPTS.get(TINY[recipe])) is not None:
        assert run_script(ROOT / "examples" / script, cwd=tmp_path).returncode == 0
    if recipe == "distill":
        output_of(
            run_lockstep(
                "train",
                "chat",
                "tiny/chat",
                "--run.steps",
                "1",
                "--run.folder",
                "chat/teacher",
                "--json",
                *CPU,
                cwd=tmp_path,
            )
        )
    words = ["train", recipe, TINY[recipe], "--ranks", "2", "--run.steps", "1", "--json", "--run.folder", "run", *CPU]
    summary = output_of(run_lockstep(*words, cwd=tmp_path))
    mine = load([resolve_recipe(recipe).path], environ={}).config
    _ran_as_asked(summary, tmp_path / "run", mine)
    if recipe in ADAPTERS:
        assert {"adapter_config.json", "adapter_model.safetensors"} < {
            file.name for file in (tmp_path / "run/model").iterdir()
        }
    else:
        _left_weights_for_transformers(summary, tmp_path / "run", CLASSES[recipe])
    _showed_a_sample(tmp_path / "run", mine.evaluation.prompt)
    assert run_lockstep("ckpt", "verify", "run", cwd=tmp_path).returncode == 0
    again = output_of(
        run_lockstep("eval", "run", "--json", "--ranks", "1", cwd=tmp_path)
    )  # in bf16, so not bitwise equal
    loss, expected = (next(iter(each["evaluation"].values()))["loss"] for each in (again, summary))
    assert loss == pytest.approx(expected, rel=1e-3)


def output_of(done: Done) -> Any:
    """Return the JSON on stdout of a command that succeeded."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _ran_as_asked(summary: dict[str, Any], run: Path, mine: Config) -> None:
    assert (summary["ranks"], summary["steps"], summary["discarded"]) == (2, 1, 0)
    assert summary["samples"] == mine.batch.global_size
    assert summary["strategy"] == {"auto": "ddp"}.get(mine.parallel.strategy, mine.parallel.strategy)
    result = load([run / "config.yaml"], environ={}).config
    for section in KEPT:
        ours, asked = (getattr(each, section).model_dump(exclude={"companion"}) for each in (result, mine))
        assert ours == asked, section  # a tiny model has a tiny companion
    assert (result.model.kind, result.run.epochs) == ("huggingface", None)


def _left_weights_for_transformers(summary: dict[str, Any], run: Path, kind: str) -> None:
    import transformers

    assert json.loads((run / "model" / "config.json").read_text())["architectures"] == [kind]
    model, result = getattr(transformers, kind).from_pretrained(run / "model", output_loading_info=True)
    assert [result[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set()] * 3
    assert sum(parameter.numel() for parameter in model.parameters()) == summary["parameters"]


def _showed_a_sample(run: Path, prompt: str | None) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    samples = [event["logged"]["sample"] for event in events if "sample" in event.get("logged", {})]
    assert len(samples) == (prompt is not None)
    assert all(sample.startswith(prompt) and len(sample) > len(prompt) for sample in samples)


def _with_an_empty_cache(words: list[str], cache: str) -> tuple[int, str]:
    """Exit code and stderr of the command, whose libraries were imported with another cache."""
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = cache
    with redirect_stderr(io.StringIO()) as printed:
        return main(words), printed.getvalue()


@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_without_a_network_it_fails_at_once(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words, cache = ["train", recipe, "--ranks", "2", *CPU, "--run.folder", str(tmp_path / "run")], tmp_path / "empty"
    began = time.monotonic()
    code, printed = in_process(_with_an_empty_cache, words, str(cache))
    assert code == 2
    assert gives(printed, "lockstep data fetch RECIPE")
    assert "Traceback" not in printed
    assert time.monotonic() - began < 60
    assert f"lockstep data fetch {recipe}" in load([resolve_recipe(recipe).path], environ={}).config.description


def test_an_overlay_contains_no_training_settings() -> None:
    for name in set(TINY.values()):
        _, overlay = resolve_all(["digits", name])
        assert set(yaml.safe_load(overlay.path.read_text())) - {"objective"} == {"model", "data", "run"}

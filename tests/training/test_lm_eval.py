"""A run's model is evaluated on tasks of lm-eval: its values on the exported model, and what can't be evaluated."""

from __future__ import annotations

import json
import sys
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.failures import gives
from training.test_hub_upload import save_model

import lockstep
from lockstep.cli.main import main
from lockstep.training.exporting import ExportArguments, export

lm_eval = pytest.importorskip("lm_eval")
tasks = pytest.importorskip("lm_eval.tasks")

TEXTS = [f"w{n % 14} w{n % 5} w{n % 3}" for n in range(16)]
DATA = {"train": {"kind": "huggingface", "name": "rows.jsonl"}}
MODEL = {"kind": "huggingface", "task": "causal-lm", "pretrained": "base"}
LORA = {"kind": "lora", "rank": 2, "alpha": 4, "targets": ["c_attn"]}
PERPLEXITY = {
    "task": "words",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}
CHOICE = {
    "task": "choice",
    **{key: PERPLEXITY[key] for key in ("dataset_path", "dataset_kwargs", "test_split")},
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": ["w1", "w2", "w3"],
    "doc_to_target": 1,
    "metric_list": [{"metric": "acc"}],
}
GROUP = {"group": "both", "task": ["words", "choice"], "aggregate_metric_list": [{"metric": "acc"}]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished runs `plain` and `lora`, and tasks in YAML."""
    home = tmp_path_factory.mktemp("home")
    with chdir(home):
        save_model(home / "base", 1)
        (home / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        (home / "known").mkdir()
        elsewhere = {**PERPLEXITY, "task": "elsewhere", "dataset_path": "someone/rows", "dataset_kwargs": {}}
        for task in (PERPLEXITY, CHOICE, elsewhere, GROUP):
            (home / "known" / f"{task.get('task') if 'group' not in task else 'both'}.yaml").write_text(
                yaml.safe_dump(task)
            )
        (home / "torn.yaml").write_text("task: [")
        for name, adapter in (("plain", {}), ("lora", {"adapter": LORA})):
            lockstep.train(config({**MODEL, **adapter}, DATA, name))
    for name, model, data in (
        ("digits", {"kind": "image-classifier"}, {"train": {"kind": "digits"}}),
        ("masked", {**MODEL, "task": "masked-lm"}, DATA),
        ("bytes", MODEL, {"train": {"kind": "stdlib-text", "length": 8}}),
    ):
        (home / name).mkdir()
        (home / name / "config.yaml").write_text(yaml.safe_dump(config(model, data, name)))
    return home


def config(model: dict[str, Any], data: dict[str, Any], folder: str) -> dict[str, Any]:
    return {
        "model": model,
        "data": data,
        "batch": {"global_size": 4},
        "optim": {"lr": 0.05},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "monitor": {"tensorboard": False, "progress": "none"},
        "run": {"steps": 2, "folder": folder},
    }


@pytest.fixture(autouse=True)
def few_tasks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval reads 14,000 files for its own tasks, which takes it ten seconds."""
    few = partial(tasks.TaskManager, include_path=str(home / "known"), include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", few)
    monkeypatch.chdir(home)


@pytest.mark.parametrize("run", ["plain", "lora"])
def test_the_values_are_those_of_lm_eval_on_the_exported_model(
    run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", run, "--lm-eval", "known/words.yaml,choice", "--json"]) == 0
    printed = capfd.readouterr()
    document = json.loads(printed.out)
    export(Path(run), ExportArguments(to=tmp_path / "out", format="hf", merge=run == "lora"))
    wanted = lm_eval.simple_evaluate(
        model="hf", model_args=f"pretrained={tmp_path / 'out'}", tasks=["words", "choice"], device="cpu",
        task_manager=tasks.TaskManager(),
    )["results"]  # fmt: skip
    assert document["run"] == run
    assert {*document["evaluation"]} == {"words", "choice"}
    for task, metrics in document["evaluation"].items():
        assert metrics == {key: value for key, value in wanted[task].items() if key in metrics}
    assert {"word_perplexity,none", "bits_per_byte,none"} <= {*document["evaluation"]["words"]}
    assert {"acc,none", "acc_stderr,none"} == {*document["evaluation"]["choice"]}
    assert f"{wanted['words']['word_perplexity,none']:.4f}" in printed.err


def test_a_group_and_fewer_samples(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "plain", "--lm-eval", "both", "--limit", "3"]) == 0
    printed = capfd.readouterr().out
    assert printed.count("|Value") == 2
    assert "step 2" in printed


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("plain", "--lm-eval", "chioce"), ("chioce", "choice")),
        (("plain", "--lm-eval", "choice,none.yaml"), ("none.yaml",)),
        (("plain", "--lm-eval", "torn.yaml"), ("torn.yaml", "line 2")),
        (("plain", "--lm-eval", "elsewhere"), ("elsewhere", "someone/rows")),
        (("plain", "--lm-eval", "both,words"), ("both", "words", "words", "both")),
        (("plain", "--lm-eval", "choice", "--ranks", "2"), ("--lm-eval", "--ranks")),
        (("plain", "--limit", "2"), ("--limit", "--lm-eval")),
        (("digits", "--lm-eval", "choice", "--trust-run"), ("causal-lm", "image-classifier")),
        (("masked", "--lm-eval", "choice", "--trust-run"), ("causal-lm", "masked-lm")),
        (("bytes", "--lm-eval", "choice", "--trust-run"), ("tokenizer",)),
    ],
    ids=lambda value: " ".join(value) if value[0] in ("plain", "digits", "masked", "bytes") else "",
)
def test_what_cannot_be_evaluated(
    words: tuple[str, ...], values: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *words]) == 2
    refused = capsys.readouterr().err.partition("lockstep: ")[2]
    assert gives(refused, *values), refused
    assert "\n" not in refused.partition("\nusage:")[0].strip()


def test_without_lm_eval_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", "plain", "--lm-eval", "choice"]) == 2
    assert "pip install 'lockstep-torch[lm-eval]'" in capsys.readouterr().err

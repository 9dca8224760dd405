"""Tasks of transformers models from a config: the same run under every strategy, labels in what is exported."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.commands import run_script
from kit.failures import fails
from kit.layouts import asking_for
from kit.runs import NOISE, Trajectory, differences, recorded_all
from kit.worlds import in_world

import lockstep
from lockstep.assembly.user_objects import UserObjects
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.simulation.estimate import estimator_of

pytest.importorskip("datasets")
ROOT = Path(__file__).parents[2]
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
DROPLESS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"model_type": "bert", "max_position_embeddings": 128, **SIZES, **DROPLESS}
VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, **SIZES, **DROPLESS}
TEXTS = {"name": "texts.jsonl", "text": "text"}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "tags": ("token-classification", {"name": "tags.jsonl", "text": "words", "label": "tags"}),
    "answers": (
        "question-answering",
        {"name": "questions.jsonl", "text": "question", "text_pair": "context", "label": "answers"},
    ),
    "choices": ("multiple-choice", {"name": "choices.jsonl", "text_pair": "choices", "label": "right"}),
    "class": ("sequence-classification", {**TEXTS, "label": "module"}),
    "several": ("sequence-classification", {**TEXTS, "label": "letters"}),
    "number": ("sequence-classification", {**TEXTS, "label": "words"}),
    "masked": ("masked-lm", TEXTS),
    "images": ("image-classification", {"name": "images", "image": "image", "label": "digit", "tokenizer": "vit"}),
}
NOISES = {"answers": 1e-7, "choices": 2e-7}
"""Of the gradient's norm: what their softmax is blind to has a gradient of rounding alone."""
PIPELINED = [name for name in TASKS if name != "choices"]  # its sequences are not the samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from datasets import Dataset
    from PIL import Image
    from transformers import ViTImageProcessor

    path = tmp_path_factory.mktemp("tasks")
    assert run_script(ROOT / "examples" / "task_data.py", ".", cwd=path).returncode == 0
    draws = np.random.default_rng(0)
    pixels = draws.integers(0, 255, (40, 8, 8, 3), dtype=np.uint8)
    rows = [{"image": Image.fromarray(each), "digit": "abc"[number % 3]} for number, each in enumerate(pixels)]
    Dataset.from_list(rows).save_to_disk(str(path / "images"))
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(path / "vit")
    return path


def config(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    """40 samples in batches of 13, so that the fourth update ends an epoch, and one is incomplete."""
    task, data = TASKS[name]
    train = {"kind": "huggingface", "tokenizer": "tokenizer", **data, "split": "train[:40]"}
    train |= {key: str(folder / train[key]) for key in ("name", "tokenizer")}
    if name != "images":
        train["max_length"] = 128 if name == "answers" else 64
    architecture = VIT if name == "images" else BERT
    if name == "choices":
        architecture = {**BERT, "initializer_range": 0.5}  # else choices are alike, and what they share cancels
    return {
        "model": {"kind": "huggingface", "task": task, "architecture": architecture},
        "data": {"train": train, "evaluation": {"held-out": {**train, "split": "train[:11]"}}},
        "batch": {"global_size": 13, "micro_size": 3},
        "optim": {"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
        "precision": {"compute": "fp32"},
        "run": {"steps": 8},
        **sections,
    }


@cache
def oracles(folder: Path) -> dict[str, Trajectory]:
    return dict(zip(TASKS, recorded_all([config(folder, name) for name in TASKS], 1, 5), strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3", "pipeline-1f1b"])
def test_a_task_is_the_single_process_s(strategy: str, folder: Path) -> None:
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    names = PIPELINED if strategy.startswith("pipeline") else list(TASKS)
    runs = recorded_all([config(folder, name, parallel=asking_for(strategy, 2)) for name in names], 2, 5)
    found = {
        name: differences(run, oracles(folder)[name], NOISES.get(name, NOISE))
        for name, run in zip(names, runs, strict=True)
    }
    assert found == {name: [] for name in names}


def _attempts(runs: list[tuple[dict[str, Any], str, int | None]]) -> list[list[float]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        losses = []
        for run, place, until in runs:
            with lockstep.session(run) as session:
                saves: Any = session.checkpoints(place)
                reports = []
                for report in session:
                    reports.append(report.loss)
                    if report.step == until:
                        break
                saves.save()
                assert all(ended.failure is None for ended in saves.finish())
            losses.append(reports)
        return losses
    finally:
        dist.destroy_process_group()


def test_a_resumed_run_is_bitwise_the_same(tmp_path: Path, folder: Path) -> None:
    runs = []
    for name in ("tags", "answers", "masked", "images"):
        run = config(folder, name, parallel={"strategy": "fsdp"})
        runs += [
            (run, f"{tmp_path}/{name}-whole", None),
            (run, f"{tmp_path}/{name}", 5),
            (run, f"{tmp_path}/{name}", None),
        ]
    losses = in_world(2, _attempts, runs)[0]
    for whole, cut, rest in zip(losses[::3], losses[1::3], losses[2::3], strict=True):
        assert [*cut, *rest] == whole


@pytest.mark.parametrize("name", ["tags", "class", "images"])
def test_what_is_exported_has_the_names_of_the_classes_and_the_processor(
    name: str, tmp_path: Path, folder: Path
) -> None:
    from transformers import AutoImageProcessor, pipeline

    run = tmp_path / "run"
    lockstep.train({**config(folder, name), "run": {"steps": 1, "folder": str(run)}})
    written = json.loads((run / "model" / "config.json").read_text())
    expected = {"tags": ["keyword", "name", "number", "operator", "text"], "images": ["a", "b", "c"]}
    names = [written["id2label"][str(number)] for number in range(len(written["id2label"]))]
    assert names == expected.get(name, names) == sorted(names)
    assert written["label2id"] == {label: number for number, label in enumerate(names)}
    if name == "images":
        assert AutoImageProcessor.from_pretrained(run / "model").size["height"] == 8
    else:
        task = "token-classification" if name == "tags" else "text-classification"
        assert pipeline(task, model=str(run / "model"), device="cpu")("def a(b): return 3")[0]


def test_classes_have_the_order_of_the_model(tmp_path: Path, folder: Path) -> None:
    named = config(folder, "images")
    lockstep.train({**named, "run": {"steps": 1, "folder": str(tmp_path / "run")}})
    named["model"] = {**named["model"], "classes": ["c", "b", "a", "d"]}
    with lockstep.session(named) as session:
        first = next(iter(session.batches())).micro_batches[0]
    assert set(first.targets.tolist()) <= {0, 1, 2}
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    saved["id2label"], saved["label2id"] = {"0": "c", "1": "b", "2": "a"}, {"c": 0, "b": 1, "a": 2}
    (tmp_path / "run" / "model" / "config.json").write_text(json.dumps(saved))
    (tmp_path / "run" / "model" / "XXH128SUMS").unlink()  # else it is damaged
    named["model"] = {"kind": "huggingface", "task": "image-classification", "pretrained": str(tmp_path / "run/model")}
    with fails(ConfigError, "['c', 'b', 'a']", key="model.classes"), lockstep.session(named):
        pass
    named["model"]["classes"] = ["c", "b", "a"]
    with lockstep.session(named):
        pass
    named["model"]["classes"] = ["c", "b", "bb"]
    with fails(ConfigError, "digit", "a"), lockstep.session(named):
        pass


def test_an_evaluation_set_with_fewer_classes_has_the_same_numbers(folder: Path) -> None:
    named = config(folder, "images")
    named["data"]["evaluation"]["held-out"]["split"] = "train[1:3]"
    with lockstep.session(named) as session:
        from lockstep.loop.session import components_of

        source = components_of(session).evaluation.sets["held-out"]
        assert source.fetch(np.array([0, 1])).targets.tolist() == [1, 2]


def test_a_plan_knows_the_memory_of_a_task(folder: Path) -> None:
    for name in ("answers", "images"):
        own = next(estimator_of(validate(config(folder, name)).config, 2, None, UserObjects()).estimates("planned"))
        assert own.peak is not None, (name, own.note)

"""`lockstep data show` prints what a model sees of its data, of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.failures import gives

from lockstep.cli.main import main

MODEL = ["--model.kind", "transformer"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["data", "show", *words]) == 0
    return capsys.readouterr().out


def test_texts_have_their_targets_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    printed = shown(capsys, "stdlib-lm", "--samples", "2", "--data.train.length", "16", "--batch.global_size", "4")
    assert (printed.count("[["), printed.count("sample ")) == (2, 2)
    assert gives(printed, "16 tokens", "16 targets", "0 of padding")
    assert gives(printed, "4 samples", "64 tokens", "64 targets", "0.0%")


def test_images_have_shape_range_and_label(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    printed = shown(capsys, "digits", "--samples", "1")
    assert gives(printed, "images", "1 x 8 x 8", "float32", "0", "1")
    assert "target: [[" in printed


def test_classified_texts_have_their_class(capsys: pytest.CaptureFixture[str]) -> None:
    printed = shown(capsys, "stdlib-classify", "--samples", "1", "--data.train.length", "64")
    assert gives(printed, "64 tokens")
    assert "def " in printed
    assert "target: [[" in printed


def test_items_of_a_dataset_of_one_s_own_are_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "import torch\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 5\n"
        "    def __getitem__(self, n): return {'x': torch.full((3, 4), float(n)), 'labels': torch.tensor([n, -100])}\n"
        "def model(): return torch.nn.Linear(4, 2)\n"
    )
    config = {
        "model": {"kind": "custom", "target": "own.py:model"},
        "data": {"train": {"kind": "custom", "target": "own.py:Data"}, "shuffle": False},
    }
    Path("run.json").write_text(json.dumps({**config, "run": {"steps": 1}}))
    printed = shown(capsys, "run.json", "--samples", "5")
    assert gives(printed, "sample 3", "3 x 4", "float32", "3", "3")
    assert gives(printed, "labels", "3", "-100") or "[3, -100]" in printed
    assert gives(printed, "5 samples", "5 targets")

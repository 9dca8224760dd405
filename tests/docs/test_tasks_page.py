"""The commands and configs of the page on tasks work, in an empty folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from docs.test_docs import ROOT, blocks
from kit.commands import run_lockstep, run_script
from kit.failures import gives

from lockstep.config.loading import load
from lockstep.core.tasks import TASKS

PAGE = ROOT / "docs" / "tasks.md"
CPU = ("--launch.device", "cpu", "--monitor.tensorboard", "false")


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    assert run_script(ROOT / "examples" / "task_data.py", cwd=tmp_path).returncode == 0
    for block in blocks(PAGE, ""):
        for line in block.splitlines():
            program, *words = shlex.split(line)
            if program == "lockstep":
                more = ("--run.folder", words[1], *CPU) if words[0] == "train" else ()
                done = run_lockstep(*words, *more, cwd=tmp_path)
                assert done.returncode == 0, (words, done.stderr)
                assert words[0] == "train" or gives(done.stdout, "targets", "padding")
    written = json.loads((tmp_path / "token-classification" / "model" / "config.json").read_text())
    assert [*written["label2id"]] == ["keyword", "name", "number", "operator", "text"]


def test_the_configs_of_the_page_load(tmp_path: Path) -> None:
    for block in blocks(PAGE, "yaml"):
        (tmp_path / "run.yaml").write_text(block)
        assert load([tmp_path / "run.yaml"], environ={}).config.model.kind == "huggingface"


def test_the_table_has_the_tasks_with_batches() -> None:
    rows = {line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `") and "-" in line[:14]}
    assert rows <= {name for name, task in TASKS.items() if task.reads is not None}

"""The page for choosing a strategy has what its command writes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("fill_choosing")


def test_the_table_is_current(command: ModuleType) -> None:
    page = command.PAGE.read_text()
    assert page == command.filled(page), "python docs/fill_choosing.py"
    assert "6,738,415,616 parameters" in page


def test_speeds_come_from_the_benchmarks_results(command: ModuleType, tmp_path: Path) -> None:
    page = command.PAGE.read_text()
    assert "ms a step" not in command.filled(page, tmp_path / "none.json")
    speeds = tmp_path / "strategies.json"
    rows = {"ddp": {"own": {"median": 12.34, "least": 1.0, "most": 99.0}}}
    speeds.write_text(json.dumps({"title": "a small model", "rows": rows}))
    lines = command.filled(page, speeds).splitlines()
    assert next(line for line in lines if line.startswith("| ddp | 2")).count("| 12.3 |") == 1
    assert next(line for line in lines if line.startswith("| zero3 | 3")).count("| - |") == 1
    assert "Milliseconds: a small model" in "\n".join(lines)


def test_names_are_those_of_the_benchmark(command: ModuleType) -> None:
    measured = set(command.MEASURED_AS.values())
    contestants = (ROOT / "benchmarks" / "strategy_loops.py").read_text()
    assert len(measured) == 7
    assert all(f'"{name}": (' in contestants for name in measured)

"""The page of strategies and features on the simulated accelerator has every cell, as its command has found it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from kit.cells import KNOWN, Cell, allowed, cells, fault, known
from kit.simulated import Simulated

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "drills"))
    return importlib.import_module("cells_drill")


def test_the_page_is_current(command: ModuleType) -> None:
    results = json.loads(command.RESULTS.read_text())["cells"]
    page = command.PAGE.read_text()
    assert page == command.filled(page, results), "python drills/cells_drill.py --tables"
    assert "| fsdp | " in page


def test_every_cell_has_a_result_that_is_not_at_fault(command: ModuleType) -> None:
    """With today's tables of features, known cells and waits."""
    pytest.importorskip("deepspeed")
    results = json.loads(command.RESULTS.read_text())["cells"]
    rows: dict[str, Cell] = {command.name_of(row): row for rows in cells(every=True).values() for row in rows}
    assert rows.keys() == results.keys()
    lines = [_fault(row, results[name]) for name, row in rows.items()]
    assert [line for line in lines if line is not None] == []


def test_every_known_outcome_and_listed_wait_occurs(command: ModuleType) -> None:
    results = json.loads(command.RESULTS.read_text())["cells"]
    rows = [row for rows in cells(every=True).values() for row in rows]
    assert {row["outcome"] for row in KNOWN} == {known(*row) for row in rows} - {None}
    listed: set[str] = set()
    seen: set[str] = set()
    for row in rows:
        of_cell = allowed(row[0], row[1])
        listed.update(of_cell)
        for wait in results[command.name_of(row)]["waits"]:
            seen.update(beginning for beginning in of_cell if wait.startswith(beginning))
    assert listed == seen | {wait for wait in listed if command.ALL_WAIT in wait}


def _fault(row: Cell, result: dict[str, object]) -> str | None:
    outcome, waits = str(result["outcome"]), result["waits"]
    refusal = outcome.removeprefix("refused: ") if outcome.startswith("refused: ") else ""
    run = Simulated(refusal=refusal, failure="" if refusal or outcome == "runs" else outcome, files=["manifest.json"])
    assert isinstance(waits, list)
    run.syncs = waits
    return fault(row, 0, run)


def test_a_table_tells_precisions_and_reasons_apart(command: ModuleType) -> None:
    runs = {"outcome": "runs", "waits": [], "faults": []}
    refused = {"outcome": "refused: optim.name: no", "waits": [], "faults": []}
    waits = {**runs, "waits": ["item in a.py:b"]}
    offload = {"ddp/offload/fp32": runs, "ddp/offload/bf16": waits, "ddp/offload/fp16": refused}
    page = command.tables({**offload, "ddp/muon/fp32": runs, "ddp/muon/bf16": runs, "single/muon/fp32": refused})
    assert "6 cells: 4 run, 2 are refused, 0 fail in torch." in page
    assert "| offload | fp32: runs<br>bf16: runs, waits<br>fp16: refused (1) | - |" in page
    assert "| muon | runs | refused (1) |" in page
    assert "\n1. optim.name: no" in page

"""The page of strategies and features on the simulated accelerator has every cell, as its command has found it."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from kit.cells import KNOWN, Cell, allowed, cells, fault, known
from kit.simulated import Simulated

from lockstep.plan.optimizers import OPTIMIZERS

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


def test_the_page_has_a_config_key_for_each_row_and_few_notes(command: ModuleType) -> None:
    page = command.PAGE.read_text()
    results = json.loads(command.RESULTS.read_text())["cells"]
    asked_by = command.cells_page.ASKED_BY
    optimizers = {name for name in OPTIMIZERS if name not in ("custom", "given")}
    assert {name.split("/")[1] for name in results} - {""} == asked_by.keys() | optimizers
    notes = set(re.findall(r"^\d+\. (.*)$", page, re.MULTILINE))
    assert 20 < len(notes) < 45, "a strategy's name or a location makes a note of its own"
    assert [note for note in notes if "\\_" in note or note.count("`") % 2 or "doesn't go with" in note] == []


def test_a_table_tells_precisions_and_reasons_apart(command: ModuleType) -> None:
    runs = {"outcome": "runs", "waits": [], "faults": []}
    refused = {"outcome": "refused: optim.name: muon doesn't go with ddp: no; take adamw", "waits": [], "faults": []}
    other = {
        **refused,
        "outcome": "refused: Python: batch.size: no\noptim.name: muon doesn't go with dp: no; take adamw",
    }
    fails = {**refused, "outcome": "TypeError: needs CUDA. Or not at a.py:3"}
    waits = {**runs, "waits": ["item in a.py:b < c.py:d"]}
    cells = {"ddp/offload/fp32": waits, "ddp/offload/bf16": waits, "ddp/offload/fp16": refused, "fsdp/lion/bf16": fails}
    cells = {**cells, "dp/muon/fp32": other, "ddp/muon/fp32": runs, "ddp/muon/bf16": runs, "single/muon/fp32": refused}
    page = "\n\n".join(command.cells_page.tables(cells, {"item in a.py": "why"}, {"TypeError": "a build"}))
    assert "Of 8 cells, **4 run**, 2 of them with a wait" in command.cells_page.counts(cells)
    assert "**3 are refused** before they start, with a sentence; **1 fail** in torch" in command.cells_page.counts(
        cells
    )
    assert "| offload | fp32, bf16: runs, waits (1)<br>fp16: refused (2) | - | - |" in page
    assert "| muon | runs | refused (2) | refused (2) |\n\n1. waits: why\n2. refused: no; take adamw\n\n## fsdp" in page
    assert "\n\n1. fails: `TypeError: needs CUDA`: a build" in page


def test_a_refusal_is_shown_without_names_of_its_cell(command: ModuleType) -> None:
    shown = command.cells_page.refusal
    unused = "refused: parallel.ddp.static_graph: True is for DDP's own reduction, not with parallel.pipeline 2; no"
    assert shown(unused, "static graph") == "it is for DDP's own reduction, not with `parallel.pipeline`; no"
    order = "refused: parallel.strategy: fsdp adds; under run.determinism invariant take ddp"
    assert shown(order, "invariant") == "the strategy adds; under `run.determinism: invariant` take ddp"
    plan = "refused: parallel.tensor_parallel.plan: blocks.0.query: colwise is for Linear; in it are a, b_c"
    assert shown(plan, "adapters") == "`parallel.tensor_parallel.plan: colwise` is for Linear"

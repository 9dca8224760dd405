"""The outsiders' table: models that no other test knows, under every strategy, are what the committed table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outsiders.cells import STRATEGIES, Cell, all_names, run
from outsiders.families import FAMILIES
from outsiders.own import OWN

TABLE = json.loads(Path(__file__).with_name("table.json").read_text())
SAMPLE = (
    "gpt2", "opt-left", "openai-gpt", "gpt_neox", "gemma", "gemma3_text", "falcon-alibi", "mpt", "stablelm-normed",
    "deepseek_v3", "mixtral-balanced", "swin", "a chain of blocks",
)  # fmt: skip
"""One of each kind that has once been wrong."""


def apart(cells: dict[tuple[str, str], Cell]) -> list[str]:
    """Cells that are not what the table says."""
    return [
        f"{name} under {strategy}: {cell.status} ({cell.said}), and the table says {TABLE[name][strategy]['status']}"
        for (name, strategy), cell in cells.items()
        if cell.status != TABLE[name][strategy]["status"]
    ]


def test_the_table_is_complete() -> None:
    assert list(TABLE) == all_names()
    assert all(list(row) == list(STRATEGIES) for row in TABLE.values())
    assert len(FAMILIES) >= 40
    assert len(OWN) >= 30


def test_a_sample_of_the_table() -> None:
    cells = run(("fsdp", "pipeline", "tensor", "context"), SAMPLE)
    assert apart(cells) == []
    assert [key for key, cell in cells.items() if cell.status == "open"] == []


@pytest.mark.drill
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_whole_table(strategy: str) -> None:
    assert apart(run((strategy,), all_names())) == []

"""Models that no other test uses match the committed compatibility table under every strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compatibility.cells import STRATEGIES, Cell, all_names, run
from compatibility.custom import CUSTOM
from compatibility.families import FAMILIES

TABLE = json.loads(Path(__file__).with_name("table.json").read_text())
SAMPLE = (
    "gpt2", "opt-left", "openai-gpt", "gpt_neox", "gemma", "gemma3_text", "falcon-alibi", "mpt", "stablelm-normed",
    "deepseek_v3", "mixtral-balanced", "swin", "a chain of blocks",
)  # fmt: skip
"""One of each kind that was wrong at some time."""
HYBRID = "nemotron_h"
"""State spaces, attention and experts, in one stack."""
PARAMETERS = (
    "a first batch replaces data", "a weight masked by a hook", "blocks that share a module", "block.forward",
    "outputs changed in place",
    "blocks called with other weights", "a penalty on all weights", "convolutions, channels last",
)  # fmt: skip


def deviations(cells: dict[tuple[str, str], Cell]) -> list[str]:
    """Return the cells whose status differs from the table's."""
    return [
        f"{name} under {strategy}: {cell.status} ({cell.message}) instead of {TABLE[name][strategy]['status']}"
        for (name, strategy), cell in cells.items()
        if cell.status != TABLE[name][strategy]["status"]
    ]


def test_the_table_is_complete() -> None:
    assert list(TABLE) == all_names()
    assert all(list(row) == list(STRATEGIES) for row in TABLE.values())
    assert len(FAMILIES) >= 40
    assert len(CUSTOM) >= 30


def test_a_sample_of_the_table() -> None:
    cells = run(("pipeline", "tensor"), (*SAMPLE[::6], HYBRID)) | run(("fsdp", "context"), SAMPLE[::12])
    cells |= run(("fsdp",), PARAMETERS)
    assert deviations(cells) == []
    assert [key for key, cell in cells.items() if cell.status == "failed"] == []


@pytest.mark.drill
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_whole_table(strategy: str) -> None:
    assert deviations(run((strategy,), all_names())) == []

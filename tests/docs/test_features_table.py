"""The tables of strategies and features on the page are those of the code."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from kit.layouts import VARIANTS


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    return importlib.import_module("fill_strategies")


def test_the_tables_have_every_strategy_once(command: ModuleType) -> None:
    lines = command.table().splitlines()
    columns = [name for line in lines if line.startswith("|  |") for name in line.split(" | ")[1:]]
    assert sorted(column.removesuffix(" |") for column in columns) == sorted(VARIANTS)


def test_the_page_has_the_table(command: ModuleType) -> None:
    assert command.table() in command.PAGE.read_text(encoding="utf-8"), "python docs/fill_strategies.py"

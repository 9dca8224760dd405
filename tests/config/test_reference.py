"""The generated page and JSON Schema are current and complete."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.config import reference, shape
from lockstep.config.schema import TransformerModel
from lockstep.strategies.registry import names

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("fill_config")


def test_the_committed_page_is_current(page: ModuleType) -> None:
    assert (DOCS / "config.md").read_text() == page.markdown(), "python docs/fill_config.py"


def test_the_committed_schema_is_current() -> None:
    committed = json.loads((DOCS / "config.schema.json").read_text())
    assert committed == reference.json_schema(), "python docs/fill_config.py"


def test_the_page_has_every_key(page: ModuleType) -> None:
    text = page.markdown()
    for key in shape.all_keys():
        if key[-1] != "kind":
            assert f"`{key[-1]}`" in text or f"`{'.'.join(key)}`" in text or f".{key[-1]}" in text


def test_descriptions_come_from_the_docstrings() -> None:
    assert reference.description(TransformerModel, "kv_heads").startswith("Key-value heads")
    assert reference.description(TransformerModel, "freeze").startswith("Patterns")
    schema = reference.json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$defs"]["TransformerModel"]["properties"]["kv_heads"]["description"].startswith("Key-value heads")
    assert schema["$defs"]["Optim"]["properties"]["lr"]["description"].startswith("Peak learning rate")


def test_every_property_has_a_description() -> None:
    made = reference.json_schema()
    bodies = {"Config": made, **made["$defs"]}
    undescribed = [
        f"{name}.{key}"
        for name, body in bodies.items()
        for key, entry in body.get("properties", {}).items()
        if len(entry.get("description", "").split()) < 3 or not entry["description"].rstrip().endswith((".", "`"))
    ]
    assert undescribed == []


def test_every_row_of_the_page_has_a_description(page: ModuleType) -> None:
    rows = [line for line in page.markdown().splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == []


def test_the_json_schema_refuses_unknown_keys_of_parallel_but_sections_of_imported_strategies() -> None:
    parallel = reference.json_schema()["$defs"]["Parallel"]
    known = parallel["then"]["propertyNames"]["enum"]
    assert {"strategy", "data", "fsdp", "pipeline_parallel"} <= set(known)
    assert "fdsp" not in known
    assert parallel["if"]["properties"]["strategy"]["enum"] == list(names())
    assert parallel["additionalProperties"] == {"type": "object"}

"""Parameter counts by module: what is alike is one row, and nothing is counted twice or left out."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.core.records import ParameterFacts
from lockstep.plan.modules import ModuleParameters, describe_modules, parameters_by_module


def decoder() -> Iterator[ParameterFacts]:
    yield ParameterFacts("model.embed.weight", (100, 8), 4, False)
    for layer in range(4):
        yield ParameterFacts(f"model.layers.{layer}.up.weight", (16, 8), 2, layer != 2, "bfloat16")
        yield ParameterFacts(f"model.layers.{layer}.norm.weight", (8,), 4, True)
    yield ParameterFacts("model.encoder.inner.deep.weight", (3,), 4, True)
    yield ParameterFacts("scale", (), 4, True)
    yield ParameterFacts("lm_head.weight", (100, 8), 4, True)


def test_alike_modules_of_a_list_are_one_row_for_each_dtype() -> None:
    assert parameters_by_module(list(decoder())) == (
        ModuleParameters("model.embed", 1, "float32", 800, 0, 3200),
        ModuleParameters("model.layers.0-1,3", 3, "bfloat16", 384, 384, 768),
        ModuleParameters("model.layers.0-3", 4, "float32", 32, 32, 128),
        ModuleParameters("model.layers.2", 1, "bfloat16", 128, 0, 256),
        ModuleParameters("model.encoder", 1, "float32", 3, 3, 12),
        ModuleParameters("", 1, "float32", 1, 1, 4),
        ModuleParameters("lm_head", 1, "float32", 800, 800, 3200),
    )


def test_the_table_has_a_line_for_each() -> None:
    head, *lines = describe_modules(parameters_by_module(list(decoder()))).splitlines()
    assert head.split() == ["module", "parameters", "trained", "dtype", "bytes"]
    assert lines[1].split() == ["model.layers.0-1,3", "384", "384", "bfloat16", "768", "B"]
    assert lines[5].split()[0] == "(model)"
    assert len({len(line) for line in (head, *lines)}) == 1

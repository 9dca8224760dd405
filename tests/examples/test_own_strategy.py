"""The strategy of examples/own_strategy.py, defined outside the package, works like the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit import small
from kit.runs import differences, recorded
from kit.worlds import in_process

import lockstep
from lockstep.config.loading import validate
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.plan.plan import make_plan
from lockstep.strategies import registry

FILE = Path(__file__).parents[2] / "examples" / "own_strategy.py"
TARGET = f"{FILE}:STRATEGY"


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    known = dict(registry._strategies)
    yield
    registry._strategies.clear()
    registry._strategies.update(known)


def test_the_strategy_matches_the_single_process() -> None:
    sections = small.config(
        parallel={"strategy": TARGET, "flat": {"average": True}}, batch={"global_size": 13, "micro_size": 3}
    )
    assert differences(recorded(sections, ranks=2), recorded(small.config())) == []


def test_plan_and_layouts_include_the_strategy() -> None:
    config = validate(small.config(parallel={"strategy": TARGET})).config
    weight = ParameterFacts("weight", (8, 8), 4, True)
    plan = make_plan(config, 2, DataFacts(40, None), [weight])
    assert (plan.strategy, plan.variant, plan.mesh.data) == ("flat", "flat", 2)
    assert plan.placement.gradients == 4 * 64
    assert registry.layouts()["flat"].family == "Data parallel"


def test_its_options_are_checked() -> None:
    registry.find_strategy(TARGET)
    with pytest.raises(lockstep.ConfigError, match=r"parallel\.flat\.averag: unknown key; did you mean average\?"):
        validate(small.config(parallel={"strategy": "flat", "flat": {"averag": True}}))
    with pytest.raises(lockstep.ConfigError, match=r"'falt' is not one of auto, .*, flat; did you mean flat"):
        validate(small.config(parallel={"strategy": "falt"}))


def test_a_name_that_is_taken_is_refused() -> None:
    flat = registry.find_strategy(TARGET)
    with pytest.raises(lockstep.ConfigError, match="there is a strategy ddp already"):
        lockstep.extend.register_strategy(
            lockstep.extend.Strategy(name="ddp", build="mine:BUILDER", variants=flat.variants)
        )


def _verified(config: dict[str, Any]) -> list[Any]:
    return lockstep.verify(config, strategies="flat", ranks=2, steps=3)


def test_verify_runs_it() -> None:
    rows = in_process(_verified, small.config(parallel={"strategy": TARGET}))
    assert [(row.strategy, row.passed) for row in rows] == [("flat", True)] * 3, rows


def _last_losses(folder: Path, runs: list[tuple[str, str, int]]) -> list[float]:
    """The last loss of each run: name, strategy, steps."""
    losses = []
    for name, strategy, steps in runs:
        run = {"steps": steps, "folder": str(folder / name)}
        sections = small.config(run=run, parallel={"strategy": strategy}, schedule={"kind": "constant"})
        lockstep.train(sections, ranks=2 if strategy != "single" else None)
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines if "loss" in line][-1])
    return losses


@pytest.mark.parametrize(("first", "then"), [(TARGET, "ddp"), ("ddp", TARGET)])
def test_its_checkpoint_resumes_under_ddp_and_the_reverse(first: str, then: str, tmp_path: Path) -> None:
    runs = [("run", first, 3), ("run", then, 6), ("single", "single", 6)]
    _, resumed, alone = in_process(_last_losses, tmp_path, runs)
    assert resumed == pytest.approx(alone, rel=1e-6)


def test_options_of_a_strategy_that_is_imported_late_are_checked_with_the_same_words() -> None:
    parallel = validate(small.config(parallel={"strategy": TARGET, "flat": {"averag": True}})).config.parallel
    with pytest.raises(lockstep.ConfigError, match=r"parallel\.flat\.averag: unknown key; did you mean average\?"):
        registry.find_strategy(TARGET).options_of(parallel)

"""Every strategy and product runs on the simulated accelerator as on a GPU: updates, an evaluation, a save.

a tensor on the wrong device    fails the run
a wait for the accelerator      only those in host_syncs.toml
a refusal                       only where the table of features has it, in its words, or in known_cells.toml
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.layouts import LAYOUTS
from kit.simulated import Simulated, simulated
from training.test_features import ASKS, _ranks, asked

from lockstep.plan.features import FEATURES, cell

HERE = Path(__file__).parent
SYNCS = tomllib.loads((HERE / "host_syncs.toml").read_text(encoding="utf-8"))["sync"]
KNOWN = tomllib.loads((HERE / "known_cells.toml").read_text(encoding="utf-8")).get("cell", [])
PRECISIONS = ("fp32", "bf16", "fp16")
SIMULATED = [name for name, layout in LAYOUTS.items() if layout.strategy.name != "deepspeed"]
"""DeepSpeed's waits are in test_zero_waits."""
Cell = tuple[str, str, str]
"""Layout, feature or nothing, precision."""


def known(layout: str, feature: str) -> str | None:
    """The beginning of a cell's outcome, if known_cells.toml has it."""
    for row in KNOWN:
        if layout in row.get("layouts", [layout]) and feature in row.get("features", [feature]):
            return str(row["outcome"])
    return None


def config(layout: str, feature: str, precision: str) -> dict[str, Any]:
    made = asked(layout, "" if feature == "compile" else feature, _ranks(layout))
    if feature == "compile":
        made["model"]["compile"] = True
    if "pipeline" in layout and "batch" not in ASKS.get(feature, {}):
        made["batch"] = {"global_size": 12, "micro_size": 3}  # more micro-batches do the same again
    if feature not in PRECISIONS:
        made["precision"] = {"compute": precision}
    return {**made, "launch": {"device": "auto"}, "run": {**made["run"], "allow_untested": True}}


def features(layout: str) -> Iterator[str]:
    """Each feature that the layout can be asked for."""
    for feature in FEATURES:
        if feature.name != "export" and cell(LAYOUTS[layout], feature.name).standing != "none":
            yield feature.name


def cells(*, every: bool) -> dict[int, list[Cell]]:
    """The cells by ranks: each layout and, with `every`, each feature under it in each precision."""
    by_ranks: dict[int, list[Cell]] = defaultdict(list)
    for layout in SIMULATED:
        rows = by_ranks[_ranks(layout)]
        if not every:
            rows.append((layout, "", "bf16"))
            continue
        for precision in PRECISIONS:
            rows += [(layout, feature, precision) for feature in ("", *features(layout)) if feature not in PRECISIONS]
    return by_ranks


def allowed(feature: str) -> set[str]:
    """The waits that host_syncs.toml lists for a feature, and for all runs."""
    return {row["where"] for row in SYNCS if feature in row.get("features", [feature])}


def fault(row: Cell, rank: int, run: Simulated) -> str | None:
    """What a rank did that it should not have done; None: nothing."""
    layout, feature, _ = row
    expected = known(layout, feature)
    refused = cell(LAYOUTS[layout], feature) if feature else None
    where = f"{'/'.join(row)} on rank {rank}"
    if expected is not None:
        return None if run.outcome.startswith(expected) else f"{where}: {run.outcome}; known_cells.toml: {expected}"
    if refused is not None and refused.standing == "refused":
        return None if refused.why in run.refusal else f"{where}: {run.outcome}, and not refused: {refused.why}"
    if run.outcome != "runs":
        return f"{where}: {run.outcome}"
    waits = sorted(set(run.syncs) - allowed(feature))
    if waits:
        return f"{where} waits for the accelerator: {waits}"
    if rank == 0 and "manifest.json" not in run.files:
        return f"{where}: no checkpoint, but {run.files}"
    return None


def faults(rows: list[Cell], ranks: int) -> list[str]:
    runs = simulated([config(*row) for row in rows], ranks)
    lines = [fault(row, rank, run) for row, by_rank in zip(rows, runs, strict=True) for rank, run in enumerate(by_rank)]
    return [line for line in lines if line is not None]


@pytest.mark.parametrize("ranks", sorted(cells(every=False)))
def test_every_layout_runs_as_on_an_accelerator(ranks: int) -> None:
    assert not faults(cells(every=False)[ranks], ranks)


def test_every_feature_of_fsdp_runs_as_on_an_accelerator() -> None:
    assert not faults([("fsdp", feature, "bf16") for feature in features("fsdp") if feature not in PRECISIONS], 2)


@pytest.mark.drill
@pytest.mark.parametrize("ranks", sorted(cells(every=True)))
def test_every_feature_runs_as_on_an_accelerator(ranks: int) -> None:
    assert not faults(cells(every=True)[ranks], ranks)


def test_a_fault_in_a_cell_is_found() -> None:
    """Of each kind: a failure, a wait, a missing refusal, a missing checkpoint."""
    row, wait = ("fsdp", "", "bf16"), allowed("").pop()
    saved = ["manifest.json"]
    assert fault(row, 0, Simulated(syncs=[wait], files=saved)) is None
    assert "no checkpoint" in str(fault(row, 0, Simulated(syncs=[wait])))
    assert "item in" in str(fault(row, 0, Simulated(syncs=[wait, "item in model.py:forward"], files=saved)))
    assert "WrongDevice" in str(fault(row, 0, Simulated(failure="WrongDevice: ...")))
    assert "not refused" in str(fault(("fsdp", "checkpointed segments", "bf16"), 0, Simulated(files=saved)))


def test_every_feature_is_asked_for() -> None:
    assert {feature.name for feature in FEATURES if feature.key != "optim.name"} <= {*ASKS, "compile", "export"}

"""Every strategy and product runs on the simulated accelerator as on a GPU: updates, an evaluation, a save.

a tensor on the wrong device    fails the run
a wait for the accelerator      only those in host_syncs.toml
a refusal                       only where the table of features has it, in its words, or in known_cells.toml
"""

from __future__ import annotations

import pytest
from kit import small
from kit.cells import PRECISIONS, allowed, cells, fault, faults, features
from kit.layouts import DRILLED
from kit.simulated import Simulated, one_rank
from training.test_features import ASKS

from lockstep.plan.features import FEATURES


@pytest.mark.parametrize("ranks", [1, 2])
def test_layouts_run_as_on_an_accelerator(ranks: int) -> None:
    """The others: drills/cells_drill.py."""
    assert not faults([cell for cell in cells(every=False)[ranks] if cell[0] not in DRILLED], ranks)


def test_products_run_as_on_an_accelerator() -> None:
    rows = [cell for cell in cells(every=False)[4] if cell[0] in ("fsdp-hybrid", "pipeline-1f1b+tensor")]
    assert len(rows) == 2
    assert not faults(rows, 4)


@pytest.mark.parametrize("third", range(3))
def test_every_feature_of_fsdp_runs_as_on_an_accelerator(third: int) -> None:
    chosen = [feature for feature in features("fsdp") if feature not in PRECISIONS][third::3]
    assert not faults([("fsdp", feature, "bf16") for feature in chosen], 2)


def test_buffers_that_a_discarded_update_has_changed_cost_no_wait() -> None:
    data = small.config()["data"] | {"drop_last": True}  # the epoch's last update has one sample
    done = one_rank(small.config("WithBatchNorm", launch={"device": "auto"}, data=data), 0, 1, None)
    assert done.outcome == "runs"
    assert done.syncs == allowed("single", "")


def test_a_fault_in_a_cell_is_found() -> None:
    """Of each kind: a failure, a wait, a missing refusal, a missing checkpoint."""
    row, wait = ("fsdp", "", "bf16"), allowed("fsdp", "").pop()
    saved = ["manifest.json"]
    assert fault(row, 0, Simulated(syncs=[wait], files=saved)) is None
    assert "no checkpoint" in str(fault(row, 0, Simulated(syncs=[wait])))
    assert "item in" in str(fault(row, 0, Simulated(syncs=[wait, "item in model.py:forward"], files=saved)))
    assert "WrongDevice" in str(fault(row, 0, Simulated(failure="WrongDevice: ...")))
    assert "not refused" in str(fault(("zero1", "muon", "bf16"), 0, Simulated(files=saved)))


def test_every_feature_is_asked_for() -> None:
    assert {feature.name for feature in FEATURES if feature.key != "optim.name"} <= {*ASKS, "compile", "export"}

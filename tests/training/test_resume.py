"""A run that was interrupted and resumes ends with exactly the weights of one that wasn't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.loop.session import ledger_of
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume

CUTS = (2, 4, 7)  # of four updates an epoch: in the first, at its very end, and in the second
STEPS = 9


def _cut_and_uncut(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The result of the uninterrupted run, and of runs interrupted at each of the steps."""
    uncut = _run(config, folder, None)
    cut = {step: _run(config, folder, step) for step in sorted(CUTS, reverse=True)}
    return {"uncut": uncut, **cut}


def _run(config: dict[str, Any], folder: str, cut: int | None) -> dict[str, Any]:
    """From the checkpoint of step `cut`; without one from the beginning, saving at all cuts."""
    with lockstep.session(config) as session:
        checkpoints = Checkpoints(session, LocalStorage(Path(folder)), {})
        checkpoints.begin(Resume(step=cut))
        assert checkpoints.resumed_from == cut
        reports = []
        for report in session:
            reports.append(report)
            if cut is None and report.step in CUTS:
                checkpoints.save()
        assert all(ended.failure is None for ended in checkpoints.finish())
        return {
            "weights": _bytes(session.state().tensors),
            "losses": {report.step: report.loss for report in reports},
            "verdicts": {report.step: report.verdict.name for report in reports},
            "scales": {report.step: report.loss_scale for report in reports},
            "ledger": [(part.first, part.last, part.digest) for part in ledger_of(session).segments],
            "progress": session.progress,
        }


def _bytes(tensors: Any) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("longer", "kind", "rates"), [(16, "cosine", ("0.005", "0.008536")), (16, "constant", ()), (8, "cosine", ())]
)
def test_a_run_that_is_made_longer_says_that_its_learning_rate_changes(
    tmp_path: Path, longer: int, kind: str, rates: tuple[str, ...]
) -> None:
    notes: list[str] = []
    for steps in (8, longer):
        config = small.config(run={"steps": steps}, schedule={"kind": kind})
        with lockstep.session(config) as session:
            checkpoints = Checkpoints(session, LocalStorage(tmp_path), {})
            notes = checkpoints.begin(Resume())
            if steps == 8 and not checkpoints.resumed_from:
                next(report for report in session if report.step == 4)
                checkpoints.save()
            checkpoints.finish()
    said = [note for note in notes if "learning rate" in note]
    assert len(said) == bool(rates)
    for part in (*rates, "run.steps: 8", "run.steps: 16", "schedule.kind: constant") if rates else ():
        assert part in said[0]


def _assert_same(found: dict[str, Any]) -> None:
    uncut = found.pop("uncut")
    assert set(uncut["losses"]) == set(range(1, STEPS + 1))
    for step, cut in found.items():
        assert set(cut["losses"]) == set(range(step + 1, STEPS + 1))
        for what in ("losses", "verdicts", "scales"):
            assert cut[what] == {key: value for key, value in uncut[what].items() if key > step}
        assert cut["weights"].keys() == uncut["weights"].keys()
        differ = [name for name in uncut["weights"] if cut["weights"][name] != uncut["weights"][name]]
        assert not differ, f"cut at step {step}: {differ}"
        assert cut["progress"] == uncut["progress"]
        assert cut["ledger"][0][0] == 0
        assert cut["ledger"][-1][1] == uncut["ledger"][-1][1]


class Averages(small.Net):
    """Has an average of its inputs, which begins as an integer and is scaled by a double."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(0))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + points.double().mean() / 3
        outputs: torch.Tensor = super().forward(points * (1 + self.mean))
        return outputs.float()


def test_a_buffer_that_a_forward_gives_another_dtype_is_resumed_with_it(tmp_path: Path) -> None:
    optim = {"name": "adamw", "lr": 0.01}
    model = {"kind": "custom", "target": f"{__file__}:Averages"}
    config = {**small.config(run={"steps": STEPS}, optim=optim), "model": model}
    (found,) = in_world(1, _cut_and_uncut, config, str(tmp_path))
    _assert_same(found)


def _digits(shift: int, workers: int, accumulation: int, compute: str, ranks: int) -> dict[str, Any]:
    share = -(-20 // ranks)
    return {
        "model": {"kind": "image-classifier", "layers": 1, "width": 4, "dropout": 0.2},
        "data": {"train": {"kind": "digits", "shift": shift}, "loader": {"workers": workers}, "drop_last": False},
        "batch": {"global_size": 20, "micro_size": -(-share // accumulation)},
        # the scale overflows at once, and again whenever it has grown
        "precision": {"compute": compute, "loss_scale": {"initial": 2.0**22, "growth_interval": 2}},
        "launch": {"device": "cpu"},
        "run": {"steps": STEPS},
    }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("shift", "workers", "accumulation"), [(0, 0, 1), (0, 1, 2), (2, 0, 2), (2, 1, 1)]
)  # all pairs
def test_cut_runs_end_as_uncut_ones(
    tmp_path: Path, shift: int, workers: int, accumulation: int, compute: str, ranks: int
) -> None:
    config = _digits(shift, workers, accumulation, compute, ranks)
    for found in in_world(ranks, _cut_and_uncut, config, str(tmp_path)):
        if compute == "fp16":
            discarded = [step for step, name in found["uncut"]["verdicts"].items() if name == "OVERFLOW"]
            assert min(discarded) < CUTS[0]
            assert max(discarded) > CUTS[-1]
        _assert_same(found)


OF_DDP = ({}, {"bucket_mb": 1e-4}, {"static_graph": True}, {"find_unused_parameters": True})


@pytest.mark.parametrize("options", OF_DDP)
def test_three_ranks_sum_in_one_order_from_the_first_update_on(tmp_path: Path, options: dict[str, Any]) -> None:
    """The sum of three numbers depends on their order, which depends on the place of a gradient in its bucket."""
    for micro_size in ("auto", 2):
        batch = {"global_size": 13, "micro_size": micro_size}
        config = small.config(batch=batch, run={"steps": STEPS}, parallel={"strategy": "ddp", "ddp": options})
        for found in in_world(3, _cut_and_uncut, config, str(tmp_path / str(micro_size))):
            _assert_same(found)


OPTIMIZERS = {
    "adam": {"name": "adam"},
    "sgd": {"name": "sgd", "momentum": 0.0},
    "sgd with momentum": {"name": "sgd", "momentum": 0.9, "nesterov": True},
    "muon": {"name": "muon"},
    "adafactor": {"name": "adafactor"},
    "lion": {"name": "lion"},
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on(tmp_path: Path, name: str, ranks: int) -> None:
    config = small.config(optim={**OPTIMIZERS[name], "lr": 0.01}, run={"steps": STEPS})
    for found in in_world(ranks, _cut_and_uncut, config, str(tmp_path)):
        _assert_same(found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_running_means_are_saved_as_they_were(tmp_path: Path, ranks: int) -> None:
    """A forward changes them while the rest of the state is still being copied."""
    config = small.config("WithBatchNorm", batch={"global_size": 10}, run={"steps": STEPS})
    for found in in_world(ranks, _cut_and_uncut, config, str(tmp_path)):
        _assert_same(found)


def _on_other_ranks(config: dict[str, Any], folder: str, cut: int | None) -> dict[str, Any]:
    found = _run(config, folder, cut)
    found["weights"] = {name: np.frombuffer(data, np.float32) for name, data in found["weights"].items()}
    return found


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (4, 3)])
def test_other_ranks_go_on_at_the_very_next_sample(tmp_path: Path, before: int, after: int) -> None:
    config = small.config(run={"steps": STEPS}, optim={"name": "sgd", "lr": 0.05})
    uncut = in_world(before, _on_other_ranks, config, str(tmp_path), None)[0]
    for found in in_world(after, _on_other_ranks, config, str(tmp_path), CUTS[1]):
        assert found["progress"] == uncut["progress"]
        for step, loss in found["losses"].items():
            assert loss == pytest.approx(uncut["losses"][step], rel=1e-6)
        for name, value in found["weights"].items():
            np.testing.assert_allclose(value, uncut["weights"][name], rtol=1e-5, atol=1e-6)
        digests = sum(digest for _, _, digest in found["ledger"]) % 2**40
        assert digests == uncut["ledger"][0][2], "other samples than the uncut run's"

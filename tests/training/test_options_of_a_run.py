"""Loader workers, drop_last, determinism, and every optimizer: each leaves the run the run it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.runs import differences, record, recorded_all
from kit.worlds import in_world

import lockstep
from lockstep import log

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9},
    "adam": {"lr": 0.01},
    "adafactor": {"lr": 0.01},
    "lion": {"lr": 1e-3},
    "muon": {"lr": 0.01},
}


def _under(optimizer: str) -> dict[str, Any]:
    return small.config(optim={"name": optimizer, **OPTIMIZERS[optimizer]})


def test_every_optimizer_on_two_ranks_is_that_of_one() -> None:
    configs = [_under(optimizer) for optimizer in OPTIMIZERS]
    one, two = recorded_all(configs, ranks=1), recorded_all(configs, ranks=2)
    for optimizer, expected, run in zip(OPTIMIZERS, one, two, strict=True):
        assert differences(run, expected) == [], optimizer
        assert expected.losses[-1] < expected.losses[0], optimizer
        for name, values in expected.weights.items():
            assert run.weights[name] == pytest.approx(values, abs=1e-5), f"{optimizer}: {name}"


def _losses(**data: Any) -> list[float]:
    config = small.config(monitor={"tensorboard": False})
    config["data"] |= data
    with lockstep.session(config) as session:
        return [report.loss for report in session]


def test_workers_change_no_loss() -> None:
    assert _losses(loader={"workers": 2}) == _losses(loader={"workers": 0})


def _samples(drop_last: bool) -> list[tuple[int, int, float]]:
    config = small.config()
    config["data"]["drop_last"] = drop_last
    with lockstep.session(config) as session:
        return [(report.samples, report.epoch, report.count) for report in session]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_samples_of_an_epoch_can_be_left_out(ranks: int) -> None:
    dropped = [(13 * step, (step - 1) // 3, 13) for step in range(1, 9)]
    assert in_world(ranks, _samples, True) == [dropped] * ranks
    kept = [(13, 0, 13), (26, 0, 13), (39, 0, 13), (40, 0, 1), (53, 1, 13), (66, 1, 13), (79, 1, 13), (80, 1, 1)]
    assert in_world(ranks, _samples, False) == [kept] * ranks


def _deterministic() -> tuple[bool, list[float], dict[str, np.ndarray], list[float], dict[str, np.ndarray]]:
    config = small.config(run={"steps": 4, "determinism": "deterministic"})
    with small.in_group():
        once, again = record(config, 4, None), record(config, 4, None)
    return torch.are_deterministic_algorithms_enabled(), once.losses, once.weights, again.losses, again.weights


def test_deterministic_runs_are_the_same_to_the_bit() -> None:
    for enabled, losses, weights, losses_again, weights_again in in_world(2, _deterministic):
        assert enabled
        assert losses == losses_again
        assert all(np.array_equal(weights[name], weights_again[name]) for name in weights)


# --- what user code logs ----------------------------------------------------------------------------------------------


class Talking(small.CrossEntropy):
    """Logs one of each kind on every forward; the text on the second rank alone."""

    def loss_sum(self, outputs: torch.Tensor, batch: lockstep.Batch) -> torch.Tensor:
        loss, rank = super().loss_sum(outputs, batch), int(os.environ.get("RANK", 0))
        if torch.is_grad_enabled():
            log.mean("own_loss", loss, batch.samples)
            log.scalar("rank", rank)
            log.histogram("logits", outputs)
            if rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
                log.text("said by", f"rank {rank}")
        return loss


def _talk(folder: Path) -> None:
    run = {"steps": 5, "folder": str(folder)}
    lockstep.train(small.config(run=run, monitor={"every": 1, "progress": "none"}), objective=Talking())


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_an_objective_logs_is_merged_by_weight(ranks: int, tmp_path: Path) -> None:
    """The fourth update has one sample, so that the second rank's share is padding, whose logs must not show."""
    in_world(ranks, _talk, tmp_path / "run")
    lines = [
        json.loads(line)
        for name in ("metrics.jsonl", "events.jsonl")
        for line in (tmp_path / "run" / name).read_text().splitlines()
    ]
    samples, losses = (
        [0, *(line["samples"] for line in lines if "lr" in line)],
        [line["loss"] for line in lines if "lr" in line],
    )
    sums = [0.0]
    for before, after, loss in zip(samples, samples[1:], losses, strict=False):
        sums.append(sums[-1] + (after - before) * loss)
    drained = [0, *(line["step"] for line in lines if "logged" in line)]
    assert drained[-1] == 5
    logged = [line["logged"] for line in lines if "logged" in line]
    for values, since, until in zip(logged, drained, drained[1:], strict=False):
        count = samples[until] - samples[since]
        assert values["own_loss"] == pytest.approx((sums[until] - sums[since]) / count, rel=1e-6)
        last = 0 if count == 1 else ranks - 1  # of the ranks with samples
        assert values["rank"] == last / 2
        assert values.get("said by") == (f"rank {ranks - 1}" if last == ranks - 1 else None)
        assert values["logits"]["count"] == 3 * count

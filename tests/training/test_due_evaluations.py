"""Evaluations that a failure, a stop or a kill comes before: none is lost, none counts twice, and the best is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from kit import small
from kit.commands import run_lockstep
from kit.worlds import in_world
from safetensors.torch import load_file
from training import interrupted_data

import lockstep
from lockstep.checkpoint.local import LocalDraft, LocalStorage
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reading import read_manifest
from lockstep.config.loading import validate
from lockstep.core.records import Batch
from lockstep.resilience.faults import FAULTS, Fault, write_plan
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.training.job import Job, run_job


class Logging(small.CrossEntropy):
    """Logs, so that ranks collect its values after an update, before the evaluation."""

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        loss = super().loss_sum(outputs, batch)
        lockstep.log.mean("own", loss.detach(), batch.samples)
        return loss


class NanOnce(Logging):
    """Its loss is NaN in the fifth update, once."""

    def __init__(self, marker: str) -> None:
        self._marker = Path(marker)
        self._calls = 0

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        loss = super().loss_sum(outputs, batch)
        self._calls += torch.is_grad_enabled()
        if self._calls == 5 and torch.is_grad_enabled() and not self._marker.exists():
            self._marker.touch()
            return loss * float("nan")
        return loss


def _config(run: Path, **sections: Any) -> dict[str, Any]:
    return small.config(**{
        "run": {"folder": str(run), "steps": 9, "end_with": "best"},
        "objective": {"kind": "custom", "target": f"{__file__}:Logging"},
        "evaluation": {"every": "3 steps"},
        "checkpoint": {"every": None, "best": "held-out.loss", "keep_last": 1},
        "monitor": {"every": 1, "progress": "none", "tensorboard": False},
        **sections,
    })  # fmt: skip


def _history(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line.get("evaluation") == "held-out"]


def _newest(run: Path) -> Manifest:
    storage = LocalStorage(run / "checkpoints")
    return read_manifest(storage, max(storage.names()))


def _trained(config: dict[str, Any]) -> str:
    try:
        run_job(Job(validate(config).config, "evaluated"))
    except Exception as error:
        return type(error).__name__
    return "finished"


def _with_faults(folder: Path, faults: list[Fault], strategy: str, **sections: Any) -> str:
    """Train on two ranks, without and with faults, and compare evaluations and best weights; return the output."""
    runs = folder / "undisturbed", folder / "killed"
    for run in runs:
        ranks = {"parallel": {"strategy": strategy}, "launch": {"ranks": 2, "device": "cpu"}}
        file, plan = run.with_suffix(".yaml"), run.with_suffix(".json")
        file.write_text(yaml.safe_dump(_config(run, **ranks, **sections)))
        write_plan(plan, faults if run == runs[1] else [])
        done = run_lockstep("train", file, **{FAULTS: str(plan)})
        assert done.returncode == 0, done.stderr
    assert _history(runs[1]) == _history(runs[0])
    weights, expected = (load_file(run / "model" / "model.safetensors") for run in runs)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    return done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_between_an_update_and_its_evaluation(tmp_path: Path, rank: int) -> None:
    """The other one fails where the logged values are collected, and saves the state."""
    at_once = {"every": None, "best": "held-out.loss", "keep_last": 1, "asynchronous": False}
    faults = [Fault("kill", rank, 7, "host")]
    output = _with_faults(tmp_path, faults, "ddp", recovery={"restarts": 1}, checkpoint=at_once)
    assert "resumes from step 6 " in output


@pytest.mark.parametrize(("strategy", "rank", "every"), [("ddp", 1, "auto"), ("ddp", 0, None), ("fsdp", 1, 1)])
def test_a_rank_that_is_killed_while_the_best_state_is_being_saved(
    tmp_path: Path, strategy: str, rank: int, every: str | int | None
) -> None:
    """The disk of rank 1 is slow. The run resumes from the best state, or from before it, and not from after it."""
    faults = [Fault("slow", 1, 2, "data"), Fault("kill", rank, 6, "data")]
    checkpoint = {"every": None, "best": "held-out.loss", "best_is": "highest", "keep_last": 1}
    recovery = {"restarts": 1, "snapshot_every": every}
    output = _with_faults(tmp_path, faults, strategy, checkpoint=checkpoint, recovery=recovery)
    assert ("resumes from step 3 " in output) == (every is not None)


def test_an_update_that_ends_the_run_is_evaluated_when_it_resumes(tmp_path: Path) -> None:
    config = _config(
        tmp_path / "run",
        objective={"kind": "custom", "target": f"{__file__}:NanOnce", "arguments": {"marker": str(tmp_path / "nan")}},
        evaluation={"every": "5 steps"},
        recovery={"bad_numbers": {"nonfinite": "stop"}},
    )
    assert in_world(1, _trained, config) == ["RunFailed"]
    assert _newest(tmp_path / "run").step == 5
    assert in_world(1, _trained, config) == ["finished"]
    assert [step for step, _ in _history(tmp_path / "run")] == [5, 9]


def _failing_before_the_save(config: dict[str, Any]) -> str:
    """Train, and fail after the evaluation of step 6, which is the best, before it is saved."""
    save = Checkpoints.save

    def fail(self: Checkpoints, *arguments: Any) -> None:
        if self.evaluations.is_best and self.evaluations.reports[0].step == 6:
            raise ValueError("planted")
        save(self, *arguments)

    with patch.object(Checkpoints, "save", fail):
        return _trained(config)


def test_a_state_that_is_rescued_has_the_metrics_of_its_evaluation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert in_world(1, _failing_before_the_save, _config(run)) == ["ValueError"]
    newest = _newest(run)
    assert newest.step == 6
    assert newest.metrics["held-out.loss"] == newest.state["best"] == _history(run)[-1][1]
    assert in_world(1, _trained, _config(run)) == ["finished"]
    assert [step for step, _ in _history(run)] == [3, 6, 9]


class _Killed(BaseException):
    """The process has ended."""


def _killed_in_publishing(config: dict[str, Any]) -> str:
    """Train, and end where a checkpoint or its manifest would be published."""
    with (
        patch.object(LocalDraft, "publish", side_effect=_Killed),
        patch.object(LocalStorage, "replace_manifest", side_effect=_Killed),
        suppress(_Killed),
    ):
        run_job(Job(validate(config).config, "evaluated"))
        return "finished"
    return "killed"


def _interrupted(run: Path, at: int, **sections: Any) -> dict[str, Any]:
    """Return the config of a run that SIGTERM stops in an evaluation."""
    arguments = {"how": "stop", "rank": 0, "at": at, "marker": str(run.parent / f"{run.name}-interrupted")}
    config = _config(run, **sections)
    target = f"{Path(interrupted_data.__file__)}:Interrupting"
    config["evaluation"]["micro_size"] = 1
    config["data"]["evaluation"] = {"held-out": {"kind": "custom", "target": target, "arguments": arguments}}
    return config


def test_a_kill_while_the_metrics_are_saved_leaves_the_only_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = _interrupted(run, 1)
    assert in_world(1, _trained, config) == ["Paused"]
    assert in_world(1, _killed_in_publishing, config) == ["killed"]
    assert LocalStorage(run / "checkpoints").names() == ["step-00000003"]
    assert in_world(1, _trained, config) == ["finished"]
    assert [step for step, _ in _history(run)] == [3, 6, 9]


@pytest.mark.parametrize("resume", [_trained, _killed_in_publishing])
def test_the_last_evaluation_counts_no_more_for_being_repeated(
    tmp_path: Path, resume: Callable[[dict[str, Any]], str]
) -> None:
    stopping = {"metric": "held-out.loss", "patience": 2, "min_delta": 100}  # which the evaluation of step 8 waits for
    runs = tmp_path / "undisturbed", tmp_path / "stopped"
    for run in runs:
        config = _interrupted(
            run,
            3,
            evaluation={"every": "4 steps"},
            monitor={"every": 1, "early_stopping": stopping, "progress": "none"},
        )
        if run == runs[0]:
            Path(config["data"]["evaluation"]["held-out"]["arguments"]["marker"]).touch()
        else:
            assert in_world(1, _trained, config) == ["Paused"]
            assert in_world(1, resume, config) == ["finished" if resume is _trained else "killed"]
        if not (run / "summary.json").exists():
            assert in_world(1, _trained, config) == ["finished"]
    undisturbed, stopped = (json.loads((run / "summary.json").read_text()) for run in runs)
    assert "stopped_early" not in undisturbed
    assert "stopped_early" not in stopped
    assert stopped["evaluation"] == undisturbed["evaluation"]
    assert _history(runs[1]) == _history(runs[0])
    assert _newest(runs[1]).metrics == _newest(runs[0]).metrics != {}
    assert _newest(runs[1]).state["early_stopping"] == _newest(runs[0]).state["early_stopping"]

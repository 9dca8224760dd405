"""Runs that end before an evaluation that is due, or in it: what resumes begins with it, and ends undisturbed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from kit import small
from kit.worlds import in_process, in_world
from training import interrupted_data

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.config.loading import validate
from lockstep.core.errors import Paused
from lockstep.core.records import Batch, StepReport
from lockstep.distributed.collectives import LocalGroup
from lockstep.loop.evaluate import EvaluationStopped, stoppable
from lockstep.training.finished_run import evaluate_run
from lockstep.training.job import Job, run_job
from lockstep.training.monitoring import UserLogs

STEPS = 9
TARGET = f"{Path(interrupted_data.__file__)}:Interrupting"


def _config(folder: Path, how: str, rank: int, at: int, strategy: str) -> dict[str, Any]:
    config = small.config(
        run={"folder": str(folder), "steps": STEPS},
        parallel={"strategy": strategy},
        evaluation={"every": "3 steps", "micro_size": 1},
        checkpoint={"every": "2 steps", "best": "held-out.loss"},
        monitor={
            "every": 1, "progress": "none", "tensorboard": False,
            "early_stopping": {"metric": "held-out.loss", "patience": 2},
        },
    )  # fmt: skip
    arguments = {"how": how, "rank": rank, "at": at, "marker": str(folder.parent / "interrupted")}
    config["data"]["evaluation"] = {"held-out": {"kind": "custom", "target": TARGET, "arguments": arguments}}
    return config


def _trained(config: dict[str, Any]) -> str:
    arguments = config["data"]["evaluation"]["held-out"]["arguments"]
    try:
        if arguments["how"] == "raise before" and arguments["rank"] == int(os.environ.get("RANK", "0")):
            with patch.object(UserLogs, "see", partialmethod(_raise_once, arguments["at"], Path(arguments["marker"]))):
                run_job(Job(validate(config).config, "interrupted"))
                return "finished"
        run_job(Job(validate(config).config, "interrupted"))
    except Exception as error:
        return type(error).__name__
    return "finished"


_see = UserLogs.see


def _raise_once(logs: UserLogs, at: int, marker: Path, report: StepReport) -> Any:
    """Fail between an update and its evaluation, where the ranks collect what user code has logged."""
    if report.step == 3 * at and not marker.exists():
        marker.touch()
        raise ValueError("planted")
    return _see(logs, report)


def _history(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line.get("evaluation") == "held-out"]


def _states(run: Path) -> dict[int, dict[str, Any]]:
    storage = LocalStorage(run / "checkpoints")
    manifests = [read_manifest(storage, name) for name in storage.names()]
    kept = ("progress", "best", "early_stopping", "evaluation_due")
    return {
        manifest.step: {**{key: manifest.state.get(key) for key in kept}, "metrics": manifest.metrics}
        for manifest in manifests
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "interrupted").touch()
    assert in_world(1, _trained, _config(folder / "run", "stop", 0, 1, "auto")) == ["finished"]
    return folder / "run"


@pytest.mark.parametrize(
    ("how", "rank", "at", "strategy"),
    [
        pytest.param("stop", 0, 1, "auto", id="stopped"),
        pytest.param("stop", 0, 3, "auto", id="stopped at the end"),
        pytest.param("stop", 1, 2, "ddp", id="one of two ranks stopped"),
        pytest.param("stop", 1, 3, "fsdp", id="one of two sharded ranks stopped"),
        pytest.param("raise", 0, 2, "auto", id="an exception"),
        pytest.param("raise", 1, 2, "ddp", id="an exception on one of two ranks"),
        pytest.param("raise before", 0, 2, "auto", id="an exception before it"),
        pytest.param("raise before", 0, 3, "auto", id="an exception before it at the end"),
        pytest.param("raise before", 1, 2, "ddp", id="an exception before it on one of two ranks"),
    ],
)
def test_it_is_done_when_the_run_resumes(
    how: str, rank: int, at: int, strategy: str, tmp_path: Path, undisturbed: Path
) -> None:
    run, ranks = tmp_path / "run", 1 if strategy == "auto" else 2
    config = _config(run, how, rank, at, strategy)
    outcomes = in_world(ranks, _trained, config)
    assert "finished" not in outcomes
    assert how != "stop" or outcomes == [Paused.__name__] * ranks
    newest = max(_states(run).items())
    assert newest == (3 * at, {**newest[1], "evaluation_due": True, "metrics": {}})
    assert in_world(ranks, _trained, config) == ["finished"] * ranks
    for (step, loss), (expected_step, expected) in zip(_history(run), _history(undisturbed), strict=True):
        assert (step, loss) == (expected_step, pytest.approx(expected, rel=1e-5))
    states, expected_states = _states(run), _states(undisturbed)
    assert states.keys() >= expected_states.keys()
    for step, expected in expected_states.items():
        assert states[step]["early_stopping"]["waited"] == expected["early_stopping"]["waited"]
        assert states[step]["metrics"].keys() == expected["metrics"].keys()


def _trained_by_launcher(folder: Path, marker: Path) -> None:
    config = _config(folder, "stop", 0, 1, "ddp")
    model = {"kind": "custom", "target": f"{Path(interrupted_data.__file__)}:Killed"}
    config["model"] = {**model, "arguments": {"marker": str(marker)}}
    config["data"]["evaluation"] = {"held-out": config["data"]["train"]}
    config["recovery"] = {"restarts": 1, "snapshot_every": 1}
    config["launch"]["ranks"] = 2
    lockstep.train(config, ranks=2)


def _evaluated_again(run: Path) -> dict[str, dict[str, float]] | None:
    return evaluate_run(run, ranks=None, trust_remote_code=False, trust_run=True)[1]


def test_a_model_that_draws_has_the_metrics_of_the_undisturbed_run_after_a_kill(tmp_path: Path) -> None:
    undisturbed, killed, marker = tmp_path / "undisturbed", tmp_path / "killed", tmp_path / "marker"
    marker.touch()
    in_process(_trained_by_launcher, undisturbed, marker)
    marker.unlink()
    in_process(_trained_by_launcher, killed, marker)
    assert marker.exists()
    history = _history(killed)
    assert history == _history(undisturbed)
    assert [step for step, _ in history] == [3, 6, 9]
    again = in_process(_evaluated_again, killed)
    assert again["held-out"]["loss"] == pytest.approx(history[-1][1], rel=1e-6)


def test_a_long_evaluation_is_left_within_a_second() -> None:
    axis, votes, seen = LocalGroup(), [], []

    def batches() -> Iterator[Batch]:
        while True:
            time.sleep(0.01)
            yield Batch({}, {}, 1, 1)

    def asked() -> bool:
        votes.append(len(seen))
        return len(votes) == 4

    def leave() -> None:
        for batch in stoppable(batches(), asked, axis):
            seen.append(batch)

    began = time.monotonic()
    with pytest.raises(EvaluationStopped):
        leave()
    assert time.monotonic() - began < 5
    assert votes[:2] == [0, 1]
    assert 2 < votes[2] - votes[1] <= 50, "half a second of batches"

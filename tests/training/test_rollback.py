"""A run that goes back because of bad numbers ends as one whose config leaves the same samples out."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit import small
from kit.commands import run_lockstep
from kit.failures import fails, gives
from kit.worlds import in_world
from torch.nn import functional as F

import lockstep
from lockstep.assembly.user_objects import UserObjects
from lockstep.checkpoint.comparison import OpenCheckpoint, compare
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.core.errors import ConfigError, RolledBack, RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.records import Batch
from lockstep.data.order import SampleOrder
from lockstep.distributed.consensus import DeviceConsensus
from lockstep.launch.ends_file import read_ends
from lockstep.loop.bad_updates import RollbackDue
from lockstep.loop.ledger import audit
from lockstep.loop.readback import Readback
from lockstep.loop.session import Session, components_of
from lockstep.report.explanation import explain
from lockstep.training.api import resolved
from lockstep.training.job import opened

STEPS = 17
"""Two epochs, and the first update of the third."""
SIZE = 5
BAD_UPDATE = 6
"""Its second micro-batch has the bad sample, on the second of two ranks."""
ORDER = SampleOrder(40, 0).indices(0, torch.arange(40).numpy()).tolist()
BAD = ORDER[SIZE * BAD_UPDATE - 1]
STRATEGIES: dict[str, Any] = {
    "single": {},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "zero2": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 2}},
    "pipeline": {"strategy": "ddp", "pipeline": 2},
}
DRILLED = [pytest.param(name, marks=pytest.mark.drill) for name in ("zero2", "pipeline")]
DDP_DRILLED = pytest.param("ddp", marks=pytest.mark.drill)
"""Where the test with the launcher is of DDP."""


class Points:
    """Points, some of which are NaN, or far away, or can't be read."""

    def __init__(
        self, nan: tuple[int, ...] = (), far: tuple[int, ...] = (), samples: int = 40, unreadable: tuple[int, ...] = ()
    ) -> None:
        self._points, self._nan, self._far, self._unreadable = small.points(samples), nan, far, unreadable

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        point, label = self._points[index]
        if index in self._unreadable:
            raise OSError("broken")
        if index in self._nan:
            return point * torch.nan, label
        return (point + 1e4, label) if index in self._far else (point, label)


class Weighted(small.CrossEntropy):
    """Gives points that are far away a weight that is much too large."""

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        far = batch.inputs[0][:, 0] > 1e3
        return (F.cross_entropy(outputs.float(), batch.targets, reduction="none") * (1 + 1e4 * far)).sum()


def config(folder: Path, strategy: str, numbers: dict[str, Any], **sections: Any) -> dict[str, Any]:
    arguments = sections.pop("arguments", {"nan": [BAD]})
    data = {"train": {"kind": "custom", "target": f"{__file__}:Points", "arguments": arguments}}
    made = small.config(
        data={**data, **sections.pop("data", {})},
        batch={"global_size": SIZE, "micro_size": 2},
        run={"steps": sections.pop("steps", STEPS), "folder": str(folder), "seed": 0},
        schedule={"kind": "linear"},
        checkpoint={"every": "2 steps", "keep_last": 10, **sections.pop("checkpoint", {})},
        monitor={"every": 1, "tensorboard": False, "progress": "none", "meter_seconds": 0},
        recovery={"snapshot_every": None, "bad_numbers": numbers, **sections.pop("recovery", {})},
        parallel=STRATEGIES[strategy],
    )
    made |= sections
    return made | ({"model": {"kind": "custom", "target": "kit.chains:Chain"}} if strategy == "pipeline" else {})


def trained(config: dict[str, Any]) -> str:
    """Train, as a rank that another launcher has started; return the message of a rollback."""
    try:
        lockstep.train(config)
    except RolledBack as rollback:
        return str(rollback)
    return ""


def printed_by(config: dict[str, Any]) -> str:
    """Train; return what the run prints."""
    with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        trained(config)
    return printed.getvalue()


def ranks_of(strategy: str) -> int:
    return 1 if strategy == "single" else 2


def assert_same_end(folder: Path, other: Path) -> None:
    first, second = (LocalStorage(run / "checkpoints") for run in (folder, other))
    compared = compare(*(OpenCheckpoint(storage, storage.names()[-1]) for storage in (first, second)))
    assert not compared.values
    assert compared.same > 0
    assert losses(folder) == losses(other)
    assert left_out(folder) == left_out(other)


def without(samples: list[int]) -> dict[str, Any]:
    """The section `data` of a run that leaves samples out."""
    return {"leave_out": [[sample, sample] for sample in samples]}


def losses(folder: Path) -> list[Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["lr"], line["kept"]) for line in lines]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in line]


def left_out(folder: Path) -> list[int]:
    storage = LocalStorage(folder / "checkpoints")
    manifest = read_manifest(storage, storage.names()[-1])
    found = audit(manifest.state, manifest.samples)
    assert found.complete
    return sorted({sample.index for sample in found.left_out})


@pytest.mark.parametrize("strategy", ["single", DDP_DRILLED, "fsdp", *DRILLED])
def test_a_run_that_goes_back_ends_as_one_whose_config_leaves_the_samples_out(tmp_path: Path, strategy: str) -> None:
    run, other, ranks = tmp_path / "run", tmp_path / "other", ranks_of(strategy)
    asked = config(run, strategy, {"nonfinite": "rollback", "rollback_steps": 3})
    window = ORDER[SIZE * (BAD_UPDATE - 3) : SIZE * BAD_UPDATE]
    messages = in_world(ranks, trained, asked)
    assert len(set(messages)) == 1
    assert f"step {BAD_UPDATE}: loss nan" in messages[0]
    assert f"suspected: micro-batch {3 if ranks == 1 else 2} of rank" in messages[0] or strategy == "pipeline"
    assert gives(messages[0], "step 2", "15 samples", "updates 4 to 6")
    assert in_world(ranks, trained, asked) == [""] * ranks
    assert in_world(ranks, trained, config(other, strategy, {}, data=without(window))) == [""] * ranks
    assert_same_end(run, other)
    assert left_out(run) == sorted(window)
    (event,) = events(run, "bad_numbers")
    assert event["bad_numbers"] == "rolled back"
    assert (event["step"], event["update"]) == (2, BAD_UPDATE)
    assert BAD in event["samples"]
    assert any(
        sentence.startswith(f"Bad numbers: update {BAD_UPDATE}: loss nan") for sentence in explain(run).sentences
    )


def test_the_launcher_starts_the_ranks_again(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    numbers = {"nonfinite": "rollback", "rollback_steps": 1}
    asked = config(run, "ddp", numbers, launch={"ranks": 2, "device": "cpu"}, recovery={"restarts": 1})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(asked))
    done = run_lockstep("train", tmp_path / "run.yaml")
    assert done.returncode == 0, done.stderr
    assert "its ranks start again" in done.stderr
    assert in_world(2, trained, config(other, "ddp", {}, data=without(ORDER[25:30]))) == [""] * 2
    assert_same_end(run, other)
    kinds = [FailureKind.ROLLED_BACK, FailureKind.DONE]
    assert [(end.kind, end.ranks[0].kind) for end in read_ends(run / "logs")] == [(kind, kind) for kind in kinds]


def test_a_run_without_an_old_state_goes_back_to_the_oldest_or_the_beginning(tmp_path: Path) -> None:
    for every, back_to, first in (("4 steps", 4, 5), ("100 steps", 0, 4)):
        run, other = tmp_path / every / "run", tmp_path / every / "other"
        numbers = {"nonfinite": "rollback", "rollback_steps": 3}
        asked = config(run, "single", numbers, checkpoint={"every": every})
        message = in_world(1, trained, asked)[0]
        assert gives(message, f"step {back_to}", f"{SIZE * (7 - first)} samples", f"updates {first}")
        in_world(1, trained, asked)
        window = ORDER[SIZE * (first - 1) : SIZE * BAD_UPDATE]
        in_world(1, trained, config(other, "single", {}, data=without(window), checkpoint={"every": every}))
        assert_same_end(run, other)


def test_a_run_that_does_not_get_further_ends_and_states_what_helps(tmp_path: Path) -> None:
    """Nearly all samples are bad from the third update on; a good one takes the place of those of a whole update."""
    bad = [sample for sample in ORDER[2 * SIZE :] if sample]
    asked = config(
        tmp_path / "run", "single", {"nonfinite": "rollback", "rollback_steps": 2}, arguments={"nan": bad},
        recovery={"budgets": {"rollback": 2}},
    )  # fmt: skip
    assert ["goes back" in in_world(1, trained, asked)[0] for _ in range(2)] == [True] * 2
    (failure,) = in_world(1, failed, asked)
    assert gives(failure, "step 5", "loss nan")
    assert gives(failure, "2 times", "smaller learning rate")


def failed(config: dict[str, Any]) -> str:
    with pytest.raises(RunFailed) as failure:
        lockstep.train(config)
    assert not isinstance(failure.value, RolledBack)
    return str(failure.value)


def test_what_a_run_that_starts_otherwise_does(tmp_path: Path) -> None:
    """A config without rollback forgets one that wasn't done; a damaged list ends the run; --fresh deletes it."""
    asked = config(tmp_path / "run", "single", {"nonfinite": "rollback"}, steps=7)
    file = tmp_path / "run" / "logs" / "rollbacks.json"
    in_world(1, trained, asked)
    assert [entry["applied"] for entry in json.loads(file.read_text())] == [False]
    in_world(1, trained, config(tmp_path / "run", "single", {}, steps=7))
    assert json.loads(file.read_text()) == []
    assert [line[3] for line in losses(tmp_path / "run")] == [True] * 5 + [False, True]
    longer = config(tmp_path / "run", "single", {"nonfinite": "rollback"}, steps=8)
    file.write_text('[{"update": 6, "to": -1}]')
    assert "rollbacks.json is damaged" in in_world(1, failed, longer)[0]
    with pytest.raises(RolledBack):
        lockstep.train(longer, fresh=True)
    assert [entry["update"] for entry in json.loads(file.read_text())] == [BAD_UPDATE]


def test_what_is_refused(tmp_path: Path) -> None:
    numbers = {"spike": "rollback"}
    with (
        pytest.raises(ConfigError, match="a session leaves the loop to you"),
        lockstep.session(config(tmp_path, "single", numbers)),
    ):
        pass
    with pytest.raises(ConfigError, match="write 10000"):
        lockstep.train(config(tmp_path / "run", "single", {**numbers, "rollback_steps": 10_001}))
    with fails(ConfigError, "rollback_steps 3", key="recovery.bad_numbers"):
        lockstep.train(config(tmp_path / "run", "single", {"rollback_steps": 3}))


SPIKE = 13
FAR_ORDER = SampleOrder(120, 0).indices(0, torch.arange(120).numpy()).tolist()
FAR = FAR_ORDER[SIZE * SPIKE - 2]
FAR_POINTS = {
    "arguments": {"samples": 120, "far": [FAR]},
    "objective": {"kind": "custom", "target": f"{__file__}:Weighted"},
}


def test_a_spike_takes_the_run_back(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    spikes = {"spike": "rollback", "window": 8, "rollback_steps": 2}
    asked = config(run, "single", spikes, **FAR_POINTS)
    assert gives(in_world(1, trained, asked)[0], "step 10", "10 samples", "updates 12 to 13")
    assert in_world(1, trained, asked) == [""]
    window = FAR_ORDER[SIZE * (SPIKE - 2) : SIZE * SPIKE]
    in_world(1, trained, config(other, "single", spikes, **FAR_POINTS, data=without(window)))
    assert_same_end(run, other)


def test_a_spike_that_is_kept_is_printed_once_with_its_micro_batch(tmp_path: Path) -> None:
    printed = in_world(1, printed_by, config(tmp_path / "run", "single", {"window": 8}, **FAR_POINTS))
    about = [
        line for line in printed[0].splitlines() if f"update {SPIKE}" in line and ("spike" in line or "kept" in line)
    ]
    assert len(about) == 1, printed[0]
    assert str(FAR) in about[0]
    (event,) = events(tmp_path / "run", "bad_numbers")
    assert event["bad_numbers"] == "kept"
    assert event["where"].startswith("micro-batch 2 of rank 0 ")
    assert FAR in event["samples"]


def test_a_device_finds_and_names_the_same_one_update_late(tmp_path: Path) -> None:
    for numbers in ({"nonfinite": "stop"}, {"nonfinite": "rollback", "rollback_steps": 2}):
        asked = config(tmp_path / "run", "single", numbers)
        assert of_session(asked, on_device=True) == of_session(asked, on_device=False)


def of_session(asked: dict[str, Any], *, on_device: bool) -> tuple[list[Any], str]:
    """The reports of a session, with what is known of bad updates, and how it ended."""
    reports: list[Any] = []
    given = UserObjects()
    with opened(resolved(asked, given), given) as session:
        if on_device:
            components = components_of(session)
            world = components.world
            late = DeviceConsensus(world.axis, world.device), Readback(world.device, late=True)
            update = replace(components.update, consensus=late[0], readback=late[1])
            session = Session(replace(components, update=update))
        try:
            for report in session:
                reports.append((report.step, report.loss, report.kept, report.samples, report.tokens))
        except RollbackDue as due:
            return [], f"{due} {due.samples} {due.bad}"
        except RunFailed as failure:
            return [], str(failure)
        return [*reports, *session.bad_updates.take_new()], ""

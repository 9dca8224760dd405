"""`lockstep chaos` on a small model: faults fire, runs recover, and what doesn't end alike is found."""

from __future__ import annotations

import json
import os
import random
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit import small
from kit.commands import Done, run_lockstep, start_lockstep

from lockstep.chaos.drawing import balanced
from lockstep.chaos.kinds import applicable
from lockstep.chaos.rounds import _evaluations, config_of_round
from lockstep.config.loading import validate
from lockstep.core.phase_clock import PhaseClock
from lockstep.resilience.faults import Fault, PlantedFault, events_of, plant, write_plan

HERE = Path(__file__)


class Undetermined(small.Net):
    """Draws from what no run can repeat."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points) + os.urandom(1)[0]


class Normalized(small.Net):
    """Ties the samples of a micro-batch together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = self.norm(super().forward(points))
        return normalized


class Points:
    """Points that are read one by one, more than a run that goes back leaves out."""

    def __init__(self) -> None:
        self._points = small.points(64)

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        return self._points[index]


def chaos(folder: Path, *words: str, **sections: Any) -> Done:
    config = small.config(parallel={"strategy": "ddp"}, launch={"ranks": 2, "device": "cpu"})
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump({**config, **sections}))
    return run_lockstep("chaos", file, "--folder", folder / "runs", "--steps", "6", *words)


def test_each_kind_of_fault(tmp_path: Path) -> None:
    done = chaos(tmp_path, "--rounds", "3", "--json", "--faults", "kill,exit,raise")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    assert {row["fault"] for row in rows} == {"kill", "exit", "raise"}
    for row in rows:
        assert row["passed"]
        assert row["recovery_seconds"] > 0
        assert row["steps_redone"] is not None
    assert "all 3 runs recovered by themselves" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_memory_that_runs_out(tmp_path: Path) -> None:
    done = chaos(tmp_path, "--rounds", "1", "--faults", "oom", "--json", "--keep", "--batch.global_size", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)
    assert row["passed"]
    assert row["distance"] < 1e-5
    assert "batch.micro_size is 4 instead of 8" in Path(row["output"]).read_text()


def test_a_round_that_fails_does_not_stop_the_rest(tmp_path: Path) -> None:
    """Micro-batches of one sample can't be halved; the folder of the round stays, and that of the other one goes."""
    words = ("--batch.global_size=2", "--run.steps=5", "--monitor.prometheus.port=9100", "--optim.lr=0.1")
    done = chaos(tmp_path, "--rounds", "2", "--faults", "oom,raise", *words, "--json")
    assert done.returncode == 3
    assert (
        "note: rounds have settings of their own, and not --monitor.prometheus.port, --run.steps; --steps is"
        in done.stderr
    )
    rows = {row["fault"]: row for row in json.loads(done.stdout)}
    assert "this run's have one sample" in rows["oom"]["failure"]
    assert rows["raise"]["passed"]
    assert rows["oom"]["output"] in done.stderr
    kept = {folder.name for folder in (tmp_path / "runs").iterdir()}
    assert kept == {"undisturbed", Path(rows["oom"]["output"]).parent.name}


@pytest.mark.parametrize(
    "kinds", ["full,gone,flip", pytest.param("readonly,slow,sample", marks=pytest.mark.drill)], ids=str
)
def test_faults_of_the_disk_and_of_the_data(tmp_path: Path, kinds: str) -> None:
    done = chaos(tmp_path, "--rounds", "3", "--faults", kinds, "--json", "--steps", "12", "--keep")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    assert {row["fault"] for row in rows} == set(kinds.split(","))
    assert all(row["passed"] for row in rows)
    for row in rows:
        output = Path(row["output"])
        texts = [file.read_text() for file in (output, *output.parent.glob("run/logs/*.log"))]
        assert LINES[row["fault"]] in "".join(texts), row


LINES = {
    "full": "No space left on device",
    "gone": "Input/output error; retrying for 60 s",
    "flip": "checkpoints/broken-step-",
    "slow": "step 12: saved",
    "readonly": "Read-only file system; retrying",
    "sample": "failed once and succeeded when it was tried again",
}


@pytest.mark.drill
def test_a_run_of_divided_sequences_goes_back_before_a_nan(tmp_path: Path) -> None:
    sizes = (
        "--model.layers=2",
        "--model.width=32",
        "--model.heads=2",
        "--data.train.length=32",
        "--evaluation.every=null",
    )
    layout = ("--ranks=2", "--parallel.context=2", "--batch.global_size=8", "--launch.device=cpu")
    words = ("--folder", tmp_path / "runs", "--rounds=1", "--faults=nan")
    done = run_lockstep("chaos", "stdlib-lm", *words, *sizes, *layout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_goes_back_before_a_nan(tmp_path: Path) -> None:
    data = {"train": {"kind": "custom", "target": f"{HERE}:Points"}}
    done = chaos(tmp_path, "--rounds", "1", "--faults", "nan", "--seed", "3", data=data)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " equal; " in done.stdout


def test_a_model_with_batch_norm_has_the_faults_that_apply(tmp_path: Path) -> None:
    model = {"kind": "custom", "target": f"{HERE}:Normalized"}
    done = chaos(tmp_path, "--rounds", "1", "--batch.global_size", "16", model=model)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_that_ends_otherwise_is_found(tmp_path: Path) -> None:
    done = chaos(tmp_path, "--rounds", "1", model={"kind": "custom", "target": f"{HERE}:Undetermined"})
    assert done.returncode == 3
    assert "ended with another state or other losses" in done.stdout
    assert "1 of 1 rounds didn't end like the undisturbed run" in done.stderr
    assert str(tmp_path / "runs" / "round-1" / "output.txt") in done.stderr


def test_a_recipe_that_fails_undisturbed(tmp_path: Path) -> None:
    done = chaos(tmp_path, model={"kind": "custom", "target": "kit.small:Missing"})
    assert done.returncode == 1
    assert "the undisturbed run ended with exit code 2" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--faults", "kil"], "did you mean kill?"),
        (["--steps", "1"], "2 updates at least"),
        (["--rounds", "0"], "0"),
        (["--launch.nodes", "2", "--launch.rendezvous", "a:1"], "leave out launch.nodes"),
        (["--faults", "diverge", "--parallel.strategy", "fsdp"], "changes one of several copies of a parameter"),
        (["--faults", "nan", "--model.compile", "true"], "set model.compile: false"),
        (["--faults", "flip", "--steps", "4"], "give --steps 5 at least"),
        (["--faults", "oom", "--batch.micro_size", "1"], "set a larger batch.micro_size"),
    ],
)
def test_refusals(tmp_path: Path, words: list[str], message: str) -> None:
    done = chaos(tmp_path, *words)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("parallel", "options", "has_copies"),
    [
        ("ddp", {}, True),
        ("fsdp", {}, False),
        ("deepspeed", {"zero_stage": 1}, True),
        ("deepspeed", {"zero_stage": 2}, True),
        ("deepspeed", {"zero_stage": 2, "bf16_weights": True}, False),  # the state is the fp32 values, in shards
        ("deepspeed", {"zero_stage": 3}, False),
    ],
)
def test_a_bit_may_flip_where_parameters_are_whole(parallel: str, options: dict[str, Any], has_copies: bool) -> None:
    section = {"strategy": parallel, **({parallel: options} if options else {})}
    config = validate(small.config(parallel=section, precision={"compute": "bf16"})).config
    assert ("diverge" in applicable(config, (), 2, 6)) == has_copies


def test_kinds_come_equally_often_in_an_order_of_the_seed() -> None:
    kinds = ["kill", "stop", "oom"]
    orders = {seed: tuple(islice(balanced(random.Random(seed), kinds), 9)) for seed in range(8)}
    assert len(set(orders.values())) > 1
    for order in orders.values():
        assert all(set(order[begin : begin + 3]) == set(kinds) for begin in (0, 3, 6))


def test_a_signal_ends_the_rounds_and_prints_them(tmp_path: Path) -> None:
    config = small.config(launch={"ranks": 1, "device": "cpu"})
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(config))
    words = ("chaos", file, "--folder", tmp_path / "runs", "--rounds", "1000", "--steps", "6", "--faults", "raise")
    started = start_lockstep(*words, "--json", cwd=tmp_path)
    started.wait_for(lambda: "equal" in started.output)
    started.send(signal.SIGINT)
    assert started.end() == 130
    rows = json.loads((tmp_path / "out").read_text())
    assert rows
    assert all(row["passed"] for row in rows)
    assert "stopped by SIGINT in round" in started.output


def test_a_folder_with_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").touch()
    assert "has content" in chaos(tmp_path).stderr


def test_a_fault_fires_once(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(plan, [Fault("raise", 0, 3, "forward")])
    with pytest.raises(PlantedFault, match="forward of update 3"):
        updates(plan)
    updates(plan)
    assert [(event["event"], event["step"]) for event in events_of(plan)] == [
        ("updated", 1),
        ("fired", 3),
        ("updated", 1),
    ]


def updates(plan: Path) -> None:
    """Make four updates of rank 0."""
    from types import SimpleNamespace

    from lockstep.core.phase_clock import Phase
    from lockstep.resilience.faults import FAULTS

    clock = PhaseClock()
    plant(SimpleNamespace(rank=0, clock=clock), 0, {FAULTS: str(plan)})  # type: ignore[arg-type]
    for _ in range(4):
        clock.enter(Phase.FORWARD)
        clock.updated()


class UndeterminedInEvaluations(small.Net):
    """Draws from what no run can repeat, but not in updates."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points) * (1 if self.training else 1 + int.from_bytes(os.urandom(4)) / 2**32)


def test_an_evaluation_that_differs_is_found(tmp_path: Path) -> None:
    model = {"kind": "custom", "target": f"{HERE}:UndeterminedInEvaluations"}
    done = chaos(tmp_path, "--rounds", "1", "--faults", "raise", "--json", model=model)
    assert done.returncode == 3, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["equal"], row["passed"], row["updates_unrecorded"]) == (False, False, 0)


@pytest.mark.parametrize(
    ("events", "exact", "are_equal"),
    [
        ([(3, 2.0), (6, 1.0)], True, True),
        ([(3, 2.0)], True, False),
        ([(3, 2.0), (6, 1.0), (6, 1.0)], True, False),
        ([(3, 2.0), (6, 1.001)], True, False),
        ([(3, 2.0), (6, 1.001)], False, True),
        ([(3, 2.0)], False, False),
    ],
)
def test_evaluations_that_are_missing_or_differ_are_found(
    events: list[tuple[int, float]], exact: bool, are_equal: bool, tmp_path: Path
) -> None:
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    for folder, pairs in ((run, events), (undisturbed, [(3, 2.0), (6, 1.0)])):
        folder.mkdir()
        lines = [{"evaluation": "held-out", "step": step, "seconds": len(pairs), "loss": loss} for step, loss in pairs]
        (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (_evaluations(run, exact=exact) == _evaluations(undisturbed, exact=exact)) == are_equal


@pytest.mark.parametrize(("every", "expected"), [("1 minute", "3 steps"), ("2 steps", "2 steps"), (None, "None")])
def test_no_evaluation_of_a_round_comes_by_the_clock(every: str | None, expected: str, tmp_path: Path) -> None:
    config = validate(small.config(evaluation={"every": every})).config
    assert str(config_of_round(config, tmp_path, 12).evaluation.every) == expected

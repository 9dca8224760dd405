"""Memory that runs out makes micro-batches smaller, and the run stays the same run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit import small
from kit.commands import Done, run_lockstep
from kit.failures import gives
from safetensors.torch import load_file

import lockstep
from lockstep.config.loading import validate
from lockstep.config.schema import Config
from lockstep.core.failure_kinds import FailureKind
from lockstep.launch.ends import End
from lockstep.launch.outcome import LaunchResult
from lockstep.loop.out_of_memory import factors_of
from lockstep.loop.session import components_of
from lockstep.monitor.attempts import read_attempts
from lockstep.resilience.faults import FAULTS, Fault, write_plan
from lockstep.training import start_run
from lockstep.training.job import Job
from lockstep.training.start_run import SmallerBatches, decided, decision_of, train_as_rank

MODELS = Path(__file__).with_name("out_of_memory_models.py")
ZERO = {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3}}
drill = pytest.mark.drill


def train(folder: Path, *words: object, fault: Fault | None = None, **sections: Any) -> Done:
    config = small.config(
        run={"steps": 8, "folder": str(folder)},
        batch={"global_size": 16, "micro_size": 8},
        launch={"ranks": 2, "device": "cpu"},
        checkpoint={"every": "4 steps", "keep_last": 10},
        recovery={},
        monitor={"every": 1, "tensorboard": False, "progress": "none", "meter_seconds": 0},
    )
    file, plan = folder.with_suffix(".yaml"), folder.with_suffix(".json")
    file.write_text(yaml.safe_dump({**config, **sections}))
    if fault is not None:
        write_plan(plan, [fault])
    return run_lockstep("train", file, *words, **{FAULTS: str(plan)} if fault is not None else {})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(folder, parallel={"strategy": "ddp"}).returncode == 0
    return folder


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def weights(folder: Path) -> Mapping[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("parallel", "phase"),
    [
        ({"strategy": "ddp"}, "backward"),
        ({"strategy": "fsdp"}, "forward"),
        pytest.param({"strategy": "ddp"}, "optimizer", marks=drill),
        pytest.param({"strategy": "fsdp"}, "backward", marks=drill),
        pytest.param({"strategy": "deepspeed", "deepspeed": {"zero_stage": 2}}, "backward", marks=drill),
        pytest.param(ZERO, "forward", marks=drill),
        pytest.param(ZERO, "backward", marks=drill),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_the_run_that_ran_out_ends_as_the_undisturbed_one(
    tmp_path: Path, undisturbed: Path, parallel: dict[str, Any], phase: str
) -> None:
    folder = tmp_path / "run"
    done = train(folder, fault=Fault("oom", 1, 6, phase, above=2), parallel=parallel)
    assert done.returncode == 0, done.stderr
    assert gives(done.stderr, "batch.micro_size", 4, 8)
    assert gives(done.stderr, "batch.micro_size", 2, 4)
    assert losses(folder) == pytest.approx(losses(undisturbed), rel=1e-5)
    expected = weights(undisturbed)
    for name, tensor in weights(folder).items():
        assert torch.allclose(tensor, expected[name], rtol=1e-4, atol=1e-5), name


def test_it_is_bitwise_the_run_that_was_resumed_with_that_size(tmp_path: Path, undisturbed: Path) -> None:
    folder, resumed = tmp_path / "run", tmp_path / "resumed"
    done = train(folder, fault=Fault("oom", 0, 5, "forward", above=4), parallel={"strategy": "ddp"})
    assert done.returncode == 0, done.stderr
    assert [attempt.number("micro_size") for attempt in read_attempts(folder)] == [8, 4]
    shutil.copytree(undisturbed, resumed)
    words = ("--from", 4, "--batch.micro_size=4", f"--run.folder={resumed}")
    assert train(resumed, *words, parallel={"strategy": "ddp"}).returncode == 0
    assert losses(folder) == losses(resumed)
    assert all(torch.equal(tensor, weights(resumed)[name]) for name, tensor in weights(folder).items())


def test_a_limit_of_the_system(tmp_path: Path) -> None:
    """Under a real limit on the process's address space, where 8 samples don't fit."""
    items = {"kind": "custom", "target": f"{MODELS}:Items"}
    done = train(
        tmp_path / "run",
        model={"kind": "custom", "target": f"{MODELS}:Greedy", "arguments": {"where": "limit"}},
        objective={"kind": "classification"},
        data={"train": items},
        launch={"ranks": 1, "device": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert gives(done.stderr, "1.25 GiB")
    assert gives(done.stderr, "batch.micro_size", 4, 8)


def test_a_round_without_any_update_is_an_attempt(tmp_path: Path) -> None:
    folder, neighbor = tmp_path / "run", tmp_path / "neighbor"
    neighbor.write_text("2")
    arguments = {"neighbor": str(neighbor), "begins": 1}
    model = {"kind": "custom", "target": f"{MODELS}:Crowded", "arguments": arguments}
    data = {"train": {"kind": "custom", "target": f"{MODELS}:Items"}}
    done = train(folder, "--ranks=1", model=model, objective={"kind": "classification"}, data=data)
    assert done.returncode == 0, done.stderr
    attempts = read_attempts(folder)
    assert [attempt.number("micro_size") for attempt in attempts] == [8, 4, 2]
    assert attempts[0].launched < attempts[1].launched < attempts[2].launched


# --- the sizes of a launch -----------------------------------------------------------------------------------------


def config_of(micro_size: object = 8, **sections: Any) -> Config:
    return validate({**small.config(), "batch": {"global_size": 16, "micro_size": micro_size}, **sections}).config


def sizes(folder: Path, config: Config) -> SmallerBatches:
    (folder / "logs").mkdir(exist_ok=True)
    return SmallerBatches(Job(config, "small"), folder, ranks=2)


def test_the_advice_after_a_kill_has_the_size_of_the_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SmallerBatches] = []
    advised: list[str] = []

    def kept(*arguments: Any) -> SmallerBatches:
        made.append(SmallerBatches(*arguments))
        return made[0]

    def launched(*_: Any, remedy: Callable[[], str], **__: Any) -> LaunchResult:
        advised.append(remedy())
        made[0].after(ran_out(batch=8))
        advised.append(remedy())
        return LaunchResult(FailureKind.DONE)

    monkeypatch.setattr(start_run, "SmallerBatches", kept)
    monkeypatch.setattr(start_run, "launch", launched)
    start_run.launch_job(Job(config_of(run={"steps": 1, "folder": str(tmp_path / "run")}), "small"), 2)
    assert ["(it is 8)" in advised[0], "(it is 4)" in advised[1]] == [True, True], advised


def ran_out(**too_large: int) -> End:
    return End(
        FailureKind.FAILED, 1, "out of memory", 0.0, too_large={f"{key}.micro_size": n for key, n in too_large.items()}
    )


def test_each_launch_begins_with_the_sizes_of_its_config(tmp_path: Path) -> None:
    first = sizes(tmp_path, config_of())
    assert gives(first.after(ran_out(batch=8)) or "", "batch.micro_size", 4, 8)
    assert first.job.config.batch.micro_size == 4
    assert sizes(tmp_path, config_of()).job.config.batch.micro_size == 8


def test_halves_until_one_sample(tmp_path: Path) -> None:
    rounds = sizes(tmp_path, config_of(3))
    for size in (3, 2):
        assert rounds.after(ran_out(batch=size))
    assert rounds.job.config.batch.micro_size == 1
    for end in (ran_out(), ran_out(batch=1)):
        assert rounds.after(end) == ""


def test_other_hosts_get_the_size_from_the_leader(tmp_path: Path) -> None:
    job = Job(config_of(recovery={"restarts": 3}), "small")
    rounds = sizes(tmp_path, job.config)
    rounds.after(ran_out(batch=8))
    decision = json.loads(json.dumps(decision_of(partial(train_as_rank, rounds.job, tmp_path))))
    assert decided(job, decision).config == rounds.job.config


def test_auto_is_the_size_that_fits(tmp_path: Path) -> None:
    """What the first update can't have isn't taken; the run is bitwise that with the size given."""
    parallel, batch = {"strategy": "ddp"}, {"global_size": 16}
    fault = Fault("oom", 1, 1, "backward", above=4)
    assert train(tmp_path / "auto", fault=fault, parallel=parallel, batch=batch).returncode == 0
    assert train(tmp_path / "given", parallel=parallel, batch={**batch, "micro_size": 4}).returncode == 0
    assert losses(tmp_path / "auto") == losses(tmp_path / "given")


def test_an_evaluation_has_a_size_of_its_own(tmp_path: Path) -> None:
    rounds = sizes(tmp_path, config_of())
    assert gives(rounds.after(ran_out(evaluation=8)) or "", "evaluation.micro_size", 4, 8)
    assert rounds.job.config.evaluation.micro_size == 4
    assert rounds.job.config.batch.micro_size == 8


def test_an_evaluation_whose_set_is_smaller_has_run_out_with_the_size_of_the_set() -> None:
    """Else halves of a larger size would run out again."""
    with lockstep.session(small.config(evaluation={"micro_size": 1024})) as session:
        assert factors_of(components_of(session).config, 1, session).evaluation_size == 11

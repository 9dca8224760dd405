"""A sample whose reading ends the process is read twice, and then left out: the run ends as one that left it out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit import small
from kit.commands import Done, run_lockstep, start_lockstep
from kit.worlds import free_port

import lockstep
from lockstep.checkpoint.comparison import OpenCheckpoint, compare
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.config.loading import validate
from lockstep.config.training_sections import Recovery
from lockstep.core.errors import ConfigError
from lockstep.core.heartbeat import Reading
from lockstep.core.ranks import LAUNCHER
from lockstep.data.bad_samples import Deadly
from lockstep.launch.deadly_samples import DeadlySamples
from lockstep.launch.deaths import FILE
from lockstep.launch.ends import End, EndKind, end_of_process, while_reading
from lockstep.launch.outcome import LaunchResult
from lockstep.launch.supervision import Supervisor
from lockstep.training.audit import audit
from lockstep.training.deadly_samples import forget_others
from lockstep.training.resuming import Resume

DATA = f"{Path(__file__).parent / 'deadly_data.py'}"
ENDS = {11: "crash", 35: "exit", 3: "kill"}
"""Of update 2 on, in updates of 8."""
FURTHER_ENDS = {9: "abort", 0: "exit as if done", 39: "exit as if saved", 33: "exit of Python"}
"""Of the first update, of the last, and of those that the start reads."""
HANG, HANG_WITH_LOCK = {8: "hang"}, {8: "hang with the interpreter's lock"}
"""Of update 3: what is fetched ahead in the first one may take long until it counts as a hang."""
SKIP = {"policy": "skip"}
Told = Callable[..., Path]


def written(folder: Path, ranks: int = 1, kind: str = "Points", **sections: Any) -> Path:
    faults = {str(index): fault for index, fault in sections.pop("faults", {}).items()}
    arguments = {"faults": faults, **sections.pop("arguments", {})}
    train = {"kind": "custom", "target": f"{DATA}:{kind}", "arguments": arguments}
    config = small.config(
        data={"train": train, "loader": {"workers": sections.pop("workers", 0)}, **sections.pop("data", {})},
        batch={"global_size": 8, "micro_size": 4},
        run={"steps": 12, "seed": 0, "folder": str(folder)},
        parallel={"strategy": "ddp" if ranks > 1 else "single"},
        launch={"ranks": ranks},
        recovery={"watchdog": {"least": 0.4, "steps": 1, "end_after": 0.8}, **sections.pop("recovery", {})},
        monitor={"every": 1, "tensorboard": False, "progress": "none", "meter_seconds": 0},
    )
    file = folder.parent / f"{folder.name}.yaml"
    model = {"kind": "custom", "target": f"{Path(small.__file__)}:Net"}
    file.write_text(yaml.safe_dump({**config, "model": model, "objective": {"kind": "classification"}}))
    return file


def train(folder: Path, *words: str, **sections: Any) -> Done:
    return run_lockstep("train", written(folder, **sections), *words)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Runs whose data is fine, and whose config leaves samples out."""
    runs: dict[tuple[int, ...], Path] = {}

    def run(*samples: int, ranks: int = 1) -> Path:
        if (*samples, ranks) not in runs:
            folder = runs[(*samples, ranks)] = tmp_path_factory.mktemp("told") / "run"
            done = train(folder, ranks=ranks, data={"leave_out": [[index, index] for index in samples]})
            assert done.returncode == 0, done.stderr
        return runs[(*samples, ranks)]

    return run


def assert_same(folder: Path, other: Path) -> None:
    losses = [
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (folder, other)
    ]
    assert losses[0] == losses[1]
    stores = [LocalStorage(run / "checkpoints") for run in (folder, other)]
    with (
        OpenCheckpoint(stores[0], stores[0].names()[-1]) as one,
        OpenCheckpoint(stores[1], stores[1].names()[-1]) as two,
    ):
        compared = compare(one, two)
    assert compared.same > 0
    assert not compared.values


def left_out(folder: Path) -> dict[int, str]:
    """What the ledger and events.jsonl have."""
    storage = LocalStorage(folder / "checkpoints")
    manifest = read_manifest(storage, storage.names()[-1])
    found = audit(manifest.state, manifest.samples)
    assert found.complete
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    listed = {sample.index: sample.reason for sample in found.left_out}
    assert {event["left_out"]: event["reason"] for event in events if "left_out" in event} == listed
    return listed


def row(faults: dict[int, str], name: str, workers: int = 0, ranks: int = 1, *, drill: bool = False) -> Any:
    marks = [pytest.mark.drill] if drill else []
    return pytest.param(faults, workers, ranks, id=f"{name}, {workers} workers, {ranks} ranks", marks=marks)


@pytest.mark.parametrize(
    ("faults", "workers", "ranks"),
    [
        row(ENDS, "ends"),
        row(ENDS, "ends", workers=1),
        row(ENDS, "ends", ranks=2, drill=True),
        row(ENDS, "ends", workers=2, ranks=2, drill=True),
        row(FURTHER_ENDS, "further ends"),
        row(FURTHER_ENDS, "further ends", workers=1, drill=True),
        row(HANG_WITH_LOCK, "hang with the interpreter's lock"),
        row(HANG_WITH_LOCK, "hang with the interpreter's lock", workers=1, drill=True),
        row(HANG, "hang", drill=True),
        row(HANG, "hang", workers=1),
        row(HANG, "hang", workers=1, ranks=2, drill=True),
    ],
)
def test_it_is_left_out_after_the_second_time(
    tmp_path: Path, told: Told, faults: dict[int, str], workers: int, ranks: int
) -> None:
    done = train(tmp_path / "run", faults=faults, workers=workers, ranks=ranks, data={"bad_samples": SKIP})
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "run", told(*sorted(faults), ranks=ranks))
    reasons = left_out(tmp_path / "run")
    assert reasons.keys() == faults.keys()
    assert all(
        reason.startswith("reading it has ended the process 2 times, the last time: ") for reason in reasons.values()
    )
    assert " left out from here on (data.bad_samples)" in done.stderr


def test_a_request_is_narrowed_down(tmp_path: Path, told: Told) -> None:
    done = train(tmp_path / "run", kind="Lists", faults={11: "crash"}, data={"bad_samples": SKIP})
    assert done.returncode == 0, done.stderr
    assert "it was reading one of samples " in done.stderr
    assert "it was reading sample 11" in done.stderr
    assert_same(tmp_path / "run", told(11))


def test_a_resume_without_a_sample_that_has_become_deadly_is_of_the_same_data(tmp_path: Path) -> None:
    """Sample 0, which each start reads, is left out by itself, and by the config."""
    sections = {"kind": "Turned", "faults": {0: "crash"}, "arguments": {"file": str(tmp_path / "turned")}}
    resumes = {"by itself": {"bad_samples": SKIP}, "by the config": {"leave_out": [[0, 0]]}}
    for name in resumes:
        assert train(tmp_path / name, "--run.steps=4", **sections).returncode == 0
    (tmp_path / "turned").touch()
    for name, data in resumes.items():
        done = train(tmp_path / name, data=data, **sections)
        assert done.returncode == 0, done.stderr
        assert left_out(tmp_path / name).keys() == {0}
    assert_same(tmp_path / "by itself", tmp_path / "by the config")


def test_by_default_the_second_time_ends_the_run_with_its_name(tmp_path: Path) -> None:
    done = train(tmp_path / "run", faults={11: "exit"})
    assert done.returncode == 1
    assert done.stderr.count("lockstep: rank 0 ended with exit code 3; it was reading sample 11") == 2
    advice = "mend it, or leave it out by data.leave_out='[[11, 11]]', or data.bad_samples='{policy: skip}'"
    assert f"reading sample 11 has ended the process 2 times: {advice}" in done.stderr
    assert "look at the host" not in done.stderr
    # what is left out isn't read, and under the other policy the run knows it already, unless it starts over
    skips, note = "--data.bad_samples={policy: skip}", f"delete logs/{FILE} in the run's folder to read it again"
    knows = train(tmp_path / "run", skips, faults={11: "exit"})
    assert note in knows.stdout + knows.stderr
    told = train(tmp_path / "run", "--fresh", "--data.leave_out=[[11, 11]]", faults={11: "exit"})
    over = train(tmp_path / "run", "--fresh", skips, faults={11: "exit"})
    assert [run.returncode for run in (knows, told, over)] == [0, 0, 0], over.stderr
    assert [run.stderr.count("start again") for run in (knows, told, over)] == [0, 0, 2]


@pytest.mark.drill
def test_under_torchrun(tmp_path: Path, told: Told) -> None:
    for workers in (0, 1):
        folder = tmp_path / f"{workers} workers"
        watchdog = {"least": 0.4, "end_after": 0.8, "other": 3.0}  # for the first update after a restart
        written(
            folder,
            ranks=2,
            faults={11: "crash", 8: "hang"},
            workers=workers,
            data={"bad_samples": SKIP},
            recovery={"watchdog": watchdog},
        )
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "4"]
        done = subprocess.run(
            [sys.executable, *words, "-m", "lockstep", "train", f"{folder.name}.yaml"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert done.returncode == 0, done.stderr
        assert_same(folder, told(11, 8, ranks=2))


@pytest.mark.drill
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_on_two_hosts(tmp_path: Path, told: Told, policy: str, workers: int) -> None:
    faults = {11: "crash", 8: "hang", 3: "exit"} if policy == "skip" else {8: "hang"}
    file = written(tmp_path / "run", 2, faults=faults, workers=workers, data={"bad_samples": {"policy": policy}})
    words = ("train", file, "--launch.ranks", 1, "--nodes", 2, "--rendezvous", f"127.0.0.1:{free_port()}")
    launchers = []
    for node in range(2):
        (tmp_path / f"node-{node}").mkdir()
        launchers.append(start_lockstep(*words, "--node-rank", node, cwd=tmp_path / f"node-{node}"))
    codes, output = [launcher.end() for launcher in launchers], launchers[0].output
    if policy == "skip":
        assert codes == [0, 0], output
        assert left_out(tmp_path / "run").keys() == faults.keys()
        assert_same(tmp_path / "run", told(*faults, ranks=2))
    else:
        assert 0 not in codes
        assert "reading sample 8 has ended the process 2 times: mend it, or leave it out by" in output


@pytest.mark.parametrize(
    ("kind", "fault", "workers", "sample"),
    [
        ("Points", "crash", 0, "sample 11"),
        pytest.param("Points", "exit", 1, "sample 11", marks=pytest.mark.drill),
        pytest.param("Points", "hang", 0, "sample 11", marks=pytest.mark.drill),
        ("Lists", "exit as if done", 0, "one of samples 8, 9, 10, 11"),
    ],
)
def test_of_an_evaluation_set_it_is_named_and_ends_the_run_the_second_time(
    tmp_path: Path, kind: str, fault: str, workers: int, sample: str
) -> None:
    held_out = {"kind": "custom", "target": f"{DATA}:{kind}", "arguments": {"faults": {"11": fault}}}
    fine = {"kind": "custom", "target": f"{DATA}:Points"}
    sections = {"evaluation": {"fine": fine, "held-out": held_out}, "bad_samples": SKIP}
    watchdog = {"least": 0.4, "steps": 1, "end_after": 0.8, "other": 1.0}
    done = train(tmp_path / "run", data=sections, workers=workers, recovery={"watchdog": watchdog})
    assert done.returncode != 0
    assert done.stderr.count("its ranks start again") == 1
    named = f"reading {sample} of data.evaluation.held-out has ended the process 2 times: mend it, or leave it out of"
    assert named in done.stderr
    found = run_lockstep("doctor", tmp_path / "run").stdout
    assert f"{sample} of data.evaluation.held-out" in found
    assert "data.bad_samples and data.leave_out are for training samples alone" in found
    assert "data.leave_out='[[" not in found


def test_a_run_that_starts_over_forgets_them_without_a_launcher_too(tmp_path: Path) -> None:
    points, logs = {"kind": "custom", "target": "kit.small:points"}, tmp_path / "run" / "logs"
    config = small.config(
        data={"train": points, "evaluation": {"set": points}, "bad_samples": SKIP},
        run={"steps": 2, "folder": str(tmp_path / "run")},
    )
    lockstep.train(config)
    record = DeadlySamples.of(validate(config).config, logs)
    for _ in range(2):
        record.add([3], "rank 0 was killed by SIGSEGV")
    assert record.known().reasons.keys() == {3}
    with pytest.raises(ConfigError, match="no evaluation will have"):  # a start that is refused is none
        lockstep.train({**config, "checkpoint": {"best": "set.beauty"}}, fresh=True)
    assert (logs / FILE).exists()
    lockstep.train(config, fresh=True)
    assert not (logs / FILE).exists()
    assert left_out(tmp_path / "run") == {}


def test_a_run_starts_over_where_its_records_cant_be_deleted(tmp_path: Path) -> None:
    """They are folders here, which a file system that is read-only would not delete, either."""
    assert train(tmp_path / "run").returncode == 0
    for name in (FILE, "rollbacks.json"):
        (tmp_path / "run" / "logs" / name).mkdir()
    done = train(tmp_path / "run", "--fresh")
    assert done.returncode == 0, done.stderr


def test_ranks_that_are_started_again_forget_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launch may have recorded it, before the run that starts over had begun."""
    config = validate(small.config()).config
    record, fresh = DeadlySamples.of(config, tmp_path / "logs"), Resume(fresh=True)
    (tmp_path / "logs").mkdir()
    record.add([3], "rank 0 was killed by SIGSEGV")
    for name, value in (("TORCHELASTIC_RESTART_COUNT", "1"), (LAUNCHER, str(os.getpid()))):
        monkeypatch.setenv(name, value)
        forget_others(config, fresh, tmp_path)
        monkeypatch.delenv(name)
        assert (tmp_path / "logs" / FILE).exists()
    forget_others(config, fresh, tmp_path)
    assert not (tmp_path / "logs" / FILE).exists()


# --- the record -------------------------------------------------------------------------------------------------------


def ended(*samples: int, kind: EndKind = EndKind.KILLED) -> list[End]:
    return [End(EndKind.ENDED, 1, "", 1.0), End(kind, 1, "was killed by SIGSEGV", 0.0, samples=samples)]


def rounds_of(record: DeadlySamples, rounds: list[list[End]], recovery: Recovery | None = None) -> tuple[int, str]:
    """The number of rounds if these fail in turn, and one after them is done; and the last one's message."""
    supervisor = Supervisor(recovery or Recovery(), lambda: 0, lambda: lambda: 0, deadly=record.after)
    for ends in rounds:
        if supervisor.next_entry(ends, LaunchResult(1, "rank 1 failed")) is None:
            return supervisor.rounds, supervisor.concluded(LaunchResult(1, "rank 1 failed")).text
    return supervisor.rounds + 1, ""


def test_a_request_whose_samples_are_fine_alone_ends_the_run(tmp_path: Path) -> None:
    number, text = rounds_of(DeadlySamples(tmp_path, "", skips=True), [ended(4, 7), ended(4, 7), ended(4, 7)])
    assert number == 2
    assert (
        "reading one of samples 4, 7 has ended the process 2 times: mend it, or leave it out by data.leave_out" in text
    )


@pytest.mark.parametrize("number", [1000, 2**16 + 1000])
def test_the_ends_of_large_requests_are_counted(tmp_path: Path, number: int) -> None:
    record, request = DeadlySamples(tmp_path, "", skips=True), ended(*range(number))
    first, second = record.after(request), record.after(request)
    assert first is not None
    assert second is not None
    assert (first.again, second.again) == (True, False)
    assert "one of samples 0, 1, 2, " in second.advice
    assert " has ended the process 2 times: mend it" in second.advice
    assert {0, 999} <= record.known().suspects


def test_as_many_samples_as_there_are_may_be_left_out_in_an_update(tmp_path: Path) -> None:
    record = DeadlySamples(tmp_path, "", skips=True)
    assert rounds_of(record, [ended(sample) for sample in range(9) for _ in range(2)], Recovery(restarts=1))[0] == 19
    assert [*record.known().reasons] == [*range(9)]


def test_a_sample_that_is_read_while_another_ends_its_reader_is_none(tmp_path: Path) -> None:
    """Rank 1 dies of sample 7, and rank 0 of that, or at the same time of sample 5; or both of something else."""
    died = End(EndKind.KILLED, 1, "was killed by SIGSEGV", 2.0, samples=(7,))
    for time, known in ((2.1, {7}), (2.0, {5, 7})):
        record = DeadlySamples(tmp_path, f"{time}", skips=True)
        for _ in range(2):
            record.after([replace(died, samples=(5,), time=time), died])
        assert record.known().reasons.keys() == known
    record = DeadlySamples(tmp_path, "", skips=True)
    assert record.after([End(EndKind.LOST, 1, "its host is gone", 1.0), died]) is None
    assert record.after([replace(died, time=3.0), died]) is not None
    assert record.known() == Deadly()


def test_without_restarts_the_next_starts_learn_it(tmp_path: Path) -> None:
    record, never = DeadlySamples(tmp_path, "", skips=True), Recovery(restarts=0)
    first, second = (rounds_of(record, [ended(7)], never) for _ in range(2))
    assert (first[0], second[0]) == (1, 1)
    assert "a sample that does so again is left out" in first[1]
    assert "start the run again to resume: sample 7 is left out then" in second[1]
    assert record.known().reasons.keys() == {7}


def test_samples_of_an_evaluation_set_are_no_training_samples(tmp_path: Path) -> None:
    record = DeadlySamples(tmp_path, "same", skips=True, evaluation={"a": "same", "b": "same"})
    record.after(ended(7))
    rounds = [[replace(end, evaluation_set=name) for end in ended(7)] for name in "abab"]
    assert [record.after(ends).again for ends in rounds] == [True, True, False, False]
    assert record.known() == Deadly({}, frozenset())


def test_lines_of_other_data_and_broken_ones_dont_count(tmp_path: Path) -> None:
    record = DeadlySamples(tmp_path, "this", skips=True)
    for _ in range(2):
        DeadlySamples(tmp_path, "other", skips=True).add([5], "rank 0 was killed by SIGSEGV")
        record.add([7, 8], "rank 0 was killed by SIGSEGV")
    with (tmp_path / FILE).open("a") as file:
        file.write('{"data": "this", "samples": ["x"], "what": ""}\n[]\n{"data": "this", "sam')
    record.add([9], "rank 0 was killed by SIGSEGV")  # on a line of its own, although the last one is torn
    record.add([9], "rank 0 was killed by SIGSEGV")
    assert record.known().reasons.keys() == {9}
    assert record.known().suspects == {7, 8}


@pytest.mark.parametrize(
    ("exitcode", "kind", "code"),
    [(-11, EndKind.KILLED, 1), (-6, EndKind.KILLED, 1), (3, EndKind.EXITED, 1), (0, EndKind.EXITED, 1),
     (75, EndKind.EXITED, 1), (130, EndKind.EXITED, 1)],
)  # fmt: skip
def test_ends_while_a_sample_is_read(exitcode: int, kind: EndKind, code: int) -> None:
    end = while_reading(end_of_process(exitcode, 0.0), Reading((7,)))
    assert (end.kind, end.code, end.samples, end.reading) == (kind, code, (7,), "sample 7")
    assert end.text


def test_a_stop_is_no_death() -> None:
    stopped = end_of_process(-15, 0.0)
    assert while_reading(stopped, Reading((7,))) == stopped

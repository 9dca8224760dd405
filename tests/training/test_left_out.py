"""Samples that can't be used are left out: the run is the same under every strategy, and if it resumes."""

from __future__ import annotations

import json
import time
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import gives
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint.comparison import OpenCheckpoint, compare
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.loop.ledger import Audit, audit
from lockstep.monitor.events import sampled_losses
from lockstep.report.run_data import read_run

BAD = {5: OSError("broken image"), 9: ValueError("too short"), 17: KeyError("no label")}
ENDLESS = 10


class Points:
    """40 points, of which three can't be read; `mended`: all are fine."""

    def __init__(self, mended: bool = False) -> None:
        self._points, self._mended = small.points(), mended

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        point, label = self._points[index]
        if self._mended:
            return point, label
        if index in BAD:
            raise BAD[index]
        return point, label


class Endless(Points):
    """Reading a point has no end, whatever is raised there; the start reads it, too."""

    def __init__(self) -> None:
        super().__init__(mended=True)

    def __getitem__(self, index: int) -> Any:
        while index == ENDLESS:
            with suppress(Exception):
                time.sleep(0.01)
        return super().__getitem__(index)


def config(folder: Path, steps: int = 8, determinism: str = "invariant", **sections: Any) -> dict[str, Any]:
    """Updates of 6, in micro-batches of 2: one of them has no sample that can be used."""
    train = {"kind": "custom", "target": f"{__name__}:Points"}
    data = {"train": train, "bad_samples": {"policy": "skip", "limit": 3}, **sections.pop("data", {})}
    return small.config(
        data=data,
        batch={"global_size": 6, "micro_size": 2},
        run={"steps": steps, "folder": str(folder), "determinism": determinism},
        schedule={"kind": "constant"},
        monitor={"every": 1, "tensorboard": False, "progress": "none"},
        **sections,
    )


def trained(config: dict[str, Any]) -> float:
    return float(lockstep.train(config).summary["loss"])


def accepting(config: dict[str, Any]) -> None:
    lockstep.train(config, accept_changes=True)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def audited(folder: Path) -> Audit:
    storage = LocalStorage(folder / "checkpoints")
    manifest = read_manifest(storage, storage.names()[-1])
    return audit(manifest.state, manifest.samples)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one rank."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    in_world(1, trained, config(folder))
    return folder


def test_the_ledger_lists_what_was_left_out(alone: Path) -> None:
    found = audited(alone)
    assert found.complete
    assert {sample.index for sample in found.left_out} == {5, 9, 17}
    assert next(sample.reason for sample in found.left_out if sample.index == 5).startswith("OSError: broken image (")
    assert {event["left_out"] for event in events(alone) if "left_out" in event} == {5, 9, 17}


def test_an_audit_notices_a_sample_that_is_not_listed(alone: Path) -> None:
    storage = LocalStorage(alone / "checkpoints")
    manifest = read_manifest(storage, storage.names()[-1])
    state = {**manifest.state, "left_out": manifest.state["left_out"][1:]}
    assert audit(state, manifest.samples).mismatches


@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs_that_lack_the_same_samples_are_proven_by_a_list_of_each_once(tmp_path: Path, drop_last: bool) -> None:
    data = {"drop_last": drop_last, "loader": {"workers": 1}}
    in_world(2, trained, config(tmp_path / "run", steps=26, data=data, parallel={"strategy": "ddp"}))
    found = audited(tmp_path / "run")
    assert found.complete
    assert sorted(sample.index for sample in found.left_out) == [5, 9, 17]
    assert [event["left_out"] for event in events(tmp_path / "run") if "left_out" in event] == [
        sample.index for sample in sorted(found.left_out, key=lambda sample: sample.position)
    ]
    assert all(sample.position < 80 and sample.until is None for sample in found.left_out)


def test_samples_that_the_config_leaves_out_for_a_while(tmp_path: Path) -> None:
    def changed(leave_out: list[list[int]], steps: int) -> dict[str, Any]:
        sections = config(tmp_path / "run", steps=steps, data={"bad_samples": {}, "leave_out": leave_out})
        sections["data"]["train"]["arguments"] = {"mended": True}
        return sections

    for leave_out, steps in (([[5, 5], [9, 9]], 9), ([[9, 9]], 17), ([[3, 9]], 26)):
        in_world(1, accepting, changed(leave_out, steps))
        assert audited(tmp_path / "run").complete
    of_five = [
        (sample.position < 52, sample.until) for sample in audited(tmp_path / "run").left_out if sample.index == 5
    ]
    assert of_five == [(True, 52), (False, None)]


def test_a_list_of_an_earlier_version_has_samples_once_an_epoch(alone: Path) -> None:
    storage = LocalStorage(alone / "checkpoints")
    manifest = read_manifest(storage, storage.names()[-1])
    listed = [{name: sample[name] for name in ("index", "reason", "position")} for sample in manifest.state["left_out"]]
    again = [{**sample, "position": sample["position"] + 40} for sample in listed]
    assert audit({**manifest.state, "left_out": [*listed, *again]}, manifest.samples).complete


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        pytest.param(2, {"parallel": {"strategy": "ddp"}}, id="ddp"),
        pytest.param(1, {"data": {"loader": {"workers": 1}}}, id="worker"),
    ],
)
def test_the_same_run_elsewhere(alone: Path, tmp_path: Path, ranks: int, sections: dict[str, Any]) -> None:
    in_world(ranks, trained, config(tmp_path / "run", **sections))
    assert losses(tmp_path / "run") == losses(alone)
    assert audited(tmp_path / "run").left_out == audited(alone).left_out


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"strategy": "fsdp"}, id="fsdp"),
        pytest.param({"strategy": "deepspeed", "deepspeed": {"zero_stage": 2}}, id="zero2", marks=pytest.mark.drill),
    ],
)
def test_sharded_strategies_leave_out_the_same(alone: Path, tmp_path: Path, parallel: dict[str, Any]) -> None:
    sharded = config(tmp_path / "run", determinism="default", parallel=parallel)
    in_world(3, trained, sharded)
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-5)
    assert audited(tmp_path / "run").left_out == audited(alone).left_out


def test_a_run_that_resumes_keeps_the_record_and_reads_none_again(alone: Path, tmp_path: Path) -> None:
    in_world(2, trained, config(tmp_path / "run", steps=3))
    before = audited(tmp_path / "run").left_out
    in_world(1, trained, config(tmp_path / "run", data={"loader": {"workers": 1}}))
    assert losses(tmp_path / "run") == losses(alone)
    assert audited(tmp_path / "run").left_out[: len(before)] == before
    assert audited(tmp_path / "run").complete


def failure(config: dict[str, Any]) -> str:
    try:
        lockstep.train(config)
    except RunFailed as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_limit_ends_the_run_with_the_list_and_a_higher_one_resumes_it(
    alone: Path, tmp_path: Path, ranks: int
) -> None:
    limited = config(tmp_path / "run", data={"bad_samples": {"policy": "skip", "limit": 2}})
    for message in in_world(ranks, failure, limited):
        assert gives(message, 3, "data.train", "data.bad_samples.limit", 2)
        assert gives(message, "sample 17", "KeyError: 'no label'")
        assert "is saved in" in message
    in_world(ranks, trained, config(tmp_path / "run"))
    assert losses(tmp_path / "run") == losses(alone)
    assert audited(tmp_path / "run").complete


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_limit_counts_the_first_batch_and_holds_for_every_start(tmp_path: Path, ranks: int) -> None:
    batch = {"batch": {"global_size": 24, "micro_size": 4}}  # the first one has samples 5 and 9
    limited = config(tmp_path / "run", data={"bad_samples": {"policy": "skip", "limit": 1}}) | batch
    for _ in range(2):
        for message in in_world(ranks, failure, limited):
            assert gives(message, 2, "data.train", "data.bad_samples.limit", 1)
    in_world(ranks, trained, config(tmp_path / "run", steps=2) | batch)
    assert gives(in_world(ranks, failure, limited)[0], 3, "data.train", "data.bad_samples.limit", 1)


def announced(config: dict[str, Any]) -> str:
    with redirect_stdout(StringIO()) as output:
        failure(config)
    return output.getvalue()


def test_a_sample_beyond_the_limit_is_not_counted_as_allowed(tmp_path: Path) -> None:
    [printed] = in_world(1, announced, config(tmp_path / "run", data={"bad_samples": {"policy": "skip", "limit": 2}}))
    assert gives(printed, "bad sample 2", "data.bad_samples.limit", 2)
    assert gives(printed, "bad sample 3", "data.bad_samples.limit", 2)


def test_by_default_the_first_one_ends_the_run(tmp_path: Path) -> None:
    strict = config(tmp_path / "run", data={"bad_samples": {}})
    [message] = in_world(1, failure, strict)
    assert message.startswith(("sample 5 can't be read: OSError: broken image", "sample 17"))


def test_weights_are_finite_where_a_whole_update_is_left_out(tmp_path: Path) -> None:
    bad = {"bad_samples": {"policy": "skip", "limit": 3}}
    tiny = config(tmp_path / "run", data=bad) | {"batch": {"global_size": 1, "micro_size": 1}}
    assert torch.isfinite(torch.tensor(in_world(1, trained, tiny)[0]))


def test_an_update_without_a_sample_has_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = config(tmp_path, steps=6, data={"shuffle": False, "leave_out": [[12, 17]], "bad_samples": {}})
    given["data"]["train"]["arguments"] = {"mended": True}
    given["monitor"]["progress"] = "plain"
    lockstep.train({**given, "run": {**given["run"], "steps": 3}})
    assert "loss        none (of the last update)" in capsys.readouterr().out
    lockstep.train(given)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    empty = lines[2]
    assert [line["step"] for line in lines if not line["count"]] == [3]
    assert (empty["loss"], empty["count"], empty["grad_norm"], empty["kept"]) == (None, 0.0, 0.0, True)
    assert "not_finite" not in empty
    columns = read_run(tmp_path).columns
    assert [columns[name].steps.tolist() for name in ("loss", "grad_norm", "lr")] == [[1, 2, 4, 5, 6]] * 2 + [
        [1, 2, 3, 4, 5, 6]
    ]
    assert [step for step, _ in sampled_losses(tmp_path / "metrics.jsonl")] == [1, 2, 4, 5, 6]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_leaves_out_the_same_by_its_config_is_equal(alone: Path, tmp_path: Path, ranks: int) -> None:
    told = config(tmp_path / "run", data={"bad_samples": {}, "leave_out": [[5, 5], [9, 9], [17, 17]]})
    told["data"]["train"]["arguments"] = {"mended": True}
    in_world(ranks, trained, told)
    assert losses(tmp_path / "run") == losses(alone)
    assert_same_state(alone, tmp_path / "run")
    found = audited(tmp_path / "run")
    assert found.complete
    assert {(sample.index, sample.reason) for sample in found.left_out} == {(i, "data.leave_out") for i in (5, 9, 17)}


def assert_same_state(*runs: Path) -> None:
    first, second = (LocalStorage(folder / "checkpoints") for folder in runs)
    compared = compare(*(OpenCheckpoint(storage, storage.names()[-1]) for storage in (first, second)))
    assert not compared.values
    assert compared.same > 0


def test_a_sample_without_an_end_is_left_out_on_any_number_of_ranks_and_workers(tmp_path: Path) -> None:
    told = config(tmp_path / "told", data={"bad_samples": {}, "leave_out": [[ENDLESS, ENDLESS]]})
    told["data"]["train"]["arguments"] = {"mended": True}
    in_world(1, trained, told)
    for ranks, workers in ((1, 0), (2, 1)):
        run = tmp_path / f"{ranks} ranks, {workers} workers"
        endless = config(run, data={"loader": {"workers": workers}})
        endless["data"] |= {"train": {"kind": "custom", "target": f"{__name__}:Endless"}}
        endless["data"]["bad_samples"] = {"policy": "skip", "limit": 1, "timeout": 0.3}
        in_world(ranks, trained, endless)
        assert losses(run) == losses(tmp_path / "told")
        assert_same_state(run, tmp_path / "told")
        found = audited(run)
        assert found.complete
        assert {sample.index for sample in found.left_out} == {ENDLESS}
        assert gives(found.left_out[0].reason, "TimeoutError", "0.3 s", "data.bad_samples.timeout")
        assert [event["left_out"] for event in events(run) if "left_out" in event][:1] == [ENDLESS]


@pytest.mark.parametrize(
    ("leave_out", "message"),
    [
        ([[0, 40]], "the last of the 40 samples of data.train is 39"),
        ([[-1, 3]], "leave_out"),
        ([5], "leave_out"),
    ],
)
def test_ranges_that_are_refused(leave_out: list[Any], message: str) -> None:
    with (
        pytest.raises(ConfigError, match=message),
        lockstep.session(small.config(data=DATA | {"leave_out": leave_out})),
    ):
        pass


DATA = {"train": {"kind": "custom", "target": f"{__name__}:Points", "arguments": {"mended": True}}}

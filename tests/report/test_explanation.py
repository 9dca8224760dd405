"""The words about a run: planted bottlenecks are named, each with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.commands import run_lockstep
from kit.failures import gives

from lockstep.report import explanation
from lockstep.report.explanation import explain
from lockstep.report.limits import Limit, limits
from lockstep.report.rank_history import read_rank_history
from lockstep.report.run_data import read_run

USUAL = {"host": 0.0002, "data": 0.001, "forward": 0.015, "backward": 0.03, "communication": 0.003, "optimizer": 0.002}


def interval(step: int, stragglers: list[dict[str, Any]], **split: float) -> dict[str, Any]:
    parts = {**USUAL, "save": 0.0, **split}
    whole = sum(parts.values())
    return {
        "step": step,
        "time": 1.79e9 + step,
        "seconds": 10 * whole,
        "ranks": [0, 1],
        "hosts": ["a"],
        "updates": [10, 10],
        "step_seconds": [whole, whole],
        "median": [whole, whole],
        "slowest": [whole, whole],
        "deviation": [0.0, 0.0],
        "split": {name: [value, value] for name, value in parts.items()},
        "gauges": {"memory_resident_peak": [2.0**30, 2.0**31]},
        "stragglers": stragglers,
    }


def write_run(folder: Path, stragglers: list[dict[str, Any]] | None = None, **split: float) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {steps: 100}\nprecision: {compute: fp32}\n")
    lines = [{"step": step, "loss": 5.0 - step / 30, "samples_per_second": 200.0} for step in range(10, 101, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [interval(step, stragglers or [], **split) for step in range(10, 101, 10)]
    (folder / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("split", "name", "remedy", "gain"),
    [
        ({"data": 0.05}, "data", "more data.loader.workers", 2.0),
        ({"communication": 0.15}, "communication", "doctor --ranks N", 4.0),
        ({"host": 0.05}, "host", "do less in monitors", 2.0),
        ({"save": 0.01}, "saves", "checkpoint.every larger", 1.2),
        ({"optimizer": 0.05}, "optimizer", "a larger batch.global_size", 2.0),
        ({"data": 1e-5, "forward": 5e-4, "backward": 1e-3, "communication": 1e-5, "optimizer": 1e-4}, "small operators",
         "a larger batch.global_size", None),
    ],
)  # fmt: skip
def test_a_planted_bottleneck_is_named_with_its_remedy_and_gain(
    tmp_path: Path, split: dict[str, float], name: str, remedy: str, gain: float | None
) -> None:
    folder = write_run(tmp_path / "run", **split)
    first = limits(read_run(folder), read_rank_history(folder))[0]
    assert first.name == name
    assert remedy in first.remedy
    assert first.gain == (gain if gain is None else pytest.approx(gain, rel=0.1))
    sentences = explain(folder).sentences
    assert len(sentences) <= 10
    assert any(remedy in sentence for sentence in sentences)


def test_a_rank_that_the_others_wait_for_is_named_instead_of_the_links(tmp_path: Path) -> None:
    slow = [{"rank": 1, "host": "b", "ratio": 2.0, "phase": "data"}]
    folder = write_run(tmp_path / "run", slow, communication=0.03)
    names = [limit.name for limit in limits(read_run(folder), read_rank_history(folder))]
    assert names == ["straggler"]
    assert any(gives(sentence, "Rank 1 on b", 2.0) for sentence in explain(folder).sentences)


def test_a_run_that_is_limited_by_its_computation_alone_is_told_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert limits(read_run(folder), read_rank_history(folder)) == []
    text = " ".join(explain(folder).sentences)
    assert gives(text, "precision.compute: bf16")
    assert "backward 59 %" in text
    assert gives(text, "2.00 GiB resident", "rank 1")


@pytest.mark.parametrize(("accumulation", "ran_out"), [(1, False), (4, True)])
def test_a_larger_micro_batch_is_not_proposed_where_it_can_not_be(
    tmp_path: Path, accumulation: int, ran_out: bool
) -> None:
    folder = write_run(tmp_path / "run")
    attempt = {"launched": 1.0, "began": 2.0, "step": 0, "seconds": 0.0, "ranks": 2, "accumulation": accumulation}
    sizes = (4, 2) if ran_out else (2,)
    (folder / "attempts.jsonl").write_text("".join(json.dumps({**attempt, "micro_size": n}) + "\n" for n in sizes))
    text = " ".join(explain(folder).sentences)
    assert gives(text, "precision.compute: bf16, more ranks.")
    short = write_run(tmp_path / "short", data=1e-5, forward=5e-4, backward=1e-3, communication=1e-5, optimizer=1e-4)
    (folder / "attempts.jsonl").rename(short / "attempts.jsonl")
    assert "batch.micro_size" not in " ".join(explain(short).sentences)


def test_what_is_damaged_or_missing_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", data=0.05)
    ranks = folder / "ranks.jsonl"
    ranks.write_text('{"step": 1, "ranks": [0]}\n[]\n\x00\n' + ranks.read_text() + '{"step": 110, "ra')
    history = read_rank_history(folder)
    assert (len(history.intervals), history.damaged) == (10, 3)
    assert limits(read_run(folder), history)[0].name == "data"
    ranks.unlink()
    assert "wasn't measured" in " ".join(explain(folder).sentences)
    (folder / "metrics.jsonl").unlink()
    assert explain(folder).sentences[0] == "No update is recorded yet."


def test_a_gain_of_nothing_is_no_gain_and_a_crowded_host_hides_no_host_code(tmp_path: Path) -> None:
    assert "times as fast" not in Limit("host sync", 0.004, "It reads", "less").sentences
    assert gives(Limit("data", 0.1, "It waits", "more").sentences, "1.1 times")
    folder = write_run(tmp_path / "run")
    code = Limit("host code", 0.4, "A profile shows that the forward computes outside", "move it")
    assert [limit.name for limit in explain(folder, [code]).limits] == ["host code"]
    lines = [json.loads(line) for line in (folder / "ranks.jsonl").read_text().splitlines()]
    crowded = ({**line, "gauges": {"core_wait_percent": [40.0, 30.0]}} for line in lines)
    (folder / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in crowded))
    assert {limit.name for limit in explain(folder, [code]).limits} == {"host code", "crowded host"}


def test_what_to_do_next_is_stated_however_much_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", data=0.05, save=0.01)
    (folder / "checkpoints" / "step-00000090").mkdir(parents=True)
    for name in ("bad_numbers", "left_out"):
        happened = [f"{name} {number}." for number in range(3)]
        monkeypatch.setattr(explanation, name, lambda *_, happened=happened, **__: happened)
    sentences = explain(folder, ended="It failed: the disk is full.").sentences
    assert len(sentences) == 10
    assert sentences[1] == "It failed: the disk is full."
    assert "An update waits for samples" in sentences[4]
    assert sentences[5:8] == ("bad_numbers 0.", "bad_numbers 1.", "bad_numbers 2.")
    assert sentences[8].startswith("`lockstep train ")
    assert "Only a profile shows" in sentences[9]


def test_the_command_prints_sentences_or_json(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", data=0.05)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write("damaged\n{\n")
    with (folder / "ranks.jsonl").open("a") as ranks:
        ranks.write("damaged\n")
    (folder / "logs").mkdir()
    end = {
        "attempt": "",
        "time": 1.79e9,
        "kind": "killed",
        "text": "rank 1 was killed by SIGKILL",
        "step": 100,
        "cause": 1,
    }
    (folder / "logs" / "ends.jsonl").write_text(json.dumps({**end, "ranks": [], "logs": {}, "environment": {}}) + "\n")
    text = run_lockstep("explain", folder).stdout
    assert "An update waits for samples" in text
    assert text.splitlines()[1] == "It failed: rank 1 was killed by SIGKILL."
    assert text.splitlines()[-2:] == [
        "note: 2 lines of metrics.jsonl can't be read, from line 11 on.",
        "note: 1 line of ranks.jsonl can't be read.",
    ]
    record = json.loads(run_lockstep("explain", folder, "--json").stdout)
    assert record["limits"][0]["name"] == "data"
    assert gives(record["sentences"][0], "not finished", "100 updates")


def test_a_checkpoint_that_no_event_has_is_resumed_from(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert not any("resumes it" in sentence for sentence in explain(folder).sentences)
    (folder / "checkpoints" / "step-00000100").mkdir(parents=True)
    assert any("newest checkpoint" in sentence for sentence in explain(folder).sentences)

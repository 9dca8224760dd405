"""`lockstep explain` names the planted bottleneck of each real run, with a profile in its folder and without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from kit.commands import run_lockstep
from kit.worlds import in_process
from profiling import planted

from lockstep.profiling.traces import read_trace, trace_files
from lockstep.report.explanation import explain
from lockstep.report.limits import limits
from lockstep.report.rank_history import read_rank_history
from lockstep.report.run_data import read_run


@pytest.mark.parametrize(
    ("run", "name", "share", "words"),
    [
        ("data", "data", 0.5, "An update waits for samples"),
        ("save", "saves", 0.5, "An update waits for checkpoints"),
        ("rank", "straggler", 0.4, "Rank 1 on"),
        ("link", "communication", 0.5, "An update waits for other ranks"),
    ],
)
def test_the_meters_name_it_first(runs: Path, run: str, name: str, share: float, words: str) -> None:
    limits_of_run = explain(runs / run).limits
    causes = [cause for cause in limits_of_run if cause.name not in ("crowded host", "small operators")]
    planted = next((cause for cause in causes if cause.name == name), None)
    as_planted = planted is not None and planted is causes[0] and planted.share > share
    if len(causes) < len(limits_of_run) and not as_planted:
        pytest.skip("other processes have this machine's cores: any phase may be long")
    assert as_planted, limits_of_run
    assert any(words in sentence for sentence in explain(runs / run).sentences)


def test_tiny_micro_batches_are_named_without_an_invented_gain(runs: Path) -> None:
    causes = {cause.name: cause for cause in explain(runs / "tiny").limits}
    if "small operators" not in causes and "crowded host" in causes:
        pytest.skip("other processes have this machine's cores: no micro-batch is short")
    cause = causes["small operators"]
    assert "its micro-batches are so short" in cause.fact
    assert "batch.micro_size" in cause.remedy
    assert cause.gain is None


def test_what_only_a_profile_sees_is_taken_from_it(runs: Path, tmp_path: Path) -> None:
    reads = run_lockstep("explain", runs / "data", "--json").stdout
    names = {limit["name"] for limit in json.loads(reads)["limits"]}
    if "crowded host" in names and "host sync" not in names:
        pytest.skip("other processes have this machine's cores: they take longer than what the profile sees")
    assert {"data", "host sync"} <= names
    text = run_lockstep("explain", runs / "small").stdout
    if "for a core that other" in text:
        pytest.skip("other processes have this machine's cores: they are what limits the run")
    assert "A profile shows that the host is the limit" in text
    assert "Only a profile shows" not in text
    shutil.copytree(runs / "small", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "profile")
    without = " ".join(explain(tmp_path / "run").sentences)
    assert "A profile shows" not in without
    assert f"small operators): `lockstep profile {tmp_path / 'run'}`" in without


@pytest.mark.parametrize("run", ["data", "small", "save"])
def test_the_profiler_itself_is_no_limit(runs: Path, tmp_path: Path, run: str) -> None:
    """Recording takes longer than these updates do; a run in which the machine stood still meanwhile is made again."""
    for folder in (runs, tmp_path / "second", tmp_path / "third"):
        if folder is not runs:
            in_process(planted.train_alone, folder, run)
        names = [cause.name for cause in limits(read_run(folder / run), read_rank_history(folder / run))]
        if "host" not in names:
            return
    if "crowded host" in names:
        pytest.skip("other processes have this machine's cores: any phase may be long")
    raise AssertionError(names)


@pytest.mark.parametrize("run", ["data", "small", "save", "rank", "link"])
def test_the_split_of_the_meters_is_that_of_the_trace(runs: Path, run: str) -> None:
    """Phases add up to an update, by the meters and by torch's profiler, whose operators are in the right phases."""
    for path in trace_files(runs / run):
        trace = read_trace(path)
        assert sum(trace.split.values()) == pytest.approx(trace.seconds, rel=0.03)
        (interval,) = read_rank_history(runs / run).intervals
        parts = {name: column[trace.rank] for name, column in interval.split.items()}
        assert sum(parts.values()) == pytest.approx(interval.step_seconds[trace.rank], rel=0.03)


def test_at_most_ten_sentences(runs: Path) -> None:
    for run in runs.iterdir():
        sentences = explain(run).sentences
        assert 5 <= len(sentences) <= 10
        assert all(sentence.endswith(".") for sentence in sentences)
        assert any("goodput is" in sentence for sentence in sentences)

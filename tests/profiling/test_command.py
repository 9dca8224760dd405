"""`lockstep profile` on runs that train, have ended, or don't answer."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path

from kit import small
from kit.commands import run_lockstep, start_lockstep
from kit.failures import gives

from lockstep.monitor.trace_requests import PROFILE


def test_a_running_job_of_two_ranks(tmp_path: Path) -> None:
    config = small.config(
        run={"steps": 100_000, "folder": "run"},
        monitor={"every": 10, "tensorboard": False, "progress": "none"},
        parallel={"strategy": "ddp"},
    )
    config["model"]["target"] = "profiling.planted:SlowOnRankOne"
    (tmp_path / "run.json").write_text(json.dumps(config))
    job = start_lockstep("train", "run.json", "--ranks", 2, cwd=tmp_path)
    run = tmp_path / "run"
    job.wait_for((run / "live.json").exists)

    for _ in range(3):  # of which other processes may disturb two
        done = run_lockstep("profile", "run", "--steps", 2, "--ranks", "0,1", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert [(trace["facts"]["rank"], trace["updates"]) for trace in record["traces"]] == [(0, 2), (1, 2)]
        findings = [finding["name"] for finding in record["findings"]]
        if "straggler" in findings:
            break
    assert "straggler" in findings
    refused = run_lockstep("profile", "run", "--ranks", "5", cwd=tmp_path)
    assert refused.returncode == 1
    assert gives(refused.stderr, "2 ranks", "rank 5")
    assert job.lives

    job.send(signal.SIGTERM)
    assert job.end() == 75
    again = run_lockstep("profile", "run", cwd=tmp_path)
    assert again.returncode == 0
    assert "rank 1 on" in again.stdout
    for path in (run / PROFILE).glob("*.gz"):
        _is_chrome_trace(path)


def _is_chrome_trace(path: Path) -> None:
    """Check what Perfetto and chrome://tracing demand of an event, and of the slices of a track: that they nest.

    Perfetto drops a slice that ends after the one within which it has begun (perfetto.dev/docs/faq).
    """
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert events
    tracks: dict[tuple[object, object], list[tuple[float, float, str]]] = {}
    for event in events:
        assert isinstance(event["name"], str)
        assert event["ph"] in "XMifsbne"
        assert "pid" in event
        assert event["ph"] == "M" or event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            track = tracks.setdefault((event["pid"], event["tid"]), [])
            track.append((event["ts"], -event["dur"], event["name"]))
    for track in tracks.values():
        ends: list[float] = []
        for begin, negative, name in sorted(track):
            while ends and ends[-1] <= begin + 0.002:  # timestamps have three decimals
                ends.pop()
            assert not ends or begin - negative <= ends[-1] + 0.002, name
            ends.append(begin - negative)


def test_a_run_that_has_ended_without_traces(tmp_path: Path) -> None:
    config = {**small.config(), "run": {"steps": 1, "folder": "run"}}
    (tmp_path / "run.json").write_text(json.dumps(config))
    assert run_lockstep("train", "run.json", cwd=tmp_path).returncode == 0
    done = run_lockstep("profile", "run", cwd=tmp_path)
    assert done.returncode == 1
    assert gives(done.stderr, "not running", "no traces")
    wrong = run_lockstep("profile", "run", "--gpus", "H10:1", cwd=tmp_path)
    assert wrong.returncode == 2, "before it would record"
    assert gives(wrong.stderr, "H100")
    assert run_lockstep("profile", "elsewhere", cwd=tmp_path).returncode == 2

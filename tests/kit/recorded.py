"""Folders of runs that have ended, as their ranks and launchers leave them, written without a run."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.launch.ends_file import file_name

GLOO_CLOSED = "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.7]:4410"
BY_A_PERSON = "by a person or a scheduler; the kernel has counted no out-of-memory kill here"
KILLED = {"rank": 1, "host": "b", "kind": "killed", "text": "was killed by SIGKILL", "time": 100.0}
PEER = {"rank": 0, "host": "a", "kind": "peer_failed", "text": GLOO_CLOSED, "time": 100.4}


def recorded_run(folder: Path, *logs: str, metrics: str = "", events: str = "") -> Path:
    """Write the folder of a run that has ended, with the logs of its ranks."""
    run = folder / "run"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {steps: 10}\n")
    (run / "environment.json").write_text("{}")
    for rank, text in enumerate(logs):
        (run / "logs" / f"rank-{rank}.log").write_text(text)
    (run / "metrics.jsonl").write_text(metrics)
    (run / "events.jsonl").write_text(events)
    return run


def record_end(run: Path, node: int = 0, **fields: object) -> None:
    """Record how a launch ended, by the launcher of a node; rank 1 was killed unless the fields differ."""
    line: dict[str, object] = {
        "attempt": "", "time": 101.0, "kind": "killed",
        "text": f"rank 1 on host b was killed by SIGKILL: {BY_A_PERSON}",
        "step": 3, "cause": 1, "ranks": [PEER, KILLED], "logs": {}, "environment": {},
    }  # fmt: skip
    with (run / "logs" / file_name(node)).open("a") as file:
        file.write(json.dumps({**line, **fields}) + "\n")

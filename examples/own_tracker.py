"""A tracker that records a run in a file with one line a step.

In Python:  lockstep.train(config, trackers=[Table("losses.txt")], ...)
In YAML:    monitor: {trackers: [{target: own_tracker.py:Table, arguments: {path: losses.txt}}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.extend import TrackedRun, Tracker


class Table(Tracker):
    """Appends to a file, which a resumed run continues."""

    def __init__(self, path: str) -> None:
        self._path = Path(path).absolute()

    def start(self, run: TrackedRun) -> str:
        """Return the file, which is the tracker's identifier when the run resumes."""
        if run.tracker_id is None:
            self._path.write_text(f"# {run.name}, run {run.id}\n")
        else:
            self._path = Path(run.tracker_id)
        return str(self._path)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if "train/loss" in values:
            self._append(f"{step} {values['train/loss']:.6f}")

    def rolled_back(self, step: int, attempt: int) -> None:
        self._append(f"# attempt {attempt} repeats what follows step {step}")

    def _append(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line + "\n")

"""A tracker that records a run with Aim: `pip install 'aim<3.28'`, as 3.29.1 doesn't read what it has written.

In YAML:    monitor: {trackers: [{target: aim_tracker.py:Aim}]}

Aim needs no network. `aim up --repo RUN/trackers/aim` shows the run; a server gets it with the argument
`repo: aim://host:53800`. Aim keeps one point of a step, so that a repeated one replaces what was recorded before. It
has no tables: they are texts.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.extend import Bins, LoggedImage, LoggedTable, TrackedRun, Tracker

_BINS = 64
_MOST_ROWS = 100


class Aim(Tracker):
    """Records a run with Aim; a resumed run continues the same one.

    Args:
        repo: Folder or address; by default in the folder of the run.
        experiment: of the run.
    """

    def __init__(self, repo: str | None = None, experiment: str = "lockstep") -> None:
        self._repo = repo
        self._experiment = experiment
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        """Return the run's hash, which Aim chooses."""
        import aim

        logging.getLogger("aim").setLevel(logging.ERROR)
        if self._repo is None:
            self._repo = str(Path(run.folder) / "aim")
            Path(self._repo).mkdir(exist_ok=True)
        repo = self._repo if "://" in self._repo else aim.Repo.from_path(self._repo, init=True)
        self._run = aim.Run(
            run.tracker_id,
            repo=repo,
            experiment=self._experiment,
            force_resume=True,  # a process that was killed has left its lock
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        self._run.name = run.name
        self._run["config"] = dict(run.config)
        self._run["environment"] = dict(run.environment)
        identifier: str = self._run.hash
        return identifier

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._run.track(value, name=name, step=step)

    def histograms(self, step: int, histograms: Mapping[str, Bins]) -> None:
        import aim

        for name, bins in histograms.items():
            if bins:
                centers = [(low + high) / 2 for low, high, _ in bins]
                even, edges = np.histogram(centers, _BINS, weights=[count for _, _, count in bins])  # as Aim has them
                distribution = aim.Distribution(hist=even, bin_range=(float(edges[0]), float(edges[-1])))
                self._run.track(distribution, name=name, step=step)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        import aim

        for name, text in texts.items():
            self._run.track(aim.Text(text), name=name, step=step)

    def images(self, step: int, images: Mapping[str, LoggedImage]) -> None:
        import aim
        from PIL import Image

        for name, image in images.items():
            self._run.track(aim.Image(Image.open(io.BytesIO(image.png()))), name=name, step=step)

    def tables(self, step: int, tables: Mapping[str, LoggedTable]) -> None:
        self.texts(step, {name: table.markdown(_MOST_ROWS) for name, table in tables.items()})

    def checkpoint(self, step: int, reference: str) -> None:
        self._run["checkpoint"] = reference

    def rolled_back(self, step: int, attempt: int) -> None:
        self._run[f"attempt {attempt}"] = f"repeats what follows step {step}"

    def finish(self, failure: str | None) -> None:
        if self._run is not None:
            self._run["failure"] = failure or "none"
            self._run.close()

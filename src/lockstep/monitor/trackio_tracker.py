"""trackio: metrics, histograms, texts, images, tables and the config in a SQLite file; `trackio show` draws it.

A resumed run continues the same trackio run: of two points of a step, the later one (`run/attempt`) counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.core.media import LoggedImage
from lockstep.core.slow_imports import import_beside
from lockstep.core.tracking import TrackedRun, refuse_unknown
from lockstep.monitor.media import file_name
from lockstep.monitor.wandb_tracker import LoggedRun

_log = logging.getLogger("lockstep.monitor")


class TrackioTracker(LoggedRun):
    """Records a run with trackio, in `TRACKIO_DIR`; `arguments` are further ones of `trackio.init`."""

    package = "trackio"
    _last_step = 0

    def start(self, run: TrackedRun) -> str:
        self._module = trackio = import_beside("trackio")
        refuse_unknown("trackio.init", self._arguments, trackio.init)
        for name in ("trackio", "trackio.run", "trackio.utils"):  # standard output is the run's, and may be JSON
            vars(import_beside(name))["print"] = _quiet
        identifier = run.tracker_id or f"{run.name}-{run.id[:8]}"
        options = {
            "name": identifier,
            "config": {**run.config, "environment": dict(run.environment)},
            "resume": "allow",
            "embed": False,
            "auto_log_gpu": False,
            "auto_log_cpu": False,
        }
        self._run = trackio.init(**options | self._arguments)
        return identifier

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        self._last_step = step
        self._run.log({**values, "run/attempt": self._attempt}, step=step)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        self.scalars(step, {name: self._module.Markdown(text) for name, text in texts.items()})

    def images(self, step: int, images: Mapping[str, LoggedImage]) -> None:
        with TemporaryDirectory() as folder:
            values = {}
            for name, image in images.items():
                file = Path(folder) / f"{file_name(name)}.png"
                file.write_bytes(image.png())
                values[name] = self._module.Image(file)
            self.scalars(step, values)  # which copies the files

    def checkpoint(self, step: int, reference: str) -> None:
        self.scalars(step, {"checkpoint": reference})

    def finish(self, failure: str | None) -> None:
        if self._run is None:
            return
        if failure is not None:
            self.scalars(self._last_step, {"run/failure": failure})
        self._run.finish()


def _quiet(*values: object, **options: object) -> None:
    _log.debug("trackio: %s", " ".join(map(str, values)))

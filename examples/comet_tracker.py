"""A tracker that records a run with Comet: `pip install comet_ml`.

In YAML:    monitor: {trackers: [{target: comet_tracker.py:Comet, arguments: {project: digits}}]}

Without a network it writes archives, which `comet upload RUN/trackers/comet/*.zip` uploads. Comet writes an archive
when an attempt ends; of an attempt whose process is killed there is none.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.extend import Bins, LoggedImage, LoggedTable, TrackedRun, Tracker

_ALL_OFF = (
    "auto_metric_logging", "auto_output_logging", "auto_param_logging", "log_code", "log_env_details",
    "log_git_metadata", "log_git_patch", "log_graph", "parse_args",
)  # fmt: skip


class Comet(Tracker):
    """Records a run with Comet; a resumed run continues the same experiment.

    Args:
        project: of the experiment.
        online: whether to send it to Comet's server, whose key COMET_API_KEY has.
    """

    def __init__(self, project: str = "lockstep", online: bool = False) -> None:
        self._project = project
        self._online = online
        self._experiment: Any = None
        self._attempt = 1

    def start(self, run: TrackedRun) -> str:
        """Return the experiment's key: the run's id, so that all attempts are one experiment."""
        import comet_ml

        logging.getLogger("comet_ml").setLevel(logging.ERROR)
        folder = Path(run.folder) / "comet"
        folder.mkdir(exist_ok=True)
        key = run.tracker_id or run.id[:32]
        options = comet_ml.ExperimentConfig(
            name=run.name, offline_directory=str(folder), display_summary_level=0, **dict.fromkeys(_ALL_OFF, False)
        )
        self._experiment = comet_ml.start(
            project_name=self._project,
            experiment_key=key,
            mode="get_or_create" if run.tracker_id is None else "get",
            online=self._online,
            experiment_config=options,
        )
        self._experiment.log_parameters(dict(run.config))
        self._experiment.log_others({f"environment.{name}": value for name, value in run.environment.items()})
        return key

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._experiment.log_metrics({**values, "run/attempt": self._attempt}, step=step)

    def histograms(self, step: int, histograms: Mapping[str, Bins]) -> None:
        from comet_ml.data_structure import Histogram

        for name, bins in histograms.items():
            histogram = Histogram()
            if bins:
                histogram.add([(low + high) / 2 for low, high, _ in bins], counts=[count for _, _, count in bins])
            self._experiment.log_histogram_3d(histogram, name=name, step=step)

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._experiment.log_text(text, step=step, metadata={"name": name})

    def images(self, step: int, images: Mapping[str, LoggedImage]) -> None:
        for name, image in images.items():
            self._experiment.log_image(io.BytesIO(image.png()), name=name, step=step)

    def tables(self, step: int, tables: Mapping[str, LoggedTable]) -> None:
        for name, table in tables.items():
            self._experiment.log_table(
                f"{name}-{step:08d}.csv", list(map(list, table.rows)), headers=list(table.columns)
            )

    def checkpoint(self, step: int, reference: str) -> None:
        self._experiment.log_other("checkpoint", reference)

    def rolled_back(self, step: int, attempt: int) -> None:
        self._attempt = attempt
        self._experiment.log_other(f"attempt {attempt}", f"repeats what follows step {step}")

    def finish(self, failure: str | None) -> None:
        if self._experiment is not None:
            self._experiment.log_other("failure", failure or "none")
            self._experiment.end()

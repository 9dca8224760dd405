"""MLflow: metrics, parameters, tags; texts and histograms as artifacts. `mlflow-skinny` suffices.

A resumed run continues the same MLflow run: of two values of a step, the later one counts.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError
from lockstep.core.formatting import flat
from lockstep.core.media import LoggedImage, LoggedTable
from lockstep.core.slow_imports import import_beside
from lockstep.core.tracking import Bins, TrackedRun, Tracker
from lockstep.monitor.media import file_name

_REFUSED = re.compile(r"[^\w\-. :/]")
_LONGEST_PARAMETER = 500
_BATCH = 100  # parameters of a request
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Less than the end of a run waits; by default MLflow tries for minutes."""


class MlflowTracker(Tracker):
    """Records a run with MLflow.

    Args:
        uri: Of the tracking server or store; None: MLFLOW_TRACKING_URI, or files in the run's folder.
        experiment: Created if there is none.
    """

    def __init__(self, uri: str | None = None, experiment: str = "lockstep") -> None:
        if find_spec("mlflow") is None:
            raise ConfigError(f"the tracker mlflow needs a package that isn't installed: {pip_install('mlflow')}")
        self._mlflow: Any = None
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._experiment = experiment
        self._client: Any = None
        self._run = ""

    def start(self, run: TrackedRun) -> str:
        self._mlflow = import_beside("mlflow")
        uri = self._uri or (Path(run.folder) / "mlflow").absolute().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow wants a database or a server
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        if run.tracker_id is not None:
            self._run = run.tracker_id
            self._client.update_run(self._run, status="RUNNING")
            return self._run
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(experiment, run_name=run.name, tags={"lockstep.run": run.id}).info.run_id
        named = ((name, value) for name, value in flat(run.config) if name)
        parameters = {name: value if isinstance(value, str) else json.dumps(value) for name, value in named}
        values = [
            self._mlflow.entities.Param(_REFUSED.sub("_", name), text[:_LONGEST_PARAMETER])
            for name, text in parameters.items()
        ]
        for at in range(0, len(values), _BATCH):
            self._client.log_batch(self._run, params=values[at : at + _BATCH])
        self._client.log_text(self._run, json.dumps(dict(run.environment), indent=2), "environment.json")
        return self._run

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        named = {_REFUSED.sub("_", name): value for name, value in values.items()}
        self._client.log_batch(self._run, metrics=[metric(name, value, now, step) for name, value in named.items()])

    def histograms(self, step: int, histograms: Mapping[str, Bins]) -> None:
        records = {name: {"step": step, "bins": bins} for name, bins in histograms.items()}
        self._log(f"{step:08d}.json", "histograms", {name: json.dumps(record) for name, record in records.items()})

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._log(f"{step:08d}.txt", "texts", texts)

    def images(self, step: int, images: Mapping[str, LoggedImage]) -> None:
        with TemporaryDirectory() as folder:
            for name, image in images.items():
                file = Path(folder) / f"{step:08d}.png"
                file.write_bytes(image.png())
                self._client.log_artifact(self._run, str(file), f"images/{file_name(name)}")

    def tables(self, step: int, tables: Mapping[str, LoggedTable]) -> None:
        records = {name: {"columns": table.columns, "data": table.rows} for name, table in tables.items()}
        self._log(f"{step:08d}.json", "tables", {name: json.dumps(record) for name, record in records.items()})

    def _log(self, file: str, kind: str, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._client.log_text(self._run, text, f"{kind}/{file_name(name)}/{file}")

    def checkpoint(self, step: int, reference: str) -> None:
        self._client.set_tag(self._run, "lockstep.checkpoint", reference)

    def rolled_back(self, step: int, attempt: int) -> None:
        self._client.set_tag(self._run, f"lockstep.attempt.{attempt}", f"repeats what follows step {step}")
        self.scalars(step, {"run/attempt": float(attempt)})

    def finish(self, failure: str | None) -> None:
        if self._run:
            status = "FINISHED" if failure is None else "KILLED" if failure == "stopped" else "FAILED"
            self._client.set_terminated(self._run, status)

"""The Prometheus endpoint: the run's newest metrics and each rank's meters, over HTTP."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from lockstep.core.records import EvaluationReport, Request, RunInfo, SaveReport, StepReport
from lockstep.monitor.goodput import goodput
from lockstep.monitor.meters import Throughput, model_flops_utilization
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.monitors import ReportWriter
from lockstep.monitor.rank_meters import MeterReport

if TYPE_CHECKING:
    from lockstep.config.schema import PrometheusConfig

_log = logging.getLogger("lockstep.monitor")
_END_S = 2.0  # for the server's thread
_OF_STEP = ("step", "loss", "grad_norm", "samples", "tokens", "discarded", "seconds")
_UNNAMED = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusEndpoint(ReportWriter):
    """Serves `/metrics` while the run trains. A port that is taken is a warning."""

    def __init__(self, section: PrometheusConfig) -> None:
        self._section = section
        self._run = ""
        self._info: RunInfo | None = None
        self._step: StepReport | None = None
        self._throughput = Throughput()
        self._evaluations: dict[str, EvaluationReport] = {}
        self._saved: int | None = None
        self._logged: dict[str, float] = {}
        self._meters: MeterReport | None = None
        self._server: Any = None
        self._thread: Any = None

    @property
    def port(self) -> int | None:
        return None if self._server is None else int(self._server.server_port)

    def start(self, info: RunInfo) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run, self._info = PurePath(info.folder).name, info
        registry = CollectorRegistry()
        registry.register(self)
        address, port = self._section.address, self._section.port
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            text = "port %d of %s can't be served (%s); set another monitor.prometheus.port or address"
            _log.warning(f"monitor.prometheus: {text}; the run continues without", port, address, reason)

    def see(self, report: StepReport) -> Iterable[Request]:
        self._throughput.add(report)
        self._step = report
        return ()

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        self._throughput.pause(report.step, report.seconds)
        self._evaluations = {**self._evaluations, report.name: report}
        return ()

    def saved(self, report: SaveReport) -> None:
        if report.failure is None:
            self._saved = report.step

    def logged(self, step: int, logged: Logged) -> None:
        self._logged = {**self._logged, **logged.values}

    def measured(self, report: MeterReport) -> None:
        self._meters = report

    def finish(self, error: BaseException | None) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=_END_S)
            self._server = None

    # --- in the server's thread -----------------------------------------------------------------------------------

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        for name, text, labels, value in self._values():
            if name not in families:
                families[name] = GaugeMetricFamily(name, text, labels=["run", *labels])
            families[name].add_metric([self._run, *labels.values()], value)
        yield from families.values()

    def _values(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        if self._info is not None:
            yield "lockstep_ranks", "ranks of the run", {}, float(self._info.ranks)
            if self._step is None:
                yield "lockstep_step", "step of the run", {}, float(self._info.resumed_from or 0)
        if (report := self._step) is not None:
            rates = self._throughput.moving
            values = {name: getattr(report, name) for name in _OF_STEP} | {"learning_rate": report.lr}
            values |= {f"{unit}_per_second": getattr(rates, unit) for unit in ("steps", "samples", "tokens")}
            for name, value in values.items():
                yield f"lockstep_{name}", f"{name} of the run", {}, float(value)
            yield from _efficiency(self._info, rates.tokens)
        if self._saved is not None:
            yield "lockstep_checkpoint_step", "step of the newest checkpoint", {}, float(self._saved)
        for evaluation in self._evaluations.values():
            for name, value in evaluation.metrics.items():
                yield "lockstep_evaluation", "last evaluation", {"set": evaluation.name, "metric": name}, value
        for name, value in self._logged.items():
            yield "lockstep_logged", "logged by user code", {"name": name}, value
        if self._meters is not None:
            yield from _rank_values(self._meters)


def _efficiency(info: RunInfo | None, tokens_per_second: float) -> Iterator[tuple[str, str, dict[str, str], float]]:
    if info is None:
        return
    if (mfu := model_flops_utilization(info, tokens_per_second)) is not None:
        yield "lockstep_mfu", "share of the peak of all devices that the model's operations use", {}, mfu
    if (useful := goodput(Path(info.folder))) is not None:
        yield "lockstep_goodput", "share of the wall time that trained updates that were kept", {}, useful.share


def _rank_values(report: MeterReport) -> Iterator[tuple[str, str, dict[str, str], float]]:
    slow = {straggler.rank for straggler in report.stragglers()}
    for rank in report.ranks:
        labels = {"rank": str(rank.notice.rank), "host": rank.notice.host}
        if rank.updates:
            yield "lockstep_rank_step_seconds", "mean time of an update", labels, rank.seconds
        yield "lockstep_rank_straggler", "1: the others wait for it", labels, float(rank.notice.rank in slow)
        for phase, seconds in rank.split.items():
            yield "lockstep_rank_phase_seconds", "time of an update's phase", {**labels, "phase": phase}, seconds
        for name, value in rank.notice.gauges.items():
            yield f"lockstep_rank_{_UNNAMED.sub('_', name)}", f"{name} of the rank", labels, value

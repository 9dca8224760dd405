"""The Prometheus endpoint over HTTP, read by Prometheus' own parser; Grafana's dashboard names metrics that exist."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from kit import small
from kit.nvml import Board, Driver
from kit.reports import FACTS, report
from kit.worlds import free_port
from prometheus_client.parser import text_string_to_metric_families

import lockstep
from lockstep.config.schema import PrometheusConfig
from lockstep.core.phase_clock import Phase, UpdateTimes
from lockstep.core.records import EvaluationReport, SaveReport
from lockstep.monitor.attempts import Attempt, attempts_text
from lockstep.monitor.host_gauges import host_gauges
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.nvidia import gpu_of
from lockstep.monitor.prometheus import PrometheusEndpoint
from lockstep.monitor.rank_meters import MeterReport, RankInterval, RankNotice

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana-dashboard.json"


def measured(folder: Path) -> MeterReport:
    """Meters of two ranks with every gauge of hosts and GPUs."""
    gauges: dict[str, float] = {}
    for _ in range(2):
        gauges.update({name: value for gauge in host_gauges(folder) for name, value in gauge().items()})
    readers = host_gauges(folder)
    for _ in range(2):
        gauges.update({name: value for gauge in readers for name, value in gauge().items()})
    gauges.update(gpu_of(Driver(Board("GPU-1")), "1").read())
    times = UpdateTimes()
    for _ in range(3):
        times.durations.add(0.5)
        times.split[Phase.FORWARD] += 0.5
        times.measured += 1
    notices = [RankNotice(rank, "ab"[rank], 1, 0.0, 3, Phase.FORWARD, 0.0, times, gauges) for rank in (0, 1)]
    return MeterReport(3, 10.0, tuple(RankInterval.between(None, notice) for notice in notices))


def served(endpoint: PrometheusEndpoint) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


@pytest.fixture
def full(tmp_path: Path) -> Any:
    endpoint = PrometheusEndpoint(PrometheusConfig(port=0))
    folder = tmp_path / "stdlib-lm-20261121-093000"
    folder.mkdir()
    began = time.time() - 20
    (folder / "attempts.jsonl").write_text(attempts_text([Attempt(began, began)]))
    (folder / "live.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 20, "seconds": 10.0}\n')
    (folder / "ranks.jsonl").write_text(f'{{"step": 20, "time": {began + 20}}}\n')
    endpoint.start(replace(FACTS, folder=str(folder), flops_per_token=1e6, peak_flops=1e12))
    endpoint.see(report(1))
    endpoint.see(report(20))
    endpoint.evaluated(EvaluationReport("held-out", 20, {"loss": 1.5, "accuracy": 0.9}, 10, 0.5))
    endpoint.saved(SaveReport(20, 1, 0.1, 0.1))
    endpoint.logged(20, Logged({"heat": 7.0}))
    endpoint.measured(measured(tmp_path))
    yield endpoint
    endpoint.finish(None)


def test_the_endpoint_has_the_run_and_its_ranks(full: PrometheusEndpoint) -> None:
    metrics = served(full)
    run = {"run": "stdlib-lm-20261121-093000"}
    assert metrics["lockstep_loss"] == [(run, 1.05)]
    assert metrics["lockstep_step"] == [(run, 20.0)]
    assert metrics["lockstep_evaluation"][1] == ({**run, "set": "held-out", "metric": "accuracy"}, 0.9)
    assert metrics["lockstep_checkpoint_step"] == [(run, 20.0)]
    assert metrics["lockstep_logged"] == [({**run, "name": "heat"}, 7.0)]
    ((_, goodput),) = metrics["lockstep_goodput"]
    assert goodput == pytest.approx(0.5, rel=0.001)
    ((_, mfu),) = metrics["lockstep_mfu"]
    assert mfu == pytest.approx(64 * 256 * 10 * 1e6 / 2e12)
    second = {**run, "rank": "1", "host": "b"}
    assert metrics["lockstep_rank_gpu_temperature"][1] == (second, 71.0)
    assert metrics["lockstep_rank_step_seconds"][1] == (second, 0.5)
    port = full.port
    full.finish(None)
    assert full.port is None
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_port_that_is_taken_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        endpoint = PrometheusEndpoint(PrometheusConfig(port=port))
        endpoint.start(FACTS)
        endpoint.see(report(1))
        endpoint.finish(None)
    assert f"port {port} of 127.0.0.1 can't be served (Address already in use)" in caplog.text
    assert "set another monitor.prometheus.port" in caplog.text


def test_a_run_that_starts_has_its_step_and_ranks() -> None:
    endpoint = PrometheusEndpoint(PrometheusConfig(port=0))
    endpoint.start(FACTS)
    names = {family.name for family in endpoint.collect()}
    endpoint.finish(None)
    assert {"lockstep_step", "lockstep_ranks"} <= names


class Scraper(lockstep.extend.Monitor):
    """Reads the endpoint of the run that it watches, until it has the run's step."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.text = ""

    def see(self, report: lockstep.extend.StepReport) -> None:
        until = time.monotonic() + 10
        while report.step == 12 and "lockstep_loss{" not in self.text:
            assert time.monotonic() < until
            time.sleep(0.01)
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url, timeout=10) as response:
                self.text = response.read().decode()


def test_a_run_serves_its_metrics(tmp_path: Path) -> None:
    scraper = Scraper(free_port())
    port = int(scraper.url.split(":")[2].split("/")[0])
    config = small.config(
        run={"steps": 14, "folder": str(tmp_path / "run")}, monitor={"every": 2, "prometheus": {"port": port}}
    )
    lockstep.train(config, monitors=[scraper])
    assert 'lockstep_loss{run="run"}' in scraper.text
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_run_on_a_host_whose_port_is_taken_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = small.config(run={"steps": 4, "folder": str(tmp_path / "run")}, monitor={"prometheus": {"port": port}})
        assert lockstep.train(config).summary["steps"] == 4
    assert "the run continues without" in caplog.text


def test_without_the_package_its_installation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = small.config(run={"steps": 4, "folder": str(tmp_path / "run")}, monitor={"prometheus": {}})
    with pytest.raises(lockstep.ConfigError, match=r"pip install 'lockstep-torch\[prometheus\]'"):
        lockstep.train(config)


def selected(expression: str) -> set[str]:
    """Names of the metrics of an expression, by Prometheus' grammar."""
    promql_parser.parse(expression)
    return set(re.findall(r"lockstep_\w+", expression))


def test_the_dashboard_names_metrics_that_exist(full: PrometheusEndpoint) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    names = {name for expression in expressions for name in selected(expression.replace("$run", ".*"))}
    assert names <= set(served(full))
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        selected("sum by (run (lockstep_step)")


def test_the_dashboard_is_grafanas() -> None:
    """Each key is one that Grafana's own models keep."""
    dashboard = json.loads(DASHBOARD.read_text())
    kept = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))

    def lost(mine: Any, kept_value: Any, place: str) -> list[str]:
        if isinstance(mine, list):
            mine, kept_value = dict(enumerate(mine)), dict(enumerate(kept_value))
        if not isinstance(mine, dict):
            return [] if mine == kept_value else [f"{place}: {mine} became {kept_value}"]
        missing = [f"{place}.{key}" for key in mine if key not in kept_value]
        return missing + [
            below for key in mine if key in kept_value for below in lost(mine[key], kept_value[key], f"{place}.{key}")
        ]

    assert lost(dashboard, kept, "dashboard") == []
    dashboard["panles"] = dashboard.pop("panels")
    kept = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))
    assert lost(dashboard, kept, "dashboard") == ["dashboard.panles"]
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(set(ids)) == len(ids)

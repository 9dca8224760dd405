"""Notices that a machine will be taken back: read from the places where clouds put them, and a run stops at one."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kit import small
from kit.worlds import in_world

from lockstep.checkpoint.local import LocalStorage
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError, Paused
from lockstep.core.stopping import handled_signals
from lockstep.resilience import notices
from lockstep.resilience.notices import look_at, watched_notice
from lockstep.training.job import Job, run_job


@contextlib.contextmanager
def serving(answers: Mapping[str, str]) -> Iterator[str]:
    """Serve texts by path, 404 for others; yield the address. `/needed` names a header that requests need."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            needed = answers.get("needed")
            code = 401 if needed and needed not in self.headers else 200 if path in answers else 404
            self.send_response(code)
            self.end_headers()
            self.wfile.write(answers.get(path, "").encode() if code == 200 else b"")

        def do_PUT(self) -> None:
            self.send_response(200 if self.path == "/latest/api/token" else 405)
            self.end_headers()
            self.wfile.write(b"token")

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


ACTION = "/latest/meta-data/spot/instance-action"
PREEMPTED = "/computeMetadata/v1/instance/preempted"


def azure(**event: object) -> dict[str, str]:
    events = [{"EventType": "Preempt", "Resources": ["node-7"], "NotBefore": "17:20", **event}]
    return {"/metadata/instance/compute/name": "node-7", "/metadata/scheduledevents": json.dumps({"Events": events})}


@pytest.mark.parametrize(
    ("place", "answers", "expected"),
    [
        ("aws", {ACTION: '{"action": "terminate"}', "needed": "X-aws-ec2-metadata-token"}, '{"action": "terminate"}'),
        ("aws", {"needed": "X-aws-ec2-metadata-token"}, None),
        ("gcp", {PREEMPTED: "TRUE", "needed": "Metadata-Flavor"}, "Google Cloud preempts it"),
        ("gcp", {PREEMPTED: "FALSE"}, None),
        ("azure", azure(), "Azure's event Preempt, not before 17:20"),
        ("azure", azure(Resources=["node-8"]), None),
        ("azure", azure(EventType="Freeze"), None),
        ("{address}/mine", {"/mine": "soon\n"}, "soon"),
        ("{address}/mine", {}, None),
    ],
)
def test_places(place: str, answers: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(answers) as address:
        monkeypatch.setattr(notices, "_LINK_LOCAL", address)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        environ = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": address, "GCE_METADATA_HOST": address.removeprefix("http://")}
        assert look_at(place.format(address=address), environ)() == expected


@pytest.mark.parametrize(
    "answers", [{"/metadata/instance/compute/name": "a", "/metadata/scheduledevents": "[1]"}, {"needed": "x"}]
)
def test_a_place_that_cant_be_asked_is_reported_once(
    answers: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notices, "_EVERY_S", 0.01)
    with serving(answers) as address:
        monkeypatch.setattr(notices, "_LINK_LOCAL", address)
        with watched_notice("azure"):
            time.sleep(0.2)
    assert capfd.readouterr().err.count("recovery.notice: azure ") == 1


def test_a_file_in_no_folder_is_reported_and_found_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notices, "_EVERY_S", 0.01)
    seen: list[int] = []
    file = tmp_path / "mounted" / "notice"
    with handled_signals(lambda number, _: seen.append(number), lambda *_: None), watched_notice(str(file)):
        time.sleep(0.05)
        file.parent.mkdir()
        time.sleep(0.05)
        file.touch()
        time.sleep(0.2)
    assert seen == [signal.SIGUSR1]
    assert capfd.readouterr().err.count(f" {file.parent}\n") == 1


def test_a_notice_is_one_warning_of_a_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_EVERY_S", 0.01)
    seen: list[int] = []
    handled = handled_signals(lambda number, _: seen.append(number), lambda *_: None)
    with handled, watched_notice(f"{tmp_path}/notice"):
        time.sleep(0.05)
        assert not seen
        (tmp_path / "notice").touch()
        time.sleep(0.2)
    assert seen == [signal.SIGUSR1]


def _stopped(config: dict[str, Any], notice: Path) -> str:
    metrics = Path(config["run"]["folder"]) / "metrics.jsonl"

    def give() -> None:
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        notice.touch()

    if os.environ["RANK"] == "1":
        threading.Thread(target=give, daemon=True).start()
    notices._EVERY_S = 0.05
    try:
        run_job(Job(validate(config).config, "notices"))
    except Paused as reason:
        return str(reason)
    return "not stopped"


def test_a_run_stops_at_a_notice_saved(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    config = small.config(
        run={"folder": str(tmp_path / "run"), "steps": 10**8},
        recovery={"notice": str(notice)},
        monitor={"progress": "none", "tensorboard": False},
    )
    outcomes = in_world(2, _stopped, config, notice)
    assert all("as requested, and saved" in text for text in outcomes)
    assert len(LocalStorage(tmp_path / "run" / "checkpoints").names()) == 1


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        ("Azur", "aws, gcp, azure"),
        ("notice", r"such as \./notice"),
        ("ftp://host/x", "no http address"),
    ],
)
def test_other_places_are_refused(place: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        validate(small.config(recovery={"notice": place}))

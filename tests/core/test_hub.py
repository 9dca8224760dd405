"""The hub is tested once for all ranks, with a timeout of 1.5 s."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from kit.commands import run_lockstep
from kit.failures import gives

from lockstep.core import hub

GPT2 = {
    "model": {"kind": "huggingface", "task": "causal-lm", "pretrained": "no/such-model"},
    "data": {"train": {"kind": "stdlib-text", "length": 32}},
    "run": {"steps": 1, "folder": "run"},
    "launch": {"device": "cpu"},
}


class SilentHub:
    """A hub that accepts connections and never answers."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._held: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connections(self) -> int:
        return len(self._held)

    def _accept(self) -> None:
        try:
            while True:
                self._held.append(self._server.accept()[0])
        except OSError:
            return

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentHub]:
    server = SilentHub()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    hub.is_connected.cache_clear()
    yield server
    hub.is_connected.cache_clear()
    server.close()


def test_a_silent_hub_times_out_and_leaves_no_thread(silent: SilentHub) -> None:
    before = set(threading.enumerate())
    began = time.monotonic()
    assert not hub.is_connected()
    assert not hub.is_connected()
    assert time.monotonic() - began < 4
    assert silent.connections == 1
    assert set(threading.enumerate()) <= before  # ranks can still be forked


def test_ranks_inherit_the_launchers_answer(silent: SilentHub, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(GPT2))
    done = run_lockstep("train", "run.yaml", "--ranks", 2, cwd=tmp_path, HF_HUB_OFFLINE=None)
    assert done.returncode == 2
    assert gives(done.stderr, "no/such-model", "hub")
    assert silent.connections == 1


@pytest.mark.parametrize(("status", "connected"), [(200, True), (404, True), (401, True), (403, False), (502, False)])
def test_a_gateway_that_refuses_does_not_count_as_the_hub(status: int, connected: bool) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert hub._answers(f"http://127.0.0.1:{server.server_port}") is connected
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_snapshot_has_the_weights_of_one_kind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the copies of the same weights that some models have in other formats and folders."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    wanted = {"config.json", f"model-00001-of-00002.{kind}", f"model-00002-of-00002.{kind}", "tokenizer.model"}
    files = [*wanted, "pytorch_model.bin", "consolidated.safetensors", "onnx/model.bin", "original/params.json"]
    files = files if kind == "safetensors" else [file for file in files if not file.endswith("safetensors")]
    asked: list[set[str]] = []

    def download(name: str, revision: str | None, **patterns: list[str]) -> str:
        asked.append(set(filter_repo_objects(files, **patterns)))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, name, revision: files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "is_connected", lambda: True)
    assert hub.snapshot("a/b") == tmp_path
    assert asked == [wanted if kind == "safetensors" else wanted | {"pytorch_model.bin"}]

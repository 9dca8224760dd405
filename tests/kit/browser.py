"""Chromium without a window, driven over pipes: pages are measured, pressed, printed, photographed.

with browser() as chromium:
    page = chromium.open(file, width=400, dark=True)  # or an address
    page.value("document.title"), page.press("ArrowLeft"), page.screenshot(file)
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None if there is none on this machine."""

OVERFLOWING = """
(() => {
  const page = document.documentElement, names = [];
  if (page.scrollWidth > page.clientWidth) names.push(`page: ${page.scrollWidth} > ${page.clientWidth}`);
  const scrolls = element => {
    for (let e = element; e; e = e.parentElement) {
      const style = getComputedStyle(e);
      if (["auto", "scroll", "hidden"].includes(style.overflowX) || style.clipPath !== "none") return true;
    }
    return false;
  };
  for (const element of document.querySelectorAll("body *")) {
    if (element.closest("svg") || element.closest("details:not([open])") || scrolls(element)) continue;
    const box = element.getBoundingClientRect();
    if (box.width && (box.right > page.clientWidth + 1 || box.left < -1 || element.scrollWidth > element.clientWidth + 1
        && getComputedStyle(element).display !== "inline"))
      names.push(`${element.tagName}.${element.className}: ${box.left}-${box.right} holds ${element.scrollWidth}: ` +
        element.textContent.trim().slice(0, 60));
  }
  for (const text of document.querySelectorAll("svg text")) {
    const box = text.getBoundingClientRect();
    if (box.width && (box.right > page.clientWidth + 1 || box.left < -1)) names.push(`text ${text.textContent}`);
  }
  return names;
})()
"""
"""JavaScript: what is wider than its box or the window."""

_KEYS = {"Tab": 9, "PageUp": 33, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13}


@dataclass
class OpenPage:
    """A page in a tab."""

    chromium: Chromium
    session: str

    def value(self, script: str) -> Any:
        """Return what JavaScript evaluates to."""
        done = self.chromium.call(
            "Runtime.evaluate", self.session, expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.chromium.call(
                "Input.dispatchKeyEvent",
                self.session,
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=_KEYS[key],
                text="\r" if key == "Enter" else "",
            )

    def accessible(self) -> list[tuple[str, str, str]]:
        """Return role, name and value of all that a screen reader sees."""
        nodes = self.chromium.call("Accessibility.getFullAXTree", self.session)["nodes"]
        return [
            tuple(str(node.get(key, {}).get("value", "")) for key in ("role", "name", "value"))  # type: ignore[misc]
            for node in nodes
            if not node["ignored"]
        ]

    def screenshot(self, file: Path) -> None:
        """Write the whole page as a PNG."""
        done = self.chromium.call("Page.captureScreenshot", self.session, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(done["data"]))

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        done = self.chromium.call("Page.printToPDF", self.session, printBackground=True)
        return base64.b64decode(done["data"])


class Chromium:
    """A running browser. Made by `browser`."""

    def __init__(self, write: int, read: int) -> None:
        self._write = write
        self._reader = os.fdopen(read, "rb", buffering=0)
        self._buffer = b""
        self._number = 0

    def open(self, page: Path | str, width: int = 1280, *, dark: bool = False) -> OpenPage:
        """Open a file or an address in a new tab."""
        address = page if isinstance(page, str) else page.absolute().as_uri()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = OpenPage(self, session)
        self.call(
            "Emulation.setDeviceMetricsOverride", session, width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, features=[scheme])
        self.call("Page.enable", session)
        self.call("Page.navigate", session, url=address)
        tab.value("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        assert tab.value("location.href") == address
        return tab

    def call(self, method: str, session: str = "", **arguments: Any) -> dict[str, Any]:
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": arguments,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _message(self) -> bytes:
        while b"\0" not in self._buffer:
            data = self._reader.read(1 << 20)
            assert data, "chromium has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Chromium]:
    """Start Chromium with a new profile in a folder, and end it."""
    assert CHROMIUM is not None
    to_child, write = os.pipe()
    read, from_child = os.pipe()

    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{to_child} 4>&{from_child}', "bash", CHROMIUM,
         "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
         "--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_child, from_child),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_child)
    os.close(from_child)
    try:
        yield Chromium(write, read)
    finally:
        os.close(write)  # chromium ends with its pipe
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

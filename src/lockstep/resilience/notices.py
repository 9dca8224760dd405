"""Watches for the notice that a machine is taken back, such as a spot instance's, and asks its run to stop.

    recovery.notice     where                                                       there is one, if
    aws                 169.254.169.254/latest/meta-data/spot/instance-action       it answers
    gcp                 metadata.google.internal/.../instance/preempted             it answers TRUE
    azure               169.254.169.254/metadata/scheduledevents                    an event names this machine
    http://...          that address                                                it answers 200
    /path/of/a/file     that file                                                   it exists

A thread of one rank a machine looks every few seconds. A notice counts as a scheduler's warning, SIGUSR1.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from lockstep.core.stopping import write_stderr

_EVERY_S = 3.0
_TIMEOUT_S = 2.0
_MOST_BYTES = 65_536
_MOST_SHOWN = 200
_LINK_LOCAL = "http://169.254.169.254"
_ENDING = ("Preempt", "Terminate", "Reboot", "Redeploy")  # Azure's events that end what runs there

Look = Callable[[], str | None]
"""Returns the notice, None if there is none. Raises an exception if that can't be known."""


def look_at(place: str, environ: Mapping[str, str] = os.environ) -> Look:
    """Return the check for a notice at a place, as given in `recovery.notice`."""
    match place:
        case "aws":
            return partial(_aws, environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _LINK_LOCAL).rstrip("/"))
        case "gcp":
            host = environ.get("GCE_METADATA_HOST", "metadata.google.internal")
            return partial(_gcp, f"http://{host}/computeMetadata/v1/instance/preempted")
        case "azure":
            return partial(_azure, f"{_LINK_LOCAL}/metadata")
    if place.startswith(("http://", "https://")):
        return partial(_get, place)
    return partial(_file, Path(place))


@contextmanager
def watched_notice(place: str | None) -> Iterator[None]:
    """Look for the notice while the block runs, in a thread; at the first one, this process gets SIGUSR1.

    A place that can't be asked is reported once, and asked again.
    """
    if place is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(place, look_at(place), ended), name="lockstep-notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(place: str, look: Look, ended: threading.Event) -> None:
    reported = False
    while True:
        try:
            notice = look()
        except Exception as error:  # whatever an address answers
            notice = None
            if not reported:
                reported = True
                reason = error.reason if isinstance(error, URLError) else error
                write_stderr(f"recovery.notice: {place} can't be asked, which is tried again until it can: {reason}")
        if notice is not None:
            write_stderr(f"this machine will be taken back: {' '.join(notice.split())[:_MOST_SHOWN]}")
            os.kill(os.getpid(), signal.SIGUSR1)
            return
        if ended.wait(_EVERY_S):
            return


def _get(address: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> str | None:
    """Return the text at an address; None if there is none (404)."""
    request = Request(address, headers=dict(headers or {}), method=method)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_S) as answer:
            text: str = answer.read(_MOST_BYTES).decode(errors="replace")
            return text.strip() or address
    except HTTPError as error:
        if error.code == 404:
            return None
        raise


def _aws(endpoint: str) -> str | None:
    token = _get(f"{endpoint}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    return _get(f"{endpoint}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token or ""})


def _gcp(address: str) -> str | None:
    return "Google Cloud preempts it" if _get(address, {"Metadata-Flavor": "Google"}) == "TRUE" else None


def _azure(endpoint: str) -> str | None:
    flavor = {"Metadata": "true"}
    name = _get(f"{endpoint}/instance/compute/name?api-version=2021-02-01&format=text", flavor)
    answer = _get(f"{endpoint}/scheduledevents?api-version=2020-07-01", flavor)
    events = json.loads(answer or "{}").get("Events", [])
    for event in events:
        if event.get("EventType") in _ENDING and name in event.get("Resources", []):
            return f"Azure's event {event['EventType']}, not before {event.get('NotBefore') or 'now'}"
    return None


def _file(path: Path) -> str | None:
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}")
    return f"{path} exists" if path.exists() else None

"""Tests once a process whether the Hugging Face hub can be reached, before its libraries are imported.

    a folder or file      never asked
    a name                HF_HUB_OFFLINE set: as it says
                          otherwise one request, 1.5 s at most; no answer: HF_HUB_OFFLINE=1, and only the cache counts

A launcher asks for all its ranks, which inherit the answer.

Left to themselves those libraries retry for half a minute before they say that there is no network.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import urllib.error
import urllib.request
import warnings
from contextlib import suppress
from functools import lru_cache

from lockstep.core.errors import ConfigError

_PATIENCE = 1.5  # seconds
_GATEWAYS = (403, 407, 451)  # what a proxy answers that lets nobody through
_FETCH = "on a machine with a network, `lockstep data fetch RECIPE` puts it into the cache"


def needs_hub() -> None:
    """Test the hub, before anything is loaded from it or its cache by name."""
    if not is_connected():
        _go_offline()


@lru_cache(maxsize=1)
def is_connected() -> bool:
    """Return whether the hub answers, or HF_HUB_OFFLINE allows it to be used."""
    setting = os.environ.get("HF_HUB_OFFLINE")
    if setting is not None:
        return setting.upper() not in ("1", "ON", "YES", "TRUE")
    return _answers(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))


def missing(kind: str, name: str, error: Exception) -> ConfigError:
    """Return the error for a name that could not be loaded."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if is_connected():
        return ConfigError(f"{kind} {name} can't be had: {reason}")
    return ConfigError(
        f"{kind} {name} is neither a folder here nor in the cache, and the hub does not answer; {_FETCH}"
    )


def _answers(endpoint: str) -> bool:
    """Ask in a child process: a name server that is silent keeps to no timeout, and a thread that waits for it would
    keep this process from being forked."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.write(write, b"1" if _asked(endpoint) else b"0")
        os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], _PATIENCE)
        return bool(ready) and os.read(read, 1) == b"1"
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _asked(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PATIENCE):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500 and error.code not in _GATEWAYS
    except (OSError, ValueError):
        return False


def _go_offline() -> None:
    """Set HF_HUB_OFFLINE, also in libraries that were imported before and keep a copy."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module, name in (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE")):
        if module in sys.modules:
            setattr(sys.modules[module], name, True)

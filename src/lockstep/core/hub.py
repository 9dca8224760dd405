"""Tests whether the Hugging Face hub can be reached, once per process and before its libraries are imported.

Without an answer within 1.5 s, HF_HUB_OFFLINE=1 is set and only the cache is used: the libraries would retry for half
a minute. A launcher makes the request for all its ranks.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import urllib.error
import urllib.request
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal

from lockstep.core.errors import ConfigError

_OFFLINE = "HF_HUB_OFFLINE"
ENDPOINT = "https://huggingface.co"
_TIMEOUT = 1.5  # seconds
_PINNED = re.compile(r"(?:(.+)@)?([0-9a-f]{40})")
_GATEWAYS = (403, 407, 451)  # statuses of a proxy that refuses


def needs_hub() -> None:
    """Test the hub before anything is loaded by name; set HF_HUB_OFFLINE if it does not answer."""
    if is_connected():
        return
    os.environ[_OFFLINE] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):  # they copy the variable when they are imported
        if module in sys.modules:
            setattr(sys.modules[module], _OFFLINE, True)


@lru_cache(maxsize=1)
def is_connected() -> bool:
    """Return whether the hub answers, or HF_HUB_OFFLINE allows it to be used."""
    setting = os.environ.get(_OFFLINE)
    if setting is not None:
        return not means_offline(setting)
    return _answers(os.environ.get("HF_ENDPOINT", ENDPOINT))


def means_offline(setting: str) -> bool:
    """Return whether a value of HF_HUB_OFFLINE forbids requests."""
    return setting.upper() in ("1", "ON", "YES", "TRUE")


# --- revisions: `main` as a config has it, `main@COMMIT` once a run has begun -----------------------------------------


def requested(revision: str | None) -> str:
    """Return the branch or tag that a revision was resolved from, or else the commit that it is."""
    pinned = _PINNED.fullmatch(revision or "main")
    return revision or "main" if pinned is None else pinned[1] or pinned[2]


def commit_of(revision: str | None) -> str | None:
    """Return the commit of a revision, or the branch or tag itself if it isn't resolved."""
    pinned = _PINNED.fullmatch(revision or "")
    return revision if pinned is None else pinned[2]


def at_revision(name: str | None, revision: str | None) -> str | None:
    """Return `NAME@REVISION`, as `named_revision` reads it."""
    return name if name is None or revision is None else f"{name}@{revision}"


def named_revision(name: str) -> tuple[str, str | None]:
    """Return the repository of `NAME@REVISION`, and what to request; a folder's name may have an @."""
    repository, at, revision = (name, "", "") if Path(name).expanduser().exists() else name.partition("@")
    return repository, commit_of(revision) if at else None


def resolved(kind: Literal["model", "dataset"], name: str, revision: str | None) -> str | None:
    """Return a revision with its commit: of the hub, or of the cache if it doesn't answer; None: neither has it.

    Raises:
        ConfigError: The hub has no such repository or revision.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    branch = requested(revision)
    if _PINNED.fullmatch(revision or ""):
        return revision
    if is_connected():
        try:
            return f"{branch}@{HfApi().repo_info(name, repo_type=kind, revision=branch).sha}"
        except (RepositoryNotFoundError, RevisionNotFoundError, ValueError) as error:
            raise missing(kind, f"{name}, revision {branch},", error) from error
        except (OSError, HfHubHTTPError):
            pass  # the libraries take the cache then, too
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind), "refs", branch)
    return f"{branch}@{cached.read_text(encoding='utf-8').strip()}" if cached.is_file() else None


def snapshot(name: str, revision: str | None = None) -> Path:
    """Return a model's folder in the cache, after a download of its weights if the hub answers. Raises OSError."""
    from huggingface_hub import HfApi, snapshot_download

    revision = commit_of(revision)
    if not is_connected():
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    files = HfApi().list_repo_files(name, revision=revision)
    weights = "*.safetensors" if any(file.endswith(".safetensors") for file in files) else "*.bin"
    patterns, others = [weights, "*.json", "*.txt", "*.model"], ["*/*", "consolidated*"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=others))


def missing(kind: str, name: str, error: Exception) -> ConfigError:
    """Return the error for a name that could not be loaded."""
    if is_connected():
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return ConfigError(f"{kind} {name} can't be loaded: {reason}")
    return ConfigError(
        f"{kind} {name} is neither a folder here nor in the cache, and the hub does not answer; on a machine with a "
        "network, `lockstep data fetch RECIPE` puts it into the cache"
    )


def _answers(endpoint: str) -> bool:
    """Make the request in a child process: name servers ignore the timeout, and a thread would prevent forks."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks beside threads
        child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.write(write, b"1" if responds(endpoint) else b"0")
        os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], _TIMEOUT)
        return bool(ready) and os.read(read, 1) == b"1"
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def responds(endpoint: str) -> bool:
    """Make one request; return whether it is answered."""
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_TIMEOUT):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500 and error.code not in _GATEWAYS
    except (OSError, ValueError):
        return False

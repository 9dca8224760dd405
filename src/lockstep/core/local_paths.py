"""Paths of a file system, told apart from URLs.

Object stores are not supported, and `Path("s3://bucket/run")` would make a local folder `s3:`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from lockstep.core.errors import ConfigError

_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)  # two letters at least: C:/ is a drive


def url_refusal(text: str) -> str | None:
    """Return why `text` can't be used as a path, or None if it isn't a URL."""
    match = _URL.match(text)
    if match is None:
        return None
    scheme, rest = match.groups()
    if scheme.lower() == "file":
        return f"{text} is a URL; write the path alone: /{rest.removeprefix('localhost/')}"
    example = f"/mnt/{rest.strip('/') or 'run'}"
    return (
        f"{text} is a URL ({scheme}), and only file systems are supported; give a path that all hosts see, such as "
        f"{example} where the storage is mounted"
    )


def checked_path_text(text: str) -> str:
    """Return `text`, for a field of the config that holds a path or a name. Raises ValueError if it is a URL."""
    refusal = url_refusal(text)
    if refusal is not None:
        raise ValueError(refusal)
    return text


def local_path(text: str | os.PathLike[str]) -> Path:
    """Return the path that `text` names. Raises ConfigError if it is a URL."""
    refusal = url_refusal(os.fspath(text))
    if refusal is not None:
        raise ConfigError(refusal)
    return Path(text)

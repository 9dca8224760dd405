"""Refuses URLs where a local path is needed: `Path("s3://bucket/run")` would create a folder `s3:`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lockstep.core.errors import ConfigError

_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)  # two letters at least: C:/ is a drive


def url_refusal(text: str) -> str | None:
    """Return why `text` can't be used as a path, or None if it isn't a URL."""
    if (match := _URL.match(text)) is None:
        return None
    scheme, rest = match.groups()
    if scheme.lower() == "file":
        return f"{text} is a URL; write only the path: /{rest.removeprefix('localhost/')}"
    if scheme.lower() in ("hub", "hf", "huggingface"):
        return f"{text} is a URL; write only the name on the hub: {re.sub('^(models|datasets)/', '', rest)}"
    return (
        f"{text} is a URL ({scheme}), and a path of a file system is needed here; give one that all hosts see, such as "
        f"/mnt/{rest.strip('/') or 'run'} where the storage is mounted"
    )


def checked_path_text(text: str) -> str:
    """Return `text`, a path or a name. Raises ValueError if it is a URL."""
    if (refusal := url_refusal(text)) is not None:
        raise ValueError(refusal)
    return text


def local_path(text: str | os.PathLike[str]) -> Path:
    """Return the path that `text` names. Raises ConfigError if it is a URL."""
    try:
        return Path(checked_path_text(os.fspath(text)))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def target_of(link: Path) -> Path:
    """Return where a link leads. Raises ConfigError if it leads to itself."""
    try:
        return link.resolve()
    except (OSError, RuntimeError):
        raise ConfigError(f"{link} is a link that leads to itself: remove it") from None

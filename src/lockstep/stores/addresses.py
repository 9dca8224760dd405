"""Addresses of object stores: `s3://bucket/prefix`, `gs://...`, `az://container/...`. Nothing is connected here.

They hold no credentials, since what an address has is written to the run's files.
"""

from __future__ import annotations

import re

from lockstep.core.local_paths import url_refusal

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://([^/]*)(/.*)?")
_SCHEMES = {"s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "abfs": "az"}


def is_address(text: str) -> bool:
    """Return whether `text` is meant as an address and not as a path."""
    return url_refusal(text) is not None


def checked_place_text(text: str) -> str:
    """Return `text`, for a config field that holds a path or an address. Raises ValueError."""
    return checked_address(text) if is_address(text) else text


def checked_run_place_text(text: str) -> str:
    """Return `text`, for the folder of a run, which is on a disk. Raises ValueError."""
    if is_address(text):
        place = checked_address(text)
        raise ValueError(f"a run's folder is on a disk, and {place} isn't; give a path, and checkpoint.folder: {place}")
    return text


def checked_address(text: str) -> str:
    """Return an address in its shortest form. Raises ValueError if it can't be one, or holds credentials."""
    match = _ADDRESS.fullmatch(text.strip())
    scheme = match[1].lower() if match is not None else ""
    if match is None or scheme == "file":
        raise ValueError(url_refusal(text) if scheme == "file" else f"{text} is not an address; write s3://bucket/run")
    authority, path = match[2], (match[3] or "").strip("/")
    if scheme not in _SCHEMES:
        raise ValueError(f"{scheme}:// isn't supported; write s3://, gs:// or az://, or pass a storage of your own")
    if not authority:
        raise ValueError(f"{text} has no bucket; write {scheme}://bucket/run")
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", authority) is None or re.search(r"[?#%]", path):
        remedy = "set variables such as AWS_PROFILE or GOOGLE_APPLICATION_CREDENTIALS"
        raise ValueError(f"{scheme}://bucket/prefix holds no credentials or options, since runs record it; {remedy}")
    return f"{_SCHEMES[scheme]}://{authority}{'/' if path else ''}{path}"


def parts_of(address: str) -> tuple[str, str, str]:
    """Return scheme, bucket (or host) and prefix of a checked address."""
    scheme, _, rest = address.partition("://")
    bucket, _, prefix = rest.partition("/")
    return scheme, bucket, prefix

"""Objects in a bucket, by obstore: Amazon's S3 and what answers as it does, Google Cloud Storage, Azure.

small object    one request; a new one only if there is none of that name
large           parts of 8 MiB, four at a time, visible once all are there; a failed upload is aborted
read            a range

obstore repeats a request that isn't answered, or is answered by 5xx or 429, for a limit in seconds. Calls with a cut
answer are repeated here. A rule of the bucket has to delete the parts that a killed process has left.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError
from lockstep.stores import faults
from lockstep.stores.addresses import checked_address, parts_of
from lockstep.stores.blobs import BlobStore, ended_early

RETRY_SECONDS = 10.0  # an address that has never answered is more likely wrong than down
PART_BYTES = 2**23
_MOST_PARTS = 10_000
_PARTS_AT_ONCE = 4
_LARGEST_COPY = 5 * 2**30  # by one request to S3
_PAUSE_S = 0.1
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_KEYS = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_users: set[int] = set()

_R = TypeVar("_R")


def open_store(address: str, retry_seconds: float = RETRY_SECONDS) -> BlobStore:
    """Return the store of an address; it isn't connected yet. Raises ConfigError."""
    try:
        return Bucket(checked_address(address), retry_seconds)
    except ValueError as error:
        raise ConfigError(str(error)) from None


class Bucket:
    """The objects under a prefix of a bucket; uploads are in parts of 5 MiB at least; Amazon allows 10,000."""

    def __init__(self, address: str, retry_seconds: float = 60.0, part_bytes: int = PART_BYTES) -> None:
        self.place = address
        self._retry_seconds = retry_seconds
        self._part_bytes = part_bytes

    def sizes(self, prefix: str) -> dict[str, int]:
        entries = self._call("", lambda obs: obs.list(self._store, prefix.rpartition("/")[0] or None).collect())
        sizes = {entry["path"]: int(entry["size"]) for entry in entries}
        return {name: sizes[name] for name in sorted(sizes) if name.startswith(prefix)}

    def size(self, name: str) -> int:
        return int(self._call(name, lambda obs: obs.head(self._store, name))["size"])

    def read(self, name: str, offset: int, into: memoryview) -> None:
        if len(into):
            into[:] = memoryview(self._read(name, offset, len(into)))

    def write(self, name: str, *pieces: memoryview) -> None:
        size = sum(map(len, pieces))
        if size <= self._part_bytes:
            data = b"".join(pieces)
            self._call(name, lambda obs: obs.put(self._store, name, data, use_multipart=False))
        else:
            self._upload(name, size, lambda part: _sections(pieces, part))

    def write_new(self, name: str, data: memoryview) -> None:
        body = bytes(data)
        try:
            self._call(name, lambda obs: obs.put(self._store, name, body, mode="create"))
        except FileExistsError:
            if not self._holds(name, body):  # an answer that was lost, and a repeated request
                raise

    def copy(self, source: str, target: str) -> None:
        size = self.size(source)
        if size <= _LARGEST_COPY:
            self._call(source, lambda obs: obs.copy(self._store, source, target))
            return

        def parts(part: int) -> Iterator[Any]:
            return (self._read(source, at, min(part, size - at)) for at in range(0, size, part))

        self._upload(target, size, parts)

    def delete(self, names: Iterable[str]) -> None:
        listed = list(names)
        for batch in filter(None, (listed[:1], listed[1:])):
            try:
                self._delete("", batch)
            except FileNotFoundError:  # Google and Azure refuse what S3 ignores
                for name in batch:
                    with suppress(FileNotFoundError):
                        self._delete(name, [name])

    def _delete(self, shown: str, names: Sequence[str]) -> None:
        self._call(shown, lambda obs: obs.delete(self._store, names))

    def _read(self, name: str, offset: int, length: int) -> Any:
        data = self._call(name, lambda obs: obs.get_range(self._store, name, start=offset, length=length))
        if len(data) != length:
            raise ended_early(offset, len(data), length)
        return data

    def _upload(self, name: str, size: int, parts: Callable[[int], Iterator[Any]]) -> None:
        part = max(self._part_bytes, -(-size // _MOST_PARTS))
        options = {"use_multipart": True, "chunk_size": part, "max_concurrency": _PARTS_AT_ONCE}
        self._call(name, lambda obs: obs.put(self._store, name, parts(part), **options))

    def _holds(self, name: str, data: bytes) -> bool:
        with suppress(OSError):
            return self.size(name) == len(data) and bytes(self._read(name, 0, len(data))) == data
        return False

    def _call(self, name: str, call: Callable[[Any], _R]) -> _R:
        """Return what a call of obstore returns, repeated while its answer is cut. Raises OSError."""
        try:
            import obstore
        except ImportError:
            raise ConfigError(f"{self.place} needs the package obstore: {pip_install('buckets')}") from None
        until = time.monotonic() + self._retry_seconds
        while True:
            try:
                return call(obstore)
            except ConfigError:
                raise
            except Exception as error:
                if not faults.is_cut(error) or time.monotonic() > until:
                    raise faults.as_os_error(error, self.place, name, self._retry_seconds) from None
            time.sleep(_PAUSE_S)

    @property
    def _store(self) -> Any:
        _users.add(os.getpid())
        if len(_users) > 1:  # its threads don't survive a fork, and a child would wait for them without end
            raise RuntimeError(f"{self.place} was used before this process was forked; start it by spawn")
        return self._opened

    @cached_property
    def _opened(self) -> Any:
        return _open(self.place, self._retry_seconds)

    def __reduce__(self) -> tuple[Any, ...]:
        return Bucket, (self.place, self._retry_seconds, self._part_bytes)


def _open(address: str, retry_seconds: float) -> Any:
    from obstore.store import from_url

    backoff = {"init_backoff": timedelta(seconds=_PAUSE_S), "max_backoff": timedelta(seconds=5), "base": 2}
    retries = {"max_retries": 10**6, "retry_timeout": timedelta(seconds=retry_seconds), "backoff": backoff}
    scheme = parts_of(address)[0]
    try:
        client = {"connect_timeout": "5s", "timeout": "30s", "allow_http": _is_http(scheme)}
        profile = {"credential_provider": _profile()} if scheme == "s3" else {}
        return from_url(address, client_options=client, retry_config=retries, **profile)
    except Exception as error:  # a profile that doesn't exist, an endpoint that is no URL, an account that isn't given
        raise ConfigError(f"{address}: {faults.settings(error, address)}") from None


def _is_http(scheme: str) -> bool:
    """Return whether the endpoint that the user names has no TLS. Raises ValueError if it isn't a URL."""
    for name in _ENDPOINTS[scheme]:
        if name in os.environ and not re.match("https?://[^/]", os.environ[name]):
            raise ValueError(f"{name} is {os.environ[name]!r}, not a URL such as https://HOST")
    return any(os.environ.get(name, "").startswith("http:") for name in _ENDPOINTS[scheme])


def _profile() -> Any:
    """Return boto3's credentials, which profiles and single sign-on need; None: obstore has all others'."""
    files = (Path(os.environ.get(name, file)).expanduser() for name, file in _FILES.items())
    is_named = bool(os.environ.get("AWS_PROFILE"))
    if not is_named and (any(map(os.environ.get, _KEYS)) or not any(file.is_file() for file in files)):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise ValueError(f"profiles (~/.aws) need the package boto3: {pip_install('buckets')}") from None
    return Boto3CredentialProvider()


def _sections(pieces: Sequence[memoryview], part: int) -> Iterator[memoryview]:
    """Yield the bytes of pieces in sections, so that few of them are copied at a time."""
    for piece in pieces:
        for at in range(0, len(piece), part):
            yield piece[at : at + part]

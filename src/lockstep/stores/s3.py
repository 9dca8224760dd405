"""Objects in an S3 bucket, by boto3: Amazon's, or any server that AWS_ENDPOINT_URL names.

small object    PutObject
large           CreateMultipartUpload -> UploadPart x N, in threads -> CompleteMultipartUpload      failed: Abort...
read            GetObject with a range
new             PutObject, If-None-Match: *
replaced        PutObject, If-Match: the tag that was read

boto3 alone, and not s3fs: s3fs pins an old botocore, and a save needs what a file interface hides, which upload is
open, and when it is aborted. Credentials come from boto3's chain (variables, profile, role) and stay in its client.

botocore counts attempts where a save needs a limit in seconds, so its own repeats are off, and each call, each part
included, is repeated here while its fault is transient.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError
from lockstep.stores import s3_faults
from lockstep.stores.addresses import parts_of
from lockstep.stores.aws_session import new_session
from lockstep.stores.blobs import ended_early

PART_BYTES = 2**24
_MOST_PARTS = 10_000
_THREADS = 4
_FIRST_REACH_S = 10.0  # an address that has never answered is more likely wrong than down
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_PAUSES = random.Random()  # of its own: a model may draw from the global generator meanwhile
_MOST_DELETED = 1000  # by one call

_R = TypeVar("_R")


class S3Store:
    """The objects under a prefix of a bucket.

    Args:
        address: `s3://bucket/prefix`, checked.
        retry_seconds: Seconds for which a call that fails is repeated.
        part_bytes: Size of the parts of an upload; Amazon's limits are 5 MiB and 10,000 parts.
    """

    def __init__(self, address: str, retry_seconds: float = 60.0, part_bytes: int = PART_BYTES) -> None:
        _, self._bucket, prefix = parts_of(address)
        self._prefix = f"{prefix}/" if prefix else ""
        self.place = address
        self._retry_seconds = retry_seconds
        self._part_bytes = part_bytes
        self._is_reached = False
        self._clients: dict[int, Any] = {}
        self._lock = threading.Lock()

    # --- reading --------------------------------------------------------------------------------------------------

    def sizes(self, prefix: str) -> dict[str, int]:
        return {name: entry["Size"] for name, entry in self._listed(prefix).items()}

    def size(self, name: str) -> int:
        return int(self._call("head_object", name, "ContentLength")["ContentLength"])

    def read(self, name: str, offset: int, into: memoryview) -> None:
        if not len(into):
            return

        def call(client: Any) -> bytes:
            wanted = f"bytes={offset}-{offset + len(into) - 1}"
            body = client.get_object(Bucket=self._bucket, Key=self._prefix + name, Range=wanted)["Body"]
            with body:
                return bytes(body.read())

        data = self._repeated("get_object", name, call)
        if len(data) != len(into):
            raise ended_early(offset, len(data), len(into))
        into[:] = data

    def _listed(self, prefix: str) -> dict[str, Any]:
        listed: dict[str, Any] = {}
        following: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", "", Prefix=self._prefix + prefix, **following)
            for entry in page.get("Contents", ()):
                listed[entry["Key"].removeprefix(self._prefix)] = entry
            if not page.get("IsTruncated"):
                return dict(sorted(listed.items()))
            following = {"ContinuationToken": page["NextContinuationToken"]}

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, name: str, *pieces: memoryview) -> None:
        size = sum(map(len, pieces))
        if size <= self._part_bytes:
            self._call("put_object", name, Body=b"".join(pieces))
            return
        upload = self._call("create_multipart_upload", name, "UploadId")["UploadId"]
        try:
            self._upload_parts(name, upload, pieces, max(self._part_bytes, -(-size // _MOST_PARTS)))
        except BaseException:
            with suppress(OSError):  # else `remove_unfinished` does it
                self._call("abort_multipart_upload", name, UploadId=upload)
            raise

    def write_new(self, name: str, data: memoryview) -> None:
        body = bytes(data)
        try:
            self._call("put_object", name, Body=body, IfNoneMatch="*")
        except FileExistsError:
            if not self._holds(name, body):  # an answer that was lost, and a repeated call
                raise
        except NotImplementedError:  # a server that knows no conditions
            if name in self.sizes(name):
                raise s3_faults.exists(f"{self.place}/{name}") from None
            self._call("put_object", name, Body=body)

    def copy(self, source: str, target: str) -> None:
        origin = {"Bucket": self._bucket, "Key": self._prefix + source}
        key = self._prefix + target
        self._repeated("copy_object", target, lambda client: client.copy(origin, self._bucket, key))

    def delete(self, names: Iterable[str]) -> None:
        listed = list(names)
        batches = [listed[:1], *(listed[at : at + _MOST_DELETED] for at in range(1, len(listed), _MOST_DELETED))]
        for batch in batches if listed else ():
            if len(batch) == 1:
                self._call("delete_object", batch[0])
                continue
            objects = [{"Key": self._prefix + name} for name in batch]
            reply = self._call("delete_objects", "", Delete={"Objects": objects, "Quiet": True})
            for fault in reply.get("Errors", ())[:1]:
                raise s3_faults.not_deleted(fault, self.place)

    def remove_unfinished(self, prefix: str) -> None:
        with suppress(OSError):
            page = self._call("list_multipart_uploads", "", Prefix=self._prefix + prefix)
            for upload in page.get("Uploads", ()):
                name = upload["Key"].removeprefix(self._prefix)
                self._call("abort_multipart_upload", name, UploadId=upload["UploadId"])

    def _upload_parts(self, name: str, upload: str, pieces: Sequence[memoryview], part_bytes: int) -> None:
        size = sum(map(len, pieces))
        starts = range(0, size, part_bytes)

        def upload_part(number: int) -> dict[str, Any]:
            start = starts[number]
            body = b"".join(_section(pieces, start, min(start + part_bytes, size)))
            reply = self._call("upload_part", name, "ETag", UploadId=upload, PartNumber=number + 1, Body=body)
            checksums = {key: reply[key] for key in reply if key.startswith("Checksum") and key != "ChecksumType"}
            return {"PartNumber": number + 1, "ETag": reply["ETag"], **checksums}

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="s3") as pool:
            jobs = [pool.submit(upload_part, number) for number in range(len(starts))]
            try:
                parts = [job.result() for job in jobs]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        try:
            self._call("complete_multipart_upload", name, UploadId=upload, MultipartUpload={"Parts": parts})
        except FileNotFoundError:  # the answer was lost, and the call repeated: is the object there?
            if self._call("head_object", name, "ETag")["ETag"].strip('"') != _etag([part["ETag"] for part in parts]):
                raise

    def _holds(self, name: str, data: bytes) -> bool:
        with suppress(OSError):
            stored = bytearray(len(data))
            if self.size(name) == len(data):
                self.read(name, 0, memoryview(stored))
                return stored == data
        return False

    # --- calls ----------------------------------------------------------------------------------------------------

    def _call(self, operation: str, name: str, needed: str = "", /, **parameters: Any) -> Any:
        """Return the answer to a call about an object, which has the value `needed`; a cut one may have lost it."""
        if name:
            parameters["Key"] = self._prefix + name

        def call(client: Any) -> Any:
            reply = getattr(client, operation)(Bucket=self._bucket, **parameters)
            if needed and needed not in reply:
                raise ConnectionError(f"the answer to {operation} ended early")
            return reply

        return self._repeated(operation, name, call)

    def _repeated(self, operation: str, name: str, call: Callable[[Any], _R]) -> _R:
        """Return what a call returns, repeated while its fault is transient. Raises OSError."""
        where = f"{self.place}/{name}" if name else self.place
        client, began = self._client(), time.monotonic()
        for pause in _pauses():
            try:
                result = call(client)
            except Exception as error:
                limit = self._retry_seconds if self._is_reached else min(self._retry_seconds, _FIRST_REACH_S)
                if not s3_faults.is_transient(error) or time.monotonic() + pause - began > limit:
                    endpoint = str(client.meta.endpoint_url)
                    raise s3_faults.as_os_error(error, operation, where, self._bucket, endpoint, limit) from error
                time.sleep(pause)
            else:
                self._is_reached = True
                return result
        raise AssertionError("pauses never end")

    def _client(self) -> Any:
        """Return this process's client: one that a fork has copied would share its connections."""
        with self._lock:
            if os.getpid() not in self._clients:
                self._clients = {os.getpid(): _new_client(self.place)}
            return self._clients[os.getpid()]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def _new_client(place: str) -> Any:
    try:
        from botocore.config import Config

        config = Config(
            connect_timeout=5,
            read_timeout=30,
            retries={"total_max_attempts": 1},
            max_pool_connections=4 * _THREADS,
            tcp_keepalive=True,
        )
        return new_session().client("s3", config=config)
    except ImportError:
        raise ConfigError(f"{place} needs the package boto3: {pip_install('s3')}") from None
    except Exception as error:  # a profile that doesn't exist, an endpoint that is no URL
        raise s3_faults.no_client(error, place) from error


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE_S
    while True:
        yield pause * _PAUSES.uniform(0.5, 1)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _section(pieces: Sequence[memoryview], start: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes from `start` to `end` of pieces that follow each other."""
    at = 0
    for piece in pieces:
        low, high = max(start - at, 0), min(end - at, len(piece))
        if low < high:
            yield piece[low:high]
        at += len(piece)


def _etag(parts: Sequence[str]) -> str:
    """Return the tag that S3 gives an object of these parts, if their tags are hashes."""
    with suppress(ValueError):
        digests = b"".join(bytes.fromhex(part.strip('"')) for part in parts)
        return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"
    return ""

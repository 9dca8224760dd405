"""The objects of a job in its bucket, by which the instances and the machine that follows them talk.

job.json           the record of the job             token              what the launchers prove to each other
project.tar.gz     the project                       ready/N            address of instance N
logs/N/BYTES       its log, from a byte on           ends/N             its exit code
stop               asks all to save and stop         results/...        the run's folder, from instance 0
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.terminal import echo, plain
from lockstep.launchers.aws_calls import AwsCalls, CallFailed
from lockstep.launchers.aws_names import AwsJob

_MOST_DELETED = 1000  # by one call
_MOST_CODE = 255


class JobObjects:
    """The objects of a job.

    Args:
        aws: Calls of AWS.
        job: The job.
    """

    def __init__(self, aws: AwsCalls, job: AwsJob) -> None:
        self._aws = aws
        self._job = job
        self._printed = 0
        self._half = b""

    def record(self) -> Mapping[str, Any] | None:
        """Return what was recorded when the job was launched; None: it was removed, or never there."""
        try:
            known: Mapping[str, Any] = json.loads(self._read("job.json"))
            int(known["nodes"]), str(known["run_folder"]), float(known["boot_minutes"])
        except CallFailed as failure:
            if failure.code in ("NoSuchKey", "404"):
                return None
            raise
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{self._job.place}/job.json is damaged") from None
        return known

    def ends(self) -> dict[str, int]:
        """Return the exit codes of the instances that have ended, by their number."""
        codes = {}
        for name in self._names("ends/"):
            text = self._read(name).decode(errors="replace").strip()
            code = int(text) if re.fullmatch(r"\d{1,3}", text) and int(text) <= _MOST_CODE else 1
            codes[name.removeprefix("ends/")] = code
        return codes

    def has_reported(self) -> bool:
        """Return whether an instance has sent anything."""
        return any(next(iter(self._names(prefix)), None) is not None for prefix in ("logs/", "ready/", "ends/"))

    def print_log(self) -> None:
        """Print what is new in the log of instance 0."""
        for name, size in self._names("logs/0/").items():
            start = _start_of(name)
            if start is None or start + size <= self._printed or start > self._printed:
                continue
            data = self._half + self._read(name)[self._printed - start :]
            self._printed = start + size
            whole, newline, self._half = data.rpartition(b"\n")
            if newline:
                echo(plain(whole.decode(errors="replace")), flush=True)

    def log_of(self, node: str) -> str:
        """Return the whole log of an instance."""
        text = b""
        for name in self._names(f"logs/{node}/"):
            start = _start_of(name)
            if start is not None and start <= len(text):
                text = text[:start] + self._read(name)
        return plain(text.decode(errors="replace"))

    def ask_to_stop(self) -> None:
        """Ask the instances to save and stop."""
        self._aws.call("s3", "put_object", Bucket=self._job.bucket, Key=self._job.key("stop"), Body=b"")

    def fetch(self, folder: Path, nodes: int) -> int:
        """Write the results into a folder, and the instances' logs; return the number of results. Raises RunFailed."""
        results = self._names("results/")
        for name in results:
            path = PurePosixPath(name.removeprefix("results/"))
            if path.is_absolute() or ".." in path.parts or not path.parts:
                echo(f"note: {name} is not fetched: its name leads out of the run's folder", file=sys.stderr)
                continue
            _write(folder / path, self._read(name))
        for node in range(nodes):
            if text := self.log_of(str(node)):
                _write(folder / "launch" / f"node-{node}.log", text.encode())
        return len(results)

    def delete(self) -> int:
        """Delete all objects of the job; return how many there were."""
        keys = [self._job.key(name) for name in self._names("")]
        for at in range(0, len(keys), _MOST_DELETED):
            batch = {"Objects": [{"Key": key} for key in keys[at : at + _MOST_DELETED]], "Quiet": True}
            reply = self._aws.call("s3", "delete_objects", Bucket=self._job.bucket, Delete=batch)
            for fault in reply.get("Errors", ())[:1]:
                raise RunFailed(f"s3:DeleteObject failed for {fault.get('Key')}: {fault.get('Message')}")
        return len(keys)

    def _names(self, prefix: str) -> dict[str, int]:
        """Return the sizes of the objects whose names start so, in the order of their names."""
        whole = self._job.key("")
        listed = self._aws.pages(
            "s3", "list_objects_v2", "Contents", Bucket=self._job.bucket, Prefix=f"{whole}{prefix}"
        )
        return {entry["Key"].removeprefix(whole): int(entry["Size"]) for entry in listed}

    def _read(self, name: str) -> bytes:
        reply = self._aws.call("s3", "get_object", Bucket=self._job.bucket, Key=self._job.key(name))
        try:
            return bytes(reply["Body"].read())
        except Exception as error:  # what the HTTP library raises when a connection breaks
            raise RunFailed(f"s3:GetObject: {self._job.place}/{name} ended early: {type(error).__name__}") from error


def _start_of(name: str) -> int | None:
    text = name.rpartition("/")[2]
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.part")
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise RunFailed(f"can't write {path}: {error.strerror}") from None

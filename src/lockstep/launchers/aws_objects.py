"""The objects of a job in its bucket, by which the instances and the machine that follows them talk.

job.json           the record of the job             token              what the launchers prove to each other
project.tar.gz     the project                       ready/N            address of instance N
logs/N/BYTES       its log, from a byte on           ends/N             its exit code
stop               asks all to save and stop         results/...        the run's folder, from instance 0

A log may have thousands of objects and gigabytes: it is listed from the newest known object on, and read in parts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.terminal import echo, plain
from lockstep.launchers.aws_calls import AwsCalls, CallFailed
from lockstep.launchers.aws_names import AwsJob

_MOST_DELETED = 1000  # by one call
_MOST_CODE = 255
_PART = 1 << 23  # bytes, read at once
_END = 1 << 16  # bytes: the end of a log, for a person


class JobObjects:
    """The objects of a job.

    Args:
        aws: Calls of AWS.
        job: The job.
    """

    def __init__(self, aws: AwsCalls, job: AwsJob) -> None:
        self._aws = aws
        self._job = job
        self._printed = _LogPlace()
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
        for name, _ in self._listed("ends/"):
            text = self._read(name).decode(errors="replace").strip()
            code = int(text) if re.fullmatch(r"\d{1,3}", text) and int(text) <= _MOST_CODE else 1
            codes[name.removeprefix("ends/")] = code
        return codes

    def has_reported(self, node: int) -> bool:
        """Return whether an instance has sent anything."""
        return any(True for place in (f"logs/{node}/", f"ends/{node}") for _ in self._listed(place))

    def print_log(self) -> None:
        """Print what is new in the log of instance 0: its whole lines."""
        for data in self._log(0, self._printed):
            whole, newline, self._half = (self._half + data).rpartition(b"\n")
            if newline:
                echo(plain(whole.decode(errors="replace")), flush=True)

    def print_rest(self) -> None:
        """Print the last line of the log, which has no end."""
        if self._half:
            echo(plain(self._half.decode(errors="replace")), flush=True)
        self._half = b""

    def end_of_log(self, node: str) -> str:
        """Return the end of an instance's log."""
        data = b""
        for name, size in reversed([*self._listed(f"logs/{node}/")]):
            data = b"".join([*self._parts(name, max(size - _END, 0), size), data])
            if len(data) >= _END:
                break
        return plain(data.decode(errors="replace"))

    def ask_to_stop(self) -> None:
        """Ask the instances to save and stop."""
        self._aws.call("s3", "put_object", Bucket=self._job.bucket, Key=self._job.key("stop"), Body=b"")

    def fetch(self, folder: Path, nodes: int) -> int:
        """Write the results into a folder, and the instances' logs; return the number of results. Raises RunFailed."""
        number = 0
        for name, size in self._listed("results/"):
            path = PurePosixPath(name.removeprefix("results/"))
            if path.is_absolute() or ".." in path.parts or not path.parts:
                echo(f"note: {name} is not fetched: its name leads out of the run's folder", file=sys.stderr)
                continue
            _write(folder / path, self._parts(name, 0, size))
            number += 1
        for node in range(nodes):
            if self.has_reported(node):
                _write(folder / "launch" / f"node-{node}.log", self._log(node, _LogPlace()))
        return number

    def delete(self) -> int:
        """Delete all objects of the job; return how many there were. Record and exit codes go last."""
        names = sorted((name for name, _ in self._listed("")), key=lambda name: name.startswith(("ends/", "job.json")))
        for at in range(0, len(names), _MOST_DELETED):
            keys = [{"Key": self._job.key(name)} for name in names[at : at + _MOST_DELETED]]
            reply = self._aws.call(
                "s3", "delete_objects", Bucket=self._job.bucket, Delete={"Objects": keys, "Quiet": True}
            )
            for fault in reply.get("Errors", ())[:1]:
                raise RunFailed(f"s3:DeleteObject failed for {fault.get('Key')}: {fault.get('Message')}")
        return len(names)

    def _log(self, node: int, place: _LogPlace) -> Iterator[bytes]:
        """Yield what follows a place in an instance's log, and move the place."""
        after = self._job.key(f"logs/{node}/{place.name[:-1]}") if place.name else ""
        for name, size in self._listed(f"logs/{node}/", after):
            label = name.rpartition("/")[2]
            if not re.fullmatch(r"\d{1,18}", label) or int(label) > place.at:
                continue
            start = int(label)
            for data in self._parts(name, place.at - start, size):
                place.at, place.name = place.at + len(data), label
                yield data

    def _listed(self, prefix: str, after: str = "") -> Iterator[tuple[str, int]]:
        """Yield names and sizes of the objects whose names start so, in the order of their names.

        Args:
            after: A key, with which and before which none is listed.
        """
        whole = self._job.key("")
        place = {"Bucket": self._job.bucket, "Prefix": f"{whole}{prefix}", **({"StartAfter": after} if after else {})}
        for entry in self._aws.pages("s3", "list_objects_v2", "Contents", **place):
            yield entry["Key"].removeprefix(whole), int(entry["Size"])

    def _parts(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of an object from one place to another."""
        for at in range(start, end, _PART):
            yield self._read(name, Range=f"bytes={at}-{min(at + _PART, end) - 1}")

    def _read(self, name: str, **range_: str) -> bytes:
        reply = self._aws.call("s3", "get_object", Bucket=self._job.bucket, Key=self._job.key(name), **range_)
        return bytes(reply["Body"])


class _LogPlace:
    """A place in a log.

    Attributes:
        at: Its byte.
        name: Last part of the name of the object that has the byte before it: that object may grow.
    """

    def __init__(self) -> None:
        self.at = 0
        self.name = ""


def _write(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file as a whole. Raises RunFailed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name[:200]}.part")
        with partial.open("wb") as file:
            file.writelines(parts)
        partial.replace(path)
    except (OSError, ValueError) as error:
        raise RunFailed(f"can't write {path}: {getattr(error, 'strerror', None) or error}") from None

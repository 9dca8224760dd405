"""A job on EC2, from the start of its instances until nothing is left that is paid for.

REGION/BUCKET[/PREFIX]/NAME names a job, from any machine with the credentials:
    s3://BUCKET/PREFIX/NAME/job.json        the record of the job      .../token      the launchers' secret
    .../logs/N        .../ends/N            log, and exit code, of instance N
    .../stop          .../results/          asks all to save and stop; the run's folder, from instance 0
    lockstep-job=NAME                       tag of all that was created for it
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, Failure, RunFailed, Stopped
from lockstep.core.jobs import JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.stopping import undo_on_stop, write_stderr
from lockstep.core.terminal import command_line, echo, plain, plain_line
from lockstep.launchers.aws_calls import AwsCalls, from_command, wait_until
from lockstep.launchers.tools import follow_until_end, read_record, write_files

TAG = "lockstep-job"
RECORD_FILE = "aws.json"

_IDENTIFIER = re.compile(
    r"(?P<region>[a-z]+(-[a-z]+)+-\d)/(?P<bucket>[a-z0-9][a-z0-9.-]+)/((?P<prefix>[^\s]+)/)?(?P<name>[a-z][a-z0-9-]*)"
)
_FILLED = ("Body", "UserData")  # parameters that are placeholders
_ENDED = ("shutting-down", "terminated")
_PAID = ["pending", "running", "stopping", "stopped"]
_RUNNING_S = 600.0
_SETTLE_S = (0.0, 2.0, 4.0)  # an instance with an unconfirmed start may be listed seconds later
_POLL_S = 5.0
_STOPPING_S = 600.0  # for a run to save and stop
_OTHERS_S = 300.0  # between the end of one instance and the others' ends
_MOST_DELETED = 1000  # by one call


@dataclass(frozen=True, slots=True)
class AwsJob:
    """A job by its identifier."""

    region: str
    bucket: str
    prefix: str
    name: str

    @property
    def identifier(self) -> str:
        return "/".join(filter(None, (self.region, self.bucket, self.prefix, self.name)))

    @property
    def place(self) -> str:
        """Address of its objects."""
        return f"s3://{self.bucket}/{self.key('')}".rstrip("/")

    @property
    def cancel_line(self) -> str:
        return command_line("lockstep", "launch", "aws", "cancel", self.identifier)

    def key(self, name: str) -> str:
        """Return the key of an object."""
        return f"{self.prefix}/{self.name}/{name}" if self.prefix else f"{self.name}/{name}"


def job_named(identifier: str) -> AwsJob:
    """Return the job that an identifier names. Raises ConfigError."""
    match = _IDENTIFIER.fullmatch(identifier)
    if match is None:
        raise ConfigError(f"{identifier!r} is neither REGION/BUCKET/NAME of an AWS job nor the folder of its run")
    return AwsJob(match["region"], match["bucket"], match["prefix"] or "", match["name"])


# --- start ----------------------------------------------------------------------------------------------------------


def start(plan: LaunchPlan, record: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Make the calls, and wait until the instances run. Raises Failure, and then nothing is left.

    Args:
        values: Values of placeholders in the calls.
    """
    job = job_named(record["job"])
    echo(f"starting AWS job {job.identifier}", file=sys.stderr, flush=True)  # to cancel it by
    aws = AwsCalls(job.region, record["profile"])

    def make(words: Sequence[str]) -> None:
        service, operation, given = from_command(words)
        filled = {name: values[given[name]] for name in _FILLED if name in given}
        aws.call(service, operation, **{**given, **filled})

    def undo() -> str:
        try:  # with new clients: a signal may have interrupted a call of the others
            remove(AwsCalls(job.region, aws.profile), job, settle=True)
        except Failure as failure:
            return f"; {failure}"
        return ""

    make(plan.commands[0])  # asks for the bucket, and changes nothing
    with undo_on_stop(lambda: write_stderr(f"what was created is removed{undo()}")):
        try:
            for words in plan.commands[1:]:
                make(words)
            _wait_for_instances(aws, job, int(record["nodes"]))
        except Exception as error:
            if left := undo():
                raise RunFailed(f"{error}{left}") from error
            raise


def _wait_for_instances(aws: AwsCalls, job: AwsJob, wanted: int) -> None:
    def are_there() -> bool:
        listed = instances(aws, job)
        if ended := [each for each in listed if _state(each) in _ENDED]:
            raise RunFailed(f"an instance has ended while it was started: {_reason(ended[0]) or 'no reason given'}")
        return sum(_state(each) == "running" for each in listed) >= wanted

    if not wait_until(are_there, _RUNNING_S, _POLL_S):
        raise RunFailed(f"the {wanted} instances are not running after {_RUNNING_S:g} s; try again, or another --type")


# --- instances, and the end of all that is paid for -----------------------------------------------------------------


def instances(aws: AwsCalls, job: AwsJob, *filters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the instances of a job, by their place in the call that started them."""
    wanted = [{"Name": f"tag:{TAG}", "Values": [job.name]}, *filters]
    listed = aws.items("ec2", "describe_instances", "Reservations[].Instances[]", Filters=wanted)
    return sorted(listed, key=lambda instance: int(instance.get("AmiLaunchIndex", 0)))


def _state(instance: Mapping[str, Any]) -> str:
    return str(instance["State"]["Name"])


def _reason(instance: Mapping[str, Any]) -> str:
    return plain_line(str(instance.get("StateReason", {}).get("Message") or instance.get("StateTransitionReason", "")))


def remove(aws: AwsCalls, job: AwsJob, *, settle: bool = False, keep_objects: bool = False) -> list[str]:
    """Remove all that was created for a job, and return what was removed. Raises RunFailed if something is left.

    Instances delete their disks and interfaces, and their spot requests end with them. `settle`: instances may have
    been started a moment ago, by a call with a lost answer.
    """
    try:
        removed = _terminate(aws, job, settle=settle)
        if not keep_objects and JobObjects(aws, job).delete():
            removed.append("objects")
    except Failure as failure:
        left = f"something of job {job.identifier} may be left, and be paid for ({failure})"
        raise RunFailed(f"{left}; try again: {job.cancel_line}") from None
    return removed


def _terminate(aws: AwsCalls, job: AwsJob, *, settle: bool) -> list[str]:
    ended: dict[str, None] = {}
    paid = {"Name": "instance-state-name", "Values": _PAID}
    for pause in _SETTLE_S if settle else _SETTLE_S[:1]:
        time.sleep(pause)
        if live := [str(each["InstanceId"]) for each in instances(aws, job, paid)]:
            aws.call("ec2", "terminate_instances", InstanceIds=live)
            ended |= dict.fromkeys(live)
        elif ended:
            break
    return [*ended]


# --- objects --------------------------------------------------------------------------------------------------------


class JobObjects:
    """The objects of a job in its bucket, where the instances and the machine that follows them talk."""

    def __init__(self, aws: AwsCalls, job: AwsJob) -> None:
        self._aws = aws
        self._job = job
        self._printed = 0  # bytes of the log

    def record(self) -> Mapping[str, Any] | None:
        """Return what was recorded when the job was launched; None: it was removed, or never there."""
        text = self._read("job.json")
        return None if text is None else json.loads(text)

    def ends(self) -> dict[int, int]:
        """Return the exit codes of the instances that have ended, by their number."""
        texts = {node: (self._read(f"ends/{node}") or b"").strip() for node in sorted(self._numbers("ends/"))}
        return {node: int(text) if text.isdigit() else 1 for node, text in texts.items()}

    def reported(self) -> set[int]:
        """Return the instances that have sent anything."""
        return self._numbers("logs/") | self._numbers("ends/")

    def _numbers(self, place: str) -> set[int]:
        names = [name.removeprefix(place) for name in self._names(place)]
        return {int(name) for name in names if name.isdecimal()}

    def print_log(self) -> None:
        """Print what is new in the log of instance 0."""
        data = self._read("logs/0", Range=f"bytes={self._printed}-") or b""
        self._printed += len(data)
        echo(plain(data.decode(errors="replace")), end="", flush=True)

    def ask_to_stop(self) -> None:
        """Ask the instances to save and stop."""
        self._aws.call("s3", "put_object", Bucket=self._job.bucket, Key=self._job.key("stop"), Body=b"")

    def fetch(self, folder: Path, nodes: int) -> int:
        """Write the results into a folder, and the instances' logs; return the number of results. Raises RunFailed."""
        folder = Path(os.path.abspath(folder))
        logs = {f"logs/{node}": folder / "launch" / f"node-{node}.log" for node in range(nodes)}
        results = {name: folder / name.removeprefix("results/") for name in self._names("results/")}
        for name, path in {**results, **logs}.items():
            if not Path(os.path.normpath(path)).is_relative_to(folder) or path == folder:
                echo(f"note: {name} is not fetched: its name leads out of the run's folder", file=sys.stderr)
                continue
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if name in logs:
                    path.write_bytes(self._read(name) or b"")
                else:
                    self._aws.download(self._job.bucket, self._job.key(name), str(path))
            except (OSError, ValueError) as error:
                raise RunFailed(f"can't write {path}: {getattr(error, 'strerror', None) or error}") from None
        return len(results)

    def delete(self) -> int:
        """Delete all objects of the job; return how many there were. Record and exit codes go last."""
        names = sorted(self._names(""), key=lambda name: name.startswith(("ends/", "job.json")))
        for at in range(0, len(names), _MOST_DELETED):
            keys = [{"Key": self._job.key(name)} for name in names[at : at + _MOST_DELETED]]
            given: dict[str, Any] = {"Bucket": self._job.bucket, "Delete": {"Objects": keys, "Quiet": True}}
            for fault in self._aws.call("s3", "delete_objects", **given).get("Errors", ())[:1]:
                raise RunFailed(f"s3:DeleteObject failed for {fault.get('Key')}: {fault.get('Message')}")
        return len(names)

    def _names(self, prefix: str) -> Iterator[str]:
        where = {"Bucket": self._job.bucket, "Prefix": self._job.key(prefix)}
        listed = self._aws.items("s3", "list_objects_v2", "Contents", **where)
        return (each["Key"].removeprefix(self._job.key("")) for each in listed)

    def _read(self, name: str, **range_: str) -> bytes | None:
        """Return an object; None: it isn't there, or has nothing in this range."""
        where = {"Bucket": self._job.bucket, "Key": self._job.key(name), **range_}
        reply = self._aws.call("s3", "get_object", accept=("NoSuchKey", "404", "InvalidRange"), **where)
        return bytes(reply["Body"]) if reply else None


# --- follow and cancel ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwsState(JobStatus):
    """The state of a job: `ends` are exit codes by instance, `live` the number of instances that have not ended."""

    ends: Mapping[int, int] = field(default_factory=dict)
    listed: Sequence[Mapping[str, Any]] = ()
    live: int = 0


class FollowedJob:
    """A job on EC2, and what its run's folder here remembers of it. Raises ConfigError: there is no such job."""

    def __init__(self, job: LaunchedJob) -> None:
        self._record_file = None if job.folder is None else job.folder / RECORD_FILE
        known = read_record(self._record_file)
        self._code: int | None = known.get("code")
        self.job = job_named(job.number)
        self._aws = AwsCalls(self.job.region, known.get("profile"))
        self._objects = JobObjects(self._aws, self.job)

    def state(self) -> AwsState:
        """Return the job's state, with its instances. Raises ConfigError: nothing of it is left, or was ever there."""
        listed, ends = instances(self._aws, self.job), self._objects.ends()
        name = f"AWS job {self.job.identifier}"
        if not listed and not ends:
            if self._code is not None:
                return AwsState(f"{name}: ended with exit code {self._code}", self._code)
            if self._objects.record() is None:
                raise ConfigError(f"AWS has nothing of job {self.job.identifier}: everything was removed")
            return AwsState(f"{name}: has no instance; {self.job.cancel_line} removes the rest")
        states = Counter(_state(each) for each in listed)
        text = f"{name}: instances {', '.join(f'{number} {state}' for state, number in states.items()) or 'gone'}"
        live = sum(_state(each) != "terminated" for each in listed)
        if live and len(ends) < len(listed):
            return AwsState(text, None, ends, listed, live)
        failed = [code for code in ends.values() if code]
        code = failed[0] if failed else int(len(ends) < len(listed) or not ends)
        code = code if self._code is None else self._code
        why = "" if ends else next((reason for each in listed if (reason := _reason(each))), "")
        return AwsState(f"{text}, exit code {code}{f' ({why})' if why else ''}", code, ends, listed, live)

    def follow(self) -> int:
        """Print the log of instance 0 until the job has ended, fetch the results, and remove everything."""
        record = self._objects.record()
        if record is None:
            if self._code is None:
                raise ConfigError(f"{self.job.place}/job.json is missing; {self.job.cancel_line} ends the job")
            return self._code
        code = self._wait_for_end(record)
        self._remember(code)
        folder = Path(record["run_folder"]) if self._record_file is None else self._record_file.parents[1]
        self._fetch(folder.absolute(), int(record["nodes"]))
        remove(self._aws, self.job)
        return code

    def cancel(self) -> None:
        """Ask the run to save and stop, then remove everything that still exists."""
        try:
            self._stop()
        finally:
            removed = remove(self._aws, self.job)
        if self._code is None:
            self._remember(Stopped.exit_code)
        if not removed:
            echo(f"nothing of AWS job {self.job.identifier} was left", file=sys.stderr)

    def _wait_for_end(self, record: Mapping[str, Any]) -> int:
        began, first_end = time.monotonic(), float("inf")
        silent, boot_s = {*range(int(record["nodes"]))}, 60 * float(record["boot_minutes"])

        def ask() -> AwsState:
            nonlocal first_end
            try:
                state = self.state()
            except ConfigError:  # another command has canceled it
                return AwsState(f"AWS job {self.job.identifier}: removed", Stopped.exit_code)
            silent.difference_update(self._objects.reported())
            now = time.monotonic()
            if state.ends or state.live < len(state.listed):
                first_end = min(first_end, now)
            why = "" if state.listed or state.ends else "no instance is left"
            if now - first_end > _OTHERS_S:
                why = f"{state.live} instances still run, and the others have ended; all are ended"
            elif silent and now - began > boot_s:
                which = ", ".join(map(str, sorted(silent)))
                why = f"instance {which} has reported nothing in {boot_s / 60:g} minutes"
            if state.code is not None or not why:
                return state
            lost = [str(each["InstanceId"]) for node, each in enumerate(state.listed) if node not in state.ends]
            consoles = [f"aws ec2 get-console-output --region {self.job.region} --instance-id {name}" for name in lost]
            text = "\n".join([f"{state.text}\nnote: {why}", *consoles])
            return replace(state, text=text, code=max(state.ends.values(), default=1) or 1)

        return follow_until_end("aws", self.job.identifier, ask, lambda _: self._objects.print_log(), _POLL_S)

    def _fetch(self, folder: Path, nodes: int) -> None:
        """Fetch the results; if that fails, end what is paid by the hour, and keep them. Raises RunFailed."""
        try:
            number = self._objects.fetch(folder, nodes)
        except RunFailed as failure:
            ways = f"lockstep launch aws follow {self.job.identifier} fetches them, and cancel deletes them"
            left = f"the results stay in {self.job.place}, and are paid for: {ways}"
            try:
                remove(self._aws, self.job, keep_objects=True)
            except RunFailed as second:
                left = str(second)
            raise RunFailed(f"{failure}; {left}") from failure
        if number:
            echo(f"{number} files of the run are in {folder}", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        """Ask the run to save and stop, and wait for it, if the run has begun."""
        try:
            state = self.state()
            if state.code is not None or not state.live or 0 not in self._objects.reported():
                return
            self._objects.ask_to_stop()
            echo("waiting for the run to save and stop; Ctrl-C leaves that to its instances", file=sys.stderr)
            rest = f"the run stops by itself; {self.job.cancel_line} removes the rest"
            with undo_on_stop(lambda: write_stderr(rest)):
                wait_until(lambda: self.state().code is not None, _STOPPING_S, _POLL_S)
            self._objects.print_log()
        except RunFailed as failure:
            write_stderr(f"the run could not be asked to save: {failure}")
        except ConfigError:  # nothing is left
            return

    def _remember(self, code: int) -> None:
        self._code = code
        if self._record_file is None:
            return
        try:
            record = {**read_record(self._record_file), "code": code}
            write_files({self._record_file: json.dumps(record, indent=2) + "\n"})
        except RunFailed as error:
            echo(f"note: {self._record_file} isn't updated: {error}", file=sys.stderr)

"""Follows a job on EC2 to its end: its state, its log, its results; then nothing is left that is paid for.

state     instances by their tag, and the exit codes that they have put into the bucket
follow    until the run has ended, or its instances are lost, or one never reports      cancel    save, stop
          log, results --> here; then instances, disks, groups and objects are removed

Every machine with the right credentials can do this: a job's identifier names its region, bucket and tag.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.core.command_lines import command_line
from lockstep.core.errors import ConfigError, Failure, RunFailed, Stopped
from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.core.jobs import JobStatus, LaunchedJob
from lockstep.core.stopping import undo_on_stop, write_stderr
from lockstep.core.terminal import echo
from lockstep.launchers.aws_calls import AwsCalls, wait_until
from lockstep.launchers.aws_instances import LIVE, console_end, instances, reason_of, remove, state_of
from lockstep.launchers.aws_names import job_named
from lockstep.launchers.aws_objects import JobObjects
from lockstep.launchers.aws_start import RECORD_FILE
from lockstep.launchers.tools import Patience, write_files

_POLL_S = 5.0
_PATIENCE_S = 300.0  # without an answer of AWS
_STOPPING_S = 600.0  # for a run to save and stop
_OTHERS_S = 300.0  # between the end of one instance and those of the others
_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class AwsState:
    """The state of a job.

    Attributes:
        text: A line for a person.
        code: The run's exit code; None while it has not ended.
        ends: Exit codes by instance, of those that have reported one.
        listed: The instances that EC2 lists.
    """

    text: str
    code: int | None
    ends: Mapping[str, int]
    listed: Sequence[Mapping[str, Any]]

    @property
    def live(self) -> int:
        """Number of instances that have not ended."""
        return sum(state_of(each) in LIVE for each in self.listed)


class FollowedJob:
    """A job on EC2, and what its run's folder here remembers of it. Raises ConfigError: there is no such job."""

    def __init__(self, job: LaunchedJob) -> None:
        self._record_file = None if job.folder is None else job.folder / RECORD_FILE
        known = self._remembered()
        self._code: int | None = known.get("code")
        self.job = job_named(job.number)
        self._aws = AwsCalls(self.job.region, known.get("profile"))
        self._objects = JobObjects(self._aws, self.job)
        self._cancel_line = command_line("lockstep", "launch", "aws", "cancel", self.job.identifier)

    def status(self) -> JobStatus:
        """Return the job's state. Raises ConfigError: nothing of it is left, or was ever there."""
        state = self.state()
        return JobStatus(state.text, state.code)

    def state(self) -> AwsState:
        """Return the job's state, with its instances. Raises ConfigError: nothing of it is left, or was ever there."""
        listed, ends = instances(self._aws, self.job), self._objects.ends()
        name = f"AWS job {self.job.identifier}"
        if not listed and not ends:
            if self._code is not None:
                return AwsState(f"{name}: ended with exit code {self._code}", self._code, {}, ())
            if self._objects.record() is None:
                raise ConfigError(
                    f"AWS has nothing of job {self.job.identifier}: it has ended, and everything was removed, or it "
                    "was never launched"
                )
            rest = f"{self._cancel_line} removes the rest"
            return AwsState(f"{name}: no instance was started, or all are long gone; {rest}", None, {}, ())
        states = Counter(state_of(each) for each in listed)
        text = f"{name}: instances {', '.join(f'{number} {state}' for state, number in states.items()) or 'gone'}"
        state = AwsState(text, None, ends, listed)
        if state.live and len(ends) < len(listed):
            return state
        failed = [code for _, code in sorted(ends.items()) if code]
        code = failed[0] if failed else int(len(ends) < len(listed) or not ends)
        code = code if self._code is None else self._code
        why = "" if ends else next((reason for each in listed if (reason := reason_of(each))), "")
        return replace(state, text=f"{text}, exit code {code}{f' ({why})' if why else ''}", code=code)

    def follow(self) -> int:
        """Print the log of instance 0 until the job has ended, fetch the results, and remove everything."""
        patience = Patience(self.job.identifier, "aws", _PATIENCE_S)
        record = patience.ask(self._objects.record, _POLL_S)
        if record is None:
            state = self.state()
            if state.code is None:
                raise ConfigError(
                    f"{state.text}; its record is missing in {self.job.place}, so it can't be followed: "
                    f"{self._cancel_line} ends it"
                )
            echo(state.text, file=sys.stderr)
            return state.code
        code = self._wait_for_end(record, patience).code
        assert code is not None
        self._remember(code)
        folder = Path(record["run_folder"]) if self._record_file is None else self._record_file.parents[1]
        self._fetch(folder, int(record["nodes"]))
        remove(self._aws, self.job)
        return code

    def cancel(self) -> None:
        """Ask the run to save and stop, then remove everything. What is gone already is no fault."""
        try:
            self._stop()
        finally:
            removed = remove(self._aws, self.job)
        if self._code is None:
            self._remember(Stopped.exit_code)
        if not removed:
            echo(f"nothing of AWS job {self.job.identifier} was left", file=sys.stderr)

    def _wait_for_end(self, record: Mapping[str, Any], patience: Patience) -> AwsState:
        """Print log and state until the job has ended. Raises RunFailed if AWS doesn't answer for long."""
        began, first_end, shown = time.monotonic(), None, ""
        silent = {*range(int(record["nodes"]))}
        while True:
            with patience:
                state = self._state_of_followed()
                silent -= {node for node in silent if self._objects.has_reported(node)}
                self._objects.print_log()
                if state.text != shown:
                    shown = state.text
                    echo(shown, file=sys.stderr, flush=True)
                if state.ends or state.live < len(state.listed):
                    first_end = first_end or time.monotonic()
                if state.code is None:
                    state = self._given_up(state, silent, began, first_end, 60 * float(record["boot_minutes"]))
                if state.code is not None:
                    self._objects.print_log()  # what came between
                    self._objects.print_rest()
                    self._explain(state)
                    return state
            time.sleep(_POLL_S)

    def _state_of_followed(self) -> AwsState:
        try:
            state = self.state()
            return state if state.listed or state.ends else replace(state, code=state.code or 1)
        except ConfigError:  # another command has canceled it
            return AwsState(f"AWS job {self.job.identifier}: removed", Stopped.exit_code, {}, ())

    def _given_up(
        self, state: AwsState, silent: set[int], began: float, first_end: float | None, boot_s: float
    ) -> AwsState:
        """Return the state with an exit code if there is nothing to wait for any more."""
        now = time.monotonic()
        if first_end is not None and now - first_end > _OTHERS_S:
            echo(f"note: {state.live} instances still run, and the others have ended; all are ended", file=sys.stderr)
        elif silent and now - began > boot_s:
            which = ", ".join(map(str, sorted(silent)))
            echo(f"note: instance {which} has reported nothing in {boot_s / 60:g} minutes", file=sys.stderr)
        else:
            return state
        return replace(state, code=max(state.ends.values(), default=1) or 1)

    def _explain(self, state: AwsState) -> None:
        """Print the log of another instance than 0 that has failed, or the console of one that has none."""
        failed = next((node for node, code in sorted(state.ends.items()) if code), None)
        if failed not in (None, "0") and not state.ends.get("0"):
            lines = self._objects.end_of_log(str(failed)).splitlines()[-_LOG_LINES:]
            echo("\n".join([f"--- the log of instance {failed} ends with:", *lines]), file=sys.stderr, flush=True)
        for node, instance in enumerate(state.listed if state.code else ()):
            if str(node) not in state.ends:
                name = str(instance["InstanceId"])
                text = console_end(self._aws, name) or "(EC2 has none of it)"
                echo(f"--- the console of instance {node}, {name}, ends with:\n{text}", file=sys.stderr, flush=True)
                break

    def _fetch(self, folder: Path, nodes: int) -> None:
        """Fetch the results; if that fails, end what is paid by the hour, and keep them. Raises RunFailed."""
        try:
            number = self._objects.fetch(folder, nodes)
        except RunFailed as failure:
            text = f"{failure}; the results stay in {self.job.place}, and are paid for: lockstep launch aws "
            ways = f"follow {self.job.identifier} fetches them, and cancel deletes them"
            try:
                remove(self._aws, self.job, keep_objects=True)
            except RunFailed as second:
                raise RunFailed(f"{failure}; {second}") from failure
            raise RunFailed(f"{text}{ways}") from failure
        if number:
            echo(f"{number} files of the run are in {folder}", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        """Ask the run to save and stop, and wait for it; a job whose run has not begun needs no waiting."""
        try:
            state = self.state()
            if state.code is not None or not state.live or not self._objects.has_reported(0):
                return
            self._objects.ask_to_stop()
            echo("waiting for the run to save and stop; Ctrl-C leaves that to its instances", file=sys.stderr)
            rest = f"the run stops by itself; {self._cancel_line} removes the rest"
            with undo_on_stop(lambda: write_stderr(rest)):
                wait_until(lambda: self.state().code is not None, _STOPPING_S, _POLL_S)
            self._objects.print_log()
        except ConfigError:  # nothing is left
            return
        except Failure as failure:
            write_stderr(f"the run could not be asked to save: {failure}")

    def _remembered(self) -> Mapping[str, Any]:
        if self._record_file is None:
            return {}
        try:
            return {**json.loads(read_bounded(self._record_file, MAX_JSON_BYTES))}
        except (OSError, ValueError, TypeError):
            raise ConfigError(f"{self._record_file} is missing or damaged; give the job's identifier") from None

    def _remember(self, code: int) -> None:
        """Write the exit code into the run's folder here."""
        self._code = code
        if self._record_file is None:
            return
        try:
            text = json.dumps({**self._remembered(), "code": code}, indent=2) + "\n"
            write_files({self._record_file: text})
        except (ConfigError, RunFailed) as error:
            echo(f"note: {self._record_file} isn't updated: {error}", file=sys.stderr)

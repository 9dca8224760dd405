"""Makes the planned calls that start a job; whatever happens, nothing is left half-way.

a call fails         what was created is removed, then the call's sentence
a signal             the same, inside the signal handler, with new clients
an answer is lost    the call is repeated: names and client tokens make that harmless; what it has created is looked for
no capacity          spot: the same on demand; on demand: some more tries
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any

from lockstep.core.command_lines import command_line
from lockstep.core.errors import Failure, RunFailed
from lockstep.core.jobs import LaunchPlan
from lockstep.core.stopping import undo_on_stop, write_stderr
from lockstep.core.terminal import echo
from lockstep.launchers.aws_bundle import project_archive, project_files, wheel
from lockstep.launchers.aws_calls import CAPACITY, AwsCalls, CallFailed, from_command, wait_until
from lockstep.launchers.aws_instances import instances, reason_of, remove, state_of
from lockstep.launchers.aws_names import AwsJob, job_named
from lockstep.launchers.aws_plan import ARCHIVE, GROUP, RECORD, SCRIPT, TOKEN, WHEEL, filled

RECORD_FILE, SCRIPT_FILE = "aws.json", "user-data.sh"

_CAPACITY_PAUSES_S = (15.0, 30.0)
_RUNNING_S = 600.0
_POLL_S = 3.0
_DONE_BEFORE = {
    "create_security_group": ["InvalidGroup.Duplicate"],
    "authorize_security_group_ingress": ["InvalidPermission.Duplicate"],
    "authorize_security_group_egress": ["InvalidPermission.Duplicate"],
    "create_placement_group": ["InvalidPlacementGroup.Duplicate"],
}
"""Operation -> codes of faults that mean that an earlier attempt has worked: all names are the job's own."""


def start(plan: LaunchPlan, record: Mapping[str, Any]) -> None:
    """Make the calls, and wait until the instances run. Raises Failure, and then nothing is left."""
    job = job_named(record["job"])
    echo(f"starting AWS job {job.identifier}", file=sys.stderr, flush=True)  # by which it can be canceled
    starting = _Starting(plan, record, job)
    with undo_on_stop(starting.undo_in_handler):
        try:
            starting.make_calls()
            starting.wait_for_instances()
        except BaseException as error:
            starting.undo(error)
            raise


class _Starting:
    """A job that is being started."""

    def __init__(self, plan: LaunchPlan, record: Mapping[str, Any], job: AwsJob) -> None:
        self._plan = plan
        self._record = record
        self._job = job
        self._aws = AwsCalls(job.region, record["profile"])
        self._has_asked = self._asked_for_instances = False
        self._is_stopped = False

    def make_calls(self) -> None:
        values = self._values()
        calls = [from_command(words) for words in self._plan.commands]
        for number, (service, operation, given) in enumerate(calls):
            if operation == "run_instances":
                self._run_instances([parameters for _, _, parameters in calls[number:]], values)
                return
            parameters = filled(given, values)
            self._has_asked |= operation != "head_bucket"
            reply = self._aws.call(service, operation, accept=_DONE_BEFORE.get(operation, ()), **parameters)
            if operation == "create_security_group":
                values[GROUP] = reply.get("GroupId") or self._existing_group()

    def wait_for_instances(self) -> None:
        wanted = int(self._record["nodes"])

        def are_there() -> bool:
            listed = instances(self._aws, self._job)
            ended = [each for each in listed if state_of(each) in ("shutting-down", "terminated")]
            if ended:
                why = reason_of(ended[0]) or "AWS gives no reason"
                raise RunFailed(f"an instance has ended while it was started: {why}")
            return sum(state_of(each) == "running" for each in listed) >= wanted

        if not wait_until(are_there, _RUNNING_S, _POLL_S):
            raise RunFailed(
                f"the {wanted} instances are not running after {_RUNNING_S:g} s; try again, or another --type"
            )

    def undo(self, error: BaseException) -> None:
        """Remove what was created; if that fails, too, the sentence has both reasons."""
        try:
            self._remove()
        except Failure as second:
            raise RunFailed(f"{error or type(error).__name__}; {second}") from error

    def undo_in_handler(self) -> None:
        """Remove what was created, inside a signal handler; a further signal ends the command at once."""
        if self._is_stopped:
            way = command_line("lockstep", "launch", "aws", "cancel", self._job.identifier)
            write_stderr(f"what was created may be left: {way}")
            return
        self._is_stopped = True
        write_stderr("removing what was created")
        try:
            self._remove()
        except Failure as failure:
            write_stderr(str(failure))

    def _remove(self) -> None:
        """Remove what was created, with new clients: a signal may have interrupted a call of the others."""
        if self._has_asked:
            aws = AwsCalls(self._job.region, self._record["profile"])
            remove(aws, self._job, settle=self._asked_for_instances)

    def _run_instances(self, alternatives: list[dict[str, Any]], values: Mapping[str, Any]) -> None:
        """Start the instances: spot ones first if they are asked for, then on demand, with some more tries."""
        self._asked_for_instances = True
        tries = [*alternatives, *[alternatives[-1]] * len(_CAPACITY_PAUSES_S)]
        pauses = [0.0] * len(alternatives) + [*_CAPACITY_PAUSES_S]
        for number, (given, pause) in enumerate(zip(tries, pauses, strict=True)):
            time.sleep(pause)
            try:
                self._aws.call("ec2", "run_instances", **filled(given, values))
                return
            except CallFailed as failure:
                if not CAPACITY.search(failure.code) or number == len(tries) - 1:
                    raise
                following = "on demand" if number < len(alternatives) - 1 else f"in {pauses[number + 1]:g} s"
                echo(f"note: {failure}; trying {following}", file=sys.stderr, flush=True)

    def _existing_group(self) -> str:
        """Return the id of the group that an attempt without an answer has created."""
        named = [{"Name": "group-name", "Values": [self._job.group]}]
        groups = self._aws.call("ec2", "describe_security_groups", Filters=named)["SecurityGroups"]
        if not groups:
            raise RunFailed(f"ec2:CreateSecurityGroup: {self._job.group} exists and isn't listed; try again")
        return str(groups[0]["GroupId"])

    def _values(self) -> dict[str, Any]:
        """Return the values of the placeholders in the planned calls."""
        words = json.dumps([list(words) for words in self._plan.commands])
        texts = {path.name: text for path, text in self._plan.files.items()}
        known = {key: self._record[key] for key in ("job", "nodes", "run_folder", "boot_minutes")}
        values: dict[str, Any] = {SCRIPT: texts[SCRIPT_FILE], RECORD: json.dumps(known).encode()}
        if TOKEN in words:
            values[TOKEN] = secrets.token_hex(32).encode()
        if WHEEL in words:
            values[WHEEL] = wheel()
        if ARCHIVE in words:
            source = str(self._record["source"])
            values[ARCHIVE] = project_archive(source, project_files(source)[0])
        return values

"""Finds what a job has on EC2 by its tag, and removes it, in the order of what it costs.

instances -> (they are gone) -> spot requests, volumes, interfaces -> security group, placement group -> objects
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.core.command_lines import command_line
from lockstep.core.errors import Failure, RunFailed
from lockstep.core.terminal import echo, plain_line
from lockstep.launchers.aws_calls import AwsCalls, CallFailed, wait_until
from lockstep.launchers.aws_names import TAG, AwsJob
from lockstep.launchers.aws_objects import JobObjects

LIVE = ("pending", "running", "stopping", "stopped", "shutting-down")
_PAID = ("pending", "running", "stopping", "stopped")
_GONE_S = 900.0  # large instances take minutes to shut down
_POLL_S = 5.0
_SETTLE_S = (0.0, 2.0, 4.0)  # an instance whose start was not confirmed may be listed seconds later
_CONSOLE_LINES = 20


def instances(aws: AwsCalls, job: AwsJob, states: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """Return the instances of a job, by their place in the call that started them."""
    wanted = [{"Name": f"tag:{TAG}", "Values": [job.name]}]
    if states:
        wanted.append({"Name": "instance-state-name", "Values": [*states]})
    reservations = aws.pages("ec2", "describe_instances", "Reservations", Filters=wanted)
    listed = [instance for reservation in reservations for instance in reservation["Instances"]]
    return sorted(listed, key=lambda instance: int(instance.get("AmiLaunchIndex", 0)))


def state_of(instance: Mapping[str, Any]) -> str:
    """Return the state of an instance, such as `running`."""
    return str(instance["State"]["Name"])


def reason_of(instance: Mapping[str, Any]) -> str:
    """Return why an instance has ended, in AWS's words; empty: it is not known."""
    reason = instance.get("StateReason", {}).get("Message") or instance.get("StateTransitionReason") or ""
    return plain_line(str(reason))


def console_end(aws: AwsCalls, instance: str) -> str:
    """Return the last lines that an instance has printed on its console; empty: they aren't known."""
    try:
        output = str(aws.call("ec2", "get_console_output", InstanceId=instance).get("Output") or "")
    except Failure:
        return ""
    return "\n".join(plain_line(line) for line in output.splitlines()[-_CONSOLE_LINES:])


def remove(aws: AwsCalls, job: AwsJob, *, settle: bool = False, keep_objects: bool = False) -> list[str]:
    """Remove all that was created for a job, and return what was removed. What is gone already is no fault.

    Args:
        settle: Instances may have been started a moment ago, by a call whose answer was lost.
        keep_objects: Leave the objects in the bucket.

    Raises:
        RunFailed: Something is left, and may cost money.
    """
    removed: list[str] = []
    failures: list[str] = []

    def attempt(step: Callable[[], Sequence[str]]) -> None:
        try:
            removed.extend(step())
        except Failure as failure:
            failures.append(str(failure))

    attempt(lambda: _terminate(aws, job, settle=settle))
    attempt(lambda: _cancel_spot_requests(aws, job))
    if not failures:  # else instances may run, and be in the groups
        attempt(lambda: _delete_groups(aws, job))
        attempt(lambda: _delete_left(aws, job))
    if not failures and not keep_objects:  # they have the exit codes, for the next attempt
        attempt(lambda: ["objects"] if JobObjects(aws, job).delete() else [])
    if failures:
        raise RunFailed(
            f"something of job {job.identifier} may be left, and be paid for ({failures[0]}); try again: "
            f"{command_line('lockstep', 'launch', 'aws', 'cancel', job.identifier)}"
        )
    return removed


def _terminate(aws: AwsCalls, job: AwsJob, *, settle: bool) -> list[str]:
    ended: dict[str, None] = {}
    for pause in _SETTLE_S if settle else _SETTLE_S[:1]:
        time.sleep(pause)
        live = [str(each["InstanceId"]) for each in instances(aws, job, _PAID)]
        if live:
            aws.call("ec2", "terminate_instances", InstanceIds=live, accept=["InvalidInstanceID.NotFound"])
            ended |= dict.fromkeys(live)
        elif ended:
            break
    return [*ended]


def _cancel_spot_requests(aws: AwsCalls, job: AwsJob) -> list[str]:
    tagged = [{"Name": f"tag:{TAG}", "Values": [job.name]}, {"Name": "state", "Values": ["open", "active"]}]
    requests = [
        str(each["SpotInstanceRequestId"])
        for each in aws.pages("ec2", "describe_spot_instance_requests", "SpotInstanceRequests", Filters=tagged)
    ]
    if requests:
        aws.call("ec2", "cancel_spot_instance_requests", SpotInstanceRequestIds=requests)
    return requests


def _delete_groups(aws: AwsCalls, job: AwsJob) -> list[str]:
    """Delete the job's security group and placement group, once no instance uses them."""
    named = [{"Name": "group-name", "Values": [job.group]}, {"Name": f"tag:{TAG}", "Values": [job.name]}]
    groups = [
        str(each["GroupId"]) for each in aws.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=named)
    ]
    accept = ["InvalidPlacementGroup.Unknown"]
    placed = aws.call("ec2", "describe_placement_groups", GroupNames=[job.group], accept=accept)
    placements = [str(each["GroupName"]) for each in placed.get("PlacementGroups", ()) if each["State"] != "deleted"]
    if not groups and not placements:
        return []
    if instances(aws, job, LIVE):
        echo("waiting for the instances to end, to delete the groups that they are in", file=sys.stderr, flush=True)
        wait_until(lambda: not instances(aws, job, LIVE), _GONE_S, _POLL_S)
    for group in groups:
        _delete_when_free(aws, "delete_security_group", "InvalidGroup.NotFound", GroupId=group)
    for name in placements:
        _delete_when_free(aws, "delete_placement_group", "InvalidPlacementGroup.Unknown", GroupName=name)
    return [*groups, *placements]


def _delete_when_free(aws: AwsCalls, operation: str, absent: str, **parameters: str) -> None:
    """Delete a group; interfaces of an instance that has just ended may still be in it for some seconds."""
    failure: CallFailed | None = None

    def is_deleted() -> bool:
        nonlocal failure
        try:
            aws.call("ec2", operation, accept=[absent], **parameters)
        except CallFailed as error:
            failure = error
            if error.code not in ("DependencyViolation", "InvalidGroup.InUse", "InvalidPlacementGroup.InUse"):
                raise
            return False
        return True

    if not wait_until(is_deleted, _GONE_S / 5, _POLL_S) and failure is not None:
        raise failure


def _delete_left(aws: AwsCalls, job: AwsJob) -> list[str]:
    """Delete volumes and interfaces that belong to no instance any more."""
    tagged = {"Name": f"tag:{TAG}", "Values": [job.name]}
    free = [tagged, {"Name": "status", "Values": ["available"]}]
    volumes = [str(each["VolumeId"]) for each in aws.pages("ec2", "describe_volumes", "Volumes", Filters=free)]
    listed = aws.pages("ec2", "describe_network_interfaces", "NetworkInterfaces", Filters=free)
    interfaces = [str(each["NetworkInterfaceId"]) for each in listed]
    for volume in volumes:
        aws.call("ec2", "delete_volume", VolumeId=volume, accept=["InvalidVolume.NotFound"])
    for interface in interfaces:
        absent = ["InvalidNetworkInterfaceID.NotFound"]
        aws.call("ec2", "delete_network_interface", NetworkInterfaceId=interface, accept=absent)
    return [*volumes, *interfaces]

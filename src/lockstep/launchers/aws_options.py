"""The options of a job on AWS, and refusals before AWS is asked; AWS refuses the rest itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from lockstep.core.errors import Problem, refuse
from lockstep.core.jobs import JobCommand
from lockstep.launchers.tools import variable_problems
from lockstep.stores.addresses import checked_address, is_address
from lockstep.strategies.section import Positive, Section

DEFAULT_AMI = "ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"

_BUCKET = re.compile(r"(s3://)?(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<prefix>(/[A-Za-z0-9._=-]+)*)/?")
_SECRET = "which all processes of an instance could read; keep it in Secrets Manager, and read it in a line of --setup"


class AwsOptions(Section):
    """Options of a job on AWS."""

    nodes: Positive = 1
    """Number of instances; on each of them one launcher starts the ranks."""
    type: str | None = None
    """Instance type, such as g6.12xlarge; required."""
    bucket: str | None = None
    """S3 bucket, BUCKET or BUCKET/PREFIX, for the project, the logs, the results and the checkpoints; required."""
    instance_profile: str | None = None
    """Instance profile with a role that may use the bucket; required."""
    ami: str = DEFAULT_AMI
    """Machine image, ami-... or ssm:PARAMETER; by default AWS's Deep Learning Base AMI for GPUs, with Ubuntu 24.04."""
    region: str | None = None
    """Region; by default the profile's, or AWS_DEFAULT_REGION."""
    profile: str | None = None
    """Profile of the AWS configuration, for credentials here; by default AWS_PROFILE, or the usual chain."""
    key_name: str | None = None
    """Key pair for ssh to the instances, which your --security-group has to allow."""
    subnet: str | None = None
    """Subnet; by default the region's default one."""
    security_group: tuple[str, ...] = ()
    """A security group of the instances; may be repeated; by default the network's, which is open to itself."""
    placement_group: str | None = None
    """Placement group to start the instances in."""
    spot: bool = False
    """Ask for spot instances."""
    efa: bool = True
    """Use Elastic Fabric Adapters where the instance type has them and there are several nodes."""
    volume_size: Positive | None = None
    """Size of the root volume in GiB; by default the image's."""
    tag: tuple[str, ...] = ()
    """A tag of all that is created, KEY=VALUE; may be repeated."""
    max_hours: Annotated[float, Field(gt=0)] = 24.0
    """Hours until an instance terminates itself, whatever happens."""
    boot_minutes: Annotated[float, Field(gt=0)] = 20.0
    """Minutes until `--follow` gives up on an instance that has not reported anything."""
    source: str = "."
    """Folder that is copied to the instances, where the command runs: what git knows of it; `none` copies nothing."""
    setup: tuple[str, ...] = ()
    """A line of bash that runs on each instance before Lockstep is installed; may be repeated."""
    program: str | None = None
    """Command that starts Lockstep on an instance; by default this Lockstep is installed there with pip."""
    env: tuple[str, ...] = ()
    """An environment variable of the run, such as NCCL_DEBUG=INFO; may be repeated."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29500
    """Port of the first instance where the launchers meet."""


def check(command: JobCommand, options: AwsOptions) -> None:
    """Raise ConfigError if the options aren't valid, or don't fit together or with the command."""
    refuse([*_malformed(options), *_kept_nowhere(command), *variable_problems(options.env, _SECRET)])


def _malformed(options: AwsOptions) -> Iterator[Problem]:
    required = {
        "type": "an instance type, such as g6.12xlarge",
        "bucket": "a bucket for the logs, results and checkpoints",
        "instance_profile": "an instance profile with a role that may use the bucket (the page AWS has its policy)",
    }
    for name, what in required.items():
        if getattr(options, name) is None:
            yield Problem(f"--{name.replace('_', '-')}", "", f"is missing; give {what}")
    if options.bucket is not None and not _BUCKET.fullmatch(options.bucket):
        yield Problem("--bucket", "", f"{options.bucket!r} is not BUCKET or BUCKET/PREFIX, such as my-bucket/lockstep")
    for text in options.tag:
        if not re.fullmatch(r"(?!aws:)[^=\n]+=[^\n]*", text):
            yield Problem("--tag", "", f"{text!r} is not KEY=VALUE, such as team=vision")
    for flag, lines in (("--setup", options.setup), ("--env", options.env)):
        yield from (Problem(flag, "", f"{line!r} is not one line") for line in lines if "\n" in line)
    if options.source != "none" and not Path(options.source).is_dir():
        yield Problem("--source", "", f"{options.source} is not a folder; give one, or none")


def _kept_nowhere(command: JobCommand) -> Iterator[Problem]:
    place = command.checkpoint_folder
    if command.starts_run and command.in_folder and place is not None and not is_address(place):
        message = f"{place} would be lost with the instances; leave it out, or give s3://BUCKET/PREFIX"
        yield Problem("", "checkpoint.folder", message)
    if not re.fullmatch(r"(?!/)(?!(.*/)?\.\.(/|$))[A-Za-z0-9._=/-]*", command.run_folder.as_posix()):
        message = f"{command.run_folder} has to be a path below this folder, of letters, digits and . _ = -"
        yield Problem("", "run.folder", message)


def bucket_parts(options: AwsOptions) -> tuple[str, str]:
    """Return the bucket, and the prefix without slashes at its ends; empty: none is given."""
    match = _BUCKET.fullmatch(options.bucket or "")
    return (match["bucket"], match["prefix"].strip("/")) if match is not None else ("", "")


def words_there(command: JobCommand, options: AwsOptions) -> list[str]:
    """Return the command line on an instance: a run without a place for checkpoints in its config gets one."""
    if not (command.starts_run and command.in_folder) or command.checkpoint_folder is not None:
        return [*command.words]
    return [*command.words, f"checkpoint.folder={checkpoints(command, options)}"]


def checkpoints(command: JobCommand, options: AwsOptions) -> str:
    """Return the address of a run's checkpoints: the same for all jobs of the run."""
    if command.checkpoint_folder is not None:
        return checked_address(command.checkpoint_folder)
    bucket, prefix = bucket_parts(options)
    return f"s3://{'/'.join(filter(None, (bucket, prefix, 'checkpoints', command.run_folder.as_posix())))}"

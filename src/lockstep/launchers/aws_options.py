"""The options of a job on AWS, and what is refused before anything is made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import Field

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.jobs import JobCommand, SweepOptions
from lockstep.core.secrets import names_a_secret
from lockstep.stores.addresses import checked_address, is_address
from lockstep.strategies.section import Positive, Section

DEFAULT_AMI = "ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
CHECKPOINTS = "checkpoints"

_AMI = re.compile(r"ami-[0-9a-f]{8,17}|ssm:/[A-Za-z0-9._/-]+")
_BUCKET = re.compile(r"(s3://)?(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<prefix>(/[A-Za-z0-9._=-]+)*)/?")
_CIDR = re.compile(r"\d{1,3}(\.\d{1,3}){3}/\d{1,2}|[0-9a-fA-F:]+/\d{1,3}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+=,.@_-]*")
_PAIR = re.compile(r"(?!aws:)[^=\n]{1,128}=[^\n]{0,256}")
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([^\n]*)")
_LINE = re.compile(r"[^\n]+")


class AwsOptions(Section, SweepOptions):
    """Options of a job on AWS."""

    nodes: Positive = 1
    """Number of instances; on each of them one launcher starts the ranks."""
    type: str | None = None
    """Instance type, such as g6.12xlarge; required."""
    bucket: str | None = None
    """S3 bucket, BUCKET or BUCKET/PREFIX, for the project, the logs, the results and the checkpoints; required."""
    instance_profile: str | None = None
    """Instance profile whose role lets an instance use the bucket; required."""
    ami: str = DEFAULT_AMI
    """Machine image, ami-... or ssm:PARAMETER; by default AWS's Deep Learning Base AMI for GPUs, with Ubuntu 24.04."""
    region: str | None = None
    """Region; by default that of the profile, or AWS_DEFAULT_REGION."""
    profile: str | None = None
    """Profile of the AWS configuration, whose credentials are used here; by default AWS_PROFILE, or the usual chain."""
    key_name: str | None = None
    """Key pair for ssh to the instances; see --ssh-from."""
    ssh_from: str | None = None
    """Addresses from which ssh is allowed, such as 198.51.100.7/32; by default none."""
    subnet: str | None = None
    """Subnet; by default the region's default one."""
    security_group: tuple[str, ...] = ()
    """A security group of the instances; may be repeated; by default one is created that is open only to itself."""
    spot: bool = False
    """Ask for spot instances first, and for on-demand ones if there are none."""
    spot_only: bool = False
    """Ask for spot instances alone."""
    placement: bool = False
    """Start the instances close together, in a placement group of their own."""
    efa: bool = True
    """Use Elastic Fabric Adapters where the instance type has them and there are several nodes."""
    volume_size: Positive | None = None
    """Size of the root volume in GiB; by default the image's."""
    tag: tuple[str, ...] = ()
    """A tag of all that is created, KEY=VALUE; may be repeated."""
    max_hours: Annotated[float, Field(gt=0)] = 24.0
    """Hours after which an instance terminates itself, whatever happens."""
    boot_minutes: Annotated[float, Field(gt=0)] = 20.0
    """Minutes after which `--follow` gives up on an instance that has not reported anything."""
    source: str = "."
    """Folder that is copied to the instances, where the command runs: what git knows of it; `none` copies nothing."""
    setup: tuple[str, ...] = ()
    """A line of bash that runs on each instance before Lockstep is installed; may be repeated."""
    program: str | None = None
    """Command that starts Lockstep on an instance; by default this Lockstep is installed there with pip."""
    image: str | None = None
    """Container image that the command runs in, with docker; Lockstep has to be installed in it."""
    env: tuple[str, ...] = ()
    """An environment variable of the run, such as NCCL_DEBUG=INFO; may be repeated."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29500
    """Port of the first instance at which the launchers meet."""


def check(command: JobCommand, options: AwsOptions) -> None:
    """Raise ConfigError if the options aren't valid, or don't fit together or with the command."""
    problems = [*_missing(options), *_malformed(options), *_misfitting(command, options)]
    if problems:
        raise ConfigError(problems)


def _missing(options: AwsOptions) -> Iterator[Problem]:
    if options.type is None:
        yield Problem("--type", "", "is missing; give an instance type, such as g6.12xlarge")
    if options.bucket is None:
        yield Problem("--bucket", "", "is missing; give a bucket for the logs, results and checkpoints")
    if options.instance_profile is None:
        what = "an instance profile whose role may use the bucket (the page AWS has its policy)"
        yield Problem("--instance-profile", "", f"is missing; give {what}")


def _malformed(options: AwsOptions) -> Iterator[Problem]:
    yield from _unlike(_AMI, "--ami", [options.ami], "an image; write ami-0123456789abcdef0 or ssm:/PARAMETER")
    yield from _unlike(_BUCKET, "--bucket", [options.bucket], "BUCKET or BUCKET/PREFIX, such as my-bucket/lockstep")
    yield from _unlike(re.compile(r"[a-z0-9-]+\.[a-z0-9-]+"), "--type", [options.type], "a type, such as g6.12xlarge")
    yield from _unlike(re.compile(r"[a-z]+(-[a-z]+)+-\d"), "--region", [options.region], "a region, such as us-east-1")
    yield from _unlike(_CIDR, "--ssh-from", [options.ssh_from], "a range of addresses, such as 198.51.100.7/32")
    yield from _unlike(
        re.compile(r"subnet-[0-9a-f]+"), "--subnet", [options.subnet], "a subnet, such as subnet-0a1b2c3d"
    )
    yield from _unlike(re.compile(r"sg-[0-9a-f]+"), "--security-group", options.security_group, "a group, sg-0a1b2c3d")
    yield from _unlike(_NAME, "--instance-profile", [options.instance_profile], "the name of an instance profile")
    yield from _unlike(_PAIR, "--tag", options.tag, "KEY=VALUE, such as team=vision")
    yield from _unlike(_VARIABLE, "--env", options.env, "NAME=VALUE, such as NCCL_DEBUG=INFO")
    yield from _unlike(_LINE, "--setup", options.setup, "one line")


def _unlike(pattern: re.Pattern[str], flag: str, values: Sequence[str | None], valid: str) -> list[Problem]:
    return [
        Problem(flag, "", f"{value!r} is not {valid}")
        for value in values
        if value is not None and not pattern.fullmatch(value)
    ]


def _misfitting(command: JobCommand, options: AwsOptions) -> Iterator[Problem]:
    if options.nodes > 1 and not command.nodes:
        message = f"{options.nodes}, but `lockstep {command.words[0]}` runs on one instance; leave it out"
        yield Problem("--nodes", "", message)
    if command.sweep:
        yield Problem("--sweep", "", "needs a queue, which EC2 has not; launch the runs one after the other")
    if options.ssh_from is not None and options.key_name is None:
        yield Problem("--ssh-from", "", "needs a key pair, without which no login is possible; give --key-name, too")
    if options.ssh_from is not None and options.security_group:
        yield Problem("--ssh-from", "", "is for the group that is created; allow ssh in --security-group instead")
    if options.image is not None and options.program is not None:
        yield Problem("--program", "", "is not for containers, in which the command is `lockstep`; leave it out")
    if options.spot_only and options.spot:
        yield Problem("--spot", "", "falls back to on-demand instances, and --spot-only doesn't; give one of them")
    for name in environment(options):
        if names_a_secret(name):
            message = (
                f"{name} looks like a secret, and every process of an instance can read its user data; keep it in "
            )
            yield Problem("--env", "", f"{message}Secrets Manager, and read it in a line of --setup")
    if options.source != "none" and not Path(options.source).is_dir():
        yield Problem("--source", "", f"{options.source} is not a folder; give one, or none")
    place = command.checkpoint_folder
    if command.starts_run and command.in_folder and place is not None and not is_address(place):
        message = f"{place} would be lost with the instances; leave it out, or give s3://BUCKET/PREFIX"
        yield Problem("", "checkpoint.folder", message)
    if command.run_folder.is_absolute() or ".." in command.run_folder.parts:
        message = f"{command.run_folder} is not in the folder in which the command runs; give a path below it"
        yield Problem("", "run.folder", message)


def bucket_parts(options: AwsOptions) -> tuple[str, str]:
    """Return the bucket, and the prefix without slashes at its ends; empty: none is given."""
    match = _BUCKET.fullmatch(options.bucket or "")
    return (match["bucket"], match["prefix"].strip("/")) if match is not None else ("", "")


def environment(options: AwsOptions) -> dict[str, str]:
    """Return the environment variables that the user gives."""
    return {match[1]: match[2] for text in options.env if (match := _VARIABLE.fullmatch(text)) is not None}


def tags(options: AwsOptions) -> dict[str, str]:
    """Return the tags that the user gives."""
    return {key: value for key, _, value in (text.partition("=") for text in options.tag)}


def words_there(command: JobCommand, options: AwsOptions) -> list[str]:
    """Return the command line on an instance: a run whose config names no place for checkpoints gets one."""
    if options.bucket is None or not _gets_checkpoints(command):
        return [*command.words]
    return [*command.words, f"checkpoint.folder={checkpoints(command, options)}"]


def checkpoints(command: JobCommand, options: AwsOptions) -> str:
    """Return the address of a run's checkpoints: the same for all jobs of the run."""
    place = command.checkpoint_folder
    if place is not None and is_address(place):
        return checked_address(place)
    bucket, prefix = bucket_parts(options)
    run = PurePosixPath(command.run_folder).as_posix()
    name = re.sub(r"[^A-Za-z0-9._=/-]|\.\.", "_", run).strip("/")
    if name != run:  # another run may become the same name
        name = f"{name}-{hashlib.sha256(run.encode(errors='surrogateescape')).hexdigest()[:8]}"
    return f"s3://{'/'.join(filter(None, (bucket, prefix, CHECKPOINTS, name)))}"


def _gets_checkpoints(command: JobCommand) -> bool:
    return command.starts_run and command.in_folder and command.checkpoint_folder is None

"""Runs a command on instances of EC2 that are started for it, and terminated after it.

The plan has all calls with their parameters; a value that is too long or too secret to print has a NAME in its place.
`aws_job` makes the calls, and follows and cancels the job.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, Failure, Problem, refuse
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.launchers.aws_calls import AwsCalls, as_command, from_command, known_region
from lockstep.launchers.aws_job import RECORD_FILE, TAG, AwsJob, FollowedJob, start
from lockstep.launchers.aws_options import AwsOptions, bucket_parts, check, checkpoints, words_there
from lockstep.launchers.aws_user_data import PROJECT, project_archive, project_files, user_data, wheel, wheel_name
from lockstep.launchers.tools import job_name, pairs, write_files

_SCRIPT_FILE = "user-data.sh"
_SCRIPT, _TOKEN, _ARCHIVE, _WHEEL, _RECORD = "USER_DATA", "TOKEN", "PROJECT", "WHEEL", "RECORD"
"""Placeholders in planned calls."""
_PRICE = {"operatingSystem": "Linux", "preInstalledSw": "NA", "tenancy": "Shared", "capacitystatus": "Used"}

Call = tuple[str, str, dict[str, Any]]
"""Service, operation, parameters."""


class AwsLauncher:
    """The launcher `aws`."""

    options = AwsOptions

    def plan(self, command: JobCommand, options: AwsOptions) -> LaunchPlan:
        """Return the script of an instance and the calls; asks AWS for what it can, and changes nothing."""
        check(command, options)
        region = known_region(options.region, options.profile)
        files, notes = project_files(options.source)
        _refuse_missing(command, options, {path.as_posix() for path in files})
        job = AwsJob(region, *bucket_parts(options), job_name(command.name, secrets.token_hex(3)))
        aws = AwsCalls(region, options.profile, attempts=2)
        facts = facts_of(aws, options)
        record = {
            **options.model_dump(include={"profile", "nodes", "boot_minutes", "source"}),
            "job": job.identifier,
            "run_folder": command.run_folder.as_posix(),
        }
        notes += _notes(command, options)
        notes.append(cost_note(hourly_price(aws, str(options.type)), options, region))
        calls = [*_bucket_calls(options, job, has_project=bool(files))]
        calls.append(("ec2", "run_instances", _instances(command, options, job, facts)))
        has_efa, words = _uses_efa(options, facts), words_there(command, options)
        if options.efa and options.nodes > 1 and facts.adapters and not has_efa:
            need = "which needs a --security-group that allows all traffic to and from itself"
            notes.append(f"{options.type} has Elastic Fabric Adapters, and the run uses none, {need}")
        script = user_data(command, options, job, words, has_project=bool(files), uses_efa=has_efa)
        texts = {_SCRIPT_FILE: script, RECORD_FILE: json.dumps(record, indent=2) + "\n"}
        planned = {command.folder / name: text for name, text in texts.items()}
        commands = [as_command(service, operation, region, given) for service, operation, given in calls]
        return LaunchPlan(planned, tuple(commands), tuple(notes), number=job.identifier)

    def submit(self, plan: LaunchPlan) -> str:
        """Make the calls, and wait until the instances run; if anything fails or a signal comes, remove all of it."""
        texts = {path.name: text for path, text in plan.files.items()}
        record = json.loads(texts[RECORD_FILE])
        write_files(plan.files)
        values: dict[str, Any] = {_SCRIPT: texts[_SCRIPT_FILE], _RECORD: texts[RECORD_FILE]}
        values[_TOKEN] = secrets.token_hex(32)
        bodies = {body for call in map(from_command, plan.commands) if (body := call[2].get("Body"))}
        values |= {_WHEEL: wheel()} if _WHEEL in bodies else {}
        values |= {_ARCHIVE: project_archive(record["source"])} if _ARCHIVE in bodies else {}
        start(plan, record, values)
        return str(record["job"])

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return the job's state."""
        return FollowedJob(job).state()

    def follow(self, job: LaunchedJob) -> int:
        """Print the job's log until it has ended; fetch the results and remove everything."""
        return FollowedJob(job).follow()

    def cancel(self, job: LaunchedJob) -> None:
        """Have the run saved and stopped, and remove everything."""
        FollowedJob(job).cancel()


AWS = AwsLauncher()


def _notes(command: JobCommand, options: AwsOptions) -> list[str]:
    end = f"the instances terminate themselves, after {options.max_hours:g} hours at the latest"
    notes = [f"{end}; `follow` or `cancel` removes what is left of the job"]
    if command.starts_run and command.in_folder:
        notes.append(f"checkpoints: {checkpoints(command, options)}; they stay there")
    return notes


def _refuse_missing(command: JobCommand, options: AwsOptions, copied: set[str]) -> None:
    message = "isn't copied to the instances, which get what git knows below --source; add it, or use a bucket"
    source = Path(options.source).resolve()
    there = {source / name for name in copied}
    there |= {folder for path in there for folder in path.parents}
    named = [word for word in command.words if word in command.paths]
    refuse(Problem(text, "", message) for text in named if Path(text).expanduser().resolve() not in there)


# --- what AWS knows -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwsFacts:
    """Id of the image, name and GiB of its root volume; Elastic Fabric Adapters of the type, one a network card."""

    image: str
    root_device: str
    root_size: int | None = None
    adapters: int = 0


def facts_of(aws: AwsCalls, options: AwsOptions) -> AwsFacts:
    """Ask AWS about the instance type and the image. Raises ConfigError, CallFailed."""
    [kind] = aws.call("ec2", "describe_instance_types", InstanceTypes=[options.type])["InstanceTypes"]
    name = options.ami.removeprefix("ssm:")
    image = aws.call("ssm", "get_parameter", Name=name)["Parameter"]["Value"] if name != options.ami else options.ami
    images = aws.call("ec2", "describe_images", ImageIds=[image])["Images"]
    if not images:
        raise ConfigError(f"--ami {image} is not an image in {aws.region}; give another --ami")
    info = kind.get("NetworkInfo", {})
    adapters = int(info.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)) if info.get("EfaSupported") else 0
    cards = int(info.get("MaximumNetworkCards", 1))
    root = str(images[0].get("RootDeviceName") or "/dev/sda1")
    disks = {each.get("DeviceName"): each.get("Ebs", {}) for each in images[0].get("BlockDeviceMappings", ())}
    return AwsFacts(image, root, disks.get(root, {}).get("VolumeSize"), min(adapters, cards))


def hourly_price(aws: AwsCalls, instance_type: str) -> float | None:
    """Return the dollars an hour of an instance on demand, from AWS's price list; None if it can't be read."""
    wanted = {**_PRICE, "instanceType": instance_type, "regionCode": aws.region}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    try:
        prices = AwsCalls("us-east-1", aws.profile, attempts=1)  # the list is served in few regions
        listed = prices.call("pricing", "get_products", ServiceCode="AmazonEC2", Filters=filters)["PriceList"]
        terms = [term for text in listed for term in json.loads(text)["terms"]["OnDemand"].values()]
        rates = [rate for term in terms for rate in term["priceDimensions"].values() if rate["unit"] == "Hrs"]
        return next((price for rate in rates if (price := float(rate["pricePerUnit"]["USD"])) > 0), None)
    except (Failure, KeyError, ValueError, TypeError, AttributeError):
        return None


def cost_note(price: float | None, options: AwsOptions, region: str) -> str:
    """Return a sentence about what the instances cost; `price` is one instance's, in dollars an hour on demand."""
    if price is None:
        return f"the cost of {options.type} wasn't read from AWS's price list (pricing:GetProducts)"
    less = "; spot instances cost less, and how much changes by the hour" if options.spot else ""
    total = f"{options.nodes} x {price:.4g} = {options.nodes * price:,.2f} dollars an hour on demand"
    return f"cost: {total} (AWS's price list for {region}), without disks and traffic{less}"


# --- calls ----------------------------------------------------------------------------------------------------------


def _uses_efa(options: AwsOptions, facts: AwsFacts) -> bool:
    return options.efa and options.nodes > 1 and facts.adapters > 0 and bool(options.security_group)


def _bucket_calls(options: AwsOptions, job: AwsJob, *, has_project: bool) -> Iterator[Call]:
    objects = {"job.json": _RECORD}
    if options.nodes > 1:
        objects["token"] = _TOKEN
    if options.program is None:
        objects[wheel_name()] = _WHEEL
    if has_project:
        objects[PROJECT] = _ARCHIVE
    yield "s3", "head_bucket", {"Bucket": job.bucket}
    for name, body in objects.items():
        yield "s3", "put_object", {"Bucket": job.bucket, "Key": job.key(name), "Body": body}


def _instances(command: JobCommand, options: AwsOptions, job: AwsJob, facts: AwsFacts) -> dict[str, Any]:
    size = options.volume_size or facts.root_size
    volume = {"DeleteOnTermination": True, **({"VolumeSize": size} if size else {})}
    resources = ["instance", "volume", "network-interface"] + ["spot-instances-request"] * options.spot
    labels = {"Name": f"lockstep {command.name}", **pairs(options.tag), TAG: job.name}
    tags = [{"Key": key, "Value": value} for key, value in labels.items()]
    given: dict[str, Any] = {
        "ImageId": facts.image,
        "InstanceType": options.type,
        "MinCount": options.nodes,
        "MaxCount": options.nodes,
        "ClientToken": job.name,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "IamInstanceProfile": {"Name": options.instance_profile},
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "BlockDeviceMappings": [{"DeviceName": facts.root_device, "Ebs": volume}],
        "TagSpecifications": [{"ResourceType": resource, "Tags": tags} for resource in resources],
        "UserData": _SCRIPT,
    }
    if options.key_name is not None:
        given["KeyName"] = options.key_name
    if options.placement_group is not None:
        given["Placement"] = {"GroupName": options.placement_group}
    if options.spot:
        once = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        given["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": once}
    groups = [*options.security_group]
    subnet = {} if options.subnet is None else {"SubnetId": options.subnet}
    if not _uses_efa(options, facts):
        return {**given, **({"SecurityGroupIds": groups} if groups else {}), **subnet}
    common = {"Groups": groups, "DeleteOnTermination": True, **subnet}
    adapters = [  # the first has an address, the others are only for EFA
        {"NetworkCardIndex": number, "DeviceIndex": min(number, 1), "InterfaceType": "efa-only" if number else "efa"}
        for number in range(facts.adapters)
    ]
    return {**given, "NetworkInterfaces": [{**adapter, **common} for adapter in adapters]}

"""The calls that start a job on EC2, with all their parameters, as --dry-run prints them.

bucket      project, Lockstep, record and token of the job
network     a security group that is open only to itself, a placement group
instances   all by one call, which gives all or none

A value that an earlier call returns, or that is too long or too secret to print, has a NAME in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.core.errors import ConfigError
from lockstep.core.jobs import JobCommand
from lockstep.launchers.aws_bundle import wheel_name
from lockstep.launchers.aws_calls import AwsCalls, as_command
from lockstep.launchers.aws_names import TAG, AwsJob
from lockstep.launchers.aws_options import AwsOptions, tags
from lockstep.launchers.aws_user_data import PROJECT

GROUP, SCRIPT, TOKEN, ARCHIVE, WHEEL, RECORD = "SECURITY_GROUP", "USER_DATA", "TOKEN", "PROJECT", "WHEEL", "RECORD"
"""Placeholders in planned calls."""
_FILLED = ("Body", "GroupId", "Groups", "SecurityGroupIds", "UserData")
IMAGE, ROOT, NETWORK = "IMAGE", "ROOT_DEVICE", "VPC"
"""Placeholders of what AWS was not asked for."""


@dataclass(frozen=True, slots=True)
class AwsFacts:
    """Facts about the image, the instance type and the subnet, from AWS.

    Attributes:
        image: The image's id.
        root_device: Name of the image's root device.
        root_size: Size of the image's root volume in GiB; None: it is not known.
        network: The subnet's network; None: the default one.
        efa_interfaces: Elastic Fabric Adapters of an instance.
        cards: Network cards of an instance.
    """

    image: str = IMAGE
    root_device: str = ROOT
    root_size: int | None = None
    network: str | None = None
    efa_interfaces: int = 0
    cards: int = 1


def facts_of(aws: AwsCalls, options: AwsOptions) -> AwsFacts:
    """Ask AWS about the instance type, the image and the subnet. Raises ConfigError, CallFailed."""
    types = aws.call("ec2", "describe_instance_types", InstanceTypes=[options.type])["InstanceTypes"]
    if not types:
        raise ConfigError(f"--type {options.type} is not there in {aws.region}; give another one, or another --region")
    kind = types[0]
    name = options.ami.removeprefix("ssm:")
    image = aws.call("ssm", "get_parameter", Name=name)["Parameter"]["Value"] if name != options.ami else options.ami
    images = aws.call("ec2", "describe_images", ImageIds=[image])["Images"]
    if not images:
        raise ConfigError(f"--ami {image} is not there in {aws.region}; give another one, or another --region")
    built_for, runs = str(images[0].get("Architecture")), kind["ProcessorInfo"]["SupportedArchitectures"]
    if built_for not in runs:
        raise ConfigError(
            f"--ami {image} is for {built_for}, and {options.type} runs {' and '.join(runs)}; give another --ami"
        )
    network = None
    if options.subnet is not None:
        subnets = aws.call("ec2", "describe_subnets", SubnetIds=[options.subnet])["Subnets"]
        network = str(subnets[0]["VpcId"])
    root = str(images[0].get("RootDeviceName") or "/dev/sda1")
    of_image: dict[str, Any] = {"image": str(image), "root_device": root, "root_size": _size_of(images[0], root)}
    return replace(_facts_of_type(kind), network=network, **of_image)


def _facts_of_type(kind: Mapping[str, Any]) -> AwsFacts:
    info = kind.get("NetworkInfo", {})
    return AwsFacts(
        efa_interfaces=int(info.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)) if info.get("EfaSupported") else 0,
        cards=int(info.get("MaximumNetworkCards", 1)),
    )


def _size_of(image: Mapping[str, Any], device: str) -> int | None:
    sizes = [
        mapping["Ebs"].get("VolumeSize")
        for mapping in image.get("BlockDeviceMappings", ())
        if mapping.get("DeviceName") == device and "Ebs" in mapping
    ]
    return int(sizes[0]) if sizes and sizes[0] else None


def uses_efa(options: AwsOptions, facts: AwsFacts) -> bool:
    """Return whether the instances get Elastic Fabric Adapters."""
    return options.efa and options.nodes > 1 and facts.efa_interfaces > 0


def launch_calls(
    command: JobCommand, options: AwsOptions, job: AwsJob, facts: AwsFacts, *, has_project: bool
) -> tuple[tuple[str, ...], ...]:
    """Return the calls in their order."""
    calls = [*_bucket_calls(options, job, has_project=has_project), *_network_calls(options, job, facts)]
    kinds = {"spot": options.spot or options.spot_only, "on-demand": not options.spot_only}
    calls += [
        ("ec2", "run_instances", _instances(command, options, job, facts, kind))
        for kind, is_asked in kinds.items()
        if is_asked
    ]
    return tuple(as_command(service, operation, job.region, given) for service, operation, given in calls)


def _bucket_calls(options: AwsOptions, job: AwsJob, *, has_project: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    objects = {"job.json": RECORD}
    if options.nodes > 1:
        objects["token"] = TOKEN
    if options.image is None and options.program is None:
        objects[wheel_name()] = WHEEL
    if has_project:
        objects[PROJECT] = ARCHIVE
    yield "s3", "head_bucket", {"Bucket": job.bucket}
    for name, body in objects.items():
        yield "s3", "put_object", {"Bucket": job.bucket, "Key": job.key(name), "Body": body}


def _network_calls(options: AwsOptions, job: AwsJob, facts: AwsFacts) -> Iterator[tuple[str, str, dict[str, Any]]]:
    if not options.security_group:
        about = "Instances of one job of Lockstep: open only to each other"
        group: dict[str, Any] = {"GroupName": job.group, "Description": about}
        if facts.network is not None:
            group["VpcId"] = facts.network
        yield "ec2", "create_security_group", {**group, "TagSpecifications": [_tagged("security-group", options, job)]}
        itself: dict[str, Any] = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": GROUP}]}
        allowed = [itself]
        if options.ssh_from is not None:
            family, key = ("Ipv6Ranges", "CidrIpv6") if ":" in options.ssh_from else ("IpRanges", "CidrIp")
            allowed.append({"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, family: [{key: options.ssh_from}]})
        yield "ec2", "authorize_security_group_ingress", {"GroupId": GROUP, "IpPermissions": allowed}
        if uses_efa(options, facts):  # which counts as traffic to the group, and not to an address
            yield "ec2", "authorize_security_group_egress", {"GroupId": GROUP, "IpPermissions": [itself]}
    if options.placement:
        tagged = [_tagged("placement-group", options, job)]
        yield (
            "ec2",
            "create_placement_group",
            {"GroupName": job.group, "Strategy": "cluster", "TagSpecifications": tagged},
        )


def _instances(command: JobCommand, options: AwsOptions, job: AwsJob, facts: AwsFacts, kind: str) -> dict[str, Any]:
    volume: dict[str, Any] = {"DeleteOnTermination": True}
    if (size := options.volume_size or facts.root_size) is not None:
        volume["VolumeSize"] = size
    resources = ["instance", "volume", "network-interface"] + ["spot-instances-request"] * (kind == "spot")
    given: dict[str, Any] = {
        "ImageId": facts.image,
        "InstanceType": options.type,
        "MinCount": options.nodes,
        "MaxCount": options.nodes,
        "ClientToken": f"{job.name}-{kind}",
        "InstanceInitiatedShutdownBehavior": "terminate",
        "IamInstanceProfile": {"Name": options.instance_profile},
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "BlockDeviceMappings": [{"DeviceName": facts.root_device, "Ebs": volume}],
        "TagSpecifications": [_tagged(resource, options, job, command) for resource in resources],
        "UserData": SCRIPT,
    }
    if options.key_name is not None:
        given["KeyName"] = options.key_name
    if options.placement:
        given["Placement"] = {"GroupName": job.group}
    if kind == "spot":
        once = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        given["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": once}
    groups = [*options.security_group] or [GROUP]
    if uses_efa(options, facts):
        return {**given, "NetworkInterfaces": list(_efa(options, facts, groups))}
    subnet = {} if options.subnet is None else {"SubnetId": options.subnet}
    return {**given, "SecurityGroupIds": groups, **subnet}


def _efa(options: AwsOptions, facts: AwsFacts, groups: list[str]) -> Iterator[dict[str, Any]]:
    """Yield an adapter for each network card: the first with an address, the others for EFA alone."""
    for number in range(min(facts.efa_interfaces, facts.cards)):
        adapter: dict[str, Any] = {
            "NetworkCardIndex": number,
            "DeviceIndex": min(number, 1),
            "InterfaceType": "efa-only" if number else "efa",
            "Groups": groups,
            "DeleteOnTermination": True,
        }
        yield adapter if options.subnet is None else {**adapter, "SubnetId": options.subnet}


def _tagged(resource: str, options: AwsOptions, job: AwsJob, command: JobCommand | None = None) -> dict[str, Any]:
    name = {} if command is None else {"Name": f"lockstep {command.name}"}
    labels: Mapping[str, str] = {**name, **tags(options), TAG: job.name}
    return {"ResourceType": resource, "Tags": [{"Key": key, "Value": value} for key, value in labels.items()]}


def filled(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a call with the values of placeholders."""

    def fill(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: fill(name, each) for name, each in value.items()}
        if isinstance(value, list):
            return [fill(key, each) for each in value]
        return values.get(value, value) if key in _FILLED and isinstance(value, str) else value

    return {key: fill(key, value) for key, value in given.items()}

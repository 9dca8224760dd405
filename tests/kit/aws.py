"""A cloud for tests: moto's server over HTTP, and faults between boto3 and it.

with cloud() as aws:                        moto keeps an instance's own interface when it is terminated, which EC2
                                            doesn't: that is mended in its server
    aws.left()                              all that exists: instances that aren't terminated, groups, volumes, objects
    with faults(Fault(3, "lost")) as calls: the fourth request takes effect, and its answer is lost; calls: all so far
"""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest

from kit.s3 import environment

BUCKET = "my-bucket"
_IMAGE = {"Name": "/aws/ami"}


@dataclass
class Cloud:
    """The server, and clients of it."""

    endpoint: str
    image: str
    subnet: str
    _clients: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        nowhere = "http://127.0.0.1:1"
        return {**environment(self.endpoint), "AWS_ENDPOINT_URL_PRICING": nowhere, "AWS_PROFILE": ""}

    def client(self, service: str) -> Any:
        if service not in self._clients:
            keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
            import boto3

            self._clients[service] = boto3.session.Session().client(service, endpoint_url=self.endpoint, **keys)
        return self._clients[service]

    def left(self) -> list[str]:
        """What exists and was made by a launch, the checkpoints apart."""
        ec2 = self.client("ec2")
        found = [
            f"{each['InstanceId']} {each['State']['Name']}"
            for reservation in ec2.describe_instances()["Reservations"]
            for each in reservation["Instances"]
            if each["State"]["Name"] != "terminated"
        ]
        found += [each["VolumeId"] for each in ec2.describe_volumes()["Volumes"]]
        found += [each["NetworkInterfaceId"] for each in ec2.describe_network_interfaces()["NetworkInterfaces"]]
        groups = ec2.describe_security_groups()["SecurityGroups"]
        found += [each["GroupName"] for each in groups if each["GroupName"] != "default"]
        found += [
            each["SpotInstanceRequestId"]
            for each in ec2.describe_spot_instance_requests()["SpotInstanceRequests"]
            if each["State"] in ("open", "active")
        ]
        return found + [name for name in self.objects() if "/checkpoints/" not in name]

    def objects(self) -> list[str]:
        listed = self.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", ())
        return [each["Key"] for each in listed]

    def put(self, key: str, text: str) -> None:
        self.client("s3").put_object(Bucket=BUCKET, Key=key, Body=text.encode())

    def clean(self) -> None:
        """Delete what a test has left."""
        ec2, s3 = self.client("ec2"), self.client("s3")
        live = [{"Name": "instance-state-name", "Values": ["pending", "running", "stopped"]}]
        for reservation in ec2.describe_instances(Filters=live)["Reservations"]:
            ec2.terminate_instances(InstanceIds=[each["InstanceId"] for each in reservation["Instances"]])
        for group in ec2.describe_security_groups()["SecurityGroups"]:
            if group["GroupName"] != "default":
                ec2.delete_security_group(GroupId=group["GroupId"])
        for name in self.objects():
            s3.delete_object(Bucket=BUCKET, Key=name)


def ends(moto: Cloud, job: str, *codes: int) -> None:
    """Put into the bucket what the script of the instances does, once they have these exit codes."""
    place = job.split("/", 2)[2]
    moto.put(f"{place}/logs/0", "step 1\nstep 2\n")
    moto.put(f"{place}/logs/1", "a note of node 1\n")
    moto.put(f"{place}/results/summary.json", "{}")
    moto.put(f"{place}/results/logs/rank-0.log", "hello")
    for node, code in enumerate(codes):
        moto.put(f"{place}/ends/{node}", f"{code}\n")


def hurried(moto: Cloud, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """An empty cloud that this process uses, in a folder, without pauses between its questions."""
    from botocore.retries.standard import ExponentialBackoff

    from lockstep.launchers import aws_job

    monkeypatch.chdir(folder)
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda backoff, context: 0.0)
    monkeypatch.setattr(aws_job, "_SETTLE_S", (0.0, 0.0))
    monkeypatch.setattr(aws_job, "_POLL_S", 0.0)
    moto.clean()
    return moto


@contextmanager
def cloud(address: str = "127.0.0.1", port: int = 0) -> Iterator[Cloud]:
    from botocore.loaders import JSONFileLoader
    from moto.ec2.models.instances import Instance
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    prepare = Instance.prep_nics
    server = ThreadedMotoServer(ip_address=address, port=port, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    read = functools.cache(partial(JSONFileLoader.load_file, JSONFileLoader()))  # of 10 MB, for each new client
    try:
        with (
            mock.patch.object(JSONFileLoader, "load_file", lambda loader, path: read(path)),
            mock.patch.object(Instance, "prep_nics", partialmethod(_with_own_interface, prepare)),
        ):
            yield _filled(Cloud(f"http://127.0.0.1:{port}", "", ""))
    finally:
        server.stop()


def _filled(made: Cloud) -> Cloud:
    made.client("s3").create_bucket(Bucket=BUCKET)
    with suppress(made.client("iam").exceptions.EntityAlreadyExistsException):  # moto's state is that of the process
        made.client("iam").create_instance_profile(InstanceProfileName="train")
    ec2 = made.client("ec2")
    images = ec2.describe_images(Filters=[{"Name": "architecture", "Values": ["x86_64"]}])["Images"]
    made.image = images[0]["ImageId"]
    made.subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    made.client("ssm").put_parameter(Name="/my/ami", Value=made.image, Type="String", Overwrite=True)
    return made


def _with_own_interface(instance: Any, prepare: Callable[..., None], interfaces: list[Any], **options: Any) -> None:
    prepare(instance, interfaces, **options)
    if not interfaces:
        for interface in instance.nics.values():
            interface.delete_on_termination = True


# --- faults ---------------------------------------------------------------------------------------------------------

Kind = Literal[
    "refused", "throttled", "no capacity", "expired", "skewed", "cut off",
    "lost", "never answered", "stopped before", "stopped after",
]  # fmt: skip

_CODES = {
    "refused": ("UnauthorizedOperation", 403),
    "throttled": ("RequestLimitExceeded", 503),
    "no capacity": ("InsufficientInstanceCapacity", 500),
    "expired": ("ExpiredToken", 400),
    "skewed": ("RequestTimeTooSkewed", 403),
}


@dataclass
class Fault:
    """What happens to a request.

    Attributes:
        at: Its number, from 0 on.
        pattern: Instead of the number, a pattern of its name.
        kind: `refused`: a permission is missing; `cut off`: no connection; `lost`: it takes effect, and its answer is
            lost; `never answered`: the same, and its repetitions aren't answered either; `stopped`: a SIGINT arrives
            before or after it.
        times: How many requests of a pattern are answered so.
    """

    at: int
    kind: Kind
    pattern: str = ""
    times: int = 1
    repeated: str = field(default="", init=False)


@contextmanager
def faults(*planned: Fault) -> Iterator[list[str]]:
    """Make faults; yield the names of all requests so far, such as `ec2:RunInstances` and `PUT token`."""
    from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
    from botocore.httpsession import URLLib3Session

    calls: list[str] = []
    send: Callable[..., Any] = URLLib3Session.send

    def sent(session: Any, request: Any) -> Any:
        name, number = _name_of(request), len(calls)
        calls.append(name)
        for fault in planned:
            if fault.kind == "never answered" and fault.repeated == name:
                raise ReadTimeoutError(endpoint_url=request.url)
            is_due = re.search(fault.pattern, name) is not None if fault.pattern else number == fault.at
            if not is_due or not fault.times:
                continue
            if fault.kind == "cut off":
                fault.times -= 1
                raise EndpointConnectionError(endpoint_url=request.url)
            if fault.kind in _CODES:
                fault.times -= 1
                return _refusal(fault.kind, name)
            if fault.kind == "stopped before":
                os.kill(os.getpid(), signal.SIGINT)
            answer = send(session, request)
            if fault.kind == "stopped after":
                os.kill(os.getpid(), signal.SIGINT)
            if fault.kind in ("lost", "never answered"):
                fault.repeated = name
                raise ReadTimeoutError(endpoint_url=request.url)
            return answer
        return send(session, request)

    with mock.patch.object(URLLib3Session, "send", sent):
        yield calls


def _name_of(request: Any) -> str:
    body = request.body
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    action = re.search(r"(?:^|&)Action=(\w+)", text)
    if action is not None:
        return f"ec2:{action[1]}"
    target = dict(request.headers.items()).get("X-Amz-Target", b"")
    if target:
        return target.decode() if isinstance(target, bytes) else str(target)
    path = urllib.parse.urlsplit(request.url)
    return f"{request.method} {path.path.rpartition('/')[2]}{'?' + path.query if path.query else ''}"


def _refusal(kind: str, name: str) -> Any:
    """An answer with an error, in the format of the service that a request is for."""
    from botocore.awsrequest import AWSResponse

    code, status = _CODES[kind]
    error = f"<Error><Code>{code}</Code><Message>planned</Message></Error>"
    if name.startswith("ec2:"):
        error = f"<Response><Errors>{error}</Errors><RequestID>r</RequestID></Response>"
    elif re.match(r"[A-Za-z]+_\d+\.", name):
        error = f'{{"__type": "{code}", "message": "planned"}}'
    text = error.encode()

    class Raw:
        def stream(self, **options: Any) -> Iterator[bytes]:
            yield text

    return AWSResponse("http://x", status, {"content-length": str(len(text))}, Raw())

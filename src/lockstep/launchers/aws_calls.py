"""Calls of AWS by boto3, with its chain of credentials; an error is a RunFailed of one sentence."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.terminal import plain_line

_ATTEMPTS = 6


class CallFailed(RunFailed):
    """A call of AWS failed; `code` is AWS's, empty if there was no answer."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class AwsCalls:
    """Clients of AWS's services in a region. boto3 repeats calls that fail for a moment, up to `attempts` times."""

    def __init__(self, region: str, profile: str | None = None, attempts: int = _ATTEMPTS) -> None:
        self.region = region
        self.profile = profile
        self._attempts = attempts
        self._session = _session(profile, region)
        self._clients: dict[str, Any] = {}

    def call(self, service: str, operation: str, /, *, accept: Sequence[str] = (), **parameters: Any) -> Any:
        """Make a call; return the answer, with the bytes of `Body`, or {} if the error's code is in `accept`."""
        try:
            with self._sentences(service, operation):
                reply = getattr(self.client(service), operation)(**parameters)
                return {**reply, "Body": reply["Body"].read()} if "Body" in reply else reply
        except CallFailed as failure:
            if failure.code in accept:
                return {}
            raise

    def items(self, service: str, operation: str, expression: str, **parameters: Any) -> Iterator[Any]:
        """Yield the items of all pages of an answer, by an expression such as `Reservations[].Instances[]`."""
        with self._sentences(service, operation):
            pages = self.client(service).get_paginator(operation).paginate(**parameters)
            yield from filter(None, pages.search(expression))

    def download(self, bucket: str, key: str, path: str) -> None:
        """Write an object of S3 to a file. Raises CallFailed, OSError."""
        with self._sentences("s3", "get_object"):
            self.client("s3").download_file(bucket, key, path)

    def client(self, service: str) -> Any:
        """Return boto3's client of a service."""
        if service not in self._clients:
            from botocore.config import Config

            retries: Any = {"mode": "standard", "total_max_attempts": self._attempts}
            config = Config(connect_timeout=10, read_timeout=60, retries=retries, tcp_keepalive=True)
            self._clients[service] = self._session.client(service, config=config)
        return self._clients[service]

    @contextmanager
    def _sentences(self, service: str, operation: str) -> Iterator[None]:
        """Turn errors of boto3 into CallFailed; later calls use new clients, which read credentials again."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError, Boto3Error) as error:
            self._session, self._clients = _session(self.profile, self.region), {}
            name = f"{service}:{''.join(part.capitalize() for part in operation.split('_'))}"
            raise _failed(error, name, self.region) from error


def known_region(region: str | None, profile: str | None) -> str:
    """Return the region that is given, or the one of the AWS configuration. Raises ConfigError."""
    known = _session(profile, region).region_name
    if not known:
        raise ConfigError("no AWS region is given; set AWS_DEFAULT_REGION, such as us-east-1, or --region of a launch")
    return str(known)


def _session(profile: str | None, region: str | None) -> Any:
    try:
        import boto3
        from botocore.exceptions import ProfileNotFound
    except ImportError:
        raise ConfigError(f"AWS needs the package boto3: {pip_install('aws')}") from None
    try:
        return boto3.session.Session(profile_name=profile, region_name=region)
    except ProfileNotFound:
        name = profile or "that AWS_PROFILE names"
        raise ConfigError(f"the AWS configuration has no profile {name}; see `aws configure list-profiles`") from None


def _failed(error: Exception, name: str, region: str) -> CallFailed:
    fault = (getattr(error, "response", None) or {}).get("Error", {})
    text, _, _ = (fault.get("Message") or str(error)).partition("Encoded authorization failure message:")
    why, code = plain_line(" ".join(text.split()))[:300].rstrip(". "), str(fault.get("Code", ""))
    return CallFailed(f"{name} failed in {region}: {why}{f' ({code})' if code else ''}", code)


def wait_until(answer: Callable[[], Any], seconds: float, pause: float) -> Any:
    """Return the first answer that is true, or the last one."""
    end = time.monotonic() + seconds
    while not (last := answer()) and time.monotonic() < end:
        time.sleep(pause)
    return last


def as_command(service: str, operation: str, region: str, parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command line of the program `aws` for the same call."""
    name, option = "s3api" if service == "s3" else service, "--cli-input-json"
    return ("aws", name, operation.replace("_", "-"), "--region", region, option, json.dumps(parameters))


def from_command(words: Sequence[str]) -> tuple[str, str, dict[str, Any]]:
    """Return service, operation and parameters of `as_command`."""
    service = "s3" if words[1] == "s3api" else words[1]
    return service, words[2].replace("-", "_"), json.loads(words[-1])

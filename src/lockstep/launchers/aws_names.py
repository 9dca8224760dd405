"""Names of a job on EC2, all of which follow from its identifier: REGION/BUCKET[/PREFIX]/NAME.

us-east-1/my-bucket/lockstep/digits-3f9a1c
    s3://my-bucket/lockstep/digits-3f9a1c/...   its objects
    lockstep-job=digits-3f9a1c                  tag of all that was created for it
    lockstep-digits-3f9a1c                      its security group and its placement group
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.core.errors import ConfigError

TAG = "lockstep-job"

_IDENTIFIER = re.compile(
    r"(?P<region>[a-z]+(-[a-z]+)+-\d)/(?P<bucket>[a-z0-9][a-z0-9.-]+)/((?P<prefix>[^\s]+)/)?(?P<name>[a-z][a-z0-9-]*)"
)


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
    def group(self) -> str:
        """Name of its security group, and of its placement group."""
        return f"lockstep-{self.name}"

    def key(self, name: str) -> str:
        """Return the key of an object."""
        return f"{self.prefix}/{self.name}/{name}" if self.prefix else f"{self.name}/{name}"


def job_named(identifier: str) -> AwsJob:
    """Return the job that an identifier names. Raises ConfigError."""
    match = _IDENTIFIER.fullmatch(identifier)
    if match is None:
        raise ConfigError(
            f"{identifier!r} is neither REGION/BUCKET/NAME of a job, as `lockstep launch aws` printed it, nor the "
            "folder of a run that AWS was given"
        )
    return AwsJob(match["region"], match["bucket"], match["prefix"] or "", match["name"])

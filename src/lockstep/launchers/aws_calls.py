"""Calls of AWS by boto3: repeated while a fault is transient; any other fault is one sentence with its remedy.

AwsCalls(region, profile).call("ec2", "run_instances", ...)      the answer, or RunFailed
as_command("ec2", "run_instances", {...})                        the same for `aws`, as --dry-run prints it

Credentials come from boto3's chain (variables, profile, single sign-on, role of the machine) and stay in its clients.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.terminal import plain_line

ATTEMPTS = 6
_FIRST_PAUSE_S = 0.5
_TRANSIENT = re.compile(
    r"Throttl|RequestLimitExceeded|TooManyRequests|SlowDown|InternalError|InternalFailure|ServerInternal|"
    r"ServiceUnavailable|Unavailable$|RequestTimeout|IdempotentInstanceTerminated.*Pending|BadDigest|OperationAborted"
)
_EXPIRED = re.compile(r"Expired|TokenRefreshRequired")  # RequestExpired of EC2, too
_SKEWED = re.compile(r"RequestTimeTooSkewed|RequestInTheFuture|Signature (expired|not yet current)")
_REFUSED = re.compile(r"UnauthorizedOperation|AccessDenied|Forbidden|^403$|NotAuthorized")
_INVALID = re.compile(
    r"AuthFailure|InvalidClientTokenId|InvalidAccessKeyId|SignatureDoesNotMatch|UnrecognizedClient|IncompleteSignature"
)
_LOGIN = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give --profile"
CAPACITY = re.compile(
    r"Insufficient\w*Capacity|SpotMaxPriceTooLow|MaxSpotInstanceCountExceeded|InsufficientHostCapacity"
)
"""Codes of faults because of which another kind of instance, or a later moment, may still be successful."""
_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"MaxSpotInstanceCount", "ask for more spot vCPUs at Service Quotas, or leave out --spot-only"),
    (r"InsufficientInstanceCapacity|InsufficientHost", "try again later, another --subnet (zone), --region or --type"),
    (r"SpotMaxPriceTooLow|Insufficient", "try again later, or leave out --spot-only"),
    (r"VcpuLimitExceeded|InstanceLimitExceeded", "ask for more vCPUs at Service Quotas, or give fewer --nodes"),
    (r"Unsupported", "`aws ec2 describe-instance-type-offerings` lists what there is; give another --type"),
    (r"OptInRequired", "accept the image's terms at the AWS Marketplace, or give another --ami"),
    (r"InvalidAMI|ParameterNotFound", "give --ami an image of this region"),
    (r"InvalidInstanceType", "`aws ec2 describe-instance-types` lists the types of this region"),
    (r"InvalidKeyPair", "`aws ec2 describe-key-pairs` lists the key pairs of this region"),
    (r"InvalidSubnet", "`aws ec2 describe-subnets` lists the subnets of this region"),
    (r"InvalidGroup|InvalidSecurityGroup", "`aws ec2 describe-security-groups` lists the groups of this region"),
    (r"VPCIdNotSpecified|MissingInput", "the region has no default network; give --subnet"),
    (r"NoSuchBucket|^404$", "correct --bucket, or create it: aws s3 mb s3://BUCKET"),
    (r"PermanentRedirect|^301$|AuthorizationHeaderMalformed", "the bucket is in another region; give that --region"),
    (r"SecurityGroupLimitExceeded|RulesPerSecurityGroup", "delete groups that nothing uses, or give --security-group"),
)  # fmt: skip


def new_session(profile: str | None = None, region: str | None = None) -> Any:
    """Return a boto3 session with the credentials and settings that variables and files have now.

    Sessions share the descriptions of Amazon's services: each would read 5 MB of JSON again.

    Args:
        profile: Profile of the AWS configuration; None: boto3's own choice.
        region: Region of its clients; None: boto3's own choice.

    Raises:
        ImportError: boto3 isn't installed.
        botocore.exceptions.ProfileNotFound: The AWS configuration doesn't have the profile.
    """
    import boto3
    import botocore.session

    core = botocore.session.Session(profile=profile)
    descriptions = _descriptions(core.get_config_variable("data_path"))
    core.register_component("data_loader", descriptions)
    session = boto3.session.Session(botocore_session=core, region_name=region)
    descriptions.search_paths[:] = dict.fromkeys(descriptions.search_paths)  # each session adds boto3's own
    return session


@cache
def _descriptions(folders: str | None) -> Any:
    """Return what reads the descriptions, and keeps them; `folders`: with more of them, as AWS_DATA_PATH has them."""
    from botocore.loaders import create_loader

    return create_loader(folders)


class CallFailed(RunFailed):
    """A call of AWS failed, and repeating it does not help.

    Attributes:
        code: AWS's code of the fault; empty if there was no answer.
        may_have_worked: Whether the call may have taken effect: its answer was lost.
    """

    def __init__(self, message: str, code: str = "", *, may_have_worked: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.may_have_worked = may_have_worked


class NoAccess(CallFailed):
    """Credentials or a way to AWS are missing: a plan can be made without them."""


class AwsCalls:
    """Clients of AWS's services in a region.

    Args:
        region: Its name.
        profile: Profile of the AWS configuration; None: boto3's own choice.
        attempts: How often a call is made while its fault is transient.
    """

    def __init__(self, region: str, profile: str | None = None, attempts: int = ATTEMPTS) -> None:
        self.region = region
        self.profile = profile
        self._attempts = attempts
        self._session = _session(profile, region)
        self._clients: dict[str, Any] = {}

    def call(self, service: str, operation: str, /, *, accept: Sequence[str] = (), **parameters: Any) -> Any:
        """Make a call.

        Args:
            accept: Codes of faults that mean that there is nothing left to do; the answer is then empty.

        Returns:
            The answer; an object of S3, whole, in `Body`.

        Raises:
            CallFailed: It failed, in one sentence.
        """
        pauses = _pauses(self._attempts)
        while True:
            try:
                reply = getattr(self._client(service), operation)(**parameters)
                return {**reply, "Body": reply["Body"].read()} if "Body" in reply else reply
            except Exception as error:
                code = _code(error)
                if any(re.fullmatch(each, code) for each in accept):
                    return {}
                pause = next(pauses, None) if is_transient(error) else None
                if pause is None:
                    if _EXPIRED.search(code):  # the next call looks for new ones
                        self._session, self._clients = _session(self.profile, self.region), {}
                    raise _failed(error, service, operation, self.region) from error
                time.sleep(pause)

    def pages(self, service: str, operation: str, key: str, **parameters: Any) -> Iterator[Any]:
        """Yield the items of all pages of an answer."""
        token: dict[str, str] = {}
        names = ("ContinuationToken", "NextContinuationToken") if service == "s3" else ("NextToken", "NextToken")
        while True:
            page = self.call(service, operation, **parameters, **token)
            yield from page.get(key, ())
            if not page.get(names[1]):
                return
            token = {names[0]: page[names[1]]}

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            from botocore.config import Config

            config = Config(connect_timeout=10, read_timeout=60, retries={"total_max_attempts": 1}, tcp_keepalive=True)
            self._clients[service] = self._session.client(service, config=config)
        return self._clients[service]


def known_region(region: str | None, profile: str | None) -> str:
    """Return the region that is given, or the one of the AWS configuration. Raises ConfigError."""
    known = region or _session(profile, None).region_name
    if not known:
        raise ConfigError("no AWS region is given; give --region, such as us-east-1, or set AWS_DEFAULT_REGION")
    return str(known)


def _session(profile: str | None, region: str | None) -> Any:
    try:
        import boto3  # noqa: F401
        from botocore import exceptions
    except ImportError:
        raise ConfigError(f"launch aws needs the package boto3: {pip_install('aws')}") from None
    try:
        return new_session(profile, region)
    except exceptions.ProfileNotFound:
        name = f" {profile}" if profile else " that AWS_PROFILE names"
        raise ConfigError(
            f"the AWS configuration has no profile{name}; `aws configure list-profiles` lists them"
        ) from None


# --- faults ---------------------------------------------------------------------------------------------------------


def is_transient(error: Exception) -> bool:
    """Return whether the same call may succeed a moment later."""
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    if isinstance(error, exceptions.ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return _TRANSIENT.search(_code(error)) is not None or (status >= 500 and not CAPACITY.search(_code(error)))
    if isinstance(error, exceptions.SSLError | exceptions.ProxyConnectionError):
        return False
    return isinstance(error, (*_connection_faults(), ResponseParserError))


def _connection_faults() -> tuple[type[Exception], ...]:
    from botocore import exceptions

    return exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError, OSError


def _failed(error: Exception, service: str, operation: str, region: str) -> CallFailed | ConfigError:
    """Return the sentence about a call that is not repeated, or no longer."""
    from botocore import exceptions

    name = _shown(service, operation)
    if isinstance(error, exceptions.ClientError):
        return _of_answer(error, name, region)
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return NoAccess(f"there are no complete AWS credentials; {_LOGIN}")
    if isinstance(error, exceptions.SSOError | exceptions.TokenRetrievalError | exceptions.CredentialRetrievalError):
        return NoAccess(f"the AWS credentials can't be renewed ({_why(error)}); call `aws sso login`, or {_LOGIN}")
    if isinstance(error, _connection_faults()):
        never = isinstance(error, exceptions.ConnectTimeoutError | exceptions.EndpointConnectionError)
        kind = NoAccess if never else CallFailed
        message = f"{name}: AWS is not reached in {region} ({_why(error)}); check the network and the region"
        return kind(message, may_have_worked=not never)
    if isinstance(error, exceptions.ParamValidationError):
        return CallFailed(f"{name}: {_why(error)}", "ParamValidation")
    return CallFailed(f"{name}: {type(error).__name__}: {_why(error)}", may_have_worked=True)


def _of_answer(error: Any, name: str, region: str) -> CallFailed:
    code, message = _code(error), _why(error)
    if _SKEWED.search(f"{code} {message}"):
        return NoAccess(
            f"{name}: AWS finds this machine's clock wrong ({message}); set it, or have it set by NTP", code
        )
    if _EXPIRED.search(code):
        clock = ", or this machine's clock is wrong" if code == "RequestExpired" else ""
        return NoAccess(f"{name}: the AWS credentials have expired{clock}; get new ones, as by `aws sso login`", code)
    if _INVALID.search(code):
        return NoAccess(f"{name}: AWS doesn't accept the credentials ({code}); {_LOGIN}", code)
    if _REFUSED.search(code):
        remedy = f"have {name} allowed by their policy (docs/aws.md has one that suffices)"
        return CallFailed(f"{name} is refused to these credentials ({message}); {remedy}", code)
    remedy = next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, code)), "")
    if not remedy and "iamInstanceProfile" in message:
        remedy = "`aws iam list-instance-profiles` lists the profiles; correct --instance-profile"
    after = f"after {ATTEMPTS} attempts " if _TRANSIENT.search(code) else ""
    text = f"{name} failed {after}in {region}: {message} ({code})"
    unknown = is_transient(error)
    return CallFailed(f"{text}; {remedy}" if remedy else text, code, may_have_worked=unknown)


def _code(error: Exception) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, Mapping) else ""


def _why(error: Exception) -> str:
    response = getattr(error, "response", None)
    text = str(response.get("Error", {}).get("Message", "")) if isinstance(response, Mapping) else str(error)
    text = re.sub(r"\s*Encoded authorization failure message:.*", "", text, flags=re.DOTALL)
    return plain_line(" ".join(text.split()))[:300].rstrip(". ") or type(error).__name__


def _shown(service: str, operation: str) -> str:
    """Return a call as policies name it: ec2:RunInstances."""
    return f"{service}:{''.join(part.capitalize() for part in operation.split('_'))}"


def _pauses(attempts: int) -> Iterator[float]:
    """Yield the seconds between the attempts."""
    yield from (_FIRST_PAUSE_S * 2**number for number in range(attempts - 1))


def wait_until(answer: Callable[[], Any], seconds: float, pause: float) -> Any:
    """Return the first answer that is true, or the last one."""
    end = time.monotonic() + seconds
    while not (last := answer()) and time.monotonic() < end:
        time.sleep(pause)
    return last


# --- calls that are planned -----------------------------------------------------------------------------------------


def as_command(service: str, operation: str, region: str, parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words by which the program `aws` makes the same call."""
    name = "s3api" if service == "s3" else service
    given = json.dumps(parameters)
    return ("aws", name, operation.replace("_", "-"), "--region", region, "--cli-input-json", given)


def from_command(words: Sequence[str]) -> tuple[str, str, dict[str, Any]]:
    """Return service, operation and parameters of `as_command`."""
    service = "s3" if words[1] == "s3api" else words[1]
    return service, words[2].replace("-", "_"), json.loads(words[-1])

"""Meaning of the faults of S3: the call is repeated, or one sentence has what is wrong, where, and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from lockstep.core.errors import ConfigError
from lockstep.core.secrets import without_secrets

_TRANSIENT_CODES = frozenset({
    "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "RequestTimeout",
    "RequestTimeoutException", "InternalError", "ServiceUnavailable", "OperationAborted", "ConditionalRequestConflict",
    "BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch",
})  # fmt: skip
_BAD_CREDENTIALS = frozenset({
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired",
    "InvalidClientTokenId", "UnrecognizedClientException", "AuthFailure",
})  # fmt: skip
_OTHER_REGION = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
_PERMISSIONS = {
    "list_objects_v2": "s3:ListBucket",
    "head_object": "s3:GetObject and s3:ListBucket",
    "get_object": "s3:GetObject",
    "copy_object": "s3:GetObject and s3:PutObject",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
}
_CREDENTIALS = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"


def is_transient(error: Exception) -> bool:
    """Return whether the same call may succeed later."""
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        code, status = _code(error), _status(error)
        return code in _TRANSIENT_CODES or status == 429 or (status >= 500 and status != 501)
    if isinstance(error, exceptions.SSLError | exceptions.ProxyConnectionError):
        return False
    transient = (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError)
    return isinstance(error, (*transient, exceptions.ResponseStreamingError, ConnectionError, TimeoutError))


def as_os_error(
    error: Exception, operation: str, where: str, bucket: str, endpoint: str, seconds: float
) -> OSError | NotImplementedError:
    """Return the OSError of a call that is not repeated, or no longer.

    NotImplementedError: the server doesn't know an option of the call.
    """
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        return _of_reply(error, operation, where, bucket, endpoint, seconds)
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return PermissionError(errno.EACCES, f"there are no complete AWS credentials; {_CREDENTIALS}", where)
    if isinstance(error, exceptions.ParamValidationError):
        return OSError(errno.EINVAL, f"{bucket!r} is not the name of a bucket; correct the address", where)
    if isinstance(error, exceptions.ConnectionError | exceptions.HTTPClientError | ConnectionError | TimeoutError):
        what = "is not reached" if _never_connected(error) else "breaks off connections"
        remedy = "check the network, and AWS_ENDPOINT_URL and the region"
        return TimeoutError(
            errno.ETIMEDOUT, f"{endpoint} {what} ({_shown(error)}), tried for {seconds:g} s; {remedy}", where
        )
    if isinstance(error, exceptions.BotoCoreError):
        return OSError(errno.EIO, f"{type(error).__name__}: {_shown(error)}", where)
    return OSError(errno.EIO, f"{endpoint} doesn't answer as S3 does ({_shown(error)}); check AWS_ENDPOINT_URL", where)


def exists(where: str) -> FileExistsError:
    """Return the error of an object that must not exist."""
    return FileExistsError(errno.EEXIST, "it exists", where)


def not_deleted(fault: Mapping[str, Any], place: str) -> OSError:
    """Return the error of one of many objects that should have been deleted."""
    return OSError(errno.EACCES, f"{fault.get('Code')}: {fault.get('Message')}", f"{place}: {fault.get('Key')}")


def no_client(error: Exception, place: str) -> ConfigError:
    """Return the error of settings that make no client."""
    return ConfigError(f"{place}: the AWS settings can't be used ({_shown(error)}); correct AWS_PROFILE, AWS_REGION "
                       "or AWS_ENDPOINT_URL")  # fmt: skip


def _of_reply(
    error: Any, operation: str, where: str, bucket: str, endpoint: str, seconds: float
) -> OSError | NotImplementedError:
    code, status, call = _code(error), _status(error), _operation_name(error, operation)
    if code == "NoSuchBucket":
        remedy = f"create it (aws s3 mb s3://{bucket}), or correct the address or AWS_ENDPOINT_URL"
        return OSError(errno.ENXIO, f"there is no bucket {bucket} at {endpoint}; {remedy}", where)
    if code in ("NoSuchKey", "NoSuchUpload", "404", "NotFound") or (status == 404 and operation != "list_objects_v2"):
        return FileNotFoundError(errno.ENOENT, "there is no such object", where)
    if code == "PreconditionFailed":
        return exists(where)
    if code == "NotImplemented":
        return NotImplementedError(code)
    if code in _BAD_CREDENTIALS:
        return PermissionError(errno.EACCES, f"the AWS credentials aren't valid ({code}); {_CREDENTIALS}", where)
    if code in _OTHER_REGION:
        return OSError(errno.ENXIO, f"bucket {bucket} is in another region ({code}); set AWS_REGION to its own", where)
    if status == 403:
        needed = _PERMISSIONS.get(operation, "s3:PutObject")
        return PermissionError(errno.EACCES, f"{call} is not allowed ({code}); these credentials need {needed}", where)
    if status == 416:
        return OSError(errno.EIO, "it has fewer bytes than it had when it was written", where)
    if is_transient(error):
        return OSError(errno.EIO, f"{call} failed for {seconds:g} s ({code}: {_message(error)})", where)
    if not _message(error):
        return OSError(errno.EIO, f"{endpoint} doesn't answer as S3 does ({code}); check AWS_ENDPOINT_URL", where)
    return OSError(errno.EIO, f"{call} failed ({code}: {_message(error)})", where)


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _message(error: Any) -> str:
    return without_secrets(str(error.response.get("Error", {}).get("Message", "")))[:300]


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _operation_name(error: Any, operation: str) -> str:
    return str(error.operation_name or operation)


def _never_connected(error: Exception) -> bool:
    from botocore import exceptions

    return isinstance(error, exceptions.EndpointConnectionError | exceptions.ConnectTimeoutError)


def _shown(error: Exception) -> str:
    return without_secrets(str(error).replace("\n", " "))[:300]

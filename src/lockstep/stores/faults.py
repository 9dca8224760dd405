"""The meaning of obstore's errors: repeat the request, or one sentence on what is wrong, where, and the remedy."""

from __future__ import annotations

import errno
import re

from lockstep.core.secrets import without_secrets
from lockstep.stores.addresses import parts_of

_CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run on a machine with a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or give the machine an identity",
}
_RIGHTS = {
    "s3": "s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload",
    "gs": "the role Storage Object Admin",
    "az": "the role Storage Blob Data Contributor",
}
_SETTINGS = {
    "s3": "correct AWS_PROFILE, AWS_REGION or AWS_ENDPOINT_URL",
    "gs": "correct GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME",
}
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_OTHER_REGION = re.compile(
    "PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|incorrect.* region"
)
_BAD_CREDENTIALS = re.compile(
    "InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|TokenRefreshRequired|AuthenticationFailed|401"
)
_NO_CREDENTIALS = re.compile("169[.]254[.]|metadata[.]google|token request|Missing (Secret)?AccessKey|get_credentials")


def is_cut(error: Exception) -> bool:
    """Return whether the answer to a request was cut, or the end of an upload was answered and that answer lost."""
    text = _first_line(error)
    return (not _status(text) and "HTTP error" in text) or "NoSuchUpload" in str(error)


def settings(error: Exception, address: str) -> str:
    """Return the sentence about settings that make no client."""
    if _NO_CREDENTIALS.search(str(error)):
        return _without_credentials(address)
    return f"its settings can't be used ({_shown(_first_line(error))}); {_SETTINGS[parts_of(address)[0]]}"


def _without_credentials(address: str) -> str:
    return f"there are no complete credentials; {_CREDENTIALS[parts_of(address)[0]]}"


def as_os_error(error: Exception, address: str, name: str, seconds: float) -> OSError:
    """Return the OSError of a call that isn't repeated, or no longer."""
    if isinstance(error, OSError) and error.errno is not None:  # of what is read while it is sent
        return error
    scheme, bucket, _ = parts_of(address)
    text, where, kind = _first_line(error), f"{address}/{name}".rstrip("/"), type(error).__name__
    status, code = _status(text), _group(r"<Code>(\w+)</Code>", str(error))
    call = _group(r"performing (\w+)", text) or "the request"
    endpoint, what = _group(r"(\w+://[^/]*)", text) or "the server", code or status
    if code in _NO_BUCKET:
        return OSError(errno.ENXIO, f"there is no bucket {bucket} at {endpoint}; create it, or correct it", where)
    if _NO_CREDENTIALS.search(text):
        return PermissionError(errno.EACCES, _without_credentials(address), where)
    if _BAD_CREDENTIALS.search(f"{code} {status}"):
        return PermissionError(errno.EACCES, f"the credentials aren't valid ({what}); {_CREDENTIALS[scheme]}", where)
    if _OTHER_REGION.search(f"{code} {text}"):
        return OSError(errno.ENXIO, f"bucket {bucket} is in another region ({code}); set AWS_REGION to its own", where)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "there is no such object", where)
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return FileExistsError(errno.EEXIST, "it exists", where)
    if status == "403":
        needed = f"{call} is not allowed ({what}); these credentials need {_RIGHTS[scheme]}"
        return PermissionError(errno.EACCES, needed, where)
    if status == "416":
        return OSError(errno.EIO, "it has fewer bytes than it had when it was written", where)
    if status:
        message = _shown(_group("<Message>([^<]*)</Message>", str(error))) or "is this the right endpoint?"
        tried = f" for {seconds:g} s" if status[0] == "5" or status == "429" else ""
        return OSError(errno.EIO, f"{call} at {endpoint} failed{tried} ({what}: {message})", where)
    if "HTTP error" in text:
        broken = "is not reached" if "sending request" in text else "breaks off connections"
        remedy = "check the network, and the endpoint and region"
        return TimeoutError(errno.ETIMEDOUT, f"{endpoint} {broken}, tried for {seconds:g} s; {remedy}", where)
    return OSError(errno.EIO, f"{kind}: {_shown(text)}", where)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _status(text: str) -> str:
    return _group(r"status code: (\d+)", text)


def _group(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _shown(text: str) -> str:
    return without_secrets(text)[:300]

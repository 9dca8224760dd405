"""Recognizes secrets by a value's name and by its form, and hides them in all that a run writes.

WANDB_API_KEY=...                    hidden completely, because of its name
https://me:hunter2@example.org/a     https://(hidden)@example.org/a
hf_..., ghp_..., AKIA..., eyJ...     hidden anywhere in a text
api_key=..., "password": "a1b2c3d4"  likewise
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN = "(hidden)"

_ANYWHERE = re.compile(
    r"secret|passw|passphrase|credential|bearer|jwt|cookie|apikey|accesskey|privatekey|token(?!iz|s(?:_|\b|$))", re.I
)
_WORDS = frozenset({"pass", "pw", "pwd", "pat", "key", "keys", "auth", "authorization", "signature", "netrc", "dsn"})
_STRONG = re.compile(
    r"secret|passw|passphrase|credential|bearer|jwt|cookie|(?:api|access|private)[_-]?key|"
    r"(?:api|auth|access|hub|hf)[_-]?token",
    re.I,
)
_STRONG_WORDS = frozenset({"pass", "pw", "pwd", "pat"})
_NO_SECRETS = frozenset({"PWD", "OLDPWD", "TOKENIZERS_PARALLELISM"})
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SHORTEST = 8  # characters of a value that is masked in any text

_TUNING = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "TOKENIZERS_PARALLELISM"})
_TUNES = re.compile(
    r"(OMP|MKL|OPENBLAS|NUMEXPR|KMP)_(NUM_THREADS|AFFINITY|BLOCKTIME|PROC_BIND|PLACES|DYNAMIC)$|NCCL_DEBUG$|"
    r"NCCL_(IB|P2P|SHM|SOCKET|ALGO|PROTO|BUFFSIZE|NTHREADS|MIN|MAX|CROSS|ASYNC|BLOCKING|TIMEOUT)\w*$"
)

_NAMED, _VALUE = rf"((?:{_STRONG.pattern})[\w-]{{0,30}}[\"']?\s?", r"[^\s\"'&,;<>(){}]"
_SHAPES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{0,30}://)[^\s/@?#\"'<>]{1,500}@"), rf"\1{HIDDEN}@"),
    (
        re.compile(
            r"([?&;](?:[A-Za-z0-9_.-]{0,60}(?:token|key|secret|password|signature|credential|auth)|sig|pwd|pw)=)"
            r"[^&#\s\"'<>]{1,5000}",
            re.I,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(rf"{_NAMED}=\s?[\"']?){_VALUE}{{6,5000}}", re.I), rf"\1{HIDDEN}"),
    # prose has a word after a colon; a secret has a digit
    (re.compile(rf"{_NAMED}:\s?[\"']?)(?={_VALUE}{{0,100}}\d){_VALUE}{{8,5000}}", re.I), rf"\1{HIDDEN}"),
    (re.compile(r"\b(bearer)([ =:]+)[A-Za-z0-9._~+/=-]{12,5000}", re.I), rf"\1\2{HIDDEN}"),
    (re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:[\s\S]{0,20000}?-----END [A-Z ]{0,40}-----)?"), HIDDEN),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,5000}\.[A-Za-z0-9_-]{4,5000}\.[A-Za-z0-9_-]{0,5000}"), HIDDEN),
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}"
            r"|glpat-[A-Za-z0-9_-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}"
            r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{16,}|pypi-[A-Za-z0-9_-]{30,}"
            r"|npm_[A-Za-z0-9]{30,}|dckr_pat_[A-Za-z0-9_-]{16,}|nvapi-[A-Za-z0-9_-]{20,}|wandb_v1_[A-Za-z0-9_]{20,})"
        ),
        HIDDEN,
    ),
)
_MAY_HOLD_SECRET = re.compile(
    _STRONG.pattern
    + r"|://|[?&;]\w|-----BEGIN|eyJ|hf_|api_org_|gh[pousr]_|github_pat_|glpat-|AKIA|ASIA|sk-|xox|AIza|ya29|"
    r"pypi-|npm_|dckr_|nvapi-|wandb_",
    re.I,
)


def without_secrets(text: str) -> str:
    """Return the text with everything that looks like a secret hidden."""
    if _MAY_HOLD_SECRET.search(text) is None:
        return text
    for shape, replacement in _SHAPES:
        text = shape.sub(replacement, text)
    return text


def names_a_secret(name: str) -> bool:
    """Return whether a variable, flag or key of this name is likely to hold a secret."""
    if name in _NO_SECRETS:
        return False
    words = map(str.lower, _PARTS.findall(name))
    has_word = any(word in _WORDS or (len(word) > 3 and word.endswith("key")) for word in words)
    return has_word or _ANYWHERE.search(name) is not None


def is_harmless_variable(name: str) -> bool:
    """Return whether a variable tunes libraries, and can't hold a secret or run code."""
    return name in _TUNING or (_TUNES.match(name) is not None and not names_a_secret(name))


def hidden_variable(name: str, value: str) -> str:
    """Return the value of an environment variable as it may be written to a file."""
    return HIDDEN if names_a_secret(name) else without_secrets(value)


def hidden_setting(name: str, value: str) -> str:
    """Return the value of a config's key as it may be written.

    Columns may also be called `key` or `token`: under such a name, a plain word is kept.
    """
    strong = (
        name.lower() == "token"
        or _STRONG.search(name) is not None
        or any(part.lower() in _STRONG_WORDS for part in _PARTS.findall(name))
    )
    looks_random = " " not in value and (len(value) >= 20 or (len(value) >= 6 and any(map(str.isdigit, value))))
    if strong or (names_a_secret(name) and looks_random):
        return HIDDEN if value else value
    return without_secrets(value)


def masked(text: str, secrets: tuple[str, ...]) -> str:
    """Return the text without these values, and without what looks like a secret."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return without_secrets(text)


def shareable(text: str) -> str:
    """Return a text without the secrets that this process knows."""
    return masked(text, secrets_in(os.environ))


def secrets_in(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of variables that hold secrets, the longest first."""
    secrets = {value for name, value in variables.items() if len(value) >= _SHORTEST and names_a_secret(name)}
    return tuple(sorted(secrets, key=len, reverse=True))


def is_hidden(value: Any) -> bool:
    """Return whether part of a value was hidden before it was written."""
    return isinstance(value, str) and HIDDEN in value

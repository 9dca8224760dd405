"""Failures told apart by what they carry (type, key, kind) and by the values in their text, not by its sentences.

with fails(ConfigError, 30, 8, key="batch.global_size"): ...
assert gives(done.stderr, "batch.micro_size", 4, 8)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from lockstep import ConfigError
from lockstep.core.errors import Failure
from lockstep.core.failure_kinds import FailureKind

_Error = TypeVar("_Error", bound=BaseException)


@contextmanager
def fails(
    error: type[_Error], *values: object, key: str | None = None, kind: FailureKind | None = None
) -> Iterator[pytest.ExceptionInfo[_Error]]:
    """Expect a failure whose text gives the values, in this order.

    Args:
        key: Of one of the config's problems.
        kind: Where it isn't that of the type.
    """
    with pytest.raises(error) as raised:
        yield raised
    failure = raised.value
    text = " ".join(str(failure).split())
    assert gives(text, *values), f"{values} aren't given: {text}"
    if key is not None:
        assert isinstance(failure, ConfigError)
        assert key in [problem.key for problem in failure.problems], text
    if kind is not None:
        assert isinstance(failure, Failure)
        assert failure.kind is kind, f"{failure.kind}: {text}"


def gives(text: str, *values: object) -> bool:
    """Whether one line has all the values, in this order, none as a part of a longer word or number.

    The first part of a dotted key counts as a word.
    """
    alone = (rf"(?<![\w.])(?<!\s-)(?<!\de-){re.escape(str(value))}(?![\w/]|[.,]\d)" for value in values)
    return re.search(".*?".join(alone), text) is not None

"""A rank of a test that dies is reported with what ended it."""

from __future__ import annotations

import faulthandler
import os
import signal

import pytest
from kit.worlds import in_world


def _crash() -> None:
    if os.environ["RANK"] == "1":
        faulthandler._sigsegv()  # type: ignore[attr-defined]


def _end() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_crash_is_named_with_its_stack() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 was ended by SIGSEGV.*line \d+ in _crash"):
        in_world(2, _crash)


def test_a_kill_is_named() -> None:
    with pytest.raises(AssertionError, match="rank 1 was ended by SIGKILL"):
        in_world(2, _end)

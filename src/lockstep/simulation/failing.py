"""Errors of simulations: what isn't known without values, and what fails in the user's own code, with its line."""

from __future__ import annotations

import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import CodeType

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lockstep.simulation import device

_PACKAGE = str(Path(__file__).parents[1])
_DEVICE = f"{device.NAME}:0"
_INSTALLED = ("site-packages", "dist-packages")


class Unpredictable(RuntimeError):
    """The run can't be simulated."""


class UserCodeFails(Unpredictable):
    """The user's own code raises, as it would on an accelerator."""


def explained(error: BaseException) -> Unpredictable:
    """Return the exception for an error in a simulation: what a user can do about it, and where."""
    while error.__cause__ is not None:  # torch's pipelines wrap what a stage raises
        error = error.__cause__
    if isinstance(error, Unpredictable):
        return error
    reason = next((line.strip().rstrip(".!") for line in str(error).splitlines() if line.strip()), type(error).__name__)
    where = _place_of_error(error)
    if isinstance(error, (DynamicOutputShapeException, DataDependentOutputException)):
        at = f" at {where}" if where else ""
        return Unpredictable(f"can't be simulated: what {reason} returns{at} depends on values, and there are none")
    if where and not isinstance(error, NotImplementedError):
        on = " on an accelerator" if _DEVICE in reason else ""
        return UserCodeFails(f"fails{on} at {where}: {reason.replace(_DEVICE, 'the accelerator')}")
    return Unpredictable(f"can't be simulated: {reason}{f' at {where}' if where else ''}")


def place(code: CodeType, line: int) -> str:
    """Return a place in code for people: `net.py:9 (Net.forward)`."""
    return f"{Path(code.co_filename).name}:{line} ({code.co_qualname})"


@cache
def is_users(file: str) -> bool:
    """Return whether a file is the user's: not Lockstep's, the interpreter's or an installed package's."""
    installed = any(part in Path(file).parts for part in _INSTALLED)
    return not (file.startswith(("<", _PACKAGE, sysconfig.get_path("stdlib"))) or installed)


def _place_of_error(error: BaseException) -> str | None:
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((place(code, line) for code, line in reversed(frames) if is_users(code.co_filename)), None)

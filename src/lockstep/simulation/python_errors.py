"""Errors of Python in a backward on the simulated device, with which torch would end the process silently.

an operation or a hook raises  -->  C++ leaves the backward, and restores the stream of the device
                               -->  it asks Python for the type of the device, while the error is pending
                               -->  Python turns any answer into an error, which C++ can't have there: abort

So the answer takes the pending error away, and the backward raises it at its end.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_pending: list[BaseException] = []
_kind, _value, _traceback = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
_first, _second, _third = ctypes.byref(_kind), ctypes.byref(_value), ctypes.byref(_traceback)
_fetch: Any = ctypes.pythonapi.PyErr_Fetch
_fetch.restype = None


def guard() -> Any:
    """Return what torch asks for the type of the device."""

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            _fetch(_first, _second, _third)  # the first call: few others work while an error is pending
            if _value:
                _keep()
            return torch._C._autograd.DeviceType.PrivateUse1

    return Guard()


def _keep() -> None:
    error = ctypes.cast(_value, ctypes.py_object).value
    if isinstance(error, BaseException):
        if _traceback:
            error = error.with_traceback(ctypes.cast(_traceback, ctypes.py_object).value)
    else:  # not made yet
        error = ctypes.cast(_kind, ctypes.py_object).value(error)
    _pending.append(error)


_EngineBase: Any = type(torch.autograd.Variable._execution_engine)


class RaisingEngine(_EngineBase):  # type: ignore[misc]
    """The engine of backwards, which raises errors that were taken away."""

    def run_backward(self, *arguments: Any, **named: Any) -> Any:
        _pending.clear()
        try:
            return super().run_backward(*arguments, **named)
        except SystemError:  # no error is left
            if not _pending:
                raise
            error = _pending[0]
            _pending.clear()
            raise error from None

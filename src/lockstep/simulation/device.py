"""A torch device that has no hardware: tensors on it have shapes, dtypes and a place, and no data.

It is torch's device for backends written in Python (privateuse1), with streams, events, generators and properties.
`lockstep.simulation.execution` decides what runs on it.

With an error of Python in a backward on the device, torch would end the process silently: C++ asks Python for the type
of the device while the error is pending, which Python turns into an error that C++ can't have there. So the answer
takes the pending error away, and the backward raises it at its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch

NAME = "simulated"
_STATE_BYTES = 16  # of a generator


@dataclass
class Properties:
    """The properties of a simulated device, under the names of `torch.cuda.get_device_properties`."""

    name: str = "simulated accelerator"
    total_memory: int = 80 << 30
    major: int = 9
    minor: int = 0


class Stream:
    """A stream; work on it is done at once. What waits for what is told to `on_order`."""

    def __init__(self, device: Any = None, priority: int = 0, **unused: Any) -> None:
        self.device = device
        self.priority = priority

    def wait_event(self, event: Event) -> None:
        _note_order("wait", self, event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note_wait("Stream.synchronize")

    def __enter__(self) -> Stream:
        self._outer = _device().current_stream()
        _device().set_stream(self)
        return self

    def __exit__(self, *unused: object) -> None:
        _device().set_stream(self._outer)


class Event:
    """An event, which has always happened."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        _note_order("record", stream or _device().current_stream(), self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _device().current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note_wait("Event.synchronize")
        _note_order("read", _device().current_stream(), self)

    def elapsed_time(self, end: Event) -> float:
        note_wait("Event.elapsed_time")
        return 1.0


class Generator:
    """A generator of the device; its draws have no values."""

    def __init__(self) -> None:
        self._state = torch.zeros(_STATE_BYTES, dtype=torch.uint8)

    def manual_seed(self, seed: int) -> Generator:
        seed_bytes = (seed % 2**64).to_bytes(8, "little")
        self._state = torch.frombuffer(bytearray(seed_bytes + bytes(_STATE_BYTES - 8)), dtype=torch.uint8).clone()
        return self

    def initial_seed(self) -> int:
        return int.from_bytes(bytes(self._state[:8].tolist()), "little")

    def get_state(self) -> torch.Tensor:
        return self._state.clone()

    def set_state(self, state: torch.Tensor) -> Generator:
        self._state = state.clone()
        return self


class _Device(ModuleType):
    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}")
        self.Stream, self.Event = Stream, Event
        self.properties = Properties()
        self.active = False
        self.on_wait: Callable[[str], None] | None = None
        self.on_order: Callable[[str, Stream, Event], None] | None = None
        self.default = Stream()
        self._thread = threading.local()
        self.default_generators = (Generator(),)
        self.allocated = self.peak = 0

    def is_available(self) -> bool:
        return self.active

    def is_initialized(self) -> bool:
        return self.active

    def is_bf16_supported(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1 if self.active else 0

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._thread, "current", self.default)

    def default_stream(self, device: Any = None) -> Stream:
        return self.default

    def set_stream(self, stream: Stream) -> None:
        self._thread.current = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with stream:
            yield

    def synchronize(self, device: Any = None) -> None:
        note_wait("synchronize")

    def empty_cache(self) -> None:
        """Do nothing: nothing is cached."""

    def manual_seed(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.default_generators[0].set_state(state)

    def get_device_properties(self, device: Any = None) -> Properties:
        return self.properties

    def get_device_name(self, device: Any = None) -> str:
        return self.properties.name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.properties.major, self.properties.minor

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.properties.total_memory - self.allocated, self.properties.total_memory

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peak = self.allocated

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False


_pending: list[BaseException] = []
_kind, _value, _traceback = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
_first, _second, _third = ctypes.byref(_kind), ctypes.byref(_value), ctypes.byref(_traceback)
_fetch: Any = ctypes.pythonapi.PyErr_Fetch
_fetch.restype = None


def _guard() -> Any:
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


@cache
def _device() -> Any:
    return _Device()


def current_stream() -> int:
    """Return a number for the current stream: 0 for the default one."""
    module = _device()
    stream = module.current_stream()
    return 0 if stream is module.default else id(stream)


def note_wait(call: str) -> None:
    """Record that the host waits for the device in this call."""
    on_wait = _device().on_wait
    if on_wait is not None:
        on_wait(call)


def _note_order(what: str, stream: Stream, event: Event) -> None:
    on_order = _device().on_order
    if on_order is not None:
        on_order(what, stream, event)


@cache
def register() -> Any:
    """Make the device known to torch, once in a process, and return its module."""
    from torch.utils import backend_registration

    module = _device()

    class DeviceHooks(torch._C._acc.PrivateUse1Hooks):
        """Answers torch's questions about the device: it is there while something is simulated."""

        def is_available(self) -> bool:
            return module.active

        def has_primary_context(self, index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=module, hook=DeviceHooks(), device_guard=_guard()
    )
    return module

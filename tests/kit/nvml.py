"""A stand-in for NVML's Python module: the functions, units and errors of its documentation, for a few GPUs.

https://docs.nvidia.com/deploy/nvml-api: power in milliwatts, clocks in MHz, memory in bytes, temperature in degrees
Celsius; a MIG instance has memory of its own, and neither utilization nor temperature, power, clocks or events.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml


@dataclass
class Board:
    """A GPU.

    Attributes:
        failures: NVML's error by function.
        xids: Numbers of errors that the driver has not reported yet.
        parent: Of a MIG instance.
    """

    uuid: str
    utilization: int = 97
    used: int = 60 << 30
    temperature: int = 71
    power: int = 612_500
    clock: int = 1755
    reasons: int = 0x1
    corrected: int = 0
    uncorrected: int = 0
    xids: deque[int] = field(default_factory=deque)
    failures: dict[str, type[Exception]] = field(default_factory=dict)
    parent: Board | None = None


def error(name: str) -> Exception:
    """Return NVML's exception, as its module makes it."""
    return pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))


class Driver(ModuleType):
    """The module pynvml with these boards. Exceptions and constants are those of the real one.

    Attributes:
        fails: Errors of all functions, such as those of a driver that was unloaded.
    """

    def __init__(self, *boards: Board, init: Exception | None = None) -> None:
        super().__init__("pynvml")
        self.boards = boards
        self.fails: Exception | None = None
        self.init = init
        self.registered: list[Board] = []
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or not callable(getattr(pynvml, name)):
            return getattr(pynvml, name)
        assert name in ANSWERS, f"the stand-in has no {name}"

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if self.fails is not None:
                raise self.fails
            board = next((argument for argument in arguments if isinstance(argument, Board)), None)
            if board is not None and name in board.failures:
                raise board.failures[name]
            if board is not None and board.parent is not None and name in OF_WHOLE_BOARDS:
                raise error("NOT_SUPPORTED")
            return ANSWERS[name](self, *arguments)

        return call

    def by_uuid(self, uuid: str) -> Board:
        for board in self.boards:
            if board.uuid == uuid:
                return board
        raise error("NOT_FOUND")

    def start(self) -> None:
        if self.init is not None:
            raise self.init

    def parent(self, board: Board) -> Board:
        if board.parent is None:
            raise error("INVALID_ARGUMENT")
        return board.parent

    def wait(self, events: object, timeout: int) -> SimpleNamespace:
        assert timeout == 0, "nothing waits for an event"
        for board in self.registered:
            if board.xids:
                return SimpleNamespace(device=board, eventType=0x8, eventData=board.xids.popleft())
        raise error("TIMEOUT")


OF_WHOLE_BOARDS = {
    "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceRegisterEvents",
}  # fmt: skip
ANSWERS: dict[str, Any] = {
    "nvmlInit": lambda driver: driver.start(),
    "nvmlShutdown": lambda driver: None,
    "nvmlDeviceGetCount": lambda driver: sum(board.parent is None for board in driver.boards),
    "nvmlDeviceGetHandleByIndex": lambda driver, index: driver.boards[index],
    "nvmlDeviceGetHandleByUUID": lambda driver, uuid: driver.by_uuid(uuid),
    "nvmlDeviceGetUUID": lambda driver, board: board.uuid,
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda driver, board: driver.parent(board),
    "nvmlDeviceGetName": lambda driver, board: "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUtilizationRates": lambda driver, board: SimpleNamespace(gpu=board.utilization, memory=40),
    "nvmlDeviceGetMemoryInfo": lambda driver, board: SimpleNamespace(total=80 << 30, used=board.used, free=0),
    "nvmlDeviceGetTemperature": lambda driver, board, sensor: board.temperature,
    "nvmlDeviceGetPowerUsage": lambda driver, board: board.power,
    "nvmlDeviceGetEnforcedPowerLimit": lambda driver, board: 700_000,
    "nvmlDeviceGetClockInfo": lambda driver, board, kind: {1: board.clock, 2: 2619}[kind],
    "nvmlDeviceGetMaxClockInfo": lambda driver, board, kind: {1: 1980, 2: 2619}[kind],
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda driver, board: board.reasons,
    "nvmlDeviceGetTotalEccErrors": lambda driver, board, kind, counter: [board.corrected, board.uncorrected][kind],
    "nvmlEventSetCreate": lambda driver: object(),
    "nvmlEventSetFree": lambda driver, events: None,
    "nvmlDeviceRegisterEvents": lambda driver, board, kinds, events: driver.registered.append(board),
    "nvmlEventSetWait_v2": lambda driver, events, timeout: driver.wait(events, timeout),
}

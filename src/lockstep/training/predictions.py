"""Asks the simulated accelerator about a run's memory, in a process of its own, for at most a minute.

    this rank: config, ranks, objects  -->  python -m lockstep.simulation.answering  -->  the answer
                                            no GPU, no process group, no values of weights or data

A rank can't simulate others itself: it is in a process group, and its tensors are real.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.training.user_objects import UserObjects

SECONDS = 60.0
_MODULE = "lockstep.simulation.answering"
_LARGE = 1 << 16  # bytes from which an array is passed on without its values
_MOST = 64 << 20  # bytes of all objects
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a run.

    Attributes:
        kind: `decide`: the choices of `auto`; `explain`: the peak, and the smallest change with which it fits.
        memory: Bytes of each rank that tensors may take.
        on_cpu: Whether ranks compute on the CPU.
    """

    kind: Literal["decide", "explain"]
    config: Config
    ranks: int
    memory: int
    given: UserObjects
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """The predicted peak of the rank that needs most.

    Attributes:
        largest: The categories that hold most, the largest first, and their bytes.
        remedy: The smallest change with which the run fits; empty if it fits as it is.
    """

    peak: int
    largest: tuple[tuple[str, int], ...]
    remedy: str


class NoAnswer(RuntimeError):
    """The simulation can't answer; the message is the reason."""


def ask(question: Question, seconds: float = SECONDS) -> Any:
    """Return the answer: a `Decision` or an `Explanation`.

    Raises:
        NoAnswer: The run can't be simulated, or not in this time.
    """
    return ask_process(_MODULE, question, seconds)


def ask_process(module: str, question: object, seconds: float) -> Any:
    """Return what a module, run with a folder that has the question, writes there.

    Raises:
        NoAnswer: It writes a sentence instead, or nothing, or not in this time.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-estimate-") as folder:
        try:
            Path(folder, "question").write_bytes(_pickled(question))
        except Exception as error:  # an object may raise anything
            raise NoAnswer(f"the objects of this run can't be passed to a simulation: {_line(error)}") from error
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, folder],
                env=_environment(os.environ),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NoAnswer(f"a simulation takes longer than {seconds:.0f} s") from error
        except OSError as error:
            raise NoAnswer(f"a simulation can't be started: {error}") from error
        answer = Path(folder, "answer")
        if not answer.is_file():
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise NoAnswer(f"a simulation failed: {last}")
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, str):
        raise NoAnswer(result)
    return result


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in own.items() if name not in _RANK_VARIABLES}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def _pickled(question: object) -> bytes:
    buffer = _Limited()
    _ShapesOnly(buffer, pickle.HIGHEST_PROTOCOL).dump(question)
    return buffer.getvalue()


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MOST:
            raise NoAnswer(f"they take more than {_MOST >> 20} MiB without the values of arrays")
        return super().write(data)


class _ShapesOnly(pickle.Pickler):
    """Pickles large arrays as zeros, which take no memory until they are read."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) or not isinstance(value, Tensor | np.ndarray) or value.nbytes < _LARGE:
            return NotImplemented
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return np.zeros, (value.shape, value.dtype)
        if type(value) is Tensor and value.layout is torch.strided:
            return _zeros, (tuple(value.shape), value.dtype, value.requires_grad)
        return NotImplemented


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=requires_grad)

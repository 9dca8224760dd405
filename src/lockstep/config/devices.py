"""The words of `launch.device` and `launch.backend`: listed ones, which `plan` accepts on a laptop, and torch's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

DEVICES = ("auto", "cpu", "cuda", "xpu", "mps", "mtia", "npu", "hpu", "mlu", "musa")
BACKENDS = ("auto", "nccl", "gloo", "xccl", "hccl", "cncl", "mccl", "ucc")


@dataclass(frozen=True, slots=True)
class Words:
    """The listed words of a key that also takes others."""

    listed: tuple[str, ...]


def _checked(listed: Sequence[str], is_known: Callable[[str], bool]) -> AfterValidator:
    def check(name: str) -> str:
        if name in listed or is_known(name):
            return name
        raise PydanticCustomError("literal_error", "torch doesn't know it")

    return AfterValidator(check)


def _is_device(name: str) -> bool:
    """Return whether torch knows a device of this type. Imports torch for a word that isn't listed."""
    torch: Any = importlib.import_module("torch")
    try:
        torch.get_device_module(name)
        return bool(torch.device(name).type == name)  # not with a number: it follows from the rank
    except RuntimeError:
        return False


def _is_backend(name: str) -> bool:
    backends: Any = importlib.import_module("torch.distributed")
    return backends.is_available() and name in backends.Backend.backend_list


def _schema(listed: Sequence[str]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"enum": list(listed)}, {"pattern": "^[a-z][a-z0-9_]*$", "type": "string"}]})


DeviceName = Annotated[str, Words(DEVICES), _checked(DEVICES, _is_device), _schema(DEVICES)]
BackendName = Annotated[str, Words(BACKENDS), _checked(BACKENDS, _is_backend), _schema(BACKENDS)]

"""The description of a model's adapter of peft, which checkpoints and exports hold without the frozen base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KEY = "_lockstep_adapter"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""peft's files of an adapter."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a model.

    Attributes:
        config: Content of peft's `adapter_config.json`.
        files: Names of tensors in peft's file, by their names in the model.
        base: Names of the base's tensors before it had the adapter, by their names in the model; also of copies that
            are trained (`modules_to_save`).
        frozen: Names in the model of the tensors that neither checkpoints nor exports hold.
        quantized: Bytes of an element of each of the base's weights that are quantized when training starts, by name.
    """

    config: Mapping[str, Any]
    files: Mapping[str, str]
    base: Mapping[str, str]
    frozen: frozenset[str]
    quantized: Mapping[str, float] = field(default_factory=dict)


def adapter_of(model: object) -> Adapter | None:
    """Return the adapter of a model; None: it has none."""
    adapter: Adapter | None = vars(model).get(_KEY)
    return adapter


def quantized_of(model: object) -> Mapping[str, float]:
    """Return `Adapter.quantized` of a model; empty: it has none."""
    adapter = adapter_of(model)
    return {} if adapter is None else adapter.quantized


def set_adapter(model: object, adapter: Adapter) -> None:
    """Note the adapter of a model."""
    vars(model)[_KEY] = adapter

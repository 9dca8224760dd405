"""Models of the transformers library: tensor names in its files, where they differ from the modules'.

The library renames, joins and splits tensors when it loads, and the reverse when it saves; its own loader is used.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models.initialization import generators_keyed

WITH_REPORT: Mapping[str, Any] = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
"""How weights are loaded: in fp32, and with a report of those that don't fit."""
_ONCE_SAVED = ("rotary_emb.inv_freq", "position_ids")  # buffers of many kinds of models


def is_transformers_model(module: nn.Module) -> bool:
    """Return whether it is one of the library's models, without importing the library."""
    if "transformers.modeling_utils" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def translated(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the tensors under the model's names, and others unchanged; None if the library can't load them."""
    try:
        with quiet(), generators_keyed(0, "names"):
            of_model = {"config": model.config, "state_dict": dict(tensors)}
            loaded, report = type(model).from_pretrained(None, **of_model, **WITH_REPORT)
    except (RuntimeError, ValueError, KeyError):
        return None
    reshaped = {name: torch.empty(shape, device="meta") for name, shape, _ in report["mismatched_keys"]}
    absent = {*report["missing_keys"], *reshaped}
    own = {name: tensor for name, tensor in loaded.state_dict().items() if name not in absent}
    return {**own, **reshaped, **{name: tensors[name] for name in report["unexpected_keys"] if name in tensors}}


def ignored_names(model: Any, names: Iterable[str]) -> frozenset[str]:
    """Return which of these names in a file the library ignores, since a model of this kind once saved them."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    patterns |= {rf"{name}$" for name in _ONCE_SAVED if any(buffer.endswith(name) for buffer in buffers)}
    return frozenset(name for name in names if any(re.search(pattern, name) for pattern in patterns))


def never_written(model: Any) -> frozenset[str]:
    """Return the names of the model's tensors that the library never writes to files."""
    return frozenset(model._keys_to_ignore_on_save or ())


def converts_weights(model: Any) -> bool:
    """Return whether the library joins or splits some of the model's tensors when it writes them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    return any(isinstance(conversion, WeightConverter) for conversion in conversions)


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Restore the classes of modules that FSDP2 has wrapped, within the block.

    FSDP2 replaces the class LlamaForCausalLM by FSDPLlamaForCausalLM, but the library looks up by the class name which
    tensors have other names in files.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = () if fsdp is None else fsdp.FSDPModule
    wrapped: list[Any] = [child for child in model.modules() if isinstance(child, kind)]
    classes = [type(module) for module in wrapped]
    for module, of_fsdp in zip(wrapped, classes, strict=True):
        _, module.__class__ = of_fsdp.__bases__
    try:
        yield
    finally:
        for module, of_fsdp in zip(wrapped, classes, strict=True):
            module.__class__ = of_fsdp


@contextmanager
def quiet() -> Iterator[None]:
    """Mute the library's progress bars and log messages within the block."""
    from transformers.utils import logging as reports

    verbosity, bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity_error()
    reports.disable_progress_bar()
    deepspeed = logging.getLogger("DeepSpeed")  # saving imports it if it is installed, and it logs to stdout
    deepspeed.addFilter(_is_an_error)
    try:
        yield
    finally:
        deepspeed.removeFilter(_is_an_error)
        reports.set_verbosity(verbosity)
        if bars:
            reports.enable_progress_bar()


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def trainer_decays(model: nn.Module) -> frozenset[str]:
    """Return the parameters that transformers' Trainer puts in its first group, with weight decay."""
    from transformers import Trainer

    decays: Any = Trainer.get_decay_parameter_names  # it doesn't use its instance
    return frozenset(decays(None, model))

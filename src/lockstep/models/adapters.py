"""Adapters by peft, injected into the model in place: it stays the model that it was, with more layers.

    layers.0.q_proj.weight  -->  layers.0.q_proj.base_layer.weight          frozen, perhaps in bf16
                                 layers.0.q_proj.lora_A.default.weight      fp32, keyed by seed and name
                                 layers.0.q_proj.lora_B.default.weight      0: the first loss is the base's

A PeftModel is seen through to the model that it changes in place, so that both have the same names.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lockstep.config.schema import HuggingFaceModel, LoraAdapter, Model
from lockstep.core.adapters import Adapter, adapter_of, quantized_of, set_adapter
from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.formatting import listed
from lockstep.core.hub import commit_of
from lockstep.core.modes import evaluation_mode
from lockstep.core.tasks import TASKS
from lockstep.models.blocks import repeated_blocks
from lockstep.models.initialization import generators_keyed
from lockstep.models.meta_model import MetaModel, in_memory


def _library(name: str, key: str, extra: str) -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, too; on a CPU it tells what it lacks
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(Problem("", key, f"needs the extra `{extra}`: {pip_install(extra)}")) from error


_bitsandbytes = partial(_library, "bitsandbytes", "model.quantization", "quantization")
_peft = partial(_library, "peft", "model.adapter", "peft")
_NAME = "default"
_SHOWN = 4


def with_adapter(module: nn.Module, section: Model, seed: int) -> nn.Module:
    """Return the model with the section's adapter, if any, its values keyed; a PeftModel without its wrapper."""
    module = seen_through(module)
    if section.adapter is None:
        return module
    if adapter_of(module) is not None:
        raise ConfigError(Problem("", "model.adapter", "the model that was passed has an adapter; leave this key out"))
    _inject(module, section)
    for name, (reset, _) in _resets(module).items():
        with generators_keyed(seed, "module", name):
            reset()
    return module


def meta_with_adapter(meta: MetaModel | None, section: Model, seed: int) -> MetaModel | None:
    """Return the same of a model without values; None if all must be made at once, as for DoRA and quantization."""
    adapter = section.adapter
    if adapter is None or meta is None:
        return meta
    if section.quantization is not None:
        return None
    if adapter.kind == "lora" and adapter.use_dora:
        return None
    _inject(meta.model, section)
    return MetaModel(meta.model, partial(_values, meta, copy.deepcopy(meta.model), seed))


def seen_through(module: nn.Module) -> nn.Module:
    """Return the model that a PeftModel changes in place; any other module as it is."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.PeftModel):
        return module
    if module.active_peft_config.is_prompt_learning:
        raise ConfigError(Problem("", "model", f"{_PROMPTS}; take a LoRA or IA3 adapter"))
    wrapper: Any = module
    model: nn.Module = wrapper.get_base_model()
    _record(model, wrapper, {plain_name(name): tensor for name, tensor in _tensors(model).items()})
    return model


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Have the model compute as without its adapter, and in evaluation mode, while the block runs."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds: Any = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
    with evaluation_mode(model):
        try:
            for layer in layers:  # peft's own method also freezes the adapter, which wrappers of the model don't expect
                layer._disable_adapters = True
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False


_PROMPTS = "a learned prompt makes the model's sequences longer than the data's, which Lockstep's objectives don't know"


def plain_name(name: str) -> str:
    """Return the name of a base's tensor before the model had an adapter."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


# --- injection ----------------------------------------------------------------------------------------------------


def _inject(model: nn.Module, section: Model) -> None:
    peft = _peft()
    config, before, linear = _config(peft, model, section), _tensors(model), _linear_layers(model)
    on_meta = any(tensor.is_meta for tensor in before.values())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what the config says, too
            wrapper = peft.get_peft_model(model, config, adapter_name=_NAME, low_cpu_mem_usage=on_meta)
    except (ValueError, TypeError, NotImplementedError) as error:
        key = "targets" if "arget" in str(error) else "kind"
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise ConfigError(Problem("", f"model.adapter.{key}", f"peft refuses: {first_line}")) from error
    config.base_model_name_or_path = section.pretrained if isinstance(section, HuggingFaceModel) else None
    config.revision = commit_of(getattr(section, "revision", None))
    _record(model, wrapper, before)
    if section.quantization is not None:
        _mark_quantized(model, section.quantization.kind, linear)


def _mark_quantized(model: nn.Module, kind: str, linear: Container[str]) -> None:
    """Note the frozen weights that `quantize` will quantize; those of `linear`, by their names before."""
    adapter: Any = adapter_of(model)
    quantized = {
        name: _NF4_BYTES if kind == "nf4" else 1 + torch.float32.itemsize / module.in_features
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and (name := f"{path}.weight") in adapter.frozen
        and adapter.base.get(name, name).removesuffix(".weight") in linear
    }
    if not quantized:
        why = f"{kind}, but {type(model).__name__} has no torch.nn.Linear in its blocks; leave it out"
        raise ConfigError(Problem("", "model.quantization.kind", why))
    set_adapter(model, replace(adapter, quantized=quantized))


_BLOCK = 64
_NF4_BYTES = 1 / 2 + 1 / _BLOCK + 4 / (_BLOCK * 256)
"""4 bits, a constant of 8 bits for 64 weights, and one of fp32 for 256 of these: 0.516."""


def quantize(model: nn.Module, kind: str, compute: torch.dtype, device: torch.device) -> nn.Module:
    """Quantize the weights that the model's adapter notes, in place, on a device; other tensors stay where they are.

    Args:
        compute: Of the forward; nf4 is also stored in it, as FSDP gathers it beside other frozen weights uncast.
    """
    bnb, adapter, before = _bitsandbytes(), cast("Adapter", adapter_of(model)), set(model.state_dict(keep_vars=True))
    for name in adapter.quantized:
        path = name.removesuffix(".weight")
        old: Any = model.get_submodule(path)
        shape = (old.in_features, old.out_features, False)
        if not old.weight.is_meta and not old.weight.isfinite().all():
            raise ConfigError(Problem("", "model", f"{name} has a NaN or an infinity, and can't be quantized"))
        if kind == "nf4":
            if device.type == "cpu" and old.in_features % _BLOCK:
                why = (
                    f"nf4, but bitsandbytes 0.50 dequantizes {name} wrongly on a CPU: its {old.in_features} inputs are "
                )
                why += f"no multiple of {_BLOCK}; take int8, or a GPU"
                raise ConfigError(Problem("", "model.quantization.kind", why))
            new = bnb.nn.Linear4bit(*shape, compute, quant_type="nf4", quant_storage=compute, device="meta")
            weight = bnb.nn.Params4bit(old.weight.data, quant_type="nf4", quant_storage=compute, module=new)
            new.forward = partial(_multiplied, new)
        else:
            new = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=_OUTLIERS, device="meta")
            weight = bnb.nn.Int8Params(old.weight.data, requires_grad=False)
        new.weight, new.bias = weight.to(device), old.bias
        if old.bias is not None:
            old.bias.data = old.bias.data.to(compute)  # as the layer's forward would
        model.set_submodule(path, new.train(old.training))
    set_adapter(model, replace(adapter, frozen=adapter.frozen | (set(model.state_dict(keep_vars=True)) - before)))
    return model


def _multiplied(layer: Any, inputs: Tensor) -> Tensor:
    """Compute Linear4bit's forward, without its changes to the layer (0.50).

    It replaces a weight that FSDP gathers, and in an evaluation on a CPU takes a layout without a backward.
    """
    from bitsandbytes import matmul_4bit

    lowered, state = inputs.to(layer.compute_dtype), layer.quant_state
    outputs: Tensor = matmul_4bit(lowered, layer.weight, bias=layer.bias, quant_state=state)
    return outputs.to(inputs.dtype)


@torch.no_grad()
def round_weights(model: nn.Module, kind: str, dtype: torch.dtype) -> None:
    """Give a base that was quantized from weights of a dtype the values that its adapter was trained beside.

    Args:
        model: The base, with the adapter or without.
    """
    functional = _bitsandbytes().functional
    for name in quantized_of(model) or [f"{layer}.weight" for layer in _linear_layers(model)]:
        weight = model.get_parameter(name)
        if kind == "nf4":
            packed = functional.quantize_4bit(weight.to(dtype), quant_type="nf4", compress_statistics=True)
            rounded = functional.dequantize_4bit(*packed)
        else:
            rounded = functional.int8_vectorwise_dequant(*functional.int8_vectorwise_quant(weight.to(dtype).half())[:2])
        weight.copy_(rounded)


_OUTLIERS = 6.0
"""Inputs beyond it are multiplied in 16 bits (transformers: llm_int8_threshold)."""


def _config(peft: Any, model: nn.Module, section: Model) -> Any:
    adapter = section.adapter
    assert adapter is not None
    task = TASKS[section.task].peft if isinstance(section, HuggingFaceModel) else None
    targets: Any = adapter.targets if isinstance(adapter.targets, str | None) else list(adapter.targets)
    if targets == "all-linear" and not isinstance(section, HuggingFaceModel):
        targets = _linear_layers(model)
    given: dict[str, Any] = adapter.model_dump(exclude={"kind", "rank", "alpha", "dropout", "targets"})
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    if given.get("init_lora_weights") == "uniform":
        given["init_lora_weights"] = True
    given = {**given, "modules_to_save": given["modules_to_save"] or None, "target_modules": targets, "task_type": task}
    if isinstance(adapter, LoraAdapter):
        return peft.LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=adapter.dropout, **given)
    return peft.IA3Config(**given)


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers in repeated blocks, or of all if there are none."""
    blocks = tuple(f"{name}." for name in repeated_blocks(model)) or ("",)
    return [name for name, child in model.named_modules() if type(child) is nn.Linear and name.startswith(blocks)]


def _record(model: nn.Module, wrapper: Any, before: Mapping[str, Tensor]) -> None:
    """Note the adapter of a model. Raises ConfigError if something is trained that peft's files don't hold."""
    from peft.utils.save_and_load import get_peft_model_state_dict

    prefix = next(name for name, child in wrapper.named_modules() if child is model) + "."
    held: dict[str, Any] = {f"{prefix}{name}": name for name in model.state_dict(keep_vars=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter_name = wrapper.active_adapter
        named = get_peft_model_state_dict(wrapper, held, adapter_name=adapter_name, save_embedding_layers=False)
    files, old_names = {own: name for name, own in named.items()}, {id(tensor): name for name, tensor in before.items()}
    tensors, parameters = _tensors(model), dict(model.named_parameters())
    base = {name: old_names[id(each)] for name, each in tensors.items() if id(each) in old_names and name not in files}
    for name in files:
        original = name.replace(f".modules_to_save.{adapter_name}.", ".original_module.")
        if original != name and original in base:
            base[name] = base[original]
    if lost := [name for name, each in parameters.items() if each.requires_grad and name not in files]:
        why = f"{listed(lost, _SHOWN)}: trained, but no part of the adapter in peft's format; freeze it, or name its "
        raise ConfigError(Problem("", "model", f"{why}module in modules_to_save"))
    if changing := [name for name in tensors if name.endswith(".running_mean") and name not in files]:
        why = f"{listed(changing, _SHOWN)} changes in training, and isn't in peft's format unless its module is named"
        raise ConfigError(Problem("", "model.adapter.modules_to_save", why))
    config = {**wrapper.peft_config[adapter_name].to_dict(), "inference_mode": True}  # as `save_pretrained` writes it
    config = {key: value.value if isinstance(value, Enum) else value for key, value in config.items()}
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    frozen = frozenset(name for name in held.values() if name not in files)
    set_adapter(model, Adapter(config, files, base, frozen))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, tied ones under each of their names, the first last."""
    named = (*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
    return dict(reversed(named))


# --- values -------------------------------------------------------------------------------------------------------


def _resets(model: nn.Module) -> dict[str, tuple[Callable[[], object], nn.Module]]:
    """Return the functions that set the initial values of the adapter's layers, with these, by name."""
    from peft.tuners.ia3 import IA3Layer
    from peft.tuners.lora import LoraLayer

    resets: dict[str, tuple[Callable[[], object], nn.Module]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            given = cast("Any", adapter_of(model)).config["init_lora_weights"]
            resets[name] = partial(layer.reset_lora_parameters, _NAME, given), cast("nn.Module", layer)
        elif isinstance(layer, IA3Layer):
            resets[name] = partial(layer.reset_ia3_parameters, _NAME), cast("nn.Module", layer)
    return resets


def _values(meta: MetaModel, sketch: nn.Module, seed: int, names: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the base's values under their new names, then the adapter's."""
    adapter = adapter_of(sketch)
    assert adapter is not None
    by_old: dict[str, list[str]] = {}
    for name, old in adapter.base.items():
        if name in names:
            by_old.setdefault(old, []).append(name)
    for old, value in meta.values(by_old):
        yield from ((name, value) for name in by_old[old])
    for name, (reset, layer) in _resets(sketch).items():
        own = {f"{name}.{key}": key for key, _ in layer.named_parameters() if f"{name}.{key}" not in adapter.base}
        if any(each in names for each in own):
            shapes = {key: layer.get_parameter(key) for key in own.values()}
            with in_memory(layer, shapes) as values, generators_keyed(seed, "module", name):
                reset()
                yield from ((each, values[key]) for each, key in own.items() if each in names)

"""The frozen base of an adapter: its dtype at rest, what it is, and how a trained adapter is merged into it."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash

from lockstep.assembly.sources import facts_of_data, make_model
from lockstep.assembly.weights import save_adapter, tensors_of
from lockstep.core import checksums
from lockstep.core.adapters import ADAPTER_FILE, Adapter, adapter_of
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.hub import snapshot
from lockstep.distributed.collectives import from_first_rank
from lockstep.models.adapters import quantize, round_weights
from lockstep.models.model_tensors import model_tensors
from lockstep.optim.precision import resolve_compute
from lockstep.strategies.registry import AUTO, find_strategy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.assembly.user_objects import UserObjects
    from lockstep.checkpoint.manifest import Manifest
    from lockstep.config.schema import Config, Model
    from lockstep.core.protocols import Axis

PLAIN = {"adapter": None, "quantization": None}
"""The keys of a model without its adapter."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def lower_frozen(model: nn.Module, config: Config, device: torch.device | None = None) -> nn.Module:
    """Return the model with its parameters in the dtypes of `precision.parameters` and `precision.frozen`.

    Args:
        device: The run's; None, in a plan: one that computes in bf16.

    Raises:
        ConfigError: They would be in bf16, and the forward computes in fp32.
    """
    dtype = _dtype(config, device)
    trained = torch.bfloat16 if config.precision.parameters == "bf16" else None
    for parameter in model.parameters():
        wanted = trained if parameter.requires_grad else dtype
        if wanted is not None and parameter.dtype in (torch.float32, torch.bfloat16, torch.float16):
            parameter.data = parameter.data.to(wanted)
    return model


def quantize_base(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Return the model with the weights of `model.quantization` quantized, in place; the base has its values."""
    if config.model.quantization is None:
        return model
    compute = resolve_compute(config.precision.compute, device) or torch.float32
    return quantize(model, config.model.quantization.kind, compute, device)


def dequantized(model: nn.Module, config: Config) -> nn.Module:
    """Return a model whose base has the values of the run's quantized one, in place; without quantization, as it is."""
    if config.model.quantization is not None:
        round_weights(model, config.model.quantization.kind, _dtype(config, None) or torch.float32)
    return model


def _dtype(config: Config, device: torch.device | None) -> torch.dtype | None:
    """Return the dtype that frozen parameters are converted to; None: they stay as they are."""
    precision, strategy = config.precision, config.parallel.strategy
    stay = strategy != AUTO and find_strategy(strategy).memory.in_fp32
    in_fp32 = precision.compute == "fp32" or (device is not None and resolve_compute(precision.compute, device) is None)
    if precision.frozen == "bf16" and in_fp32:
        why = "bf16, but the forward computes in fp32, which takes fp32 weights; set precision.compute: bf16, or fp32"
        raise ConfigError(Problem("", "precision.frozen", why))
    if precision.frozen == "bf16" and stay:
        why = f"bf16, but {strategy} keeps all parameters in one dtype; set fp32, or parallel.strategy: fsdp"
        raise ConfigError(Problem("", "precision.frozen", why))
    if precision.frozen != "auto":
        return torch.bfloat16 if precision.frozen == "bf16" else torch.float32
    if config.model.adapter is None or in_fp32 or stay:
        return None
    return torch.float16 if precision.compute == "fp16" else torch.bfloat16


def base_of(section: Model, model: nn.Module, axis: Axis) -> Mapping[str, str | None] | None:
    """Return what the base of a model's adapter is, for checkpoints, which don't hold it. All ranks together.

    Returns:
        Repository, revision, and hash of its files, or of its values if code of the user makes it; None: there is no
        adapter, or all follows from the config's architecture and seed.
    """
    adapter = adapter_of(model)
    place = getattr(section, "pretrained", None) or (None if continues(section) else section.init_from)
    if adapter is None or (place is None and section.kind not in ("custom", "given")):
        return None

    if place is not None:
        return identity_of(place, axis, getattr(section, "revision", None))

    return identity_of_values(model, adapter.frozen, axis)


def identity_of_values(model: nn.Module, names: Iterable[str], axis: Axis) -> Mapping[str, str | None]:
    """Return the hash of a module's values, as `identity_of` does for files. All ranks together."""

    def find() -> dict[str, str | None]:
        digest, tensors = xxhash.xxh3_128(), model.state_dict()
        for name in sorted(names):
            digest.update(name.encode())
            digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return {"repository": None, "revision": None, "hash": digest.hexdigest()}

    return cast("Mapping[str, str | None]", from_first_rank(axis, find))


def continues(section: Model) -> bool:
    """Return whether `init_from` is an adapter, and not a base."""
    return section.init_from is not None and (Path(section.init_from).expanduser() / ADAPTER_FILE).is_file()


def identity_of(place: str, axis: Axis, revision: str | None = None) -> Mapping[str, str | None]:
    """Return repository, revision and hash of the files of pretrained weights. All ranks together."""

    def find() -> dict[str, str | None]:
        path, digest = Path(place).expanduser(), xxhash.xxh3_128()
        folder = path if path.exists() else snapshot(place, revision)
        for file in [folder] if folder.is_file() else sorted(folder.iterdir()):
            if file.suffix in _WEIGHTS:
                digest.update(f"{file.name} {checksums.hash_of(file)}".encode())
        commit = folder.name if folder.parent.name == "snapshots" else None
        return {"repository": place, "revision": commit, "hash": digest.hexdigest()}

    return cast("Mapping[str, str | None]", from_first_rank(axis, find))


def adapter_in(manifest: Manifest) -> Adapter | None:
    """Return the adapter that a checkpoint holds; None: it holds the whole model."""
    parts = manifest.state.get("data", {}).get("adapter")
    return None if parts is None else Adapter(parts["config"], parts["files"], {}, frozenset())


def merged(config: Config, adapter: Adapter, tensors: Mapping[str, Tensor], given: UserObjects) -> dict[str, Any]:
    """Return the tensors of the base with the adapter added, and the names of tied ones.

    Args:
        config: The run's.
        tensors: The adapter's, by their names in the model.
    """
    import peft

    if config.model.kind == "given":
        why = "--merge builds the base from the config, and this one was passed in Python; export without it, then use "
        raise ConfigError(f"{why}PeftModel.from_pretrained(model, FOLDER).merge_and_unload()")
    plain = config.with_values(model={**PLAIN, **({"init_from": None} if continues(config.model) else {})})
    base = dequantized(make_model(plain, facts_of_data(plain, given), given), config)
    with tempfile.TemporaryDirectory(prefix="lockstep-merge-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its libraries about each other
        save_adapter(adapter, tensors, Path(folder))
        wrapper: Any = peft.PeftModel.from_pretrained(base, folder)
        model: nn.Module = wrapper.merge_and_unload(safe_merge=True)
    return {"tensors": tensors_of(model), "tied": model_tensors(model).tied}

"""The companion of a run: a frozen second model, with outputs that the objective compares with.

batch --> companion, without gradients --> objective.from_companion --> batch.companion --> loss_sum(outputs, batch)

It is the model as the run begins, or pretrained weights. Where the strategy shards parameters, it is sharded as fsdp
does; elsewhere each rank has all of it. Checkpoints name it, and don't hold it. The model as an adapter's run begins is
that model without the adapter: there is no second one.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import safe_open

from lockstep.assembly.adapters import continues, identity_of, identity_of_values, lower_frozen
from lockstep.assembly.parallelize import WholeModel, parallelize, tensor_plan_of
from lockstep.config.schema import ActivationCheckpointing, HuggingFaceModel, Loader
from lockstep.config.training_sections import INITIAL
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.files import write_atomically
from lockstep.core.terminal import echo
from lockstep.data.loader import evaluation_batches
from lockstep.data.order import fingerprint
from lockstep.data.sources import ReferencedSource
from lockstep.distributed.collectives import from_first_rank
from lockstep.models.build import build_meta_model, build_model, parameter_facts, sketch_model
from lockstep.models.model_tensors import model_tensors
from lockstep.models.weight_matching import match_initial_weights
from lockstep.optim.absent import NoOptimizer
from lockstep.plan.batch import micro_ranges
from lockstep.strategies.registry import REFERENCE, find_strategy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from lockstep.assembly.user_objects import UserObjects
    from lockstep.config.schema import Config, Model
    from lockstep.core.protocols import Axis, Source
    from lockstep.core.records import DataFacts, Inputs, ParameterFacts
    from lockstep.distributed.mesh_position import MeshPosition
    from lockstep.distributed.process_group import World
    from lockstep.engine.companion import Companion
    from lockstep.plan.plan import Plan

_KEY = "objective.companion"


def _section(config: Config) -> Model | None:
    """Return the companion as a section `model`; None: there is none, or it is the base. Raises ConfigError."""
    place = config.objective.second_model
    if place is None or is_base(config):
        return None
    if config.model.quantization is not None:
        why = "a companion isn't quantized, so it isn't the same model; take the base itself (initial), or leave it out"
        raise ConfigError(Problem("", "model.quantization", why))
    if place == INITIAL:
        return config.model
    if not isinstance(config.model, HuggingFaceModel):
        why = f"{place} is for a model of kind huggingface, and this is one of kind {config.model.kind}; set initial"
        raise ConfigError(Problem("", _KEY, why))
    revision = config.model.revision if place == config.model.pretrained else None
    keys = {"pretrained": place, "revision": revision, "architecture": None, "init_from": None, "init_partial": False}
    return config.model.model_copy(update=keys)


def is_base(config: Config) -> bool:
    """Return whether the companion is the model without its adapter, which changes nothing before it is trained."""
    adapter = config.model.adapter
    if config.objective.second_model != INITIAL or adapter is None or continues(config.model):
        return False
    return adapter.kind != "lora" or adapter.bias == "none"  # else biases of the base are trained


def companion_facts(
    config: Config, facts: DataFacts, own: Sequence[ParameterFacts], *, trust_remote_code: bool
) -> list[ParameterFacts]:
    """Return the facts of the companion's parameters; `own`: of the model's. Raises ConfigError."""
    section = None if config.objective.precompute else _section(config)
    if section is not None and section is not config.model:
        sketch = sketch_model(section, facts, trust_remote_code=trust_remote_code).requires_grad_(False)
        own = parameter_facts(lower_frozen(sketch, config))
    return [replace(each, trainable=False) for each in own if section is not None]


def whole_companion(
    config: Config,
    plan: Plan,
    facts: DataFacts,
    model: nn.Module,
    given: UserObjects,
    sample: Callable[[], Inputs],
    device: torch.device,
) -> WholeModel | None:
    """Return the companion before it is placed; None: there is none.

    Args:
        model: The model with its initial values, or without values.
    """
    section = _section(config)
    if section is None:
        return None
    seed, trust, meta = config.run.seed, given.trust_remote_code, None
    if section is config.model and not any(parameter.is_meta for parameter in model.parameters()):
        companion, weights = copy.deepcopy(model), None
    else:
        if _is_sharded(config, plan):
            meta = build_meta_model(section, facts, seed, trust_remote_code=trust)
        companion = meta.model if meta else build_model(section, facts, seed, trust_remote_code=trust)
        weights = match_initial_weights(companion, section)
        if weights is not None and meta is None:
            weights.put(companion)
    if section is not config.model:
        companion.requires_grad_(False)
        if config.objective.kind == "distill" and (sizes := [*map(_outputs, (companion, model))])[0] != sizes[1]:
            why = f"it has {sizes[0]:,} tokens or classes, and the model {sizes[1]:,}; take a teacher of the same ones"
            raise ConfigError(Problem("", _KEY, why))
    lower_frozen(companion, config, device).requires_grad_(False).eval()
    tensor_plan = tensor_plan_of(config.parallel.tensor_parallel, plan.mesh, companion)
    return WholeModel(companion, list(model_tensors(companion).shapes), meta, weights, tensor_plan, sample)


def _outputs(model: Any) -> int:
    """Return the number of tokens or classes of a transformers model."""
    head = model.get_output_embeddings()
    return int(model.config.num_labels if head is None else head.weight.shape[0])


def _is_sharded(config: Config, plan: Plan) -> bool:
    return bool(find_strategy(plan.strategy).variant(config.parallel).state.parameters)


def placed(whole: WholeModel | None, config: Config, plan: Plan, world: World) -> nn.Module | None:
    """Return the companion as this rank holds it. All ranks together."""
    if whole is None:
        return None
    name = "fsdp" if _is_sharded(config, plan) else REFERENCE.name
    fsdp = config.parallel.fsdp.model_copy(update={"wrap": "blocks"})  # it may be of other classes
    alone = config.with_values(
        model={"compile": False},
        optim={"ema": None},
        memory={"activation_checkpointing": ActivationCheckpointing(), "activation_offload": "none"},
        parallel={"strategy": name, "fsdp": fsdp},
        run={"determinism": "default"},
    )
    return parallelize(whole, alone, replace(plan, strategy=name), world, NoOptimizer()).sharding.state.model


def companion_identity(config: Config, whole: WholeModel | None, axis: Axis) -> Mapping[str, str | None] | None:
    """Return what the companion is, for checkpoints; None: there is none, or it follows from the config."""
    section = _section(config)
    if whole is not None and section is not None and section.kind == "given":  # training changes it in place
        return identity_of_values(whole.module, whole.module.state_dict(), axis)
    place = None if section is None else getattr(section, "pretrained", None) or section.init_from
    return None if place is None else identity_of(place, axis, getattr(section, "revision", None))


# --- computed before training ---------------------------------------------------------------------------------------

_FILE = "reference.safetensors"


def precompute(
    sources: Mapping[str, Source],
    forward: Callable[[], Companion],
    origin: object,
    plan: Plan,
    position: MeshPosition,
    world: World,
    folder: Path | None,
) -> None:
    """Fill the numbers of sources that have them: the companion's log-probabilities. All ranks together.

    Args:
        sources: By name.
        forward: Makes the companion's forward.
        origin: What the numbers depend on, beside the samples.
        folder: Of the run, which keeps them; None: they are computed at each start.
    """
    keys = {name: fingerprint(source.fingerprint, origin) for name, source in sources.items()}
    file = None if folder is None else folder / _FILE
    known = from_first_rank(world.axis, partial(_read, file, keys))
    companion = None if keys.keys() <= known.keys() else forward()
    for name, source in sources.items():
        if companion is not None and name not in known:
            if world.rank == 0:
                what = f"the reference's log-probabilities of {source.facts.samples:,} samples"
                echo(f"lockstep: computing {what} ({name})", file=sys.stderr, flush=True)
            known[name] = _computed(source, companion, plan.batch.micro_size, position, world)
        _values_of(source).copy_(known[name])
    if file is not None and companion is not None and world.rank == 0:
        write_atomically(file, safetensors.torch.save(known, keys))


def _read(file: Path | None, keys: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the numbers in a file that are of the same samples and companion."""
    if file is None or not file.is_file():
        return {}
    with safe_open(file, "pt") as content:
        own = content.metadata() or {}
        return {name: content.get_tensor(name) for name, key in keys.items() if own.get(name) == key}


def _computed(source: Source, companion: Companion, size: int, position: MeshPosition, world: World) -> Tensor:
    place, values = (position.share, position.shares), torch.zeros_like(_values_of(source))
    batches = evaluation_batches(source, size, *place, Loader(), world.device)
    for batch, (first, stop) in zip(batches, micro_ranges(len(values), size, *place), strict=True):
        numbers, left_out = companion(batch).companion, {sample.index for sample in batch.left_out}
        if batch.samples and position.reports_loss:
            rows = [index for index in range(first, stop) if index not in left_out]
            values[rows] = numbers.float().cpu().view(len(rows), -1)
    return world.axis.sum(values.to(world.device)).cpu()


def _values_of(source: Any) -> Tensor:
    while not isinstance(source, ReferencedSource):
        source = source.source
    return source.values

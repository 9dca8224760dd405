"""The only file that knows all rooms. It calls their constructors in order; what it can't build, it refuses by name.

data --> facts --> model, weights --> transforms --> device --> optimizer --> sharding --> engine --> loader --> session
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.config.deepspeed import engine_config
from lockstep.config.schema import Loader
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import DataFacts, RunFacts
from lockstep.data.custom import adapt_dataset
from lockstep.data.loader import TrainingLoader, evaluation_batches
from lockstep.data.sources import open_source
from lockstep.distributed.collectives import Alone
from lockstep.distributed.consensus import WithOrderedLoss, consensus_over
from lockstep.distributed.memory import memory_of_a_rank, peak_of_a_rank
from lockstep.distributed.place import pair_of_ends, place_of
from lockstep.distributed.rng import KeyedDraws, seed_everything
from lockstep.engine.eager import Eager
from lockstep.engine.numbered import Numbered
from lockstep.models.blocks import blocks_in_line, repeated_blocks
from lockstep.models.build import blank_model, build_model, sketch_model
from lockstep.models.chunked_loss import LossInHead, in_head
from lockstep.models.facts import parameter_facts
from lockstep.models.freezing import freeze
from lockstep.models.objectives import NextToken, Targets, adapt_objective, build_objective, coupling
from lockstep.models.starting_weights import start_weights
from lockstep.models.transformer import flops_per_token
from lockstep.monitor.journal import Journal, recording
from lockstep.optim.groups import parameter_groups
from lockstep.optim.norms import squared_norm
from lockstep.optim.optimizers import Elementwise, adapt_optimizer, build_elementwise, build_optimizer
from lockstep.optim.precision import LossScaler, autocast_context, resolve_compute, set_tf32
from lockstep.plan.plan import Machine, because, derived_for_deepspeed, make_plan, resolve_strategy, strategy_of
from lockstep.plan.schedule import learning_rate
from lockstep.plan.stages import stages_of
from lockstep.sharding.buffers import SharedBuffers
from lockstep.sharding.data_parallel import over_gpus
from lockstep.sharding.ddp import ReplicatedByDDP
from lockstep.sharding.in_backward import UpdatedInBackward
from lockstep.sharding.invariant import Invariant
from lockstep.sharding.pieces import Across, Pieces
from lockstep.sharding.single import Single
from lockstep.sharding.state import of_model
from lockstep.training.invariance import NOTE, refuse_coupled
from lockstep.training.memory_watch import MemoryWatch
from lockstep.training.readback import readback_from
from lockstep.training.session import Rate, Rooms, Session
from lockstep.transforms.activation_checkpointing import RecomputeBlocks
from lockstep.transforms.activation_offload import OffloadActivations
from lockstep.transforms.compiling import Compile
from lockstep.transforms.order import transform
from lockstep.transforms.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from lockstep.config.schema import Config, DataSource, HuggingFaceModel
    from lockstep.core.protocols import Engine, Objective, Optimizer, Sharding, Source, Transform
    from lockstep.core.records import Batch
    from lockstep.distributed.consensus import Consensus
    from lockstep.distributed.place import Place
    from lockstep.distributed.process_group import World
    from lockstep.distributed.ring import Ring
    from lockstep.engine.cutting import Cut
    from lockstep.engine.in_context import InContext
    from lockstep.models.blank import Blank
    from lockstep.plan.mesh import Mesh
    from lockstep.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Given:
    """Objects handed over in Python, in place of what a config names.

    Attributes:
        model: a module (its weights are kept), or a function that makes one (seeded).
        dataset, collate: a map-style Dataset, and how its items become a batch.
        evaluation: further Datasets by name.
        objective: with `count` and `loss_sum` (`core.protocols.Objective`), or one of torch's losses.
        optimizer: makes a torch optimizer from parameter groups.
        schedule: (step from 0, steps of the run or None) -> learning rate as a share of `optim.lr`.
        trust_remote_code: let a Hugging Face model run code that comes with its weights.
    """

    model: nn.Module | Callable[[], nn.Module] | None = None
    dataset: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    objective: object | None = None
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    schedule: Callable[[int, int | None], float] | None = None
    trust_remote_code: bool = False


def assemble(config: Config, world: World, given: Given) -> Session:
    """Puts a run together on this rank; `world` is where it is among the others.

    Raises:
        ConfigError: something that was asked for can't be had; nothing has been trained yet.
    """
    seed_everything(config.run.seed)
    _set_determinism(config)
    set_tf32(config.precision.tf32)
    source, evaluation = open_sources(config, given)
    machine = _machine(config, world)
    blank = _blank(config, source.facts, given, world, machine)
    model = blank.model if blank is not None else make_model(config, source.facts, given)
    plan = make_plan(config, world.size, source.facts, parameter_facts(model), machine)
    notes = list(start_weights(model, config.model)) if blank is None else []
    objective = make_objective(config, source.facts, given)
    divided = _tensor_plan(config, plan.mesh, model)
    if divided:
        _refuse_for_parts(config, given, objective)
    computed = _computed(config, plan.mesh, model, objective)
    blocks = repeated_blocks(model)
    names = list(of_model(model)[0])
    coupled, flops = coupling(model), flops_per_token(model, source.facts)
    transforms = _transforms(config, model, blocks, world)
    model = transform(model, transforms, world.device)
    cut = _cut(config, plan.mesh, world, model, blocks)
    place = place_of(plan.mesh, world)  # what can be refused is refused by now: groups are made by all ranks together
    across = _spread(place, model, divided)
    if config.run.determinism == "invariant":
        refuse_coupled(model, objective)
    parts = _Parts(
        config, world, plan, model, _OptimizerOf(config, given), blank, notes, place, blocks, names, cut, across, source
    )
    sharding = _sharding(parts)
    plan = replace(plan, warnings=(*plan.warnings, *notes))
    dtype = resolve_compute(config.precision.compute, world.device)
    scaler = LossScaler(config.precision.loss_scale, enabled=dtype is torch.float16, device=world.device)
    engine, consensus = _engine_and_vote(parts, objective, computed, sharding)
    loader = TrainingLoader(
        source,
        plan.batch,
        place.share,
        config.run.seed,
        shuffle=config.data.shuffle,
        drop_last=config.data.drop_last,
        options=config.data.loader,
        device=world.device,
        count=objective.count,
    )
    rooms = Rooms(
        config=config,
        plan=plan,
        world=world,
        place=place,
        objective=objective,
        sharding=sharding,
        engine=engine,
        loader=loader,
        source=source,
        evaluation=evaluation,
        consensus=consensus,
        readback=readback_from(world.device),
        scaler=scaler,
        rate=_rate(config, given),
        coupled=coupled,
        flops_per_token=flops,
        watch=_watch(config, transforms, world),
        updates_ahead=sharding.begin if isinstance(sharding, UpdatedInBackward) else None,
    )
    return Session(rooms)


def open_sources(config: Config, given: Given) -> tuple[Source, dict[str, Source]]:
    """The training source and the evaluation sources by name."""
    train = _open(config, config.data.train, given, given.dataset, "data.train")
    evaluation = {
        name: _open(config, section, given, given.evaluation.get(name), f"data.evaluation.{name}")
        for name, section in config.data.evaluation.items()
    }
    return train, evaluation


def make_model(config: Config, facts: DataFacts, given: Given) -> nn.Module:
    """On the CPU, in fp32, with its usual first weights."""
    if config.model.kind != "given":
        return build_model(config.model, facts, config.run.seed, trust_remote_code=given.trust_remote_code)
    model = given.model
    if not isinstance(model, nn.Module) and callable(model):
        model = model()
    if not isinstance(model, nn.Module):
        raise _not_given("model", "a torch.nn.Module, or a function that makes one", given.model)
    freeze(model, config.model.freeze)
    return model


def make_objective(config: Config, facts: DataFacts, given: Given) -> Objective:
    """What the config names, or what was handed over."""
    if given.objective is not None:
        return adapt_objective(given.objective)
    if config.objective.kind == "given":
        raise _not_given("objective", "an object with `count` and `loss_sum`", None)
    return build_objective(config.objective, config.model, facts)


def run_facts(
    session: Session, recipe: str, folder: str, resumed_from: int | None = None, notes: Sequence[str] = ()
) -> RunFacts:
    """What the start of the run prints."""
    from lockstep.monitor.meters import peak_flops

    rooms = session.rooms
    plan, world = rooms.plan, rooms.world
    dtype = resolve_compute(rooms.config.precision.compute, world.device)
    precision = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    device_name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    return RunFacts(
        recipe=recipe,
        folder=folder,
        strategy=plan.strategy if plan.mesh.shares == plan.mesh.ranks else strategy_of(plan),
        backend=world.backend,
        precision=precision,
        device=device_name,
        ranks=world.size,
        steps=plan.steps,
        global_size=plan.batch.global_size,
        micro_size=plan.batch.micro_size,
        accumulation=plan.batch.accumulation,
        parameters=plan.parameters,
        trainable=plan.trainable,
        epoch_samples=plan.epoch_samples,
        peak_flops=peak_flops(device_name, precision),
        flops_per_token=rooms.flops_per_token,
        resumed_from=resumed_from,
        shares=rooms.place.shares,
        notes=(*plan.warnings, *_notes(session), *notes),
    )


def _notes(session: Session) -> tuple[str, ...]:
    rooms = session.rooms
    notes = []
    if rooms.plan.strategy == "fsdp" and (told := because(rooms.plan)):
        notes.append(told)
    coupled = rooms.coupled
    if coupled is not None or not rooms.objective.decomposes:
        reason = coupled or "the objective says that it does not decompose over samples"
        notes.append(f"{reason}: this run depends on batch.micro_size and on the number of ranks")
    if rooms.plan.batch.fixed:
        notes.append(NOTE)
    if rooms.plan.strategy == "dp" and rooms.sharding.module is rooms.sharding.bare:
        notes.append("dp spreads a batch over the GPUs of one process; with fewer than two it runs as single")
    compression = rooms.config.parallel.ddp.compression if rooms.plan.strategy == "ddp" else "none"
    if compression != "none":
        notes.append(
            f"parallel.ddp.compression {compression} loses bits of each gradient: "
            f"the curve is close to the single process's, not equal"
        )
    if compression == "powersgd":
        notes.append("what powersgd remembers is not saved: a run that goes on is not, to the bit, one never stopped")
    return tuple(notes)


# --- single parts -------------------------------------------------------------------------------------------------


def _open(config: Config, section: DataSource, given: Given, dataset: Any, key: str) -> Source:
    if section.kind == "given":
        if dataset is None:
            raise _not_given(key, "a map-style Dataset", dataset)
        return adapt_dataset(dataset, given.collate)
    task, tokenizer = None, None
    if config.model.kind == "huggingface":
        model: HuggingFaceModel = config.model
        task, tokenizer = model.task, model.pretrained
    return open_source(section, task=task, tokenizer=tokenizer)


def _not_given(key: str, wanted: str, got: object) -> ConfigError:
    found = "nothing was" if got is None else f"a {type(got).__name__} was"
    return ConfigError(Problem("", key, f"kind `given` takes {wanted} handed over in Python, and {found}"))


def _set_determinism(config: Config) -> None:
    if config.run.determinism == "default":
        return
    import os

    if config.run.determinism == "invariant":
        torch.set_num_threads(1)  # kernels add in another order with another number, which launchers derive from ranks

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it; read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _transforms(config: Config, model: nn.Module, blocks: Sequence[str], world: World) -> list[Transform]:
    chosen: list[Transform] = []
    options, compiles = config.memory.activation_checkpointing, config.model.compile
    by_compiler = compiles and options.mode == "budget"
    if options.mode != "none" and not by_compiler:
        chain = blocks_in_line(model, list(blocks)) if options.mode == "segments" else blocks
        chosen.append(RecomputeBlocks(options, chain, _unheard, world.axis.broadcast))
    if config.memory.activation_offload == "cpu":
        chosen.append(OffloadActivations())
    if compiles:
        chosen.append(
            Compile(resolve_compute(config.precision.compute, world.device), options.budget if by_compiler else 1.0)
        )
    if config.parallel.ddp.sync_batchnorm:
        chosen.append(SyncBatchNorm())
    return chosen


def _watch(config: Config, transforms: Sequence[Transform], world: World) -> MemoryWatch | None:
    options = config.memory.activation_checkpointing
    if options.mode != "adaptive":
        return None
    switch = next(one.switch for one in transforms if isinstance(one, RecomputeBlocks))
    limit = memory_of_a_rank(world)
    return MemoryWatch(
        switch,
        used=lambda: peak_of_a_rank(world.device) / limit,
        threshold=options.threshold,
        look_every=options.look_every,
        speaks=world.rank == 0,
    )


class _OptimizerOf:
    """Makes the optimizer of the parameters that a strategy gives it.

    Attributes:
        users: it is one that was handed over, of which nothing is known.
    """

    def __init__(self, config: Config, given: Given) -> None:
        self._optim = config.optim
        self._make = given.optimizer
        self.users = given.optimizer is not None

    def __call__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        groups = parameter_groups(parameters, self._optim)
        if self._make is None:
            return build_optimizer(self._optim, groups)
        for group in groups:
            group.setdefault("lr", self._optim.lr * group["lr_scale"])
        return adapt_optimizer(self._make(groups))

    def elementwise(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Elementwise:
        """For a strategy that lays the elements of all parameters end to end, and makes the step by itself."""
        if self.users:
            raise ConfigError(
                "an optimizer that was handed over may look at a parameter's shape, and DeepSpeed gives it flat parts; "
                "name one in optim.name, or take parallel.strategy: fsdp, or ddp"
            )
        return build_elementwise(self._optim, parameter_groups(parameters, self._optim))


def _unheard() -> AbstractContextManager[object]:
    """What user code logs inside goes nowhere."""
    return recording(Journal())


def _tensor_plan(config: Config, mesh: Mesh, model: nn.Module) -> dict[str, str]:
    """How each module is divided, if any is."""
    if mesh.tensor == 1:
        return {}
    from lockstep.models.transformer import SEQUENCE_PLAN, TENSOR_PLAN, Transformer
    from lockstep.transforms.tensor_plans import tensor_plan

    options = config.parallel.tensor_parallel
    ours = SEQUENCE_PLAN if options.sequence_parallel else TENSOR_PLAN
    return tensor_plan(model, options, mesh.tensor, ours if isinstance(model, Transformer) else None)


def _spread(place: Place, model: nn.Module, plan: Mapping[str, str]) -> Across | None:
    """Divides the matrices that this rank has."""
    if not plan:
        return None
    from lockstep.transforms.tensor_parallel import spread  # DTensors take 0.5 s to import

    assert place.device_mesh is not None, "a model whose matrices are divided has a mesh"
    found = spread(model, plan, place.device_mesh["tensor"])
    return Across(place.tensor, found.alike, found.partial)


def _refuse_for_parts(config: Config, given: Given, objective: Objective) -> None:
    """Raises ConfigError: something that was handed over doesn't know what to do with parts of matrices."""
    if given.optimizer is not None:
        why = (
            "an optimizer that was handed over may look at a parameter's shape, and with parallel.tensor it gets parts"
        )
        raise ConfigError(
            Problem("", "parallel.tensor", f"{why}; name one in optim.name, or leave parallel.tensor out")
        )
    if config.parallel.tensor_parallel.loss_parallel and not isinstance(objective, NextToken | Targets):
        why = "true, but an objective of your own takes whole logits; write false"
        raise ConfigError(Problem("", "parallel.tensor_parallel.loss_parallel", why))


def _cut(config: Config, mesh: Mesh, world: World, model: nn.Module, blocks: Sequence[str]) -> Cut | None:
    """This rank's stages, if the model is cut into any."""
    if mesh.pipeline == 1:
        return None
    from lockstep.engine.cutting import Cut, Cutting

    options = config.parallel.pipeline_parallel
    asked = Cutting(
        rank=mesh.coordinates(world.rank)["pipeline"],
        ranks=mesh.pipeline,
        schedule=options.schedule,
        stages_per_rank=stages_of(options.schedule, options.stages_per_rank),
        split=None if options.split == "auto" else options.split,
    )
    return Cut(model, blocks_in_line(model, blocks), asked, world.device)


def _computed(config: Config, mesh: Mesh, model: nn.Module, objective: Objective) -> Objective:
    """The objective as a rank computes it: of its own positions, in the model's head."""
    if mesh.context > 1:
        if not isinstance(objective, NextToken | Targets) or not objective.language or _has_two_sequences(model):
            kind = "two sequences" if _has_two_sequences(model) else "an objective that isn't of tokens"
            why = f"{mesh.context} divides a sequence of tokens that all have targets, and here is {kind}; leave it out"
            raise ConfigError(Problem("", "parallel.context", why))
        objective = objective.aligned()
    if config.memory.loss_chunk is not None:
        objective = in_head(objective, model, config.memory.loss_chunk)
    return objective


def _has_two_sequences(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _in_context(parts: _Parts, ring: Ring, objective: Objective, computed: Objective, sharding: Sharding) -> InContext:
    assert isinstance(objective, NextToken | Targets), "others were refused"
    world, config = parts.world, parts.config
    if world.device.type == "cuda" and not config.run.allow_untested:
        why = f"{ring.size} was never tested on GPUs; --allow-untested tries it"
        raise ConfigError(Problem("", "parallel.context", why))
    from lockstep.engine.in_context import Divider, InContext

    divider = Divider(sharding.bare, ring, objective.targets_of)
    prepare = divider if not isinstance(computed, LossInHead) else _after(divider, computed.show)
    eager = Eager(
        sharding,
        computed,
        autocast_context(resolve_compute(config.precision.compute, world.device), world.device),
        KeyedDraws(config.run.seed, parts.place.share, world.device, parts.place.coordinates["context"]).set,
        _unheard,
        prepare,
    )
    engine = InContext(eager, divider)
    engine.rehearse(next(evaluation_batches(parts.source, 2, 0, 1, Loader(), world.device)), world.axis)
    return engine


def _after(first: Callable[[Batch], Batch], then: Callable[[Batch], Batch]) -> Callable[[Batch], Batch]:
    return lambda batch: then(first(batch))


def _engine_and_vote(
    parts: _Parts, told: Objective, objective: Objective, sharding: Sharding
) -> tuple[Engine, Consensus]:
    """Args:
    told: what people asked for.
    objective: as it is computed.
    """
    config, place, world, cut = parts.config, parts.place, parts.world, parts.cut
    autocast = autocast_context(resolve_compute(config.precision.compute, world.device), world.device)
    consensus = consensus_over(world.axis, world.device)
    if cut is not None:
        from lockstep.engine.pipeline import Pipelined

        engine: Engine = Pipelined(
            sharding,
            objective,
            autocast,
            KeyedDraws(config.run.seed, place.share, world.device).set,
            _unheard,
            cut=cut,
            schedule=config.parallel.pipeline_parallel.schedule,
            axis=place.pipeline,
            group=place.pipeline_group,
            device=world.device,
        )
        return engine, consensus
    if place.ring is not None:
        return _in_context(parts, place.ring, told, objective, sharding), consensus
    prepare: Any = {"prepare": objective.show} if isinstance(objective, LossInHead) else {}
    if not isinstance(sharding, Invariant):
        part = place.coordinates["tensor"] if config.parallel.tensor_parallel.sequence_parallel else 0
        draws = KeyedDraws(config.run.seed, place.share, world.device, part)
        return Eager(sharding, objective, autocast, draws.set, _unheard, **prepare), consensus
    eager = partial(Eager, sharding, objective, autocast, unheard=_unheard, **prepare)
    draws = KeyedDraws(config.run.seed, 0, world.device)
    engine = Numbered(eager, draws.set, partial(parts.plan.batch.share, rank=place.share), sharding.begin)
    return engine, WithOrderedLoss(consensus, sharding.loss_sum)


def _rate(config: Config, given: Given) -> Rate:
    custom, optim, schedule = given.schedule, config.optim, config.schedule
    if custom is None:
        return lambda done, step, steps: learning_rate(optim, schedule, done, step, steps)
    return lambda done, step, steps: optim.lr * custom(step, steps)


# --- shardings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a strategy is made of.

    Attributes:
        model: on the CPU; without values if it is `blank`'s.
        notes: what people should know; what is found on the way joins.
        blocks: names of the repeated layers of the whole model.
        names: of the tensors of the whole model, in order.
        cut: this rank's stages; None: it has the whole model.
        across: with whom it shares each matrix; None: with nobody.
        source: of the training samples.
    """

    config: Config
    world: World
    plan: Plan
    model: nn.Module
    optimizer_of: _OptimizerOf
    blank: Blank | None
    notes: list[str]
    place: Place
    blocks: Sequence[str]
    names: Sequence[str]
    cut: Cut | None
    across: Across | None
    source: Source

    def make_pieces(self) -> Pieces:
        """Who holds what of the model. All ranks together, once: a group may be made."""
        place, cut = self.place, self.cut
        shared = cut.shared if cut is not None else ()
        ends = pair_of_ends(place, cut.owners[0], cut.owners[-1]) if cut is not None and shared else Alone()
        return Pieces(
            self.model,
            self.names,
            place.pipeline,
            shared=shared,
            ends=ends,
            device=self.world.device,
            across=self.across,
        )


def _sharding(parts: _Parts) -> Sharding:
    """Of the strategy that is planned."""
    if parts.config.run.determinism == "invariant":
        return _invariant(parts)
    if parts.plan.strategy == "ddp" and parts.plan.mesh.pieces > 1:
        return _replicas(parts)  # DistributedDataParallel takes a whole model
    return _SHARDING[parts.plan.strategy](parts)


def _single(parts: _Parts) -> Sharding:
    model = parts.model.to(parts.world.device)
    if parts.config.optim.in_backward:
        return UpdatedInBackward(model, parts.optimizer_of(model.named_parameters()), squared_norm)
    return Single(model, parts.optimizer_of(model.named_parameters()), squared_norm)


def _data_parallel(parts: _Parts) -> Sharding:
    model = parts.model.to(parts.world.device)
    gpus = torch.cuda.device_count() if parts.world.device.type == "cuda" else 0
    if gpus > 1 and not parts.config.run.allow_untested:
        why = "dp over several GPUs was never tested; --allow-untested tries it, ddp is faster"
        raise ConfigError(Problem("", "parallel.strategy", why))
    return over_gpus(model, parts.optimizer_of(model.named_parameters()), squared_norm, gpus)


def _ddp(parts: _Parts) -> Sharding:
    model, world = parts.model.to(parts.world.device), parts.world
    return ReplicatedByDDP(
        model,
        parts.optimizer_of(model.named_parameters()),
        squared_norm,
        parts.config.parallel.ddp,
        ranks=world.axis.size,
        device=world.device,
        backend=world.backend,
    )


def _invariant(parts: _Parts) -> Sharding:
    model, world = parts.model.to(parts.world.device), parts.world
    optimizer = parts.optimizer_of(model.named_parameters())
    return Invariant(model, optimizer, squared_norm, world.axis, int(parts.config.parallel.ddp.bucket_mb * 2**20))


def _fsdp(parts: _Parts) -> Sharding:
    from lockstep.sharding.fsdp import ShardedByFSDP, give_memory, shard  # DTensors take 0.5 s to import

    model, options, place = parts.model, parts.config.parallel.fsdp, parts.place
    blocks = parts.blocks if parts.cut is None else parts.cut.blocks
    shard(model, options, place, parts.world.device, blocks)
    if parts.blank is not None:
        give_memory(model, parts.world.device)
        parts.blank.fill()
        parts.notes.extend(start_weights(model, parts.config.model))
    return ShardedByFSDP(
        model,
        parts.optimizer_of,
        squared_norm,
        options,
        place,
        parts.make_pieces(),
        whole=parts.optimizer_of.users,
        find_unused=parts.config.parallel.ddp.find_unused_parameters,
    )


def _replicas(parts: _Parts) -> Sharding:
    from lockstep.sharding.replicas import Replicas

    model = parts.model.to(parts.world.device)
    buffers = SharedBuffers(model, parts.place.with_share)
    return Replicas(model, parts.optimizer_of, squared_norm, parts.place.data, parts.make_pieces(), buffers)


def _deepspeed(parts: _Parts) -> Sharding:
    from lockstep.sharding.deepspeed import DividedByDeepSpeed, ReplicatedByDeepSpeed, engage

    model, device = parts.model.to(parts.world.device), parts.world.device
    handed = engine_config(parts.config, derived_for_deepspeed(parts.plan))
    if parts.config.parallel.deepspeed.zero_stage == 0:
        optimizer = parts.optimizer_of(model.named_parameters())
        idle = torch.optim.SGD([one for one in model.parameters() if one.requires_grad])  # DeepSpeed wants one to begin
        return ReplicatedByDeepSpeed(engage(model, idle, handed, device), model, optimizer, squared_norm)
    rule = parts.optimizer_of.elementwise(model.named_parameters())
    engine = engage(model, rule.optimizer, handed, device)
    return DividedByDeepSpeed(engine, model, squared_norm, rule.entries, counts=rule.counts)


def _machine(config: Config, world: World) -> Machine:
    memory = memory_of_a_rank(world) if config.parallel.strategy == "auto" else None
    return Machine(world.machine_ranks, memory)


def _blank(config: Config, facts: DataFacts, given: Given, world: World, machine: Machine) -> Blank | None:
    """A model that is to be divided gets its values afterwards, if they can come part by part."""
    strategy: str = config.parallel.strategy
    if strategy == "auto" and world.size > 1 and config.model.kind not in ("given", "custom"):
        sketch = sketch_model(config.model, facts, trust_remote_code=given.trust_remote_code)
        strategy, _ = resolve_strategy(config, world.size, parameter_facts(sketch), machine.memory)
    if strategy != "fsdp":
        return None
    return blank_model(config.model, facts, config.run.seed, trust_remote_code=given.trust_remote_code)


_SHARDING: Mapping[str, Callable[[_Parts], Sharding]] = {
    "single": _single,
    "dp": _data_parallel,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "deepspeed": _deepspeed,
}

"""The only file that knows all rooms. It calls their constructors in order; what it can't build, it refuses by name.

data --> facts --> model, weights --> transforms --> device --> optimizer --> sharding --> engine --> loader --> session
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.config.deepspeed import engine_config
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.records import DataFacts, RunFacts
from lockstep.data.custom import adapt_dataset
from lockstep.data.loader import TrainingLoader
from lockstep.data.sources import open_source
from lockstep.distributed.consensus import consensus_over
from lockstep.distributed.memory import memory_of_a_rank
from lockstep.distributed.rng import KeyedDraws, seed_everything
from lockstep.engine.eager import Eager
from lockstep.models.blocks import repeated_blocks
from lockstep.models.build import build_model
from lockstep.models.facts import parameter_facts
from lockstep.models.freezing import freeze
from lockstep.models.objectives import adapt_objective, build_objective, coupling
from lockstep.models.starting_weights import start_weights
from lockstep.monitor.journal import Journal, recording
from lockstep.optim.groups import parameter_groups
from lockstep.optim.norms import squared_norm
from lockstep.optim.optimizers import Elementwise, adapt_optimizer, build_elementwise, build_optimizer
from lockstep.optim.precision import LossScaler, autocast_context, resolve_compute, set_tf32
from lockstep.plan.plan import Machine, derived_for_deepspeed, make_plan
from lockstep.plan.schedule import learning_rate
from lockstep.sharding.data_parallel import over_gpus
from lockstep.sharding.ddp import ReplicatedByDDP
from lockstep.sharding.single import Single
from lockstep.training.readback import readback_from
from lockstep.training.session import Rate, Rooms, Session
from lockstep.transforms.compiling import Compile
from lockstep.transforms.order import transform
from lockstep.transforms.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from lockstep.config.schema import Config, DataSource, HuggingFaceModel
    from lockstep.core.protocols import Objective, Optimizer, Sharding, Source, Transform
    from lockstep.distributed.process_group import World
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
    model = make_model(config, source.facts, given)
    notes = start_weights(model, config.model)
    memory = memory_of_a_rank(world) if config.parallel.strategy == "auto" else None
    machine = Machine(world.machine_ranks, memory)
    plan = make_plan(config, world.size, source.facts, parameter_facts(model), machine)
    plan = replace(plan, warnings=(*plan.warnings, *notes))
    objective = make_objective(config, source.facts, given)
    model = transform(model, _transforms(config, world.device), world.device).to(world.device)
    sharding = _SHARDING[plan.strategy](config, world, plan, model, _OptimizerOf(config, given))
    dtype = resolve_compute(config.precision.compute, world.device)
    scaler = LossScaler(config.precision.loss_scale, enabled=dtype is torch.float16, device=world.device)
    draws = KeyedDraws(config.run.seed, world.axis.rank, world.device)
    loader = TrainingLoader(
        source,
        plan.batch,
        world.axis.rank,
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
        objective=objective,
        sharding=sharding,
        engine=Eager(sharding, objective, autocast_context(dtype, world.device), draws.set, _unheard),
        loader=loader,
        source=source,
        evaluation=evaluation,
        consensus=consensus_over(world.axis, world.device),
        readback=readback_from(world.device),
        scaler=scaler,
        rate=_rate(config, given),
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
    from lockstep.models.transformer import flops_per_token
    from lockstep.monitor.meters import peak_flops

    rooms = session.rooms
    plan, world = rooms.plan, rooms.world
    dtype = resolve_compute(rooms.config.precision.compute, world.device)
    precision = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    device_name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    return RunFacts(
        recipe=recipe,
        folder=folder,
        strategy=plan.strategy,
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
        flops_per_token=flops_per_token(rooms.sharding.bare, rooms.source.facts),
        resumed_from=resumed_from,
        notes=(*plan.warnings, *_notes(session), *notes),
    )


def _notes(session: Session) -> tuple[str, ...]:
    rooms = session.rooms
    notes = []
    coupled = coupling(rooms.sharding.bare)
    if coupled is not None or not rooms.objective.decomposes:
        reason = coupled or "the objective says that it does not decompose over samples"
        notes.append(f"{reason}: this run depends on batch.micro_size and on the number of ranks")
    if rooms.plan.strategy == "dp" and rooms.sharding.module is rooms.sharding.bare:
        notes.append("dp spreads a batch over the GPUs of one process; with fewer than two it runs as single")
    if rooms.config.parallel.ddp.compression != "none":
        notes.append(
            f"parallel.ddp.compression {rooms.config.parallel.ddp.compression} loses bits of each gradient: "
            f"the curve is close to the single process's, not equal"
        )
    if rooms.config.parallel.ddp.compression == "powersgd":
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
    if config.run.determinism != "deterministic":
        return
    import os

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it; read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _transforms(config: Config, device: torch.device) -> list[Transform]:
    chosen: list[Transform] = []
    if config.model.compile:
        chosen.append(Compile(resolve_compute(config.precision.compute, device)))
    if config.parallel.ddp.sync_batchnorm:
        chosen.append(SyncBatchNorm())
    return chosen


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


def _rate(config: Config, given: Given) -> Rate:
    custom, optim, schedule = given.schedule, config.optim, config.schedule
    if custom is None:
        return lambda done, step, steps: learning_rate(optim, schedule, done, step, steps)
    return lambda done, step, steps: optim.lr * custom(step, steps)


# --- shardings ----------------------------------------------------------------------------------------------------


def _single(config: Config, world: World, plan: Plan, model: nn.Module, optimizer_of: _OptimizerOf) -> Sharding:
    return Single(model, optimizer_of(model.named_parameters()), squared_norm)


def _data_parallel(config: Config, world: World, plan: Plan, model: nn.Module, optimizer_of: _OptimizerOf) -> Sharding:
    gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    return over_gpus(model, optimizer_of(model.named_parameters()), squared_norm, gpus)


def _ddp(config: Config, world: World, plan: Plan, model: nn.Module, optimizer_of: _OptimizerOf) -> Sharding:
    return ReplicatedByDDP(
        model,
        optimizer_of(model.named_parameters()),
        squared_norm,
        config.parallel.ddp,
        ranks=world.axis.size,
        device=world.device,
        backend=world.backend,
    )


def _fsdp(config: Config, world: World, plan: Plan, model: nn.Module, optimizer_of: _OptimizerOf) -> Sharding:
    from lockstep.sharding.fsdp import ShardedByFSDP, shard  # DTensors take 0.5 s to import

    options = config.parallel.fsdp
    shard(model, options, plan.mesh, world.device, repeated_blocks(model))
    return ShardedByFSDP(model, optimizer_of, squared_norm, options, plan.mesh, whole=optimizer_of.users)


def _deepspeed(config: Config, world: World, plan: Plan, model: nn.Module, optimizer_of: _OptimizerOf) -> Sharding:
    from lockstep.sharding.deepspeed import DividedByDeepSpeed, ReplicatedByDeepSpeed, engage

    handed = engine_config(config, derived_for_deepspeed(plan))
    if config.parallel.deepspeed.zero_stage == 0:
        optimizer = optimizer_of(model.named_parameters())
        idle = torch.optim.SGD([one for one in model.parameters() if one.requires_grad])  # DeepSpeed wants one to begin
        return ReplicatedByDeepSpeed(engage(model, idle, handed, world.device), model, optimizer, squared_norm)
    rule = optimizer_of.elementwise(model.named_parameters())
    engine = engage(model, rule.optimizer, handed, world.device)
    return DividedByDeepSpeed(engine, model, squared_norm, rule.entries, counts=rule.counts)


_SHARDING: Mapping[str, Callable[[Any, Any, Any, nn.Module, Any], Any]] = {
    "single": _single,
    "dp": _data_parallel,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "deepspeed": _deepspeed,
}

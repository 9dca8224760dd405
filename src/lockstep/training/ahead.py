"""Does ahead what every rank of every round would do before it trains: in the launcher, and in ranks that wait.

    launcher    imports, data, versions, git's state, a plan that nothing uses --> fork --> ranks: forward, backward ...
                                                                               --> fork --> ranks of the next round:
                                                                                            small components, wait

A plan is made only for what it leaves behind: schemas, patterns and operators that are compiled when they are first
used. Nothing in the launcher starts a thread or touches an accelerator, after which no rank could be forked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lockstep.config.trust import code_in
from lockstep.config.writing import plain_yaml, to_public
from lockstep.core import standby
from lockstep.core.errors import Failure
from lockstep.core.hub import needs_hub
from lockstep.data.hub import names_hub
from lockstep.launch.forking import may_fork
from lockstep.models.build import built_ahead, describe_model
from lockstep.monitor.environment import described_ahead
from lockstep.monitor.meters import peak_flops
from lockstep.plan.plan import make_plan
from lockstep.strategies.record import resolved
from lockstep.strategies.registry import AUTO, find_strategy
from lockstep.training.assemble import assemble, make_components
from lockstep.training.components import Purpose
from lockstep.training.session import Session
from lockstep.training.sources import INERT_DATA, facts_of_data, opened_ahead
from lockstep.training.user_objects import UserObjects

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.core.protocols import Source
    from lockstep.distributed.process_group import World
    from lockstep.training.components import Components

_OWN_MODELS = ("transformer", "text-classifier", "image-classifier")
"""Kinds of models whose code is Lockstep's."""
_SMALL = 4_000_000  # parameters: with gradients and Adam's moments, 64 MB of a rank
_NOT_COMPONENTS = ("monitors", "monitor.trackers", "checkpoint.storage")


def imports_ahead(config: Config) -> list[str]:
    """Return the slow modules that every rank will import, for a launcher that imports them once and forks ranks.

    Fails early if the config needs the hub, which can't be reached.
    """
    if names_hub(config):
        needs_hub()
    models = ["transformers.modeling_utils"] if config.model.kind == "huggingface" else []
    events = ["tensorboard.compat.proto.event_pb2"] if config.monitor.tensorboard else []
    build = "" if config.parallel.strategy == AUTO else find_strategy(config.parallel.strategy).build
    builders = [build.partition(":")[0]] if isinstance(build, str) and build.startswith("lockstep.") else []
    # DDP, FSDP and DeepSpeed import the compiler; a plan compares all strategies; DDP's forward imports the profiler
    common = ["torch._dynamo", "lockstep.config.deepspeed", "torch.profiler._cupti_monitor"]
    when_it_hangs = "lockstep.distributed.flight_record"
    return [*common, when_it_hangs, *models, *events, *builders]


@contextmanager
def prepared_ahead(config: Config, ranks: int) -> Iterator[None]:
    """Hold what ranks that are forked while the block runs have in common."""
    if may_fork():
        _import_on_cpu(config)
    if config.model.kind not in _OWN_MODELS or not may_fork():  # other models run code of their own, or are given
        yield
        return
    with opened_ahead(config) as source, described_ahead(), ExitStack() as held:
        with suppress(Failure):  # which the ranks report
            if source is not None:
                held.enter_context(built_ahead(config.model, source.facts, config.run.seed))
            _rehearse(config, ranks, source)
        yield


def _import_on_cpu(config: Config) -> None:
    """Import what every rank of the strategy imports on the CPU. An import that fails fails in the ranks, too."""
    chosen = config.parallel.strategy
    if chosen != AUTO and (name := find_strategy(chosen).import_on_cpu) and _trains_on_cpu(config):
        with suppress(Exception):
            resolved(name)(torch.device("cpu"))


def _trains_on_cpu(config: Config) -> bool:
    """Return whether ranks certainly train on the CPU; no driver is asked, or they couldn't be forked."""
    device = config.launch.device
    return device == "cpu" or (device == "auto" and torch.accelerator.current_accelerator() is None)


def _rehearse(config: Config, ranks: int, source: Source | None) -> None:
    plain_yaml(to_public(config))
    peak_flops("cpu", "fp32")
    if source is not None:
        make_plan(config, ranks, source.facts, describe_model(config.model, source.facts))


# --- in ranks that wait -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """Components that a rank has made before it was needed, of these settings."""

    config: Config
    components: Components


def ready_ahead(config: Config, given: UserObjects, world: World) -> Ready | None:
    """Return the components of a rank that waits; None: it doesn't, or they are large, or run code of other people."""
    if not standby.is_waiting() or not _may_be_ready(config, given):
        return None
    return Ready(config, make_components(config, world, given, Purpose.RESUME))


def session_with(ready: Ready | None, config: Config, given: UserObjects, world: World, purpose: Purpose) -> Session:
    """Return the session of a rank, with the components that are ready if it needs such."""
    if ready is not None:
        if purpose is Purpose.RESUME and config == ready.config:
            return Session(ready.components)
        ready.components.loader.close()
        ready.components.sharding.step.close()
    return assemble(config, world, given, purpose)


def _may_be_ready(config: Config, given: UserObjects) -> bool:
    sections = (config.data.train, *config.data.evaluation.values())
    is_own = config.model.kind in _OWN_MODELS and all(section.kind in INERT_DATA for section in sections)
    used = [key for key in code_in(config) if not key.startswith(_NOT_COMPONENTS)]
    if not is_own or used or replace(given, monitors=(), trackers=(), storage=None) != UserObjects():
        return False
    parallel = config.parallel
    is_whole = parallel.pipeline == parallel.tensor == parallel.context == 1
    has_engine = parallel.strategy != AUTO and find_strategy(parallel.strategy).import_on_cpu  # another library's
    if not is_whole or has_engine or config.model.compile or not _trains_on_cpu(config):
        return False
    facts = describe_model(config.model, facts_of_data(config, given))
    return sum(parameter.elements for parameter in facts) <= _SMALL

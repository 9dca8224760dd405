"""Plans derived from a config without starting a process or allocating the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.assembly.adapters import lower_frozen
from lockstep.assembly.companion import companion_facts
from lockstep.assembly.parallelize import check_model
from lockstep.assembly.sources import open_sources
from lockstep.assembly.user_objects import UserObjects, refuse_given
from lockstep.core.errors import ConfigError
from lockstep.distributed.memory import memory_if_started
from lockstep.launch.devices import choose_ranks, count_accelerators, count_cores
from lockstep.plan.stated_facts import facts_of_config, sizes_of_config

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config
    from lockstep.core.records import DataFacts
    from lockstep.plan.choosing import Decision
    from lockstep.plan.plan import Plan


_LONG = {"steps": 1_000_000, "samples": None, "tokens": None, "epochs": None}
"""A length that makes no schedule too long: no warning of one is printed where the length isn't known."""
_NO_EPOCH = {"epoch_steps": 0, "epoch_samples": 0}


def plan_run(
    loaded: LoadedConfig,
    memory: int | None,
    decision: tuple[Decision | None, str] = (None, ""),
    *,
    trust_remote_code: bool,
) -> Plan:
    """Return the plan of a run.

    Args:
        memory: Bytes of each rank; None: as on this machine.
        decision: What `auto` takes; or None, and why it isn't known.
    """
    from lockstep.models.build import parameter_facts, sketch_model
    from lockstep.models.building_objectives import lone_samples
    from lockstep.plan.plan import Machine, make_plan

    config = loaded.config
    refuse_given(loaded)
    sizes, notes = sizes_of_config(config), list[str]()
    unknown: dict[str, Any] = {} if facts_of_config(config) is None else _NO_EPOCH
    try:
        facts = data_facts(config, UserObjects(trust_remote_code=trust_remote_code))
    except ConfigError as error:
        if sizes is None:
            raise
        facts, why = sizes, str(error).splitlines()[0]
        notes = [f"data.train was not read, so the run's length isn't known: {why}."]
        config, unknown = config.with_values(run=_LONG), {**_NO_EPOCH, "steps": None, "samples": None, "tokens": None}
    model = lower_frozen(sketch_model(config.model, facts, trust_remote_code=trust_remote_code), config)
    ranks = choose_ranks(config.launch)
    machine = Machine(memory=memory or memory_here(config, ranks), decision=decision[0], undecided=decision[1])
    own = parameter_facts(model)
    further = companion_facts(config, facts, own, trust_remote_code=trust_remote_code)
    plan = make_plan(config, ranks, facts, own, machine, further)
    check_model(model, config, plan)
    return replace(plan, warnings=(*plan.warnings, *lone_samples(model, plan), *notes), **unknown)


def memory_here(config: Config, ranks: int) -> int | None:
    """Return the bytes that each of N ranks would have on this machine; None if it has too few devices or cores."""
    return memory_if_started(*count_accelerators(config.launch), count_cores(), ranks)


def data_facts(config: Config, given: UserObjects) -> DataFacts:
    """Return the facts about the data from the config, or else from the data."""
    return facts_of_config(config) or open_sources(config, given)[0].facts

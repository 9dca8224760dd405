"""Does every rank's slow imports once, in the launcher, before ranks are forked.

Nothing in the launcher starts a thread or touches an accelerator: then no rank could be forked.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from lockstep.core.hub import needs_hub
from lockstep.core.processes import may_fork
from lockstep.data.hub import names_hub
from lockstep.strategies.record import resolved
from lockstep.strategies.registry import AUTO, find_strategy

if TYPE_CHECKING:
    from lockstep.config.schema import Config


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
    return [*common, "lockstep.distributed.flight_record", *models, *events, *builders]


def import_on_cpu(config: Config) -> None:
    """Import what every rank of the strategy imports on the CPU. A failing import fails in the ranks, too."""
    chosen = config.parallel.strategy
    if chosen == AUTO or not may_fork() or not _trains_on_cpu(config):
        return
    if name := find_strategy(chosen).hooks.import_on_cpu:
        with suppress(Exception):
            resolved(name)(torch.device("cpu"))


def _trains_on_cpu(config: Config) -> bool:
    """Return whether ranks certainly train on the CPU; no driver is asked, or they couldn't be forked."""
    device = config.launch.device
    return device == "cpu" or (device == "auto" and torch.accelerator.current_accelerator() is None)

"""Turns an out-of-memory error into a sentence: what was asked for, what there is, where, and what to change.

    RuntimeError: ... you tried to allocate 6442450944 bytes ...
    --> out of memory in the backward pass of micro-batch 2 of 4, update 13: 6.0 GiB were asked for, and 1.2 of 4.0 GiB
        were free (ulimit -v). Set batch.micro_size to 4 (it is 8). If that is not enough: set ...

The change that costs least comes first: a smaller micro-batch leaves the run as it is, computing activations again
costs time, dividing the training state over ranks takes ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.errors import OutOfMemory
from lockstep.core.formatting import size
from lockstep.core.out_of_memory import bytes_asked, error_location, ran_out
from lockstep.strategies.registry import AUTO, find_strategy

if TYPE_CHECKING:
    import torch

    from lockstep.config.schema import Config
    from lockstep.core.control_groups import MemoryLimit
    from lockstep.core.out_of_memory import Phase


@dataclass(frozen=True, slots=True)
class Setting:
    """What decides how much memory a rank needs.

    Attributes:
        micro_size, evaluation_size: samples per forward, in training and in an evaluation.
        ranks: of the run.
        strategy: as resolved, or `auto` where it isn't resolved yet.
        has_blocks: whether the model has repeated blocks, whose activations can be computed again.
    """

    config: Config
    micro_size: int
    evaluation_size: int
    ranks: int
    strategy: str
    has_blocks: bool = True


def setting_of(config: Config, ranks: int) -> Setting:
    """As far as the config alone tells; `auto` is every rank's share of the global batch at once."""
    share = -(-config.batch.global_size // ranks)
    micro = share if config.batch.micro_size == "auto" else min(config.batch.micro_size, share)
    evaluation = micro if config.evaluation.micro_size == "auto" else config.evaluation.micro_size
    return Setting(config, micro, evaluation, ranks, config.parallel.strategy)


def explain(error: BaseException, setting: Setting, device: torch.device) -> OutOfMemory | None:
    """The failure to raise in place of `error`; None if it has nothing to do with memory."""
    cause = ran_out(error)
    if cause is None:
        return None
    from lockstep.distributed.memory import memory_limit_of

    place, asked, room = error_location(error), bytes_asked(cause), memory_limit_of(device)
    phase = None if place is None else place.phase
    where = f" {place}" if place is not None else " while the model and its training state were set up"
    wanted = f"{size(asked)} were asked for, and " if asked is not None else ""
    free = f"{size(room.free)} of {size(room.total)} were free ({room.owner} limit)"
    return OutOfMemory(f"out of memory{where}: {wanted}{free}. {advice(setting, phase, asked, room)}")


def advice(setting: Setting, phase: Phase | None, asked: int | None = None, room: MemoryLimit | None = None) -> str:
    """What to change, the smallest change first.

    Args:
        phase: where memory ran out; None: before the first update.
        asked: bytes of the allocation that failed, if known.
    """
    changes = _CHANGES.get(phase or "", _of_state)(setting)
    if phase in _PER_SAMPLE:
        micro_size = setting.evaluation_size if phase == "evaluation" else setting.micro_size
        if asked and room is not None and asked // micro_size > room.total:  # nothing else makes one sample smaller
            return f"One sample alone would need {size(asked // micro_size)}: make the samples or the model smaller."
        smaller = _smaller(micro_size, asked, room)
        key = _PER_SAMPLE[phase]
        changes = [*([f"set {key} to {smaller} (it is {micro_size})"] if smaller else []), *changes]
    first, *others = changes
    more = f" If that is not enough: {'; or '.join(others)}." if others else ""
    return f"{first[0].upper()}{first[1:]}.{more}"


def _smaller(now: int, asked: int | None, room: MemoryLimit | None) -> int:
    """Half, or less where the failed allocation, which grows with the samples, is more than twice what there is."""
    return min(now // 2, now * room.total // asked) if asked and room is not None else now // 2


def _of_activations(setting: Setting) -> list[str]:
    recompute = setting.config.memory.activation_checkpointing.mode == "none" and setting.has_blocks
    return [*(["set memory.activation_checkpointing.mode to full"] if recompute else []), *_of_state(setting)]


def _of_data(setting: Setting) -> list[str]:
    workers = setting.config.data.loader.workers
    fewer = [f"set data.loader.workers below {workers}, or data.loader.prefetch to 1"] if workers else []
    return [*fewer, "make the data set hold less of itself in memory, for example by np.memmap"]


def _of_checkpoint(setting: Setting) -> list[str]:
    """A save needs the host's memory for a copy of the rank's share of the state."""
    return ["give the host memory for one copy of each rank's share of the training state", *_divided(setting)]


def _of_state(setting: Setting) -> list[str]:
    """Of parameters, gradients and optimizer state, which no micro-batch makes smaller."""
    return [*_divided(setting), "make the model smaller, or give each rank more memory"]


def _divided(setting: Setting) -> list[str]:
    if setting.strategy != AUTO and find_strategy(setting.strategy).divides:
        return [f"start more than {setting.ranks} ranks: each then holds a smaller part of the training state"]
    if setting.ranks > 1:
        return [f"set parallel.strategy to fsdp: each of the {setting.ranks} ranks then holds a part of the state"]
    return ["set parallel.strategy to fsdp on more ranks, with memory of their own: each holds a part of the state"]


_CHANGES: Mapping[str, Callable[[Setting], list[str]]] = {
    "forward": _of_activations,
    "backward": _of_activations,
    "data": _of_data,
    "checkpoint": _of_checkpoint,
}
_PER_SAMPLE = {
    "forward": "batch.micro_size",
    "backward": "batch.micro_size",
    "data": "batch.micro_size",
    "evaluation": "evaluation.micro_size",
}

"""Transforms in the order that their rules give."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from lockstep.core.protocols import Transform


def apply_transforms(model: Module, transforms: Sequence[Transform], device: torch.device) -> Module:
    """Return the model after the transforms, one after the other.

    Raises:
        ConfigError: One of them can't be applied to this model on this device, or changes the names of its tensors.
    """
    from torch.nn import Module

    names = model.state_dict(keep_vars=True).keys()
    for transform in transforms:
        reason = transform.refuses(model, device)
        if reason is not None:
            raise ConfigError(f"{transform.name}: {reason}")
        changed = transform.apply(model)
        if not isinstance(changed, Module):
            raise ConfigError(f"{transform.name}: apply returned {changed!r:.80}; return the module")
        model = changed
        after = model.state_dict(keep_vars=True).keys()
        if after != names:
            added, lost = (", ".join(sorted(changed)[:3]) or "none" for changed in (after - names, names - after))
            raise ConfigError(
                f"{transform.name}: the model's tensors must keep their names, which saving and sharding use; "
                f"added {added}, lost {lost}. Add layers in the model itself, before it is passed to Lockstep"
            )
    return model


def split_at(step: str, transforms: Sequence[Transform]) -> tuple[list[Transform], list[Transform]]:
    """Return the transforms that come before a step, and those that come after it.

    Each follows its rules, otherwise the given order. The step is as late as rules allow.

    Raises:
        ConfigError: Two have one name, or the rules contradict each other.
    """
    by_name = {transform.name: transform for transform in transforms}
    if len(by_name) < len(transforms):
        names = [transform.name for transform in transforms]
        raise ConfigError(f"transforms: two have the name {next(name for name in names if names.count(name) > 1)}")
    known = {*by_name, step}
    graph = {name: {other for other in transform.after if other in known} for name, transform in by_name.items()}
    graph.setdefault(step, set())
    for name, transform in by_name.items():
        for other in transform.before:
            if other in known:
                graph[other].add(name)
    following = {step}
    while more := {name for name, earlier in graph.items() if earlier & following} - following:
        following |= more
    graph[step] |= graph.keys() - following
    try:
        names = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise ConfigError(f"transforms: their rules contradict each other: {' before '.join(error.args[1])}") from error
    index = names.index(step)
    return [by_name[name] for name in names[:index]], [by_name[name] for name in names[index + 1 :]]

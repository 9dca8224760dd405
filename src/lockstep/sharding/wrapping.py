"""Which modules FSDP gathers at a time.

Transformer                    blocks               [Attention]                     size, at least 1,000
├── embedding      1,000       |                    |                               embedding
├── blocks                     |                    |
│   ├── 0            600       blocks.0             |
│   │   ├── attention  400     |  (with its parts)  blocks.0.attention              |
│   │   └── mlp        200     |                    |                               |
│   └── 1            600       blocks.1             blocks.1.attention              |
└── head                       what is left goes with the root

A parameter that several modules share must lie in one unit with all of them: FSDP2 would cut it twice, and the two
parts would drift apart. A unit that holds one shared with the outside is left to what lies around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from lockstep.config.schema import FSDP

_NEVER = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""They have no forward, so nothing would gather them."""


def units(model: nn.Module, options: FSDP, blocks: Sequence[str]) -> list[str]:
    """Names of the modules, in the order of the model: those around others come before these.

    Args:
        blocks: names of the model's repeated layers.

    Raises:
        ConfigError: no module is of the classes that were asked for.
    """
    if options.wrap == "root":
        return []
    if options.wrap == "blocks":
        wanted = list(blocks)
    elif options.wrap == "size":
        wanted = list(_large(model, options.min_num_params))
    else:
        wanted = _of_classes(model, options.wrap)
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    modules = dict(model.named_modules())
    return sorted((name for name in wanted if not _shares(model, modules[name])), key=order.__getitem__)


def _of_classes(model: nn.Module, classes: Sequence[str]) -> list[str]:
    found = [(name, type(module).__name__) for name, module in model.named_modules() if name]
    there = {kind for _, kind in found}
    lacking = [kind for kind in classes if kind not in there]
    if lacking:
        near = [one for one in (closest_match(kind, sorted(there)) for kind in lacking) if one]
        have = f"did you mean {' and '.join(near)}?" if near else f"it has {', '.join(sorted(there)[:12])}"
        raise ConfigError(
            Problem("", "parallel.fsdp.wrap", f"the model has no module of class {', '.join(lacking)}; {have}")
        )
    return [name for name, kind in found if kind in classes]


def _large(model: nn.Module, least: int) -> Iterator[str]:
    """Modules of so many parameters, those of modules that are taken already not counted."""
    taken: set[int] = set()
    for name, module in reversed(list(model.named_modules())):
        if not name or isinstance(module, _NEVER):
            continue
        own = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        if sum(own.values()) >= least:
            taken.update(own)
            yield name


def _shares(model: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of it also belongs to a module outside."""
    inside = {id(one) for one in module.modules()}
    own = {id(parameter) for parameter in module.parameters()}
    return any(
        id(parameter) in own
        for other in model.modules()
        if id(other) not in inside
        for parameter in other._parameters.values()
        if parameter is not None
    )

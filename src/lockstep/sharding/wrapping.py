"""The units that FSDP gathers at a time.

Transformer                    blocks               [Attention]                     size, at least 1,000
├── embedding      1,000       |                    |                               embedding
├── blocks                     |                    |
│   ├── 0            600       blocks.0             |
│   │   ├── attention  400     |  (with its parts)  blocks.0.attention              |
│   │   └── mlp        200     |                    |                               |
│   └── 1            600       blocks.1             blocks.1.attention              |
└── head                       what is left goes with the root

A parameter that several modules share must be in one unit with all of them: FSDP2 would shard it twice, and the two
copies would diverge. So must a module that two blocks have in common. A unit that shares a parameter with modules
outside is merged into the unit around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from lockstep.config.schema import FSDP, Config

_NEVER = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward, so nothing would gather them."""


def units(model: nn.Module, options: FSDP, blocks: Sequence[str]) -> list[str]:
    """Return the names of the units' modules in the order of the model: outer ones come before inner ones.

    Args:
        blocks: Names of the model's repeated layers.

    Raises:
        ConfigError: The model has no module of a class that `wrap` names.
    """
    if options.wrap == "root":
        return []
    if options.wrap == "blocks":
        wanted = set(blocks)
    elif options.wrap == "size":
        wanted = set(_large(model, options.min_num_params))
    else:
        wanted = set(_of_classes(model, options.wrap))
    return [name for name, module in model.named_modules() if name in wanted and not _shares(model, module)]


def check(model: nn.Module, config: Config) -> None:
    """Raise ConfigError if the model has no module of a class that `wrap` names."""
    units(model, config.parallel.fsdp, ())


def _of_classes(model: nn.Module, classes: Sequence[str]) -> list[str]:
    kinds = [(name, type(module).__name__) for name, module in model.named_modules() if name]
    known = sorted({kind for _, kind in kinds})
    missing = [kind for kind in classes if kind not in known]
    if missing:
        near = [match for match in (closest_match(kind, known) for kind in missing) if match]
        have = f"did you mean {' and '.join(near)}?" if near else f"it has {', '.join(known[:12])}"
        why = f"the model has no module of class {', '.join(missing)}; {have}"
        raise ConfigError(Problem("", "parallel.fsdp.wrap", why))
    return [name for name, kind in kinds if kind in classes]


def _large(model: nn.Module, least: int) -> Iterator[str]:
    """Yield modules of at least `least` parameters, without counting those of modules that were yielded before."""
    taken: set[int] = set()
    for name, module in reversed(list(model.named_modules())):
        if not name or isinstance(module, _NEVER):
            continue
        own = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        if sum(own.values()) >= least:
            taken.update(own)
            yield name


def _shares(model: nn.Module, module: nn.Module) -> bool:
    """Return whether a module outside of `module` has one of its parameters, perhaps by a module that both have."""
    own = set(module.parameters())
    places = tuple(f"{name}." for name, each in model.named_modules(remove_duplicate=False) if each is module)
    named = model.named_parameters(remove_duplicate=False)
    return any(parameter in own and not name.startswith(places) for name, parameter in named)

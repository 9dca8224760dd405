"""Weights from a file into a model, tensor by tensor, by name; nothing is put in before all of it is known to fit.

    the model's tensors, each with its names         the file's names
    embedding.weight = head.weight (tied)     <----  embedding.weight                       as it stands
    body.0.weight                             <----  module.body.0.weight                   without wrappers
    body.0.bias                               <----  model.body.0.bias                      behind one prefix for all

Wrappers are those of DistributedDataParallel and torch.compile. Where names of a model of transformers don't fit, the
library is asked for what it calls them (`transformers_models`).
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.config.schema import ModelSection
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.distributed.shard_boxes import copy_from_full
from lockstep.models.transformers_models import is_transformers_model, translated
from lockstep.models.weight_files import Weights, read_weights, readable

_KEY = "model.init_from"
_PARTIAL = "model.init_partial: true starts what is missing or has another shape with its usual first weights"
_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")
_PARALLEL = "module."
_SHOWN = 6


def match_initial_weights(model: nn.Module, section: ModelSection) -> WeightMatch | None:
    """What `init_from` names, if it names any, and where in the whole model it goes. Changes nothing.

    Args:
        model: may be without values.

    Raises:
        ConfigError: it can't be read, or doesn't fit: all that is missing, left over, or of another shape.
    """
    if section.init_from is None:
        return None
    try:
        fit = match_weights(model, read_weights(Path(section.init_from)))
        if not fit.whole and not (section.init_partial and fit.pairs):
            raise ConfigError(f"{fit.complaint()}{_PARTIAL if fit.pairs and not section.init_partial else ''}".rstrip())
    except ConfigError as error:
        raise ConfigError([Problem("", _KEY, problem.message) for problem in error.problems]) from error
    except RunFailed as error:
        raise ConfigError(Problem("", _KEY, str(error))) from error
    return fit


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of the model: a parameter or a saved buffer.

    Attributes:
        names: several if it is tied.
    """

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def slots_of(model: nn.Module) -> list[Slot]:
    """All that `state_dict` has, each tensor once.

    Raises:
        ConfigError: it has something that is no tensor.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"the model's {name} is a {type(value).__name__}: only tensors are weights")
        names.setdefault(id(value), []).append(name)
        tensors[id(value)] = value
    return [Slot(tuple(names[key]), tensor) for key, tensor in tensors.items()]


@dataclass(frozen=True, slots=True)
class WeightMatch:
    """How weights go with a model.

    Attributes:
        place: of the weights.
        pairs: slots, and the tensors that go into them.
        missing: slots for which there is none.
        reshaped: slots for which there is one of another shape.
        left: names of the file that are no slot's.
        prefix: that all names of the file have, and none of the model's.
    """

    place: Path
    pairs: Sequence[tuple[Slot, Tensor]]
    missing: Sequence[Slot]
    reshaped: Sequence[tuple[Slot, Tensor]]
    left: Mapping[str, Tensor]
    prefix: str

    @property
    def whole(self) -> bool:
        """Every slot has its tensor, and every tensor its slot."""
        return not (self.missing or self.reshaped or self.left)

    @torch.no_grad()
    def put(self, model: nn.Module | None = None) -> None:
        """In the model's dtype, on its device.

        Args:
            model: what became of it, if it was divided since; of what this rank has no part of, nothing is put in.
        """
        now = None if model is None else model.state_dict(keep_vars=True)
        for slot, found in self.pairs:
            if now is None:
                copy_from_full(slot.tensor, found)
            elif slot.name in now:
                copy_from_full(now[slot.name], found)

    def notes(self) -> tuple[str, ...]:
        """A sentence for each kind of thing that isn't as it should be."""
        return tuple(self._notes())

    def _notes(self) -> Iterator[str]:
        if self.prefix:
            yield f"the names in {self.place} were taken without the {readable(self.prefix)} before them"
        if self.missing:
            yield (
                f"{self.place} lacks {_many(self.missing, 'tensor')} of the model, left at the usual first weights: "
                f"{_listed([slot.name for slot in self.missing])}"
            )
        if self.reshaped:
            yield (
                f"{self.place} has {_many(self.reshaped, 'tensor')} in another shape, left at the usual first weights: "
                f"{_listed([_shapes(*pair) for pair in self.reshaped])}"
            )
        if self.left:
            yield f"{self.place} has {_many(self.left, 'tensor')} that the model lacks: {_listed([*self.left])}"

    def complaint(self) -> str:
        """All that doesn't fit; ends with a new line."""
        if not self.pairs and not self.reshaped:
            mine = [slot.name for slot in self.missing]
            return (
                f"{self.place} has none of the model's {_many(mine, 'tensor')}\n"
                f"  the model has: {_listed(mine)}\n"
                f"  the file has: {_listed([*self.left])}{_nearest(mine, self.left)}\n"
            )
        names = [slot.name for slot in self.missing]
        lines = [f"{self.place} doesn't have the weights of this model"]
        if self.missing:
            lines.append(f"missing: {_listed([_shaped(slot.name, slot.tensor) for slot in self.missing])}")
        if self.left:
            left = [_shaped(name, tensor) for name, tensor in self.left.items()]
            lines.append(f"left over: {_listed(left)}{_nearest(names, self.left)}")
        if self.reshaped:
            lines.append(f"of another shape: {_listed([_shapes(*pair) for pair in self.reshaped])}")
        return "\n  ".join(lines) + "\n"


def match_weights(model: nn.Module, weights: Weights, *, translate: bool = True) -> WeightMatch:
    """Which tensor goes where. Changes nothing.

    Args:
        translate: ask transformers what it calls names that don't fit, which takes a second model in memory.

    Raises:
        ConfigError: a tied parameter has two values in the file, or a tensor can't be had in the model's dtype.
    """
    fit = _fit(slots_of(model), weights)
    if fit.whole or not translate or not is_transformers_model(model):
        return fit
    own = translated(model, weights.tensors)
    return fit if own is None else _fit(slots_of(model), Weights(weights.place, own))


def _fit(slots: Sequence[Slot], weights: Weights) -> WeightMatch:
    mine = [name for slot in slots for name in slot.names]
    theirs, prefix = _spelt(mine, weights.tensors)
    pairs, missing, reshaped = [], [], []
    for slot in slots:
        found = [weights.tensors[theirs[name]] for name in slot.names if name in theirs]
        if not found:
            missing.append(slot)
        elif any(tensor.shape != slot.tensor.shape for tensor in found):
            reshaped.append((slot, next(tensor for tensor in found if tensor.shape != slot.tensor.shape)))
        else:
            _check(weights.place, slot, found)
            pairs.append((slot, found[0]))
    taken = set(theirs.values())
    left = {readable(name): weights.tensors[name] for name in sorted(weights.tensors) if name not in taken}
    return WeightMatch(weights.place, pairs, missing, reshaped, left, prefix)


def _check(place: Path, slot: Slot, found: Sequence[Tensor]) -> None:
    if any(not _equal(found[0], other) for other in found[1:]):
        raise ConfigError(f"{' and '.join(slot.names)} are one tensor in this model, and differ in {place}")
    if not torch.can_cast(found[0].dtype, slot.tensor.dtype):
        raise ConfigError(f"{slot.name} is {found[0].dtype} in {place}, which {slot.tensor.dtype} can't hold")


def _equal(one: Tensor, other: Tensor) -> bool:
    """To the bit, a NaN too."""
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# --- names --------------------------------------------------------------------------------------------------------


def _spelt(mine: Collection[str], theirs: Collection[str]) -> tuple[dict[str, str], str]:
    """My names --> theirs, as far as they are there; and the prefix that theirs have."""
    found = {name: name for name in mine if name in theirs}
    rest = _by_bare_name([name for name in theirs if name not in found])
    others = {name: bare for name in mine if name not in found and (bare := _bare(name)) in rest}
    found |= {name: rest[bare] for name, bare in others.items()}
    if found:
        return found, ""
    prefix = _prefix({_bare(name) for name in mine}, rest)
    behind = {name: rest[place] for name in mine if prefix and (place := prefix + _bare(name)) in rest}
    return behind, prefix


def _by_bare_name(names: Collection[str]) -> dict[str, str]:
    """Two names that differ in wrappers alone are nobody's."""
    counts = Counter(map(_bare, names))
    return {_bare(name): name for name in names if counts[_bare(name)] == 1}


def _bare(name: str) -> str:
    name = _COMPILED.sub("", name)
    while name.startswith(_PARALLEL):
        name = name.removeprefix(_PARALLEL)
    return name


def _prefix(mine: Collection[str], theirs: Collection[str]) -> str:
    """What stands before most of my names; nothing if two prefixes would do as well."""
    counts = Counter(name.removesuffix(tail) for name in theirs for tail in _tails(name) if tail in mine)
    best = counts.most_common(2)
    if not best or (len(best) == 2 and best[0][1] == best[1][1]):
        return ""
    return best[0][0]


def _tails(name: str) -> Iterator[str]:
    """`a.b.c` --> `b.c`, `c`."""
    while "." in name:
        _, _, name = name.partition(".")
        yield name


# --- words --------------------------------------------------------------------------------------------------------


def _many(things: Collection[object], what: str) -> str:
    return f"{len(things):,} {what}{'' if len(things) == 1 else 's'}"


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _SHOWN:,} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more


def _shaped(name: str, tensor: Tensor) -> str:
    return f"{name} {list(tensor.shape)}"


def _shapes(slot: Slot, found: Tensor) -> str:
    return f"{slot.name} {list(found.shape)} where the model has {list(slot.tensor.shape)}"


def _nearest(missing: Sequence[str], left: Collection[str]) -> str:
    """Which of the names left over may be meant by the missing ones."""
    pairs = []
    for name in missing[:_SHOWN]:
        near = difflib.get_close_matches(name, left, n=1, cutoff=0.75)
        pairs += [f"{near[0]} for {name}"] if near else []
    return f" (is it {', '.join(pairs)}?)" if pairs else ""

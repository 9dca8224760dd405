"""Loads weights from a file into a model, tensor by tensor, by name, once all are known to fit.

    the model's tensors, each with its names         the file's names
    embedding.weight = head.weight (tied)     <----  embedding.weight                       as it stands
    body.0.weight                             <----  module.body.0.weight                   without wrappers
    body.0.bias                               <----  model.body.0.bias                      behind one prefix for all

Wrappers are those of DistributedDataParallel and torch.compile. Where names of a model of transformers don't fit, the
library translates them (`transformers_models`).
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
    """Return how the weights that `init_from` names match the model; None if it names none. Changes nothing.

    Args:
        model: may be without values.

    Raises:
        ConfigError: it can't be read, or doesn't fit; states all that is missing, left over, or of another shape.
    """
    if section.init_from is None:
        return None
    try:
        fit = match_weights(model, read_weights(Path(section.init_from)))
        if not fit.whole and not (section.init_partial and fit.pairs):
            raise ConfigError(
                f"{fit.mismatches()}{_PARTIAL if fit.pairs and not section.init_partial else ''}".rstrip()
            )
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
    """Return all that `state_dict` has, each tensor once.

    Raises:
        ConfigError: it has a value that is no tensor.
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
    """The match of weights with a model.

    Attributes:
        place: of the weights.
        pairs: slots, and the tensors that go into them.
        missing: slots without a tensor.
        reshaped: slots whose tensor has another shape.
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
        """True if every slot has its tensor, and every tensor its slot."""
        return not (self.missing or self.reshaped or self.left)

    @torch.no_grad()
    def put(self, model: nn.Module | None = None) -> None:
        """Copy the tensors into the model, in its dtype, on its device.

        Args:
            model: the sharded model, if it was sharded since; tensors that this rank has no shard of are left out.
        """
        sharded = None if model is None else model.state_dict(keep_vars=True)
        for slot, tensor in self.pairs:
            if sharded is None:
                copy_from_full(slot.tensor, tensor)
            elif slot.name in sharded:
                copy_from_full(sharded[slot.name], tensor)

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each kind of mismatch."""
        notes = []
        if self.prefix:
            notes.append(f"the names in {self.place} were taken without the {readable(self.prefix)} before them")
        if self.missing:
            notes.append(
                f"{self.place} lacks {_many(self.missing, 'tensor')} of the model, left at the usual first weights: "
                f"{_listed([slot.name for slot in self.missing])}"
            )
        if self.reshaped:
            notes.append(
                f"{self.place} has {_many(self.reshaped, 'tensor')} in another shape, left at the usual first weights: "
                f"{_listed([_shapes(*pair) for pair in self.reshaped])}"
            )
        if self.left:
            notes.append(f"{self.place} has {_many(self.left, 'tensor')} that the model lacks: {_listed([*self.left])}")
        return tuple(notes)

    def mismatches(self) -> str:
        """Return all that doesn't fit; ends with a new line."""
        if not self.pairs and not self.reshaped:
            names = [slot.name for slot in self.missing]
            return (
                f"{self.place} has none of the model's {_many(names, 'tensor')}\n"
                f"  the model has: {_listed(names)}\n"
                f"  the file has: {_listed([*self.left])}{_nearest(names, self.left)}\n"
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
    """Return which tensor goes where. Changes nothing.

    Args:
        translate: have transformers translate names that don't fit, which takes a second model in memory.

    Raises:
        ConfigError: a tied parameter has two values in the file, or the model's dtype can't hold a tensor.
    """
    fit = _fit(slots_of(model), weights)
    if fit.whole or not translate or not is_transformers_model(model):
        return fit
    tensors = translated(model, weights.tensors)
    return fit if tensors is None else _fit(slots_of(model), Weights(weights.place, tensors))


def _fit(slots: Sequence[Slot], weights: Weights) -> WeightMatch:
    file_names, prefix = _match_names([name for slot in slots for name in slot.names], weights.tensors)
    pairs, missing, reshaped = [], [], []
    for slot in slots:
        tensors = [weights.tensors[file_names[name]] for name in slot.names if name in file_names]
        if not tensors:
            missing.append(slot)
        elif any(tensor.shape != slot.tensor.shape for tensor in tensors):
            reshaped.append((slot, next(tensor for tensor in tensors if tensor.shape != slot.tensor.shape)))
        else:
            _check(weights.place, slot, tensors)
            pairs.append((slot, tensors[0]))
    taken = set(file_names.values())
    left = {readable(name): weights.tensors[name] for name in sorted(weights.tensors) if name not in taken}
    return WeightMatch(weights.place, pairs, missing, reshaped, left, prefix)


def _check(place: Path, slot: Slot, tensors: Sequence[Tensor]) -> None:
    if any(not _equal(tensors[0], other) for other in tensors[1:]):
        raise ConfigError(f"{' and '.join(slot.names)} are one tensor in this model, and differ in {place}")
    if not torch.can_cast(tensors[0].dtype, slot.tensor.dtype):
        raise ConfigError(f"{slot.name} is {tensors[0].dtype} in {place}, which {slot.tensor.dtype} can't hold")


def _equal(tensor: Tensor, other: Tensor) -> bool:
    """Return whether all bits are equal, those of a NaN too."""
    if tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride():
        return True
    return torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# --- names --------------------------------------------------------------------------------------------------------


def _match_names(model_names: Collection[str], file_names: Collection[str]) -> tuple[dict[str, str], str]:
    """Return the model's names --> the file's, as far as they are there; and the prefix that the file's have."""
    matches = {name: name for name in model_names if name in file_names}
    others = [name for name in file_names if name not in matches]
    counts = Counter(map(_unwrapped, others))  # two names that differ in wrappers alone match nothing
    rest = {_unwrapped(name): name for name in others if counts[_unwrapped(name)] == 1}
    unmatched = {name: _unwrapped(name) for name in model_names if name not in matches}
    matches |= {name: rest[plain] for name, plain in unmatched.items() if plain in rest}
    if matches:
        return matches, ""
    prefix = _prefix(set(unmatched.values()), rest)
    return {
        name: rest[prefix + plain] for name, plain in unmatched.items() if prefix and prefix + plain in rest
    }, prefix


def _unwrapped(name: str) -> str:
    name = _COMPILED.sub("", name)
    while name.startswith(_PARALLEL):
        name = name.removeprefix(_PARALLEL)
    return name


def _prefix(model_names: Collection[str], file_names: Collection[str]) -> str:
    """Return the prefix of most of the model's names; none if two prefixes would do as well."""
    counts: Counter[str] = Counter()
    for name in file_names:
        tail = name
        while "." in tail:  # a.b.c: b.c, c
            _, _, tail = tail.partition(".")
            if tail in model_names:
                counts[name.removesuffix(tail)] += 1
    best = counts.most_common(2)
    if not best or (len(best) == 2 and best[0][1] == best[1][1]):
        return ""
    return best[0][0]


# --- messages --------------------------------------------------------------------------------------------------------


def _many(things: Collection[object], what: str) -> str:
    return f"{len(things):,} {what}{'' if len(things) == 1 else 's'}"


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _SHOWN:,} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more


def _shaped(name: str, tensor: Tensor) -> str:
    return f"{name} {list(tensor.shape)}"


def _shapes(slot: Slot, tensor: Tensor) -> str:
    return f"{slot.name} {list(tensor.shape)} where the model has {list(slot.tensor.shape)}"


def _nearest(missing: Sequence[str], left: Collection[str]) -> str:
    """Return the names left over that are closest to missing ones."""
    pairs = []
    for name in missing[:_SHOWN]:
        near = difflib.get_close_matches(name, left, n=1, cutoff=0.75)
        pairs += [f"{near[0]} for {name}"] if near else []
    return f" (is it {', '.join(pairs)}?)" if pairs else ""

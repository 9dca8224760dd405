"""Match the tensors of a file with a model's by name, and copy them once all are known to fit.

    the model's tensors, each with its names         the file's names
    embedding.weight = head.weight (tied)     <----  embedding.weight                       the same
    body.0.weight                             <----  module.body.0.weight                   without wrappers
    body.0.bias                               <----  model.body.0.bias                      with one prefix for all

If names don't match a transformers model's, the library translates them (`transformers_models`).
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.config.schema import ModelSection
from lockstep.core.adapters import ADAPTER_CONFIG, ADAPTER_FILE, Adapter, adapter_of
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.formatting import listed
from lockstep.core.near_runs import BESIDE
from lockstep.distributed.extra_states import set_extra_states
from lockstep.distributed.shard_boxes import copy_from_full
from lockstep.models.adapters import plain_name
from lockstep.models.transformers_models import is_transformers_model, translated
from lockstep.models.weight_files import Weights, read_weights, readable

PARTIAL = "set model.init_partial: true to initialize missing tensors, and tensors of another shape, as usual"
_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")
_PARALLEL = "module."
_SHOWN = 6
_UNSHAPED = (
    "lora_alpha", "use_rslora", "use_dora", "alpha_pattern", "fan_in_fan_out", "feedforward_modules", "use_qalora",
    "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "velora_config",
)  # fmt: skip
"""Keys of peft that change what an adapter computes, and no shape."""
_BASE_KEPT = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of peft's `init_lora_weights` that leave the base as it is."""
_LEAST_BYTES = 2  # of a number that isn't quantized
DEQUANTIZE = "dequantize it where it was made (transformers: `model.dequantize()`), and save it in bf16"


def match_initial_weights(model: nn.Module, section: ModelSection) -> WeightMatch | None:
    """Match the weights of `init_from`, if it is set, with the model; raise ConfigError for all that doesn't fit."""
    if section.init_from is None:
        return None
    with problems_of("init_from"):
        place = Path(section.init_from)
        weights = read_weights(place, adapters=section.adapter is not None)
        if (adapter := adapter_of(model)) is not None:
            _refuse_other_function(adapter, weights.place)
        match = match_weights(model, weights)
        if not match.whole and not (section.init_partial and match.pairs):
            remedy = PARTIAL if match.pairs and not section.init_partial else ""
            raise ConfigError(f"{match.mismatches()}{remedy}".rstrip(), FailureKind.OTHER_WEIGHTS)
        beside = (name for name in BESIDE if place.is_dir() and (weights.place.parent / name).is_file())
        return replace(match, unread=(*weights.skipped, *beside))


def _refuse_other_function(adapter: Adapter, place: Path) -> None:
    """Raise ConfigError if the tensors in a file compute something else in this model than where they are from."""
    own = adapter.config
    if place.name != ADAPTER_FILE:
        if own.get("use_dora"):
            remedy = "set model.pretrained instead, or model.adapter.use_dora: false"
            raise ConfigError(f"init_from replaces the weights that DoRA starts from; {remedy}")
        return
    try:
        saved = json.loads(place.with_name(ADAPTER_CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place} needs its {ADAPTER_CONFIG} beside it: {error}") from error
    if (initial := saved.get("init_lora_weights")) not in _BASE_KEPT:
        remedy = "convert it by peft: save_pretrained(FOLDER, path_initial_model_for_weight_conversion=...)"
        raise ConfigError(f"{place} was begun with init_lora_weights {initial}, which changes the base; {remedy}")
    for key in _UNSHAPED:
        then, now = (sorted(each) if isinstance(each, list) else each for each in (saved.get(key), own.get(key)))
        if (then or None) != (now or None):
            raise ConfigError(
                f"{place} was trained with {key} {then}, and this model's adapter has {now}; set the same"
            )


@contextmanager
def problems_of(key: str) -> Iterator[None]:
    """Have errors in the block name the key of `model` that they are of."""
    try:
        yield
    except (ConfigError, RunFailed) as error:
        problems = error.problems if isinstance(error, ConfigError) else [Problem("", "", str(error))]
        kind = error.kind if isinstance(error, ConfigError) else None
        raise ConfigError([Problem("", f"model.{key}", problem.message) for problem in problems], kind) from error


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of the model: a parameter or a saved buffer, with several names if it is tied."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def slots_of(model: nn.Module) -> list[Slot]:
    """Return the tensors of the model's `state_dict`, each once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"the model's {name} is a {type(value).__name__}: only tensors are weights; use buffers")
        names.setdefault(id(value), []).append(name)
        tensors[id(value)] = value
    return [Slot(tuple(names[key]), tensor) for key, tensor in tensors.items()]


@dataclass(frozen=True, slots=True)
class WeightMatch:
    """The match of weights in a file or folder with a model.

    Attributes:
        missing: Slots without a tensor.
        unexpected: Tensors of the file without a slot, by name.
        prefix: A prefix of all names of the file, and of none of the model's.
        unread: Other values of the file, and files beside it.
    """

    place: Path
    pairs: Sequence[tuple[Slot, Tensor]]
    missing: Sequence[Slot]
    reshaped: Sequence[tuple[Slot, Tensor]]
    unexpected: Mapping[str, Tensor]
    prefix: str = ""
    unread: Sequence[str] = ()

    @property
    def whole(self) -> bool:
        """Return whether every slot has its tensor, and every tensor its slot."""
        return not (self.missing or self.reshaped or self.unexpected)

    @torch.no_grad()
    def put(self, model: nn.Module, sharded: Mapping[str, Tensor] | None = None) -> None:
        """Copy the tensors into the model, or into `sharded` ones by name; this rank may lack some."""
        for slot, tensor in self.pairs:
            if sharded is None:
                copy_from_full(slot.tensor, tensor)
            elif slot.name in sharded:
                copy_from_full(sharded[slot.name], tensor)
        own = {slot.name: slot.tensor for slot, _ in self.pairs}
        set_extra_states(model, own if sharded is None else {name: sharded[name] for name in own.keys() & sharded})

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each kind of mismatch."""
        notes = [f"the prefix {readable(self.prefix)} of the names in {self.place} was removed"] if self.prefix else []
        notes += [f"{self.place}: {line}" for line in self._by_kind()]
        if self.unread:
            unread = listed(self.unread, _SHOWN)
            notes.append(f"{self.place}: not read: {unread}; use `lockstep ckpt import` to take optimizer and step")
        return tuple(notes)

    def mismatches(self) -> str:
        """Return a description of all mismatches, which ends with a new line."""
        return "\n  ".join([f"{self.place} doesn't have the weights of this model", *self._by_kind()]) + "\n"

    def _by_kind(self) -> list[str]:
        kinds = {
            "missing": [f"{slot.name} {list(slot.tensor.shape)}" for slot in self.missing],
            "unexpected": [f"{name} {list(tensor.shape)}" for name, tensor in self.unexpected.items()],
            "of another shape": [
                f"{slot.name} {list(tensor.shape)} where the model has {list(slot.tensor.shape)}"
                for slot, tensor in self.reshaped
            ],
        }
        hint = {"unexpected": _nearest([slot.name for slot in self.missing], self.unexpected)}
        return [f"{kind}: {listed(names, _SHOWN)}{hint.get(kind, '')}" for kind, names in kinds.items() if names]


def match_weights(model: nn.Module, weights: Weights, *, translate: bool = True) -> WeightMatch:
    """Match the tensors of a file with the model's, without changing it.

    Args:
        translate: Let transformers translate names that don't match, which takes the memory of a second model.

    Raises:
        ConfigError: A tied parameter has two values in the file, or the model's dtype can't hold a tensor.
    """
    slots = slots_of(model)
    if (adapter := adapter_of(model)) is not None:
        names = adapter.files if weights.place.name == ADAPTER_FILE else adapter.base
        slots = [
            Slot((*slot.names, *map(plain_name, slot.names), names[slot.name]), slot.tensor)
            for slot in slots
            if slot.name in names
        ]
    match = _match(slots, weights)
    if match.whole or not translate or not is_transformers_model(model):
        return match
    tensors = translated(model, weights.tensors)
    return match if tensors is None else _match(slots, Weights(weights.place, tensors))


def _match(slots: Sequence[Slot], weights: Weights) -> WeightMatch:
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
    matched = set(file_names.values())
    unexpected = {readable(name): weights.tensors[name] for name in sorted(weights.tensors) if name not in matched}
    return WeightMatch(weights.place, pairs, missing, reshaped, unexpected, prefix)


def _check(place: Path, slot: Slot, tensors: Sequence[Tensor]) -> None:
    if any(not _equal(tensors[0], other) for other in tensors[1:]):
        raise ConfigError(f"{' and '.join(slot.names)} are one tensor in this model, but differ in {place}")
    dtype, own = tensors[0].dtype, slot.tensor.dtype
    if (
        isinstance(slot.tensor, nn.Parameter)
        and own.is_floating_point
        and (not dtype.is_floating_point or dtype.itemsize < _LEAST_BYTES)
    ):
        raise ConfigError(f"{slot.name} is {dtype} in {place}: quantized; {DEQUANTIZE}")
    if not torch.can_cast(dtype, own):
        raise ConfigError(f"{slot.name} is {dtype} in {place}, which {own} can't hold")


def _equal(tensor: Tensor, other: Tensor) -> bool:
    if tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride():
        return True
    return torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# --- names --------------------------------------------------------------------------------------------------------


def _match_names(model_names: Collection[str], file_names: Collection[str]) -> tuple[dict[str, str], str]:
    matches = {name: name for name in model_names if name in file_names}
    others = [name for name in file_names if name not in matches]
    counts = Counter(map(_unwrapped, others))  # two names that only differ in wrappers don't match
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
    """Return the prefix that most of the model's names have in the file; none if two are equally good."""
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


def _nearest(missing: Sequence[str], unexpected: Collection[str]) -> str:
    pairs = []
    for name in missing[:_SHOWN]:
        near = difflib.get_close_matches(name, unexpected, n=1, cutoff=0.75)
        pairs += [f"{near[0]} for {name}"] if near else []
    return f" (is it {', '.join(pairs)}?)" if pairs else ""

"""Random generators of user code, as part of the run: saved with it, and restored when it resumes.

    augmenter = numpy.random.default_rng(7)
    lockstep.register_generator("augmenter", augmenter)     on every rank, whenever user code makes it

All of Lockstep's own randomness is keyed and has no state. What a user draws from a generator that lives on has: it is
saved for each rank under its name. A generator that is registered only after the run went on gets its state then. A
rank that the saved run didn't have begins with a state of its own, drawn from the first rank's and its number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.core.errors import RunFailed
from lockstep.core.keys import key

Generator = torch.Generator | np.random.Generator | random.Random
_PREFIX = "generators."
_ROOM = 16_384  # a state as text fits, and takes always as much: its digits vary


@dataclass(frozen=True, slots=True)
class _Kind:
    """The functions that get, set and reseed a kind of generator."""

    get: Callable[[Any], Tensor]
    put: Callable[[Any, Tensor], object]
    reseed: Callable[[Any, int], None]


_registered: dict[str, Generator] = {}
_waiting: dict[str, Callable[[str, Generator], None]] = {}


def register_generator(name: str, generator: Generator) -> None:
    """Make a generator part of the run.

    Args:
        name: the same on all ranks, and in each process of the run.

    Raises:
        TypeError: it is none of torch.Generator, numpy.random.Generator, random.Random.
    """
    _kind(generator)
    _registered[name] = generator
    if name in _waiting:
        _waiting.pop(name)(name, generator)


def registered() -> list[str]:
    """Return the names of the registered generators."""
    return list(_registered)


def states(rank: int) -> dict[str, Tensor]:
    """`generators.RANK.NAME` -> uint8 [bytes], copies."""
    return {f"{_PREFIX}{rank}.{name}": _kind(generator).get(generator) for name, generator in _registered.items()}


def restore(saved: Mapping[str, Tensor], rank: int) -> None:
    """Restore generators, those that are registered and those that will be."""
    states: dict[str, dict[int, Tensor]] = {}
    for place, state in saved.items():
        if place.startswith(_PREFIX):
            owner, _, name = place.removeprefix(_PREFIX).partition(".")
            states.setdefault(name, {})[int(owner)] = state
    _waiting.clear()
    for name, by_rank in states.items():
        _waiting[name] = _setter(by_rank, rank)
        if name in _registered:
            _waiting.pop(name)(name, _registered[name])


@contextmanager
def replayed_draws(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restore random state at the block's end, so that the same numbers are drawn again: of this process, on the CPU
    and on `device`, and of registered generators. Yield a function that returns whether anything was drawn."""
    ways: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        *(
            (partial(_kind(generator).get, generator), partial(_kind(generator).put, generator))
            for generator in _registered.values()
        ),
    ]
    if device.type == "cuda":
        ways.append((partial(torch.cuda.get_rng_state, device), partial(torch.cuda.set_rng_state, device=device)))
    before = [get() for get, _ in ways]
    try:
        yield lambda: not all(_same(get(), old) for (get, _), old in zip(ways, before, strict=True))
    finally:
        for (_, put), old in zip(ways, before, strict=True):
            put(old)


def _same(left: object, right: object) -> bool:
    states = (state if isinstance(state, Tensor) else _text(state) for state in (left, right))
    return torch.equal(*states)


def _setter(by_rank: Mapping[int, Tensor], rank: int) -> Callable[[str, Generator], None]:
    def put(name: str, generator: Generator) -> None:
        kind = _kind(generator)
        try:
            kind.put(generator, by_rank.get(rank, by_rank[min(by_rank)]))
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise RunFailed(
                f"the saved state of generator {name!r} is of another kind of generator: {error}"
            ) from error
        if rank not in by_rank:
            kind.reseed(generator, rank)

    return put


def _kind(generator: Generator) -> _Kind:
    for known, kind in _KINDS.items():
        if isinstance(generator, known):
            return kind
    raise TypeError(
        f"a {type(generator).__name__} can't be registered; a torch.Generator, a numpy.random.Generator and a "
        f"random.Random can"
    )


# --- the three kinds ----------------------------------------------------------------------------------------------


def _text(state: object) -> Tensor:
    data = json.dumps(state, default=_listed).encode()
    return torch.frombuffer(bytearray(data.ljust(_ROOM)), dtype=torch.uint8)


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return int(value)


def _arrayed(value: dict[str, Any]) -> Any:
    return np.array(value["array"], dtype=value["dtype"]) if value.keys() == {"array", "dtype"} else value


def _read(state: Tensor, arrays: bool = False) -> Any:
    return json.loads(state.numpy().tobytes(), object_hook=_arrayed if arrays else None)


def _reseed_torch(generator: torch.Generator, rank: int) -> None:
    drawn = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    generator.manual_seed(key(drawn, "rank", rank) >> 1)


def _put_numpy(generator: np.random.Generator, state: Tensor) -> None:
    generator.bit_generator.state = _read(state, arrays=True)


def _reseed_numpy(generator: np.random.Generator, rank: int) -> None:
    seed = key(int(generator.integers(2**62)), "rank", rank)
    generator.bit_generator.state = type(generator.bit_generator)(seed).state


def _put_python(generator: random.Random, state: Tensor) -> None:
    version, internal, gauss = _read(state)
    generator.setstate((version, tuple(internal), gauss))


def _reseed_python(generator: random.Random, rank: int) -> None:
    generator.seed(key(generator.getrandbits(62), "rank", rank))


_KINDS: Mapping[type, _Kind] = {
    torch.Generator: _Kind(lambda generator: generator.get_state().clone(), torch.Generator.set_state, _reseed_torch),
    np.random.Generator: _Kind(lambda generator: _text(generator.bit_generator.state), _put_numpy, _reseed_numpy),
    random.Random: _Kind(lambda generator: _text(generator.getstate()), _put_python, _reseed_python),
}

"""Random generators of user code, as part of the run: saved with it, and restored when it resumes.

    augmenter = numpy.random.default_rng(7)
    lockstep.register_generator("augmenter", augmenter)     on every rank, whenever user code makes it

Each rank's state is saved under the generator's name. What a fetch draws is keyed and doesn't change the state, since
batches are fetched ahead, in other processes. A generator that is registered after a resume gets its state then. A new
rank's state is drawn from rank 0's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from lockstep.core.errors import RunFailed
from lockstep.core.keys import key

Generator = torch.Generator | np.random.Generator | random.Random
PREFIX = "generators."  # of the names of states, which each rank has its own of
_TEXT_BYTES = 16_384  # the size of a state as text, with a varying number of digits; all states fit


_registered: dict[str, Generator] = {}  # process-wide: user code registers before there is a session, and once
_waiting: dict[str, tuple[Mapping[int, Tensor], int]] = {}  # states by rank, and this rank, until user code registers


def register_generator(name: str, generator: Generator) -> None:
    """Make a generator part of the run, under a name that is the same on all ranks.

    Raises:
        TypeError: It is none of torch.Generator, numpy.random.Generator, random.Random.
    """
    if not any(isinstance(generator, kind) for kind in get_args(Generator)):
        kinds = "a torch.Generator, a numpy.random.Generator and a random.Random can"
        raise TypeError(f"a {type(generator).__name__} can't be registered; {kinds}")
    _registered[name] = generator
    _restore_if_waiting(name)


def registered() -> list[str]:
    """Return the names of the registered generators."""
    return list(_registered)


def states(rank: int) -> dict[str, Tensor]:
    """Return copies of the states: `generators.RANK.NAME` -> uint8 [bytes]."""
    return {f"{PREFIX}{rank}.{name}": _get(generator) for name, generator in _registered.items()}


def restore(saved: Mapping[str, Tensor], rank: int) -> None:
    """Restore generators, also those that will be registered."""
    states: dict[str, dict[int, Tensor]] = {}
    for saved_name, state in saved.items():
        if saved_name.startswith(PREFIX):
            owner, _, name = saved_name.removeprefix(PREFIX).partition(".")
            states.setdefault(name, {})[int(owner)] = state
    _waiting.clear()
    _waiting.update((name, (by_rank, rank)) for name, by_rank in states.items())
    for name in _registered:
        _restore_if_waiting(name)


def put(states: Mapping[str, Tensor], rank: int) -> None:
    """Set generators to what `states` returned."""
    for name, generator in _registered.items():
        if (state := states.get(f"{PREFIX}{rank}.{name}")) is not None:
            _put(generator, state)


def on_host() -> dict[str, Tensor]:
    """Return copies of the states of generators that a data worker can use: none of an accelerator."""
    return {name: _get(generator) for name, generator in _of_host()} if _registered else {}


def put_on_host(states: Mapping[str, Tensor]) -> None:
    """Set generators to what `on_host` returned."""
    for name, generator in _of_host() if states else ():
        if name in states:
            _put(generator, states[name])


def seed_on_host(seed: int) -> None:
    """Seed the generators of `on_host`, each by its name."""
    for name, generator in _of_host() if _registered else ():
        _seed(generator, key(seed, "generator", name))


def _of_host() -> list[tuple[str, Generator]]:
    return [
        (name, generator)
        for name, generator in _registered.items()
        if not isinstance(generator, torch.Generator) or generator.device.type == "cpu"
    ]


@contextmanager
def replayed_draws(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restore the state of all generators, registered ones too, at the block's end.

    Yields a function that returns whether anything was drawn.
    """
    accessors: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
    ]
    for generator in _registered.values():
        accessors.append((partial(_get, generator), partial(_put, generator)))
    if device.type != "cpu":
        module = torch.get_device_module(device)
        accessors.append((partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)))
    before = [get() for get, _ in accessors]

    def has_drawn() -> bool:
        pairs = ((get(), old) for (get, _), old in zip(accessors, before, strict=True))
        as_tensors = ([state if isinstance(state, Tensor) else _text(state) for state in pair] for pair in pairs)
        return not all(torch.equal(*pair) for pair in as_tensors)

    try:
        yield has_drawn
    finally:
        for (_, put), old in zip(accessors, before, strict=True):
            put(old)


def _restore_if_waiting(name: str) -> None:
    if name not in _waiting:
        return
    by_rank, rank = _waiting.pop(name)
    generator = _registered[name]
    try:
        _put(generator, by_rank.get(rank, by_rank[min(by_rank)]))
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise RunFailed(f"the saved state of generator {name!r} is of another kind of generator: {error}") from error
    if rank not in by_rank:
        _seed(generator, key(_draw(generator), "rank", rank))


# --- the three kinds ----------------------------------------------------------------------------------------------


def _text(state: object) -> Tensor:
    data = json.dumps(state, default=_listed).encode()
    return torch.frombuffer(bytearray(data.ljust(_TEXT_BYTES)), dtype=torch.uint8)


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return int(value)


def _read(state: Tensor) -> Any:
    def array(value: dict[str, Any]) -> Any:
        return np.array(value["array"], dtype=value["dtype"]) if value.keys() == {"array", "dtype"} else value

    return json.loads(state.numpy().tobytes(), object_hook=array)


def _get(generator: Generator) -> Tensor:
    if isinstance(generator, torch.Generator):
        return generator.get_state().clone()
    return _text(generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state)


def _put(generator: Generator, state: Tensor) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, internal, gauss = _read(state)
        generator.setstate((version, tuple(internal), gauss))
    else:
        generator.bit_generator.state = _read(state)


def _draw(generator: Generator) -> int:
    if isinstance(generator, torch.Generator):
        return int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return generator.getrandbits(62) if isinstance(generator, random.Random) else int(generator.integers(2**62))


def _seed(generator: Generator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed >> 1)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state

"""Registered generators resume where they were, whenever they are registered."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.worlds import in_world

import lockstep
from lockstep.distributed import generators
from lockstep.resuming.resuming import Resume

MAKERS: dict[str, Callable[[int], Any]] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "numpy": np.random.default_rng,
    "numpy mt19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "python": random.Random,
}


def _draw(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, np.random.Generator):
        return [*generator.random(2).tolist(), float(generator.normal())]
    return [generator.random(), generator.gauss(0, 1), generator.random()]


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    generators._registered.clear()
    generators._waiting.clear()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("late", [False, True])
def test_a_restored_generator_draws_what_the_saved_one_would_have(kind: str, late: bool) -> None:
    first = MAKERS[kind](1)
    lockstep.register_generator("mine", first)
    _draw(first)
    saved = generators.states(0)
    expected = [_draw(first) for _ in range(3)]
    generators._registered.clear()
    second = MAKERS[kind](2)
    if late:
        generators.restore(saved, 0)
        _draw(second)
        lockstep.register_generator("mine", second)
    else:
        lockstep.register_generator("mine", second)
        generators.restore(saved, 0)
    assert [_draw(second) for _ in range(3)] == expected


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_has_the_same_size_whenever_it_is_saved(kind: str) -> None:
    generator = MAKERS[kind](1)
    lockstep.register_generator("mine", generator)
    sizes = set()
    for _ in range(20):
        _draw(generator)
        sizes.add(len(generators.states(0)["generators.0.mine"]))
    assert len(sizes) == 1


@pytest.mark.parametrize("kind", MAKERS)
def test_a_rank_that_the_saved_run_did_not_have_draws_other_numbers(kind: str) -> None:
    lockstep.register_generator("mine", MAKERS[kind](1))
    saved = generators.states(0)
    draws = []
    for rank in (0, 1, 2, 1):
        lockstep.register_generator("mine", MAKERS[kind](9))
        generators.restore(saved, rank)
        draws.append(tuple(_draw(generators._registered["mine"])))
    assert len(set(draws)) == 3
    assert draws[1] == draws[3]


def test_the_state_of_another_kind_of_generator_is_refused() -> None:
    lockstep.register_generator("mine", random.Random(1))
    saved = generators.states(0)
    lockstep.register_generator("mine", torch.Generator())
    with pytest.raises(lockstep.RunFailed, match="saved state of generator 'mine' is of another kind"):
        generators.restore(saved, 0)
    with pytest.raises(TypeError, match=r"a str can't be registered; a torch\.Generator, "):
        lockstep.register_generator("mine", "generator")  # type: ignore[arg-type]


def _noisy(folder: str, step: int | None) -> list[float]:
    """Return the losses of a run whose objective draws from a registered generator."""
    generator = np.random.default_rng(int(os.environ["RANK"]))

    class Noisy(small.CrossEntropy):
        def loss_sum(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return super().loss_sum(outputs, batch) * float(1 + generator.random())

    lockstep.register_generator("noise", generator)
    with lockstep.session(small.config(), objective=Noisy()) as session:
        from lockstep.checkpoint.local import LocalStorage
        from lockstep.resuming.checkpoints import Checkpoints

        checkpoints = Checkpoints(session, LocalStorage(Path(folder)), {})
        checkpoints.begin(Resume(step=step))
        losses = []
        for report in session:
            losses.append(report.loss)
            if step is None and report.step == 3:
                checkpoints.save()
        checkpoints.finish()
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_draws_resumes_with_bitwise_identical_losses(tmp_path: Path, ranks: int) -> None:
    [uninterrupted, *_] = in_world(ranks, _noisy, str(tmp_path), None)
    for losses in in_world(ranks, _noisy, str(tmp_path), 3):
        assert losses == uninterrupted[3:]

"""Faults to plant in a session: each is a bug that a training system could really have.

The comparison with the single process must notice every one of them; a comparison that doesn't proves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.loop.session import components_of


def _replace(session: Any, **rooms: Any) -> None:
    session._components = dataclasses.replace(components_of(session), **rooms)


def _replace_in_sharding(session: Any, **members: Any) -> None:
    _replace(session, sharding=components_of(session).sharding._replace(**members))


class _Wrapped:
    """Forwards to the original, except for what a subclass overrides."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def mean_of_means(session: Any) -> None:
    """Each micro-batch's mean loss counts alike, however many valid targets it has."""

    class Objective(_Wrapped):
        def loss_sum(self, outputs: object, batch: Any) -> torch.Tensor:
            ranks, micro_batches = components_of(session).world.size, components_of(session).plan.batch.accumulation
            mean = self._original.loss_sum(outputs, batch) / max(1, self._original.count(batch))
            return mean * session._count / (ranks * micro_batches)

    engine = components_of(session).engine
    engine = getattr(engine, "_engine", engine)  # context parallelism wraps it
    engine._objective = Objective(engine._objective)


def missing_division_by_ranks(session: Any) -> None:
    """The reduction's mean is undone twice: gradients are too large by the number of ranks."""
    components_of(session).sharding.step._ranks = components_of(session).world.size ** 2


def double_reduction(session: Any) -> None:
    """Gradients are summed over ranks a second time."""

    class Engine(_Wrapped):
        def accumulate(self, *batches_and_scale: Any) -> None:
            self._original.accumulate(*batches_and_scale)
            for parameter in components_of(session).sharding.state.model.parameters():
                dist.all_reduce(parameter.grad)

    _replace(session, engine=Engine(components_of(session).engine))


def swapped_sample(session: Any) -> None:
    """One sample of one update is another one."""

    class Source(_Wrapped):
        def fetch(self, indices: np.ndarray) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:
                indices = indices.copy()
                indices[0] = (indices[0] + 1) % self._original.facts.samples
            return self._original.fetch(indices)

    loader = components_of(session).loader
    loader._source = Source(loader._source)
    _restart(session)


def cursor_off_by_one(session: Any) -> None:
    """The data continues one sample too late."""
    from lockstep.core.progress import Progress

    _restart(session, Progress(samples=1))


def clip_norm_of_one_rank(session: Any) -> None:
    """Each rank clips by its own share of the norm."""

    class Step(_Wrapped):
        def squared_norm(self) -> torch.Tensor:
            return self._original.squared_norm() / components_of(session).world.size

    _replace_in_sharding(session, step=Step(components_of(session).sharding.step))


def stale_moment(session: Any) -> None:
    """What the optimizer learned from the second update is forgotten: the third starts from moments of the first."""

    state = components_of(session).sharding.state

    class Step(_Wrapped):
        def update(self, *how: Any) -> None:
            moments = {
                name: tensor for name, tensor in state.live_state().tensors.items() if name.startswith("optimizer.")
            }
            before = {name: tensor.clone() for name, tensor in moments.items()}
            self._original.update(*how)
            if session.progress.steps == 1:
                for name, tensor in before.items():
                    moments[name].copy_(tensor)

    _replace_in_sharding(session, step=Step(components_of(session).sharding.step))


def lost_when_published(session: Any) -> None:
    """A tensor is left out when weights are gathered to be published."""
    _replace_in_sharding(
        session, state=_GatheredAgain(session, lambda name, tensor: None if "norm" in name else tensor)
    )


def stale_when_published(session: Any) -> None:
    """A tensor is published with other values than it has."""
    _replace_in_sharding(
        session, state=_GatheredAgain(session, lambda name, value: value + 1 if "norm" in name else value)
    )


class _GatheredAgain(_Wrapped):
    """What `change` makes of the weights, each further time that they are asked for between two updates."""

    def __init__(self, session: Any, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__(components_of(session).sharding.state)
        self._session, self._change, self._asked = session, change, -1

    def weights(self, **which: Any) -> Any:
        again, self._asked = self._session.progress.steps == self._asked, self._session.progress.steps
        for name, tensor in self._original.weights(**which):
            changed = self._change(name, tensor) if again else tensor
            if changed is not None:
                yield name, changed


def unsynchronised_tied_weight(session: Any) -> None:
    """Of a weight that is embedding and head, the head's part of the gradient stays this rank's own."""
    model = components_of(session).sharding.state.model
    head, part = model.head, []

    def see(module: Any, inputs: Any, output: torch.Tensor) -> None:
        seen = inputs[0].detach().flatten(0, -2)
        output.register_hook(lambda gradient: part.append(gradient.flatten(0, -2).T @ seen))

    class Engine(_Wrapped):
        def accumulate(self, *batches_and_scale: Any) -> None:
            part.clear()
            self._original.accumulate(*batches_and_scale)
            own = torch.stack(part).sum(dim=0)
            mean = own.clone()
            dist.all_reduce(mean)
            head.weight.grad += own - mean / components_of(session).world.size

    head.register_forward_hook(see)
    _replace(session, engine=Engine(components_of(session).engine))


def _restart(session: Any, progress: Any = None) -> None:
    here, session._batch = session.progress, None
    session.progress = progress or here
    session.begin()
    session.progress = here


FAULTS: dict[str, Callable[[Any], None]] = {
    "a mean of means": mean_of_means,
    "a missing division by ranks": missing_division_by_ranks,
    "a double reduction": double_reduction,
    "one swapped sample": swapped_sample,
    "a cursor off by one": cursor_off_by_one,
    "a clip norm of one rank": clip_norm_of_one_rank,
    "a stale moment": stale_moment,
}

OF_PIECES: dict[str, Callable[[Any], None]] = {
    "ends that keep their own gradient of a tied weight": lambda session: setattr(
        components_of(session).sharding.step._partition, "reduce_shared", lambda gradients: None
    ),
}
"""Of a model that is cut over ranks."""

PUBLISHING: dict[str, Callable[[Any], None]] = {
    "a tensor lost when published": lost_when_published,
    "a tensor published stale": stale_when_published,
}
"""Those that only the published weights show."""

STOPPING: dict[str, Callable[[Any], None]] = {
    "an unsynchronized tied weight": unsynchronised_tied_weight,
}
"""Those that stop a run at the next vote, because ranks differ."""

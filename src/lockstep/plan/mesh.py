"""Ranks as a mesh of axes, outermost first. Pure arithmetic.

    pipeline 2 x tensor 2:     rank    0  1 | 2  3        neighbors on the tensor axis (most traffic) have
                            pipeline   0  0 | 1  1        consecutive ranks, so they are on one machine; those
                              tensor   0  1 | 0  1        on the pipeline axis (least traffic) are far apart

A group is the set of ranks that differ along one axis only: above, (0, 1) and (2, 3) along `tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from lockstep.core.errors import ConfigError, Problem
from lockstep.strategies.registry import strategies

if TYPE_CHECKING:
    from lockstep.config.schema import Parallel
    from lockstep.strategies.record import Strategy

Axis = Literal["pipeline", "data", "shard", "context", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The size of each axis.

    Attributes:
        pipeline: Stages of the model.
        data: Replicas of the training state.
        shard: Shards of each replica's state.
        context: Shards of each sequence.
        tensor: Shards of each matrix.
    """

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of AXES."""
        return (self.pipeline, self.data, self.shard, self.context, self.tensor)

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def shares(self) -> int:
        """Number of shares of a global batch: ranks along the other axes have the same samples."""
        return self.data * self.shard

    @property
    def pieces(self) -> int:
        """Number of parts of the partitioned model."""
        return self.pipeline * self.tensor

    def with_context(self, *, divided: bool) -> Mesh:
        """Return the mesh of the state: ranks along `context` hold shards if it is `divided`, else replicas."""
        data, shard = (1, self.context) if divided else (self.context, 1)
        return replace(self, data=self.data * data, shard=self.shard * shard, context=1)

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the position of `rank` on each axis."""
        assert 0 <= rank < self.ranks, f"rank {rank} of {self.ranks}"
        return {axis: rank // self._stride(axis) % size for axis, size in zip(AXES, self.sizes, strict=True)}

    def groups(self, axis: Axis) -> Iterator[range]:
        """Yield all groups along `axis`."""
        stride = self._stride(axis)
        length = self.sizes[AXES.index(axis)] * stride
        for block in range(0, self.ranks, length):
            for first in range(block, block + stride):
                yield range(first, first + length, stride)

    def _stride(self, axis: Axis) -> int:
        """Return the distance in ranks between neighbors on an axis."""
        return math.prod(self.sizes[AXES.index(axis) + 1 :])


def make_mesh(ranks: int, sizes: Mapping[Axis, int], rest: Axis = "data", *, fixed: bool = False) -> Mesh:
    """Return the mesh of `ranks` ranks with these axes; `data` may follow from the others.

    Args:
        rest: The axis to advise another size for.
        fixed: Its size is the user's.

    Raises:
        ConfigError: The product of the axes is not the number of ranks.
    """
    product = math.prod(sizes.values())
    others = product // sizes.get(rest, 1)
    if "data" not in sizes and ranks % others == 0:
        sizes = {**sizes, "data": ranks // others}
    mesh = Mesh(*(sizes.get(axis, 1) for axis in AXES))
    if mesh.ranks == ranks:
        return mesh
    total = f" = {product}" if len(sizes) > 1 else ""
    fact = f"{' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))}{total}, not {ranks}, the number of ranks"
    below, above = ranks // others * others, -(-ranks // others) * others
    remedy = f"Start {product}" if fixed else f"Start {below} or {above}" if below else f"Start {above}"
    if ranks % others == 0:
        remedy = f"{rest} = {ranks // others} gives {ranks}; or start {product}"
    raise ConfigError(Problem("", "parallel", f"{fact}. {remedy} ranks."))


def mesh_of(parallel: Parallel, strategy: Strategy, ranks: int, machine_ranks: int | None = None) -> Mesh:
    """Return how a strategy arranges the ranks.

    Args:
        machine_ranks: Ranks of one machine, which holds a hybrid replica; None: all ranks.

    Raises:
        ConfigError: The degrees contradict the strategy, or their product is not the number of ranks.
    """
    variant = strategy.variant(parallel)
    partitioned = _partitioned(parallel, strategy, ranks)
    if variant.mesh == "hybrid":
        given = (parallel.data != "auto", parallel.shard != "auto")
        sizes = _hybrid(parallel, ranks, machine_ranks or ranks, partitioned)
        return make_mesh(ranks, sizes, "shard" if given == (True, False) else "data", fixed=all(given))
    title = variant.title or strategy.name
    if variant.divides and parallel.data not in ("auto", 1):
        other = f", or write {variant.replicated}" if variant.replicated else ""
        raise ConfigError(Problem("", "parallel.data", f"{title} has one replica; leave parallel.data out{other}"))
    if not variant.divides and parallel.shard not in ("auto", 1):
        raise ConfigError(Problem("", "parallel.shard", f"{title} shards nothing; leave parallel.shard out"))
    rest: Axis = "shard" if variant.divides else "data"
    degree = parallel.shard if variant.divides else parallel.data
    left = max(1, ranks // math.prod(partitioned.values()))
    sizes = {"data": 1, rest: left if degree == "auto" else degree, **partitioned}
    return make_mesh(ranks, sizes, rest, fixed=degree != "auto")


def _partitioned(parallel: Parallel, strategy: Strategy, ranks: int) -> dict[Axis, int]:
    """Return the degrees above one of the axes that partition the model or its sequences."""
    axes: tuple[Axis, ...] = ("pipeline", "context", "tensor")
    requested = {axis: degree for axis in axes if (degree := getattr(parallel, axis)) != 1}
    degrees: dict[Axis, int] = {axis: degree for axis, degree in requested.items() if degree != "auto"}
    if strategy.exactness.reference:
        start = f"start {math.prod(degrees.values())} ranks"
        problems = [
            Problem("", f"parallel.{axis}", f"{degree}, but there is one rank; write parallel.{axis}: 1, or {start}")
            for axis, degree in degrees.items()
        ]
        if problems:
            raise ConfigError(problems)
        return {}
    for axis in (axis for axis in requested if axis not in strategy.combines.axes):
        able = " or ".join(other.name for other in strategies() if axis in other.combines.axes)
        why = f"{strategy.name} doesn't go with parallel.{axis} {requested[axis]}; take {able}"
        raise ConfigError(Problem("", "parallel.strategy", f"{why}, or leave parallel.{axis} out"))
    of_model = [axis for axis in requested if axis != "context"]
    if "context" in requested and of_model:
        where = f"parallel.{of_model[0]} {requested[of_model[0]]}"
        why = f"{requested['context']}, but sequences can't be sharded with {where}; leave one of them out"
        raise ConfigError(Problem("", "parallel.context", why))
    open_axes = [axis for axis in requested if axis not in degrees]
    if len(open_axes) > 1:
        why = f"auto, and so is parallel.{open_axes[0]}, but only one degree can follow from the ranks"
        raise ConfigError(Problem("", f"parallel.{open_axes[1]}", f"{why}; give one a number"))
    if open_axes:  # no replicas are made that were not requested
        others = (degree for degree in (parallel.data, parallel.shard, *degrees.values()) if degree != "auto")
        degrees[open_axes[0]] = max(1, ranks // math.prod(others))
    return {axis: degree for axis, degree in degrees.items() if degree != 1}


def _hybrid(parallel: Parallel, ranks: int, machine_ranks: int, partitioned: Mapping[Axis, int]) -> dict[Axis, int]:
    """Return the sizes; by default a replica is on one machine."""
    by = math.prod(partitioned.values())
    if parallel.data == "auto":
        return {"shard": max(1, machine_ranks // by) if parallel.shard == "auto" else parallel.shard, **partitioned}
    shard = max(1, ranks // (parallel.data * by)) if parallel.shard == "auto" else parallel.shard
    return {"data": parallel.data, "shard": shard, **partitioned}

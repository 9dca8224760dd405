"""Ranks as a mesh of axes, outermost first. Pure arithmetic, for any number of ranks.

    pipeline 2 x tensor 2:     rank    0  1 | 2  3        neighbours of the tensor axis (which talk most) are
                            pipeline   0  0 | 1  1        neighbours by number, so on one machine; the pipeline's
                              tensor   0  1 | 0  1        (which talk least) are far apart

A group is the set of ranks that differ along one axis alone: above, (0, 1) and (2, 3) along `tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from lockstep.core.errors import ConfigError, Problem
from lockstep.strategies.registry import combining, find_variant

if TYPE_CHECKING:
    from lockstep.config.schema import Parallel
    from lockstep.strategies.record import Strategy, Variant

Axis = Literal["pipeline", "data", "shard", "context", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The size of each axis; an axis of one divides nothing.

    pipeline: stages of the model. data: replicas. shard: parts of a replica's state. context: parts of a
    sequence. tensor: parts of a matrix product.
    """

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of AXES."""
        return (self.pipeline, self.data, self.shard, self.context, self.tensor)

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def shares(self) -> int:
        """Of a global batch: ranks along the other axes have the same samples."""
        return self.data * self.shard

    def with_context(self, *, divided: bool) -> Mesh:
        """As state lies: ranks along `context` hold parts of it, if it is `divided`, otherwise replicas."""
        data, shard = (1, self.context) if divided else (self.context, 1)
        return replace(self, data=self.data * data, shard=self.shard * shard, context=1)

    @property
    def pieces(self) -> int:
        """That the model itself is cut into."""
        return self.pipeline * self.tensor

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Where `rank` stands on each axis."""
        assert 0 <= rank < self.ranks, f"rank {rank} of {self.ranks}"
        found: dict[Axis, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[Axis, int]) -> int:
        """The rank at these coordinates; axes that are left out are at 0."""
        found = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            place = coordinates.get(axis, 0)
            assert 0 <= place < size, f"{axis} {place} of {size}"
            found = found * size + place
        return found

    def group(self, rank: int, axis: Axis) -> range:
        """The ranks that differ from `rank` along `axis` alone, itself among them, in the order of the axis."""
        size, stride = self._along(axis)
        first = rank - rank // stride % size * stride
        return range(first, first + size * stride, stride)

    def groups(self, axis: Axis) -> Iterator[range]:
        """All groups along `axis`: each rank is in exactly one."""
        size, stride = self._along(axis)
        for block in range(0, self.ranks, size * stride):
            for first in range(block, block + stride):
                yield range(first, first + size * stride, stride)

    def _along(self, axis: Axis) -> tuple[int, int]:
        """Size of an axis, and the distance in ranks between neighbours on it."""
        place = AXES.index(axis)
        return self.sizes[place], math.prod(self.sizes[place + 1 :])


def make_mesh(
    ranks: int, sizes: Mapping[Axis, int], rest: Axis = "data", *, fixed: bool = False, beside: str = ""
) -> Mesh:
    """The mesh of `ranks` ranks with these axes; `data` takes what the others leave, if it isn't given.

    Args:
        rest: the axis that another number would do for, first of all.
        fixed: that somebody has said its number, and it doesn't follow from the ranks.
        beside: what else could be done, at the end of a sentence.

    Raises:
        ConfigError: the axes don't multiply out to the ranks.
    """
    others = math.prod(size for axis, size in sizes.items() if axis != rest)
    if "data" not in sizes and ranks % others == 0:
        sizes = {**sizes, "data": ranks // others}
    mesh = Mesh(*(sizes.get(axis, 1) for axis in AXES))
    if mesh.ranks == ranks:
        return mesh
    raise ConfigError(Problem("", "parallel", f"{_sum(ranks, sizes)} {_nearest(ranks, sizes, rest, fixed)}{beside}."))


def mesh_of(parallel: Parallel, strategy: Strategy, ranks: int, machine_ranks: int | None = None) -> Mesh:
    """Return how a strategy lays `ranks` out.

    Args:
        machine_ranks: Of one machine, which the shards of a hybrid replica stay within; None: all are on one.

    Raises:
        ConfigError: the degrees contradict the strategy, or don't multiply out to the ranks.
    """
    return _mesh_of(parallel, strategy, strategy.variant(parallel), ranks, machine_ranks)


def _mesh_of(
    parallel: Parallel, strategy: Strategy, variant: Variant, ranks: int, machine_ranks: int | None = None
) -> Mesh:
    partitioned = _partitioned(parallel, strategy, ranks)
    if variant.mesh == "hybrid":
        given = (parallel.data != "auto", parallel.shard != "auto")
        sizes = _hybrid(parallel, ranks, machine_ranks or ranks, partitioned)
        return make_mesh(ranks, sizes, "shard" if given == (True, False) else "data", fixed=all(given))
    title = variant.title or strategy.name
    key, several = _first_fitting(parallel, ranks, [variant.replicated] if variant.replicated else [])
    if variant.divides and parallel.data not in ("auto", 1):
        others = f"{several} has {parallel.data}, or " if several else ""
        raise ConfigError(Problem("", "parallel.data", f"{title} has one replica; {others}leave parallel.data out"))
    if not variant.divides and parallel.shard not in ("auto", 1):
        sharded = next((words for name, words in variant.sharded.items() if _fits(parallel, ranks, name)), None)
        others = f"{sharded}, or " if sharded else ""
        raise ConfigError(Problem("", "parallel.shard", f"{title} divides nothing; {others}leave parallel.shard out"))
    rest: Axis = "shard" if variant.divides else "data"
    asked = parallel.shard if variant.divides else parallel.data
    left = max(1, ranks // math.prod(partitioned.values()))
    sizes = {"data": 1, rest: left if asked == "auto" else asked, **partitioned}
    beside = f", or write {key}: {several}, which has several replicas" if several else ""
    return make_mesh(ranks, sizes, rest, fixed=asked != "auto", beside=beside)


def _first_fitting(parallel: Parallel, ranks: int, names: Sequence[str]) -> tuple[str, str]:
    """Return the option that selects the first of these variants that has a mesh of so many ranks, and its value."""
    name = next((name for name in names if _fits(parallel, ranks, name)), None)
    if name is None:
        return "", ""
    strategy, variant = find_variant(name)
    option, value = next(iter(variant.options.items()))
    return f"parallel.{strategy.section}.{option}", str(value)


def _fits(parallel: Parallel, ranks: int, name: str) -> bool:
    try:
        _mesh_of(parallel, *find_variant(name), ranks)
    except ConfigError:
        return False
    return True


def _partitioned(parallel: Parallel, strategy: Strategy, ranks: int) -> dict[Axis, int]:
    """Return the degrees by which the model itself or its sequences are partitioned; those of one are left out."""
    asked: dict[Axis, int | Literal["auto"]] = {
        "pipeline": parallel.pipeline,
        "context": parallel.context,
        "tensor": parallel.tensor,
    }
    asked = {axis: degree for axis, degree in asked.items() if degree != 1}
    if strategy.reference:
        given = {axis: degree for axis, degree in asked.items() if degree != "auto"}
        if given:
            raise ConfigError([Problem("", f"parallel.{axis}", _for_one_rank(axis, given)) for axis in given])
        return {}
    for axis in (axis for axis in asked if axis not in strategy.axes):
        why = (
            f"{strategy.name} doesn't go with parallel.{axis} {asked[axis]}; take {' or '.join(combining(axis))}, or "
            f"leave parallel.{axis} out"
        )
        raise ConfigError(Problem("", "parallel.strategy", why))
    of_model = [axis for axis in asked if axis != "context"]
    if "context" in asked and of_model:
        where = f"parallel.{of_model[0]} {asked[of_model[0]]}"
        why = f"{asked['context']}, but sequences can't be divided with {where}; leave one of them out"
        raise ConfigError(Problem("", "parallel.context", why))
    open_ = [axis for axis, degree in asked.items() if degree == "auto"]
    if len(open_) > 1:
        why = f"auto, and so is parallel.{open_[0]}: only one of them can be what the others leave; give one a number"
        raise ConfigError(Problem("", f"parallel.{open_[1]}", why))
    degrees = {axis: degree for axis, degree in asked.items() if degree != "auto"}
    if open_:  # replicas that were not asked for are not made
        others = (degree for degree in (parallel.data, parallel.shard, *degrees.values()) if degree != "auto")
        degrees[open_[0]] = max(1, ranks // math.prod(others))
    return {axis: degree for axis, degree in degrees.items() if degree != 1}


def _for_one_rank(axis: Axis, asked: Mapping[Axis, int]) -> str:
    return f"{asked[axis]}, but there is one rank; write parallel.{axis}: 1, or start {math.prod(asked.values())} ranks"


def _hybrid(parallel: Parallel, ranks: int, machine_ranks: int, partitioned: Mapping[Axis, int]) -> dict[Axis, int]:
    """What isn't given follows: of the parts of a replica, that they lie on one machine."""
    by = math.prod(partitioned.values())
    if parallel.data == "auto":
        return {"shard": max(1, machine_ranks // by) if parallel.shard == "auto" else parallel.shard, **partitioned}
    shard = max(1, ranks // (parallel.data * by)) if parallel.shard == "auto" else parallel.shard
    return {"data": parallel.data, "shard": shard, **partitioned}


def _sum(ranks: int, sizes: Mapping[Axis, int]) -> str:
    product = f" = {math.prod(sizes.values())}" if len(sizes) > 1 else ""
    sum_ = " x ".join(str(size) for size in sizes.values()) + product
    return f"{' x '.join(sizes)} = {sum_}, but there {'is 1 rank' if ranks == 1 else f'are {ranks} ranks'}."


def _nearest(ranks: int, sizes: Mapping[Axis, int], rest: Axis, fixed: bool) -> str:
    """What would do: another number of one axis, or of ranks."""
    product = math.prod(sizes.values())
    others = product // sizes.get(rest, 1)
    if ranks % others == 0:
        return f"{rest} = {ranks // others} gives {ranks}; or start {product} ranks"
    if fixed:
        exact = _exact_degree(ranks, sizes)
        return f"{exact}; or start {product} ranks" if exact else f"Start {product} ranks"
    below, above = ranks // others * others, -(-ranks // others) * others
    starts = f"{below} or {above}" if below else f"{above}"
    fits = _nearest_degree(ranks, {axis: size for axis, size in sizes.items() if axis != rest})
    return f"Whatever {rest} is, it takes a multiple of {others}: {fits}start {starts} ranks"


def _exact_degree(ranks: int, sizes: Mapping[Axis, int]) -> str:
    """Of the first axis by which alone it comes to the ranks."""
    product = math.prod(sizes.values())
    for axis, size in sizes.items():
        if size > 1 and ranks % (product // size) == 0:
            return f"{axis} = {ranks * size // product} gives {ranks}"
    return ""


def _nearest_degree(ranks: int, sizes: Mapping[Axis, int]) -> str:
    """Of the first axis by which alone the others fit."""
    for axis, size in sizes.items():
        rest = math.prod(sizes.values()) // size
        fitting = [degree for degree in range(1, ranks // rest + 1) if ranks % (rest * degree) == 0]
        near = [*[one for one in fitting if one < size][-1:], *[one for one in fitting if one > size][:1]]
        if size > 1 and near:
            return f"{axis} = {' or '.join(map(str, near))} fits {ranks}; or "
    return ""

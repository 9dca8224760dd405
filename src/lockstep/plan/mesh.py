"""Ranks as a mesh of axes, outermost first. Pure arithmetic, for any number of ranks.

    pipeline 2 x tensor 2:     rank    0  1 | 2  3        neighbours of the tensor axis (which talk most) are
                            pipeline   0  0 | 1  1        neighbours by number, so on one machine; the pipeline's
                              tensor   0  1 | 0  1        (which talk least) are far apart

A group is the set of ranks that differ along one axis alone: above, (0, 1) and (2, 3) along `tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from lockstep.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from lockstep.config.schema import Parallel

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


def make_mesh(ranks: int, sizes: Mapping[Axis, int]) -> Mesh:
    """The mesh of `ranks` ranks with these axes; `data` takes what the others leave, if it isn't given.

    Raises:
        ConfigError: the axes don't multiply out to the ranks.
    """
    others = math.prod(size for axis, size in sizes.items() if axis != "data")
    if "data" not in sizes and ranks % others == 0:
        sizes = {**sizes, "data": ranks // others}
    mesh = Mesh(*(sizes.get(axis, 1) for axis in AXES))
    if mesh.ranks == ranks:
        return mesh
    raise ConfigError(Problem("", "parallel", _does_not_multiply_out(ranks, sizes, mesh.ranks, others)))


def mesh_of(parallel: Parallel, strategy: str, ranks: int, machine_ranks: int | None = None) -> Mesh:
    """How a strategy lays `ranks` out.

    Args:
        strategy: never `auto`.
        machine_ranks: of one machine, which the parts of a hybrid replica stay within; None: all are on one.

    Raises:
        ConfigError: the degrees contradict the strategy, or don't multiply out to the ranks.
    """
    cut = _cut_model(parallel, strategy, ranks)
    sharding = parallel.fsdp.sharding_strategy if strategy == "fsdp" else None
    if sharding in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        return make_mesh(ranks, _hybrid(parallel, ranks, machine_ranks or ranks, cut))
    stage = parallel.deepspeed.zero_stage if strategy == "deepspeed" else 0
    divides = sharding in ("FULL_SHARD", "SHARD_GRAD_OP") or stage > 0
    word = f"fsdp with {sharding}" if sharding else strategy
    word = f"deepspeed with zero_stage {stage}" if strategy == "deepspeed" else word
    if divides and parallel.data not in ("auto", 1):
        others = "" if stage else f"HYBRID_SHARD has {parallel.data}, or "
        why = f"{word} has one replica; {others}leave parallel.data out"
        raise ConfigError(Problem("", "parallel.data", why))
    if not divides and parallel.shard not in ("auto", 1):
        others = "zero_stage 1, 2 and 3 do" if strategy == "deepspeed" else "fsdp with FULL_SHARD or HYBRID_SHARD does"
        why = f"{word} divides nothing; {others}, or leave parallel.shard out"
        raise ConfigError(Problem("", "parallel.shard", why))
    axis: Axis = "shard" if divides else "data"
    size = parallel.shard if divides else parallel.data
    left = max(1, ranks // math.prod(cut.values()))
    return make_mesh(ranks, {"data": 1, axis: left if size == "auto" else size, **cut})


def _cut_model(parallel: Parallel, strategy: str, ranks: int) -> dict[Axis, int]:
    """The degrees by which the model itself or its sequences are cut; those of one are left out."""
    asked: dict[Axis, int | Literal["auto"]] = {
        "pipeline": parallel.pipeline,
        "context": parallel.context,
        "tensor": parallel.tensor,
    }
    asked = {axis: degree for axis, degree in asked.items() if degree != 1}
    if strategy == "single":
        given = {axis: degree for axis, degree in asked.items() if degree != "auto"}
        if given:
            raise ConfigError([Problem("", f"parallel.{axis}", _for_one_rank(axis, given)) for axis in given])
        return {}
    if asked and strategy not in ("ddp", "fsdp"):
        axis = next(iter(asked))
        why = (
            f"{strategy} doesn't go with parallel.{axis} {asked[axis]}; take ddp or fsdp, or leave parallel.{axis} out"
        )
        raise ConfigError(Problem("", "parallel.strategy", why))
    cuts = [axis for axis in asked if axis != "context"]
    if "context" in asked and cuts:
        where = f"parallel.{cuts[0]} {asked[cuts[0]]}"
        why = f"{asked['context']}, but sequences can't be divided with {where}; leave one of them out"
        raise ConfigError(Problem("", "parallel.context", why))
    open_ = [axis for axis, degree in asked.items() if degree == "auto"]
    if len(open_) > 1:
        why = f"auto, and so is parallel.{open_[0]}: only one of them can be what the others leave; give one a number"
        raise ConfigError(Problem("", f"parallel.{open_[1]}", why))
    cut = {axis: degree for axis, degree in asked.items() if degree != "auto"}
    if open_:  # replicas that were not asked for are not made
        others = (degree for degree in (parallel.data, parallel.shard, *cut.values()) if degree != "auto")
        cut[open_[0]] = max(1, ranks // math.prod(others))
    return {axis: degree for axis, degree in cut.items() if degree != 1}


def _for_one_rank(axis: Axis, asked: Mapping[Axis, int]) -> str:
    return f"{asked[axis]}, but there is one rank; write parallel.{axis}: 1, or start {math.prod(asked.values())} ranks"


def _hybrid(parallel: Parallel, ranks: int, machine_ranks: int, cut: Mapping[Axis, int]) -> dict[Axis, int]:
    """What isn't given follows: of the parts of a replica, that they lie on one machine."""
    by = math.prod(cut.values())
    if parallel.data == "auto":
        return {"shard": max(1, machine_ranks // by) if parallel.shard == "auto" else parallel.shard, **cut}
    shard = max(1, ranks // (parallel.data * by)) if parallel.shard == "auto" else parallel.shard
    return {"data": parallel.data, "shard": shard, **cut}


def _does_not_multiply_out(ranks: int, sizes: Mapping[Axis, int], product: int, others: int) -> str:
    names = " x ".join(sizes)
    sum_ = " x ".join(str(size) for size in sizes.values()) + (f" = {product}" if len(sizes) > 1 else "")
    said = f"{names} = {sum_}, but there {'is 1 rank' if ranks == 1 else f'are {ranks} ranks'}."
    if ranks % others == 0:
        return f"{said} data = {ranks // others} gives {ranks}; or start {product} ranks."
    below, above = ranks // others * others, -(-ranks // others) * others
    starts = f"{below} or {above}" if below else f"{above}"
    fits = _nearest_degree(ranks, {axis: size for axis, size in sizes.items() if axis != "data"})
    return f"{said} Whatever data is, it takes a multiple of {others}: {fits}start {starts} ranks."


def _nearest_degree(ranks: int, sizes: Mapping[Axis, int]) -> str:
    """Of the first axis by which alone the others fit."""
    for axis, size in sizes.items():
        rest = math.prod(sizes.values()) // size
        fitting = [degree for degree in range(1, ranks // rest + 1) if ranks % (rest * degree) == 0]
        near = [*[one for one in fitting if one < size][-1:], *[one for one in fitting if one > size][:1]]
        if size > 1 and near:
            return f"{axis} = {' or '.join(map(str, near))} fits {ranks}; or "
    return ""

"""A model cut between its blocks: each rank keeps some of them, under their own names.

    embedding    blocks.0  blocks.1  blocks.2  blocks.3    norm  head
    `- before                                               after -'
    rank 0   keeps  embedding, blocks.0, blocks.1           the rest has no weights there
    rank 1   keeps  blocks.2, blocks.3, norm, head          under the same names as in the whole model

A stage runs the model's own forward on the micro-batch, which every rank has: what comes before its first block makes
masks and the like; blocks that lie elsewhere let their input through; its first block takes what the stage before has
sent; and behind its last block the forward is left. So it works for any model whose blocks form a chain, and needs no
forward of its own for a part of a model.

That they form one is seen before anything is trained, alike on every rank, in a rehearsal that computes nothing: each
block is met once, in order; where a stage begins, a block takes the very tensor that the one before has returned, and
nothing besides that is made from weights that lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.core.errors import ConfigError, Failure, Problem
from lockstep.core.records import Inputs
from lockstep.engine.eager import call, call_without_hooks
from lockstep.engine.elsewhere import (
    EVERYWHERE,
    Around,
    Elsewhere,
    Side,
    in_place_of,
    leave,
    no_chain,
    outside,
    refuse_tied_blocks,
    stand_in,
    tied_across,
)
from lockstep.engine.judging import Unheard
from lockstep.engine.rehearsing import entered_modules, first_line, unchanged
from lockstep.engine.sketch import Sketch
from lockstep.engine.usage import sides_of_use
from lockstep.plan.stages import Schedule, balanced, owner

_COLLECTED = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Keys of a config of transformers by which outputs hold something of each block."""
Meet = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the place of a block's call: its number, and what it is given."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """What stages hand on.

    Attributes:
        shape, dtype: of one micro-batch's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a pipeline is asked to be cut.

    Attributes:
        ranks: of the pipeline; `rank` is this one.
        split: names of the blocks that stages begin with, from the second on; None: stages of about the same cost.
    """

    rank: int
    ranks: int
    schedule: Schedule
    stages_per_rank: int
    split: Sequence[str] | None

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank


class Cut:
    """A model of which this rank keeps a part.

    Attributes:
        model: the part; it runs one stage at a time, by `run`.
        blocks: names of those that are kept.
        mine: numbers of this rank's stages, in order.
        stages: of the whole model.
        shared: names of parameters that the first and the last stage both have, since they are tied.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        asked: Cutting,
        device: torch.device,
        inputs: Inputs,
        unheard: Unheard,
    ) -> None:
        """Cuts the model in place, before it is moved to `device` or sharded.

        Args:
            inputs: of a few samples, on the CPU: on which side of the blocks other modules are used is seen by them.
            unheard: makes the context in which what user code logs is no data.

        Raises:
            ConfigError: it can't be cut so.
        """
        _refuse_no_chain(model, blocks)
        with unheard():
            around = outside(model, blocks, sides_of_use(model, blocks, inputs))
        self._unheard = unheard
        begins = _begins(model, blocks, asked, around)
        self._begins = begins
        self._sketch = Sketch(model, device) if type(model) is nn.Sequential else None
        self.model = model
        self.stages = asked.stages
        self.mine = [stage for stage in range(asked.stages) if owner(stage, asked.ranks, asked.schedule) == asked.rank]
        self.owners = [owner(stage, asked.ranks, asked.schedule) for stage in range(asked.stages)]
        ends = [*begins[1:], len(blocks)]
        self._spans = {stage: range(begins[stage], ends[stage]) for stage in self.mine}
        self._device = device
        self._names = list(blocks)
        self._modules = [model.get_submodule(name) for name in blocks]
        self._meet: Meet | None = None
        self._returns: str | int = "tensor"
        self._learned: torch.dtype | None = None
        self._shapes: dict[Any, list[Hidden]] = {}
        kept = {index for span in self._spans.values() for index in span}
        self.blocks = [name for index, name in enumerate(blocks) if index in kept]
        keeps_ends = self.mine[0] == 0, self.mine[-1] == self.stages - 1
        refuse_tied_blocks(model, blocks)
        self.shared = tied_across(model, around) if self.owners[0] != self.owners[-1] else []
        self._around = around
        kept_sides = {side for side, keeps in zip(("before", "after"), keeps_ends, strict=True) if keeps}
        leave(around, kept_sides, device)
        self._calls: list[Callable[..., Any]] = []  # with their hooks, which a block that lets through doesn't run
        for index, module in enumerate(self._modules):
            if index not in kept:
                _empty(module)
            self._calls.append(cast("Any", module)._call_impl)
            cast("Any", module)._call_impl = partial(self._in_block, index)
        cast("Any", model).forward = _until_left(model.forward)

    def parameters_of(self, stage: int) -> Iterator[nn.Parameter]:
        """Of its blocks, and of what lies before or after all blocks, if that belongs to it."""
        own = {id(one) for index in self._spans[stage] for one in self._modules[index].parameters()}
        others = {
            id(one) for kept in self._spans.values() for index in kept for one in self._modules[index].parameters()
        }
        ends = stage in (0, self.stages - 1)
        return (one for one in self.model.parameters() if id(one) in own or (ends and id(one) not in others))

    def run(self, stage: int, hidden: Tensor | None, inputs: Inputs) -> Any:
        """The stage's part of a forward on a micro-batch.

        Args:
            hidden: what the stage before has sent; None for the first.

        Returns:
            What goes to the next stage; of the last, what the model returns.

        Raises:
            ConfigError: the model's blocks are no chain, and can't be cut here.
        """
        span, last = self._spans[stage], len(self._modules) - 1
        passed: _Passed | None = None
        others = ExitStack()  # what comes before the stage's own blocks is another one's to tell

        def meet(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal passed
            if index not in span:
                passed = _Passed.on(_given(args, kwargs))
                return _as(self._returns, passed.hidden)
            if index == span[0] and index > 0:
                if passed is None or not passed.is_still(_given(args, kwargs)):  # a training forward may do more
                    raise _something_between(self._names[index - 1], self._names[index])
                args, kwargs = _with(_sent_back(hidden), args, kwargs)
                Elsewhere.refused = EVERYWHERE
                others.close()
            found = self._calls[index](*args, **kwargs)
            if index == span[-1] and index < last:
                raise _Left(self._handed_on(found))
            return found

        with others, self._meeting(meet, EVERYWHERE if stage == 0 else frozenset()):
            if stage > 0:
                others.enter_context(self._unheard())
            return call(self.model, inputs)

    def handed(self, inputs: Inputs) -> list[Hidden]:
        """What each stage is handed of a micro-batch; the first stage's is a filler. No weights are used for it, but in
        the first call; in the autocast of the run."""
        sign = tuple((tuple(one.shape), one.dtype) for one in tree_leaves(inputs) if isinstance(one, Tensor))
        if sign not in self._shapes:
            self._shapes[sign] = self._handed_in_sequence(inputs) if self._sketch else self._handed_alike(inputs)
        return self._shapes[sign]

    def _handed_in_sequence(self, inputs: Inputs) -> list[Hidden]:
        assert self._sketch is not None, "a Sequential has one"
        made = [_hidden(one, name) for one, name in zip(self._sketch.outputs(inputs), self._names, strict=True)]
        return [made[max(0, begin - 1)] for begin in self._begins]

    def _handed_alike(self, inputs: Inputs) -> list[Hidden]:
        before = self._before(inputs)
        if self._learned is None:
            self._learn(inputs, before)
            self._rehearse(inputs, before)
        assert self._learned is not None, "just learned"
        return [Hidden(tuple(before.shape), self._learned)] * self.stages

    @torch.no_grad()
    def _learn(self, inputs: Inputs, before: Tensor) -> None:
        """What blocks return, found out by running one of this rank's on zeros."""
        name, first = self.blocks[0], self._spans[self.mine[0]][0]
        returned: list[Any] = []

        def meet(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            zeros = torch.zeros(before.shape, dtype=before.dtype, device=self._device)
            args, kwargs = _with(zeros, args, kwargs)
            try:
                returned.append(self._calls[first](*args, **kwargs))  # in the place of the model's first
            except Failure:
                raise
            except Exception as error:  # whatever it runs into
                why = f"{name} fails on what {self._names[0]} is given ({first_line(error)}): stages hand on one shape"
                raise no_chain(why) from error
            raise _Left(None)

        with self._only_looking(), self._meeting(meet):
            call(self.model, inputs)
        self._returns = _form(returned[0], name)
        found = _first(returned[0])
        if found.shape != before.shape:
            raise no_chain(f"{name} makes {list(found.shape)} of {list(before.shape)}: stages hand on one shape")
        self._learned = found.dtype

    @torch.no_grad()
    def _rehearse(self, inputs: Inputs, before: Tensor) -> None:
        """The whole forward with stand-ins for all weights, the same on every rank.

        Raises:
            ConfigError: the blocks are no chain where stages are cut.
        """
        zeros = torch.zeros(before.shape, dtype=self._learned, device=self._device)
        rehearsal = _Rehearsal(self._names, frozenset(self._begins[1:]), self._returns, zeros)
        with self._only_looking(), self._without_weights(), self._meeting(rehearsal.meet, frozenset(("after",))):
            self._pass_through(lambda: call_without_hooks(self.model, inputs))
        rehearsal.end()

    def _pass_through(self, forward: Callable[[], object]) -> object:
        """A forward in which blocks let their inputs through, or are left out.

        Raises:
            ConfigError: the model's own code needs more of blocks than what they return.
        """
        with entered_modules(self.model) as inside:
            try:
                return forward()
            except Failure:
                raise
            except Exception as error:  # whatever it runs into that looks into a block; on all ranks alike
                raise _needs_blocks(inside, error) from error

    def _before(self, inputs: Inputs) -> Tensor:
        """What the first block of all would take, in shape and precision."""

        def meet(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise _Left(_given(args, kwargs))

        with torch.no_grad(), self._only_looking(), self._without_weights(), self._meeting(meet):
            return cast("Tensor", self._pass_through(lambda: call_without_hooks(self.model, inputs)))

    @contextmanager
    def _only_looking(self) -> Iterator[None]:
        """No forward inside counts: nothing is drawn or logged, and no running mean, or anything else, changes."""
        forked = torch.random.fork_rng([self._device] if self._device.type == "cuda" else [])
        with self._unheard(), unchanged(self.model), forked:
            self.model.eval()
            yield

    def _without_weights(self) -> AbstractContextManager[None]:
        """What lies outside of the blocks computes with stand-ins: shapes alone come out."""
        shared = {id(one) for name, one in self.model.named_parameters() if name in self.shared}
        return in_place_of(
            (module, key, stand_in(one, self._device, f"{name}.{key}".lstrip("."), None if id(one) in shared else side))
            for name, module, side in self._around
            for key, one in module._parameters.items()
            if one is not None
        )

    @contextmanager
    def _meeting(self, meet: Meet, refused: frozenset[Side | None] = frozenset()) -> Iterator[None]:
        """While a forward runs in which `meet` says what becomes of each block."""
        assert self._meet is None, "one forward runs at a time"
        self._meet = meet
        Elsewhere.refused = refused
        try:
            yield
        finally:
            self._meet = None
            Elsewhere.refused = frozenset()

    def _in_block(self, index: int, *args: Any, **kwargs: Any) -> Any:
        assert self._meet is not None, "a model that is cut runs by Cut.run alone"
        return self._meet(index, args, kwargs)

    def _handed_on(self, found: Any) -> Tensor:
        hidden = _first(found)
        if self._learned is not None and hidden.dtype != self._learned:
            raise no_chain(f"blocks return {hidden.dtype} and {self._learned}: stages hand on one precision")
        return hidden.contiguous()


class _Passed(NamedTuple):
    """What a block that lies elsewhere has let through."""

    hidden: Any
    version: int

    @classmethod
    def on(cls, hidden: Any) -> _Passed:
        return cls(hidden, hidden._version if isinstance(hidden, Tensor) else 0)

    def is_still(self, given: object) -> bool:
        """Whether the next block is given just that, and nothing was done to it in place."""
        return given is self.hidden and (not isinstance(given, Tensor) or given._version == self.version)


def _something_between(before: str, block: str) -> ConfigError:
    return no_chain(
        f"the model's forward computes something between {before} and {block}, which neither stage would know of (such "
        f"as h = h + block(h)); move it into the block, or cut elsewhere by parallel.pipeline_parallel.split"
    )


def _needs_blocks(inside: Sequence[str], error: Exception) -> ConfigError:
    where = inside[-1] if inside and inside[-1] else "the model"
    return no_chain(
        f"the forward of {where} fails where blocks lie on other ranks ({first_line(error)}): it needs more of them "
        "than the tensor that each hands on"
    )


class _Rehearsal:
    """Args:
    names: of all blocks.
    begins: blocks that stages begin with, from the second stage on.
    returns: what blocks do, as `_form` tells it.
    zeros: of the shape that they hand on.
    """

    def __init__(self, names: Sequence[str], begins: frozenset[int], returns: str | int, zeros: Tensor) -> None:
        self._names = names
        self._begins = begins
        self._returns = returns
        self._zeros = zeros
        self._met = -1
        self._handed = _Passed.on(None)

    def meet(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index != self._met + 1:
            raise no_chain(
                f"{self._names[index]} is called twice or out of order: stages meet each block once, in order"
            )
        self._met, given = index, _given(args, kwargs)
        if index in self._begins:
            self._refuse_more_than_handed(index, given, [*args, *kwargs.values()][1:])
        if index == len(self._names) - 1:
            Elsewhere.refused = frozenset(("before",))
        hands_on = index + 1 in self._begins or index == len(self._names) - 1
        self._handed = _Passed.on(self._zeros.clone() if hands_on else given)
        return _as(self._returns, self._handed.hidden)

    def end(self) -> None:
        if self._met != len(self._names) - 1:
            raise no_chain(
                f"{self._names[self._met + 1]} is not met in a forward: stages meet each block once, in order"
            )

    def _refuse_more_than_handed(self, index: int, given: object, others: list[Any]) -> None:
        block, before = self._names[index], self._names[index - 1]
        if not self._handed.is_still(given):
            raise _something_between(before, block)
        for other in tree_leaves(others):
            if isinstance(other, Elsewhere):
                raise no_chain(f"{block} takes more than what {before} made: a tensor made with {other.of}")


class _SentBack(torch.autograd.Function):
    """What is received; its gradient is sent, and so lies in one piece."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _sent_back(hidden: Tensor | None) -> Tensor:
    return cast("Tensor", cast("Any", _SentBack).apply(hidden))


def _with(hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What a block is given, but its first input."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): hidden}


class _Left(BaseException):
    """The forward is left behind the stage's last block. No `Exception`, which a model might catch."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


def _until_left(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except _Left as left:
            return left.hidden

    return run


# --- cutting ------------------------------------------------------------------------------------------------------


def refuse_to_cut(model: nn.Module, blocks: Sequence[str], asked: Cutting) -> None:
    """As far as the modules tell.

    Raises:
        ConfigError: it can't be cut so.
    """
    _refuse_no_chain(model, blocks)
    _begins(model, blocks, asked, outside(model, blocks, {}))
    refuse_tied_blocks(model, blocks)


def _refuse_no_chain(model: nn.Module, blocks: Sequence[str]) -> None:
    kind = type(model).__name__
    collected = next((key for key in _COLLECTED if getattr(getattr(model, "config", None), key, False)), None)
    if collected is not None:
        raise no_chain(
            f"{kind} collects something of all its blocks ({collected}: true), and a stage has its own; set it to false"
        )
    parents = dict.fromkeys(name.rpartition(".")[0] for name in blocks)
    if len(parents) > 1:
        raise no_chain(f"{kind} has several lists of blocks ({', '.join(parents)}), and stages need one chain")
    if not blocks:
        raise no_chain(f"{kind} has no repeated blocks: no ModuleList or Sequential of two layers of one class or more")


def _begins(model: nn.Module, blocks: Sequence[str], asked: Cutting, around: Sequence[Around]) -> list[int]:
    if len(blocks) < asked.stages:
        sum_ = f"{asked.ranks} x {asked.stages_per_rank} = " if asked.stages_per_rank > 1 else ""
        has = f"{type(model).__name__} has {len(blocks)} blocks"
        why = f"{sum_}{asked.stages} stages, but {has}; take at most that many"
        raise ConfigError(Problem("", "parallel.pipeline", why))
    if asked.split is None:
        costs = [_cost(model.get_submodule(name)) for name in blocks]
        return balanced(costs, asked.stages, _cost_after(around))
    return _named(blocks, asked.split, asked.stages)


def _named(blocks: Sequence[str], split: Sequence[str], stages: int) -> list[int]:
    unknown = [name for name in split if name not in blocks]
    begins = [0, *(blocks.index(name) for name in split if name in blocks)]
    why = None
    if unknown:
        known = ", ".join(blocks[:4]) + (", ..." if len(blocks) > 4 else "")
        why = f"the model has no block {unknown[0]!r}; there are {known}"
    elif len(begins) != stages:
        why = (
            f"{len(split)} names make {len(begins)} stages, but there are {stages}; name those that begin with a block"
        )
    elif begins != sorted(set(begins)):
        why = f"{', '.join(split)}: names go in the model's order, from its second block on, {blocks[1]}, each once"
    if why is not None:
        raise ConfigError(Problem("", "parallel.pipeline_parallel.split", why))
    return begins


def _cost(module: nn.Module) -> float:
    """Weights that a token meets: those of tables are only looked up."""
    tables = {id(one) for child in module.modules() if isinstance(child, nn.Embedding) for one in child.parameters()}
    return float(sum(one.numel() for one in module.parameters() if id(one) not in tables))


def _cost_after(around: Sequence[Around]) -> float:
    after = [module for _, module, side in around if side == "after"]
    return float(sum(one.numel() for module in after for one in module.parameters(recurse=False)))


def _empty(module: nn.Module) -> None:
    """It keeps its class and plain attributes, which a model may look at."""
    module._modules.clear()
    module._parameters.clear()
    module._buffers.clear()
    cast("Any", module).forward = _unused


def _unused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a block that lies elsewhere computes nothing")


# --- what blocks take and return ----------------------------------------------------------------------------------


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _hidden(made: object, name: str) -> Hidden:
    if not isinstance(made, Tensor):
        raise no_chain(f"{name} returns a {type(made).__name__}, and stages hand on a tensor")
    return Hidden(tuple(made.shape), made.dtype)


def _form(found: Any, name: str) -> str | int:
    if isinstance(found, Tensor):
        return "tensor"
    if isinstance(found, tuple) and found and isinstance(found[0], Tensor):
        if any(isinstance(one, Tensor) for one in tree_leaves(found[1:])):
            raise no_chain(f"{name} returns more than one tensor, and stages hand on one")
        return len(found)
    raise no_chain(f"{name} returns a {type(found).__name__}, and stages hand on a tensor")


def _first(found: Any) -> Tensor:
    return cast("Tensor", found if isinstance(found, Tensor) else found[0])


def _as(form: str | int, hidden: Any) -> Any:
    return hidden if isinstance(form, str) else (hidden, *(None for _ in range(form - 1)))

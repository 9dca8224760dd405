"""Micro-batches whose sequences are divided over ranks: each computes its own positions, and its part of the loss.

    the same micro-batch on all ranks  -->  own positions of inputs and targets  -->  forward, ring attention  --+
                                                                                                                 |
    gradient of this rank's part of the loss, added to the others' as any data rank's  <--  sum of own losses  <-+

Targets are aligned with their logits before anything is divided: the target of a rank's last position is the first
token of its neighbor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core.errors import ConfigError, Failure, Problem, RunFailed
from lockstep.core.records import Batch
from lockstep.distributed.forward_mode import SequencePartition, current_sequences, padded_length, positions_of
from lockstep.engine.dry_run import (
    dry_run,
    entered_modules,
    first_line,
    first_positions,
    is_by_position,
    outputs_of_modules,
    unchanged,
)
from lockstep.engine.eager import EagerEngine, call

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis
    from lockstep.core.records import GlobalBatch, Inputs
    from lockstep.distributed.collectives import Ring

_KEY = "parallel.context"
_NO_TARGET = -100
_CHECKED = 16  # positions for each rank
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative


class DividedAttention(Protocol):
    """The attention of a model while its sequences are divided (`transforms.context_parallel.ContextParallel`)."""

    @property
    def takes_mask(self) -> bool: ...

    @property
    def takes_positions(self) -> bool: ...

    def active(self) -> AbstractContextManager[None]: ...

    def divide(self, division: SequencePartition) -> None: ...


class SequenceDivider:
    """Gives a rank its part of each micro-batch.

    Args:
        model: The module without wrappers.
        attention: The model's.
        ring: The ranks that have the same samples.
        targets_of: Returns the target of each position that has logits; -100 for none.

    Attributes:
        rule: Where the model sees the tokens of a padded sequence; None: it isn't known for padding that comes before
            tokens, and batches with such padding are refused.
    """

    def __init__(
        self, model: nn.Module, attention: DividedAttention, ring: Ring, targets_of: Callable[[Batch], Tensor]
    ) -> None:
        self.model = model
        self.attention = attention
        self._ring = ring
        self.ranks = ring.size
        self.targets_of = targets_of
        self.rule: PositionRule | None = _by_row

    def __call__(self, batch: Batch) -> Batch:
        """Return this rank's part; its division is the current one from then on.

        Raises:
            RunFailed: Something in the batch isn't laid out by positions.
        """
        targets = self.targets_of(batch)
        if targets.dim() != 2:
            raise RunFailed(
                f"{_KEY} divides sequences, and the targets of a batch are {list(targets.shape)}, not a row of "
                "positions for each sample"
            )
        length, ranks = targets.shape[1], self._ring.size
        own = positions_of(self._ring.rank, ranks, length).to(targets.device)
        inputs, mask = _without_mask(batch.inputs, length) if self.attention.takes_mask else (batch.inputs, None)
        real = self._real(mask, targets)
        last = real is not None and self._hides_nothing(real, targets)
        division = SequencePartition(self._ring, length, own.clamp(max=length - 1), real, last)
        self.attention.divide(division)
        given = self._own_inputs(inputs, length, division.positions)
        if self.attention.takes_positions and isinstance(given, dict) and "position_ids" not in given:
            rule = self.rule or _by_row
            given["position_ids"] = rule(real, targets)[:, division.positions]
        own_targets = targets[:, division.positions].masked_fill(own >= length, _NO_TARGET)
        return replace(batch, inputs=given, targets=own_targets)

    def _hides_nothing(self, real: Tensor, targets: Tensor) -> bool:
        """Return whether causal attention needs no mask: padding comes last, and has no targets.

        Raises:
            RunFailed: There is padding before tokens, and a divided forward can't be the whole one's.
        """
        from_padding = (targets != _NO_TARGET) & ~real[:, : targets.shape[1]]
        if bool((real[:, 1:] <= real[:, :-1]).all()):
            return not bool(from_padding.any())
        row = int((real[:, 1:] > real[:, :-1]).any(1).nonzero()[0, 0])
        where = f"{_KEY}: sample {row} of a batch has padding before its tokens (attention_mask), and"
        if self.rule is None:
            raise RunFailed(f"{where} where the model sees tokens behind padding isn't known; pad on the right")
        if bool(from_padding.any()):
            raise RunFailed(
                f"{where} {int(from_padding.sum())} targets are predicted from padding, such as a text's first token "
                "from the padding before it; pad on the right, or give the first token of each text the label -100"
            )
        return False

    def _real(self, mask: Tensor | None, targets: Tensor) -> Tensor | None:
        """Return [B, padded]: which positions are real; None: all are."""
        length = targets.shape[1]
        more = padded_length(length, self._ring.size) - length
        if mask is None and not more:
            return None
        real = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.bool()
        return None if not more and bool(real.all()) else F.pad(real, (0, more))

    def _own_inputs(self, inputs: Inputs, length: int, positions: Tensor) -> Inputs:
        def part(name: object, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if not is_by_position(value, length):
                raise RunFailed(
                    f"{_KEY} divides sequences of {length} positions, and the input {name} of a batch is "
                    f"{list(value.shape)}: it isn't laid out as [samples, positions, ...]"
                )
            return value[:, positions]

        if isinstance(inputs, tuple):
            return tuple(part(number, value) for number, value in enumerate(inputs))
        return {name: part(name, value) for name, value in inputs.items()}


PositionRule = Callable[["Tensor | None", Tensor], Tensor]
"""(real tokens [B, T or more] or None, targets [B, T]) -> positions at which the model sees tokens, [B, T]."""


def _by_row(real: Tensor | None, targets: Tensor) -> Tensor:
    """Return each token's place in the row, padding or not, as Llama does."""
    return torch.arange(targets.shape[1], device=targets.device).expand(targets.shape)


def _by_mask(real: Tensor | None, targets: Tensor) -> Tensor:
    """Return the number of real tokens before each, as OPT does. Positions of padding mean nothing."""
    if real is None:
        return _by_row(real, targets)
    return (real[:, : targets.shape[1]].long().cumsum(1) - 1).clamp(min=0)


def _padded_before(batch: Batch) -> Batch | None:
    """Return the batch with the first third of every second sample's tokens masked; None: it has no mask of tokens, or
    such a sample has fewer than three."""
    mask = None if isinstance(batch.inputs, tuple) else batch.inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    number = int(mask[::2].sum(1).min()) // 3
    if not number:
        return None
    changed = mask.clone()
    changed[::2] *= changed[::2].cumsum(1) > number
    assert not isinstance(batch.inputs, tuple)
    nothing = torch.full_like(batch.targets, _NO_TARGET)
    return replace(batch, inputs={**batch.inputs, "attention_mask": changed}, targets=nothing)


def _first_different(
    whole: Mapping[str, Tensor], divided: Mapping[str, Tensor], division: SequencePartition
) -> str | None:
    """Return the module whose outputs are the first to differ; None: none do, as far as the roughest of their dtypes
    shows. What isn't real may differ."""
    tolerance = max((_TOLERANCE[part.dtype] for part in divided.values()), default=0.0)
    for name, part in divided.items():
        expected = whole.get(name)
        axis = None if expected is None else _axis_of_positions(expected, part, division.own)
        if expected is None or axis is None:
            continue
        expected, part = expected.index_select(axis, division.positions).float(), part.float()
        if division.real is not None:
            expected, part = (_of_real_tokens(item, axis, division) for item in (expected, part))
        if (part - expected).norm() > tolerance * expected.norm():
            return name or "the model itself"
    return None


def _of_real_tokens(outputs: Tensor, axis: int, division: SequencePartition) -> Tensor:
    """Return outputs with 0 at padding: what attention gives there means nothing, and differs. Outputs without an axis
    of samples, such as those of positions alone, stay as they are.

    Args:
        axis: Of the positions; the samples' is the first of the others that is as large.
    """
    assert division.real is not None, "there is padding"
    own = positions_of(division.ring.rank, division.ring.size, division.length)
    real = division.real[:, own.to(outputs.device)]
    samples = next((item for item in range(outputs.dim()) if item != axis and outputs.shape[item] == len(real)), None)
    if samples is None:
        return outputs
    shape = [1] * outputs.dim()
    shape[samples], shape[axis] = real.shape
    hidden = ~(real if samples < axis else real.T).reshape(shape)
    return outputs.masked_fill(hidden, 0)


def _fails_divided(inside: Sequence[str], error: Exception) -> ConfigError:
    name = inside[-1] if inside and inside[-1] else "the model"
    why = (
        f"{name} fails where sequences are divided, and works on whole ones ({first_line(error)}): its attention isn't "
        "one that ring attention can replace, such as F.scaled_dot_product_attention, or a mask of its own is for "
        "whole sequences. Leave parallel.context out"
    )
    return ConfigError(Problem("", _KEY, why))


def _axis_of_positions(whole: Tensor, part: Tensor, own: int) -> int | None:
    """Return the axis along which a part has `own` of the whole's; [samples, positions, ...] or [positions, ...]."""
    if whole.dim() != part.dim():
        return None
    differ = [axis for axis in range(part.dim()) if whole.shape[axis] != part.shape[axis]]
    return differ[0] if len(differ) == 1 and part.shape[differ[0]] == own else None


def _without_mask(inputs: Inputs, length: int) -> tuple[Inputs, Tensor | None]:
    """Return the inputs without the mask of real tokens, [B, T], and the mask."""
    mask = None if isinstance(inputs, tuple) else inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != length:
        return inputs, None
    assert not isinstance(inputs, tuple)
    return {name: value for name, value in inputs.items() if name != "attention_mask"}, mask


class ContextEngine:
    """The engine of a model whose sequences are divided.

    Args:
        engine: Its micro-batches are prepared by `divider`.
    """

    def __init__(self, engine: EagerEngine, divider: SequenceDivider) -> None:
        self._engine = engine
        self._divider = divider
        self._attention = divider.attention
        self.outputs: Callable[[Inputs], object] = engine.outputs  # of whole sequences, on each rank

    def check(self, batch: Batch, axis: Axis) -> None:
        """Compare the model's forward on divided sequences with that on whole ones, module by module, without autocast.
        All ranks together.

        Args:
            batch: Of a few samples, of whose sequences the first positions are taken.
            axis: All ranks, which share what they find.

        Raises:
            ConfigError: A module makes something else of a position when it doesn't see those around it.
        """
        model, targets = self._divider.model, self._divider.targets_of(batch)
        batch = first_positions(batch, targets.shape[1], _CHECKED * self._divider.ranks)
        module = self._different_by(_by_row, batch, axis)
        if module is not None and self._different_by(_by_mask, batch, axis) is None:
            module = None
        if module is None:
            with dry_run(model, targets.device):
                model.eval()
                self._divider.rule = self._rule_of_padding(batch, axis)
        if module is not None:
            why = (
                f"{module} makes something else of a position in a divided sequence than in a whole one. Layers see "
                "this rank's positions alone, but for attention by F.scaled_dot_product_attention or of the "
                "transformers library; where they are is told by lockstep.positions(), in place of torch.arange(), "
                "or a forward's `position_ids`. Leave parallel.context out, or change the model"
            )
            raise ConfigError(Problem("", _KEY, why))

    def _different_by(self, rule: PositionRule, batch: Batch, axis: Axis) -> str | None:
        """Return the first module that differs in training, unless it draws numbers then, or in evaluation."""
        model, device = self._divider.model, self._divider.targets_of(batch).device
        self._divider.rule = rule
        with dry_run(model, device) as drawn:
            module = self._different(batch, axis)
            if any(axis.gather(drawn())):  # each rank for its own positions: that means nothing
                module = None
        if module is not None:
            return module
        with dry_run(model, device):
            model.eval()
            return self._different(batch, axis)

    def _rule_of_padding(self, batch: Batch, axis: Axis) -> PositionRule | None:
        """Return the rule by which a divided forward is the whole one's where padding comes before tokens, if any
        is."""
        padded = _padded_before(batch)
        if not all(axis.gather(padded is not None)):
            return None
        assert padded is not None, "all ranks have one"
        for rule in (_by_row, _by_mask):
            self._divider.rule = rule
            if self._different(padded, axis) is None:
                return rule
        return None

    def _different(self, batch: Batch, axis: Axis) -> str | None:
        """Return the first module that differs, on the first rank that has one."""
        model = self._divider.model
        with torch.no_grad(), unchanged(model), outputs_of_modules(model) as whole:
            call(model, batch.inputs)
        with torch.no_grad(), self._attention.active(), outputs_of_modules(model) as divided:
            part = self._divider(batch)
            division = current_sequences()
            assert division is not None
            with entered_modules(model) as inside:
                try:
                    call(model, part.inputs)
                except Failure:
                    raise
                except Exception as error:  # whatever a model runs into whose attention is another one; on all ranks
                    raise _fails_divided(inside, error) from error
        modules = axis.gather(_first_different(whole, divided, division))
        return next((item for item in modules if isinstance(item, str)), None)

    def accumulate(self, batch: GlobalBatch, seed_scale: float | Tensor, announce: Callable[[Tensor], None]) -> None:
        """See `core.protocols.Engine`."""
        with self._attention.active():
            self._engine.accumulate(batch, seed_scale, announce)

    def evaluate(self, micro_batches: Iterable[Batch]) -> Mapping[str, Tensor]:
        """See `core.protocols.Engine`."""
        with self._attention.active():
            return self._engine.evaluate(micro_batches)

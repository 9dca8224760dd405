"""Sequences divided over ranks: each computes its own positions, and its part of the loss.

Targets are aligned with their logits before sequences are divided: the target of a rank's last position is the first
token of its neighbor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core.errors import ConfigError, Failure, Problem, RunFailed
from lockstep.core.protocols import Observe, unobserved
from lockstep.core.records import IGNORED, Batch
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
    from lockstep.transforms.context_parallel import ContextParallel

_KEY = "parallel.context"
_CHECKED = 16  # positions for each rank that the check computes
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative


class SequenceDivider:
    """Selects a rank's part of each micro-batch.

    Args:
        model: The module without wrappers.
        targets_of: Returns the target of each position that has logits; -100 for none.

    Attributes:
        rule: The positions of the tokens of a padded sequence in the model; None: batches with padding before
            tokens are refused, because they aren't known.
    """

    def __init__(
        self, model: nn.Module, attention: ContextParallel, ring: Ring, targets_of: Callable[[Batch], Tensor]
    ) -> None:
        self.model = model
        self.attention = attention
        self._ring = ring
        self.ranks = ring.size
        self.targets_of = targets_of
        self.rule: PositionRule | None = _by_row

    def __call__(self, batch: Batch) -> Batch:
        """Return this rank's part; its division is the current one from then on."""
        targets = self.targets_of(batch)
        if targets.dim() != 2:
            raise RunFailed(
                f"{_KEY} divides sequences, and the targets of a batch are {list(targets.shape)}, not a row of "
                "positions for each sample"
            )
        length = targets.shape[1]
        own = positions_of(self._ring.rank, self.ranks, length).to(targets.device)
        inputs, mask = _without_mask(batch.inputs, length) if self.attention.takes_mask else (batch.inputs, None)
        real = self._real(mask, targets)
        last = real is not None and self._hides_nothing(real, targets)
        division = SequencePartition(self._ring, length, own.clamp(max=length - 1), real, last)
        self.attention.divide(division)
        own_inputs = self._own_inputs(inputs, length, division.positions)
        if self.attention.takes_positions and isinstance(own_inputs, dict) and "position_ids" not in own_inputs:
            rule = self.rule or _by_row
            own_inputs["position_ids"] = rule(real, targets)[:, division.positions]
        own_targets = targets[:, division.positions].masked_fill(own >= length, IGNORED)
        return replace(batch, inputs=own_inputs, targets=own_targets)

    def _hides_nothing(self, real: Tensor, targets: Tensor) -> bool:
        """Return whether causal attention needs no mask: padding comes last, and has no targets."""
        from_padding = (targets != IGNORED) & ~real[:, : targets.shape[1]]
        if bool((real[:, 1:] <= real[:, :-1]).all()):
            return not bool(from_padding.any())
        if self.rule is not None and not bool(from_padding.any()):
            return False
        row = int((real[:, 1:] > real[:, :-1]).any(1).nonzero()[0, 0])
        where = f"{_KEY}: sample {row} of a batch has padding before its tokens (attention_mask), and"
        if self.rule is None:
            raise RunFailed(f"{where} the positions that the model uses after padding aren't known; pad on the right")
        raise RunFailed(
            f"{where} {int(from_padding.sum())} targets are predicted from padding, such as a text's first token "
            "from the padding before it; pad on the right, or give the first token of each text the label -100"
        )

    def _real(self, mask: Tensor | None, targets: Tensor) -> Tensor | None:
        """Return [B, padded]: which positions are real; None: all are."""
        length = targets.shape[1]
        more = padded_length(length, self.ranks) - length
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
"""(real tokens [B, T or more] or None, targets [B, T]) -> positions of tokens in the model, [B, T]."""


def _by_row(real: Tensor | None, targets: Tensor) -> Tensor:
    """Return each token's index in the row, counting padding, as in Llama."""
    return torch.arange(targets.shape[1], device=targets.device).expand(targets.shape)


def _by_mask(real: Tensor | None, targets: Tensor) -> Tensor:
    """Return the number of real tokens before each, as in OPT. Positions of padding mean nothing."""
    if real is None:
        return _by_row(real, targets)
    return (real[:, : targets.shape[1]].long().cumsum(1) - 1).clamp(min=0)


def _padded_before(batch: Batch) -> Batch | None:
    """Return the batch with the first third of every second sample masked; None: it has no mask, or is too short.

    A sample is too short with fewer than three tokens.
    """
    mask = None if isinstance(batch.inputs, tuple) else batch.inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    number = int(mask[::2].sum(1).min()) // 3
    if not number:
        return None
    changed = mask.clone()
    changed[::2] *= changed[::2].cumsum(1) > number
    assert not isinstance(batch.inputs, tuple)
    nothing = torch.full_like(batch.targets, IGNORED)
    return replace(batch, inputs={**batch.inputs, "attention_mask": changed}, targets=nothing)


def _first_different(
    whole: Mapping[str, Tensor], divided: Mapping[str, Tensor], division: SequencePartition
) -> str | None:
    tolerance = max((_TOLERANCE[part.dtype] for part in divided.values()), default=0.0)
    for name, part in divided.items():
        expected = whole.get(name)
        if expected is None or expected.dim() != part.dim():
            continue
        differing = [dim for dim in range(part.dim()) if expected.shape[dim] != part.shape[dim]]
        if len(differing) != 1 or part.shape[differing[0]] != division.own:
            continue  # not [samples, positions, ...] or [positions, ...]
        dim = differing[0]
        expected, part = expected.index_select(dim, division.positions).float(), part.float()
        if division.real is not None:
            expected, part = (_without_padding(item, dim, division, division.real) for item in (expected, part))
        if (part - expected).norm() > tolerance * expected.norm():
            return name or "the model itself"
    return None


def _without_padding(outputs: Tensor, dim: int, division: SequencePartition, real: Tensor) -> Tensor:
    """Return outputs with 0 at padding, where attention's mean nothing; `dim` has the positions."""
    own = positions_of(division.ring.rank, division.ring.size, division.length)
    real = real[:, own.to(outputs.device)]
    samples = next((item for item in range(outputs.dim()) if item != dim and outputs.shape[item] == len(real)), None)
    if samples is None:
        return outputs
    shape = [1] * outputs.dim()
    shape[samples], shape[dim] = real.shape
    hidden = ~(real if samples < dim else real.T).reshape(shape)
    return outputs.masked_fill(hidden, 0)


def _without_mask(inputs: Inputs, length: int) -> tuple[Inputs, Tensor | None]:
    mask = None if isinstance(inputs, tuple) else inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != length:
        return inputs, None
    assert not isinstance(inputs, tuple)
    return {name: value for name, value in inputs.items() if name != "attention_mask"}, mask


class ContextEngine:
    """The engine of context parallelism; `engine` prepares micro-batches with `divider`."""

    def __init__(self, engine: EagerEngine, divider: SequenceDivider) -> None:
        self._engine = engine
        self._divider = divider
        self._attention = divider.attention
        self.outputs: Callable[[Inputs], object] = engine.outputs  # of whole sequences, on each rank

    @property
    def losses(self) -> list[Tensor]:
        return self._engine.losses

    def check(self, batch: Batch, axis: Axis) -> None:
        """Compare the model's forward with that on whole sequences. All ranks (`axis`) together.

        Args:
            batch: A few samples; the first positions of their sequences are used.

        Raises:
            ConfigError: A module's output at a position depends on positions that it doesn't see.
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
                f"{module} has another output at a position of its sequence's part than in the whole sequence. Layers "
                "see only this rank's positions, except for attention by F.scaled_dot_product_attention or of the "
                "transformers library. Take positions from lockstep.positions() instead of torch.arange(), or from a "
                "forward's `position_ids`; or leave parallel.context out"
            )
            raise ConfigError(Problem("", _KEY, why))

    def _different_by(self, rule: PositionRule, batch: Batch, axis: Axis) -> str | None:
        """Return the first module that differs in training, unless it draws numbers then, or in evaluation."""
        model, device = self._divider.model, self._divider.targets_of(batch).device
        self._divider.rule = rule
        with dry_run(model, device) as drawn:
            module = self._different(batch, axis)
            if any(axis.gather(drawn())):  # each rank for its own positions, so they differ
                module = None
        if module is not None:
            return module
        with dry_run(model, device):
            model.eval()
            return self._different(batch, axis)

    def _rule_of_padding(self, batch: Batch, axis: Axis) -> PositionRule | None:
        """Return the rule that keeps forwards the same where padding comes before tokens; None: none is known."""
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
                except Exception as error:  # on all ranks
                    name = inside[-1] if inside and inside[-1] else "the model"
                    why = (
                        f"{name} fails where sequences are divided, and works on whole ones ({first_line(error)}): its "
                        "attention isn't one that ring attention can replace, such as F.scaled_dot_product_attention, "
                        "or has a mask for whole sequences. Leave parallel.context out"
                    )
                    raise ConfigError(Problem("", _KEY, why)) from error
        modules = axis.gather(_first_different(whole, divided, division))
        return next((item for item in modules if isinstance(item, str)), None)

    def accumulate(self, batch: GlobalBatch, seed_scale: float | Tensor, announce: Callable[[Tensor], None]) -> None:
        with self._attention.active():
            self._engine.accumulate(batch, seed_scale, announce)

    def evaluate(self, micro_batches: Iterable[Batch], observe: Observe = unobserved) -> Mapping[str, Tensor]:
        with self._attention.active():
            return self._engine.evaluate(micro_batches, observe)

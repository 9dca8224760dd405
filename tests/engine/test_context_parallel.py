"""The part of a micro-batch that a rank computes where sequences are divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.failures import fails
from torch import Tensor, nn

from lockstep.core.errors import RunFailed
from lockstep.core.records import Batch
from lockstep.distributed.forward_mode import SequencePartition
from lockstep.engine.context_parallel import SequenceDivider, _by_mask, _by_row, _first_different


class Ring:
    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank, self.size = rank, size


class Attention:
    """Records the division."""

    def __init__(self, takes_mask: bool, takes_positions: bool) -> None:
        self.takes_mask, self.takes_positions = takes_mask, takes_positions
        self.division: Any = None

    def divide(self, division: SequencePartition) -> None:
        self.division = division


def divided(rank: int, batch: Batch, takes_mask: bool = False, takes_positions: bool = False) -> tuple[Batch, Any]:
    attention = Attention(takes_mask, takes_positions)
    divider = SequenceDivider(nn.Module(), attention, Ring(rank), lambda batch: batch.targets)  # type: ignore[arg-type]
    return divider(batch), attention.division


def texts(length: int, mask: list[list[int]] | None = None) -> Batch:
    """Two texts whose tokens are 0, 1, 2, ... and 100, 101, ...; the target of a token is the one after it."""
    tokens = torch.arange(length) + torch.tensor([[0], [100]])
    inputs = {"tokens": tokens} if mask is None else {"tokens": tokens, "attention_mask": torch.tensor(mask)}
    return Batch(inputs=inputs, targets=tokens + 1, samples=2, tokens=2 * length)


@pytest.mark.parametrize(("rank", "own"), [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])
def test_a_rank_has_a_chunk_from_the_front_and_one_from_the_back(rank: int, own: list[int]) -> None:
    part, division = divided(rank, texts(8))
    assert division.positions.tolist() == own
    assert part.inputs["tokens"][0].tolist() == own
    assert part.targets[1].tolist() == [101 + position for position in own], "aligned before sequences are divided"
    assert division.real is None


def test_padded_positions_have_the_last_token_and_no_target() -> None:
    part, division = divided(0, texts(5))
    assert division.positions.tolist() == [0, 1, 4, 4]  # 8 positions, of which 6 and 7 are this rank's
    assert part.targets[0].tolist() == [1, 2, -100, -100]
    assert division.real.int().tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]] * 2
    assert division.unreal_last


def test_every_target_is_computed_by_one_rank() -> None:
    for length in range(1, 14):
        targets = [target for rank in range(2) for target in divided(rank, texts(length))[0].targets[0].tolist()]
        assert sorted(target for target in targets if target != -100) == list(range(1, length + 1))


def test_a_mask_of_padding_goes_to_the_division_if_the_attention_takes_it() -> None:
    mask = [[1, 1, 1, 0], [1, 1, 1, 1]]
    part, division = divided(0, texts(4, mask), takes_mask=True)
    assert "attention_mask" not in part.inputs
    assert division.real.int().tolist() == mask
    assert not division.unreal_last, "a target is predicted from padding"
    kept, division = divided(0, texts(4, mask))
    assert kept.inputs["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert division.real is None


def test_positions_are_passed_to_a_forward_that_takes_them() -> None:
    part, _ = divided(1, texts(8), takes_positions=True)
    assert part.inputs["position_ids"].tolist() == [[2, 3, 4, 5]] * 2


def test_padding_before_tokens_is_refused_where_a_target_is_predicted_from_it() -> None:
    with fails(RunFailed, "sample 0", "padding", "1 targets"):
        divided(0, texts(4, [[0, 1, 1, 1], [1, 1, 1, 1]]), takes_mask=True)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch(torch.zeros(2, 4), torch.zeros(2), 2, 2), "the targets of a batch are [2], not a row of positions"),
        (
            Batch({"tokens": torch.zeros(2, 4), "label": torch.zeros(2)}, torch.zeros(2, 4), 2, 8),
            "the input label of a batch is [2]: it isn't laid out as [samples, positions, ...]",
        ),
    ],
)
def test_tensors_without_positions_are_refused(batch: Batch, message: str) -> None:
    with pytest.raises(RunFailed) as refusal:
        divided(0, batch)
    assert message in str(refusal.value)


def test_models_see_tokens_by_row_or_by_mask() -> None:
    targets, real = torch.zeros(1, 4), torch.tensor([[0, 1, 1, 0]]).bool()
    assert _by_row(real, targets).tolist() == [[0, 1, 2, 3]]
    assert _by_mask(real, targets).tolist() == [[0, 0, 1, 1]]
    assert _by_mask(None, targets).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("dim", [0, 1])
def test_outputs_are_compared_at_real_tokens_alone(dim: int) -> None:
    real = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    division = SequencePartition(Ring(0), 4, torch.tensor([0, 3]), real)  # type: ignore[arg-type]
    whole = torch.randn(2, 4, 3).movedim(1, dim)
    part = whole.index_select(dim, division.positions).clone()

    def first_different(changed: Tensor) -> str | None:
        return _first_different({"layer": whole, "": whole}, {"layer": changed}, division)

    assert first_different(part) is None
    part.movedim(dim, 1)[0, 1] += 1  # padding of the first sample
    assert first_different(part) is None
    part.movedim(dim, 1)[1, 1] += 1  # the last token of the second
    assert first_different(part) == "layer"

"""The direction of a metric follows from the words of its name, or isn't known."""

from __future__ import annotations

import pytest

from lockstep.core.directions import known_direction


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("held-out.loss", "lowest"),
        ("held-out.bits_per_byte", "lowest"),
        ("accuracy.word_error_rate", "lowest"),  # the set's name doesn't count
        ("test.f1", "highest"),
        ("v1.5.macro-f1", "highest"),
        ("test.top5_accuracy", "highest"),
        ("test.quality", None),
        ("test.lossless", None),
        ("test.error_recall", None),  # of both
    ],
)
def test_a_direction_is_known_by_name(metric: str, direction: str | None) -> None:
    assert known_direction(metric) == direction

"""Machines may have different numbers of ranks; a plan has one number for all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.assembly.deciding import _machine_ranks


@pytest.mark.parametrize(("ranks", "plan"), [([4, 4], 4), ([4, 2], 2), ([2, 1], 1), ([8, 4, 4], 4), ([3], 3)], ids=str)
def test_all_ranks_plan_with_the_same_number(ranks: list[int], plan: int) -> None:
    """Before, a hybrid mesh had other shards on each machine."""
    everyone = [number for number in ranks for _ in range(number)]
    axis = SimpleNamespace(gather=lambda own: everyone)
    for number in ranks:
        world = SimpleNamespace(size=len(everyone), machine_ranks=number, axis=axis)
        assert _machine_ranks(cast("Any", world)) == plan

"""The doctor names faults that are planted for real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.planted import FAULTS, PlantedFault


@pytest.mark.drill
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_planted_fault_is_named(fault: PlantedFault, tmp_path: Path) -> None:
    if (why := fault.why_not()) is not None:
        pytest.skip(why)
    answer = fault.plant(tmp_path)
    assert re.search(fault.names, answer.text), answer.text
    assert answer.code == fault.code, answer.text

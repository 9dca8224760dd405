"""The example of functions for any loop, on two ranks: a plain PyTorch loop, and a session's."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from kit.worlds import in_world

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(folder: Path, kind: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["watch_own_loop.py", kind]
    runpy.run_path(str(EXAMPLES / "watch_own_loop.py"), run_name="__main__")


@pytest.mark.parametrize("kind", ["plain", "session"])
def test_the_example_shows_the_same_on_both_ranks(kind: str, tmp_path: Path) -> None:
    in_world(2, example, tmp_path, kind)
    first, second = ((tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines() for rank in (0, 1))
    assert len(first) == len(second) == 3 * 4 + 1
    assert all("rank 0/2 curve: " in line for line in first)
    assert all("rank 1/2 curve: " in line for line in second)
    messages = [[line.split("curve: ")[1] for line in lines] for lines in (first, second)]
    assert messages[0][:-1] == messages[1][:-1]
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+), \d+ samples/s", "\n".join(messages[0]))]
    assert losses == sorted(losses, reverse=True)
    of_ranks = eval(messages[0][3].split("ranks: ")[1])
    assert sum(of_ranks) / 2 == pytest.approx(losses[0], abs=2e-4)
    assert "194 weights in [" in messages[0][2]

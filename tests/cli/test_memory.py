"""`lockstep plan --measure --modes`: what each way to save memory saves and costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.commands import run_lockstep

from lockstep.cli.main import main
from lockstep.simulation.planning import ModeMeasurement, table_row

SMALL = ["--model.layers", "4", "--model.width", "32", "--data.train.length", "64", "--batch.global_size", "4"]


def test_modes_are_compared_with_none(tmp_path: Path) -> None:
    modes = "full+loss-chunk,offload"
    arguments = ["plan", "stdlib-lm", "--measure", "--ranks", "1", "--modes", modes, "--steps", "1", "--json", *SMALL]
    printed = run_lockstep(*arguments, cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    lines = printed.stderr.splitlines()
    rows = {row["mode"]: row for row in json.loads(printed.stdout)["modes"]}
    assert list(rows) == ["none", "full+loss-chunk", "offload"]
    assert 3 * 4 * 40_000 < rows["full+loss-chunk"]["peak"] < 0.7 * rows["none"]["peak"]
    assert rows["none"]["milliseconds"] > 0
    assert "memory.activation_offload: on the CPU activations are already" in rows["offload"]["why"]
    assert any(line.startswith("| none |") and line.count("1.00") == 2 for line in lines)
    assert "profiler" not in printed.stderr


@pytest.mark.parametrize(
    ("peak", "shown"), [(300, "300 B"), (18_432, "18.0 KiB"), (300_000, "293 KiB"), (5_600_000_000, "5.22 GiB")]
)
def test_sizes_are_shown_in_fitting_units(peak: int, shown: str) -> None:
    row = ModeMeasurement("none", peak, 4.4)
    assert table_row(row, row) == f"| none | {shown} | 1.00 | 4.4 | 1.00 |"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "ful"], "there is no mode 'ful'; did you mean full?"),
        (["--modes", "x"], "there is no mode 'x'; there are none, full"),
        (["--steps", "0"], "'0' is not a whole number above 0"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "stdlib-lm", "--measure", *arguments]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--modes", "full"], ["--measure", "--steps", "5"]])
def test_what_belongs_together_is_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "stdlib-lm", *arguments]) == 2
    assert "--measure --modes all --steps 5" in capsys.readouterr().err


def test_the_verb_that_measured_them_names_its_successor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "stdlib-lm"]) == 2
    assert "lockstep plan RECIPE --measure --modes" in capsys.readouterr().err

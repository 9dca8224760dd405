"""`lockstep plan --measure --modes`: what each way to save memory saves and costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.commands import run_lockstep
from kit.failures import gives

from lockstep.cli.main import main
from lockstep.simulation.planning import mode_row

SMALL = ["--model.layers", "4", "--model.width", "32", "--data.train.length", "64", "--batch.global_size", "4"]


def test_modes_are_compared_with_none(tmp_path: Path) -> None:
    modes = "full+loss-chunk,offload"
    arguments = ["plan", "stdlib-lm", "--measure", "--ranks", "1", "--modes", modes, "--json", *SMALL]
    printed = run_lockstep(*arguments, cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    lines = printed.stderr.splitlines()
    rows = {row["mode"]: row for row in json.loads(printed.stdout)["modes"]}
    assert list(rows) == ["none", "full+loss-chunk", "offload"]
    assert 3 * 4 * 40_000 < rows["full+loss-chunk"]["peak"] < 0.7 * rows["none"]["peak"]
    assert rows["none"]["milliseconds"] > 0
    assert rows["offload"]["why"].startswith("memory.activation_offload: ")
    assert any(line.startswith("| none |") and line.count("1.00") == 2 for line in lines)
    assert "profiler" not in printed.stderr


def test_a_row_has_ratios_to_none_or_the_reason() -> None:
    none, full = ({"mode": name, "peak": peak, "milliseconds": 4.0} for name, peak in (("none", 2048), ("full", 512)))
    assert mode_row(full, none) == "| full | 512 B | 0.25 | 4.0 | 1.00 |"
    assert mode_row({"mode": "offload", "peak": None, "why": "no GPU"}, none) == "| offload | no GPU | | | |"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "ful"], "there is no mode 'ful'; did you mean full?"),
        (["--modes", "x"], "there is no mode 'x'; there are none, full"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "stdlib-lm", "--measure", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_modes_are_of_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "stdlib-lm", "--modes", "full"]) == 2
    assert "--measure --modes all" in capsys.readouterr().err


def test_the_verb_that_measured_them_names_its_successor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "stdlib-lm"]) == 2
    assert gives(capsys.readouterr().err, "lockstep plan RECIPE --measure --modes")

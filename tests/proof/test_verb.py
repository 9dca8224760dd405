"""`lockstep verify` from the command line."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from kit.commands import Done, run_lockstep
from kit.failures import gives

FIELDS = {"strategy", "ranks", "max_loss_difference", "max_weight_difference", "passed"}
SMALL = [
    "--batch.global_size=4",
    "--data.train.length=32",
    "--model.layers=2",
    "--model.width=64",
    "--launch.device=cpu",
]


def verify(*words: str, cwd: Path) -> Done:
    return run_lockstep("verify", "stdlib-lm", *SMALL, *words, cwd=cwd)


def test_a_recipe_is_verified(tmp_path: Path) -> None:
    done = verify("--strategies", "ddp,fsdp-hybrid", "--ranks", "1,2", "--steps", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {(row["strategy"], row["ranks"]) for row in rows} == {("ddp", 1), ("ddp", 2), ("fsdp-hybrid", 2)}
    for row in rows:
        assert set(row) >= FIELDS
        assert row["passed"] is True
        assert row["max_loss_difference"] <= 1e-6
    lines = done.stderr.splitlines()
    assert sum(line.endswith("passed") for line in lines) == len(rows) == 9
    assert any(gives(line, f"all {len(rows)} runs") for line in lines)
    assert any(gives(line, "fsdp-hybrid on 1 rank") for line in lines)
    page = (tmp_path / "runs" / "verify-stdlib-lm.html").read_text()
    assert str(Path("runs/verify-stdlib-lm.html")) in lines
    _assert_offline(page)
    assert page.count("<tr>") == 1 + len(rows)
    assert "prefers-color-scheme: dark" in page


def _assert_offline(page: str) -> None:
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org)", page)


def test_a_deviation_ends_with_exit_code_3(tmp_path: Path) -> None:
    words = ["--strategies", "ddp", "--ranks", "2", "--steps", "2", "--json", "--html", "page/mine.html"]
    done = verify(*words, "--parallel.ddp.compression", "fp16", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    rows = json.loads(done.stdout)
    assert [row["passed"] for row in rows] == [False] * 3
    assert all(row["step"] == 1 and row["parameter"] for row in rows)
    assert gives(done.stderr, "by design", "parallel.ddp.compression fp16")
    assert "something is computed in a lower precision" in done.stderr
    assert gives(done.stderr, "3 of 3 runs")
    page = (tmp_path / "page" / "mine.html").read_text()
    assert "Not verified" in page
    assert "loses bits of each gradient" in page
    _assert_offline(page)


def test_if_every_run_is_refused_the_exit_code_is_2(tmp_path: Path) -> None:
    heads = ["--model.heads", "1", "--model.kv_heads", "1"]
    done = verify("--strategies", "tensor", "--ranks", "2", "--steps", "2", *heads, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert gives(done.stdout, "3 refused")
    assert done.stdout.count("2 doesn't divide the 1") == 1
    assert "tensor on 2 ranks: refused: " in done.stdout
    page = html.unescape((tmp_path / "runs" / "verify-stdlib-lm.html").read_text())
    assert page.count("2 doesn't divide the 1") >= 3


def test_a_partition_of_the_config_that_no_run_has_is_reported_first_and_last(tmp_path: Path) -> None:
    words = ["--parallel.pipeline", "2", "--strategies", "ddp", "--ranks", "2", "--steps", "1"]
    done = verify(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    not_covered = "no run has parallel.pipeline 2, which the config sets; use --strategies pipeline-1f1b"
    assert lines[1] == f"note: {not_covered}"
    assert lines[-2] == f"all 3 runs match the single process; but {not_covered}"
    assert not_covered in (tmp_path / "runs" / "verify-stdlib-lm.html").read_text()


def test_wrong_arguments_are_explained(tmp_path: Path) -> None:
    done = verify("--strategies", "fdsp", cwd=tmp_path)
    assert done.returncode == 2
    assert gives(done.stderr, "fdsp", "fsdp?")
    done = verify("--ranks", "1,none", cwd=tmp_path)
    assert done.returncode == 2
    assert "whole numbers above 0 separated by commas" in done.stderr

"""`lockstep verify` as people use it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kit.commands import Done, run_lockstep

FIELDS = {"strategy", "ranks", "max_loss_difference", "max_weight_difference", "passed"}
SMALL = ["--batch.global_size", "4", "--data.train.length", "32", "--model.layers", "2", "--launch.device", "cpu"]


def verify(*words: str, cwd: Path) -> Done:
    return run_lockstep("verify", "stdlib-lm", *SMALL, *words, cwd=cwd)


def test_a_recipe_is_proved(tmp_path: Path) -> None:
    done = verify("--strategies", "ddp,fsdp,fsdp-hybrid", "--ranks", "1,2", "--steps", "4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {(row["strategy"], row["ranks"]) for row in rows} == {
        ("ddp", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("fsdp-hybrid", 2)
    }  # fmt: skip
    for row in rows:
        assert set(row) >= FIELDS
        assert row["passed"] is True
        assert row["max_loss_difference"] <= 1e-6
    lines = done.stderr.splitlines()
    assert sum(line.endswith("passed") for line in lines) == len(rows) == 15
    assert f"all {len(rows)} runs are the single process's" in lines
    assert "note: not run: fsdp-hybrid on 1 rank: two replicas, each divided, take an even number of ranks" in lines
    page = (tmp_path / "runs" / "verify-stdlib-lm.html").read_text()
    assert str(Path("runs/verify-stdlib-lm.html")) in lines
    _needs_no_network(page)
    assert page.count("<tr>") == 1 + len(rows)
    assert "prefers-color-scheme: dark" in page


def _needs_no_network(page: str) -> None:
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org)", page)


def test_a_difference_ends_with_exit_code_3(tmp_path: Path) -> None:
    words = ["--strategies", "ddp", "--ranks", "2", "--steps", "2", "--json", "--html", "page/mine.html"]
    done = verify(*words, "--parallel.ddp.compression", "fp16", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    rows = json.loads(done.stdout)
    assert [row["passed"] for row in rows] == [False] * 3
    assert all(row["step"] == 1 and row["parameter"] for row in rows)
    assert "likely: by design: parallel.ddp.compression fp16 loses bits of each gradient" in done.stderr
    assert "something on the way is in a lower precision" in done.stderr
    assert "3 of 3 runs are not the single process's" in done.stderr
    page = (tmp_path / "page" / "mine.html").read_text()
    assert "Not proved" in page
    assert "loses bits of each gradient" in page
    _needs_no_network(page)


def test_where_all_is_refused_nothing_is_proved(tmp_path: Path) -> None:
    heads = ["--model.heads", "1", "--model.kv_heads", "1"]
    done = verify("--strategies", "tensor", "--ranks", "2", "--steps", "2", *heads, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert "nothing was compared; 3 refused" in done.stdout
    assert "2 doesn't divide the 1" in done.stdout


def test_what_was_asked_for_and_not_compared_is_said_first_and_last(tmp_path: Path) -> None:
    words = ["--parallel.pipeline", "2", "--strategies", "ddp", "--ranks", "2", "--steps", "1"]
    done = verify(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    missing = "parallel.pipeline 2, which the config asks for, is not among them: --strategies pipeline-1f1b"
    assert lines[1] == f"note: {missing}"
    assert lines[-2] == f"all 3 runs are the single process's; but {missing}"
    assert missing in (tmp_path / "runs" / "verify-stdlib-lm.html").read_text()


def test_a_wrong_word_is_answered(tmp_path: Path) -> None:
    done = verify("--strategies", "fdsp", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean fsdp?" in done.stderr
    done = verify("--ranks", "1,none", cwd=tmp_path)
    assert done.returncode == 2
    assert "whole numbers above 0 separated by commas" in done.stderr

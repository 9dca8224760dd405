"""Copies of the training state that differ between ranks are found, and the ranks are named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit import small
from kit.commands import run_lockstep
from kit.worlds import in_world

import lockstep
from lockstep.core.errors import ConfigError, ReplicasDiffer
from lockstep.loop.session import components_of, updates_of
from lockstep.resilience.number_faults import flip_bit
from lockstep.training.run import ReplicaCheck

_FLIPPED_AFTER = 3
_CASES: dict[str, tuple[int, dict[str, Any], str]] = {
    "two copies": (
        2,
        {"strategy": "ddp"},
        r"ranks 0 and 1 hold different copies of .*, and no majority.*; wrong: \[\]",
    ),
    "three copies": (3, {"strategy": "ddp"}, r"rank 1 holds another copy of .* than the other 2 ranks.*; wrong: \[1\]"),
    "zero2": (2, {"strategy": "deepspeed", "deepspeed": {"zero_stage": 2}}, r"ranks 0 and 1 hold different copies"),
    "pipeline": (4, {"strategy": "ddp", "pipeline": 2}, r"ranks 0 and 1 hold different copies"),
    "hybrid": (
        4,
        {"strategy": "fsdp", "data": 2, "fsdp": {"sharding_strategy": "HYBRID_SHARD"}},
        r"ranks 1 and 3 hold different copies",
    ),
}


def _found(parallel: dict[str, Any]) -> list[str]:
    """What a run without a flipped bit ends with, and one with it."""
    asked = small.config(parallel=parallel, run={"steps": 5})
    if "pipeline" in parallel:
        asked |= {"model": {"kind": "custom", "target": "kit.chains:Chain"}}
        asked |= {"batch": {"global_size": 13, "micro_size": 13}}
    with small.in_group():
        return [_outcome(asked, flips=flips and os.environ["RANK"] == "1") for flips in (False, True)]


def _outcome(asked: dict[str, Any], *, flips: bool) -> str:
    with lockstep.session(asked) as session:
        check = ReplicaCheck(session, 1)
        try:
            for _ in updates_of(session, lambda before: False):
                if flips and session.progress.steps == _FLIPPED_AFTER:
                    flip_bit(components_of(session).sharding.state.model, lambda: None)
                check.compare()
        except ReplicasDiffer as failure:
            return f"{failure}; wrong: {[*failure.ranks]}"
    return "alike"


@pytest.mark.parametrize("case", _CASES)
def test_ranks_whose_copies_differ_are_named(case: str) -> None:
    ranks, parallel, expected = _CASES[case]
    import re

    for usual, flipped in in_world(ranks, _found, parallel):
        assert usual == "alike"
        assert flipped.startswith(f"step {_FLIPPED_AFTER}: ")
        assert re.search(expected, flipped), flipped


def test_shards_without_a_copy_are_compared_with_nothing() -> None:
    assert [found[1] for found in in_world(2, _found, {"strategy": "fsdp"})] == ["alike"] * 2


def _compared(folder: Path) -> list[int]:
    steps: list[int] = []
    original = ReplicaCheck.compare

    def compare(self: ReplicaCheck) -> None:
        steps.append(self.session.progress.steps)
        original(self)

    asked = small.config(parallel={"strategy": "ddp"}, run={"steps": 5, "folder": str(folder)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaCheck, "compare", compare)
        lockstep.train({**asked, "recovery": {"compare_every": 2}})
    return steps


def test_a_run_compares_every_so_many_updates(tmp_path: Path) -> None:
    for steps in in_world(2, _compared, tmp_path / "run"):
        assert [step for step in steps if step < 5] == [2, 4]


def test_runs_recover_from_both_kinds_of_faults(tmp_path: Path) -> None:
    """The samples of a NaN are left out; a bit that has flipped is undone by the newest checkpoint."""
    file = tmp_path / "small.yaml"
    parallel = {"strategy": "deepspeed", "deepspeed": {"zero_stage": 2}}
    config = small.config(parallel=parallel, launch={"ranks": 2, "device": "cpu"})
    file.write_text(yaml.safe_dump(config))
    words = ("--folder", tmp_path / "runs", "--steps", "6", "--rounds", "2", "--keep", "--json")
    done = run_lockstep("chaos", file, "--faults", "nan,diverge", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    assert {row["fault"] for row in rows} == {"nan", "diverge"}
    for row in rows:
        assert row["passed"]
        shown = "ranks 0 and 1 hold different copies" if row["fault"] == "diverge" else "leaves out the 14 samples"
        assert shown in Path(row["output"]).read_text()


def test_a_custom_loop_compares_no_copies_and_says_so() -> None:
    with pytest.raises(ConfigError) as refused, lockstep.session(small.config(recovery={"compare_every": 1})):
        pass
    assert [problem.key for problem in refused.value.problems] == ["recovery.compare_every"]


def test_one_rank_has_no_copies(tmp_path: Path) -> None:
    done = run_lockstep("chaos", "digits", "--ranks", "1", "--faults", "diverge", "--folder", tmp_path / "runs")
    assert done.returncode == 2
    assert "on 2 ranks" in done.stderr

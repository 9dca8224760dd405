"""Saved under any strategy, resumed under any other and on other ranks: the very state, then the very samples.

All strategies are in the pairs that `make drill` runs.

saved on 3 ranks (single: 1, tensor, hybrid: 4)   -->   resumed on 2 (1, 2, 4), without a conversion step
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.chains import TENSOR_PLAN
from kit.layouts import VARIANTS
from kit.worlds import in_world
from safetensors.numpy import load_file

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import Reader, ReadItem, read_manifest
from lockstep.checkpoint.storage import checkpoint_name
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume
from lockstep.training.exporting import ExportArguments, export

CUT, STEPS = 3, 5
ALIKE = {
    "fsdp-no-shard": "ddp",
    "fsdp-hybrid-grad-op": "fsdp-hybrid",
    "zero0": "ddp",
    **{f"pipeline-{schedule}": "pipeline-1f1b" for schedule in ("gpipe", "interleaved-1f1b", "zero-bubble", "zbv")},
    "tensor-sequence": "tensor",
    "context": "ddp",
    "context+fsdp": "fsdp",
    "pipeline-1f1b+tensor": "pipeline-1f1b and tensor, which test_tensor sees",
}
"""What holds its state as another strategy does."""
STRATEGIES = [name for name in VARIANTS if name != "dp" and name not in ALIKE]
FEWER = ["single", "fsdp", "zero3", "pipeline-1f1b"]
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- pairs -->\n", "<!-- end of pairs -->"


def asked(strategy: str) -> dict[str, Any]:
    """fp16, whose scale has grown and has overflowed by the time of the save; uneven blocks, dropout none."""
    parallel: dict[str, Any] = {**VARIANTS[strategy], **({"data": 2} if "hybrid" in strategy else {})}
    if "tensor" in strategy:
        parallel |= {"tensor_parallel": {"plan": TENSOR_PLAN}}
    asked = small.config(
        parallel=parallel,
        precision={"compute": "fp16", "loss_scale": {"initial": 2.0**26, "growth_interval": 2}},
        run={"steps": STEPS},
    )
    return {**asked, "model": {"kind": "custom", "target": "kit.chains:Chain"}}


def ranks_of(strategy: str, ranks: int) -> int:
    if strategy == "tensor":
        return ranks + ranks % 2
    return 1 if strategy == "single" else 4 if "hybrid" in strategy or "+" in strategy else ranks


# --- on a rank ----------------------------------------------------------------------------------------------------


def save_all(strategies: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """Each strategy's run, saved at the cut, with its result."""
    with _grouped():
        return {strategy: _save(asked(strategy), f"{folder}/{strategy}") for strategy in strategies}


def _save(config: dict[str, Any], folder: str) -> dict[str, Any]:
    with lockstep.session(config) as session:
        checkpoints = Checkpoints(session, LocalStorage(Path(folder)), {})
        checkpoints.begin(Resume())
        losses: list[float] = []
        for report in session:
            losses.append(report.loss)
            if report.step == CUT:
                checkpoints.save()
        assert all(ended.failure is None for ended in checkpoints.finish())
        return {"state": _saved(folder), "losses": losses[CUT:]}


def sources_of(target: str, strategies: list[str]) -> list[str]:
    """Whose checkpoints are resumed under it: all in the drill; else the single process's, its own, and one other,
    not the same one of each target."""
    if len(strategies) > len(FEWER):
        return strategies
    place = strategies.index(target)
    other = strategies[(place + 3) % len(strategies)]
    return [name for name in strategies if name in {"single", target, other}]


def resume_all(sources: list[str], target: str, folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Under the target, from each source's checkpoint; and on from that of the single process, in the drill from the
    target's own in a session of its own, too: what all others restore is bitwise the same state."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    followed = ["single", target] if len(sources) > len(FEWER) else ["single"]
    others = [name for name in sources if name not in followed]
    with _grouped():
        for restored in ([*others, "single"], *([name] for name in dict.fromkeys(followed) if name != "single")):
            with lockstep.session(asked(target)) as session:
                for source in restored:
                    state = _restored(session, source, target, folder)
                    found[source, target] = {"state": state, "losses": None}
                found[restored[-1], target]["losses"] = [report.loss for report in session]
    return found


def _restored(session: Any, source: str, target: str, folder: str) -> dict[str, Any]:
    """What was restored is saved at once: so all of it can be read again, however it is divided."""
    again = f"{folder}/{source}-{target}"
    checkpoints = Checkpoints(session, LocalStorage(Path(again)), {})
    checkpoints.begin(Resume(origin=LocalStorage(Path(folder) / source)))
    assert checkpoints.resumed_from == CUT
    checkpoints.save()
    assert all(ended.failure is None for ended in checkpoints.finish())
    return _saved(again)


def _saved(folder: str) -> dict[str, Any]:
    """Every tensor whole, and every number, of the checkpoint at the cut; read by one rank."""
    if os.environ["RANK"] != "0":
        return {}
    storage, name = LocalStorage(Path(folder)), checkpoint_name(CUT)
    manifest = read_manifest(storage, name)
    memory = {
        key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in manifest.tensors.items()
    }
    items = (ReadItem(key, entry.info.whole, memory[key]) for key, entry in manifest.tensors.items())
    Reader(storage, name, manifest).read(items)
    numbers = {key: manifest.state[key] for key in ("progress", "loss_scale", "patience")}
    return {"numbers": numbers, **{key: tensor.numpy() for key, tensor in memory.items()}}


def _grouped() -> Any:
    return small.in_group()


# --- all of it ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[FEWER, pytest.param(STRATEGIES, marks=pytest.mark.drill)], ids=["fewer", "all"])
def strategies(request: pytest.FixtureRequest) -> list[str]:
    return list(request.param)


@pytest.fixture(scope="module")
def folder(strategies: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def saved(strategies: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """The state of each strategy at the cut, and its result."""
    states: dict[str, dict[str, Any]] = {}
    for ranks in (1, 3, 4):
        names = [name for name in strategies if ranks_of(name, 3) == ranks]
        states |= in_world(ranks, save_all, names, folder)[0]
    return states


@pytest.fixture(scope="module")
def pairs(strategies: list[str], folder: str, saved: dict[str, dict[str, Any]]) -> dict[tuple[str, str], str]:
    """What is wrong with each pair; nothing if it is the same run."""
    resumed: dict[tuple[str, str], dict[str, Any]] = {}
    for target in strategies:
        sources = sources_of(target, strategies)
        resumed |= in_world(ranks_of(target, 2), resume_all, sources, target, folder)[0]
    return {pair: _difference(saved[pair[0]], state) for pair, state in resumed.items()}


def _difference(saved: dict[str, Any], found: dict[str, Any]) -> str:
    before, after = saved["state"], found["state"]
    if before["numbers"] != after["numbers"]:
        return f"{after['numbers']} restored, {before['numbers']} saved"
    if before.keys() != after.keys():
        return f"other names: {sorted(before.keys() ^ after.keys())}"
    for name, value in before.items():
        if name != "numbers" and not np.array_equal(value, after[name]):
            return f"{name} differs"
    if found["losses"] is not None and found["losses"] != pytest.approx(
        saved["losses"], rel=2e-3
    ):  # fp16: another split rounds otherwise
        return f"losses {found['losses']} after it, {saved['losses']} without a cut"
    return ""


def test_a_checkpoint_loads_anywhere(strategies: list[str], pairs: dict[tuple[str, str], str]) -> None:
    assert {pair: difference for pair, difference in pairs.items() if difference} == {}
    assert pairs.keys() == {(source, target) for target in strategies for source in sources_of(target, strategies)}
    assert {source for source, _ in pairs} == {*strategies}


def test_it_is_exported(folder: str, saved: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    for strategy, run in saved.items():
        target = tmp_path / strategy / "model.safetensors"
        target.parent.mkdir()
        export(Path(folder) / strategy, ExportArguments(step=CUT, to=target))
        state = run["state"]
        expected = {name.removeprefix("model."): state[name] for name in state if name.startswith("model.")}
        exported = load_file(target)
        assert exported.keys() == expected.keys(), strategy
        assert all(np.array_equal(exported[name], value) for name, value in expected.items()), strategy


def test_the_table_in_the_docs_is_that_of_the_pairs(pairs: dict[tuple[str, str], str]) -> None:
    """On a difference: put what is printed between the marks in docs/checkpoints.md. What only drills load counts."""
    table = _table(pairs)
    page = PAGE.read_text(encoding="utf-8")
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)] == table, f"the page should have\n{table}"


def _table(pairs: dict[tuple[str, str], str]) -> str:
    head = ["saved under \\ resumed under", *STRATEGIES]
    rows = [
        [source, *("no" if pairs.get((source, target)) else "yes" for target in STRATEGIES)] for source in STRATEGIES
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

"""Muon and Adafactor look at whole matrices; under fsdp, whose ranks hold rows of them, their runs are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.runs import recorded, recorded_all
from kit.worlds import in_world
from torch import Tensor, nn
from training.test_checkpoint_pairs import CUT, STEPS, _difference, _restored, _save
from training.test_same_run import config

NAMES = ("muon", "adafactor")
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated, reduced each time, clipped": {
        "fsdp": {"reduce_every": "micro-batch"},
        "batch": {"global_size": 13, "micro_size": 2},
        "clip_norm": 0.01,
    },
    "bf16, grad op": {"precision": {"compute": "bf16"}, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
    "fp16, which overflows at first": {"precision": {"compute": "fp16", "loss_scale": {"initial": 2.0**24}}},
    "rules and frozen": {
        "model": {**config(13)["model"], "freeze": ["*.query.*"]},
        "rules": [{"match": ["*.out.*"], "lr_scale": 0.5}],
    },
}
UPDATES = 3
LOSSES = 1e-6


def asked(name: str, option: str, *, sharded: bool) -> dict[str, Any]:
    sections = dict(OPTIONS[option])
    fsdp, batch = sections.pop("fsdp", {}), sections.pop("batch", {"global_size": 13})
    optim = {"name": name, "lr": 1e-3, **{key: sections.pop(key) for key in ("clip_norm", "rules") if key in sections}}
    parallel = {"strategy": "fsdp", "fsdp": fsdp} if sharded else {"strategy": "single"}
    return {**config(13), "optim": optim, "batch": batch, "parallel": parallel, **sections}


@pytest.mark.parametrize("name", NAMES)
def test_options_of_a_run_leave_it_the_single_process(name: str) -> None:
    sharded = recorded_all([asked(name, option, sharded=True) for option in OPTIONS], 2, UPDATES)
    for option, run in zip(OPTIONS, sharded, strict=True):
        expected = recorded(asked(name, option, sharded=False), updates=UPDATES)
        close = 2e-3 if "precision" in OPTIONS[option] else LOSSES
        assert run.losses == pytest.approx(expected.losses, rel=close), option
        for key, value in expected.weights.items():
            off = np.sqrt(np.mean((run.weights[key] - value) ** 2))
            assert off <= 0.1 * len(expected.losses) * 1e-3, f"{option} {key}"


# --- checkpoints --------------------------------------------------------------------------------------------------


class Shapes(nn.Module):
    """Matrices whose factors have the shape of a rank's rows: on 2, on 3, and on 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(1, 3, 3, padding=1)
        self.widths = nn.ModuleList(nn.Linear(width, rows) for width, rows in ((4, 3), (3, 2), (2, 1), (1, 5), (5, 4)))
        self.head = nn.Linear(4, 3)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.kernel(points.unsqueeze(1)).mean(dim=1)
        for layer in self.widths:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def resumable(strategy: str, name: str) -> dict[str, Any]:
    parallel: dict[str, Any] = {"strategy": strategy}
    if strategy == "hybrid":
        parallel = {"strategy": "fsdp", "data": 2, "fsdp": {"sharding_strategy": "HYBRID_SHARD"}}
    made = small.config(parallel=parallel, optim={"name": name, "lr": 0.01}, run={"steps": STEPS})
    return {**made, "model": {"kind": "custom", "target": "training.test_whole_matrices:Shapes"}}


def save_each(strategies: list[str], ranks: int, folder: str) -> dict[str, Any]:
    with small.in_group():
        return {
            f"{strategy} {ranks} {name}": _save(resumable(strategy, name), f"{folder}/{strategy} {ranks} {name}")
            for strategy in strategies
            for name in NAMES
        }


def resume_each(sources: list[str], target: str, folder: str) -> dict[str, Any]:
    import lockstep

    made = {}
    with small.in_group():
        for source in sources:
            for name in NAMES:
                with lockstep.session(resumable(target, name)) as session:
                    state = _restored(session, f"{source} {name}", target, folder)
                    made[f"{source} {name}"] = {"state": state, "losses": [report.loss for report in session]}
    return made


def test_a_checkpoint_resumes_under_other_strategies_and_on_other_ranks(tmp_path: Path) -> None:
    assert CUT < STEPS
    folder = str(tmp_path)
    saved = in_world(1, save_each, ["single"], 1, folder)[0] | in_world(3, save_each, ["ddp", "fsdp"], 3, folder)[0]
    targets = [
        (1, ["fsdp 3"], "single"),
        (2, ["single 1", "fsdp 3"], "fsdp"),
        (2, ["fsdp 3"], "ddp"),
        (4, ["ddp 3"], "hybrid"),
    ]
    for ranks, sources, target in targets:
        for source, resumed in in_world(ranks, resume_each, sources, target, folder)[0].items():
            assert _difference(saved[source], resumed) == "", f"{source} -> {target} on {ranks}"


def test_stages_and_parts_of_sequences_share_the_matrices_of_their_own_ranks() -> None:
    layouts: list[dict[str, Any]] = [{"pipeline": 2}, {"context": 2}]
    configs = [
        {
            **asked(name, "accumulated, reduced each time, clipped", sharded=True),
            "parallel": {"strategy": "fsdp", **layout},
        }
        for name in NAMES
        for layout in layouts
    ]
    runs = recorded_all(configs, 4, UPDATES)
    for number, name in enumerate(NAMES):
        expected = recorded(asked(name, "accumulated, reduced each time, clipped", sharded=False), updates=UPDATES)
        for run in runs[number * len(layouts) :][: len(layouts)]:
            assert run.losses == pytest.approx(expected.losses, rel=LOSSES)

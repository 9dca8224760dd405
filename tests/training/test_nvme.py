"""Optimizer state of ZeRO-3 in files: the same run, saved and resumed as under every other strategy.

DeepSpeed compiles an extension for it, which takes minutes: the tests that need it are part of `make drill`.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.worlds import in_world
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.core.errors import ConfigError
from lockstep.sharding import deepspeed_swap
from lockstep.training.session import Session, components_of

needs_libaio = pytest.mark.skipif(
    not Path("/usr/include/libaio.h").exists(), reason="libaio is missing: apt-get install libaio-dev"
)
_PATIENCE_S = 900.0  # of a compiler
UPDATES = 4


class Wide(nn.Module):
    """Matrices of more than 1 MiB on each of two ranks, which DeepSpeed moves to files; biases stay in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle, self.head = nn.Linear(4, 2048), nn.Linear(2048, 260), nn.Linear(260, 3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(F.relu(self.inner(points)))))


def _config(parallel: dict[str, Any], optimizer: str = "adamw") -> dict[str, Any]:
    return {
        **small.config(parallel=parallel, run={"steps": UPDATES}, schedule={"kind": "constant"}),
        "model": {"kind": "custom", "target": "training.test_nvme:Wide"},
        "optim": {"name": optimizer, "lr": 0.001, "clip_norm": 0.5},
    }


def _zero3(**options: Any) -> dict[str, Any]:
    return {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3, **options}}


def _nvme(folder: Path) -> dict[str, Any]:
    return _zero3(offload_optimizer="nvme", nvme_path=str(folder / "nvme"))


def _losses(session: Session, until: int) -> list[float]:
    """Train until a step; the losses."""
    losses = []
    for batch in session.batches():
        session.accumulate(batch)
        losses.append(session.commit().result().loss)
        if session.progress.steps == until:
            break
    return losses


def _run(parallel: dict[str, Any], folder: Path | None = None, until: int = UPDATES, **objects: Any) -> list[float]:
    """Train until a step from the newest checkpoint, and save; the losses."""
    with lockstep.session(_config(parallel), **objects) as session:
        saves = session.checkpoints(folder) if folder is not None else None
        losses = _losses(session, until)
        if saves is not None:
            saves.save()
            assert [report.failure for report in saves.finish()] == [None]
    return losses


def _swapped_run(folder: Path) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with small.in_group():
        plain, swapped = (_run(parallel, objective=small.NanAt(range(1, 2))) for parallel in (_zero3(), _nvme(folder)))
        cut = _run(_nvme(folder), folder / "a", 2) + _run(_nvme(folder), folder / "a", 3)
        elsewhere = _run({"strategy": "ddp"}, folder / "a")
        _run({"strategy": "ddp"}, folder / "b", 2)
        back = _run(_nvme(folder), folder / "b")
        whole = _run(_zero3())
    return {
        "discarded": (plain, swapped), "resumed": (whole[:3], cut), "under ddp": (whole[3:], elsewhere),
        "from ddp": (whole[2:], back), "left": sorted(path.name for path in (folder / "nvme").iterdir()),
    }  # fmt: skip


@pytest.mark.drill
@needs_libaio
def test_state_on_nvme_is_trained_saved_and_resumed_as_in_memory(tmp_path: Path) -> None:
    """Losses are bitwise those of stage 3 in memory, a discarded update included; files are deleted at the end."""
    runs = in_world(2, _swapped_run, tmp_path, patience=_PATIENCE_S)[0]
    for name in ("discarded", "resumed"):
        expected, actual = runs[name]
        assert repr(actual) == repr(expected), name
    for name in ("under ddp", "from ddp"):
        expected, actual = runs[name]
        assert actual == pytest.approx(expected, rel=2e-6), name
    assert runs["left"] == []


def _held(folder: Path) -> tuple[list[int], int, int]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with lockstep.session(_config(_nvme(folder), "sgd")) as session:
        _losses(session, 2)
        zero: Any = components_of(session).sharding.step
        flats = [flat.numel() for flat in zero._zero.fp32_partitioned_groups_flat]
        files = sum(
            path.stat().st_size
            for path in (folder / "nvme").glob("**/*.swp")
            if f"rank{os.environ['RANK']}" in str(path)
        )
        names = {name for name, _ in components_of(session).sharding.state.weights()}
    return flats, files, len(names)


@pytest.mark.drill
@needs_libaio
def test_what_is_on_nvme_is_not_in_memory(tmp_path: Path) -> None:
    elements = sum(parameter.numel() for parameter in Wide().parameters() if parameter.ndim == 2)
    for flats, files, names in in_world(2, _held, tmp_path, patience=_PATIENCE_S):
        assert min(flats) == 0 < max(flats), "biases stay"
        assert files >= 2 * 4 * elements // 2, "values and momentum"
        assert names == 6


def test_what_is_used_of_deepspeed_is_there() -> None:
    """Where the extension isn't built, the tests above don't show it."""
    from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    methods = {
        "_swappable_optimizer_subgroup", "_swap_out_offload_fp32_gradients", "unscale_and_clip_grads",
        "_optimizer_states_and_gradient_swap_in", "_optimizer_states_and_gradient_swap_out", "_release_swap_buffers",
    }  # fmt: skip
    assert methods <= vars(DeepSpeedZeroOptimizer_Stage3).keys()
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3)
    assert all(f"self.{name}" in source for name in ("swap_optimizer", "fp16_groups", "__param_id_to_grad_partition"))
    assert "self.swap_folder" in inspect.getsource(PartitionedOptimizerSwapper.__base__)


def test_a_machine_without_libaio_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self: False)
    with pytest.raises(ConfigError, match=r"async_io, which can't be built: libaio is missing .*; take cpu"):
        deepspeed_swap.swap_folder(str(tmp_path))


def test_files_of_processes_that_have_ended_are_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deepspeed_swap, "_load_async_io", lambda: None)
    first = deepspeed_swap.swap_folder(str(tmp_path))
    stale = first.with_name(first.name.replace(f"-{os.getpid()}-", "-4194999-"))
    stale.mkdir()
    (tmp_path / "mine").mkdir()
    second = deepspeed_swap.swap_folder(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([first, second, tmp_path / "mine"])

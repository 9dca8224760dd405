"""Histograms of weights and gradients: each element counts once, whichever ranks hold it, and no update changes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.layouts import asking_for
from kit.worlds import in_world
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lockstep
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.monitor.histogram import Histogram, HistogramCounts
from lockstep.training.histograms import histograms_of
from lockstep.training.session import components_of

EVERY = {"monitor": {"histograms": {"every": 2}, "tensorboard": False}}
Counted = list[dict[str, Histogram]]


def config(**sections: Any) -> dict[str, Any]:
    """A transformer with a tied weight, so that the first and the last stage of a pipeline hold the same one."""
    ragged = {"kind": "custom", "target": "kit.ragged:Ragged", "collate": "kit.ragged:collate_in_sevens"}
    return {
        "model": {"kind": "transformer", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocabulary": 64},
        "data": {"train": ragged},
        "batch": {"global_size": 12, "micro_size": 3},
        "optim": {"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
        "precision": {"compute": "fp32"},
        "run": {"steps": 4},
        **sections,
    }


def counted(settings: dict[str, Any]) -> tuple[Counted, Counted, list[float], list[float]]:
    """The histograms of each recorded update; those of the gathered tensors; losses and gradient norms."""
    with lockstep.session(settings) as session:
        components = components_of(session)
        histograms = histograms_of(components)
        assert histograms is not None
        merged, gathered, losses, norms = [], [], [], []
        for batch in session.batches():
            session.accumulate(batch)
            whole = {
                f"gradients/{name}": HistogramCounts.of(value).read() for name, value in components.sharding.gradients()
            }
            report = session.commit().result()
            histograms.count_weights(report.step)
            for name, value in components.sharding.state.weights():
                if name in components.tensors.parameters:
                    whole[f"weights/{name}"] = HistogramCounts.of(value).read()
            if of_model := histograms.see(report).of_model:
                merged.append(dict(of_model))
                gathered.append(whole)
            losses.append(report.loss)
            norms.append(report.grad_norm)
        assert not histograms._counts
        return merged, gathered, losses, norms


def checked(settings: dict[str, Any]) -> tuple[Counted, Counted, list[float], list[float]]:
    """Count, and see that losses and norms are bitwise those without histograms."""
    with small.in_group():
        result = counted({**settings, **EVERY})
        with lockstep.session(settings) as session:
            assert [(report.loss, report.grad_norm) for report in session] == list(zip(*result[2:], strict=True))
        return result


@cache
def alone() -> tuple[Counted, Counted, list[float], list[float]]:
    return in_world(1, checked, config())[0]


LAYOUTS = ("ddp", "fsdp", "zero3", "tensor", "pipeline-1f1b")
DRILLED = ("fsdp-no-shard", "zero1", "zero2", "tensor-sequence", "context+fsdp")


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.drill) for name in DRILLED)])
def test_two_ranks_count_what_one_counts(layout: str) -> None:
    first, second = in_world(2, checked, config(parallel=asking_for(layout, 2)))
    merged, gathered, _, norms = first
    assert second[0] == merged, "all ranks have the same"
    expected = alone()[0]
    assert len(merged) == len(expected) == 2
    for own, whole, oracle in zip(merged, gathered, expected, strict=True):
        assert own.keys() == whole.keys() == oracle.keys()
        for name, histogram in own.items():
            exact = (histogram.counts, histogram.low, histogram.high)
            assert exact == (whole[name].counts, whole[name].low, whole[name].high), name
            assert histogram.total == pytest.approx(whole[name].total, rel=1e-9, abs=1e-9)
            assert histogram.count == oracle[name].count
            bins = histogram.counts.keys() | oracle[name].counts.keys()
            moved = sum(abs(histogram.counts.get(i, 0) - oracle[name].counts.get(i, 0)) for i in bins)
            assert moved <= 4 + 0.02 * histogram.count, f"{name}: rounding moves few elements over an edge"
    squares = sum(part.squares for name, part in merged[0].items() if name.startswith("gradients/"))
    assert squares**0.5 == pytest.approx(norms[1], rel=1e-5), "unscaled, not clipped, each element once"


def test_a_run_s_files_have_them(tmp_path: Path) -> None:
    monitor = {"histograms": {"every": 3, "parameters": ["head.*"]}, "every": 2, "progress": "none"}
    lockstep.train(small.config(run={"steps": 6, "folder": str(tmp_path)}, monitor=monitor))
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    names = ["gradients/head.bias", "gradients/head.weight", "weights/head.bias", "weights/head.weight"]
    assert sorted(events.Tags()["histograms"]) == names
    for name in names:
        points = events.Histograms(name)
        assert [point.step for point in points] == [3, 6]
        assert points[0].histogram_value.num == (3 if "bias" in name else 24)
        assert sum(points[0].histogram_value.bucket) == points[0].histogram_value.num
    assert "head.bias" not in (tmp_path / "events.jsonl").read_text()


def test_what_is_not_finite_is_counted_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = {"histograms": {"every": 1, "of": "gradients"}, "progress": "none"}
    run = {"steps": 6, "folder": str(tmp_path)}
    lockstep.train(small.config(run=run, monitor=monitor), objective=small.NanAt(range(2, 4)))
    assert [text for text in caplog.messages if "that are not finite" in text] == [
        "gradients/head.bias has 3 values at step 3 that are not finite, and so do 3 more"
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    points = events.Scalars("gradients/inner.weight/not_finite")
    assert [(point.step, point.value) for point in points] == [(3, 32.0), (4, 32.0)]
    assert [point.histogram_value.num for point in events.Histograms("gradients/inner.weight")] == [
        32,
        32,
        0,
        0,
        32,
        32,
    ]


def test_what_can_t_be_counted_is_refused(tmp_path: Path) -> None:
    run = {"steps": 8, "folder": str(tmp_path / "run")}
    with pytest.raises(
        ConfigError, match=r"optim\.in_backward frees each gradient .* monitor\.histograms\.of: weights"
    ):
        validate(small.config(monitor={"histograms": {}}, optim={"in_backward": True, "clip_norm": None}))
    with pytest.raises(
        ConfigError, match=r"'tail\.\*' matches none of the model's 4 parameters, such as inner\.weight"
    ):
        lockstep.train(small.config(run=run, monitor={"histograms": {"parameters": ["tail.*"]}, "progress": "none"}))


def test_a_large_tensor_is_counted_in_pieces() -> None:
    values = torch.randn(3, 700_001, generator=torch.Generator().manual_seed(0))
    values[0, 0], values[2, -1] = float("inf"), 9.0
    counts = HistogramCounts.of(values).read()
    assert (counts.count, counts.not_finite, counts.high) == (values.numel() - 1, 1, 9.0)
    assert counts.squares == pytest.approx(float(values[values.isfinite()].double().square().sum()))

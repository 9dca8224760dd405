"""On GPUs, every layout and feature is the single process on the CPU."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from gpu.on_gpus import EXACT, on_gpus, recorded_on_gpus
from kit.layouts import LAYOUTS, asking_for
from kit.runs import Trajectory, differences, recorded
from training.test_features import TOLERANCE, _ranks, asked
from training.test_same_run import config

from lockstep.plan.features import FEATURES, cell

SLACK = 20  # another processor adds in another order
PROVED = [name for name in LAYOUTS if name != "dp"]
ON_ONE_RANK = ["single", "ddp", "fsdp", "fsdp-grad-op", "fsdp-no-shard", "zero0", "zero1", "zero2", "zero3"]
FEATURED = ["single", "ddp", "fsdp", "zero2", "zero3"]
OVER_GLOO = ["ddp", "fsdp-no-shard", "zero0", "zero1", "zero2"]
HALF = ("bf16", "fp16")


@cache
def oracle() -> Trajectory:
    return recorded({**config(12, **EXACT), "launch": {"device": "cpu"}})


def layers(layout: str) -> int:
    return 4 if layout in ("pipeline-interleaved-1f1b", "pipeline-zero-bubble", "pipeline-zbv") else 2


@pytest.mark.parametrize("layout", ON_ONE_RANK)
def test_one_rank(layout: str) -> None:
    (run,) = recorded_on_gpus([on_gpus(parallel=asking_for(layout, 1))], 1)
    assert isinstance(run, Trajectory), run
    assert differences(run, oracle(), slack=SLACK) == []


@pytest.mark.parametrize("layout", [name for name in PROVED if name != "single"])
def test_several_ranks(layout: str) -> None:
    ranks = _ranks(layout)
    if layout not in OVER_GLOO and ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs: ranks that share one have gloo, whose functional collectives crash on GPUs")
    asked = on_gpus(parallel=asking_for(layout, ranks))
    asked["model"] = {**asked["model"], "layers": layers(layout)}
    expected = oracle() if layers(layout) == 2 else recorded({**asked, "parallel": {}, "launch": {"device": "cpu"}})
    (run,) = recorded_on_gpus([asked], ranks)
    assert isinstance(run, Trajectory), run
    assert differences(run, expected, slack=SLACK) == []


def asked_features(layout: str) -> list[str]:
    names = [feature.name for feature in FEATURES if feature.name != "export"]
    return [name for name in names if cell(LAYOUTS[layout], name).standing in ("cpu", "gpu")]


@pytest.mark.parametrize("layout", FEATURED)
def test_features(layout: str) -> None:
    """Losses are those of the single process on the CPU with the same feature."""
    features = asked_features(layout)
    configs, oracles = [], {}
    for feature in features:
        asked_config = {**asked(layout, "" if feature == "compile" else feature, 1), "launch": {"device": "cuda"}}
        asked_config.setdefault("precision", EXACT["precision"])
        asked_config["precision"] = {"tf32": False, **asked_config["precision"]}
        asked_config["run"] = {**asked_config["run"], "allow_untested": True}
        reference = asked_config
        if feature == "compile":
            asked_config = {**asked_config, "model": {**asked_config["model"], "compile": True}}
        configs.append(asked_config)
        plain = {**reference, "parallel": {}, "launch": {"device": "cpu"}, "memory": {}}
        oracles[feature] = plain
    runs = dict(zip(features, recorded_on_gpus(configs, 1, 3), strict=True))
    wrong = {}
    for feature, run in runs.items():
        if isinstance(run, str):
            wrong[feature] = run.strip().splitlines()[-1]
            continue
        expected = recorded(oracles[feature], updates=3).losses
        off = max(abs(mine / theirs - 1) for mine, theirs in zip(run.losses, expected, strict=True))
        if off > 5 * TOLERANCE.get(feature, 2e-5):
            wrong[feature] = f"losses {run.losses}, not {expected}: off by {off:.1e}"
    assert wrong == {}


@pytest.mark.parametrize("layout", FEATURED)
@pytest.mark.parametrize("compute", HALF)
def test_half_precision_learns_as_fp32_does(layout: str, compute: str) -> None:
    asked_config = on_gpus(parallel=asking_for(layout, 1), precision={"compute": compute})
    (run,) = recorded_on_gpus([asked_config], 1, 8)
    assert isinstance(run, Trajectory), run
    expected = oracle().losses
    assert run.losses[:4] == pytest.approx(expected, rel=1e-2)
    assert run.losses[-1] < run.losses[0]

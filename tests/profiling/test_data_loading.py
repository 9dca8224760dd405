"""`lockstep profile data`: what a sample costs, the speed by number of workers, the recommended one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from kit import small
from kit.commands import run_lockstep
from kit.failures import fails, gives
from kit.worlds import in_process
from profiling import loaded

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.profiling.loading import DataProfile, LoaderSpeed, data_lines, recommend, settings


@pytest.fixture(scope="module")
def slow() -> DataProfile:
    """On 2 CPUs or more, workers read side by side: they sleep."""
    planted: DataProfile = in_process(loaded.profile, loaded.config(slow=17), 2.5, 0.02)
    return planted


def test_a_samples_cost(slow: DataProfile) -> None:
    cost = slow.cost
    assert (cost.slowest_index, cost.by_sample) == (17, True)
    assert cost.slowest > 0.06
    assert 0.003 < cost.mean < 0.06
    assert 0.003 < cost.mean < cost.slowest
    assert list(cost.stages) == ["items", "collate"]
    assert cost.stages["items"] > 2 * cost.stages["collate"]
    assert sum(cost.stages.values()) == pytest.approx(1, abs=0.05)


def test_workers_pay_for_samples_that_wait(slow: DataProfile) -> None:
    speeds = {speed.workers: speed for speed in slow.settings}
    assert 50 < speeds[0].samples < 340
    if 2 in speeds:
        assert speeds[2].samples > 1.15 * speeds[0].samples
        assert slow.recommended == max(speeds, key=lambda workers: speeds[workers].samples)
    assert slow.needed == pytest.approx(20 / 0.02)
    text = "\n".join(data_lines(slow))
    assert gives(text, "slowest", "sample 17")
    assert gives(text, "1.00k samples/s")
    assert f"recommended: data.loader.workers: {slow.recommended} (the fastest: " in text


def test_a_time_that_is_too_short_for_a_micro_batch() -> None:
    began = time.perf_counter()
    profile = loaded.profile(loaded.config(milliseconds=100.0), 0.3)
    assert time.perf_counter() - began < 4  # 16 samples are the fingerprint's
    assert profile.settings == ()
    assert profile.recommended is None
    assert profile.unmeasured.startswith("not measured with 0, 1")
    assert profile.cost.mean > 0.1


def test_data_that_cannot_be_read() -> None:
    with fails(RunFailed, "sample 8", "ValueError: torn"):
        loaded.profile(loaded.config(torn=8), 20.0)  # 7 is in the fingerprint, too
    with pytest.raises(ConfigError, match="no samples"):
        loaded.profile(loaded.config(samples=0), 0.5)
    with fails(ConfigError, "Stream", "IterableDataset"):
        loaded.profile(loaded.config("Stream"), 0.5)


def test_token_files_and_texts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 4000)
    tokens = run_lockstep("data", "prepare", "text.txt", "--output", "tokens", "--tokenizer", "bytes", cwd=tmp_path)
    assert tokens.returncode == 0, tokens.stderr
    words = ("data.train.kind=tokens", "data.train.folder=tokens", "data.train.length=64", "model.vocabulary=257")
    done = run_lockstep("profile", "data", "stdlib-lm", *words, "--seconds", 1, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    assert record["kind"] == "tokens"
    assert record["cost"]["by_sample"] is False
    for speed in record["settings"]:
        assert speed["tokens"] == pytest.approx(64 * speed["samples"], rel=0.02)


def test_of_a_run(tmp_path: Path) -> None:
    config = {**small.config(), "run": {"steps": 200, "folder": "run"}}
    (tmp_path / "run.json").write_text(json.dumps(config))
    assert run_lockstep("train", "run.json", "--monitor.meter_seconds", "0.1", cwd=tmp_path).returncode == 0
    done = run_lockstep("profile", "data", "run", "--seconds", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the model's updates need" in done.stdout
    assert "recommended: data.loader.workers: " in done.stdout
    assert run_lockstep("profile", "dta", cwd=tmp_path).returncode == 2


def test_settings_and_recommendations() -> None:
    assert settings(8, 3) == [0, 1, 2, 3, 4, 8]
    assert settings(6, 0) == [0, 1, 2, 4, 6]
    assert settings(0, 0) == [0, 1]
    speeds = [LoaderSpeed(workers, samples, 0.0, 0.0) for workers, samples in ((0, 100), (1, 80), (2, 500))]
    assert recommend(speeds, None)[0] == 2
    assert recommend(speeds, 4)[0] == 0
    assert recommend(speeds, 50)[0] == 1
    assert recommend(speeds, 300)[0] == 2
    assert recommend(speeds, 1000)[0] == 2
    assert gives(recommend(speeds, 1000)[1], "fastest", "0.5 times")
    assert recommend([*speeds, LoaderSpeed(4, 520, 0.0, 0.0)], None)[0] == 2
    assert recommend([], None) == (None, "")

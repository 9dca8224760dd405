"""The search for the best config that fits: what it finds, what it leaves out, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.commands import run_lockstep
from kit.failures import gives
from simulation.test_peak_memory import NOTHING
from simulation.test_step_time import cluster, large

import lockstep
from lockstep.config.loading import load
from lockstep.config.schema import Config
from lockstep.plan.gpus import GPUCluster
from lockstep.simulation.estimate import Estimator, estimator_of
from lockstep.simulation.page import PlannedStep, write_plan
from lockstep.simulation.planning import NO_LENGTH, describe_clusters, row_on
from lockstep.simulation.search import (
    Candidate,
    Found,
    _layouts,
    _offloaded,
    _Search,
    describe,
    overlay_of,
    search,
)
from lockstep.simulation.timing import SHARES, StepTime


def sized(layers: int) -> dict[str, Any]:
    return {"kind": "transformer", "vocabulary": 4096, "layers": layers, "heads": 8, "width": 1024}


def estimator(config: Config, gpus: GPUCluster) -> Estimator:
    return estimator_of(config, gpus.ranks, gpus.gpu.memory, NOTHING, gpus)


@cache
def found_on(memory: float, ranks: int = 1, goal: Any = "time", layers: int = 2) -> tuple[Estimator, Found]:
    own = estimator(large(ranks, "auto", model=sized(layers)), cluster(per_node=ranks, memory=int(memory * 2**30)))
    return own, search(own, goal)


def merged(config: Config, overlay: Mapping[str, Any], folder: Path) -> Config:
    files = [folder / "run.yaml", folder / "found.yaml"]
    for file, values in zip(files, (config.model_dump(mode="json", exclude_unset=True), overlay), strict=True):
        file.write_text(yaml.safe_dump(values))
    return load(files).config


def test_the_found_config_is_the_fastest_and_fits(tmp_path: Path) -> None:
    own, found = found_on(40, ranks=2)
    shown: list[tuple[str, float, int]] = []
    best = search(own, show=lambda *values: shown.append(values)).best
    assert best == found.best
    assert {"ddp", "fsdp"} <= {name.partition(",")[0] for name, *_ in shown}, "a terminal shows them at once"
    assert best is not None
    assert best.seconds is not None
    assert best.reserved is not None
    assert best.reserved <= 40 << 30
    config = merged(own.config, best.overlay, tmp_path)
    peak, step = replace(own, config=config).simulated(config)
    assert (step.seconds, peak.reserved and peak.reserved.total) == (best.seconds, best.reserved), "train takes it"
    assert own.cluster is not None
    assert best.seconds <= 1.001 * own.step_time(own.config, own.cluster).seconds
    fitting = [each for each in found.candidates if each.fits and each.seconds is not None and not each.why]
    assert not fitting, "each of the others has a reason"
    assert best.checkpointing == "none", "there is room"
    assert {"ddp", "fsdp"} <= {each.layout for each in [best, *found.candidates]}


@pytest.mark.parametrize("compute", ["auto", "bf16", "fp32"])
@pytest.mark.parametrize("stays", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_what_arithmetic_refuses_does_not_fit(compute: str, stays: str) -> None:
    parallel = {"strategy": "fsdp", "fsdp": {"sharding_strategy": stays}}
    data = {"train": {"kind": "tokens", "folder": "not-on-this-machine", "length": 8}}  # few activations
    sections = {"data": data, "batch": {"global_size": 8, "micro_size": 1}, "parallel": parallel}
    model = {"kind": "transformer", "vocabulary": 256, "layers": 8, "heads": 8, "width": 512}
    config = large(8, model=model, precision={"compute": compute}, **sections)
    own = estimator(config, cluster(per_node=8))
    needed = own.peak(config).bytes
    assert not replace(own, memory=needed).too_large(config)
    assert replace(own, memory=own.planned(config).placement.total - 1).too_large(config)


def test_strategies_that_shard_alike_stand_for_each_other_only_if_they_were_simulated() -> None:
    gpus = cluster(per_node=8)

    def names(parallel: dict[str, Any], *, simulated: bool) -> list[str]:
        seen: list[tuple[Config, Candidate]] = []
        found = []
        for name, config in _layouts(large(8, model=sized(2), parallel=parallel), gpus, 0, seen):
            found.append(name)
            seen.append((config, Candidate({}, name, 1, "none", None, 1 if simulated else None, None)))
        return found

    assert "zero3" not in names({"strategy": "fsdp"}, simulated=True)
    assert "zero3" in names({"strategy": "fsdp"}, simulated=False)
    in_bf16 = {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3, "bf16_weights": True}}
    assert "zero3" in names(in_bf16, simulated=True), "its parameters take half of FSDP's bytes"


def test_little_memory_is_answered_by_what_saves_it() -> None:
    _, plenty = found_on(40)
    _, little = found_on(3)
    assert plenty.best is not None
    assert little.best is not None
    assert little.best.seconds > plenty.best.seconds
    assert little.best.reserved <= 3 << 30 < plenty.best.reserved
    unfit = [each for each in little.candidates if each.fits is False]
    assert unfit
    assert all("fit" in each.why or "takes" in each.why for each in unfit)


def test_one_sample_of_a_rank_that_does_not_fit_is_checkpointed() -> None:
    config = large(2, "auto", model=sized(3), batch={"global_size": 2}, memory={"loss_chunk": 64})
    whole, least = (search(estimator(config, cluster(per_node=2)), goal).best for goal in ("time", "memory"))
    assert whole is not None
    assert least is not None
    assert least.reserved is not None
    found = search(estimator(config, cluster(per_node=2, memory=least.reserved)))
    assert found.best is not None
    assert (whole.checkpointing, found.best.checkpointing) == ("none", "full")


def test_where_nothing_else_fits_the_optimizer_is_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, least = found_on(40, goal="memory")
    assert least.best is not None
    assert least.best.reserved is not None
    own, found = found_on((least.best.reserved - 1) / 2**30)
    assert found.best is not None
    assert found.plan is not None
    assert merged(own.config, found.best.overlay, tmp_path).parallel.deepspeed.offload_optimizer == "cpu"
    assert "host's memory" in found.best.why
    assert not any("doesn't fit" in warning for warning in found.plan.warnings)
    assert least.best.layout == "single", "the host is slower than anything that fits"
    of_shallow = _Search._simulated

    def too_little(finder: _Search, config: Config) -> Any:
        step = of_shallow(finder, config)
        return step._replace(reserved=int(0.97 * step.reserved))

    with monkeypatch.context() as patched:
        patched.setattr(_Search, "_simulated", too_little)
        assert search(own).best == found.best, "also if shallow models have promised that something else fits"


def test_axes_that_the_config_has_do_not_keep_a_search_from_offloading() -> None:
    divided = large(2, parallel={"strategy": "ddp", "tensor": 2}, model=sized(2))
    names = [name for name, config in _offloaded(divided) if config.parallel.tensor == 1]
    assert len(names) == len(list(_offloaded(divided))) > 0


def test_where_the_whole_model_takes_more_than_expected_a_smaller_micro_batch_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = estimator(large(1, "single", model=sized(8)), cluster(per_node=1, memory=int(6.5 * 2**30)))
    right = search(own).best
    of_shallow = _Search._simulated

    def too_little(finder: _Search, config: Config) -> Any:
        step = of_shallow(finder, config)
        return step._replace(reserved=int(0.85 * step.reserved))

    monkeypatch.setattr(_Search, "_simulated", too_little)
    found = search(own)
    assert found.best == right
    assert any(each.seconds is not None and "too much" in each.why for each in found.candidates)


def test_a_model_that_cannot_be_checkpointed_has_a_least_memory_too() -> None:
    _, found = found_on(40, goal="memory", layers=1)
    assert found.best is not None
    assert (found.best.micro_size, found.best.checkpointing) == (1, "none")


def test_what_takes_least_is_found_where_it_alone_fits() -> None:
    """Without checkpointing, casts of weights wait for the backward: the line of that mode isn't that of the others."""
    config = large(1, "auto", model=sized(6), memory={"loss_chunk": 64})
    least = search(estimator(config, cluster(per_node=1)), "memory").best
    assert least is not None
    assert least.reserved is not None
    found = search(estimator(config, cluster(per_node=1, memory=least.reserved)))
    assert found.best is not None
    assert (found.best.layout, found.best.checkpointing, found.best.micro_size) == ("single", "full", 1)


def test_what_fits_nowhere_is_shown_with_what_is_missing() -> None:
    _, found = found_on(0.3)
    assert found.best is None
    assert all(not each.fits for each in found.candidates)
    assert "no config fits" in describe(found, "time")
    missing = [each.reserved for each in found.candidates if each.reserved is not None]
    assert missing == sorted(missing)
    assert missing[0] > 0.3 * 2**30


def test_the_least_memory() -> None:
    _, fastest = found_on(40)
    _, smallest = found_on(40, goal="memory")
    assert smallest.best is not None
    assert fastest.best is not None
    assert (smallest.best.micro_size, smallest.best.checkpointing) == (1, "full")
    assert smallest.best.reserved < fastest.best.reserved


def test_shallow_models_stand_for_the_whole_one(tmp_path: Path) -> None:
    own, found = found_on(8, layers=12)
    [other, *_] = [each for each in found.candidates if each.fits]
    whole = merged(own.config, other.overlay, tmp_path)
    peak, step = replace(own, config=whole).simulated(whole)
    assert peak.reserved is not None
    assert step.seconds == pytest.approx(other.seconds, rel=0.02)
    assert peak.reserved.total == pytest.approx(other.reserved, rel=0.03)
    assert found.best is not None
    best = merged(own.config, found.best.overlay, tmp_path)
    exact, _ = replace(own, config=best).simulated(best)
    assert exact.reserved is not None
    assert found.best.reserved == exact.reserved.total, "the found one is simulated whole"


def test_an_overlay_sets_back_what_the_config_has(tmp_path: Path) -> None:
    config = large(4, parallel={"strategy": "fsdp", "tensor": 2, "fsdp": {"reduce_every": "micro-batch"}})
    plain = large(4, "ddp")
    overlay = overlay_of(config, plain)
    assert overlay["parallel"]["tensor"] == 1
    again = merged(config, overlay, tmp_path)
    assert (again.parallel.strategy, again.parallel.tensor) == ("ddp", 1)


def test_the_command_prints_an_overlay(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(
        json.dumps(large(1, "single", model=sized(2)).model_dump(mode="json", exclude_unset=True))
    )
    words = ("plan", "run.json", "--gpus", "H100:1", "--search")
    shown = run_lockstep(*words, "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    values = json.loads(shown.stdout)
    assert values["candidates"][0]["overlay"] == values["found"]
    (tmp_path / "found.yaml").write_text(yaml.safe_dump(values["found"]))
    planned = run_lockstep("plan", "run.json", "found.yaml", *words[2:4], "--peak", "planned", "--json", cwd=tmp_path)
    [row] = json.loads(planned.stdout)["strategies"]
    assert row["step_seconds"] == pytest.approx(values["candidates"][0]["step_seconds"])
    assert row["reserved_bytes"] == values["candidates"][0]["reserved_bytes"]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("--search",), "H100:8"),
        (("--gpus", "H100:8", "--goal", "memory"), "--search"),
        (("--gpus", "H100:8", "--search", "--goal", "cost"), "--price"),
        (("--gpus", "H100:8", "--nodes", "1,2", "--compare", "digits"), "--compare"),
        (("--gpus", "H100:8", "--nodes", "1,2", "--peak", "none"), "--peak none"),
        (("--gpus", "H100:8", "--nodes", "1-2"), "1,2,4"),
        (("--gpus", "H100:8,L4:8,L4:4", "--price", "2USD,1USD"), "3 GPUs"),
        (("--gpus", "H100:8,L4:8", "--price", "2USD,1EUR"), "one currency"),
        (("--gpus", "H100:8", "--search", "--peak", "planned"), "--peak"),
        (("--gpus", "H100:8", "--search", "--calibrate"), "--calibrate"),
        (("--calibrate", "--json"), "--json"),
        (("--html", "plan.html"), "--html"),
        (("--gpus", "H100:8", "--search", "--html", "plan.html"), "--html"),
        (("--calibrate", "--out", "absent/row.toml"), "absent/row.toml"),
    ],
)
def test_flags_without_an_effect_are_refused(words: tuple[str, ...], value: str, tmp_path: Path) -> None:
    done = run_lockstep("plan", "digits", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert value in done.stderr


def test_two_configs_side_by_side(tmp_path: Path) -> None:
    for name, mode in (("run", "none"), ("other", "full")):
        memory = {"activation_checkpointing": {"mode": mode}}
        values = large(1, "single", model=sized(2), memory=memory).model_dump(mode="json", exclude_unset=True)
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    words = ("plan", "run.json", "--compare", "other.json", "--gpus", "H100:1", "--price", "2USD")
    shown = run_lockstep(*words, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["run", "other"]
    first, second = json.loads(run_lockstep(*words, "--json", cwd=tmp_path).stdout)["compared"]
    assert first["reserved_bytes"] > second["reserved_bytes"]
    assert first["step_seconds"] < second["step_seconds"]
    record = lockstep.estimate(str(tmp_path / "other.json"), gpus="H100:1", price="2USD")
    assert {key: value for key, value in second.items() if key != "config"} == record.as_json()
    assert record.memory.time is not None
    assert record.costs["cost"] == pytest.approx(2 * record.costs["hours"])


def test_a_page_has_a_bar_for_each_row_and_marks_what_nothing_beats(tmp_path: Path) -> None:
    parts = {"matmul": 1.0, "communication": 0.5}
    time = StepTime(1.5, {**dict.fromkeys(SHARES, 0.0), **parts}, 0.0, 1.0, 0.4)
    rows = [("A", 1.0, 30.0), ("B", 2.0, 40.0), ("C <i>", 3.0, 20.0)]
    steps = [PlannedStep(label, time, "", hours, cost) for label, hours, cost in rows]
    text = write_plan(tmp_path / "plan.html", "a run", steps, "EUR").read_text()
    assert text.count("<rect x=") == 3 * 2
    assert text.count("matmul: 1,000.0 ms") == 3
    filled = re.findall(r'<circle [^>]* fill="(\S+)"', text)
    assert filled == ["var(--c0)", "none", "var(--c0)"], "B is slower and dearer than A"
    assert "C &lt;i&gt;" in text
    assert "<i>" not in text
    alone = write_plan(tmp_path / "one.html", "a run", steps[:1]).read_text()
    assert "<circle" not in alone


def test_a_search_on_the_cpu_counts_tensors() -> None:
    found = search(estimator(large(1, "auto", model=sized(2)), cluster(per_node=1, device="cpu")))
    assert found.best is not None
    assert (found.best.layout, found.best.checkpointing) == ("single", "none")


def test_hours_are_left_out_where_the_length_is_unknown() -> None:
    known, unknown = (
        row_on(estimator(large(1, "single", model=sized(2), run=run), cluster(per_node=1)), None)
        for run in ({"steps": 10}, {"epochs": 3})
    )
    assert known.as_json()["hours"] > 0
    assert "hours" not in unknown.as_json(), "the data isn't here: an epoch may have any length"
    assert unknown.as_json()["tokens_per_second"] == pytest.approx(known.as_json()["tokens_per_second"])
    assert NO_LENGTH in describe_clusters([unknown], None)
    assert NO_LENGTH not in describe_clusters([known], None)


@pytest.mark.drill
def test_several_clusters_have_a_row_each(tmp_path: Path) -> None:
    values = large(1, "auto", model=sized(2)).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "run.json").write_text(json.dumps(values))
    words = ("plan", "run.json", "--gpus", "H100:1,L4:2", "--nodes", "1,2", "--price", "10USD,0.5USD", "--search")
    rows = {}
    for goal in ("time", "cost"):
        shown = run_lockstep(*words, "--goal", goal, "--json", cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        rows[goal] = json.loads(shown.stdout)["clusters"]
    of = [(row["gpu"], row["per_node"], row["nodes"]) for row in rows["time"]]
    assert of == [("H100", 1, 1), ("H100", 1, 2), ("L4", 2, 1), ("L4", 2, 2)]
    for goal, key in (("time", "step_seconds"), ("cost", "cost")):
        [best] = [row for row in rows[goal] if row["best"]]
        assert best[key] == min(row[key] for row in rows[goal])
    own, cheapest = rows["time"][0], next(row for row in rows["cost"] if row["best"])
    assert own["cost"] == pytest.approx(10 * own["hours"])
    assert cheapest["gpu"] == "L4", "twenty times cheaper, and not twenty times slower"
    (tmp_path / "found.yaml").write_text(yaml.safe_dump(own["found"]))
    alone = run_lockstep(
        "plan", "run.json", "found.yaml", "--gpus", "H100:1", "--peak", "planned", "--json", cwd=tmp_path
    )
    assert json.loads(alone.stdout)["strategies"][0]["step_seconds"] == pytest.approx(own["step_seconds"])
    text = run_lockstep(*words, cwd=tmp_path).stdout
    assert [line.endswith("<-") for line in text.splitlines()[2:6]].count(True) == 1


def test_a_cluster_that_cannot_train_the_run_says_why(tmp_path: Path) -> None:
    parallel = {"strategy": "ddp", "tensor": 4}
    values = large(4, parallel=parallel, model=sized(2)).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "run.json").write_text(json.dumps(values))
    words = ("plan", "run.json", "--nodes", "1", "--json")
    shown = run_lockstep(*words, "--gpus", "H100:4,H100:2", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    first, second = json.loads(shown.stdout)["clusters"]
    found, refused = shown.stderr.splitlines()
    assert gives(found, "1 of 2", "4 x H100", f"{1000 * first['step_seconds']:,.1f} ms")
    assert gives(refused, "2 of 2", "2 x H100", "Start 4 ranks")
    assert (first["fits"], first["best"]) == (True, True)
    assert (second["fits"], second["best"]) == (False, False)
    assert "Start 4 ranks" in second["note"]
    nowhere = run_lockstep(*words, "--gpus", "H100:2,L4:2", cwd=tmp_path)
    assert (nowhere.returncode, nowhere.stdout) == (2, ""), "the reason that all have is the error"
    assert "Start 4 ranks" in nowhere.stderr
    small = run_lockstep(*words, "--gpus", "H100:4,L4:4", "--memory", "1100MiB", cwd=tmp_path)
    assert small.returncode == 1, "it fits nowhere"
    assert not any(row["fits"] or row["best"] for row in json.loads(small.stdout)["clusters"])

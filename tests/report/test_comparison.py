"""Runs side by side: what differs, what is equal but for the seed, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.failures import fails, gives
from kit.pages import Page, interval, write_intervals

from lockstep.cli.main import main
from lockstep.core.errors import ConfigError
from lockstep.monitor.attempts import Attempt, attempts_text
from lockstep.report.comparison import as_json, clipped, compare, comparison_charts, compose_comparison, text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
STEPS = range(10, 201, 10)
NASTY = "</script><b>\"'Ünï\x1b[2J" + "名" * 180


def write_run(folder: Path, *, last: float = 1.0, seed: int = 1, finished: bool = True, **sections: Any) -> Path:
    """A run whose loss falls from 5 to `last`, with an evaluation each 50 steps."""
    folder.mkdir(parents=True)
    config = {"optim": {"lr": 0.01}, "run": {"seed": seed, "folder": str(folder), "steps": 200}}
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.lock").touch()
    lines = [
        {"step": step, "samples": 8 * step, "loss": last + (5 - last) * (1 - step / 200), "grad_norm": 1.0, "lr": 0.01,
         "loss_scale": 1.0, "seconds": step / 10, "samples_per_second": 80.0, "tokens_per_second": 800.0}
        for step in STEPS
    ]  # fmt: skip
    events = [
        {"evaluation": "held-out", "step": step, "loss": last + 0.5, "accuracy": 0.9} for step in range(50, 201, 50)
    ]
    for name, records in (("metrics.jsonl", lines), ("events.jsonl", events)):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    write_intervals(folder, [interval(step) for step in STEPS])
    if finished:
        facts = {"ranks": 2, "peak_flops": 1e9, "flops_per_token": 1e6}
        attempt = Attempt(launched=1e9, began=1e9 + 5, hosts=(("a", 2),), facts=facts)
        (folder / "attempts.jsonl").write_text(attempts_text([attempt]))
        (folder / "summary.json").write_text(json.dumps({"seconds": 20.0, "steps": 200}))
    return folder


def append(file: Path, *records: dict[str, Any]) -> None:
    with file.open("a") as handle:
        handle.writelines(json.dumps(record) + "\n" for record in records)


# --- figures, configs, seeds -----------------------------------------------------------------------------------------


def test_final_figures_stand_side_by_side(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", last=2.0, finished=False)
    rows = compare([a, b]).figure_rows()
    table = {name: values for name, *values in rows[1:]}
    assert rows[0] == ["Final", "a", "b"]
    assert table["training loss"] == ["1", "2"]
    assert table["held-out loss"] == ["1.5", "2.5"]
    assert table["held-out accuracy"] == ["90.00 %", "90.00 %"]
    assert table["step time"] == ["51.2 ms", "51.2 ms"]
    assert (table["samples/s"], table["tokens/s"]) == (["80.0", "80.0"], ["800", "800"])
    assert table["MFU"] == ["40.00 %", "–"]  # 800 tokens/s x 1 MFLOP / (2 x 1 GFLOP/s)
    assert table["time in backward"] == ["58.59 %", "58.59 %"]
    assert table["memory, most of a rank"] == ["260 MiB", "260 MiB"]
    assert table["duration"] == ["20.0 s", "20.0 s"]
    assert table["attempts"] == ["1", "1"]


def test_only_keys_that_differ_are_shown_dotted_and_without_secrets(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", data={"train": [{"path": "x", "weight": 1}], "token": "hf_" + "a" * 30})
    b = write_run(tmp_path / "b", data={"train": [{"path": "y", "weight": 1}], "token": "hf_" + "b" * 30}, seed=2)
    (b / "config.yaml").write_text((b / "config.yaml").read_text() + "extra: null\n")
    differences = compare([a, b]).differences
    assert differences == {"data.train.0.path": ("x", "y"), "run.seed": ("1", "2"), "extra": (None, "null")}


def test_of_the_surroundings_what_differs_is_shown(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    for run, version in ((a, "2.11.0"), (b, "2.13.0")):
        (run / "environment.json").write_text(
            json.dumps({"packages": {"torch": version}, "host": "h", "created": run.name})
        )
    assert compare([a, b]).differences == {"environment: packages": ('{"torch": "2.11.0"}', '{"torch": "2.13.0"}')}


def test_runs_that_differ_in_seed_and_folder_alone_are_a_group(tmp_path: Path) -> None:
    losses = {(lr, seed): lr * 10 + seed for lr in (0.01, 0.03) for seed in (1, 2, 3)}
    runs = [
        write_run(tmp_path / f"{lr}-{seed}", last=loss, seed=seed, optim={"lr": lr})
        for (lr, seed), loss in losses.items()
    ]
    comparison = compare(runs)
    assert [(group.name, group.seeds) for group in comparison.groups] == [
        ("optim.lr=0.01", ["1", "2", "3"]),
        ("optim.lr=0.03", ["1", "2", "3"]),
    ]
    mean, deviation, number = comparison.groups[1].figures["training loss"]
    of_group = [loss for (lr, _), loss in losses.items() if lr == 0.03]
    assert (mean.value, deviation.value) == pytest.approx((statistics.mean(of_group), statistics.stdev(of_group)))
    assert number == 3
    assert ["training loss", "2.1 ± 1", "2.3 ± 1"] in comparison.seed_rows()
    colors = [series.color for series in comparison_charts(comparison)[0].series]
    assert colors == [0, 0, 0, 1, 1, 1]


def test_without_seeds_there_are_no_statistics(tmp_path: Path) -> None:
    comparison = compare([write_run(tmp_path / "a"), write_run(tmp_path / "b", optim={"lr": 0.1})])
    assert comparison.seed_rows() == []


# --- curves ----------------------------------------------------------------------------------------------------------


def test_each_run_has_a_color_and_dash_of_its_own_and_its_restarts(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{number:02}", optim={"lr": number}) for number in range(14)]
    append(
        runs[3] / "events.jsonl", {"resumed": 100, "step": 100, "ranks": 2}, {"resumed": 150, "step": 150, "ranks": 2}
    )
    (runs[3] / "earlier" / "1").mkdir(parents=True)
    append(runs[3] / "earlier" / "1" / "metrics.jsonl", {"step": 110, "loss": 4.0}, {"step": 130, "loss": 4.0})
    comparison = compare(runs)
    charts = comparison_charts(comparison)
    assert [chart.title for chart in charts] == [
        *("Training loss", "Held-out loss", "Held-out accuracy", "Gradient norm", "Learning rate", "Tokens per second")
    ]
    page = Page(compose_comparison(comparison))
    lines = [str(a["class"]) for tag, a in page.elements if tag == "path" and "data-points" in a]
    assert len(set(lines[:14])) == 14
    assert "at 100, 150 from 130 to 100" in page.text
    assert "from 1 (run-00) to 1 (run-00)" in page.text


def test_noisy_curves_are_medians_that_keep_their_gaps(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in "ab"]
    for run in runs:
        noise = [{"step": s, "loss": None if 300 < s < 310 else 2 + s % 2, "lr": 0.1} for s in range(1, 1001)]
        (run / "metrics.jsonl").write_text("")
        append(run / "metrics.jsonl", *noise)
    chart = comparison_charts(compare(runs))[0]
    assert "Running medians." in chart.notes
    assert np.isnan(chart.series[-1].values[(chart.series[-1].steps > 300) & (chart.series[-1].steps < 310)]).all()
    assert "Not finite, shaded: 9 values of b." in chart.notes


# --- what is refused, damaged, or nasty -------------------------------------------------------------------------------


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a = write_run(tmp_path / "runs" / "a")
    with fails(ConfigError, "no run"):
        compare([])
    with fails(ConfigError, a, "lockstep report"):
        compare([a])
    with fails(ConfigError, a, "more than once"):
        compare([a, a.parent / "." / "a"])
    with fails(ConfigError, tmp_path):
        compare([a, tmp_path])
    many = [write_run(tmp_path / "many" / str(number)) for number in range(65)]
    with fails(ConfigError, 65, 64):
        compare(many)


def test_names_that_are_alike_or_nasty_are_told_apart_and_never_become_markup(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / folder / NASTY.replace("/", "-")[:60]) for folder in ("x", "y")]
    append(runs[0] / "events.jsonl", {"evaluation": NASTY, "step": 10, "loss": 1.0})
    append(runs[1] / "events.jsonl", {"evaluation": NASTY, "step": 10, "loss": 1.0})
    (runs[1] / "config.yaml").write_text(json.dumps({NASTY: NASTY}))
    comparison = compare(runs)
    assert len({run.label for run in comparison.runs}) == 2
    page = Page(compose_comparison(comparison))
    assert (page.open, len(page.scripts)) == ([], 1)
    assert "\x1b" not in text(comparison, 80)
    assert max(map(len, text(comparison, 80).splitlines())) <= 80
    json.dumps(as_json(comparison))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n'),
        ("metrics.jsonl", "".join(f'{{"step": {step}, "loss": null}}\n' for step in range(300))),
        ("metrics.jsonl", "\x00\x01{]\n[]\n{"),
        ("metrics.jsonl", ""),
        ("events.jsonl", ""),
        ("config.yaml", "a: ["),
        ("config.yaml", ""),
        ("summary.json", "{"),
        ("ranks.jsonl", "{}\n[]\n"),
        ("environment.json", '{"packages": [[[1]]], "git": null}'),
    ],
)
def test_a_damaged_or_empty_run_is_compared_as_far_as_it_goes(tmp_path: Path, name: str, content: str) -> None:
    a, b, damaged = (write_run(tmp_path / run) for run in ("a", "b", "damaged"))
    (damaged / name).write_text(content)
    comparison = compare([a, b, damaged])
    page = Page(compose_comparison(comparison))
    assert page.open == []
    assert len(page.charts()) >= 5
    assert "damaged" in text(comparison, None)
    json.dumps(as_json(comparison))
    if name == "config.yaml":
        assert len(comparison.groups) == 2, "an unknown config equals none"
        assert "nothing is known of how these differ: damaged" in page.text


METRICS = st.dictionaries(st.sampled_from(["step", "loss", "lr", "seconds", "samples", "samples_per_second"]), VALUES)
EVENTS = st.dictionaries(st.sampled_from(["step", "evaluation", "loss", "logged", "resumed", "saved"]), VALUES)
ATTEMPTS = st.dictionaries(
    st.sampled_from(["attempt", "launched", "began", "hosts", "ranks", "peak_flops", "flops_per_token", "plan"]), VALUES
)
RANKS = st.dictionaries(st.sampled_from(list(interval(10))), VALUES).map(lambda changes: {**interval(10), **changes})


def lines(records: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[str]:
    return st.lists(records.map(json.dumps), max_size=5).map("\n".join)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    metrics=lines(METRICS),
    events=lines(EVENTS),
    ranks=lines(RANKS),
    attempts=lines(ATTEMPTS),
    summary=EVENTS,
    config=METRICS,
)
def test_no_content_of_the_files_stops_a_comparison(
    tmp_path: Path,
    metrics: str,
    events: str,
    ranks: str,
    attempts: str,
    summary: dict[str, Any],
    config: dict[str, Any],
) -> None:
    shutil.rmtree(tmp_path / "b", ignore_errors=True)
    a = tmp_path / "a" if (tmp_path / "a").exists() else write_run(tmp_path / "a")
    b = write_run(tmp_path / "b")
    files = {"metrics": metrics, "events": events, "ranks": ranks, "attempts": attempts}
    for name, content in ((f"{stem}.jsonl", content) for stem, content in files.items()):
        (b / name).write_text((b / name).read_text() + content)
    (b / "summary.json").write_text(json.dumps(summary))
    (b / "config.yaml").write_text(json.dumps(config))
    comparison = compare([a, b])
    assert Page(compose_comparison(comparison)).open == []
    assert max(map(len, text(comparison, 60).splitlines())) <= 60
    json.dumps(as_json(comparison))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_takes_runs_and_folders_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        write_run(tmp_path / "sweep" / f"seed-{seed}", seed=seed)
    alone = write_run(tmp_path / "alone", optim={"lr": 0.5}, finished=False)
    output = tmp_path / "page.html"
    assert main(["compare", str(tmp_path / "sweep"), str(alone), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["Final", "sweep/seed-1", "sweep/seed-2", "alone"]
    assert "optim.lr=0.01 (n = 2)" in printed
    assert printed.splitlines()[-1] == str(output)
    assert Page(output.read_text()).charts()
    assert main(["compare", str(tmp_path / "sweep"), str(alone), "--output", str(output), "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(run["label"], run["state"], run["group"]) for run in record["runs"]] == [
        ("sweep/seed-1", "done", 0),
        ("sweep/seed-2", "done", 0),
        ("alone", "stopped", 1),
    ]
    assert record["groups"][0]["figures"]["training loss"] == {"mean": 1.0, "deviation": 0.0, "n": 2}
    assert record["differences"]["optim.lr"] == {"sweep/seed-1": "0.01", "sweep/seed-2": "0.01", "alone": "0.5"}


def test_a_folder_that_can_t_be_written_lacks_the_page_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(write_run(tmp_path / f"seed-{seed}", seed=seed)) for seed in (1, 2)]
    with (tmp_path / "seed-1" / "metrics.jsonl").open("a") as metrics:
        metrics.write("damaged\n")

    def refused(path: Path, text: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("lockstep.report.html.write_atomically", refused)
    assert main(["compare", *runs]) == 0
    printed = capsys.readouterr()
    assert "training loss" in printed.out
    assert gives(printed.out, 1, "metrics.jsonl")
    assert gives(printed.err, os.strerror(errno.EROFS), "--output FILE")
    assert main(["compare", *runs, "--output", str(tmp_path / "page.html")]) == 1
    printed = capsys.readouterr()
    assert "training loss" in printed.out
    assert "Read-only file system" in printed.err


def test_for_another_program_runs_are_in_blocks_and_nothing_is_cut(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{'long' * 7}-{number}", seed=number, optim={"lr": number}) for number in range(8)]
    printed = text(compare(runs), None)
    assert max(map(len, printed.splitlines())) <= 100
    assert "…" not in printed
    assert all(run.name in printed for run in runs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no run to compare"),
        (["run"], "is a single run"),
        (["nowhere"], "there is no folder nowhere"),
        (["empty"], "empty is neither the folder of a run nor one with runs in it"),
        (["run", "s3://bucket"], "s3://bucket"),
    ],
)
def test_the_command_refuses_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "compare.html").exists()


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("stdlib-lm-20260101-120000", "stdlib-lm-20260102-120000", "my-sweep/0", "my-sweep/1", "other"):
        write_run(tmp_path / "runs" / name)
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    commands = re.findall(r"^lockstep (.*)$", page, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["report"] * 2 + ["compare"] * 3 + ["explain"]
    for command in commands:
        words = command.replace("s3://bucket/", "").split()  # tests of stored runs have addresses
        assert main(words) == 0, command
    assert {"compare.html", "mine.html"} <= {entry.name for entry in tmp_path.iterdir()}


def test_a_terminals_width_cuts_tables_into_blocks(tmp_path: Path) -> None:
    comparison = compare(
        [write_run(tmp_path / f"a-rather-long-name-{n}", last=n, optim={"lr": n}) for n in range(1, 7)]
    )
    for width in (40, 80, 200):
        lines = text(comparison, width).splitlines()
        assert max(map(len, lines)) <= width
        for number in range(1, 7):
            assert any(f"a-rather-long-name-{number}" in line for line in lines), width


def test_what_is_clipped_keeps_both_ends() -> None:
    assert clipped("abcdefghij", 10) == "abcdefghij"
    assert clipped("abcdefghijk", 10) == "abcd…ghijk"


def test_a_comparison_needs_no_torch(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    code = "import sys; from lockstep.cli.compare import run; run(sys.argv[1:]); print('torch' in sys.modules)"
    words = [sys.executable, "-c", code, str(a), str(b), "--output", str(tmp_path / "page.html")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"

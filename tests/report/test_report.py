"""The report: one file that shows the run, whatever is left of it, and executes nothing that the run wrote."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.failures import fails, gives
from kit.pages import Happening, Page, evaluated, logged, make_run, page_of, resumed, saved
from kit.reports import report

from lockstep.cli import report as verb
from lockstep.cli.main import main
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.records import Verdict
from lockstep.launch.ends import End
from lockstep.launch.ends_file import append_ends
from lockstep.launch.outcome import LaunchResult
from lockstep.monitor.folder import RunFolder
from lockstep.monitor.metric_log import Logged
from lockstep.report import write_report

# --- what is shown --------------------------------------------------------------------------------------------------


def test_a_finished_run_is_shown_in_figures_and_curves(tmp_path: Path) -> None:
    happenings = {
        step: [evaluated("held-out", step, loss=2.0 - step / 30, accuracy=step / 40), saved(step)]
        for step in (10, 20, 30)
    }
    page = page_of(make_run(tmp_path, happenings=happenings))
    assert "Finished" in page.text
    assert "not finished" not in page.text
    for words in (
        "Learns to read",
        "Training loss 1.033 at step 30",
        "Held-out loss 1 at step 30",
        "Held-out accuracy 75.00 % at step 30",
        "Time 3.25 s",
        "Throughput 164k tokens/s, median",
        "Steps 30 Samples 1,920 Tokens 491,520 Parameters 313,216 Global batch 64 samples",
        "Ranks 2 Strategy ddp over gloo Device cpu Precision bf16 Restarts 0 Discarded updates 0",
        "held-out 30 1 75.00 %",
        "Saved 3 times, last after step 30: 1.00 MiB in 0.20 s each (median). Training waited 0.03 s.",
        "lr: 0.0003",
    ):
        assert words in page.text, words
    assert [title.partition(".")[0] for title in page.charts()] == [
        *("Loss", "Accuracy", "Gradient norm", "Learning rate", "Tokens per second")
    ]
    assert page.charts()[0].startswith("Loss. From 2 to 1.033; lowest 1.033 at step 30, highest 2 at step 1")
    assert page.charts()[1].startswith("Accuracy. From 25.00 % to 75.00 %")
    assert page.count("save") == 5 * 3 + 1  # in each chart, and in the key


def test_without_tokens_the_throughput_is_of_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    alike = [json.dumps({**line, "tokens_per_second": line["samples_per_second"]}) for line in lines]
    (run / "metrics.jsonl").write_text("\n".join(alike) + "\n")
    assert page_of(run).charts()[-1] == "Samples per second. Always 640"


def test_each_set_has_its_row_and_its_curve(tmp_path: Path) -> None:
    happenings = {
        step: [evaluated("held-out", step, loss=2.0, perplexity=7.4), evaluated("code", step, loss=1.5)]
        for step in (10, 30)
    }
    page = page_of(make_run(tmp_path, happenings=happenings))
    assert "training 1.033 held-out 2 code 1.5" in page.text
    assert "Set step loss perplexity held-out 30 2 7.4 code 30 1.5" in page.text


def test_restarts_are_marked_in_every_chart_and_listed(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, happenings={10: [resumed(10, 2)], 20: [resumed(20, 4), resumed(20, 4)]}))
    assert page.count("restart") == len(page.charts()) * 2
    assert (
        "startup Not recorded 10 2 Not recorded 20 4 Not recorded 20 4 "
        "The ranks were started again 3 times, from step 10, 20, 20." in page.text
    )
    assert "Time 3.25 s over 4 attempts" in page.text


def test_a_save_that_failed_is_marked_and_listed(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, happenings={10: [saved(10)], 20: [saved(20, "No space left on device")]}))
    assert page.count("failed") == len(page.charts()) + 1
    assert gives(page.text, "step 10", "1 of 2", "step 20", "No space left")


def test_discarded_updates_are_marked_and_listed(tmp_path: Path) -> None:
    def discard(step: int, verdict: Verdict) -> Happening:
        return lambda log: log.see(report(step, verdict=verdict, grad_norm=math.inf, loss=math.nan))

    run = make_run(
        tmp_path, happenings={30: [discard(31, Verdict.NON_FINITE), discard(32, Verdict.OVERFLOW)]}, grad_norm=0.5
    )
    page = page_of(run)
    assert page.count("discarded") == len(page.charts()) * 2 + 1
    assert "Discarded updates: 1 × gradient not finite, 1 × fp16 overflow, between step 31 and 32." in page.text
    assert "at step 32" not in page.text.partition("Throughput")[0]
    assert re.search(r"Training loss [\d.]+ at step 30", page.text)


def test_values_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    run = make_run(tmp_path, happenings={30: [lambda log: log.see(report(31, loss=math.nan))]}, steps=30)
    text = write_report(run).read_text()
    assert "Not finite, shaded: 1 value of training." in Page(text).text
    assert text.count('class="gap" d="M1000 0H1000v') == 1


def test_a_run_of_one_update_is_a_dot(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, steps=1))
    assert page.charts()[0] == "Loss. Always 2"


def test_what_users_logged_is_drawn(tmp_path: Path) -> None:
    values = {step: [lambda log, step=step: log.logged(step, Logged({"expert_load": step / 100}))] for step in (5, 10)}
    page = page_of(make_run(tmp_path, happenings=values))
    assert page.charts()[-1] == "Expert load. From 0.05 to 0.1; lowest 0.05 at step 5, highest 0.1 at step 10"


def test_of_very_many_logged_values_some_are_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"logged": {f"value {number}": number for number in range(100)}, "step": 10}) + "\n")
    page = page_of(run)
    assert "76 more logged values are in events.jsonl." in page.text


def test_samples_are_shown_from_the_first_to_the_last(tmp_path: Path) -> None:
    page = page_of(
        make_run(tmp_path, happenings={step: [logged(step, sample=f"text {step}")] for step in range(1, 31)})
    )
    assert page.count("sample") == 6
    assert "step 1 · sample text 1" in page.text
    assert "step 30 · sample text 30" in page.text
    assert "24 more are in events.jsonl." in page.text


def test_config_and_environment_stand_in_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    surroundings = {
        "created": "2026-11-21T11:09:07+0100",
        "gpus": [{"name": "NVIDIA H200", "memory_bytes": 150_000_000_000}] * 8,
        "git": {"commit": "1aaa609", "branch": "main", "changed_files": 3},
        "command_line": ["lockstep", "train", "my run"],
        "variables": {"OMP_NUM_THREADS": "1"},
        "packages": {"torch": "2.13.0"},
    }
    (run / "environment.json").write_text(json.dumps(surroundings))
    text = page_of(run).text
    for words in (
        "Configuration, as resolved description: Learns to read optim: lr: 0.0003",
        "started 21 November 2026, 11:09 UTC+01:00",
        'gpus [{"name": "NVIDIA H200", "memory_bytes": 150000000000}',
        'git {"commit": "1aaa609", "branch": "main", "changed_files": 3}',
        'command line ["lockstep", "train", "my run"]',
        '"OMP_NUM_THREADS": "1"',
        'packages {"torch": "2.13.0"}',
    ):
        assert words in text, words


# --- what is missing or damaged -------------------------------------------------------------------------------------


def test_an_unfinished_run_names_the_command_that_resumes_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=17, finished=False, happenings={10: [saved(10)], 15: [saved(15, "full")]})
    text = page_of(run).text
    expected = (
        "This run was not finished when the report was made: step 17 of 30 is the last recorded. "
        f"lockstep train {run} resumes it from the save of step 10."
    )
    assert expected in text
    assert "Steps 17 Samples 1,088" in text
    assert "No evaluation is recorded." in text


def test_how_a_run_ended_is_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, steps=17, finished=False)
    attempt = {"launched": 1.0, "began": 2.0, "step": 0, "seconds": 0.0, "ranks": 2}
    (run / "attempts.jsonl").write_text(json.dumps({**attempt, "strategy": "ddp", "backend": "gloo"}) + "\n")
    text = "rank 0 was killed"
    end = End(FailureKind.KILLED, text, time=time.monotonic())
    append_ends(run / "logs", 0, [end], ["a"], LaunchResult(end.kind, text), {0: 0})
    assert verb.run([str(run)]) == 0
    text = Page((run / "report.html").read_text()).text
    assert "Not finished" in text
    assert "It failed: rank 0 was killed." in text
    assert "Strategy ddp over gloo" in text, "what its attempt resolved, not what was configured"
    summary = {"steps": 17, "ranks": 1, "stopped_early": "held-out.loss has not improved"}
    (run / "summary.json").write_text(json.dumps(summary))
    assert "It ended early: held-out.loss has not improved." in page_of(run).text
    assert verb.run([str(run)]) == 0
    assert Page((run / "report.html").read_text()).text.count("It ended early") == 1


def test_a_run_that_trains_is_not_to_be_resumed(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=17, finished=False, happenings={10: [saved(10)]})
    held = RunFolder.create(run, again=True)
    try:
        text = page_of(run).text
    finally:
        held.release()
    assert "Running" in text
    assert "This run was training when the report was made: step 17 of 30 is the last recorded. No eval" in text


@pytest.mark.parametrize("content", [None, b"", b'{"step": 10, "lo'])
def test_without_a_whole_line_there_is_still_a_report(tmp_path: Path, content: bytes | None) -> None:
    run = make_run(tmp_path, finished=False)
    (run / "metrics.jsonl").unlink()
    (run / "events.jsonl").unlink(missing_ok=True)
    if content is not None:
        (run / "metrics.jsonl").write_bytes(content)
    page = page_of(run)
    assert "This run was not finished when the report was made. No save is recorded." in page.text
    assert "No update is recorded: metrics.jsonl is missing or has no whole line." in page.text
    assert "There is no curve: no finite value is recorded." in page.text
    assert page.charts() == []


def test_damaged_lines_are_counted_and_the_others_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[4], lines[7] = b"\xff\xfe{]\n", b'{"step": "eight"}\n'
    (run / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"step": 31, "loss": 1')
    page = page_of(run)
    assert gives(page.text, "2 lines", "metrics.jsonl", "line 5")
    assert "From 2 to 1.033" in page.charts()[0]


@pytest.mark.parametrize(
    ("name", "content", "flaw"),
    [
        ("summary.json", "{", "summary.json is damaged and left out."),
        ("environment.json", "[1]", "environment.json is damaged and left out."),
        ("config.yaml", "a: [", "config.yaml is damaged; it is shown as it is."),
        ("config.yaml", "!!int ''", "config.yaml is damaged; it is shown as it is."),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, flaw: str) -> None:
    run = make_run(tmp_path)
    (run / name).write_text(content)
    assert flaw in page_of(run).text


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just(10**400)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = (
    *("step", "loss", "grad_norm", "lr", "kept", "verdict", "seconds", "tokens", "samples", "tokens_per_second"),
    *("evaluation", "logged", "resumed", "saved", "ranks", "bytes", "failure", "created", "command_line", "gpus"),
)
RECORD = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8)
WITH_STEP = st.builds(lambda record, step: {**record, "step": step}, RECORD, st.integers(0, 2**60))
LINES = st.lists(WITH_STEP.map(json.dumps) | st.text(max_size=10), max_size=6).map("\n".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(metrics=LINES, events=LINES, summary=RECORD, around=RECORD, config=st.text(max_size=30) | RECORD.map(json.dumps))
def test_no_content_of_the_files_stops_a_report(
    tmp_path: Path, metrics: str, events: str, summary: dict[str, object], around: dict[str, object], config: str
) -> None:
    contents = {
        "run.lock": "",
        "metrics.jsonl": metrics,
        "events.jsonl": events,
        "summary.json": json.dumps(summary),
        "environment.json": json.dumps(around),
        "config.yaml": config,
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8", errors="replace")
    page = page_of(tmp_path)
    assert page.open == []
    assert len(page.scripts) == 1


# --- one file, and safe ---------------------------------------------------------------------------------------------


def test_nothing_that_a_run_wrote_is_executed(tmp_path: Path) -> None:
    attack = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\"' onload=alert(3) \ud800"
    happenings: dict[int, Iterable[Happening]] = {
        10: [
            logged(10, **{attack: attack}),
            evaluated(attack, 10, **{"loss": 1.0, attack: 2.0}),
            saved(10, attack),
            lambda log: log.logged(10, Logged({attack: 1.0})),
        ],
        20: [evaluated(attack, 20, **{"loss": 1.0, attack: 2.0})],
    }
    run = make_run(tmp_path, happenings=happenings)
    (run / "config.yaml").write_text(json.dumps({"description": attack, attack: attack}))
    (run / "environment.json").write_text(json.dumps({attack: attack, "variables": {attack: attack}}))
    page = page_of(run)
    assert [tag for tag, _ in page.elements if tag in ("script", "img", "iframe", "link")] == ["script"]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.open == []
    assert page.text.count("alert(1)") >= 6


def test_only_its_own_script_may_run_and_nothing_is_fetched(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    (script,) = page.scripts
    (policy,) = (a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    named = {name for _, attributes in page.elements for name in attributes}
    assert not named & {"src", "href", "srcset", "data"}
    assert not re.search(r"url\(|@import|@font-face", write_report(tmp_path / "run").read_text())


@pytest.mark.drill
def test_a_million_lines_make_a_small_page_on_which_a_spike_is_seen(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    line = '{"step": %d, "loss": %s, "grad_norm": %.4f, "lr": 0.001, "loss_scale": 1, '
    line += '"samples_per_second": %d, "tokens_per_second": %d, "kept": true}\n'
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 1_000_001):
            loss = "9.75" if step == 654_321 else f"{2 + step % 7 / 10}"
            file.write(line % (step, loss, step % 11 / 10, 900 + step % 13, 9000 + step % 17))
    written = write_report(run)
    assert written.stat().st_size < 500_000
    text = written.read_text()
    assert "Steps 30" in Page(text).text  # the summary's
    assert " 9.75," in text
    assert gives(text, 2.1, 2.1, 2, "step 7")
    assert gives(text, "40,001 values")


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_into_the_run_and_prints_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    assert main(["report", str(run), "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"run": str(run), "report": str(run / "report.html"), "finished": True}
    assert Page((run / "report.html").read_text()).charts()


def test_the_command_writes_to_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    assert verb.run([str(run), "--output", str(tmp_path / "mine.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mine.html'}\n"
    assert not (run / "report.html").exists()
    with fails(RunFailed, tmp_path / "nowhere" / "mine.html", os.strerror(errno.ENOENT)):
        write_report(run, tmp_path / "nowhere" / "mine.html")
    with fails(RunFailed, run, os.strerror(errno.EISDIR)):
        write_report(run, run)


def test_a_folder_that_is_not_a_run_is_refused_with_the_run_that_may_be_meant(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with fails(ConfigError, tmp_path / "run2", f"{run}?"):
        write_report(tmp_path / "run2")
    with fails(ConfigError, run / "logs"):
        write_report(run / "logs")


def test_a_file_that_the_system_refuses_to_read_is_named_with_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with fails(RunFailed, run / "metrics.jsonl", os.strerror(errno.EISDIR)):
        write_report(run)


def test_no_torch_is_needed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    code = "import sys; from lockstep.cli.report import run; run(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"

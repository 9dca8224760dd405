"""`lockstep top`: one screen shows a run of any size, live in a terminal and once without."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.cli.main import main
from lockstep.looking.screen import draw, sparkline
from lockstep.looking.watched import event_text, watch
from lockstep.monitor.attempts import Attempt, attempts_text

PHASES = ("forward", "backward", "communication")


def make_run(path: Path, ranks: int = 2, *, per_host: int = 8, age: float = 0.0, silent: tuple[int, ...] = ()) -> Path:
    """Write the files of a run that is running on another host; rank 1 is a straggler."""
    path.mkdir(parents=True)
    began = time.time() - age - 20
    (path / "attempts.jsonl").write_text(attempts_text([Attempt(began, began, facts={"steps": 300})]))
    (path / "run.lock").write_text("process 9 on host-0, since 2026-11-21 09:30:00\n")
    (path / "environment.json").write_text('{"host": "host-0"}')
    losses = [*(4.0 / step for step in range(1, 120)), math.nan]
    lines = [
        {"step": step, "loss": None if math.isnan(loss) else loss, "grad_norm": 0.5, "lr": 1e-3, "seconds": step / 10}
        | {"samples_per_second": 640.0, "tokens_per_second": 24500.0, "discarded": 1}
        for step, loss in enumerate(losses, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (path / "events.jsonl").write_text(
        '{"resumed": 50, "step": 50, "ranks": 2}\n{"evaluation": "held-out", "step": 100, "loss": 0.5, "seconds": 1}\n'
        '{"saved": 100, "step": 100, "bytes": 2048, "seconds": 0.25, "lost_seconds": 0}\n'
    )
    rows = [
        {"rank": rank, "host": f"host-{rank // per_host}", "step": 120, "phase": PHASES[rank % 3], "phase_seconds": 0.2}
        | {"silent": 45.0 if rank in silent else 0.5, "step_seconds": 0.1, "slowest": 0.12}
        | {"split": {"forward": 0.06, "backward": 0.04}, "gauges": {"memory_allocated": 2.0**30}}
        for rank in range(ranks)
    ]
    stragglers = [{"rank": 1, "host": "host-0", "ratio": 1.71, "phase": "data"}]
    live = {"time": time.time() - age, "step": 120, "ranks": rows, "stragglers": stragglers}
    (path / "live.json").write_text(json.dumps(live))
    return path


def screen(run: Path, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(draw(watch(run), console))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


def test_a_small_run_is_shown_whole(tmp_path: Path) -> None:
    lines = screen(make_run(tmp_path / "run"), 120)
    assert lines[0].endswith("run  running  2 ranks on host-0")
    assert lines[1] == "The loss is not finite from step 120 on"
    assert re.fullmatch(r"120/300 ━+╸? *40 %  0:1[89] left", lines[2])
    assert lines[3].startswith("24.5k tokens/s  100 ms a step  grad norm 0.5  lr 0.001  goodput ")
    assert re.fullmatch(r"loss [▁-█]+x 4 to 0.03361", lines[4])
    assert lines[5] == "time forward 60 %  backward 40 %"
    assert [line.split() for line in lines[7:10]] == [
        ["rank", "host", "step", "phase", "for", "mean", "p95", "memory"],
        ["0", "host-0", "120", "forward", *lines[8].split()[4:6], "100", "ms", "120", "ms", "1.00", "GiB"],
        [
            "1",
            "host-0",
            "120",
            "backward",
            *lines[9].split()[4:6],
            "100",
            "ms",
            "120",
            "ms",
            "1.00",
            "GiB",
            "1.7x",
            "data",
        ],
    ]
    assert lines[-3:] == [
        "step 50: resumed on 2 ranks",
        "step 100: evaluation held-out: loss 0.5",
        "step 100: saved 2.00 KiB in 0.25 s",
    ]


def test_a_phase_lasts_as_long_as_it_was_posted_unless_the_rank_is_stuck_in_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", age=5.0)
    content = json.loads((run / "live.json").read_text())
    content["ranks"][0] |= {"phase_seconds": 0.52, "silent": 0.5}  # updates have passed since
    content["ranks"][1] |= {"phase_seconds": 60.5, "silent": 0.5}
    (run / "live.json").write_text(json.dumps(content))
    seconds = [rank.phase_seconds for rank in watch(run).ranks]
    assert seconds[0] == pytest.approx(0.02)
    assert 65 < seconds[1] < 75


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_of_hundreds_of_ranks_the_worst_are_shown(tmp_path: Path, width: int, height: int) -> None:
    lines = screen(make_run(tmp_path / "run", ranks=512, silent=(300, 301)), width, height)
    assert len(lines) < height
    assert lines[0].endswith("512 ranks on 64 hosts")
    ranks = [line.split() for line in lines if re.match(r" *\d+  host", line)]
    assert [rank[0] for rank in ranks[:3]] == ["300", "301", "1"]
    assert ranks[0][-3] == "silent"
    assert f"{len(ranks)} of 512 ranks, the worst first" in lines


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_narrow_screen_lacks_columns_and_marks_what_is_cut(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    run = make_run(tmp_path / "run", ranks=4)
    whole, cut = screen(run, 300), screen(run, width)
    head = next(line for line in cut if line.startswith("rank")).split()
    assert head[0] == "rank"
    assert set(head) <= set(next(line for line in whole if line.startswith("rank")).split())
    words = {word for line in whole for word in line.split()}
    for line in cut[1:]:
        assert "…" in line or set(line.split()) <= words or "━" in line or line.startswith("loss"), line


def test_gpus_of_several_hosts_have_their_columns(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ranks=4, per_host=2)
    content = json.loads((run / "live.json").read_text())
    for number, row in enumerate(content["ranks"]):
        row["gauges"] = {"gpu_utilization": 97.0 - number, "memory_allocated": 2.0**33, "gpu_memory_total": 8e10}
    (run / "live.json").write_text(json.dumps(content))
    facts = {"steps": 300, "flops_per_token": 6e9, "peak_flops": 1e15, "ranks": 4}
    now = time.time()
    attempt = Attempt(launched=now - 24, began=now - 20, hosts=(("host-0", 2), ("host-1", 2)), facts=facts)
    (run / "attempts.jsonl").write_text(attempts_text([attempt]))
    lines = screen(run, 140)
    assert lines[0].endswith("4 ranks on 2 hosts")
    table = [line.split() for line in lines if re.match(r" *(rank|\d) +host", line)]
    assert table[0] == ["rank", "host", "step", "phase", "for", "mean", "p95", "memory", "GPU"]
    assert [row[1] for row in table[1:]] == ["host-0", "host-0", "host-1", "host-1"]
    assert [row[-2:] for row in table[1:]] == [[f"{97 - rank}", "%"] for rank in range(4)]
    assert "MFU 4 %" in lines[3]  # 24.5k x 6e9 / (4 x 1e15)
    assert re.search(r"goodput 4\d %", lines[3])  # 12 s of updates in 24 s, without an evaluation of 1 s
    assert [watch(run).ranks[rank].host for rank in (1, 2)] == ["host-0", "host-1"]


def test_a_run_whose_host_is_gone_shows_all_ranks_silent(tmp_path: Path) -> None:
    lines = screen(make_run(tmp_path / "run", age=20), 100)
    assert len([line for line in lines if "silent 20" in line]) == 2


def test_a_run_that_has_ended_is_shown_with_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "live.json").unlink()
    (run / "logs").mkdir()
    end = {
        "attempt": "process 9 on host-0, since 2026-11-21 09:30:00",
        "time": 1,
        "kind": "killed",
        "cause": 1,
        "step": 120,
    }
    end |= {"text": "rank 1 on host a was killed by SIGKILL", "ranks": [], "logs": {}, "environment": {}}
    (run / "logs" / "ends.jsonl").write_text(json.dumps(end) + "\n")
    (run / "metrics.jsonl").write_text('{"step": 120, "loss": 1.0}\n')
    lines = screen(run)
    assert lines[0].endswith("run  failed")
    assert lines[1] == "rank 1 on host a was killed by SIGKILL"
    (run / "summary.json").write_text('{"steps": 300}')
    assert screen(run)[0].endswith("run  done")


def test_damaged_files_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    live = {"time": time.time(), "ranks": [7, {"rank": "x", "gauges": 3, "split": [1], "host": "\x1b[2J"}, {}]}
    (run / "live.json").write_text(json.dumps(live | {"stragglers": {"a": 1}}))
    (run / "events.jsonl").write_text(
        '{"evaluation": "a\\u001b[2J", "step": 1, "loss": "x", "y": null}\n{"saved": "\n[]\n'
    )
    (run / "metrics.jsonl").write_bytes(os.urandom(5000))
    assert "\x1b" not in "".join(screen(run))
    for name in ("live.json", "events.jsonl", "metrics.jsonl", "environment.json", "attempts.jsonl"):
        (run / name).unlink()
    assert screen(run)


def test_a_sparkline_has_medians_and_marks_what_is_not_finite() -> None:
    assert sparkline([8.0, 4.0, math.nan, 1.0], 4) == "█▄x▁"
    assert sparkline([1.0, 1.0, 5.0, 5.0], 2) == "▁█"
    assert sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([1.0, math.nan], 8) == ""
    assert sparkline([float(n) for n in range(1000)], 5, " .:#") == "..:##"


def test_events_are_sentences() -> None:
    assert event_text({"saved": 3, "step": 3, "failure": "no space"}) == "step 3: not saved: no space"
    assert event_text({"epoch_done": 1, "step": 46, "loss": 0.25}) == "step 46: epoch 2 done, loss 0.25"
    assert event_text({"logged": {"x": 1.0}, "step": 3}) == ""


def test_odd_values_of_metrics_are_left_out_or_called_not_finite(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for odd in (None, math.nan, math.inf, "x", True, [1], 10**400, {"n" * 5000: 1}):
        record = {
            "step": 120,
            "loss": odd,
            "grad_norm": odd,
            "lr": odd,
            "discarded": odd,
            "seconds": odd,
            "n" * 5000: odd,
        }
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        assert not any(word in line.split() for line in screen(run) for word in ("nan", "norm", "lr", "discarded"))
    assert event_text({"evaluation": "held-out", "step": 3, "loss": None, "f1": 0.5, "x": math.nan}) == (
        "step 3: evaluation held-out: loss not finite, f1 0.5, x not finite"
    )
    assert event_text({"epoch_done": 1, "step": 46, "loss": None}) == "step 46: epoch 2 done, loss not finite"


def test_without_a_terminal_the_state_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["top"]) == 2
    assert "there is no run" in capsys.readouterr().err
    run = make_run(tmp_path / "runs" / "mine")
    before = {file: file.read_bytes() for file in run.rglob("*")}
    page = (Path(__file__).parents[2] / "docs" / "looking.md").read_text()
    lines = re.findall(r"^lockstep (top.*)$", page, re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        assert main(shlex.split(line)) == 0
        out, err = capsys.readouterr()
        assert "mine  running  2 ranks" in (err if "--json" in line else out)
        if "--json" in line:
            described = json.loads(out)
            assert (described["run"], described["state"]) == ("runs/mine", "running")
            assert [rank["rank"] for rank in described["ranks"]] == [0, 1]
            assert described["ranks"][1]["seconds"] == watch(run).ranks[1].seconds
            assert described["last"]["loss"] == described["loss"]
    assert {file: file.read_bytes() for file in run.rglob("*")} == before
    assert main(["top", "runs"]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_a_terminal_is_redrawn_when_its_size_changes_and_left_as_it_was(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    main_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(terminal)
    command = [sys.executable, "-m", "lockstep", "top", str(run)]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    try:
        first = _read(main_end, "q quits")
        assert first.startswith("\x1b[?1049h")
        assert "host-0" in first
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        assert "p95" not in first
        _read(main_end, "p95")
        os.write(main_end, b"q")
        _read(main_end, "\x1b[?1049l")
        assert process.wait(20) == 0
        assert termios.tcgetattr(terminal) == before
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(main_end)


def _read(handle: int, wanted: str) -> str:
    """Return what a terminal shows up to some text."""
    text, end = "", time.monotonic() + 20
    while wanted not in text:
        assert time.monotonic() < end, text
        if select.select([handle], [], [], 0.1)[0]:
            text += os.read(handle, 1 << 16).decode("utf-8", "replace")
    return text

"""The terminal: exact plain lines, the live display at several widths, broken pipes."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.reports import FACTS, report

from lockstep.core import formatting
from lockstep.core.errors import OutOfMemory, PeerFailed, RolledBack, RunFailed, Stopped, WorkerDied
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.ranks import LAUNCHER
from lockstep.core.records import EvaluationReport, Verdict
from lockstep.monitor.console import Console
from lockstep.monitor.live import LiveDisplay, Status
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.monitors import BackgroundWriter, EpochReport, Monitors

EVALUATION = EvaluationReport("held-out", 30, {"accuracy": 0.9722, "bits_per_byte": 2.19, "loss": 1.518}, 1234, 0.5)


def test_a_run_in_plain_lines() -> None:
    stream = io.StringIO()
    monitors = Monitors([BackgroundWriter(Console(10, stream=stream))], every=10)
    monitors.start(replace(FACTS, notes=("Take care.",), trainable=300_000))
    for step in range(1, 31):
        lost = int(step >= 12) + int(step >= 25)  # the second is printed with its samples, by `bad_updates`
        verdict = {12: Verdict.OVERFLOW, 25: Verdict.NON_FINITE}.get(step, Verdict.KEPT)
        monitors.see(report(step, verdict=verdict, discarded=lost, loss_scale=32768.0 if lost else 65536.0))
    monitors.evaluated(EVALUATION)
    monitors.finish(None)
    assert stream.getvalue().splitlines() == [
        "stdlib-lm",
        "  strategy    ddp on 2 ranks, backend gloo",
        "  device      cpu",
        "  precision   bf16",
        "  parameters  313,216 (300,000 trained, 13,216 frozen)",
        "  batch       64 = 16 x 2 x 2 (micro-batch x accumulation x ranks)",
        "  steps       30",
        "  folder      /runs/stdlib-lm-20261121-093000",
        "  note        Take care.",
        "step 1/30  loss 2  164k tokens/s  640 samples/s  10.0 steps/s  grad norm 0.5  lr 0.001  epoch 1  0:03 left",
        "step 12: update discarded (fp16 overflow, loss scale 32768); 1 so far",
        "step 20/30  loss 1.05  164k tokens/s  640 samples/s  10.0 steps/s  grad norm 0.5  lr 0.001  1 discarded"
        "  epoch 1  0:01 left",
        "step 30/30  loss 1.033  164k tokens/s  640 samples/s  10.0 steps/s  grad norm 0.5  lr 0.001  2 discarded"
        "  epoch 1  0:00 left",
        "step 30: evaluation held-out: loss 1.518, accuracy 97.22 %, bits per byte 2.19 (1,234 samples in 0.50 s)",
        "done: 30 steps, 1,920 samples, 491,520 tokens in 3.00 s",
        "  loss        1.033 (of the last update)",
        "  evaluation  held-out: loss 1.518, accuracy 97.22 %, bits per byte 2.19 (step 30)",
        "  speed       164k tokens/s, 640 samples/s, 10.0 steps/s",
        "  discarded   2 of 30 updates",
        "  folder      /runs/stdlib-lm-20261121-093000",
    ]


def _lines(console: Console, stream: io.StringIO, steps: range, seconds_per_step: float) -> list[int]:
    console.start(replace(FACTS, steps=None))
    for step in steps:
        console.see(report(step, seconds=step * seconds_per_step))
    return [
        int(line.split()[1].replace(",", "")) for line in stream.getvalue().splitlines() if line.startswith("step ")
    ]


def test_plain_lines_are_printed_at_most_once_a_second_and_at_scheduled_steps() -> None:
    stream = io.StringIO()
    steps = _lines(Console(10, stream=stream), stream, range(1, 10_001), 0.0005)
    assert steps == [1, 2010, 4010, 6010, 8010]


def test_a_long_run_prints_more_seldom() -> None:
    """A day of training is some thousands of lines."""
    stream = io.StringIO()
    steps = _lines(Console(1, stream=stream), stream, range(1, 86_401), 1.0)
    assert steps[:5] == [1, 2, 3, 4, 5]
    assert {after - before for before, after in itertools.pairwise(steps[-50:-1])} == {30}
    assert len(steps) < 3400


def test_the_log_of_a_batch_job_has_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    stream = io.StringIO()
    _lines(Console(10, stream=stream), stream, range(1, 31), 0.1)
    times = [re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d  (.*)", line) for line in stream.getvalue().splitlines()]
    texts = [match[1] for match in times if match]
    assert len(texts) == len(times)
    assert [text.split("  ")[0] for text in texts[-3:]] == ["step 1", "step 20", "step 30"]


def test_slow_steps_still_show_that_the_run_lives() -> None:
    stream = io.StringIO()
    assert _lines(Console(1000, stream=stream), stream, range(1, 30), 5.0) == [1, 5, 9, 13, 17, 21, 25, 29]


def test_without_progress_start_evaluations_and_end_remain() -> None:
    stream = io.StringIO()
    monitors = Monitors([BackgroundWriter(Console(1, "none", stream))])
    monitors.start(FACTS)
    for step in range(1, 31):
        monitors.see(report(step))
    monitors.evaluated(EVALUATION)
    monitors.finish(None)
    lines = stream.getvalue().splitlines()
    assert not any(line.startswith("step 1/") for line in lines)
    assert any("evaluation held-out" in line for line in lines)
    assert any(line.startswith("done: 30 steps") for line in lines)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, "done: 12 of 30 steps"),
        (Stopped("please"), "stopped after 12 of 30 steps"),
        (KeyboardInterrupt(), "stopped after 12 of 30 steps"),
        (ValueError("x"), "failed after 12 of 30 steps"),
        (PeerFailed("rank 1 has failed"), "interrupted after 12 of 30 steps"),
        (RolledBack("step 12: loss nan"), "interrupted after 12 of 30 steps"),
    ],
)
def test_the_summary_states_how_the_run_ended(error: BaseException | None, end: str) -> None:
    stream = io.StringIO()
    console = Console(10, "none", stream)
    console.start(FACTS)
    console.see(report(12))
    console.finish(error)
    assert end in stream.getvalue()
    assert "  speed" not in stream.getvalue(), "one report has no speed yet"


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (ValueError("x"), "interrupted"),
        (OutOfMemory("x"), "interrupted"),
        (WorkerDied("x", kind=FailureKind.WORKER_KILLED), "interrupted"),
        (RunFailed("x"), "failed"),
    ],
)
def test_what_the_launcher_tries_again_has_not_failed(
    error: Exception, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    stream = io.StringIO()
    console = Console(10, "none", stream)
    console.start(FACTS)
    console.finish(error)
    assert f"{end} after 0 of 30 steps" in stream.getvalue()


def test_an_attempt_without_an_update_ends_at_the_step_that_it_resumed_from() -> None:
    stream = io.StringIO()
    console = Console(10, "none", stream)
    console.start(replace(FACTS, resumed_from=10))
    console.finish(ValueError("x"))
    assert "failed after 10 of 30 steps" in stream.getvalue()


def test_epochs_and_what_user_code_logs_are_printed() -> None:
    stream = io.StringIO()
    console = Console(1, stream=stream)
    console.start(FACTS)
    console.see(report(1))
    console.epoch(EpochReport(0, 1, 2.5, 64, 75.0, True))
    console.logged(1, Logged({"hits": 0.25}, {}, {"sample": "def f():\n    pass", "long": "x" * 2000}))
    console.see(report(30))
    text = stream.getvalue()
    assert "step 1: epoch 1 done: mean loss 2.5, 1 min 15 s\n" in text
    assert "step 1: sample: def f():\n    pass\n" in text
    assert "x" * 1000 + " ...\n" in text
    assert "lr 0.001  hits 0.25  epoch 1" in text


def test_utilization_is_shown_where_the_peak_is_known() -> None:
    stream = io.StringIO()
    console = Console(1, stream=stream)
    console.start(replace(FACTS, peak_flops=1e12, flops_per_token=5e6))
    console.see(report(1))
    assert "164k tokens/s  MFU 41.0 %" in stream.getvalue()


def test_data_without_tokens_shows_none() -> None:
    stream = io.StringIO()
    console = Console(1, stream=stream)
    console.start(FACTS)
    console.see(report(1, tokens=64, update_tokens=64))
    console.finish(None)
    assert "tokens" not in stream.getvalue()


def test_signs_that_the_stream_can_not_write_are_replaced() -> None:
    raw = io.BytesIO()
    console = Console(1, stream=io.TextIOWrapper(raw, encoding="ascii"))
    console.start(replace(FACTS, recipe="épreuve"))
    assert raw.getvalue().splitlines()[0] == b"?preuve"


# --- streams that break -----------------------------------------------------------------------------------------

RUN = """
import sys
sys.path.insert(0, {tests!r})
from kit.reports import FACTS, report
from lockstep.monitor.console import Console
from lockstep.monitor.monitors import BackgroundWriter, Monitors
monitors = Monitors([BackgroundWriter(Console(1, {progress!r}))])
monitors.start(FACTS)
for step in range(1, 5001):
    monitors.see(report(step, seconds=2.0 * step))
monitors.finish(None)
print("last line")
sys.stderr.write("survived")
"""


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    code = RUN.format(tests=os.path.dirname(os.path.dirname(__file__)), progress="plain")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == b"survived"
    assert run.returncode == 0


def test_a_closed_stream_and_a_full_disk_do_not_end_the_run() -> None:
    closed = io.StringIO()
    closed.close()
    with open("/dev/full", "w") as full:
        for stream in (closed, full):
            console = Console(1, "plain", stream)
            console.start(FACTS)
            console.see(report(1))
            console.finish(None)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_reader_that_does_not_read_does_not_stop_the_run() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb") as reader:
        monitors = Monitors([BackgroundWriter(Console(1, "plain", stream), most=1000)])
        monitors.start(FACTS)
        for step in range(1, 3001):  # about 300 kB; a pipe holds 64 kB
            monitors.see(report(step, seconds=40.0 * step))
        received: list[bytes] = []
        thread = threading.Thread(target=lambda: received.extend(reader))
        thread.start()
        monitors.finish(None)
        stream.close()
        thread.join()
    steps = [int(line.split(b"/")[0].split()[1].replace(b",", b"")) for line in received if line.startswith(b"step ")]
    assert steps[:700] == list(range(1, 701)), "in order, nothing missing before the limit"
    assert received[-1].startswith(b"  folder")


def _on_a_terminal(columns: int, progress: str = "auto") -> str:
    """Run and return what the terminal received."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.extend(iter(lambda: _read(reader), b"")))
    thread.start()
    before = sys.stdout, sys.stderr
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        console = Console(10, progress, stream)
        console.start(replace(FACTS, steps=3))
        console.see(report(1))
        console.see(report(2, seconds=1000.0))
        console.evaluated(EVALUATION)
        console.see(report(3, seconds=2000.0))
        console.finish(None)
    assert (sys.stdout, sys.stderr) == before
    thread.join()
    os.close(reader)
    return b"".join(received).decode()


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 4096)
    except OSError:  # a pty whose other end was closed
        return b""


@pytest.fixture(autouse=True)
def _usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "CI", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_the_live_display_on_a_terminal() -> None:
    text = _on_a_terminal(80)
    assert "2/3" in text
    assert "\x1b[32m━" in text
    assert "step 30: evaluation held-out" in text
    assert text.rstrip().endswith("/runs/stdlib-lm-20261121-093000")
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l"), "the cursor is to be seen"


def test_no_color_means_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = _on_a_terminal(80)
    assert "2/3" in text
    assert "\x1b[3" not in text


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    text = _on_a_terminal(80)
    assert "step 2/3" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(("value", "live"), [("true", False), ("1", False), ("false", True), ("", True)])
def test_ci_gets_plain_lines_although_it_has_a_terminal(
    monkeypatch: pytest.MonkeyPatch, value: str, live: bool
) -> None:
    monkeypatch.setenv("CI", value)
    text = _on_a_terminal(80)
    assert ("\x1b" in text) is live
    assert ("step 2/3" in text) is not live


def test_narrow_terminals_are_not_overrun() -> None:
    for columns in (30, 60):
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", _on_a_terminal(columns))
        rows = [
            line
            for line in re.split(r"[\r\n]+", text)
            if "━" in line or ("loss 1" in line and "evaluation" not in line)
        ]
        assert max(len(line) for line in rows if "(of the last update)" not in line) <= columns


def test_a_display_that_could_not_start_can_be_stopped() -> None:
    reader, writer = pty.openpty()
    before = sys.stdout, sys.stderr
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        display = LiveDisplay(stream)
        os.close(reader)
        with pytest.raises(OSError, match="Input/output error"):
            display.start()
        display.stop()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is left is written when it is closed
    assert (sys.stdout, sys.stderr) == before


PRINTS_ABOVE_ROWS = """
import sys
from pathlib import Path
from lockstep.launch.streams import doubled
from lockstep.monitor.live import LiveDisplay, Status

with doubled(Path(sys.argv[1])):
    display = LiveDisplay(sys.stdout)
    display.start()
    display.show(Status(1, 3, "0:14 left", ("loss 2.345",)))
    display.print("a report")
    print("of user code")
    print("a warning", file=sys.stderr)
    display.show(Status(2, 3, "0:07 left", ("loss 1.234",)))
    print("begun", end="")
    display.stop()
    print(", ended")
"""


def test_a_log_has_what_is_printed_and_none_of_the_drawings(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reader, writer = pty.openpty()
    subprocess.run([sys.executable, "-c", PRINTS_ABOVE_ROWS, str(log)], stdout=writer, stderr=writer, check=True)
    os.close(writer)
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert log.read_text() == "a report\nof user code\na warning\nbegun, ended\n"
    assert "2/3" in shown
    assert "loss 1.234" in shown
    for line in log.read_text().splitlines():
        assert line in shown


def test_a_terminal_that_hangs_up_does_not_end_the_run() -> None:
    code = RUN.format(tests=os.path.dirname(os.path.dirname(__file__)), progress="auto")
    reader, writer = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        os.close(writer)
        os.read(reader, 100)
        os.close(reader)
        assert run.stderr.read() == b"survived"
    assert run.returncode == 0


# --- how it looks -----------------------------------------------------------------------------------------------

PARTS = ("loss 2.345", "24.5k tokens/s", "MFU 41.0 %", "12.3 steps/s", "grad norm 0.82", "lr 9.8e-04")


@given(st.integers(10, 300))
def test_parts_that_do_not_fit_are_left_out_whole(width: int) -> None:
    text = Status(120, 300, "0:14 left", PARTS).fitting(width)
    assert len(text) <= width
    assert set(text.split("  ")) <= {*PARTS, ""}


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.25, "0.25"), (999, "999"), (999.6, "1.00k"), (12_345, "12.3k"), (1.234e6, "1.23M"), (99.96, "100")],
)
def test_short(number: float, text: str) -> None:
    assert formatting.short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.534, "0.53 s"), (12.34, "12.3 s"), (59.99, "1 min 00 s"), (3725, "1 h 02 min"), (1e5, "1 d 03 h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (13.2, "0:14"), (3725, "1:02:05"), (1e5, "1d 03:46")])
def test_clock(seconds: float, text: str) -> None:
    assert formatting.clock(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(2.34567, "2.346"), (1.23456e-5, "1.23e-05"), (float("nan"), "nan"), (0, "0")]
)
def test_value(number: float, text: str) -> None:
    assert formatting.value(number) == text

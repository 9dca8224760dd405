"""Untrusted text reaches the terminal as text: no escape sequence, no line that could be taken for Lockstep's."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest

from lockstep.checkpoint.storage import Owner, owner_bytes
from lockstep.cli.main import main
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.terminal import plain, plain_line
from lockstep.monitor.console import Console
from lockstep.monitor.live import LiveDisplay, Status
from lockstep.monitor.metric_log import Logged

ESC = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e\x7f"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\x0d\u202e\x7f"
CONFIG = {"model": {"kind": "image-classifier"}, "data": {"train": {"kind": "digits"}}, "run": {"steps": 1}}


def _steers(text: str) -> bool:
    return any(sign in text for sign in "\x1b\x07\x9b\r\u202e\x7f")


def test_what_steers_a_terminal_is_shown() -> None:
    assert plain(ESC) == SHOWN
    assert plain("two\nlines\tand a tab, größer 漢字 🙂\r\n") == "two\nlines\tand a tab, größer 漢字 🙂\r\n"
    assert plain("\ud800 \u2028 \U000e0041") == r"\ud800 \u2028 \U000e0041"
    assert plain_line("a\nlockstep: all is well\r\n") == r"a\nlockstep: all is well\n"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--run.steps", "1", f"--{ESC}"],
        ["train", f"{ESC}.yaml"],
        ["train", f"{ESC}"],
        ["config", "check", "key.yaml"],
        ["config", "check", "value.yaml"],
        ["config", "check", f"key{ESC}.yaml"],
        ["config", "show", "shown.yaml"],
        ["config", "import", "key.yaml"],
        ["config", f"{ESC}"],
        ["plan", "shown.yaml", "run.folder=x", "--json", "--nothing", ESC],
        ["ckpt", f"{ESC}"],
        ["ckpt", "ls", f"folder{ESC}"],
        ["ckpt", "show", "run"],
        ["eval", "run"],
        ["report", f"folder{ESC}"],
        ["report", "runs"],
        ["export", "run"],
        [f"{ESC}"],
        ["data", "prepare", f"{ESC}", "--output", "out", "--tokenizer", "bytes"],
    ],
    ids=lambda words: " ".join(words).replace(ESC, "ESC"),
)
def test_commands(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("key.yaml", f"key{ESC}.yaml"):
        (tmp_path / name).write_text(json.dumps({**CONFIG, f"a{ESC}\nlockstep: done": 1}))
    (tmp_path / "value.yaml").write_text(json.dumps({**CONFIG, "optim": {"name": ESC, "lr": ESC}}))
    (tmp_path / "shown.yaml").write_text(json.dumps({**CONFIG, "description": ESC, "evaluation": {"prompt": ESC}}))
    (tmp_path / f"folder{ESC}").mkdir()
    (tmp_path / "runs" / f"a{ESC}").mkdir(parents=True)
    (tmp_path / "runs" / f"a{ESC}" / "config.yaml").touch()
    run = tmp_path / "run"
    (run / "checkpoints" / f"step-00000001{ESC}").mkdir(parents=True)
    (run / "checkpoints" / f"broken-step-00000001{ESC}").mkdir()
    (run / "checkpoints" / "owner.json").write_bytes(owner_bytes(Owner(ESC, ESC, ESC)))
    (run / "environment.json").write_text(json.dumps({"recipe": ESC, "run": ESC}))
    (run / "config.yaml").write_text(json.dumps({**CONFIG, "launch": {"environment": {f"A{ESC}": ESC}}}))
    (run / "run.lock").write_text(ESC)
    main(words)
    printed = capfd.readouterr()
    assert not _steers(printed.out + printed.err)
    assert "\nlockstep: done" not in printed.out + printed.err


def test_no_key_ends_a_comment_of_an_imported_config(tmp_path: Path) -> None:
    """What follows it would be a line of a config that its user trusts."""
    section = "a\nlaunch: {environment: {LD_PRELOAD: evil.so}} #"
    (tmp_path / "theirs.yaml").write_text(json.dumps({section: {"train_file": "x"}, "lr": 0.1}))
    main(["config", "import", str(tmp_path / "theirs.yaml"), "--lenient", "--to", str(tmp_path / "ours.yaml")])
    text = (tmp_path / "ours.yaml").read_text()
    assert "LD_PRELOAD" in text
    assert "LD_PRELOAD" not in "".join(line for line in text.splitlines() if not line.startswith("#"))


def test_failures() -> None:
    """Python prints them, too, and so do torchrun and the logs."""
    for failure in (RunFailed(ESC), ConfigError(ESC), ConfigError([Problem(ESC, ESC, ESC), Problem("", "a", ESC)])):
        assert not _steers(str(failure))
    assert "\n" not in str(Problem("a\nb.yaml:1:1", "key\nkey", "is wrong"))


def test_what_a_run_shows() -> None:
    stream = io.StringIO()
    console = Console(1, "none", stream)
    console.logged(1, Logged({f"value{ESC}": 1.0}, {}, {f"name{ESC}\nstep 9: saved": f"{ESC}\nsecond line"}))
    shown = stream.getvalue()
    assert not _steers(shown)
    assert "\nstep 9: saved" not in shown
    assert "\nsecond line" in shown


def test_what_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    display = LiveDisplay(stream)
    display.start()
    display.show(Status(1, 2, 1.0, (f"[red]loss{ESC}[/red] 1.0",)))
    display.print(plain(f"[bold]{ESC}[/bold]"))
    display.stop()
    shown = stream.getvalue()
    assert "owned\x07" not in shown
    assert "\x1b[2J" not in shown
    assert "[red]loss" in shown, "no markup is read"
    assert "[bold]" in shown


ALLOWED = {
    "distributed/user_collectives.py",  # print_once prints for its caller
    "core/json_output.py",  # JSON, where every such sign is escaped
    "__main__.py",  # a constant sentence, before anything is imported
    "core/terminal.py", "launch/streams.py", "monitor/console.py", "monitor/live.py",
}  # fmt: skip


def test_nothing_prints_past_it() -> None:
    source = Path(__file__).parents[2] / "src" / "lockstep"
    calls = []
    for file in sorted(source.rglob("*.py")):
        name = file.relative_to(source).as_posix()
        for node in ast.walk(ast.parse(file.read_text())) if name not in ALLOWED else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "print",
                "sys.stdout.write",
                "sys.stderr.write",
            ):
                calls.append(f"{name}:{node.lineno}")
    assert calls == []

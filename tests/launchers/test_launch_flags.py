"""What all launchers share: flags that were meant, help, notes on the config."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from kit.failures import gives

from lockstep.cli.main import main
from lockstep.launchers import BUILTIN, aws, introduction

NO_SUCH = "there is no such flag of launch"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "--node", "2"], f"--node: {NO_SUCH} slurm; did you mean --nodes?"),
        (["slurm", "--partitoin=x"], f"--partitoin: {NO_SUCH} slurm; did you mean --partition?"),
        (["slurm", "--time", "9:00", "--memm", "2G"], f"--memm: {NO_SUCH} slurm; did you mean --mem?"),
        (["slurm", "--frobnicate"], f"--frobnicate: {NO_SUCH} slurm; lockstep launch slurm --help lists"),
        (["slurm", "--ranks", "2"], "--ranks: belongs to the command, as --ranks N after its verb: train digits"),
        (["slurm", "--optim.lr=2"], "--optim.lr: belongs to the command, after its verb: train digits --optim.lr"),
    ],
)
def test_an_unknown_flag_names_the_one_that_is_meant(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words, "train", "digits"]) == 2
    assert capsys.readouterr().err.startswith(f"lockstep: {message}")


@pytest.mark.parametrize("where", sorted(BUILTIN))
def test_help_begins_with_what_it_does_and_an_example_that_works(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws, "facts_of", lambda calls, options: aws.AwsFacts("ami-1", "/dev/sda1"))
    assert main(["launch", where, "--help"]) == 0
    shown = capsys.readouterr().out.partition("\n\n")[2]
    assert shown.startswith(introduction(where))
    example = next(line for line in shown.splitlines() if line.startswith(f"  lockstep launch {where}"))
    words = shlex.split(example)[3:]
    assert main(["launch", where, "--dry-run", *words]) == 0


PAGES = {path.stem: path.read_text() for path in (Path(__file__).parents[2] / "docs").glob("*.md")}
COMMANDS = [
    line
    for where in ("kubernetes", "ray", "slurm", "ssh")
    for line in PAGES[where].splitlines()
    if line.startswith(f"lockstep launch {where} -")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_a_launchers_page_can_be_planned(line: str) -> None:
    _, _, where, *words = shlex.split(line)
    assert main(["launch", where, "--dry-run", *words]) == 0


def test_a_note_on_the_config_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    train, note = ["train", "digits", "run.steps=8"], "lockstep: run.steps (--run.steps) replaces run.epochs\n"
    sweep = ["--sweep", "optim.lr=0.1,0.01"]
    assert main(["launch", "slurm", "--dry-run", *sweep, *train]) == 0
    assert capsys.readouterr().err.count(note) == 1
    assert main(["launch", "ssh", "--hosts", "a,b", "--program", "false", "--ssh=-Fnone", *train]) == 1
    assert note not in capsys.readouterr().err, "node 0 prints it"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["train", "digits", "--nodes", "2"],
            "--nodes: how the hosts meet is the launcher's part; give it before the verb",
        ),
        (
            ["train", "digits", "launch.node_rank=1"],
            "launch.node_rank: how the hosts meet is the launcher's part; leave it",
        ),
        (["--sweep", "optim.lr=1,1", "train", "digits"], "--sweep: optim.lr or one of its values is given twice"),
        (["--sweep", "optim.lr=1", "--sweep", "optim.lr=2", "train", "digits"], "--sweep: optim.lr or one of its"),
        (["--sweep", "run.folder=a,b", "train", "digits"], "--sweep: each run has its own folder"),
    ],
)
def test_what_a_launcher_would_ignore_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", "--dry-run", *words]) == 2
    assert text in capsys.readouterr().err


def test_how_hosts_meet_needs_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--rendezvous", "10.0.0.1:29500"]) == 2
    assert gives(capsys.readouterr().err, "--rendezvous", "--nodes")

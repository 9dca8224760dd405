"""What `launch ssh` would start on each host, and what is refused before any host is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli.main import main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def record(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    before = set(Path().iterdir())
    assert main(["launch", "ssh", "--dry-run", *words]) == 0
    assert set(Path().iterdir()) == before, "a dry run writes nothing"
    planned: dict[str, dict[str, str]] = json.loads(capsys.readouterr().out)
    return planned


def test_each_host_gets_its_ranks_and_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    planned = record(
        capsys, "--hosts", "me@a:2,b:3,[fe80::1%eth0],c", "train", "digits", "run.folder=run", "--ranks", "1"
    )
    common = "train digits run.folder=run --ranks 1"
    meeting = "--nodes 4 --rendezvous ADDRESS:PORT --node-rank"
    assert planned["hosts"] == {
        "me@a": f"{common} --ranks 2 {meeting} 0 --job-id {planned['job']}",
        "b": f"{common} --ranks 3 {meeting} 1 --job-id {planned['job']}",
        "fe80::1%eth0": f"{common} {meeting} 2 --job-id {planned['job']}",
        "c": f"{common} {meeting} 3 --job-id {planned['job']}",
    }


def test_one_host_meets_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert record(capsys, "--hosts", "a", "verify", "digits")["hosts"] == {"a": "verify digits"}


def test_a_value_from_here_is_not_written_down(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_SECRET", "hidden value")
    assert main(["launch", "ssh", "--dry-run", "--hosts", "a", "--env", "OUR_SECRET", "train", "digits"]) == 0
    output = capsys.readouterr()
    assert "OUR_SECRET" in output.out
    assert "hidden value" not in output.out + output.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digits"], "--hosts a,b with the hosts is missing"),
        (
            ["--hosts", "a,b:0", "train", "digits"],
            "--hosts: 'b:0' is not a host; write NAME, NAME:8 for 8 ranks, or [::1]:8",
        ),
        (["--hosts=-oProxyCommand=x", "train", "digits"], "'-oProxyCommand=x' is not a host"),
        (
            ["--hosts", "::1", "train", "digits"],
            "'::1' is not a host; write NAME, NAME:8 for 8 ranks, or [::1]:8 for an address",
        ),
        (["--hosts", "[-oProxyCommand=x]", "train", "digits"], "is not a host"),
        (["--hosts", "a,me@b,a", "train", "digits"], "host a is given twice; give it once"),
        (["--hosts", "a,", "train", "digits"], "--hosts: '' is not a host"),
        (["--hosts", "a,b", "verify", "digits"], "--hosts: `lockstep verify` runs on one host"),
        (["--hosts", "a:2", "verify", "digits"], "--hosts: `lockstep verify` runs on one host"),
        (
            ["--hosts", "a", "--sweep", "optim.lr=1,2", "train", "digits"],
            "--sweep: needs a queue with job arrays, and ssh",
        ),
        (["--hosts", "a", "--env", "NOT_SET_HERE", "train", "digits"], "--env: NOT_SET_HERE isn't set here; set it"),
        (
            ["--hosts", "a", "--env", "1=2", "train", "digits"],
            "--env: '1=2' is not NAME=VALUE, such as NCCL_DEBUG=INFO",
        ),
        (["--hosts", "a", "--ssh=p2222", "train", "digits"], "--ssh: 'p2222' is not an option of it; write --ssh=-p2"),
        (["--hosts", "a,b", "--rendezvous", "a", "train", "digits"], "--rendezvous: 'a' is not HOST:PORT"),
        (["--hosts", "a:2,b", "train", "digits", "--ranks", "1", "parallel.pipeline=2"], "not 3, the number of ranks"),
        (["status", "4711", "--hosts"], "unrecognized arguments: --hosts"),
        (["status", "4711"], "'4711' is neither a job that ssh was given from here nor the folder of its run"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "ssh", *words]) == 2
    assert message in capsys.readouterr().err

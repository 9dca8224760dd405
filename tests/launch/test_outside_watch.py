"""Ranks that another launcher has started are watched by a process beside them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from kit import small, worlds
from kit.waiting import wait_until
from kit.worlds import in_world

import lockstep
from lockstep.config.schema import Launch
from lockstep.config.training_sections import Watchdog
from lockstep.core import heartbeat
from lockstep.core.heartbeat import PROCESS, mapped_heartbeats
from lockstep.core.stopping import STACKS_SIGNAL
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.process_group import joined
from lockstep.launch import outside_watch
from lockstep.launch.ends import EndKind
from lockstep.launch.memory_folder import ROOT


class Hangs(small.Net):
    """Hangs on rank 1 in its tenth forward, the first time."""

    def __init__(self, once: str) -> None:
        super().__init__()
        self.once, self.left = Path(once), 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= self.training
        if self.left == 0 and os.environ["RANK"] == "1" and not self.once.exists():
            self.once.touch()
            while True:
                time.sleep(0.01)
        return super().forward(x)


def _config(folder: Path) -> dict[str, Any]:
    model = {"kind": "custom", "target": f"{__name__}:Hangs", "arguments": {"once": str(folder / "once")}}
    run = {"steps": 14, "folder": str(folder / "run")}
    return {**small.config(run=run, recovery={"watchdog": {"least": 0.5, "end_after": 1.5}}), "model": model}


def _watched_as_by_wrappers() -> None:
    """Let this rank be watched, which has a parent of its own, as those that `srun ./wrapper.sh` starts."""
    outside_watch._host_of = worlds.HOST_OF
    parent = int(os.environ["RANK"]) + 2**22
    outside_watch.os = SimpleNamespace(**{**vars(os), "getppid": lambda: parent})  # ranks of `worlds` have one parent


def _train_watched(folder: str) -> None:
    _watched_as_by_wrappers()
    lockstep.train(_config(Path(folder)))


def test_a_rank_that_hangs_is_named_and_killed(tmp_path: Path) -> None:
    before = set(ROOT.glob("*-watch-*"))
    with pytest.raises(AssertionError, match=r"rank 1 was ended by SIGKILL|rank 0 raised"):
        in_world(2, _train_watched, str(tmp_path))
    report = (tmp_path / "run/logs/hangs.txt").read_text()
    assert "rank 1 hangs in its forward at" in report
    assert "test_outside_watch.py" in report
    assert "the other rank waits for it" in report
    deadline = time.monotonic() + 20
    while not set(ROOT.glob("*-watch-*")) <= before:
        assert time.monotonic() < deadline, "the process should have ended with the ranks"
        time.sleep(0.05)


# --- a stop -----------------------------------------------------------------------------------------------------------


def test_an_opening_leaves_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_once() -> int:
        with outside_watch.watched_from_outside(config, None) as watch:
            watch(LocalGroup())
            assert heartbeat.own() is not before
        assert heartbeat.own() is before
        os.kill(os.getpid(), STACKS_SIGNAL)  # of a watch that hasn't noticed that the rank has left
        return len(os.listdir("/proc/self/fd"))

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(int(name.endswith("SIZE"))))
    monkeypatch.setattr(outside_watch, "started_by_lockstep", lambda environ: False)
    monkeypatch.setattr(outside_watch, "_start", lambda *task: None)
    monkeypatch.setattr(outside_watch, "ROOT", tmp_path)
    config: Any = SimpleNamespace(recovery=SimpleNamespace(watchdog=Watchdog()))
    before = heartbeat.own()
    assert len({open_once() for _ in range(3)}) == 1
    assert not [*tmp_path.iterdir()], "no process has taken these folders"


def _reads_for_ever(folder: Path, beat: heartbeat.Heartbeat) -> None:
    """Handle SIGTERM, as ranks do, and read sample 7 with the interpreter's lock held."""
    with outside_watch._noting_signals(folder, 0):
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's data workers of earlier tests have left a handler
        os.waitpid(_forked_reader(), 0)  # its signals aren't the rank's
        heartbeat.use(beat)
        with heartbeat.reads(heartbeat.mark_of(7, evaluates=False)):
            while True:
                ctypes.PyDLL(None).sleep(60)


def _forked_reader() -> int:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    return child


@pytest.mark.parametrize(
    ("sent", "kind", "samples"),
    [([signal.SIGTERM], EndKind.INTERRUPTED, ()), ([signal.SIGUSR2], EndKind.KILLED, (7,)), ([], EndKind.KILLED, (7,))],
)
def test_a_rank_that_is_killed_because_it_does_not_stop_is_no_death_of_its_sample(
    tmp_path: Path, sent: list[signal.Signals], kind: EndKind, samples: tuple[int, ...]
) -> None:
    (beat,) = mapped_heartbeats(tmp_path, 1)
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    process = os.fork()
    if process == 0:
        _reads_for_ever(tmp_path, beat)
    signal.signal(signal.SIGUSR2, before)
    beat.numbers[PROCESS] = process
    signals = outside_watch._signals_file(tmp_path, 0)
    try:
        wait_until(lambda: beat.reading() is not None)
        rank = outside_watch._OutsideRank(beat, os.open(signals, os.O_RDONLY))
        for number in sent:
            os.kill(process, number)
        wait_until(lambda: [*signals.read_bytes()] == sent)
        rank.update()
        assert rank.ended is None
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    rank.update()
    assert rank.ended is not None
    assert (rank.ended.kind, rank.ended.samples) == (kind, samples)


def test_a_watch_that_a_rank_does_not_join_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    beats = mapped_heartbeats(tmp_path, 2)
    beats[0].numbers[PROCESS] = os.getpid()
    monkeypatch.setattr(outside_watch, "_COMES_S", 0.2)
    assert not outside_watch._all_begun(beats, 4)
    assert "the ranks of this host aren't watched for hangs: rank 5 didn't begin within 0.2 s" in capfd.readouterr().err
    beats[1].numbers[PROCESS] = os.getpid()
    assert outside_watch._all_begun(beats, 4)


def _host(local_ranks: list[int], machines: str) -> tuple[str, list[int], int, bool]:
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    outside_watch.machine = lambda: machines[rank]
    with joined(Launch(device="cpu"), grouped=True) as world:
        host = worlds.HOST_OF(world.axis, makes=True)
        assert host is not None
        world.axis.barrier()
        if host.is_maker:
            host.folder.rmdir()
    return host.folder.name, [*host.ranks], host.place, host.is_maker


def test_the_ranks_of_a_host_are_those_that_see_each_other() -> None:
    (first, *one), (second, *two), (third, *three) = in_world(3, _host, [0, 0, 1], "aba")
    assert first == third != second
    assert [one, two, three] == [[[0, 2], 0, True], [[1], 0, True], [[0, 2], 1, False]]


def test_two_launchers_on_one_host_have_one_watch() -> None:
    (first, *one), (second, *two) = in_world(2, _host, [0, 0], "aa")
    assert first == second
    assert [one, two] == [[[0, 1], 0, True], [[0, 1], 1, False]]


@pytest.mark.drill
def test_torchrun_starts_the_ranks_again(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(_config(tmp_path)))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "lockstep", "train"]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [*map(str, Path(__file__).parents[:2]), *sys.path[:3], os.environ.get("PYTHONPATH", "")]
        ),
    }
    done = subprocess.run(
        [sys.executable, *words, "small.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert "lockstep: rank 1 hasn't moved for" in done.stderr
    assert done.stderr.count("rank 1 hangs in its forward at") == 1
    assert done.stdout.count("resumes from step 9") == 1

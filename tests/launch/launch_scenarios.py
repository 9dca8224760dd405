"""Launches for tests, whose ranks perform acts: each rank has a comma-separated list of them."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.schema import Launch
from lockstep.config.training_sections import Recovery
from lockstep.core.errors import ConfigError, Failure, RunFailed, Stopped
from lockstep.core.ranks import RankEnvironment
from lockstep.launch import rendezvous, worker_group
from lockstep.launch.agent import FollowerRounds, Hosts, LeaderRounds
from lockstep.launch.local import launch, may_fork
from lockstep.launch.rendezvous import connected_hosts
from lockstep.launch.supervision import Rounds, Supervisor


def acts(
    script: Sequence[str],
    logs: str | None = None,
    section: dict[str, object] | None = None,
    repeat: int = 1,
    ahead: Sequence[str] = (),
) -> int:
    """Launch ranks, of which rank N performs script[N]; return the exit code, or the sum of exit codes if repeated."""
    worker_group._GRACE, worker_group._SETTLE, worker_group._SETTLE_PEER = (
        0.5,
        0.2,
        4.0,
    )  # a test has less time than a cluster
    launch_section = Launch(**(section or {}))
    entry = partial(play, list(script))
    folder = Path(logs) if logs else None
    return sum(launch(entry, len(script), launch_section, folder, preload=ahead).show() for _ in range(repeat))


def host_acts(
    script: Sequence[str],
    ranks: int,
    section: dict[str, object],
    settings: dict[str, str] | None = None,
    versions: dict[str, str] | None = None,
) -> int:
    """Launch the ranks of one of several hosts; rank N of all performs script[N]. Return the exit code."""
    if versions is not None:
        rendezvous.versions = lambda: versions
    worker_group._GRACE, worker_group._SETTLE, worker_group._SETTLE_PEER = 0.5, 0.2, 4.0
    launch_section = Launch(**section)
    try:
        with connected_hosts(launch_section, ranks, settings or {}) as hosts:
            hosts.meet()
            result = launch(partial(play, list(script)), ranks, launch_section, None, hosts=hosts)
            if hosts.leads:
                hosts.finish(result)
            return result.show()
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code


def host_rounds(
    scripts: Sequence[Sequence[str]],
    ranks: int,
    section: dict[str, object],
    wait: float = 20.0,
    fails: bool = False,
) -> int:
    """Launch the ranks of one of several hosts; in round R rank N performs scripts[R - 1][N], or the last ones.

    Args:
        fails: Ranks can't be started after the first round.
    """
    worker_group._GRACE, worker_group._SETTLE, worker_group._SETTLE_PEER = 0.5, 0.2, 4.0
    launch_section = Launch(**section)

    def entry() -> Callable[[], int]:
        return partial(play, list(scripts[min(hosts.round, len(scripts)) - 1]))

    def next_round() -> Callable[[], int]:
        return partial(play, list(scripts[min(hosts.round, len(scripts) - 1)]))

    try:
        with connected_hosts(launch_section, ranks, {}, recovers=True) as hosts:
            hosts.meet()
            rounds: Rounds = FollowerRounds(hosts, wait, lambda folder, decision: entry())
            if hosts.leads:
                supervisor = Supervisor(Recovery(), lambda: 0, next_round)
                rounds = LeaderRounds(hosts, supervisor, wait, Path("run"), lambda entry: {})
                hosts.open_folder(Path("run"), {})
            elif hosts.wait_for_folder() is None:
                return 0
            if fails:
                _fail_after_first_round(hosts)
            result = launch(entry(), ranks, launch_section, None, hosts=hosts, supervisor=rounds)
            if hosts.leads:
                hosts.finish(result)
            return result.show()
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code


def _fail_after_first_round(hosts: Hosts) -> None:
    begin = worker_group.Round.begin

    def refusing(job: worker_group.Ranks, **options: Any) -> worker_group.Round:
        if hosts.round > 1:
            raise RunFailed(f"its ranks can't be started: {OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))}")
        return begin(job, **options)

    worker_group.Round.begin = refusing  # type: ignore[method-assign]


def refused(script: Sequence[str], section: dict[str, object]) -> int:
    try:
        return acts(script, section=section)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def with_a_thread(script: Sequence[str], module_level: bool) -> int:
    """Launch ranks from a process that has another thread, so that they can't be forked."""
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    assert not may_fork()
    entry = partial(play, list(script)) if module_level else lambda: 0
    try:
        return launch(entry, len(script), Launch(), None).show()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        stop.set()


def forkable(use: str) -> int:
    """Return 0 if a process that has used torch or numpy may still be forked, else 1."""
    import numpy as np
    import torch

    if use == "numpy":
        np.ones((400, 400)) @ np.ones((400, 400))
    if use == "torch":
        torch.set_num_threads(2)
        torch.ones(4_000_000).sum()
    return 0 if may_fork() else 1


def environment_restored() -> int:
    """Launch a single rank, which runs in this process, and check that the environment is restored."""
    before, launcher, ran_in = dict(os.environ), os.getpid(), []

    def entry() -> int:
        assert RankEnvironment.read(os.environ) == RankEnvironment()
        assert os.environ["RANK"] == "0"
        assert os.environ["GREETING"] == "hello"
        ran_in.append(os.getpid())
        return 0

    code = launch(entry, 1, Launch(environment={"GREETING": "hello"}), None).show()
    assert ran_in == [launcher]
    assert dict(os.environ) == before
    return code


def play(script: list[str]) -> int:
    me = RankEnvironment.read(os.environ)
    for act in script[me.rank].split(","):
        verb, _, value = act.partition(":")
        code = _VERBS[verb](value, me)
        if code is not None:
            return code
    return 0


def _say(value: str, me: RankEnvironment) -> None:
    print(value)


def _say_in_c(value: str, me: RankEnvironment) -> None:
    os.write(1, f"{value}\n".encode())


def _warn(value: str, me: RankEnvironment) -> None:
    warnings.warn(value, stacklevel=1)


def _env(value: str, me: RankEnvironment) -> None:
    print(f"{value}={os.environ.get(value)} in rank {me.rank}")


def _imported(value: str, me: RankEnvironment) -> None:
    print(f"rank {me.rank} {'finds' if value in sys.modules else 'lacks'} {value}")


def _threads(value: str, me: RankEnvironment) -> None:
    import torch

    print(f"rank {me.rank} has {torch.get_num_threads()} threads")
    torch.ones(4_000_000).sum()  # hangs forever if libgomp's threads did not survive a fork


def _tty(value: str, me: RankEnvironment) -> None:
    print(f"rank {me.rank} {'sees' if sys.stdout.isatty() else 'has no'} terminal")


def _return(value: str, me: RankEnvironment) -> int:
    return int(value)


def _exit(value: str, me: RankEnvironment) -> None:
    os._exit(int(value))


def _raise(value: str, me: RankEnvironment) -> None:
    raise ValueError(value)


def _config(value: str, me: RankEnvironment) -> None:
    raise ConfigError(value)


def _give_up(value: str, me: RankEnvironment) -> None:
    raise RunFailed(value)


def _stop(value: str, me: RankEnvironment) -> None:
    raise Stopped(value)


def _quit(value: str, me: RankEnvironment) -> None:
    sys.exit(value)


def _kill(value: str, me: RankEnvironment) -> None:
    os.kill(os.getpid(), int(value))


def _stop_launcher(value: str, me: RankEnvironment) -> None:
    os.kill(os.getppid(), int(value))


def _sleep(value: str, me: RankEnvironment) -> None:
    time.sleep(float(value))


def _pid(value: str, me: RankEnvironment) -> None:
    path = Path(value) / f"pid-{me.rank}"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def _deaf(value: str, me: RankEnvironment) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _reduce(value: str, me: RankEnvironment) -> None:
    """All-reduce `value` times, and check the sums."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        store = dist.TCPStore(me.master_addr, me.master_port, me.world_size, me.rank == 0, master_listen_fd=me.store_fd)
        dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
    for _ in range(int(value)):
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [float(me.world_size)] * 3


def _meet(value: str, me: RankEnvironment) -> None:
    """Join the others as a run does, with a timeout of a second; sleep, stop or receive; then all-reduce forever."""
    import torch
    import torch.distributed as dist

    from lockstep.distributed.process_group import joined

    what, _, seconds = value.partition(" ")
    with joined(Launch(timeout=1.0), grouped=True):
        dist.all_reduce(torch.ones(3))
        if what == "sleep":
            time.sleep(float(seconds))
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while what != "receive":
            dist.all_reduce(torch.ones(3))
        dist.recv(torch.ones(3), 0)


def _raise_slowly(value: str, me: RankEnvironment) -> None:
    """Fail, close the connections, and report the failure only afterwards."""
    import torch.distributed as dist

    try:
        raise ValueError(value)
    finally:
        dist.destroy_process_group()
        time.sleep(0.6)


def _last_words(value: str, me: RankEnvironment) -> None:
    """Leave a thread, an exit function and an unflushed stream."""
    import atexit

    atexit.register(print, "exit function", end="")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread, "))).start()


def _orderly(value: str, me: RankEnvironment) -> int:
    """Work until SIGTERM, then save, and write how often it arrived."""
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "only the launcher handles Ctrl-C"
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    _pid(value, me)
    while not received:
        time.sleep(0.01)
    time.sleep(0.3)
    (Path(value) / f"saved-{me.rank}").write_text(str(len(received)))
    return 130


_VERBS = {
    "say": _say,
    "say-in-c": _say_in_c,
    "warn": _warn,
    "env": _env,
    "imported": _imported,
    "threads": _threads,
    "tty": _tty,
    "return": _return,
    "exit": _exit,
    "raise": _raise,
    "config": _config,
    "give-up": _give_up,
    "stop": _stop,
    "quit": _quit,
    "kill": _kill,
    "stop-launcher": _stop_launcher,
    "sleep": _sleep,
    "pid": _pid,
    "deaf": _deaf,
    "reduce": _reduce,
    "meet": _meet,
    "raise-slowly": _raise_slowly,
    "orderly": _orderly,
    "last-words": _last_words,
}

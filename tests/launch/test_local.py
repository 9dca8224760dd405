"""Launches of real processes; a failure is a row: acts of each rank, exit code, and stderr."""

from __future__ import annotations

import errno
import os
import pty
import re
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kit.failures import gives
from kit.waiting import wait_for

if TYPE_CHECKING:
    from conftest import ForkServer, Launched

ENDS = [
    ("all done", ["return:0", "return:0"], 0, [], ["rank"]),
    ("own code", ["sleep:30", "return:5"], 1, ["rank 1 ended with exit code 5"], ["Traceback"]),
    ("exits", ["sleep:30", "exit:7"], 1, ["rank 1 ended with exit code 7"], ["Traceback"]),
    ("exits with a message", ["sleep:30", "quit:enough"], 1, ["rank 1: enough"], ["Traceback"]),
    ("exception", ["sleep:30", "raise:boom"], 1, ["rank 1 failed:", "ValueError: boom"], ["rank 0", "launch/rank.py"]),
    ("config", ["config:lr is 0", "config:lr is 0"], 2, ["lr is 0"], ["rank", "Traceback"]),
    ("config of one rank", ["sleep:30", "config:lr is 0"], 2, ["rank 1: lr is 0"], ["Traceback"]),
    ("run failed", ["give-up:no disk", "sleep:30"], 1, ["rank 0: no disk"], ["Traceback"]),
    ("stopped", ["stop:time is up", "stop:time is up"], 130, ["time is up"], ["rank", "Traceback"]),
    (
        "out of memory",
        ["reduce:99999", "reduce:1,kill:9"],
        1,
        ["rank 1 was killed by SIGKILL: by a person or a scheduler; the kernel has counted no out-of-memory kill here"],
        ["peer"],
    ),
    ("crash", ["reduce:99999", "reduce:1,kill:11"], 1, ["rank 1 was killed by SIGSEGV"], ["peer"]),
    ("rank 0 killed", ["reduce:1,kill:9", "reduce:99999"], 1, ["rank 0 was killed by SIGKILL"], ["peer"]),
    ("cause after effect", ["reduce:99999", "reduce:1,raise-slowly:boom"], 1, ["rank 1 failed:", "boom"], ["peer"]),
    ("first of two", ["sleep:0.3,raise:second", "raise:first"], 1, ["rank 1 failed:", "first"], ["second"]),
    ("ignores SIGTERM", ["deaf,sleep:60", "sleep:0.2,raise:boom"], 1, ["rank 1 failed:", "boom"], ["rank 0"]),
    ("one rank", ["return:0"], 0, [], ["rank"]),
    ("one rank, exception", ["raise:boom"], 1, ["Traceback", "ValueError: boom"], ["rank 0"]),
    ("one rank, config", ["config:lr is 0"], 2, ["lr is 0"], ["Traceback"]),
    ("one rank, stopped", ["stop:time is up"], 130, ["time is up"], ["Traceback"]),
    ("one rank, own code", ["return:5"], 1, ["ended with exit code 5"], ["Traceback"]),
]

_HANGS = "did not answer within 1 s (launch.timeout), while"
_LATE = "rank 2 did not answer within 4 s (launch.timeout), while the others waited"
HANGS = [
    ("sleeps", 1.0, ["meet", "meet:sleep 60"], f"rank 1 {_HANGS} rank 0 waited"),
    ("rank 0 is stopped", 1.0, ["meet:stop", "meet"], f"rank 0 {_HANGS} rank 1 waited"),
    ("two of four", 1.0, ["meet", "meet:sleep 60", "meet", "meet:stop"], f"ranks 1 and 3 {_HANGS} the others waited"),
    ("late, not hanging", 4.0, ["meet", "meet", "meet:sleep 4"], _LATE),  # the launcher waits until it comes
    ("two collectives", 1.0, ["meet", "meet:receive"], "no rank hangs, and yet a collective took longer than 1 s"),
]


@pytest.mark.parametrize(("timeout", "script", "message"), [row[1:] for row in HANGS], ids=[row[0] for row in HANGS])
def test_a_rank_that_hangs_is_named_by_those_that_waited(
    fork_server: ForkServer, timeout: float, script: list[str], message: str
) -> None:
    code, _, err = fork_server.run("acts", script=script, section={"timeout": timeout})
    err = "".join(line for line in err.splitlines(keepends=True) if not line.startswith("note: "))
    assert code == 1, err
    assert err.startswith(f"lockstep: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "code", "present", "absent"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS]
)
def test_exit_code_and_first_cause(
    fork_server: ForkServer, script: list[str], code: int, present: list[str], absent: list[str]
) -> None:
    result, _, err = fork_server.run("acts", script=script)
    err = re.sub(r"Fatal Python error.*?(?=\nlockstep|\Z)", "", err, flags=re.DOTALL)  # the crash's own stack
    assert result == code, err
    assert all(err.count(text) == 1 for text in present), err
    assert not any(text in err for text in absent), err


def test_twenty_launches_in_a_row_all_reduce(fork_server: ForkServer) -> None:
    code, _, err = fork_server.run("acts", script=["reduce:5"] * 2, repeat=20)
    assert code == 0, err
    assert err == ""


def test_two_launches_at_once_do_not_collide(fork_server: ForkServer) -> None:
    both = [fork_server.start("acts", script=["reduce:200"] * 2, repeat=3) for _ in range(2)]
    assert [launched.wait() for launched in both] == [0, 0], [launched.err for launched in both]


def test_more_ranks_than_cores_run_and_are_noted(fork_server: ForkServer) -> None:
    ranks = len(os.sched_getaffinity(0)) + 1
    code, _, err = fork_server.run("acts", script=["reduce:3"] * ranks)
    assert code == 0
    assert f"note: {ranks} ranks share" in err


def test_preloaded_modules_are_imported_before_ranks_are_forked(fork_server: ForkServer) -> None:
    """A module that isn't installed is skipped: a rank that needs it reports that."""
    script = ["imported:colorsys"] * 2
    code, out, err = fork_server.run("acts", script=script, ahead=["no_such_module", "colorsys"])
    assert (code, err) == (0, "")
    assert out.count("finds colorsys") == 2
    code, out, _ = fork_server.run("acts", script=script)
    assert out.count("lacks colorsys") == 2


def test_environment_reaches_the_ranks(fork_server: ForkServer) -> None:
    script = ["env:GREETING,env:LOCAL_RANK,env:LOCAL_WORLD_SIZE", "env:GREETING,env:LOCAL_RANK,env:LOCKSTEP_STORE_FD"]
    code, out, _ = fork_server.run("acts", script=script, section={"environment": {"GREETING": "hello"}})
    assert code == 0
    assert sorted(out.splitlines()) == [
        "GREETING=hello in rank 0",
        "GREETING=hello in rank 1",
        "LOCAL_RANK=0 in rank 0",
        "LOCAL_RANK=1 in rank 1",
        "LOCAL_WORLD_SIZE=2 in rank 0",
        "LOCKSTEP_STORE_FD=None in rank 1",
    ]


def test_cores_are_shared_evenly(fork_server: ForkServer) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    _, out, _ = fork_server.run("acts", script=["threads"] * 2)
    assert sorted(out.splitlines()) == [f"rank {rank} has {share} threads" for rank in range(2)]
    _, out, _ = fork_server.run("acts", script=["threads"] * 2, section={"environment": {"OMP_NUM_THREADS": "3"}})
    assert sorted(out.splitlines()) == [f"rank {rank} has 3 threads" for rank in range(2)]


def test_a_single_rank_runs_in_the_launcher(fork_server: ForkServer) -> None:
    code, _, err = fork_server.run("environment_restored")
    assert code == 0, err


def test_a_used_port_and_the_launchers_variables_are_refused(fork_server: ForkServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = fork_server.run("refused", script=["return:0"] * 2, section={"port": port})
    assert code == 2
    assert gives(err, "launch.port:", port, os.strerror(errno.EADDRINUSE), 0)
    assert err.count("\n") == 1

    code, _, err = fork_server.run("refused", script=["return:0"] * 2, section={"environment": {"RANK": "1"}})
    assert code == 2
    assert gives(err, "launch.environment.RANK:")
    assert err.count("\n") == 1


def test_the_store_listens_only_on_loopback_on_the_configured_port(fork_server: ForkServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script = [f"reduce:1,pid:{tmp_path},sleep:30"] * 2
    launched = fork_server.start("acts", script=script, section={"port": port})
    _ranks(tmp_path, 2)
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening
    os.kill(launched.pid, signal.SIGTERM)
    assert launched.wait() == 75


# --- fresh interpreters ------------------------------------------------------------------------------------------


def test_ranks_are_fresh_interpreters_if_the_process_has_threads(fork_server: ForkServer) -> None:
    code, _, err = fork_server.run("with_a_thread", script=["reduce:2,threads"] * 2, module_level=True)
    assert code == 0, err
    code, _, err = fork_server.run("with_a_thread", script=["return:0"] * 2, module_level=False)
    assert code == 0, err  # cloudpickle sends it by value


@pytest.mark.parametrize(("use", "forkable"), [("import", True), ("numpy", True), ("torch", False)])
def test_only_threads_that_do_not_survive_a_fork_prevent_it(fork_server: ForkServer, use: str, forkable: bool) -> None:
    assert fork_server.run("forkable", use=use)[0] == (0 if forkable else 1)


def test_a_rank_waits_for_its_threads_and_exit_functions(fork_server: ForkServer) -> None:
    code, out, err = fork_server.run("acts", script=["last-words", "return:0"])
    assert (code, out) == (0, "thread, \nexit function"), err


# --- logs --------------------------------------------------------------------------------------------------------


def test_output_goes_to_logs_and_that_of_rank_0_also_to_the_terminal(fork_server: ForkServer, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    script = ["say:\x1b[1mbold\x1b[0m from 0", "say:from 1,say-in-c:from C,warn:odd data"]
    code, out, err = fork_server.run("acts", script=script, logs=str(logs))
    assert code == 0
    assert out == "\x1b[1mbold\x1b[0m from 0\n"
    assert (logs / "rank-0.log").read_text() == "bold from 0\n"
    log = (logs / "rank-1.log").read_text()
    assert log.startswith("from 1\nfrom C\n")
    assert "odd data" in log
    assert err == ""


def test_logs_are_appended_to(fork_server: ForkServer, tmp_path: Path) -> None:
    fork_server.run("acts", script=["say:a"], logs=str(tmp_path))
    fork_server.run("acts", script=["say:b"], logs=str(tmp_path))
    assert (tmp_path / "rank-0.log").read_text() == "a\nb\n"


def test_failure_is_shown_once_and_logged(fork_server: ForkServer, tmp_path: Path) -> None:
    code, _, err = fork_server.run("acts", script=["sleep:30", "raise:boom"], logs=str(tmp_path))
    assert code == 1
    assert err.count("ValueError: boom") == 1
    assert gives(err, tmp_path)
    assert (tmp_path / "rank-1.log").read_text().count("ValueError: boom") == 1


def test_a_single_rank_logs_too(fork_server: ForkServer, tmp_path: Path) -> None:
    code, out, err = fork_server.run("acts", script=["say:hello,raise:boom"], logs=str(tmp_path))
    assert (code, out) == (1, "hello\n")
    assert err.count("ValueError: boom") == 1
    log = (tmp_path / "rank-0.log").read_text()
    assert log.startswith("hello\nTraceback")
    assert log.count("ValueError: boom") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_0_keeps_its_terminal(fork_server: ForkServer, tmp_path: Path, ranks: int) -> None:
    terminal, rank_terminal = pty.openpty()
    try:
        launched = fork_server.start(
            "acts", script=["tty"] * ranks, logs=str(tmp_path), out=Path(os.ttyname(rank_terminal))
        )
        assert launched.wait() == 0
        assert os.read(terminal, 1000) == b"rank 0 sees terminal\r\n"
    finally:
        os.close(terminal)
        os.close(rank_terminal)
    if ranks == 2:
        assert (tmp_path / "rank-1.log").read_text() == "rank 1 has no terminal\n"


# --- signals -----------------------------------------------------------------------------------------------------


def _ranks(folder: Path, count: int) -> list[int]:

    paths = [folder / f"pid-{rank}" for rank in range(count)]
    wait_for(paths)
    return [int(path.read_text()) for path in paths]


def _send(launched: Launched, number: signal.Signals, group: bool) -> None:
    (os.killpg if group else os.kill)(launched.pid, number)


@pytest.mark.parametrize("group", [False, True], ids=["launcher", "process group"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_is_orderly_and_each_rank_gets_one_signal(
    fork_server: ForkServer, tmp_path: Path, number: signal.Signals, group: bool
) -> None:
    launched = fork_server.start("acts", script=[f"orderly:{tmp_path}"] * 2)
    _ranks(tmp_path, 2)
    if group and number == signal.SIGTERM:  # as timeout(1) does: the process, then its group
        _send(launched, number, group=False)
        time.sleep(0.05)
        counts = {"1", "2"}  # some ranks also get it from outside the launcher
    else:
        counts = {"1"}
    _send(launched, number, group)
    assert launched.wait() == (75 if number == signal.SIGTERM else 130)
    assert {(tmp_path / f"saved-{rank}").read_text() for rank in range(2)} <= counts
    assert launched.err == f"lockstep: stopped by {number.name}\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_without_a_handler_stop_on_sigterm(fork_server: ForkServer, tmp_path: Path, ranks: int) -> None:
    launched = fork_server.start("acts", script=[f"pid:{tmp_path},sleep:60"] * ranks)
    _ranks(tmp_path, ranks)
    _send(launched, signal.SIGTERM, group=False)
    assert launched.wait() == 75
    assert "Traceback" not in launched.err


def test_a_rank_stopped_in_a_collective_has_not_failed(fork_server: ForkServer, tmp_path: Path) -> None:
    launched = fork_server.start("acts", script=[f"reduce:1,pid:{tmp_path},reduce:9999999"] * 2)
    _ranks(tmp_path, 2)
    _send(launched, signal.SIGINT, group=True)
    assert launched.wait() == 130
    assert "Traceback" not in launched.err


def test_second_ctrl_c_ends_at_once(fork_server: ForkServer, tmp_path: Path) -> None:
    launched = fork_server.start("acts", script=[f"deaf,pid:{tmp_path},sleep:60"] * 2)
    ranks = _ranks(tmp_path, 2)
    _send(launched, signal.SIGINT, group=True)
    time.sleep(0.7)
    assert all(_alive(pid) for pid in ranks)
    _send(launched, signal.SIGINT, group=True)
    begun = time.monotonic()
    assert launched.wait() == 130
    assert time.monotonic() - begun < 5
    assert not any(_alive(pid) for pid in ranks)


@pytest.mark.parametrize("section", [{"timeout": 0.5}, {"grace": 0.5}], ids=["timeout", "grace"])
def test_an_orderly_stop_has_a_time_limit(fork_server: ForkServer, tmp_path: Path, section: dict[str, float]) -> None:
    script = [f"deaf,pid:{tmp_path},sleep:60"] * 2
    launched = fork_server.start("acts", script=script, section=section)
    _ranks(tmp_path, 2)
    _send(launched, signal.SIGTERM, group=False)
    assert launched.wait() == 75


def test_no_orphans_when_the_launcher_is_killed(fork_server: ForkServer, tmp_path: Path) -> None:
    launched = fork_server.start("acts", script=[f"deaf,pid:{tmp_path},sleep:60"] * 3)
    ranks = _ranks(tmp_path, 3)
    _send(launched, signal.SIGKILL, group=False)
    assert launched.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while any(_alive(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(_alive(pid) for pid in ranks)


def _alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and is not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""Launchers of several hosts end alike: on loopback, where each is a host with ranks of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kit.failures import gives
from kit.waiting import wait_for
from kit.worlds import free_port

if TYPE_CHECKING:
    from conftest import ForkServer, Launched

HOST = socket.gethostname()

# the acts of ranks 0 and 1 on the first host and of rank 2 on the second, exit code, and stderr of both
ENDS = [
    ("all done", ["reduce:3", "reduce:3", "reduce:3"], 0, ""),
    ("own code", ["sleep:30", "sleep:30", "return:5"], 1, f"lockstep: rank 2 on host {HOST} ended with exit code 5\n"),
    ("config", ["config:lr is 0"] * 3, 2, "lockstep: lr is 0\n"),
    ("paused by one", ["stop:time is up"] * 3, 130, "lockstep: time is up\n"),
    (
        "killed in a collective",
        ["reduce:99999", "reduce:99999", "reduce:1,kill:9"],
        1,
        f"lockstep: rank 2 on host {HOST} was killed by SIGKILL: by a person or a scheduler; the kernel has counted no "
        "out-of-memory kill here\n",
    ),
    (
        "a rank of the first host is killed",
        ["reduce:1,kill:9", "reduce:99999", "reduce:99999"],
        1,
        f"lockstep: rank 0 on host {HOST} was killed by SIGKILL: by a person or a scheduler; the kernel has counted no "
        "out-of-memory kill here\n",
    ),
]


def start_hosts(fork_server: ForkServer, script: list[str], ranks: list[int], **section: object) -> list[Launched]:
    """Start a launcher for each host; the first has the rendezvous."""
    common = {"nodes": len(ranks), "rendezvous": f"127.0.0.1:{free_port()}", "job_id": "tested", "timeout": 20.0}
    return [
        fork_server.start("host_acts", script=script, ranks=number, section={**common, "node_rank": node, **section})
        for node, number in enumerate(ranks)
    ]


def ended(launched: list[Launched]) -> tuple[list[int], list[str]]:
    codes = [launcher.wait() for launcher in launched]
    return codes, [
        "".join(line for line in launcher.err.splitlines(keepends=True) if not line.startswith("note: "))
        for launcher in launched
    ]


@pytest.mark.parametrize(("script", "code", "text"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS])
def test_all_hosts_end_with_the_first_cause(fork_server: ForkServer, script: list[str], code: int, text: str) -> None:
    assert ended(start_hosts(fork_server, script, [2, 1])) == ([code, code], [text, text])


def test_a_rank_that_hangs_is_named_on_all_hosts(fork_server: ForkServer) -> None:
    codes, texts = ended(start_hosts(fork_server, ["meet", "meet", "meet:sleep 60"], [2, 1], timeout=1.0))
    assert codes == [1, 1], texts
    assert texts[0] == texts[1]
    said = "lockstep: rank 2 on host .* did not answer within 1 s .launch.timeout., while the others waited"
    assert re.match(said, texts[0])


@pytest.mark.parametrize("at", [0, 1])
def test_a_stop_at_one_host_stops_all(fork_server: ForkServer, tmp_path: Path, at: int) -> None:

    launched = start_hosts(fork_server, [f"orderly:{tmp_path}"] * 3, [2, 1])
    wait_for([tmp_path / f"pid-{rank}" for rank in range(3)])
    os.kill(launched[at].pid, signal.SIGINT)
    codes, texts = ended(launched)
    assert codes == [130, 130]
    assert all(gives(text, "stopped", "SIGINT") and text.count("\n") == 1 for text in texts)
    assert {(tmp_path / f"saved-{rank}").read_text() for rank in range(3)} == {"1"}


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_launcher_that_is_killed_is_named_by_the_others(fork_server: ForkServer, tmp_path: Path, killed: int) -> None:

    launched = start_hosts(fork_server, [f"pid:{tmp_path},sleep:60"] * 3, [1, 1, 1])
    wait_for([tmp_path / f"pid-{rank}" for rank in range(3)])
    begun = time.monotonic()
    os.kill(launched[killed].pid, signal.SIGKILL)
    codes, texts = ended([launcher for node, launcher in enumerate(launched) if node != killed])
    assert time.monotonic() - begun < 8
    assert codes == [1, 1]
    assert all(gives(text, HOST, f"rank {killed}", "lost") and text.count("\n") == 1 for text in texts)


def test_a_host_that_cannot_start_its_ranks_ends_all(fork_server: ForkServer) -> None:
    common = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}", "timeout": 20.0}
    sections = ({"node_rank": 0}, {"node_rank": 1, "environment": {"RANK": "7"}})
    launched = [
        fork_server.start("host_acts", script=["sleep:30"] * 2, ranks=1, section={**common, **own}) for own in sections
    ]
    reason = "launch.environment.RANK: is set for each rank by the launcher; leave it out\n"
    assert ended(launched) == ([2, 2], [f"lockstep: host {HOST}: {reason}", reason])


# --- the meeting ------------------------------------------------------------------------------------------------------


def test_hosts_take_their_places_as_they_come(fork_server: ForkServer, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    script = ["env:LOCAL_WORLD_SIZE,env:MASTER_ADDR,reduce:2"] * 4
    section = {"nodes": 3, "rendezvous": address, "timeout": 20.0}
    launched = [fork_server.start("host_acts", script=script, ranks=number, section=section) for number in (1, 2, 1)]
    codes, texts = ended(launched)
    assert codes == [0, 0, 0], texts
    lines = sorted(line for launcher in launched for line in launcher.out.splitlines())
    assert [line for line in lines if line.startswith("MASTER")] == [
        f"MASTER_ADDR=127.0.0.1 in rank {rank}" for rank in range(4)
    ]
    assert sum(line.startswith("LOCAL_WORLD_SIZE=2") for line in lines) == 2


def test_missing_hosts_and_contradictions_are_named_on_all_hosts(fork_server: ForkServer) -> None:
    def start(sections: list[dict[str, object]], settings: list[dict[str, str]], **common: object) -> list[Launched]:
        section = {"nodes": 3, "rendezvous": f"127.0.0.1:{free_port()}", "timeout": 10.0, **common}
        return [
            fork_server.start(
                "host_acts", script=["return:0"] * 2, ranks=1, section={**section, **own}, settings=hashes
            )
            for own, hashes in zip(sections, settings, strict=True)
        ]

    rows: list[tuple[list[dict[str, object]], list[dict[str, str]], str]] = [
        ([{}, {"node_rank": 2}, {"node_rank": 2}], [{}, {}, {}], f"hosts {HOST} and {HOST} both have --node-rank 2"),
        ([{"node_rank": 0}, {"nodes": 4, "node_rank": 1}], [{}, {}], "--nodes (4, not 3)"),
        ([{}, {}], [{"optim.lr": "1"}, {"optim.lr": "2"}], "differs from host"),
    ]
    address = f"127.0.0.1:{free_port()}"
    missing = start([{}, {}], [{}, {}], rendezvous=address, timeout=1.5)
    of_rows = [start(sections, settings) for sections, settings, _ in rows]
    text = (
        f"2 of 3 hosts reached {address} within 1.5 s (launch.timeout): {HOST}, {HOST}; missing: 1 more. Start the "
        f"same command on each host, and let the hosts reach {address}\n"
    )
    assert ended(missing) == ([1, 1], [text, text])
    for launched, (sections, _, part) in zip(of_rows, rows, strict=True):
        codes, texts = ended(launched)
        assert codes == [2] * len(sections), texts
        assert len(set(texts)) == 1
        assert part in texts[0]


@pytest.mark.parametrize("differing", ["Lockstep", "torch", "Python"])
def test_versions_that_differ_are_named_on_all_hosts(fork_server: ForkServer, differing: str) -> None:
    section = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}", "timeout": 20.0}
    same = {"Lockstep": "1.0", "torch": "2.13.0", "Python": "3.11"}
    launched = [
        fork_server.start("host_acts", script=["return:0"] * 2, ranks=1, section=own, versions=versions)
        for own, versions in (
            ({**section, "node_rank": 0}, same),
            ({**section, "node_rank": 1}, {**same, differing: "9.9"}),
        )
    ]
    text = f"host {HOST} differs from host {HOST} in {differing} (9.9, not {same[differing]}); give all hosts the same "
    text += "command, config and versions\n"
    codes, texts = ended(launched)
    assert (codes, texts) == ([2, 2], [text, text]), texts


def test_a_host_with_another_token_and_a_stranger_are_refused(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    section = {"nodes": 2, "rendezvous": f"127.0.0.1:{port}", "timeout": 20.0}
    good = fork_server.start("host_acts", script=["return:0"], ranks=1, section={**section, "node_rank": 0})
    bad = fork_server.start(
        "host_acts", script=["return:0"], ranks=1, section={**section, "job_id": "b", "node_rank": 1}
    )
    code, texts = ended([bad])
    assert code == [2]
    assert gives(texts[0], f"127.0.0.1:{port}", "token", HOST)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"\x00" + struct.pack("<I", 7) + b"GET / HTTP/1.0\r\n\r\n" + bytes(80))
        received = b""
        while data := stranger.recv(1000):
            received += data
    assert received.startswith(b"LOCKSTEP-HOSTS-2")
    assert received[48:] == b"-" + bytes(32), "it gets a refusal, and nothing else"
    os.kill(good.pid, signal.SIGTERM)
    good.wait()
    assert gives(good.err, "127.0.0.1", "refused", "token")
    assert good.err.count("was refused") == 1


def test_a_host_too_many_and_another_program_are_reported(fork_server: ForkServer, tmp_path: Path) -> None:

    section = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}", "timeout": 20.0}
    script = [f"pid:{tmp_path},sleep:60"] * 2
    launched = [fork_server.start("host_acts", script=script, ranks=1, section=section) for _ in range(2)]
    wait_for([tmp_path / f"pid-{rank}" for rank in range(2)])
    code, _, err = fork_server.run("host_acts", script=script, ranks=1, section=section)
    assert code == 2
    assert gives(err, HOST, "too many", "2 hosts", f"{HOST}, {HOST}")
    assert err.count("\n") == 1
    os.kill(launched[0].pid, signal.SIGTERM)
    assert ended(launched)[0] == [75, 75]

    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        section = {"nodes": 2, "rendezvous": address, "timeout": 20.0, "node_rank": 1}
        host = fork_server.start("host_acts", script=script, ranks=1, section=section)
        connection, _ = other.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            assert host.wait() == 2
    assert gives(host.err, address, "--rendezvous")
    assert host.err.count("\n") == 1

"""`lockstep doctor --ranks N`: values, figures, and who is named when a rank is slow, wrong, hanging or dead."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from kit.commands import run_lockstep
from kit.failures import gives
from kit.worlds import in_process, in_world

from lockstep.config.schema import Launch
from lockstep.distributed import measurements
from lockstep.distributed.measurements import _OPERATIONS, TimedPair, timed_collectives, timed_pairs
from lockstep.doctor.findings import Finding, FindingState
from lockstep.doctor.links import RankPlace, check_of_clocks, check_of_hosts, check_of_pairs, check_of_values
from lockstep.doctor.ranks import Measurement, _pairs, check_ranks
from lockstep.launch.local import launch

SECTION = Launch(timeout=20, device="cpu")


def _measured(fault: Callable[[], None] | None = None) -> tuple[list[Any], list[TimedPair]]:
    from lockstep.distributed.process_group import joined

    if fault is not None:
        fault()
    measurements._LONGEST_CALL_S = 60.0  # no size is left out on a loaded machine
    with joined(SECTION, grouped=True) as world:
        rows = list(timed_collectives(world, [64, 8192]))
        pairs = timed_pairs(world, list(itertools.combinations(range(world.size), 2)), 1 << 16)
        return rows, pairs


def test_all_operations_are_right_and_measured_on_three_ranks() -> None:
    results = in_world(3, _measured)
    rows, pairs = results[0]
    assert all(other == (rows, pairs) for other in results)
    assert [row.operation for row in rows] == [name for name in _OPERATIONS for _ in range(2)]
    assert all(row.is_right and row.seconds > 0 for row in rows)
    assert [(pair.first, pair.second) for pair in pairs] == [(0, 1), (0, 2), (1, 2)]
    assert all(pair.is_right and 0 < pair.latency < 1 and pair.bandwidth > 0 for pair in pairs)
    by_name = {row.operation: row for row in rows}
    reduced = by_name["all-reduce"]
    assert reduced.bus_factor == pytest.approx(4 / 3)
    assert by_name["all-gather"].bus_factor == pytest.approx(2 / 3)
    assert by_name["all-reduce"].bus_bandwidth == pytest.approx(
        4 / 3 * by_name["all-reduce"].size / by_name["all-reduce"].seconds
    )


def _alter_what_arrives() -> None:
    import torch.distributed as dist

    if os.environ["RANK"] == "1":
        for name in ("all_reduce", "broadcast"):
            setattr(dist, name, partial(_altered, getattr(dist, name)))


def _altered(call: Callable[..., None], tensor: Any, *rest: Any) -> None:
    call(tensor, *rest)
    tensor[-1] += 1


def test_wrong_values_are_named() -> None:
    rows, _ = in_world(2, _measured, _alter_what_arrives)[0]
    assert {row.operation for row in rows if not row.is_right} == {"all-reduce", "broadcast"}
    (finding,) = check_of_values(rows)
    assert finding.state is FindingState.WRONG
    assert gives(finding.seen, "broadcast", "64 B")


def _slow_messages() -> None:
    from lockstep.distributed import measurements

    seconds = measurements._seconds
    if os.environ["RANK"] == "2":
        measurements._seconds = lambda call, device: 0.5 + seconds(call, device)


def test_a_slow_link_is_named() -> None:
    _, pairs = in_world(3, _measured, _slow_messages)[0]
    hosts = [RankPlace(f"node{rank}", 0.0, True) for rank in range(3)]
    (finding,) = check_of_pairs(pairs, hosts)
    assert finding.state is FindingState.WARNING
    assert re.match(r"all links of node2 .* node0 and node2: \S+ \S+ from node2; .*node1 and node2: ", finding.seen)
    (one,) = check_of_pairs([replace(pair, there=9.0, back=1.0 if pair.second == 1 else 9.0) for pair in pairs], hosts)
    assert gives(one.seen, "node0 and node1", "1 B/s from node1", "9 B/s")


def test_a_changed_message_is_named() -> None:
    hosts = [RankPlace(name, 0.0, True) for name in "ab"]
    (finding,) = check_of_pairs([TimedPair(0, 1, 1e-4, 1e9, 1e9, True)], hosts)
    assert finding.state is FindingState.OK
    (finding,) = check_of_pairs([TimedPair(0, 1, 1e-4, 1e9, 1e9, False)], hosts)
    assert finding.state is FindingState.WRONG


def test_slow_links_between_gpus_of_a_host_are_named() -> None:
    pairs = [TimedPair(0, 1, 1e-5, 2e11, 2e11, True), TimedPair(0, 2, 1e-5, 2e10, 2e11, True)]
    (finding,) = check_of_pairs(pairs, [RankPlace("a", 0.0) for _ in range(3)])
    assert gives(finding.seen, "rank 0 on a", "rank 2", "18.6 GiB/s")
    (finding,) = check_of_pairs(pairs, [RankPlace("a", 0.0, True) for _ in range(3)])
    assert finding.state is FindingState.OK


def test_a_host_whose_clock_differs_is_named_once() -> None:
    places = [RankPlace(host, clock) for host, clock in (("a", 0.0), ("a", 0.1), ("b", 20.0), ("b", 20.0))]
    (finding,) = check_of_clocks(places)
    assert finding.state is FindingState.WRONG
    assert gives(finding.seen, "b", "20.0 s ahead", "a")
    assert check_of_clocks(places[:2]) == []


def test_what_is_wrong_with_hosts_is_named_once() -> None:
    full, old = (Finding(FindingState.WRONG, text, "Do.", "x") for text in ("/dev/shm is full", "torch is old"))
    places = [RankPlace("a", 0.0, findings=(full,)), RankPlace("a", 0.0), RankPlace("b", 0.0, findings=(full, old))]
    texts = [finding.seen for finding in check_of_hosts(places)]
    assert texts == ["on a, b: /dev/shm is full", "on b: torch is old"]


def test_many_ranks_are_measured_by_hosts_and_neighbors() -> None:
    places = [RankPlace(f"h{rank // 8}", 0.0) for rank in range(24)]
    pairs = _pairs(places)
    assert {(0, 8), (0, 16), (8, 16), (0, 1), (22, 23)} <= set(pairs)
    assert len(pairs) == 3 + 21


# --- ranks that end or hang -------------------------------------------------------------------------------------------


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    time.sleep(60)


def _entry(fault: Callable[[], None]) -> int:
    from lockstep.distributed import measurements

    if os.environ["RANK"] == "1":
        measurements.timed_pairs = lambda *_: fault()  # type: ignore[assignment, return-value]
    return check_ranks(Measurement(Launch(timeout=1.5, device="cpu"), 64, 80, as_json=False), None)


def _launched(fault: Callable[[], None]) -> tuple[int, str]:
    result = launch(partial(_entry, fault), 2, Launch(timeout=1.5, device="cpu"), None)
    return result.code, result.text


@pytest.mark.parametrize(("fault", "text"), [(_end, "rank 1 was killed by SIGKILL"), (_hang, "rank 1 did not answer")])
def test_a_dead_or_hung_rank_is_named_within_the_timeout(fault: Callable[[], None], text: str) -> None:
    began = time.monotonic()
    code, message = in_process(_launched, fault)
    assert code == 1
    assert text in message
    assert time.monotonic() - began < 25


def test_the_command_prints_figures() -> None:
    done = run_lockstep("doctor", "--ranks", 2, "--size", "1KiB", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert len(content["collectives"]) == len(_OPERATIONS)
    assert [finding["state"] for finding in content["findings"]] == ["ok", "ok"]
    assert "Warning" not in done.stderr
    done = run_lockstep("doctor", "--ranks", 2, "--size", "1KiB")
    assert gives(done.stdout, "2 ranks", "1 host")
    assert max(map(len, done.stdout.splitlines())) <= 80

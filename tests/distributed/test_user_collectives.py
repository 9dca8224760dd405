"""What user code prints, gathers and broadcasts, inside a run and outside of one."""

from __future__ import annotations

import pytest

from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.user_collectives import broadcast, current_group, gather, print_once


@pytest.mark.parametrize(("rank", "printed"), [(None, "hello\n"), ("0", "hello\n"), ("1", "")])
def test_outside_a_run_the_launchers_first_rank_prints(
    rank: str | None, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    print_once("hello")
    assert capsys.readouterr().out == printed


def test_inside_a_run_its_first_rank_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with current_group(LocalGroup()):
        print_once("hello")
        assert (gather(1), broadcast(2)) == ([1], 2)
    assert capsys.readouterr().out == "hello\n"

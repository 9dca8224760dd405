"""The reason of an abort is in what the rank has printed last."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep.core.failure_kinds import FailureKind
from lockstep.launch.ends import End, end_of_process
from lockstep.launch.local import result_of
from lockstep.launch.rank_stacks import with_last_words

SIZES = "[enforce fail at pair.cc:456] 56 vs 4. Received data size doesn't match expected size."
THROWN = f"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  {SIZES}\n"
STACK = """Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "/b.py", line 1 in run

Thread 0x2 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 5 in all_reduce
  File "/my/model.py", line 33 in forward
  File "/y/rank.py", line 9 in run_rank
"""


def ended(logs: Path, printed: str, exitcode: int = -6) -> tuple[End, str]:
    before = "what():  of an earlier launch\n"
    (logs / "rank-1.log").write_text(before + printed)
    end = with_last_words(end_of_process(exitcode, 1.0), logs / "rank-1.log", len(before))
    return end, result_of([_PEER, end], 9.0).text


_PEER = End(FailureKind.ENDED, "", 9.0)


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (
            THROWN + STACK,
            "was killed by SIGABRT: the ranks called different collectives, or with tensors of different sizes, "
            f"at /my/model.py:33 in forward, {SIZES}",
        ),
        (
            "step 3\nfree(): invalid pointer\n" + STACK,
            "SIGABRT: at /my/model.py:33 in forward, free(): invalid pointer",
        ),
        ("terminate called without an active exception\n", "SIGABRT: terminate called without an active exception"),
        (
            "step 3: Assertion hope failed?\nx.cpp:3: f(): Assertion `a > b' failed.\nstep 4\n",
            "SIGABRT: x.cpp:3: f(): Assertion `a > b' failed.",
        ),
        ("step 3\n", "was killed by SIGABRT"),
        ("", "was killed by SIGABRT"),
        ("  what():  " + "x" * 10_000, "was killed by SIGABRT: " + "x" * 300),
    ],
)
def test_the_reason_of_an_abort(tmp_path: Path, printed: str, text: str) -> None:
    end, shown = ended(tmp_path, printed)
    assert end.text.endswith(text)
    assert shown == f"rank 1 {end.text}"


def test_a_long_line_is_searched_in_no_time(tmp_path: Path) -> None:
    began = time.process_time()
    end, _ = ended(tmp_path, "Assertion " * 25_000)
    assert end.text == "was killed by SIGABRT"
    assert time.process_time() - began < 2.0


def test_the_line_of_a_crash(tmp_path: Path) -> None:
    end, _ = ended(tmp_path, STACK.replace("Aborted", "Segmentation fault"), -11)
    assert end.text == "was killed by SIGSEGV: at /my/model.py:33 in forward"


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "s3cr3t-s3cr3t-s3cr3t")
    end, _ = ended(tmp_path, "  what():  denied to s3cr3t-s3cr3t-s3cr3t\n")
    assert "s3cr3t" not in end.text
    assert "denied to" in end.text


def test_other_ends_have_none(tmp_path: Path) -> None:
    assert ended(tmp_path, THROWN, -9)[0].text == "was killed by SIGKILL"

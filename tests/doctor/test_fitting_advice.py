"""`lockstep doctor RUN` advises what fits the failure of this run, and states each message once."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.failures import gives
from kit.recorded import KILLED, record_end, recorded_run

from lockstep.core.failure_kinds import FailureKind
from lockstep.doctor.run import describe_run, diagnose_run
from lockstep.launch.ends_file import gist


def test_of_a_survived_failure_what_happened_is_stated_without_the_advice(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "")
    memory = "out of memory: 2.00 GiB were requested, and 21.5 GiB were free (the machine's limit)"
    record_end(
        run,
        kind="out_of_memory",
        text=f"{memory}. Set batch.micro_size to 4 (it is 8). If that is not enough: add ranks.",
        step=None,
    )
    record_end(run, kind="done", text="", cause=None, ranks=[], step=9)
    (run / "summary.json").write_text("{}")
    assert any(gives(note, 1, memory) and "batch.micro_size" not in note for note in diagnose_run(run).notes)


SET_FAILED = (
    "data.evaluation.held: sample 17 can't be read: OSError: corrupt jpeg (mine.py:47). Mend the sample, or leave it "
    "out of the set: data.bad_samples is for training samples only"
)
GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:565. "
    "This is typically caused by a remote worker crashing. Check the logs before reporting. GLHF! \U0001f3d6\ufe0f"
)


def test_a_sample_of_an_evaluation_set_is_not_left_out_of_the_training_data(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, f"OSError: corrupt jpeg\n\n{SET_FAILED}\n", f"RuntimeError: {GLOO}\n")
    failed = {"rank": 0, "host": "a", "kind": "sample", "text": SET_FAILED, "time": 100.0}
    closed = {"rank": 1, "host": "a", "kind": "peer_failed", "text": f"RuntimeError: {GLOO}", "time": 100.1}
    record_end(run, kind="sample", text=f"rank 0: {SET_FAILED}", cause=0, ranks=[failed, closed])
    text = describe_run(diagnose_run(run), None)
    assert f"cause: {FailureKind.SAMPLE.title}" in text
    assert "[[17, 17]]" not in text
    assert text.count(SET_FAILED) == 2, "as the state, and as evidence"
    assert text.count("Connection closed by peer") == 1
    assert gives(text, "rank 1 on a", "+0.1 s", FailureKind.PEER_FAILED.title)


def test_the_gist_of_a_list_is_one_line() -> None:
    items = [
        f"  sample {index} of data.train can't be used: OSError: cannot read it (mine.py:48)" for index in range(9)
    ]
    shown = gist("\n".join(["9 samples can't be used:", *items]))
    assert shown.startswith("9 samples can't be used: sample 0 of data.train can't be used: ")
    assert len(shown) <= 500
    assert gist("two:\n  a\n  b") == "two: a; b"
    assert gist("none:\n") == "none:"


@pytest.mark.parametrize(
    "allocator", ["torch.OutOfMemoryError: CUDA out of memory.", "DefaultCPUAllocator: can't allocate"]
)
def test_memory_that_ran_out_is_one_failure(tmp_path: Path, allocator: str) -> None:
    message = "out of memory in the forward pass of micro-batch 1 of 8, update 1: 2.00 GiB were requested"
    run = recorded_run(tmp_path, "", f"{allocator}\n\n{message}\n")
    ranks = [{**KILLED, "kind": "out_of_memory", "text": message}]
    record_end(run, kind="out_of_memory", text=f"rank 1: {message}", ranks=ranks)
    assert [item.failure.name for item in diagnose_run(run).seen] == ["out of memory"]


def test_a_failed_save_that_a_later_one_made_good_asks_for_nothing(tmp_path: Path) -> None:
    failed = '{"saved": 2, "step": 2, "bytes": 0, "seconds": 1, "lost_seconds": 0, "failure": "no space"}\n'
    later = '{"saved": 4, "step": 4, "bytes": 9, "seconds": 1, "lost_seconds": 0}\n'
    for events, is_named in ((failed, True), (failed + later, False)):
        run = recorded_run(tmp_path / str(is_named), "fine\n", metrics='{"step": 10, "loss": 1.0}\n', events=events)
        (run / "summary.json").write_text("{}")
        assert ("save failed" in describe_run(diagnose_run(run), None)) == is_named

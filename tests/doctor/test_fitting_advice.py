"""`lockstep doctor RUN` advises what fits the failure of this run, and states each message once."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.recorded import KILLED, record_end, recorded_run

from lockstep.doctor.run import describe_run, diagnose_run
from lockstep.launch.ends_file import gist


def test_of_a_survived_failure_what_happened_is_stated_without_the_advice(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "")
    memory = "out of memory: 2.00 GiB were requested, and 21.5 GiB were free (the machine's limit)"
    record_end(run, text=f"{memory}. Set batch.micro_size to 4 (it is 8). If that is not enough: add ranks.", step=None)
    record_end(run, code=0, text="", cause=None, ranks=[], step=9)
    (run / "summary.json").write_text("{}")
    assert f"It survived one failure: {memory}." in diagnose_run(run).notes


SET_FAILED = (
    "data.evaluation.held: sample 17 can't be read: OSError: corrupt jpeg (mine.py:47). Mend the sample, or leave it "
    "out of the set: data.bad_samples is for training samples alone"
)
GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:565. "
    "This is typically caused by a remote worker crashing. Check the logs before reporting. GLHF! \U0001f3d6\ufe0f"
)


def test_a_sample_of_an_evaluation_set_is_not_left_out_of_the_training_data(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, f"OSError: corrupt jpeg\n\n{SET_FAILED}\n", f"RuntimeError: {GLOO}\n")
    failed = {"rank": 0, "host": "a", "end": "message", "code": 1, "text": SET_FAILED, "time": 100.0}
    closed = {"rank": 1, "host": "a", "end": "peer_failed", "code": 1, "text": f"RuntimeError: {GLOO}", "time": 100.1}
    record_end(run, text=f"rank 0: {SET_FAILED}", cause=0, ranks=[failed, closed])
    text = describe_run(diagnose_run(run), None)
    assert "cause: evaluation sample can't be used" in text
    assert "[[17, 17]]" not in text
    assert "policy: skip" not in text
    assert text.count(SET_FAILED) == 2, "as the state, and as evidence"
    assert "logs/rank-0.log:3: the same" in text
    assert text.count("Connection closed by peer") == 1
    assert "rank 1 on a  +0.1 s  failed because another rank had ended" in text
    assert "GLHF" not in text


def test_too_many_bad_samples_are_a_known_failure_that_a_higher_limit_resumes(tmp_path: Path) -> None:
    lines = [
        f"  sample {index} of data.train can't be used: OSError: cannot read {index} (mine.py:48)" for index in range(6)
    ]
    head = (
        "6 samples of data.train can't be used, and data.bad_samples.limit is 5. Mend the data, or set a higher limit:"
    )
    message = "\n".join([head, *lines])
    run = recorded_run(tmp_path, f"step 3\n{message}\n", metrics='{"step": 3, "loss": 1.0}\n')
    ends = [
        {"rank": rank, "host": "a", "end": "message", "code": 1, "text": gist(message), "time": 1.0} for rank in (0, 1)
    ]
    record_end(run, text=gist(message), cause=1, ranks=ends)
    diagnosis = diagnose_run(run)
    assert [item.failure.name for item in diagnosis.seen] == ["too many bad samples"]
    assert diagnosis.resume == f"lockstep train {run} data.bad_samples.limit=12"
    text = describe_run(diagnosis, None)
    assert f"with a higher limit: lockstep train {run} data.bad_samples.limit=12" in text
    assert text.count("cannot read 0") == 2, "as the state, and as evidence"
    assert not any("No known failure" in note for note in diagnosis.notes)


def test_the_gist_of_a_list_has_whole_items() -> None:
    items = [
        f"  sample {index} of data.train can't be used: OSError: cannot read it (mine.py:48)" for index in range(9)
    ]
    shown = gist("\n".join(["9 samples can't be used:", *items]))
    assert shown.endswith("(mine.py:48); and others")
    assert len(shown) <= 500
    assert gist("two:\n  a\n  b") == "two: a; b"
    assert gist("none:\n") == "none:"


ONE = "; micro-batches have one sample already. Set parallel.strategy to fsdp"


@pytest.mark.parametrize(
    ("owner", "more", "name", "lowers"),
    [
        ("cuda:0's", ". Set batch.micro_size to 4 (it is 8)", "GPU out of memory", True),
        ("the machine's", ". Set batch.micro_size to 4 (it is 8)", "out of memory on a CPU", True),
        ("ulimit -v", "", "out of memory on a CPU", True),
        ("the machine's", ONE, "one sample doesn't fit in memory", False),
        ("cuda:0's", ONE, "one sample doesn't fit in memory", False),
    ],
)
def test_memory_that_ran_out_is_named_by_its_device_and_one_sample_is_not_halved(
    tmp_path: Path, owner: str, more: str, name: str, lowers: bool
) -> None:
    message = (
        "out of memory in the forward pass of micro-batch 1 of 8, update 1: 2.00 GiB were requested, and 1.0 GiB of "
    )
    message += f"9.0 GiB were free ({owner} limit); this rank's peak was 284 MiB{more}"
    allocator = (
        "torch.OutOfMemoryError: CUDA out of memory." if "cuda" in owner else "DefaultCPUAllocator: can't allocate"
    )
    run = recorded_run(tmp_path, "", f"{allocator}\n\n{message}\n")
    record_end(run, text=f"rank 1: {message}", ranks=[{**KILLED, "end": "message", "text": message}])
    diagnosis = diagnose_run(run)
    assert [item.failure.name for item in diagnosis.seen] == [name]
    assert ("-> Lower batch.micro_size" in describe_run(diagnosis, None)) == lowers


def test_a_failed_save_that_a_later_one_made_good_asks_for_nothing(tmp_path: Path) -> None:
    failed = '{"saved": 2, "step": 2, "bytes": 0, "seconds": 1, "lost_seconds": 0, "failure": "no space"}\n'
    later = '{"saved": 4, "step": 4, "bytes": 9, "seconds": 1, "lost_seconds": 0}\n'
    for events, is_named in ((failed, True), (failed + later, False)):
        run = recorded_run(tmp_path / str(is_named), "fine\n", metrics='{"step": 10, "loss": 1.0}\n', events=events)
        (run / "summary.json").write_text("{}")
        assert ("save failed" in describe_run(diagnose_run(run), None)) == is_named

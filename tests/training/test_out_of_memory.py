"""Out of memory ends a run in one sentence: what was asked for, what there is, where, and what to change."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from kit.commands import Done, run_lockstep
from kit.failures import gives

from lockstep.config.loading import validate
from lockstep.config.schema import Config
from lockstep.core.control_groups import MemoryLimit
from lockstep.core.out_of_memory import error_location, note_location, out_of_memory_cause, requested_bytes
from lockstep.loop.out_of_memory import advice, explain, memory_factors, sizes_too_large

MODELS = Path(__file__).with_name("out_of_memory_models.py")
CONFIG = {
    "model": {"kind": "custom", "target": f"{MODELS}:Greedy"},
    "objective": {"kind": "classification"},
    "data": {
        "train": {"kind": "custom", "target": f"{MODELS}:Items"},
        "evaluation": {"held-out": {"kind": "custom", "target": f"{MODELS}:Items"}},
    },
    "batch": {"global_size": 16, "micro_size": 8},
    "run": {"steps": 1, "folder": "run"},
    "launch": {"device": "cpu"},
    "recovery": {"restarts": 0},
    "monitor": {"tensorboard": False},
}
FREE = r"[\d.]+ [MG]iB of [\d.]+ [GT]iB were free \((the machine's|the control group's|ulimit -v) limit\); "
FREE += r"this rank's peak was [\d.]+ MiB"


def train(folder: Path, *words: object) -> Done:
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    return run_lockstep("train", "run.yaml", *words, cwd=folder)


def sentence(done: Done) -> str:
    """What the run ended with; nothing else on the terminal is about the error."""
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "out of memory" in line]
    return line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(
            ["--model.arguments.where=forward"],
            r"in the forward pass of micro-batch 1 of 2, update 1: 1,?024 TiB were requested, and "
            rf"{FREE}\. One sample alone would need 128 TiB: make the samples or the model smaller\.",
            id="forward",
        ),
        pytest.param(
            ["--model.arguments.where=backward"],
            rf"in the backward pass of micro-batch 1 of 2, update 1: {FREE}\. Set "
            r"batch\.micro_size to 4 \(it is 8\)\. "
            r"If that is not enough: set memory\.activation_checkpointing\.mode to full; or set parallel\.strategy .*",
            id="backward, in Python's words",
        ),
        pytest.param(
            ["--model.arguments.where=init"],
            rf"while the model and its training state were set up: 1,?024 TiB were requested, and {FREE}\. Set "
            r"parallel\.strategy to fsdp on more ranks.*",
            id="before the first update",
        ),
        pytest.param(
            ["--model.arguments.where=evaluation"],
            rf"in the evaluation on held-out: 1,?024 TiB were requested, and {FREE}\. One sample alone .*",
            id="evaluation",
        ),
        pytest.param(
            ["--data.train.arguments.bad=9", "--data.train.arguments.memory=true", "--data.loader.workers=1"],
            rf"while reading samples? .*\b9\b.*: {FREE}\. Set batch\.micro_size to 4 \(it is 8\)\. "
            r"If that is not "
            r"enough: set data\.loader\.workers below 1, .*",
            id="a data worker",
        ),
    ],
)
def test_one_sentence_names_place_sizes_and_remedy(tmp_path: Path, words: list[str], expected: str) -> None:
    done = train(tmp_path, *words)
    assert done.returncode == 1
    assert re.fullmatch(f"lockstep: out of memory {expected}", sentence(done)), sentence(done)
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "out_of_memory_models.py" in log
    assert sentence(done).removeprefix("lockstep: ").partition(" peak was ")[0] in log


def test_one_rank_of_two_is_named_and_has_the_traceback_in_its_log(tmp_path: Path) -> None:
    done = train(tmp_path, "--ranks", 2, "--model.arguments.where=backward", "--model.arguments.rank=1")
    assert done.returncode == 1
    expected = r"lockstep: rank 1: out of memory in the backward pass of micro-batch 1 of 1, update 1: .*"
    assert re.fullmatch(expected, sentence(done))
    assert gives(sentence(done), "Set batch.micro_size to 4", 8, "2 ranks")
    assert "MemoryError" in (tmp_path / "run/logs/rank-1.log").read_text()


def test_the_advised_micro_batch_fits(tmp_path: Path) -> None:
    """Under a real limit on the process's address space, where 8 samples don't fit, and 6 would."""
    done = train(tmp_path, "--model.arguments.where=limit")
    assert gives(sentence(done), "1.25 GiB")
    assert "(ulimit -v limit)" in sentence(done)
    found = re.search(r"Set batch\.micro_size to (\d+)", sentence(done))
    assert found is not None
    assert train(tmp_path, "--model.arguments.where=limit", f"--batch.micro_size={found[1]}").returncode == 0


# --- killed by the kernel -------------------------------------------------------------------------------------------

GROUPS = Path("/sys/fs/cgroup/memory")


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    folder = GROUPS / "lockstep-test-out-of-memory"
    try:
        folder.mkdir(exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.drill
def test_a_rank_that_the_kernel_kills_for_memory_is_named_so(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    words = ["-m", "lockstep", "train", "run.yaml", "--ranks=2", "--model.arguments.where=hog"]
    with control_group(3 << 30) as group:
        enter = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} {' '.join(words)}"
        done = subprocess.run(["sh", "-c", enter], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    expected = (
        "lockstep: rank 0 was killed by SIGKILL: out of memory (the kernel's OOM killer, in this control group). "
        "Set batch.micro_size to 4 (it is 8)."
    )
    assert expected in done.stderr


@pytest.mark.drill
def test_a_rank_that_the_kernel_kills_for_memory_starts_again_with_smaller_micro_batches(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "recovery": {}}))
    words = ["-m", "lockstep", "train", "run.yaml", "--model.arguments.where=group"]
    with control_group(3 << 30) as group:
        enter = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} {' '.join(words)}"
        done = subprocess.run(["sh", "-c", enter], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert gives(done.stderr, "SIGKILL", "out of memory", "OOM")
    assert gives(done.stderr, "batch.micro_size", 4, 8)


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which "
                "15.50 GiB is free."
            ),
            20 << 30,
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
            64,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), 8),
        (MemoryError("Unable to allocate 1.50 KiB for an array with shape (3,)"), 1536),
        (MemoryError(), None),
        (RuntimeError("std::bad_alloc"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), None),
        (OSError(12, "Cannot allocate memory"), None),
    ],
)
def test_the_words_of_every_allocator_are_known(error: Exception, asked: int | None) -> None:
    wrapper = RuntimeError("stage 1 failed")
    wrapper.__cause__ = error
    assert out_of_memory_cause(error) is error
    assert out_of_memory_cause(wrapper) is error
    assert requested_bytes(error) == asked


@pytest.mark.parametrize("error", [ValueError("out of memory"), OSError(28, "No space left"), RuntimeError("shapes")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    assert out_of_memory_cause(error) is None


def test_a_chain_of_causes_may_have_a_cycle() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert out_of_memory_cause(first) is None


def test_the_innermost_place_counts() -> None:
    inner, outer = MemoryError(), RuntimeError("a stage failed")
    outer.__cause__ = inner
    note_location(inner, "forward", "in stage 2's forward pass")
    note_location(outer, "backward", "in the schedule")
    place = error_location(outer)
    assert place == "in stage 2's forward pass"
    assert place.phase == "forward"


def _config(**sections: object) -> Config:
    return validate({**CONFIG, **sections}).config


def test_samples_that_are_read_for_an_evaluation_are_a_part_of_it() -> None:
    error = MemoryError()
    note_location(error, "data", "while samples 3, 4 were read")
    note_location(error, "evaluation", "in the evaluation on held-out")
    place = error_location(error)
    assert place is not None
    assert (place.phase, str(place)) == ("evaluation", "while samples 3, 4 were read")
    factors = memory_factors(_config(evaluation={"micro_size": 32}), 1)
    assert sizes_too_large(place.phase, factors) == {"evaluation.micro_size": 32}


def test_a_micro_batch_of_one_leaves_the_other_remedies() -> None:
    config = _config(batch={"global_size": 4, "micro_size": 1})
    assert gives(advice(memory_factors(config, 1), "forward"), "Set memory.activation_checkpointing.mode to full")


def test_what_is_computed_again_already_leaves_division() -> None:
    config = _config(
        batch={"global_size": 4, "micro_size": 1},
        memory={"activation_checkpointing": {"mode": "full"}},
        parallel={"strategy": "fsdp"},
    )
    assert gives(advice(memory_factors(config, 4), "backward"), "Start more than 4")


def test_no_micro_batch_makes_the_optimizer_state_smaller() -> None:
    advised = advice(memory_factors(_config(), 4), "update")
    assert gives(advised, "Set parallel.strategy to fsdp", 4)
    assert "micro_size" not in advised


def test_a_far_too_large_allocation_asks_for_a_smaller_micro_batch_than_half() -> None:
    factors = memory_factors(_config(batch={"global_size": 64}), 1)
    limit = MemoryLimit(total=8 << 30, free=1 << 30, owner="cuda:0's")
    assert gives(advice(factors, "forward", 32 << 30, limit), "Set batch.micro_size to 16", 64)


def test_a_full_dev_shm_is_named_and_not_the_machine() -> None:
    error = RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")
    note_location(error, "data", "while samples 1 and 2 were fetched")
    factors = memory_factors(validate({**CONFIG, "data": {**CONFIG["data"], "loader": {"workers": 2}}}).config, 1)  # type: ignore[dict-item]
    failure = explain(error, factors, torch.device("cpu"))
    assert failure is not None
    assert gives(str(failure), "samples 1 and 2", "/dev/shm", "docker run --shm-size")

"""Runs on this machine's NVIDIA GPUs: a rank on each over NCCL; where there are too few, all on one over gloo."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.runs import Trajectory, recorded_session
from kit.worlds import in_world
from training.test_same_run import config

import lockstep

PACKAGE = Path(lockstep.__file__).parent
EXACT = {"precision": {"compute": "fp32", "tf32": False}}
PATIENCE_S = 240


def on_gpus(**sections: Any) -> dict[str, Any]:
    """The config of a small transformer that computes on GPUs, in exact fp32 but for `sections`."""
    asked = {**config(12, **{**EXACT, **sections}), "launch": {"device": "cuda"}}
    return {**asked, "run": {**asked["run"], "allow_untested": True}}


def recorded_on_gpus(configs: list[dict[str, Any]], ranks: int, updates: int = 4) -> list[Trajectory | str]:
    """What each run did, as the first rank saw it, or the error it ended with."""
    return in_world(ranks, _record_each, configs, updates, patience=PATIENCE_S)[0]


def _record_each(configs: list[dict[str, Any]], updates: int) -> list[Trajectory | str]:
    with group():
        return [_recorded_or_error(config, updates) for config in configs]


def _recorded_or_error(config: dict[str, Any], updates: int) -> Trajectory | str:
    try:
        with lockstep.session(config) as session:
            return recorded_session(session, updates)
    except (RuntimeError, ValueError, lockstep.ConfigError):
        return traceback.format_exc()[-3000:]


@contextmanager
def group() -> Iterator[None]:
    """The process group of these ranks."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    if ranks <= gpus:
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Where the host waits for the GPU meanwhile: the innermost functions of Lockstep, innermost first."""
    waits: list[str] = []

    def note(message: Warning | str, *unused: object, **named: object) -> None:
        if str(message).startswith("called a synchronizing"):
            frames = [
                frame for frame in reversed(traceback.extract_stack()) if Path(frame.filename).is_relative_to(PACKAGE)
            ]
            waits.append(" < ".join(f"{Path(frame.filename).name}:{frame.name}" for frame in frames[:3]))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def on_one_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns in a process with one rank's environment and a GPU."""
    return in_world(1, function, *arguments, patience=PATIENCE_S)[0]

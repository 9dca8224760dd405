"""Proofs of small configs, from a process that is fit to fork ranks: nothing has been computed in it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.worlds import in_world
from lockstep.assembly.user_objects import UserObjects
from lockstep.config.loading import validate
from lockstep.core.ranks import RankEnvironment
from lockstep.distributed.process_group import joined
from lockstep.proof.cases import plan_verification
from lockstep.proof.rows import Row
from lockstep.proof.runner import VerificationJob, record_references, run_case

_NOTHING = UserObjects()


def proved(config: dict[str, Any], **how: Any) -> list[Row]:
    """What `lockstep.verify(config, **how)` returns."""
    rows: list[Row] = in_world(1, _prove, config, how)[0]
    return rows


def _prove(config: dict[str, Any], how: dict[str, Any]) -> list[Row]:
    import lockstep

    for name in RankEnvironment().variables():
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:  # otherwise the output of crashed ranks would be kept
        tempfile.tempdir = folder
        return lockstep.verify(config, **how)


def text(global_size: int = 13, **sections: Any) -> dict[str, Any]:
    """A small transformer with a tied weight on ragged text, clipped; 40 samples, so that the fourth update ends an
    epoch."""
    ragged = {"kind": "custom", "target": "kit.ragged:Ragged", "collate": "kit.ragged:collate"}
    return {
        "model": {"kind": "transformer", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocabulary": 64},
        "data": {"train": ragged},
        "batch": {"global_size": global_size},
        "optim": {"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
        "launch": {"device": "cpu"},
        "run": {"steps": 8},
        **sections,
    }


def with_faults(
    config: dict[str, Any], faults: list[Any], ranks: int = 2, steps: int = 4, given: UserObjects = _NOTHING
) -> list[list[Row]]:
    """The rows of DDP on N ranks, for each fault; all in one world, with one reference. None: no fault."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = validate(config).config
        proof = plan_verification(loaded, ["ddp"], [ranks], "fp32", gpus=0)
        in_world(1, record_references, proof.references, given, Path(folder), steps)
        return in_world(ranks, _with_faults, proof.cases, Path(folder), faults, steps, given)[0]


def _with_faults(cases: Any, folder: Path, faults: list[Any], steps: int, given: UserObjects) -> list[list[Row]]:
    found = []
    with joined(cases[0].config.launch, grouped=True) as world:
        for number, fault in enumerate(faults):
            numbered = [replace(case, number=100 * number + case.number) for case in cases]
            job = VerificationJob(folder, tuple(numbered), given, steps, "fp32", fault, None)
            found.append([run_case(job, case, world) for case in numbered])
    return found

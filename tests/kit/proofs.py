"""Proofs of small configs, from a process that is fit to fork ranks: nothing has been computed in it."""

from __future__ import annotations

import os
from typing import Any

from kit.worlds import in_world
from lockstep.core.ranks import RankEnvironment
from lockstep.proof.rows import Row


def proved(config: dict[str, Any], **how: Any) -> list[Row]:
    """What `lockstep.verify(config, **how)` returns."""
    rows: list[Row] = in_world(1, _prove, config, how)[0]
    return rows


def _prove(config: dict[str, Any], how: dict[str, Any]) -> list[Row]:
    import lockstep

    for name in RankEnvironment().variables():
        os.environ.pop(name, None)
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

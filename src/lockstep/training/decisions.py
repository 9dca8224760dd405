"""The decision of the leader of several hosts about the ranks of a round, as it is sent to the other hosts.

leader    entry of its ranks --> {"resume": {...}} --> launcher of each host --> entry of its ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from lockstep.training.job import Job


def decision_of(entry: Callable[[], int]) -> dict[str, Any]:
    """Return what other hosts have to know of an entry, which is a `partial` of a job and its folder."""
    resume = cast("Job", entry.args[0]).resume  # type: ignore[attr-defined]
    fields = {name: getattr(resume, name) for name in ("fresh", "step", "accept_changes")}
    return {"resume": {**fields, "forks": resume.origin is not None}}


def decided(job: Job, decision: Mapping[str, Any]) -> Job:
    """Return the job of this host as the leader has decided."""
    fields = dict(decision["resume"])
    origin = job.resume.origin if fields.pop("forks") else None
    return replace(job, resume=replace(job.resume, origin=origin, **fields))

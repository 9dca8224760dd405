"""The decision of the leader of several hosts about the ranks of a round, as it is sent to the other hosts.

    leader    entry of its ranks --> {"resume": {...}, "settings": {...}} --> each launcher --> entry of its ranks

Settings are those that the supervisor has changed since the start, by their keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from lockstep.config.schema import Config
from lockstep.config.writing import to_plain
from lockstep.training.job import Job


def decision_of(begun: Job, entry: Callable[[], int]) -> dict[str, Any]:
    """Return what other hosts have to know of an entry, which is a `partial` of a job and its folder.

    Args:
        begun: The job as this launcher has begun it.
    """
    job = cast("Job", entry.args[0])  # type: ignore[attr-defined]
    fields = {name: getattr(job.resume, name) for name in ("fresh", "step", "accept_changes")}
    before = dict(flat(to_plain(begun.config)))
    settings = {key: value for key, value in flat(to_plain(job.config)) if before.get(key) != value}
    return {"resume": {**fields, "forks": job.resume.origin is not None}, "settings": settings}


def decided(job: Job, decision: Mapping[str, Any]) -> Job:
    """Return the job of this host as the leader has decided."""
    fields = dict(decision["resume"])
    origin = job.resume.origin if fields.pop("forks") else None
    config = job.config
    if decision["settings"]:
        plain = to_plain(config)
        for key, value in decision["settings"].items():
            *sections, name = key.split(".")
            section = plain
            for part in sections:
                section = section[part]
            section[name] = value
        config = Config.model_validate_json(json.dumps(plain))  # in Python's mode a list is no tuple
    return replace(job, config=config, resume=replace(job.resume, origin=origin, **fields))


def flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of nested sections by their keys."""
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, item in value.items():
        yield from flat(item, f"{name}.{key}" if name else str(key))

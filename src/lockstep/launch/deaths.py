"""The lines of a run's record of samples whose reading has ended a process; see `deadly_samples`, which writes them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.core.files import MAX_JSON_BYTES, changed, read_bounded
from lockstep.core.heartbeat import Reading
from lockstep.monitor.folder import ENVIRONMENT, LOGS

FILE = "deadly_samples.jsonl"


class Death(NamedTuple):
    """An end of a process, and the samples of which it was reading one.

    Attributes:
        data: A digest of the section that they are of.
        evaluation_set: The name of their evaluation set; None: they are training data.
    """

    data: str
    samples: frozenset[int]
    what: str
    evaluation_set: str | None = None

    def __str__(self) -> str:
        return f"{self.what}; it was reading {Reading(tuple(sorted(self.samples)), self.evaluation_set)}"


def deaths_in(logs: Path) -> list[Death]:
    """Return what a run's record has, of all data, as far as it can be read."""
    try:
        lines = read_bounded(logs / FILE, MAX_JSON_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [death for line in lines if (death := _death(line)) is not None]


def _death(line: str) -> Death | None:
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        fields: dict[str, Any] = json.loads(line)
        samples = frozenset(fields["samples"])
        if samples and all(type(sample) is int for sample in samples):
            name = fields.get("evaluation_set")
            return Death(str(fields["data"]), samples, str(fields["what"]), None if name is None else str(name))
    return None


def deaths_of_last_launch(run: Path) -> list[Death]:
    """Return what a run's record has, if its last launch has written there."""
    is_new = changed(run / LOGS / FILE) > changed(run / ENVIRONMENT)
    return deaths_in(run / LOGS) if is_new else []

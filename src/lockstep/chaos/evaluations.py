"""The evaluations that a round has recorded, compared with those of the run without a fault.

events.jsonl    {"evaluation": "held-out", "step": 6, "loss": 1.25, ...} --> (held-out, 6): loss 1.25, ...

After memory ran out, or with fewer ranks, sums are rounded otherwise: then metrics are compared within a tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.chaos.references import distance
from lockstep.monitor.events import EVENTS

_TOLERANCE = 1e-2  # of a metric, relatively; the formats of 16 bits need as much
_OTHER = ("evaluation", "step", "samples", "seconds")


def differing(run: Path, undisturbed: Path, reference: Path, *, exact: bool) -> int:
    """Return the number of evaluations that a run lacks, has twice, or has with other metrics.

    Args:
        reference: The run with which the round is compared from where that one resumed; else the undisturbed one.
        exact: Whether metrics must be bitwise equal.

    Raises:
        OSError, ValueError, KeyError: One of the files can't be read.
    """
    expected, recorded = {**_evaluations(undisturbed), **_evaluations(reference)}, _evaluations(run)
    return sum(
        not _are_equal(recorded.get(key, ()), expected.get(key, ()), exact=exact)
        for key in expected.keys() | recorded.keys()
    )


def _evaluations(run: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the metrics by evaluation set and step, once for each time that they were recorded."""
    evaluations: dict[tuple[str, int], list[dict[str, Any]]] = {}
    file = run / EVENTS
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        event = json.loads(text)
        if "evaluation" in event:
            metrics = {name: value for name, value in event.items() if name not in _OTHER}
            evaluations.setdefault((event["evaluation"], event["step"]), []).append(metrics)
    return evaluations


def _are_equal(recorded: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], *, exact: bool) -> bool:
    if exact or len(recorded) != len(expected):
        return list(recorded) == list(expected)
    return all(_are_near(*pair) for pair in zip(recorded, expected, strict=True))


def _are_near(metrics: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    defined, also = ({name for name, value in each.items() if value is not None} for each in (metrics, expected))
    return metrics.keys() == expected.keys() and defined == also and distance(metrics, expected) <= _TOLERANCE

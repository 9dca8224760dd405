"""The identity of a run's data, which each of its checkpoints records, and whether another start has the same data.

    parts of a fingerprint   code   sample 0   sample 21  ...  sample 319
    of the checkpoint         a        b          c               d
    now                       a      not read     c               d          the same data: the checkpoint's identity

It stays the same while samples are left out, or read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.data.sources import fingerprint_parts

if TYPE_CHECKING:
    from lockstep.core.protocols import Source

Part = str | None


def identity_of(source: Source, epoch_samples: int) -> dict[str, Any]:
    """Return what identifies the data of a run, as each of its checkpoints records it."""
    return {
        "fingerprint": source.fingerprint,
        "samples": source.facts.samples,
        "epoch_samples": epoch_samples,
        "parts": [*fingerprint_parts(source)],
    }


def continued(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what identifies the data of a run that resumes from a checkpoint: as there, if it is the same data.

    Args:
        saved: Of the checkpoint; versions that didn't record parts had the same fingerprints if all samples were read.
        now: As `identity_of` returns it.
    """
    parts: Sequence[Part] = now["parts"]
    before: Sequence[Part] = saved.get("parts") or [None] * len(parts)
    alike = len(before) == len(parts) and all(map(_agree, before, parts))
    all_read = None not in parts and None not in saved.get("parts", ())
    if not alike or (all_read and now["fingerprint"] != saved["fingerprint"]):
        return now
    known = [then if part is None else part for then, part in zip(before, parts, strict=True)]
    return {**now, "fingerprint": saved["fingerprint"], "parts": known}


def _agree(before: Part, part: Part) -> bool:
    return before is None or part is None or before == part

"""Rows of the catalog about training samples: those that can't be read, and those that take their reader down."""

from __future__ import annotations

from lockstep.doctor.catalog import row

DEADLY = "sample ends its reader"
_SKIP = (
    "or leave it out: lockstep train RUN data.leave_out='[[N, N]]'; data.bad_samples='{policy: skip}' leaves all such "
    "samples out. Data that was mended may need --accept-changes."
)

OF_SAMPLES = (
    row(
        DEADLY,
        r"(?:was reading|were reading|data worker \d+ reads|\(update \d+,) "
        r"(?:sample (?P<sample>\d+)\b(?! of an evaluation)|one of samples \d(?!.* of an evaluation))",
        "Reading this sample ends or blocks the process that reads it: native code crashes, exits or waits for a lock, "
        "or a file server doesn't answer.",
        f"Mend the sample, {_SKIP}",
    ),
    row(
        "sample can't be used",
        r"\bsample (?P<sample>\d+) can't be (?:used|read|put into one batch)|"
        r"\bsamples \d.* can each be read, but not put into one batch",
        "The dataset raised an exception for this sample, or returned None or other shapes than for the others.",
        f"Mend the sample, {_SKIP}",
    ),
)

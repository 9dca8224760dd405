"""Rows of the catalog about training samples: those that can't be read, and those that take their reader down."""

from __future__ import annotations

from lockstep.doctor.catalog import row

DEADLY, DEADLY_EVALUATED = "sample ends its reader", "evaluation set ends its reader"
_READS = r"(?:(?:was reading|while it read|were reading|data worker \d+ reads) |\((?:update \d+, )?)"
_EVALUATED = r" of (?:data\.evaluation\.|an evaluation )"
_SKIP = (
    "or leave it out: lockstep train RUN data.leave_out='[[N, N]]'; data.bad_samples='{policy: skip}' leaves all such "
    "samples out. Data that was mended may need --accept-changes."
)

OF_SAMPLES = (
    row(
        DEADLY,
        rf"{_READS}(?:sample (?P<sample>\d+)\b(?!{_EVALUATED})|one of samples \d(?!.*{_EVALUATED}))",
        "Reading this sample ends or blocks the process that reads it: native code crashes, exits or waits for a lock, "
        "or a file server doesn't answer.",
        f"Mend the sample, {_SKIP}",
    ),
    row(
        DEADLY_EVALUATED,
        rf"{_READS}(?:sample \d+{_EVALUATED}|one of samples \d.*{_EVALUATED})",
        "Reading a sample of an evaluation set ends or blocks the process that reads it.",
        "Mend the sample, or leave it out of the set, then start the run again to resume. data.bad_samples and "
        "data.leave_out are for training samples alone.",
    ),
    row(
        "sample can't be used",
        r"\bsample (?P<sample>\d+) can't be (?:used|read|put into one batch)|"
        r"\bsamples \d.* can each be read, but not put into one batch",
        "The dataset raised an exception for this sample, or returned None or other shapes than for the others.",
        f"Mend the sample, {_SKIP}",
    ),
)

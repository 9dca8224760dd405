"""Rows of the catalog about samples: those that can't be read, and those that take their reader down.

Training samples can be left out by the config, those of evaluation sets can't: each kind has a row of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from lockstep.doctor.catalog import row

TOO_MANY = "too many bad samples"
LIMIT = "data.bad_samples.limit="
_OVER_LIMIT = re.compile(r"\b(\d+) samples? of data\.train can't be used, and data\.bad_samples\.limit is \d")
_READS = r"(?:(?:was reading|while it read|were reading|data worker \d+ reads) |\((?:update \d+, )?)"
_EVALUATED = r" of (?:data\.evaluation\.|an evaluation )"
_OF_A_SET = r"data\.evaluation\.[^:]+: "
_LEFT_OUT_OF_SET = (
    "Mend the sample, or leave it out of the set, then start the run again to resume. data.bad_samples and "
    "data.leave_out are for training samples alone."
)
_SKIP = (
    "or leave it out: lockstep train RUN data.leave_out='[[N, N]]'; data.bad_samples='{policy: skip}' leaves all such "
    "samples out. Data that was mended may need --accept-changes."
)

OF_SAMPLES = (
    row(
        "sample ends its reader",
        rf"{_READS}(?:sample (?P<sample>\d+)\b(?!{_EVALUATED})|one of samples \d(?!.*{_EVALUATED}))",
        "Reading this sample ends or blocks the process that reads it: native code crashes, exits or waits for a lock, "
        "or a file server doesn't answer.",
        f"Mend the sample, {_SKIP}",
    ),
    row(
        "evaluation set ends its reader",
        rf"{_READS}(?:sample \d+{_EVALUATED}|one of samples \d.*{_EVALUATED})",
        "Reading a sample of an evaluation set ends or blocks the process that reads it.",
        _LEFT_OUT_OF_SET,
    ),
    row(
        "evaluation sample can't be used",
        rf"{_OF_A_SET}(?:sample \d+ can't be |samples \d.* can each be read, but not put into one batch)",
        "The dataset of an evaluation set raised an exception for this sample, or returned None or other shapes "
        "than for the others.",
        _LEFT_OUT_OF_SET,
    ),
    row(
        TOO_MANY,
        _OVER_LIMIT.pattern,
        "More training samples can't be read, or not be put into a batch, than data.bad_samples.limit allows.",
        "If they all fail in the same way (a path, a mount, a permission), mend that; otherwise resume with a higher "
        f"limit: lockstep train RUN {LIMIT}N",
    ),
    row(
        "sample can't be used",
        r"\bsample (?P<sample>\d+) can't be (?:used|read|put into one batch)|"
        r"\bsamples \d.* can each be read, but not put into one batch",
        "The dataset raised an exception for this sample, or returned None or other shapes than for the others.",
        f"Mend the sample, {_SKIP}",
    ),
)


def with_higher_limit(text: str, lines: Iterable[str]) -> str:
    """Return a text with a limit for its N: twice the bad samples that the lines report, as more may follow."""
    number = max((int(match[1]) for line in lines if (match := _OVER_LIMIT.search(line))), default=None)
    return text if number is None else text.replace(f"{LIMIT}N", f"{LIMIT}{2 * number}")

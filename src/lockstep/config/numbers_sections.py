"""The section of a config about updates whose numbers are bad."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lockstep.strategies.section import Section


class BadNumbers(Section):
    """Updates whose loss or gradient norm is not finite, or far above those before: a spike."""

    nonfinite: Literal["skip", "retry", "stop"] = "skip"
    """skip: an update with a NaN or an infinity is discarded; retry: it is repeated once from the same state, and
    discarded if it isn't finite again (a GPU makes the host wait for each update); stop: it is discarded, and ends the
    run. An overflow of fp16 under a loss scale is always skipped."""
    spike: Literal["ignore", "warn", "skip", "stop"] = "warn"
    """warn: an update with a spike is kept and reported; skip: it is discarded; stop: it is discarded, and ends the
    run."""
    window: Annotated[int, Field(ge=8)] = 128
    """Number of kept updates from which the median and the deviation are computed; the first ones have no spikes."""
    threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 20.0
    """A spike is more than this many deviations above the median. A deviation is 1.4826 x the median absolute
    deviation, and at least 1 % of the median."""

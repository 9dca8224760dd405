"""The section of a config about updates whose numbers are bad."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lockstep.strategies.section import Positive, Section


class BadNumbers(Section):
    """Updates whose loss or gradient norm is not finite, or far above those before: a spike."""

    nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    """skip: an update with a NaN or an infinity is discarded; rollback: it is discarded, and the run goes back by
    `rollback_steps`; stop: it is discarded, and ends the run. An overflow of fp16 under a loss scale is always
    skipped."""
    spike: Literal["ignore", "warn", "skip", "rollback", "stop"] = "warn"
    """warn: an update with a spike is kept and reported; skip: it is discarded; rollback: it is discarded, and the run
    goes back by `rollback_steps`; stop: it is discarded, and ends the run."""
    window: Annotated[int, Field(ge=8)] = 128
    """Number of kept updates from which the median and the deviation are computed; the first ones have no spikes."""
    threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 20.0
    """A spike is more than this many deviations above the median. A deviation is 1.4826 x the median absolute
    deviation, and at least 1 % of the median."""
    rollback_steps: Positive = 10
    """rollback: number of updates, up to and with the bad one, whose samples are left out. The run goes back to the
    newest checkpoint or snapshot before them, or to the oldest one there is."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> BadNumbers:
        if self.rollback_steps != type(self).model_fields["rollback_steps"].default and not self.rolls_back:
            raise ValueError(
                f"rollback_steps {self.rollback_steps} is for nonfinite: rollback and spike: rollback; write one of "
                "them, or leave it out"
            )
        return self

    @property
    def rolls_back(self) -> bool:
        """True if the run may go back to an earlier state."""
        return "rollback" in (self.nonfinite, self.spike)

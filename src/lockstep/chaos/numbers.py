"""The settings under which a run recovers from bad numbers, for the rounds of `lockstep chaos`.

nan        recovery.bad_numbers.nonfinite: retry    the update is repeated
diverge    recovery.compare_every: 1                the copies are compared, and ranks start again
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.schema import Config


def prepared(config: Config, kinds: Collection[str], ranks: int) -> Config:
    """Return the config with what the kinds of faults need.

    Raises:
        ConfigError: A single rank has no copy that could differ.
    """
    recovery = config.recovery
    if "nan" in kinds:
        numbers = recovery.bad_numbers.model_copy(update={"nonfinite": "retry"})
        recovery = recovery.model_copy(update={"bad_numbers": numbers})
    if "diverge" in kinds:
        if ranks == 1:
            raise ConfigError("--faults diverge changes one of several copies of a parameter; start 2 ranks at least")
        recovery = recovery.model_copy(update={"compare_every": 1})
    return config.model_copy(update={"recovery": recovery})

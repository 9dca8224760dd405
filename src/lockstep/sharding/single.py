"""One process holds everything.

model --> gradient --> optimizer
"""

from __future__ import annotations

from lockstep.sharding.held import HeldWhole


class Single(HeldWhole):
    """The oracle: every other strategy must reproduce what this one does."""

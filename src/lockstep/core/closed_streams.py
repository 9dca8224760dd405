"""Opens /dev/null for standard streams that are closed, as after `lockstep train ... >&-`.

Otherwise Python sets them to None, and the next file or socket that is opened gets their descriptor: output goes there.
"""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Replace each closed standard stream with /dev/null, for this process and those that it starts."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        descriptor = os.open(os.devnull, os.O_RDWR)
        os.dup2(descriptor, number)
        os.set_inheritable(number, True)
        if descriptor != number:
            os.close(descriptor)
        stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  it stays open
        setattr(sys, name, stream)

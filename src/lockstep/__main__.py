"""The program: `lockstep`, and `python -m lockstep`, so that torchrun and its kin can start it.

Signals are handled before anything else is imported.
"""

from __future__ import annotations

from lockstep.core.stopping import stop_at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def command() -> NoReturn:
    """Ends this process with the exit code of the verb."""
    stop_at_once()
    from lockstep.cli.main import command as verb

    verb()


if __name__ == "__main__":
    command()

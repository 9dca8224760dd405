"""The program: `lockstep`, and `python -m lockstep`, so that torchrun and other launchers can start it.

Signal handlers are installed before anything else is imported.
"""

from __future__ import annotations

import sys

from lockstep.core.distribution import why_not_here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def command() -> NoReturn:
    """Run the verb and end this process with its exit code."""
    _refuse_other_systems()
    from lockstep.core.process_settings import open_closed_streams
    from lockstep.core.stopping import stop_at_once

    open_closed_streams()
    stop_at_once(trains=sys.argv[1:2] == ["train"])
    from lockstep.cli.main import command as verb

    verb()


def _refuse_other_systems() -> None:
    why = why_not_here()
    if why is not None:
        print(f"lockstep: {why}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    command()

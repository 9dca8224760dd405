"""The health check of a container: python3 -m lockstep.launchers.docker_health.

init --> launcher --> ranks        healthy: the launcher has started the ranks of its node
                 '--> relay        the connection to other nodes, which starts first
"""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.core.terminal import echo

_RELAY = "lockstep.launch.relay"


def main(processes: Path = Path("/proc"), first: int = 1) -> int:
    """Print what the container does, and return 0 if its ranks run, 1 if they don't.

    Args:
        processes: The table of processes.
        first: The first process of the container: the init process, or the launcher.
    """
    launcher = first
    while not Path(_words(processes, launcher)[0]).name.startswith("python"):
        children = _children(processes, launcher)
        if not children:
            echo("no launcher runs")
            return 1
        launcher = children[0]
    ranks = sum(_RELAY not in " ".join(_words(processes, child)) for child in _children(processes, launcher))
    echo(f"{ranks} ranks run" if ranks else "no rank runs: the launcher starts them, or waits for other nodes")
    return 0 if ranks else 1


def _children(processes: Path, parent: int) -> list[int]:
    """Return the live children of a process."""
    statuses = {int(path.name): _status(path) for path in processes.iterdir() if path.name.isdecimal()}
    return sorted(pid for pid, status in statuses.items() if status[1:2] == [str(parent)] and status[0] not in "ZX")


def _status(process: Path) -> list[str]:
    """Return the state and the parent of a process; nothing if it has ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return []


def _words(processes: Path, process: int) -> list[str]:
    """Return a process's command line; one empty word if it has ended."""
    try:
        text = (processes / str(process) / "cmdline").read_text(errors="replace")
    except OSError:
        return [""]
    return text.split("\0")


if __name__ == "__main__":
    sys.exit(main())

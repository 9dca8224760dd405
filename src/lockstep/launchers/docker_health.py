"""The health check of a container: python3 -m lockstep.launchers.docker_health.

init --> launcher --> ranks        healthy: the launcher has started the ranks of its node
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(processes: Path = Path("/proc")) -> int:
    """Print what the container does, and return 0 if its ranks run, 1 if they don't."""
    launcher = 1
    while not _is_python(processes, launcher):
        children = _children(processes, launcher)
        if not children:
            print("no launcher runs")
            return 1
        launcher = children[0]
    ranks = len(_children(processes, launcher))
    print(f"{ranks} ranks run" if ranks else "no rank runs: the launcher starts them, or waits for other nodes")
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


def _is_python(processes: Path, process: int) -> bool:
    try:
        words = (processes / str(process) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return Path(words[0].decode(errors="replace")).name.startswith("python")


if __name__ == "__main__":
    sys.exit(main())

"""Reports of failures that come before a process closes its connections to other ranks, which may take long or hang.

the launcher's code in a rank     reports_failures(send)     what to do with the exception
the process group, on its way     report_failure(error)      once; then connections are aborted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_reporters: list[Callable[[BaseException], None]] = []
"""The functions of the runs that this process is in. Process-wide: who reports and who fails don't know each other."""


@contextmanager
def reports_failures(report: Callable[[BaseException], None]) -> Iterator[None]:
    """Have `report_failure` call `report` while the block runs."""
    _reporters.append(report)
    try:
        yield
    finally:
        _reporters.remove(report)


def report_failure(error: BaseException) -> bool:
    """Report an exception that will end this process; return whether there was a reporter."""
    for report in _reporters:
        report(error)
    return bool(_reporters)

"""The checks of a machine, side by side; one that hangs, as on a dead file server, becomes a finding itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lockstep.doctor import software, system
from lockstep.doctor.findings import Finding, MachineView, warning, wrong

_SECONDS = 2.0
_IMPORT_S = 60.0  # seconds for the import of torch from a slow disk


@dataclass(frozen=True, slots=True)
class Check:
    """A check, which may take `seconds`. It finds nothing if another check reports why it can't."""

    name: str
    run: Callable[[MachineView], Iterable[Finding]]
    seconds: float = _SECONDS


CHECKS: tuple[Check, ...] = (
    Check("Python", software.python),
    Check("torch", software.torch_imports, _IMPORT_S),
    Check("versions", software.packages_fit, 10.0),
    Check("accelerators", software.accelerators, _IMPORT_S),
    Check("compiler", software.compiler),
    Check("disk of runs", system.run_disk),
    Check("disk of the cache", system.cache_disk),
    Check("/dev/shm", system.shared_memory),
    Check("open files", system.open_files),
    Check("clock", system.clock),
    Check("port", system.port),
    Check("interfaces", system.network_interfaces),
    Check("hub", system.hugging_face_hub),
    Check("rank variables", system.rank_variables),
    Check("threads", system.threads),
    Check("variables", system.contradictions),
)


def examine(machine: MachineView, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Run the checks, each in a thread, and return what they find in the table's order."""
    began = time.monotonic()
    results: list[tuple[Check, threading.Thread, list[Finding]]] = []
    for check in checks:
        findings: list[Finding] = []
        thread = threading.Thread(target=_run, args=(check, machine, findings), name=check.name, daemon=True)
        thread.start()
        results.append((check, thread, findings))
    collected: list[Finding] = []
    for check, thread, findings in results:
        thread.join(max(0.0, began + check.seconds - time.monotonic()))
        is_hub = check.run is system.hugging_face_hub  # few runs need it
        late = (warning if is_hub else wrong)(
            f"no answer within {check.seconds:g} s",
            "Look for a file server or a name server that doesn't answer: mount, df, /etc/resolv.conf.",
        )
        collected += findings if not thread.is_alive() else [replace(late, name=check.name)]
    return collected


def _run(check: Check, machine: MachineView, findings: list[Finding]) -> None:
    try:
        findings += [replace(finding, name=check.name) for finding in list(check.run(machine))]
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        findings.append(replace(wrong(text, "Correct the file system, or choose another folder."), name=check.name))
    except Exception as error:
        fault = warning(f"the check failed: {type(error).__name__}: {error}", "Report it with this line.")
        findings.append(replace(fault, name=check.name))

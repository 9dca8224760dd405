"""Records the beginning of an attempt in attempts.jsonl: when, on which hosts, and what its plan promised."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.core.records import RunInfo
from lockstep.launch.memory_folder import note_attempt
from lockstep.monitor.attempts import (
    Attempt,
    Planned,
    attempt_id,
    attempts_in,
    attempts_text,
    by_host,
    content_of,
    facts_of,
    last_sign,
    launched,
)
from lockstep.monitor.folder import RunFolder
from lockstep.training.micro_sizes import least_micro_size
from lockstep.training.session import Session, components_of, seconds_of

if TYPE_CHECKING:
    from lockstep.training.components import Components

_SAME_LAUNCH_S = 0.1  # times are recorded rounded


@dataclass(frozen=True, slots=True)
class EarlierAttempts:
    """The attempts of a run before this one.

    Attributes:
        ended: When the last of them gave its last sign; NaN if that isn't known.
    """

    attempts: tuple[Attempt, ...]
    ended: float
    content: bytes = b""  # of attempts.jsonl

    @classmethod
    def of(cls, run: Path) -> EarlierAttempts:
        """Read those of a folder, before its history is rewound."""
        content = content_of(run)
        attempts = attempts_in(content)
        return cls(attempts, last_sign(run) if attempts else float("nan"), content)


NO_ATTEMPTS = EarlierAttempts((), float("nan"))


def _launched(run: Path, earlier: EarlierAttempts) -> float:
    """Return when this attempt was launched: one after another in the same launch, when that had ended."""
    start = launched(run)
    is_again = any(abs(attempt.launched - start) < _SAME_LAUNCH_S for attempt in earlier.attempts)
    return earlier.ended if is_again else start


def _further_facts(components: Components) -> dict[str, int | str | None]:
    """Return sizes of micro-batches that the launcher looks at when memory has run out, and why samples are coupled."""
    return {
        "least_micro_size": least_micro_size(components),
        "evaluation_size": components.evaluator.micro_size,
        "coupled": components.coupled,
    }


def record_attempt(
    session: Session, run: Path, earlier: EarlierAttempts, info: RunInfo, memory: Path | None = None
) -> str | None:
    """Record this attempt, on the first rank; all ranks call it. Raises RunFailed.

    Args:
        memory: The launcher's folder in memory; None: there is none.

    Returns:
        What identifies it (`attempt_id`), on the first rank.
    """
    components = components_of(session)
    hosts = cast("list[str]", components.world.axis.gather(socket.gethostname()))
    if components.world.rank != 0:
        return None
    plan = components.plan
    held = plan.placement
    attempt = Attempt(
        _launched(run, earlier),
        time.time(),
        earlier.ended,
        session.progress.steps,
        seconds_of(session),
        by_host(hosts),
        {**facts_of(info), **_further_facts(components)},
        Planned(held.parameters, held.gradients, held.optimizer, plan.sent, plan.bubble),
    )
    RunFolder.open(run).write_attempts(attempts_text((*earlier.attempts, attempt), earlier.content))
    if memory is not None:
        note_attempt(memory, run)
    return attempt_id(len(earlier.attempts) + 1, attempt)

"""The restarts of a run: what ended the ranks before each, from where they went again, and what it cost.

attempts.jsonl     when each attempt was launched and began, and its step     --.
logs/ends.jsonl    how each start of ranks ended                              --+--> a row each restart
events.jsonl       steps and ranks, where the attempts weren't all recorded   --'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.core.formatting import duration, first_sentence
from lockstep.launch.ends_file import LaunchEnds
from lockstep.launch.last_launch import decided_ends
from lockstep.monitor.goodput import RestartCost, restart_costs
from lockstep.report.run_data import RunData

_UNRECORDED = "No record: the launcher was killed, or its machine stopped"
_FINISHED = "It was finished, and was started again"


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart of a run's ranks.

    Attributes:
        step: From which they resumed; 0: from the beginning.
        ranks: Their number; 0: unknown.
        cause: What had ended the ranks before it; empty: unknown.
        first: The rank that had failed first, with its host; empty: none, or unknown.
        cost: None if it isn't known.
    """

    step: int
    ranks: int
    cause: str = ""
    first: str = ""
    cost: RestartCost | None = None


def restarts(run: RunData) -> list[Restart]:
    """Return the restarts of a run, the first one first."""
    if len(run.attempts) <= len(run.restarts):
        return [Restart(step, ranks) for step, ranks in run.restarts]
    ends, resumptions = decided_ends(run.folder), []
    costs = restart_costs(run.attempts)
    for before, attempt, cost in zip(run.attempts, run.attempts[1:], costs, strict=False):
        between = [end for end in ends if before.began <= end.time < attempt.began]
        cause = "; then ".join(map(_cause, between)) or (_UNRECORDED if ends else "")
        ranks = sum(number for _, number in attempt.hosts)
        resumptions.append(Restart(attempt.step, ranks, cause, _first_to_fail(between), cost))
    return resumptions


def _cause(end: LaunchEnds) -> str:
    if end.text:
        return first_sentence(end.text)
    return _FINISHED if end.code == 0 else f"The ranks ended with exit code {end.code}"


def _first_to_fail(ends: Sequence[LaunchEnds]) -> str:
    end = ends[0] if ends else None
    if end is None or end.cause is None or end.is_stop:
        return ""
    return next((f"rank {rank.rank} on {rank.host}" for rank in end.ranks if rank.rank == end.cause), "")


def restart_table(resumptions: Sequence[Restart], most: int) -> list[list[str]]:
    """Return the rows of the last restarts, the head first; empty if there are none."""
    rows = [["What had ended the ranks", "failed first", "from step", "ranks", "lost", "down", "startup"]]
    for restart in resumptions[-most:]:
        cost = restart.cost
        times = ["", "", ""] if cost is None else [duration(part) for part in (cost.lost, cost.downtime, cost.startup)]
        ranks = f"{restart.ranks:,}" if restart.ranks else ""
        rows.append([restart.cause or "Not recorded", restart.first, f"{restart.step:,}", ranks, *times])
    return rows if resumptions else []


def cost_of_all(resumptions: Sequence[Restart]) -> str:
    """Return what the restarts cost, as a sentence; empty if it isn't known."""
    costs = [restart.cost for restart in resumptions if restart.cost is not None]
    if not costs:
        return ""
    lost, down, startup = (
        duration(sum(part)) for part in zip(*((c.lost, c.downtime, c.startup) for c in costs), strict=True)
    )
    whole = duration(sum(cost.seconds for cost in costs))
    return (
        f"This cost {whole}: {lost} were lost with attempts that ended, {down} passed between attempts, and "
        f"{startup} until their first updates."
    )

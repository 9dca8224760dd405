"""Diagnosis of a run: its files, read with the catalog.

    logs/ends*.jsonl                              --> how the last launch ended, and each of its ranks
    logs/rank-*.log  metrics.jsonl  events.jsonl  --> lines that show a known failure --> causes first, with evidence
    summary.json, run.lock                        --> finished, running, or ended
    metrics.jsonl                                 --> a loss that diverged, or never improved; a run that hung
    environment.json, checkpoints                 --> what has changed since an earlier start; where it resumes

Links out of the folder are refused.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.core.errors import named_ranks
from lockstep.core.formatting import duration, listed
from lockstep.core.near_runs import not_a_run
from lockstep.doctor.catalog import Standing
from lockstep.doctor.evidence import (
    LogEvidence,
    SeenFailure,
    kernel_evidence,
    last_line_of,
    rank_logs,
    seen_failures,
    silent_ranks,
)
from lockstep.doctor.failures_of_hosts import DISK_FULL, OUT_OF_MEMORY
from lockstep.doctor.failures_of_samples import LIMIT, TOO_MANY, with_higher_limit
from lockstep.doctor.known_failures import NO_PROGRESS, OTHER_DATA, SAVE_FAILED, failure_in, failure_named
from lockstep.doctor.losses import finding_of_losses
from lockstep.doctor.saved import saved_state
from lockstep.doctor.starts import changes_since_saved, differences_of_hosts
from lockstep.launch.ends_file import EXITED, LaunchEnds, RankEnd
from lockstep.launch.last_launch import (
    LastLaunch,
    failure_before_refusals,
    full_disk,
    last_launch,
    survived_failures,
)
from lockstep.monitor.folder import ENVIRONMENT, LOGS, is_finished, is_run, refuse_escaping_links
from lockstep.monitor.run_lock import held_by
from lockstep.report.run_data import RunData, read_run

_SHORTEST_HANG_S = 10.0
_MOST_SURVIVED = 5  # failures in a note
_INTERVALS = 5  # between records, after which a run without a further one hangs


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of a run.

    Attributes:
        state: A sentence.
        is_wrong: Whether the run failed, or its loss diverged.
        seen: Failures, the cause first.
        notes: What else matters, a sentence each.
        ranks: How the ranks of the last launch ended, the first cause first; empty if that isn't recorded.
        resume: The command that resumes the run; empty: there is nothing to resume.
    """

    run: Path
    state: str
    is_wrong: bool
    seen: tuple[SeenFailure, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: tuple[RankEnd, ...] = ()
    resume: str = ""


def diagnose_run(run: Path) -> Diagnosis:
    """Read a run's folder.

    Raises:
        ConfigError: It is not a run's folder, or a file in it is a link to the outside.
        OSError: A file can't be read.
    """
    if not is_run(run):
        raise not_a_run(run)
    refuse_escaping_links(run)
    data = read_run(run)
    last = last_launch(run, data.environment)
    seen = [_with_later_save(item, data) for item in seen_failures(run, last)]
    if is_finished(run):
        early = (data.summary or {}).get("stopped_early")
        why = f"; it ended early: {early}" if isinstance(early, str) else ""
        return _continuing(run, data, seen, f"finished ({_progress(data)}){why}")
    if held_by(run) is not None:
        return _continuing(run, data, seen, f"running ({_progress(data)} so far)")
    if last.records:
        return _recorded(run, data, last, seen)
    return _unrecorded(run, data, last, seen)


def _continuing(run: Path, data: RunData, seen: list[SeenFailure], state: str) -> Diagnosis:
    """Return the diagnosis of a run that is finished, or runs: what it survived is no fault."""
    losses = finding_of_losses(data.trained_loss)
    notes = [*_common_suspects(data), *_survived(run), *([losses.text] if losses is not None else [])]
    return Diagnosis(run, state, losses is not None and losses.is_wrong, _remarks(seen), (*notes, *data.flaws))


def _with_later_save(item: SeenFailure, data: RunData) -> SeenFailure:
    """Return a failed save with the one that was written after it, if there is one; any other failure as it is."""
    last = data.saves[-1] if data.saves else None
    if item.failure.name != SAVE_FAILED or last is None or last.failure is not None:
        return item
    failed = max(save.step for save in data.saves if save.failure is not None)
    again = "it was repeated, and succeeded" if last.step == failed else f"that of step {last.step:,} succeeded"
    cause = f"A checkpoint could not be written at step {failed:,}; after that, {again}."
    remedy = "Nothing is missing now. If it happens again, read the reason in that line, and check the disk."
    return replace(item, failure=replace(item.failure, cause=cause, remedy=remedy))


def _survived(run: Path) -> list[str]:
    return [text] if (text := survived_failures(run, _MOST_SURVIVED)) else []


def _remarks(seen: Sequence[SeenFailure]) -> tuple[SeenFailure, ...]:
    return tuple(item for item in seen if item.failure.standing is Standing.REMARK)


# --- runs that have ended -------------------------------------------------------------------------------------------


def _recorded(run: Path, data: RunData, last: LastLaunch, seen: list[SeenFailure]) -> Diagnosis:
    """Return the diagnosis of a launch whose end its launchers have recorded; node 0's is the one that decided."""
    end = last.records[0]
    ranks = tuple(sorted(end.ranks, key=lambda rank: (rank.rank != end.cause, rank.time)))
    reason = end.text.partition("\n")[0] or f"exit code {end.code}"
    if end.is_stop:
        hang = _hang(run, data, end)
        if hang is None:
            return _ended(run, data, f"stopped {_after(data)}: {reason}", _remarks(seen), ranks=ranks, failed=False)
        return _ended(run, data, f"stopped without progress {_after(data)}: {reason}", (hang, *seen), ranks=ranks)
    if end.code == 0:  # all ranks have exited so, or the summary is gone
        ways = dict.fromkeys(rank.text for rank in ranks if rank.end in EXITED)
        reason = f"all ranks ended with exit code 0 before it was done{': ' * bool(ways)}{'; '.join(ways)}"
    state = f"{'refused' if end.is_refused else 'failed'} {_after(data)}: {reason}"
    notes = list(differences_of_hosts(last.records))
    if end.is_refused and (before := failure_before_refusals(run)) is not None:
        notes.insert(0, f"Before that it had failed: {before.text}.")
        seen = [*seen, *_shown_by(before, seen)]
    if _lacks_cause(seen) and not end.is_refused and (log := rank_logs(run).get(end.cause or 0)) is not None:
        notes.append(f"No known failure shows in the files; read the end of {log}.")
    return _ended(run, data, state, seen, notes, ranks=ranks)


def _shown_by(end: LaunchEnds, seen: Sequence[SeenFailure]) -> list[SeenFailure]:
    """Return the failure that the message of an earlier launch shows, unless it was seen."""
    failure = failure_in(end.text)
    if failure is None or any(item.failure is failure for item in seen):
        return []
    return [SeenFailure(failure, [LogEvidence(end.file, end.line, end.text, end.cause)])]


def _unrecorded(run: Path, data: RunData, last: LastLaunch, seen: list[SeenFailure]) -> Diagnosis:
    """Return the diagnosis of a launch of which no record was left, or that another launcher has started."""
    if last.was_killed:
        if (full := _full_disk(run)) is not None:
            seen = [full, *(item for item in seen if item.failure is not full.failure)]
        elif lines := _kernel_kills_at_the_end(run, data):
            seen = [SeenFailure(failure_named(OUT_OF_MEMORY), lines), *seen]
        way = "its launcher was killed, its machine stopped, or its disk was full"
        if _variable(data, "WORLD_SIZE") == "1":
            way = "its process was killed or called os._exit(), its machine stopped, or its disk was full"
        if full is not None:
            way = "its disk is full"
        advice = _of_last_line(run) if _lacks_cause(seen) else []
        return _ended(run, data, f"failed {_after(data)} without a record: {way}", seen, advice)
    if len(_remarks(seen)) == len(seen):
        state = f"ended {_after(data)}, and its files show no failure: it was stopped, or killed"
        return _ended(run, data, state, seen, failed=False)
    notes = []
    if silent := silent_ranks(run, seen):
        notes.append(f"{named_ranks(silent)} ended without a message: killed, or hung. Run dmesg on that host.")
    return _ended(run, data, f"failed {_after(data)}", seen, notes)


def _ended(
    run: Path,
    data: RunData,
    state: str,
    seen: Sequence[SeenFailure],
    notes: Sequence[str] = (),
    *,
    ranks: tuple[RankEnd, ...] = (),
    failed: bool = True,
) -> Diagnosis:
    """Return the diagnosis of a run that has ended, with what a person needs in order to resume it."""
    losses, saved = finding_of_losses(data.trained_loss), saved_state(run, data)
    texts = [*notes, *_common_suspects(data), *([losses.text] if losses is not None else [])]
    if failed:
        texts += changes_since_saved(run, data)
    texts += _survived(run)
    if data.restarts:
        times = len(data.restarts)
        texts.append(f"It was resumed {times} time{'s' * (times > 1)}, last from step {data.restarts[-1][0]}.")
    texts += [saved.note, *data.flaws]
    resume = saved.resume + _changes_to_resume(seen) if saved.resume else ""
    return Diagnosis(run, state, failed, tuple(seen), tuple(texts), ranks, resume)


def _changes_to_resume(seen: Sequence[SeenFailure]) -> str:
    """Return what the command that resumes a run needs after these failures, lest it fails in the same way."""
    words = []
    for item in seen:
        if item.failure.name == OTHER_DATA:
            words.append(" --accept-changes")
        elif item.failure.name == TOO_MANY:
            words.append(with_higher_limit(f" {LIMIT}N", [line.text for line in item.evidence]))
    return "".join(words)


def _of_last_line(run: Path) -> list[str]:
    """Return sentences on a run that left neither a record nor a known failure."""
    logs = rank_logs(run)
    shown = [f"The last line of {file}: {text}" for file in logs.values() if (text := last_line_of(file))]
    return [*shown[:1], "Run dmesg on its host, see what the scheduler recorded, and search the program for os._exit."]


def _progress(data: RunData) -> str:
    wanted = data.configured("run", "steps")
    if not data.reached:
        return "no update"
    return f"step {data.reached}" + (f" of {wanted}" if isinstance(wanted, int) else "")


def _after(data: RunData) -> str:
    return f"after {_progress(data)}" if data.reached else "before its first update"


def _lacks_cause(seen: Sequence[SeenFailure]) -> bool:
    return all(item.failure.standing > Standing.SYMPTOM for item in seen)


def _variable(data: RunData, name: str) -> object:
    variables = data.environment.get("variables")
    return variables.get(name) if isinstance(variables, dict) else None


# --- what no log has ------------------------------------------------------------------------------------------------


def _hang(run: Path, data: RunData, end: LaunchEnds) -> SeenFailure | None:
    """Return the finding that a run had recorded nothing for long when it was ended, by the times of its files."""
    step, seconds = data.last.get("step"), data.last.get("seconds")
    times = _times(run, ("metrics.jsonl", "events.jsonl") if isinstance(step, int) else (ENVIRONMENT,))
    records = len(data.columns["loss"].steps)
    interval = seconds / records if isinstance(seconds, int | float) and records else 1.0
    silent = end.time - max(times, default=end.time)
    if silent < max(_SHORTEST_HANG_S, _INTERVALS * interval):
        return None
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(times)))
    usual = f"; until then a record came every {duration(interval)}" if records else ""
    what = f"nothing was recorded for {duration(silent)} before the end, since {since}{usual}"
    return SeenFailure(failure_named(NO_PROGRESS), [LogEvidence("metrics.jsonl" if records else ENVIRONMENT, 0, what)])


def _full_disk(run: Path) -> SeenFailure | None:
    """Return the finding that the disk of the run has no space now."""
    text = full_disk(run)
    return SeenFailure(failure_named(DISK_FULL), [LogEvidence(str(run), 0, text)]) if text else None


def _kernel_kills_at_the_end(run: Path, data: RunData) -> list[LogEvidence]:
    """Return the kernel's record of processes that it killed when the run's files were last written."""
    if data.environment.get("host") != socket.gethostname():
        return []
    logs = [f"{LOGS}/{file.name}" for file in rank_logs(run).values()]
    return kernel_evidence(_times(run, ("metrics.jsonl", "events.jsonl", ENVIRONMENT, *logs)))


def _times(run: Path, names: Sequence[str]) -> list[float]:
    """Return when these files were written, as far as they are there."""
    times = []
    for name in names:
        with suppress(OSError):
            times.append((run / name).stat().st_mtime)
    return times


_FEWEST = 2  # bad updates: each of one has its samples in common with itself
_MOST = 3  # samples in common: more are no finding


def _common_suspects(data: RunData) -> list[str]:
    """Return a sentence about the samples that are in the suspected micro-batch of each bad update; none: no such."""
    suspected = [set(samples) for samples in data.suspected]
    common = sorted(set.intersection(*suspected).difference(data.left_out)) if len(suspected) >= _FEWEST else []
    if not 0 < len(common) <= _MOST:
        return []
    names, are, it = listed([*map(str, common)], _MOST), *(("are", "them") if len(common) > 1 else ("is", "it"))
    spans = ", ".join(f"[{sample}, {sample}]" for sample in common)
    return [
        f"Sample{'s' * (len(common) > 1)} {names} {are} in the suspected micro-batch of each of {len(suspected)} bad "
        f"updates: mend {it}, or leave {it} out by data.leave_out='[{spans}]'."
    ]

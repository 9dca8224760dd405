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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint.manifest import CorruptCheckpoint
from lockstep.checkpoint.reading import read_manifest
from lockstep.checkpoint.storage import names_by_step
from lockstep.core.command_lines import command_line
from lockstep.core.errors import Failure, named_ranks
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
from lockstep.launch.ends_file import EXITED, LaunchEnds, RankEnd
from lockstep.launch.last_launch import (
    LastLaunch,
    failure_before_refusals,
    full_disk,
    last_launch,
    survived_failures,
)
from lockstep.launch.memory_folder import left_by
from lockstep.monitor.folder import ENVIRONMENT, LOGS, is_finished, is_run, refuse_escaping_links
from lockstep.monitor.run_lock import held_by
from lockstep.report.run_data import RunData, read_run
from lockstep.training.locations import run_config, storage_of
from lockstep.training.memory_snapshots import snapshots_in

_SHORTEST_HANG_S = 10.0
_MOST_SURVIVED = 5  # failures in a note
_INTERVALS = 5  # between records, after which a run without a further one hangs
_FEWEST = 2  # bad updates: each of one has its samples in common with itself
_MOST_COMMON = 3  # samples in common: more are no finding
_OF_HOSTS = ("--nodes", "--rendezvous", "--job-id", "--ranks")
"""Flags that a resumed run needs again: its config has what the others set."""
_PLAIN = ("host", "python", "executable", "platform", "cpu", "working_directory")
_OF_A_LAUNCH = ("RANK", "MASTER_", "WORLD_SIZE", "LOCAL_", "GROUP_", "LOCKSTEP_", "TORCHELASTIC_", "SLURM_", "OMP_NUM")
"""Variables that differ from start to start, and mean nothing."""
_CREATED = "created"  # when a start was described; a rank that saves while others fail describes nothing
_CHECKPOINTS = 5  # the newest, in which a description is looked for
_MOST_NAMED = 8  # differences in a note


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
    """Diagnose a launch that left no record, or that another launcher started."""
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
    times = []
    for name in names:
        with suppress(OSError):
            times.append((run / name).stat().st_mtime)
    return times


def _common_suspects(data: RunData) -> list[str]:
    """Return a sentence about samples that are in the suspected micro-batch of every bad update, if any."""
    suspected = [set(samples) for samples in data.suspected]
    common = sorted(set.intersection(*suspected).difference(data.left_out)) if len(suspected) >= _FEWEST else []
    if not 0 < len(common) <= _MOST_COMMON:
        return []
    names, are, it = listed([*map(str, common)], _MOST_COMMON), *(("are", "them") if len(common) > 1 else ("is", "it"))
    spans = ", ".join(f"[{sample}, {sample}]" for sample in common)
    return [
        f"Sample{'s' * (len(common) > 1)} {names} {are} in the suspected micro-batch of each of {len(suspected)} bad "
        f"updates: mend {it}, or leave {it} out by data.leave_out='[{spans}]'."
    ]


@dataclass(frozen=True, slots=True)
class SavedState:
    """The newest saved state of a run.

    Attributes:
        note: What is saved where.
        resume: The command that resumes from it; empty: there is nothing to resume.
    """

    note: str
    resume: str = ""


def saved_state(run: Path, data: RunData) -> SavedState:
    """Return where the newest state of a run that has ended is, and how it is resumed."""
    own = max(_steps(run), default=None) if (run / ENVIRONMENT).exists() else None
    if own is None:
        own = max((save.step for save in data.saves if save.failure is None), default=None)
    memory = left_by(run)
    in_memory = max(names_by_step(snapshots_in(memory, None).names()), default=-1) if memory is not None else -1
    if in_memory > (-1 if own is None else own):
        return SavedState(
            f"The state after step {in_memory:,} is in this host's memory, in {memory}.", _resume(run, data)
        )
    if own is None:
        return SavedState("No checkpoint exists: the run starts from the beginning.", _resume(run, data))
    return SavedState(f"The newest checkpoint is that of step {own:,}.", _resume(run, data))


def _resume(run: Path, data: RunData) -> str:
    return command_line("lockstep", "train", run, *_flags_of_hosts(data))


def _flags_of_hosts(data: RunData) -> list[str]:
    """Return the flags of the recorded command line by which several hosts met; none if it was one host."""
    typed = data.environment.get("command_line")
    words = [word for word in typed if isinstance(word, str)] if isinstance(typed, list) else []
    if not any(word.partition("=")[0] == "--nodes" for word in words):
        return []
    flags = []
    for number, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name in _OF_HOSTS:
            flags += [word] if equals else words[number : number + 2]
    return flags


def _steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints; none if they can't be listed."""
    with suppress(Failure, OSError):
        return [*names_by_step(storage_of(run_config(run).checkpoint, run).names())]
    return []


def changes_since_saved(run: Path, data: RunData) -> list[str]:
    """Return a sentence about what differs between the last start and an earlier one, by its newest checkpoint."""
    this = data.environment
    if _CREATED not in this:
        return []
    try:
        storage = storage_of(run_config(run).checkpoint, run)
        steps = sorted(names_by_step(storage.names()).items(), reverse=True)[:_CHECKPOINTS]
        for step, name in steps:
            before = read_manifest(storage, name).environment
            changed = list(_differences(before, this)) if _CREATED in before else []
            if changed:
                return [
                    f"An earlier start saved step {step}; since then this has changed: {listed(changed, _MOST_NAMED)}."
                ]
            if before.get(_CREATED, this[_CREATED]) != this[_CREATED]:
                return []
    except (Failure, CorruptCheckpoint, OSError):
        return []
    return []


def differences_of_hosts(records: Sequence[LaunchEnds]) -> list[str]:
    """Return a sentence for each host whose environment differs from node 0's."""
    notes = []
    for record in records[1:]:
        changed = [text for text in _differences(records[0].environment, record.environment) if text[:5] != "host "]
        if changed:
            first, other = (_text(entry.environment.get("host")) for entry in (records[0], record))
            notes.append(f"From host {first} to host {other} this differs: {listed(changed, _MOST_NAMED)}.")
    return notes


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in _PLAIN:
        if name in before and name in after and before[name] != after[name]:
            yield f"{name.replace('_', ' ')} {_text(before[name])} -> {_text(after[name])}"
    for section in ("packages", "variables"):
        old, new = (_mapping(environment.get(section)) for environment in (before, after))
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name) and not name.startswith(_OF_A_LAUNCH):
                sign = "=" if section == "variables" else " "
                yield f"{name}{sign}{_text(old.get(name))} -> {_text(new.get(name))}"
    if before.get("gpus") != after.get("gpus") and "gpus" in before and "gpus" in after:
        yield f"GPUs {_gpus(before['gpus'])} -> {_gpus(after['gpus'])}"
    commits = [_mapping(environment.get("git")).get("commit") for environment in (before, after)]
    if None not in commits and commits[0] != commits[1]:
        yield f"commit {_text(commits[0])[:10]} -> {_text(commits[1])[:10]}"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _gpus(value: object) -> str:
    names: dict[str, int] = {}
    for gpu in value if isinstance(value, list) else []:
        with suppress(TypeError):
            names[_text(_mapping(gpu).get("name"))] = names.get(_text(_mapping(gpu).get("name")), 0) + 1
    return " + ".join(f"{number} x {name}" for name, number in names.items()) or "none"


def _text(value: object) -> str:
    return "none" if value is None else str(value)

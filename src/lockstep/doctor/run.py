"""Diagnosis of a run, from its files, with the catalog of known failures. Links out of the folder are refused."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.storage import names_by_step
from lockstep.core.errors import Failure, named_ranks
from lockstep.core.failure_kinds import FailureKind, Retry
from lockstep.core.files import changed
from lockstep.core.formatting import counted, duration, first_sentence, listed
from lockstep.core.near_runs import not_a_run
from lockstep.core.terminal import command_line, plain_line
from lockstep.doctor.evidence import (
    LogEvidence,
    SeenFailure,
    last_line_of,
    rank_logs,
    seen_failures,
    silent_ranks,
)
from lockstep.doctor.findings import wrapped
from lockstep.doctor.known_failures import (
    DISK_FULL,
    KNOWN,
    NO_PROGRESS,
    SAVE_FAILED,
    KnownFailure,
    Standing,
    failure_named,
    failure_of,
)
from lockstep.doctor.losses import finding_of_losses
from lockstep.launch.ends_file import (
    LastLaunch,
    LaunchEnds,
    RankEnd,
    failure_before_refusals,
    full_disk,
    last_launch,
    survived_failures,
)
from lockstep.launch.memory_folder import left_by
from lockstep.monitor.events import EVENTS
from lockstep.monitor.folder import ENVIRONMENT, METRICS, held_by, is_finished, is_run, refuse_escaping_links
from lockstep.report.run_data import RunData, read_run
from lockstep.resuming.locations import run_config, storage_of
from lockstep.resuming.memory_snapshots import snapshots_in

_SHORTEST_HANG_S = 10.0
_MOST_SURVIVED = 5  # failures in a note
_INTERVALS = 5  # between records; a run without a record for that long hangs
_OF_HOSTS = ("--nodes", "--rendezvous", "--job-id", "--ranks")
"""Flags that a resumed run needs again: the others are in its config."""
_OF_MEMORY = {kind.title for kind in FailureKind if kind.retry is Retry.MEMORY}
_OF_A_LAUNCH = ("RANK", "MASTER_", "WORLD_SIZE", "LOCAL_", "GROUP_", "LOCKSTEP_", "TORCHELASTIC_", "SLURM_", "OMP_NUM")
"""Variables that differ from start to start, and mean nothing."""
_MOST_NAMED = 8  # differences in a note
_SHOWN_IN_TERMINAL = 400  # characters of a line of evidence
_MOST_EVIDENCE = 3  # lines of one failure
_MOST_RANKS = 8  # shown
_COMMANDS_OF_RUN = re.compile(r"(lockstep (?:train|ckpt [a-z]+)) RUN")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of a run.

    Attributes:
        is_wrong: Whether the run failed, or its loss diverged.
        seen: Failures, the cause first.
        notes: What else matters, a sentence each.
        ranks: How the ranks of the last launch ended, the first cause first; empty: not recorded.
        resume: The command that resumes the run; may be empty.
    """

    run: Path
    state: str
    is_wrong: bool
    seen: tuple[SeenFailure, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: tuple[RankEnd, ...] = ()
    resume: str = ""


def diagnose_run(run: Path) -> Diagnosis:
    """Diagnose a run. Raises ConfigError if it is none, or a file in it is a link to the outside, and OSError."""
    if not is_run(run):
        raise not_a_run(run)
    refuse_escaping_links(run)
    data = read_run(run)
    last = last_launch(run, data.environment)
    is_saved = bool(data.saves) and data.saves[-1].failure is None  # after a failed save, if there was one
    seen = [item for item in seen_failures(run, last) if item.failure.name != SAVE_FAILED or not is_saved]
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
    """Diagnose a finished or running run: failures that it survived are no fault."""
    losses = finding_of_losses(data.trained_loss)
    notes = [*_survived(run), *([losses.text] if losses is not None else [])]
    return Diagnosis(run, state, losses is not None and losses.is_wrong, _remarks(seen), (*notes, *data.flaws))


def _survived(run: Path) -> list[str]:
    return [text] if (text := survived_failures(run, _MOST_SURVIVED)) else []


def _remarks(seen: Sequence[SeenFailure]) -> tuple[SeenFailure, ...]:
    return tuple(item for item in seen if item.failure.standing is Standing.REMARK)


# --- runs that have ended -------------------------------------------------------------------------------------------


def _recorded(run: Path, data: RunData, last: LastLaunch, seen: list[SeenFailure]) -> Diagnosis:
    """Diagnose a launch with a record of its end; node 0's decided."""
    end = last.records[0]
    ranks = tuple(sorted(end.ranks, key=lambda rank: (rank.rank != end.cause, rank.time)))
    reason = end.text.partition("\n")[0] or end.kind.title
    if end.kind.is_stop:
        hang = _hang(run, data, end)
        if hang is None:
            return _ended(run, data, f"stopped {_after(data)}: {reason}", _remarks(seen), ranks=ranks, failed=False)
        return _ended(run, data, f"stopped without progress {_after(data)}: {reason}", (hang, *seen), ranks=ranks)
    if end.kind is FailureKind.DONE:  # all ranks have exited so, or the summary is gone
        ways = dict.fromkeys(rank.text for rank in ranks if rank.kind is FailureKind.EXITED)
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
    failure = failure_of(end.kind, end.text)
    if failure is None or any(item.failure is failure for item in seen):
        return []
    return [SeenFailure(failure, [LogEvidence(end.file, end.line, end.text, end.cause)])]


def _unrecorded(run: Path, data: RunData, last: LastLaunch, seen: list[SeenFailure]) -> Diagnosis:
    """Diagnose a launch that left no record, or that another launcher started."""
    if last.was_killed:
        full = full_disk(run)
        if full:
            failure = failure_named(DISK_FULL)
            others = (item for item in seen if item.failure is not failure)
            seen = [SeenFailure(failure, [LogEvidence(str(run), 0, full)]), *others]
        way = "its launcher was killed, its machine stopped, or its disk was full"
        if _mapping(data.environment.get("variables")).get("WORLD_SIZE") == "1":
            way = "its process was killed or called os._exit(), its machine stopped, or its disk was full"
        if full:
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
    losses = finding_of_losses(data.trained_loss)
    texts = [*notes, *([losses.text] if losses is not None else []), *_survived(run)]
    if data.restarts:
        texts.append(f"It was resumed {counted(len(data.restarts), 'time')}, last from step {data.restarts[-1][0]}.")
    texts += [saved_state(run, data), *data.flaws]
    is_other = any(item.failure.name == FailureKind.OTHER_DATA.title for item in seen)
    resume = command_line("lockstep", "train", run, *_flags_of_hosts(data)) + " --accept-changes" * is_other
    return Diagnosis(run, state, failed, tuple(seen), tuple(texts), ranks, resume)


def _of_last_line(run: Path) -> list[str]:
    shown = [f"The last line of {file}: {text}" for file in rank_logs(run).values() if (text := last_line_of(file))]
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


# --- what no log has ------------------------------------------------------------------------------------------------


def _hang(run: Path, data: RunData, end: LaunchEnds) -> SeenFailure | None:
    """Return the finding that a run had recorded nothing for long when it was ended, by the times of its files."""
    records, seconds = len(data.columns["loss"].steps), data.last.get("seconds")
    last = changed(*(run / name for name in ((METRICS, EVENTS) if records else (ENVIRONMENT,))))
    interval = seconds / records if isinstance(seconds, int | float) and records else 1.0
    silent = end.time - (last or end.time)
    if silent < max(_SHORTEST_HANG_S, _INTERVALS * interval):
        return None
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last))
    usual = f"; until then a record came every {duration(interval)}" if records else ""
    what = f"nothing was recorded for {duration(silent)} before the end, since {since}{usual}"
    return SeenFailure(failure_named(NO_PROGRESS), [LogEvidence(METRICS if records else ENVIRONMENT, 0, what)])


def saved_state(run: Path, data: RunData) -> str:
    """Say where the newest state of a run that has ended is."""
    own = max(_steps(run), default=None) if (run / ENVIRONMENT).exists() else None
    if own is None:
        own = max((save.step for save in data.saves if save.failure is None), default=-1)
    memory = left_by(run)
    in_memory = max(names_by_step(snapshots_in(memory, None).names()), default=-1) if memory is not None else -1
    if in_memory > own:
        return f"The state after step {in_memory:,} is in this host's memory, in {memory}."
    if own < 0:
        return "No checkpoint exists: the run starts from the beginning."
    return f"The newest checkpoint is of step {own:,}."


def _flags_of_hosts(data: RunData) -> list[str]:
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
    with suppress(Failure, OSError):
        return [*names_by_step(storage_of(run_config(run).checkpoint, run).names())]
    return []


def differences_of_hosts(records: Sequence[LaunchEnds]) -> list[str]:
    """Return a sentence for each host with another environment than node 0."""
    notes = []
    for record in records[1:]:
        if changed := list(_differences(records[0].environment, record.environment)):
            first, other = (entry.environment.get("host") for entry in (records[0], record))
            notes.append(f"From host {first} to host {other} this differs: {listed(changed, _MOST_NAMED)}.")
    return notes


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    if before.get("python") != after.get("python") and "python" in before and "python" in after:
        yield f"python {before.get('python')} -> {after.get('python')}"
    for section, sign in (("packages", " "), ("variables", "=")):
        old, new = (_mapping(environment.get(section)) for environment in (before, after))
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name) and not name.startswith(_OF_A_LAUNCH):
                yield f"{name}{sign}{old.get(name, 'none')} -> {new.get(name, 'none')}"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# --- text and JSON: in a terminal long evidence is cut, in a file nothing -------------------------------------------


def describe_run(diagnosis: Diagnosis, width: int | None) -> str:
    """Return the diagnosis as text; `width` None: for a file, no line is broken or cut."""
    lines = [plain_line(f"{diagnosis.run}: {diagnosis.state}")]
    if diagnosis.is_wrong and diagnosis.ranks:
        lines += ["", *_of_ranks(diagnosis, width)]
    for number, item in enumerate(diagnosis.seen):
        failure = item.failure
        lines += ["", f"{_title(failure.standing, is_first=number == 0)}: {failure.name}"]
        lines += wrapped(failure.cause, "  ", width)
        shown = item.evidence if width is None else item.evidence[:_MOST_EVIDENCE]
        for number_of_line, line in enumerate(shown):
            repeats = any(earlier.text.endswith(line.text) for earlier in shown[:number_of_line])
            place = f"{line.file}:{line.line}" if line.line else line.file
            text = f"{place}: {'the same' if repeats else line.text}"
            lines += wrapped(_shortened(text, width), "  ", width, "    ", breaks=True)
        if len(item.evidence) > len(shown):
            lines.append(f"  and {len(item.evidence) - len(shown)} more such lines")
        lines += wrapped(f"-> {remedy_for(item, diagnosis.run)}", "  ", width, "     ")
    if diagnosis.notes:
        lines += ["", *(line for note in diagnosis.notes for line in wrapped(note, "  ", width))]
    if diagnosis.resume:
        lines += ["  resume it:", f"    {plain_line(diagnosis.resume)}"]
    return "\n".join(lines)


def remedy_for(seen: SeenFailure, run: Path) -> str:
    """Return what to do, with this run in the commands, and the sample in the evidence."""
    named = command_line(run)
    samples, remedy = {sample for line in seen.evidence for sample in line.samples}, seen.failure.remedy
    if len(samples) == 1:
        if seen.failure.name not in _OF_MEMORY:
            remedy = FailureKind.SAMPLE.remedy
        remedy = remedy.replace("[[N, N]]", "[[{0}, {0}]]".format(*samples))
    return _COMMANDS_OF_RUN.sub(lambda match: f"{match[1]} {named}", remedy)


def _shortened(text: str, width: int | None) -> str:
    if width is None or len(text) <= _SHOWN_IN_TERMINAL:
        return text
    return f"{text[: _SHOWN_IN_TERMINAL - 1]}…"


def _of_ranks(diagnosis: Diagnosis, width: int | None) -> Iterator[str]:
    """Yield lines for the first ranks to end, with how long after the first one the others ended."""
    ranks, first = diagnosis.ranks, diagnosis.ranks[0].time
    in_full = [diagnosis.state, *(line.text for item in diagnosis.seen for line in item.evidence)]
    shown = ranks if width is None else ranks[:_MOST_RANKS]
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first))
    for number, rank in enumerate(shown):
        moment = f"{rank.time - first:+.1f} s" if number else began
        text = f"rank {rank.rank} on {rank.host}  {moment}  {_end_of(rank, in_full)}"
        yield from wrapped(_shortened(text, width), "  ", width, "      ", breaks=True)
    if len(ranks) > len(shown):
        yield f"  and {len(ranks) - len(shown)} more ranks"


def _end_of(rank: RankEnd, in_full: Sequence[str]) -> str:
    if not rank.text or rank.kind is FailureKind.PEER_FAILED:
        return rank.kind.title
    return first_sentence(rank.text) if any(rank.text in text for text in in_full) else rank.text


def _title(standing: Standing, *, is_first: bool) -> str:
    if standing in (Standing.CAUSE, Standing.SYMPTOM):
        return "cause" if is_first else "also seen"
    return standing.name.lower()


def run_as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis for `--json`."""
    return {
        "run": str(diagnosis.run),
        "state": diagnosis.state,
        "wrong": diagnosis.is_wrong,
        "failures": [
            {
                **_as_json(item.failure),
                "remedy": remedy_for(item, diagnosis.run),
                "evidence": [
                    {"file": line.file, "line": line.line, "rank": line.rank, "text": line.text}
                    for line in item.evidence
                ],
            }
            for item in diagnosis.seen
        ],
        "ranks": [{**asdict(rank), "kind": rank.kind.name.lower()} for rank in diagnosis.ranks],
        "notes": list(diagnosis.notes),
        "resume": diagnosis.resume or None,
    }


def describe_known(width: int | None) -> str:
    """Return the catalog as text."""
    lines = [f"{len(KNOWN)} known failures"]
    for failure in KNOWN:
        lines += ["", failure.name, *wrapped(failure.cause, "  ", width)]
        lines += wrapped(f"-> {failure.remedy}", "  ", width, "     ")
    return "\n".join(lines)


def known_as_json() -> list[dict[str, str]]:
    """Return the catalog for `--json`."""
    return [
        {**_as_json(failure), "pattern": failure.pattern.pattern if failure.pattern else "", "file": failure.file}
        for failure in KNOWN
    ]


def _as_json(failure: KnownFailure) -> dict[str, str]:
    standing = failure.standing.name.lower()
    return {"name": failure.name, "standing": standing, "cause": failure.cause, "remedy": failure.remedy}

"""A diagnosis, and the catalog, as text and as JSON.

In a terminal lines have its width, and long evidence ends with an ellipsis; in a file or a pipe nothing is cut.
Commands for copying have lines of their own, which are never broken.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.core.command_lines import command_line
from lockstep.core.formatting import first_sentence
from lockstep.core.terminal import plain_line
from lockstep.doctor.catalog import KnownFailure, Standing
from lockstep.doctor.evidence import LogEvidence, SeenFailure
from lockstep.doctor.failures_of_samples import with_higher_limit
from lockstep.doctor.findings import wrapped
from lockstep.doctor.known_failures import KNOWN
from lockstep.doctor.run import Diagnosis
from lockstep.launch.ends_file import RankEnd

_SHOWN_IN_TERMINAL = 400  # characters of a line of evidence
_MOST_EVIDENCE = 3  # lines of one failure
_MOST_RANKS = 8  # shown
_ENDS = {
    "done": "was done",
    "ended": "was ended by the launcher",
    "paused": "saved and stopped",
    "peer_failed": "failed because another rank had ended",
    "stopped": "was stopped",
}
"""How a rank without a message ended, or one whose message is about another rank, by `EndKind`."""
_MARK_OF_GLOO = re.compile(r"\[\S*/gloo/transport/\S+\] ")
_HINT_OF_GLOO = re.compile(r"\. This is typically caused by .* GLHF!.*")
"""Parts of gloo's errors that help no one here: the place in its code, and advice that the diagnosis gives itself."""
_COMMANDS_OF_RUN = re.compile(r"(lockstep (?:train|ckpt [a-z]+)) RUN")


def describe_run(diagnosis: Diagnosis, width: int | None) -> str:
    """Return the diagnosis as text: the state, the cause with its evidence, then what followed from it.

    Args:
        width: Columns of the terminal; None: of a file, in which no line is broken or cut.
    """
    lines = [plain_line(f"{diagnosis.run}: {diagnosis.state}")]
    if diagnosis.is_wrong and diagnosis.ranks:
        lines += ["", *_of_ranks(diagnosis, width)]
    for number, item in enumerate(diagnosis.seen):
        failure = item.failure
        lines += ["", f"{_title(failure.standing, is_first=number == 0)}: {failure.name}"]
        lines += wrapped(failure.cause, "  ", width)
        shown = item.evidence if width is None else item.evidence[:_MOST_EVIDENCE]
        for place, text in _without_repetitions(shown):
            lines += wrapped(_shortened(f"{place}: {text}", width), "  ", width, "    ", breaks=True)
        if len(item.evidence) > len(shown):
            lines.append(f"  and {len(item.evidence) - len(shown)} more such lines")
        lines += wrapped(f"-> {remedy_for(item, diagnosis.run)}", "  ", width, "     ")
    if diagnosis.notes:
        lines += ["", *(line for note in diagnosis.notes for line in wrapped(note, "  ", width))]
    if diagnosis.resume:
        lines += ["  resume it:", f"    {plain_line(diagnosis.resume)}"]
    return "\n".join(lines)


def remedy_for(seen: SeenFailure, run: Path) -> str:
    """Return what to do, with this run in the commands, and the sample that the evidence names."""
    named = command_line(run)
    samples = {sample for line in seen.evidence if (sample := seen.failure.sample_in(line.text))}
    remedy = with_higher_limit(seen.failure.remedy, [line.text for line in seen.evidence])
    if len(samples) == 1:
        remedy = remedy.replace("[[N, N]]", "[[{0}, {0}]]".format(*samples))
    return _COMMANDS_OF_RUN.sub(lambda match: f"{match[1]} {named}", remedy)


def _shortened(text: str, width: int | None) -> str:
    if width is None or len(text) <= _SHOWN_IN_TERMINAL:
        return text
    return f"{text[: _SHOWN_IN_TERMINAL - 1]}…"


def _without_repetitions(evidence: Sequence[LogEvidence]) -> Iterator[tuple[str, str]]:
    """Yield place and text of each line; a rank's log repeats what the launcher has recorded of its end."""
    shown: list[str] = []
    for line in evidence:
        text = _MARK_OF_GLOO.sub("", _HINT_OF_GLOO.sub("", line.text))
        repeats = any(earlier.endswith(text) for earlier in shown)
        yield f"{line.file}:{line.line}" if line.line else line.file, "the same" if repeats else text
        shown.append(text)


def _of_ranks(diagnosis: Diagnosis, width: int | None) -> Iterator[str]:
    """Yield lines for each of the first ranks to end: which was first, and how long after it the others ended."""
    ranks, first = diagnosis.ranks, diagnosis.ranks[0].time
    in_full = [diagnosis.state, *(line.text for item in diagnosis.seen for line in item.evidence)]
    shown = ranks if width is None else ranks[:_MOST_RANKS]
    for number, rank in enumerate(shown):
        moment = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first)) if number == 0 else f"{rank.time - first:+.1f} s"
        )
        text = f"rank {rank.rank} on {rank.host}  {moment}  {_end_of(rank, in_full)}"
        yield from wrapped(_shortened(text, width), "  ", width, "      ", breaks=True)
    if len(ranks) > len(shown):
        yield f"  and {len(ranks) - len(shown)} more ranks"


def _end_of(rank: RankEnd, in_full: Sequence[str]) -> str:
    """Return how a rank ended; only the first sentence of a message that is in `in_full`."""
    if not rank.text or rank.end == "peer_failed":
        return _ENDS.get(rank.end, rank.end)
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
        "ranks": [asdict(rank) for rank in diagnosis.ranks],
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
    return [{**_as_json(failure), "pattern": failure.pattern.pattern, "file": failure.file} for failure in KNOWN]


def _as_json(failure: KnownFailure) -> dict[str, str]:
    standing = failure.standing.name.lower()
    return {"name": failure.name, "standing": standing, "cause": failure.cause, "remedy": failure.remedy}

"""Runs a recipe undisturbed, then again and again with a fault in each run, and compares how they end.

    undisturbed     --> last checkpoint, losses
    round 1, 2, ... --> a fault at random (rank, update, phase) --> fired? recovered? --> bitwise identical?
                                                                    memory ran out? --> see `memory`

Each run is a process forked from this one, which has imported torch and isn't a rank; its output is in a file.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.chaos import memory, numbers
from lockstep.chaos.drawing import draw_faults
from lockstep.checkpoint.comparison import OpenCheckpoint, compare
from lockstep.checkpoint.reading import read_manifest
from lockstep.config.every import Every
from lockstep.core.errors import ConfigError, Failure, RunFailed, VerificationError, message_of
from lockstep.core.terminal import echo
from lockstep.launch.devices import choose_ranks
from lockstep.launch.local import import_ahead
from lockstep.monitor.folder import CHECKPOINTS, METRICS
from lockstep.resilience.faults import FAULTS, KINDS_OF_SEVERAL, OOM, Fault, events_of, write_plan
from lockstep.resilience.number_faults import BAD_SAMPLE
from lockstep.training.audit import audit
from lockstep.training.job import Job, imports_ahead
from lockstep.training.locations import choose, find
from lockstep.training.ownership import LENGTHS
from lockstep.training.start_run import launch_job

if TYPE_CHECKING:
    from lockstep.config.schema import Config

_SAVES = 4  # checkpoints of a run
_RESTARTS = 3
_END_AFTER_S = 4.0  # a planted hang doesn't resolve itself
_REFERENCES = {OOM: memory.reference, BAD_SAMPLE: numbers.reference}
"""The runs with which rounds are compared that can't end as the undisturbed one."""
_LEAVE_OUT = "data.leave_out"  # which a round's reference may have in its config
_LAST_LINES = 5  # of a failed run's output, in a message


@dataclass(frozen=True, slots=True)
class ChaosRow:
    """A round.

    Attributes:
        fault, rank, step, phase: The fault.
        fired: Whether its rank reached that phase of that update.
        code: Exit code of the run.
        recovery_seconds: From the fault to the end of the first update after it; None: there was none.
        steps_redone: Updates that had been made before the fault, and were made again.
        equal: Whether the last checkpoint is bitwise identical to that of the undisturbed run, and so are the losses;
            after `oom`, to that of the run that is resumed with smaller micro-batches.
        distance: By what part of it a loss differs from the undisturbed run's, at most.
        updates_unrecorded: Number of updates that metrics.jsonl lacks.
        ledger_complete: Whether the run was trained on every sample of its order once.
        output: The file with what the run printed.
    """

    fault: str
    rank: int
    step: int
    phase: str
    fired: bool
    code: int
    recovery_seconds: float | None
    steps_redone: int | None
    equal: bool
    updates_unrecorded: int
    ledger_complete: bool
    output: str
    distance: float = 0.0

    @property
    def passed(self) -> bool:
        return self.fired and not self.code and self.equal and not self.updates_unrecorded and self.ledger_complete


def run_rounds(
    job: Job, kinds: Sequence[str], rounds: int, steps: int, seed: int, folder: Path, show: Callable[[ChaosRow], None]
) -> list[ChaosRow]:
    """Run all rounds; return a row for each.

    Args:
        job: What is trained; its folder, length and checkpoints are replaced.
        steps: Updates of a run.
        folder: For the runs and their output; exists.
        show: Called with each row.

    Raises:
        RunFailed: The undisturbed run failed.
    """
    ranks = job.config.launch.ranks
    number = choose_ranks(job.config.launch) if ranks == "auto" else ranks
    import_ahead(imports_ahead(job.config))
    job = replace(job, config=numbers.prepared(job.config, kinds, number))
    draws = random.Random(seed)
    kinds = [kind for kind in kinds if number > 1 or kind not in KINDS_OF_SEVERAL]
    undisturbed = folder / "undisturbed"
    code, output = _trained(replace(job, config=_config_of_round(job.config, undisturbed, steps)), number)
    if code:
        last = "\n".join(output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:])
        raise RunFailed(f"the undisturbed run ended with exit code {code}:\n{last}")
    rows = []
    for place in range(1, rounds + 1):
        run = folder / f"round-{place}"
        plan = folder / f"round-{place}.faults.json"
        checkpoints = Path(job.config.checkpoint.folder or run / CHECKPOINTS)
        fault, *more = draw_faults(draws, kinds, number, steps, _every(steps), checkpoints)
        if fault.kind == OOM:
            fault = memory.in_memory(fault, draws.choice(memory.PHASES), undisturbed)
        write_plan(plan, [fault, *more])
        code, output = _trained(replace(job, config=_config_of_round(job.config, run, steps)), number, plan)
        expected = undisturbed
        if fault.kind in _REFERENCES and not code:
            of_reference = replace(job, config=_config_of_round(job.config, folder / f"reference-{place}", steps))
            expected = _REFERENCES[fault.kind](of_reference, run, lambda job: _trained(job, number)[0])
        rows.append(_row(fault, plan, code, output, run, undisturbed, expected))
        show(rows[-1])
    return rows


def free_folder(chosen: Path | None, recipe: str) -> Path:
    """Make and return the folder of all runs. Raises ConfigError if the chosen one has content."""
    folder = chosen or Path("runs") / f"chaos-{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--folder {folder} has content; name a new or an empty one")
    except OSError as error:
        raise ConfigError(f"--folder {folder}: {error.strerror or error}") from None
    return folder.absolute()


def _trained(job: Job, ranks: int, plan: Path | None = None) -> tuple[int, Path]:
    """Train in a process of its own; return its exit code, and the file with its output."""
    output = Path(job.config.run.folder or "").with_suffix(".txt")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with output.open("wb") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
            if plan is not None:
                os.environ[FAULTS] = str(plan)
            code = launch_job(job, ranks)[1].show()
        except Failure as failure:
            echo(message_of(failure), file=sys.stderr)
            code = failure.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output


def _every(steps: int) -> int:
    """Return the updates between two saves."""
    return max(1, steps // _SAVES)


def _config_of_round(config: Config, run: Path, steps: int) -> Config:
    sections = {
        "run": {**dict.fromkeys(LENGTHS), "steps": steps, "folder": str(run)},
        "recovery": {
            "restarts": max(_RESTARTS, config.recovery.restarts),
            "watchdog": config.recovery.watchdog.model_copy(update={"enabled": True, "end_after": _END_AFTER_S}),
        },
        "checkpoint": {"every": Every(_every(steps), "steps")},
        "monitor": {"every": 1, "progress": "none"},
    }
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _row(fault: Fault, plan: Path, code: int, output: Path, run: Path, undisturbed: Path, reference: Path) -> ChaosRow:
    """Return the row of a round that is compared with the undisturbed run, or from where it resumed with another."""
    events = events_of(plan)
    fired = next((event for event in events if event["event"] == "fired"), None)
    after = [event for event in events if fired is not None and event["time"] > fired["time"]]
    again = next((event for event in after if event["event"] == "updated"), None)
    equal = ledger_complete = False
    losses: dict[int, Any] = {}
    expected = usual = _losses(undisturbed)
    with suppress(Failure, OSError, ValueError, KeyError):
        losses = _losses(run)
        expected = {**usual, **_losses(reference)}
        equal = _have_equal_state(run, reference) and all(expected[step] == loss for step, loss in losses.items())
        ledger_complete = _is_complete(run)
    return ChaosRow(
        fault.kind,
        fault.rank,
        fault.step,
        fault.phase,
        fired is not None,
        code,
        again["time"] - fired["time"] if again is not None and fired is not None else None,
        max(0, fault.step - again["step"]) if again is not None else None,
        equal,
        len(expected.keys() - losses.keys()),
        ledger_complete,
        str(output),
        memory.distance(losses, usual),
    )


def _have_equal_state(run: Path, undisturbed: Path) -> bool:
    places = [find(path) for path in (run, undisturbed)]
    first, second = (OpenCheckpoint(place.storage, choose(place, None)) for place in places)
    with first, second:
        compared = compare(first, second)
    config = {key: values for key, values in compared.config.items() if key != _LEAVE_OUT}
    return replace(compared, config=config).equal


def _losses(run: Path) -> dict[int, Any]:
    """Return the losses by step. Raises OSError, ValueError, KeyError."""
    lines = [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def _is_complete(run: Path) -> bool:
    place = find(run)
    manifest = read_manifest(place.storage, choose(place, None))
    try:
        return audit(manifest.state, manifest.samples).complete
    except VerificationError:
        return False

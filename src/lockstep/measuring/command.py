"""What the verb memory does: ranks of their own for each mode, a line a mode, JSON.

none        2 updates to warm up, N timed, 1 whose memory is counted  -->  peak, ms
full        the same updates                                          -->  peak, ms, x none's
refused: a line with the reason; the next goes on
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.core.errors import ConfigError, OutOfMemory, Paused, RunFailed, Stopped
from lockstep.core.formatting import size
from lockstep.core.json_output import emit
from lockstep.core.stopping import undo_on_stop
from lockstep.core.terminal import echo
from lockstep.launch.devices import choose_ranks, count_gpus
from lockstep.launch.local import launch
from lockstep.measuring.modes import configs
from lockstep.training.job import imports_ahead
from lockstep.training.session import components_of
from lockstep.training.user_objects import UserObjects, refuse_given

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config
    from lockstep.core.arguments import MemoryArguments
    from lockstep.training.session import Session

_WARM_UP = 2  # the second forward is the first that a budget decides of


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one mode.

    Attributes:
        peak: bytes that an update needs at once, above `held`; of the rank that needs most. None: it didn't run.
        held: bytes of parameters, buffers and optimizer state, and on a GPU whatever else is there between updates.
        milliseconds: of the fastest update: what others do on the machine only adds. On the CPU of processor time.
        why: it didn't run.
    """

    mode: str
    peak: int | None = None
    held: int | None = None
    milliseconds: float | None = None
    why: str = ""


def memory(loaded: LoadedConfig, recipe: str, arguments: MemoryArguments) -> int:
    """Returns the exit code."""
    refuse_given(loaded)
    asked = configs(_long_enough(loaded.config, arguments.steps), arguments.modes)
    given = UserObjects(trust_remote_code=arguments.trust_remote_code)
    ranks = choose_ranks(loaded.config.launch)
    device = _device_of(loaded.config)
    echo(f"{recipe} on {device}, {ranks} rank{'s' * (ranks != 1)}: {_SAID[device]}\n\n{head()}", flush=True)
    rows: list[Measured] = []
    with _folder() as folder:
        for mode, config in asked.items():
            rows.append(_measured(mode, config, given, ranks, arguments.steps, folder))
            echo(line(rows[-1], rows[0]), flush=True)
    if rows[0].held is not None:
        echo(f"\nmodel and optimizer hold {size(rows[0].held)} besides")
    if arguments.json:
        emit([asdict(row) for row in rows])
    return 0


_SAID = {
    "cpu": "what torch's allocator gave out at once in an update, and the fastest one's processor time",
    "cuda": "the most that torch had allocated in an update, and the time of the fastest",
}


def head() -> str:
    """Of the table, in Markdown."""
    return "| mode | peak of an update | of none's | ms an update | of none's |\n| --- | ---: | ---: | ---: | ---: |"


def line(row: Measured, none: Measured) -> str:
    """One mode."""
    if row.peak is None or row.milliseconds is None:
        return f"| {row.mode} | {row.why} | | | |"
    of_peak = f"{row.peak / none.peak:.2f}" if none.peak else ""
    of_time = f"{row.milliseconds / none.milliseconds:.2f}" if none.milliseconds else ""
    return f"| {row.mode} | {size(row.peak)} | {of_peak} | {row.milliseconds:.1f} | {of_time} |"


def _long_enough(config: Config, steps: int) -> Config:
    """However short the run is: epochs begin again."""
    length = {"steps": _WARM_UP + steps + 2, "samples": None, "tokens": None, "epochs": None}
    return config.model_copy(update={"run": config.run.model_copy(update=length)})


def _measured(mode: str, config: Config, given: UserObjects, ranks: int, steps: int, folder: Path) -> Measured:
    """Raises:
    RunFailed: the ranks ended without a word.
    Stopped: somebody asked for it.
    """
    file = folder / f"{mode}.json"
    try:
        entry = partial(_be_a_rank, mode, config, given, steps, file)
        code = launch(entry, ranks, config.launch, None, apart=True, ahead=imports_ahead(config)).show()
    except ConfigError as refusal:
        return Measured(mode, why=f"refused: {refusal}")
    if code in (Stopped.exit_code, Paused.exit_code):
        raise Stopped("stopped")
    if not file.exists():
        raise RunFailed(f"mode {mode} can't be measured: its ranks ended with exit code {code}")
    return Measured(**json.loads(file.read_text(encoding="utf-8")))


@contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="lockstep-memory-"))
    try:
        with undo_on_stop(partial(shutil.rmtree, path, ignore_errors=True)):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _device_of(config: Config) -> str:
    """Without torch in this process."""
    return "cpu" if config.launch.device == "cpu" or not count_gpus() else "cuda"


# --- on a rank ------------------------------------------------------------------------------------------------------


def _be_a_rank(mode: str, config: Config, given: UserObjects, steps: int, file: Path) -> int:
    from lockstep.training.job import opened

    try:
        with opened(config, given) as session:
            found = _measure(mode, session, steps)
            first = components_of(session).world.rank == 0
    except ConfigError as refusal:  # all ranks have it
        found, first = Measured(mode, why=f"refused: {refusal}"), True
    except OutOfMemory:
        found, first = Measured(mode, why="out of memory"), True
    if first:
        file.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return 0


def _measure(mode: str, session: Session, steps: int) -> Measured:
    from lockstep.measuring.peak import held_by, peak_of

    world, batches = components_of(session).world, iter(session.batches())
    times = []

    def update() -> None:
        session.accumulate(next(batches))
        session.commit().result()

    clock = time.process_time if world.device.type == "cpu" else time.perf_counter
    for number in range(_WARM_UP + steps):
        began = clock()
        update()
        if number >= _WARM_UP:
            times.append(clock() - began)
    held = held_by(session.state().tensors.values(), world.device)
    peak = peak_of(update, world.device)
    peaks = cast("list[int]", world.axis.gather(peak))
    return Measured(mode, max(peaks), held, 1000 * min(times))

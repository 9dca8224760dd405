"""Measures the memory and the time of an update in each mode, in new ranks for each, and prints a table.

none        2 updates to warm up, N timed, 1 whose memory is counted  -->  peak, ms
full        the same updates                                          -->  peak, ms, x none's
refused     a row with the reason; the next mode follows
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.config.schema import Config, Memory
from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError, OutOfMemory, Paused, RunFailed, Stopped
from lockstep.core.formatting import size
from lockstep.core.stopping import undo_on_stop
from lockstep.core.terminal import echo
from lockstep.launch.devices import choose_ranks, count_accelerators
from lockstep.launch.local import launch
from lockstep.training.ahead import imports_ahead
from lockstep.training.session import components_of
from lockstep.training.user_objects import UserObjects, refuse_given

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config
    from lockstep.training.session import Session

_WARM_UP = 2  # the second forward is the first for which a budget chooses blocks
_METHOD = {
    "cpu": "peak memory of torch's allocator in an update, and processor time of the fastest update",
    "accelerator": "peak memory that torch allocated in an update, and time of the fastest update",
}
_HEAD = "| mode | peak of an update | of none's | ms an update | of none's |\n| --- | ---: | ---: | ---: | ---: |"


@dataclass(frozen=True, slots=True)
class ModeMeasurement:
    """Memory and time of an update in one mode.

    Attributes:
        peak: Peak bytes of an update above `held`, of the rank that needs most; None: the mode didn't run.
        held: Bytes of parameters, buffers and optimizer state, and on a GPU whatever else is there between updates.
        milliseconds: Time of the fastest update, as other processes only add to it; on the CPU processor time.
        why: Why the mode didn't run.
    """

    mode: str
    peak: int | None = None
    held: int | None = None
    milliseconds: float | None = None
    why: str = ""


def measure_modes(
    loaded: LoadedConfig, recipe: str, modes: str, steps: int, *, trust_remote_code: bool
) -> list[ModeMeasurement]:
    """Measure each mode in new ranks of this machine, and print a table row for each.

    Args:
        modes: Names separated by commas, or `all`.
        steps: Updates of each mode that are timed.
    """
    refuse_given(loaded)
    length = {"steps": _WARM_UP + steps + 2, "samples": None, "tokens": None, "epochs": None}
    config = loaded.config.model_copy(update={"run": loaded.config.run.model_copy(update=length)})
    chosen = configs(config, modes)
    given = UserObjects(trust_remote_code=trust_remote_code)
    ranks = choose_ranks(config.launch)
    device, count = count_accelerators(config.launch)
    method = _METHOD["accelerator" if count else "cpu"]
    echo(f"{recipe} on {device}, {ranks} rank{'s' * (ranks != 1)}: {method}\n\n{_HEAD}", flush=True)
    rows: list[ModeMeasurement] = []
    folder = Path(tempfile.mkdtemp(prefix="lockstep-memory-"))
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    try:
        with undo_on_stop(remove):
            for mode, of_mode in chosen.items():
                rows.append(_run_mode(mode, of_mode, given, ranks, steps, folder))
                echo(table_row(rows[-1], rows[0]), flush=True)
    finally:
        remove()
    if rows[0].held is not None:
        echo(f"\nmodel and optimizer hold another {size(rows[0].held)}")
    return rows


def table_row(row: ModeMeasurement, none: ModeMeasurement) -> str:
    """Return a row of the Markdown table, with the ratios to the mode `none`."""
    if row.peak is None or row.milliseconds is None:
        return f"| {row.mode} | {row.why} | | | |"
    peak_ratio = f"{row.peak / none.peak:.2f}" if none.peak else ""
    time_ratio = f"{row.milliseconds / none.milliseconds:.2f}" if none.milliseconds else ""
    return f"| {row.mode} | {size(row.peak)} | {peak_ratio} | {row.milliseconds:.1f} | {time_ratio} |"


def _run_mode(mode: str, config: Config, given: UserObjects, ranks: int, steps: int, folder: Path) -> ModeMeasurement:
    """Launch the ranks of one mode.

    Raises:
        RunFailed: The ranks ended without a result.
        Stopped: A signal asked them to stop.
    """
    file = folder / f"{mode}.json"
    try:
        entry = partial(_be_a_rank, mode, config, given, steps, file)
        code = launch(entry, ranks, config.launch, None, own_process=True, preload=imports_ahead(config)).show()
    except ConfigError as refusal:
        return ModeMeasurement(mode, why=f"refused: {refusal}")
    if code in (Stopped.exit_code, Paused.exit_code):
        raise Stopped("stopped")
    if not file.exists():
        raise RunFailed(f"mode {mode} can't be measured: its ranks ended with exit code {code}")
    return ModeMeasurement(**json.loads(file.read_text(encoding="utf-8")))


# --- on a rank ------------------------------------------------------------------------------------------------------


def _be_a_rank(mode: str, config: Config, given: UserObjects, steps: int, file: Path) -> int:
    from lockstep.training.job import opened

    try:
        with opened(config, given) as session:
            measurement = _measure(mode, session, steps)
            writes = components_of(session).world.rank == 0
    except ConfigError as refusal:  # raised on all ranks
        measurement, writes = ModeMeasurement(mode, why=f"refused: {refusal}"), True
    except OutOfMemory:
        measurement, writes = ModeMeasurement(mode, why="out of memory"), True
    if writes:
        file.write_text(json.dumps(asdict(measurement)), encoding="utf-8")
    return 0


def _measure(mode: str, session: Session, steps: int) -> ModeMeasurement:
    from lockstep.measuring.peak import held_by, peak_of

    world, batches = components_of(session).world, iter(session.batches())
    times = []

    def update() -> None:
        session.accumulate(next(batches))
        session.commit().result()

    clock = time.process_time if world.device.type == "cpu" else time.perf_counter
    for number in range(_WARM_UP + steps):
        start = clock()
        update()
        if number >= _WARM_UP:
            times.append(clock() - start)
    held = held_by(session.state().tensors.values(), world.device)
    peak = peak_of(update, world.device)
    peaks = cast("list[int]", world.axis.gather(peak))
    return ModeMeasurement(mode, max(peaks), held, 1000 * min(times))


MODES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": {"mode": "full"}},
    "full-every-2": {"activation_checkpointing": {"mode": "full", "every": 2}},
    "selective": {"activation_checkpointing": {"mode": "selective"}},
    "segments": {"activation_checkpointing": {"mode": "segments"}},
    "budget": {"activation_checkpointing": {"mode": "budget"}},
    "loss-chunk": {"loss_chunk": 256},
    "offload": {"activation_offload": "cpu"},
    "full+offload": {"activation_checkpointing": {"mode": "full"}, "activation_offload": "cpu"},
    "full+loss-chunk": {"activation_checkpointing": {"mode": "full"}, "loss_chunk": 256},
}


OWN = "yours"
"""The mode that the config itself sets."""


def configs(config: Config, names: str) -> dict[str, Config]:
    """Return a config for each mode. `none`, with which all are compared, comes first even if it isn't named.

    Args:
        names: Modes separated by commas, or `all`.

    Raises:
        ConfigError: There is no such mode.
    """
    known = {
        name: config.model_copy(update={"memory": Memory.model_validate(section)}) for name, section in MODES.items()
    }
    if config.memory != Memory():
        known[OWN] = config
    chosen = list(known) if names == "all" else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--modes: there is no mode {name!r}; {did_you_mean(name, known)}")
    return {name: known[name] for name in dict.fromkeys(["none", *chosen])}

"""Measures what each way to save memory saves and costs: a config's updates in each mode, in new ranks for each.

none      --> peak, ms                       full     memory: {activation_checkpointing: {mode: full}}
full      --> peak, ms, x none's             refused  a row with the reason; the next mode follows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.config.schema import Config, Memory
from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError, OutOfMemory
from lockstep.core.formatting import counted, size
from lockstep.core.terminal import echo
from lockstep.launch.devices import choose_ranks
from lockstep.simulation.planning import computes_on_cpu, measured_rank
from lockstep.training.user_objects import UserObjects

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig

MODES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": {"mode": "full"}},
    "full-every-2": {"activation_checkpointing": {"mode": "full", "every": 2}},
    "selective": {"activation_checkpointing": {"mode": "selective"}},
    "loss-chunk": {"loss_chunk": 256},
    "offload": {"activation_offload": "cpu"},
    "full+offload": {"activation_checkpointing": {"mode": "full"}, "activation_offload": "cpu"},
    "full+loss-chunk": {"activation_checkpointing": {"mode": "full"}, "loss_chunk": 256},
}
OWN = "yours"
"""The mode that the config itself sets."""

_HEAD = "| mode | peak of a rank | of none's | ms an update | of none's |\n| --- | ---: | ---: | ---: | ---: |"


@dataclass(frozen=True, slots=True)
class ModeMeasurement:
    """Memory and time of an update in one mode.

    Attributes:
        peak: Bytes at the peak of the rank that needs most; None: the mode didn't run.
        milliseconds: Time of the fastest update; on the CPU processor time.
        why: Why the mode didn't run.
    """

    mode: str
    peak: int | None = None
    milliseconds: float | None = None
    why: str = ""


def measure_modes(loaded: LoadedConfig, modes: str, steps: int, *, trust_remote_code: bool) -> list[ModeMeasurement]:
    """Measure each mode in new ranks of this machine, and print a row of a table for each.

    Args:
        modes: Names separated by commas, or `all`.
        steps: Updates of each mode that are timed.
    """
    chosen, given = configs(loaded.config, modes), UserObjects(trust_remote_code=trust_remote_code)
    ranks = choose_ranks(loaded.config.launch)
    time = "processor time on this machine's CPU" if computes_on_cpu(loaded.config) else "time on this machine"
    echo(f"each mode on {counted(ranks, 'rank')}, with the {time} of the fastest update:\n\n{_HEAD}", flush=True)
    rows: list[ModeMeasurement] = []
    for mode, config in chosen.items():
        try:
            measured = measured_rank(config, given, ranks, steps)
            rows.append(ModeMeasurement(mode, measured.peak.bytes, measured.milliseconds))
        except ConfigError as refusal:
            rows.append(ModeMeasurement(mode, why=f"refused: {refusal}"))
        except OutOfMemory:
            rows.append(ModeMeasurement(mode, why="out of memory"))
        echo(table_row(rows[-1], rows[0]), flush=True)
    return rows


def table_row(row: ModeMeasurement, none: ModeMeasurement) -> str:
    """Return a row of the Markdown table, with the ratios to the mode `none`."""
    if row.peak is None or row.milliseconds is None:
        return f"| {row.mode} | {row.why} | | | |"
    peak_ratio = f"{row.peak / none.peak:.2f}" if none.peak else ""
    time_ratio = f"{row.milliseconds / none.milliseconds:.2f}" if none.milliseconds else ""
    return f"| {row.mode} | {size(row.peak)} | {peak_ratio} | {row.milliseconds:.1f} | {time_ratio} |"


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

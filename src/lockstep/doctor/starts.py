"""The starts of a run, and what differs between them and between hosts.

checkpoints/*/manifest.json   the environment of the start that wrote it  --.
environment.json              that of the last start  --------------------'-- what has changed since
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.checkpoint.manifest import CorruptCheckpoint
from lockstep.checkpoint.reading import read_manifest
from lockstep.checkpoint.storage import names_by_step
from lockstep.core.errors import Failure
from lockstep.core.formatting import listed
from lockstep.launch.ends_file import LaunchEnds
from lockstep.report.run_data import RunData
from lockstep.training.finished_run import run_config
from lockstep.training.locations import storage_of

_PLAIN = ("host", "python", "executable", "platform", "cpu", "working_directory")
_OF_A_LAUNCH = ("RANK", "MASTER_", "WORLD_SIZE", "LOCAL_", "GROUP_", "LOCKSTEP_", "TORCHELASTIC_", "SLURM_", "OMP_NUM")
"""Variables that differ from start to start, and mean nothing."""
_CREATED = "created"  # when a start was described; a rank that saves while others fail describes nothing
_CHECKPOINTS = 5  # the newest, in which a description is looked for
_MOST = 8  # differences in a note


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
                return [f"An earlier start saved step {step}; since then this has changed: {listed(changed, _MOST)}."]
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
            notes.append(f"From host {first} to host {other} this differs: {listed(changed, _MOST)}.")
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

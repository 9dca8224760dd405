"""Names what was meant by a flag that a launcher doesn't have.

launch slurm --node 2                  --nodes: the closest one
launch kubernetes --gpus-per-node 8    --gpus: another launcher's flag of the same meaning
launch slurm --ranks 2 train digits    the command's: it belongs after the verb
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem

_SAME = (
    ("gpus", "gpus-per-node", "gpus-per-task", "num-gpus", "gres"),
    ("cpu", "cpus", "cpus-per-task", "cpus-per-node", "num-cpus"),
    ("memory", "mem"),
    ("nodes", "hosts", "nnodes", "num-nodes", "replicas"),
    ("workdir", "folder", "chdir", "working-dir"),
    ("image", "container-image"),
    ("volume", "volumes", "mount", "container-mounts"),
    ("time", "walltime", "time-limit"),
    ("partition", "queue"),
    ("env", "environment", "export"),
)
"""Flags of one meaning: of launchers, and of other tools."""
_GONE = {
    ("docker", "init"): "lockstep init docker writes the Dockerfile and compose.yaml",
    ("kubernetes", "kind"): "a Job runs on every cluster; docs/other-schedulers.md has a TrainJob",
}
_RANKS = ("ranks", "nproc", "nproc-per-node", "np", "ntasks", "ntasks-per-node")


def refuse_unknown(where: str, own: Sequence[str], flags: Mapping[str, bool]) -> None:
    """Raise ConfigError if a flag before the verb isn't the launcher's.

    Args:
        own: The words before the verb.
        flags: The launcher's, and whether each takes a value.
    """
    unknown = [flag for flag in _given(own, flags) if flag not in flags and flag != "-h"]
    if unknown:
        raise ConfigError([Problem(flag, "", _meant(where, flag, [*flags])) for flag in unknown])


def _given(own: Sequence[str], flags: Mapping[str, bool]) -> Iterator[str]:
    words = iter(own)
    for word in words:
        flag, equals, _ = word.partition("=")
        yield flag
        if flags.get(flag) and not equals:
            next(words, None)


def _meant(where: str, flag: str, known: Sequence[str]) -> str:
    name = flag.lstrip("-").replace("_", "-")
    if name in _RANKS:
        return "belongs to the command, as --ranks N after its verb: train digits --ranks 2"
    if (where, name) in _GONE:
        return f"there is no such flag any more: {_GONE[where, name]}"
    if "." in name:
        return f"belongs to the command, after its verb: train digits {flag} ..."
    groups = [group for group in _SAME if name in group]
    same = [each for each in known for group in groups if each.removeprefix("--") in group]
    meant = same[0] if same else closest_match(flag, known)
    ending = f"did you mean {meant}?" if meant else f"lockstep launch {where} --help prints those that there are"
    return f"there is no such flag of launch {where}; {ending}"

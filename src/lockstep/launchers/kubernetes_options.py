"""The options of a job on Kubernetes, and what is refused before anything is made.

Names, labels, taints, images and amounts are Kubernetes' to check: the server tries the manifests first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.jobs import JobCommand
from lockstep.core.secrets import names_a_secret
from lockstep.core.terminal import plain_line, shortened
from lockstep.launchers.tools import seconds_to_save
from lockstep.stores.addresses import is_address
from lockstep.strategies.section import Auto, Positive, Section

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([^\0]*)", re.DOTALL)
_MODES = {"ro": True, "rw": False}
_SIZE = re.compile(r"(?P<number>[0-9]{1,15}(\.[0-9]{1,9})?)(?P<unit>k|[MGTPE]|[KMGTPE]i)?")
_FACTORS = {"": 1.0, "k": 1e3} | {
    unit + suffix: float(base**power)
    for power, unit in enumerate("KMGTPE", start=1)
    for suffix, base in (("", 1000), ("i", 1024))
}
_SCRATCH = "/work"


class KubernetesOptions(Section):
    """Options of a job on Kubernetes."""

    image: str | None = None
    """Container image in which Lockstep is installed, such as registry.example/me/train:1; required."""
    nodes: Positive = 1
    """Number of pods; in each of them one launcher starts the ranks."""
    gpus: Positive | None = None
    """GPUs of each pod; without --ranks, each gets a rank."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the resource that --gpus counts, such as amd.com/gpu."""
    cpu: str | None = None
    """CPUs of each pod, such as 16 or 500m."""
    memory: str | None = None
    """Memory of each pod, such as 200Gi; /dev/shm counts."""
    shm: str = "auto"
    """Size of /dev/shm, such as 16Gi; auto: half of --memory, or 8Gi without it."""
    volume: tuple[str, ...] = ()
    """A persistent volume claim and where the pods see it, such as work:/work or data:/data:ro; may be repeated."""
    workdir: str | None = None
    """Folder of the pod in which the command runs; by default the first volume's that can be written to."""
    env: tuple[str, ...] = ()
    """An environment variable, such as NCCL_DEBUG=INFO; may be repeated."""
    env_secret: tuple[str, ...] = ()
    """A Secret of the namespace whose keys become environment variables, or SECRET:KEY for one of them; may be
    repeated."""
    namespace: str | None = None
    """Namespace; by default the one of kubectl's context."""
    context: str | None = None
    """Context of kubectl; by default the current one."""
    service_account: str | None = None
    """Service account of the pods."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Condition for pulling the image; by default the cluster decides by the image's tag."""
    image_pull_secret: tuple[str, ...] = ()
    """A Secret with the registry's credentials; may be repeated."""
    node_selector: tuple[str, ...] = ()
    """A label that the nodes must have, such as pool=h100; may be repeated."""
    toleration: tuple[str, ...] = ()
    """A taint that the pods tolerate, as KEY, KEY=VALUE or either with :EFFECT; may be repeated."""
    priority_class: str | None = None
    """Priority class of the pods."""
    label: tuple[str, ...] = ()
    """A label of all objects, such as team=vision; may be repeated."""
    user: Positive = 1000
    """User id and group id that the containers run with, and own the volumes' files with; never root."""
    grace: Positive | Auto = "auto"
    """Seconds that a pod has to save and stop; auto: a minute, and the time that 200 MB/s a pod take to save the
    state."""
    restart: bool = True
    """Start pods again that were stopped and saved, or whose node was taken: the run resumes."""
    retries: Annotated[int, Field(ge=0)] = 0
    """How many times the pods are also started again when the run fails with exit code 1."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29500
    """Port of the first pod at which the launchers meet."""
    program: str = "lockstep"
    """Program that starts Lockstep in the image."""


def check(command: JobCommand, options: KubernetesOptions) -> None:
    """Raise ConfigError if the options aren't valid, or don't fit together or with the command."""
    problems = [*_malformed(options), *_misfitting(command, options)]
    if not problems:
        problems += _unseen(command, options)
    if not problems and command.starts_run and not _is_kept(command, options):
        problems.append(_lost(command, options))
    if problems:
        raise ConfigError(problems)


def _malformed(options: KubernetesOptions) -> Iterator[Problem]:
    """Yield a problem for each value from which no manifest can be made."""
    yield from _bad_volumes(options)
    yield from _bad_pairs(options)
    for flag, size in (("--memory", options.memory), ("--shm", None if options.shm == "auto" else options.shm)):
        if size is not None and amount(size) <= 0:
            yield Problem(flag, "", f"{shortened(size)} is not a size above 0; write 200Gi")
    folder = options.workdir
    if folder is not None and not (folder.startswith("/") and folder.isprintable()):
        yield Problem("--workdir", "", f"{shortened(folder)} is not an absolute path, such as /work")


def _bad_volumes(options: KubernetesOptions) -> Iterator[Problem]:
    paths: list[str] = []
    for text in options.volume:
        claim, _, rest = text.partition(":")
        path, colon, mode = rest.partition(":")
        if not path.startswith("/") or (colon and mode not in _MODES) or not path.isprintable():
            message = f"{shortened(text)} is not CLAIM:/PATH or CLAIM:/PATH:ro; write {claim or 'work'}:/work"
            yield Problem("--volume", "", message)
            continue
        place = str(PurePosixPath(path))
        if place in ("/", "/dev/shm") or ".." in PurePosixPath(path).parts:
            yield Problem("--volume", "", f"{shortened(path)} can't be a volume's; give another path, such as /work")
        elif place in paths:
            yield Problem("--volume", "", f"pods would see two volumes at {place}; give each a path of its own")
        paths.append(place)


def _bad_pairs(options: KubernetesOptions) -> Iterator[Problem]:
    for flag, texts, example in (
        ("--label", options.label, "team=vision"),
        ("--node-selector", options.node_selector, "pool=h100"),
    ):
        for text in texts:
            if "=" not in text:
                yield Problem(flag, "", f"{shortened(text)} is not KEY=VALUE, such as {example}")
        yield from _twice(flag, [text.partition("=")[0] for text in texts])
    for text in options.env:
        if not _VARIABLE.fullmatch(text):
            yield Problem("--env", "", f"{shortened(text)} is not NAME=VALUE, such as NCCL_DEBUG=INFO")
    keys = [text.partition(":")[2] for text in options.env_secret if ":" in text]
    yield from _twice("--env", [*(text.partition("=")[0] for text in options.env), *keys])


def _twice(flag: str, names: Sequence[str]) -> Iterator[Problem]:
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(flag, "", f"{shortened(name)} is given twice; give it once")


def _misfitting(command: JobCommand, options: KubernetesOptions) -> list[Problem]:
    problems: list[Problem] = []

    def refuse(flag: str, message: str, when: Callable[[], object]) -> None:
        if when():
            problems.append(Problem(flag, "", message))

    refuse(
        "--image",
        "is missing; give the image in which Lockstep is installed, such as registry.example/me/train:1",
        lambda: not options.image,
    )
    refuse(
        "--nodes",
        f"{options.nodes}, but `lockstep {command.words[0]}` runs in one pod; leave it out",
        lambda: options.nodes > 1 and not command.nodes,
    )
    refuse(
        "--retries",
        "needs pods that start again; leave out --no-restart",
        lambda: options.retries and not options.restart,
    )
    refuse(
        "--shm",
        f"{options.shm} is more than --memory {options.memory}, in which it counts; give less",
        lambda: amount(options.shm) > amount(options.memory or "") > 0,
    )
    refuse(
        "--fresh, --from, --fork",
        "would start over with each pod that is started again; give --no-restart too, or start from them once and then "
        "leave them out",
        lambda: options.restart and command.restart_words != command.words,
    )
    problems += [
        Problem("--env", "", f"{name} looks like a secret, and the job shows its value; put it into a Secret and "
                "give --env-secret NAME")
        for name in variables(options)
        if names_a_secret(name)
    ]  # fmt: skip
    return problems


def _unseen(command: JobCommand, options: KubernetesOptions) -> list[Problem]:
    """Return a problem for each path here that lies outside of the current folder, and for the pods in no volume."""
    problems = []
    for text in command.paths:
        inside = PurePosixPath(os.path.normpath(PurePosixPath(workdir(options), text)))
        below_here = Path(os.path.abspath(Path(text).expanduser())).is_relative_to(Path.cwd())
        relative = not text.startswith(("/", "~"))
        if (relative and below_here) or any(inside.is_relative_to(path) for _, path, _ in claims(options)):
            continue
        message = (
            f"the pods don't see it: {inside} is in no volume; copy it into one and give --volume "
            f"CLAIM:{inside.parent}, or name it relative to this folder and copy it to the pods' --workdir"
        )
        problems.append(Problem(plain_line(text), "", message))
    return problems


def _lost(command: JobCommand, options: KubernetesOptions) -> Problem:
    """Return the problem that what the run saves would end with the pod."""
    folder = _kept_folder(command, options)
    holding = [claim for claim, path, _ in claims(options) if folder.is_relative_to(path)]
    reason = f"{folder} is in no volume; give --volume CLAIM:{folder.parent} or another that holds it"
    if holding:
        reason = f"{folder} is in the read-only volume {holding[0]}; give it without :ro, or another that holds the run"
    message = f"would be lost with the pod: {reason}, or checkpoint.folder=s3://BUCKET/PREFIX"
    return Problem("", "run.folder" if command.checkpoint_folder is None else "checkpoint.folder", message)


def _kept_folder(command: JobCommand, options: KubernetesOptions) -> PurePosixPath:
    place = command.checkpoint_folder or run_folder(command, options)
    return PurePosixPath(os.path.normpath(PurePosixPath(workdir(options), place)))


def shm_size(options: KubernetesOptions) -> str:
    """Return the size of /dev/shm."""
    if options.shm != "auto":
        return options.shm
    return "8Gi" if options.memory is None else f"{max(int(amount(options.memory) / 2) >> 20, 1)}Mi"


def grace_seconds(command: JobCommand, options: KubernetesOptions) -> int:
    """Return the seconds between SIGTERM and SIGKILL."""
    return seconds_to_save(command, options.nodes) if options.grace == "auto" else options.grace


# --- where files are ------------------------------------------------------------------------------------------------


def claims(options: KubernetesOptions) -> list[tuple[str, str, bool]]:
    """Return the claim, the path and whether it is read-only, of each volume."""
    parts = [text.split(":") for text in options.volume]
    return [(part[0], str(PurePosixPath(part[1])), part[2:] == ["ro"]) for part in parts if len(part) > 1]


def workdir(options: KubernetesOptions) -> str:
    """Return the folder in which the command runs; `/work` if no volume is there for it."""
    writable = [path for _, path, read_only in claims(options) if not read_only]
    return options.workdir or (writable[0] if writable else _SCRATCH)


def needs_scratch(options: KubernetesOptions) -> bool:
    """Return whether the command runs in a folder of the pod's own, which ends with it."""
    return options.workdir is None and all(read_only for _, _, read_only in claims(options))


def run_folder(command: JobCommand, options: KubernetesOptions) -> str:
    """Return where the pods see the run's folder."""
    return str(PurePosixPath(workdir(options)) / command.run_folder)


def _is_kept(command: JobCommand, options: KubernetesOptions) -> bool:
    """Return whether the checkpoints outlive a pod."""
    place = command.checkpoint_folder
    if place is not None and is_address(place):
        return True
    folder = _kept_folder(command, options)
    return any(folder.is_relative_to(path) for _, path, read_only in claims(options) if not read_only)


# --- pairs ----------------------------------------------------------------------------------------------------------


def variables(options: KubernetesOptions) -> dict[str, str]:
    """Return the environment variables that the user gives."""
    return {match[1]: match[2] for text in options.env if (match := _VARIABLE.fullmatch(text)) is not None}


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """Return `KEY=VALUE` texts as a mapping."""
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


def tolerations(options: KubernetesOptions) -> list[dict[str, str]]:
    """Return the taints that the pods tolerate."""
    return [
        {"key": key}
        | ({"operator": "Exists"} if value is None else {"operator": "Equal", "value": value})
        | ({} if effect is None else {"effect": effect})
        for key, value, effect in map(_toleration, options.toleration)
    ]


def amount(size: str) -> float:
    """Return a size in bytes; 0 if it isn't one."""
    match = _SIZE.fullmatch(size)
    return float(match["number"]) * _FACTORS[match["unit"] or ""] if match else 0.0


def _toleration(text: str) -> tuple[str, str | None, str | None]:
    """Return the key, the value and the effect."""
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    return key, value if equals else None, effect if colon else None

"""The options of a job on Kubernetes, and what is refused before anything is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.jobs import JobCommand
from lockstep.core.secrets import names_a_secret
from lockstep.launchers.tools import seconds_to_save
from lockstep.stores.addresses import is_address
from lockstep.strategies.section import Auto, Positive, Section

Kind = Literal["job", "jobset", "trainjob"]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_SECRET = re.compile(_NAME.pattern + r"(:[A-Za-z_][A-Za-z0-9_]*)?")
_LABEL = re.compile(r"([A-Za-z0-9][-A-Za-z0-9._/]*)=(([A-Za-z0-9][-A-Za-z0-9._]*)?)")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|[MGTPE]|[KMGTPE]i)?")
_VOLUME = re.compile(r"(?P<claim>[^:]+):(?P<path>/[^:]*)(?P<mode>:ro|:rw)?")
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_TOLERATION = re.compile(
    r"(?P<key>[A-Za-z0-9][-A-Za-z0-9._/]*)(=(?P<value>[-A-Za-z0-9._]*))?"
    r"(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
_FACTORS = {"m": 1e-3, "": 1.0, "k": 1e3} | {
    unit + suffix: float(base**power)
    for power, unit in enumerate("KMGTPE", start=1)
    for suffix, base in (("", 1000), ("i", 1024))
}
_SCRATCH = "/work"


class KubernetesOptions(Section):
    """Options of a job on Kubernetes."""

    image: str | None = None
    """Container image in which Lockstep is installed, such as registry.example/me/train:1; required."""
    kind: Kind = "job"
    """Kind of job: an Indexed Job with a headless Service, a JobSet, or a TrainJob of Kubeflow Trainer."""
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
    runtime: str = "torch-distributed"
    """ClusterTrainingRuntime of a TrainJob."""
    program: str = "lockstep"
    """Program that starts Lockstep in the image."""


def check(command: JobCommand, options: KubernetesOptions) -> None:
    """Raise ConfigError if the options aren't valid, or don't fit together or with the command."""
    problems = [*_malformed(options), *_misfitting(command, options)]
    if problems:
        raise ConfigError(problems)


def _malformed(options: KubernetesOptions) -> list[Problem]:
    names = "letters a to z, digits and dashes"
    return [
        *_unlike(_NAME, "--namespace", [options.namespace], f"a namespace: {names}"),
        *_unlike(_NAME, "--service-account", [options.service_account], f"a service account: {names}"),
        *_unlike(_NAME, "--priority-class", [options.priority_class], f"a priority class: {names}"),
        *_unlike(_NAME, "--runtime", [options.runtime], f"a runtime: {names}"),
        *_unlike(
            _SECRET, "--env-secret", options.env_secret, "SECRET or SECRET:KEY, the name of a Secret and of a key"
        ),
        *_unlike(_NAME, "--image-pull-secret", options.image_pull_secret, f"the name of a Secret: {names}"),
        *_unlike(_QUANTITY, "--cpu", [options.cpu], "a number of CPUs; write 16 or 500m"),
        *_unlike(_QUANTITY, "--memory", [options.memory], "a size; write 200Gi"),
        *_unlike(_QUANTITY, "--shm", [options.shm if options.shm != "auto" else None], "a size; write 16Gi"),
        *_unlike(_VOLUME, "--volume", options.volume, "CLAIM:/PATH or CLAIM:/PATH:ro, such as work:/work"),
        *_unlike(_VARIABLE, "--env", options.env, "NAME=VALUE, such as NCCL_DEBUG=INFO"),
        *_unlike(_LABEL, "--label", options.label, "KEY=VALUE, such as team=vision"),
        *_unlike(_LABEL, "--node-selector", options.node_selector, "KEY=VALUE, such as pool=h100"),
        *_unlike(
            _TOLERATION, "--toleration", options.toleration, "KEY[=VALUE][:NoSchedule|PreferNoSchedule|NoExecute]"
        ),
        *_unlike(re.compile(r"/.*"), "--workdir", [options.workdir], "an absolute path, such as /work"),
    ]


def _unlike(pattern: re.Pattern[str], flag: str, values: Sequence[str | None], valid: str) -> list[Problem]:
    return [
        Problem(flag, "", f"{value!r} is not {valid}")
        for value in values
        if value is not None and not pattern.fullmatch(value)
    ]


def _misfitting(command: JobCommand, options: KubernetesOptions) -> list[Problem]:
    problems: list[Problem] = []

    def refuse(flag: str, message: str, when: Callable[[], object]) -> None:
        if when():
            problems.append(Problem(flag, "", message))

    refuse(
        "--image",
        "is missing; give the image in which Lockstep is installed, such as registry.example/me/train:1",
        lambda: not options.image or options.image != "".join(options.image.split()),
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
        lambda: _bytes(options.shm) > _bytes(options.memory or "1E"),
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
    problems += _trainjob_problems(options)
    if not problems and command.starts_run and not _is_kept(command, options):
        folder = run_folder(command, options)
        message = (
            f"would be lost with the pod: {folder} is in no volume; give --volume CLAIM:{PurePosixPath(folder).parent} "
            "or another that holds it, or checkpoint.folder=s3://BUCKET/PREFIX"
        )
        problems.append(Problem("", "run.folder", message))
    return problems


def _trainjob_problems(options: KubernetesOptions) -> list[Problem]:
    """Return the options that a TrainJob can't hold: its runtime decides them."""
    if options.kind != "trainjob":
        return []
    given = {
        "--no-restart": not options.restart,
        "--retries": options.retries,
        "--image-pull-policy": options.image_pull_policy,
        "--priority-class": options.priority_class,
        "--env-secret SECRET": any(":" not in text for text in options.env_secret),
        "--port": options.port != KubernetesOptions.model_fields["port"].default,
    }
    return [
        Problem(flag, "", "can't be given for a TrainJob, whose runtime decides it; leave it out, or give "
                + ("--env-secret SECRET:KEY" if "SECRET" in flag else "--kind job"))
        for flag, value in given.items()
        if value
    ]  # fmt: skip


def _bytes(quantity: str) -> float:
    match = _QUANTITY.fullmatch(quantity)
    return float(match[1]) * _FACTORS[match[2] or ""] if match else 0.0


def shm_size(options: KubernetesOptions) -> str:
    """Return the size of /dev/shm."""
    if options.shm != "auto":
        return options.shm
    return "8Gi" if options.memory is None else f"{max(int(_bytes(options.memory) / 2) >> 20, 1)}Mi"


def grace_seconds(command: JobCommand, options: KubernetesOptions) -> int:
    """Return the seconds between SIGTERM and SIGKILL."""
    return seconds_to_save(command, options.nodes) if options.grace == "auto" else options.grace


# --- where files are ------------------------------------------------------------------------------------------------


def claims(options: KubernetesOptions) -> list[tuple[str, str, bool]]:
    """Return the claim, the path and whether it is read-only, of each volume."""
    matches = [match for text in options.volume if (match := _VOLUME.fullmatch(text)) is not None]
    return [(match["claim"], match["path"].rstrip("/") or "/", match["mode"] == ":ro") for match in matches]


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
    folder = PurePosixPath(workdir(options), place or run_folder(command, options))
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
    matches = [match for text in options.toleration if (match := _TOLERATION.fullmatch(text)) is not None]
    return [
        {"key": match["key"]}
        | ({"operator": "Exists"} if match["value"] is None else {"operator": "Equal", "value": match["value"]})
        | ({} if match["effect"] is None else {"effect": match["effect"]})
        for match in matches
    ]

"""The manifests of a job on Kubernetes, and its options: an Indexed Job, and for several pods a headless Service.

NAME-0.NAME is the first pod's address. Names, labels, images and amounts are Kubernetes' to check: the server tries the
manifests first.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import yaml
from pydantic import Field

from lockstep.core.errors import ConfigError, Paused, Problem, Stopped, VerificationError, refuse
from lockstep.core.jobs import JobCommand
from lockstep.core.terminal import command_line, shortened
from lockstep.launchers.tools import as_comment, as_yaml, pairs, program_words, seconds_to_save, variable_problems
from lockstep.stores.addresses import is_address
from lockstep.strategies.section import Auto, Positive, Section

TOKEN = "LOCKSTEP_JOB_TOKEN"
_CONTAINER = "lockstep"
_PORT = 29500  # of the first pod
_KEPT_S = 7 * 24 * 3600
_SCRATCH = "/work"
_VOLUME = re.compile(r"[^:]+:/[^:]*[^:/](:r[ow])?")
_SECRET = "and the job shows its value; put it into a Secret and give --env-secret NAME"


class KubernetesOptions(Section):
    """Options of a job on Kubernetes."""

    image: str | None = None
    """Container image with Lockstep, such as registry.example/me/train:1; required."""
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
    shm: str = "8Gi"
    """Size of /dev/shm, which is memory."""
    volume: tuple[str, ...] = ()
    """A persistent volume claim and where the pods see it, such as work:/work or data:/data:ro; may be repeated."""
    workdir: str | None = None
    """Folder of the pod where the command runs; by default the first volume's that can be written to."""
    env: tuple[str, ...] = ()
    """An environment variable, such as NCCL_DEBUG=INFO; may be repeated."""
    env_secret: tuple[str, ...] = ()
    """A Secret of the namespace with keys that become environment variables, or SECRET:KEY for one of them; may be
    repeated."""
    namespace: str | None = None
    """Namespace; by default the one of kubectl's context."""
    context: str | None = None
    """Context of kubectl; by default the current one."""
    pod: str | None = None
    """A YAML file with further keys of the pods' spec, such as nodeSelector, tolerations and priorityClassName."""
    label: tuple[str, ...] = ()
    """A label of all objects, such as team=vision; may be repeated."""
    user: Positive = 1000
    """User id and group id that the containers run with, and own the volumes' files with; never root."""
    grace: Positive | Auto = "auto"
    """Seconds that a pod has to save and stop; auto: a minute, and the time that 200 MB/s a pod take to save the
    state."""
    restart: bool = True
    """Start pods again that were stopped and saved, or lost their node: the run resumes."""
    retries: Annotated[int, Field(ge=0)] = 0
    """How many times the pods are also started again when the run fails with exit code 1."""
    program: str = "lockstep"
    """Program that starts Lockstep in the image."""


def check(command: JobCommand, options: KubernetesOptions) -> None:
    """Raise ConfigError if the options aren't valid, or don't fit together or with the command."""
    refuse([*_malformed(options), *_misfitting(command, options), *variable_problems(options.env, _SECRET)])
    refuse(_lost(command, options))


def _malformed(options: KubernetesOptions) -> Iterator[Problem]:
    for text in options.volume:
        if not _VOLUME.fullmatch(text) or ".." in text.split("/") or not text.isprintable():
            yield Problem("--volume", "", f"{shortened(text)} is not CLAIM:/PATH or CLAIM:/PATH:ro, such as work:/work")
    for text in options.label:
        if "=" not in text:
            yield Problem("--label", "", f"{shortened(text)} is not KEY=VALUE, such as team=vision")
    if options.workdir is not None and not options.workdir.startswith("/"):
        yield Problem("--workdir", "", f"{shortened(options.workdir)} is not an absolute path, such as /work")


def _misfitting(command: JobCommand, options: KubernetesOptions) -> Iterator[Problem]:
    if not options.image:
        message = "is missing; give an image with Lockstep, such as registry.example/me/train:1"
        yield Problem("--image", "", message)
    if options.retries and not options.restart:
        yield Problem("--retries", "", "needs pods that start again; leave out --no-restart")
    if options.restart and command.restart_words != command.words:
        message = "would start over with each pod that is started again; give --no-restart too, or start from them once"
        yield Problem("--fresh, --from, --fork", "", message)


def _lost(command: JobCommand, options: KubernetesOptions) -> Iterator[Problem]:
    """Yield a problem if the run would end with the pod: no volume holds its folder."""
    place = command.checkpoint_folder
    folder = PurePosixPath(os.path.normpath(PurePosixPath(workdir(options), place or command.run_folder)))
    claim = _claim_of(folder, options)
    if command.starts_run and not is_address(str(place)) and (claim is None or claim[2]):
        remedy = f"give --volume CLAIM:{folder.parent}, or checkpoint.folder=s3://BUCKET/PREFIX"
        message = f"would be lost with the pod: {folder} is in no volume that can be written; {remedy}"
        yield Problem("", "run.folder" if place is None else "checkpoint.folder", message)


# --- where files are ------------------------------------------------------------------------------------------------


def _claims(options: KubernetesOptions) -> list[tuple[str, str, bool]]:
    parts = [text.split(":") for text in options.volume if ":" in text]
    return [(part[0], str(PurePosixPath(part[1])), part[2:] == ["ro"]) for part in parts]


def _claim_of(path: PurePosixPath, options: KubernetesOptions) -> tuple[str, str, bool] | None:
    holding = [claim for claim in _claims(options) if path.is_relative_to(claim[1])]
    return max(holding, key=lambda claim: len(claim[1]), default=None)


def workdir(options: KubernetesOptions) -> str:
    """Return the folder where the command runs; `/work`, which ends with the pod, if no volume is there for it."""
    writable = [path for _, path, read_only in _claims(options) if not read_only]
    return options.workdir or (writable[0] if writable else _SCRATCH)


def _needs_scratch(options: KubernetesOptions) -> bool:
    return options.workdir is None and all(read_only for _, _, read_only in _claims(options))


# --- manifests ------------------------------------------------------------------------------------------------------


def documents(command: JobCommand, options: KubernetesOptions, name: str) -> list[dict[str, Any]]:
    """Return the manifests, the job's last."""
    service = [_service(options, name)] if options.nodes > 1 else []
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(options, name)}
    return [*service, {**head, "spec": _job_spec(command, options, name)}]


def text_of(manifests: Sequence[Mapping[str, Any]], command: JobCommand) -> str:
    """Return the manifests as YAML, with a comment about their use."""
    again = f"kubectl create --filename={shlex.quote(f'{command.folder}/job.yaml')}"
    parts = [command.typed, f"Written by that command, to be read, changed and created again: {again}"]
    if TOKEN in str(manifests):
        name = manifests[-1]["metadata"]["name"]
        secret = command_line("kubectl", "create", "secret", "generic", name, f"--from-file={TOKEN}=/dev/stdin")
        parts.append("The pods prove to each other that they know a secret, which that command also makes:")
        parts.append(f"openssl rand -hex 32 | {secret}")
    head = [f"# {as_comment(part)}\n" for part in parts]
    return "".join([*head, *(f"---\n{as_yaml(manifest)}" for manifest in manifests)])


# --- objects --------------------------------------------------------------------------------------------------------


def _labels(options: KubernetesOptions, name: str) -> dict[str, str]:
    own = {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": name}
    return {**own, **pairs(options.label)}


def _metadata(options: KubernetesOptions, name: str) -> dict[str, Any]:
    namespace = {} if options.namespace is None else {"namespace": options.namespace}
    return {"name": name, **namespace, "labels": _labels(options, name)}


def _service(options: KubernetesOptions, name: str) -> dict[str, Any]:
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"batch.kubernetes.io/job-name": name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(options, name), "spec": spec}


def _job_spec(command: JobCommand, options: KubernetesOptions, name: str) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": options.nodes,
        "parallelism": options.nodes,
        "backoffLimit": options.retries * options.nodes,
        **_failures(options),
        "ttlSecondsAfterFinished": _KEPT_S,
        "template": {"metadata": {"labels": _labels(options, name)}, "spec": _pod_spec(command, options, name)},
    }


def _failures(options: KubernetesOptions) -> dict[str, Any]:
    if not options.restart:
        return {}

    def on_code(action: str, operator: str, *codes: int) -> dict[str, Any]:
        exits = {"containerName": _CONTAINER, "operator": operator, "values": list(codes)}
        return {"action": action, "onExitCodes": exits}

    taken = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    final = (ConfigError.exit_code, VerificationError.exit_code, Stopped.exit_code)
    ends = on_code("FailJob", "In", *final) if options.retries else on_code("FailJob", "NotIn", Paused.exit_code)
    rules = [on_code("Ignore", "In", Paused.exit_code), taken, ends]
    return {"podReplacementPolicy": "Failed", "podFailurePolicy": {"rules": rules}}


# --- pods -----------------------------------------------------------------------------------------------------------


def _pod_spec(command: JobCommand, options: KubernetesOptions, name: str) -> dict[str, Any]:
    identity = {"runAsNonRoot": True, "runAsUser": options.user, "runAsGroup": options.user, "fsGroup": options.user}
    grace = seconds_to_save(command, options.nodes) if options.grace == "auto" else options.grace
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "subdomain": name if options.nodes > 1 else None,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            **identity,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(command, options, name)],
        "volumes": list(_volumes(options)),
    }
    return {**_without_empty(spec), **_further(options)}


def _further(options: KubernetesOptions) -> Mapping[str, Any]:
    if options.pod is None:
        return {}
    try:
        given = yaml.safe_load(Path(options.pod).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(Problem("--pod", "", f"{options.pod} can't be read: {error}")) from None
    if not isinstance(given, dict) or {"containers", "volumes"} & set(given):
        message = f"{options.pod} isn't a mapping of a pod's spec, or has containers or volumes, which are made here"
        raise ConfigError(Problem("--pod", "", message))
    return given


def _container(command: JobCommand, options: KubernetesOptions, name: str) -> dict[str, Any]:
    return _without_empty(
        {
            "name": _CONTAINER,
            "image": options.image,
            "command": program_words(options.program),
            "args": list(_arguments(command, options, name)),
            "workingDir": workdir(options),
            "env": list(_environment(options, name)),
            "envFrom": [{"secretRef": {"name": text}} for text in options.env_secret if ":" not in text],
            "resources": _resources(options),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": list(_mounts(options)),
        }
    )


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value not in (None, [], {})}


def _arguments(command: JobCommand, options: KubernetesOptions, name: str) -> Iterator[str]:
    yield from (word.replace("$(", "$$(") for word in command.words)  # $(NAME) is what Kubernetes replaces
    if options.nodes == 1:
        return
    yield from ("--nodes", str(options.nodes), "--rendezvous", f"{name}-0.{name}:{_PORT}")
    yield from ("--node-rank", "$(JOB_COMPLETION_INDEX)", "--job-id", name)


def _environment(options: KubernetesOptions, name: str) -> Iterator[dict[str, Any]]:
    own = {"HOME": "/tmp", "USER": "lockstep"}  # the user id may have no name
    for variable, value in {**own, **pairs(options.env)}.items():
        yield {"name": variable, "value": value.replace("$(", "$$(")}
    for secret, _, key in (text.partition(":") for text in options.env_secret if ":" in text):
        yield {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
    if options.nodes > 1:
        yield {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": name, "key": TOKEN}}}


def _resources(options: KubernetesOptions) -> dict[str, Any]:
    gpus = {} if options.gpus is None else {options.gpu_resource: str(options.gpus)}
    amounts = _without_empty({"cpu": options.cpu, "memory": options.memory, **gpus})
    return {"requests": amounts, "limits": amounts} if amounts else {}


def _mounts(options: KubernetesOptions) -> Iterator[dict[str, Any]]:
    yield {"name": "shm", "mountPath": "/dev/shm"}
    if _needs_scratch(options):
        yield {"name": "scratch", "mountPath": workdir(options)}
    for number, (_, path, read_only) in enumerate(_claims(options)):
        mount = {"name": f"volume-{number}", "mountPath": path}
        yield {**mount, "readOnly": True} if read_only else mount


def _volumes(options: KubernetesOptions) -> Iterator[dict[str, Any]]:
    yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}}
    if _needs_scratch(options):
        yield {"name": "scratch", "emptyDir": {}}
    for number, (claim, _, read_only) in enumerate(_claims(options)):
        source: dict[str, Any] = {"claimName": claim, "readOnly": True} if read_only else {"claimName": claim}
        yield {"name": f"volume-{number}", "persistentVolumeClaim": source}

"""The manifests of a job on Kubernetes: an Indexed Job, and for several pods a headless Service.

NAME-0.NAME is the first pod's address.

Of several pods each has a launcher. The job's token is in no manifest, only the name of the Secret that holds it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.core.errors import ConfigError, Paused, Stopped, VerificationError
from lockstep.core.jobs import JobCommand
from lockstep.launchers.commented_yaml import yaml_lines
from lockstep.launchers.kubernetes_options import (
    KubernetesOptions,
    claims,
    grace_seconds,
    needs_scratch,
    pairs,
    shm_size,
    tolerations,
    variables,
    workdir,
)
from lockstep.launchers.tools import as_comment, program_words

TOKEN = "LOCKSTEP_JOB_TOKEN"
_CONTAINER = "lockstep"
_KEPT_S = 7 * 24 * 3600
_COMMENTS = {
    "publishNotReadyAddresses": "The first pod's name resolves as soon as the pod exists.",
    "completionMode": "Each pod has a number, 0 to completions - 1: its node rank.",
    "podFailurePolicy": f"The first rule that matches counts; {Paused.exit_code}: stopped and saved.",
    "ttlSecondsAfterFinished": "The job and its logs are deleted a week after its end.",
    "terminationGracePeriodSeconds": "After SIGTERM all ranks save and stop, within these seconds.",
    "envFrom": "Secrets, by name: their values are in no manifest.",
}
"""Key -> a comment above its first line."""


def documents(command: JobCommand, options: KubernetesOptions, name: str) -> list[dict[str, Any]]:
    """Return the manifests, the job's last."""
    service = [_service(options, name)] if options.nodes > 1 else []
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(options, name)}
    return [*service, {**head, "spec": _job_spec(command, options, name)}]


def text_of(manifests: Sequence[Mapping[str, Any]], command: JobCommand) -> str:
    """Return the manifests as YAML with comments."""
    parts = [
        f"# {as_comment(command.typed)}",
        "# Written by that command, to be read, changed and created again: kubectl create --filename="
        + as_comment(shlex.quote(f"{command.folder}/job.yaml")),
    ]
    if TOKEN in str(manifests):
        name = manifests[-1]["metadata"]["name"]
        parts += [
            "# The pods prove to each other that they know a secret, which that command also makes:",
            f"# openssl rand -hex 32 | kubectl create secret generic {name} --from-file={TOKEN}=/dev/stdin",
        ]
    comments = dict(_COMMENTS)
    for manifest in manifests:
        parts += ["---", *yaml_lines(manifest, comments)]
    return "\n".join(parts) + "\n"


# --- objects --------------------------------------------------------------------------------------------------------


def _labels(options: KubernetesOptions, name: str) -> dict[str, str]:
    own = {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": name}
    return {**own, **pairs(options.label)}


def _metadata(options: KubernetesOptions, name: str) -> dict[str, Any]:
    namespace = {} if options.namespace is None else {"namespace": options.namespace}
    return {"name": name, **namespace, "labels": _labels(options, name)}


def _service(options: KubernetesOptions, name: str) -> dict[str, Any]:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": name},
    }
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
    """Return which ends of a pod count as failures of the job."""
    if not options.restart:
        return {}

    def on_code(action: str, operator: str, *codes: int) -> dict[str, Any]:
        return {
            "action": action,
            "onExitCodes": {"containerName": _CONTAINER, "operator": operator, "values": list(codes)},
        }

    taken = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    final = (ConfigError.exit_code, VerificationError.exit_code, Stopped.exit_code)
    ends = on_code("FailJob", "In", *final) if options.retries else on_code("FailJob", "NotIn", Paused.exit_code)
    return {
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [on_code("Ignore", "In", Paused.exit_code), taken, ends]},
    }


# --- pods -----------------------------------------------------------------------------------------------------------


def _pod_spec(command: JobCommand, options: KubernetesOptions, name: str) -> dict[str, Any]:
    identity = {"runAsNonRoot": True, "runAsUser": options.user, "runAsGroup": options.user, "fsGroup": options.user}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_seconds(command, options),
        "subdomain": name if options.nodes > 1 else None,
        "serviceAccountName": options.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "priorityClassName": options.priority_class,
        "nodeSelector": pairs(options.node_selector),
        "tolerations": tolerations(options),
        "imagePullSecrets": [{"name": secret} for secret in options.image_pull_secret],
        "securityContext": {
            **identity,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(command, options, name)],
        "volumes": list(_volumes(options)),
    }
    return _without_empty(spec)


def _container(command: JobCommand, options: KubernetesOptions, name: str) -> dict[str, Any]:
    return _without_empty(
        {
            "name": _CONTAINER,
            "image": options.image,
            "imagePullPolicy": options.image_pull_policy,
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
    yield from ("--nodes", str(options.nodes), "--rendezvous", f"{name}-0.{name}:{options.port}")
    yield from ("--node-rank", "$(JOB_COMPLETION_INDEX)", "--job-id", name)


def _environment(options: KubernetesOptions, name: str) -> Iterator[dict[str, Any]]:
    given = variables(options)
    for variable, value in {"HOME": "/tmp", "USER": "lockstep", **given}.items():  # the user id may have no name
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
    if needs_scratch(options):
        yield {"name": "scratch", "mountPath": workdir(options)}
    for number, (_, path, read_only) in enumerate(claims(options)):
        mount = {"name": f"volume-{number}", "mountPath": path}
        yield {**mount, "readOnly": True} if read_only else mount


def _volumes(options: KubernetesOptions) -> Iterator[dict[str, Any]]:
    yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm_size(options)}}
    if needs_scratch(options):
        yield {"name": "scratch", "emptyDir": {}}
    for number, (claim, _, read_only) in enumerate(claims(options)):
        source: dict[str, Any] = {"claimName": claim, "readOnly": True} if read_only else {"claimName": claim}
        yield {"name": f"volume-{number}", "persistentVolumeClaim": source}

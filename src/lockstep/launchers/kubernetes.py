"""Runs a command in pods of a Kubernetes cluster, by kubectl.

A job's identifier is NAMESPACE/job/NAME, with CONTEXT/ before it where the context was given.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from lockstep.core.errors import ConfigError, RunFailed, Stopped
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.stopping import undo_on_stop
from lockstep.core.terminal import echo, plain
from lockstep.launchers.kubernetes_manifests import TOKEN, KubernetesOptions, check, documents, text_of, workdir
from lockstep.launchers.tools import execute, follow_until_end, job_name, refuse_to_cancel_ended, write_files

_NOT_HERE = "install it, with a context for your cluster; --dry-run prints the manifests anywhere"
_LABEL = "batch.kubernetes.io/job-name"  # selects its pods
_INDEX = "batch.kubernetes.io/job-completion-index"
_ITS_UID = "{.metadata.uid}"
_UID = "UID"  # instead of it, in a planned call
_POLL_S = 2.0


class KubernetesLauncher:
    """The launcher `kubernetes`."""

    options = KubernetesOptions

    def plan(self, command: JobCommand, options: KubernetesOptions) -> LaunchPlan:
        """Return the manifests and the calls of kubectl that create them."""
        check(command, options)
        name = job_name(command.name, secrets.token_hex(3))
        manifests = documents(command, options, name)
        kubectl = _kubectl(options.context, options.namespace)
        path = command.folder / "job.yaml"
        owned = [f"service/{name}"] * (len(manifests) > 1) + [f"secret/{name}"] * (options.nodes > 1)
        commands = [(*kubectl, "create", "--dry-run=server", f"--filename={path}")]
        if options.nodes > 1:
            commands.append((*kubectl, "create", "secret", "generic", name, f"--from-file={TOKEN}=/dev/stdin"))
        commands.append((*kubectl, "create", f"--filename={path}"))
        if owned:
            commands.append((*kubectl, "get", f"jobs.batch/{name}", f"--output=jsonpath={_ITS_UID}"))
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": _UID}
            patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
            commands += [(*kubectl, "patch", each, "--type=merge", f"--patch={patch}") for each in owned]
        folder = workdir(options)
        where = "is here; the pods read it at {}, in the image or a volume"
        notes = tuple(f"{each} {where.format(PurePosixPath(folder, each))}" for each in command.paths)
        return LaunchPlan({path: text_of(manifests, command)}, tuple(commands), notes)

    def submit(self, plan: LaunchPlan) -> str:
        """Create the job and its objects; delete them again if a call fails."""
        (text,) = plan.files.values()
        manifests = [manifest for manifest in yaml.safe_load_all(text) if manifest]
        name = manifests[-1]["metadata"]["name"]
        kubectl = plan.commands[0][: plan.commands[0].index("create")]
        namespace = _namespace(kubectl)
        write_files(plan.files)
        _asked(plan.commands[0])  # the server tries the manifests
        resources = [f"jobs.batch/{name}", f"service/{name}", f"secret/{name}"]
        with undo_on_stop(lambda: _delete(kubectl, resources)):
            try:
                _create(plan.commands[1:])
            except RunFailed as failure:
                try:
                    _delete(kubectl, resources)
                except RunFailed as second:
                    left = shlex.join([*kubectl, "delete", "--ignore-not-found", *resources])
                    raise RunFailed(f"{failure}; what was created is left ({second}); delete it: {left}") from None
                raise
        context = [word.partition("=")[2] for word in kubectl if word.startswith("--context=")]
        return "/".join([*context, namespace, "job", name])

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return the job's state."""
        return _ask(_named(job.number))

    def follow(self, job: LaunchedJob) -> int:
        """Print the log of the first pod, and of those that replace it, until the job has ended."""
        target = _named(job.number)
        _ask(target)
        try:
            return follow_until_end("kubernetes", job.number, lambda: _ask(target), _PodLogs(target).print_new, _POLL_S)
        except ConfigError:
            echo(f"Kubernetes {target.identifier}: deleted", file=sys.stderr)
            return Stopped.exit_code

    def cancel(self, job: LaunchedJob) -> None:
        """Delete the job: its pods get SIGTERM, and the time to save; what belongs to it goes with it."""
        target = _named(job.number)
        refuse_to_cancel_ended(_ask(target))
        _delete(target.kubectl, [target.resource])


KUBERNETES = KubernetesLauncher()


# --- kubectl --------------------------------------------------------------------------------------------------------


def _kubectl(context: str | None, namespace: str | None) -> tuple[str, ...]:
    options = [f"--context={context}"] * (context is not None) + [f"--namespace={namespace}"] * (namespace is not None)
    return ("kubectl", *options)


def _asked(words: Sequence[str], given: str | None = None) -> str:
    return execute(words, _NOT_HERE, given)


def _namespace(kubectl: Sequence[str]) -> str:
    """Return the namespace of the calls. Raises RunFailed if kubectl or its context is missing."""
    if not any(word.startswith("--context=") for word in kubectl):
        _asked(("kubectl", "config", "current-context"))
    for word in kubectl:
        if word.startswith("--namespace="):
            return word.partition("=")[2]
    return _asked((*kubectl, "config", "view", "--minify", "--output=jsonpath={..namespace}")).strip() or "default"


def _delete(kubectl: Sequence[str], resources: Sequence[str]) -> None:
    _asked((*kubectl, "delete", "--ignore-not-found", "--wait=false", *resources))


def _create(commands: Sequence[Sequence[str]]) -> None:
    """Execute planned calls: one reads the job's token on stdin, one prints the job's uid, and others contain it."""
    uid = ""
    for words in commands:
        given = secrets.token_hex(32) if TOKEN in words[-1] else None
        output = _asked([word.replace(f'"{_UID}"', f'"{uid}"') for word in words], given)
        uid = output.strip() if words[-1].endswith(_ITS_UID) else uid


# --- what the cluster knows of a job --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    kubectl: tuple[str, ...]
    name: str
    identifier: str

    @property
    def resource(self) -> str:
        return f"jobs.batch/{self.name}"


@dataclass(frozen=True, slots=True)
class _ClusterJob(JobStatus):
    """A job's state: `first` are the pods with node rank 0, the oldest first."""

    first: tuple[Mapping[str, Any], ...] = ()


def _named(number: str) -> _Target:
    *context, namespace, kind, name = ["", "", *number.rsplit("/", 3)]
    if kind != "job" or not namespace or not name:
        raise ConfigError(f"{number!r} is neither NAMESPACE/job/NAME of a job nor the folder of its run")
    return _Target(_kubectl(context[-1] or None, namespace), name, number)


def _ask(target: _Target) -> _ClusterJob:
    try:
        job = json.loads(_asked((*target.kubectl, "get", target.resource, "--output=json")))
    except RunFailed as failure:
        if "NotFound" not in str(failure):
            raise
        why = "canceled, ended more than a week ago, or in another context"
        raise ConfigError(f"Kubernetes knows no {target.identifier}: {why}") from None
    listed = _asked((*target.kubectl, "get", "pods", f"--selector={_LABEL}={target.name}", "--output=json"))
    pods = sorted(json.loads(listed)["items"], key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    ends = {each["type"]: each for each in job.get("status", {}).get("conditions", ()) if each["status"] == "True"}
    if "Complete" in ends:
        state, code = "completed", 0
    elif "Failed" in ends:
        code = _code(ends["Failed"], pods)
        reasons = sorted({each["reason"] for each in _terminated(pods) if each.get("reason", "Error") != "Error"})
        why = f" ({plain(', '.join(reasons))})" if reasons else ""
        state = f"failed, exit code {code}{why}: {plain(ends['Failed'].get('message', 'without a message'))}"
    else:
        state, code = _unfinished(pods), None
    first = tuple(pod for pod in pods if pod["metadata"].get("labels", {}).get(_INDEX, "0") == "0")
    restarts = max(len(first) - 1, 0)
    text = f"Kubernetes {target.identifier}: {state}{f', restart {restarts}' if restarts else ''}"
    return _ClusterJob(text, code, first)


def _states(pods: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    statuses = [each for pod in pods for each in pod.get("status", {}).get("containerStatuses", ())]
    return [each["state"][kind] for each in statuses if kind in each.get("state", {})]


def _terminated(pods: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [*_states(pods, "terminated"), *(pod["status"] for pod in pods if pod.get("status", {}).get("reason"))]


def _code(failed: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> int:
    """Return the exit code of a failed run: the one in the job's condition, or the last of a pod."""
    if match := re.search(r"exit code (\d+)", failed.get("message", "")):
        return int(match[1])
    return next((each["exitCode"] for each in reversed(_states(pods, "terminated")) if each["exitCode"]), 1)


def _unfinished(pods: Sequence[Mapping[str, Any]]) -> str:
    live = [pod for pod in pods if pod.get("status", {}).get("phase") in ("Pending", "Running")]
    if not live:
        return "waits for its pods"
    running = sum(pod["status"]["phase"] == "Running" for pod in live)
    conditions = [each for pod in live for each in pod["status"].get("conditions", ())]
    waits = [each for each in _states(live, "waiting") if each.get("reason") != "ContainerCreating"]
    waits += [each for each in conditions if each["type"] == "PodScheduled" and each["status"] == "False"]
    texts = {plain(": ".join(each[key] for key in ("reason", "message") if each.get(key))) for each in waits} - {""}
    return f"{running} of {len(live)} pods running" + (f" ({'; '.join(sorted(texts))})" if texts else "")


class _PodLogs:
    """Prints the logs of a job's first pods, one after another, each line once."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._printed: dict[str, str] = {}  # pod -> time of its last line, as the cluster writes it
        self._ended: set[str] = set()

    def print_new(self, state: _ClusterJob) -> None:
        """Print what is new, until each pod that runs has ended."""
        for pod in state.first:
            name, phase = pod["metadata"]["name"], pod.get("status", {}).get("phase")
            if name in self._ended or phase not in ("Running", "Succeeded", "Failed"):
                continue
            if name not in self._printed and len(state.first) > 1:
                echo(f"--- {name}", file=sys.stderr, flush=True)
            self._printed.setdefault(name, "")
            error = self._stream(name, pod["spec"]["containers"][0]["name"])
            if phase != "Running":
                self._ended.add(name)
                if error:
                    echo(f"note: the log of {name} can't be read: {error}", file=sys.stderr, flush=True)

    def _stream(self, name: str, container: str) -> str:
        """Print the log until it ends or the connection breaks; return the error of kubectl."""
        last = self._printed[name]
        since = [f"--since-time={last}"] if last else []
        words = (*self._target.kubectl, "logs", "--follow", "--timestamps", f"--container={container}", *since, name)
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, errors="replace") as logs:
            for line in logs.stdout or ():
                moment, _, text = line.rstrip("\n").partition(" ")
                if moment > last:
                    self._printed[name] = moment
                    echo(text, flush=True)
            complaint = logs.stderr.read().strip() if logs.stderr is not None else ""
        return complaint if logs.returncode else ""

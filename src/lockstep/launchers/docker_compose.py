"""Compose files: that of a job, and that of a project.

x-node     what all nodes have: the image, the user, how they are stopped, what they see
services   node0, node1, ...: one launcher each, which starts the ranks of its node, and their GPUs
networks   one of their own, at which nothing else of this machine takes part

No secret is in them: the token of the job is a variable, whose value `docker compose up` reads from its environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.command_lines import command_line
from lockstep.core.errors import Paused
from lockstep.core.jobs import JobCommand
from lockstep.launch.meeting import TOKEN
from lockstep.launchers.commented_yaml import OneLine, yaml_lines
from lockstep.launchers.docker_options import (
    DockerOptions,
    container_user,
    gpus,
    grace_seconds,
    number_of_nodes,
    variables,
    volumes,
)
from lockstep.launchers.tools import as_comment, program_words

FOLDER_LABEL = "lockstep.folder"
"""Label of a container: where the files of its job are."""
WORKSPACE = "/workspace"
"""Folder of a project in its image."""
BUILD_ARGUMENTS = ("BASE_IMAGE", "TORCH_INDEX", "LOCKSTEP")
"""Build arguments of the Dockerfile that Compose takes from variables of the same names, where they are set."""

_NODES_OF_PROJECT = 2
_GRACE_OF_PROJECT_S = 120
_TUNING = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME")
_COMMENTS = {
    "args": "Without a value: that of the variable of this name, or the Dockerfile's default.",
    "user": "Not root. The folders below `volumes` must be writable for this user.",
    "init": "It passes signals on, and reaps processes.",
    "stop_signal": f"All ranks then save and stop within the grace period, with exit code {Paused.exit_code}.",
    "shm_size": "NCCL and data loaders share memory here.",
    TOKEN: "A secret that the nodes share; its value comes from the environment of `docker compose up`.",
    "healthcheck": "Healthy: the ranks of the node have started.",
    "device_ids": "Each node needs GPUs of its own.",
}
_PROJECT_COMMENTS = {
    "volumes": "The data, and the runs: checkpoints, logs and metrics.",
    "NCCL_DEBUG": "Without a value: that of the variable of this name, if it is set.",
    "shm_size": _COMMENTS["shm_size"],
}


@dataclass(frozen=True, slots=True)
class ComposeProject:
    """The files of a project that its compose file names.

    Attributes:
        name: Of the project and its image.
        config: A config file of the project, or a recipe.
    """

    name: str
    config: str


def job_text(command: JobCommand, options: DockerOptions, name: str, folder: Path) -> str:
    """Return the compose file of a job.

    Args:
        name: Of the job, and of its network.
        folder: Where the command is run.
    """
    nodes = number_of_nodes(options)
    up = as_comment(command_line("docker", "compose", "--file", command.folder / "compose.yaml", "up"))
    head = [
        as_comment(command.typed),
        "Written by that command, to be read, changed and started again:",
        f'{TOKEN}="$(openssl rand -hex 32)" {up}' if nodes > 1 else up,
    ]
    user = container_user(options, folder)
    common = {
        **_image_of_job(options, folder),
        **_container(user, grace_seconds(command, options), options.shm),
        "networks": OneLine(["ranks"]),
        "working_dir": str(folder),
        "entrypoint": OneLine(program_words(options.program)),
        "environment": _environment_of_job(options),
        "volumes": [_mount(each.host, each.target, each.read_only) for each in volumes(options, folder)],
        "labels": {FOLDER_LABEL: str(command.folder)},
        **(_health() if command.nodes else {}),
    }
    own = [
        {
            "container_name": f"{name}-node{node}",
            "hostname": f"node{node}",
            "command": OneLine([*command.words, *_joining(node, nodes, options.port, name)]),
            **_devices(options, node),
        }
        for node in range(nodes)
    ]
    return _text(head, name, _escaped(common, keep=TOKEN), [_escaped(each) for each in own], {})


def project_text(project: ComposeProject, options: DockerOptions) -> str:
    """Return the compose file of a project."""
    nodes = number_of_nodes(options, _NODES_OF_PROJECT)
    head = [
        f"{nodes} nodes on this machine, for {'NVIDIA GPUs' if gpus(options) else 'CPUs'}.",
        "Written by `lockstep launch docker --init`, to be read and changed.",
        "",
        f'  export {TOKEN}="$(openssl rand -hex 32)"',
        "  mkdir -p data runs",
        "  docker compose up --build",
        "",
        "`docker compose down` stops the nodes, saved; `up` again resumes the run.",
    ]
    common = {
        "image": project.name,
        "build": {
            "context": ".",
            "args": {**dict.fromkeys(BUILD_ARGUMENTS), "UID": "${LOCKSTEP_UID:-1000}", "GID": "${LOCKSTEP_GID:-1000}"},
        },
        **_container("${LOCKSTEP_UID:-1000}:${LOCKSTEP_GID:-1000}", _GRACE_OF_PROJECT_S, options.shm),
        "networks": OneLine(["ranks"]),
        "environment": {
            TOKEN: f"${{{TOKEN}:?is not set; see the first lines of compose.yaml}}",
            **dict.fromkeys(_TUNING),
        },
        "volumes": [
            _mount("${LOCKSTEP_DATA:-./data}", f"{WORKSPACE}/data", read_only=True),
            _mount("${LOCKSTEP_RUNS:-./runs}", f"{WORKSPACE}/runs", read_only=False),
        ],
        **_health(),
    }
    words = ["train", project.config, "run.folder=runs/docker"]
    own = [
        {
            "hostname": f"node{node}",
            "command": OneLine([*words, *_joining(node, nodes, options.port, "docker")]),
            **_devices(options, node),
        }
        for node in range(nodes)
    ]
    return _text(head, project.name, common, own, _PROJECT_COMMENTS)


def _text(
    head: Sequence[str],
    name: str,
    common: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    more: Mapping[str, str],
) -> str:
    comments = {**_COMMENTS, **more}
    parts = [f"# {line}".rstrip() for line in head]
    parts += [
        *yaml_lines({"name": name}, {}),
        "",
        "x-node: &node",
        *_indented(yaml_lines(common, comments), 2),
        "",
        "services:",
    ]
    for number, node in enumerate(nodes):
        parts += [f"  node{number}:", "    <<: *node", *_indented(yaml_lines(node, comments), 4)]
    parts += ["", "networks:", "  ranks:", "    driver: bridge"]
    return "\n".join(parts) + "\n"


def _indented(lines: Iterator[str], spaces: int) -> Iterator[str]:
    return (f"{' ' * spaces}{line}" for line in lines)


def _escaped(value: Any, keep: str = "") -> Any:
    """Return the value with `$` doubled, in which Compose would replace variables; but not below the key `keep`."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {key: each if key == keep else _escaped(each, keep) for key, each in value.items()}
    if isinstance(value, OneLine):
        return OneLine(_escaped(each) for each in value)
    return [_escaped(each, keep) for each in value] if isinstance(value, list) else value


# --- parts of a service ---------------------------------------------------------------------------------------------


def _image_of_job(options: DockerOptions, folder: Path) -> dict[str, Any]:
    if options.image is not None:
        return {"image": options.image}
    build = {"context": str(folder), "args": dict.fromkeys(BUILD_ARGUMENTS)}
    return {"image": f"{project_name(folder.name)}:latest", "build": build}


def project_name(name: str) -> str:
    """Return a name for a project and its image, after the name of its folder or package."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "lockstep-project"


def _container(user: str, grace_s: int, shm: str) -> dict[str, Any]:
    """Return how a container runs and is stopped."""
    return {
        "user": user,
        "init": True,
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{grace_s}s",
        "shm_size": shm,
        "ulimits": {"memlock": -1},
        "cap_drop": OneLine(["ALL"]),
        "security_opt": OneLine(["no-new-privileges:true"]),
        "restart": "no",
        "logging": {"driver": "local", "options": {"max-size": "50m", "max-file": "2"}},
    }


def _mount(source: str, target: str, read_only: bool) -> dict[str, Any]:
    mount = {"type": "bind", "source": source, "target": target}
    only_read = {"read_only": True} if read_only else {}
    return {**mount, **only_read, "bind": {"create_host_path": False}}  # it would be root's


def _environment_of_job(options: DockerOptions) -> dict[str, str | None]:
    own = {"HOME": "/tmp", "USER": "lockstep"}  # the user id may have no name in the image
    token = {TOKEN: f"${{{TOKEN}:?is made by lockstep launch docker}}"} if number_of_nodes(options) > 1 else {}
    return {**own, **variables(options), **token}


def _joining(node: int, nodes: int, port: int, job: str) -> list[str]:
    if nodes == 1:
        return []
    return ["--nodes", str(nodes), "--rendezvous", f"node0:{port}", "--node-rank", str(node), "--job-id", job]


def _devices(options: DockerOptions, node: int) -> dict[str, Any]:
    """Return the reservation of a node's GPUs."""
    count = gpus(options)
    if not count:
        return {}
    numbers = [str(node * count + number) for number in range(count)]
    device = {"driver": "nvidia", "device_ids": OneLine(numbers), "capabilities": OneLine(["gpu"])}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _health() -> dict[str, Any]:
    return {
        "healthcheck": {
            "test": OneLine(["CMD", "python3", "-m", "lockstep.launchers.docker_health"]),
            "interval": "30s",
            "timeout": "10s",
            "retries": 3,
            "start_period": "120s",
        }
    }

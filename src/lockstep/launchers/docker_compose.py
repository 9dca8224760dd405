"""The compose file of a job.

services   node0, node1, ...: one launcher each, which starts the ranks of its node, and their GPUs
networks   one of their own, at which nothing else of this machine takes part

No secret is in it: the token of the job is a variable, whose value `docker compose up` reads from its environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.command_lines import command_line
from lockstep.core.jobs import JobCommand
from lockstep.launch.meeting import TOKEN
from lockstep.launchers.commented_yaml import yaml_lines
from lockstep.launchers.docker_options import DockerOptions, container_user, gpus, grace_seconds, variables, volumes
from lockstep.launchers.tools import as_comment, program_words

FOLDER_LABEL = "lockstep.folder"
"""Label of a container: where the files of its job are."""
_BUILD_ARGUMENTS = ("BASE_IMAGE", "TORCH_INDEX", "LOCKSTEP")  # Compose takes them from variables of these names


def job_text(command: JobCommand, options: DockerOptions, name: str, folder: Path) -> str:
    """Return the compose file of a job.

    Args:
        name: Of the job, and of its network.
        folder: Where the command is run.
    """
    nodes = options.nodes
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
        "networks": ["ranks"],
        "working_dir": str(folder),
        "entrypoint": program_words(options.program),
        "environment": _environment_of_job(options),
        "volumes": [_mount(each.host, each.target, each.read_only) for each in volumes(options, folder)],
        "labels": {FOLDER_LABEL: str(command.folder)},
    }
    own = [
        {
            "container_name": f"{name}-node{node}",
            "hostname": f"node{node}",
            "command": [*command.words, *_joining(node, nodes, options.port, name)],
            **_devices(options, node),
        }
        for node in range(nodes)
    ]
    services = {f"node{node}": {**_escaped(common, keep=TOKEN), **_escaped(each)} for node, each in enumerate(own)}
    compose = {"name": name, "services": services, "networks": {"ranks": {"driver": "bridge"}}}
    return "\n".join([*(f"# {line}" for line in head), *yaml_lines(compose, {})]) + "\n"


def _escaped(value: Any, keep: str = "") -> Any:
    """Return the value with `$` doubled, in which Compose would replace variables; but not below the key `keep`."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {key: each if key == keep else _escaped(each, keep) for key, each in value.items()}
    return [_escaped(each, keep) for each in value] if isinstance(value, list) else value


# --- parts of a service ---------------------------------------------------------------------------------------------


def _image_of_job(options: DockerOptions, folder: Path) -> dict[str, Any]:
    if options.image is not None:
        return {"image": options.image}
    build = {"context": str(folder), "args": dict.fromkeys(_BUILD_ARGUMENTS)}
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "lockstep-project"
    return {"image": f"{name}:latest", "build": build}


def _container(user: str, grace_s: int, shm: str) -> dict[str, Any]:
    """Return how a container runs and is stopped."""
    return {
        "user": user,
        "init": True,
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{grace_s}s",
        "shm_size": shm,
        "ulimits": {"memlock": -1},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "no",
        "logging": {"driver": "local", "options": {"max-size": "50m", "max-file": "2"}},
    }


def _mount(source: str, target: str, read_only: bool) -> dict[str, Any]:
    mount = {"type": "bind", "source": source, "target": target}
    only_read = {"read_only": True} if read_only else {}
    return {**mount, **only_read, "bind": {"create_host_path": False}}  # it would be root's


def _environment_of_job(options: DockerOptions) -> dict[str, str | None]:
    own = {"HOME": "/tmp", "USER": "lockstep"}  # the user id may have no name in the image
    token = {TOKEN: f"${{{TOKEN}:?is made by lockstep launch docker}}"} if options.nodes > 1 else {}
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
    device = {"driver": "nvidia", "device_ids": numbers, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}

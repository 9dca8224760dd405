"""The options of a job on a Ray cluster, and what is refused before anything is submitted."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import Field

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.jobs import JobCommand
from lockstep.core.secrets import names_a_secret
from lockstep.stores.addresses import is_address
from lockstep.strategies.section import Auto, Positive, Section

ADDRESS = re.compile(r"https?://[^\s/@]+(?::\d+)?(?:/[^\s@]*)?|[^\s/:@]+:\d+")
"""Addresses of Ray's dashboard."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*=[^\0]*", re.DOTALL)
_RESOURCE = re.compile(r"([A-Za-z][\w:.-]*)=(\d+(?:\.\d+)?)")


class RayOptions(Section):
    """Options of a job on a Ray cluster."""

    nodes: Positive = 1
    """Number of nodes; on each of them one launcher starts the ranks."""
    gpus_per_node: Positive | None = None
    """GPUs of each node; without --ranks, each gets a rank."""
    cpus_per_node: Positive | Auto = "auto"
    """CPUs of each node that are taken from Ray; auto: one for each rank or GPU, where their number is known."""
    resource: tuple[str, ...] = ()
    """Another resource of Ray that each node must have, such as accelerator_type:H100=0.001; may be repeated."""
    address: str | None = None
    """Address of Ray's dashboard; by default RAY_API_SERVER_ADDRESS, or http://127.0.0.1:8265."""
    folder: str | None = None
    """Working folder, shared by all nodes; by default the path of this one."""
    upload: bool = False
    """Give each node a copy of this folder through Ray, instead of sharing it; at most 500 MiB."""
    program: str | None = None
    """Command that starts Lockstep on the nodes; by default this one's path."""
    env: tuple[str, ...] = ()
    """An environment variable for the run, such as NCCL_DEBUG=INFO; may be repeated."""
    wait: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to wait for nodes that the cluster doesn't have yet; nodes that are busy are always waited for."""
    retries: Annotated[int, Field(ge=0)] = 0
    """How many times the run starts again when it has lost a node; it resumes."""
    grace: Positive | Auto = "auto"
    """Seconds that a node has to save and stop; auto: a minute, and the time that 200 MB/s a node take to save the
    state."""


def check(command: JobCommand, options: RayOptions) -> None:
    """Raise ConfigError if the options aren't valid, or don't fit together or with the command."""
    problems = []
    if options.nodes > 1 and not command.nodes:
        message = f"{options.nodes}, but `lockstep {command.words[0]}` runs on one node; leave it out"
        problems.append(Problem("--nodes", "", message))
    if options.upload and options.folder is not None:
        problems.append(
            Problem("--upload", "", "copies this folder, and --folder names a shared one; give one of them")
        )
    if options.retries and command.restart_words != command.words:
        message = "would start over with each retry; leave out --retries, or start from them once"
        problems.append(Problem("--fresh, --from, --fork", "", message))
    if options.address is not None and not ADDRESS.fullmatch(options.address):
        message = f"{options.address!r} is not the address of Ray's dashboard; write http://HEAD:8265"
        problems.append(Problem("--address", "", message))
    for text in options.resource:
        if not _RESOURCE.fullmatch(text):
            example = "NAME=AMOUNT, such as accelerator_type:H100=0.001"
            problems.append(Problem("--resource", "", f"{text!r} is not {example}"))
        elif (name := text.partition("=")[0]) in ("CPU", "GPU"):
            problems.append(Problem("--resource", "", f"{name} has an option of its own: --{name.lower()}s-per-node"))
    for text in options.env:
        if not _VARIABLE.fullmatch(text):
            problems.append(Problem("--env", "", f"{text!r} is not NAME=VALUE, such as NCCL_DEBUG=INFO"))
        elif names_a_secret(name := text.partition("=")[0]):
            message = f"{name} looks like a secret, and Ray's dashboard shows its value; set it where Ray is started"
            problems.append(Problem("--env", "", message))
    if not problems and options.upload and command.starts_run and not _is_kept(command):
        message = (
            f"{command.run_folder} would be lost with Ray's copy of this folder; give it an absolute path of a shared "
            "folder, or checkpoint.folder=s3://BUCKET/PREFIX"
        )
        problems.append(Problem("", "run.folder", message))
    if problems:
        raise ConfigError(problems)


def _is_kept(command: JobCommand) -> bool:
    """Return whether the checkpoints outlive the copy of a folder."""
    place = command.checkpoint_folder or str(command.run_folder)
    return is_address(place) or PurePosixPath(place).is_absolute() or not command.in_folder


def bundle(command: JobCommand, options: RayOptions) -> dict[str, float]:
    """Return the resources of each node, by Ray's names."""
    number = command.ranks or options.gpus_per_node or 1
    cpus = number if options.cpus_per_node == "auto" else options.cpus_per_node
    gpus = {} if options.gpus_per_node is None else {"GPU": options.gpus_per_node}
    others = {name: float(amount) for name, _, amount in (text.rpartition("=") for text in options.resource)}
    return {"CPU": cpus, **gpus, **others}

"""The options of a job in containers, and what is refused before anything is made."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.jobs import HostOptions, JobCommand, SweepOptions
from lockstep.core.secrets import names_a_secret
from lockstep.launchers.mounts import Mount, is_seen, mounting, unseen_problems
from lockstep.launchers.tools import seconds_to_save
from lockstep.stores.addresses import is_address
from lockstep.strategies.section import Auto, Positive, Section

_VOLUME = re.compile(r"(?P<host>[^:]+):(?P<path>/[^:/][^:]*)(?P<mode>:ro|:rw)?")
_VARIABLE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(=(?P<value>[^\0]*))?", re.DOTALL)
_SIZE = re.compile(r"[1-9][0-9]{0,9}([kmg]b?)?", re.IGNORECASE)
_USER = re.compile(r"[1-9][0-9]{0,9}(:[1-9][0-9]{0,9})?")
_OTHER_THAN_ROOT = "1000:1000"


class DockerOptions(Section, HostOptions, SweepOptions):
    """Options of a job in containers on this machine."""

    image: str | None = None
    """Image in which Lockstep is installed; by default it is built from the Dockerfile in the current folder."""
    nodes: Positive = 1
    """Number of containers; in each of them one launcher starts the ranks."""
    cuda: bool = False
    """Use NVIDIA GPUs: one for each node, or --gpus-per-node."""
    gpus_per_node: Positive | None = None
    """NVIDIA GPUs of each node, in their order; without --ranks, each gets a rank."""
    volume: tuple[str, ...] = ()
    """A further folder, and its path in the containers, such as /data:/data:ro; may be repeated. They see the
    current folder anyway, at its own path."""
    env: tuple[str, ...] = ()
    """An environment variable, as NAME=VALUE, or NAME with its value here, which no file has; may be repeated."""
    shm: str = "8gb"
    """Size of /dev/shm of each container."""
    user: str | None = None
    """User id, or UID:GID, that the containers run with; by default yours."""
    grace: Positive | Auto = "auto"
    """Seconds that a container has to save and stop; auto: a minute, and the time that 200 MB/s take to save."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29500
    """Port of node 0, in the containers' own network, at which the launchers meet."""
    program: str = "lockstep"
    """Program that starts Lockstep in the image."""

    def world_size(self, ranks: int | None) -> int | None:
        """Return the number of ranks on all nodes."""
        return None if ranks is None else ranks * self.nodes


def gpus(options: DockerOptions) -> int:
    """Return the number of GPUs of each node."""
    return options.gpus_per_node or int(options.cuda)


def check(command: JobCommand, options: DockerOptions, folder: Path) -> None:
    """Raise ConfigError if the options aren't valid, or don't fit together or with the command.

    Args:
        folder: Where the command is run.
    """
    problems = [*_malformed(options, folder), *_misfitting(command, options, folder)]
    if not problems:
        problems += unseen_problems(command.paths, volumes(options, folder), folder, "--volume", ":ro")
    if not problems and command.nodes:
        problems += _lost(command, options, folder)
    if problems:
        raise ConfigError(problems)


def _malformed(options: DockerOptions, folder: Path) -> Iterator[Problem]:
    if not _SIZE.fullmatch(options.shm):
        yield Problem("--shm", "", f"{options.shm!r} is not a size; write 8gb")
    if options.user is not None and not _USER.fullmatch(options.user):
        yield Problem("--user", "", f"{options.user!r} is not UID or UID:GID, numbers other than 0, such as 1000:1000")
    for text in options.env:
        match = _VARIABLE.fullmatch(text)
        if match is None:
            yield Problem("--env", "", f"{text!r} is not NAME=VALUE or NAME, such as NCCL_DEBUG=INFO")
        elif match["value"] is None and match["name"] not in os.environ:
            yield Problem("--env", "", f"{text} isn't set here; set it, or write {text}=VALUE")
        elif match["value"] is not None and names_a_secret(match["name"]):
            name = match["name"]
            yield Problem("--env", "", f"{name} looks like a secret, which would be written down; set it, and give "
                          f"--env {name}")  # fmt: skip
    names = [text.partition("=")[0] for text in options.env]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem("--env", "", f"{name} is given twice; give it once")
    for text in options.volume:
        match = _VOLUME.fullmatch(text)
        if match is None:
            yield Problem("--volume", "", f"{text!r} is not FOLDER:/PATH or FOLDER:/PATH:ro, such as /data:/data:ro")
        elif not (folder / Path(match["host"]).expanduser()).exists():
            yield Problem("--volume", "", f"there is no {match['host']} here; create it")
    places = [mount.target for mount in volumes(options, folder)]
    for place in sorted({place for place in places if places.count(place) > 1}):
        yield Problem("--volume", "", f"containers would see two folders at {place}; leave one out")


def _misfitting(command: JobCommand, options: DockerOptions, folder: Path) -> Iterator[Problem]:
    if options.image is None and not (folder / "Dockerfile").is_file():
        yield Problem("--image", "", "is missing, and there is no Dockerfile here to build it from; give an image in "
                      "which Lockstep is installed, or write a Dockerfile: lockstep init docker")  # fmt: skip
    if options.nodes > 1 and not command.nodes:
        message = f"{options.nodes}, but `lockstep {command.words[0]}` runs in one container; leave it out"
        yield Problem("--nodes", "", message)
    if command.sweep:
        yield Problem("--sweep", "", "needs a queue, which Docker has not; launch the runs one after the other")
    if folder == Path("/"):
        yield Problem("", "", "containers see the current folder, which is /; call this in the folder of your project")


def _lost(command: JobCommand, options: DockerOptions, folder: Path) -> list[Problem]:
    """Return a problem if what the run saves would end with its containers."""
    place = command.checkpoint_folder
    if place is not None and is_address(place):
        return []
    kept = folder / (place or command.run_folder)
    mounts = volumes(options, folder)
    if is_seen(kept, mounts, writing=True):
        return []
    outside = Path(os.path.realpath(kept))
    where = "a read-only volume" if is_seen(kept, mounts) else "no volume"
    remedy = f"give {mounting('--volume', outside.parent)}"
    message = f"would be lost with the container: {outside} is in {where}; {remedy}"
    return [Problem("", "run.folder" if place is None else "checkpoint.folder", message)]


def container_user(options: DockerOptions, folder: Path) -> str:
    """Return UID:GID of the containers: by default yours; if you are root, the folder's owner's, and never root's."""
    if options.user is not None:
        return options.user if ":" in options.user else f"{options.user}:{options.user}"
    user, group = os.getuid(), os.getgid()
    if user == 0:
        owner = folder.stat()
        user, group = owner.st_uid, owner.st_gid
    return f"{user}:{group}" if user else _OTHER_THAN_ROOT


def grace_seconds(command: JobCommand, options: DockerOptions) -> int:
    """Return the seconds between SIGTERM and SIGKILL."""
    return seconds_to_save(command, 1) if options.grace == "auto" else options.grace


def volumes(options: DockerOptions, folder: Path) -> list[Mount]:
    """Return each mount, that of the folder first."""
    matches = [match for text in options.volume if (match := _VOLUME.fullmatch(text)) is not None]
    given = [
        Mount(
            os.path.normpath(folder / Path(match["host"]).expanduser()),
            os.path.normpath(match["path"]),
            match["mode"] == ":ro",
        )
        for match in matches
    ]
    return [Mount(str(folder), str(folder)), *given]


def variables(options: DockerOptions) -> dict[str, str | None]:
    """Return the environment variables that the user gives; None: the value here."""
    matches = [match for text in options.env if (match := _VARIABLE.fullmatch(text)) is not None]
    return {match["name"]: match["value"] for match in matches}

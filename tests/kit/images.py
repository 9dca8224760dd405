"""Real images for tests: a base made by debootstrap, Dockerfiles built by buildah, commands run in them.

Only root can do that, and no engine is needed: storage is a folder, isolation a chroot; a container that is stopped as
Docker does it also has a PID namespace, in which an init process is number 1.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BASE = Path(__file__).parents[2] / "build" / "drill-base"  # takes minutes, and is kept
BASE_IMAGE = "localhost/lockstep-drill-base"
_PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap", "ip": "iproute2"}
_MINUTES = 20
_AS_DOCKER = """\
set -eu
hostname "$1"
root=$2 user=$3 folder=$4; shift 4
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
while [ "$1" != -- ]; do mount --bind "${1%%:*}" "$root${1#*:}"; shift; done
shift
exec chroot --userspec="$user" "$root" env --ignore-environment --chdir="$folder" "$@"
"""


def why_not() -> str | None:
    """Return why images can't be built here; None if they can."""
    if os.geteuid() != 0:
        return "building images needs root here"
    missing = [package for program, package in _PACKAGES.items() if shutil.which(program) is None]
    return f"images are built by programs that are missing: apt-get install {' '.join(missing)}" if missing else None


def make_base() -> None:
    """Make a folder with Debian and Python, if it isn't there."""
    if BASE.is_dir():
        return
    unfinished = BASE.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(exist_ok=True)
    include = "--include=python3,python3-venv,ca-certificates,tini"
    _execute("debootstrap", "--variant=minbase", include, "bookworm", str(unfinished))
    unfinished.rename(BASE)


class Images:
    """A store of images in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = ("--storage-driver", "vfs", "--root", f"{folder}/store", "--runroot", f"{folder}/run")

    def words(self, *words: str) -> list[str]:
        """Return the words of a call of buildah on this store."""
        return [str(shutil.which("buildah")), *self._store, *words]

    def import_base(self) -> None:
        """Make the base an image."""
        make_base()
        container = self._call("from", "scratch")
        self._call("add", "--quiet", container, str(BASE), "/")
        self._call("commit", "--quiet", "--rm", container, BASE_IMAGE)

    def build(self, context: Path, tag: str) -> str:
        """Build a folder's Dockerfile on the base, with pip configured as here; return what was printed."""
        config = self._folder / "pip.conf"
        config.write_text(pip_config())
        mounts = [f"--volume={place}:{place}:ro" for place in sorted(_places(config.read_text()))]
        given = [f"--build-arg=BASE_IMAGE={BASE_IMAGE}", f"--secret=id=pip,src={config}", *mounts]
        words = ("bud", "--isolation=chroot", "--format=docker", "--pull-never", *given, f"--tag={tag}", str(context))
        return self._call(*words)

    def container(self, tag: str, hosts: Mapping[str, str]) -> str:
        """Make a container of an image, which knows hosts by name; return its identifier."""
        return self._call("from", *(f"--add-host={name}:{address}" for name, address in hosts.items()), tag)

    def as_docker(
        self, tag: str, service: Mapping[str, Any], mounts: Mapping[Path, str], variables: Mapping[str, str]
    ) -> list[str]:
        """Return words that run a service in a new container below an init process, as Docker does with `init: true`.

        The init process is the child of the process that executes the words.
        """
        image = json.loads(self.inspect(tag))["Docker"]["config"]
        root = self._call("mount", self._call("from", tag))
        places = [f"{source}:{target}" for source, target in mounts.items()]
        environment = [*image["Env"], *(f"{name}={value}" for name, value in variables.items())]
        namespaces = [str(shutil.which("unshare")), "--fork", "--kill-child", "--pid", "--mount", "--uts"]
        known = [service["hostname"], root, service["user"], image["WorkingDir"]]
        program = ["/usr/bin/tini", "--", *image["Entrypoint"], *service["command"]]
        return [*namespaces, "sh", "-c", _AS_DOCKER, "container", *known, *places, "--", *environment, *program]

    def inspect(self, tag: str) -> str:
        return self._call("inspect", "--type=image", tag)

    def run(self, container: str, *words: str) -> str:
        """Run a command in a container as its user, and return what it prints."""
        return self._call("run", "--isolation=chroot", container, "--", *words)

    def _call(self, *words: str) -> str:
        return _execute(*self.words(*words)).strip()


def pip_config() -> str:
    """Return pip's configuration on this machine, its variables included, as one file."""
    listed = _execute(sys.executable, "-m", "pip", "config", "list").splitlines()
    settings = {}
    for key, value in (line.split("=", 1) for line in listed if "=" in line):
        settings.setdefault(key.rpartition(".")[2], " ".join(str(ast.literal_eval(value)).split()))
    return "\n".join(["[global]", *(f"{key} = {value}" for key, value in settings.items())]) + "\n"


def _places(config: str) -> set[Path]:
    """Return the folders that pip's configuration names, and those of files that it names."""
    words = [word.removeprefix("file://") for word in config.split()]
    paths = [Path(word) for word in words if word.startswith("/")]
    return {path if path.is_dir() and path.name != "simple" else path.parent for path in paths if path.exists()}


def _execute(*words: str) -> str:
    done = _run(words)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=60 * _MINUTES, check=False)

"""The files of a project in containers: lockstep launch docker --init.

Dockerfile       base      Python, added if the base image has none
                 packages  a virtual environment: Lockstep, the project's requirements, the project
                 image     both, and a user who isn't root
compose.yaml     two nodes, see `docker_compose`
.dockerignore    what never goes into an image: runs, data, environments, secrets
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.init_templates import CONFIG
from lockstep.core.distribution import DISTRIBUTION
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.jobs import ProjectFiles
from lockstep.launchers.docker_compose import WORKSPACE, ComposeProject, project_name, project_text
from lockstep.launchers.docker_options import DockerOptions, check_for_project, gpus

CPU_IMAGE = "python:3.12.12-slim-bookworm"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_IMAGE = "nvidia/cuda:13.0.1-devel-ubuntu24.04"

_EXTRAS = "digits,hf"
_REFERENCE = re.compile(r"^\s*(-[rce]|--requirement|--constraint|--editable|\.|file:)", re.MULTILINE)
_LARGE_BYTES = 200 * 2**20
_IGNORED = {
    "Version control, environments, caches": (
        ".git", ".venv", "venv", "**/__pycache__", "**/.*_cache", "**/*.egg-info", "node_modules", "build", "dist",
    ),
    "Data, runs, checkpoints: mounted, not copied": ("data", "runs", "checkpoints", "logs", "wandb", "mlruns"),
    "Secrets": (
        "**/.env", "**/.env.*", "**/.netrc", "**/.pypirc", "**/pip.conf", "**/.aws", "**/.ssh", "**/*.pem", "**/*.key",
        "**/id_rsa*", "**/id_ed25519*", "**/.lockstep-token",
    ),
    "What describes the image": ("Dockerfile", "compose.yaml", ".dockerignore"),
}  # fmt: skip
_PIP = """\
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \\
    {command}"""


@dataclass(frozen=True, slots=True)
class _Project:
    """The parts of a project's folder that count for its image.

    Attributes:
        lists: Files that pip reads: requirements.txt, constraints.txt.
        constraints: The file of constraints, if there is one.
        refers: Whether one of them names further files, or the folder itself.
        installs: Whether pip can install the folder.
        wheel: A wheel of Lockstep in the folder, relative to it.
        is_lockstep: Whether it is Lockstep's own repository.
    """

    lists: tuple[str, ...]
    constraints: str | None
    refers: bool
    installs: bool
    wheel: str | None
    is_lockstep: bool


def project_files(folder: Path, options: DockerOptions) -> ProjectFiles:
    """Return the files for the project in a folder. Raises ConfigError."""
    check_for_project(options)
    project = _project(folder, cuda=gpus(options) > 0)
    config = CONFIG if (folder / CONFIG).is_file() else "digits"
    files = {
        "Dockerfile": "\n".join(_dockerfile(project, cuda=gpus(options) > 0)) + "\n",
        "compose.yaml": project_text(ComposeProject(project_name(_name(folder) or folder.name), config), options),
        ".dockerignore": _ignore_file(),
    }
    steps = (
        "mkdir -p data runs",
        'export LOCKSTEP_JOB_TOKEN="$(openssl rand -hex 32)"',
        "docker compose up --build",
    )
    notes = [*_size_notes(folder), *_source_notes(project)]
    return ProjectFiles({folder / name: text for name, text in files.items()}, steps, tuple(notes))


def _project(folder: Path, *, cuda: bool) -> _Project:
    constraints = [name for name in (*["constraints-cuda.txt"] * cuda, "constraints.txt") if (folder / name).is_file()]
    requirements = [name for name in ("requirements.txt",) if (folder / name).is_file()]
    lists = [*requirements, *constraints[:1]]
    wheels = sorted(folder.glob(f"wheels/{DISTRIBUTION.replace('-', '_')}-*.whl"))
    return _Project(
        lists=tuple(lists),
        refers=any(_REFERENCE.search((folder / name).read_text(encoding="utf-8", errors="replace")) for name in lists),
        constraints=constraints[0] if constraints else None,
        installs=(folder / "setup.py").is_file() or _is_package(folder),
        wheel=str(wheels[-1].relative_to(folder)) if wheels else None,
        is_lockstep=_name(folder) == DISTRIBUTION,
    )


def _pyproject(folder: Path) -> dict[str, object]:
    """Return the contents of pyproject.toml; nothing if there is none. Raises ConfigError."""
    try:
        return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("pyproject.toml", "", f"can't be read: {error}")) from None


def _is_package(folder: Path) -> bool:
    """Return whether pyproject.toml describes a package, and not only the settings of tools."""
    return bool({"project", "build-system"} & _pyproject(folder).keys())


def _name(folder: Path) -> str | None:
    project = _pyproject(folder).get("project")
    name = project.get("name") if isinstance(project, dict) else None
    return name if isinstance(name, str) else None


# --- Dockerfile -----------------------------------------------------------------------------------------------------


def _dockerfile(project: _Project, *, cuda: bool) -> Iterator[str]:
    yield f"# Lockstep in a container, for {'NVIDIA GPUs' if cuda else 'CPUs'}."
    yield "# Written by `lockstep launch docker --init`, to be read and changed."
    yield "#"
    yield "#   docker build --tag me/train:1 .                   BuildKit, which Docker has since version 23"
    yield "#   docker run --rm --init me/train:1 train digits"
    yield "#"
    yield "# An index that needs a password: docker build --secret id=pip,src=PIP.CONF. It is in no layer of the image."
    yield ""
    other = "CPUs: lockstep launch docker --init" if cuda else "NVIDIA GPUs: lockstep launch docker --init --cuda"
    yield f"# For {other}"
    yield f"ARG BASE_IMAGE={CUDA_IMAGE if cuda else CPU_IMAGE}"
    yield from _BASE.splitlines()
    yield from _packages(project, cuda=cuda)
    yield from _IMAGE.format(workspace=WORKSPACE).splitlines()


_BASE = """\

FROM ${BASE_IMAGE} AS base
# The images for CUDA have no Python.
ARG PYTHON=3.12
RUN if ! python3 -c "import ensurepip"; then \\
        apt-get update \\
        && apt-get install --yes --no-install-recommends \\
            python3="${PYTHON}.*" python3-dev="${PYTHON}.*" python3-venv="${PYTHON}.*" \\
        && rm -rf /var/lib/apt/lists/*; \\
    fi
"""


def _packages(project: _Project, *, cuda: bool) -> Iterator[str]:
    yield ""
    yield "FROM base AS packages"
    yield "ENV PATH=/opt/venv/bin:$PATH"
    yield f"WORKDIR {WORKSPACE}"
    yield "RUN python3 -m venv /opt/venv"
    yield "# A further index for pip: PyTorch's own has its builds for CPUs, without CUDA's libraries."
    yield f'ARG TORCH_INDEX="{"" if cuda else CPU_INDEX}"'
    constraint = f" --constraint {project.constraints}" if project.constraints else ""
    install = f'pip install ${{TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}}{constraint}'
    if project.is_lockstep:
        yield f'ARG LOCKSTEP=".[{_EXTRAS}]"'
        yield "COPY . ."
    else:
        yield "# What pip installs as Lockstep: a requirement, or a wheel in the folder `wheels`."
        default = f"./{project.wheel}[{_EXTRAS}]" if project.wheel else f"{DISTRIBUTION}[{_EXTRAS}]"
        yield f'ARG LOCKSTEP="{default}"'
        if project.wheel:
            yield "COPY wheels wheels"
        if project.refers:
            yield "COPY . ."
        elif project.lists:
            yield f"COPY {' '.join(project.lists)} ./"
    requirements = "".join(f" --requirement {name}" for name in project.lists if name != project.constraints)
    command = f'echo "$LOCKSTEP" >/tmp/lockstep.txt \\\n    && {install} --requirement /tmp/lockstep.txt{requirements}'
    yield from _PIP.format(command=command).splitlines()
    if project.is_lockstep:
        return
    if project.installs:
        yield from () if project.refers else ("COPY . .",)
        yield from _PIP.format(command=f"{install} .").splitlines()


_IMAGE = """\

FROM base
# A fixed id. Folders that are mounted must be writable for it: --build-arg UID=$(id -u) --build-arg GID=$(id -g)
ARG UID=1000
ARG GID=1000
RUN groupadd --non-unique --gid "$GID" lockstep \\
    && useradd --non-unique --no-log-init --uid "$UID" --gid "$GID" --create-home lockstep \\
    && chmod 1777 /home/lockstep \\
    && mkdir -p {workspace}/data {workspace}/runs \\
    && chown "$UID:$GID" {workspace} {workspace}/runs
COPY --from=packages /opt/venv /opt/venv
COPY . {workspace}
ENV PATH=/opt/venv/bin:$PATH HOME=/home/lockstep USER=lockstep PYTHONUNBUFFERED=1
WORKDIR {workspace}
USER ${{UID}}:${{GID}}
STOPSIGNAL SIGTERM
ENTRYPOINT ["lockstep"]
CMD ["--help"]
"""


# --- .dockerignore --------------------------------------------------------------------------------------------------


def _ignore_file() -> str:
    parts = ["# What isn't copied into the image. Written by `lockstep launch docker --init`, to be read and changed."]
    for title, patterns in _IGNORED.items():
        parts += ["", f"# {title}", *patterns]
    return "\n".join(parts) + "\n"


def _size_notes(folder: Path) -> Iterator[str]:
    """Yield a note about each large entry of the folder that would be copied into the image."""
    ignored = {pattern.removeprefix("**/") for patterns in _IGNORED.values() for pattern in patterns}
    for entry in sorted(folder.iterdir()):
        size = 0 if entry.name in ignored else _bytes(entry)
        if size > _LARGE_BYTES:
            yield f"{entry.name}: {size / 2**30:.1f} GiB would be copied into the image; add it to .dockerignore"


def _bytes(path: Path) -> int:
    """Return the bytes of a file, or of a folder's files, as far as they can be read."""
    sizes = [path.lstat().st_size]
    if path.is_dir() and not path.is_symlink():
        sizes += [entry.stat(follow_symlinks=False).st_size for entry in _files(path)]
    return sum(sizes)


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield entry


def _source_notes(project: _Project) -> Iterator[str]:
    """Yield how to get this Lockstep into the image, if it was installed from a checkout."""
    from importlib.metadata import PackageNotFoundError, distribution

    if project.is_lockstep or project.wheel:
        return
    try:
        origin = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        return
    if origin is not None:
        yield (
            "this Lockstep was installed from a checkout or a file; for the same one in the image, put a wheel of it "
            "into the folder `wheels`, and then call this: pip wheel --no-deps --wheel-dir wheels PATH"
        )

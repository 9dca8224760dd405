"""Copies the project and this Lockstep to the instances.

project.tar.gz      what git knows of the folder: its files, and new ones that .gitignore doesn't name
WHEEL               this very Lockstep, so that the instances run what was tried here; pip installs what it needs
"""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import lockstep
from lockstep.config.recipes import recipes_folder
from lockstep.core.distribution import DISTRIBUTION
from lockstep.core.errors import ConfigError, RunFailed

LARGEST_PROJECT = 2**28  # bytes
_SECRET_FILES = (".env", ".netrc", ".npmrc", ".pypirc", "id_rsa", "id_ed25519", "credentials", "credentials.json")
_SECRET_ENDS = (".pem", ".key", ".p12", ".pfx")
_EXTRAS = {"hf": "transformers", "digits": "scikit-learn", "deepspeed": "deepspeed"}
"""Extra -> a package; what is installed here is installed there."""


def project_files(source: str) -> tuple[list[Path], list[str]]:
    """Return the project's files, relative to `source`, and notes about those that are left out. Raises ConfigError."""
    if source == "none":
        return [], []
    tracked = _git(source, "--cached")
    if tracked is None:
        return [], [f"{source} is not in a git repository: none of its files are copied to the instances"]
    new = _git(source, "--others", "--exclude-standard") or []
    secret = [path for path in new if _looks_secret(path)]
    files = [path for path in (*tracked, *new) if path not in secret and Path(source, path).is_file()]
    size = sum(Path(source, path).stat().st_size for path in files)
    if size > LARGEST_PROJECT:
        raise ConfigError(
            f"the project in {Path(source).absolute()} has {size / 2**20:,.0f} MiB, and at most "
            f"{LARGEST_PROJECT / 2**20:,.0f} are copied; name data in .gitignore and read it from a bucket, or give "
            "another --source"
        )
    left_out = ", ".join(map(str, secret))
    return files, [f"not copied to the instances, because they look like secrets: {left_out}"] if secret else []


def project_archive(source: str, files: Sequence[Path]) -> bytes:
    """Return the files as a compressed archive. Raises RunFailed."""
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
            for path in files:
                archive.add(Path(source, path), str(path), recursive=False, filter=_without_owner)
    except OSError as error:
        raise RunFailed(f"can't read {error.filename}: {error.strerror}") from None
    return buffer.getvalue()


def wheel_name() -> str:
    """Return the file name of the wheel."""
    return f"{DISTRIBUTION.replace('-', '_')}-{lockstep.__version__}-py3-none-any.whl"


def wheel() -> bytes:
    """Return this Lockstep as a wheel, which pip installs. Raises RunFailed: nothing is known of its requirements."""
    try:
        known = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise RunFailed(
            f"{DISTRIBUTION} was not installed here by pip, so nothing is known of what it needs; give --program, the "
            "command that starts Lockstep on the instances"
        ) from None
    about = f"{DISTRIBUTION.replace('-', '_')}-{lockstep.__version__}.dist-info"
    contents = dict(_package())
    contents[f"{about}/METADATA"] = str(known.read_text("METADATA")).encode()
    contents[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: lockstep\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents[f"{about}/entry_points.txt"] = str(known.read_text("entry_points.txt") or "").encode()
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in contents.items()]
    contents[f"{about}/RECORD"] = "\n".join([*lines, f"{about}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def requirement() -> str:
    """Return the extras of the wheel that are installed here, and that of the bucket, as `[buckets,hf]`."""
    here = [extra for extra, package in _EXTRAS.items() if _version(package)]
    return f"[{','.join(['buckets', *here])}]"


def torch_requirement() -> str:
    """Return the requirement of this machine's torch, without the kind of its build."""
    return f"torch=={_version('torch').partition('+')[0]}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _package() -> Iterator[tuple[str, bytes]]:
    root = Path(lockstep.__file__).parent
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"lockstep/{path.relative_to(root).as_posix()}", path.read_bytes()
    recipes = recipes_folder()
    if not recipes.is_relative_to(root):  # a checkout has them beside the package
        for path in sorted(recipes.rglob("*.yaml")):
            yield f"lockstep/recipes/{path.relative_to(recipes).as_posix()}", path.read_bytes()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _git(source: str, *options: str) -> list[Path] | None:
    """Return what `git ls-files` lists; None: this is no repository, or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", source, "ls-files", "-z", *options], capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return [Path(name.decode("utf-8", "surrogateescape")) for name in done.stdout.split(b"\0") if name]


def _looks_secret(path: Path) -> bool:
    return path.name in _SECRET_FILES or path.name.startswith(".env.") or path.suffix in _SECRET_ENDS


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry

"""Checks of Python and of packages, by their metadata: nothing but torch is imported."""

from __future__ import annotations

import mmap
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from lockstep.core.command_lines import command_line
from lockstep.core.distribution import DISTRIBUTION
from lockstep.doctor.findings import Finding, MachineView, not_here, ok, warning, wrong

_OLDEST, _NEWEST = (3, 11), (3, 13)
_DEEPSPEED = "deepspeed"  # the package
_PACKAGES = (
    DISTRIBUTION, "torch", "torchvision", "torchaudio", "deepspeed", "transformers", "datasets", "tokenizers",
    "accelerate", "peft", "torchao", "safetensors", "numpy", "triton",
)  # fmt: skip
_EXTENSIONS = (("torchvision", ("_C.so", "_C*.so")), ("torchaudio", ("lib/*torchaudio*.so", "_torchaudio*.so")))
_CUDA_LIBRARY = b"libtorch_cuda.so"


def python(machine: MachineView) -> Iterator[Finding]:
    """Check the interpreter's version."""
    version, this = platform.python_version(), sys.version_info[:2]
    seen = f"{version} at {sys.executable}"
    if this < _OLDEST:
        yield wrong(seen, f"Install Python {_OLDEST[0]}.{_OLDEST[1]} or newer.")
    elif this > _NEWEST or sys.maxsize < 2**32:
        yield warning(
            seen, f"Use a 64-bit Python {_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST[0]}.{_NEWEST[1]}: others are untested."
        )
    else:
        yield ok(seen)


def packages_fit(machine: MachineView) -> Iterator[Finding]:
    """Compare the versions that packages require with the installed ones."""
    from packaging.requirements import InvalidRequirement, Requirement

    installed = _installed(machine)
    fits = 0
    for name in _PACKAGES:
        for text in (installed[name].requires or []) if name in installed else []:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            other = _canonical(requirement.name)
            if other not in installed or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            version = installed[other].version
            if requirement.specifier.contains(version, prereleases=True):
                fits += 1
                continue
            yield wrong(
                f"{name} {installed[name].version} requires {requirement.name}{requirement.specifier}, and "
                f"{requirement.name} is {version}",
                f'Install versions that fit each other: pip install "{requirement.name}{requirement.specifier}", or '
                f"a {name} made for {requirement.name} {version.partition('+')[0]}.",
            )
    if fits:
        names = [
            f"{name} {installed[name].version}" for name in ("torch", "transformers", "deepspeed") if name in installed
        ]
        yield ok(f"{', '.join(names)}: {fits} requirements hold")


def builds_fit(machine: MachineView) -> Iterator[Finding]:
    """Compare the build of torch (CPU, CUDA 12.8, ...) with those of torchvision and torchaudio."""
    installed = _installed(machine)
    torch = installed.get("torch")
    torch_folder = next((folder for folder, _ in _torches(machine)), None)
    if torch is None or torch_folder is None:
        return
    built = _local(torch.version)
    has_cuda = any((torch_folder / "lib").glob("libtorch_cuda*"))
    for name, patterns in _EXTENSIONS:
        if name not in installed:
            continue
        version = installed[name].version
        remedy = f"Install {name} and torch from the same index (both for the CPU, or both for the same CUDA)."
        folder = Path(str(installed[name].locate_file(name)))
        files = [file for pattern in patterns for file in folder.glob(pattern)]
        if built and _local(version) and _local(version) != built:
            yield wrong(f"{name} {version} was built for another torch than {torch.version}", remedy)
        elif not has_cuda and any(_contains(file, _CUDA_LIBRARY) for file in files):
            yield wrong(f"{name} {version} needs CUDA's libraries, and torch {torch.version} has none", remedy)
        else:
            yield ok(f"{name} {version} was built for torch {torch.version}")


def torch_copies(machine: MachineView) -> Iterator[Finding]:
    """Look for more than one torch where Python looks for modules."""
    copies = _torches(machine)
    described = [f"{version or 'a file'} in {folder}" for folder, version in copies]
    if len(copies) > 1:
        yield wrong(
            f"{len(copies)} torches on sys.path: {' and '.join(described)}; the first is imported",
            "Keep one: remove the other folder from PYTHONPATH, or uninstall torch there (pip uninstall torch).",
        )
    stated: dict[str, set[str]] = {}
    for distribution in metadata.distributions(name="torch", path=list(machine.search_path)):
        stated.setdefault(os.path.realpath(str(distribution.locate_file(""))), set()).add(distribution.version)
    for folder, versions in stated.items():
        if len(versions) > 1:
            yield wrong(
                f"{folder} has the metadata of torch {' and '.join(sorted(versions))}",
                "Run pip uninstall torch until it reports none, then install it again: an update was interrupted.",
            )


def compiler(machine: MachineView) -> Iterator[Finding]:
    """Look for what torch.compile and DeepSpeed's operators are built with."""
    search = machine.environ.get("PATH", os.defpath)
    named = machine.environ.get("CXX", "")
    programs = [named.split()[0]] if named.split() else ["c++", "g++", "clang++"]
    program = next((path for name in programs if (path := shutil.which(name, path=search))), None)
    deepspeed = _DEEPSPEED in _installed(machine)
    if program is None:
        what = f"CXX={named} is no program" if named else "no C++ compiler in PATH (c++, g++, clang++)"
        users = "torch.compile and DeepSpeed's offloaded optimizers fail" if deepspeed else "torch.compile fails"
        remedy = "Set CXX to a compiler." if named else "Install one (apt-get install g++), or leave compilation out."
        yield (wrong if deepspeed or named else warning)(f"{what}: {users}", remedy)
        return
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield warning(
            f"{program}, and Python.h is missing: Triton's and C++ extensions fail to compile",
            "Install the headers of this Python (apt-get install python3-dev).",
        )
    elif deepspeed and shutil.which("ninja", path=search) is None:
        yield warning(
            f"{program}, and no ninja, with which DeepSpeed builds its operators",
            "Install it: pip install ninja.",
        )
    else:
        yield ok(program)


def stale_builds(machine: MachineView) -> Iterator[Finding]:
    """Look for the lock files of torch's C++ extensions, for which every later build waits without a limit."""
    named = machine.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(named) if named else machine.cache.expanduser() / "torch_extensions"
    if not root.is_dir():
        yield not_here("no C++ extension was built here")
        return
    locks = [lock for pattern in ("lock", "*/lock", "*/*/lock") for lock in root.glob(pattern) if lock.is_file()]
    for lock in locks:
        minutes = (machine.now() - lock.stat().st_mtime) / 60
        if minutes < 0.5 or lock.parent.resolve() in _working_folders(machine):
            yield warning(f"{lock}: an extension is being built", "Wait until it is built.")
            continue
        yield wrong(
            f"{lock} is {minutes:.0f} minutes old: a build was killed, and all later ones wait for it without a limit",
            f"Delete it: {command_line('rm', lock)}",
        )
    if not locks:
        yield ok(f"no build of an extension waits in {root}")


def _working_folders(machine: MachineView) -> set[Path]:
    """Return the working folders of all processes that this user may see: compilers work in an extension's folder."""
    folders = set()
    for process in filter(str.isdecimal, machine.names("proc")):
        with suppress(OSError):
            folders.add(Path(os.readlink(machine.root / "proc" / process / "cwd")))
    return folders


def _installed(machine: MachineView) -> dict[str, metadata.Distribution]:
    """Return the installed packages by their names, as Python would import them: the first of several."""
    packages: dict[str, metadata.Distribution] = {}
    for name in _wanted_names(machine):
        distributions = metadata.distributions(name=name, path=list(machine.search_path))
        for distribution in distributions:
            packages.setdefault(name, distribution)
            break
    return packages


def _wanted_names(machine: MachineView) -> list[str]:
    paths = [path or os.getcwd() for path in machine.search_path]
    names = (entry for path in paths if os.path.isdir(path) for entry in os.listdir(path))
    infos = (entry for entry in names if entry.endswith((".dist-info", ".egg-info")))
    return sorted({_canonical(entry.rpartition(".")[0].partition("-")[0]) for entry in infos})


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _local(version: str) -> str:
    """Return the build in a version: cpu, cu128, ...; empty if it states none."""
    return version.partition("+")[2]


def _torches(machine: MachineView) -> list[tuple[Path, str]]:
    """Return folder and version of each torch that Python could import, in the order in which it looks."""
    copies: dict[str, tuple[Path, str]] = {}
    for path in machine.search_path:
        place = Path(path or os.getcwd())
        folder = place / "torch"
        if (folder / "__init__.py").is_file():
            match = re.search(r"__version__ = '([^']*)'", _read(folder / "version.py"))
            copies.setdefault(os.path.realpath(folder), (folder, match[1] if match else ""))
        elif (place / "torch.py").is_file():
            copies.setdefault(os.path.realpath(place / "torch.py"), (place / "torch.py", ""))
    return list(copies.values())


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _contains(file: Path, text: bytes) -> bool:
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0
    except (OSError, ValueError):  # it is empty
        return False

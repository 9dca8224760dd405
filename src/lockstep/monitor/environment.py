"""What surrounds a run: enough to know later where its figures came from, and nothing secret."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("lockstep-train", "torch", "numpy", "pydantic", "transformers", "datasets", "tokenizers", "deepspeed")
_VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|OPENBLAS|KMP|SLURM|LOCKSTEP|HF|TRANSFORMERS|HSA|ROCM|HIP)_.*"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_RANK|PYTHONHASHSEED|CUBLAS_WORKSPACE_CONFIG"
)
_SECRET = re.compile(r"token|secret|passw|key|credential|auth|cookie", re.IGNORECASE)
_HIDDEN = "(hidden)"
_GIT_SECONDS = 5.0


def describe() -> dict[str, Any]:
    """Versions, platform, CPU, GPUs, git state of the working directory, command line, relevant variables.

    GPUs are listed only if torch has been imported already, since nothing here is worth importing it for.
    """
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": _versions(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "working_directory": str(Path.cwd()),
        "git": _git(Path.cwd()),
        "command_line": hide_arguments(sys.argv),
        "variables": relevant_variables(os.environ),
    }


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that change how training runs; values of secret ones, and passwords in URLs, are hidden."""
    return {
        name: _HIDDEN if _SECRET.search(name) else _hide_password(value)
        for name, value in sorted(variables.items())
        if _VARIABLES.fullmatch(name)
    }


def hide_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without the values of `--some.token VALUE`, `--some-key=VALUE` and `some.password=VALUE`."""
    shown: list[str] = []
    flag_is_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if flag_is_secret and not argument.startswith("--"):
            shown.append(_HIDDEN)
        elif equals and _SECRET.search(name) and not _is_harmless(name):
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(_hide_password(argument))
        flag_is_secret = argument.startswith("--") and not equals and _is_secret_flag(argument)
    return shown


def _is_secret_flag(flag: str) -> bool:
    return bool(_SECRET.search(flag)) and not _is_harmless(flag)


def _is_harmless(name: str) -> bool:
    """Tokens are also what language models read."""
    return bool(re.search(r"tokens\b|tokenizer|kind$", name, re.IGNORECASE))


def _hide_password(text: str) -> str:
    return re.sub(r"(://[^/@:\s]*):[^/@\s]*@", rf"\1:{_HIDDEN}@", text)


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def _gpus() -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in properties]


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit, branch, and whether tracked files differ from it; None outside of a repository or without git."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    headers = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    changed = [line.rsplit(" ", 1)[-1].split("\t")[0] for line in lines if not line.startswith("# ")]
    commit = headers.get("branch.oid")
    return {
        "commit": None if commit == "(initial)" else commit,
        "branch": headers.get("branch.head"),
        "changed_files": len(changed),
    }

"""The environment of a run: enough to know later where its figures came from, without secrets."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.core.distribution import DISTRIBUTION, version_of
from lockstep.core.secrets import HIDDEN, hidden_setting, hidden_variable, is_harmless_variable, without_secrets

_PACKAGES = ("torch", "numpy", "pydantic", "transformers", "datasets", "tokenizers", "deepspeed")
_VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|OPENBLAS|KMP|SLURM|LOCKSTEP|HF|TRANSFORMERS|HSA|ROCM|HIP)_.*"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_RANK|PYTHONHASHSEED|CUBLAS_WORKSPACE_CONFIG"
)
_GIT_SECONDS = 5.0
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=all")


def describe(of_config: Collection[str] = ()) -> dict[str, Any]:
    """Return versions, platform, CPU, GPUs (if torch was imported), git state, command line and relevant variables.

    Args:
        of_config: Names of the variables that `launch.environment` has set; their values may be secrets.
    """
    return {
        **short_description(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "working_directory": str(Path.cwd()),
        "git": _git(Path.cwd()),
        "command_line": hide_arguments(sys.argv),
        "variables": relevant_variables(os.environ, of_config),
    }


def short_description() -> dict[str, Any]:
    """Return what may differ between the hosts of a run: host, versions and relevant variables."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": dict(_versions()),
        "variables": relevant_variables(os.environ),
    }


def relevant_variables(variables: Mapping[str, str], of_config: Collection[str] = ()) -> dict[str, str]:
    """Return the variables that change how training runs, without secrets."""
    hidden = [name for name in of_config if not is_harmless_variable(name)]
    return {
        name: HIDDEN if name in hidden or _sets_variables(name) else hidden_variable(name, value)
        for name, value in sorted(variables.items())
        if _VARIABLES.fullmatch(name)
    }


def hide_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets: keys such as `--some.token VALUE` and `launch.environment`."""
    shown: list[str] = []
    flag = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if flag and not argument.startswith("--") and not (equals and _sets_variables(name)):
            shown.append(_hidden_value(flag, argument))
        elif equals and not _SCHEME.match(argument):
            shown.append(f"{without_secrets(name)}={_hidden_value(name, value)}")
        else:
            shown.append(without_secrets(argument))
        flag = argument if argument.startswith("--") and not equals else ""
    return shown


def _hidden_value(flag: str, value: str) -> str:
    if _sets_variables(flag):
        return HIDDEN
    shown = hidden_setting(flag.rpartition(".")[2], value)
    return _INSIDE.sub(lambda pair: pair[1] + hidden_setting(pair[2], pair[3]), shown)


def _sets_variables(name: str) -> bool:
    return "launch.environment" in name.lower().replace("__", ".").replace("-", "_")


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_INSIDE = re.compile(r"""((?<=[{,\s"'])([\w.-]+)["']?\s*:\s*)([^\s,{}\[\]]+)""")


@cache
def _versions() -> Mapping[str, str]:
    return {DISTRIBUTION: __version__, **{each: version for each in _PACKAGES if (version := version_of(each))}}


@cache
def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def _gpus() -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.accelerator.is_available():
        return []
    module = torch.get_device_module()
    properties = [module.get_device_properties(index) for index in range(module.device_count())]
    return [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in properties]


def _git(folder: Path) -> dict[str, Any] | None:
    """Return commit, branch, and how many tracked files differ; None outside of a repository or without git."""
    settings = _git_lines(folder, "config", "--show-scope", "--includes", "--name-only", "--list") or []
    if any(re.match(r"(local|worktree)\tfilter\.", name) for name in settings):  # comparing files would run a program
        head, branch = (_git_lines(folder, "rev-parse", *words) for words in (("HEAD",), ("--abbrev-ref", "HEAD")))
        return {"commit": head[0] if head else None, "branch": branch[0] if branch else None, "changed_files": None}
    lines = _git_lines(folder, *_STATUS)
    if lines is None:
        return None
    headers = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    commit = headers.get("branch.oid")
    return {
        "commit": None if commit == "(initial)" else commit,
        "branch": headers.get("branch.head"),
        "changed_files": sum(not line.startswith("# ") for line in lines),
    }


def _git_lines(folder: Path, *words: str) -> list[str] | None:
    """Return the output of a git command that runs no program which the repository names; None if it fails."""
    try:
        result = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *words],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return result.stdout.splitlines()

"""Tests the built distribution on each Python it supports and with the newest torch: `python drills/versions_drill.py`.

    sdist --> for each Python: a new venv --> pip install --> train on 2 ranks, resume under fsdp, verify, audit, check

The versions are those of pyproject.toml's classifiers, with constraints.txt; then once torch's newest release, without
its pin. Interpreters come from the PATH and from pyenv's folder. A row is skipped, with the reason, if there is no
interpreter, or if pip would have to download CUDA's packages, which are gigabytes, for another Python than this one.
`--venv` names a venv that has torch and not Lockstep: a row of its Python and torch uses its packages.

Prints a table, writes results/versions.json, and fails (exit code 1) if a row failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attempts import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
BUILD = "from setuptools import build_meta; build_meta.build_sdist('dist')"
FACTS = "import json, platform, torch; print(json.dumps([platform.python_version(), torch.__version__]))"
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
COMMON = ("--launch.device=cpu", "--monitor.progress=none", "--monitor.tensorboard=false", "--ranks=2")


class Skipped(Exception):
    """Raised with the reason why a row can't be tested on this machine."""


class Failed(Exception):
    """Raised with the command that failed and the end of what it printed."""


@dataclass
class Row:
    wanted: str
    result: str = "passed"
    python: str = ""
    torch: str = ""
    seconds: float = 0.0
    reason: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, action="append", default=[], help="may be given several times")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drill-versions-") as name:
        sdist = build(Path(name))
        rows = [trial(sdist, version, pinned_torch(), arguments.venv) for version in supported_pythons()]
        rows.append(trial(sdist, OWN, None, arguments.venv))
    results = {
        "command": " ".join(["python drills/versions_drill.py", *["--venv VENV"] * len(arguments.venv)]),
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "versions.json").write_text(json.dumps(results, indent=2) + "\n")
    print(table(results), flush=True)
    sys.exit(any(row.result == "failed" for row in rows))


def supported_pythons() -> list[str]:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [line.rpartition(" ")[2] for line in classifiers if re.search(r":: 3\.\d+$", line)]


def pinned_torch() -> str:
    return constraints()["torch"]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def build(folder: Path) -> Path:
    """Return the source distribution, built from a copy of the tree."""
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs"))
    run([sys.executable, "-c", BUILD], folder / "tree")
    (sdist,) = (folder / "tree" / "dist").glob("*.tar.gz")
    return sdist


def trial(sdist: Path, version: str, torch: str | None, venvs: Sequence[Path]) -> Row:
    """Install the distribution under one Python with this torch (None: the newest) and run the smoke test."""
    row, start = Row(f"Python {version}" if torch else "newest torch"), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drill-versions-") as name:
        folder = Path(name)
        try:
            programs = install(sdist, folder, version, torch, venvs)
            row.python, row.torch = json.loads(run([programs / "python", "-c", FACTS], folder))
            smoke_test(programs / "lockstep", folder)
        except Skipped as skipped:
            row.result, row.reason = "skipped", str(skipped)
        except (Failed, OSError, subprocess.TimeoutExpired) as failed:
            row.result, row.reason = "failed", str(failed)
    row.seconds = round(time.monotonic() - start, 1)
    print(f"  {row}", file=sys.stderr, flush=True)
    return row


def install(sdist: Path, folder: Path, version: str, torch: str | None, venvs: Sequence[Path]) -> Path:
    """Return the folder of programs of a new venv with the distribution in it."""
    venv = matching(venvs, version, torch)
    interpreter = venv / "bin" / "python" if venv else find_python(version)
    run([interpreter, "-m", "venv", folder / "venv"], folder)
    programs = folder / "venv" / "bin"
    if venv:
        borrow_packages(programs / "python", venv)
    pins = {name: pin for name, pin in constraints().items() if torch or name != "torch"}
    (folder / "constraints.txt").write_text("".join(f"{name}=={pin}\n" for name, pin in pins.items()))
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--constraint", folder / "constraints.txt", f"{sdist}[digits]"]
    if torch and not venv:
        install_cpu_build(pip, torch, folder)
    elif not venv:
        refuse_downloads_of_cuda(pip, folder)
    run(pip, folder)
    if not torch and not venv:  # also beyond the versions that pyproject.toml allows
        newest = [*pip[:-3], "--upgrade", "torch"]
        refuse_downloads_of_cuda(newest, folder)
        run([*newest, "--no-deps"], folder)
    return programs


def matching(venvs: Sequence[Path], version: str, torch: str | None) -> Path | None:
    """Return the venv of this Python with this torch; if torch is None, with any but the pinned one."""
    for venv in venvs:
        python, version_of_torch = json.loads(run([venv / "bin" / "python", "-c", FACTS], ROOT))
        pinned = version_of_torch == pinned_torch()
        if pinned == bool(torch) and (not torch or python.startswith(f"{version}.")):
            return venv
    return None


def find_python(version: str) -> Path:
    if version == OWN:
        return Path(sys.executable)
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)
    for candidate in [shutil.which(f"python{version}"), *pyenv]:
        if candidate and subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
            return Path(candidate)
    raise Skipped(f"python{version} is neither on the PATH nor in pyenv's folder")


def borrow_packages(python: Path, venv: Path) -> None:
    """Put a venv's packages behind those of a new one, where pip sees them as installed."""
    new, borrowed = (run([program, "-c", PURELIB], ROOT).strip() for program in (python, venv / "bin" / "python"))
    Path(new, "borrowed.pth").write_text(f"{borrowed}\n")


def install_cpu_build(pip: Sequence[object], torch: str, folder: Path) -> None:
    """Install torch as `make install` does. Raises Skipped if there is no CPU build for this Python."""
    try:
        run(
            [*pip[:-1], "--no-deps", "--retries", "1", "--timeout", "10", "--extra-index-url", CPU_INDEX, "torch"],
            folder,
        )
    except Failed as failed:
        raise Skipped(f"torch {torch} wasn't found: point PIP_FIND_LINKS to its wheel, or pass --venv") from failed


def refuse_downloads_of_cuda(pip: Sequence[object], folder: Path) -> None:
    """Raise Skipped if pip would download CUDA's packages."""
    report = folder / "report.json"
    run([*pip, "--dry-run", "--report", report], folder)
    items = json.loads(report.read_text())["install"]
    remote = [item["metadata"] for item in items if not item["download_info"]["url"].startswith("file:")]
    cuda = [package["name"] for package in remote if package["name"].startswith(("nvidia-", "cuda-"))]
    if cuda:
        (torch,) = (item["metadata"]["version"] for item in items if item["metadata"]["name"] == "torch")
        raise Skipped(
            f"torch {torch} comes with {len(cuda)} packages of CUDA, which are gigabytes to download: "
            "point PIP_FIND_LINKS to CPU wheels, or pass --venv"
        )


def smoke_test(lockstep: Path, folder: Path) -> None:
    run_folder = folder / "run"
    run(
        [lockstep, "train", "digits", f"--run.folder={run_folder}", "--run.epochs=null", "--run.steps=6", *COMMON],
        folder,
    )
    run([lockstep, "train", run_folder, "--run.steps=9", "--parallel.strategy=fsdp", *COMMON], folder)
    summary = json.loads((run_folder / "summary.json").read_text())
    if summary["steps"] != 9:
        raise Failed(f"the resumed run ended at step {summary['steps']} instead of 9")
    run([lockstep, "ckpt", "verify", run_folder, "--all"], folder)
    run([lockstep, "ckpt", "audit", run_folder], folder)
    run([lockstep, "config", "check", "stdlib-lm", "--ranks", "2"], folder)
    run([lockstep, "config", "check", "stdlib-lm", "--optim.lr", "abc"], folder, exit_code=2)


def run(command: Sequence[object], folder: Path, exit_code: int = 0) -> str:
    """Return what a command prints on stdout. Raises Failed if it ends with another exit code."""
    words = [str(word) for word in command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=1800, env=environment)
    if done.returncode != exit_code:
        end = " ".join((done.stderr or done.stdout).split())[-500:]
        raise Failed(f"{Path(words[0]).name} {' '.join(words[1:3])} ended with exit code {done.returncode}: {end}")
    return done.stdout


def table(results: Mapping[str, Any]) -> str:
    lines = ["| | Python | torch | result | seconds | reason |", "|---|---|---|---|--:|---|"]
    for row in results["rows"]:
        cells = (row["wanted"], row["python"], row["torch"], row["result"], f"{row['seconds']:.0f}", row["reason"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""The folder of a run.

runs/stdlib-lm-20261121-093000/
├── config.yaml         the resolved config
├── environment.json    the run's id, the machine, the versions, the state of the user's code
├── metrics.jsonl       a line every `monitor.every` steps
├── events.jsonl        evaluations, epochs, and what user code logged
├── attempts.jsonl      a line an attempt: when and where it began, what its plan promised
├── ranks.jsonl         a line every `monitor.meter_seconds`: each rank's times and memory
├── live.json           what each rank is doing; only while the run trains
├── tensorboard/        curves
├── media/              images and tables that user code logged
├── trackers/           what trackers keep here: identifiers, files without a network
├── profile/            traces of some updates (`profile.steps`, `lockstep profile`)
├── logs/               what each rank printed, and how each has ended
├── launch/             what a launcher, such as Slurm's, was given, and its output
├── report.html         the run as one page
├── summary.json        its result; there once the run is finished
├── run.lock            the process that runs it; marks the folder as a run's
├── checkpoints/        the saved states, see `lockstep.checkpoint`
└── earlier/1/          lines of an earlier attempt that this one has replaced
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.files import MAX_JSON_BYTES, is_same_file, read_bounded, write_if_changed
from lockstep.core.jobs import JOB_FILES
from lockstep.core.local_paths import local_path, target_of
from lockstep.core.near_runs import did_you_mean_run
from lockstep.monitor import history
from lockstep.monitor.jsonl import read_object
from lockstep.monitor.media import MEDIA

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
ATTEMPTS = "attempts.jsonl"
TENSORBOARD = "tensorboard"
TRACKERS = "trackers"
LOGS = "logs"
SUMMARY = "summary.json"
EARLIER = "earlier"
CHECKPOINTS = "checkpoints"
_FOLDERS = (TENSORBOARD, MEDIA, TRACKERS, LOGS, EARLIER, "model")
LOCK = "run.lock"
HOLDER = re.compile(r"process (\d+) on (\S+), since (.+)")
"""The content of a lock: process, host, time."""
_MOST_LOCK = 1000
_FORKS_END_S = 10.0  # of a process that was killed: they end with it
_PAUSE_S = 0.05


class RunFolder:
    """A run's folder. Made by `create` or `open`."""

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: str | os.PathLike[str] | None, recipe: str = "run", *, again: bool = False) -> RunFolder:
        """Create the folder, or open one that can be resumed, and lock it until `release`.

        Args:
            path: None for runs/RECIPE-DATE-TIME, with -2, -3, ... behind it if that is taken.
            recipe: Name of the run: a word, or the path of a config.
            again: Whether a finished run may be resumed, or begun again.

        Raises:
            ConfigError: The path is a file.
            RunFailed: The folder has other content, a finished run, or one that is running; or it can't be written.
        """
        folder = local_path(path) if path is not None else _new_default_folder(recipe)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(Problem("", "run.folder", f"{folder} is a file; name a folder"))
        with _run_failed_on_error("create the run folder", folder):
            return cls._create(folder.absolute(), again)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Return a run's folder as it is. Raises RunFailed if `path` is not one."""
        folder = Path(path).absolute()
        if not is_run(folder):
            raise RunFailed(f"{folder} is not the folder of a run: it has no {CONFIG}{did_you_mean_run(Path(path))}")
        refuse_escaping_links(folder)
        return cls(folder)

    @classmethod
    def _create(cls, path: Path, again: bool) -> RunFolder:
        path.mkdir(parents=True, exist_ok=True)
        if is_finished(path) and not again:
            raise RunFailed(f"the run in {path} is finished; give run.folder another name to train again")
        content = sorted(entry.name for entry in path.iterdir() if entry.name != JOB_FILES)
        if content and not is_run(path):
            shown = f"{', '.join(content[:3])}{', ...' if content[3:] else ''}"
            remedy = "give run.folder the name of a new folder, or empty this one"
            raise RunFailed(f"run folder {path} has other content ({shown}); {remedy}")
        refuse_escaping_links(path)
        lock, holder = open_lock(path)  # held as long as this process, or a rank forked from it, lives
        if holder is not None:
            os.close(lock)
            raise RunFailed(f"the run in {path} is running ({holder}); give run.folder another name")
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode(), 0)
        for name in (TENSORBOARD, LOGS):
            (path / name).mkdir(exist_ok=True)
        return cls(path, lock)

    def archive_attempt(self) -> None:
        """Move what an earlier attempt left to earlier/N, so that no curve mixes two runs. Raises RunFailed."""
        with _run_failed_on_error("archive the content of", self.path):
            stay = (LOCK, EARLIER, LOGS, CHECKPOINTS, JOB_FILES)
            entries = [entry for entry in self.path.iterdir() if entry.name not in stay]
            if left := [entry for entry in entries if not entry.is_dir() or any(entry.iterdir())]:
                archive = _next_archive(self.path)
                archive.mkdir(parents=True)
                for entry in left:
                    entry.rename(archive / entry.name)
            (self.path / TENSORBOARD).mkdir(exist_ok=True)

    def rewind(self, step: int, *, repeats_evaluations: bool = False) -> None:
        """Rewind the history to `step`, as `history.rewind` does; later lines move to earlier/N. Raises RunFailed."""
        with _run_failed_on_error("rewind the history in", self.path):
            history.rewind(self.path, step, _next_archive(self.path), repeats_evaluations=repeats_evaluations)

    def write(self, name: str, content: str | Mapping[str, Any]) -> None:
        """Write a file: text such as CONFIG (YAML that can be trained from again), or JSON such as ENVIRONMENT.

        SUMMARY marks the run as finished. Raises RunFailed.
        """
        text = content if isinstance(content, str) else json.dumps(content, indent=2, allow_nan=False) + "\n"
        with _run_failed_on_error("write", self.path / name):
            write_if_changed(self.path / name, text)

    def remove_unstarted(self) -> None:
        """Remove the folder of a run that was refused before it started."""
        if not (self.path / CONFIG).exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def taken(self) -> str:
        """Return why the path no longer leads to the folder that this process locked; empty if it does."""
        if self._lock is None or is_same_file(self.path / LOCK, self._lock):
            return ""
        return f"{self.path} was deleted or moved, or belongs to another run now"

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def is_run(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is the folder of a run, finished or not."""
    return any((Path(path) / name).is_file() for name in (LOCK, CONFIG))


def is_finished(path: str | os.PathLike[str]) -> bool:
    """Return whether the run in `path` is finished."""
    return (Path(path) / SUMMARY).is_file()


def read_summary(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return summary.json of the run in `path`, None if it isn't finished. Raises RunFailed if it can't be read."""
    file = Path(path) / SUMMARY
    try:
        return dict(json.loads(read_bounded(file, MAX_JSON_BYTES)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RunFailed(f"can't read {file}: {error}") from error


def recipe_of(path: str | os.PathLike[str]) -> str:
    """Return the name that the run in `path` started with; its folder's name if that can't be read."""
    folder = Path(path).absolute()
    recipe = read_object(folder / ENVIRONMENT).get("recipe")
    return recipe if isinstance(recipe, str) else folder.name


def refuse_escaping_links(run: Path) -> None:
    """Raise ConfigError if a link in a run's folder leads out of it, or something in it is neither file nor folder.

    The files behind such a link could be read, overwritten or deleted. The run's folder itself may be a link.
    """
    root = run.resolve()
    with _run_failed_on_error("read", run):
        folders = [run, *(run / name for name in _FOLDERS if (run / name).is_dir() and not (run / name).is_symlink())]
        paths = [path for folder in folders for path in folder.iterdir()]
    for path in paths:
        target = target_of(path) if path.is_symlink() else root
        if not target.is_relative_to(root):
            raise ConfigError(
                f"{path} is a link to {target}, outside of the run's folder; replace the link by its target, "
                "and keep checkpoints elsewhere with checkpoint.folder"
            )
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} is neither a file nor a folder, and a run's folder has nothing else: remove it")


def _new_default_folder(recipe: str) -> Path:
    runs, name = Path("runs"), f"{Path(recipe).stem or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    with _run_failed_on_error("create the run folder", (runs / name).absolute()):
        runs.mkdir(exist_ok=True)
        for number in itertools.count(1):
            path = runs / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    raise AssertionError("there is always a free number")


def _next_archive(path: Path) -> Path:
    taken = [int(entry.name) for entry in (path / EARLIER).glob("*") if entry.name.isdecimal()]
    return path / EARLIER / str(1 + max(taken, default=0))


@contextlib.contextmanager
def _run_failed_on_error(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFailed(f"can't {verb} {path}: {error.strerror or error}") from error


def lock_holder(path: str | os.PathLike[str]) -> bytes | None:
    """Return the content of the run's lock, which differs from start to start; None if it can't be read."""
    try:
        return read_bounded(Path(path) / LOCK, _MOST_LOCK)
    except OSError:
        return None


def held_by(path: str | os.PathLike[str]) -> str | None:
    """Return the content of the run's lock if a process of this host holds it; else None."""
    try:
        handle = os.open(Path(path) / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return (lock_holder(path) or b"").decode(errors="replace").strip()
    except OSError:
        return None
    finally:
        os.close(handle)
    return None


def holder_is_gone(path: str | os.PathLike[str]) -> bool:
    """Return whether the process that took the lock was on this host and has ended."""
    match = HOLDER.fullmatch((lock_holder(path) or b"").decode(errors="replace").strip())
    return match is not None and match[2] == socket.gethostname() and not Path("/proc", match[1]).exists()


def open_lock(path: Path) -> tuple[int, str | None]:
    """Take a run folder's lock; return its handle, and the holder if that is another process. Raises OSError."""
    file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    until = time.monotonic() + _FORKS_END_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if holder_is_gone(path) and time.monotonic() < until:  # its forked ranks end soon
                time.sleep(_PAUSE_S)
                continue
            return file, os.pread(file, _MOST_LOCK, 0).decode(errors="replace").strip() or "another process"
        except OSError:  # no locks on this file system: no process is kept out
            pass
        return file, None

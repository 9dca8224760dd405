"""Where a run lies.

    runs/stdlib-lm-20261121-093000/
    ├── config.yaml         the resolved config
    ├── environment.json    the run's id, the machine, the versions, the state of the user's code
    ├── metrics.jsonl       a line every `monitor.every` steps
    ├── events.jsonl        evaluations, epochs, and what user code logged
    ├── tensorboard/        curves
    ├── logs/               what each rank printed
    ├── report.html         the run as one page
    ├── summary.json        what it came to; there once the run is finished
    ├── run.lock            who is at it; marks the folder as a run's
    ├── checkpoints/        the saved states, see `lockstep.checkpoint`
    └── earlier/1/          what an attempt before had written that this one makes anew

The one who starts the run creates the folder (`RunFolder.create`), once; its ranks look into it (`RunFolder.open`).
No torch is needed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.core.bounded_files import MOST_JSON, read_bounded
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.local_paths import local_path
from lockstep.monitor import history

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
LOGS = "logs"
SUMMARY = "summary.json"
LOCK = "run.lock"
EARLIER = "earlier"
CHECKPOINTS = "checkpoints"
_MOST_LOCK = 1000


class RunFolder:
    """A run's folder. Made by `create` or `open`.

    Attributes:
        path: absolute.
    """

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: str | os.PathLike[str] | None, recipe: str = "run", *, again: bool = False) -> RunFolder:
        """Makes the folder, or opens that of a run that can go on; holds it until `release`.

        Args:
            path: None for runs/RECIPE-DATE-TIME, with -2, -3, ... behind it if that is taken.
            recipe: what the run is called: a name, or a file whose stem is taken.
            again: a finished run may be gone on with, or begun anew.

        Raises:
            ConfigError: it is a file.
            RunFailed: it holds something else, a finished run, or one that is under way; or it can't be written.
        """
        where = local_path(path) if path is not None else _free_name(recipe)
        if where.exists() and not where.is_dir():
            raise ConfigError(Problem("", "run.folder", f"{where} is a file; name a folder"))
        try:
            return cls._create(where.absolute(), again)
        except OSError as error:
            raise RunFailed(_cannot("create the run folder", where, error)) from error

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """A run's folder as it is. Raises RunFailed if `path` is none."""
        where = Path(path).absolute()
        if not is_run(where):
            raise RunFailed(f"{where} is not the folder of a run: it has no {CONFIG}")
        refuse_escaping_links(where)
        return cls(where)

    @classmethod
    def _create(cls, path: Path, again: bool) -> RunFolder:
        path.mkdir(parents=True, exist_ok=True)
        if is_finished(path) and not again:
            raise RunFailed(f"the run in {path} is finished; give run.folder another name to train again")
        held = sorted(entry.name for entry in path.iterdir())
        if held and not is_run(path):
            raise RunFailed(
                f"run folder {path} holds something else ({', '.join(held[:3])}{', ...' if held[3:] else ''}); "
                "give run.folder the name of a new folder, or empty this one"
            )
        refuse_escaping_links(path)
        lock = _take_lock(path)
        for name in (TENSORBOARD, LOGS):
            (path / name).mkdir(exist_ok=True)
        return cls(path, lock)

    def begin_anew(self) -> None:
        """What an attempt before has left goes to earlier/N, so that no curve is two runs'. Raises RunFailed."""
        try:
            _put_aside(self.path)
            self.tensorboard.mkdir(exist_ok=True)
        except OSError as error:
            raise RunFailed(_cannot("put aside what is in", self.path, error)) from error

    def rewind(self, step: int) -> None:
        """Takes the history back to `step`, from which the run goes on; the lines beyond go to earlier/N.

        Raises:
            RunFailed: the files can't be written.
        """
        try:
            history.rewind(self.path, step, _next_aside(self.path))
        except OSError as error:
            raise RunFailed(_cannot("rewind the history in", self.path, error)) from error

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def tensorboard(self) -> Path:
        return self.path / TENSORBOARD

    @property
    def logs(self) -> Path:
        return self.path / LOGS

    @property
    def finished(self) -> bool:
        return is_finished(self.path)

    def write_config(self, text: str) -> None:
        """The resolved config, as YAML that can be trained from again. Raises RunFailed."""
        self._write(CONFIG, text)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """What the run is called, and what `environment.describe()` found. Raises RunFailed."""
        self._write(ENVIRONMENT, json.dumps(environment, indent=2) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Marks the run as finished. Raises RunFailed."""
        self._write(SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def remove_unbegun(self) -> None:
        """A run that was refused before it began leaves nothing."""
        if not self.config.exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def release(self) -> None:
        """Lets others have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write(self, name: str, text: str) -> None:
        try:
            write_atomically(self.path / name, text)
        except OSError as error:
            raise RunFailed(_cannot("write", self.path / name, error)) from error


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is the folder of a run, finished or not."""
    return any((Path(path) / name).is_file() for name in (LOCK, CONFIG))


def is_finished(path: str | os.PathLike[str]) -> bool:
    """Whether the run that lies in `path` came to its end."""
    return (Path(path) / SUMMARY).is_file()


def lock_holder(path: str | os.PathLike[str]) -> bytes | None:
    """Who holds the run's folder, as its lock says; None if that can't be told. No two runs say the same."""
    try:
        return read_bounded(Path(path) / LOCK, _MOST_LOCK)
    except OSError:
        return None


def read_summary(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The final object of the run in `path`, None if it isn't finished. Raises RunFailed if it can't be read."""
    file = Path(path) / SUMMARY
    try:
        return dict(json.loads(read_bounded(file, MOST_JSON)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RunFailed(f"can't read {file}: {error}") from error


def recipe_of(path: str | os.PathLike[str]) -> str:
    """What the run in `path` was called when it began; its folder's name if that can't be told."""
    try:
        recipe = json.loads(read_bounded(Path(path) / ENVIRONMENT, MOST_JSON)).get("recipe")
    except (OSError, ValueError, AttributeError):
        recipe = None
    return recipe if isinstance(recipe, str) else Path(path).absolute().name


def write_atomically(path: Path, text: str) -> None:
    """The file has the old text or the new, never a part. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(_new_file(temporary), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _new_file(path: Path) -> int:
    """One that was there already, left by a process of the same number or put there by somebody, is removed."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)


def refuse_escaping_links(run: Path) -> None:
    """Raises ConfigError if anything in a run's folder leads out of it: a link, or what is neither file nor folder.

    Whoever made the folder could have the files behind it read, overwritten or deleted. A link to a run's folder is
    no such link.
    """
    home = run.resolve()
    for path, mode in _reached(run):
        if stat.S_ISLNK(mode) and not path.resolve().is_relative_to(home):
            raise ConfigError(
                f"{path} is a link to {path.resolve()}, outside of the run's folder; put what it leads to in its "
                "place, and keep checkpoints elsewhere with checkpoint.folder"
            )
        if not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ConfigError(f"{path} is neither a file nor a folder; a run's folder holds nothing else: remove it")


def _reached(run: Path) -> Iterator[tuple[Path, int]]:
    """What Lockstep opens by name, or lists, with its mode; checkpoints look after themselves."""
    try:
        for path in run.iterdir():
            mode = _mode(path)
            yield path, mode
            if path.name in _FOLDERS and stat.S_ISDIR(mode):
                yield from ((inside, _mode(inside)) for inside in path.iterdir())
    except OSError as error:
        raise RunFailed(_cannot("read", run, error)) from error


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except FileNotFoundError:  # a run under way writes and renames
        return stat.S_IFREG


_FOLDERS = (TENSORBOARD, LOGS, EARLIER, "model")


def _free_name(recipe: str) -> Path:
    """runs/RECIPE-DATE-TIME, made here and now: of two that start in the same second, one gets -2."""
    stem = Path(recipe).stem or "run"
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    runs = Path("runs")
    try:
        runs.mkdir(exist_ok=True)
        number = 1
        while True:
            path = runs / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
    except OSError as error:
        raise RunFailed(_cannot("create the run folder", (runs / name).absolute(), error)) from error


def open_lock(path: Path) -> tuple[int, str | None]:
    """Open a run folder's lock and take it; return its handle, and who holds it if that is another process.

    Raises OSError.
    """
    file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return file, os.read(file, _MOST_LOCK).decode(errors="replace").strip() or "another process"
    except OSError:  # a file system that can't lock: then nobody is kept out
        pass
    return file, None


def _take_lock(path: Path) -> int | None:
    """Held as long as this process, or a rank forked from it, lives."""
    file, holder = open_lock(path)
    if holder is not None:
        os.close(file)
        raise RunFailed(f"the run in {path} is under way ({holder}); give run.folder another name")
    os.ftruncate(file, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode(), 0)
    return file


_STAYS = (LOCK, EARLIER, LOGS, CHECKPOINTS)


def _put_aside(path: Path) -> None:
    left = [entry for entry in path.iterdir() if entry.name not in _STAYS and not _is_empty(entry)]
    if not left:
        return
    aside = _next_aside(path)
    aside.mkdir(parents=True)
    for entry in left:
        entry.rename(aside / entry.name)


def _next_aside(path: Path) -> Path:
    taken = [int(entry.name) for entry in (path / EARLIER).glob("*") if entry.name.isdecimal()]
    return path / EARLIER / str(1 + max(taken, default=0))


def _is_empty(entry: Path) -> bool:
    return entry.is_dir() and not any(entry.iterdir())


def _cannot(verb: str, path: Path, error: OSError) -> str:
    return f"can't {verb} {path}: {error.strerror or error}"

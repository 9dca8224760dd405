"""Trains a run whose folder is in a bucket: `run.folder: s3://bucket/digits`.

this process    takes the lock, fetches the working copy, trains in it, as in any folder
first rank      publishes before each checkpoint exists, and at the end
publisher       a process that renews the lock, also during an upload, and publishes every 15 s, until this process
                ends, however it ends; then, once no rank is left, it publishes what they have left and releases the
                lock. If it is killed, it is started again
other hosts     publish their ranks' logs when these have ended
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.terminal import echo
from lockstep.launch.outcome import print_on_stderr
from lockstep.monitor.folder import CONFIG, ENVIRONMENT, SUMMARY
from lockstep.stores.addresses import is_address
from lockstep.training.store_lock import GONE_S, RENEWED_S
from lockstep.training.working_copy import LogMarks, WorkingCopy, checkpoints_address, config_error_of, working_folder

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.training.job import Job

_PUBLISHER = ("-P", "-m", __name__)
_LEFT_S = 30.0  # for ranks to end after the process that started them


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run in a bucket that this process, or one that started it, holds the lock of."""

    address: str
    token: str
    retry_seconds: float

    @cache  # noqa: B019  # a client takes long to make, and a process has one such run
    def copy(self) -> WorkingCopy:
        """Return its working copy."""
        return WorkingCopy(self.address, self.token, self.retry_seconds)

    def publish(self, is_removed: Callable[[str], bool] = lambda name: False) -> None:
        """Publish what has changed; see `WorkingCopy.publish`. Raises RunFailed."""
        try:
            self.copy().publish(is_removed)
        except OSError as error:
            raise RunFailed(f"{error.filename or self.address}: {error.strerror or error}") from error


def is_stored(config: Config) -> bool:
    """Return whether the run's folder is in a bucket."""
    return config.run.folder is not None and is_address(config.run.folder)


def in_working_copy(config: Config, folder: Path | None = None) -> Config:
    """Return the config with the working copy as the run's folder, and the checkpoints in the bucket.

    Args:
        folder: Instead of the working copy.
    """
    address = config.run.folder
    assert address is not None, "the run's folder is in a bucket"
    run = config.run.model_copy(update={"folder": str(folder or working_folder(address))})
    checkpoint = config.checkpoint
    if checkpoint.folder is None and checkpoint.storage is None:
        checkpoint = checkpoint.model_copy(update={"folder": checkpoints_address(address)})
    return config.model_copy(update={"run": run, "checkpoint": checkpoint})


def in_bucket(config: Config, stored: StoredRun | None) -> Config:
    """Return the config as the run's config.yaml has it: without places that change when the bucket is copied."""
    if stored is None:
        return config
    checkpoint = config.checkpoint
    if checkpoint.folder == checkpoints_address(stored.address):
        checkpoint = checkpoint.model_copy(update={"folder": None})
    run = config.run.model_copy(update={"folder": None})
    return config.model_copy(update={"run": run, "checkpoint": checkpoint})


@contextmanager
def opened_run(job: Job, *, is_first: bool = True) -> Iterator[Job]:
    """Yield the job in a working copy, whose run no other process trains while the block runs.

    Args:
        is_first: Whether this is the first rank, or the process that starts the ranks.

    Raises:
        ConfigError: The bucket can't be used, or holds something else.
        RunFailed: Another process trains the run.
    """
    if not is_stored(job.config):
        yield job
        return
    address, seconds = str(job.config.run.folder), job.config.checkpoint.retry_seconds
    if not is_first:
        with _glimpse(WorkingCopy(address, None, seconds)) as folder:
            yield replace(job, config=in_working_copy(job.config, folder))
        return
    copy = WorkingCopy(address, None, seconds)
    _begin(copy, is_fork=job.resume.origin is not None)
    stored = StoredRun(copy.address, str(copy.lock.token), seconds)
    with _publisher(stored):
        yield replace(job, config=in_working_copy(job.config), stored=stored)


def publish_logs(config: Config, before: LogMarks) -> None:
    """Publish the logs of a host whose launcher doesn't lead. A bucket that fails is reported."""
    try:
        WorkingCopy(str(config.run.folder), None, config.checkpoint.retry_seconds).publish_logs(before)
    except OSError as error:
        print_on_stderr(f"this host's logs are not in {config.run.folder}: {error.strerror or error}")


def _begin(copy: WorkingCopy, *, is_fork: bool) -> None:
    """Lock the run and fetch it."""
    try:
        with config_error_of(copy.address):
            copy.lock.take(print_on_stderr)
            names = copy.names()
            if names and (is_fork or CONFIG not in names):
                shown = f"{', '.join(names[:3])}{', ...' if names[3:] else ''}"
                why = f"{copy.address} holds {'a run' if CONFIG in names else 'something else'} already ({shown})"
                raise ConfigError(f"{why}; give the new run another prefix")
            copy.fetch()
    except ConfigError as error:
        copy.lock.give_up()
        raise ConfigError(Problem("", "run.folder", str(error))) from error.__cause__
    except BaseException:
        copy.lock.give_up()
        raise
    print_on_stderr(f"the run is in {copy.address}; {copy.folder} is a working copy")


@contextmanager
def _glimpse(copy: WorkingCopy) -> Iterator[Path]:
    """Yield a folder with the files by which another rank than the first finds whether anything is left to train."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        with config_error_of(copy.address):
            copy.read_into(Path(folder), (CONFIG, ENVIRONMENT, SUMMARY))
        yield Path(folder)


# --- the publisher ----------------------------------------------------------------------------------------------------


@contextmanager
def _publisher(stored: StoredRun) -> Iterator[None]:
    """Keep a publisher running as long as the block, and until it has published everything."""
    keeper = _Keeper(stored)
    keeper.start()
    try:
        yield
    finally:
        if keeper.end():
            _end(stored.copy(), _Renewal(stored.copy()))


class _Keeper(threading.Thread):
    """A thread that starts the publisher again if it ends before it should."""

    def __init__(self, stored: StoredRun) -> None:
        super().__init__(name="publisher", daemon=True)
        self._stored = stored
        self._ended = threading.Event()
        self._starting = threading.Lock()
        self._process = self._new_process()

    def run(self) -> None:
        pause = 0.0
        while self._process.wait() is not None and not self._ended.is_set():
            _warn(f"the process that publishes the run to {self._stored.address} has ended; it is started again")
            if self._ended.wait(pause):
                return
            pause = RENEWED_S
            with self._starting:
                if self._ended.is_set():
                    return
                with suppress(OSError):  # it is tried again
                    self._process = self._new_process()

    def end(self) -> bool:
        """Let the publisher end, and wait for it; return whether it has ended before it could publish everything."""
        with self._starting:
            is_gone = self._process.poll() is not None
            self._ended.set()
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(OSError):
            self._process.stdin.close()
        self.join()
        return is_gone or self._process.wait() < 0  # it was killed

    def _new_process(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, *_PUBLISHER, self._stored.address, self._stored.token, str(self._stored.retry_seconds)]
        # in a session of its own: a signal to the group ends ranks
        return subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)


class _Renewal(threading.Thread):
    """A thread that renews the lock of a run until it is stopped, also while this process publishes.

    Attributes:
        is_lost: Whether the lock is another process's by now.
        error: Of the last renewal; None: it succeeded.
    """

    def __init__(self, copy: WorkingCopy) -> None:
        super().__init__(name="renewal", daemon=True)
        self._lock = copy.lock
        self._stopped = threading.Event()
        self.is_lost = False
        self.error: OSError | None = None
        self.start()

    def run(self) -> None:
        while not self.is_lost and not self._stopped.wait(RENEWED_S):
            try:
                self.is_lost = not self._lock.renew()
                self.error = None
            except OSError as error:
                self.error = error

    def stop(self) -> None:
        """Renew the lock no more; wait until no renewal is under way."""
        self._stopped.set()
        self.join()


def _publish_until_end(stored: StoredRun) -> int:
    """Publish until standard input ends, and no rank is left."""
    copy, ended = stored.copy(), threading.Event()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    renewal = _Renewal(copy)
    reported = False
    while not ended.wait(RENEWED_S):
        try:
            if not renewal.is_lost:
                copy.publish()
            if renewal.is_lost:
                raise RunFailed(f"another process trains the run in {copy.address} now")
            if renewal.error is not None:
                raise renewal.error
            reported = False
        except RunFailed as error:
            _warn(f"{error}; nothing more of this one is written there")
            ended.wait()
            return 1
        except OSError as error:
            if not reported:
                _warn(f"{_reason(error, copy)}; the run continues, and retries")
            reported = True
    return _end(copy, renewal)


def _end(copy: WorkingCopy, renewal: _Renewal) -> int:
    """Publish what the ranks have left, once all have ended, and release the lock; return the exit code."""
    limit = time.monotonic() + _LEFT_S
    while copy.is_running() and time.monotonic() < limit:
        time.sleep(0.05)
    try:
        copy.publish()
        renewal.stop()
        copy.lock.release()
    except RunFailed as error:
        _warn(f"{error}; nothing more of this run is written there")
        return 1
    except OSError as error:
        kept = f"the last lines of its logs are in {copy.folder}, and it stays locked for {GONE_S:g} s"
        _warn(f"{_reason(error, copy)}; {kept}")
        return 1
    finally:
        renewal.stop()
    return 0


def _reason(error: Exception, copy: WorkingCopy) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.filename or copy.address}: {error.strerror or error}"


def _warn(text: str) -> None:
    with suppress(OSError):
        echo(f"lockstep: warning: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(_publish_until_end(StoredRun(sys.argv[1], sys.argv[2], float(sys.argv[3]))))

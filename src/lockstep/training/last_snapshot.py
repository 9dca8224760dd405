"""Saving, when a launch has ended, of the newest snapshot in memory that is newer than every checkpoint."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint.inspection import verify
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import manifest_bytes, read_manifest
from lockstep.checkpoint.storage import names_by_step
from lockstep.config.writing import plain_yaml, to_public
from lockstep.core.errors import Failure
from lockstep.monitor.folder import RunFolder, is_run
from lockstep.training.locations import storage_of
from lockstep.training.memory_snapshots import snapshots_in

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.launch.memory_folder import MemoryFolder
    from lockstep.launch.outcome import LaunchResult
    from lockstep.training.job import Job

_log = logging.getLogger("lockstep")


def after_last_round(
    job: Job, folder: Path, memory: MemoryFolder, result: LaunchResult, *, on_hosts: bool
) -> LaunchResult:
    """Save what memory has and the storage doesn't, if the run has failed or stopped; return the result that states it.

    If the storage can't take it, or several hosts have a part each, memory keeps it for the next start of the run.
    """
    if result.code == 0:
        return result
    try:
        storage = storage_of(job.config.checkpoint, folder, job.given.storage)
        saved = None if on_hosts else _save_newest(snapshots_in(memory.path, storage.run), storage)
    except Failure as failure:  # the ranks have failed for the same reason
        _log.debug("no storage for a snapshot: %s", failure)
        return result
    if on_hosts and (text := left_on_host(job, folder, memory)):
        return _with_text(result, text)
    if saved is None:
        return _with_checkpoint(result, storage) if result.cut_off else result
    step, fault = saved
    if fault is None:
        if not is_run(folder):  # it was deleted or moved: with the config, the same command resumes
            RunFolder(folder).write_config(plain_yaml(to_public(job.config)))
        text = f"the state after step {step:,} was in memory, and is saved in {storage.place}; start it again to resume"
    else:
        memory.leave()
        place = f"in this host's memory, in {memory.path}, from which the same command resumes"
        text = f"the state after step {step:,} could not be saved: {fault}; it is {place}"
    return _with_text(result, text)


def left_on_host(job: Job, folder: Path, memory: MemoryFolder) -> str:
    """Leave the memory of one of several hosts to the next start of the run, and return what to report.

    Nothing happens, and the text is empty, if this host sees a checkpoint that is as new.
    """
    step, newest = newest_step(snapshots_in(memory.path, None)), -1
    with suppress(Failure):
        newest = newest_step(storage_of(job.config.checkpoint, folder, job.given.storage))
    if step <= newest:
        return ""
    memory.leave()
    return (
        f"the state after step {step:,} is in the memory of the hosts, this one's part in {memory.path}; the same "
        "command on all of them resumes from it within an hour"
    )


def _with_text(result: LaunchResult, text: str) -> LaunchResult:
    return replace(result, text="\n".join(filter(None, (result.text, text))))


def _with_checkpoint(result: LaunchResult, storage: Storage) -> LaunchResult:
    """Return the result, which also states the newest checkpoint if there is one."""
    newest = newest_step(storage)
    if newest < 0:
        return result
    text = f"the state after step {newest:,} is saved in {storage.place}; start it again to resume"
    return replace(result, text=f"{result.text}\n{text}")


def newest_step(storage: Storage) -> int:
    """Return the step of the newest checkpoint; -1 if there is none, or if the storage can't be read."""
    try:
        return max(names_by_step(storage.names()), default=-1)
    except OSError:
        return -1


def _save_newest(snapshots: LocalStorage, storage: Storage) -> tuple[int, str | None] | None:
    """Save the newest intact snapshot in the storage, if it is newer than all checkpoints there.

    Returns:
        Its step, and why it could not be saved; None: there is none.
    """
    newest = newest_step(storage)
    for step, name in sorted(names_by_step(snapshots.names()).items(), reverse=True):
        if step <= newest:
            return None
        if verify(snapshots, name).fault is not None:
            continue
        try:
            _copy(snapshots, name, storage)
        except OSError as error:
            return step, error.strerror or str(error)
        return step, None
    return None


def _copy(snapshots: LocalStorage, name: str, storage: Storage) -> None:
    manifest = read_manifest(snapshots, name)
    draft = storage.with_separate_drafts().begin(name)
    try:
        for file in manifest.files:
            with _whole(snapshots, name, file) as whole:
                draft.write(file, whole)
        draft.publish(manifest_bytes(snapshots, name))
    except BaseException:
        draft.discard()
        raise


@contextmanager
def _whole(snapshots: LocalStorage, name: str, file: str) -> Iterator[memoryview]:
    """Yield the bytes of a file, which need no more memory."""
    with (
        (Path(snapshots.place) / name / file).open("rb") as handle,
        mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as data,
        memoryview(data) as whole,
    ):
        yield whole

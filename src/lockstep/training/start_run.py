"""Starts a run: checks it against its folder, then trains as a rank or in ranks that it starts.

this process is a rank already (torchrun, ...)  --> train as that rank
otherwise                                       --> create the folder, start the ranks, wait for their exit code
several hosts (launch.nodes)                    --> meet the others first; the leader does the same, they follow
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lockstep.assembly.user_objects import UserObjects, refuse_given
from lockstep.checkpoint.storage import names_by_step
from lockstep.config.writing import to_plain
from lockstep.core.errors import ConfigError, Failure, Problem, RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.formatting import counted, flat
from lockstep.core.nodes import is_elastic, node_range
from lockstep.core.progress import Progress
from lockstep.core.ranks import names_a_rank
from lockstep.core.stopping import blocked_signals, undo_on_stop
from lockstep.core.terminal import echo
from lockstep.launch.agent import FollowerRounds, Hosts, LaunchState, LeaderRounds
from lockstep.launch.devices import choose_ranks
from lockstep.launch.ends_file import append_ends, last_step
from lockstep.launch.local import import_ahead, launch
from lockstep.launch.memory_folder import MemoryFolder
from lockstep.launch.other_launchers import interface_variables
from lockstep.launch.outcome import LaunchResult, print_on_stderr
from lockstep.launch.rendezvous import connected_hosts
from lockstep.launch.supervision import BY_KERNEL, Rounds, Supervisor
from lockstep.loop.out_of_memory import advice, memory_factors
from lockstep.monitor.attempts import read_attempts
from lockstep.monitor.folder import ATTEMPTS, CONFIG, LOGS, METRICS, RunFolder, is_finished, read_summary, recipe_of
from lockstep.plan.batch import half
from lockstep.plan.plan import check_on_ranks
from lockstep.plan.schedule import LENGTHS, used_of_budget
from lockstep.resuming.locations import CheckpointLocation, choose, readable_manifest, run_config, storage_of
from lockstep.resuming.memory_snapshots import after_last_round, left_on_host, snapshots_in
from lockstep.resuming.ownership import other_settings, run_folder_for
from lockstep.resuming.resuming import Resume, epoch_samples_in
from lockstep.training.ahead import import_on_cpu, imports_ahead
from lockstep.training.job import Job, run_job

if TYPE_CHECKING:
    from lockstep.checkpoint.manifest import Manifest
    from lockstep.checkpoint.storage import Storage
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config, Run
    from lockstep.core.protocols import ObjectStore
    from lockstep.launch.ends import End

_MICRO_SIZE, _EVALUATION_SIZE = "batch.micro_size", "evaluation.micro_size"
_UNTRAINED = (FailureKind.CONFIG, FailureKind.STOPPED, FailureKind.INTERRUPTED, FailureKind.PAUSED)
"""Ends of a run that may not have trained: its folder then has no config."""
_MAX_DIFFERENCES = 5  # settings shown in a message
_OF_HOST = ("launch", "monitor", "description")  # sections that may differ between hosts


def decision_of(entry: Callable[[], int]) -> dict[str, Any]:
    """Return what other hosts have to know about an entry, a `partial` of a job and its folder."""
    job = cast("Job", entry.args[0])  # type: ignore[attr-defined]
    fields = {name: getattr(job.resume, name) for name in ("fresh", "step", "accept_changes")}
    sizes = {name: getattr(job.config, name).micro_size for name in ("batch", "evaluation")}
    return {"resume": {**fields, "forks": job.resume.origin is not None}, "micro_sizes": sizes}


def decided(job: Job, decision: Mapping[str, Any]) -> Job:
    """Return the job of this host as the leader has decided."""
    fields = dict(decision["resume"])
    origin = job.resume.origin if fields.pop("forks") else None
    sizes = {name: {"micro_size": size} for name, size in decision["micro_sizes"].items()}
    return replace(job, config=job.config.with_values(**sizes), resume=replace(job.resume, origin=origin, **fields))


class SmallerBatches:
    """The sizes of a launch's micro-batches, round after round; `job` is the next round's, `ranks` are of all hosts."""

    def __init__(self, job: Job, folder: Path, ranks: int) -> None:
        self.job, self.folder, self.ranks = job, folder, ranks
        self._attempts = len(read_attempts(folder))

    def after(self, end: End) -> str:
        """Let the next round need less memory after this end; return what changes, empty if nothing can."""
        sizes = self._too_large(end)
        changed = self._smaller(sizes)
        if changed is None:
            return ""
        self.job = replace(self.job, config=changed)
        listed = " and ".join(f"{key} is {half(size)} instead of {size}" for key, size in sizes.items())
        kept = ", and the global batch stays as it is" if _MICRO_SIZE in sizes else ""
        return f"{listed} from here on{kept}"

    def _smaller(self, sizes: Mapping[str, int]) -> Config | None:
        """Return the config with half of these sizes; None: that isn't smaller, or the run doesn't work with it."""
        changed = self.job.config
        for key, size in sizes.items():
            name, _, option = key.partition(".")
            current = getattr(getattr(changed, name), option)
            if size > 1 and (current == "auto" or current >= size):
                changed = changed.with_values(**{name: {option: half(size)}})
        micro_size, before = changed.batch.micro_size, self.job.config.batch.micro_size
        is_too_small = micro_size != "auto" and micro_size < (self._of_last_attempt("least_micro_size") or 1)
        if changed == self.job.config or (is_too_small and micro_size != before):
            return None
        try:
            check_on_ranks(changed, self.ranks)
        except ConfigError:
            return None
        return changed

    def _too_large(self, end: End) -> Mapping[str, int]:
        if end.too_large or end.kind not in BY_KERNEL:
            return end.too_large
        is_evaluated = end.evaluates or end.evaluation_set is not None
        key, fact = (_EVALUATION_SIZE, "evaluation_size") if is_evaluated else (_MICRO_SIZE, "micro_size")
        size = self._of_last_attempt(fact)
        return {} if size is None else {key: size}

    def _of_last_attempt(self, fact: str) -> int | None:
        attempts = read_attempts(self.folder)
        number = attempts[-1].number(fact) if len(attempts) > self._attempts else None
        return None if number is None else int(number)


def train(loaded: LoadedConfig, recipe: str, resume: Resume, *, trust_remote_code: bool) -> tuple[int, Path | None]:
    """Train the run of a config to its end.

    Args:
        recipe: What the run is called where its config names no folder.

    Returns:
        The exit code, and the run's folder if this process is the one that prints the run's summary.
    """
    refuse_given(loaded)
    job = Job(loaded.config, recipe, given=UserObjects(trust_remote_code=trust_remote_code), resume=resume)
    # Among several ranks, the first may have created the folder and started this run there already: only it checks.
    is_first = os.environ.get("RANK", "0") == "0"
    is_rank = names_a_rank(os.environ)
    if loaded.config.launch.nodes != 1 and not is_rank:
        path, result = train_on_hosts(job, loaded.config.launch.ranks)
        result.show()
        return result.code, path if result.code == 0 and path is not None and path.exists() else None
    if is_done(job, is_first=is_first):
        return 0, Path(job.config.run.folder or "")
    if is_rank:
        finished = run_job(job)
        return 0, finished.folder if is_first else None
    path, result = launch_job(job, job.config.launch.ranks)
    result.show()
    return result.code, path if result.code == 0 else None


# --- refusals before a folder is created or a rank is started -------------------------------------------------------


def is_done(job: Job, *, is_first: bool) -> bool:
    """Return whether nothing is left to train, which the first rank prints. Raises ConfigError if the run can't start.

    Args:
        is_first: Whether this process compares the settings with the folder's run.
    """
    config, resume = job.config, job.resume
    _check_start(config, resume)
    if config.run.folder is None or resume.fresh or resume.step is not None or resume.origin is not None:
        return False
    folder = Path(config.run.folder)
    if is_first and (folder / CONFIG).is_file() and recipe_of(folder) != job.recipe:
        _refuse_other_settings(config, folder)
    return has_nothing_to_train(config, folder)


def _check_start(config: Config, resume: Resume) -> None:
    """Raise ConfigError if the checkpoint to start from doesn't exist, or leaves nothing to train."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # it resumes from its newest checkpoint
        return
    if resume.origin is not None:
        location = CheckpointLocation(resume.origin)
    elif resume.step is None:
        return
    elif config.run.folder is None:
        raise ConfigError("--from resumes a run: lockstep train RUN --from STEP, or give its run.folder")
    else:
        location = CheckpointLocation(storage_of(config.checkpoint, Path(config.run.folder)))
    start = readable_manifest(location.storage, choose(location, resume.step))
    if start is not None and (left := _left(config.run, start))[0] <= 0:
        raise ConfigError(
            f"the checkpoint of step {start.step:,} is {left[1]} already: nothing would be trained; give a longer "
            "length, or an earlier checkpoint: --from STEP"
        )


def _refuse_other_settings(config: Config, folder: Path) -> None:
    differences = other_settings(config, run_config(folder))
    if not differences:
        return
    shown = "".join(f"\n  {line}" for line in differences[:_MAX_DIFFERENCES])
    more = "\n  ..." if len(differences) > _MAX_DIFFERENCES else ""
    why = (
        f"{folder} holds a run of {recipe_of(folder)}, which had other settings:{shown}{more}\n"
        "Give run.folder another name, or start over there: --fresh (in Python: fresh=True)"
    )
    raise ConfigError(Problem("", "run.folder", why))


def has_nothing_to_train(config: Config, folder: Path, given: ObjectStore | None = None) -> bool:
    """Return whether the run in the folder has reached the configured length; if so, the first rank prints that.

    Raises ConfigError if the run is unfinished, and longer than the config asks for, or had other settings.
    """
    finished = is_finished(folder)
    if not finished and not (folder / CONFIG).is_file():
        return False
    then = run_config(folder)
    if all(getattr(then.run, length) == getattr(config.run, length) for length in LENGTHS):
        if finished:
            reason = (read_summary(folder) or {}).get("stopped_early")
            if reason and then.monitor.early_stopping != config.monitor.early_stopping:
                return False
            _refuse_other_settings(config, folder)
            early = f": it ended early, since {reason}" if reason else ""
            longer = "to train it further, give it a longer run.steps (or epochs, ...); --fresh starts over"
            _echo_once(f"the run in {folder} is finished{early}; {longer}")
        return finished
    too_long = _too_long(config.run, storage_of(config.checkpoint, folder, given), folder, finished=finished)
    if too_long is None:
        return False
    if not finished:
        raise ConfigError(too_long)
    _echo_once(too_long)
    return True


def _echo_once(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        echo(message)


def _too_long(run: Run, storage: Storage, folder: Path, *, finished: bool) -> str | None:
    """Return the message for a run with a checkpoint beyond its new length, or None.

    A run that stopped exactly at its new end still has to be finished.
    """
    steps = names_by_step(storage.names())
    newest = readable_manifest(storage, steps[max(steps)]) if steps else None
    if newest is None:
        return None
    left, place = _left(run, newest)
    if left > 0 or (left == 0 and not finished):
        return None
    return (
        f"the run in {folder} is at step {newest.step:,} already, {place}; give it a longer one to resume it, or go "
        "back: --from STEP, or --fresh"
    )


def _left(run: Run, manifest: Manifest) -> tuple[float, str]:
    """Return how much of the run's length is left after a checkpoint, and the place where that is."""
    progress = Progress(manifest.step, manifest.samples, manifest.tokens)
    used, budget = used_of_budget(run, progress, epoch_samples_in(manifest))
    key = next(length for length in LENGTHS if getattr(run, length) is not None)
    return budget - used, f"{'past' if used > budget else 'at'} run.{key} {getattr(run, key)}"


# --- ranks of this machine ------------------------------------------------------------------------------------------


def launch_job(job: Job, ranks: int | Literal["auto"], hosts: Hosts | None = None) -> tuple[Path, LaunchResult]:
    """Create the run's folder and run the job on N ranks of this machine, `hosts`' leader; return how they ended."""
    number = choose_ranks(job.config.launch) if ranks == "auto" else ranks
    path = run_folder_for(job.config, job.recipe, job.resume)
    existed = path is not None and path.exists()
    result = unended = LaunchResult(FailureKind.CONFIG)  # stays if anything is raised

    def leave() -> None:
        if memory is not None and result is unended:  # what is in it is saved nowhere else
            memory.leave_snapshots()
        elif memory is not None:
            memory.remove()
        folder.release()
        if not existed and result.kind in _UNTRAINED:  # after other failures the ranks' logs are in it
            folder.remove_unstarted()

    def stop() -> None:
        if result is unended:
            text = "stopped before its ranks started"
            append_ends(logs, 0, [], [], LaunchResult(FailureKind.STOPPED, text), {})
        leave()

    with ExitStack() as stack:
        with blocked_signals(forks=True):  # no stop comes between creating the folder and what would undo it
            folder = RunFolder.create(path, job.recipe, again=True)
            logs = folder.path / LOGS
            memory = MemoryFolder.make(folder.path, hosts=0 if hosts is None else len(hosts.world))
            stack.enter_context(undo_on_stop(stop))
        job = replace(job, memory=memory.path if memory is not None else None)
        try:
            size = number if hosts is None else hosts.size
            sizes = SmallerBatches(job, folder.path, size)
            remedy = lambda: advice(memory_factors(sizes.job.config, size), "forward")  # noqa: E731
            entry, ahead = partial(train_as_rank, sizes.job, folder.path), imports_ahead(job.config)
            if hosts is not None:
                hosts.open_folder(folder.path, decision_of(entry))
            import_on_cpu(job.config)
            ended = launch(
                entry, number, job.config.launch, logs, preload=ahead, remedy=remedy, hosts=hosts,
                supervisor=_rounds(job, sizes, folder, hosts), watchdog=job.config.recovery.watchdog,
            )  # fmt: skip
            if memory is not None:
                ended = after_last_round(
                    job.config, job.given.storage, folder.path, memory, ended, on_hosts=hosts is not None
                )
            result = ended
        except Failure as failure:
            append_ends(logs, 0, [], [], LaunchResult.of(failure), {})
            raise
        finally:
            leave()
    return folder.path, result


def _rounds(job: Job, sizes: SmallerBatches, folder: RunFolder, hosts: Hosts | None) -> Rounds | None:
    if hosts is None:
        return _supervisor(sizes, folder) if job.config.recovery.ever else None
    if not hosts.recovers:
        return None
    return LeaderRounds(hosts, _supervisor(sizes, folder), job.config.recovery.host_wait, sizes.folder, decision_of)


def _supervisor(sizes: SmallerBatches, run: RunFolder) -> Supervisor:
    job, folder, attempts = sizes.job, run.path, run.path / ATTEMPTS
    before = _content(attempts)

    def resumed() -> Callable[[], int]:
        """Return the entry of ranks that resume this run, or, if none has begun, start it as they were to."""
        begun = _content(attempts) != before
        resume = replace(job.resume, fresh=False, step=None, origin=None) if begun else job.resume
        return partial(train_as_rank, replace(sizes.job, resume=resume, again=begun), folder)

    def furthest() -> int | None:
        starts_over = job.resume.fresh or job.resume.step is not None
        if starts_over and _content(attempts) == before:  # what is there is what the run starts over from
            return 0
        steps = list(names_by_step(snapshots_in(job.memory, None).names())) if job.memory is not None else []
        return max((*steps, last_step(folder / METRICS) or 0))

    return Supervisor(job.config.recovery, furthest, resumed, sizes.after, run.taken)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def train_as_rank(job: Job, folder: Path) -> int:
    """Train as a rank of a job with an existing folder."""
    run_job(replace(job, folder=folder))
    return 0


# --- several hosts -------------------------------------------------------------------------------------------------


def train_on_hosts(job: Job, ranks: int | Literal["auto"]) -> tuple[Path | None, LaunchResult]:
    """Run the job as one of several hosts, with N ranks on this one; return the folder, if any, and how they ended."""
    section = job.config.launch
    number = choose_ranks(section) if ranks == "auto" else ranks
    if is_elastic(section.nodes):
        _refuse_numbers_of_hosts(job.config, number)
    with connected_hosts(section, number, _common_settings(job), recovers=job.config.recovery.ever) as hosts:
        import_ahead(imports_ahead(job.config))
        hosts.meet()
        interface_variables(section.interface)  # refused here, before anything is made, all hosts report it
        alone = {"nodes": 1, "rendezvous": None, "node_rank": None}  # the run may be trained from on one host
        job = replace(job, config=job.config.with_values(launch=alone))
        return _lead(job, number, hosts) if hosts.leads else _follow(job, number, hosts)


def _refuse_numbers_of_hosts(config: Config, ranks: int) -> None:
    """Raise ConfigError with each allowed number of hosts that the run can't train on."""
    if not config.recovery.budget("host"):
        why = f"no budget for lost hosts, but launch.nodes {config.launch.nodes} continues without them; give 3"
        raise ConfigError(Problem("", "recovery.restarts", why))
    least, most = node_range(config.launch.nodes)
    refusals = []
    for nodes in range(least, most + 1):
        try:
            check_on_ranks(config, nodes * ranks)
        except ConfigError as error:
            refusals.append(f"\n  {counted(nodes, 'host')}, {counted(nodes * ranks, 'rank')}: {error}")
    if refusals:
        why = f"{config.launch.nodes}, but the run can't train on each of these numbers of hosts:{''.join(refusals)}"
        raise ConfigError(Problem("", "launch.nodes", why))


def _lead(job: Job, ranks: int, hosts: Hosts) -> tuple[Path | None, LaunchResult]:
    if is_done(job, is_first=True):
        path, result = Path(job.config.run.folder or ""), LaunchResult(FailureKind.DONE)
    else:
        others = ", ".join(str(host) for host in hosts.world[1:])
        there = f"this one, {hosts.here}, is node 0" + (f"; the others: {others}" if others else "")
        print_on_stderr(f"{counted(len(hosts.world), 'host')}: {there}")
        path, result = launch_job(job, ranks, hosts)
    hosts.finish(result)
    return path, result


def _follow(job: Job, ranks: int, hosts: Hosts) -> tuple[Path | None, LaunchResult]:
    path = hosts.wait_for_folder()
    if path is None:
        print_on_stderr("nothing is left to train, as node 0 reports")
        return None, LaunchResult(FailureKind.DONE)
    logs = path / LOGS
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise RunFailed(f"host {hosts.name} can't create {logs} for its ranks' logs: {reason}") from None
    where = f"logs are in {logs}, and rank 0 prints on host {hosts.world[0].name}"
    print_on_stderr(f"{len(hosts.world)} hosts: this one, {hosts.here}, is node {hosts.node}; {where}")
    remedy = partial(advice, memory_factors(job.config, hosts.size), "forward")
    ahead = imports_ahead(job.config)
    recovery = job.config.recovery
    with _memory_kept(job, path, hosts) as memory:
        job = replace(job, memory=memory)

        def entry(folder: Path, decision: Mapping[str, Any]) -> Callable[[], int]:
            return partial(train_as_rank, decided(job, decision), folder)

        rounds = FollowerRounds(hosts, recovery.host_wait, entry) if hosts.recovers else None
        result = launch(
            entry(path, hosts.decision), ranks, job.config.launch, logs, preload=ahead, remedy=remedy, hosts=hosts,
            supervisor=rounds, watchdog=recovery.watchdog,
        )  # fmt: skip
    if hosts.state is LaunchState.CALLED:
        hosts.fail(result.kind, f"stopped on host {hosts.name}")
    if result.code == 0:
        print_on_stderr(f"done: {hosts.here}; the run is in {path} on host {hosts.world[0].name}")
    return path, result


@contextmanager
def _memory_kept(job: Job, run: Path, hosts: Hosts) -> Iterator[Path | None]:
    """Yield this host's folder in memory, which stays for the next start of the run if that may need it."""
    takes = job.config.recovery.snapshot_every is not None
    memory = MemoryFolder.make(run, hosts=len(hosts.world)) if takes else None
    try:
        yield memory.path if memory is not None else None
    finally:
        if memory is not None:
            try:
                storage = storage_of(job.config.checkpoint, run, job.given.storage)
                if not hosts.is_done and (text := left_on_host(storage, memory)):
                    print_on_stderr(text)
            except (Failure, OSError):  # what this host has may still be needed
                memory.leave()
            memory.remove()


def _common_settings(job: Job) -> dict[str, str]:
    """Return what must be equal on all hosts, by name: hashes, because hosts send them to each other."""
    plain = {section: value for section, value in to_plain(job.config).items() if section not in _OF_HOST}
    launch, resume = job.config.launch, job.resume
    flags = {
        "--fresh": resume.fresh,
        "--from": resume.step,
        "--fork": resume.origin is not None,
        "--accept-changes": resume.accept_changes,
        "recipe": job.recipe,
        "launch.backend": launch.backend,
        "launch.device": launch.device,
        "launch.job_id": launch.job_id,
    }
    values = {**dict(flat(plain)), **flags}
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16] for name, value in values.items()}

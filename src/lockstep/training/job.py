"""One run, as one rank sees it, from joining the others to the last line.

Job --(launcher: one process a rank)--> join --> assemble --> run --> weights, summary
                                                    '-- the first rank alone writes and shows anything
"""

from __future__ import annotations

import importlib
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.config.known_runs import recorded
from lockstep.config.schema import Config
from lockstep.core.errors import Failure, RunFailed
from lockstep.core.hub import needs_hub
from lockstep.core.out_of_memory import ran_out
from lockstep.core.ranks import names_a_rank
from lockstep.core.records import Request, RestartReport, RunInfo, StepReport
from lockstep.data.hub import names_hub
from lockstep.distributed.process_group import World, joined
from lockstep.launch import streams
from lockstep.launch.other_launchers import launch_environment
from lockstep.launch.rank import append
from lockstep.launch.streams import log_path
from lockstep.models.blocks import repeated_blocks
from lockstep.monitor import history, metric_log
from lockstep.monitor.console import Console
from lockstep.monitor.environment import describe
from lockstep.monitor.events import EventLog, summarize
from lockstep.monitor.folder import LOGS, LockedRunFolder, RunFolder, lock_holder
from lockstep.monitor.metric_log import LogEntries, MetricLog, merge
from lockstep.monitor.monitors import Monitors, ThrottledMonitor
from lockstep.monitor.tensorboard import TensorBoard
from lockstep.resilience.signals import run_signals
from lockstep.strategies.registry import uses_ranks
from lockstep.training.assemble import assemble
from lockstep.training.checkpoints import Checkpoints, Resume
from lockstep.training.fallback_folder import save_elsewhere
from lockstep.training.folder_watch import FolderWatch, looking
from lockstep.training.locations import storage_of
from lockstep.training.out_of_memory import Setting, explain, setting_of
from lockstep.training.ownership import run_folder_for
from lockstep.training.run import Results, SaveFailed, run
from lockstep.training.run_info import run_info
from lockstep.training.session import Session, components_of
from lockstep.training.text import codec_of, sample
from lockstep.training.user_objects import UserObjects, user_monitors
from lockstep.training.weights import save_weights, tokenizer_of

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("lockstep")
_NONE: tuple[Request, ...] = ()
_SHOW_LOG = (Request.SHOW_LOG,)


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank of a run is given.

    Attributes:
        recipe: what the run is called.
        folder: of the run; None: the first rank makes one and tells the others.
        given: objects handed over in Python.
        resume: how it begins.
    """

    config: Config
    recipe: str
    folder: Path | None = None
    given: UserObjects = field(default_factory=UserObjects)
    resume: Resume = field(default_factory=Resume)


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that is over.

    Attributes:
        summary: as in RUN/summary.json; the same on every rank.
        folder: of the run.
    """

    summary: dict[str, Any]
    folder: Path


def imports_ahead(config: Config) -> list[str]:
    """What every rank is going to import, for seconds: for a launcher that forks them. Asks the hub in their place, if
    the config names anything there."""
    if names_hub(config):
        needs_hub()
    models = ["transformers.modeling_utils"] if config.model.kind == "huggingface" else []
    return ["torch._dynamo", *models]  # DDP, FSDP and DeepSpeed import the compiler


def run_job(job: Job) -> Finished:
    """Trains on this rank, and returns when the run is done."""
    if job.config.evaluation.prompt is not None:
        codec_of(job.config)  # refuses what makes no text, before anything is trained
    with opened(job.config, job.given) as session, _tracebacks_kept(job, session) as folder:
        checkpoints, notes = _begin(job, session, folder)
        facts = run_info(session, job.recipe, str(folder), checkpoints.resumed_from, notes)
        world = components_of(session).world
        users = user_monitors(job.config, job.given) if world.rank == 0 else []
        monitors = Monitors(_watchers(job.config, folder, world, checkpoints), users)
        with _watched(session, checkpoints, folder) as held:
            with metric_log.recording(MetricLog()) as log, _shown(monitors, facts):
                if checkpoints.resumed_from is not None:
                    monitors.restarted(
                        RestartReport(session.attempt, checkpoints.resumed_from, session.progress.samples)
                    )
                drain = _Drain(session, monitors, log)
                try:
                    results = run(session, monitors, checkpoints, drain)
                except SaveFailed as failure:
                    raise RunFailed(f"{failure}; {_keep(session, checkpoints, folder, held)}") from failure
                if job.config.evaluation.prompt is not None:
                    metric_log.text("sample", sample(session, job.config.evaluation.prompt))
                drain.show(results.progress.steps)
            with run_signals(shown=world.rank == 0, ends=True):  # the run is done: there is nothing to stop
                summary = _leave(session, checkpoints, facts, results, held)
    return Finished(summary, folder)


@contextmanager
def _watched(session: Session, checkpoints: Checkpoints, folder: Path) -> Iterator[Callable[[], Path]]:
    """While the block runs, what somebody deletes of the run's folder is made again. Yields what returns the folder, on
    the first rank, and raises RunFailed if it is another run's by now."""
    if components_of(session).world.rank != 0:
        with looking(streams.reopen):
            yield lambda: folder
        return
    assert checkpoints.history is not None, "the first rank writes the history"
    watch = FolderWatch(LockedRunFolder(folder, checkpoints.run), checkpoints, checkpoints.history)
    checkpoints.look = watch.look

    def held() -> Path:
        watch.refuse_taken()
        return folder

    with closing(checkpoints.history), closing(watch), looking(watch.look):
        yield held


@contextmanager
def opened(config: Config, given: UserObjects) -> Iterator[Session]:
    """A session on this rank, among the ranks that the environment names."""
    grouped = names_a_rank(os.environ) or uses_ranks(config.parallel.strategy)
    with launch_environment(config.launch), joined(config.launch, grouped=grouped) as world:
        session: Session | None = None
        try:
            session = assemble(config, world, given)
            if world.exchange is not None:
                world.exchange.listen()
            yield session
        except Exception as error:
            failure = explain(error, _setting(config, world, session), world.device)
            if failure is None:
                raise
            raise failure from error
        finally:
            if session is not None:
                session.close()


def _setting(config: Config, world: World, session: Session | None) -> Setting:
    """What decides how much memory a rank needs; without a session, as far as the config tells."""
    setting = setting_of(config, world.size)
    if session is None:
        return setting
    plan = components_of(session).plan
    return replace(
        setting,
        micro_size=plan.batch.micro_size,
        evaluation_size=components_of(session).evaluator.micro_size,
        strategy=plan.strategy,
        has_blocks=bool(repeated_blocks(components_of(session).sharding.state.model)),
    )


@contextmanager
def _shown(monitors: Monitors, facts: RunInfo) -> Iterator[None]:
    """Monitors hear the start and, however it comes, the end."""
    monitors.start(facts)
    try:
        yield
    except BaseException as error:
        monitors.finish(error)
        raise
    monitors.finish(None)


class _Drain:
    """Collects what user code logged on all ranks, at the steps that are written down; costs nothing if none did."""

    def __init__(self, session: Session, monitors: Monitors, log: MetricLog) -> None:
        self._axis = components_of(session).world.axis
        self._every = components_of(session).config.monitor.every
        self._monitors = monitors
        self._log = log
        self._somebody_logged = False

    def __call__(self, report: StepReport) -> Iterable[Request]:
        self._somebody_logged |= Request.SHOW_LOG in report.requests
        if self._somebody_logged and report.step % self._every == 0:
            self.show(report.step)
        return _NONE if self._log.empty else _SHOW_LOG

    def show(self, step: int) -> None:
        """All ranks together."""
        self._somebody_logged = False
        logged = merge([cast("LogEntries", entries) for entries in self._axis.gather(self._log.drain())])
        if logged:
            self._monitors.logged(step, logged)


@contextmanager
def _tracebacks_kept(job: Job, session: Session) -> Iterator[Path]:
    """The run's folder. Under a launcher that isn't ours, the traceback of what ends in a sentence is written to the
    rank's log there; ours does it itself, and one process alone shows its traceback."""
    with _run_folder(job, components_of(session).world) as folder:
        holder = lock_holder(folder)
        try:
            yield folder
        except Exception as error:
            told = ran_out(error) or (isinstance(error, Failure) and error.__cause__ is not None)
            is_ours = lock_holder(folder) == holder  # it may be deleted by now, or another run's
            if told and is_ours and job.folder is None and names_a_rank(os.environ):
                append(log_path(folder / LOGS, components_of(session).world.rank), _traceback_of(error))
            raise


def _traceback_of(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


@contextmanager
def _run_folder(job: Job, world: World) -> Iterator[Path]:
    """The run's folder, the same on all ranks; nobody else has it while the block runs."""
    if job.folder is not None:
        yield job.folder
        return
    made = _folder_or_failure(job) if world.rank == 0 else None
    found = world.axis.broadcast(made.path if isinstance(made, RunFolder) else made)
    if isinstance(found, Failure):
        raise found
    try:
        yield cast("Path", found)
    finally:
        if isinstance(made, RunFolder):
            made.release()


def _folder_or_failure(job: Job) -> RunFolder | Failure:
    try:
        folder = run_folder_for(job.config, job.recipe, fresh=job.resume.fresh)
        return RunFolder.create(folder, job.recipe, again=True)
    except Failure as failure:
        return failure


def _begin(job: Job, session: Session, folder: Path) -> tuple[Checkpoints, list[str]]:
    """Goes on from a checkpoint or begins anew; either way the folder then tells of one run, up to here."""
    first = components_of(session).world.rank == 0
    environment = {"recipe": job.recipe, **describe()} if first else {}
    checkpoints = Checkpoints(
        session, storage_of(job.config, folder, job.given.storage), environment, folder, job.recipe
    )
    notes = checkpoints.begin(job.resume)
    if first:
        place = RunFolder.open(folder)
        if checkpoints.resumed_from is None or job.resume.origin is not None:
            place.archive_attempt()
        else:
            place.rewind(checkpoints.resumed_from)
            notes += history.faults(folder, checkpoints.written)
        place.write_config(recorded(components_of(session).config, checkpoints.run))
        place.write_environment({**environment, "run": checkpoints.run})
    components_of(session).world.axis.barrier()
    if job.resume.origin is not None:
        checkpoints.save()
    return checkpoints, notes


def _watchers(config: Config, folder: Path, world: World, checkpoints: Checkpoints) -> list[ThrottledMonitor]:
    """The first rank writes and shows; the others have nothing to say that it doesn't know."""
    if world.rank != 0:
        return []
    place, monitor = RunFolder.open(folder), config.monitor
    log, console = EventLog(place.metrics, monitor.every), Console(monitor.every, monitor.progress)
    board = [TensorBoard(place.tensorboard, monitor.every)] if monitor.tensorboard else []
    checkpoints.history = history.HistoryFiles(folder, [log, *board])
    return [log, console, *board]


def _leave(
    session: Session, checkpoints: Checkpoints, facts: RunInfo, results: Results, held: Callable[[], Path]
) -> dict[str, Any]:
    """Weights and summary in the run's folder; the summary, written last, says that the run is finished."""
    summary = summarize(facts, results.progress, results.last, results.evaluations, results.seconds)
    if components_of(session).config.run.end_with == "best":
        checkpoints.load_best()
    weights = whole_weights(session)
    step, place = results.progress.steps, checkpoints.place
    saved = f"the state after step {step:,} is saved in {place}"
    _on_first_rank(components_of(session).world, lambda: publish(session, weights, held()), saved)
    if components_of(session).config.run.end_with != "best":
        checkpoints.restore_last()
    _on_first_rank(components_of(session).world, lambda: RunFolder.open(held()).write_summary(summary), saved)
    if components_of(session).world.rank == 0:
        _report(held())
    components_of(session).world.axis.barrier()
    return summary


def _on_first_rank(world: World, act: Callable[[], object], saved: str) -> None:
    """Acts there; if that fails, all ranks raise the same RunFailed, which adds what is saved."""
    failure: RunFailed | None = None
    if world.rank == 0:
        try:
            act()
        except RunFailed as error:
            failure = RunFailed(f"{error}; {saved}")
    failure = cast("RunFailed | None", world.axis.broadcast(failure))
    if failure is not None:
        raise failure


def whole_weights(session: Session) -> dict[str, Tensor]:
    """Return them on the first rank, an empty mapping on the others. All ranks together."""
    return dict(components_of(session).sharding.state.weights(wanted=components_of(session).world.rank == 0))


def publish(session: Session, weights: Mapping[str, Tensor], folder: Path) -> Path:
    """Writes the gathered weights as a run leaves them. Returns where. Raises RunFailed: as `save_weights`."""
    components = components_of(session)
    return save_weights(
        components.sharding.state.model, components.tensors, weights, folder, tokenizer_of(components.config)
    )


def _keep(session: Session, checkpoints: Checkpoints, folder: Path, held: Callable[[], Path]) -> str:
    """What is left of a run whose last state its own folder can't take; says where, on all ranks."""
    place = save_elsewhere(session, checkpoints, folder)
    if place is None:
        return _keep_weights(session, held)
    return f"it is saved in {place}, from which the run continues: lockstep train {place}"


def _keep_weights(session: Session, held: Callable[[], Path]) -> str:
    """What is left of a run whose state can't be saved; says where, on all ranks."""
    said, weights = "", whole_weights(session)
    if components_of(session).world.rank == 0:
        try:
            place = publish(session, weights, held())
            said = f"its weights are in {place}"
        except RunFailed as error:
            said = f"neither could its weights: {error}"
    return str(components_of(session).world.axis.broadcast(said))


def _report(folder: Path) -> None:
    """Write the run's page. One that can't be written is no reason to fail a run that is done."""
    try:
        importlib.import_module("lockstep.report").write_report(folder)  # by name: it is in a layer above this one
    except RunFailed as failure:
        _log.warning("%s", failure)
    except Exception as error:  # an installation that was replaced while the run went on, among others
        _log.warning("the report could not be written: %s: %s", type(error).__name__, error)

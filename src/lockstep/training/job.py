"""A whole run on one rank, from joining the other ranks to its summary.

Job --(launcher: one process a rank)--> join --> assemble --> run --> weights, summary
                                                    '-- only the first rank writes and prints
"""

from __future__ import annotations

import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.assembly.user_objects import UserObjects, transform_names
from lockstep.checkpoint.storage import names_by_step
from lockstep.config.loading import validate
from lockstep.config.schema import Config
from lockstep.config.trust import recorded, unremembered
from lockstep.core import heartbeat
from lockstep.core.errors import Failure, RunFailed
from lockstep.core.out_of_memory import out_of_memory_cause
from lockstep.core.ranks import names_a_rank
from lockstep.core.records import RestartReport, RunInfo
from lockstep.core.terminal import echo
from lockstep.data.hub import huggingface_sections, pinned
from lockstep.distributed.collectives import from_first_rank
from lockstep.distributed.process_group import World, joined
from lockstep.launch.other_launchers import launch_environment
from lockstep.launch.outside_watch import watched_from_outside
from lockstep.launch.rank import append
from lockstep.launch.streams import log_path
from lockstep.loop.attempt import record_attempt, run_info
from lockstep.loop.components import Purpose
from lockstep.loop.out_of_memory import explain, factors_of
from lockstep.loop.session import Session, components_of, evaluation_weights, ledger_of
from lockstep.loop.text import codec_of, continuations
from lockstep.models.generation import Sampling
from lockstep.monitor import metric_log
from lockstep.monitor.attempts import last_sign, read_attempts
from lockstep.monitor.environment import describe
from lockstep.monitor.events import summarize
from lockstep.monitor.folder import CONFIG, ENVIRONMENT, LOGS, SUMMARY, RunFolder, lock_holder
from lockstep.monitor.metric_log import MetricLog
from lockstep.monitor.monitors import Monitors
from lockstep.monitor.profiler import Profiler
from lockstep.optim.precision import autocast_context, resolve_compute
from lockstep.resilience.faults import plant
from lockstep.resilience.memory_faults import Trained
from lockstep.resilience.signals import run_signals
from lockstep.resuming.checkpoints import TRANSFORMS, Checkpoints
from lockstep.resuming.locations import readable_manifest, run_config, storage_of
from lockstep.resuming.memory_snapshots import snapshots_in
from lockstep.resuming.ownership import BEGUN, FOLDER, folder_of_launch, keep, kept, resumed, run_folder_for
from lockstep.resuming.resuming import Resume, a_checkpoint_follows
from lockstep.resuming.rollbacks import Rollback, leave_out_windows, report_rollbacks, rollbacks_of
from lockstep.strategies.registry import find_strategy, uses_ranks
from lockstep.training.assemble import assemble
from lockstep.training.monitoring import Meters, UserLogs, make_monitors, refuse_missing_packages, started
from lockstep.training.publishing import publish, write_report
from lockstep.training.run import Results, SaveFailed, run

_SAMPLE_TOKENS = 200
_SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True)
class Job:
    """The input of every rank of a run.

    Attributes:
        recipe: what the run is called.
        folder: of the run; None: the first rank makes one.
        memory: the launcher's folder in memory; None: there is none.
        again: whether the launcher restarts the ranks of a run.
    """

    config: Config
    recipe: str
    folder: Path | None = None
    given: UserObjects = field(default_factory=UserObjects)
    resume: Resume = field(default_factory=Resume)
    memory: Path | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished run: its summary, as in RUN/summary.json and the same on every rank, and its folder."""

    summary: dict[str, Any]
    folder: Path


def run_job(job: Job) -> Finished:
    """Train on this rank, and return when the run is finished."""
    heartbeat.begin_stage(heartbeat.Stage.START)
    config, prompt = job.config, job.config.evaluation.prompt
    if prompt is not None:
        codec_of(config.model, config.data.train)  # refuses a model that makes no text, before training
    refuse_missing_packages(config)
    with opened(config, job.given, job=job) as session, _logged_tracebacks(job, session) as folder:
        world = components_of(session).world
        again = job.again or kept(world, BEGUN) is not None
        job = replace(job, resume=resumed(job.resume, world))
        is_first = world.rank == 0
        continues = is_first and not job.resume.fresh and job.resume.origin is None
        earlier = read_attempts(folder) if continues else ()  # before the history is rewound
        ended = last_sign(folder) if earlier else math.nan
        checkpoints, notes, rollbacks = _begin(job, session, folder)
        components = components_of(session)
        profiler = Profiler(config.profile, components.world, folder)
        notes += [*profiler.notes, *filter(None, [profiler.begins_after(components.plan.steps)])]
        facts = run_info(session, job.recipe, str(folder), checkpoints.resumed_from, notes)
        if again:  # the first start has printed the others
            facts = replace(facts, again=True, notes=tuple(notes))
        checkpoints.snapshots.begin_attempt(record_attempt(session, folder, earlier, ended, facts, job.memory))
        plant(components.world, session.progress.steps, trained_in=partial(trained_in, session))
        meters = Meters(session, folder)
        monitors = make_monitors(config, job.recipe, job.given, folder, checkpoints, meters) if is_first else Monitors()
        own_folder = partial(_own_folder, folder, lock_holder(folder))
        with closing(checkpoints.history):
            with metric_log.recording(MetricLog()) as log, started(monitors, facts), meters.measuring():
                if (step := checkpoints.resumed_from) is not None:
                    monitors.restarted(RestartReport(ledger_of(session).attempt, step, session.progress.samples))
                if is_first:
                    report_rollbacks(rollbacks, monitors, session.progress, folder)
                user_logs = UserLogs(session, monitors, log)
                try:
                    results = run(session, monitors, checkpoints, user_logs, profiler)
                except SaveFailed as failure:
                    if checkpoints.snapshots.keep():  # which the launcher saves, or leaves to the next start
                        raise
                    raise _without_state(failure, session, own_folder) from failure
                if prompt is not None:
                    metric_log.text("sample", _sample(session, prompt))
                if results.stopped_early is not None:
                    metric_log.text("early stopping", results.stopped_early)
                meters.stop()  # and all ranks have, when their logs have been gathered
                user_logs.finish(results.progress.steps)
            with run_signals(shown=is_first, ends=True):  # the run is finished: there is nothing to stop
                summary = _publish_results(session, checkpoints, facts, results, own_folder)
    return Finished(summary, folder)


def trained_in(session: Session) -> Trained:
    """Return what `lockstep chaos` plants faults in."""
    components = components_of(session)
    model = components.sharding.state.model
    return Trained(
        model,
        components.sharding.step,
        (components.evaluation.micro_size, components.plan.batch.micro_size).__getitem__,
        components.loader.positions_of,
        getattr(components.engine, "first_module", model),
    )


def _without_state(failure: SaveFailed, session: Session, folder: Callable[[], Path]) -> SaveFailed:
    """Publish the weights of a run that can't save its last state; return the failure to report."""
    try:
        return SaveFailed(f"{failure}; its weights are in {publish(session, folder)}")
    except RunFailed as error:
        return SaveFailed(f"{failure}; its weights couldn't be written either: {error}")


def _purpose(job: Job, world: World) -> Purpose:
    if job.resume.origin is not None:
        return Purpose.RESUME
    folder = job.folder or (Path(job.config.run.folder) if job.config.run.folder is not None else None)
    if folder is None or job.resume.fresh:
        return Purpose.TRAIN
    memory = None if job.memory is None else snapshots_in(job.memory, None)
    follows = a_checkpoint_follows(partial(storage_of, job.config.checkpoint, folder, job.given.storage), memory, world)
    return Purpose.RESUME if follows else Purpose.TRAIN


def _earlier(config: Config, job: Job | None) -> Config | None:
    """Return the config that the run which is to be resumed or forked has begun with, if any."""
    if job is not None and job.resume.origin is not None:
        names = names_by_step(job.resume.origin.names())
        name = names.get(job.resume.step or max(names, default=0))
        manifest = None if name is None else readable_manifest(job.resume.origin, name)
        return None if manifest is None else validate(manifest.config).config
    if job is None or job.resume.fresh:
        return None
    known = Path(config.run.folder) if config.run.folder is not None else folder_of_launch(config, job.recipe)
    folder = job.folder or known
    return run_config(folder) if folder is not None and (folder / CONFIG).is_file() else None


# --- the session --------------------------------------------------------------------------------------------------


@contextmanager
def opened(
    config: Config, given: UserObjects, purpose: Purpose = Purpose.TRAIN, job: Job | None = None
) -> Iterator[Session]:
    """Open a session on this rank among those that the environment names; `purpose` is of one without a job."""
    prefix_warnings()
    grouped = names_a_rank(os.environ) or uses_ranks(config.parallel.strategy)
    folder = config.run.folder if job is None or job.folder is None else job.folder
    logs = None if folder is None else Path(folder) / LOGS
    with (
        launch_environment(config.launch),
        watched_from_outside(config, logs) as watch,
        joined(config.launch, grouped=grouped) as world,
    ):
        session: Session | None = None
        try:
            watch(world.axis)
            if job is not None:
                purpose = _purpose(job, world)
            if any(huggingface_sections(config)):
                config = from_first_rank(world.axis, lambda: pinned(config, _earlier(config, job)))
            session = assemble(config, world, given, purpose)
            if job is None:
                components_of(session).precompute(None)  # only a run writes to its folder
            if world.exchange is not None:
                world.exchange.listen()
            yield session
        except Exception as error:
            failure = explain(error, factors_of(config, world.size, session), world.device)
            if failure is None:
                raise
            raise failure from error
        finally:
            if session is not None:
                session.close()


def _begin(job: Job, session: Session, folder: Path) -> tuple[Checkpoints, list[str], list[Rollback]]:
    """Start or resume from a checkpoint; the folder then has the history of one run, up to here."""
    components = components_of(session)
    is_first = components.world.rank == 0
    environment: dict[str, Any] = {"recipe": job.recipe, **describe(job.config.launch.environment)} if is_first else {}
    transforms = transform_names(job.config.transforms, job.given)
    if is_first and transforms:
        environment[TRANSFORMS] = transforms
    rollbacks, resume = rollbacks_of(components, folder, job.resume)
    storage = storage_of(job.config.checkpoint, folder, job.given.storage)
    checkpoints = Checkpoints(session, storage, environment, folder, job.recipe, job.memory)
    notes = [f"transforms of the model: {', '.join(transforms)}"] if transforms else []
    if callable(getattr(components.sharding.state.model, "configure_optimizers", None)) and job.given.optimizer is None:
        notes.append(f"configure_optimizers isn't called; optim.name: {job.config.optim.name}, or pass optimizer=...")
    of_rollbacks = leave_out_windows(rollbacks, components, session.left_out)
    notes += [*checkpoints.begin(resume), *of_rollbacks]
    if checkpoints.resumed_from is None:
        components.draw()
    if is_first:
        run_folder = RunFolder.open(folder)
        if checkpoints.resumed_from is None or resume.origin is not None:
            run_folder.archive_attempt()
        else:
            run_folder.rewind(checkpoints.resumed_from, repeats_evaluations=checkpoints.evaluations.comes_first)
        run_folder.write(CONFIG, recorded(components.config, checkpoints.run))
        notes += unremembered(components.config, folder)
        run_folder.write(ENVIRONMENT, {**environment, "run": checkpoints.run})
    components.precompute(folder)
    components.world.axis.barrier()
    if resume.origin is not None:
        checkpoints.save()
    keep(components.world, BEGUN)
    return checkpoints, notes, rollbacks


# --- the folder ---------------------------------------------------------------------------------------------------


@contextmanager
def _run_folder(job: Job, world: World) -> Iterator[Path]:
    """Yield the run's folder, the same on all ranks; it is locked while the block runs."""
    if job.folder is not None:
        yield job.folder
        return
    created: list[RunFolder] = []
    known = kept(world, FOLDER)

    def create() -> Path:
        path = Path(known) if known is not None else run_folder_for(job.config, job.recipe, job.resume)
        created.append(RunFolder.create(path, job.recipe, again=True))
        return created[0].path

    try:
        path = from_first_rank(world.axis, create)
        keep(world, FOLDER, str(path))
        yield path
    finally:
        for folder in created:
            folder.release()


@contextmanager
def _logged_tracebacks(job: Job, session: Session) -> Iterator[Path]:
    """Yield the run's folder; under another launcher, write the traceback behind a failure to the rank's log there."""
    world = components_of(session).world
    with _run_folder(job, world) as folder:
        try:
            yield folder
        except Exception as error:
            is_message = out_of_memory_cause(error) or (isinstance(error, Failure) and error.__cause__ is not None)
            if is_message and folder.is_dir() and job.folder is None and names_a_rank(os.environ):
                append(log_path(folder / LOGS, world.rank), "".join(traceback.format_exception(error)))
            raise


# --- the end ------------------------------------------------------------------------------------------------------


def _own_folder(folder: Path, holder: bytes | None) -> Path:
    if lock_holder(folder) not in (holder, None):
        raise RunFailed(f"{folder} belongs to another run now: nothing is written there")
    return folder


def _publish_results(
    session: Session, checkpoints: Checkpoints, facts: RunInfo, results: Results, own_folder: Callable[[], Path]
) -> dict[str, Any]:
    """Write weights and summary to the run's folder; the summary, last, marks the run as finished."""
    components = components_of(session)
    summary = summarize(facts, results.progress, results.last, results.evaluations, results.seconds)
    if results.stopped_early is not None:
        summary["stopped_early"] = results.stopped_early
    if components.config.run.end_with == "best":
        checkpoints.load_best()

    def write() -> None:
        RunFolder.open(own_folder()).write(SUMMARY, summary)
        write_report(own_folder())

    try:
        publish(session, own_folder)
        from_first_rank(components.world.axis, write)
    except RunFailed as failure:
        saved = f"the state after step {results.progress.steps:,} is saved in {checkpoints.place}"
        raise RunFailed(f"{failure}; {saved}", kind=failure.kind) from failure
    return summary


class _OnStandardError(logging.Handler):
    """Prints warnings with a prefix, unless the program has a handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            echo(f"lockstep: {self.format(record)}", file=sys.stderr, flush=True)


def prefix_warnings() -> None:
    """Print warnings as all other messages."""
    logger = logging.getLogger("lockstep")
    if not any(isinstance(handler, _OnStandardError) for handler in logger.handlers):
        logger.addHandler(_OnStandardError(logging.WARNING))


def _sample(session: Session, prompt: str) -> str:
    """Return the prompt with the model's continuation, or with why there is none; all ranks together, same result."""
    components, config = components_of(session), components_of(session).config
    codec, plan = codec_of(config.model, config.data.train), components.plan
    shards = find_strategy(plan.strategy).variant(config.parallel).state.parameters
    if plan.mesh.pipeline > 1 or (shards and getattr(config.model, "task", "") == "seq2seq"):
        return f"{prompt}: no rank has the whole model; `lockstep generate` continues it"
    sampling = Sampling(_SAMPLE_TEMPERATURE, seed=config.run.seed)
    options = {"is_whole": plan.mesh.tensor * plan.mesh.context == 1, "synced": shards and plan.mesh.shares > 1}
    try:
        compute, device = resolve_compute(config.precision.compute, components.world.device), components.world.device
        with evaluation_weights(session), autocast_context(compute, device)():
            model, facts = components.sharding.state.model, components.source.facts
            [text] = continuations(codec, model, [codec.encode(prompt)], _SAMPLE_TOKENS, facts, sampling, **options)
            return prompt + text
    except RunFailed as failure:  # must not fail a run that is finished
        return f"{prompt}: {failure}"

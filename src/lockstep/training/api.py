"""Lockstep from Python.

lockstep.train(config, model=..., train_dataset=...)      a whole run; with `ranks=2`, in separate processes
with lockstep.session(config, model=...) as session:      the same components under a custom loop
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from torch import nn

from lockstep.assembly.user_objects import Objects, UserObjects, refuse_missing, user_objects
from lockstep.assembly.weights import load_weights
from lockstep.config.known_runs import run_of
from lockstep.config.loading import load, validate
from lockstep.config.reading import read_file, to_python
from lockstep.config.recipes import resolve_recipe
from lockstep.config.schema import GIVEN, Config, ObjectiveConfig, Schedule
from lockstep.config.training_sections import OPTIONS_OF_NAMED
from lockstep.config.trust import approved
from lockstep.core.deferred_signals import DEFERRAL
from lockstep.core.errors import ConfigError, Failure, Problem
from lockstep.core.ranks import names_a_rank
from lockstep.launch.local import refuse_import_of_script
from lockstep.launch.other_launchers import refuse_rank_count
from lockstep.launch.outcome import print_on_stderr
from lockstep.loop.session import Session
from lockstep.monitor.metric_log import MetricLog, recording
from lockstep.resuming.checkpoints import rescuing
from lockstep.resuming.resuming import Resume
from lockstep.training.job import Finished, Job, opened, run_job

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig


ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str]


def train(
    config: ConfigLike,
    *,
    ranks: int | Literal["auto"] | None = None,
    name: str = "run",
    trust_run: bool = False,
    accept_changes: bool = False,
    fresh: bool = False,
    **objects: Unpack[Objects],
) -> Finished:
    """Train, and return when the run is done.

    Args:
        config: a recipe's name, a file, a mapping, or a Config. It need not contain what is passed as an object.
        ranks: number of processes to start; None: train in this one (or as the rank that a launcher made of it).
        name: what the run is called; part of its folder's name.
        trust_run: whether the config of another user's run may name code, and reach out of the run's folder (`config`
            is that folder, or a file in it).
        accept_changes: resume although data, model or seed differ from the checkpoint's.
        fresh: start from the beginning; checkpoints in the run's folder are renamed.
        **objects: `model`, `train_dataset`, ...: see `lockstep.Objects`. A module has the trained weights in the end.

    Raises:
        ConfigError: the run can't be started as it is configured; lists all problems.
        Paused: a signal stopped the run; its state is saved.
        RunFailed: the run failed.
    """
    try:
        refuse_import_of_script()
        given = user_objects(objects)
        resume = Resume(fresh=fresh, accept_changes=accept_changes)
        job = Job(resolved(config, given, trusted=trust_run, writes=True), name, given=given, resume=resume)
        if names_a_rank(os.environ) and isinstance(ranks, int):
            refuse_rank_count(ranks, "ranks")
        if job.config.launch.nodes != 1 and not names_a_rank(os.environ):  # the leader looks whether anything is left
            return run_job(job) if ranks is None else _train_in_ranks(job, ranks)
        finished = None if fresh else _finished(job)
        if finished is not None:
            return finished
        if ranks is None or names_a_rank(os.environ):
            return run_job(job)
        return _train_in_ranks(job, ranks)
    except Failure as failure:
        raise failure.with_traceback(None) from failure.__cause__  # of one frame: the message is for the caller


@contextmanager
def session(config: ConfigLike, *, trust_run: bool = False, **objects: Unpack[Objects]) -> Iterator[Session]:
    """Open a run for a custom loop: iterate over the session, or call `accumulate`, `commit`, `evaluate`.

    It writes no folder and shows nothing. Arguments are as for `train`.
    """
    given = user_objects(objects)
    checked = resolved(config, given, trusted=trust_run)
    for is_on, key, why in (
        (checked.monitor.early_stopping, "monitor.early_stopping", "can't end it; leave this out"),
        (checked.schedule.plateau, "schedule.plateau", "doesn't see its evaluations; pass a schedule"),
        (checked.recovery.bad_numbers.rolls_back, "recovery.bad_numbers", "can't start it again; write skip"),
        (checked.recovery.compare_every, "recovery.compare_every", "compares no copies; leave this out"),
    ):
        if is_on:
            raise ConfigError(Problem("", key, f"a session leaves the loop to you, and {why}, or use lockstep.train"))
    with (
        opened(checked, given) as opened_session,
        rescuing(opened_session),
        recording(MetricLog()),
        DEFERRAL.of_sigint(),
    ):
        yield opened_session


def resolved(config: ConfigLike, given: UserObjects, *, trusted: bool = False, writes: bool = False) -> Config:
    """Return the config, with `given` where objects were passed. Raises ConfigError with all its problems.

    Args:
        trusted, writes: as of `trust.approved`.
    """
    checked = approved(_loaded(config, _given_sections(given)), trusted=trusted, writes=writes)
    refuse_missing(checked, given)
    return checked


def _loaded(config: ConfigLike, given: Mapping[str, Any]) -> LoadedConfig:
    if not isinstance(config, str | os.PathLike):
        values = config.model_dump(exclude_unset=True) if isinstance(config, Config) else dict(config)
        return validate(*_layers(values, given))
    recipe = resolve_recipe(os.fspath(config))
    if not given:
        return load([recipe.path], of_runs=[recipe.path] if recipe.of_run else [])
    tree, wrong = read_file(recipe.path)
    if wrong or tree is None:
        raise ConfigError(wrong)
    loaded = validate(*_layers(cast("Mapping[str, Any]", to_python(tree)), given))
    run = run_of(recipe.path, tree, named=recipe.of_run)
    if run is None:
        return loaded
    return replace(loaded, origins=dict.fromkeys(loaded.origins, run.name), runs=(run,))


_REPLACED: Mapping[str, tuple[str, Collection[str]]] = {
    "objective": ("kind", ObjectiveConfig.model_fields),
    "optim": ("name", OPTIONS_OF_NAMED),
    "schedule": ("kind", Schedule.model_fields),
    "checkpoint": ("storage", ()),
}
"""Selectors, and the keys that an object replaces, by section."""


def _layers(values: Mapping[str, Any], given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a config's values, without the keys that an object replaces, and the sections of the objects."""
    values, sections = dict(values), dict(given)
    for name, (selector, keys) in _REPLACED.items():
        section = values.get(name)
        if name in given and isinstance(section, Mapping) and section.get(selector) != GIVEN:
            values[name] = {key: value for key, value in section.items() if key not in (selector, *keys)}
    if "transforms" in given:  # those that the config names stay; a run's own config has the placeholder already
        named = [section for section in values.get("transforms", ()) if section.get("target") != GIVEN]
        sections["transforms"] = [*named, *given["transforms"]]
    return [values, sections]


def _given_sections(given: UserObjects) -> dict[str, Any]:
    kind: dict[str, Any] = {"kind": "given"}
    source = kind if given.collate is None else {**kind, "collate": "given"}
    data: dict[str, Any] = {} if given.train_dataset is None else {"train": source}
    if given.eval_datasets:
        data["evaluation"] = dict.fromkeys(given.eval_datasets, source)
    sections: dict[str, Any] = {
        **{name: kind for name in ("model", "objective", "schedule") if getattr(given, name) is not None},
        "data": data,
        "optim": {"name": "given"} if given.optimizer is not None else None,
        "checkpoint": {"storage": {"target": GIVEN}} if given.storage is not None else None,
        "transforms": [{"target": GIVEN}] * len(given.transforms),
    }
    return {name: section for name, section in sections.items() if section}


def _finished(job: Job) -> Finished | None:
    """Return what the finished run in run.folder left, if nothing of it is left to train; a module gets its weights."""
    from lockstep.monitor.folder import is_finished, read_summary
    from lockstep.training.start_run import has_nothing_to_train

    folder = Path(job.config.run.folder).absolute() if job.config.run.folder is not None else None
    if folder is None or not is_finished(folder) or not has_nothing_to_train(job.config, folder, job.given.storage):
        return None
    if isinstance(job.given.model, nn.Module):
        load_weights(job.given.model, folder)
    return Finished(read_summary(folder) or {}, folder)


def _train_in_ranks(job: Job, ranks: int | Literal["auto"]) -> Finished:
    from lockstep.monitor.folder import read_summary
    from lockstep.training.start_run import launch_job, train_on_hosts

    model, on_hosts = job.given.model, job.config.launch.nodes != 1
    if isinstance(model, nn.Module):
        tensors: Iterator[Any] = chain(model.parameters(), model.buffers())
        if any(tensor.is_cpu and tensor.is_shared() for tensor in tensors):  # and would be among forked ranks
            job = replace(job, given=replace(job.given, model=copy.deepcopy(model)))
    folder, outcome = train_on_hosts(job, ranks) if on_hosts else launch_job(job, ranks)
    if outcome.code != 0:
        raise outcome.failure()
    folder = folder or Path(job.config.run.folder or "")
    if isinstance(model, nn.Module):
        try:
            load_weights(model, folder)
        except Failure as failure:  # a transform has changed the ranks' modules, or the folder is on another host
            print_on_stderr(f"lockstep: the module that was passed keeps its first weights: {failure}")
    return Finished(read_summary(folder) or {}, folder)

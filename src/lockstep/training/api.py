"""Lockstep from Python.

lockstep.train(config, model=..., train_dataset=...)      a whole run; with `ranks=2`, in separate processes
with lockstep.session(config, model=...) as session:      the same components under a custom loop
    for report in session: ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from torch import nn

from lockstep.config.approval import approved
from lockstep.config.foreign_code import GIVEN
from lockstep.config.known_runs import run_of
from lockstep.config.loading import load, validate
from lockstep.config.reading import read_file, to_python
from lockstep.config.recipes import resolve_recipe
from lockstep.config.schema import Config, ModelSection
from lockstep.core.errors import ConfigError
from lockstep.core.ranks import names_a_rank
from lockstep.launch.local import refuse_import_of_script
from lockstep.launch.other_launchers import refuse_rank_count
from lockstep.training.job import Finished, Job, opened, run_job
from lockstep.training.rescue import rescuing
from lockstep.training.resuming import Resume
from lockstep.training.session import Session
from lockstep.training.user_objects import Objects, UserObjects, refuse_missing, user_objects

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
        trust_run: let code run that the config of somebody else's run names (`config` is its folder, or a file in it).
        accept_changes: resume although data, model or seed differ from those of the checkpoint.
        fresh: start from the beginning; checkpoints in the run's folder are set aside.
        **objects: `model`, `train_dataset`, `eval_datasets`, `objective`, ...: see `lockstep.Objects`. A module is
            trained in place, unless `ranks` starts processes.

    Raises:
        ConfigError: the run can't be had as it is configured; lists all problems.
        Paused: a signal stopped the run; its state is saved.
        RunFailed: the run failed.
    """
    refuse_import_of_script()
    given = user_objects(objects)
    resume = Resume(fresh=fresh, accept_changes=accept_changes)
    job = Job(resolved(config, given, trusted=trust_run, writes=True), name, given=given, resume=resume)
    if names_a_rank(os.environ) and isinstance(ranks, int):
        refuse_rank_count(ranks, "ranks")
    finished = None if fresh else _finished(job)
    if finished is not None:
        return finished
    if ranks is None or names_a_rank(os.environ):
        return run_job(job)
    return _train_in_ranks(job, ranks)


@contextmanager
def session(config: ConfigLike, *, trust_run: bool = False, **objects: Unpack[Objects]) -> Iterator[Session]:
    """Open a run for a custom loop: iterate over the session, or call `accumulate`, `commit`, `evaluate`.

    It writes no folder and shows nothing. Arguments are those of `train`.
    """
    given = user_objects(objects)
    with opened(resolved(config, given, trusted=trust_run), given) as opened_session, rescuing(opened_session):
        yield opened_session


def resolved(config: ConfigLike, given: UserObjects, *, trusted: bool = False, writes: bool = False) -> Config:
    """The config, with `given` where objects were handed over. Raises ConfigError: all that is wrong with it.

    Args:
        trusted, writes: as of `approval.approved`.
    """
    checked = approved(_loaded(config, _handed(given)), trusted=trusted, writes=writes)
    refuse_missing(checked, given)
    return checked


def _loaded(config: ConfigLike, handed: Mapping[str, Any]) -> LoadedConfig:
    if not isinstance(config, str | os.PathLike):
        values = config.model_dump(exclude_unset=True) if isinstance(config, Config) else dict(config)
        return validate(_with(values, handed))
    recipe = resolve_recipe(os.fspath(config))
    if not handed:
        return load([recipe.path], of_runs=[recipe.path] if recipe.of_run else [])
    tree, wrong = read_file(recipe.path)
    if wrong or tree is None:
        raise ConfigError(wrong)
    loaded = validate(_with(cast("Mapping[str, Any]", to_python(tree)), handed))
    run = run_of(recipe.path, tree, named=recipe.of_run)
    if run is None:
        return loaded
    return replace(loaded, origins=dict.fromkeys(loaded.origins, run.name), runs=(run,))


def _with(values: Mapping[str, Any], handed: Mapping[str, Any]) -> dict[str, Any]:
    sections: dict[str, Any] = {
        name: {**_still_meant(name, values.get(name, {})), **section}
        for name, section in handed.items()
        if name != "transforms"
    }
    if "transforms" in handed:  # those that the config names stay; a run's own config has the placeholder already
        named = [section for section in values.get("transforms", ()) if section.get("target") != GIVEN]
        sections["transforms"] = [*named, *handed["transforms"]]
    return {**values, **sections}


_OF_RULES = ("name", "betas", "eps", "momentum", "nesterov")  # settings of the optimizers that have a name


def _still_meant(name: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said beside an object that is handed over: all of the data, what goes for any model, and for any
    optimizer."""
    if name == "model":
        return {key: value for key, value in asked.items() if key in ModelSection.model_fields}
    if name == "optim":
        return {key: value for key, value in asked.items() if key not in _OF_RULES}
    return asked if name in ("data", "checkpoint") else {}


def _handed(given: UserObjects) -> dict[str, Any]:
    """The sections that handed-over objects stand for."""
    kind = {"kind": "given"}
    source = {"kind": "given", "collate": "given"} if given.collate is not None else kind
    data: dict[str, Any] = {}
    if given.train_dataset is not None:
        data["train"] = source
    if given.eval_datasets:
        data["evaluation"] = dict.fromkeys(given.eval_datasets, source)
    sections = {
        "model": kind if given.model is not None else {},
        "objective": kind if given.objective is not None else {},
        "data": data,
        "optim": {"name": "given"} if given.optimizer is not None else {},
        "schedule": kind if given.schedule is not None else {},
        "checkpoint": {"storage": {"target": GIVEN}} if given.storage is not None else {},
    }
    transforms = [{"target": GIVEN}] * len(given.transforms)
    named = {name: section for name, section in sections.items() if section}
    return {**named, "transforms": transforms} if transforms else named


def _finished(job: Job) -> Finished | None:
    """Return what the finished run in run.folder left, if nothing of it is left to train; a module gets its weights."""
    from lockstep.monitor.folder import is_finished, read_summary
    from lockstep.training.start_run import has_nothing_to_train
    from lockstep.training.weights import load_weights

    folder = Path(job.config.run.folder).absolute() if job.config.run.folder is not None else None
    if folder is None or not is_finished(folder) or not has_nothing_to_train(job.config, folder, job.given.storage):
        return None
    if isinstance(job.given.model, nn.Module):
        load_weights(job.given.model, folder)
    return Finished(read_summary(folder) or {}, folder)


def _train_in_ranks(job: Job, ranks: int | Literal["auto"]) -> Finished:
    from lockstep.monitor.folder import read_summary
    from lockstep.training.start_run import launch_job

    folder, outcome = launch_job(job, ranks)
    if outcome.code != 0:
        raise outcome.failure()
    return Finished(read_summary(folder) or {}, folder)

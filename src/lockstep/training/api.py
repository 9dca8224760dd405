"""Lockstep from Python.

lockstep.train(config, model=..., dataset=...)            a whole run; with `ranks=2`, in processes of its own
with lockstep.session(config, model=...) as session:      the same rooms under a loop of yours
    for report in lockstep.steps(session): ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

from lockstep.checkpoint.local import LocalStorage
from lockstep.config.approval import approved
from lockstep.config.known_runs import run_of
from lockstep.config.loading import load, validate
from lockstep.config.reading import read_file, to_python
from lockstep.config.recipes import resolve_recipe
from lockstep.config.schema import Config, ModelSection
from lockstep.core.errors import ConfigError
from lockstep.core.local_paths import local_path
from lockstep.core.ranks import names_a_rank
from lockstep.distributed.user_collectives import print_once
from lockstep.launch.local import refuse_import_of_script
from lockstep.launch.other_launchers import refuse_rank_count
from lockstep.training.checkpoints import Checkpoints, Resume
from lockstep.training.given import Given, refuse_missing
from lockstep.training.job import Finished, Job, opened, run_job
from lockstep.training.rescue import rescuing
from lockstep.training.session import Session

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lockstep.config.loading import LoadedConfig


def checkpoints(
    session: Session, folder: str | os.PathLike[str], *, fresh: bool = False, accept_changes: bool = False
) -> Checkpoints:
    """Saves of a session that runs under a loop of yours; goes on from the newest in `folder` that verifies.

    All ranks together, before the first batch. `.resumed_from` tells the step, `.save()` begins a save in the
    background, `.finish()` waits for it.

    Args:
        fresh: begin anew; what is there is put aside.
        accept_changes: go on although data, model or seed are others than before.

    Raises:
        ConfigError: what is saved there is another run's.
        RunFailed: none of the checkpoints there can be read.
    """
    made = Checkpoints(session, LocalStorage(local_path(folder).absolute()), {})
    for note in made.begin(Resume(fresh=fresh, accept_changes=accept_changes)):
        print_once(f"lockstep: {note}")
    return made


ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str]


def train(
    config: ConfigLike,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    dataset: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    objective: object | None = None,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    schedule: Callable[[int, int | None], float] | None = None,
    ranks: int | Literal["auto"] | None = None,
    name: str = "run",
    trust_run: bool = False,
) -> Finished:
    """Trains, and returns when the run is done.

    Args:
        config: a recipe's name, a file, a mapping, or a Config. What is handed over below need not be in it.
        model: a module, or a function that makes one. In this process a module is trained in place.
        dataset: a map-style Dataset. Items are a mapping (`labels`, `targets` are what the objective gets), a tuple
            (its last is the target), or a tensor; or `collate` makes a `lockstep.Batch` of them.
        evaluation: further Datasets by name.
        objective: what to train for, if the model's kind doesn't say; an object with `count` and `loss_sum`, or one of
            torch's losses.
        optimizer: makes a torch optimizer from parameter groups, in place of `optim.name`. A function, because a
            strategy may replace parameters. Its own `lr` is the peak, unless the config says `optim.lr`.
        schedule: (step from 0, steps of the run or None) -> learning rate as a share of its peak.
        ranks: starts so many processes; None: trains in this one (or as the rank that a launcher made of it).
        name: what the run is called; part of its folder's name.
        trust_run: let code run that the config of somebody else's run names (`config` is its folder, or a file in it).

    Raises:
        ConfigError: something asked for can't be had; says all that is wrong.
        Paused: a signal asked for it; all is saved.
        RunFailed: the run failed.
    """
    refuse_import_of_script()
    given = Given(
        model=model,
        dataset=dataset,
        collate=collate,
        evaluation=evaluation or {},
        objective=objective,
        optimizer=optimizer,
        schedule=schedule,
    )
    job = Job(resolved(config, given, trusted=trust_run, writes=True), name, given=given)
    if names_a_rank(os.environ) and isinstance(ranks, int):
        refuse_rank_count(ranks, "ranks")
    if ranks is None or names_a_rank(os.environ):
        return run_job(job)
    return _train_in_ranks(job, ranks)


@contextmanager
def session(
    config: ConfigLike,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    dataset: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    objective: object | None = None,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    schedule: Callable[[int, int | None], float] | None = None,
    trust_run: bool = False,
) -> Iterator[Session]:
    """The rooms of a run, for a loop of yours: `accumulate`, `commit`, `evaluate`. Arguments as of `train`.

    Writes no folder and shows nothing.
    """
    given = Given(
        model=model,
        dataset=dataset,
        collate=collate,
        evaluation=evaluation or {},
        objective=objective,
        optimizer=optimizer,
        schedule=schedule,
    )
    with opened(resolved(config, given, trusted=trust_run), given) as opened_session, rescuing(opened_session):
        yield opened_session


def resolved(config: ConfigLike, given: Given, *, trusted: bool = False, writes: bool = False) -> Config:
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
    return {
        **values,
        **{name: {**_still_meant(name, values.get(name, {})), **section} for name, section in handed.items()},
    }


_OF_RULES = ("name", "betas", "eps", "momentum", "nesterov")  # settings of the optimizers that have a name


def _still_meant(name: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said beside an object that is handed over: all of the data, what goes for any model, and for any
    optimizer."""
    if name == "model":
        return {key: value for key, value in asked.items() if key in ModelSection.model_fields}
    if name == "optim":
        return {key: value for key, value in asked.items() if key not in _OF_RULES}
    return asked if name == "data" else {}


def _handed(given: Given) -> dict[str, Any]:
    """The sections that handed-over objects stand for."""
    kind = {"kind": "given"}
    source = {"kind": "given", "collate": "given"} if given.collate is not None else kind
    data: dict[str, Any] = {}
    if given.dataset is not None:
        data["train"] = source
    if given.evaluation:
        data["evaluation"] = dict.fromkeys(given.evaluation, source)
    sections = {
        "model": kind if given.model is not None else {},
        "objective": kind if given.objective is not None else {},
        "data": data,
        "optim": {"name": "given"} if given.optimizer is not None else {},
        "schedule": kind if given.schedule is not None else {},
    }
    return {name: section for name, section in sections.items() if section}


def _train_in_ranks(job: Job, ranks: int | Literal["auto"]) -> Finished:
    from lockstep.monitor.folder import read_summary
    from lockstep.training.command import launch_job

    folder, outcome = launch_job(job, ranks)
    if outcome.code != 0:
        raise outcome.failure()
    return Finished(read_summary(folder) or {}, folder)

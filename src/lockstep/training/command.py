"""What the verbs train, eval, generate and plan do.

this process is a rank already (torchrun, ...)  --> be it
otherwise                                       --> make the folder, start the ranks, pass on their exit code
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.checkpoint.manifest import CorruptCheckpoint
from lockstep.checkpoint.reading import by_step, read_manifest
from lockstep.core.errors import ConfigError, Problem, Stopped
from lockstep.core.json_output import emit
from lockstep.core.progress import Progress
from lockstep.core.ranks import names_a_rank
from lockstep.core.stopping import blocked_signals, undo_on_stop
from lockstep.core.terminal import echo
from lockstep.distributed.memory import memory_if_started
from lockstep.launch.devices import choose_ranks, count_cores, count_gpus
from lockstep.launch.local import launch
from lockstep.launch.outcome import LaunchResult
from lockstep.monitor.folder import CONFIG, RunFolder, is_finished, is_run, read_summary, recipe_of
from lockstep.plan.schedule import used_of_budget
from lockstep.plan.told_sizes import NOT_READ, facts_of_config
from lockstep.training.assemble import refuse_cuts
from lockstep.training.checkpoints import Resume, storage_of
from lockstep.training.job import Job, imports_ahead, opened, run_job
from lockstep.training.locations import CheckpointLocation, choose, find
from lockstep.training.out_of_memory import advice, setting_of
from lockstep.training.ownership import LENGTHS, other_settings, run_folder_for
from lockstep.training.saved_state import epoch_samples_in
from lockstep.training.session import components_of
from lockstep.training.sources import facts_of_data, make_model, open_sources
from lockstep.training.user_objects import UserObjects, refuse_given
from lockstep.training.weights import load_weights, to_rebuild

if TYPE_CHECKING:
    from lockstep.checkpoint.local import LocalStorage
    from lockstep.checkpoint.manifest import Manifest
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config
    from lockstep.core.arguments import EvaluateArguments, GenerateArguments, PlanArguments, TrainArguments
    from lockstep.core.records import DataFacts

_NOTHING_BEGUN = (ConfigError.exit_code, Stopped.exit_code)  # unless the folder holds the run's config
_EVALUATION_SET = "data.evaluation: {held-out: {kind: digits, split: held-out}}"
_SHOWN = 5  # settings that differ, in a message


def train(loaded: LoadedConfig, recipe: str, arguments: TrainArguments) -> int:
    """Returns the exit code."""
    config, given = loaded.config, UserObjects(trust_remote_code=arguments.trust_remote_code)
    refuse_given(loaded)
    folder = config.run.folder
    _refuse_start(config, arguments)
    _refuse_taken_fork(config, arguments)
    again = arguments.fresh or arguments.step is not None
    if folder is not None and not again:
        _refuse_other_recipe(config, recipe, Path(folder))
    if folder is not None and not again and _has_enough(config, Path(folder)):
        _print_summary(Path(folder), arguments.json)
        return 0
    job = Job(config, recipe, given=given, resume=_resume(arguments))
    if names_a_rank(os.environ):
        finished = run_job(job)
        if os.environ["RANK"] == "0":
            _print_summary(finished.folder, arguments.json)
        return 0
    place, outcome = launch_job(job, config.launch.ranks)
    outcome.show()
    code = outcome.code
    if code == 0:
        _print_summary(place, arguments.json)
    return code


def _refuse_start(config: Config, arguments: TrainArguments) -> None:
    """A step that isn't there, or that leaves nothing to train; before a folder is made or a rank is started for it."""
    if arguments.origin is not None:
        place = find(arguments.origin, trusted=arguments.trust_run)
    elif arguments.step is None:
        return
    elif config.run.folder is None:
        raise ConfigError("--from goes on with a run: lockstep train RUN --from STEP, or give its run.folder")
    else:
        place = CheckpointLocation(Path(storage_of(config, Path(config.run.folder)).place))
    start = _readable(place.storage, choose(place, arguments.step))
    if start is None:
        return
    length = _length(config, start)
    if length.used >= length.budget:
        raise ConfigError(
            f"the checkpoint of step {start.step:,} is {length} already: nothing would be trained; give a longer "
            f"run.{length.key}, or go back further: --from STEP"
        )


def _refuse_taken_fork(config: Config, arguments: TrainArguments) -> None:
    """A fork would put aside what another run has left. Of several ranks the first makes the folder, and looks."""
    folder = config.run.folder
    if arguments.origin is None or folder is None or os.environ.get("RANK", "0") != "0":
        return
    if Path(folder).is_dir() and any(Path(folder).iterdir()):
        on = f", or go on with that one: lockstep train {folder}" if is_run(folder) else ""
        held = "a run already" if is_run(folder) else "something else"
        raise ConfigError(f"--fork begins a new run, and {folder} holds {held}; name a folder that isn't there{on}")
    storage = storage_of(config, Path(folder))
    if by_step(storage.names()):
        why = f"{storage.place} holds checkpoints already, and a fork begins with one of its own; name another folder"
        raise ConfigError(Problem("", "checkpoint.folder", why))


def _resume(arguments: TrainArguments) -> Resume:
    origin = None
    if arguments.origin is not None:
        origin = find(arguments.origin, trusted=arguments.trust_run).folder
    return Resume(arguments.fresh, arguments.step, origin, arguments.accept_changes)


def _refuse_other_recipe(config: Config, recipe: str, folder: Path) -> None:
    """What another recipe has trained is not gone on with under this one's settings. Of several ranks the first may
    have begun this run there already: it alone looks."""
    if not (folder / CONFIG).is_file() or os.environ.get("RANK", "0") != "0" or recipe_of(folder) == recipe:
        return
    differences = other_settings(config, run_config(folder))
    if differences:
        raise ConfigError(_holds_another(folder, differences))


def _holds_another(folder: Path, differences: list[str]) -> Problem:
    shown = "".join(f"\n  {line}" for line in differences[:_SHOWN])
    more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    run = f"{'the finished run' if is_finished(folder) else 'a run'} of {recipe_of(folder)}"
    why = f"{folder} holds {run}, which had other settings:{shown}{more}\n"
    return Problem("", "run.folder", f"{why}Give run.folder another name, or begin anew there: --fresh")


def _has_enough(config: Config, folder: Path) -> bool:
    """Whether there is nothing left to train; says so.

    Raises:
        ConfigError: the run isn't finished, and is beyond what it is to be now; or it is, and had other settings.
    """
    finished = is_finished(folder)
    if not finished and not (folder / CONFIG).is_file():
        return False
    if not _has_other_length(config, folder):
        differences = other_settings(config, run_config(folder)) if finished else []
        if differences:
            raise ConfigError(_holds_another(folder, differences))
        if finished:
            echo(f"the run in {folder} is finished; give it a longer run.steps (or epochs, ...) to go on, or --fresh")
        return finished
    too_far = _too_far(config, folder, finished=finished)
    if too_far is not None and not finished:
        raise ConfigError(too_far)
    if too_far is not None:
        echo(too_far)
    return too_far is not None


def _has_other_length(config: Config, folder: Path) -> bool:
    then, now = run_config(folder).run, config.run
    return any(getattr(then, length) != getattr(now, length) for length in LENGTHS)


def _too_far(config: Config, folder: Path, *, finished: bool) -> str | None:
    """What to say of a run whose newest checkpoint is beyond what it is to be now; None: it isn't.

    One that stopped just at its new end is still to be finished.
    """
    storage = storage_of(config, folder)
    steps = by_step(storage.names())
    newest = _readable(storage, steps[max(steps)]) if steps else None
    if newest is None:
        return None
    length = _length(config, newest)
    if length.used < length.budget or (length.used == length.budget and not finished):
        return None
    return (
        f"the run in {folder} is at step {newest.step:,} already, {length}; "
        f"give it a longer run.{length.key} to go on, or go back: --from STEP, or --fresh"
    )


def _readable(storage: LocalStorage, name: str) -> Manifest | None:
    """None: it is damaged; the run says so, and goes on from one before."""
    try:
        return read_manifest(storage, name)
    except CorruptCheckpoint:
        return None


@dataclass(frozen=True, slots=True)
class _Length:
    """How far a checkpoint is, beside how long the run is to be, in the unit of `key`."""

    used: float
    budget: float
    key: str
    asked: object

    def __str__(self) -> str:
        return f"{'past' if self.used > self.budget else 'at'} run.{self.key} {self.asked}"


def _length(config: Config, manifest: Manifest) -> _Length:
    progress = Progress(manifest.step, manifest.samples, manifest.tokens)
    used, budget = used_of_budget(config.run, progress, epoch_samples_in(manifest))
    key = next(length for length in LENGTHS if getattr(config.run, length) is not None)
    return _Length(used, budget, key, getattr(config.run, key))


def launch_job(job: Job, ranks: int | Literal["auto"]) -> tuple[Path, LaunchResult]:
    """Makes the run's folder and runs the job on so many ranks of this machine; returns the folder too."""
    number = choose_ranks(job.config.launch) if ranks == "auto" else ranks
    asked = run_folder_for(job.config, job.recipe, fresh=job.resume.fresh)
    was_there = asked is not None and asked.exists()
    outcome = LaunchResult(ConfigError.exit_code)  # what `launch` raises

    def leave() -> None:
        folder.release()
        if not was_there and outcome.code in _NOTHING_BEGUN:  # of what failed otherwise, the ranks' words are in it
            folder.remove_unbegun()

    with ExitStack() as stack:
        with blocked_signals(forks=True):  # no stop comes between making the folder and what would undo it
            folder = RunFolder.create(asked, job.recipe, again=True)
            stack.enter_context(undo_on_stop(leave))
        try:
            entry, ahead = partial(_be_a_rank, job, folder.path), imports_ahead(job.config)
            remedy = advice(setting_of(job.config, number), "forward")
            outcome = launch(entry, number, job.config.launch, folder.logs, ahead=ahead, remedy=remedy)
        finally:
            leave()
    return folder.path, outcome


def _be_a_rank(job: Job, folder: Path) -> int:
    run_job(replace(job, folder=folder))
    return 0


def _print_summary(folder: Path, as_json: bool) -> None:
    if as_json:
        emit(read_summary(folder))


# --- after a run --------------------------------------------------------------------------------------------------


def evaluate(run: Path, arguments: EvaluateArguments) -> int:
    """Judges the weights that a run left, on its evaluation sets."""
    config = _for_evaluation(_for_whole_weights(to_rebuild(loaded_config(run), trusted=arguments.trust_run)))
    if not config.data.evaluation:
        why = f"the run has no evaluation sets; add one to {run}/config.yaml, such as {_EVALUATION_SET}"
        raise ConfigError(Problem("", "data.evaluation", why))
    if arguments.ranks is not None:
        config = config.model_copy(update={"launch": config.launch.model_copy(update={"ranks": arguments.ranks})})
    with tempfile.TemporaryDirectory(prefix="lockstep-eval-") as folder:
        file = Path(folder, "evaluation.json")
        entry = partial(_evaluate_rank, config, run, arguments, file)
        if names_a_rank(os.environ):
            code = entry()
        else:
            ranks = choose_ranks(config.launch)
            code = launch(entry, ranks, config.launch, None, ahead=imports_ahead(config)).show()
        if arguments.json and file.exists():  # on the first rank, or by it
            emit({"run": str(run), "evaluation": json.loads(file.read_text(encoding="utf-8"))})
    return code


def _for_evaluation(config: Config) -> Config:
    """A training set that was handed over in Python isn't here, and isn't needed: an evaluation set takes its place."""
    config = _without_updates(config)
    sets = config.data.evaluation
    if config.data.train.kind != "given" or not sets or any(one.kind == "given" for one in sets.values()):
        return config
    data = config.data.model_copy(update={"train": next(iter(sets.values()))})
    return config.model_copy(update={"data": data})


def _without_updates(config: Config) -> Config:
    """An evaluation makes no update: an optimizer and a schedule that were handed over aren't needed."""
    optim, schedule = config.optim, config.schedule
    if optim.name == "given":
        optim = optim.model_copy(update={"name": "adamw"})
    if schedule.kind == "given":
        schedule = schedule.model_copy(update={"kind": "constant"})
    return config.model_copy(update={"optim": optim, "schedule": schedule})


def _for_whole_weights(config: Config) -> Config:
    """The weights that a run left are whole; DeepSpeed divides a model together with its optimizer alone."""
    strategy = "auto" if config.parallel.strategy == "deepspeed" else config.parallel.strategy
    degrees = {"data": "auto", "shard": "auto", "pipeline": 1, "context": 1, "tensor": 1}
    parallel = config.parallel.model_copy(update={"strategy": strategy, **degrees})
    return config.model_copy(update={"parallel": parallel})


def _evaluate_rank(config: Config, run: Path, arguments: EvaluateArguments, file: Path) -> int:
    """Prints what it finds; as JSON, it goes into `file`."""
    from lockstep.monitor.events import metrics_by_set

    given = UserObjects(trust_remote_code=arguments.trust_remote_code)
    with opened(config, given) as session:
        load_weights(components_of(session).sharding.bare, run)
        reports = session.evaluate()
        if components_of(session).world.rank == 0:
            for report in reports:
                figures = "  ".join(f"{name} {value:.4f}" for name, value in report.metrics.items())
                echo(f"{report.name}: {figures}  ({report.samples:,} samples in {report.seconds:.1f} s)")
            file.write_text(json.dumps(metrics_by_set(reports)), encoding="utf-8")
    return 0


def generate(run: Path, prompt: str, arguments: GenerateArguments) -> int:
    """Continues a prompt with the language model that a run left."""
    import torch

    from lockstep.models.generation import generate as continuations
    from lockstep.training.text import codec_of, context_of

    config = to_rebuild(loaded_config(run), trusted=arguments.trust_run)
    given = UserObjects(trust_remote_code=arguments.trust_remote_code)
    codec = codec_of(config)
    facts = facts_of_data(config, given)
    model = make_model(config, facts, given).eval()
    load_weights(model, run)
    tokens = continuations(
        model,
        codec.encode(prompt),
        arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        generator=torch.Generator().manual_seed(arguments.seed),
        context=context_of(facts),
    )
    text = codec.decode(list(tokens))
    if arguments.json:
        emit({"run": str(run), "prompt": prompt, "text": text})
    else:
        echo(prompt + text)
    return 0


def run_config(run: Path) -> Config:
    """The resolved config in a run's folder, to be looked at; secrets are hidden in it."""
    return loaded_config(run).config


def loaded_config(run: Path) -> LoadedConfig:
    """The same, with whether this user has started the run."""
    from lockstep.config.loading import load

    file = RunFolder.open(run).config
    return load([file], environ={}, of_runs=[file])


# --- before a run -------------------------------------------------------------------------------------------------


def plan(loaded: LoadedConfig, recipe: str, arguments: PlanArguments) -> int:
    """What follows from a config, without starting a process or allocating the model."""
    from lockstep.models.build import sketch_model
    from lockstep.models.facts import parameter_facts
    from lockstep.plan.plan import Machine, as_json, describe, make_plan

    config, given = loaded.config, UserObjects(trust_remote_code=arguments.trust_remote_code)
    refuse_given(loaded)
    facts, notes = _facts_to_plan_by(config, given)
    model = sketch_model(config.model, facts, trust_remote_code=arguments.trust_remote_code)
    ranks = choose_ranks(config.launch)
    gpus = 0 if config.launch.device == "cpu" else count_gpus()
    memory = arguments.memory or memory_if_started(gpus, count_cores(), ranks)
    made = make_plan(config, ranks, facts, parameter_facts(model), Machine(memory=memory))
    made = replace(made, warnings=(*made.warnings, *notes))
    refuse_cuts(config, made.mesh, model)
    if arguments.json:
        emit(as_json(made))
    else:
        echo(f"{recipe}\n{describe(made)}")
    return 0


def _facts_to_plan_by(config: Config, given: UserObjects) -> tuple[DataFacts, list[str]]:
    """What the config tells of its data, or the data itself; and what a reader should know of it."""
    facts = facts_of_config(config)
    return (open_sources(config, given)[0].facts, []) if facts is None else (facts, [NOT_READ])


def deepspeed_config(loaded: LoadedConfig, *, trust_remote_code: bool) -> int:
    """Shows the DeepSpeed config that makes the same run without Lockstep; on stderr, what no config can say."""
    from lockstep.config.deepspeed import plain_config
    from lockstep.models.facts import describe_model
    from lockstep.plan.plan import derived_for_deepspeed, make_plan

    config, given = loaded.config, UserObjects(trust_remote_code=trust_remote_code)
    refuse_given(loaded)
    if config.parallel.strategy != "deepspeed":
        why = f"{config.parallel.strategy}, so that DeepSpeed has no part in it; write deepspeed"
        raise ConfigError(Problem("", "parallel.strategy", why))
    facts, _ = _facts_to_plan_by(config, given)
    parameters = describe_model(config.model, facts, trust_remote_code=trust_remote_code)
    made = make_plan(config, choose_ranks(config.launch), facts, parameters)
    echo(json.dumps(plain_config(config, derived_for_deepspeed(made)), indent=2))
    for note in _beyond_deepspeed(config, len(made.groups)):
        echo(f"note: {note}", file=sys.stderr)
    return 0


def _beyond_deepspeed(config: Config, groups: int) -> list[str]:
    schedule = config.schedule
    notes = ["a script's usual loss is the mean of each micro-batch, Lockstep's the mean over all targets of an update"]
    if groups > 1:
        notes.append(
            f"the optimizer has {groups} groups of parameters (optim.decay, optim.rules): make them in the script"
        )
    if schedule.kind != "constant" or schedule.warmup_steps or schedule.warmup_ratio:
        notes.append("DeepSpeed's schedules run two updates behind Lockstep's; a constant rate without warm-up doesn't")
    return notes

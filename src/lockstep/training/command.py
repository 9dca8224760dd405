"""What the verbs train, eval, generate and plan do.

this process is a rank already (torchrun, ...)  --> be it
otherwise                                       --> make the folder, start the ranks, pass on their exit code
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.ranks import names_a_rank
from lockstep.launch.devices import choose_ranks
from lockstep.launch.local import launch
from lockstep.monitor.folder import RunFolder, is_finished, read_summary
from lockstep.training.assemble import Given, make_model, open_sources
from lockstep.training.job import Job, make_folder, opened, run_job

if TYPE_CHECKING:
    from lockstep.config.loading import Loaded
    from lockstep.config.schema import Config
    from lockstep.core.arguments import EvaluateArguments, GenerateArguments, PlanArguments, TrainArguments


def train(loaded: Loaded, recipe: str, arguments: TrainArguments) -> int:
    """Returns the exit code."""
    config, given = loaded.config, Given(trust_remote_code=arguments.trust_remote_code)
    refuse_given(config)
    folder = config.run.folder
    if folder is not None and is_finished(folder):
        print(f"the run in {folder} is finished; give run.folder another name to train again")
        _print_summary(Path(folder), arguments.json)
        return 0
    if names_a_rank(os.environ):
        finished = run_job(Job(config, recipe, given=given))
        if os.environ["RANK"] == "0":
            _print_summary(finished.folder, arguments.json)
        return 0
    place, code = launch_job(Job(config, recipe, given=given), config.launch.ranks)
    if code == 0:
        _print_summary(place, arguments.json)
    return code


def launch_job(job: Job, ranks: int | Literal["auto"]) -> tuple[Path, int]:
    """Makes the run's folder and runs the job on so many ranks of this machine; returns the folder and exit code."""
    number = choose_ranks(job.config.launch) if ranks == "auto" else ranks
    folder = make_folder(job.config, job.recipe)
    try:
        code = launch(partial(_be_a_rank, job, folder.path), number, job.config.launch, folder.logs)
    finally:
        folder.release()
    return folder.path, code


def refuse_given(config: Config) -> None:
    """From the command line nobody can hand over an object."""
    kinds = {"model": config.model.kind, "objective": config.objective.kind, "data.train": config.data.train.kind}
    problems = [
        Problem("", f"{key}.kind", "`given` is an object handed over in Python; from a config, name a `custom` one")
        for key, kind in kinds.items()
        if kind == "given"
    ]
    if problems:
        raise ConfigError(problems)


def _be_a_rank(job: Job, folder: Path) -> int:
    run_job(Job(job.config, job.recipe, folder, job.given))
    return 0


def _print_summary(folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(read_summary(folder)), flush=True)


# --- after a run --------------------------------------------------------------------------------------------------


def evaluate(run: Path, arguments: EvaluateArguments) -> int:
    """Judges the weights that a run left, on its evaluation sets."""
    config = run_config(run)
    if arguments.ranks is not None:
        config = config.model_copy(update={"launch": config.launch.model_copy(update={"ranks": arguments.ranks})})
    if names_a_rank(os.environ):
        return _evaluate_rank(config, run, arguments)
    return launch(partial(_evaluate_rank, config, run, arguments), choose_ranks(config.launch), config.launch, None)


def _evaluate_rank(config: Config, run: Path, arguments: EvaluateArguments) -> int:
    from lockstep.monitor.summary import by_set
    from lockstep.training.weights import load_weights

    given = Given(trust_remote_code=arguments.trust_remote_code)
    with opened(config, given) as session:
        load_weights(session.rooms.sharding.bare, run)
        reports = session.evaluate()
        if session.rooms.world.rank == 0:
            for report in reports:
                figures = "  ".join(f"{name} {value:.4f}" for name, value in report.metrics.items())
                print(f"{report.name}: {figures}  ({report.samples:,} samples in {report.seconds:.1f} s)")
            if arguments.json:
                print(json.dumps({"run": str(run), "evaluation": by_set(reports)}), flush=True)
    return 0


def generate(run: Path, prompt: str, arguments: GenerateArguments) -> int:
    """Continues a prompt with the language model that a run left."""
    import torch

    from lockstep.models.generation import generate as continuations
    from lockstep.training.text import codec_of, context_of
    from lockstep.training.weights import load_weights

    config, given = run_config(run), Given(trust_remote_code=arguments.trust_remote_code)
    codec = codec_of(config)
    facts = open_sources(config, given)[0].facts
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
        print(json.dumps({"run": str(run), "prompt": prompt, "text": text}))
    else:
        sys.stdout.write(prompt + text + "\n")
    return 0


def run_config(run: Path) -> Config:
    """The resolved config in a run's folder."""
    from lockstep.config.loading import load

    return load([RunFolder.open(run).config], environ={}).config


# --- before a run -------------------------------------------------------------------------------------------------


def plan(loaded: Loaded, recipe: str, arguments: PlanArguments) -> int:
    """What follows from a config, without starting a process or allocating the model."""
    from lockstep.models.facts import describe_model
    from lockstep.plan.plan import as_json, describe, make_plan

    config, given = loaded.config, Given(trust_remote_code=arguments.trust_remote_code)
    refuse_given(config)
    source, _ = open_sources(config, given)
    parameters = describe_model(config.model, source.facts, trust_remote_code=arguments.trust_remote_code)
    made = make_plan(config, choose_ranks(config.launch), source.facts, parameters)
    print(json.dumps(as_json(made)) if arguments.json else f"{recipe}\n{describe(made)}")
    return 0

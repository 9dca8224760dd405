"""The command line that `lockstep launch` runs elsewhere, checked as by its verb; for a sweep, one for each run."""

from __future__ import annotations

import itertools
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.cli.arguments import HOST_FLAGS, Prepared
from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError, Failure, Problem
from lockstep.core.jobs import JOB_FILES, JobCommand
from lockstep.core.secrets import HIDDEN
from lockstep.monitor.environment import hide_arguments

if TYPE_CHECKING:
    from lockstep.config.schema import Config

VERBS = {"train": "train", "eval": "evaluate", "verify": "verify", "plan": "plan", "doctor": "doctor"}
"""Verbs that a launcher can run -> their modules, each with a function `prepare`."""
OF_JOBS = {
    "status": "print the state of a job",
    "follow": "print a job's output until it has ended, and return its exit code",
    "cancel": "stop a job for good",
    "stop": "stop a job for good, as cancel",
}
"""Commands about a job, which take the place of VERB."""
WorldSize = Callable[[int | None], int | None]
"""Ranks of each node, if given -> ranks on all nodes, if known."""
_MOST_RUNS = 1000  # of a sweep: more are a mistake


def job_command(
    where: str, sweep: Sequence[str], typed: Sequence[str], words: Sequence[str], world_size: WorldSize
) -> JobCommand:
    """Check the command line; return it with what a launcher needs to know. Raises ConfigError."""
    _refuse_secrets([*words, *sweep])
    prepared = _prepared(words, world_size)
    folder = prepared.folder or _free_folder(prepared.name)
    runs = _sweep(sweep, words, prepared, folder, world_size)
    needs_name = prepared.starts_run and prepared.folder is None and not runs
    naming = (f"run.folder={folder}",) if needs_name else ()
    restart = words[1:] if prepared.restart is None else prepared.restart
    config = prepared.config
    ranks = config.launch.ranks if config is not None and prepared.starts_run else prepared.ranks
    return JobCommand(
        words=(*words, *naming),
        restart_words=(words[0], *restart, *naming),
        typed=shlex.join(["lockstep", "launch", where, *typed]),
        name=Path(prepared.name).name,
        folder=folder.absolute() / JOB_FILES,
        ranks=ranks if isinstance(ranks, int) else None,
        nodes=prepared.nodes,
        starts_run=prepared.starts_run,
        sweep=runs,
        state_bytes=_state_bytes(prepared),
        run_folder=folder,
        checkpoint_folder=config.checkpoint.folder if config is not None else None,
        paths=_paths_here(words[1:], config, folder),
        in_folder=config is None or config.checkpoint.storage is None,
    )


def _paths_here(words: Sequence[str], config: Config | None, folder: Path) -> tuple[str, ...]:
    """Return the texts of the arguments and the config that are paths of files and folders here, without the run's."""
    texts = [text for word in words for text in (word, word.partition("=")[2])]
    own = {str(folder)}
    if config is not None:
        texts += _texts(config.model_dump())
        own |= {config.run.folder or "", config.checkpoint.folder or ""}
    named = [text for text in dict.fromkeys(texts) if text and _exists(text)]
    return tuple(text for text in named if not {text, str(Path(text).expanduser())} & own)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long for a path, a null byte, an unknown home
        return False


def _state_bytes(prepared: Prepared) -> int | None:
    """Return about how large a checkpoint is; None if the config doesn't show it, or the model can't be built here."""
    config = prepared.config
    if config is None or not prepared.starts_run:
        return None
    from lockstep.core.records import DataFacts
    from lockstep.plan.placement import checkpoint_bytes
    from lockstep.plan.stated_facts import model_states_sizes

    if not model_states_sizes(config.model):
        return None
    from lockstep.models.build import describe_model

    try:
        facts = DataFacts(config.batch.global_size, None)
        parameters = describe_model(config.model, facts, trust_remote_code=prepared.trust_remote_code)
    except Failure:  # a login node may lack what the nodes have; there it would be reported
        return None
    return checkpoint_bytes(config, parameters)


def _prepared(words: Sequence[str], world_size: WorldSize) -> Prepared:
    verb, *arguments = words
    if verb not in VERBS:
        raise ConfigError(f"lockstep launch can't run {verb!r}; {did_you_mean(verb, [*VERBS, *OF_JOBS])}")
    _refuse_host_flags(arguments)
    prepared = cast("Prepared", import_module(f"lockstep.cli.{VERBS[verb]}").prepare(arguments))
    _check_ranks(prepared, world_size)
    return prepared


def _refuse_secrets(words: Sequence[str]) -> None:
    """Raise ConfigError for a value that a run's folder would hide: a job's files show its command line."""
    remedy = "give it to the launcher (--env NAME, --env-secret, a line of --setup), or write it into a config file"
    for before, word, public in zip(("", *words), words, hide_arguments(words), strict=False):
        if word != public:
            flag = public.partition("=")[0] if public.partition("=")[2] == HIDDEN else before
            raise ConfigError(Problem(flag, "", f"its value would be in the files of the job; {remedy}"))


def _refuse_host_flags(arguments: Sequence[str]) -> None:
    """Raise ConfigError for flags about the rendezvous: the launcher sets them."""
    for word in arguments:
        key = word.partition("=")[0].removeprefix("--").removeprefix("launch.").replace("-", "_")
        if key in HOST_FLAGS and word.startswith(("--", "launch.")):
            flag = word.partition("=")[0]
            where = "give it before the verb" if key == "nodes" else "leave it out"
            raise ConfigError(Problem(flag, "", f"how the hosts meet is the launcher's part; {where}"))


def _check_ranks(prepared: Prepared, world_size: WorldSize) -> None:
    config = prepared.config
    if config is None or not prepared.starts_run:
        return
    total = world_size(None if config.launch.ranks == "auto" else config.launch.ranks)
    if total is not None:
        from lockstep.plan.plan import check_on_ranks

        check_on_ranks(config, total)


def _free_folder(name: str) -> Path:
    stem = Path("runs", f"{Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    names = itertools.chain([stem], (Path(f"{stem}-{number}") for number in itertools.count(2)))
    return next(path for path in names if not path.exists())


def _sweep(
    sweep: Sequence[str], words: Sequence[str], prepared: Prepared, folder: Path, world_size: WorldSize
) -> tuple[tuple[str, ...], ...]:
    if not sweep:
        return ()
    if not prepared.starts_run:
        raise ConfigError(f"--sweep trains several runs, and {words[0]} trains none")
    values: dict[str, list[str]] = {}
    for text in sweep:
        key, equals, listed = text.partition("=")
        each = listed.split(",")
        if not equals or not key or "" in each:
            raise ConfigError(Problem("--sweep", "", f"{text!r} is not KEY=A,B, such as optim.lr=0.1,0.01"))
        if key == "run.folder":
            raise ConfigError(Problem("--sweep", "", "each run has its own folder below the sweep's"))
        if key in values or len({*each}) < len(each):
            raise ConfigError(Problem("--sweep", "", f"{key} or one of its values is given twice; give each once"))
        values[key] = [f"{key}={value}" for value in each]
    if math.prod(map(len, values.values())) > _MOST_RUNS:
        raise ConfigError(Problem("--sweep", "", f"these are more than {_MOST_RUNS:,} runs; give fewer values"))
    combinations = enumerate(itertools.product(*values.values()))
    runs = [(*combination, f"run.folder={folder}/{number}") for number, combination in combinations]
    configs = [_prepared((*words, *added), world_size).config for added in runs]
    places = [config.checkpoint.folder for config in configs if config is not None and config.checkpoint.folder]
    if len({*places}) < len(places):
        message = "is the same for several runs of the sweep; leave it out, and each saves in its own folder"
        raise ConfigError(Problem("", "checkpoint.folder", message))
    return tuple(runs)

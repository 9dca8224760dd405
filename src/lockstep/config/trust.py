"""Decides whether a config may be acted on, before anything is imported, set, opened or written.

a file of the user, overrides, Python     yes
a run that this user has started here     yes; the values hidden in its config are restored
any other run                             what reaches out of its folder is listed; --trust-run allows it
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.known_runs import RUN_ID, Keys, KnownRun, configs_of, digest_of, remember, why_forgetful
from lockstep.config.loading import LoadedConfig, validate
from lockstep.config.schema import GIVEN, Config
from lockstep.config.shape import ANYTHING, ValueShape, fields
from lockstep.config.writing import hidden_in, plain_yaml, to_plain, to_public
from lockstep.core.errors import ConfigError, Problem, refuse
from lockstep.core.extensions import locate
from lockstep.core.secrets import is_harmless_variable, is_hidden
from lockstep.core.terminal import plain_line
from lockstep.core.tracking import TRACKERS
from lockstep.stores.addresses import is_address
from lockstep.strategies.section import Section

_MOST_CONFIGS = 4  # per run: resuming it under other overrides makes another


# --- what reaches out of a run's folder ---------------------------------------------------------------------------


def _asks(path: Keys, value: object) -> str | None:
    return "" if isinstance(value, str) else None


def _nothing(path: Keys, value: object) -> None:
    """Accept names inside the run, and text that is only shown."""


def _word(path: Keys, value: object) -> str | None:
    """Accept what can't be a path or an address."""
    return "" if isinstance(value, str) and ("/" in value or value.startswith(("~", ".."))) else None


def _code(path: Keys, value: object) -> str | None:
    return None if value == GIVEN else ""


def _strategy(path: Keys, value: object) -> str | None:
    return "" if ":" in str(value) else None


def _file(path: Keys, value: object) -> str:
    return "it is outside of the run's folder"


def _variable(path: Keys, value: object) -> str | None:
    return None if is_harmless_variable(path[-1]) else "a variable can make a process run code"


def _address(path: Keys, value: object) -> str | None:
    return None if value in ("127.0.0.1", "::1", "localhost") else "other hosts can connect"


_LOADS = re.compile(r"auto_map|custom_pipelines|kernel_config|use_kernels|\w*backbone\w*|\w*name_or_path")


def _architecture(path: Keys, value: object) -> str | None:
    """Accept numbers and words; an `attn_implementation` with a / is a repository of kernels."""
    is_word = not isinstance(value, str) or re.fullmatch(r"[\w., -]*", value) is not None
    return None if is_word and not any(map(_LOADS.fullmatch, path)) else "transformers loads by it"


_RULES: Mapping[Callable[[Keys, object], str | None], str] = {
    _code: "model.target objective.target optim.target data.train.target data.train.collate checkpoint.storage.target "
    "monitor.trackers.target monitors.target transforms.target",
    _asks: "model.arguments.* objective.arguments.* optim.arguments.* data.train.arguments.* monitors.arguments.* "
    "evaluation.metrics.arguments.* evaluation.generate.metrics.arguments.* "
    "checkpoint.storage.arguments.* monitor.trackers.arguments.* transforms.arguments.* recovery.notice "
    "launch.rendezvous launch.interface",
    _strategy: "parallel.strategy",
    _architecture: "model.architecture.*",
    _variable: "launch.environment.*",
    _file: "model.init_from model.pretrained objective.companion data.train.name data.train.tokenizer "
    "data.train.chat_template data.train.folder run.folder checkpoint.folder "
    "parallel.deepspeed.config",  # or a name on the hub, or an address
    _address: "monitor.prometheus.address",
    _word: "model.revision data.train.revision launch.job_id data.train.split data.train.configuration "
    "parallel.deepspeed.config.* parallel.tensor_parallel.plan.*",
    _nothing: "description evaluation.prompt evaluation.metrics.kind evaluation.metrics.name "
    "evaluation.generate.metrics.kind evaluation.generate.metrics.name "
    "model.adapter.targets model.adapter.modules_to_save model.adapter.feedforward_modules "
    "model.adapter.exclude_modules "
    "model.freeze model.inputs.* model.classes data.train.text data.train.text_pair data.train.image "
    "data.train.label data.train.rejected data.train.desirable data.train.messages data.train.tools data.train.system "
    "data.train.system_column "
    "optim.rules.match parallel.pipeline_parallel.split parallel.fsdp.wrap checkpoint.best "
    "memory.activation_checkpointing.modules monitor.early_stopping.metric schedule.plateau.metric profile.steps "
    "launch.nodes",
}
REACHES = {key: rule for rule, keys in _RULES.items() for key in keys.split()}
"""Each key of the schema that takes a text, with the rule for its values: None, or a remark if they reach out.

`*` stands for a free name, and `data.train` for the evaluation sets, too.
"""
_WRITTEN_TO = ("run.folder", "checkpoint.folder")


@dataclass(frozen=True, slots=True)
class Reach:
    """A value of a config that reaches out of the run's folder.

    Attributes:
        path: Of its key, with the numbers of list items.
        key: As in `REACHES`.
        remark: May be empty.
    """

    path: Keys
    key: str
    value: Any
    remark: str

    @property
    def place(self) -> str:
        """The key, for messages."""
        return ".".join(self.path).replace(".[", "[")


def reaching(config: Config, run: Path | None = None) -> Iterator[Reach]:
    """Yield what reaches out of a run's folder; None: as if every path did."""
    for path, key, value in _texts(config, ANYTHING, (), ""):
        rule = REACHES.get(key, _asks)
        if rule is _file and run is not None and not outside(value, run):
            continue
        if (remark := rule(path, value)) is not None:
            yield Reach(path, key, value, remark)


def code_in(config: Config) -> dict[str, str]:
    """Return the target of each key that names code to import."""
    code = [each for each in reaching(config) if REACHES.get(each.key) in (_code, _strategy)]
    return {
        demand.place: demand.value
        for demand in code
        if demand.key != "monitor.trackers.target" or demand.value not in TRACKERS
    }


def outside(place: str, run: Path) -> bool:
    """Return whether a path or address is outside of the run's folder."""
    return is_address(place) or not Path(place).expanduser().absolute().resolve().is_relative_to(run.resolve())


def _texts(value: Any, at: ValueShape, path: Keys, key: str) -> Iterator[tuple[Keys, str, Any]]:
    """Yield path, key and value of all that isn't a number, a switch or a word of a fixed list."""
    if isinstance(value, Section):
        for name, inner in value:
            shape = fields(type(value)).get(name, ANYTHING)
            yield from _texts(inner, shape, (*path, name), f"{key}.{name}" if key else name)
    elif isinstance(value, Mapping):
        below = "data.train" if key == "data.evaluation" else f"{key.removesuffix('.*')}.*"
        for name, inner in value.items():
            yield from _texts(inner, at.values or ANYTHING, (*path, str(name)), below)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, at.items or ANYTHING, (*path, f"[{number}]"), key)
    elif value is not None and (at.text or at.anything or key in REACHES):
        yield path, key, value


# --- approval -----------------------------------------------------------------------------------------------------


def approved(loaded: LoadedConfig, *, trusted: bool, writes: bool = False) -> Config:
    """Return the config, if all of it may be used.

    Args:
        trusted: The user trusts the author of the run.
        writes: A run will be written to the config's folders.

    Raises:
        ConfigError: The run is foreign and reaches out of its folder; or a hidden value is unknown.
    """
    if reasons := [] if trusted else list(_unapproved(loaded, writes)):
        shown = "".join(f"\n  {place}: {plain_line(demand)}" for place, demand in reasons)
        runs = ", ".join(dict.fromkeys(plain_line(run.name) for run in loaded.runs))
        why = why_forgetful()
        whose = f"of a run that isn't known as yours ({why})" if why else "of a run that you have not started here"
        raise ConfigError(
            f"{runs} is the config {whose}, and it runs code or reaches out of the run's folder:{shown}\n"
            "Pass --trust-run if you trust the author of the run (in Python: trust_run=True)"
        )
    return _with_hidden_values(loaded)


def _unapproved(loaded: LoadedConfig, writes: bool) -> Iterator[tuple[str, str]]:
    for run in loaded.runs:
        code = code_in(loaded.config)
        for demand in reaching(loaded.config, run.run):
            if not run.holds(_origin(loaded, demand.path)) or (demand.key in _WRITTEN_TO and not writes):
                continue
            if run.known is None:
                yield demand.place, f"{demand.value} ({demand.remark})" if demand.remark else str(demand.value)
            elif demand.place in code and (moved := _moved(demand.value, run.known)):
                yield demand.place, moved


def _origin(loaded: LoadedConfig, path: Keys) -> str | None:
    keys = (".".join(path[:end]) for end in range(len(path), 0, -1))
    return next((loaded.origins[key] for key in keys if key in loaded.origins), None)


def _moved(target: str, known: KnownRun) -> str | None:
    """Return the message for code that has moved since this user started the run."""
    then, now = known.code.get(target, ""), locate(target)
    return f"{target} (it was {then or 'not found'} when you started the run, and is {now})" if then != now else None


_VARIABLES = ("launch", "environment")


def _with_hidden_values(loaded: LoadedConfig) -> Config:
    """Return the config with its hidden values, without hidden variables that this process has."""
    known = {path: value for run in loaded.runs if run.known is not None for path, value in run.known.hidden.items()}
    unknown: list[Keys] = []

    def restored(value: Any, path: Keys) -> Any:
        if isinstance(value, dict):
            kept = {name: item for name, item in value.items() if not left_out(item, (*path, name))}
            return {name: restored(item, (*path, name)) for name, item in kept.items()}
        if isinstance(value, list):
            return [restored(item, (*path, str(number))) for number, item in enumerate(value)]
        if is_hidden(value) and path not in known:
            unknown.append(path)
        return known.get(path, value) if is_hidden(value) else value

    def left_out(value: Any, path: Keys) -> bool:
        return is_hidden(value) and path not in known and path[:-1] == _VARIABLES and path[-1] in os.environ

    plain = to_plain(loaded.config)
    values = restored(plain, ())
    refuse(map(_unknown, unknown))
    return loaded.config if values == plain else validate(values).config


def _unknown(path: Keys) -> Problem:
    key = ".".join(path)
    variable = f"set {path[2]} in your environment, or " if path[:2] == _VARIABLES else ""
    why = "is a secret; its value isn't kept in a run's folder and isn't known here"
    return Problem("", key, f"{why}; {variable}give --{key} VALUE")


# --- the record of a run ------------------------------------------------------------------------------------------


def recorded(config: Config, run_id: str) -> str:
    """Return the text of a run's config.yaml, without secrets, and record that this user has started the run."""
    public = to_public(config)
    if not RUN_ID.fullmatch(run_id):  # of a checkpoint that another program has written
        return plain_yaml(public)
    configs = configs_of(run_id)
    digest = digest_of(public)
    others = {name: record for name, record in configs.items() if name != digest}
    code = {target: locate(target) for target in code_in(config).values()}
    kept = {**others, digest: {"code": code, "hidden": [[list(path), value] for path, value in hidden_in(config)]}}
    if kept != configs:  # else a run that resumes is known already
        remember(run_id, {"configs": dict(list(kept.items())[-_MOST_CONFIGS:])})
    return plain_yaml(public)


def unremembered(config: Config, run: Path) -> list[str]:
    """Return the note that this start won't be known later, if the run will need that."""
    problem = why_forgetful()
    if problem is None or not (hidden_in(config) or any(reaching(config, run))):
        return []
    return [f"{problem}; nobody can know later that you have started this run, so resume its folder with --trust-run"]

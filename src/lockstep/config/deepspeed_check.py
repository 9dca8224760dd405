"""Checks a user's DeepSpeed config: what Lockstep's config also sets must agree, the rest is passed to DeepSpeed.

ds.json     {"train_batch_size": "auto", "gradient_clipping": 0.5, "zero_optimization": {"stage": 3, ...}, ...}
              filled in                    must equal optim.clip_norm    passed on, or refused by name
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.deepspeed_keys import DeepSpeedKey, deepspeed_keys, keys_of
from lockstep.config.reading import MOST_BYTES
from lockstep.core.closest import closest_match
from lockstep.core.errors import Problem, refuse
from lockstep.core.files import read_bounded

if TYPE_CHECKING:
    from lockstep.config.schema import Config, DeepSpeed, Schedule

AUTO = "auto"
_PLACE = "parallel.deepspeed.config"
_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OF_PLAN = (*_BATCH, "scheduler")
"""Keys that depend on the plan."""
_CURVES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OF_ONE_SCHEDULER = {"warmup_max_lr": "WarmupDecayLR", "cos_min_ratio": "WarmupCosineLR"}
"""Parameters with defaults that matter under one scheduler; all others matter under every one."""
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "zero_optimization": {"stage": 0},
    "zero_optimization.offload_optimizer": {"device": "none"},
    "zero_optimization.offload_param": {"device": "none"},
    **{key: {"enabled": False} for key in ("fp16", "bf16", "bfloat16")},
}
"""DeepSpeed's values for keys that a section leaves out."""


@dataclass(frozen=True, slots=True)
class Derived:
    """Numbers of a plan: steps of the whole run, if known, and trainable elements."""

    ranks: int
    micro_size: int
    accumulation: int
    steps: int | None
    trainable: int


@dataclass(frozen=True, slots=True)
class _Difference:
    """A key of the DeepSpeed config that isn't accepted, why, and Lockstep's settings that would accept it."""

    path: str
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def check_alone(config: Config) -> None:
    """Check what doesn't depend on the number of ranks or the model. Raises ConfigError."""
    check(config, Derived(ranks=1, micro_size=1, accumulation=1, steps=None, trainable=0), later=_OF_PLAN)


def check(config: Config, derived: Derived, later: Sequence[str] = ()) -> None:
    """Check the DeepSpeed config against Lockstep's, except for the keys in `later`.

    Raises:
        ConfigError: Lists what contradicts, isn't accepted, or isn't a key of DeepSpeed's.
    """
    given, problems = read_deepspeed(config.parallel.deepspeed)
    problems += [Problem("", f"parallel.{key}", why) for key, why in _wrong_options(config)]
    values = {key: value for key, value in given.items() if key not in later}
    problems += [Problem("", f"{_PLACE}.{each.path}", each.why) for each in _differences(config, derived, "", values)]
    refuse(problems)


def left_to_deepspeed(config: Config, written: Collection[str]) -> dict[str, Any]:
    """Return the DeepSpeed config's values for Lockstep's keys that aren't in `written`."""
    derived = Derived(ranks=1, micro_size=1, accumulation=1, steps=10**9, trainable=0)  # any ratio of them is a warmup
    given = {key: value for key, value in read_deepspeed(config.parallel.deepspeed)[0].items() if key not in _BATCH}
    settings = [setting for each in _differences(config, derived, "", given) for setting in each.settings.items()]
    return {key: value for key, value in settings if key not in written and key != "run.steps"}


def read_deepspeed(section: DeepSpeed) -> tuple[Mapping[str, Any], list[Problem]]:
    """Return the DeepSpeed config, or the problem with its file."""
    if section.config is None or isinstance(section.config, Mapping):
        return section.config or {}, []
    path = Path(section.config)
    try:
        content = json.loads(read_bounded(path, MOST_BYTES))
    except OSError as error:
        return {}, [Problem("", _PLACE, f"can't read {path}: {error.strerror or error}")]
    except (ValueError, RecursionError) as error:
        return {}, [Problem("", _PLACE, f"{path} is not JSON: {error}")]
    return (content, []) if isinstance(content, dict) else ({}, [Problem("", _PLACE, f"{path} is not a JSON object")])


def warmup_steps(schedule: Schedule, steps: int | None) -> int:
    if schedule.warmup_ratio is not None:
        return round(schedule.warmup_ratio * (steps or 0))
    return schedule.warmup_steps or 0


def warmup_num_steps(schedule: Schedule, steps: int | None) -> int:
    """Return DeepSpeed's number for this warmup: it counts from a step of rate 0."""
    return warmup_steps(schedule, steps) + (2 if schedule.warmup_type == "log" else 1)


# --- the comparison -----------------------------------------------------------------------------------------------


def _wrong_options(config: Config) -> Iterator[tuple[str, str]]:
    section, compute = config.parallel.deepspeed, config.precision.compute
    stage, offload = section.zero_stage, section.offload_optimizer
    if config.parallel.ddp.find_unused_parameters:
        why = "DeepSpeed gives a parameter that isn't used a gradient of zero; write false, or take ddp"
        yield "ddp.find_unused_parameters", why
    if offload != "none" and stage == 0:
        yield "deepspeed.offload_optimizer", f"{offload} requires zero_stage 1, 2 or 3, and it is 0"
    if section.offload_param != "none" and stage != 3:
        yield "deepspeed.offload_param", f"{section.offload_param} requires zero_stage 3, and it is {stage}"
    if section.bf16_weights and compute != "bf16":
        why = f"true, but precision.compute is {compute}; write `precision.compute: bf16`"
        yield "deepspeed.bf16_weights", why
    if section.bf16_weights and stage < 2:
        yield "deepspeed.bf16_weights", f"true requires zero_stage 2 or 3, and it is {stage}"


def _differences(config: Config, derived: Derived, path: str, given: Mapping[str, Any]) -> Iterator[_Difference]:
    values = {**_LEFT_OUT.get(path, {}), **given}
    is_off = path == "fp16" and values["enabled"] is not True
    is_off = is_off and not (values["enabled"] == AUTO and config.precision.compute == "fp16")
    unused = "pin_memory" if values.get("device") == "none" else ""
    for name, value in values.items():
        key = f"{path}.{name}".strip(".")
        row = deepspeed_keys().get(key)
        if row is None:
            near = closest_match(name, keys_of(path))
            meant = f"did you mean {near}?" if near else "see the list of keys in DeepSpeed's documentation"
            yield _Difference(key, f"DeepSpeed has no such key; {meant}")
        elif row.rule == "section":
            yield from _in_section(config, derived, key, value)
        elif value != AUTO and not (is_off and name != "enabled") and name != unused:
            yield from _in_value(config, derived, row, value, values)


def _in_section(config: Config, derived: Derived, key: str, value: Any) -> Iterator[_Difference]:
    absent = not value if key.endswith(".params") else value is None and ".offload_" in key
    if value == AUTO or absent:
        return
    if not isinstance(value, Mapping):
        yield _Difference(key, f"{_json(value)} is not a mapping")
        return
    mode = config.memory.activation_checkpointing.mode
    if key == "activation_checkpointing" and mode == "none" and not all(map(_is_off, value.values())):
        setting = "memory.activation_checkpointing.mode"
        why = f"DeepSpeed checkpoints activations only of models that call its functions, and {setting} is none"
        yield _Difference(key, f"{why}; write `{setting}: full`, or leave it out", {setting: "full"})
    if key == "scheduler" and (kind := value.get("type", AUTO)) not in (AUTO, *_CURVES):
        yield _Difference(f"{key}.type", f"{kind} is not supported; {', '.join(_CURVES)} are")
        return
    yield from _differences(config, derived, key, value)
    if key == "scheduler" and value.get("type") in _CURVES and (params := value.get("params", {})) != AUTO:
        yield from _in_defaults(config, derived, value["type"], params if isinstance(params, Mapping) else {})


def _in_defaults(config: Config, derived: Derived, scheduler: str, params: Mapping[str, Any]) -> Iterator[_Difference]:
    """Yield DeepSpeed's defaults for parameters that its scheduler leaves out, where they differ."""
    for name in keys_of("scheduler.params", ["same"]):
        row = deepspeed_keys()[f"scheduler.params.{name}"]
        immaterial = name == "warmup_type" and not warmup_steps(config.schedule, derived.steps)
        if row.value is None or name in params or immaterial or _OF_ONE_SCHEDULER.get(name, scheduler) != scheduler:
            continue
        if not _same(row.value, expected := _ours(config, derived, row)):
            key, default = row.ours, _text(row.value)
            why = f"not given, so DeepSpeed takes {default}, but {key} is {_text(expected)}"
            yield _Difference(row.path, f'{why}; write `{key}: {default}`, or "auto" here', {key: row.value})


def _in_value(
    config: Config, derived: Derived, row: DeepSpeedKey, value: Any, section: Mapping[str, Any]
) -> Iterator[_Difference]:
    if row.rule == "only" and value != row.value:
        write = f"write {_json(row.value)}, or leave it out"
        yield _Difference(row.path, f"{_json(value)} is not accepted: {row.note}; {write}")
    elif row.rule == "refuse" and not _is_off(value):
        yield _Difference(row.path, f"{row.note}; leave it out")
    elif row.path.endswith("_persistence_threshold") and not is_number_of_elements(value):
        yield _Difference(row.path, f"{_json(value)} is not a whole number of 0 or more")
    elif row.path == "zero_allow_untested_optimizer" and not value and config.optim.name not in ("adam", "adamw"):
        why = f"false, but DeepSpeed calls {config.optim.name} untested; write true, or leave it out"
        yield _Difference(row.path, why)
    elif row.rule == "same" and row.path not in ("zero_allow_untested_optimizer", "optimizer.params.adam_w_mode"):
        expected, meant = _ours(config, derived, row), _meant(config, derived, row, value, section)
        if row.path.endswith(".device") and meant not in ("cpu", "none"):
            yield _Difference(row.path, f"{_json(value)} is not supported; write cpu")
        elif row.path == "optimizer.type" and meant not in ("adamw", "adam", "sgd", "lion"):
            yield _Difference(row.path, f"{value} is not supported; `optim.name` is adamw, adam, sgd or lion")
        elif row.path == "gradient_accumulation_steps" and value != derived.accumulation and meant == expected:
            size = f"batch.global_size: {derived.micro_size * value * derived.ranks}"
            yield _Difference(row.path, f'{value}, but it is {derived.accumulation}; write `{size}`, or "auto" here')
        elif not _same(meant, expected):
            fact = f"{row.ours} is {_text(expected)}"
            if row.path == "gradient_accumulation_steps":
                fact = f"it is {derived.accumulation} here"
            why = f'{_json(value)}, but {fact}; write `{row.ours}: {_text(meant)}`, or "auto" here'
            yield _Difference(row.path, why, {row.ours: meant})


def _ours(config: Config, derived: Derived, row: DeepSpeedKey) -> Any:
    """Return the value that Lockstep's config, or its plan, has for a key."""
    of_plan = {
        "train_micro_batch_size_per_gpu": derived.micro_size,
        "gradient_accumulation_steps": derived.micro_size,
        "scheduler.params.warmup_num_steps": warmup_steps(config.schedule, derived.steps),
        "scheduler.params.total_num_steps": derived.steps,
    }
    return of_plan[row.path] if row.path in of_plan else reduce(getattr, row.ours.split("."), config)


def _meant(config: Config, derived: Derived, row: DeepSpeedKey, value: Any, section: Mapping[str, Any]) -> Any:
    """Return a value of the DeepSpeed config as Lockstep's key has it."""
    ours, compute = _ours(config, derived, row), config.precision.compute
    match row.path:
        case "optimizer.type":  # DeepSpeed's Adam is AdamW unless `adam_w_mode` is false
            params = section.get("params")
            coupled = isinstance(params, Mapping) and params.get("adam_w_mode", True) not in (True, AUTO)
            return "adamw" if str(value).lower() == "adam" and not coupled else str(value).lower()
        case "scheduler.type":
            return _CURVES[value]
        case "fp16.enabled" | "bf16.enabled" | "bfloat16.enabled":
            dtype = "fp16" if row.path.startswith("fp16") else "bf16"
            return ours if value == (compute == dtype) else dtype if value else "fp32"
        case "gradient_clipping":
            return value or None
        case "fp16.initial_scale_power":
            return 2.0 ** (value if _is_number(value) and abs(value) < 1000 else 0)
        case "gradient_accumulation_steps":
            if value == derived.accumulation or not isinstance(value, int) or value <= 0:
                return ours if value == derived.accumulation else value
            return -(-config.batch.global_size // (derived.ranks * value))
        case "scheduler.params.warmup_num_steps":
            return ours if value == warmup_num_steps(config.schedule, derived.steps) else value
    return value


def _is_off(value: Any) -> bool:
    return not value or value == AUTO or (isinstance(value, Mapping) and value.get("enabled") is False)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    if _is_number(first) and _is_number(second):
        return math.isclose(first, second, rel_tol=1e-9)
    return bool(first == second)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def is_number_of_elements(value: object) -> bool:
    """Return whether it is a whole number of 0 or more, such as 1e5."""
    if isinstance(value, float):
        return value >= 0 and value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

"""Checks a user's DeepSpeed config: what Lockstep's config also states must agree, the rest is passed to DeepSpeed.

    ds.json     {"train_batch_size": "auto", "gradient_clipping": 0.5, "zero_optimization": {"stage": 3, ...}, ...}
                        |                          |                            |
                  filled in by `deepspeed`   compared with optim.clip_norm    passed on, or refused by name
                                             and refused if it differs

`deepspeed_keys` has the keys, with what happens to each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.deepspeed_keys import DeepSpeedKey, deepspeed_keys, keys_of
from lockstep.config.reading import MOST_BYTES
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.files import read_bounded

if TYPE_CHECKING:
    from lockstep.config.schema import Config, DeepSpeed, Parallel, Schedule

AUTO = "auto"
_PLACE = "parallel.deepspeed.config"
_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_RANK_DEPENDENT = (*_BATCH, "scheduler")
"""Keys whose values depend on the plan."""
_CURVES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OF_ONE_SCHEDULER = {"warmup_max_lr": "WarmupDecayLR", "cos_min_ratio": "WarmupCosineLR"}
"""Parameters whose defaults matter under one scheduler; all others matter under every one."""


@dataclass(frozen=True, slots=True)
class Derived:
    """Numbers that a plan knows.

    Attributes:
        steps: Number of updates in the whole run; None if unknown in advance.
        trainable: Number of trainable elements.
    """

    ranks: int
    micro_size: int
    accumulation: int
    steps: int | None
    trainable: int


def check_alone(config: Config) -> None:
    """Check what depends neither on the number of ranks nor on the model. Raises ConfigError, as `check`."""
    check(config, Derived(ranks=1, micro_size=1, accumulation=1, steps=None, trainable=0), later=_RANK_DEPENDENT)


def check(config: Config, derived: Derived, later: Sequence[str] = ()) -> None:
    """Check the DeepSpeed config against Lockstep's.

    Args:
        later: Keys that are checked later.

    Raises:
        ConfigError: Lists what contradicts, isn't accepted, or isn't a key of DeepSpeed's.
    """
    given, problems = read_deepspeed(config.parallel.deepspeed)
    problems += _section_problems(config.parallel)
    problems += _bf16_problems(config)
    comparison = _Comparison(config, derived)
    comparison.section("", {key: given[key] for key in given if key not in later})
    problems += comparison.problems
    if problems:
        raise ConfigError(problems)


def left_to_deepspeed(config: Config, written: Collection[str]) -> dict[str, Any]:
    """Return the values that the DeepSpeed config has for keys that the user hasn't set, by these keys.

    Args:
        written: The dotted keys that the user has set.
    """
    section = config.parallel.deepspeed
    if section.config is None:
        return {}
    many = 10**9  # any ratio of them is a warmup
    comparison = _Comparison(config, Derived(ranks=1, micro_size=1, accumulation=1, steps=many, trainable=0))
    comparison.section("", {key: value for key, value in read_deepspeed(section)[0].items() if key not in _BATCH})
    return {key: value for key, value in comparison.settings.items() if key not in written and key != "run.steps"}


def read_deepspeed(section: DeepSpeed) -> tuple[Mapping[str, Any], list[Problem]]:
    """Return the DeepSpeed config, or the problem with its file."""
    if section.config is None or isinstance(section.config, Mapping):
        return section.config or {}, []
    path = Path(section.config)
    try:
        content = json.loads(read_bounded(path, MOST_BYTES))
    except RecursionError:
        return {}, [Problem("", _PLACE, f"{path} is nested too deep for a DeepSpeed config")]
    except OSError as error:
        return {}, [Problem("", _PLACE, f"can't read {path}: {error.strerror or error}")]
    except ValueError as error:
        return {}, [Problem("", _PLACE, f"{path} is not JSON: {error}")]
    if not isinstance(content, dict):
        return {}, [Problem("", _PLACE, f"{path} holds no JSON object, but a {type(content).__name__}")]
    return content, []


def warmup_steps(schedule: Schedule, steps: int | None) -> int:
    if schedule.warmup_ratio is not None:
        return round(schedule.warmup_ratio * (steps or 0))
    return schedule.warmup_steps or 0


def warmup_num_steps(schedule: Schedule, steps: int | None) -> int:
    """Return DeepSpeed's number for this warmup: it counts from an update of rate 0."""
    return warmup_steps(schedule, steps) + (2 if schedule.warmup_type == "log" else 1)


# --- the comparison -----------------------------------------------------------------------------------------------


def _section_problems(parallel: Parallel) -> list[Problem]:
    """Return the problems of parallel.deepspeed itself, and of options that don't go with it."""
    section, problems = parallel.deepspeed, list[tuple[str, str]]()
    if parallel.ddp.find_unused_parameters:
        why = "DeepSpeed gives a parameter that isn't used a gradient of zero; write false, or take ddp"
        problems.append(("ddp.find_unused_parameters", why))
    if section.offload_optimizer == "nvme" and section.nvme_path is None:
        problems.append(("deepspeed.nvme_path", "null, but offload_optimizer is nvme; name a folder on a local disk"))
    if section.offload_optimizer == "nvme" and section.zero_stage in (1, 2):
        why = f"nvme requires zero_stage 3, and it is {section.zero_stage}; write `zero_stage: 3`, or take cpu"
        problems.append(("deepspeed.offload_optimizer", why))
    if section.offload_param != "none" and section.zero_stage != 3:
        why = f"{section.offload_param} requires zero_stage 3, and it is {section.zero_stage}"
        problems.append(("deepspeed.offload_param", why))
    if section.offload_optimizer != "none" and section.zero_stage == 0:
        why = f"{section.offload_optimizer} requires zero_stage 1, 2 or 3, and it is 0"
        problems.append(("deepspeed.offload_optimizer", why))
    return [Problem("", f"parallel.{key}", why) for key, why in problems]


def _bf16_problems(config: Config) -> list[Problem]:
    section, compute, key = config.parallel.deepspeed, config.precision.compute, "parallel.deepspeed.bf16_weights"
    if not section.bf16_weights:
        return []
    problems = []
    if compute != "bf16":
        problems.append(f"true, but precision.compute is {compute}; write `precision.compute: bf16`")
    if section.zero_stage < 2:
        problems.append(f"true requires zero_stage 2 or 3, and it is {section.zero_stage}")
    return [Problem("", key, problem) for problem in problems]


def _expected_values(config: Config, derived: Derived) -> dict[str, Any]:
    optim, schedule, zero, scale = config.optim, config.schedule, config.parallel.deepspeed, config.precision.loss_scale
    return {
        "train_batch_size": config.batch.global_size,
        "train_micro_batch_size_per_gpu": derived.micro_size,
        "gradient_accumulation_steps": derived.accumulation,
        "gradient_clipping": optim.clip_norm or 0.0,
        "dataloader_drop_last": config.data.drop_last,
        "optimizer.params.lr": optim.lr,
        "optimizer.params.betas": list(optim.betas),
        "optimizer.params.eps": optim.eps,
        "optimizer.params.weight_decay": optim.weight_decay,
        "optimizer.params.momentum": optim.momentum,
        "optimizer.params.nesterov": optim.nesterov,
        "scheduler.params.warmup_num_steps": warmup_steps(schedule, derived.steps),
        "scheduler.params.warmup_type": schedule.warmup_type,
        "scheduler.params.warmup_max_lr": optim.lr,
        "scheduler.params.total_num_steps": derived.steps,
        "scheduler.params.cos_min_ratio": schedule.final_ratio,
        "fp16.initial_scale_power": math.log2(scale.initial),
        "fp16.loss_scale_window": scale.growth_interval,
        "zero_optimization.stage": zero.zero_stage,
        "zero_optimization.offload_optimizer.device": zero.offload_optimizer,
        "zero_optimization.offload_optimizer.pin_memory": zero.pin_memory,
        "zero_optimization.offload_optimizer.nvme_path": zero.nvme_path,
        "zero_optimization.offload_param.device": zero.offload_param,
        "zero_optimization.offload_param.pin_memory": zero.pin_memory,
    }


class _Comparison:
    """Compares a DeepSpeed config with Lockstep's, key by key; collects problems in the order of the file.

    Attributes:
        settings: Values that would solve problems, by the keys of Lockstep's config.
    """

    def __init__(self, config: Config, derived: Derived) -> None:
        self.problems: list[Problem] = []
        self.settings: dict[str, Any] = {}
        self._config = config
        self._derived = derived
        self._expected = _expected_values(config, derived)

    def section(self, path: str, values: Mapping[str, Any]) -> None:
        """Compare the keys under `path`."""
        fp16 = values.get("enabled", False)
        enabled = path != "fp16" or fp16 is True or (fp16 == AUTO and self._config.precision.compute == "fp16")
        device = values.get("device", "none")
        offloads = device != "none"
        unused = {"pin_memory", "nvme_path"} if not offloads else {"nvme_path"} if device != "nvme" else set[str]()
        if path == "zero_optimization" and "stage" not in values:
            self._agrees(deepspeed_keys()[f"{path}.stage"], 0)
        if path in ("fp16", "bf16", "bfloat16") and "enabled" not in values:
            self._precision(f"{path}.enabled", False)
        for name, value in values.items():
            key = f"{path}.{name}" if path else name
            row = deepspeed_keys().get(key)
            if row is None:
                near = closest_match(name, keys_of(path))
                meant = f"did you mean {near}?" if near else "see the list of keys in DeepSpeed's documentation"
                self._add(key, f"DeepSpeed has no such key; {meant}")
            elif row.rule == "section":
                self._section(key, value)
            elif value != AUTO and (enabled or name == "enabled") and name not in unused:
                self._value(row, name, value, values)
            if row is not None and row.rule == "nvme" and device == "nvme" and value not in (False, None):
                self._add(key, f"{row.note}; leave it out")

    def _section(self, key: str, value: Any) -> None:
        absent = not value if key.endswith(".params") else value is None and ".offload_" in key
        if value == AUTO or absent:
            return None
        if key == "zero_optimization" and isinstance(value, bool):
            return self._add(key, f'{_json(value)} is an old spelling; write {{"stage": {int(value)}}}')
        if not isinstance(value, Mapping):
            return self._add(key, f"{_json(value)} is not a mapping")
        if ".offload_" in key and "device" not in value:
            self._agrees(deepspeed_keys()[f"{key}.device"], "none")
        mode = self._config.memory.activation_checkpointing.mode
        if key == "activation_checkpointing" and mode == "none" and not all(map(_is_off, value.values())):
            self.settings["memory.activation_checkpointing.mode"] = "full"
            self._add(
                key,
                "DeepSpeed checkpoints activations only of models that call its functions, and "
                "memory.activation_checkpointing.mode is none; write `memory.activation_checkpointing.mode: full`, or "
                "leave it out",
            )
        if key == "scheduler" and (kind := value.get("type", AUTO)) not in (AUTO, *_CURVES):
            return self._add(f"{key}.type", f"{kind} is not supported; {', '.join(_CURVES)} are")
        self.section(key, value)
        if key == "scheduler" and (params := value.get("params", {})) != AUTO:
            self._defaults(value.get("type"), params if isinstance(params, Mapping) else {})
        return None

    def _value(self, row: DeepSpeedKey, name: str, value: Any, section: Mapping[str, Any]) -> None:
        if row.rule == "only" and value != row.value:
            write = f"write {_json(row.value)}, or leave it out"
            self._add(row.path, f"{_json(value)} is not accepted: {row.note}; {write}")
        elif row.rule == "refuse" and not _is_off(value):
            self._add(row.path, f"{row.note}; leave it out")
        elif name.endswith("_persistence_threshold") and not is_number_of_elements(value):
            self._add(row.path, f"{_json(value)} is not a whole number of 0 or more")
        elif row.path in self._expected:
            self._agrees(row, value)
        elif name == "enabled":
            self._precision(row.path, value)
        elif row.path == "optimizer.type":
            self._optimizer(str(value), section.get("params"))
        elif row.path == "scheduler.type" and _CURVES[value] != self._config.schedule.kind:
            self.settings[row.ours] = _CURVES[value]
            write = f'write `schedule.kind: {_CURVES[value]}`, or "auto" here'
            self._add(row.path, f"{value}, but schedule.kind is {self._config.schedule.kind}; {write}")
        elif name == "zero_allow_untested_optimizer" and not value and self._config.optim.name not in ("adam", "adamw"):
            rule = self._config.optim.name
            self._add(row.path, f"false, but DeepSpeed calls {rule} untested; write true, or leave it out")

    def _add(self, key: str, message: str) -> None:
        self.problems.append(Problem("", f"{_PLACE}.{key}", message))

    def _agrees(self, row: DeepSpeedKey, value: Any) -> None:
        expected = self._expected[row.path]
        as_written = row.path.endswith("warmup_num_steps") and value == warmup_num_steps(
            self._config.schedule, self._derived.steps
        )
        if _same(value, expected) or as_written:
            return
        setting = value
        if row.path == "gradient_clipping" and not value:
            setting = None
        elif row.path == "fp16.initial_scale_power":
            setting = 2.0 ** (value if _is_number(value) and abs(value) < 1000 else 0)
        self.settings[row.ours] = setting
        write = f"{row.ours}: {f'{setting:g}' if _is_number(setting) and setting is not value else _json(setting)}"
        fact = f"{row.ours} is {_json(expected)}"
        if row.path == "gradient_accumulation_steps":
            size, ranks, micro = self._config.batch.global_size, self._derived.ranks, self._derived.micro_size
            fact = f"batch.global_size and batch.micro_size make it {expected} ({size} samples on {ranks} x {micro})"
            fitting = -(-size // (ranks * value)) if isinstance(value, int) and value > 0 else micro
            write = f"{row.ours}: {fitting}"
        self._add(row.path, f'{_json(value)}, but {fact}; write `{write}`, or "auto" here')

    def _optimizer(self, name: str, params: Any) -> None:
        """Compare the optimizer; DeepSpeed's Adam is AdamW unless `adam_w_mode` is false."""
        coupled = isinstance(params, Mapping) and params.get("adam_w_mode", True) not in (True, AUTO)
        meant = "adamw" if name.lower() == "adam" and not coupled else name.lower()
        if meant not in ("adamw", "adam", "sgd", "lion"):
            self._add("optimizer.type", f"{name} is not supported; `optim.name` is adamw, adam, sgd or lion")
        elif meant != self._config.optim.name:
            self.settings["optim.name"] = meant
            write = f'write `optim.name: {meant}`, or "auto" here'
            self._add("optimizer.type", f'"{name}", but optim.name is "{self._config.optim.name}"; {write}')

    def _defaults(self, scheduler: Any, params: Any) -> None:
        """Compare DeepSpeed's defaults for the parameters that the section leaves out."""
        for name in keys_of("scheduler.params", ["same"]) if scheduler in _CURVES else ():
            row = deepspeed_keys()[f"scheduler.params.{name}"]
            immaterial = name == "warmup_type" and not warmup_steps(self._config.schedule, self._derived.steps)
            if row.value is None or name in params or immaterial or _OF_ONE_SCHEDULER.get(name, scheduler) != scheduler:
                continue
            key, value, expected = row.ours, _json(row.value), self._expected[row.path]
            if not _same(row.value, expected):
                self.settings[key] = row.value
                why = f"not given, so DeepSpeed takes {value}, but {key} is {_json(expected)}"
                self._add(row.path, f'{why}; write `{key}: {value}`, or "auto" here')

    def _precision(self, key: str, enabled: Any) -> None:
        dtype, compute = "fp16" if key.startswith("fp16") else "bf16", self._config.precision.compute
        if isinstance(enabled, bool) and enabled != (compute == dtype):
            self.settings["precision.compute"] = dtype if enabled else "fp32"
            write = f'write `precision.compute: {dtype if enabled else "fp32"}`, or "auto" here'
            self._add(key, f"{_json(enabled)}, but precision.compute is {compute}; {write}")


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


def is_number_of_elements(value: object) -> bool:
    """Return whether it is a whole number of 0 or more, which JSON may write as 1e5."""
    if isinstance(value, float):
        return value >= 0 and value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

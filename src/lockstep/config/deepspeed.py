"""A DeepSpeed config, as it is, beside ours: what both say must agree, and the rest is DeepSpeed's.

    ds.json     {"train_batch_size": "auto", "gradient_clipping": 0.5, "zero_optimization": {"stage": 3, ...}, ...}
                        |                          |                            |
                  filled in here          compared with optim.clip_norm     handed on, or refused by name
                                          and refused if it differs

    engine_config    what the run's engine gets: it reduces, divides and updates, and nothing else
    plain_config     what DeepSpeed alone would be given to make the same run

Numbers that depend on the number of ranks come in as `Derived`, from the plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import deepspeed_words as words
from lockstep.config.reading import MOST_BYTES
from lockstep.core.bounded_files import read_bounded
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from lockstep.config.schema import Config, DeepSpeed, Schedule
    from lockstep.plan.plan import Plan

_PLACE = "parallel.deepspeed.config"
_ACTIVATION = "activation_checkpointing"
_AUTO = "auto"
_BUCKET = 500_000_000
"""DeepSpeed's own: elements reduced at a time."""
_OF_RANKS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "scheduler")
"""Keys whose values are compared with what only a plan knows."""
_THRESHOLDS = tuple(
    f"{prefix}{what}_persistence_threshold" for prefix in ("stage3_", "") for what in ("param", "model")
)
_KEPT_WHOLE = 100_000
"""DeepSpeed's own: elements of the largest parameter that stage 3 keeps whole."""


@dataclass(frozen=True, slots=True)
class Derived:
    """What a plan knows.

    Attributes:
        steps: of the whole run; None if only running tells.
        trainable: elements.
    """

    ranks: int
    micro_size: int
    accumulation: int
    steps: int | None
    trainable: int


def engine_config(config: Config, derived: Derived) -> dict[str, Any]:
    """What `deepspeed.initialize` is given. The schedule, clipping, the loss scale and accumulation are ours, so that
    there the engine is told of none.

    Raises:
        ConfigError: see `check`.
    """
    check(config, derived)
    given, _ = _read(config.parallel.deepspeed)
    return {
        "train_micro_batch_size_per_gpu": derived.micro_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **_handed_on(given, words.HANDED_ON),
        "zero_optimization": _zero(config, derived, given),
    }


def plain_config(config: Config, derived: Derived) -> dict[str, Any]:
    """The same run as DeepSpeed's own JSON says it, every number filled in.

    Raises:
        ConfigError: see `check`; or DeepSpeed has no such optimizer, schedule or batch.
    """
    check(config, derived)
    given, _ = _read(config.parallel.deepspeed)
    train_batch = derived.micro_size * derived.accumulation * derived.ranks
    problems = [*_not_plain(config, derived, train_batch)]
    if problems:
        raise ConfigError(problems)
    scheduler = _scheduler(config, derived)
    return {
        "train_batch_size": train_batch,
        "train_micro_batch_size_per_gpu": derived.micro_size,
        "gradient_accumulation_steps": derived.accumulation,
        "gradient_clipping": config.optim.clip_norm or 0.0,
        "optimizer": _optimizer(config),
        **({} if scheduler is None else {"scheduler": scheduler}),
        **_precision(config),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **_handed_on(given, words.HANDED_ON),
        "zero_optimization": _zero(config, derived, given),
    }


def kept_whole(section: DeepSpeed, elements: Sequence[int]) -> list[bool]:
    """Which parameters, by their elements, stage 3 also leaves whole on every rank, so that nobody waits for them."""
    given, _ = _read(section)
    zero = given.get("zero_optimization")
    found = zero if isinstance(zero, Mapping) else {}
    most, room = (
        next((found[key] for key in (f"stage3_{name}", name) if _is_number_of_elements(found.get(key))), default)
        for name, default in (("param_persistence_threshold", _KEPT_WHOLE), ("model_persistence_threshold", math.inf))
    )
    kept = []
    for number in elements:
        kept.append(number <= min(most, room))
        room -= number if kept[-1] else 0
    return kept


def not_carried_out(config: Config) -> list[str]:
    """What the DeepSpeed config asks for, changes no result, and isn't done; a sentence each."""
    section = config.parallel.deepspeed.config is not None and _read(config.parallel.deepspeed)[0].get(_ACTIVATION)
    if not isinstance(section, Mapping) or not section.get("cpu_checkpointing"):
        return []
    if config.memory.activation_offload == "cpu":
        return []
    return [f"{_PLACE}.{_ACTIVATION}.cpu_checkpointing: {words.ACTIVATIONS['cpu_checkpointing']}."]


def derived_of(plan: Plan) -> Derived:
    """Return the numbers of a plan that a DeepSpeed config is compared with, or filled in from."""
    return Derived(plan.ranks, plan.batch.micro_size, plan.batch.accumulation, plan.steps, plan.trainable)


def check_plan(config: Config, plan: Plan) -> list[str]:
    """Check the DeepSpeed config of a planned run, and return warnings.

    Raises:
        ConfigError: see `check`.
    """
    check(config, derived_of(plan))
    return not_carried_out(config)


def check_alone(config: Config) -> None:
    """As `check`, of what doesn't depend on the number of ranks or on the model. Raises ConfigError."""
    check(config, Derived(ranks=1, micro_size=1, accumulation=1, steps=None, trainable=0), later=_OF_RANKS)


def check(config: Config, derived: Derived, later: Sequence[str] = ()) -> None:
    """Raises ConfigError with all that contradicts, that isn't taken, or that DeepSpeed doesn't have; but for the keys
    that are looked at `later`."""
    given, problems = _read(config.parallel.deepspeed)
    problems += _own_options(config)
    problems += _Comparison(config, derived, {key: given[key] for key in given if key not in later}).problems()
    if problems:
        raise ConfigError(problems)


# --- what is written ----------------------------------------------------------------------------------------------


def _read(section: DeepSpeed) -> tuple[Mapping[str, Any], list[Problem]]:
    """The JSON, or why there is none."""
    if section.config is None or isinstance(section.config, Mapping):
        return section.config or {}, []
    path = Path(section.config)
    try:
        found = json.loads(read_bounded(path, MOST_BYTES))
    except RecursionError:
        return {}, [Problem("", _PLACE, f"{path} is nested too deep for a DeepSpeed config")]
    except OSError as error:
        return {}, [Problem("", _PLACE, f"can't read {path}: {error.strerror or error}")]
    except ValueError as error:
        return {}, [Problem("", _PLACE, f"{path} is not JSON: {error}")]
    if not isinstance(found, dict):
        return {}, [Problem("", _PLACE, f"{path} holds no JSON object, but a {type(found).__name__}")]
    return found, []


def _handed_on(given: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """An `auto` of these is left to DeepSpeed's own default."""
    return {key: given[key] for key in keys if key in given and given[key] != _AUTO}


def _is_number_of_elements(value: object) -> bool:
    """JSON may write it as 1e5."""
    if isinstance(value, float):
        return value >= 0 and value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _zero(config: Config, derived: Derived, given: Mapping[str, Any]) -> dict[str, Any]:
    section = config.parallel.deepspeed
    zero: dict[str, Any] = {"stage": section.zero_stage, "reduce_bucket_size": max(1, min(_BUCKET, derived.trainable))}
    zero |= _handed_on(given.get("zero_optimization") or {}, words.ZERO_HANDED_ON)
    for key in ("offload_optimizer", "offload_param"):
        device = getattr(section, key)
        if device != "none":
            zero[key] = {"device": device, "pin_memory": section.pin_memory}
    return zero


def _optimizer(config: Config) -> dict[str, Any]:
    optim = config.optim
    params: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if optim.name in ("adamw", "adam"):
        adam = {"betas": list(optim.betas), "eps": optim.eps, "torch_adam": True, "adam_w_mode": optim.name == "adamw"}
        return {"type": "AdamW" if optim.name == "adamw" else "Adam", "params": params | adam}
    if optim.name == "sgd":
        return {"type": "SGD", "params": params | {"momentum": optim.momentum, "nesterov": optim.nesterov}}
    return {"type": "Lion", "params": params | {"betas": list(optim.betas)}}


def _scheduler(config: Config, derived: Derived) -> dict[str, Any] | None:
    """DeepSpeed's, whose warm-up and curve come two updates later than ours."""
    schedule, steps = config.schedule, derived.steps
    warmup = _warmup(config, derived)
    if schedule.kind == "constant" and not warmup:
        return None
    shared = {"warmup_num_steps": _warmup_num_steps(schedule, warmup), "warmup_type": schedule.warmup_type}
    if schedule.kind == "cosine":
        cosine = {"total_num_steps": steps, "warmup_min_ratio": 0.0, "cos_min_ratio": schedule.final_ratio}
        return {"type": "WarmupCosineLR", "params": {**cosine, **shared}}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": config.optim.lr, **shared}
    if schedule.kind == "constant":
        return {"type": "WarmupLR", "params": rates}
    return {"type": "WarmupDecayLR", "params": {"total_num_steps": steps, **rates}}


def _warmup_num_steps(schedule: Schedule, warmup: int) -> int:
    """DeepSpeed's number for a warm-up of so many updates: it counts from an update of rate 0."""
    return warmup + (2 if schedule.warmup_type == "log" else 1)


def _warmup(config: Config, derived: Derived) -> int:
    schedule = config.schedule
    if schedule.warmup_ratio is not None:
        return round(schedule.warmup_ratio * (derived.steps or 0))
    return schedule.warmup_steps or 0


def _precision(config: Config) -> dict[str, Any]:
    """DeepSpeed's autocast: parameters stay fp32, as here."""
    compute = config.precision.compute
    if compute in ("fp32", "auto"):
        return {}
    return {"torch_autocast": {"enabled": True, "dtype": {"bf16": "bfloat16", "fp16": "float16"}[compute]}}


def _not_plain(config: Config, derived: Derived, train_batch: int) -> Iterator[Problem]:
    global_size, schedule = config.batch.global_size, config.schedule
    if train_batch != global_size:
        yield Problem(
            "",
            "batch.global_size",
            f"{global_size} is not micro x accumulation x ranks = {derived.micro_size} x {derived.accumulation} x "
            f"{derived.ranks} = {train_batch}, and DeepSpeed has only those; write `batch.global_size: {train_batch}`",
        )
    if config.optim.name in ("muon", "adafactor"):
        yield Problem("", "optim.name", f"{config.optim.name} has no counterpart in DeepSpeed; take adamw")
    if schedule.kind == "warmup-stable-decay":
        yield Problem("", "schedule.kind", "DeepSpeed has no warmup-stable-decay; take linear, cosine or constant")
    if schedule.kind == "linear" and schedule.final_ratio:
        yield Problem("", "schedule.final_ratio", f"{schedule.final_ratio:g}, but DeepSpeed's linear decay ends at 0")
    if config.precision.compute == "auto":
        yield Problem("", "precision.compute", "auto depends on the machine; write fp32, bf16 or fp16")
    if derived.steps is None and schedule.kind != "constant":
        yield Problem("", "run", "only running tells how many steps there are, and DeepSpeed's schedule needs them")


# --- what is compared ---------------------------------------------------------------------------------------------


def _own_options(config: Config) -> list[Problem]:
    """Of parallel.deepspeed itself, and what doesn't go with it."""
    section, found = config.parallel.deepspeed, list[Problem]()
    if config.parallel.ddp.find_unused_parameters:
        why = "DeepSpeed gives a parameter that isn't used a gradient of zero; write false, or take ddp"
        found.append(Problem("", "parallel.ddp.find_unused_parameters", why))
    for key in ("offload_optimizer", "offload_param"):
        place = f"parallel.deepspeed.{key}"
        if getattr(section, key) == "nvme":
            why = (
                "nvme is not there: DeepSpeed moves that state between files, where no checkpoint can read it; take cpu"
            )
            found.append(Problem("", place, why))
    if section.offload_param != "none" and section.zero_stage != 3:
        why = f"{section.offload_param} is of zero_stage 3, and it is {section.zero_stage}"
        found.append(Problem("", "parallel.deepspeed.offload_param", why))
    if section.offload_optimizer != "none" and section.zero_stage == 0:
        why = f"{section.offload_optimizer} is of zero_stage 1, 2 and 3, and it is 0"
        found.append(Problem("", "parallel.deepspeed.offload_optimizer", why))
    return found


class _Comparison:
    """Of what is given with what is ours, key by key."""

    def __init__(self, config: Config, derived: Derived, given: Mapping[str, Any]) -> None:
        self._config = config
        self._derived = derived
        self._given = given
        self._found: list[Problem] = []

    def problems(self) -> list[Problem]:
        compared = {
            "train_batch_size": self._batch,
            "train_micro_batch_size_per_gpu": self._micro,
            "gradient_accumulation_steps": self._accumulation,
            "gradient_clipping": self._clipping,
            "optimizer": self._optimizer,
            "scheduler": self._scheduler,
            "fp16": self._fp16,
            "bf16": self._bf16,
            "bfloat16": self._bf16,
            "zero_optimization": self._zero,
            "activation_checkpointing": self._activation_checkpointing,
            "dataloader_drop_last": self._drop_last,
            "zero_allow_untested_optimizer": self._untested,
        }
        known = [*compared, *words.HANDED_ON, *words.ONE_VALUE, *words.REFUSED]
        for key, value in self._given.items():
            if key in compared:
                if value != _AUTO:
                    compared[key](key, value)
            else:
                self._by_words(key, value, known, words.HANDED_ON, words.ONE_VALUE, words.REFUSED)
        return self._found

    # --- kinds of answers ---

    def _say(self, key: str, message: str) -> None:
        self._found.append(Problem("", f"{_PLACE}.{key}", message))

    def _by_words(
        self,
        key: str,
        value: Any,
        known: Sequence[str],
        handed_on: Sequence[str],
        one_value: Mapping[str, tuple[Any, str]],
        refused: Mapping[str, str],
        inside: str = "",
    ) -> None:
        if key in handed_on:
            return
        if key in one_value:
            wanted, why = one_value[key]
            if value not in (wanted, _AUTO):
                self._say(inside + key, f"{_json(value)} is not taken: {why}; write {_json(wanted)}, or leave it out")
        elif key in refused:
            if not _is_off(value):
                self._say(inside + key, f"{refused[key]}; leave it out")
        else:
            near = closest_match(key, known)
            meant = f"did you mean {near}?" if near else "see the list of keys in DeepSpeed's documentation"
            self._say(inside + key, f"DeepSpeed has no such key; {meant}")

    def _agrees(self, key: str, value: Any, ours: str, here: Any, write: str | None = None) -> None:
        """`here` is the value that ours has, in DeepSpeed's terms."""
        if value == _AUTO or _same(value, here):
            return
        todo = write if write is not None else f"`{ours}: {_json(value)}`"
        self._say(key, f'{_json(value)}, but {ours} says {_json(here)}; write {todo}, or "auto" here')

    def _section(self, key: str, value: Any) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        self._say(key, f"{_json(value)} is not a mapping")
        return {}

    # --- batch ---

    def _batch(self, key: str, value: Any) -> None:
        self._agrees(key, value, "batch.global_size", self._config.batch.global_size)

    def _micro(self, key: str, value: Any) -> None:
        self._agrees(key, value, "batch.micro_size", self._derived.micro_size)

    def _accumulation(self, key: str, value: Any) -> None:
        found = self._derived
        if value == _AUTO or value == found.accumulation:
            return
        size = self._config.batch.global_size
        micro = -(-size // (found.ranks * value)) if isinstance(value, int) and value > 0 else found.micro_size
        sum_ = f"{size} samples on {found.ranks} x {found.micro_size}"
        self._say(
            key,
            f"{_json(value)}, but batch.global_size and batch.micro_size come to {found.accumulation} ({sum_}); "
            f'write `batch.micro_size: {micro}`, or "auto" here',
        )

    def _drop_last(self, key: str, value: Any) -> None:
        self._agrees(key, value, "data.drop_last", self._config.data.drop_last)

    # --- optimizer, schedule ---

    def _clipping(self, key: str, value: Any) -> None:
        here = self._config.optim.clip_norm or 0.0
        self._agrees(key, value, "optim.clip_norm", here, None if value else "`optim.clip_norm: null`")

    def _untested(self, key: str, value: Any) -> None:
        if value is False and self._config.optim.name not in ("adam", "adamw"):
            self._say(
                key, f"false, but DeepSpeed calls {self._config.optim.name} untested; write true, or leave it out"
            )

    def _optimizer(self, key: str, value: Any) -> None:
        section, optim = self._section(key, value), self._config.optim
        params = section.get("params") or {}
        params = self._section(f"{key}.params", params) if params != _AUTO else {}
        name = section.get("type", _AUTO)
        ours = None if name == _AUTO else _rule_of(str(name), params)
        if name != _AUTO and ours is None:
            self._say(f"{key}.type", f"{name} is not there; `optim.name` is adamw, adam, sgd or lion")
        elif ours is not None:
            self._agrees(
                f"{key}.type", name, "optim.name", optim.name if ours != optim.name else name, f"`optim.name: {ours}`"
            )
        for unknown in set(section) - {"type", "params"}:
            self._say(f"{key}.{unknown}", "it is not taken; type and params are")
        known: dict[str, tuple[str, Any]] = {
            "lr": ("optim.lr", optim.lr),
            "betas": ("optim.betas", list(optim.betas)),
            "eps": ("optim.eps", optim.eps),
            "weight_decay": ("optim.weight_decay", optim.weight_decay),
            "momentum": ("optim.momentum", optim.momentum),
            "nesterov": ("optim.nesterov", optim.nesterov),
        }
        for one, found in params.items():
            place = f"{key}.params.{one}"
            if one in known:
                self._agrees(place, found, *known[one])
            elif one != "adam_w_mode":  # part of the name: see _rule_of
                self._by_words(one, found, [*known, *_PARAMS], (), _PARAMS, {}, f"{key}.params.")

    def _scheduler(self, key: str, value: Any) -> None:
        section, schedule = self._section(key, value), self._config.schedule
        params = section.get("params") or {}
        params = self._section(f"{key}.params", params) if params != _AUTO else {}
        name = section.get("type", _AUTO)
        if name not in (_AUTO, *_CURVES):
            self._say(f"{key}.type", f"{name} is not there; {', '.join(_CURVES)} are")
            return
        if name != _AUTO and _CURVES[name] != schedule.kind:
            todo = f"`schedule.kind: {_CURVES[name]}`"
            self._say(f"{key}.type", f'{name}, but schedule.kind is {schedule.kind}; write {todo}, or "auto" here')
        for one, found in params.items():
            self._of_schedule(f"{key}.params.{one}", one, found)
        if section.get("params") != _AUTO:
            self._left_to_deepspeed(f"{key}.params", words.SCHEDULER_DEFAULTS.get(name, {}), params)

    def _of_schedule(self, place: str, one: str, value: Any) -> None:
        if one in _SCHEDULE:
            self._by_words(one, value, (), (), _SCHEDULE, {}, "scheduler.params.")
        elif one == "warmup_num_steps" and value == _warmup_num_steps(self._config.schedule, self._scheduled(one)[1]):
            return  # as `plain_config` writes it
        elif one in _SCHEDULED:
            self._agrees(place, value, *self._scheduled(one))
        else:
            self._by_words(one, value, [*_SCHEDULE, *_SCHEDULED], (), {}, {}, "scheduler.params.")

    def _left_to_deepspeed(self, place: str, defaults: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        """What the section doesn't say, and DeepSpeed would take otherwise."""
        for one, value in defaults.items():
            ours, here = self._scheduled(one)
            immaterial = one == "warmup_type" and not _warmup(self._config, self._derived)
            if one not in params and not immaterial and not _same(value, here):
                why = f"not given, which is {_json(value)} to DeepSpeed, but {ours} is {_json(here)}"
                self._say(f"{place}.{one}", f'{why}; write `{ours}: {_json(value)}`, or "auto" here')

    def _scheduled(self, one: str) -> tuple[str, Any]:
        """The key of ours that says the same, and its value."""
        schedule, optim = self._config.schedule, self._config.optim
        return {
            "warmup_num_steps": ("schedule.warmup_steps", _warmup(self._config, self._derived)),
            "warmup_type": ("schedule.warmup_type", schedule.warmup_type),
            "warmup_max_lr": ("optim.lr", optim.lr),
            "total_num_steps": ("run.steps", self._derived.steps),
            "cos_min_ratio": ("schedule.final_ratio", schedule.final_ratio),
        }[one]

    # --- precision ---

    def _bf16(self, key: str, value: Any) -> None:
        section = self._section(key, value)
        self._compute(key, section, "bf16")
        for one, found in section.items():
            if one != "enabled":
                self._by_words(one, found, ["enabled", *_BF16], (), _BF16, {}, f"{key}.")

    def _fp16(self, key: str, value: Any) -> None:
        section, scale = self._section(key, value), self._config.precision.loss_scale
        enabled = self._compute(key, section, "fp16")
        for one, found in section.items():
            if one == "enabled":
                continue
            if one == "initial_scale_power" and enabled:
                here, write = math.log2(scale.initial), f"`precision.loss_scale.initial: {2.0 ** _number(found):g}`"
                self._agrees(f"{key}.{one}", found, "precision.loss_scale.initial", here, write)
            elif one == "loss_scale_window" and enabled:
                ours = "precision.loss_scale.growth_interval"
                self._agrees(f"{key}.{one}", found, ours, scale.growth_interval)
            elif enabled or one not in ("initial_scale_power", "loss_scale_window", *_FP16):
                known = ["enabled", "initial_scale_power", "loss_scale_window", *_FP16]
                self._by_words(one, found, known, (), _FP16, {}, f"{key}.")

    def _compute(self, key: str, section: Mapping[str, Any], dtype: str) -> bool:
        """Whether that is what is computed in."""
        enabled, compute = section.get("enabled", False), self._config.precision.compute
        if enabled is True and compute != dtype:
            todo = f'write `precision.compute: {dtype}`, or "auto" here'
            self._say(f"{key}.enabled", f"true, but precision.compute is {compute}; {todo}")
        if enabled is False and compute == dtype:
            todo = 'write `precision.compute: fp32`, or "auto" here'
            self._say(f"{key}.enabled", f"false, but precision.compute is {compute}; {todo}")
        return bool(enabled is True or (enabled == _AUTO and compute == dtype))

    # --- ZeRO ---

    def _zero(self, key: str, value: Any) -> None:
        if isinstance(value, bool):
            self._say(key, f'{_json(value)} is an old spelling; write {{"stage": {int(value)}}}')
            return
        known = ["stage", "offload_optimizer", "offload_param",
                 *words.ZERO_HANDED_ON, *words.ZERO_ONE_VALUE, *words.ZERO_REFUSED]  # fmt: skip
        section, ours = self._section(key, value), self._config.parallel.deepspeed
        if "stage" not in section:
            self._agrees(f"{key}.stage", 0, "parallel.deepspeed.zero_stage", ours.zero_stage)
        for one, found in section.items():
            if one == "stage":
                self._agrees(f"{key}.stage", found, "parallel.deepspeed.zero_stage", ours.zero_stage)
            elif one in ("offload_optimizer", "offload_param"):
                if found is not None and found != _AUTO:
                    self._offload(f"{key}.{one}", one, self._section(f"{key}.{one}", found))
            elif one in _THRESHOLDS and found != _AUTO and not _is_number_of_elements(found):
                self._say(f"{key}.{one}", f"{_json(found)} is not a whole number of 0 or more")
            else:
                self._by_words(
                    one, found, known, words.ZERO_HANDED_ON, words.ZERO_ONE_VALUE, words.ZERO_REFUSED, f"{key}."
                )

    def _offload(self, place: str, one: str, section: Mapping[str, Any]) -> None:
        ours = self._config.parallel.deepspeed
        device = section.get("device", "none")
        self._agrees(f"{place}.device", device, f"parallel.deepspeed.{one}", getattr(ours, one))
        for key, value in section.items():
            if key == "pin_memory" and device != "none":
                self._agrees(f"{place}.{key}", value, "parallel.deepspeed.pin_memory", ours.pin_memory)
            elif key in words.OFFLOAD_OF_NVME:
                if device != "none" and value not in (False, None):
                    self._say(f"{place}.{key}", "it is for NVMe, which is refused; leave it out")
            elif key not in ("device", "pin_memory"):
                known = ["device", "pin_memory", *words.OFFLOAD_OF_NVME, *words.OFFLOAD_ONE_VALUE]
                self._by_words(key, value, known, (), words.OFFLOAD_ONE_VALUE, {}, f"{place}.")

    # --- activation checkpointing ---

    def _activation_checkpointing(self, key: str, value: Any) -> None:
        """DeepSpeed does it for models alone that call its own functions; ours does it for any."""
        section = self._section(key, value)
        mode = self._config.memory.activation_checkpointing.mode
        if mode == "none" and not all(map(_is_off, section.values())):
            self._say(
                key,
                "DeepSpeed checkpoints activations only of models that call its functions, and "
                "memory.activation_checkpointing.mode is none; write `memory.activation_checkpointing.mode: full`, or "
                "leave it out",
            )
        known = [*words.ACTIVATIONS, *_ACTIVATIONS]
        for one, found in section.items():
            self._by_words(one, found, known, tuple(words.ACTIVATIONS), _ACTIVATIONS, {}, f"{key}.")


_CURVES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_SCHEDULED = ("warmup_num_steps", "warmup_type", "warmup_max_lr", "total_num_steps", "cos_min_ratio")
_SCHEDULE: Mapping[str, tuple[Any, str]] = {
    "warmup_min_lr": (0, "warm-ups begin above 0"),
    "warmup_min_ratio": (0, "warm-ups begin above 0"),
}
_PARAMS: Mapping[str, tuple[Any, str]] = {
    "torch_adam": (True, "updates are made by torch's optimizer"),
    "bias_correction": (True, "moments are always corrected"),
    "amsgrad": (False, "it is not there"),
    "maximize": (False, "it is not there"),
    "dampening": (0, "it is not there"),
    "freeze_step": (None, "one-bit optimizers are not there"),
    "cuda_aware": (None, "one-bit optimizers are not there"),
    "max_grad_norm": (None, "gradient_clipping is DeepSpeed's word for it"),
}
_FP16: Mapping[str, tuple[Any, str]] = {
    "loss_scale": (0, "the loss scale is dynamic"),
    "hysteresis": (1, "the loss scale is lowered at each overflow"),
    "consecutive_hysteresis": (False, "the loss scale is lowered at each overflow"),
    "min_loss_scale": (0, "the loss scale has no least value"),
    "auto_cast": (False, "inputs are cast by autocast, where an operation wants it"),
    "fp16_master_weights_and_grads": (False, "parameters and optimizer state are fp32"),
}
_BF16: Mapping[str, tuple[Any, str]] = {
    "bf16_master_weights_and_grads": (False, "parameters and optimizer state are fp32"),
    "bf16_optimizer_states": (False, "parameters and optimizer state are fp32"),
    "check_grad_overflow": (True, "every gradient is judged, in whatever precision"),
    "immediate_grad_update": (True, "gradients are accumulated in fp32"),
}
_ACTIVATIONS: Mapping[str, tuple[Any, str]] = {
    "profile": (False, "Lockstep doesn't time each block"),
}


def _rule_of(name: str, params: Mapping[str, Any]) -> str | None:
    """Ours of DeepSpeed's: its Adam is AdamW unless told otherwise."""
    match name.lower():
        case "adam" | "adamw":
            return "adamw" if params.get("adam_w_mode", True) in (True, _AUTO) or name.lower() == "adamw" else "adam"
        case "sgd" | "lion":
            return name.lower()
    return None


def _is_off(value: Any) -> bool:
    """Whether a section asks for nothing."""
    return not value or value == _AUTO or (isinstance(value, Mapping) and value.get("enabled") is False)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if _is_number(one) and _is_number(other):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    return float(value) if _is_number(value) and abs(value) < 1000 else 0.0


def _json(value: Any) -> str:
    return json.dumps(value, default=str)

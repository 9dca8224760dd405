"""A DeepSpeed config, key by key, as settings of ours.

    "zero_optimization": {"stage": 3,                parallel.deepspeed.zero_stage: 3
                          "overlap_comm": true}      parallel.deepspeed.config, handed on
    "scheduler": {"type": "WarmupLR", ...}           schedule.kind: constant
    "wandb": {"enabled": true}                       not there, and why

Which keys there are is in `config/deepspeed_keys.md`, which `parallel.deepspeed.config` is checked against, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.config.deepspeed_keys import DeepSpeedKey, deepspeed_keys, keys_of
from lockstep.config.wording import yaml_like
from lockstep.interop import rules
from lockstep.interop.foreign import (
    NOTHING,
    Answer,
    ForeignFile,
    ForeignKey,
    derived,
    is_off,
    not_needed,
    not_there,
    plain,
    taken,
    to_do,
)
from lockstep.interop.keys import key_rows

_CONFIG = "parallel.deepspeed.config"
_CURVES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_OF_ONE_SCHEDULER = {"warmup_max_lr": "WarmupDecayLR", "cos_min_ratio": "WarmupCosineLR"}
_FROM_ARGUMENTS = {
    "train_batch_size", "gradient_clipping", "lr", "weight_decay", "betas", "eps", "momentum", "warmup_num_steps",
    "total_num_steps", "enabled", "cos_min_ratio",
}  # fmt: skip
"""Keys that HF Trainer fills in from its arguments, where a file has `auto`."""
_TWO_WAYS = {
    "schedule.warmup_steps": "schedule.warmup_steps, or schedule.warmup_ratio",
    "run.steps": "run.steps or run.epochs",
}


def answer(path: Sequence[str], key: ForeignKey, file: ForeignFile) -> Answer | None:
    """Return what becomes of a key; None if DeepSpeed has no such key.

    Args:
        path: The key in DeepSpeed's config, without the sections around that.
    """
    names = (".".join(path[:length]) for length in range(len(path), 0, -1))
    row = next((deepspeed_keys()[name] for name in names if name in deepspeed_keys()), None)
    if row is None or (row.rule in ("section", "same") and row.path != ".".join(path)):
        return _automatic(path, row, file) if key.value == "auto" else None
    if key.value == "auto":
        return _automatic(path, row, file)
    if path[-1] == "enabled" and not isinstance(key.value, bool | None):
        return rules.no_switch(key.value)
    match row.rule:
        case "section":
            return NOTHING if key.value in (None, {}) else not_there("it is a mapping")
        case "pass":
            return _handed_on(path, key, file)
        case "only":
            return _only(row, key, file)
        case "nvme":
            return not_needed(row.note)
        case "refuse":
            return _refused(row, path, key, file)
        case "other":
            return _activations(row, key)
    return _same(row, key, file)


def keys_near(path: Sequence[str]) -> list[str]:
    """Return the keys among which a misspelled one was meant."""
    return keys_of("zero_optimization" if path[0] == "zero_optimization" else "")


def _automatic(path: Sequence[str], row: DeepSpeedKey | None, file: ForeignFile) -> Answer:
    if row is not None and row.rule == "pass":
        return not_needed("DeepSpeed's default is taken")
    follows = path[-1] == "train_batch_size" and file.number("train_micro_batch_size_per_gpu") is not None
    if row is not None and path[-1] in _FROM_ARGUMENTS and file.kind == "deepspeed" and row.ours and not follows:
        return to_do(f"HF Trainer's arguments have it there: write {_TWO_WAYS.get(row.ours, row.ours)}")
    return not_needed("left to HF Trainer there; here it follows from the rest of the config")


def _handed_on(path: Sequence[str], key: ForeignKey, file: ForeignFile) -> Answer:
    beside: dict[str, object] = {}
    if path[0] == "zero_optimization":
        stage = file.value("zero_optimization.stage", "zero_stage", "stage")
        beside = {} if stage is None else {f"{_CONFIG}.zero_optimization.stage": stage}
    return Answer("taken", {**beside, ".".join((_CONFIG, *path)): key.value}, "handed on to DeepSpeed")


def _only(row: DeepSpeedKey, key: ForeignKey, file: ForeignFile) -> Answer:
    if row.path.startswith("fp16.") and file.value("fp16.enabled") is not True:
        return not_needed("fp16 is not on")
    unchanged = key.value in (row.value, None) or not (key.value or row.value)
    if unchanged or not row.matters:
        return not_needed(row.note)
    return not_there(f"{row.note}; write {yaml_like(row.value)}")


def _refused(row: DeepSpeedKey, path: Sequence[str], key: ForeignKey, file: ForeignFile) -> Answer:
    if row.path.startswith("torch_autocast."):
        return _autocast(key, file)
    if ".cpu_offload" in row.path:
        return _old_offload(row.path.rpartition(".")[2], key)
    if is_off(key.value) or file.value(f"{path[0]}.enabled") is False:
        return NOTHING
    return not_there(row.note) if row.matters else not_needed(row.note)


def _autocast(key: ForeignKey, file: ForeignFile) -> Answer:
    if key.word == "enabled":
        return derived("dtype decides the arithmetic", {}) if key.value else NOTHING
    if key.word != "dtype":
        return not_needed("torch's autocast has its own list")
    if file.value("torch_autocast.enabled") is not True:
        return not_needed("torch_autocast is not on")
    compute = rules.arithmetic(key.value)
    if compute is None:
        return not_there("`precision.compute` is auto, fp32, bf16 or fp16")
    return taken("precision.compute", compute)


def _old_offload(word: str, key: ForeignKey) -> Answer:
    if word == "cpu_offload_use_pin_memory":
        return taken("parallel.deepspeed.pin_memory", key.value)
    which = "offload_optimizer" if word == "cpu_offload" else "offload_param"
    return taken(f"parallel.deepspeed.{which}", "cpu") if key.value else NOTHING


def _activations(row: DeepSpeedKey, key: ForeignKey) -> Answer:
    """DeepSpeed checkpoints the activations of models that call its functions; Lockstep, of any."""
    if is_off(key.value):
        return NOTHING
    if key.word == "cpu_checkpointing":
        return Answer("to do", {row.ours: "full"}, f"mode: full, but {row.note}")
    return derived(row.note, {row.ours: "full"})


def _same(row: DeepSpeedKey, key: ForeignKey, file: ForeignFile) -> Answer:
    section, _, word = row.path.rpartition(".")
    if not section and word in key_rows() and key_rows()[word].rule in ("batch", "accumulation"):
        general = key_rows()[word]
        return (rules.batch if general.rule == "batch" else rules.accumulation)(general, key, file)
    if row.note:
        return derived(row.note, {}) if section else not_needed(row.note)
    if row.path == "optimizer.type":
        return rules.optimizer(key_rows()["optimizer.type"], key, file)
    if row.path == "scheduler.type":
        kind = _CURVES.get(plain(str(key.value)))
        why = "WarmupLR, WarmupDecayLR and WarmupCosineLR have counterparts"
        return not_there(why) if kind is None else taken(row.ours, kind, f"for {key.value}")
    if row.path == "optimizer.params.lr" and (peak := _peak(file)) is not None:
        return not_needed(f"the scheduler's warmup_max_lr, {peak}, is the peak")
    if word == "warmup_type" and key.value not in ("linear", "log"):
        return not_there("linear and log are")
    if word in ("warmup_num_steps", "total_num_steps"):
        return (rules.warmup if word == "warmup_num_steps" else rules.length)(key_rows()[word], key, file)
    if word == "enabled":
        return rules.precision(key_rows()["bf16"], key, file)
    if section == "fp16" and file.value("fp16.enabled") is not True:
        return not_needed("fp16 is not on")
    if word == "initial_scale_power":
        return rules.power_of_two(key_rows()[word], key, file)
    if word == "stage":
        return Answer("taken", {"parallel.strategy": "deepspeed", row.ours: key.value})
    return _offload(row, word, key, file) if ".offload_" in section else taken(row.ours, _value(word, key.value))


def _value(word: str, value: object) -> object:
    return value or None if word == "gradient_clipping" else value


def _offload(row: DeepSpeedKey, word: str, key: ForeignKey, file: ForeignFile) -> Answer:
    if word == "pin_memory":
        on = file.value(f"{key.section}.device") == "cpu"
        return taken(row.ours, key.value) if on else not_needed("nothing is offloaded")
    if key.value == "nvme":
        return not_there("state on NVMe can't be in a checkpoint; take cpu")
    return taken(row.ours, key.value if not isinstance(key.value, bool) else "cpu" if key.value else "none")


# --- what the file leaves to DeepSpeed ----------------------------------------------------------------------------


def _peak(file: ForeignFile) -> object:
    """Return the rate that the scheduler sets, whatever the optimizer was given; None: the optimizer's."""
    stated = file.value("scheduler.params.warmup_max_lr")
    left = scheduler_defaults(file).get("warmup_max_lr")
    return stated if left is None else left["optim.lr"]


def scheduler_defaults(file: ForeignFile) -> Mapping[str, Mapping[str, object]]:
    """Return what the file leaves to the defaults of its DeepSpeed scheduler, in our keys."""
    kind = file.value("scheduler.type")
    given = {key.word for key in file.keys if "scheduler" in map(plain, key.path)}
    if plain(str(kind)) not in _CURVES or any(key.word == "params" and key.value == "auto" for key in file.keys):
        return {}
    left = {}
    for row in deepspeed_keys().values():
        section, _, word = row.path.rpartition(".")
        has_default = section == "scheduler.params" and row.rule == "same" and row.value is not None
        if has_default and word not in given and _OF_ONE_SCHEDULER.get(word, kind) == kind:
            left[word] = {row.ours: row.value}
    return left

"""Convert a DeepSpeed config, key by key, to Lockstep's settings.

    "zero_optimization": {"stage": 3,                parallel.deepspeed.zero_stage: 3
                          "overlap_comm": true}      parallel.deepspeed.config, passed on
    "wandb": {"enabled": true}                       not there, with the reason

The keys are in `config/deepspeed_keys.md`; `parallel.deepspeed.config` is checked against the same table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.config.deepspeed_keys import DeepSpeedKey, deepspeed_keys
from lockstep.config.wording import yaml_like
from lockstep.interop import rules
from lockstep.interop.foreign import ForeignFile, ForeignKey, is_off, plain
from lockstep.interop.keys import NOTHING, Answer, Status, asked, derived, key_rows, not_needed, not_there, taken, to_do

_CONFIG = "parallel.deepspeed.config"
_SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_ONE_SCHEDULER_ONLY = {"warmup_max_lr": "WarmupDecayLR", "cos_min_ratio": "WarmupCosineLR"}
_SET_BY_ARGUMENTS = {
    "train_batch_size", "gradient_clipping", "lr", "weight_decay", "betas", "eps", "momentum", "warmup_num_steps",
    "total_num_steps", "enabled", "cos_min_ratio",
}  # fmt: skip
"""Keys that HF Trainer sets from its arguments, where a file has `auto`."""


def answer(path: Sequence[str], key: ForeignKey, file: ForeignFile) -> Answer | None:
    """Return what becomes of the key at this path of DeepSpeed's config; None if DeepSpeed has no such key."""
    names = (".".join(path[:length]) for length in range(len(path), 0, -1))
    row = next((deepspeed_keys()[name] for name in names if name in deepspeed_keys()), None)
    if key.value == "auto":
        return _automatic(path, row, file)
    if row is None or (row.rule in ("section", "same") and row.path != ".".join(path)):
        return None
    if path[-1] == "enabled" and not isinstance(key.value, bool | None):
        return rules.no_switch(key.value)
    match row.rule:
        case "section":
            return NOTHING if key.value in (None, {}) else not_there("it is a mapping")
        case "pass":
            stage = file.value("zero_optimization.stage", "zero_stage", "stage")
            needs_stage = path[0] == "zero_optimization" and stage is not None
            beside = {f"{_CONFIG}.zero_optimization.stage": stage} if needs_stage else {}
            return Answer("taken", {**beside, ".".join((_CONFIG, *path)): key.value}, "passed on to DeepSpeed")
        case "only":
            is_usual = key.value in (row.value, None) or not (key.value or row.value)
            if is_usual or not row.matters or (path[0] == "fp16" and file.value("fp16.enabled") is not True):
                return not_needed(row.note)
            return not_there(f"{row.note}; write {yaml_like(row.value)}")
        case "ignore":
            return not_needed(row.note)
        case "refuse":
            return _refused(row, path, key, file)
        case "other" if is_off(key.value):
            return NOTHING
        case "other":  # DeepSpeed's checkpointing is for models that call its functions, Lockstep's for any
            status: Status = "to do" if key.word == "cpu_checkpointing" else "derived"
            return Answer(status, {row.ours: "full"}, row.note)
    return _same(row, key, file)


def _automatic(path: Sequence[str], row: DeepSpeedKey | None, file: ForeignFile) -> Answer:
    if row is not None and row.rule == "pass":
        return not_needed("DeepSpeed's default applies")
    follows = path[-1] == "train_batch_size" and file.number("train_micro_batch_size_per_gpu") is not None
    if row is not None and path[-1] in _SET_BY_ARGUMENTS and file.kind == "deepspeed" and row.ours and not follows:
        target = row.ours
        why = f"HF Trainer sets it from its arguments; write {target}"
        return to_do(why) if target == "run.steps" else asked(target, why)
    return not_needed("HF Trainer sets it; in Lockstep it follows from the rest of the config")


def _refused(row: DeepSpeedKey, path: Sequence[str], key: ForeignKey, file: ForeignFile) -> Answer:
    if row.path.startswith("torch_autocast."):
        if key.word == "enabled":
            return derived("dtype decides the precision", {}) if key.value else NOTHING
        if key.word != "dtype" or file.value("torch_autocast.enabled") is not True:
            return not_needed("torch_autocast is not on, or has a fixed list")
        compute = rules.precision_name(key.value)
        return rules.UNKNOWN_PRECISION if compute is None else taken("precision.compute", compute)
    if row.path.endswith(".cpu_offload_use_pin_memory"):
        return taken("parallel.deepspeed.pin_memory", key.value)
    if ".cpu_offload" in row.path:
        which = "offload_optimizer" if row.path.endswith(".cpu_offload") else "offload_param"
        return taken(f"parallel.deepspeed.{which}", "cpu") if key.value else NOTHING
    if is_off(key.value) or file.value(f"{path[0]}.enabled") is False:
        return NOTHING
    return not_there(row.note) if row.matters else not_needed(row.note)


def _same(row: DeepSpeedKey, key: ForeignKey, file: ForeignFile) -> Answer:
    section, _, word = row.path.rpartition(".")
    general = key_rows().get("bf16" if word == "enabled" else row.path if row.path in key_rows() else word)
    if not section and general is not None and general.rule in ("batch", "accumulation"):
        return rules.GENERAL_RULES[general.rule](general, key, file)
    if row.note:
        return derived(row.note, {}) if section else not_needed(row.note)
    if row.path == "scheduler.type":
        kind = _SCHEDULES.get(plain(str(key.value)))
        why = "WarmupLR, WarmupDecayLR and WarmupCosineLR have counterparts"
        return not_there(why) if kind is None else taken(row.ours, kind, f"for {key.value}")
    if row.path == "optimizer.params.lr":
        default = scheduler_defaults(file).get("warmup_max_lr", {})
        peak = default.get("optim.lr", file.value("scheduler.params.warmup_max_lr"))
        if peak is not None:
            return not_needed(f"the scheduler's warmup_max_lr, {peak}, is the peak")
    if word == "warmup_type" and key.value not in ("linear", "log"):
        return not_there("linear and log are supported")
    if section == "fp16" and word != "enabled" and file.value("fp16.enabled") is not True:
        return not_needed("fp16 is not on")
    if general is not None and general.rule in ("optimizer", "warmup", "length", "precision", "power of two"):
        return rules.GENERAL_RULES[general.rule](general, key, file)
    if word == "stage":
        return Answer("taken", {"parallel.strategy": "deepspeed", row.ours: key.value})
    if ".offload_" not in section:
        return taken(row.ours, key.value or None if word == "gradient_clipping" else key.value)
    if word != "pin_memory":
        return rules.offload(row.ours, key.value)
    on = file.value(f"{key.section}.device") == "cpu"
    return taken(row.ours, key.value) if on else not_needed("nothing is offloaded")


def scheduler_defaults(file: ForeignFile) -> Mapping[str, Mapping[str, object]]:
    """Return the defaults of the file's DeepSpeed scheduler for keys that it doesn't set, as Lockstep's keys."""
    kind = file.value("scheduler.type")
    given = {key.word for key in file.keys if "scheduler" in map(plain, key.path)}
    if plain(str(kind)) not in _SCHEDULES or any(key.word == "params" and key.value == "auto" for key in file.keys):
        return {}
    left = {}
    for row in deepspeed_keys().values():
        section, _, word = row.path.rpartition(".")
        has_default = section == "scheduler.params" and row.rule == "same" and row.value is not None
        if has_default and word not in given and _ONE_SCHEDULER_ONLY.get(word, kind) == kind:
            left[word] = {row.ours: row.value}
    return left

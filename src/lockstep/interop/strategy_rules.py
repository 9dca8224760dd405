"""Rules for strategies and their options, ranks and activation checkpointing.

fsdp: full_shard auto_wrap offload      parallel.strategy: fsdp, ...sharding_strategy: FULL_SHARD, ...cpu_offload: true
num_processes: 8 on num_machines: 2     launch.ranks: 4
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lockstep.config.devices import DEVICES
from lockstep.interop import deepspeed, rules
from lockstep.interop.foreign import ForeignFile, ForeignKey, is_off, plain, read_foreign
from lockstep.interop.keys import (
    NOTHING,
    Answer,
    KeyRow,
    derived,
    key_rows,
    keys_for,
    not_needed,
    not_there,
    taken,
    to_do,
)
from lockstep.interop.rules import Rule, precision_name

_ALL_GPUS = ("gpu", "auto", "-1", -1)


def fsdp_dtype(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert one dtype of FSDP's mixed precision, or a name that sets all of it."""
    compute = precision_name(key.value) if isinstance(key.value, str) else None
    if key.word != "mixed_precision":
        return not_there("choose fp32, bf16 or fp16") if compute is None else taken(row.target, compute)
    if key.value is False:
        return NOTHING
    if compute is None:
        return to_do("write precision.compute: bf16 (autocast), or parallel.fsdp.mixed_precision.param_dtype")
    return derived(row.note, {row.target: compute})


def fsdp(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert HF Trainer's `fsdp: full_shard auto_wrap offload`, as text or as a list, or a switch."""
    if key.value in ("", False, []):
        return NOTHING
    settings: dict[str, object] = {row.target: "fsdp"}
    shardings = dict(key_rows()["sharding_strategy"].values)
    for word in re.findall(r"\w+", str(key.value).lower()):
        if word in shardings and not word.isdigit():
            settings["parallel.fsdp.sharding_strategy"] = shardings[word]
        elif word == "offload":
            settings["parallel.fsdp.cpu_offload"] = True
        elif word not in ("auto_wrap", "true"):
            options = "full_shard, shard_grad_op, no_shard, hybrid_shard, offload"
            return not_there(f"{word} is not an option of it; choose from {options}")
    return Answer("taken", settings)


def wrap(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert the names of module classes."""
    classes = [key.value] if isinstance(key.value, str) else key.value
    if not isinstance(classes, list):
        return not_there("it must be a class or a list of classes")
    names = [name.strip() for entry in classes for name in str(entry).split(",") if name.strip()]
    return taken(row.target, names) if names else NOTHING


def wrap_size(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    policy = str(file.value("auto_wrap_policy", "fsdp_auto_wrap_policy") or "size").lower()
    if not key.value or not policy.startswith("size"):
        return NOTHING
    return Answer("taken", {row.target: key.value, "parallel.fsdp.wrap": "size"})


def deepspeed_file(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert the DeepSpeed JSON at this path, or a switch."""
    if key.value in (False, "", {}):
        return NOTHING
    if isinstance(key.value, bool):
        return taken(row.target, "deepspeed")
    path = next((place for place in (file.path.parent / str(key.value), Path(str(key.value))) if place.is_file()), None)
    if path is None:
        return not_there(f"there is no file {key.value}; import it separately: lockstep config import FILE")
    inner = replace(read_foreign(path, "deepspeed"), ranks=file.ranks)
    settings: dict[str, object] = {}
    for option in inner.keys:
        answer = deepspeed.answer([plain(part) for part in option.path], option, inner)
        if answer is None or answer.status == "not there":
            return not_there(f"{option.where}: {option.key} {answer.why if answer else 'is not a key of DeepSpeed'}")
        settings |= answer.settings
    stage = settings.get("parallel.deepspeed.zero_stage", 0)
    return derived(f"from {path}", {**settings, row.target: "deepspeed", "parallel.deepspeed.zero_stage": stage})


def cpu_offload(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert `cpu_offload`, an option of FSDP and formerly of DeepSpeed."""
    of_fsdp = any(plain(part).startswith("fsdp") for part in key.path) or file.find("sharding_strategy")
    if of_fsdp or file.find("zero_stage", "stage") is None:
        return taken(row.target, key.value)
    return NOTHING if is_off(key.value) else taken("parallel.deepspeed.offload_optimizer", "cpu")


def strategy(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    name = plain(str(key.value))
    if name in ("no", "none", "", "false"):
        return NOTHING if file.kind != "accelerate" else taken(row.target, "single")
    if name != "auto" and name in ("gpu", *DEVICES):
        return taken("launch.device", "cuda" if name == "gpu" else name)
    if name in ("multi_gpu", "multi_cpu", "multi_npu", "multi_xpu", "distributeddataparallel"):
        return derived(f"{key.value} is DDP", {row.target: "ddp"})
    stage = re.search(r"stage_([0-3])" if name.startswith("deepspeed") else r"^zero\w*([0-3])$", name)
    if stage:
        return Answer("taken", {row.target: "deepspeed", "parallel.deepspeed.zero_stage": int(stage[1])})
    if name in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard"):
        return Answer("taken", {row.target: "fsdp", "parallel.fsdp.sharding_strategy": name.upper()})
    own = next((own for own in ("ddp", "fsdp", "deepspeed") if name.startswith(own)), name.removesuffix("_device"))
    if own not in ("ddp", "fsdp", "deepspeed", "dp", "auto", "single"):
        choices = f"{key.value} is not a strategy; choose auto, single, dp, ddp, fsdp or deepspeed"
        return not_there(strategy_hint(name) or choices)
    unused = {"parallel.ddp.find_unused_parameters": True} if "unused_parameters_true" in name else {}
    return Answer("taken", {row.target: own, **unused})


def strategy_hint(name: str) -> str | None:
    """Return what to write for a kind of parallelism that has its own key; None for an unknown name."""
    for word, key in (("pipeline", "pipeline"), ("tensor", "tensor"), ("context", "context"), ("ring", "context")):
        if name.startswith(word):
            return f"write `parallel.{key}: 2`, for two ranks, beside `parallel.strategy: ddp` or fsdp"
    if stage := re.fullmatch(r"(?:deepspeed_?)?zero_?(?:stage_?)?([0-3])", name):
        return f"write `parallel.strategy: deepspeed` and `parallel.deepspeed.zero_stage: {stage[1]}`"
    return None


def ranks(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Compute the ranks of this machine; a file may count all machines' ranks."""
    machines = file.number("num_machines", "nnodes", "num_nodes") or 1
    if key.value in _ALL_GPUS and not isinstance(key.value, bool):
        return derived(f"{key.value}: all GPUs of the machine", {row.target: "auto"})
    if machines == 1 or key.word in ("nproc_per_node", "devices", "gpus", "num_gpus"):
        return taken(row.target, key.value)
    if not isinstance(key.value, int) or key.value % machines:
        return not_there(f"it must be a multiple of {machines} machines")
    return derived(f"{key.value} on {machines} machines", {row.target: key.value // machines})


def recompute_every(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    switch = file.find(*keys_for("choice", "memory.activation_checkpointing.mode"))
    if switch is not None and is_off(switch.value):
        return not_needed(f"{switch.key} is off")
    if key.value in (0, False):
        return NOTHING
    beside = {} if switch is not None else {"memory.activation_checkpointing.mode": "full"}
    return Answer("taken", {**beside, row.target: key.value})


STRATEGY_RULES: Mapping[str, Rule] = {
    "fsdp dtype": fsdp_dtype, "fsdp": fsdp, "wrap": wrap, "wrap size": wrap_size, "deepspeed": deepspeed_file,
    "offload": lambda row, key, file: rules.offload(row.target, key.value), "cpu offload": cpu_offload,
    "strategy": strategy, "ranks": ranks,
    "recompute every": recompute_every,
}  # fmt: skip

"""Rules for all but strategies: how they convert another tool's value.

    per_device_train_batch_size: 8       derived      batch.global_size: 128 = 8 x 2 x 8 ranks, batch.micro_size: 8
    max_steps: -1                        not needed   no limit; num_train_epochs decides

A rule may look at the whole file: several keys may set one thing together, or one of them decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from lockstep.config.reading import resolve
from lockstep.config.wording import yaml_like
from lockstep.core.tasks import TASKS
from lockstep.interop.foreign import ForeignFile, ForeignKey, is_off, plain
from lockstep.interop.keys import (
    NOTHING,
    Answer,
    KeyRow,
    NeedsRanks,
    asked,
    derived,
    keys_for,
    not_needed,
    not_there,
    taken,
    to_do,
)

Rule: TypeAlias = Callable[[KeyRow, ForeignKey, ForeignFile], Answer]


# --- rules without arithmetic -------------------------------------------------------------------------------------


def rename(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    return NOTHING if key.value in (None, "auto", [], {}) else taken(row.target, key.value)


def choice(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Map the value by the row's table; `torch.optim.X` counts as its last word, `cuda:0` as its first."""
    value = key.value
    text = plain(yaml_like(value) if isinstance(value, bool | int | float) else str(value or ""))
    spellings = (text, text.rpartition(".")[2], text.partition(":")[0]) if isinstance(value, str) else (text,)
    exact = next((target for spelling in spellings for source, target in row.values if source == spelling), None)
    starts = (target for source, target in row.values if source.endswith("*") and text.startswith(source[:-1]))
    target = exact if exact is not None else "-" if value == "auto" else next(starts, None)
    if target is None or (value and isinstance(value, list | dict)):
        return not_there(f"{yaml_like(value)} has no counterpart{'; ' if row.note else ''}{row.note}")
    if target in ("-", "~"):
        return NOTHING if target == "-" else not_needed(row.note)
    mapped = value if target == "*" else resolve(target)
    return taken(row.target, mapped, "" if mapped == value or isinstance(value, bool) else f"for {yaml_like(value)}")


def requests_nothing(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer | None:
    """Return the answer if the value requests nothing or its switch is off."""
    switches: tuple[str, ...] = ("push_to_hub",) if row.key.startswith("hub_") else ()
    if row.key.startswith("wandb") and row.key != "wandb_log":
        switches = ("use_wandb", "wandb_log", "wandb.enabled")
    for switch in switches:
        value = file.value(switch)
        if (value is False or (value is None and switch == "push_to_hub")) and switch != row.key:
            return not_needed(f"{switch} is off")
    if not row.values:
        return NOTHING if is_off(key.value) else None
    same = any(type(key.value) is type(value) and key.value == value for value in row.quiet_values())
    return NOTHING if same or key.value is None else None


# --- batch --------------------------------------------------------------------------------------------------------

_NANOGPT = {
    "always_save_checkpoint", "block_size", "decay_lr", "eval_iters", "init_from", "lr_decay_iters", "max_iters",
    "n_embd", "wandb_log", "warmup_iters",
}  # fmt: skip


def batch(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Compute the global batch from micro-batch, accumulation and ranks; raises NeedsRanks."""
    global_size = file.number(*keys_for("batch", "batch.global_size"))
    micro, steps = file.number(*keys_for("batch", "batch.micro_size")), accumulation_of(file)
    if row.target == "batch.global_size":
        return _global_size(key, micro, steps, file)
    if global_size is not None or not isinstance(key.value, int):
        return taken("batch.micro_size", key.value, "of each rank" if file.kind == "yaml" else "")
    words = {other.word for other in file.keys}
    # without accumulation in the file nanoGPT's default applies, which forks change
    if file.kind == "yaml" and "gradient_accumulation_steps" in words and len(words & _NANOGPT) >= 3:
        why = f"{key.value} samples x {steps} micro-batches of all ranks together; nanoGPT divides them by the ranks"
        return derived(why, {"batch.global_size": key.value * steps, "batch.micro_size": key.value})
    if file.ranks is None:
        raise NeedsRanks(f"{key.value} samples x {steps} micro-batches x ranks is the global batch")
    settings = {"batch.global_size": key.value * steps * file.ranks, "batch.micro_size": key.value}
    return derived(f"{key.value} samples of each rank x {steps} micro-batches x {file.ranks} ranks", settings)


def accumulation_of(file: ForeignFile) -> int:
    return file.number(*keys_for("accumulation", "batch.global_size")) or 1


def _global_size(key: ForeignKey, micro: int | None, steps: int, file: ForeignFile) -> Answer:
    stated = file.find(*keys_for("accumulation", "batch.global_size")) is not None
    if micro is not None and file.ranks is not None and stated and micro * steps * file.ranks != key.value:
        product = f"{micro} x {steps} x {file.ranks} = {micro * steps * file.ranks}"
        return not_there(f"micro-batch x accumulation x ranks is {product}; correct one of the four")
    return taken("batch.global_size", key.value, "of all ranks" if file.kind == "yaml" else "")


def accumulation(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Compute the micro-batch from global batch, accumulation and ranks; raises NeedsRanks."""
    size, steps = file.number(*keys_for("batch", "batch.global_size")), key.value
    if file.number(*keys_for("batch", "batch.micro_size")) is not None:
        return derived("follows from batch.global_size, batch.micro_size and the ranks", {})
    if steps == 1:
        return not_needed("one micro-batch per update is the default")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        return not_there("it must be a whole number above 0")
    if size is None:
        why = f"accumulation is derived: write batch.global_size: {steps} x samples of a micro-batch x ranks"
        return asked(row.target, why)
    if file.ranks is None:
        raise NeedsRanks(f"{size} samples / ({steps} micro-batches x ranks) is a micro-batch")
    quotient = f"{size} / ({steps} micro-batches x {file.ranks} ranks)"
    if size % (steps * file.ranks):
        return not_there(f"{quotient} is not a whole number of samples")
    return derived(quotient, {"batch.micro_size": size // (steps * file.ranks)})


# --- length, warmup, schedule -------------------------------------------------------------------------------------


def steps_of(file: ForeignFile) -> object:
    return file.value(*keys_for("length", "run.steps"))


def epochs_of(file: ForeignFile) -> object:
    return file.value(*keys_for("length", "run.epochs"))


def length(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Choose the key that sets the run's length: steps before tokens before epochs, as in the other tools."""
    words = [word for unit in ("steps", "tokens", "epochs") for word in keys_for("length", f"run.{unit}")]
    deciding = next((other for other in map(file.find, words) if _limits(other)), None)
    if not _limits(key):
        return not_needed("no limit")
    if deciding is not None and deciding.path != key.path and deciding.word != key.word:
        return not_needed(f"{deciding.key} decides how long the run is")
    return taken(row.target, key.value)


def _limits(key: ForeignKey | None) -> bool:
    value = None if key is None else key.value
    return value is not None and not (isinstance(value, int | float) and value <= 0)


def warmup(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert the warmup, in steps or as a share of the run."""
    if file.kind == "trainer" and file.value("lr_scheduler_type") == "constant":
        return not_needed("a constant rate has no warmup in HF Trainer")
    if row.target == "schedule.warmup_ratio":
        steps = file.value(*keys_for("warmup", "schedule.warmup_steps"))
        beside = isinstance(steps, int | float) and steps > 0
        return not_needed("the number of warmup steps decides") if beside else taken(row.target, key.value)
    if isinstance(key.value, float) and 0 < key.value < 1:
        return derived("below 1 it is a share of the run", {"schedule.warmup_ratio": key.value})
    if key.value == 0 and file.value(*keys_for("warmup", "schedule.warmup_ratio")):
        return not_needed("the warmup is set as a share of the run")
    return taken(row.target, key.value)


def decay_length(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Compare the steps or epochs of the falling rate with the run's length; in Lockstep they are equal."""
    lengths = [value for value in (steps_of(file), epochs_of(file)) if value is not None]
    if key.value in lengths:
        return not_needed("the rate falls over the whole run")
    if not lengths:
        return to_do("the rate falls over the whole run; write the same number as run.steps")
    return not_there(f"the rate falls over the whole run, which is {lengths[0]} long; use the same number for both")


def _share(row: KeyRow, part: object, whole: object, of: str, question: str) -> Answer:
    if not isinstance(part, int | float) or not isinstance(whole, int | float) or whole <= 0:
        return asked(row.target, question)
    return derived(f"{part} of {whole} {of}", {row.target: float(f"{part / whole:.6g}")})


def warmup_epochs(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    question = "write schedule.warmup_steps, or schedule.warmup_ratio: a share of the run"
    return NOTHING if key.value == 0 else _share(row, key.value, epochs_of(file), "epochs", question)


def decay_steps(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    question = "write schedule.decay_ratio: the share of the run that decays"
    return _share(row, key.value, steps_of(file), "steps", question)


def final_rate(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    question = "write schedule.final_ratio: the last rate as a share of the peak optim.lr"
    peak = file.value("learning_rate", "lr", "max_lr", "peak_lr")
    return NOTHING if key.value == 0 else _share(row, key.value, peak, "at the peak", question)


# --- optimizer, precision -----------------------------------------------------------------------------------------

_PACKAGED = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw8bit"), "adamw-8bit"),
    **dict.fromkeys(("schedule_free_adamw", "adamwschedulefree"), "schedule-free"),
}
_OPTIMIZERS = ("adamw", "adafactor", "muon", "lion", "adam", "sgd")
UNKNOWN_PRECISION = not_there("`precision.compute` is auto, fp32, bf16 or fp16")
_LOW_BIT = ("8bit", "4bit", "8_bit", "4_bit", "paged", "int8", "fp8")
_PRECISION_NAMES = (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"), ("float16", "fp16"), ("16", "fp16"),
               ("fp32", "fp32"), ("float32", "fp32"), ("32", "fp32"), ("no", "fp32"), ("auto", "auto"))  # fmt: skip
_SWITCHES = ("bf16", "fp16", "bf16.enabled", "bfloat16.enabled", "fp16.enabled")
_PRECISIONS = ("mixed_precision", "precision", "use_amp", "amp", "torch_dtype", "dtype", "amp_dtype")


def optimizer(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    name = str(key.value).lower().rpartition(".")[2]
    names = f"`optim.name` is one of {', '.join(sorted({*_OPTIMIZERS, *_PACKAGED.values()}))}"
    if name in _PACKAGED:
        return taken(row.target, _PACKAGED[name])
    if any(sign in name for sign in _LOW_BIT):
        return not_there(f"there is no {key.value}; {names}")
    target = next((target for target in _OPTIMIZERS if name.startswith((target, f"fused{target}"))), None)
    of_deepspeed = file.kind == "deepspeed" or any(plain(part).startswith(("deepspeed", "ds_")) for part in key.path)
    if target is None:
        return not_there(names)
    if target == "adam" and of_deepspeed and file.value("adam_w_mode") is not False:
        return derived("DeepSpeed's Adam is AdamW unless adam_w_mode is false", {row.target: "adamw"})
    if target == "sgd" and file.find("momentum") is None:
        return derived("torch's SGD has no momentum by default", {row.target: "sgd", "optim.momentum": 0.0})
    return taken(row.target, target)


def betas(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    first, second = (file.value(f"adam_beta{number}", f"beta{number}") for number in (1, 2))
    pair = [0.9 if first is None else first, 0.999 if second is None else second]
    return derived("both as one pair", {row.target: pair})


def clip(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if key.value == "auto":
        return NOTHING
    return taken(row.target, None if key.value in (None, 0, False, -1) else key.value)


def power_of_two(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if not isinstance(key.value, int) or not 0 <= key.value < 64:
        return not_there(f"{row.target} is 2 to the power of this value, from 0 to 63")
    return taken(row.target, 2**key.value, f"2 to the power of {key.value}")


def precision_name(value: object) -> str | None:
    """Return precision.compute for another tool's name of a precision."""
    name = str(value).lower().removeprefix("torch.")
    return next((target for source, target in _PRECISION_NAMES if name.startswith(source)), None)


def offload(target: str, value: object) -> Answer:
    """Return the device to offload to, for its name or a switch."""
    device = value if not isinstance(value, bool) else "cpu" if value else "none"
    if device == "nvme":
        return not_there("nothing is offloaded to NVMe; use cpu")
    return taken(target, device)


def no_switch(value: object) -> Answer:
    return not_there(f"{yaml_like(value)} is not true or false")


def precision(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert the precision: a switch that is on decides, then a key with a dtype."""
    value, word = key.value, key.section if key.word == "enabled" else key.word
    if key.word == "bf16" and value == "auto":  # Axolotl's
        return _automatic(key, file)
    if key.word in ("bf16", "fp16", "bfloat16", "enabled", "use_amp") and not isinstance(value, bool):
        return NOTHING if value in (None, "auto") else no_switch(value)
    if _belongs_to_disabled_amp(key, file):
        return not_needed("automatic mixed precision is off")
    on = next((switch for name in _SWITCHES if (switch := file.find(name)) and switch.value is True), None)
    is_narrow = word in ("bf16", "bfloat16", "fp16")
    if on is not None and on.path != key.path and not (value is True and is_narrow):
        return not_needed(f"{on.key} decides the precision; stored parameters are always fp32")
    if isinstance(value, bool) and is_narrow:
        return taken(row.target, "fp16" if word == "fp16" else "bf16") if value else NOTHING
    if isinstance(value, bool) and key.word in ("amp", "use_amp", "mixed_precision", "enabled"):
        return _automatic(key, file)
    named = next((other for name in _PRECISIONS if _names_precision(other := file.find(name))), None)
    if named is not None and named.path != key.path and on is None:
        return not_needed(f"{named.key} decides the precision; stored parameters are always fp32")
    compute = precision_name(value)
    if value is False or compute is None:
        return NOTHING if value is False else UNKNOWN_PRECISION
    return taken(row.target, compute, "" if compute == value else f"for {yaml_like(value)}")


def _belongs_to_disabled_amp(key: ForeignKey, file: ForeignFile) -> bool:
    if key.word == "amp_dtype" or (key.word == "dtype" and key.section in ("amp", "mixed_precision")):
        return file.value("use_amp", "amp", "amp.enabled", "mixed_precision.enabled") is False
    return False


def _names_precision(key: ForeignKey | None) -> bool:
    """Return whether it names the precision of compute, unlike FSDP's, which is for collectives."""
    if key is None or isinstance(key.value, bool):
        return False
    return not any(plain(part).startswith("fsdp") for part in key.path)


def _automatic(key: ForeignKey, file: ForeignFile) -> Answer:
    named = file.find("dtype", "amp_dtype", "precision")
    if not key.value:
        elsewhere = named is not None and not _belongs_to_disabled_amp(named, file)
        return NOTHING if elsewhere else taken("precision.compute", "fp32")
    if named is not None and _names_precision(named):
        return not_needed(f"{named.key} decides the precision")
    return derived("bf16 where the device supports it", {"precision.compute": "auto"})


# --- intervals, trackers --------------------------------------------------------------------------------------------


def interval(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert a number of steps or, below 1, a share of the run, unless the strategy key decides."""
    strategy = file.value(*(word for word, _ in row.values)) if row.values else None
    if strategy in ("no", False, "epoch", "best"):
        return not_needed(f"{yaml_like(strategy)} decides how often")
    value = key.value
    if not (isinstance(value, float) and 0 < value < 1):
        return taken(row.target, int(value) if isinstance(value, float) and row.target == "monitor.every" else value)
    steps, epochs = steps_of(file), epochs_of(file)
    if isinstance(steps, int) and steps > 0:
        return derived(f"{value} of {steps} steps", {row.target: max(1, round(value * steps))})
    if isinstance(epochs, int | float) and row.target != "monitor.every":
        return derived(f"{value} of {epochs} epochs", {row.target: f"{value * epochs:g} epochs"})
    return to_do(f"write {row.target}: a number of steps{'' if row.target == 'monitor.every' else ', or 1 epoch'}")


def interval_in_epochs(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert a number of epochs; Lightning's val_check_interval is a share of one or a number of micro-batches."""
    value = key.value
    if key.word == "val_check_interval" and not isinstance(value, float):
        steps = accumulation_of(file)
        if not isinstance(value, int) or steps == 1:
            return taken(row.target, value)
        return derived(f"{value} micro-batches, {steps} an update", {row.target: max(1, round(value / steps))})
    if key.word == "check_val_every_n_epoch" and value == 1 and file.find("val_check_interval") is not None:
        return not_needed("val_check_interval decides how often")
    if is_off(value) and value != 1:
        return NOTHING
    if key.word == "val_check_interval":
        return derived("a share of an epoch", {row.target: f"{value:g} epochs"})
    return taken(row.target, f"{value} epoch{'s' * (value != 1)}")


def eval_strategy(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert HF Trainer's eval_strategy; without eval_steps its interval is logging_steps."""
    if key.value in ("epoch", "epochs"):
        return taken(row.target, "1 epoch")
    if key.value in ("no", False):
        return taken(row.target, None)
    if file.find("eval_steps") is not None:
        return not_needed("eval_steps decides")
    if key.value != "steps":
        return not_there("choose steps, epoch or no")
    every = file.value("logging_steps")
    how_often = every if isinstance(every, int) else 500
    return derived("without eval_steps the interval is logging_steps", {row.target: how_often})


def save_strategy(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    match key.value:
        case "epoch":
            return taken(row.target, "1 epoch")
        case "no" | False:
            return derived("one is always written when the run is stopped or done", {row.target: None})
        case "steps":
            return not_needed("save_steps decides") if file.value("save_steps") else taken(row.target, 500)
        case "best":
            return to_do("write checkpoint.best: SET.METRIC for a set of data.evaluation")
    return not_there("choose steps, epoch, best or no")


def trackers(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if isinstance(key.value, bool):
        return taken(row.target, key.value)
    names = [str(name) for name in key.value] if isinstance(key.value, list) else [str(key.value)]
    others = [name for name in names if name not in ("none", "all", "tensorboard", "None")]
    if not others:
        return taken(row.target, names != ["none"] and bool(key.value))
    why = f"write monitor.trackers: [{', '.join(f'{{target: {name}}}' for name in others)}]"
    return Answer("to do", {row.target: "tensorboard" in names}, why)


# --- models and data, which a file may only name --------------------------------------------------------------------

_NOT_TRANSFORMERS = (
    "resnet", "vgg", "densenet", "mobilenet", "efficientnet", "alexnet", "mlp", "cnn", "simple", "toy", "unet",
)  # fmt: skip
_NOT_ON_THE_HUB = ("cifar", "mnist", "imagenet", "synthetic", "random", "dummy", "fake", "toy")
_FILES = (".txt", ".csv", ".json", ".jsonl", ".parquet", ".bin")
_SHAPE = ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "n_embd", "hidden_size", "d_model", "hidden_dim")


def named_model(file: ForeignFile) -> ForeignKey | None:
    return file.find(*keys_for("model", "model.pretrained"))


def _is_on_the_hub(key: ForeignKey | None) -> bool:
    return key is not None and isinstance(key.value, str) and not key.value.lower().startswith(_NOT_TRANSFORMERS)


def model_type(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if named_model(file) is not None:
        return not_needed("the named model determines it")
    return Answer("taken", {"model.kind": "huggingface", row.target: key.value})


def attention(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if named_model(file) is None and file.find("model_type") is None:
        return to_do(f"write {row.target}: {key.value} with a model of kind huggingface")
    return taken(row.target, key.value)


def model(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if not isinstance(key.value, str):
        return not_there("it must be a name")
    if not _is_on_the_hub(key):
        return to_do("write model: {kind: custom, target: 'file.py:Name'}, with the function that builds it")
    return Answer("taken", {"model.kind": "huggingface", row.target: key.value})


def task(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    name = plain(str(key.value)).replace("_", "-")
    if name not in TASKS or not _is_on_the_hub(named_model(file)):
        return to_do("write model.kind and, for huggingface, model.task")
    return taken(row.target, name)


def shape(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert a size of a model without a name: Lockstep's transformer, or the one of `model_type`."""
    if named_model(file) is not None:
        return to_do("the named model determines it; to change it, write model.architecture")
    if file.find("model_type") is not None:
        return taken(f"model.architecture.{key.path[-1]}", key.value)
    if row.target in ("model.dropout", "") and file.find(*_SHAPE) is None:
        return to_do("write it as an argument of your model: model.arguments")
    return derived("for Lockstep's transformer", {"model.kind": "transformer", row.target: key.value})


def dataset(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    name = str(key.value)
    if name.lower().startswith(_NOT_ON_THE_HUB):
        return to_do("write data.train: {kind: custom, target: 'file.py:Name'}, with the class of the Dataset")
    if not _is_hub_dataset(name):
        return to_do("tokenize it (lockstep data prepare), then write data.train: {kind: tokens, folder: FOLDER}")
    return Answer("taken", {"data.train.kind": "huggingface", row.target: name})


def _is_hub_dataset(name: str) -> bool:
    is_path = name.startswith((".", "/")) or Path(name).suffix in _FILES
    return not is_path and not name.lower().startswith(_NOT_ON_THE_HUB)


def data_key(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert a key of data.train for a dataset of the hub; `block_size` packs documents into blocks."""
    kind, name = file.value("data.train.kind"), file.value(*keys_for("dataset", "data.train.name"))
    if kind is None and (name is None or not _is_hub_dataset(str(name))):
        places = "data.train.max_length (huggingface) or length (tokens)"
        return to_do(f"write it with data.train.kind, as {places if row.target.endswith('max_length') else row.target}")
    if kind not in (None, "huggingface") and row.target == "data.train.max_length":
        return taken("data.train.length", key.value)
    if key.word == "block_size":
        return derived("documents are packed into blocks", {row.target: key.value, "data.train.packed": True})
    return taken(row.target, key.value)


GENERAL_RULES: Mapping[str, Rule] = {
    "rename": rename, "choice": choice, "attention": attention, "model type": model_type,
    "warmup epochs": warmup_epochs, "decay steps": decay_steps,
    "not needed": lambda row, key, file: not_needed(row.note),
    "not there": lambda row, key, file: requests_nothing(row, key, file) or not_there(row.note),
    "to do": lambda row, key, file: requests_nothing(row, key, file) or to_do(row.note_for(key.value)),
    "batch": batch, "accumulation": accumulation, "length": length, "warmup": warmup,
    "decay length": decay_length, "final rate": final_rate, "optimizer": optimizer,
    "betas": betas, "clip": clip, "power of two": power_of_two, "precision": precision, "interval": interval,
    "interval in epochs": interval_in_epochs, "eval strategy": eval_strategy, "save strategy": save_strategy,
    "trackers": trackers, "model": model, "task": task, "shape": shape, "dataset": dataset, "data key": data_key,
}  # fmt: skip

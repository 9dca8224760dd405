"""How another tool's value becomes ours: batch, length, schedule, optimizer, arithmetic.

    per_device_train_batch_size: 8       derived      batch.global_size: 128 = 8 x 2 x 8 ranks, batch.micro_size: 8
    gradient_accumulation_steps: 2       derived      follows from batch.global_size, batch.micro_size and the ranks
    max_steps: -1                        not needed   no limit; num_train_epochs decides

A rule may look at the whole file: batch sizes, lengths, warm-ups and precisions are stated by several keys together, of
which one decides. `run_rules`, `strategy_rules` and `model_rules` have the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from lockstep.config.reading import resolve
from lockstep.config.wording import yaml_like
from lockstep.interop.foreign import (
    NOTHING,
    Answer,
    ForeignFile,
    ForeignKey,
    NeedsRanks,
    derived,
    is_off,
    not_needed,
    not_there,
    plain,
    taken,
    to_do,
)
from lockstep.interop.keys import KeyRow, key_rows

Rule: TypeAlias = Callable[[KeyRow, ForeignKey, ForeignFile], Answer]


def keys_for(rule: str, ours: str) -> list[str]:
    """Return the keys of a rule that set `ours`, in the order of the table."""
    return [row.key for row in key_rows().values() if row.rule == rule and row.ours == ours]


# --- rules without arithmetic -------------------------------------------------------------------------------------


def rename(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    return NOTHING if key.value in (None, "auto", [], {}) else taken(row.ours, key.value)


def choice(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """A value of ours for each of theirs; of `torch.optim.X` the last word counts, of `cuda:0` the first."""
    value = key.value
    text = plain(yaml_like(value) if isinstance(value, bool | int | float) else str(value or ""))
    spellings = (text, text.rpartition(".")[2], text.partition(":")[0]) if isinstance(value, str) else (text,)
    exact = next((ours for spelling in spellings for theirs, ours in row.values if theirs == spelling), None)
    starts = (ours for theirs, ours in row.values if theirs.endswith("*") and text.startswith(theirs[:-1]))
    ours = exact if exact is not None else "-" if value == "auto" else next(starts, None)
    if ours is None or (value and isinstance(value, list | dict)):
        return not_there(f"{yaml_like(value)} has no counterpart{'; ' if row.note else ''}{row.note}")
    if ours in ("-", "~"):
        return NOTHING if ours == "-" else not_needed(row.note)
    mapped = value if ours == "*" else resolve(ours)
    return taken(row.ours, mapped, "" if mapped == value or isinstance(value, bool) else f"for {yaml_like(value)}")


def asks_for_nothing(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer | None:
    """Return the answer, if the value asks for nothing, or its switch is off."""
    for switch in _switches(row.key):
        value = file.value(switch)
        if (value is False or (value is None and switch == "push_to_hub")) and switch != row.key:
            return not_needed(f"{switch} is off")
    if not row.values:
        return NOTHING if is_off(key.value) else None
    same = any(type(key.value) is type(value) and key.value == value for value in row.quiet_values())
    return NOTHING if same or key.value is None else None


def _switches(word: str) -> Sequence[str]:
    if word.startswith("hub_"):
        return ("push_to_hub",)
    return ("use_wandb", "wandb_log", "wandb.enabled") if word.startswith("wandb") and word != "wandb_log" else ()


def unsupported(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    return asks_for_nothing(row, key, file) or not_there(row.note)


def left_to_do(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    return asks_for_nothing(row, key, file) or to_do(row.note_for(key.value))


def unneeded(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    return not_needed(row.note)


# --- batch --------------------------------------------------------------------------------------------------------

_NANOGPT = {
    "always_save_checkpoint", "block_size", "decay_lr", "eval_iters", "init_from", "lr_decay_iters", "max_iters",
    "n_embd", "wandb_log", "warmup_iters",
}  # fmt: skip


def batch(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """The global batch from micro-batch, accumulation and ranks; raises NeedsRanks."""
    global_size = file.number(*keys_for("batch", "batch.global_size"))
    micro, steps = file.number(*keys_for("batch", "batch.micro_size")), accumulation_of(file)
    if row.ours == "batch.global_size":
        return _global_size(key, micro, steps, file)
    if global_size is not None or not isinstance(key.value, int):
        return taken("batch.micro_size", key.value, "of each rank" if file.kind == "yaml" else "")
    words = {other.word for other in file.keys}
    # where the accumulation is left out, nanoGPT's default would be meant, which forks change
    if file.kind == "yaml" and "gradient_accumulation_steps" in words and len(words & _NANOGPT) >= 3:
        why = f"{key.value} samples x {steps} micro-batches of all ranks together: nanoGPT divides them by the ranks"
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
    """The micro-batch from global batch, accumulation and ranks; raises NeedsRanks."""
    size, steps = file.number(*keys_for("batch", "batch.global_size")), key.value
    if file.number(*keys_for("batch", "batch.micro_size")) is not None:
        return derived("follows from batch.global_size, batch.micro_size and the ranks", {})
    if steps == 1:
        return not_needed("the rank's whole share at once is the default")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        return not_there("it is a whole number above 0")
    if size is None:
        return to_do(f"accumulation is derived: write batch.global_size: {steps} x samples of a micro-batch x ranks")
    if file.ranks is None:
        raise NeedsRanks(f"{size} samples / ({steps} micro-batches x ranks) is a micro-batch")
    quotient = f"{size} / ({steps} micro-batches x {file.ranks} ranks)"
    if size % (steps * file.ranks):
        return not_there(f"{quotient} is no whole number of samples; {_fitting_ranks(size, steps, file.ranks)}")
    return derived(quotient, {"batch.micro_size": size // (steps * file.ranks)})


def _fitting_ranks(size: int, steps: int, ranks: int) -> str:
    """Return the nearest numbers of ranks that divide it, as the end of a sentence."""
    if size % steps:
        return f"{steps} micro-batches don't divide {size}, on any number of ranks"
    share = size // steps
    fewer = next(number for number in range(min(ranks, share), 0, -1) if share % number == 0)
    more = next((number for number in range(ranks + 1, min(share, 4 * ranks) + 1) if share % number == 0), None)
    return f"ranks that divide it: {fewer}{f' or {more}' if more else ''}"


# --- length, warm-up, schedule ------------------------------------------------------------------------------------


def steps_of(file: ForeignFile) -> object:
    return file.value(*keys_for("length", "run.steps"))


def epochs_of(file: ForeignFile) -> object:
    return file.value(*keys_for("length", "run.epochs"))


def length(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """The run's length: steps go before tokens before epochs, as in the other tools."""
    words = [word for unit in ("steps", "tokens", "epochs") for word in keys_for("length", f"run.{unit}")]
    deciding = next((other for other in map(file.find, words) if _limits(other)), None)
    if not _limits(key):
        return not_needed("no limit")
    if deciding is not None and deciding.path != key.path and deciding.word != key.word:
        return not_needed(f"{deciding.key} decides how long the run is")
    return taken(row.ours, key.value)


def _limits(key: ForeignKey | None) -> bool:
    value = None if key is None else key.value
    return value is not None and not (isinstance(value, int | float) and value <= 0)


def warmup(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """The warm-up, in steps or as a share of the run."""
    if file.kind == "trainer" and file.value("lr_scheduler_type") == "constant":
        return not_needed("a constant rate has no warm-up in HF Trainer")
    if row.ours == "schedule.warmup_ratio":
        steps = file.value(*keys_for("warmup", "schedule.warmup_steps"))
        beside = isinstance(steps, int | float) and steps > 0
        return not_needed("the steps of warm-up decide") if beside else taken(row.ours, key.value)
    if isinstance(key.value, float) and 0 < key.value < 1:
        return derived("below 1 it is a share of the run", {"schedule.warmup_ratio": key.value})
    if key.value == 0 and file.value(*keys_for("warmup", "schedule.warmup_ratio")):
        return not_needed("the warm-up is stated as a share of the run")
    return taken(row.ours, key.value)


def warmup_epochs(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    epochs = epochs_of(file)
    if key.value == 0:
        return NOTHING
    if not isinstance(epochs, int | float) or not isinstance(key.value, int | float) or not epochs:
        return to_do("write schedule.warmup_steps, or schedule.warmup_ratio: a share of the run")
    return derived(f"{key.value} of {epochs} epochs", {row.ours: key.value / epochs})


def decay_length(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """The number of steps, or epochs, over which the rate falls: here, over the whole run."""
    lengths = [value for value in (steps_of(file), epochs_of(file)) if value is not None]
    if key.value in lengths:
        return not_needed("the rate falls over the whole run")
    if not lengths:
        return to_do("the rate falls over the whole run: write run.steps, as long")
    return not_there(f"the rate falls over the whole run, which is {lengths[0]} long; write the same here and there")


def decay_steps(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    steps = steps_of(file)
    if isinstance(steps, int) and isinstance(key.value, int) and steps > 0:
        return derived(f"{key.value} of {steps} steps", {row.ours: key.value / steps})
    return to_do("write schedule.decay_ratio: the share of the run that decays")


def final_rate(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    peak = file.value("learning_rate", "lr", "max_lr", "peak_lr")
    if key.value == 0:
        return NOTHING
    if not isinstance(peak, int | float) or not isinstance(key.value, int | float) or not peak:
        return to_do("write schedule.final_ratio: the last rate as a share of the peak optim.lr")
    return derived(f"{key.value} / {peak}", {row.ours: float(f"{key.value / peak:.6g}")})


# --- optimizer, arithmetic ----------------------------------------------------------------------------------------

_OPTIMIZERS = ("adamw", "adafactor", "muon", "lion", "adam", "sgd")
_FEWER_BITS = ("8bit", "4bit", "8_bit", "4_bit", "paged", "int8", "fp8")
_ARITHMETIC = (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"), ("float16", "fp16"), ("16", "fp16"),
               ("fp32", "fp32"), ("float32", "fp32"), ("32", "fp32"), ("no", "fp32"), ("auto", "auto"))  # fmt: skip
_SWITCHES = ("bf16", "fp16", "bf16.enabled", "bfloat16.enabled", "fp16.enabled")
_PRECISIONS = ("mixed_precision", "precision", "use_amp", "amp", "torch_dtype", "dtype", "amp_dtype")


def optimizer(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    name = str(key.value).lower().rpartition(".")[2]
    names = f"`optim.name` is one of {', '.join(sorted(_OPTIMIZERS))}"
    if any(sign in name for sign in _FEWER_BITS):
        return not_there(f"there is no {key.value}: optimizer state is fp32; {names}")
    ours = next((ours for ours in _OPTIMIZERS if name.startswith((ours, f"fused{ours}"))), None)
    of_deepspeed = file.kind == "deepspeed" or any(plain(part).startswith(("deepspeed", "ds_")) for part in key.path)
    if ours is None:
        return not_there(names)
    if ours == "adam" and of_deepspeed and file.value("adam_w_mode") is not False:
        return derived("DeepSpeed's Adam is AdamW unless adam_w_mode is false", {row.ours: "adamw"})
    if ours == "sgd" and file.find("momentum") is None:
        return derived("torch's SGD has no momentum by default", {row.ours: "sgd", "optim.momentum": 0.0})
    return taken(row.ours, ours)


def betas(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    first, second = (file.value(f"adam_beta{number}", f"beta{number}") for number in (1, 2))
    pair = [0.9 if first is None else first, 0.999 if second is None else second]
    return derived("both in one", {row.ours: pair})


def clip(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if key.value == "auto":
        return NOTHING
    return taken(row.ours, None if key.value in (None, 0, False, -1) else key.value)


def power_of_two(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if not isinstance(key.value, int) or not 0 <= key.value < 64:
        return not_there(f"{row.ours} is 2 to the power of it, from 0 to 63")
    return taken(row.ours, 2**key.value, f"2 to the power of {key.value}")


def arithmetic(value: object) -> str | None:
    """Return precision.compute for another tool's name of an arithmetic."""
    name = str(value).lower().removeprefix("torch.")
    return next((ours for theirs, ours in _ARITHMETIC if name.startswith(theirs)), None)


def no_switch(value: object) -> Answer:
    return not_there(f"{yaml_like(value)} is not true or false")


def precision(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """The arithmetic: a switch that is on decides; then what has a name."""
    value, word = key.value, key.section if key.word == "enabled" else key.word
    if key.word in ("bf16", "fp16", "bfloat16", "enabled", "use_amp") and not isinstance(value, bool):
        return NOTHING if value in (None, "auto") else no_switch(value)
    if _of_amp_that_is_off(key, file):
        return not_needed("automatic mixed precision is off")
    on = next((switch for name in _SWITCHES if (switch := file.find(name)) and switch.value is True), None)
    is_narrow = word in ("bf16", "bfloat16", "fp16")
    if on is not None and on.path != key.path and not (value is True and is_narrow):
        return not_needed(f"{on.key} decides the arithmetic; parameters at rest are fp32 in any case")
    if isinstance(value, bool) and is_narrow:
        return taken(row.ours, "fp16" if word == "fp16" else "bf16") if value else NOTHING
    if isinstance(value, bool) and key.word in ("amp", "use_amp", "mixed_precision", "enabled"):
        return _automatic(key, file)
    named = next((other for name in _PRECISIONS if _names_one(other := file.find(name))), None)
    if named is not None and named.path != key.path and on is None:
        return not_needed(f"{named.key} decides the arithmetic; parameters at rest are fp32 in any case")
    compute = arithmetic(value)
    if value is False or compute is None:
        return NOTHING if value is False else not_there("`precision.compute` is auto, fp32, bf16 or fp16")
    return taken(row.ours, compute, "" if compute == value else f"for {yaml_like(value)}")


def _of_amp_that_is_off(key: ForeignKey, file: ForeignFile) -> bool:
    if key.word == "amp_dtype" or (key.word == "dtype" and key.section in ("amp", "mixed_precision")):
        return file.value("use_amp", "amp", "amp.enabled", "mixed_precision.enabled") is False
    return False


def _names_one(key: ForeignKey | None) -> bool:
    """Return whether it names the arithmetic, and isn't FSDP's, which gathers and sums in it."""
    return (
        key is not None and not isinstance(key.value, bool) and not any(plain(part)[:4] == "fsdp" for part in key.path)
    )


def _automatic(key: ForeignKey, file: ForeignFile) -> Answer:
    named = file.find("dtype", "amp_dtype", "precision")
    if not key.value:
        elsewhere = named is not None and not _of_amp_that_is_off(named, file)
        return NOTHING if elsewhere else taken("precision.compute", "fp32")
    if named is not None and _names_one(named):
        return not_needed(f"{named.key} decides the arithmetic")
    return derived("bf16 where the processor has it", {"precision.compute": "auto"})


GENERAL_RULES: Mapping[str, Rule] = {
    "rename": rename, "choice": choice, "not needed": unneeded, "not there": unsupported, "to do": left_to_do,
    "batch": batch, "accumulation": accumulation, "length": length, "warmup": warmup, "warmup epochs": warmup_epochs,
    "decay length": decay_length, "decay steps": decay_steps, "final rate": final_rate, "optimizer": optimizer,
    "betas": betas, "clip": clip, "power of two": power_of_two, "precision": precision,
}  # fmt: skip

"""What one key of another tool's config comes to here, where that takes more than a new name.

    per_device_train_batch_size: 8       derived   batch.global_size: 128 = 8 x 2 x 8 ranks, batch.micro_size: 8
    gradient_accumulation_steps: 2       derived   follows from batch.global_size, batch.micro_size and the ranks
    max_steps: -1                        not needed   no limit; num_train_epochs says how long

An answer may look at the whole file (`Facts`): batch sizes, lengths, warm-ups and precisions are said by several keys
together, of which one decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from lockstep.config.foreign_files import Kind, Said, plain
from lockstep.config.foreign_words import ACCUMULATION, ALL_GPUS, MICRO, meaning
from lockstep.config.wording import yaml_like

Standing = Literal["taken", "derived", "not needed", "to do", "not there", "not known"]
Settings: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    """Attributes:
    settings: keys of ours with their values.
    why: how it was derived, or why nothing came of it.
    """

    standing: Standing
    settings: Settings = field(default_factory=dict)
    why: str = ""


def taken(**settings: object) -> Answer:
    """Keys with `__` for the dot."""
    return Answer("taken", {key.replace("__", "."): value for key, value in settings.items()})


def derived(why: str, settings: Settings) -> Answer:
    return Answer("derived", settings, why)


def not_needed(why: str) -> Answer:
    return Answer("not needed", {}, why)


def to_do(why: str) -> Answer:
    return Answer("to do", {}, why)


def not_there(why: str) -> Answer:
    return Answer("not there", {}, why)


NOTHING = not_needed("it asks for nothing")


def is_off(value: object) -> bool:
    """Whether it asks for nothing: a switch that is off, an empty list, a size of 1."""
    if isinstance(value, bool):
        return not value
    return value in (None, "", 0, 1, [], {}, "no", "none", "auto")


@dataclass(frozen=True)
class Facts:
    """Attributes:
    ranks: on which the file's numbers were meant to run, if anybody says.
    """

    kind: Kind
    said: Sequence[Said]
    ranks: int | None
    folder: Path

    def find(self, words: Sequence[str]) -> Said | None:
        """The first of these words (or `section.word`) that has a value."""
        for word in words:
            for one in self.said:
                if _ends(one.path, word) and one.value not in (None, "auto"):
                    return one
        return None

    def value(self, words: Sequence[str]) -> object:
        found = self.find(words)
        return None if found is None else found.value

    def number(self, words: Sequence[str]) -> int | None:
        found = self.value(words)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    def has_section(self, *names: str) -> bool:
        return any(plain(part) in names for one in self.said for part in one.path[:-1])

    def context(self) -> Mapping[str, object]:
        """For `foreign_words`."""
        found: dict[str, object] = {}
        for one in self.said:
            found.setdefault(one.word, one.value)
        return found


def _ends(path: Sequence[str], word: str) -> bool:
    parts = word.split(".")
    return len(path) >= len(parts) and [plain(part) for part in path[-len(parts) :]] == parts


# --- batch --------------------------------------------------------------------------------------------------------

GLOBAL = ("train_batch_size", "global_batch_size", "total_batch_size", "effective_batch_size")
MICRO_HERE = (*MICRO, "per_device_batch_size", "batch_size_per_device", "batch_size_per_gpu", "per_gpu_batch_size")
ACCUMULATION_HERE = (*ACCUMULATION, "accumulation_steps", "gradient_accumulation", "grad_accum_steps")
RANKS = ("num_processes", "world_size", "num_gpus", "devices", "gpus")


class NeedsRanks(Exception):
    """A sum can't be made without the number of ranks."""


def batch(said: Said, facts: Facts) -> Answer:
    """Raises NeedsRanks."""
    whole, micro = facts.number(GLOBAL), facts.number(MICRO_HERE)
    steps = facts.number(ACCUMULATION_HERE) or 1
    if said.word in GLOBAL:
        return _whole(said.value, micro, steps, facts)
    if said.word in ACCUMULATION_HERE:
        return _accumulation(said, whole, micro, steps, facts)
    if whole is not None or not isinstance(said.value, int):
        return Answer("taken", {"batch.micro_size": said.value}, "of each rank" if _guessed(facts) else "")
    if _of_nanogpt(facts):
        why = f"{said.value} samples x {steps} micro-batches of all ranks together: nanoGPT divides them by the ranks"
        return derived(why, {"batch.global_size": said.value * steps, "batch.micro_size": said.value})
    if facts.ranks is None:
        raise NeedsRanks(f"{said.value} samples x {steps} micro-batches x ranks is the global batch")
    total = said.value * steps * facts.ranks
    sum_ = f"{said.value} samples of each rank x {steps} micro-batches x {facts.ranks} ranks"
    return derived(sum_, {"batch.global_size": total, "batch.micro_size": said.value})


def _guessed(facts: Facts) -> bool:
    """Whether a script of its own could mean a size of each rank, or of all."""
    return facts.kind == "yaml"


def _of_nanogpt(facts: Facts) -> bool:
    """By its words. Where it leaves out the accumulation, nanoGPT's default would be meant, which forks change."""
    words = {one.word for one in facts.said}
    return facts.kind == "yaml" and "gradient_accumulation_steps" in words and len(words & _NANOGPT) >= 3


_NANOGPT = {
    "always_save_checkpoint", "block_size", "decay_lr", "eval_iters", "init_from", "lr_decay_iters", "max_iters",
    "n_embd", "wandb_log", "warmup_iters",
}  # fmt: skip


def _whole(value: object, micro: int | None, steps: int, facts: Facts) -> Answer:
    said_all = micro is not None and facts.ranks is not None and facts.find(ACCUMULATION_HERE) is not None
    if said_all and micro is not None and facts.ranks is not None and micro * steps * facts.ranks != value:
        product = f"{micro} x {steps} x {facts.ranks} = {micro * steps * facts.ranks}"
        return not_there(f"micro-batch x accumulation x ranks is {product}; correct one of the four")
    return Answer("taken", {"batch.global_size": value}, "of all ranks" if _guessed(facts) else "")


def _accumulation(said: Said, whole: int | None, micro: int | None, steps: int, facts: Facts) -> Answer:
    if micro is not None:
        return derived("follows from batch.global_size, batch.micro_size and the ranks", {})
    if said.value == 1:
        return not_needed("the rank's whole share at once is the default")
    if not isinstance(said.value, int):
        return not_there("it is a whole number above 0")
    if whole is None:
        return to_do(f"write batch.global_size: {steps} x samples of a micro-batch x ranks")
    if facts.ranks is None:
        raise NeedsRanks(f"{whole} samples / ({said.value} micro-batches x ranks) is a micro-batch")
    sum_ = f"{whole} / ({steps} micro-batches x {facts.ranks} ranks)"
    if whole % (steps * facts.ranks):
        return not_there(f"{sum_} is no whole number of samples; {_fitting_ranks(whole, steps, facts.ranks)}")
    return derived(sum_, {"batch.micro_size": whole // (steps * facts.ranks)})


def _fitting_ranks(whole: int, steps: int, ranks: int) -> str:
    """The nearest that divide it, as the end of a sentence."""
    if whole % steps:
        return f"{steps} micro-batches don't divide {whole}, on however many ranks"
    share = whole // steps
    fewer = next(number for number in range(min(ranks, share), 0, -1) if share % number == 0)
    more = next((number for number in range(ranks + 1, min(share, 4 * ranks) + 1) if share % number == 0), None)
    return f"ranks that divide it: {fewer}{f' or {more}' if more else ''}"


# --- length, warm-up, schedule --------------------------------------------------------------------------------------

STEPS = ("max_steps", "max_train_steps", "total_steps", "num_training_steps", "train_steps", "max_iters",
         "training.num_steps", "num_steps", "total_num_steps", "run.steps", "steps")  # fmt: skip
EPOCHS = ("num_train_epochs", "max_epochs", "num_epochs", "n_epochs", "epochs")
TOKENS = ("max_tokens", "num_tokens", "train_tokens", "tokens")


def length(said: Said, facts: Facts) -> Answer:
    """One of them decides: steps before tokens before epochs, as everywhere."""
    limit = next(
        (one for one in map(facts.find, ((word,) for word in (*STEPS, *TOKENS, *EPOCHS))) if _limits(one)), None
    )
    if not _limits(said):
        return not_needed("no limit")
    if limit is not None and limit.path != said.path and limit.word != said.word:
        return not_needed(f"{limit.key} says how long the run is")
    unit = "steps" if said.word in _last(STEPS) else "tokens" if said.word in TOKENS else "epochs"
    return Answer("taken", {f"run.{unit}": said.value})


def _last(words: Sequence[str]) -> set[str]:
    return {word.rpartition(".")[2] for word in words}


def _limits(said: Said | None) -> bool:
    value = None if said is None else said.value
    return value is not None and not (isinstance(value, int | float) and value <= 0)


WARMUP_STEPS = ("warmup_steps", "num_warmup_steps", "warmup_num_steps", "warmup_iters")
WARMUP_RATIO = ("warmup_ratio", "warmup_fraction", "warmup_proportion")


def warmup(said: Said, facts: Facts) -> Answer:
    if facts.kind == "trainer" and facts.value(("lr_scheduler_type",)) == "constant":
        return not_needed("a constant rate has no warm-up in HF Trainer")
    steps = facts.value(WARMUP_STEPS)
    if said.word in WARMUP_RATIO:
        beside = isinstance(steps, int | float) and steps > 0
        return (
            not_needed("steps of warm-up are said, and go first")
            if beside
            else taken(schedule__warmup_ratio=said.value)
        )
    if isinstance(said.value, float) and 0 < said.value < 1:
        return derived("below 1 it is a share of the run", {"schedule.warmup_ratio": said.value})
    if said.value == 0 and facts.value(WARMUP_RATIO):
        return not_needed("the warm-up is said as a share of the run")
    return taken(schedule__warmup_steps=said.value)


def warmup_epochs(said: Said, facts: Facts) -> Answer:
    epochs = facts.value(EPOCHS)
    if said.value == 0:
        return NOTHING
    if not isinstance(epochs, int | float) or not isinstance(said.value, int | float):
        return to_do("write schedule.warmup_steps, or schedule.warmup_ratio: a share of the run")
    return derived(f"{said.value} of {epochs} epochs", {"schedule.warmup_ratio": said.value / epochs})


def curve(said: Said, facts: Facts) -> Answer:
    if plain(str(said.value)) == "cosine_with_min_lr":
        return derived("its end is said apart", {"schedule.kind": "cosine"})
    return renamed("lr_scheduler_type", said, facts)


def decay_length(said: Said, facts: Facts) -> Answer:
    """Over how many steps, or epochs, the rate falls."""
    lengths = [value for value in (facts.value(STEPS), facts.value(EPOCHS)) if value is not None]
    if said.value in lengths:
        return not_needed("the rate falls over the whole run")
    if not lengths:
        return to_do("the rate falls over the whole run: write run.steps, as long")
    return not_there(f"the rate falls over the whole run, which is {lengths[0]} long; write the same here and there")


def decays(said: Said, facts: Facts) -> Answer:
    """nanoGPT's switch."""
    first = facts.find(("lr_scheduler_type", "lr_scheduler", "lr_schedule", "scheduler.type", "scheduler.name"))
    if not isinstance(said.value, bool):
        return no_switch(said.value)
    if first is not None:
        return not_needed(f"{first.key} says the curve")
    if not said.value:
        return taken(schedule__kind="constant")
    return derived("its curve is a cosine", {"schedule.kind": "cosine"})


def least_rate(said: Said, facts: Facts) -> Answer:
    peak = facts.value(("learning_rate", "lr", "max_lr", "peak_lr"))
    if said.value in (0, None):
        return NOTHING
    if not isinstance(peak, int | float) or not isinstance(said.value, int | float) or not peak:
        return to_do("write schedule.final_ratio: the last rate as a share of the peak")
    return derived(f"{said.value} / {peak}", {"schedule.final_ratio": said.value / peak})


# --- optimizer ----------------------------------------------------------------------------------------------------


def optimizer(said: Said, facts: Facts) -> Answer:
    found = meaning("optimizer", said.value, facts.context())
    if not isinstance(found, Mapping):
        return not_there(str(found))
    if found["optim.name"] == "adam" and _of_deepspeed(said, facts) and facts.value(("adam_w_mode",)) is not False:
        return derived("DeepSpeed's Adam is AdamW unless adam_w_mode is false", {"optim.name": "adamw"})
    if found["optim.name"] == "sgd" and facts.find(("momentum",)) is None:
        return derived("torch's SGD has no momentum unless it is said", {"optim.name": "sgd", "optim.momentum": 0.0})
    return Answer("taken", found)


def _of_deepspeed(said: Said, facts: Facts) -> bool:
    return facts.kind == "deepspeed" or any(plain(part).startswith(("deepspeed", "ds_")) for part in said.path)


def betas(said: Said, facts: Facts) -> Answer:
    found = meaning("adam_beta1", said.value, facts.context())
    assert isinstance(found, Mapping)
    return derived("both in one", found)


# --- arithmetic ---------------------------------------------------------------------------------------------------

_SWITCHES = ("bf16", "fp16", "bf16.enabled", "bfloat16.enabled", "fp16.enabled")
_PRECISIONS = ("mixed_precision", "precision", "use_amp", "amp", "torch_dtype", "dtype", "amp_dtype")


def precision(said: Said, facts: Facts) -> Answer:
    """A switch that is on decides; then what is said by name."""
    if said.word in _TRUE_OR_FALSE and not isinstance(said.value, bool):
        return NOTHING if said.value in (None, "auto") else no_switch(said.value)
    if _of_amp_that_is_off(said, facts):
        return not_needed("automatic mixed precision is off")
    switched = next(
        (one for one in map(facts.find, ((word,) for word in _SWITCHES)) if one and one.value is True), None
    )
    if switched is not None and switched.path != said.path and not _switches_on(said):
        return not_needed(f"{switched.key} says the arithmetic; parameters at rest are fp32 in any case")
    if isinstance(said.value, bool) and said.word in ("amp", "use_amp", "mixed_precision", "enabled"):
        return _amp(said, facts)
    first = next((one for one in map(facts.find, ((word,) for word in _PRECISIONS)) if _names_one(one)), None)
    if first is not None and first.path != said.path and switched is None:
        return not_needed(f"{first.key} says the arithmetic; parameters at rest are fp32 in any case")
    if said.value is False:
        return NOTHING
    word = said.word if said.word != "enabled" else plain(said.path[-2])
    return renamed({"use_amp": "amp", "bfloat16": "bf16", "amp_dtype": "dtype"}.get(word, word), said, facts)


_TRUE_OR_FALSE = ("bf16", "fp16", "bfloat16", "enabled", "use_amp")


def no_switch(value: object) -> Answer:
    return not_there(f"{yaml_like(value)} is not true or false")


def _of_amp_that_is_off(said: Said, facts: Facts) -> bool:
    beside = said.word == "dtype" and len(said.path) > 1 and plain(said.path[-2]) in ("amp", "mixed_precision")
    if said.word != "amp_dtype" and not beside:
        return False
    return facts.value(("use_amp", "amp", "amp.enabled", "mixed_precision.enabled")) is False


def _switches_on(said: Said) -> bool:
    """One of the two narrow arithmetics."""
    return said.value is True and plain(said.path[-2 if said.word == "enabled" else -1]) in ("bf16", "bfloat16", "fp16")


def _names_one(said: Said | None) -> bool:
    """Not those of FSDP, which say in what is gathered and summed."""
    if said is None or isinstance(said.value, bool):
        return False
    return not any(plain(part).startswith("fsdp") for part in said.path)


def _amp(said: Said, facts: Facts) -> Answer:
    section = plain(said.path[-2]) if len(said.path) > 1 else ""
    if said.word == "enabled" and section in ("bf16", "fp16", "bfloat16"):
        return taken(precision__compute="fp16" if section == "fp16" else "bf16") if said.value else NOTHING
    named = facts.find(("dtype", "amp_dtype", "precision"))
    if not said.value:
        elsewhere = named is not None and not _of_amp_that_is_off(named, facts)
        return NOTHING if elsewhere else taken(precision__compute="fp32")
    if named is not None and _names_one(named):
        return not_needed(f"{named.key} says the arithmetic")
    return derived("bf16 where the processor has it", {"precision.compute": "auto"})


def dtype(said: Said, facts: Facts) -> Answer:
    """Of a part of FSDP's mixed precision."""
    found = meaning("dtype", said.value, facts.context())
    if not isinstance(found, Mapping):
        return not_there("one of fp32, bf16 and fp16")
    return Answer("taken", {f"parallel.fsdp.mixed_precision.{said.word}": found["precision.compute"]})


def fsdp_precision(said: Said, facts: Facts) -> Answer:
    if said.value in (False, None):
        return NOTHING
    found = meaning("dtype", said.value, facts.context()) if isinstance(said.value, str) else None
    if not isinstance(found, Mapping):
        return to_do("write precision.compute: bf16 (autocast), or parallel.fsdp.mixed_precision.param_dtype")
    name = found["precision.compute"]
    return derived("gathered and computed in it", {"parallel.fsdp.mixed_precision.param_dtype": name})


# --- how it is divided ----------------------------------------------------------------------------------------------

_BY_NUMBER = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "_HYBRID_SHARD_ZERO2"}


def sharding(said: Said, facts: Facts) -> Answer:
    value = _BY_NUMBER.get(said.value, said.value) if isinstance(said.value, int) else said.value
    named = str(value).upper().rpartition(".")[2]
    return taken(parallel__fsdp__sharding_strategy=f"_{named}" if named == "HYBRID_SHARD_ZERO2" else named)


def prefetch(said: Said, facts: Facts) -> Answer:
    named = str(said.value).upper().rpartition(".")[2]
    if named == "BACKWARD_PRE":
        return taken(parallel__fsdp__backward_prefetch=named)
    return not_needed("FSDP2 always gathers the next block while the backward of this one runs")


def fsdp(said: Said, facts: Facts) -> Answer:
    """HF Trainer's `fsdp: full_shard auto_wrap offload`, as text or as a list; or a switch."""
    if said.value in ("", False, None, []):
        return NOTHING
    words = str(said.value).lower().replace(",", " ").strip("[]").replace("'", "").split()
    settings: dict[str, object] = {"parallel.strategy": "fsdp"}
    for word in words:
        if word.upper() in _BY_NUMBER.values() or word == "hybrid_shard_zero2":
            settings["parallel.fsdp.sharding_strategy"] = word.upper().replace("HYBRID_SHARD_Z", "_HYBRID_SHARD_Z")
        elif word == "offload":
            settings["parallel.fsdp.cpu_offload"] = True
        elif word not in ("auto_wrap", "true"):
            return not_there(
                f"{word} is no option of it; full_shard, shard_grad_op, no_shard, hybrid_shard, offload are"
            )
    return Answer("taken", settings)


def wrap(said: Said, facts: Facts) -> Answer:
    """Classes by name; a policy by its kind."""
    classes = [said.value] if isinstance(said.value, str) else said.value
    if isinstance(classes, list):
        names = [name.strip() for one in classes for name in str(one).split(",") if name.strip()]
        return taken(parallel__fsdp__wrap=names) if names else NOTHING
    return NOTHING if said.value is None else not_there("a class, or a list of them")


def wrap_policy(said: Said, facts: Facts) -> Answer:
    named = str(said.value).upper()
    if facts.find(("transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls")):
        return not_needed("the classes to wrap are named")
    if named.startswith("TRANSFORMER") or said.value is True:
        return derived("the model's repeated blocks are found", {"parallel.fsdp.wrap": "blocks"})
    return renamed("auto_wrap_policy", said, facts)


def least_wrapped(said: Said, facts: Facts) -> Answer:
    if not said.value:
        return NOTHING
    by_size = str(facts.value(("auto_wrap_policy", "fsdp_auto_wrap_policy")) or "size").upper()
    if not by_size.startswith("SIZE"):
        return not_needed("it is of wrapping by size, and another policy is said")
    return Answer("taken", {"parallel.fsdp.min_num_params": said.value, "parallel.fsdp.wrap": "size"})


def offload(said: Said, facts: Facts) -> Answer:
    value = said.value if not isinstance(said.value, bool) else "cpu" if said.value else "none"
    which = "offload_param" if "param" in "_".join(said.path[-2:]) else "offload_optimizer"
    if value == "nvme":
        return not_there("state on NVMe can't be in a checkpoint; take cpu")
    return Answer("taken", {f"parallel.deepspeed.{which}": value})


def strategy(said: Said, facts: Facts) -> Answer:
    named = plain(str(said.value))
    if named in ("no", "none", "", "false"):
        return NOTHING if facts.kind != "accelerate" else taken(parallel__strategy="single")
    if named in ("multi_gpu", "multi_cpu", "multi_npu", "multi_xpu", "distributeddataparallel"):
        return derived(f"{said.value} is DDP", {"parallel.strategy": "ddp"})
    if named.startswith("zero") and named[-1] in "0123":
        return Answer("taken", {"parallel.strategy": "deepspeed", "parallel.deepspeed.zero_stage": int(named[-1])})
    if named in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard"):
        return Answer("taken", {"parallel.strategy": "fsdp", "parallel.fsdp.sharding_strategy": named.upper()})
    return renamed("strategy", said, facts)


def processes(said: Said, facts: Facts) -> Answer:
    """Of all machines together."""
    machines = facts.number(("num_machines", "nnodes", "num_nodes")) or 1
    if said.value in ALL_GPUS:
        return derived(f"{said.value}: all GPUs of the machine", {"launch.ranks": "auto"})
    if machines == 1 or said.word in ("nproc_per_node", "devices", "gpus", "num_gpus"):
        return taken(launch__ranks=said.value)
    if not isinstance(said.value, int) or said.value % machines:
        return not_there(f"not a multiple of {machines} machines")
    return derived(f"{said.value} on {machines} machines", {"launch.ranks": said.value // machines})


def stages(said: Said, facts: Facts) -> Answer:
    return NOTHING if said.value in (1, None) else taken(parallel__pipeline=said.value)


def device(said: Said, facts: Facts) -> Answer:
    if isinstance(said.value, bool):  # use_cpu, no_cuda
        return taken(launch__device="cpu") if said.value else NOTHING
    named = str(said.value).partition(":")[0].lower()
    if named in ("cpu", "cuda", "auto", "gpu"):
        return taken(launch__device={"gpu": "cuda"}.get(named, named))
    return not_there("a CPU or CUDA GPUs")


# --- what is written, and when --------------------------------------------------------------------------------------


def often(key: str, strategies: Sequence[str]) -> Callable[[Said, Facts], Answer]:
    """eval_steps and save_steps: below 1, a share of the run; unless the strategy beside says otherwise."""

    def answer(said: Said, facts: Facts) -> Answer:
        how = facts.value(strategies)
        if how in ("no", False, "epoch", "best"):
            return not_needed(f"{how} is said to be how often")
        if isinstance(said.value, float) and 0 < said.value < 1:
            return _share(key, said.value, facts)
        return Answer("taken", {key: said.value})

    return answer


def _share(key: str, share: float, facts: Facts) -> Answer:
    steps, epochs = facts.value(STEPS), facts.value(EPOCHS)
    if isinstance(steps, int) and steps > 0:
        return derived(f"{share} of {steps} steps", {key: max(1, round(share * steps))})
    if isinstance(epochs, int | float):
        return derived(f"{share} of {epochs} epochs", {key: f"{share * epochs:g} epochs"})
    return to_do(f"write {key}: a number of steps, or 1 epoch")


def epochs_between(key: str) -> Callable[[Said, Facts], Answer]:
    """save_every_n_epochs."""

    def answer(said: Said, facts: Facts) -> Answer:
        if is_off(said.value) and said.value != 1:
            return NOTHING
        return Answer("taken", {key: f"{said.value} epoch{'s' * (said.value != 1)}"})

    return answer


def eval_strategy(said: Said, facts: Facts) -> Answer:
    if said.value == "steps":
        every = facts.value(("eval_steps",))
        return not_needed("eval_steps says it") if every else _logging_steps(facts)
    return renamed("eval_strategy", said, facts)


def _logging_steps(facts: Facts) -> Answer:
    every = facts.value(("logging_steps",))
    how_often = every if isinstance(every, int) else 500
    return derived("without eval_steps it is logging_steps", {"evaluation.every": how_often})


def save_strategy(said: Said, facts: Facts) -> Answer:
    match said.value:
        case "epoch":
            return taken(checkpoint__every="1 epoch")
        case "no" | False:
            return derived("one is written in any case when the run is stopped or done", {"checkpoint.every": None})
        case "steps":
            return not_needed("save_steps says it") if facts.value(("save_steps",)) else taken(checkpoint__every=500)
        case "best":
            return to_do("write checkpoint.best: SET.METRIC for a set of data.evaluation")
    return not_there("steps, epoch, best or no")


def log_every(said: Said, facts: Facts) -> Answer:
    if isinstance(said.value, float) and 0 < said.value < 1:
        found = _share("monitor.every", said.value, facts)
        whole = isinstance(found.settings.get("monitor.every"), int)
        return found if whole else to_do("write monitor.every: a number of steps")
    return taken(monitor__every=int(said.value) if isinstance(said.value, float) else said.value)


def trackers(said: Said, facts: Facts) -> Answer:
    names = [str(one) for one in said.value] if isinstance(said.value, list) else [str(said.value)]
    if isinstance(said.value, bool):
        return taken(monitor__tensorboard=said.value)
    others = [name for name in names if name not in ("none", "all", "tensorboard", "None")]
    if others:
        found = {"monitor.tensorboard": "tensorboard" in names}
        return Answer("not there", found, f"metrics.jsonl and TensorBoard are written; not yet {', '.join(others)}")
    return taken(monitor__tensorboard=names != ["none"] and bool(said.value))


def run_name(said: Said, facts: Facts) -> Answer:
    first = facts.find(FOLDERS)
    if is_off(said.value) or not isinstance(said.value, str):
        return NOTHING
    if first is not None:
        return not_needed(f"a run is its folder, and {first.key} names it")
    return to_do(f"a run is its folder: write run.folder: runs/{said.value}")


def narrow_evaluation(said: Said, facts: Facts) -> Answer:
    """bf16_full_eval and fp16_full_eval: the model itself in half precision."""
    if is_off(said.value):
        return NOTHING
    narrow = said.word.partition("_")[0]
    if facts.value((narrow,)) is True:
        return not_needed("evaluation computes in precision.compute, as training does")
    return not_there(f"evaluation computes in precision.compute, as training does, and {narrow} isn't said")


def validation_interval(said: Said, facts: Facts) -> Answer:
    """Lightning's val_check_interval: a share of an epoch, or a number of micro-batches."""
    if isinstance(said.value, float):
        return derived("a share of an epoch", {"evaluation.every": f"{said.value:g} epochs"})
    steps = facts.number(ACCUMULATION_HERE) or 1
    if not isinstance(said.value, int) or steps == 1:
        return Answer("taken", {"evaluation.every": said.value})
    return derived(
        f"{said.value} micro-batches, {steps} an update", {"evaluation.every": max(1, round(said.value / steps))}
    )


def validation_epochs(said: Said, facts: Facts) -> Answer:
    """Lightning's check_val_every_n_epoch."""
    if said.value in (1, None) and facts.find(("val_check_interval",)) is not None:
        return not_needed("val_check_interval says how often")
    return renamed("check_val_every_n_epoch", said, facts)


def of_class(answer: Callable[[Said, Facts], Answer]) -> Callable[[Said, Facts], Answer]:
    """The answer to `torch.optim.AdamW`, as LightningCLI and Hydra write it, by the class alone."""
    return lambda said, facts: answer(Said(said.path, str(said.value).rpartition(".")[2], said.where), facts)


def to_host(said: Said, facts: Facts) -> Answer:
    """`cpu_offload`, which is DeepSpeed's old word, too."""
    of_fsdp = any(plain(part).startswith("fsdp") for part in said.path) or facts.find(("sharding_strategy",))
    if of_fsdp or facts.find(("zero_stage", "stage")) is None:
        return Answer("taken", {"parallel.fsdp.cpu_offload": said.value})
    return NOTHING if is_off(said.value) else taken(parallel__deepspeed__offload_optimizer="cpu")


def attention(said: Said, facts: Facts) -> Answer:
    model = facts.find(MODEL)
    if said.value in (None, "auto"):
        return NOTHING
    if model is None and facts.find(("model_type",)) is None:
        return to_do(f"write model.architecture.attn_implementation: {said.value} beside a model of kind huggingface")
    return Answer("taken", {"model.architecture.attn_implementation": said.value})


FOLDERS = ("output_dir", "folder", "default_root_dir", "save_dir", "out_dir")


def folder(said: Said, facts: Facts) -> Answer:
    first = facts.find(FOLDERS)
    if first is not None and first.path != said.path:
        return not_needed(f"all of a run lies in one folder, and {first.key} names it")
    return taken(run__folder=said.value)


def seed(said: Said, facts: Facts) -> Answer:
    first = facts.find(("seed", "random_seed", "manual_seed"))
    if first is not None and first.path != said.path:
        return not_needed(f"one seed is for all; {first.key} says it")
    return taken(run__seed=said.value)


# --- model and data -------------------------------------------------------------------------------------------------

MODEL = ("model_name_or_path", "pretrained_model_name_or_path", "model_name", "model.name", "model.pretrained",
         "model.name_or_path", "model.path", "model.model_name", "model")  # fmt: skip
DATASET = ("dataset_name", "data.dataset", "data.name", "dataset.name", "data.dataset_name", "dataset")
_TASKS = {
    "causallm": "causal-lm", "clm": "causal-lm", "languagemodeling": "causal-lm", "textgeneration": "causal-lm",
    "lm": "causal-lm", "maskedlm": "masked-lm", "mlm": "masked-lm", "fillmask": "masked-lm", "seq2seq": "seq2seq",
    "seq2seqlm": "seq2seq", "translation": "seq2seq", "summarization": "seq2seq",
    "sequenceclassification": "sequence-classification", "textclassification": "sequence-classification",
    "classification": "sequence-classification", "seqcls": "sequence-classification",
}  # fmt: skip
_NOT_OF_HF = (
    "resnet",
    "vgg",
    "densenet",
    "mobilenet",
    "efficientnet",
    "alexnet",
    "mlp",
    "cnn",
    "simple",
    "toy",
    "unet",
)
_NOT_OF_DATASETS = ("cifar", "mnist", "imagenet", "synthetic", "random", "dummy", "fake", "toy")


def model(said: Said, facts: Facts) -> Answer:
    if not isinstance(said.value, str):
        return not_there("a name")
    if said.value.lower().startswith(_NOT_OF_HF):
        return to_do("write model: {kind: custom, target: 'file.py:Name'}, naming what makes it")
    return Answer("taken", {"model.kind": "huggingface", "model.pretrained": said.value})


def task(said: Said, facts: Facts) -> Answer:
    named = plain(str(said.value)).replace("_", "").removeprefix("automodelfor").removeprefix("for").replace(" ", "")
    found = _TASKS.get(named)
    name = facts.find(MODEL)
    if found is None or name is None or model(name, facts).standing != "taken":
        return to_do("write model.kind, and for huggingface model.task")
    return taken(model__task=found)


def labels(said: Said, facts: Facts) -> Answer:
    found = facts.find(MODEL)
    if found is None or model(found, facts).standing != "taken":
        return to_do("it is what the data says; to change it, write model.classes beside model.kind")
    return Answer("taken", {"model.classes": said.value, "model.task": "sequence-classification"})


def shape_of_model(key: str) -> Callable[[Said, Facts], Answer]:
    """Of a model that has no name: Lockstep's transformer, or what `model_type` says."""

    def answer(said: Said, facts: Facts) -> Answer:
        if facts.find(MODEL) is not None:
            return to_do("the named model has a shape of its own; to change it, write model.architecture")
        if facts.find(("model_type",)) is not None:
            return Answer("taken", {f"model.architecture.{said.path[-1]}": said.value})
        if key == "model.dropout" and facts.find(SHAPE) is None:
            return to_do("write it where your model is made: model.arguments")
        return derived("of Lockstep's own transformer", {"model.kind": "transformer", key: said.value})

    return answer


def biases(said: Said, facts: Facts) -> Answer:
    if facts.find(MODEL) is not None or facts.find(SHAPE) is None:
        return shape_of_model("model.dropout")(said, facts)
    if not said.value:
        return not_needed("Lockstep's own transformer has none")
    return not_there("Lockstep's own transformer has none; write false")


def begins_from(said: Said, facts: Facts) -> Answer:
    """nanoGPT's `init_from`: scratch, resume, or a model's name."""
    if said.value in (None, "scratch"):
        return not_needed("weights are drawn, unless model.pretrained or model.init_from names some")
    if said.value == "resume":
        return not_needed("a run goes on by itself when it is started again with the same run.folder")
    return to_do(
        f"write model: {{kind: huggingface, task: causal-lm, pretrained: {said.value}}}, or model.init_from: FILE"
    )


def model_type(said: Said, facts: Facts) -> Answer:
    if facts.find(MODEL) is not None:
        return not_needed("the named model has a type of its own")
    return Answer("taken", {"model.kind": "huggingface", "model.architecture.model_type": said.value})


SHAPE = ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "n_embd", "hidden_size", "d_model", "hidden_dim")


def dataset(said: Said, facts: Facts) -> Answer:
    name = str(said.value)
    if name.lower().startswith(_NOT_OF_DATASETS):
        return to_do("write data.train: {kind: custom, target: 'file.py:Name'}, naming what makes the Dataset")
    if name.startswith((".", "/")) or Path(name).suffix in (".txt", ".csv", ".json", ".jsonl", ".parquet", ".bin"):
        return to_do("turn it into tokens (lockstep data prepare), then data.train: {kind: tokens, folder: FOLDER}")
    return Answer("taken", {"data.train.kind": "huggingface", "data.train.name": name})


def of_dataset(key: str) -> Callable[[Said, Facts], Answer]:
    """A key of data.train, where that is a set of the hub."""

    def answer(said: Said, facts: Facts) -> Answer:
        found = facts.find(DATASET)
        if found is None or dataset(found, facts).standing != "taken":
            return to_do(f"write it beside data.train.kind, as {_beside(key)}")
        return Answer("taken", {f"data.train.{key}": said.value})

    return answer


def packed(said: Said, facts: Facts) -> Answer:
    """`block_size`: documents are joined and cut into blocks."""
    found = of_dataset("max_length")(said, facts)
    if found.standing != "taken":
        return found
    return derived("documents are joined and cut", {**found.settings, "data.train.packed": True})


def _beside(key: str) -> str:
    return "data.train.max_length (huggingface) or length (tokens)" if key == "max_length" else f"data.train.{key}"


def evaluation_split(said: Said, facts: Facts) -> Answer:
    found = facts.find(DATASET)
    if found is None or dataset(found, facts).standing != "taken":
        return to_do("write a set under data.evaluation")
    name, place = found.value, f"data.evaluation.{said.value}"
    if not str(said.value).replace("_", "").replace("-", "").isalnum():
        place = "data.evaluation.held-out"
    settings: dict[str, object] = {f"{place}.kind": "huggingface", f"{place}.name": name, f"{place}.split": said.value}
    for words, key in ((CONFIGURATION, "configuration"), (TEXT, "text"), (LABEL, "label"), (LENGTH, "max_length")):
        value = facts.value(words)
        if value is not None:
            settings[f"{place}.{key}"] = value
    if facts.find(("block_size",)) is not None:
        settings[f"{place}.packed"] = True
    return derived("as data.train, of that split", settings)


CONFIGURATION = ("dataset_config_name", "dataset_config", "data.config", "dataset.config", "data.subset")
TEXT = ("text_column", "text_column_name", "text_field", "dataset_text_field")
LABEL = ("label_column", "label_column_name", "label_field")
LENGTH = ("max_length", "max_seq_length", "max_seq_len", "seq_len", "seq_length", "block_size", "sequence_length",
          "context_length", "model_max_length")  # fmt: skip


# --- in general -----------------------------------------------------------------------------------------------------


def renamed(word: str, said: Said, facts: Facts) -> Answer:
    """As the hints of a config say it."""
    found = meaning(word, said.value, facts.context())
    if found is None:
        return Answer("not known")
    if isinstance(found, str):
        return not_there(found)
    changed = list(found.values()) != [said.value]
    return Answer("taken", found, f"for {yaml_like(said.value)}" if changed else "")

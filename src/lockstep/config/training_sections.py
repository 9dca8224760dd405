"""Sections about the step: objective, batch, optimizer, schedule, precision, memory, profile, recovery."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lockstep.strategies.section import Auto, Fraction, PathText, Positive, Section, without_effect


class BadNumbers(Section):
    """Steps with a loss or gradient norm that is not finite, or far above the steps before (a spike)."""

    nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    """Action on a NaN or infinity. skip: discard the step; rollback: also go back by `rollback_steps`; stop: also
    end the run. An fp16 overflow under a loss scale is always skipped."""
    spike: Literal["ignore", "warn", "skip", "rollback", "stop"] = "warn"
    """Action on a spike. warn: keep the step and report it; skip: discard it; rollback: also go back by
    `rollback_steps`; stop: also end the run."""
    window: Annotated[int, Field(ge=8)] = 128
    """Kept steps for the median and deviation; no spike is detected before there are as many."""
    threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 20.0
    """Deviations above the median that make a spike. A deviation is 1.4826 x the median absolute deviation, and at
    least 1 % of the median."""
    rollback_steps: Positive = 10
    """rollback: leave out the samples of this many steps, up to the bad one. The run resumes from the newest
    checkpoint or snapshot before them."""

    def _contradictions(self) -> Iterator[str]:
        if self.rollback_steps != type(self).model_fields["rollback_steps"].default and not self.rolls_back:
            yield (
                f"rollback_steps {self.rollback_steps} is for nonfinite: rollback and spike: rollback; write one of "
                "them, or leave it out"
            )

    @property
    def rolls_back(self) -> bool:
        """True if the run may go back to an earlier state."""
        return "rollback" in (self.nonfinite, self.spike)


class BatchConfig(Section):
    """The number of samples in a step. Ranks and accumulation don't change it."""

    global_size: Positive = 32
    """Samples per step, over all ranks."""
    micro_size: Positive | Auto = "auto"
    """Samples per forward and backward of a rank, at most; auto: the largest that fits. It is halved when memory runs
    out."""


def _settle_target(section: ObjectiveConfig | Optim, selector: str) -> Iterator[str]:
    """Let `target` select `custom`. Yield why they contradict each other."""
    if section.target is not None and selector not in section.model_fields_set:
        object.__setattr__(section, selector, "custom")  # the section is frozen, and not yet anyone's
    selected = getattr(section, selector)
    if selected == "custom" and section.target is None:
        yield f"{selector} custom needs `target`: module:Name or path/to/file.py:Name"
    if selected != "custom" and section.target is not None:
        yield f"{selector} is {selected}, and `target` names code of your own; write {selector}: custom, or drop target"


def _unused(section: ObjectiveConfig | Optim, selector: str, keys: Iterable[str], remedy: str) -> Iterator[str]:
    """Yield which keys don't apply to the user code that the section selects."""
    selected = getattr(section, selector)
    unused = [key for key in keys if getattr(section, key) != type(section).model_fields[key].default]
    if selected in ("custom", "given") and unused:
        yield f"{' and '.join(unused)} without effect: {selector} is {selected}; {remedy}"


INITIAL = "initial"
"""The companion that is the model as the run begins."""
_REFERENCED = ("dpo", "ipo", "kto")
PAIRS = ("dpo", "ipo", "orpo", "simpo", "reward")
"""Objectives of pairs of answers, one chosen and one rejected."""
_TAKEN_BY = {
    "beta": ("dpo", "ipo", "kto", "orpo", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "margin": ("simpo",),
    "temperature": ("distill",),
    "soft": ("distill",),
    "companion": (*_REFERENCED, "distill", "custom", "given"),
    "precompute": _REFERENCED,
}
_NOT_SMOOTHED = ("ipo", "kto", "orpo", "reward", "distill")


class ObjectiveConfig(Section):
    """The objective of the training."""

    kind: Literal[
        "auto", "next-token", "masked-lm", "classification", "seq2seq", "dpo", "ipo", "kto", "orpo", "simpo",
        "reward", "distill", "custom", "given",
    ] = "auto"  # fmt: skip
    """`auto`: the model's; dpo, ipo, orpo, simpo, reward: of pairs of answers (`data.train.rejected`); kto: of
    answers that are desirable or not (`data.train.desirable`); distill: a teacher's outputs; `given`: an object passed
    in Python."""
    label_smoothing: Fraction = 0.0
    """Fraction of a target's probability that is spread over all classes or tokens; dpo, simpo: probability that the
    two answers of a pair are swapped."""
    beta: Annotated[float, Field(gt=0)] | None = None
    """dpo, ipo, kto, orpo, simpo: strength of the preference's term; null: 0.1, for simpo 2."""
    desirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """kto: factor on the loss of a desirable answer."""
    undesirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """kto: factor on the loss of an undesirable answer."""
    margin: Annotated[float, Field(ge=0)] = 1.0
    """simpo: margin between the rewards of the two answers (gamma)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """distill: divisor of the logits of model and teacher."""
    soft: Fraction = 0.5
    """distill: weight of the divergence from the teacher; the rest is the cross-entropy of the targets."""
    companion: PathText | None = None
    """Frozen second model, with outputs that the objective compares with: `initial`, which is the model as the run
    begins, or a folder or hub name of pretrained weights (transformers). null: dpo, ipo and kto take `initial`."""
    precompute: bool = False
    """dpo, ipo, kto: compute the companion's log-probabilities of all samples before training, and keep these numbers
    instead of the companion."""
    target: PathText | None = None
    """`package.module:Name`, `path/to/file.py:Name` or registered name of a class with `count` and `loss_sum`, or of a
    torch loss such as `CrossEntropyLoss`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `target`."""

    def _contradictions(self) -> Iterator[str]:
        yield from _settle_target(self, "kind")
        yield from _unused(self, "kind", ["label_smoothing"], "smooth in your objective")
        for name, kinds in _TAKEN_BY.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.kind not in kinds:
                yield f"{name} is an option of {' and '.join(kinds)}; {self.kind} would ignore it"
        if self.label_smoothing and self.kind in _NOT_SMOOTHED:
            yield f"label_smoothing {self.label_smoothing:g} is not for {self.kind}; remove it"
        if self.kind == "distill" and self.companion is None:
            yield "distill needs a teacher: name its folder, or its name on the hub, as companion"

    @property
    def second_model(self) -> str | None:
        """The companion in use; None: there is none."""
        return self.companion or (INITIAL if self.kind in _REFERENCED else None)


class ParameterRule(Section):
    """Settings for the parameters that match."""

    match: tuple[str, ...]
    """Patterns of parameter names, such as `*.bias` or `head.*`."""
    lr_scale: Annotated[float, Field(ge=0)] = 1.0
    """Factor on the learning rate; 0 keeps the parameters as they are."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay; null: `optim.weight_decay`."""


class WeightAverage(Section):
    """An exponential moving average of the weights (EMA), used by evaluations and exports."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Share of the average that stays at each update."""
    every: Positive = 1
    """Steps between two updates of the average."""
    start: Annotated[int, Field(ge=0)] = 0
    """Steps before the average begins, as the weights then are."""


_OPTIONS = ("betas", "eps", "momentum", "nesterov")
OPTIONS_OF_NAMED = ("target", "arguments", *_OPTIONS)
"""Keys of `optim` that describe one optimizer, selected by its name."""


class Optim(Section):
    """The optimizer and its settings."""

    name: Literal[
        "adamw", "adam", "sgd", "muon", "adafactor", "lion", "adamw-8bit", "schedule-free", "custom", "given"
    ] = "adamw"
    """The optimizer. `muon` updates matrices, and other parameters by AdamW; `adamw-8bit`: AdamW of bitsandbytes, with
    moments in 8 bits; `schedule-free`: Schedule-Free AdamW; `custom`: `target`; `given`: passed in Python."""
    target: PathText | None = None
    """`package.module:Name`, `path/to/file.py:Name` or registered name of a torch optimizer, which is called with
    parameter groups."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `target`."""
    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the moments, for adam, adamw, adamw-8bit, schedule-free, lion, and muon's AdamW."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator, for adam, adamw, adamw-8bit, schedule-free, and muon's AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay, decoupled; with adam and sgd part of the gradient."""
    momentum: Fraction = 0.9
    """Momentum of sgd and muon."""
    nesterov: bool = False
    """Nesterov momentum for sgd; muon always uses it."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters with weight decay: those with two or more dims, or all."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the gradient to this global norm; null: never."""
    rules: tuple[ParameterRule, ...] = ()
    """Other settings for some parameters; the first match wins."""
    ema: WeightAverage | None = None
    """Average the weights; null: no average."""

    def _contradictions(self) -> Iterator[str]:
        yield from _settle_target(self, "name")
        yield from _unused(self, "name", _OPTIONS, "pass it to your optimizer")
        if self.nesterov and self.name == "sgd" and self.momentum == 0:
            yield "nesterov needs a momentum above 0; the usual one is 0.9"
        if self.nesterov and self.name != "sgd":
            yield f"nesterov is an option of sgd; {self.name} would ignore it"


class Plateau(Section):
    """Lower learning rates after evaluations without an improvement, by torch's ReduceLROnPlateau."""

    metric: str
    """Metric of an evaluation set, such as `held-out.loss`."""
    mode: Literal["auto", "min", "max"] = "auto"
    """auto: min for a loss or error, max for an accuracy or score, by the metric's name."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Each reduction multiplies the learning rate by this."""
    patience: Annotated[int, Field(ge=0)] = 10
    """Evaluations in a row without an improvement that change nothing; the next one reduces the learning rate."""
    threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    """Smallest change that counts as an improvement."""
    threshold_mode: Literal["rel", "abs"] = "rel"
    """rel: `threshold` is a fraction of the best value; abs: a difference."""
    cooldown: Annotated[int, Field(ge=0)] = 0
    """Evaluations after a reduction that aren't counted."""
    min_lr: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Lowest learning rate."""
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-8
    """Smaller reductions are not made."""


class Schedule(Section):
    """Learning rate as a function of progress: warmup, then the kind's curve down to `final_ratio` of the peak."""

    kind: Literal[
        "constant", "linear", "cosine", "cosine-restarts", "polynomial", "inverse-sqrt", "piecewise",
        "warmup-stable-decay", "plateau", "given",
    ] = "cosine"  # fmt: skip
    """Learning rate after the warmup; `given`: a function passed in Python, which replaces the whole schedule."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of warmup; null: see `warmup_ratio`."""
    warmup_ratio: Fraction | None = None
    """Warmup as a fraction of the run, instead of `warmup_steps`."""
    warmup_type: Literal["linear", "log"] = "linear"
    """log: DeepSpeed's logarithmic warmup."""
    decay_ratio: Fraction = 0.2
    """warmup-stable-decay: fraction of the run that decays, at its end."""
    final_ratio: Fraction = 0.0
    """Final learning rate, as a fraction of the peak."""
    power: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """polynomial: exponent of the decay."""
    cycles: Positive = 1
    """cosine-restarts: number of periods, each from the peak down to `final_ratio`."""
    milestones: tuple[tuple[Fraction, Fraction], ...] = ()
    """piecewise: pairs of a fraction of the run, and the learning rate from there on as a fraction of the peak, such as
    `[[0.5, 0.1], [0.8, 0.01]]`."""

    plateau: Plateau | None = None
    """plateau: when to reduce the learning rate, which is constant otherwise."""

    def _contradictions(self) -> Iterator[str]:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            yield "warmup_steps and warmup_ratio set the same thing; keep one"
        if self.kind == "given" and (options := without_effect(self, "kind")):
            yield f"{options} without effect: kind is given, a function that replaces the whole schedule"
        for key, kinds in _KEYS_OF_CURVES.items():
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and self.kind not in (*kinds, "given"):
                yield f"{key} is an option of kind {' or '.join(kinds)}; {self.kind} would ignore it"
        if self.final_ratio and self.kind in ("inverse-sqrt", "piecewise", "plateau"):
            yield f"final_ratio {self.final_ratio:g} is without effect: the curve of {self.kind} has no end of its own"
        if self.kind == "plateau" and self.plateau is None:
            yield "plateau needs a metric, such as plateau: {metric: held-out.loss}"
        shares = [share for share, _ in self.milestones]
        if self.kind == "piecewise" and (not shares or shares != sorted(set(shares))):
            yield "piecewise needs milestones with rising fractions of the run, such as [[0.5, 0.1], [0.8, 0.01]]"
        if self.kind == "warmup-stable-decay" and (self.warmup_ratio or 0.0) + self.decay_ratio > 1:
            yield (
                f"warmup_ratio {self.warmup_ratio} + decay_ratio {self.decay_ratio} is more than the whole run; "
                f"decay_ratio can be {1 - (self.warmup_ratio or 0.0):g} at most"
            )


_KEYS_OF_CURVES = {
    "power": ("polynomial",), "cycles": ("cosine-restarts",), "milestones": ("piecewise",), "plateau": ("plateau",),
}  # fmt: skip


class LossScale(Section):
    """Dynamic loss scaling of fp16."""

    initial: Annotated[float, Field(gt=0)] = 65536.0
    """First loss scale."""
    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    """The scale grows by this factor."""
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The scale shrinks by this factor after an overflow, which discards the step."""
    growth_interval: Positive = 2000
    """Steps without overflow before the scale grows."""


class Precision(Section):
    """Precision of the arithmetic, and of parameters at rest. Losses are always fp32."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast of forward and backward; auto: bf16 where the processor has it, otherwise fp32."""
    parameters: Literal["fp32", "bf16"] = "fp32"
    """Trained parameters and the state of their optimizer at rest. bf16: with stochastic rounding, for adamw and adam,
    under single, ddp and fsdp; `compute` is bf16 then."""
    frozen: Literal["auto", "bf16", "fp32"] = "auto"
    """Frozen parameters at rest; auto: with `model.adapter` bf16 or fp16 where the forward computes in that, except
    under DeepSpeed, otherwise as the model has them."""
    tf32: bool = True
    """Allow TF32 in fp32 matrix products on NVIDIA GPUs."""
    loss_scale: LossScale = LossScale()
    """Dynamic loss scaling of fp16, in `compute` or `parallel.fsdp.mixed_precision`."""

    def _contradictions(self) -> Iterator[str]:
        if self.parameters == "bf16" and self.compute == "auto":
            object.__setattr__(self, "compute", "bf16")  # the section is frozen, and not yet anyone's
        if self.parameters == "bf16" and self.compute != "bf16":
            yield f"parameters are bf16, but compute is {self.compute}; write compute: bf16, or leave it out"
        if self.frozen == "bf16" and self.compute == "fp16":
            yield "frozen is bf16, but compute is fp16, and a forward can't mix them; write frozen: auto"


class ActivationCheckpointing(Section):
    """Activation checkpointing: which activations a forward keeps for the backward.

    The gradient is bitwise identical; a block must draw random numbers from torch's own generators.
    """

    mode: Literal["none", "full", "selective", "budget"] = "none"
    """none: keep all activations; full: keep the inputs of each block and recompute the rest; selective: also keep the
    outputs of matrix products and attention; budget: torch's compiler selects, with `model.compile`."""
    every: Positive = 1
    """full, selective: recompute every Nth module."""
    modules: Literal["blocks"] | tuple[str, ...] = "blocks"
    """Modules to recompute: the repeated blocks, or these classes, such as `[Attention, SwiGLU]`."""
    budget: Fraction = 0.5
    """budget: fraction of the activations' memory that may be kept."""

    def _contradictions(self) -> Iterator[str]:
        for name, modes in _OPTIONS_OF_MODES.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and self.mode not in modes:
                yield f"{name} {value} is an option of mode {' or '.join(modes)}; {self.mode} would ignore it"


_OPTIONS_OF_MODES = {"every": ("full", "selective"), "modules": ("full", "selective"), "budget": ("budget",)}


class Memory(Section):
    """Ways to save memory."""

    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    activation_offload: Literal["none", "cpu"] = "none"
    """cpu: keep activations in host memory until the backward; for GPUs."""
    loss_chunk: Positive | None = None
    """Language models: compute the loss for this many positions at a time; null: all at once."""


_STEPS = re.compile(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?")


def step_range(steps: int | str) -> tuple[int, int]:
    """Return the first and the last step of `10`, or of `10..13`. Raises ValueError."""
    if (match := _STEPS.fullmatch(str(steps))) is None:
        raise ValueError(f"steps {steps!r} is no update such as 10, and no range of updates such as 10..13")
    first = int(match[1])
    last = int(match[2] or first)
    if first < 1 or last < first:
        raise ValueError(f"steps {steps} is empty: the first update is 1, and a range ends where it begins or later")
    return first, last


class ProfileConfig(Section):
    """Traces of some steps by torch.profiler, in the run's folder `profile`."""

    steps: Positive | str | None = None
    """Steps to record, such as `10..13`; null: none."""
    ranks: Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Ranks that record."""
    warmup: Annotated[int, Field(ge=0)] = 1
    """Profiler warmup steps before the trace."""
    shapes: bool = True
    """Record the shapes of inputs."""
    memory: bool = True
    """Record allocations, and on a GPU also a memory snapshot."""
    stacks: bool = False
    """Record Python stacks: larger traces, slower steps."""
    flops: bool = False
    """Estimate the FLOPs of matrix products and convolutions."""

    def _contradictions(self) -> Iterator[str]:
        if self.steps is not None:
            step_range(self.steps)
        if self.ranks == ():
            yield "ranks is empty; name ranks such as [0], or all"


NOTICES = ("aws", "gcp", "azure")
"""Clouds with a metadata service that announces when a machine will be taken back."""


class Budgets(Section):
    """Restarts by kind of failure, instead of `recovery.restarts`."""

    transient: Annotated[int, Field(ge=0)] | None = None
    """A rank is killed, or loses its peers, a connection, a disk or its driver."""
    program: Annotated[int, Field(ge=0)] | None = None
    """An exception or exit of the program."""
    hang: Annotated[int, Field(ge=0)] | None = None
    """A rank that hangs, or a collective that not all ranks reach."""
    host: Annotated[int, Field(ge=0)] | None = None
    """A host that can't be reached."""
    rollback: Annotated[int, Field(ge=0)] | None = None
    """Rollbacks in a row without progress beyond the one before."""
    memory: Annotated[int, Field(ge=0)] | None = None
    """Memory runs out; the micro-batch is halved each time. Null: until it is 1, unless `restarts` is 0."""


_HALVINGS = 64  # more than any micro-batch allows


class Watchdog(Section):
    """Limits for a rank that hangs while the others wait for it: it is reported, then killed."""

    enabled: bool = True
    """Watch the ranks."""
    least: Annotated[float, Field(gt=0)] = 2.0
    """Seconds without progress before a rank is reported, at least."""
    steps: Annotated[float, Field(ge=1)] = 5.0
    """The same in median steps; the larger of the two counts."""
    end_after: Annotated[float, Field(ge=0)] | None = 60.0
    """Seconds without progress before the rank is killed and all restart, at least twice the time before it is
    reported. Null: it is only reported."""
    other: Annotated[float, Field(gt=0)] = 300.0
    """Instead of `least` and `steps` outside of steps (start, compilation, evaluation, save, end). Must be below
    `launch.timeout`. A rank is killed after four times as long."""
    end_start_after: Annotated[float, Field(ge=0)] | None = 7200.0
    """Instead of `end_after` at the start, at the end, and between steps of your own loop; at least twice `other`.
    Null: it is only reported."""

    def _contradictions(self) -> Iterator[str]:
        if not self.enabled and (limits := without_effect(self, "enabled")):
            yield f"{limits} without effect: enabled is false; leave one of them out"
        for end, least in (("end_after", "least"), ("end_start_after", "other")):
            seconds, named = getattr(self, end), getattr(self, least)
            if seconds not in (None, type(self).model_fields[end].default) and seconds < named:
                yield f"{end} {seconds:g} is less than {least}: write {2 * named:g} or more, or null"


class Recovery(Section):
    """Restarts after failed ranks or lost hosts, under Lockstep's launcher."""

    restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts in a row from the newest checkpoint, without progress, for each kind of failure; 0: never. An exception
    that repeats at the same step ends the run. Out of memory has its own budget."""
    budgets: Budgets = Budgets()
    watchdog: Watchdog = Watchdog()
    bad_numbers: BadNumbers = BadNumbers()
    snapshot_every: Annotated[int, Field(gt=0)] | Literal["auto"] | None = "auto"
    """Steps between in-memory snapshots (/dev/shm) for restarted ranks; auto: at most 0.5 % of the time;
    null: none. They take four times the memory of the state, on several hosts five times. Only under Lockstep's
    launcher."""
    compare_every: Positive | None = None
    """Steps between comparisons of replicated state across ranks, also before each save. If it differs, ranks restart
    from the newest checkpoint. Null: never."""
    host_wait: Annotated[float, Field(ge=0)] = 120.0
    """Several hosts: seconds to wait for a lost host; 0: end the run. With MIN:MAX `launch.nodes`, wait only below
    MIN."""

    notice: str | None = None
    """Place that announces a preemption: `aws`, `gcp` or `azure` (spot instances), an http address that answers 200, or
    a file that then exists. The run saves and stops."""

    @field_validator("notice")
    @classmethod
    def _notice_is_a_place(cls, place: str | None) -> str | None:
        if place is None or place in NOTICES or place.startswith(("http://", "https://")):
            return place
        if "://" in place or not ("/" in place or "." in place):
            raise ValueError(f"{place} is none of {', '.join(NOTICES)}, no http address, and no path such as ./{place}")
        return place

    @property
    def ever(self) -> bool:
        """True if ranks restart after failures of any kind."""
        return any(self.budget(kind) for kind in Budgets.model_fields)

    def budget(self, kind: str) -> int:
        """Return how many times in a row ranks restart after failures of a kind."""
        number: int | None = getattr(self.budgets, kind, None)
        if number is None and kind == "memory" and self.restarts:
            return _HALVINGS
        return self.restarts if number is None else number

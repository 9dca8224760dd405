"""What goes with what: strategy x feature, and how it is known.

                     ddp          fsdp                         each cell
    fp16             cpu          cpu                          tested on the CPU (and on which GPU, when)
    muon             cpu          refused: whole matrices      why it can't be
    offload          -            untested                     runs with --allow-untested
                                                               -: the strategy has no such option

A test runs every cell that says `cpu` against the single process, and asks for every one that says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from lockstep.config.schema import Config, Optim
from lockstep.core.errors import ConfigError, Problem
from lockstep.plan.variants import VARIANTS, factors

if TYPE_CHECKING:
    from lockstep.plan.batch import BatchPlan

Standing = Literal["cpu", "untested", "refused", "none"]


@dataclass(frozen=True, slots=True)
class Cell:
    """Attributes:
    standing: cpu: tested there against the single process; none: the strategy has no such option.
    why: it is refused, or untested.
    gpu: where and when it was tested on one: `H200, 2026-11-20, 1a2b3c4`.
    on_cpu: it is for GPUs alone: what is said to ranks that compute on the CPU.
    """

    standing: Standing
    why: str = ""
    gpu: str = ""
    on_cpu: Problem | None = None

    def __str__(self) -> str:
        words = {"cpu": "CPU", "untested": "untested", "refused": "refused", "none": "-"}[self.standing]
        return f"{words}: {self.why}" if self.why else f"{words}, {self.gpu}" if self.gpu else words


@dataclass(frozen=True, slots=True)
class Feature:
    """Attributes:
    name: as people call it.
    key: of the config, that asks for it.
    asked: whether a run does.
    """

    name: str
    key: str
    asked: Callable[[Config, BatchPlan, int], bool]


def _optimizer(name: str) -> Feature:
    return Feature(name, "optim.name", lambda config, batch, frozen: config.optim.name == name)


def _checkpointing(name: str, mode: str) -> Feature:
    key = "memory.activation_checkpointing.mode"
    return Feature(name, key, lambda config, batch, frozen: config.memory.activation_checkpointing.mode == mode)


_CHECKPOINTING = {
    "activation checkpointing": "full",
    "selective checkpointing": "selective",
    "checkpointed segments": "segments",
    "checkpointing by budget": "budget",
    "adaptive checkpointing": "adaptive",
}

FEATURES: tuple[Feature, ...] = (
    Feature("accumulation", "batch.micro_size", lambda config, batch, frozen: batch.accumulation > 1),
    Feature("uneven batches", "batch.global_size", lambda config, batch, frozen: not batch.even),
    Feature("bf16", "precision.compute", lambda config, batch, frozen: config.precision.compute == "bf16"),
    Feature("fp16", "precision.compute", lambda config, batch, frozen: config.precision.compute == "fp16"),
    Feature("compile", "model.compile", lambda config, batch, frozen: config.model.compile),
    *(_checkpointing(name, mode) for name, mode in _CHECKPOINTING.items()),
    Feature(
        "activation offload",
        "memory.activation_offload",
        lambda config, batch, frozen: config.memory.activation_offload != "none",
    ),
    Feature("optimizer in backward", "optim.in_backward", lambda config, batch, frozen: config.optim.in_backward),
    Feature("chunked loss", "memory.loss_chunk", lambda config, batch, frozen: config.memory.loss_chunk is not None),
    Feature("frozen parameters", "model.freeze", lambda config, batch, frozen: frozen > 0),
    Feature(
        "loss parallel", "parallel.tensor_parallel.loss_parallel", lambda config, batch, frozen: _divides_logits(config)
    ),
    Feature("offload", "parallel", lambda config, batch, frozen: _offloads(config)),
    Feature("export", "", lambda config, batch, frozen: False),  # of a checkpoint, whatever wrote it
    *(_optimizer(name) for name in get_args(Optim.model_fields["name"].annotation) if name != "given"),
)


def _divides_logits(config: Config) -> bool:
    return config.parallel.tensor != 1 and config.parallel.tensor_parallel.loss_parallel


def _offloads(config: Config) -> bool:
    parallel = config.parallel
    if parallel.strategy == "deepspeed":
        return parallel.deepspeed.offload_optimizer != "none" or parallel.deepspeed.offload_param != "none"
    return parallel.strategy == "fsdp" and parallel.fsdp.cpu_offload


_CPU, _NONE = Cell("cpu"), Cell("none")
_WORST_FIRST: tuple[Standing, ...] = ("refused", "untested", "none", "cpu")
_DIVIDED = ("fsdp", "fsdp-grad-op", "fsdp-hybrid", "fsdp-hybrid-grad-op", "zero1", "zero2", "zero3")
_SPREAD = ("tensor", "tensor-sequence")
_ZERO = ("zero0", "zero1", "zero2", "zero3")
_HOOKED = "DeepSpeed's hooks are part of the forward, and have not been tried compiled; write false, or take ddp"
_WHOLE_MATRICES = "it updates whole matrices, of which a rank holds a part; take adamw, or parallel.strategy: ddp"
_PARTS_OF_MATRICES = "it updates whole matrices, of which a rank holds a part; take adamw, or leave parallel.tensor out"
_NEEDS_GPU = Cell(
    "untested",
    "FSDP2 offloads from a GPU alone, and none was at hand",
    on_cpu=Problem("", "parallel.fsdp.cpu_offload", "on the CPU parameters are already; it is for GPUs: leave it out"),
)

_GATHERED_BLOCK_BY_BLOCK = "FSDP gathers each block around its own call, and a segment is one call; take mode: full"
_CUT_ELSEWHERE = "a rank has some of the blocks alone, and would choose by itself; take mode: full"
_NOT_MEASURED = "what a block keeps isn't measured where its matrices are divided; take mode: full"
_OTHER_TENSORS = "its hooks hand on other tensors than a block has returned; take mode: full"
_OFFLOADS_FROM_GPUS = Cell(
    "untested",
    "activations are offloaded from a GPU alone, and none was at hand",
    on_cpu=Problem("", "memory.activation_offload", "on the CPU activations are already; it is for GPUs: leave it out"),
)
_REDUCED_FIRST = "gradients are reduced, divided or put together before they are applied; take single, or write false"
_TARGETS_OF_ONE = "replicas have heads of their own, and nobody tells them their targets; take single, or ddp"
_PART_OF_HEAD = "each rank has a part of the head alone; take parallel.tensor_parallel.loss_parallel, or leave it out"
_LAST_STAGE = "the last stage gives logits to the objective; leave it out"
_COMPILED_WHOLE = "a compiled forward can't be left between two blocks; write false, or take fsdp"

_COMPILED_PARTS = (
    "torch's compiler (2.13) fails on divided matrices where shapes change, as texts of unequal length do; write false"
)
_TWICE = (
    "gradients of inputs and of weights are made apart, and each would compute a block again; take pipeline-1f1b, or "
    "interleaved-1f1b"
)

_OTHERWISE: Mapping[tuple[str, str], Cell] = {
    **{(name, "compile"): Cell("refused", _COMPILED_WHOLE) for name in VARIANTS if name.startswith("pipeline")},
    **{
        (name, feature): Cell("refused", _TWICE)
        for name in ("pipeline-zero-bubble", "pipeline-zbv")
        for feature in ("activation checkpointing", "selective checkpointing", "adaptive checkpointing")
    },
    **{(name, "compile"): Cell("refused", _COMPILED_PARTS) for name in _SPREAD},
    **{(name, "offload"): _NONE for name in ("single", "dp", "ddp", "zero0")},
    **{(name, "offload"): _NEEDS_GPU for name in VARIANTS if name.startswith("fsdp")},
    **{
        (name, "checkpointed segments"): Cell("refused", _GATHERED_BLOCK_BY_BLOCK)
        for name in VARIANTS
        if "fsdp" in name
    },
    **{
        (name, feature): Cell("refused", _CUT_ELSEWHERE)
        for name in VARIANTS
        if name.startswith("pipeline")
        for feature in ("checkpointed segments", "checkpointing by budget")
    },
    **{(name, "checkpointing by budget"): Cell("refused", _NOT_MEASURED) for name in _SPREAD},
    ("zero3", "checkpointed segments"): Cell("refused", _OTHER_TENSORS),
    **{(name, "activation offload"): _OFFLOADS_FROM_GPUS for name in VARIANTS},
    **{(name, "optimizer in backward"): Cell("refused", _REDUCED_FIRST) for name in VARIANTS if name != "single"},
    ("dp", "chunked loss"): Cell("refused", _TARGETS_OF_ONE),
    **{(name, "chunked loss"): Cell("refused", _PART_OF_HEAD) for name in _SPREAD},
    **{(name, "chunked loss"): Cell("refused", _LAST_STAGE) for name in VARIANTS if name.startswith("pipeline")},
    **{(name, "compile"): Cell("refused", _HOOKED) for name in _ZERO},
    **{(name, rule): Cell("refused", _WHOLE_MATRICES) for name in _DIVIDED for rule in ("muon", "adafactor")},
    **{(name, rule): Cell("refused", _PARTS_OF_MATRICES) for name in _SPREAD for rule in ("muon", "adafactor")},
}


def cell(variant: str, feature: str) -> Cell:
    """How a feature stands under a strategy, both by their names; under a product as under the factor that it goes
    least with."""
    if feature == "loss parallel" and not set(factors(variant)) & set(_SPREAD):
        return _NONE
    found = [_OTHERWISE.get((factor, feature), _CPU) for factor in factors(variant)]
    return min(found, key=lambda one: _WORST_FIRST.index(one.standing))


def check_features(config: Config, variant: str, batch: BatchPlan, frozen: int, device: str | None = None) -> None:
    """Args:
        frozen: parameters that are not trained.
        device: that ranks compute on, cpu or cuda; None: as the config says, if it does.

    Raises:
        ConfigError: what is asked for is refused, or untested and nobody has said that it may be; all at once.
    """
    problems = list(_problems(config, variant, batch, frozen, on_cpu=(device or config.launch.device) == "cpu"))
    if problems:
        raise ConfigError(problems)


def _problems(config: Config, variant: str, batch: BatchPlan, frozen: int, *, on_cpu: bool) -> Iterator[Problem]:
    if config.optim.in_backward and batch.accumulation > 1:
        yield Problem(
            "",
            "optim.in_backward",
            f"applies the gradient of a micro-batch, and an update has {batch.accumulation} of them; write "
            f"batch.micro_size: {batch.global_size}, or in_backward: false",
        )
    for feature in FEATURES:
        if not feature.asked(config, batch, frozen):
            continue
        found = cell(variant, feature.name)
        if on_cpu and found.on_cpu is not None:
            yield found.on_cpu
        elif found.standing == "refused":
            yield Problem("", feature.key, f"{feature.name} doesn't go with {variant}: {found.why}")
        elif found.standing == "untested" and not config.run.allow_untested:
            yield Problem(
                "",
                feature.key,
                f"{feature.name} under {variant} was never tested ({found.why}); --allow-untested tries it",
            )


_FAMILIES = (
    ("Data parallel", ("single", "dp", "ddp")),
    ("FSDP", tuple(name for name in VARIANTS if name.startswith("fsdp"))),
    ("DeepSpeed ZeRO", _ZERO),
    ("Pipeline parallel", tuple(name for name in VARIANTS if name.startswith("pipeline"))),
    ("Context and tensor parallel", tuple(name for name in VARIANTS if name.startswith(("context", "tensor")))),
)


def table() -> str:
    """Return the tables of docs/strategies.md: one a family, with a row a feature and a column a strategy."""
    notes: list[str] = []
    parts = []
    for family, names in _FAMILIES:
        rows = [["", *names], ["---"] * (len(names) + 1)]
        rows += [[feature.name, *(_shown(cell(name, feature.name), notes) for name in names)] for feature in FEATURES]
        parts += [f"### {family}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*parts, "### Notes", "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]) + "\n"


def _shown(found: Cell, notes: list[str]) -> str:
    if not found.why:
        return str(found)
    note = f"{found.standing}: {found.why}"
    if note not in notes:
        notes.append(note)
    return f"{found.standing} ({notes.index(note) + 1})"


if __name__ == "__main__":
    sys.stdout.write(table())

"""The table of strategies and features: which ones work together, and the evidence.

                     ddp          zero2                        each cell
    fp16             cpu          cpu                          tested on the CPU (and on which GPU, when)
    muon             cpu          refused: whole matrices      the reason of the refusal
    act. offload     untested     untested                     runs with --allow-untested
    offload          -            cpu                          -: the strategy has no such option

A test compares every `cpu` cell with the single process, and checks that every other cell is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.config.schema import Config
from lockstep.core.errors import ConfigError, Problem
from lockstep.plan.optimizers import OPTIMIZERS
from lockstep.strategies.record import CPU, NONE, WHOLE_MATRICES, Cell, RunLayout, Standing, refused

if TYPE_CHECKING:
    from lockstep.plan.batch import BatchPlan

_WORST_FIRST: tuple[Standing, ...] = ("refused", "untested", "none", "cpu")


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """The features that a run uses; `frozen` is the number of frozen elements."""

    config: Config
    layout: RunLayout
    batch: BatchPlan
    frozen: int


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table.

    Attributes:
        key: The config key that selects it.
        requested: Whether a run uses it.
        default: Its cell under strategies that have none.
        axis: The mesh axis that it needs.
        whole_matrices: It needs whole matrices, so that a strategy that shards the state must support it.
    """

    name: str
    key: str
    requested: Callable[[FeatureRequest], bool]
    default: Cell = CPU
    axis: str = ""
    whole_matrices: bool = False


def _optimizer(name: str) -> Feature:
    requested = lambda run: run.config.optim.name == name  # noqa: E731
    return Feature(name, "optim.name", requested, whole_matrices=OPTIMIZERS[name].whole_matrices)


def _checkpointing(name: str, mode: str) -> Feature:
    key = "memory.activation_checkpointing.mode"
    return Feature(name, key, lambda run: run.config.memory.activation_checkpointing.mode == mode)


def _quantization(kind: str) -> Feature:
    def requested(run: FeatureRequest) -> bool:
        return run.config.model.quantization is not None and run.config.model.quantization.kind == kind

    return Feature(f"{kind} base", "model.quantization.kind", requested)


_WHOLE_MATRICES = refused("it updates whole matrices, and a rank holds a shard; take adamw, or parallel.strategy: fsdp")
_OFFLOADS_FROM_GPUS = Cell(
    "untested",
    "activations are offloaded only from a GPU, where its numbers weren't compared",
    on_cpu=Problem("", "memory.activation_offload", "on the CPU activations are already; it is for GPUs: leave it out"),
)

FEATURES: tuple[Feature, ...] = (
    Feature("accumulation", "batch.micro_size", lambda run: run.batch.accumulation > 1),
    Feature("uneven batches", "batch.global_size", lambda run: not run.batch.even),
    Feature("bf16", "precision.compute", lambda run: run.config.precision.compute == "bf16"),
    Feature("fp16", "precision.compute", lambda run: run.config.precision.compute == "fp16"),
    Feature(
        "bf16 parameters",
        "precision.parameters",
        lambda run: run.config.precision.parameters == "bf16",
        refused("an update rounds them by the places of their elements; take single, ddp or fsdp, or write fp32"),
    ),
    Feature("compile", "model.compile", lambda run: run.config.model.compile),
    _checkpointing("activation checkpointing", "full"),
    _checkpointing("selective checkpointing", "selective"),
    Feature(
        "activation offload",
        "memory.activation_offload",
        lambda run: run.config.memory.activation_offload != "none",
        _OFFLOADS_FROM_GPUS,
    ),
    Feature("chunked loss", "memory.loss_chunk", lambda run: run.config.memory.loss_chunk is not None),
    Feature("frozen parameters", "model.freeze", lambda run: run.frozen > 0),
    Feature("averaged weights", "optim.ema", lambda run: run.config.optim.ema is not None),
    Feature("adapters", "model.adapter", lambda run: run.config.model.adapter is not None),
    Feature("companion", "objective.companion", lambda run: run.config.objective.second_model is not None),
    _quantization("nf4"),
    _quantization("int8"),
    Feature(
        "loss parallel",
        "parallel.tensor_parallel.loss_parallel",
        lambda run: run.config.parallel.tensor != 1 and run.config.parallel.tensor_parallel.loss_parallel,
        axis="tensor",
    ),
    Feature(
        "offload",
        "parallel",
        lambda run: run.layout.strategy.memory.offloads(run.layout.strategy.options_of(run.config.parallel)),
        NONE,
    ),
    Feature("export", "", lambda run: False),  # of a checkpoint, whatever wrote it
    *(_optimizer(name) for name in OPTIMIZERS if name not in ("custom", "given")),
)
_BY_NAME = {feature.name: feature for feature in FEATURES}


def cell(layout: RunLayout, feature: str) -> Cell:
    """Return the cell of a feature under a layout: the worst of its cells under the layout's factors."""
    row = _BY_NAME[feature]
    if row.axis and all(partition.axis != row.axis for partition in layout.partitions):
        return NONE
    default = _WHOLE_MATRICES if row.whole_matrices and layout.variant.divides else row.default
    key = WHOLE_MATRICES if row.whole_matrices else feature
    of_layout = {**layout.strategy.cells, **layout.variant.cells}
    under_strategy = of_layout.get(feature) or of_layout.get(key) or default
    cells = [*(partition.cells.get(key, CPU) for partition in layout.partitions), under_strategy]
    return min(cells, key=lambda each: _WORST_FIRST.index(each.standing))


def refusal(run: FeatureRequest) -> str | None:
    """Return the first feature of a run that its layout refuses, and why; None: it refuses none."""
    for feature in FEATURES:
        if feature.requested(run) and (state := cell(run.layout, feature.name)).standing == "refused":
            return f"{feature.name} doesn't go with {run.layout.name}: {state.why}"
    return None


def check_features(run: FeatureRequest, device: str | None = None) -> None:
    """Refuse features that don't work together on a device (None: the config's `launch.device`).

    Raises:
        ConfigError: Lists the features that are refused, or untested without `run.allow_untested`.
    """
    if problems := list(_problems(run, on_cpu=(device or run.config.launch.device) == "cpu")):
        raise ConfigError(problems)


def _problems(run: FeatureRequest, *, on_cpu: bool) -> Iterator[Problem]:
    layout = run.layout.name
    for feature in (feature for feature in FEATURES if feature.requested(run)):
        state = cell(run.layout, feature.name)
        if on_cpu and state.on_cpu is not None:
            yield state.on_cpu
        elif state.standing == "refused":
            yield Problem("", feature.key, f"{feature.name} doesn't go with {layout}: {state.why}")
        elif state.standing == "untested" and not run.config.run.allow_untested:
            why = f"{feature.name} under {layout} was never tested ({state.why}); --allow-untested tries it"
            yield Problem("", feature.key, why)

"""What goes with what: strategy x feature, and how it is known.

                     ddp          fsdp                         each cell
    fp16             cpu          cpu                          tested on the CPU (and on which GPU, when)
    muon             cpu          refused: whole matrices      why it can't be
    offload          -            untested                     runs with --allow-untested
                                                               -: the strategy has no such option

A row states what holds by default; strategies and partitions state what differs. A test runs every cell that says
`cpu` against the single process, and asks for every one that says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from lockstep.config.schema import Config, Optim
from lockstep.core.errors import ConfigError, Problem
from lockstep.strategies.record import CPU, NONE, Cell, RunLayout, Standing, refused
from lockstep.strategies.registry import layouts

if TYPE_CHECKING:
    from lockstep.plan.batch import BatchPlan

_WORST_FIRST: tuple[Standing, ...] = ("refused", "untested", "none", "cpu")


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """What a run asks for.

    Attributes:
        frozen: The number of parameters that are not trained.
    """

    config: Config
    layout: RunLayout
    batch: BatchPlan
    frozen: int


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table.

    Attributes:
        name: As people call it.
        key: The key of the config that asks for it.
        asked: Whether a run does.
        default: How it stands under strategies that don't state otherwise.
        axis: The mesh axis that it needs.
        whole_matrices: It needs whole matrices in one place, so that no shard of the state will do.
    """

    name: str
    key: str
    asked: Callable[[FeatureRequest], bool]
    default: Cell = CPU
    axis: str = ""
    whole_matrices: bool = False


def _optimizer(name: str) -> Feature:
    asked = lambda run: run.config.optim.name == name  # noqa: E731
    return Feature(name, "optim.name", asked, whole_matrices=name in ("muon", "adafactor"))


def _checkpointing(name: str, mode: str) -> Feature:
    key = "memory.activation_checkpointing.mode"
    return Feature(name, key, lambda run: run.config.memory.activation_checkpointing.mode == mode)


_WHOLE_MATRICES = refused(
    "it updates whole matrices, of which a rank holds a part; take adamw, or parallel.strategy: ddp"
)
_REDUCED_FIRST = refused(
    "gradients are reduced, divided or put together before they are applied; take single, or write false"
)
_OFFLOADS_FROM_GPUS = Cell(
    "untested",
    "activations are offloaded from a GPU alone, and none was at hand",
    on_cpu=Problem("", "memory.activation_offload", "on the CPU activations are already; it is for GPUs: leave it out"),
)

FEATURES: tuple[Feature, ...] = (
    Feature("accumulation", "batch.micro_size", lambda run: run.batch.accumulation > 1),
    Feature("uneven batches", "batch.global_size", lambda run: not run.batch.even),
    Feature("bf16", "precision.compute", lambda run: run.config.precision.compute == "bf16"),
    Feature("fp16", "precision.compute", lambda run: run.config.precision.compute == "fp16"),
    Feature("compile", "model.compile", lambda run: run.config.model.compile),
    _checkpointing("activation checkpointing", "full"),
    _checkpointing("selective checkpointing", "selective"),
    _checkpointing("checkpointed segments", "segments"),
    _checkpointing("checkpointing by budget", "budget"),
    _checkpointing("adaptive checkpointing", "adaptive"),
    Feature(
        "activation offload",
        "memory.activation_offload",
        lambda run: run.config.memory.activation_offload != "none",
        default=_OFFLOADS_FROM_GPUS,
    ),
    Feature(
        "optimizer in backward",
        "optim.in_backward",
        lambda run: run.config.optim.in_backward,
        default=_REDUCED_FIRST,
    ),
    Feature("chunked loss", "memory.loss_chunk", lambda run: run.config.memory.loss_chunk is not None),
    Feature("frozen parameters", "model.freeze", lambda run: run.frozen > 0),
    Feature(
        "loss parallel",
        "parallel.tensor_parallel.loss_parallel",
        lambda run: run.config.parallel.tensor != 1 and run.config.parallel.tensor_parallel.loss_parallel,
        axis="tensor",
    ),
    Feature(
        "offload",
        "parallel",
        lambda run: run.layout.strategy.offloads(run.layout.strategy.options_of(run.config.parallel)),
        default=NONE,
    ),
    Feature("export", "", lambda run: False),  # of a checkpoint, whatever wrote it
    *(_optimizer(name) for name in get_args(Optim.model_fields["name"].annotation) if name not in ("custom", "given")),
)
_BY_NAME = {feature.name: feature for feature in FEATURES}


def cell(layout: RunLayout, feature: str) -> Cell:
    """Return how a feature stands under a layout: as under that of its factors that it goes least with."""
    row = _BY_NAME[feature]
    if row.axis and all(partition.axis != row.axis for partition in layout.partitions):
        return NONE
    cells = [*(partition.cells.get(feature, CPU) for partition in layout.partitions), _under_strategy(layout, row)]
    return min(cells, key=lambda one: _WORST_FIRST.index(one.standing))


def _under_strategy(layout: RunLayout, row: Feature) -> Cell:
    default = _WHOLE_MATRICES if row.whole_matrices and layout.variant.divides else row.default
    return layout.variant.cells.get(row.name) or layout.strategy.cells.get(row.name) or default


def check_features(run: FeatureRequest, device: str | None = None) -> None:
    """Refuse what doesn't go together.

    Args:
        device: What ranks compute on, cpu or cuda; None: as the config says, if it does.

    Raises:
        ConfigError: what is asked for is refused, or untested and nobody has said that it may be; all at once.
    """
    problems = list(_problems(run, on_cpu=(device or run.config.launch.device) == "cpu"))
    if problems:
        raise ConfigError(problems)


def _problems(run: FeatureRequest, *, on_cpu: bool) -> Iterator[Problem]:
    batch, layout = run.batch, run.layout.name
    if run.config.optim.in_backward and batch.accumulation > 1:
        yield Problem(
            "",
            "optim.in_backward",
            f"applies the gradient of a micro-batch, and an update has {batch.accumulation} of them; write "
            f"batch.micro_size: {batch.global_size}, or in_backward: false",
        )
    for feature in (feature for feature in FEATURES if feature.asked(run)):
        state = cell(run.layout, feature.name)
        if on_cpu and state.on_cpu is not None:
            yield state.on_cpu
        elif state.standing == "refused":
            yield Problem("", feature.key, f"{feature.name} doesn't go with {layout}: {state.why}")
        elif state.standing == "untested" and not run.config.run.allow_untested:
            why = f"{feature.name} under {layout} was never tested ({state.why}); --allow-untested tries it"
            yield Problem("", feature.key, why)


def table() -> str:
    """Return the tables of docs/strategies.md: one a family, with a row a feature and a column a strategy."""
    notes: list[str] = []
    parts = []
    columns = list(layouts().values())
    for family in dict.fromkeys(layout.family for layout in columns):
        members = [layout for layout in columns if layout.family == family]
        rows = [["", *(layout.name for layout in members)], ["---"] * (len(members) + 1)]
        rows += [
            [feature.name, *(_shown(cell(layout, feature.name), notes) for layout in members)] for feature in FEATURES
        ]
        parts += [f"### {family}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*parts, "### Notes", "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]) + "\n"


def _shown(state: Cell, notes: list[str]) -> str:
    if not state.why:
        return str(state)
    note = f"{state.standing}: {state.why}"
    if note not in notes:
        notes.append(note)
    return f"{state.standing} ({notes.index(note) + 1})"


if __name__ == "__main__":
    sys.stdout.write(table())

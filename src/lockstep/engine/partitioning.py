"""The partition of a model into the stages of a pipeline.

rank 0   keeps  embedding, blocks.0, blocks.1           the rest has no weights there
rank 1   keeps  blocks.2, blocks.3, norm, head          under the same names as in the whole model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import nn

from lockstep.core.errors import ConfigError, Problem
from lockstep.engine.module_calls import forward_called
from lockstep.engine.placeholders import OuterModule, no_chain, outer_modules, refuse_tied_blocks
from lockstep.plan.stages import Schedule, balanced

_COLLECTED = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Keys of a transformers config that add something of each block to the outputs."""


@dataclass(frozen=True, slots=True)
class PartitionSpec:
    """The requested partition of a pipeline, for the rank at coordinate `rank`.

    Attributes:
        split: Names of the first blocks of stages, from the second on; None: stages of about the same cost.
    """

    rank: int
    ranks: int
    schedule: Schedule
    stages_per_rank: int
    split: Sequence[str] | None

    @property
    def stages(self) -> int:
        """Stages of the whole model."""
        return self.ranks * self.stages_per_rank


def check_partition(model: nn.Module, blocks: Sequence[str], spec: PartitionSpec) -> None:
    """Raise ConfigError if the model can't be partitioned so, as far as its modules show."""
    refuse_no_chain(model, blocks)
    first_blocks(model, blocks, spec, outer_modules(model, blocks, {}))
    refuse_tied_blocks(model, blocks)


def refuse_no_chain(model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise ConfigError if the model has no chain of blocks, or needs more of each than it passes on."""
    kind = type(model).__name__
    collected = next((key for key in _COLLECTED if getattr(getattr(model, "config", None), key, False)), None)
    if collected is not None:
        raise no_chain(
            f"{kind} collects something of all its blocks ({collected}: true), and a stage has its own; set it to false"
        )
    parents = dict.fromkeys(name.rpartition(".")[0] for name in blocks)
    if len(parents) > 1:
        raise no_chain(f"{kind} has several lists of blocks ({', '.join(parents)}), and stages need one chain")
    if not blocks:
        raise no_chain(f"{kind} has no repeated blocks: no ModuleList or Sequential of two layers of one class or more")
    parent = model.get_submodule(next(iter(parents)))
    if isinstance(parent, nn.Sequential) and len(parent) > len(blocks):  # their names leave repetitions out
        raise no_chain(
            "a Sequential calls one of its modules twice: stages call each block once; make one for each place"
        )


def first_blocks(
    model: nn.Module, blocks: Sequence[str], spec: PartitionSpec, outer: Sequence[OuterModule]
) -> list[int]:
    """Return the index of each stage's first block."""
    if len(blocks) < spec.stages:
        product = f"{spec.ranks} x {spec.stages_per_rank} = " if spec.stages_per_rank > 1 else ""
        has = f"{type(model).__name__} has {len(blocks)} blocks"
        why = f"{product}{spec.stages} stages, but {has}; take at most that many"
        raise ConfigError(Problem("", "parallel.pipeline", why))
    if spec.split is None:
        costs = [_cost(model.get_submodule(name)) for name in blocks]
        after = [module for _, module, side in outer if side == "after"]
        cost_after = float(sum(parameter.numel() for module in after for parameter in module.parameters(recurse=False)))
        return balanced(costs, spec.stages, cost_after)
    return _named_blocks(blocks, spec.split, spec.stages)


def _named_blocks(blocks: Sequence[str], split: Sequence[str], stages: int) -> list[int]:
    firsts = [0, *(blocks.index(name) for name in split if name in blocks)]
    if len(firsts) != stages or len(firsts) != len(split) + 1 or firsts != sorted(set(firsts)):
        why = (
            f"{', '.join(split)}: name the first block of each of the {stages} stages from the second on, in the "
            f"model's order, from {', '.join(blocks[1:4])}, ..."
        )
        raise ConfigError(Problem("", "parallel.pipeline_parallel.split", why))
    return firsts


def _cost(module: nn.Module) -> float:
    """Return the number of weights that multiply a token: tables are only looked up."""
    embeddings = (child for child in module.modules() if isinstance(child, nn.Embedding))
    tables = {id(parameter) for embedding in embeddings for parameter in embedding.parameters()}
    return float(sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in tables))


def empty_block(name: str, module: nn.Module) -> None:
    """Remove what a block of another stage holds; it keeps its class and plain attributes, which a model may read."""
    module._modules.clear()
    module._parameters.clear()
    module._buffers.clear()
    cast("Any", module).forward = partial(_refuse_call, name)


def _refuse_call(name: str, *args: Any, **kwargs: Any) -> Any:
    raise forward_called(name, "parallel.pipeline")

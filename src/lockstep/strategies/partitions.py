"""The mesh axes along which a model or its sequences are partitioned, beside the strategy that holds the state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lockstep.strategies.record import Cell, Partition, refused
from lockstep.strategies.section import Auto, Positive, Section

if TYPE_CHECKING:
    from lockstep.config.schema import Parallel

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv"]


class PipelineParallel(Section):
    """How a model is cut into stages, and in which order micro-batches go through them."""

    schedule: Schedule = "1f1b"
    """1f1b holds as many micro-batches as there are stages, gpipe all; interleaved-1f1b gives each rank several stages
    and waits less; zero-bubble (interleaved) and zbv (two stages a rank, in a V) put off gradients of weights until a
    rank would wait."""
    stages_per_rank: Positive | Auto = "auto"
    """auto: 2 where the schedule interleaves, otherwise 1; zbv always has 2."""
    split: tuple[str, ...] | Auto = "auto"
    """Names of the blocks that stages begin with, from the second stage on; auto: stages of about the same cost."""


class TensorParallelOptions(Section):
    """How the matrices of a model are divided over the ranks of `parallel.tensor`."""

    plan: Literal["auto"] | dict[str, str] = "auto"
    """auto: our transformer's, or the one that a Hugging Face config carries; or the style of each module by a pattern
    of its name, such as `{"layers.*.query": colwise, "layers.*.out": rowwise}`."""
    sequence_parallel: bool = False
    """Each rank keeps its own positions of what lies between the divided matrices, which norms and dropout work on."""
    loss_parallel: bool = False
    """The loss is computed on logits that stay divided by the vocabulary; in evaluations they are put together."""


_SOME_BLOCKS = refused("a rank has some of the blocks alone, and would choose by itself; take mode: full")
_TWICE = refused(
    "gradients of inputs and of weights are made apart, and each would compute a block again; take pipeline-1f1b, or "
    "interleaved-1f1b"
)
_PIPELINE = {
    "compile": refused("a compiled forward can't be left between two blocks; write false, or take fsdp"),
    "checkpointed segments": _SOME_BLOCKS,
    "checkpointing by budget": _SOME_BLOCKS,
    "chunked loss": refused("the last stage gives logits to the objective; leave it out"),
}
_WEIGHTS_APART = {
    **_PIPELINE,
    "activation checkpointing": _TWICE,
    "selective checkpointing": _TWICE,
    "adaptive checkpointing": _TWICE,
}
_MATRICES = refused("it updates whole matrices, of which a rank holds a part; take adamw, or leave parallel.tensor out")
_TENSOR = {
    "compile": refused(
        "torch's compiler (2.13) fails on divided matrices where shapes change, as texts of unequal length do; write "
        "false"
    ),
    "checkpointing by budget": refused(
        "what a block keeps isn't measured where its matrices are divided; take mode: full"
    ),
    "chunked loss": refused(
        "each rank has a part of the head alone; take parallel.tensor_parallel.loss_parallel, or leave it out"
    ),
    "muon": _MATRICES,
    "adafactor": _MATRICES,
}


def _pipeline(schedule: Schedule, degree: int | Auto, cells: dict[str, Cell], *, product: bool = False) -> Partition:
    keys = {"pipeline": degree, "pipeline_parallel": {"schedule": schedule}}
    return Partition(
        name=f"pipeline-{schedule}",
        axis="pipeline",
        family="Pipeline parallel",
        parallel=keys,
        cells=cells,
        product=product,
    )


_INNER = "Context and tensor parallel"
PARTITIONS: tuple[Partition, ...] = (
    _pipeline("gpipe", "auto", _PIPELINE),
    _pipeline("1f1b", "auto", _PIPELINE, product=True),
    _pipeline("interleaved-1f1b", 2, _PIPELINE),
    _pipeline("zero-bubble", 2, _WEIGHTS_APART),
    _pipeline("zbv", 2, _WEIGHTS_APART),
    Partition(
        name="context", axis="context", family=_INNER, parallel={"context": 2}, divides_model=False, product=True
    ),
    Partition(
        name="tensor",
        axis="tensor",
        family=_INNER,
        parallel={"tensor": 2, "tensor_parallel": {"sequence_parallel": False}},
        cells=_TENSOR,
        product=True,
    ),
    Partition(
        name="tensor-sequence",
        axis="tensor",
        family=_INNER,
        parallel={"tensor": 2, "tensor_parallel": {"sequence_parallel": True}},
        cells=_TENSOR,
    ),
)
AXES = tuple(dict.fromkeys(partition.axis for partition in PARTITIONS))


def partitions_of(parallel: Parallel) -> tuple[Partition, ...]:
    """Return the partitions that a config asks for, in the order of the axes."""
    names = []
    if parallel.pipeline != 1:
        names.append(f"pipeline-{parallel.pipeline_parallel.schedule}")
    if parallel.context != 1:
        names.append("context")
    if parallel.tensor != 1:
        names.append("tensor-sequence" if parallel.tensor_parallel.sequence_parallel else "tensor")
    by_name = {partition.name: partition for partition in PARTITIONS}
    return tuple(by_name[name] for name in names)

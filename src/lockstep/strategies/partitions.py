"""The mesh axes along which a model or its sequences are partitioned, in addition to the strategy for the state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lockstep.strategies.record import PACKAGED, WHOLE_MATRICES, Cell, Partition, refused
from lockstep.strategies.section import Auto, Positive, Section

if TYPE_CHECKING:
    from lockstep.config.schema import Parallel

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv"]


class PipelineParallel(Section):
    """The partition of a model into stages, and the order of micro-batches through them."""

    schedule: PipelineSchedule = "1f1b"
    """gpipe keeps activations of all micro-batches, 1f1b of as many as there are stages; interleaved-1f1b has several
    stages per rank and waits less; zero-bubble and zbv delay weight gradients to fill the bubble."""
    stages_per_rank: Positive | Auto = "auto"
    """auto: 2 if the schedule interleaves, otherwise 1; zbv always has 2."""
    split: tuple[str, ...] | Auto = "auto"
    """Names of the blocks that stages begin with, from the second stage on; auto: stages of equal cost."""


class TensorParallelOptions(Section):
    """The sharding of a model's matrices over the ranks of `parallel.tensor`."""

    plan: Literal["auto"] | dict[str, str] = "auto"
    """auto: the plan of the model or its Hugging Face config; or a style for each pattern of module names, such as
    `{"layers.*.query": colwise, "layers.*.out": rowwise}`."""
    sequence_parallel: bool = False
    """Shard activations between the sharded matrices by position."""
    loss_parallel: bool = False
    """Compute the loss on logits sharded by vocabulary."""


_TWICE = refused(
    "gradients of inputs and of weights are computed separately, and each would recompute a block; take pipeline-1f1b, "
    "or interleaved-1f1b"
)
_WHOLE_MODEL = {
    "bf16 parameters": refused("it is for whole models and sequences; take single, ddp or fsdp alone, or write fp32")
}
_PIPELINE = {
    "companion": refused("a companion has no stages; leave it out, or take fsdp"),
    **_WHOLE_MODEL,
    "compile": refused("a compiled forward can't be left between two blocks; write false, or take fsdp"),
    "chunked loss": refused("the last stage passes logits to the objective; leave it out"),
}
_CONTEXT = {
    **_WHOLE_MODEL,
    "companion": refused("a companion sees whole sequences, and a rank has a part of each; leave it out, or take fsdp"),
}
_CHECKPOINTING = ("activation checkpointing", "selective checkpointing")
_WEIGHTS_APART = {**_PIPELINE, **dict.fromkeys(_CHECKPOINTING, _TWICE)}
_OF_PEFT = refused("peft's layers keep their matrices whole; take fsdp, or leave parallel.tensor out")
_TENSOR = {
    **dict.fromkeys(PACKAGED, refused("it works on whole parameters; take adamw, or leave parallel.tensor out")),
    **_WHOLE_MODEL,
    **dict.fromkeys(("adapters", "nf4 base", "int8 base"), _OF_PEFT),
    "compile": refused(
        "torch's compiler (2.13) fails on sharded matrices where shapes change, as texts of different lengths do; "
        "write false"
    ),
    "chunked loss": refused(
        "each rank has only a shard of the head; take parallel.tensor_parallel.loss_parallel, or leave it out"
    ),
    WHOLE_MATRICES: refused(
        "it updates whole matrices, and a rank holds a shard; take adamw, or leave parallel.tensor out"
    ),
}


def _pipeline(
    schedule: PipelineSchedule, degree: int | Auto, cells: dict[str, Cell], *, product: bool = False
) -> Partition:
    keys, name = {"pipeline": degree, "pipeline_parallel": {"schedule": schedule}}, f"pipeline-{schedule}"
    return Partition(
        name=name, axis="pipeline", family="Pipeline parallel", parallel=keys, cells=cells, product=product
    )


def _tensor(name: str, *, sequence_parallel: bool, product: bool = False) -> Partition:
    keys = {"tensor": 2, "tensor_parallel": {"sequence_parallel": sequence_parallel}}
    return Partition(name=name, axis="tensor", family=_INNER, parallel=keys, cells=_TENSOR, product=product)


_INNER = "Context and tensor parallel"
PARTITIONS: tuple[Partition, ...] = (
    _pipeline("gpipe", "auto", _PIPELINE),
    _pipeline("1f1b", "auto", _PIPELINE, product=True),
    _pipeline("interleaved-1f1b", 2, _PIPELINE),
    _pipeline("zero-bubble", 2, _WEIGHTS_APART),
    _pipeline("zbv", 2, _WEIGHTS_APART),
    Partition(
        name="context",
        axis="context",
        family=_INNER,
        parallel={"context": 2},
        divides_model=False,
        product=True,
        cells=_CONTEXT,
    ),
    _tensor("tensor", sequence_parallel=False, product=True),
    _tensor("tensor-sequence", sequence_parallel=True),
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
    return tuple(partition for partition in PARTITIONS if partition.name in names)

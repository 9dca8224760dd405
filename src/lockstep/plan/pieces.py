"""What doesn't go with a model that is itself cut over ranks, by stages or by matrices, or whose sequences are.

Options of DistributedDataParallel have no part in it: its gradients are summed over replicas by `sharding.replicas`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.schema import DDP, TransformerModel
from lockstep.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from lockstep.config.schema import Config, PipelineParallel
    from lockstep.plan.mesh import Mesh


def refuse_for_pieces(config: Config, strategy: str, mesh: Mesh) -> None:
    """Raises ConfigError: something was asked for that can't be done, or would be ignored; all at once."""
    if mesh.pieces == mesh.context == 1:
        return
    problems = [Problem("", key, message) for key, message in _problems(config, strategy, mesh).items()]
    if problems:
        raise ConfigError(problems)


def before_unused(strategy: str, mesh: Mesh) -> str:
    """Return what has to change first where `parallel.ddp.find_unused_parameters` is refused ("leave x out and ")."""
    if strategy == "deepspeed":
        return "take parallel.strategy: ddp and "
    cuts = [f"parallel.{axis}" for axis in ("pipeline", "tensor") if getattr(mesh, axis) > 1]
    return f"leave {' and '.join(cuts)} out and " if cuts else ""


def _problems(config: Config, strategy: str, mesh: Mesh) -> dict[str, str]:
    """By key."""
    parallel, found = config.parallel, {}
    axis = "pipeline" if mesh.pipeline > 1 else "tensor" if mesh.tensor > 1 else "context"
    where = f"with parallel.{axis} {getattr(mesh, axis)}"
    if config.run.determinism == "invariant":
        found["run.determinism"] = f"invariant needs every rank to compute the whole model; {where} take deterministic"
    if mesh.pieces == 1:
        return found
    for name, usual in DDP():
        value = getattr(parallel.ddp, name)
        if value != usual:
            found[f"parallel.ddp.{name}"] = (
                f"{value} is for DDP's own reduction, which isn't used {where}; leave it out"
            )
    if mesh.pipeline > 1:
        found |= _of_pipelines(parallel.pipeline_parallel, strategy)
    if mesh.tensor > 1 and isinstance(config.model, TransformerModel):
        found |= _of_heads(config.model, mesh.tensor)
    if mesh.pipeline > 1 and mesh.tensor > 1 and parallel.tensor_parallel.sequence_parallel:
        found["parallel.tensor_parallel.sequence_parallel"] = (
            "true, but the stages of a pipeline hand on all positions; write false, or leave parallel.pipeline out"
        )
    return found


def _of_heads(model: TransformerModel, degree: int) -> dict[str, str]:
    """Each rank has whole ones."""
    for name, size in (("heads", model.heads), ("key-value heads", model.kv_heads or model.heads)):
        if size % degree:
            return {
                "parallel.tensor": f"{degree} doesn't divide the {size} {name}; take {nearest_divisors(size, degree)}"
            }
    return {}


def nearest_divisors(size: int, degree: int) -> str:
    """The divisors of `size` next to `degree`, below and above."""
    below = max(one for one in range(1, min(size, degree) + 1) if size % one == 0)
    above = next((one for one in range(degree, size + 1) if size % one == 0), None)
    return f"{below}" if above is None else f"{below} or {above}"


def _of_pipelines(options: PipelineParallel, strategy: str) -> dict[str, str]:
    schedule, stages, found = options.schedule, options.stages_per_rank, {}
    if strategy == "fsdp" and schedule in ("zero-bubble", "zbv"):
        found["parallel.pipeline_parallel.schedule"] = (
            f"{schedule} makes gradients of weights outside of a backward, where FSDP doesn't see them; "
            f"take interleaved-1f1b or 1f1b, or parallel.strategy: ddp"
        )
    fixed = {"zbv": 2, "gpipe": 1, "1f1b": 1}.get(schedule)
    if fixed is not None and stages not in ("auto", fixed):
        other = "" if schedule == "zbv" else "take interleaved-1f1b, or "
        found["parallel.pipeline_parallel.stages_per_rank"] = (
            f"{stages}, but {schedule} has {fixed} a rank; {other}leave it out"
        )
    return found

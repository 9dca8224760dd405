"""Shows the parts of a traced update beside the plan's: which takes longer than predicted, and what that means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from lockstep.assembly.user_objects import UserObjects, refuse_given
from lockstep.core.errors import ConfigError
from lockstep.core.formatting import aligned, short_time
from lockstep.plan.gpus import GPUCluster, known_gpu, parse_cluster
from lockstep.simulation.estimate import estimator_of
from lockstep.simulation.timing import SHARES, Share, StepTime

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.monitor.attempts import Attempt
    from lockstep.profiling.traces import Trace

_NAMES: Mapping[Share, tuple[str, ...]] = {
    "communication": ("nccl", "c10d", "gloo", "fsdp::"),
    "optimizer": ("_fused_ada", "_fused_sgd", "aten::_foreach", "Optimizer.step"),
    "attention": ("attention", "flash", "fmha"),
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "conv", "gemm", "linear"),
}
"""The words in the names of operators by part, the first that has one; others move bytes."""
_MEANINGS: Mapping[Share, str] = {
    "matmul": "products reach less of the peak: a lower clock (nvidia-smi -q -d CLOCK), or sizes that fill it badly",
    "attention": "another kernel than flash attention computes it: see the model's attn_implementation",
    "memory": "operations are not fused, or copy: try model.compile: true",
    "optimizer": "it isn't one fused kernel: see optim",
    "communication": "links are slower than assumed, or others use them: lockstep doctor --ranks N measures them",
    "host": "Python can't issue operations fast enough: raise batch.micro_size, or set model.compile: true",
}
_PHASES: Mapping[str, tuple[Sequence[str], Sequence[Share]]] = {
    "forward, backward and communication": (
        ("forward", "backward", "communication"),
        ("matmul", "attention", "memory", "communication", "host", "bubble"),
    ),
    "the optimizer": (("optimizer",), ("optimizer",)),
    "data, saves and Python between steps, which the plan doesn't count,": (("data", "save", "host"), ()),
}
"""The phases of an update, and the plan's parts in them: on a GPU collectives are waited for inside of forward, too."""
_SHOWN = 1e-6  # seconds
_NOTABLE = 0.05  # of an update


def cluster_of_run(attempt: Attempt, gpus: str | None) -> GPUCluster | None:
    """Return the GPUs of a run: as `--gpus` says, or of known ones by their driver's name; None: unknown."""
    ranks = int(attempt.number("ranks") or 1)
    per_node = max((number for _, number in attempt.hosts), default=ranks)
    if gpus is not None:
        cluster = parse_cluster(gpus, max(1, ranks // per_node))
        if (attempt.facts.get("device") == "cpu") != (cluster.gpu.device == "cpu"):
            raise ConfigError(f"--gpus {gpus}: the run was on {attempt.facts.get('device')}")
        if cluster.ranks != ranks:
            raise ConfigError(f"--gpus {gpus}: the run has {ranks} ranks, {per_node} of a node")
        return cluster
    gpu = known_gpu(str(attempt.facts.get("device")))
    return None if gpu is None or ranks % per_node else GPUCluster(gpu, per_node, ranks // per_node)


def planned_time(loaded: LoadedConfig, attempt: Attempt, cluster: GPUCluster) -> StepTime:
    """Return the predicted time of a run's step. Raises ConfigError or Unpredictable."""
    refuse_given(loaded)
    if loaded.config.model.compile:
        raise ConfigError("the time of fused operations isn't predicted, and model.compile makes them")
    size = int(attempt.number("micro_size") or 1)
    config = loaded.config.with_values(batch={"micro_size": size})
    if config.parallel.strategy == "auto":
        config = config.with_values(parallel={"strategy": attempt.facts.get("strategy")})
    return estimator_of(config, cluster.ranks, None, UserObjects(), cluster).step_time(config, cluster)


def measured_parts(trace: Trace) -> dict[Share, float]:
    """Return the seconds of a traced update by part, as a plan divides it."""
    parts: dict[Share, float] = dict.fromkeys(SHARES, 0.0)
    for operator in trace.operators:
        parts[_part_of(operator.name)] += operator.seconds
    if (device := trace.device) is not None:
        parts["communication"], parts["host"] = device.exposed, max(0.0, device.idle - device.stalled)
    else:
        model = ("forward", "backward")
        parts["host"] = sum(trace.outside.get(phase, 0.0) for phase in model)
        inner = parts["host"] + parts["matmul"] + parts["attention"]
        parts["memory"] = max(0.0, sum(trace.split.get(phase, 0.0) for phase in model) - inner)
        parts["optimizer"], parts["communication"] = (
            trace.split.get(phase, 0.0) for phase in ("optimizer", "communication")
        )
    return parts


def planned_lines(trace: Trace, step: StepTime) -> Iterator[str]:
    """Yield a table of measured and predicted parts, and what the slowest one means."""
    measured = measured_parts(trace)
    rows = [("parts of an update", "measured", "predicted")]
    pairs = [*((part, measured[part], step.parts[part]) for part in SHARES), ("all", trace.seconds, step.seconds)]
    rows += [(name, short_time(own), short_time(other)) for name, own, other in pairs if max(own, other) > _SHOWN]
    yield from aligned(rows, left={0})
    more = {part: measured[part] - step.parts[part] for part in _MEANINGS}
    slowest = max(more, key=lambda part: more[part])
    if more[slowest] < _NOTABLE * trace.seconds:
        yield "no part takes longer than predicted by 5 % of an update"
    else:
        yield f"{slowest} takes {short_time(more[slowest])} longer than predicted: {_MEANINGS[slowest]}"


def beside_plan(split: Mapping[str, float], step: StepTime, cluster: GPUCluster) -> str:
    """Return the time of an update, of which `split` has the seconds by phase, beside the plan's; and what differs."""
    more = {
        name: sum(split.get(phase, 0.0) for phase in phases) - sum(step.parts[part] for part in parts)
        for name, (phases, parts) in _PHASES.items()
    }
    whole, most = sum(split.values()), max(more, key=lambda name: abs(more[name]))
    text = f"A step took {short_time(whole)}; the plan for {cluster} predicts {short_time(step.seconds)}"
    if abs(more[most]) < _NOTABLE * whole:
        return f"{text}."
    sign = "-" if more[most] < 0 else "+"
    return f"{text}. Most of the difference is in {most} ({sign}{short_time(abs(more[most]))})."


def _part_of(operator: str) -> Share:
    return next((part for part, words in _NAMES.items() if any(word in operator for word in words)), "memory")

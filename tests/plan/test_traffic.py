"""What a rank sends in an update, as docs/choosing.md has it, is what it sends in a real one, counted over gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kit.layouts import VARIANTS
from kit.worlds import in_world

from lockstep.config.loading import validate
from lockstep.core.records import DataFacts
from lockstep.loop.session import components_of
from lockstep.models.build import describe_model
from lockstep.plan.optimizers import is_hidden_matrix

CONFIG = {
    "model": {"kind": "transformer", "layers": 2, "width": 32, "heads": 2, "vocabulary": 256, "tie_embeddings": False},
    "data": {"train": {"kind": "stdlib-text", "length": 16}},
    "batch": {"global_size": 8, "micro_size": 2},
    "precision": {"compute": "fp32"},
    "launch": {"device": "cpu"},
    "run": {"steps": 3},
}
MICRO_BATCHES = 2
NOTHING_KEPT = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
STAGE_3 = {"zero_stage": 3, "config": {"zero_optimization": {"stage": 3, **NOTHING_KEPT}}}
PARALLELS: dict[str, dict[str, Any]] = {
    **{
        name: dict(VARIANTS[name])
        for name in ("ddp", "fsdp", "fsdp-grad-op", "fsdp-no-shard", "zero0", "zero1", "zero2")
    },
    "zero3": {"strategy": "deepspeed", "deepspeed": STAGE_3},
}
Formula = Callable[[int, int, int], float]
GATHERED: dict[str, Formula] = {
    **dict.fromkeys(("ddp", "fsdp-no-shard", "zero0"), lambda parts, whole, root: 0),
    "fsdp": lambda parts, whole, root: parts * (2 * whole - root),
    "fsdp-grad-op": lambda parts, whole, root: parts * whole,
    **dict.fromkeys(("zero1", "zero2"), lambda parts, whole, root: whole),
    "zero3": lambda parts, whole, root: 2 * parts * whole,
}
"""From micro-batches, and bytes of the model and of what is in no block, in units of (N - 1) / N."""
REDUCED: dict[str, Formula] = {
    **dict.fromkeys(("ddp", "fsdp-no-shard", "zero0", "zero1"), lambda parts, whole, root: 2 * whole),
    **dict.fromkeys(("fsdp", "fsdp-grad-op"), lambda parts, whole, root: whole),
    "zero2": lambda parts, whole, root: 2 * parts * whole,
    "zero3": lambda parts, whole, root: parts * whole,
}
NORMS = 16  # bytes that DeepSpeed's own norms may take, in addition to the formula
SHARE = {"allreduce_": 2.0, "_allgather_base_": 1.0, "_reduce_scatter_base_": 1.0, "alltoall_base_": 1.0}


def counted(sections: list[dict[str, Any]]) -> list[tuple[float, int, int]]:
    """Return, for each run: bytes that one rank sends in the third update, of the model, and at its root."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        return [_counted(each) for each in sections]
    finally:
        dist.destroy_process_group()


def _counted(sections: dict[str, Any]) -> tuple[float, int, int]:
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    import lockstep

    sent: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        """Count the larger side of each collective, which all of its ranks know; votes are float64 and left out."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "c10d":
                name = function._schema.name.removeprefix("c10d::")
                sent[name] += max(map(_bytes_of, args))
            return function(*args, **(kwargs or {}))

    with lockstep.session({**CONFIG, **sections}) as session:
        for batch in session.batches():
            with Counting():
                session.accumulate(batch)
                report = session.commit().result()
            if report.step == 2:
                sent.clear()
        names = [(name, value.numel() * 4) for name, value in components_of(session).sharding.state.weights()]
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    total = sum(SHARE[name] * share * size for name, size in sent.items() if size)
    return total, sum(size for _, size in names), sum(size for name, size in names if not name.startswith("blocks."))


def _bytes_of(argument: Any) -> int:
    import torch

    tensors = argument if isinstance(argument, list | tuple) else [argument]
    return sum(
        each.nbytes for each in tensors if isinstance(each, torch.Tensor) and each.dtype in (torch.float32, torch.uint8)
    )


def of_optimizer(name: str, ranks: int) -> float:
    """Return what an optimizer of whole matrices sends under FSDP: matrices to one rank and back, or sums over rows."""
    own = describe_model(validate(CONFIG).config.model, DataFacts(1, None))
    hidden = sum(each.bytes for each in own if is_hidden_matrix(each)) / ranks
    sums = sum(4 * (2 + (each.shape[1] + 1 if len(each.shape) == 2 else 0)) for each in own)
    return 2 * (ranks - 1) / ranks * {"muon": hidden, "adafactor": sums}.get(name, 0)


def test_each_strategy_sends_the_bytes_of_the_formula() -> None:
    runs = [(name, "adamw", {"parallel": parallel}) for name, parallel in PARALLELS.items()]
    runs += [("fsdp", name, {"parallel": VARIANTS["fsdp"], "optim": {"name": name}}) for name in ("muon", "adafactor")]
    for counts in in_world(2, counted, [sections for *_, sections in runs]):
        for (name, optimizer, sections), (sent, whole, at_root) in zip(runs, counts, strict=True):
            assert whole > at_root > 0
            gathered, reduced = (of(MICRO_BATCHES, whole, at_root) for of in (GATHERED[name], REDUCED[name]))
            expected = (gathered + reduced) / 2 + of_optimizer(optimizer, 2)
            assert sent == pytest.approx(expected, abs=NORMS if name.startswith("zero") else 0), sections

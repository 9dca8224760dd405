"""Writes the tables of choosing.md: memory by placement, bytes sent by formula, speed as benchmarks measured it.

    python docs/fill_choosing.py             rewrites the text between <!-- NAME --> and <!-- /NAME -->

The column of speeds needs benchmarks/results/strategies.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.loading import validate
from lockstep.config.schema import Config
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.models.build import describe_model
from lockstep.plan.mesh import Mesh
from lockstep.plan.placement import Placement, State, placements
from lockstep.strategies.record import RunLayout
from lockstep.strategies.registry import layouts

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "choosing.md"
SPEEDS = ROOT / "benchmarks" / "results" / "strategies.json"
GIB = 2**30
RANKS = 8
REPLICAS = 2
"""Number of replicas under the hybrid strategies."""
LIVE_UNDER_ZERO3 = 1_000_000_000
"""DeepSpeed's `stage3_max_live_parameters`, its default."""
LLAMA_7B = {
    "kind": "transformer", "layers": 32, "width": 4096, "heads": 32, "mlp_width": 11008, "vocabulary": 32000,
    "tie_embeddings": False,
}  # fmt: skip
"""Touvron et al. 2023, "Llama 2" (arXiv:2307.09288): 6,738,415,616 parameters."""

BEST_FOR = {
    "single": "one CPU or GPU; the baseline for all others",
    "ddp": "whatever fits: sends the least, gathers nothing",
    "fsdp": "what doesn't fit, on fast links; large models in general",
    "fsdp-grad-op": "parameters fit, moments and gradients don't: saves the second all-gather",
    "fsdp-hybrid": "many machines: gathers within one, and only reduces between them",
    "zero1": "parameters and gradients fit, moments don't; existing DeepSpeed configs",
    "zero2": "as zero1, and gradients don't fit either",
    "zero3": "as fsdp, for existing DeepSpeed configs, or with offloading to the host",
}
"""The last column of the table; variants without a line are left out."""
MEASURED_AS = {
    "ddp": "ddp",
    "fsdp": "fsdp FULL_SHARD",
    "fsdp-grad-op": "fsdp SHARD_GRAD_OP",
    "fsdp-hybrid": "fsdp HYBRID_SHARD",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}
"""Rows of the benchmark's results."""
LAYOUTS = [layout for layout in layouts().values() if layout.name in BEST_FOR]


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text()))


def filled(page: str, speeds: Path = SPEEDS) -> str:
    """Return the page's text with current tables."""
    results = json.loads(speeds.read_text()) if speeds.exists() else None
    return re.sub(
        r"(<!-- choosing -->\n).*?(<!-- /choosing -->)",
        lambda match: f"{match[1]}{table(results)}{match[2]}",
        page,
        flags=re.DOTALL,
    )


def table(results: Mapping[str, Any] | None) -> str:
    config = validate({"model": LLAMA_7B, "data": {"train": {"kind": "given"}}, "run": {"steps": 1}}).config
    parameters = describe_model(config.model, DataFacts(samples=1, tokens_per_sample=None))
    sizes = ["parameters", "gradients", "optimizer", "state, GiB a rank", "gathered, GiB", "GiB sent a rank and update"]
    head = ["", *sizes, "best for"]
    rows = [_row(layout, config, parameters) for layout in LAYOUTS]
    if results is not None:
        head.insert(-1, "ms a step")
        for layout, row in zip(LAYOUTS, rows, strict=True):
            row.insert(-1, _speed(layout, results))
    count = sum(parameter.elements for parameter in parameters)
    lines = [head, ["---"] * len(head), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    measured = "" if results is None else f" Milliseconds: {results['title']}, not of this model."
    return f"{text}\n\n{count:,} parameters on {RANKS} ranks, fsdp-hybrid as {REPLICAS} replicas.{measured}\n"


def _row(layout: RunLayout, config: Config, parameters: Sequence[ParameterFacts]) -> list[str]:
    place, sent = _placement(layout, config, parameters), _sent(layout, parameters)
    gathered = _gathered(layout, parameters)
    parts = (place.parameters, place.gradients, place.optimizer, place.total, gathered)
    return [layout.name, *(f"{size / GIB:.1f}" for size in parts), f"{sent / GIB:.1f}", BEST_FOR[layout.name]]


def _replicas(layout: RunLayout) -> int:
    return REPLICAS if layout.variant.mesh == "hybrid" else 1


def _placement(layout: RunLayout, config: Config, parameters: Sequence[ParameterFacts]) -> Placement:
    mesh = Mesh(data=_replicas(layout), shard=RANKS // _replicas(layout))
    rows = placements(State(config.parallel, config.optim, parameters), RANKS, layout, mesh)
    return next(row for row in rows if row.strategy == layout.name)


def _gathered(layout: RunLayout, parameters: Sequence[ParameterFacts]) -> int:
    """Return the bytes of gathered parameters that a rank holds at a time, at most."""
    if not layout.variant.divides or layout.name in ("zero0", "zero1", "zero2", "fsdp-no-shard"):
        return 0
    sizes = {fact.name: fact.elements * fact.element_bytes for fact in parameters}
    if layout.variant.name == "zero3":
        return min(4 * LIVE_UNDER_ZERO3, sum(sizes.values()))
    all_blocks = layout.name in ("fsdp-grad-op", "fsdp-hybrid-grad-op")
    held = lambda name: all_blocks or not name.startswith("blocks.") or name.startswith(("blocks.0.", "blocks.1."))  # noqa: E731
    return sum(size for name, size in sizes.items() if held(name))


def _sent(layout: RunLayout, parameters: Sequence[ParameterFacts]) -> float:
    """Return the bytes that a rank sends, by the page's formulas, for one micro-batch."""
    sizes = {parameter.name: parameter.elements * parameter.element_bytes for parameter in parameters}
    size = sum(sizes.values())
    at_root = sum(bytes_ for name, bytes_ in sizes.items() if not name.startswith("blocks."))
    in_fsdp = 3 * size - at_root
    units = {"single": 0, "ddp": 2 * size, "fsdp": in_fsdp, "fsdp-grad-op": 2 * size, "fsdp-hybrid": in_fsdp}
    units |= dict.fromkeys(("zero1", "zero2", "zero3"), 3 * size)
    shards = RANKS // _replicas(layout)
    between_replicas = 2 * (1 - 1 / _replicas(layout)) * size / shards
    return (1 - 1 / shards) * units[layout.name] + between_replicas


def _speed(layout: RunLayout, results: Mapping[str, Any]) -> str:
    row = results["rows"].get(MEASURED_AS.get(layout.name, ""))
    return "-" if row is None else f"{row['own']['median']:.1f}"


if __name__ == "__main__":
    main()

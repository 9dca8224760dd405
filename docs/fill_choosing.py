"""Writes the tables of choosing.md: memory by placement, bytes sent by formula, speed as benchmarks measured it.

    python docs/fill_choosing.py             rewrites what stands between <!-- NAME --> and <!-- /NAME -->

The column of speeds is there where benchmarks/results/strategies.json is.
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
from lockstep.models.facts import describe_model
from lockstep.plan.mesh import Mesh
from lockstep.plan.placement import Placement, placements
from lockstep.plan.traffic import Traffic, Volume, traffic

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "choosing.md"
SPEEDS = ROOT / "benchmarks" / "results" / "strategies.json"
GIB = 2**30
RANKS = 8
REPLICAS = 2
"""Of the hybrids."""
LLAMA_7B = {
    "kind": "transformer", "layers": 32, "width": 4096, "heads": 32, "mlp_width": 11008, "vocabulary": 32000,
    "tie_embeddings": False,
}  # fmt: skip
"""Touvron et al. 2023, "Llama 2" (arXiv:2307.09288): 6,738,415,616 parameters."""

BEST_FOR = {
    "single": "one CPU or GPU; the yardstick for all others",
    "ddp": "whatever fits: the least to send, nothing to gather",
    "fsdp": "what doesn't fit, on fast links; large models in general",
    "fsdp-grad-op": "parameters fit, moments and gradients don't: saves the second gathering",
    "fsdp-hybrid": "many machines: gathers within one, and only reduces between them",
    "zero1": "parameters and gradients fit, moments don't; who has DeepSpeed's JSON",
    "zero2": "as zero1, and gradients don't fit either",
    "zero3": "as fsdp, for who has DeepSpeed's JSON, or must offload to the host",
}
MEASURED_AS = {
    "ddp": "ddp",
    "fsdp": "fsdp FULL_SHARD",
    "fsdp-grad-op": "fsdp SHARD_GRAD_OP",
    "fsdp-hybrid": "fsdp HYBRID_SHARD",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text()))


def filled(page: str, speeds: Path = SPEEDS) -> str:
    """The page's text, with the tables as they are now."""
    results = json.loads(speeds.read_text()) if speeds.exists() else None
    return re.sub(
        r"(<!-- choosing -->\n).*?(<!-- /choosing -->)",
        lambda found: f"{found[1]}{table(results)}{found[2]}",
        page,
        flags=re.DOTALL,
    )


def table(results: Mapping[str, Any] | None) -> str:
    config = validate({"model": LLAMA_7B, "data": {"train": {"kind": "given"}}, "run": {"steps": 1}}).config
    parameters = describe_model(config.model, DataFacts(samples=1, tokens_per_sample=None))
    head = ["", "parameters", "gradients", "optimizer", "GiB a rank", "GiB sent a rank and update", "best for"]
    rows = [_row(name, config, parameters) for name in BEST_FOR]
    if results is not None:
        head.insert(-1, "ms a step")
        for row in rows:
            row.insert(-1, _speed(row[0], results))
    count = sum(one.elements for one in parameters)
    lines = [head, ["---"] * len(head), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    measured = "" if results is None else f" Milliseconds: {results['title']}, not of this model."
    return f"{text}\n\n{count:,} parameters on {RANKS} ranks, fsdp-hybrid as {REPLICAS} replicas.{measured}\n"


def _row(name: str, config: Config, parameters: Sequence[ParameterFacts]) -> list[str]:
    place, sent = _placement(name, config, parameters), _sent(name, config, parameters)
    parts = (place.parameters, place.gradients, place.optimizer, place.total)
    return [name, *(f"{size / GIB:.1f}" for size in parts), f"{sent.total / GIB:.1f}", BEST_FOR[name]]


def _placement(name: str, config: Config, parameters: Sequence[ParameterFacts]) -> Placement:
    mesh = Mesh(data=REPLICAS, shard=RANKS // REPLICAS) if "hybrid" in name else Mesh(shard=RANKS)
    return next(row for row in placements(config, RANKS, parameters, name, mesh) if row.strategy == name)


def _sent(name: str, config: Config, parameters: Sequence[ParameterFacts]) -> Traffic:
    size = sum(one.elements * one.element_bytes for one in parameters)
    at_root = sum(one.elements * one.element_bytes for one in parameters if not one.name.startswith("blocks."))
    return traffic(name, Volume(size, size, at_root), RANKS, replicas=REPLICAS if "hybrid" in name else 1)


def _speed(name: str, results: Mapping[str, Any]) -> str:
    row = results["rows"].get(MEASURED_AS.get(name, ""))
    return "-" if row is None else f"{row['own']['median']:.1f}"


if __name__ == "__main__":
    main()

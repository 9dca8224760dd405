"""What `plan --search` finds for Llama and Mixtral on 8 to 1,024 H100s, how long it takes, and what others published.

python benchmarks/plan_search.py                  all rows, without a GPU; twenty minutes
python benchmarks/plan_search.py --only "70B"     rows whose name contains a text

Published: torchtitan's benchmarks/llama3_h100_202412_torchtitan.md (bf16, eager, or as noted; H100 of 96 GB with 2.4
TB/s and 500 W) and NVIDIA NeMo's docs/source/performance/performance_summary.md (NeMo 24.07 on Megatron-Core, FP8). The
figures of both are of other software than Lockstep: they show whether the layout is one that people take.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rounds import about_here, markdown, save

from lockstep.assembly.user_objects import UserObjects
from lockstep.config.schema import Config
from lockstep.core.processes import in_fork
from lockstep.plan.gpus import GPUCluster, parse_cluster
from lockstep.simulation.estimate import estimator_of
from lockstep.simulation.search import search, title

LLAMA_2 = {"model_type": "llama", "vocab_size": 32000}
LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}


def _sizes(width: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


SIZES: Mapping[str, Mapping[str, Any]] = {
    "Llama 2 7B": LLAMA_2,
    "Llama 2 13B": {**LLAMA_2, **_sizes(5120, 13824, 40, 40)},
    "Llama 2 70B": {**LLAMA_2, **_sizes(8192, 28672, 80, 64), "num_key_value_heads": 8},
    "Llama 3.1 8B": {**LLAMA_3, **_sizes(4096, 14336, 32, 32)},
    "Llama 3.1 70B": {**LLAMA_3, **_sizes(8192, 28672, 80, 64)},
    "Llama 3.1 405B": {**LLAMA_3, **_sizes(16384, 53248, 126, 128)},
    "Mixtral 8x7B": {"model_type": "mixtral", "vocab_size": 32000},
}
NEXT_BEST = 3


@dataclass(frozen=True, slots=True)
class Row:
    """A model on H100s; `published` is a config and its tokens per second of a GPU."""

    model: str
    gpus: int
    global_size: int
    length: int = 4096
    published: str = ""
    titan: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} on {self.gpus:,}"

    @property
    def cluster(self) -> GPUCluster:
        cluster = parse_cluster(f"H100:{min(8, self.gpus)}", max(1, self.gpus // 8))
        if not self.titan:
            return cluster
        figures = dataclasses.replace(cluster.gpu, memory=int(94.5 * 2**30), bandwidth=2.4e12, watts=500)
        return dataclasses.replace(cluster, gpu=figures)

    @property
    def config(self) -> Config:
        return Config.model_validate(
            {
                "model": {"kind": "huggingface", "task": "causal-lm", "architecture": dict(SIZES[self.model])},
                "data": {"train": {"kind": "tokens", "folder": "not-on-this-machine", "length": self.length}},
                "batch": {"global_size": self.global_size},
                "optim": {"name": "adamw", "lr": 1e-4},
                "precision": {"compute": "bf16"},
                "run": {"steps": 1000},
            }
        )


TITAN = "FSDP, micro-batch 2, selective"
ROWS = (
    Row("Llama 2 7B", 8, 128, published="data parallel, micro-batch 1: 16,634 in FP8 (NeMo)"),
    Row("Llama 2 7B", 64, 512),
    Row("Llama 2 7B", 1024, 4096),
    Row("Llama 2 13B", 8, 128),
    Row("Llama 2 13B", 16, 128, published="pipeline 4, micro-batch 1: 8,715 in FP8 (NeMo)"),
    Row("Llama 2 13B", 64, 512),
    Row("Llama 2 13B", 1024, 4096),
    Row("Llama 2 70B", 8, 128),
    Row("Llama 2 70B", 64, 128, published="tensor 4 x pipeline 4, micro-batch 1: 1,717 in FP8 (NeMo)"),
    Row("Llama 2 70B", 1024, 1024),
    Row("Mixtral 8x7B", 8, 128),
    Row("Mixtral 8x7B", 64, 256),
    Row("Mixtral 8x7B", 1024, 4096),
    Row("Llama 3.1 8B", 8, 16, 8192, f"{TITAN}: 5,762 (torchtitan)", titan=True),
    Row("Llama 3.1 8B", 128, 256, 8192, f"{TITAN}: 5,605 (torchtitan)", titan=True),
    Row("Llama 3.1 70B", 256, 512, 8192, "FSDP 32 x tensor 8, full: 829 in FP8, compiled (torchtitan)", titan=True),
    Row(
        "Llama 3.1 405B",
        512,
        256,
        8192,
        "FSDP 8 x tensor 8 x pipeline 8, full: 128 in FP8, compiled (torchtitan)",
        True,
    ),
)


def searched(row: Row) -> dict[str, Any]:
    """Return the found config, the next ones, and the seconds of the search, with a process for each core."""
    start = time.perf_counter()
    found = search(estimator_of(row.config, row.gpus, row.cluster.gpu.memory, UserObjects(), row.cluster))
    seconds = time.perf_counter() - start
    record: dict[str, Any] = {"name": row.name, "search_seconds": round(seconds, 1), "simulations": found.simulations,
                              "published": row.published, "config": "nothing fits", "next": []}  # fmt: skip
    if found.best is not None and found.best.seconds is not None:
        tokens = row.global_size * row.length / found.best.seconds / row.gpus
        record |= {"config": title(found.best), "step_seconds": round(found.best.seconds, 4), "tokens": round(tokens)}
        record["mfu"] = round(found.memory.time.mfu, 4) if found.memory and found.memory.time else None
    others = [each for each in found.candidates if each.fits and each.seconds]
    record["next"] = [f"{title(each)}: {each.why}" for each in others[:NEXT_BEST]]
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    results = []
    for row in ROWS:
        if only in row.name:
            results.append(in_fork(partial(searched, row)))
            print(results[-1], flush=True)
    record = {
        "command": "python benchmarks/plan_search.py",
        "machine": about_here(("torch", "transformers")),
        "rows": results,
    }
    if not only:
        save("plan_search", record)
    print(table(record))


def table(results: Mapping[str, Any]) -> str:
    """Return the table of found configs in Markdown."""
    lines = [
        [
            row["name"],
            row["config"],
            f"{row['tokens']:,}" if "tokens" in row else "",
            f"{row['mfu']:.0%}" if row.get("mfu") else "",
            f"{row['search_seconds']:.0f} s",
            row["next"][0] if row["next"] else "",
            row["published"],
        ]
        for row in results["rows"]
    ]
    return markdown(["model on H100s", "found", "tokens/s a GPU", "MFU", "search", "next best", "published"], lines)


if __name__ == "__main__":
    main()

"""Predicted and published speed of training: MPT models under FSDP on H100 and A100, 8 to 512 GPUs.

python benchmarks/plan_time.py                    all rows, without a GPU; half an hour
python benchmarks/plan_time.py --only "H100 1b"   rows whose name contains a text

Published: tokens per second in the README of MosaicML's llm-foundry (scripts/train/benchmarking, bf16), in
published/llm_foundry.csv. The shares of the GPUs' speeds in plan/gpus.toml are fitted to the rows marked `fitted`; the
errors of the others show what a prediction is worth.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounds import about_here, markdown, save

from lockstep.assembly.user_objects import UserObjects
from lockstep.config.schema import Config
from lockstep.plan.gpus import parse_cluster
from lockstep.simulation.estimate import estimator_of

PUBLISHED = Path(__file__).parent / "published" / "llm_foundry.csv"
SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
"""Width, layers and heads of an MPT: a GPT-2 of that size, with the exact GELU."""
BF16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}


@dataclass(frozen=True, slots=True)
class Row:
    """A published row."""

    gpu: str
    model: str
    length: int
    gpus: int
    micro_batch: int
    accumulation: int
    checkpointing: bool
    tokens_per_second: int
    fitted: bool

    @property
    def name(self) -> str:
        return f"{self.gpu} {self.model} {self.length:,} x {self.gpus}"


def rows() -> list[Row]:
    """Return the published rows."""
    with PUBLISHED.open() as file:
        return [
            Row(
                gpu=line["gpu"],
                model=line["model"],
                length=int(line["length"]),
                gpus=int(line["gpus"]),
                micro_batch=int(line["micro_batch"]),
                accumulation=int(line["accumulation"]),
                checkpointing=line["checkpointing"] == "1",
                tokens_per_second=int(line["tokens_per_second"]),
                fitted=line["fitted"] == "1",
            )
            for line in csv.DictReader(file)
        ]


def config_of(row: Row) -> Config:
    """Return the config of a published run."""
    width, layers, heads = SIZES[row.model]
    architecture = {
        "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": row.length,
        "vocab_size": 50368, "activation_function": "gelu", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip
    mode = "full" if row.checkpointing else "none"
    return Config.model_validate(
        {
            "model": {"kind": "huggingface", "task": "causal-lm", "architecture": architecture},
            "data": {"train": {"kind": "tokens", "folder": "not-on-this-machine", "length": row.length}},
            "batch": {"global_size": row.gpus * row.micro_batch * row.accumulation, "micro_size": row.micro_batch},
            "optim": {"name": "adamw", "lr": 1e-4},
            "precision": {"compute": "bf16"},
            "parallel": {"strategy": "fsdp", "fsdp": BF16},
            "memory": {"activation_checkpointing": {"mode": mode}},
            "run": {"steps": 10},
        }
    )


def predicted(row: Row) -> float:
    """Return the predicted tokens per second of all GPUs."""
    config, cluster = config_of(row), parse_cluster(f"{row.gpu}:8", max(1, row.gpus // 8))
    step = estimator_of(config, row.gpus, None, UserObjects()).step_time(config, cluster)
    return row.gpus * row.micro_batch * row.accumulation * row.length / step.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    results = []
    for row in rows():
        if only in row.name:
            tokens = predicted(row)
            error = row.tokens_per_second / tokens - 1  # of the step's time
            results.append({"name": row.name, "gpu": row.gpu, "published": row.tokens_per_second,
                            "predicted": round(tokens), "error": round(error, 4), "fitted": row.fitted})  # fmt: skip
            print(f"{row.name:<32} {row.tokens_per_second:>12,} {tokens:>12,.0f} {error:+.1%}", flush=True)
    record = {
        "command": "python benchmarks/plan_time.py",
        "machine": about_here(("torch", "transformers")),
        "rows": results,
    }
    if not only:
        save("plan_time", record)
    print(table(record))


def table(results: Mapping[str, Any]) -> str:
    """Return the table of errors in Markdown."""
    lines = []
    for name in ("H100", "A100-80GB", "A100-40GB", ""):
        for fitted in (True, False):
            errors = [row for row in results["rows"] if row["gpu"].startswith(name) and row["fitted"] is fitted]
            if errors:
                lines.append([name or "all", "fitted" if fitted else "others", *_errors(errors)])
    return markdown(["GPU", "rows", "number", "median error", "p90", "largest"], lines)


def _errors(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    errors = sorted((abs(row["error"]), row["name"]) for row in rows)
    p90 = errors[min(len(errors) - 1, round(0.9 * (len(errors) - 1)))][0]
    worst, name = errors[-1]
    return [
        str(len(errors)),
        f"{statistics.median(error for error, _ in errors):.1%}",
        f"{p90:.1%}",
        f"{worst:.1%} ({name})",
    ]


if __name__ == "__main__":
    main()

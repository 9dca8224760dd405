"""Predicted and measured peak memory of a rank, side by side, over models, strategies, precisions and features.

python benchmarks/plan_memory.py                    all rows, on 1 and 2 CPU ranks of this machine
python benchmarks/plan_memory.py --only decoder     rows whose name contains a text

Predicted: three updates on a simulated CPU, without data. Measured: the same updates here, every tensor counted. On a
machine with GPUs, `--device cuda` predicts for them and measures there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rounds import about_here, markdown, save

from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.formatting import size
from lockstep.core.processes import in_fork
from lockstep.simulation.planning import measured_beside_predicted

MODELS: Mapping[str, Mapping[str, Any]] = {
    "decoder": {
        "model": {"kind": "transformer", "vocabulary": 256, "layers": 4, "heads": 4, "width": 128},
        "data": {"train": {"kind": "stdlib-text", "length": 128}},
    },
    "wide decoder": {
        "model": {"kind": "transformer", "vocabulary": 512, "layers": 2, "heads": 8, "width": 512},
        "data": {"train": {"kind": "stdlib-text", "length": 64}},
    },
    "classifier": {
        "model": {"kind": "text-classifier"},
        "data": {"train": {"kind": "stdlib-functions"}},
    },
    "llama": {
        "model": {
            "kind": "huggingface",
            "task": "causal-lm",
            "architecture": {
                "model_type": "llama",
                "hidden_size": 128,
                "intermediate_size": 352,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "vocab_size": 512,
            },
        },
        "data": {"train": {"kind": "stdlib-text", "length": 128}},
    },
}
HERE = Path(__file__).parent


def _custom(name: str) -> dict[str, Any]:
    return {"kind": "custom", "target": f"{HERE}/plan_memory_models.py:{name}"}


CLASSES: Mapping[str, Any] = {"data": {"train": _custom("Texts")}, "objective": {"kind": "classification"}}
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "convolutions": {"model": _custom("Convolutions"), **CLASSES, "data": {"train": _custom("Images")}},
    "recurrent": {"model": _custom("Recurrent"), **CLASSES},
    "tied": {"model": _custom("Tied"), **CLASSES},
    "low-rank adapters": {
        "model": _custom("adapted"),
        "data": {"train": {"kind": "stdlib-text", "length": 128}},
    },
    "encoder-decoder": {
        "model": {
            "kind": "huggingface",
            "task": "seq2seq",
            "architecture": {
                "model_type": "t5",
                "d_model": 128,
                "d_ff": 352,
                "d_kv": 32,
                "num_layers": 2,
                "num_heads": 4,
                "vocab_size": 512,
            },
        },
        "data": {"train": _custom("Pairs")},
    },
}
"""Each under every layout, in bf16."""
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "single": (1, {"strategy": "single"}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "fsdp-grad-op": (2, {"strategy": "fsdp", "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}),
}
MORE_LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    **{f"zero{stage}": (2, {"strategy": "deepspeed", "deepspeed": {"zero_stage": stage}}) for stage in range(4)},
    "pipeline": (2, {"strategy": "ddp", "pipeline": 2}),
    "tensor": (2, {"strategy": "ddp", "tensor": 2}),
}
"""Each with the decoder, in both precisions."""
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"precision": {"compute": "fp32"}},
    "bf16": {"precision": {"compute": "bf16"}},
    "checkpointing": {
        "precision": {"compute": "bf16"},
        "memory": {"activation_checkpointing": {"mode": "full"}},
    },
    "accumulation": {"precision": {"compute": "bf16"}, "batch": {"global_size": 32, "micro_size": 4}},
}
COMMON: Mapping[str, Any] = {
    "batch": {"global_size": 16, "micro_size": 8},
    "optim": {"name": "adamw", "lr": 1e-3},
    "run": {"steps": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    rows = {}
    os.environ["OMP_NUM_THREADS"] = "1"  # of ranks: threads change no bytes
    torch.set_num_threads(1)
    for module in ("torch._dynamo", "transformers.modeling_utils"):
        importlib.import_module(module)  # once; each row's processes are forks of this one
    for name, config in _configs(arguments.device):
        if arguments.only in name:
            rows[name] = in_fork(partial(_row, config))
            print(name, rows[name], flush=True)
    if not arguments.only:
        command = f"python benchmarks/plan_memory.py --device {arguments.device}"
        here = about_here(["torch"])
        save(
            "plan_memory" if arguments.device == "cpu" else "plan_memory_gpu",
            {"command": command, "machine": here, "device": arguments.device, "rows": rows},
        )


def _configs(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for model, of_model in MODELS.items():
        for layout in LAYOUTS:
            for feature in FEATURES:
                yield _config(device, model, of_model, layout, feature)
    for layout in MORE_LAYOUTS:
        for feature in ("fp32", "bf16"):
            yield _config(device, "decoder", MODELS["decoder"], layout, feature)
    for model, of_model in OTHERS.items():
        for layout in LAYOUTS:
            yield _config(device, model, of_model, layout, "bf16")


def _config(
    device: str, model: str, of_model: Mapping[str, Any], layout: str, feature: str
) -> tuple[str, dict[str, Any]]:
    ranks, parallel = {**LAYOUTS, **MORE_LAYOUTS}[layout]
    launch = {"device": device, "ranks": ranks}
    sections = {**COMMON, **of_model, "parallel": parallel, "launch": launch, **FEATURES[feature]}
    return f"{model}, {layout}, {feature}", sections


def _row(config: dict[str, Any]) -> dict[str, Any]:
    try:
        predicted, measured = measured_beside_predicted(validate(config), trust_remote_code=False)
    except ConfigError as refusal:
        return {"refused": str(refusal).splitlines()[0]}
    except RunFailed as failure:
        return {"refused": f"failed: {str(failure).splitlines()[0]}"}
    worst = max(abs(predicted.by_category[name] - held) for name, held in measured.by_category.items())
    categories = {name: [predicted.by_category[name], held] for name, held in measured.by_category.items() if held}
    return {
        "predicted": predicted.bytes,
        "measured": measured.bytes,
        "worst_category_bytes": worst,
        "categories": categories,
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown table, and the errors' median and maximum."""
    lines, errors = [], []
    for name, row in results["rows"].items():
        if "refused" in row:
            lines.append([name, row["refused"], "", "", ""])
            continue
        errors.append(abs(row["predicted"] / row["measured"] - 1))
        worst = f"{row['worst_category_bytes']:,} B"
        lines.append([name, size(row["predicted"]), size(row["measured"]), f"{errors[-1]:.3%}", worst])
    summary = (
        f"{len(errors)} configurations on {results['device']}: median error {statistics.median(errors):.3%}, "
        f"largest {max(errors):.3%}."
    )
    head = ["", "predicted", "measured", "error of the peak", "largest error of a category"]
    machine = results["machine"]
    source = f"`{results['command']}`, {machine['date']}, torch {machine['versions']['torch']}."
    return f"{markdown(head, lines)}\n\n{summary}\n\n{source}"


if __name__ == "__main__":
    main()

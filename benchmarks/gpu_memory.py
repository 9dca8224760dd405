"""What a GPU holds at the peak of an update: models of 7B to 405B parameters on 8 to 1,024 GPUs, by strategy.

python benchmarks/gpu_memory.py                  all rows (more than an hour); writes the tables of docs/gpu-memory.md
python benchmarks/gpu_memory.py --only "7B"      rows whose name contains a text; the others keep their results
python benchmarks/gpu_memory.py --tables         the tables alone, from the results

No GPU is used: Lockstep's own updates run on the simulated accelerator, as the rank that needs most memory.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rounds import RESULTS, about_here, markdown, save

from lockstep.core.terminal import muted_stderr

PAGE = Path(__file__).parents[1] / "docs" / "gpu-memory.md"
NAME = "gpu_memory"
GIB = 1 << 30
COLUMNS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "casts": "casts",
    "communication": "comm.",
    "other": "other",
}


@dataclass(frozen=True, slots=True)
class Size:
    """A model on a number of GPUs, and the strategies to try on them."""

    key: str
    model: Mapping[str, Any]
    ranks: int
    length: int
    rows: Mapping[str, Mapping[str, Any]]
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _decoder(kind: str, width: int, inner: int, layers: int, heads: int, kv_heads: int, **more: int) -> dict[str, Any]:
    sizes = {
        "model_type": kind, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 32000, **more,
    }  # fmt: skip
    return {"kind": "huggingface", "task": "causal-lm", "architecture": sizes}


def _fsdp(sharding: str = "FULL_SHARD", **more: Any) -> dict[str, Any]:
    options = {"sharding_strategy": sharding, **{key: more.pop(key) for key in ("reduce_every",) if key in more}}
    return {"strategy": "fsdp", "fsdp": options, **more}


def _zero(stage: int) -> dict[str, Any]:
    return {"strategy": "deepspeed", "deepspeed": {"zero_stage": stage}}


_EACH = {"reduce_every": "micro-batch"}
SIZES = (
    Size(
        "Llama 2 7B on 8 GPUs",
        _decoder("llama", 4096, 11008, 32, 32, 32),
        8,
        2048,
        {
            "ddp": {"strategy": "ddp"},
            "fsdp": _fsdp(),
            "fsdp, each micro-batch reduced": _fsdp(**_EACH),
            "fsdp-grad-op": _fsdp("SHARD_GRAD_OP"),
            "fsdp-no-shard": _fsdp("NO_SHARD"),
            "fsdp-hybrid, 2 x 4": _fsdp("HYBRID_SHARD", data=2, shard=4),
            "zero1": _zero(1),
            "zero2": _zero(2),
            "zero3": _zero(3),
            "tensor 2 + fsdp": _fsdp(tensor=2),
            "tensor 8": {"strategy": "ddp", "tensor": 8},
            "context 2 + fsdp": _fsdp(context=2),
            "pipeline 2 + fsdp": _fsdp(pipeline=2),
        },
    ),
    Size(
        "Llama 2 70B on 64 GPUs",
        _decoder("llama", 8192, 28672, 80, 64, 8),
        64,
        4096,
        {
            "ddp": {"strategy": "ddp"},
            "fsdp": _fsdp(),
            "fsdp, each micro-batch reduced": _fsdp(**_EACH),
            "fsdp-grad-op": _fsdp("SHARD_GRAD_OP"),
            "fsdp-hybrid, 8 x 8": _fsdp("HYBRID_SHARD", data=8, shard=8),
            "zero3": _zero(3),
            "tensor 8 + fsdp": _fsdp(tensor=8),
            "pipeline 8 + fsdp": _fsdp(pipeline=8),
        },
        {"none": ("fsdp, each micro-batch reduced",)},
    ),
    Size(
        "Mixtral 8x7B on 64 GPUs",
        _decoder("mixtral", 4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2),
        64,
        4096,
        {
            "fsdp": _fsdp(),
            "fsdp, each micro-batch reduced": _fsdp(**_EACH),
            "tensor 8 + fsdp": _fsdp(tensor=8),
        },
        {"none": ("fsdp, each micro-batch reduced",)},
    ),
    Size(
        "Llama 3.1 405B on 1,024 GPUs",
        _decoder("llama", 16384, 53248, 126, 128, 8, vocab_size=128256),
        1024,
        8192,
        {
            "fsdp": _fsdp(),
            "fsdp, each micro-batch reduced": _fsdp(**_EACH),
            "fsdp-hybrid, 8 x 128, each micro-batch reduced": _fsdp("HYBRID_SHARD", data=8, shard=128, **_EACH),
            "tensor 8 + fsdp": _fsdp(tensor=8),
        },
        {"none": ("tensor 8 + fsdp",)},
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--missing", action="store_true", help="only rows without a result")
    parser.add_argument("--tables", action="store_true")
    arguments = parser.parse_args()
    place = RESULTS / f"{NAME}.json"
    rows = json.loads(place.read_text())["rows"] if place.exists() else {}
    for name, size, config in [] if arguments.tables else _configs():
        if arguments.only in name and not (arguments.missing and name in rows):
            rows[name] = _row(size, config)
            print(name, rows[name], flush=True)
            ordered = {key: rows[key] for key, _, _ in _configs() if key in rows}
            command = "python benchmarks/gpu_memory.py"
            save(NAME, {"command": command, "machine": about_here(["torch", "transformers"]), "rows": ordered})
    PAGE.write_text(filled(PAGE.read_text(), json.loads(place.read_text())))


def _configs() -> Iterator[tuple[str, Size, dict[str, Any]]]:
    for size in SIZES:
        for mode in ("full", "none"):
            for row, parallel in size.rows.items():
                if row in size.modes.get(mode, size.rows):
                    yield f"{size.key}, {mode}, {row}", size, _config(size, mode, parallel)


def _config(size: Size, mode: str, parallel: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run of micro-batches of one sample, two of them in an update, or one for each stage of a pipeline."""
    stages = parallel.get("pipeline", 1)
    shares = size.ranks // (stages * parallel.get("tensor", 1) * parallel.get("context", 1))
    return {
        "model": size.model,
        "data": {"train": {"kind": "tokens", "folder": "not-on-this-machine", "length": size.length}},
        "batch": {"global_size": shares * max(2, stages), "micro_size": 1},
        "optim": {"name": "adamw", "lr": 1e-4},
        "precision": {"compute": "bf16"},
        "parallel": parallel,
        "memory": {"activation_checkpointing": {"mode": mode}},
        "run": {"steps": 100, "allow_untested": True},
    }


def _row(size: Size, config: dict[str, Any]) -> dict[str, Any]:
    from lockstep.assembly.user_objects import UserObjects
    from lockstep.config.loading import validate
    from lockstep.core.errors import ConfigError
    from lockstep.simulation.estimate import estimator_of

    began = time.perf_counter()
    try:
        with muted_stderr():
            checked = validate(config).config
            estimator = estimator_of(checked, size.ranks, None, UserObjects())
            peak = estimator.peak(checked)
    except (ConfigError, RuntimeError, NotImplementedError) as error:
        return {"why": str(error).splitlines()[0]}
    return {
        "elements": sum(fact.elements for fact in estimator.parameters),
        "peak": peak.bytes,
        **peak.by_category,
        "seconds": round(time.perf_counter() - began, 1),
    }


# --- tables -------------------------------------------------------------------------------------------------------


def filled(text: str, results: Mapping[str, Any]) -> str:
    """Return the page with each table that there are results for."""
    for size in SIZES:
        pattern = rf"(<!-- {size.key} -->\n).*?(<!-- /{size.key} -->)"
        written = table(size, results)
        text = re.sub(pattern, lambda match, written=written: f"{match[1]}{written}\n{match[2]}", text, flags=re.S)
    return text


def table(size: Size, results: Mapping[str, Any]) -> str:
    """Return a size's table: GiB by category, and what isn't simulated."""
    lines, notes = [], []
    for mode in ("full", "none"):
        for row in size.rows:
            held = results["rows"].get(f"{size.key}, {mode}, {row}")
            if held is None:
                continue
            if "why" in held:
                notes.append(f"{row} ({mode}): {held['why']}")
                continue
            figures = [f"{held[name] / GIB:.1f}" for name in (*COLUMNS, "peak")]
            lines.append([row, mode, *figures])
    head = ["strategy", "checkpointing", *COLUMNS.values(), "peak, GiB"]
    return "\n".join([markdown(head, lines), *(f"\nNot simulated: {note}" for note in notes)])


if __name__ == "__main__":
    main()

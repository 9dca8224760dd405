"""The cells that run on the simulated accelerator: each layout with each feature, and with options of its own.

    layout    feature             precision    outcome
    fsdp      chunked loss        bf16         runs
    zero1     muon                bf16         refused: it updates whole matrices, and a rank holds a shard ...
    tensor    experts             bf16         runs

A cell is at fault where a rank fails, waits for the accelerator at a point that host_syncs.toml doesn't list, is not
refused in the words of the table of features, or publishes no checkpoint.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from training.test_features import ASKS, _layers, _ranks, asked

from kit import families
from kit.layouts import LAYOUTS
from kit.simulated import Simulated, simulated
from lockstep.data.prepare import prepare
from lockstep.plan.features import FEATURES, cell

PLACE = Path(__file__).parents[1] / "simulation"
SYNCS = tomllib.loads((PLACE / "host_syncs.toml").read_text(encoding="utf-8"))["sync"]
KNOWN = tomllib.loads((PLACE / "known_cells.toml").read_text(encoding="utf-8")).get("cell", [])
PRECISIONS = ("fp32", "bf16", "fp16")
SIMULATED = [name for name, layout in LAYOUTS.items() if layout.strategy.name != "deepspeed" or find_spec("deepspeed")]
Cell = tuple[str, str, str]
"""Layout, feature or nothing, precision."""
_BF16 = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"), "bf16")
_OWN_PLAN = {"blocks.*.mlp.gate": "colwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
_EXPERTS = {
    "kind": "huggingface",
    "task": "causal-lm",
    "architecture": {
        "model_type": "mixtral", "vocab_size": 64, "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "packed data": ("", {"data": {"train": {"kind": "tokens", "folder": "", "length": 28, "documents": "whole"}}}),
    "experts": ("", {**families.family("mixtral"), "model": _EXPERTS}),
    "deterministic": ("", {"run": {"determinism": "deterministic"}}),
    "invariant": ("", {"run": {"determinism": "invariant"}, "batch": {"global_size": 8, "micro_size": 1}}),
    "unused parameters": ("", {"parallel": {"ddp": {"find_unused_parameters": True}}}),
    "bf16 parameters": ("fsdp", {"parallel": {"fsdp": {"mixed_precision": _BF16}}}),
    "fp16 parameters": ("fsdp", {"parallel": {"fsdp": {"mixed_precision": {"param_dtype": "fp16"}}}}),
    "wrap root": ("fsdp", {"parallel": {"fsdp": {"wrap": "root"}}}),
    "wrap size": ("fsdp", {"parallel": {"fsdp": {"wrap": "size", "min_num_params": 1000}}}),
    "wrap classes": ("fsdp", {"parallel": {"fsdp": {"wrap": ["Attention", "SwiGLU"]}}}),
    "micro-batches reduced": ("fsdp", {**ASKS["accumulation"], "parallel": {"fsdp": {"reduce_every": "micro-batch"}}}),
    "forward prefetch": ("fsdp", {"parallel": {"fsdp": {"forward_prefetch": True}}}),
    "static graph": ("ddp", {"parallel": {"ddp": {"static_graph": True}}}),
    "gradients beside buckets": ("ddp", {"parallel": {"ddp": {"gradient_as_bucket_view": False}}}),
    "small buckets": ("ddp", {"parallel": {"ddp": {"bucket_mb": 0.001}}}),
    "fp16 compression": ("ddp", {"parallel": {"ddp": {"compression": "fp16"}}}),
    "bf16 compression": ("ddp", {"parallel": {"ddp": {"compression": "bf16"}}}),
    "powersgd": ("ddp", {"parallel": {"ddp": {"compression": "powersgd", "powersgd": {"start_step": 2}}}}),
    "synced batch norm": (
        "ddp",
        {
            "model": {"kind": "custom", "target": "kit.small:WithBatchNorm"},
            "objective": {"kind": "classification"},
            "data": {"train": {"kind": "custom", "target": "kit.small:points"}},
            "parallel": {"ddp": {"sync_batchnorm": True}},
        },
    ),
    "stages by name": ("pipeline", {"parallel": {"pipeline_parallel": {"split": []}}}),
    "own plan": ("tensor", {"parallel": {"tensor_parallel": {"plan": _OWN_PLAN}}}),
}
"""By name: the strategy or the axis that has it, or nothing for all layouts, and the sections that ask for it."""


@cache
def packed_folder() -> str:
    """A folder of packed documents, as `lockstep data prepare` writes it; removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-packed-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    texts = folder / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "{"lockstep " * (number % 4 + 1)}"}}\n' for number in range(200)))
    prepare([str(texts)], folder / "tokens", tokenizer="bytes")
    return str(folder / "tokens")


def config(layout: str, feature: str, precision: str) -> dict[str, Any]:
    """The config of a cell."""
    made = asked(layout, "" if feature in OPTIONS else feature, _ranks(layout))
    if feature in OPTIONS:
        made = _merged(made, OPTIONS[feature][1])
    if feature == "packed data":
        made["data"]["train"]["folder"] = packed_folder()
        made["model"]["vocabulary"] = None
    if feature == "stages by name":
        made["model"]["layers"] = 4
        made["parallel"]["pipeline_parallel"]["split"] = [f"blocks.{block}" for block in _first_blocks(layout)]
    if "pipeline" in layout and "batch" not in {**ASKS.get(feature, {}), **OPTIONS.get(feature, ("", {}))[1]}:
        made["batch"] = {"global_size": 12, "micro_size": 3}  # more micro-batches do the same again
    if feature not in PRECISIONS:
        made["precision"] = {"compute": precision}
    return {**made, "launch": {"device": "auto"}, "run": {**made["run"], "allow_untested": True}}


def _first_blocks(layout: str) -> range:
    """The blocks with which the stages of a layout begin, from the second on: two stages, or two on each rank."""
    return range(1, 4) if _layers(layout, "") == 4 else range(1, 2)


def _merged(sections: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The sections with the changes; one of another kind replaces what was there."""
    made = dict(sections)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(made.get(key), dict) and not {"kind", "train"} & value.keys():
            made[key] = _merged(made[key], value)
        else:
            made[key] = dict(value) if isinstance(value, dict) else value
    return made


_NOT_SIMULATED = ("compile", "export", "nf4 base", "int8 base")
"""torch compiles for devices that it knows; an export is of a checkpoint; bitsandbytes needs real weights."""


def features(layout: str) -> Iterator[str]:
    """Each feature that the layout can be asked for."""
    for feature in FEATURES:
        if feature.name not in _NOT_SIMULATED and cell(LAYOUTS[layout], feature.name).standing != "none":
            yield feature.name


def options(layout: str) -> Iterator[str]:
    """Each of OPTIONS that the layout can be asked for."""
    for name, (of, _) in OPTIONS.items():
        if not of or of in _axes(layout):
            yield name


def _axes(layout: str) -> set[str]:
    """The strategy of a layout, and the axes of its partitions."""
    return {LAYOUTS[layout].strategy.name, *(partition.axis for partition in LAYOUTS[layout].partitions)}


def cells(*, every: bool) -> dict[int, list[Cell]]:
    """The cells by ranks: each layout and, with `every`, each feature under it in each precision, and each option."""
    by_ranks: dict[int, list[Cell]] = defaultdict(list)
    for layout in SIMULATED:
        rows = by_ranks[_ranks(layout)]
        if not every:
            rows.append((layout, "", "bf16"))
            continue
        for precision in PRECISIONS:
            rows += [(layout, feature, precision) for feature in ("", *features(layout)) if feature not in PRECISIONS]
        rows += [(layout, option, "bf16") for option in options(layout)]
    return by_ranks


def known(layout: str, feature: str, precision: str) -> str | None:
    """A text in the cell's outcome, if known_cells.toml has it."""
    named = {"layouts": {layout}, "axes": _axes(layout), "features": {feature}, "precisions": {precision}}
    for row in KNOWN:
        if all(key not in row or values & set(row[key]) for key, values in named.items()):
            return str(row["outcome"])
    return None


def allowed(layout: str, feature: str) -> list[str]:
    """The beginnings of the waits that host_syncs.toml lists for a layout and a feature, and for all runs."""
    named = {"layouts": layout, "features": feature}
    return [row["where"] for row in SYNCS if all(value in row.get(key, [value]) for key, value in named.items())]


def fault(row: Cell, rank: int, run: Simulated) -> str | None:
    """What a rank did that it should not have done; None: nothing."""
    layout, feature, precision = row
    expected = known(layout, feature, precision)
    refused = cell(LAYOUTS[layout], feature) if feature and feature not in OPTIONS else None
    where = f"{'/'.join(row)} on rank {rank}"
    if expected is not None:
        return None if expected in run.outcome else f"{where}: {run.outcome}; known_cells.toml: {expected}"
    if refused is not None and refused.standing == "refused":
        return None if refused.why in run.refusal else f"{where}: {run.outcome}, and not refused: {refused.why}"
    if run.outcome != "runs":
        return f"{where}: {run.outcome}"
    waits = sorted({wait for wait in run.syncs if not wait.startswith(tuple(allowed(layout, feature)))})
    if waits:
        return f"{where} waits for the accelerator: {waits}"
    if rank == 0 and "manifest.json" not in run.files:
        return f"{where}: no checkpoint, but {run.files}"
    return None


def faults(rows: list[Cell], ranks: int) -> list[str]:
    """What the ranks of the cells did that they should not have done."""
    runs = simulated([config(*row) for row in rows], ranks)
    lines = [fault(row, rank, run) for row, by_rank in zip(rows, runs, strict=True) for rank, run in enumerate(by_rank)]
    return [line for line in lines if line is not None]

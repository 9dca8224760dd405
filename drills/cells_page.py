"""Write the page of strategies and features on the simulated accelerator, from the results of its cells.

counts    in the first paragraph
rows      each row's name, and the config that asks for it
cells     for each family of layouts a table, and under it the notes of its numbers
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
FAMILIES = {
    "single, dp and ddp": lambda name: name in ("single", "dp", "ddp"),
    "fsdp": lambda name: name.startswith("fsdp"),
    "deepspeed": lambda name: name.startswith("zero"),
    "pipeline": lambda name: name.startswith("pipeline") and "+" not in name,
    "tensor and context": lambda name: name.startswith(("tensor", "context")) and "+" not in name,
    "products": lambda name: "+" in name,
}
"""Tables of the page, and which layouts are columns of each."""
ASKED_BY = {
    "accumulation": "batch.micro_size: 2",
    "uneven batches": "batch.global_size: 13",
    "activation checkpointing": "memory.activation_checkpointing.mode: full",
    "selective checkpointing": "memory.activation_checkpointing.mode: selective",
    "activation offload": "memory.activation_offload: cpu",
    "chunked loss": "memory.loss_chunk: 17",
    "frozen parameters": "model.freeze: ['embedding.*', '*.query.*']",
    "loss parallel": "parallel.tensor_parallel.loss_parallel: true",
    "offload": "parallel.fsdp.cpu_offload: true or parallel.deepspeed.offload_optimizer: cpu",
    "averaged weights": "optim.ema: {decay: 0.5}",
    "adapters": "model.adapter.kind: lora",
    "companion": "objective.kind: distill and objective.companion: initial",
    "packed data": "data.train.kind: tokens and data.train.documents: whole",
    "experts": "model.architecture: {model_type: mixtral}",
    "deterministic": "run.determinism: deterministic",
    "invariant": "run.determinism: invariant",
    "unused parameters": "parallel.ddp.find_unused_parameters: true",
    "bf16 parameters": "parallel.fsdp.mixed_precision.param_dtype: bf16",
    "fp16 parameters": "parallel.fsdp.mixed_precision.param_dtype: fp16",
    "wrap root": "parallel.fsdp.wrap: root",
    "wrap size": "parallel.fsdp.wrap: size",
    "wrap classes": "parallel.fsdp.wrap: [Attention, SwiGLU]",
    "micro-batches reduced": "parallel.fsdp.reduce_every: micro-batch",
    "forward prefetch": "parallel.fsdp.forward_prefetch: true",
    "static graph": "parallel.ddp.static_graph: true",
    "gradients beside buckets": "parallel.ddp.gradient_as_bucket_view: false",
    "small buckets": "parallel.ddp.bucket_mb: 0.001",
    "fp16 compression": "parallel.ddp.compression: fp16",
    "bf16 compression": "parallel.ddp.compression: bf16",
    "powersgd": "parallel.ddp.compression: powersgd",
    "synced batch norm": "parallel.ddp.sync_batchnorm: true",
    "stages by name": "parallel.pipeline_parallel.split",
    "own plan": "parallel.tensor_parallel.plan",
}
"""By row: the config that asks for it. A row that isn't here is an optimizer."""
_CODE = re.compile(r"(?<![\w`'.])(?:[a-z]+(?:[._][a-z_]+)+(?:: \w+)?|mode: \w+)")
_JOINED = ("run.determinism invariant", "run.determinism: invariant")  # one sentence has it without a colon


def filled(text: str, results: Results, waits: Mapping[str, str], failures: Mapping[str, str]) -> str:
    """Return the page with what the results state.

    Args:
        waits: By the beginning of a wait: why it is there.
        failures: By a text of torch's errors: why no accelerator would show them.
    """
    written = {
        "counts": counts(results),
        "rows": rows(results),
        "cells": "\n\n".join(tables(results, waits, failures)),
    }
    for name, part in written.items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda at, part=part: f"{at[1]}{part}\n{at[2]}",
            text,
            flags=re.DOTALL,
        )
    return text


def counts(results: Results) -> str:
    outcomes = [result["outcome"] for result in results.values()]
    waiting = sum(bool(result["waits"]) for result in results.values())
    runs = outcomes.count("runs")
    refused = sum(outcome.startswith("refused") for outcome in outcomes)
    failed = len(outcomes) - runs - refused
    return (
        f"Of {len(outcomes):,} cells, **{runs:,} run**, {waiting:,} of them with a wait that has a reason; "
        f"**{refused:,} are refused** before they start, with a sentence; **{failed:,} fail** in torch."
    )


def rows(results: Results) -> str:
    """Return the table of rows: each name, and the config that asks for it."""
    names = dict.fromkeys(name.split("/")[1] for name in results)
    lines = [f"| {name} | {_in_code(asked_by(name))} |" for name in names if name]
    return "\n".join(["| row | asked for by |", "| --- | --- |", *lines])


def _in_code(config: str) -> str:
    parts = re.sub(" (and|or) ", r"` \1 `", config)
    return f"`{parts}`"


def asked_by(feature: str) -> str:
    return ASKED_BY.get(feature, f"optim.name: {feature}")


def tables(results: Results, waits: Mapping[str, str], failures: Mapping[str, str]) -> Iterator[str]:
    """Yield a heading, a table and its notes for each family of layouts."""
    layouts = list(dict.fromkeys(name.split("/")[0] for name in results))
    for family, has in FAMILIES.items():
        notes: dict[str, int] = {}
        columns = [layout for layout in layouts if has(layout)]
        if not columns:
            continue
        yield f"## {family}"
        yield _table(results, columns, lambda row, result, notes=notes: _mark(row, result, notes, waits, failures))
        if notes:
            yield "\n".join(f"{number}. {note}" for note, number in notes.items())


def _table(results: Results, layouts: list[str], mark: Callable[[str, Mapping[str, Any]], str]) -> str:
    by_cell: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for name, result in results.items():
        layout, feature, precision = name.split("/")
        if layout in layouts:
            by_cell.setdefault((feature, layout), {})[precision] = result
    features = list(dict.fromkeys(feature for feature, _ in by_cell))
    lines = [f"| | {' | '.join(layouts)} |", f"| --- |{' --- |' * len(layouts)}"]
    for feature in features:
        of_row = [by_cell.get((feature, layout), {}) for layout in layouts]
        marks = [_of_precisions({key: mark(feature, result) for key, result in cell.items()}) for cell in of_row]
        lines.append(f"| {feature or '(nothing else)'} | {' | '.join(marks)} |")
    return "\n".join(lines)


def _of_precisions(marks: Mapping[str, str]) -> str:
    """Return a cell's text: one for all precisions, or one for those that share it."""
    if not marks:
        return "-"
    together: dict[str, list[str]] = {}
    for precision, mark in marks.items():
        together.setdefault(mark, []).append(precision)
    if len(together) == 1:
        return next(iter(together))
    return "<br>".join(f"{', '.join(precisions)}: {mark}" for mark, precisions in together.items())


def _mark(
    feature: str,
    result: Mapping[str, Any],
    notes: dict[str, int],
    waits: Mapping[str, str],
    failures: Mapping[str, str],
) -> str:
    """Return `runs`, or what else happened with the numbers of its notes."""
    outcome = result["outcome"]
    if outcome == "runs" and not result["waits"]:
        return "runs"
    if outcome == "runs":
        starts = tuple(start for start in waits if any(wait.startswith(start) for wait in result["waits"]))
        why = [f"waits: {waits[start]}" for start in starts]
        kind = "runs, waits"
    elif outcome.startswith("refused: "):
        why, kind = [f"refused: {refusal(outcome, feature)}"], "refused"
    else:
        why, kind = [f"fails: {failure(outcome, failures)}"], "fails"
    numbers = sorted({notes.setdefault(note, len(notes) + 1) for note in why})
    return f"{kind} ({', '.join(map(str, numbers))})"


def refusal(outcome: str, feature: str) -> str:
    """Return why a cell is refused, without the names of its layout and of its own row.

    Of several problems, the one of the table of features counts, or else the first.
    """
    problems = outcome.removeprefix("refused: ").removeprefix("Python: ").splitlines()
    of_table = [problem.partition(" doesn't go with ")[2] for problem in problems]
    text = next(filter(None, of_table)).partition(": ")[2] if any(of_table) else _without_row(problems[0], feature)
    text = re.sub(r"^\S+ is for DDP's", "it is for DDP's", text).partition("; in it are")[0]
    text = re.sub(r"\bparallel\.(\w+):? \d+", r"parallel.\1", text)
    return _CODE.sub(lambda at: f"`{at[0]}`", text.replace(*_JOINED))


def _without_row(problem: str, feature: str) -> str:
    """Return a problem without the key that its row is about, the strategy's name, and the location in the model."""
    problem = re.sub(r"^parallel\.strategy: \w+ ", "the strategy ", problem)
    problem = re.sub(r" blocks\.[\w.]+:", "", problem)
    key, _, rest = problem.partition(": ")
    asked, _, value = asked_by(feature).partition(": ")
    return rest if key == asked and (key.startswith("parallel.ddp.") or not rest.startswith(value)) else problem


def failure(outcome: str, failures: Mapping[str, str]) -> str:
    """Return the first sentence of torch's error, and why no accelerator would show it."""
    text = " ".join(outcome.split()).partition(" at ")[0].partition(". ")[0]
    why = next((reason for beginning, reason in failures.items() if text.startswith(beginning)), "")
    return f"`{text}`" + (f": {why}" if why else "")

"""Output of the commands of `ckpt`: lines of text, and objects for scripts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import yaml

from lockstep.checkpoint.inspection import ListedCheckpoint, PruneResult, age
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reading import VerificationResult
from lockstep.config.wording import yaml_like
from lockstep.core import formatting
from lockstep.core.formatting import counted

if TYPE_CHECKING:
    from lockstep.checkpoint.comparison import Comparison, TensorDifference
    from lockstep.core.records import LeftOutSample
    from lockstep.loop.ledger import Audit

_MAX_VALUE = 100  # characters
_MAX_LINES = 12  # of one kind

Lines = list[str]
Object = dict[str, Any]


def listed(
    folder: str, entries: Sequence[ListedCheckpoint], why: Mapping[int, Sequence[str]], aside: Mapping[str, int]
) -> Lines:
    """Return a table, then a line for each checkpoint that is damaged or was moved aside."""
    if not entries and not aside:
        return [f"there is no checkpoint in {folder}"]
    rows = [("step", "samples", "written", "size", "kept as", "metrics")]
    for entry in entries:
        if (manifest := entry.manifest) is not None:
            numbers = (f"{manifest.step:,}", f"{manifest.samples:,}", _ago(manifest), formatting.size(manifest.size))
            rows.append((*numbers, ", ".join(why[entry.step]) or "(deletable)", _metrics(manifest.metrics)))
    return [
        folder,
        *(_table(rows, ">>>><<") if len(rows) > 1 else ()),
        *(f"{entry.name} is damaged: {entry.damage}" for entry in entries if entry.damage is not None),
        *(f"moved aside: {name}, {formatting.size(size)}" for name, size in aside.items()),
    ]


def listed_json(
    folder: str, entries: Sequence[ListedCheckpoint], why: Mapping[int, Sequence[str]], aside: Mapping[str, int]
) -> Object:
    """Return the same as an object; sizes are in bytes."""
    checkpoints = []
    for entry in entries:
        facts = _progress(entry.manifest) if entry.manifest is not None else {"step": entry.step}
        checkpoints.append({"name": entry.name, "damaged": entry.damage, "stays": list(why[entry.step]), **facts})
    moved = [{"name": name, "size": size} for name, size in aside.items()]
    return {"folder": folder, "checkpoints": checkpoints, "aside": moved}


def _progress(manifest: Manifest) -> Object:
    names = ("step", "samples", "tokens", "written", "size", "ranks", "metrics")
    return {name: getattr(manifest, name) for name in names}


def shown(place: str, manifest: Manifest, *, tensors: bool) -> Lines:
    """Return the contents of a manifest as YAML, without hashes, and each tensor only on request."""
    sizes: dict[str, list[int]] = {}
    for name, entry in manifest.tensors.items():
        sizes.setdefault(name.partition(".")[0], []).append(entry.size)
    each = {name: f"{entry.info}, {formatting.size(entry.size)}" for name, entry in manifest.tensors.items()}
    total = {part: f"{len(of)} ({formatting.size(sum(of))})" for part, of in sizes.items()}
    ledger = manifest.state.get("ledger") or ()
    contents = {
        "run": manifest.run,
        **_progress(manifest),
        "size": f"{formatting.size(manifest.size)} in {counted(len(manifest.files), 'file')}",
        "versions": {"python": manifest.environment.get("python"), **manifest.environment.get("packages", {})},
        "config": manifest.config,
        "state": {key: _short(yaml_like(value)) for key, value in manifest.state.items() if key != "ledger"},
        "ledger": [{key: value for key, value in segment.items() if key != "order"} for segment in ledger],
        "tensors": each if tensors else total,
    }
    return [place, *yaml.safe_dump(contents, sort_keys=False, allow_unicode=True, width=120).splitlines()]


def shown_json(name: str, manifest: Manifest, *, tensors: bool) -> Object:
    """Return the same as an object; `tensors` only on request."""
    result: Object = {name: getattr(manifest, name) for name in ("config", "environment", "state")}
    result |= {"name": name, "run_id": manifest.run, **_progress(manifest), "tensor_count": len(manifest.tensors)}
    result["files"] = {file: entry.size for file, entry in manifest.files.items()}
    result["tensor_bytes"] = sum(entry.size for entry in manifest.tensors.values())
    if tensors:
        names = ("dtype", "shape", "size")
        facts = {tensor: [getattr(entry, name) for name in names] for tensor, entry in manifest.tensors.items()}
        result["tensors"] = {tensor: dict(zip(names, values, strict=True)) for tensor, values in facts.items()}
    return result


def verified(result: VerificationResult) -> str:
    if result.fault is not None:
        return f"{result.name}  damaged: {result.fault}"
    return f"{result.name}  intact: {formatting.size(result.size)} in {formatting.duration(result.seconds)}"


def damaged(folder: str, faults: Sequence[VerificationResult], number: int) -> str:
    """Return the error for the damaged ones among `number` checkpoints."""
    if number == 1:
        return f"{folder}/{faults[0].name} is damaged: {faults[0].fault}"
    lines = "".join(f"\n  {result.name}: {result.fault}" for result in faults)
    return f"{len(faults)} of {number} checkpoints in {folder} are damaged:{lines}"


def audited(step: int, audit: Audit) -> Lines:
    rows = [("attempt", "ranks", "from", "to", "used")]
    for segment, expected in zip(audit.segments, audit.expected, strict=True):
        used = "the expected samples" if segment.digest == expected else "OTHER SAMPLES"
        used = used if segment.attempt else "not known: used by another program before the import"
        rows.append((f"{segment.attempt}", f"{segment.ranks}", f"{segment.first:,}", f"{segment.last:,}", used))
    return [
        *_table(rows, ">>>><"),
        *(f"from sample {position:,}: {what}" for position, what in audit.changes),
        *(f"left out {_span(sample)}: sample {sample.index}: {sample.reason}" for sample in audit.left_out),
        f"step {step:,}, {audit.samples:,} samples: "
        + ("complete, each sample of the order once" if audit.complete else f"NOT complete: {incomplete(audit)}"),
    ]


def _span(sample: LeftOutSample) -> str:
    return f"from {sample.position:,} on" if sample.until is None else f"from {sample.position:,} to {sample.until:,}"


def incomplete(audit: Audit) -> str:
    """Return what is wrong, in a sentence."""
    faults = {
        "no update used the samples at": audit.gaps,
        "more than one update used those at": audit.repeats,
        "samples that the order doesn't have there were used at": audit.mismatches,
    }
    places = {what: ", ".join(f"{first:,} to {last:,}" for first, last in spans) for what, spans in faults.items()}
    return "; ".join(f"{what} {where}" for what, where in places.items() if where)


def audited_json(audit: Audit) -> Object:
    fields = asdict(audit)
    segments = zip(fields["segments"], fields.pop("expected"), strict=True)
    fields["segments"] = [{**segment, "expected": expected} for segment, expected in segments]
    changes = [{"at": position, "what": what} for position, what in audit.changes]
    return {**fields, "complete": audit.complete, "changes": changes}


def compared(names: Sequence[str], comparison: Comparison) -> Lines:
    """Return the first differences of each kind."""
    if comparison.equal:
        return [f"equal: {counted(comparison.same, 'tensor')}, config and state"]
    lines = [f"A  {names[0]}", f"B  {names[1]}"]
    for side, alone in zip("AB", comparison.alone, strict=True):
        lines += _first(f"{counted(len(alone), 'tensor')} only in {side}", alone)
    kinds = [f"{name}: {first} in A, {second} in B" for name, first, second in comparison.kinds]
    lines += _first(f"{counted(len(kinds), 'tensor')} with another shape or dtype", kinds)
    values = list(map(_difference, comparison.values))
    lines += _first(f"{counted(len(values), 'tensor')} with other values ({comparison.same} are identical)", values)
    for what, differences in (("config", comparison.config), ("state", comparison.state)):
        items = [f"{key}: {_value(first)} in A, {_value(second)} in B" for key, (first, second) in differences.items()]
        lines += _first(f"{counted(len(items), 'value')} of the {what}", items)
    return lines


def compared_json(comparison: Comparison) -> Object:
    fields = asdict(comparison)
    fields["kinds"] = {name: pair for name, *pair in fields["kinds"]}
    fields["values"] = {tensor.pop("name"): tensor for tensor in fields["values"]}
    only_in = fields.pop("alone")
    return {**fields, "equal": comparison.equal, "only_in": only_in}


def _first(title: str, items: Sequence[str]) -> Lines:
    if not items:
        return []
    more = [f"  and {len(items) - _MAX_LINES} more"] if len(items) > _MAX_LINES else []
    return [f"{title}:", *(f"  {item}" for item in items[:_MAX_LINES]), *more]


def _difference(tensor: TensorDifference) -> str:
    facts = [f"{tensor.differing:,} of {tensor.elements:,} elements"]
    if tensor.absolute is not None and tensor.relative is not None:
        relative = f"{formatting.value(tensor.relative)} of the value"
        facts.append(f"by at most {formatting.value(tensor.absolute)} ({relative})")
    if tensor.not_finite:
        facts.append(f"{tensor.not_finite:,} not finite")
    return f"{tensor.name}: {', '.join(facts)}"


def _value(value: Any) -> str:
    return "missing" if value is None else _short(yaml_like(value))


def pruned(result: PruneResult, aside: Mapping[str, int], *, dry: bool) -> Lines:
    deleted = {**result.deleted, **aside}
    verb = "would delete" if dry else "deleted"
    verified = f"; {result.trusted} is intact" if result.trusted is not None else ""
    total = formatting.size(sum(deleted.values()))
    return [
        *(f"{verb} {name}, {formatting.size(size)}" for name, size in deleted.items()),
        f"{verb} {len(deleted) or 'none'} ({total}); {len(result.stay)} kept{verified}",
    ]


def pruned_json(result: PruneResult, aside: Mapping[str, int], *, dry: bool) -> Object:
    kept = {"stay": list(result.stay), "verified": result.trusted}
    size = sum(result.deleted.values()) + sum(aside.values())
    return {"dry_run": dry, "deleted": list(result.deleted), "aside": list(aside), "bytes": size, **kept}


def _table(rows: Sequence[Sequence[str]], sides: str) -> Lines:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def _metrics(metrics: Mapping[str, float | None]) -> str:
    """Return metrics by evaluation set, such as `held-out: loss 0.1385, accuracy 97.21 %`."""
    by_set: dict[str, dict[str, float | None]] = {}
    for name, value in metrics.items():
        evaluation, _, metric = name.rpartition(".")
        by_set.setdefault(evaluation, {})[metric] = value
    return "; ".join(f"{evaluation}: {formatting.metrics(values)}" for evaluation, values in by_set.items())


def _ago(manifest: Manifest) -> str:
    seconds = age(manifest, time.time())
    return manifest.written if seconds is None else f"{formatting.duration(seconds)} ago"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"

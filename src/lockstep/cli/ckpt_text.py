"""What the sub-verbs of `ckpt` say: lines for people, and objects for scripts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import yaml

from lockstep.checkpoint.inspection import ListedCheckpoint, PruneResult, VerificationResult, age
from lockstep.checkpoint.manifest import Manifest
from lockstep.config.wording import yaml_like
from lockstep.core import formatting

if TYPE_CHECKING:
    from lockstep.checkpoint.comparison import Comparison, TensorDifference
    from lockstep.training.audit import Audit, Span

_LONGEST = 100  # characters of a value
_MOST = 12  # lines of one kind

Lines = list[str]
Object = dict[str, Any]


# --- ls -----------------------------------------------------------------------------------------------------------


def listed(
    folder: str, found: Sequence[ListedCheckpoint], why: Mapping[int, Sequence[str]], aside: Mapping[str, int]
) -> Lines:
    """A table; what is damaged, and what was put aside, in lines of their own."""
    if not found and not aside:
        return [f"there is no checkpoint in {folder}"]
    rows = [_row(one.manifest, why[one.step]) for one in found if one.manifest is not None]
    return [
        folder,
        *(_table([("step", "samples", "written", "size", "stays as", "metrics"), *rows], ">>>><<") if rows else ()),
        *(f"{one.name} is damaged: {one.damage}" for one in found if one.damage is not None),
        *(f"put aside: {name}, {formatting.size(size)}" for name, size in aside.items()),
    ]


def listed_json(
    folder: str, found: Sequence[ListedCheckpoint], why: Mapping[int, Sequence[str]], aside: Mapping[str, int]
) -> Object:
    """`size` in bytes."""
    return {
        "folder": folder,
        "checkpoints": [
            {
                "name": one.name,
                "damaged": one.damage,
                "stays": list(why[one.step]),
                **(_progress(one.manifest) if one.manifest is not None else {"step": one.step}),
            }
            for one in found
        ],
        "aside": [{"name": name, "size": size} for name, size in aside.items()],
    }


def _row(manifest: Manifest, why: Sequence[str]) -> tuple[str, ...]:
    return (
        f"{manifest.step:,}",
        f"{manifest.samples:,}",
        _ago(manifest),
        formatting.size(manifest.size),
        ", ".join(why) or "(may go)",
        _metrics(manifest.metrics),
    )


def _progress(manifest: Manifest) -> Object:
    return {
        "step": manifest.step,
        "samples": manifest.samples,
        "tokens": manifest.tokens,
        "written": manifest.written,
        "size": manifest.size,
        "ranks": manifest.ranks,
        "metrics": manifest.metrics,
    }


# --- show ---------------------------------------------------------------------------------------------------------


def shown(place: str, manifest: Manifest, *, tensors: bool) -> Lines:
    """All that the manifest says but hashes; each tensor only if asked for."""
    state = {key: value for key, value in manifest.state.items() if key != "ledger"}
    return [
        place,
        *_pairs(
            {
                "run": manifest.run,
                "step": f"{manifest.step:,}",
                "samples": f"{manifest.samples:,}",
                "tokens": f"{manifest.tokens:,}",
                "written": f"{manifest.written} ({_ago(manifest)})",
                "ranks": str(manifest.ranks),
                "size": f"{formatting.size(manifest.size)} in {_number(len(manifest.files), 'file')}",
                "metrics": _metrics(manifest.metrics) or "none at this step",
                "versions": _versions(manifest.environment) or "not known",
            }
        ),
        "config, where it isn't the default:",
        *_indented(_yaml(manifest.config)),
        "state:",
        *_indented(_pairs({key: _short(yaml_like(value)) for key, value in _flat(state, "")})),
        *_ledger(manifest.state.get("ledger") or ()),
        f"tensors: {_tensors_in_total(manifest)}",
        *(_indented(_tensor_table(manifest)) if tensors else ()),
    ]


def shown_json(name: str, manifest: Manifest, *, tensors: bool) -> Object:
    """`tensors` only if asked for."""
    found = {
        "name": name,
        "run_id": manifest.run,
        **_progress(manifest),
        "files": {file: entry.size for file, entry in manifest.files.items()},
        "config": manifest.config,
        "environment": manifest.environment,
        "state": manifest.state,
        "tensor_count": len(manifest.tensors),
        "tensor_bytes": sum(entry.size for entry in manifest.tensors.values()),
    }
    if tensors:
        found["tensors"] = {
            tensor: {"dtype": entry.dtype, "shape": list(entry.shape), "size": entry.size}
            for tensor, entry in manifest.tensors.items()
        }
    return found


def _versions(environment: Mapping[str, Any]) -> str:
    packages = {"python": environment.get("python"), **environment.get("packages", {})}
    return ", ".join(f"{package} {version}" for package, version in packages.items() if version is not None)


def _yaml(config: Mapping[str, Any]) -> Lines:
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=120).splitlines()


def _ledger(segments: Sequence[Mapping[str, Any]]) -> Lines:
    """A line each, without the order of the samples, which is long."""
    told = (", ".join(f"{key} {value}" for key, value in one.items() if key != "order") for one in segments)
    return [f"ledger: {_number(len(segments), 'segment')}", *_indented(told)]


def _tensors_in_total(manifest: Manifest) -> str:
    """By what comes before the first dot: model, optimizer."""
    sizes: dict[str, list[int]] = {}
    for name, entry in manifest.tensors.items():
        sizes.setdefault(name.partition(".")[0], []).append(entry.size)
    parts = ", ".join(f"{part} {len(of)} ({formatting.size(sum(of))})" for part, of in sizes.items())
    return f"{len(manifest.tensors)}: {parts}" if parts else "none"


def _tensor_table(manifest: Manifest) -> Lines:
    rows = [
        (name, entry.dtype, str(list(entry.shape)), formatting.size(entry.size))
        for name, entry in manifest.tensors.items()
    ]
    return _table(rows, "<<<>")


# --- verify -------------------------------------------------------------------------------------------------------


def verified(one: VerificationResult) -> str:
    if one.fault is not None:
        return f"{one.name}  damaged: {one.fault}"
    return f"{one.name}  whole: {formatting.size(one.size)} in {formatting.duration(one.seconds)}"


def distrusted(folder: str, faults: Sequence[VerificationResult], number: int) -> str:
    """Of so many that were read."""
    if number == 1:
        return f"{folder}/{faults[0].name} is damaged: {faults[0].fault}"
    shown = "".join(f"\n  {one.name}: {one.fault}" for one in faults)
    return f"{len(faults)} of {number} checkpoints in {folder} are damaged:{shown}"


# --- audit --------------------------------------------------------------------------------------------------------


def audited(step: int, found: Audit) -> Lines:
    segments = zip(found.segments, found.expected, strict=True)
    rows = [
        (
            f"{one.attempt}",
            f"{one.ranks}",
            f"{one.first:,}",
            f"{one.last:,}",
            "the samples that belong there" if one.digest == expected else "OTHER SAMPLES",
        )
        for one, expected in segments
    ]
    return [
        *_table([("attempt", "ranks", "from", "to", "had"), *rows], ">>>><"),
        *(f"from sample {at:,} on: {what}" for at, what in found.changes),
        f"step {step:,}, {found.samples:,} samples: "
        + ("complete, each sample of the order once" if found.complete else f"NOT complete: {incomplete(found)}"),
    ]


def incomplete(found: Audit) -> str:
    """What is wrong, in a sentence."""
    faults = (
        ("no update had the samples at", found.gaps),
        ("more than one update had those at", found.repeats),
        ("other samples than the order says were used at", found.mismatches),
    )
    return "; ".join(f"{what} {_spans(spans)}" for what, spans in faults if spans)


def audited_json(found: Audit) -> Object:
    return {
        "samples": found.samples,
        "complete": found.complete,
        "gaps": [list(span) for span in found.gaps],
        "repeats": [list(span) for span in found.repeats],
        "mismatches": [list(span) for span in found.mismatches],
        "changes": [{"at": at, "what": what} for at, what in found.changes],
        "segments": [
            {**asdict(one), "expected": expected} for one, expected in zip(found.segments, found.expected, strict=True)
        ],
    }


def _spans(spans: Iterable[Span]) -> str:
    return ", ".join(f"{first:,} to {last:,}" for first, last in spans)


# --- diff ---------------------------------------------------------------------------------------------------------


def compared(names: Sequence[str], found: Comparison) -> Lines:
    """The first of each kind of difference."""
    if found.equal:
        return [f"equal: {_number(found.same, 'tensor')}, config and state"]
    lines = [f"A  {names[0]}", f"B  {names[1]}"]
    for side, alone in zip("AB", found.alone, strict=True):
        lines += _first(f"{_number(len(alone), 'tensor')} only in {side}", alone)
    kinds = [f"{name}: {one} in A, {other} in B" for name, one, other in found.kinds]
    lines += _first(f"{_number(len(kinds), 'tensor')} of another shape or dtype", kinds)
    values = [_apart(one) for one in found.values]
    lines += _first(f"{_number(len(values), 'tensor')} of other values ({found.same} are the same)", values)
    for what, differences in (("config", found.config), ("state", found.state)):
        said = [f"{key}: {_said(one)} in A, {_said(other)} in B" for key, (one, other) in differences.items()]
        lines += _first(f"{_number(len(said), 'value')} of the {what}", said)
    return lines


def compared_json(found: Comparison) -> Object:
    return {
        "equal": found.equal,
        "only_in": [list(names) for names in found.alone],
        "kinds": {name: [_kind(one), _kind(other)] for name, one, other in found.kinds},
        "values": {
            one.name: {key: value for key, value in asdict(one).items() if key != "name"} for one in found.values
        },
        "same": found.same,
        "config": {key: list(pair) for key, pair in found.config.items()},
        "state": {key: list(pair) for key, pair in found.state.items()},
    }


def _first(title: str, items: Sequence[str]) -> Lines:
    if not items:
        return []
    more = [f"  and {len(items) - _MOST} more"] if len(items) > _MOST else []
    return [f"{title}:", *(f"  {item}" for item in items[:_MOST]), *more]


def _apart(one: TensorDifference) -> str:
    far = [f"{one.differing:,} of {one.elements:,} elements"]
    if one.absolute is not None and one.relative is not None:
        far.append(f"by {formatting.value(one.absolute)} at most ({formatting.value(one.relative)} of the value)")
    if one.not_finite:
        far.append(f"{one.not_finite:,} not finite")
    return f"{one.name}: {', '.join(far)}"


def _kind(kind: Any) -> Object:
    return {"dtype": kind.dtype, "shape": list(kind.shape)}


def _said(value: Any) -> str:
    return "nothing" if value is None else _short(yaml_like(value))


# --- prune --------------------------------------------------------------------------------------------------------


def pruned(found: PruneResult, aside: Mapping[str, int], *, dry: bool) -> Lines:
    gone = {**found.deleted, **aside}
    verb = "would delete" if dry else "deleted"
    trusted = f"; {found.trusted} is whole" if found.trusted is not None else ""
    return [
        *(f"{verb} {name}, {formatting.size(size)}" for name, size in gone.items()),
        *(f"{name} needn't stay, but is being read" for name in found.read),
        f"{verb} {len(gone) or 'none'} ({formatting.size(sum(gone.values()))}); {len(found.stay)} stay{trusted}",
    ]


def pruned_json(found: PruneResult, aside: Mapping[str, int], *, dry: bool) -> Object:
    return {
        "dry_run": dry,
        "deleted": list(found.deleted),
        "aside": list(aside),
        "bytes": sum(found.deleted.values()) + sum(aside.values()),
        "read": list(found.read),
        "stay": list(found.stay),
        "verified": found.trusted,
    }


# --- words --------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Sequence[str]], sides: str) -> Lines:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def _pairs(values: Mapping[str, str]) -> Lines:
    return _table(list(values.items()), "<<") if values else []


def _indented(lines: Iterable[str]) -> Lines:
    return [f"  {line}" for line in lines]


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, item in value.items():
        yield from _flat(item, f"{key}.{name}" if key else str(name))


def _metrics(metrics: Mapping[str, float | None]) -> str:
    """held-out: loss 0.1385, accuracy 97.21 %"""
    by_set: dict[str, dict[str, float | None]] = {}
    for name, value in metrics.items():
        evaluation, _, metric = name.rpartition(".")
        by_set.setdefault(evaluation, {})[metric] = value
    return "; ".join(f"{evaluation}: {formatting.metrics(values)}" for evaluation, values in by_set.items())


def _ago(manifest: Manifest) -> str:
    seconds = age(manifest, time.time())
    return manifest.written if seconds is None else f"{formatting.duration(seconds)} ago"


def _number(number: int, of: str) -> str:
    return f"{number:,} {of}{'' if number == 1 else 's'}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

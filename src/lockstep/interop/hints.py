"""Hints about other tools' keys in a Lockstep config: Lockstep's key and, where it can be computed, the value.

    max_grad_norm: 0.5      ->   Lockstep's key is optim.clip_norm: write `optim.clip_norm: 0.5`

The answers are as in an import, one key at a time. `config.validation_errors` calls this module.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.config.reading import Leaf, Node, Table, leaves, to_python
from lockstep.config.wording import OPEN, yaml_like
from lockstep.interop.answers import apply
from lockstep.interop.foreign import ForeignFile, ForeignKey, as_yaml_1_1, plain
from lockstep.interop.keys import NOTHING, KeyRow, key_rows
from lockstep.interop.strategy_rules import strategy_hint

_UNCHANGED = ("rename", "length", "shape")
"""Rules that don't change the value."""
_BATCH = (
    "Lockstep derives accumulation: write `batch.global_size`, the samples of an update on all ranks, and "
    "`batch.micro_size`, the samples of one forward"
)
_OFF = {"precision.compute": "fp32", "memory.activation_checkpointing.mode": "none"}
"""Values for a switch that is off, where Lockstep's key is a choice."""


def key_hint(path: tuple[str, ...], node: Node, tree: Table) -> str | None:
    """Return what to write instead of another tool's key; None if no tool has it."""
    row = _row(path)
    if row is None:
        row = key_rows().get(plain(path[-1]).partition("_")[0])
        return row.note if row is not None and row.rule == "not there" and len(path) == 1 else None
    if row.rule in ("not there", "to do", "not needed"):
        return row.note_for(node.value if isinstance(node, Leaf) else "NAME")
    has_value = isinstance(node, Leaf) and node.value is not None
    if not has_value and row.note.startswith("write "):
        return row.note
    if row.rule == "accumulation" or row.target == "batch.micro_size":
        return _BATCH
    if not isinstance(node, Leaf) or not has_value:
        return f"Lockstep's key is {row.target}{'; ' if row.note else ''}{row.note}" if row.target else None
    keys = tuple(ForeignKey(way, to_python(leaf)) for way, leaf in leaves(tree) if way and "arguments" not in way)
    typed = node.text if row.rule in _UNCHANGED and isinstance(node.value, int | float) else None
    key = ForeignKey(path, as_yaml_1_1(node))
    answer = apply(row, key, ForeignFile(Path(), "yaml", (key,) if row.rule == "length" else keys))
    stated = {other.key for other in keys if other.word == "kind"}
    settings = {target: value for target, value in answer.settings.items() if target not in stated}
    if answer == NOTHING and row.target:
        if row.target not in _OFF:
            return f"Lockstep's key is {row.target}; leave it out for {yaml_like(node.value)}"
        settings = {row.target: _OFF[row.target]}
    if not settings or OPEN in settings.values():
        return answer.why
    flag, separator = ("--", " ") if node.where.startswith("--") else ("", ": ")
    written = " and ".join(
        f"`{flag}{target}{separator}{typed or (value if isinstance(value, str) else yaml_like(value))}`"
        for target, value in settings.items()
    )
    return f"Lockstep's key is {next(iter(settings))}: write {written}"


def _row(path: tuple[str, ...]) -> KeyRow | None:
    rows = key_rows()
    return rows.get(".".join(map(plain, path[-2:]))) or rows.get(plain(path[-1]))


def target_of(path: tuple[str, ...]) -> str | None:
    """Return Lockstep's key for another tool's one, if it has one."""
    row = _row(path)
    return row.target or None if row is not None else None


def value_hint(key: str, node: Node) -> str | None:
    """Return what to write instead of another tool's value for a Lockstep key; None if no tool has it."""
    if not isinstance(node, Leaf) or not isinstance(node.value, str):
        return None
    if key == "parallel.strategy":
        return strategy_hint(node.value.lower())
    row = key_rows().get(key.rpartition(".")[2])
    if row is None or row.target != key or row.rule != "choice":
        return None
    answer = apply(row, ForeignKey((row.key,), node.value), ForeignFile(Path(), "yaml", ()))
    return row.note if answer.why == row.note else None

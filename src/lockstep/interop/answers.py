"""Answer one key of another tool's config: find its row, and apply its rule.

("zero_optimization", "stage")     DeepSpeed's key, in any section
("optim", "lr")                    Lockstep's key, taken as it is
("scheduler", "type")              `section.key` takes precedence over `key`, and `key` over `section`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from lockstep.config import shape
from lockstep.config.deepspeed_keys import keys_of
from lockstep.core.closest import closest_match
from lockstep.interop import deepspeed
from lockstep.interop.foreign import ForeignFile, ForeignKey, is_off, plain
from lockstep.interop.keys import NOTHING, Answer, KeyRow, key_rows, not_needed, taken
from lockstep.interop.rules import GENERAL_RULES, Rule
from lockstep.interop.strategy_rules import STRATEGY_RULES

RULES: Mapping[str, Rule] = {**GENERAL_RULES, **STRATEGY_RULES}
_WHOLE = ("not needed", "not there", "to do")
_SECTIONS_WITH_KEYS = (
    "mode", "project", "comment", "description", "checkpointing", "enable_checkpointing", "ddp", "multi_gpu",
    "distributed", "zero_optimization", "lr_scheduler_kwargs", "accelerator_config", "fsdp_config", "fsdp_plugin",
    "dynamo_config",
)  # fmt: skip
"""Sections with a row for the section itself, not for the keys in it."""
_SECTION_SWITCHES = ("enabled", "enable", "use_ddp", "use_fsdp", "use_deepspeed")
_SECTION_OF = {"fsdp_config": "fsdp", "deepspeed_config": "deepspeed"}


def answered(key: ForeignKey, file: ForeignFile) -> Answer:
    """Return what becomes of one key; raises NeedsRanks."""
    path = tuple(plain(part) for part in key.path)
    if (off := _unused_strategy(path, file)) is not None:
        return not_needed(f"{off} is off")
    if inside := _inside_deepspeed(path, file):
        section = "zero_optimization" if inside[0] == "zero_optimization" else ""
        return deepspeed.answer(inside, key, file) or _unknown(key, keys_of(section))
    if file.kind == "yaml" and is_lockstep_key(key.path) and key.path != ("model", "task"):  # tasks differ in spelling
        return taken(key.key, key.value)
    row = _row(path)
    if row is not None:
        return apply(row, key, file)
    if key.word in _SECTION_SWITCHES and isinstance(key.value, bool | str):
        return NOTHING if is_off(key.value) else not_needed("its section determines it")
    if key.value in (None, "auto", [], {}) and key.word in _known_words():
        return NOTHING
    zero = ("zero_optimization",) if key.word in keys_of("zero_optimization", ["pass", "only", "refuse"]) else ()
    is_known = zero or key.word in keys_of("", ["pass", "only"])
    flat = deepspeed.answer((*zero, key.word), key, file) if is_known else None
    return flat or _unknown(key, _known_words())


def _row(path: Sequence[str]) -> KeyRow | None:
    rows = key_rows()
    qualified = rows.get(".".join(path[-2:])) if len(path) > 1 else None
    for section in path[:-1]:
        row = qualified or rows.get(section)
        if row is not None and (row is qualified or (row.rule in _WHOLE and section not in _SECTIONS_WITH_KEYS)):
            return row
    return rows.get(path[-1])


def apply(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Apply the row's rule to the key's value; raises NeedsRanks."""
    if key.value is None and row.rule not in ("clip", "not needed", "not there", "to do"):
        return NOTHING
    deciding = file.find(*row.unless) if row.unless else None
    if deciding is not None and deciding.path != key.path:
        return not_needed(f"{row.note_for(key.value)}{'; ' if row.note else ''}{deciding.key} decides")
    return RULES[row.rule](row, key, file)


def _unknown(key: ForeignKey, known: Sequence[str]) -> Answer:
    near = closest_match(key.path[-1], [word for word in known if word != key.word], cutoff=0.8)
    return Answer("not known", {}, f"did you mean {near}?" if near else "no known tool has this key")


def _unused_strategy(path: Sequence[str], file: ForeignFile) -> str | None:
    if len(path) < 2 or file.kind not in ("trainer", "accelerate") or path[0] not in _SECTION_OF:
        return None
    name = _SECTION_OF[path[0]]
    if file.kind == "trainer":
        return name if is_off(file.value(name)) else None
    return None if plain(str(file.value("distributed_type"))).startswith(name) else name


def _inside_deepspeed(path: tuple[str, ...], file: ForeignFile) -> tuple[str, ...]:
    if file.kind == "deepspeed":
        return path
    if len(path) > 1 and path[0] in ("deepspeed", "ds_config", "deepspeed_config", "zero") and path[1] in keys_of(""):
        of_accelerate = path[1] in ("gradient_accumulation_steps", "gradient_clipping")
        return () if of_accelerate else path[1:]
    return path if path[0] == "zero_optimization" else ()


def is_lockstep_key(path: Sequence[str]) -> bool:
    """Return whether it is a Lockstep key of any kind, or inside a mapping with free names."""
    shapes: list[shape.ValueShape] = [shape.root()]
    for part in path:
        if any(at.anything for at in shapes):
            return True
        inner = [shape.fields(section).get(part) for at in shapes for section in at.sections()]
        shapes = [at for at in inner if at is not None] + [at.values for at in shapes if at.values is not None]
    return bool(shapes) and (len(path) > 1 or not any(at.sections() for at in shapes))


@cache
def _known_words() -> tuple[str, ...]:
    words = {word.rpartition(".")[2] for word in key_rows()}
    return tuple(sorted({*words, *(path[-1] for path in shape.all_keys() if len(path) > 1)}))

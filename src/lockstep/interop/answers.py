"""The answer to one key of another tool's config: its row is found, and its rule applied.

("zero_optimization", "stage")     DeepSpeed's key, wherever it stands
("optim", "lr")                    a key of ours is taken as it is
("wandb", "project")               the row of `wandb` answers for all in it
("scheduler", "type")              `section.key` goes before `key`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from lockstep.config import shape
from lockstep.config.deepspeed_keys import keys_of
from lockstep.core.closest import closest_match
from lockstep.interop import deepspeed
from lockstep.interop.foreign import NOTHING, Answer, ForeignFile, ForeignKey, is_off, not_needed, plain, taken
from lockstep.interop.keys import KeyRow, key_rows
from lockstep.interop.model_rules import MODEL_RULES
from lockstep.interop.rules import GENERAL_RULES, Rule
from lockstep.interop.run_rules import RUN_RULES
from lockstep.interop.strategy_rules import STRATEGY_RULES

RULES: Mapping[str, Rule] = {**GENERAL_RULES, **RUN_RULES, **STRATEGY_RULES, **MODEL_RULES}
_WITH_OWN_KEYS = (
    "mode", "project", "comment", "description", "checkpointing", "enable_checkpointing", "ddp", "multi_gpu",
    "distributed", "zero_optimization", "lr_scheduler_kwargs", "accelerator_config", "fsdp_config", "fsdp_plugin",
    "dynamo_config",
)  # fmt: skip
"""Sections whose own row doesn't answer for the keys in them."""
_SWITCHES_OF_SECTIONS = ("enabled", "enable", "use_ddp", "use_fsdp", "use_deepspeed")
_SECTION_OF = {"fsdp_config": "fsdp", "deepspeed_config": "deepspeed"}


def answered(key: ForeignKey, file: ForeignFile) -> Answer:
    """Return what becomes of one key; raises NeedsRanks."""
    path = tuple(plain(part) for part in key.path)
    if (off := _of_another_strategy(path, file)) is not None:
        return not_needed(f"{off} is off")
    if inside := _inside_deepspeed(path, file):
        return deepspeed.answer(inside, key, file) or _unknown(key, deepspeed.keys_near(inside))
    if (
        file.kind == "yaml" and _is_ours(key.path) and key.path != ("model", "task")
    ):  # whose values others spell otherwise
        return taken(key.key, key.value)
    row = _row(path)
    if row is not None:
        return apply(row, key, file)
    if key.word in _SWITCHES_OF_SECTIONS and isinstance(key.value, bool | str):
        return NOTHING if is_off(key.value) else not_needed("the section around it states it")
    if key.value in (None, "auto", [], {}) and key.word in _known_or_ours():
        return NOTHING
    return _flat_deepspeed(key, file) or _unknown(key, _known_or_ours())


def _row(path: Sequence[str]) -> KeyRow | None:
    """Return the row of `section.key`, of a section that answers for all in it, or of the key."""
    rows = key_rows()
    for section in path[:-1]:
        qualified = rows.get(".".join(path[-2:]))
        row = qualified or rows.get(section)
        whole = row is not None and row.rule in ("not needed", "not there") and section not in _WITH_OWN_KEYS
        if row is not None and (whole or row is qualified):
            return row
    return rows.get(path[-1])


def apply(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Return what the row makes of the key's value; raises NeedsRanks."""
    if key.value is None and row.rule not in ("clip", "not needed", "not there", "to do"):
        return NOTHING
    deciding = file.find(*row.unless) if row.unless else None
    if deciding is not None and deciding.path != key.path:
        return not_needed(f"{row.note}{'; ' if row.note else ''}{deciding.key} decides")
    return RULES[row.rule](row, key, file)


def _unknown(key: ForeignKey, known: Sequence[str]) -> Answer:
    near = closest_match(key.path[-1], [word for word in known if word != key.word], cutoff=0.8)
    return Answer("not known", {}, f"did you mean {near}?" if near else "no tool that Lockstep knows has it")


def _of_another_strategy(path: Sequence[str], file: ForeignFile) -> str | None:
    """Return the strategy that HF Trainer or Accelerate doesn't run under, if the key is one of its options."""
    if len(path) < 2 or file.kind not in ("trainer", "accelerate") or path[0] not in _SECTION_OF:
        return None
    name = _SECTION_OF[path[0]]
    if file.kind == "trainer":
        return name if is_off(file.value(name)) else None
    return None if plain(str(file.value("distributed_type"))).startswith(name) else name


def _inside_deepspeed(path: tuple[str, ...], file: ForeignFile) -> tuple[str, ...]:
    """Return the path in DeepSpeed's config, if the key is one of that."""
    if file.kind == "deepspeed":
        return path
    if len(path) > 1 and path[0] in ("deepspeed", "ds_config", "deepspeed_config", "zero") and path[1] in keys_of(""):
        of_accelerate = path[1] in ("gradient_accumulation_steps", "gradient_clipping")
        return () if of_accelerate else path[1:]
    return path if path[0] == "zero_optimization" else ()


def _flat_deepspeed(key: ForeignKey, file: ForeignFile) -> Answer | None:
    """Return the answer for a key of DeepSpeed's that stands outside its section."""
    if key.word in keys_of("zero_optimization", ["pass", "only", "refuse"]):
        return deepspeed.answer(("zero_optimization", key.word), key, file)
    return deepspeed.answer((key.word,), key, file) if key.word in keys_of("", ["pass", "only"]) else None


def _is_ours(path: Sequence[str]) -> bool:
    """Return whether it is a key of ours, of whatever kind, or stands in a mapping of free names."""
    shapes: list[shape.ValueShape] = [shape.root()]
    for part in path:
        if any(at.anything for at in shapes):
            return True
        inner = [shape.fields(section).get(part) for at in shapes for section in at.sections()]
        shapes = [at for at in inner if at is not None] + [at.values for at in shapes if at.values is not None]
    return bool(shapes) and len(path) > 1


@cache
def _known_or_ours() -> tuple[str, ...]:
    """Return the words among which a misspelled one was meant."""
    words = {word.rpartition(".")[2] for word in key_rows()}
    return tuple(sorted({*words, *(path[-1] for path in shape.all_keys() if len(path) > 1)}))

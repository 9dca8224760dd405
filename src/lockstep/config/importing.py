"""Another tool's config as ours: every key of it answered, and what comes out is checked.

    args.json  -->  read_foreign  -->  an Answer a key  -->  settings  -->  YAML, `lockstep config check`ed
                                            |
                    learning_rate           taken        optim.lr: 5e-05
                    per_device_train_...    derived      batch.global_size: 64 = 8 samples x 1 x 8 ranks
                    logging_nan_inf_filter  not needed   a NaN is never averaged
                    neftune_noise_alpha     not there    ...
                    lerning_rate            not known    did you mean learning_rate?

What the file leaves to its tool's defaults comes out with these, where ours are others. What no file can say (the
script's own model and data) comes out as a marked place, or from `also`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.config import deepspeed_words, import_deepspeed, import_words, shape
from lockstep.config import import_answers as ways
from lockstep.config.foreign_files import NAMES, ForeignFile, Kind, Said, plain, read_foreign
from lockstep.config.foreign_words import words
from lockstep.config.import_answers import NOTHING, Answer, Facts, NeedsRanks, is_off, not_needed, not_there, to_do
from lockstep.config.import_table import ANSWERS
from lockstep.config.loading import validate
from lockstep.config.merging import ALTERNATIVES
from lockstep.config.override import Override
from lockstep.config.overrides import from_flags
from lockstep.config.reading import Table, leaves, to_python
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.terminal import echo


@dataclass(frozen=True, slots=True)
class Finding:
    """A key of the file, and what became of it. `key` is in brackets where the file left it to a default."""

    key: str
    where: str
    answer: Answer


@dataclass(frozen=True)
class Imported:
    """Attributes:
    findings: one a key, in the order of the file; then defaults.
    settings: by dotted key of ours.
    missing: what a run needs besides, with how to write it.
    """

    file: ForeignFile
    findings: tuple[Finding, ...]
    settings: Mapping[str, object]
    missing: Mapping[str, str]

    @property
    def unanswered(self) -> tuple[Finding, ...]:
        """What the run would lack."""
        return _lost(self.findings)


def _lost(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(one for one in findings if one.answer.standing in ("not there", "not known"))


_ASKS_THE_SHELL, _ASKS_PYTHON = "--ranks N", "ranks=N"


def import_file(
    path: Path,
    kind: Kind | None = None,
    ranks: int | None = None,
    also: Sequence[Override] = (),
    lenient: bool = False,
) -> Imported:
    """Args:
        kind: None: as the file's words tell.
        ranks: on which it was meant to run.
        also: further settings, which win.
        lenient: what is not there or not known is no mistake beside others.

    Raises:
        ConfigError: the file can't be read; a sum needs `ranks`; a value, or two together, can't be in our config,
            with what is not there or not known besides.
    """
    return _imported(read_foreign(path, kind), ranks, also, lenient=lenient)


def _imported(
    file: ForeignFile,
    ranks: int | None,
    also: Sequence[Override] = (),
    asks: str = _ASKS_THE_SHELL,
    lenient: bool = False,
) -> Imported:
    _refuse_other_ranks(file, ranks, asks)
    findings = listed(file, ranks, asks)
    over = _overridden(also)
    taken = {key: value for one in findings for key, value in one.answer.settings.items()}
    settings = {key: value for key, value in taken.items() if not _is_replaced(key, over)} | over
    missing = {key: how for key, how in _NECESSARY.items() if not _has(settings, key)}
    by_key = {key: one for one in findings for key in one.answer.settings if key not in over}
    try:
        _check(settings, missing, by_key, over)
    except ConfigError as error:
        raise ConfigError([*error.problems, *([] if lenient else map(_problem, _lost(findings)))]) from None
    return Imported(file, findings, settings, missing)


def import_config(path: str | os.PathLike[str], *, ranks: int | None = None) -> dict[str, object]:
    """Another tool's config, or one of ours, as a mapping of sections that `lockstep.train` takes.

    A script's YAML, a DeepSpeed JSON, HF TrainingArguments as JSON, Accelerate's config: `lockstep config import` lists
    what becomes of each key. What only you can say is named on stderr, by the first rank.

    Args:
        ranks: on which it was meant to run, where a sum needs it. None: as many as the file says, else as
            WORLD_SIZE says, which torchrun sets.

    Raises:
        ConfigError: as of `import_file`; or a key would be lost.
    """
    file = read_foreign(Path(path), None)
    found = _imported(file, ranks or _ranks_of(file) or _ranks_started(), asks=_ASKS_PYTHON)
    if found.unanswered:
        raise ConfigError([*map(_problem, found.unanswered)])
    if os.environ.get("RANK", "0") == "0":
        for problem in map(_problem, (one for one in found.findings if one.answer.standing == "to do")):
            echo(f"lockstep: to do: {problem}", file=sys.stderr)
    return nested(found.settings)


def listed(file: ForeignFile, ranks: int | None = None, asks: str = _ASKS_THE_SHELL) -> tuple[Finding, ...]:
    """What becomes of each key, before anything is checked.

    Args:
        asks: how whoever imports would say the ranks.

    Raises:
        ConfigError: a sum needs `ranks`.
    """
    facts = Facts(file.kind, file.said, ranks or _ranks_of(file), file.path.parent)
    found = _settled([*_findings(facts, asks)])
    return (*found, *_defaults(facts, found, asks))


def nested(settings: Mapping[str, object]) -> dict[str, object]:
    """Dotted keys as sections, in the order of the schema.

    Raises:
        ConfigError: a key is both a section and a value.
    """
    tree: dict[str, object] = {}
    for key, value in settings.items():
        *sections, last = key.split(".")
        at = tree
        for section in sections:
            inner = at.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(Problem("", key, f"{section} is said to be {inner!r}, and to hold further keys"))
            at = inner
        at[last] = value
    order = [*shape.fields(_root()), *tree]  # a section that there isn't comes last, to be refused by name
    return {name: tree[name] for name in dict.fromkeys(order) if name in tree}


def _root() -> type:
    section = shape.root().section
    assert section is not None
    return section


def _overridden(also: Sequence[Override]) -> dict[str, object]:
    tree, problems = from_flags(also, Table())
    if problems:
        raise ConfigError(problems)
    return {".".join(path): to_python(node) for path, node in leaves(tree) if path}


def _is_replaced(key: str, over: Mapping[str, object]) -> bool:
    """Whether an override says in another way what this key says, as `run.steps` takes the place of `run.epochs`."""
    section, _, word = key.rpartition(".")
    ways = ALTERNATIVES.get((section,), ())
    return word in ways and any(over.get(f"{section}.{way}") is not None for way in ways)


def _refuse_other_ranks(file: ForeignFile, ranks: int | None, asks: str) -> None:
    said, word = _ranks_of(file), asks.rstrip("= N")
    if None not in (ranks, said) and said != ranks:
        raise ConfigError(f"{file.path} is for {said} ranks, and {word} says {ranks}; leave {word} out, or correct it")


def _ranks_of(file: ForeignFile) -> int | None:
    facts = Facts(file.kind, file.said, None, file.path.parent)
    here, machines = facts.number(("nproc_per_node",)), facts.number(("nnodes", "num_nodes", "num_machines")) or 1
    return here * machines if here is not None else facts.number(ways.RANKS)


def _ranks_started() -> int | None:
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if said.isdecimal() else None


# --- one answer a key -----------------------------------------------------------------------------------------------


def _findings(facts: Facts, asks: str) -> Iterator[Finding]:
    short_of_ranks = []
    for said in facts.said:
        try:
            yield Finding(said.key, said.where, answered(said, facts))
        except NeedsRanks as needs:
            short_of_ranks.append(Problem(said.where, said.key, f"{needs}; say how many it was made for: {asks}"))
    if short_of_ranks:
        raise ConfigError(short_of_ranks)


def answered(said: Said, facts: Facts) -> Answer:
    """Raises NeedsRanks."""
    path = tuple(plain(part) for part in said.path)
    if (off := _of_another_strategy(path, facts)) is not None:
        return not_needed(f"{off} is off")
    inside = _inside_deepspeed(path, facts)
    if inside:
        found = import_deepspeed.answer(inside, said, facts)
        return found or _unknown(said, import_deepspeed.keys_near(inside))
    if facts.kind == "yaml" and _is_own(said.path) and said.path not in _THEIRS_TOO:
        return Answer("taken", {said.key: said.value})
    for word in (".".join(path[-2:]), *path[:-1], path[-1]):
        if word in ANSWERS and (word == ".".join(path[-2:]) or word == path[-1]):
            return _unless_unsaid(word, said, facts)
        if word in import_words.NOT_NEEDED and (word not in _OPENED or word == path[-1]):
            return not_needed(import_words.NOT_NEEDED[word])
        if word in import_words.NOT_THERE:
            return _unless_off(word, said, facts, not_there(import_words.NOT_THERE[word]))
    return _by_word(said, facts)


def _unless_off(word: str, said: Said, facts: Facts, answer: Answer) -> Answer:
    """The answer, if the word asks for anything."""
    switch = import_words.switched_off(word, lambda name: facts.value((name,)))
    if switch is not None:
        return not_needed(f"{switch} is off") if switch != said.word else NOTHING
    neutral = import_words.NEUTRAL.get(word)
    if neutral is None:
        return NOTHING if is_off(said.value) else answer
    same = any(type(said.value) is type(one) and said.value == one for one in neutral)
    return NOTHING if same or said.value is None else answer


def _unless_unsaid(word: str, said: Said, facts: Facts) -> Answer:
    if said.value is None and word not in _NULL_SPEAKS:
        return NOTHING
    return ANSWERS[word](said, facts)


def _by_word(said: Said, facts: Facts) -> Answer:
    word = said.word
    if word in import_words.TO_DO:
        return _unless_off(word, said, facts, to_do(import_words.TO_DO[word]))
    if said.value in (None, "auto", [], {}) and word in _known():
        return NOTHING
    if word in import_words.OWN:
        return Answer("taken", {import_words.OWN[word]: said.value})
    if word in _SWITCHES_OF_SECTIONS and isinstance(said.value, bool | str):
        return NOTHING if is_off(said.value) else not_needed("the section around it says so")
    found = ways.renamed(word, said, facts)
    if found.standing == "not known":
        flat = import_deepspeed.answer(_in_deepspeed(word), said, facts) if _in_deepspeed(word) else None
        return flat or _unknown(said, _known_or_ours())
    if found.standing == "not there" and (is_off(said.value) or word in _REASONS_THAT_HOLD):
        return not_needed(found.why.removesuffix("; leave it out"))
    return found


def _unknown(said: Said, known: Sequence[str]) -> Answer:
    near = closest_match(said.path[-1], [word for word in known if word != said.word], cutoff=0.8)
    return Answer("not known", {}, f"did you mean {near}?" if near else "no tool that Lockstep knows has it")


def _of_another_strategy(path: tuple[str, ...], facts: Facts) -> str | None:
    """The strategy that HF Trainer or Accelerate is not under, of which the key is an option."""
    if len(path) < 2 or facts.kind not in ("trainer", "accelerate") or path[0] not in _SECTION_OF:
        return None
    name = _SECTION_OF[path[0]]
    switch = facts.value(("distributed_type",) if facts.kind == "accelerate" else (name,))
    on = plain(str(switch)).startswith(name) if facts.kind == "accelerate" else not is_off(switch)
    return None if on else name


_SECTION_OF = {"fsdp_config": "fsdp", "deepspeed_config": "deepspeed"}


def _in_deepspeed(word: str) -> tuple[str, ...]:
    """Where a word would stand in DeepSpeed's config, if it is one of it."""
    if word in (*deepspeed_words.ZERO_HANDED_ON, *deepspeed_words.ZERO_ONE_VALUE, *deepspeed_words.ZERO_REFUSED):
        return ("zero_optimization", word)
    return (word,) if word in (*deepspeed_words.HANDED_ON, *deepspeed_words.ONE_VALUE) else ()


def _inside_deepspeed(path: tuple[str, ...], facts: Facts) -> tuple[str, ...]:
    """The path in DeepSpeed's config, if the key is one of that."""
    if facts.kind == "deepspeed":
        return path
    top = deepspeed_words.TOP
    if len(path) > 1 and path[0] in ("deepspeed", "ds_config", "deepspeed_config", "zero") and path[1] in top:
        return () if path[1] in _OF_ACCELERATE else path[1:]
    return path if path[0] == "zero_optimization" else ()


_OF_ACCELERATE = ("gradient_accumulation_steps", "gradient_clipping")


_REASONS_THAT_HOLD = (
    "use_orig_params", "fsdp_use_orig_params", "sync_module_states", "fsdp_sync_module_states", "limit_all_gathers",
    "fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading", "fsdp_limit_all_gathers", "fsdp_state_dict_type",
    "state_dict_type", "fsdp_version", "gradient_checkpointing_kwargs", "checkpointing", "enable_checkpointing",
)  # fmt: skip
"""Of what `foreign_words` says isn't there: always so, or somebody else's business."""
_THEIRS_TOO = (("model", "task"),)
"""Keys of ours whose values others spell otherwise."""
_OPENED = ("mode", "project", "comment", "description")
"""Words that as a section's name say nothing of what is in it."""
_SWITCHES_OF_SECTIONS = ("enabled", "enable", "use_ddp", "use_fsdp", "use_deepspeed")
_NULL_SPEAKS = ("max_grad_norm", "gradient_clip_val", "clip_grad_norm", "grad_clip")


def _is_own(path: Sequence[str]) -> bool:
    """Whether it is a key of ours, of whatever kind, or stands in a mapping of free names."""
    shapes: list[shape.ValueShape] = [shape.root()]
    for part in path:
        if any(at.anything for at in shapes):
            return True
        inner = [shape.fields(section).get(part) for at in shapes for section in at.sections()]
        shapes = [at for at in inner if at is not None] + [at.values for at in shapes if at.values is not None]
    return bool(shapes) and len(path) > 1


@cache
def _known() -> tuple[str, ...]:
    """Every word that has an answer."""
    tables = (import_words.NOT_NEEDED, import_words.NOT_THERE, import_words.TO_DO, import_words.OWN)
    answered_alone = (word.rpartition(".")[2] for word in ANSWERS)
    return tuple(sorted({*words(), *answered_alone, *(word for table in tables for word in table)}))


@cache
def _known_or_ours() -> tuple[str, ...]:
    """Among which a misspelt one was meant."""
    return tuple(sorted({*_known(), *(path[-1] for path in shape.all_keys() if len(path) > 1)}))


# --- all together ---------------------------------------------------------------------------------------------------


def _settled(findings: Sequence[Finding]) -> list[Finding]:
    """Where two keys say the same of ours, the first holds; a second that differs is named."""
    held: dict[str, tuple[object, Finding]] = {}
    settled = []
    for one in findings:
        clash = next((key for key, value in one.answer.settings.items() if key in held and held[key][0] != value), None)
        if clash is None:
            for key, value in one.answer.settings.items():
                held.setdefault(key, (value, one))
            settled.append(one)
        else:
            first = held[clash][1]
            why = f"{first.key} ({first.where}) says {clash}: {held[clash][0]}; keep one of the two"
            settled.append(Finding(one.key, one.where, not_there(why)))
    return settled


def _defaults(facts: Facts, findings: Sequence[Finding], asks: str) -> Iterator[Finding]:
    """What the file leaves to its tool, and ours would do otherwise."""
    said = {key for one in findings for key in one.answer.settings}
    for word, key, settings in _DEFAULTS.get(facts.kind, ()):
        lengthy = key == "run.epochs" and _has(dict.fromkeys(said, 1), key)
        if key not in said and not lengthy and not _left_open(word, facts):
            why = f"not in the file; the default of {NAMES[facts.kind]}"
            yield Finding(f"({word})", "", ways.derived(why, settings))
    if facts.kind == "trainer" and not said & {"batch.global_size", "batch.micro_size"}:
        yield _default_batch(facts, asks)
    if facts.kind == "deepspeed":
        yield from _unsaid_by_deepspeed(facts, findings)
    if facts.kind == "yaml" and "parallel.strategy" not in said:
        yield from _strategy_of_options(facts, said)


def _left_open(words: str, facts: Facts) -> bool:
    """Whether one of these is in the file, as `auto`."""
    keys = {f"{word}{end}" for word in words.split(", ") for end in ("", ".enabled", ".type")}
    return any(one.value == "auto" and ".".join(map(plain, one.path)) in keys for one in facts.said)


def _default_batch(facts: Facts, asks: str) -> Finding:
    said = Said(("per_device_train_batch_size",), 8, "")
    try:
        return Finding(f"({said.key})", "", ways.batch(said, facts))
    except NeedsRanks as needs:
        raise ConfigError(Problem("", said.key, f"{needs} (8 is HF Trainer's default); say how many: {asks}")) from None


def _unsaid_by_deepspeed(facts: Facts, findings: Sequence[Finding]) -> Iterator[Finding]:
    settings = {key: value for one in findings for key, value in one.answer.settings.items()}
    name = "optimizer.params.weight_decay"
    if "optim.name" in settings and "optim.weight_decay" not in settings and not _left_open(name, facts):
        why = "not in the file; DeepSpeed's default"
        yield Finding(f"({name})", "", ways.derived(why, {"optim.weight_decay": 0.0}))
    if settings.get("optim.weight_decay"):
        why = "DeepSpeed's optimizer decays every parameter that it is given"
        yield Finding(f"({name})", "", ways.derived(why, {"optim.decay": "all"}))
    for name, ours in import_deepspeed.unsaid_by_scheduler(facts).items():
        yield Finding(f"(scheduler.params.{name})", "", ways.derived("not in the file; DeepSpeed's default", ours))


def _strategy_of_options(facts: Facts, said: Collection[str]) -> Iterator[Finding]:
    """The strategy whose options the file has; a question, where they are of several."""
    sections = {"fsdp": ("fsdp", "fsdp_config"), "deepspeed": ("deepspeed", "zero_optimization"), "ddp": ("ddp",)}
    own = [key.split(".")[1] for key in said if key.startswith("parallel.") and key not in _OF_SEVERAL]
    named = [name for name, names in sections.items() if facts.has_section(*names)]
    there = named or [name for name in sections if name in own]
    if len(there) == 1:
        why = f"the file has options of {there[0]}, and of no other"
        yield Finding("(strategy)", "", ways.derived(why, {"parallel.strategy": there[0]}))
    elif there:
        why = f"write parallel.strategy: the file has options of {', '.join(there[:-1])} and {there[-1]}"
        yield Finding("(strategy)", "", to_do(why))


_OF_SEVERAL = ("parallel.ddp.find_unused_parameters",)  # fsdp's, too
_DEFAULTS: Mapping[Kind, tuple[tuple[str, str, Mapping[str, object]], ...]] = {
    "trainer": (
        ("learning_rate", "optim.lr", {"optim.lr": 5e-5}),
        ("weight_decay", "optim.weight_decay", {"optim.weight_decay": 0.0}),
        ("lr_scheduler_type", "schedule.kind", {"schedule.kind": "linear"}),
        ("bf16, fp16", "precision.compute", {"precision.compute": "fp32"}),
        ("num_train_epochs", "run.epochs", {"run.epochs": 3.0}),
    ),
    "deepspeed": (
        ("gradient_clipping", "optim.clip_norm", {"optim.clip_norm": None}),
        ("scheduler", "schedule.kind", {"schedule.kind": "constant"}),
        ("bf16, fp16", "precision.compute", {"precision.compute": "fp32"}),
        (
            "zero_optimization.stage",
            "parallel.strategy",
            {"parallel.strategy": "deepspeed", "parallel.deepspeed.zero_stage": 0},
        ),
    ),
    "accelerate": (("mixed_precision", "precision.compute", {"precision.compute": "fp32"}),),
}
"""By kind: their word, the key of ours that it would have set, and what it is there."""
_NECESSARY = {
    "model": "{kind: huggingface, task: causal-lm, pretrained: NAME}, or {kind: custom, target: 'file.py:Name'}",
    "model.task": "causal-lm, masked-lm, sequence-classification, seq2seq, or another one of docs/config.md",
    "data.train": "{kind: huggingface, name: NAME}, {kind: tokens, folder: FOLDER} or "
    "{kind: custom, target: 'file.py:Name'}",
    "run.epochs": "how long the run is; or run.steps, run.samples, run.tokens",
}


def _has(settings: Mapping[str, object], key: str) -> bool:
    if key == "run.epochs":
        return any(settings.get(f"run.{unit}") is not None for unit in ("steps", "samples", "tokens", "epochs"))
    if key == "model.task":
        return settings.get("model.kind") != "huggingface" or key in settings
    return f"{key}.kind" in settings


_STAND_INS: Mapping[str, Mapping[str, object]] = {
    "model": {"model.kind": "given"},
    "model.task": {"model.task": "causal-lm"},
    "data.train": {"data.train.kind": "given"},
    "run.epochs": {"run.epochs": 1},
}
"""So that all else can be checked before the user has said these."""


def _check(
    settings: Mapping[str, object], missing: Mapping[str, str], by_key: Mapping[str, Finding], over: Collection[str]
) -> None:
    """Raises ConfigError, with places in the imported file."""
    whole = dict(settings)
    for key in missing:
        whole |= _STAND_INS[key]
    try:
        validate(nested(whole))
    except ConfigError as error:
        raise ConfigError([_placed(problem, by_key, over) for problem in error.problems]) from None


def _problem(one: Finding) -> Problem:
    return Problem(one.where, one.key, one.answer.why)


def _placed(problem: Problem, by_key: Mapping[str, Finding], over: Collection[str]) -> Problem:
    one = by_key.get(problem.key)
    if one is not None:
        ours = "" if problem.key == one.key else f"{problem.key}: "
        return Problem(one.where, one.key, f"{ours}{problem.message}")
    if any(f"{key}.".startswith(f"{problem.key}.") for key in over):
        return Problem(f"--{problem.key}", problem.key, problem.message)
    return Problem("", problem.key, problem.message)  # of several keys together

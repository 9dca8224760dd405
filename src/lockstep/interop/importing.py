"""Import another tool's config: an answer for every key, and a check of the result.

    args.json  -->  read_foreign  -->  an Answer a key  -->  settings  -->  YAML, `lockstep config check`ed
                                            |
                    learning_rate           taken        optim.lr: 5e-05
                    per_device_train_...    derived      batch.global_size: 64 = 8 samples x 1 x 8 ranks
                    logging_nan_inf_filter  not needed   a NaN is never averaged
                    lerning_rate            not known    did you mean learning_rate?

Where the file relies on its tool's defaults and Lockstep's differ, the result sets them. What no file can contain (the
script's model and data) is listed as missing, or comes from overrides.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.config import shape
from lockstep.config.layers import ALTERNATIVES, from_flags
from lockstep.config.loading import validate
from lockstep.config.override import Override
from lockstep.config.reading import Table, leaves, to_python
from lockstep.config.wording import OPEN
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.terminal import echo
from lockstep.interop import deepspeed
from lockstep.interop.answers import answered, is_lockstep_key
from lockstep.interop.foreign import NAMES, ForeignFile, ForeignKey, ForeignKind, plain, read_foreign
from lockstep.interop.keys import Answer, NeedsRanks, asked, derived, key_rows, not_needed, not_there
from lockstep.interop.rules import batch

_ASKS = "specify the number of ranks: --ranks N, or ranks=N in Python"


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """A key of the file with its answer; the key is in parentheses where the file relies on a default."""

    key: str
    where: str
    answer: Answer


@dataclass(frozen=True)
class ImportedConfig:
    """Another tool's config, converted.

    Attributes:
        findings: One per key, in the order of the file; then defaults.
        settings: Values by Lockstep's dotted keys.
        missing: Further keys that a run needs, with how to write them.
    """

    file: ForeignFile
    findings: tuple[ImportedKey, ...]
    settings: Mapping[str, object]
    missing: Mapping[str, str]

    @property
    def unanswered(self) -> tuple[ImportedKey, ...]:
        """The keys without a counterpart: the run would lose their effect."""
        return tuple(finding for finding in self.findings if finding.answer.status in ("not there", "not known"))


def import_file(
    path: Path,
    kind: ForeignKind | None = None,
    ranks: int | None = None,
    also: Sequence[Override] = (),
    lenient: bool = False,
) -> ImportedConfig:
    """Import a file, of the kind that its keys suggest by default, that was meant for this number of ranks.

    Args:
        also: Further settings, which take precedence.
        lenient: Leave keys without a counterpart out of an error's list.

    Raises:
        ConfigError: The file can't be read, a number needs `ranks`, or values are invalid.
    """
    file = read_foreign(path, kind)
    stated = _ranks_of(file)
    if None not in (ranks, stated) and stated != ranks:
        raise ConfigError(f"{file.path} is for {stated} ranks, and not {ranks}; leave the number out, or correct it")
    tree, problems = from_flags(also, Table())
    if problems:
        raise ConfigError(problems)
    over = {".".join(path): to_python(node) for path, node in leaves(tree) if path}
    findings = tuple(_answered_by(over, finding) for finding in listed(file, ranks))
    settings = {key: value for key, value in _settings_of(findings).items() if not _is_replaced(key, over)} | over
    missing = {key: how for key, (how, _) in _NECESSARY.items() if not _has(settings, key)}
    imported = ImportedConfig(file, findings, settings, missing)
    by_key = {key: finding for finding in findings for key in finding.answer.settings if key not in over}
    whole = {key: value for key, value in settings.items() if value != OPEN}
    for key in missing:
        whole |= _NECESSARY[key][1]
    try:
        validate(nested(whole))
    except ConfigError as error:
        problems = [_placed(problem, by_key, over) for problem in error.problems]
        raise ConfigError([*problems, *([] if lenient else map(_problem, imported.unanswered))]) from None
    return imported


def import_config(path: str | os.PathLike[str], *, ranks: int | None = None) -> dict[str, object]:
    """Return another tool's config, or one of Lockstep's, as a mapping of sections that `lockstep.train` takes.

    It may be a script's YAML, a DeepSpeed JSON, HF TrainingArguments as JSON, or Accelerate's config; `lockstep config
    import` lists what becomes of each key. Rank 0 prints on stderr what is left to decide. A value that the file
    leaves open is `???`, and is refused until you assign one.

    Args:
        ranks: Number of ranks that it was meant for, if a number depends on it. None: the file's, else WORLD_SIZE.

    Raises:
        ConfigError: As in `import_file`; or a key has no counterpart.
    """
    started = os.environ.get("WORLD_SIZE", "")
    ranks = ranks or _ranks_of(read_foreign(Path(path), None)) or (int(started) if started.isdecimal() else None)
    imported = import_file(Path(path), ranks=ranks)
    if imported.unanswered:
        raise ConfigError([*map(_problem, imported.unanswered)])
    if os.environ.get("RANK", "0") == "0":
        for finding in imported.findings:
            if finding.answer.status == "to do":
                echo(f"lockstep: to do: {_problem(finding)}", file=sys.stderr)
    return nested(imported.settings)


def listed(file: ForeignFile, ranks: int | None = None) -> tuple[ImportedKey, ...]:
    """Return what becomes of each key, without checking the result. Raises ConfigError if a number needs `ranks`."""
    file = replace(file, ranks=ranks or _ranks_of(file))
    findings, problems = [], []
    for key in file.keys:
        try:
            findings.append(ImportedKey(key.key, key.where, answered(key, file)))
        except NeedsRanks as needs:
            problems.append(Problem(key.where, key.key, f"{needs}; {_ASKS}"))
    if problems:
        raise ConfigError(problems)
    decided = {key: value for finding in findings for key, value in finding.answer.settings.items() if value != OPEN}
    settled = _settled([_answered_by(decided, finding) for finding in findings])
    return (*settled, *_defaults(file, settled))


def nested(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings with dotted keys as nested sections, in the order of the schema. Raises ConfigError."""
    tree: dict[str, object] = {}
    for key, value in settings.items():
        *sections, last = key.split(".")
        at = tree
        for section in sections:
            inner = at.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(Problem("", key, f"{section} is both the value {inner!r} and a section"))
            at = inner
        at[last] = value
    root = shape.root().section
    assert root is not None
    order = dict.fromkeys([*shape.fields(root), *tree])  # an unknown section comes last, to be refused by name
    return {name: tree[name] for name in order if name in tree}


def _settings_of(findings: Sequence[ImportedKey]) -> dict[str, object]:
    return {key: value for finding in findings for key, value in finding.answer.settings.items()}


def _answered_by(over: Mapping[str, object], finding: ImportedKey) -> ImportedKey:
    keys = [key for key, value in finding.answer.settings.items() if value == OPEN]
    if not keys or not all(key in over or _is_replaced(key, over) for key in keys):
        return finding
    return replace(finding, answer=not_needed(f"{keys[0]} is given"))


def _is_replaced(key: str, over: Mapping[str, object]) -> bool:
    """Return whether an override sets the same by another key, as `run.steps` replaces `run.epochs`."""
    section, _, word = key.rpartition(".")
    ways = ALTERNATIVES.get((section,), ())
    return word in ways and any(over.get(f"{section}.{way}") is not None for way in ways)


def _ranks_of(file: ForeignFile) -> int | None:
    here, machines = file.number("nproc_per_node"), file.number("nnodes", "num_nodes", "num_machines") or 1
    if here is not None:
        return here * machines
    return file.number("num_processes", "world_size", "num_gpus", "devices", "gpus")


def _settled(findings: Sequence[ImportedKey]) -> list[ImportedKey]:
    """Return the findings where the first of two keys that set the same wins; a second that differs is refused."""
    first: dict[str, tuple[object, ImportedKey]] = {}
    settled = []
    for finding in findings:
        settings = finding.answer.settings
        clash = next((key for key, value in settings.items() if key in first and first[key][0] != value), None)
        if clash is None:
            for key, value in settings.items():
                first.setdefault(key, (value, finding))
            settled.append(finding)
        else:
            value, other = first[clash]
            why = f"{other.key} ({other.where}) sets {clash}: {value}; keep one of the two"
            settled.append(replace(finding, answer=not_there(why)))
    return settled


_DEFAULTS: Mapping[ForeignKind, Mapping[str, Mapping[str, object]]] = {
    "trainer": {
        "learning_rate": {"optim.lr": 5e-5},
        "weight_decay": {"optim.weight_decay": 0.0},
        "lr_scheduler_type": {"schedule.kind": "linear"},
        "bf16, fp16": {"precision.compute": "fp32"},
        "num_train_epochs": {"run.epochs": 3.0},
    },
    "yaml": {
        "learning rate": {"optim.lr": OPEN},
        "schedule": {"schedule.kind": OPEN},
        "mixed precision": {"precision.compute": "fp32"},
        "clipping": {"optim.clip_norm": None},
        "parameters that decay": {"optim.decay": "all"},
    },
    "deepspeed": {
        "gradient_clipping": {"optim.clip_norm": None},
        "scheduler": {"schedule.kind": "constant"},
        "bf16, fp16": {"precision.compute": "fp32"},
        "zero_optimization.stage": {"parallel.strategy": "deepspeed", "parallel.deepspeed.zero_stage": 0},
    },
    "accelerate": {"mixed_precision": {"precision.compute": "fp32"}},
}
"""Defaults of the tools by kind of file and the tool's key, as settings; the first that is set decides."""


def _defaults(file: ForeignFile, findings: Sequence[ImportedKey]) -> Iterator[ImportedKey]:
    settings = _settings_of(findings)
    for word, default in _defaults_of(file, settings).items():
        target = next(iter(default))
        has_length = target == "run.epochs" and _has(dict.fromkeys(settings, 1), target)
        if target not in settings and not has_length and not _left_open(word, file):
            why = f"not in the file; the default of {'PyTorch' if file.kind == 'yaml' else NAMES[file.kind]}"
            question = asked(target, f"not in the file; write {target}, as the script has it")
            yield ImportedKey(f"({word})", "", question if default[target] == OPEN else derived(why, default))
    if file.kind == "trainer" and not settings.keys() & {"batch.global_size", "batch.micro_size"}:
        key = ForeignKey(("per_device_train_batch_size",), 8)
        try:
            yield ImportedKey(f"({key.key})", "", batch(key_rows()[key.key], key, file))
        except NeedsRanks as needs:
            why = f"{needs} (8 is HF Trainer's default); {_ASKS}"
            raise ConfigError(Problem("", key.key, why)) from None
    if file.kind == "deepspeed":
        yield from _deepspeed_defaults(file, settings)
    if file.kind == "yaml" and "parallel.strategy" not in settings:
        yield from _strategy_of_options(file, settings)


def _defaults_of(file: ForeignFile, settings: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
    """Return the defaults that count for the file, or what its script decides: none for an excerpt of a config."""
    defaults = _DEFAULTS[file.kind]
    if file.kind == "deepspeed" and not file.has_section("optimizer"):
        script = _DEFAULTS["yaml"]
        return {**defaults, "learning rate": script["learning rate"], "scheduler": script["schedule"]}
    about_training = settings.keys() & {"optim.lr", "batch.global_size", "batch.micro_size"}
    if file.kind == "yaml" and (not about_training or all(is_lockstep_key(key.path) for key in file.keys)):
        return {}
    return defaults


def _left_open(words: str, file: ForeignFile) -> bool:
    keys = {f"{word}{end}" for word in words.split(", ") for end in ("", ".enabled", ".type")}
    return any(key.value == "auto" and plain(key.key) in keys for key in file.keys)


def _deepspeed_defaults(file: ForeignFile, settings: Mapping[str, object]) -> Iterator[ImportedKey]:
    name = "optimizer.params.weight_decay"
    if "optim.name" in settings and "optim.weight_decay" not in settings and not _left_open(name, file):
        yield ImportedKey(f"({name})", "", derived("not in the file; DeepSpeed's default", {"optim.weight_decay": 0.0}))
    if settings.get("optim.weight_decay"):
        why = "DeepSpeed's optimizer decays every parameter"
        yield ImportedKey(f"({name})", "", derived(why, {"optim.decay": "all"}))
    for name, default in deepspeed.scheduler_defaults(file).items():
        yield ImportedKey(f"(scheduler.params.{name})", "", derived("not in the file; DeepSpeed's default", default))


def _strategy_of_options(file: ForeignFile, settings: Collection[str]) -> Iterator[ImportedKey]:
    sections = {"fsdp": ("fsdp", "fsdp_config"), "deepspeed": ("deepspeed", "zero_optimization"), "ddp": ("ddp",)}
    of_several = "parallel.ddp.find_unused_parameters"  # fsdp's, too
    own = [key.split(".")[1] for key in settings if key.startswith("parallel.") and key != of_several]
    named = [name for name, names in sections.items() if file.has_section(*names)]
    there = named or [name for name in sections if name in own]
    if len(there) == 1:
        why = f"the file has options of {there[0]} only"
        yield ImportedKey("(strategy)", "", derived(why, {"parallel.strategy": there[0]}))
    elif there:
        why = f"write parallel.strategy: the file has options of {', '.join(there[:-1])} and {there[-1]}"
        yield ImportedKey("(strategy)", "", asked("parallel.strategy", why))


_NECESSARY: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "model": (
        "{kind: huggingface, task: causal-lm, pretrained: NAME}, or {kind: custom, target: 'file.py:Name'}",
        {"model.kind": "given"},
    ),
    "model.task": (
        "causal-lm, masked-lm, sequence-classification, seq2seq, or another task of docs/config.md",
        {"model.task": "causal-lm"},
    ),
    "data.train": (
        "{kind: huggingface, name: NAME}, {kind: tokens, folder: FOLDER} or {kind: custom, target: 'file.py:Name'}",
        {"data.train.kind": "given"},
    ),
    "run.epochs": ("how long the run is; or run.steps, run.samples, run.tokens", {"run.epochs": 1}),
}
"""The keys that a run needs: how to write each, and a substitute, so that everything else can be checked."""


def _has(settings: Mapping[str, object], key: str) -> bool:
    if key == "run.epochs":
        return any(settings.get(f"run.{unit}") is not None for unit in ("steps", "samples", "tokens", "epochs"))
    if key == "model.task":
        return settings.get("model.kind") != "huggingface" or key in settings
    return f"{key}.kind" in settings


def _problem(finding: ImportedKey) -> Problem:
    return Problem(finding.where, finding.key, finding.answer.why)


def _placed(problem: Problem, by_key: Mapping[str, ImportedKey], over: Collection[str]) -> Problem:
    finding = by_key.get(problem.key)
    if finding is not None:
        prefix = "" if problem.key == finding.key else f"{problem.key}: "
        return Problem(finding.where, finding.key, f"{prefix}{problem.message}")
    if any(f"{key}.".startswith(f"{problem.key}.") for key in over):
        return Problem(f"--{problem.key}", problem.key, problem.message)
    return Problem("", problem.key, problem.message)  # of several keys together

"""Datasets, tokenizers and weights from a folder, a file, or by name from the cache or Hugging Face's hub.

FOLDER saved by save_to_disk      its split
FOLDER of files, or one file      json, jsonl, csv, parquet, txt
name (and configuration)          cache or hub; without a network only the cache, without waiting

`lockstep data fetch` fills the cache (HF_HOME) on a connected machine, for machines without a network.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lockstep.config.schema import Config, HuggingFaceData, HuggingFaceModel
from lockstep.config.training_sections import INITIAL
from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.hub import (
    at_revision,
    commit_of,
    is_connected,
    missing,
    named_revision,
    needs_hub,
    requested,
    resolved,
    snapshot,
)
from lockstep.core.out_of_memory import out_of_memory_cause
from lockstep.data.order import fingerprint
from lockstep.strategies.section import Section

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".text": "text"}


def load_rows(name: str, configuration: str | None, split: str, revision: str | None = None) -> Any:
    """Return a datasets.Dataset. Raises ConfigError: the library, the data or the split is missing."""
    _library("datasets").disable_progress_bars()
    path = Path(name).expanduser()
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return _from_disk(path, split)
        return _load(path, name, configuration, split, commit_of(revision))
    except ConfigError:
        raise
    except Exception as error:  # the library raises many types
        if out_of_memory_cause(error):
            raise
        if path.exists():
            raise ConfigError(f"dataset {name}, split {split}, can't be read: {error}") from error
        raise missing("dataset", name, error) from error


def check_texts(
    values: Sequence[object],
    rows: Iterable[int],
    column: str,
    where: str,
    error: Callable[[str], Exception] = ConfigError,
) -> None:
    """Raise the error for the first value of a column that is not a text; `rows` are their numbers, from 1."""
    if set(map(type, values)) == {str}:
        return
    for number, value in zip(rows, values, strict=False):
        if not isinstance(value, str):
            has = "no text" if value is None else f"{value!r:.60} and no text"
            raise error(f"{where}, row {number:,} has {has} in the column {column}; remove the row or correct it")


def _load(path: Path, name: str, configuration: str | None, split: str, revision: str | None) -> Any:
    from datasets import load_dataset

    if path.is_file():
        if path.suffix not in _BUILDERS:
            known = ", ".join(_BUILDERS)
            raise ConfigError(f"{name}: files of type {path.suffix or '(none)'} can't be read; use one of {known}")
        return load_dataset(_BUILDERS[path.suffix], data_files=str(path), split=split)
    if path.is_dir():
        return load_dataset(str(path), configuration, split=split)
    if path.suffix in _BUILDERS or name.startswith(("/", ".", "~")):
        raise ConfigError(f"there is no file or folder {path}")
    needs_hub()
    if is_connected() or revision is None:
        return load_dataset(name, configuration, split=split, revision=revision)
    rows = load_dataset(name, configuration, split=split)  # the library's cache has the newest one that was loaded
    cached = {Path(file["filename"]).parent.name for file in rows.cache_files}
    if cached != {revision}:
        raise ConfigError(
            f"dataset {name}: the cache has the commit {', '.join(sorted(cached))}, the run needs {revision}, and the "
            "hub does not answer; on a machine with a network, `lockstep data fetch RECIPE` puts it into the cache"
        )
    return rows


def _from_disk(path: Path, split: str) -> Any:
    from datasets import DatasetDict, ReadInstruction, load_from_disk

    saved = load_from_disk(str(path))
    splits = saved if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved}
    parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    if len(parts) != 1:
        raise ConfigError(f"split {split} names {len(parts)} splits; name one split of a saved dataset")
    [part] = parts
    rows = splits[part.splitname]
    return rows.select(range(part.from_ or 0, len(rows) if part.to is None else part.to))


class Processor(NamedTuple):
    """Folder or hub name of what makes a run's inputs: a tokenizer and the file of its chat template, or of images."""

    name: str
    chat_template: str | None = None
    images: bool = False

    def load(self) -> Any:
        """Return it. Raises ConfigError."""
        return load_image_processor(self.name) if self.images else load_tokenizer(self.name, self.chat_template)


def load_image_processor(name: str) -> Any:
    """Return an image processor from a folder or the cache. Raises ConfigError.

    It is the one that needs no torchvision, which resizes differently: samples are the same on every machine.
    """
    return _loaded("AutoImageProcessor", "image processor", name, backend="pil")


def _loaded(kind: str, what: str, name: str, **options: Any) -> Any:
    if not Path(name).expanduser().is_dir():
        needs_hub()
    repository, revision = named_revision(name)
    options |= {} if revision is None else {"revision": revision}
    try:  # trust_remote_code None is a prompt of 15 s on the terminal
        make = getattr(_library("transformers"), kind)
        return make.from_pretrained(repository, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        raise missing(what, name, error) from error


def load_tokenizer(name: str, chat_template: str | None = None, *, words: bool = False) -> Any:
    """Return a tokenizer, which can pad, from a folder or the cache (`NAME`, `NAME@REVISION`).

    It has the chat template of a file, if one is given; with `words`, it takes texts that are split into words.

    Raises ConfigError.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and forked workers exclude each other
    tokenizer = _loaded("AutoTokenizer", "tokenizer", name, **({"add_prefix_space": True} if words else {}))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(f"tokenizer {name} has no token to pad with (pad, eos, sep or unk)")
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"chat_template {chat_template} can't be read: {error}") from error
    return tokenizer


def begin_tokens(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer begins a text with."""
    text: list[int] = tokenizer("a")["input_ids"]
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    ends = bool(text) and text[-1] == end_token(tokenizer)
    return text[: len(text) - len(plain) - ends]


def ends_of(tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that end a text, or a turn of the chat template."""
    ends = {end_token(tokenizer)}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with suppress(Exception):  # a template may refuse such a short chat
            ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
            ends.add(next((each for each in reversed(ids) if each in tokenizer.added_tokens_decoder), None))
    return sorted(end for end in ends if end is not None)


def end_token(tokenizer: Any) -> int | None:
    """Return the id of the eos token, otherwise of the sep token, otherwise None."""
    token: int | None = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    return token


def rows_identity(rows: Any) -> tuple[object, ...]:
    """Return what distinguishes a dataset's content: the library's fingerprint, and the sizes of its files.

    The fingerprint, private to the library, is a hash of the files and of all that was done to the rows since, the same
    in every process.
    """
    sizes = sorted(os.path.getsize(file["filename"]) for file in rows.cache_files)
    return rows._fingerprint, len(rows), sizes


def tokenizer_identity(tokenizer: Any) -> str:
    """Return a hash of a tokenizer and of the libraries that apply it."""
    import tokenizers
    import transformers

    content: list[object] = []
    if tokenizer.is_fast:
        content.append(tokenizer.backend_tokenizer.to_str())
    else:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            content += [(file.name, file.read_bytes()) for file in sorted(Path(folder).iterdir())]
    versions = transformers.__version__, tokenizers.__version__
    return fingerprint(type(tokenizer).__name__, *content, versions)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"this needs the {name} library, which is not installed: {pip_install('hf')}") from error


def fetch(config: Config) -> Iterator[str]:
    """Download model, tokenizers and datasets; yield a line for each. Raises ConfigError."""
    pretrained, sections = huggingface_sections(config)
    if not names_hub(config):
        yield "nothing to fetch: this run uses nothing from the hub"
        return
    if not is_connected():
        raise ConfigError("the hub does not answer (no network, or HF_HUB_OFFLINE is set), so nothing can be fetched")
    revision = getattr(config.model, "revision", None)
    for model in dict.fromkeys((pretrained, _companion(config))):
        if model is not None and _is_remote(model):
            _library("transformers")
            snapshot(model, revision if model == pretrained else None)
            yield f"model {model}"
    for name in dict.fromkeys(section.tokenizer or at_revision(pretrained, revision) for section in sections):
        if name is not None and _is_remote(name):
            images = any(section.image for section in sections)
            Processor(name, images=images).load()
            yield f"{'image processor' if images else 'tokenizer'} {name}"
    for section in sections:
        if _is_remote(section.name):
            rows = load_rows(section.name, section.configuration, section.split, section.revision)
            yield f"dataset {section.name}, split {section.split}: {len(rows):,} rows"


def pinned(config: Config, earlier: Config | None) -> Config:
    """Return the config with the commits of what it loads from the hub: those of an earlier start, else today's.

    Raises:
        ConfigError: The hub has no such revision, or a folder was given one.
    """
    then = earlier or config
    before = then.data.evaluation if earlier else {}
    evaluation = {
        name: _pinned(section, f"data.evaluation.{name}", before.get(name))
        for name, section in config.data.evaluation.items()
    }
    train = _pinned(config.data.train, "data.train", earlier and then.data.train)
    data = config.data.model_copy(update={"train": train, "evaluation": evaluation})
    return config.model_copy(update={"model": _pinned(config.model, "model", earlier and then.model), "data": data})


def _pinned(section: Section, key: str, then: Section | None) -> Section:
    if not isinstance(section, HuggingFaceModel | HuggingFaceData):
        return section
    kind: Literal["model", "dataset"] = "model" if isinstance(section, HuggingFaceModel) else "dataset"
    name, earlier = _repository(section), _repository(then)
    if name is None or not _is_remote(name):
        if section.revision is not None:
            why = f"{section.revision} is for a repository of the hub, and {name} is on this machine; remove it"
            raise ConfigError(Problem("", f"{key}.revision", why))
        return section
    revision = section.revision
    if isinstance(then, type(section)) and earlier == name and requested(then.revision) == requested(revision):
        revision = then.revision
    else:
        needs_hub()
        revision = resolved(kind, name, revision) or revision
    return section.model_copy(update={"revision": revision})


def _repository(section: Section | None) -> str | None:
    return getattr(section, "pretrained", None) or getattr(section, "name", None)


def names_hub(config: Config) -> bool:
    """Return whether the run uses anything from the hub or its cache by name."""
    pretrained, sections = huggingface_sections(config)
    names = [
        pretrained,
        _companion(config),
        *(section.name for section in sections),
        *(section.tokenizer for section in sections),
    ]
    return any(name is not None and _is_remote(name) for name in names)


def huggingface_sections(config: Config) -> tuple[str | None, list[HuggingFaceData]]:
    """Return the pretrained model, and the datasets of the datasets library."""
    pretrained = config.model.pretrained if isinstance(config.model, HuggingFaceModel) else None
    sections = (config.data.train, *config.data.evaluation.values())
    return pretrained, [section for section in sections if isinstance(section, HuggingFaceData)]


def _companion(config: Config) -> str | None:
    return None if config.objective.companion == INITIAL else config.objective.companion


def _is_remote(name: str) -> bool:
    return not Path(name).expanduser().exists()

"""The trained weights, from all ranks to RUN/model: each writes a share of a large model, and none holds it whole.

    small    rank 0: model.safetensors
    large    rank 0: model-00001-of-00004.safetensors        model.safetensors.index.json: name -> file
             rank 1: model-00002-of-00004.safetensors        written by the first rank, last
             ...

Tensors are gathered one at a time; a rank keeps those of its file. Ranks then wait for each other's disks without a
time limit. The folder is written under another name and exchanged with the old one: it is the old one or the new one.
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.core import checksums
from lockstep.core.errors import ConfigError, Failure, RunFailed
from lockstep.core.files import flush
from lockstep.models.blocks import repeated_blocks
from lockstep.models.transformers_models import (
    converts_weights,
    is_transformers_model,
    never_written,
    own_classes,
    quiet,
    saving_on_every_rank,
)
from lockstep.training.session import components_of, evaluation_weights
from lockstep.training.weights import (
    FILE,
    INDEX,
    MODEL,
    remove_training_keys,
    replace_folder,
    shapes_in,
    temporary,
    tokenizer_of,
    write_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.protocols import Axis
    from lockstep.models.model_tensors import ModelTensors
    from lockstep.sharding.partition import Spec
    from lockstep.training.session import Session

_log = logging.getLogger("lockstep")
MAX_FILE_BYTES = 5 * 10**9
"""A model of more bytes is written in several files, as the transformers library's `max_shard_size` does by default in
versions before 5."""
MIN_FILE_BYTES = 5 * 10**8
"""Files of a large model aren't smaller, however many ranks there are."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the published model.

    Attributes:
        rank: The rank that writes it.
        names: Its tensors, by the model's names.
    """

    name: str
    rank: int
    names: tuple[str, ...]


def publish(session: Session, folder: Callable[[], Path]) -> Path:
    """Write the model to a run's folder, whole or not at all; return its path. All ranks together.

    Args:
        folder: Returns the run's folder; called on the first rank.

    Raises:
        RunFailed: On all ranks alike: the tensors aren't all of the model's, or a disk is full or not writable.
    """
    components = components_of(session)
    axis, state = components.world.axis, components.sharding.state
    target, partial = _begin(axis, folder)
    try:
        specs = state.specs()
        shapes = {name: shape for name, (shape, _) in specs.items()}
        listed = components.tensors
        listed.refuse_incomplete(shapes, listed.shapes, f"{target}: nothing was published: the gathered weights")
        writers = [rank for rank, sees in enumerate(axis.gather(_sees(partial))) if sees] or [0]
        files = plan_files(_groups(state.model, specs), specs, writers)
        hashes: dict[str, str] = {}
        with evaluation_weights(session):
            for start in range(0, len(files), len(writers)):
                hashes |= _write_files(session, files[start : start + len(writers)], partial, target)
        _finish(session, hashes, sum(map(bytes_of, specs.values())), partial, target)
    finally:
        if axis.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
    is_file = len(files) == 1 and not is_transformers_model(state.model)
    return target / FILE if is_file else target


def _begin(axis: Axis, folder: Callable[[], Path]) -> tuple[Path, Path]:
    """Make the new folder on the first rank; return the path of the published one, and of the new one."""
    result: tuple[Path, Path] | Failure | None = None
    if axis.rank == 0:
        try:
            target = folder() / MODEL
            partial = temporary(target, "new")
            with _as_run_failed(target):
                for stale in target.parent.glob(f".{MODEL}.*"):  # of a process that was killed; the folder is locked
                    shutil.rmtree(stale, ignore_errors=True)
                if target.exists() and not target.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
                partial.mkdir(parents=True)
            result = target, partial
        except Failure as error:
            result = error
    axis.barrier()
    result = cast("tuple[Path, Path] | Failure", axis.broadcast(result))
    if isinstance(result, Failure):
        raise result
    return result


def _sees(partial: Path) -> bool:
    """Return whether this rank can write to the folder: it may be on another host's disk."""
    with suppress(OSError):
        return partial.name in {entry.name for entry in partial.parent.iterdir()}
    return False


# --- which rank writes what ---------------------------------------------------------------------------------------


def plan_files(groups: Sequence[Sequence[str]], specs: Mapping[str, Spec], writers: Sequence[int]) -> list[_File]:
    """Divide a model into files of about equal bytes, whose writers take turns.

    Args:
        groups: Names that stay together in one file, in the order of the model.
        writers: Ranks that can write.
    """
    sizes = [sum(bytes_of(specs[name]) for name in group) for group in groups]
    total = sum(sizes)
    number = 1
    if total > MAX_FILE_BYTES:
        rounds = -(-total // (len(writers) * MAX_FILE_BYTES))
        number = min(rounds * len(writers), max(-(-total // MAX_FILE_BYTES), total // MIN_FILE_BYTES))
    members: list[list[str]] = [[] for _ in range(number)]
    before = 0
    for group, size in zip(groups, sizes, strict=True):
        middle = (before + size / 2) / max(total, 1)
        members[min(int(middle * number), number - 1)] += group
        before += size
    filled = [names for names in members if names] or [[]]
    return [
        _File(
            FILE if len(filled) == 1 else f"model-{index + 1:05d}-of-{len(filled):05d}.safetensors",
            writers[index % len(writers)],
            tuple(names),
        )
        for index, names in enumerate(filled)
    ]


def bytes_of(spec: Spec) -> int:
    """Return the bytes of a tensor."""
    shape, dtype = spec
    return prod(shape) * dtype.itemsize


def _groups(model: nn.Module, specs: Mapping[str, Spec]) -> list[list[str]]:
    """Return the tensors that must be in one file: a block's, if the library joins some when it writes them."""
    if not (is_transformers_model(model) and converts_weights(model)):
        return [[name] for name in specs]
    blocks = repeated_blocks(model)
    groups: dict[str, list[str]] = {}
    for name in specs:
        block = next((block for block in blocks if name.startswith(f"{block}.")), None)
        groups.setdefault(name if block is None else f"{block}.", []).append(name)
    return list(groups.values())


def _in_turns(files: Iterable[_File]) -> list[str]:
    """Return the names of files that are gathered together: the first of each, the second of each, ..."""
    rows = zip_longest(*(file.names for file in files))
    return [name for row in rows for name in row if name is not None]


# --- writing ------------------------------------------------------------------------------------------------------


def _write_files(session: Session, files: Sequence[_File], partial: Path, target: Path) -> dict[str, str]:
    """Gather the tensors of files, one file a rank, and write them; return all hashes, once all ranks have written."""
    components = components_of(session)
    axis, state = components.world.axis, components.sharding.state
    own = next((file for file in files if file.rank == axis.rank), None)
    wanted = frozenset(own.names if own is not None else ())
    tensors = dict(state.weights(wanted=wanted.__contains__, names=_in_turns(files)))
    result: str | RunFailed | None = None
    if own is not None:
        try:
            with _as_run_failed(target):
                shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                what = f"{target}: nothing was published: the gathered weights"
                components.tensors.refuse_incomplete(shapes, own.names, what)
                result = _write(state.model, components.tensors, own, tensors, partial)
        except RunFailed as failure:
            result = failure
    tensors.clear()
    results = _all_results(components.world.axis, result)
    return {file.name: cast("str", results[file.rank]) for file in files}


def _write(model: Any, expected: ModelTensors, file: _File, tensors: dict[str, Tensor], partial: Path) -> str:
    """Write one file; return its hash."""
    place = partial / file.name
    if is_transformers_model(model):
        own = partial / f".{file.name}"
        with quiet(), own_classes(model), saving_on_every_rank(model):
            model.save_pretrained(own, state_dict=expected.with_tied_names(tensors), max_shard_size="1000TB")
        (own / FILE).rename(place)
        if file.rank == 0:  # config.json and others
            for other in own.iterdir():
                other.replace(partial / other.name)
        shutil.rmtree(own)
    else:
        write_tensors(tensors, place)
    place.chmod(partial.stat().st_mode & 0o666)  # safetensors makes it readable by its owner alone
    flush(place)
    return checksums.hash_of(place)


def _finish(session: Session, hashes: Mapping[str, str], size: int, partial: Path, target: Path) -> None:
    """Complete the folder and exchange it with the published one, on the first rank; the others wait.

    Args:
        size: Bytes of all tensors.
    """
    components = components_of(session)
    failure: RunFailed | None = None
    if components.world.rank == 0:
        try:
            with _as_run_failed(target):
                _complete(session, hashes, size, partial, target)
                replace_folder(target, partial)
        except RunFailed as error:
            failure = error
    _all_results(components.world.axis, failure)


def _complete(session: Session, hashes: Mapping[str, str], size: int, partial: Path, target: Path) -> None:
    """Check what all ranks have written, and add the index, the list of hashes and the tokenizer."""
    from lockstep.data.hub import load_tokenizer

    components = components_of(session)
    model: Any = components.sharding.state.model
    shapes = {file: shapes_in(partial / file) for file in hashes}
    if len(hashes) > 1:
        weight_map = {name: file for file, names in shapes.items() for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if is_transformers_model(model):
        written = f"{target}: nothing was published: the files that transformers has written"
        union = {name: shape for of_file in shapes.values() for name, shape in of_file.items()}
        components.tensors.refuse_incomplete_file(union, never_written(model), written)
        remove_training_keys(partial)
        tokenizer = tokenizer_of(components.config.model, components.config.data.train)
        if tokenizer is not None:
            with suppress(ConfigError):  # it isn't on this machine
                load_tokenizer(tokenizer).save_pretrained(partial)
    checksums.record_folder(partial, hashes)
    for path in (*sorted(partial.iterdir()), partial):
        flush(path)


@contextmanager
def _as_run_failed(target: Path) -> Iterator[None]:
    try:
        yield
    except RunFailed:
        raise
    except Exception as error:  # safetensors has an exception of its own for a full disk
        raise RunFailed(f"{target}: the trained weights could not be written: {error}") from error


def _all_results(axis: Axis, result: object) -> list[object]:
    """Return each rank's result, however long its disk takes; raise the first failure among them on all ranks."""
    axis.barrier()
    results = axis.gather(result)
    failure = next((result for result in results if isinstance(result, RunFailed)), None)
    if failure is not None:
        raise failure
    return results


def write_report(folder: Path) -> None:
    """Write the run's page. One that can't be written must not fail a run that is finished."""
    try:
        importlib.import_module("lockstep.report").write_report(folder)  # by name: it is in a layer above this one
    except RunFailed as failure:
        _log.warning("%s", failure)
    except Exception as error:  # for example, an installation that was replaced meanwhile
        _log.warning("the report could not be written: %s: %s", type(error).__name__, error)

"""The trained weights, from all ranks to RUN/model, which rank 0 writes; no rank holds a large model whole.

    small    model.safetensors
    large    model-00001-of-00004.safetensors, ...        model.safetensors.index.json: name -> file

The tensors of one file are gathered and written before the next one's. The folder is written under another name and
exchanged with the old one.
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.assembly.weights import (
    FILE,
    INDEX,
    MODEL,
    add_tokenizer,
    complete_for_transformers,
    save_adapter,
    shapes_in,
    tokenizer_of,
    write_tensors,
)
from lockstep.core import checksums
from lockstep.core.adapters import ADAPTER_FILE
from lockstep.core.errors import RunFailed
from lockstep.core.files import flush, replace_folder, temporary
from lockstep.distributed.collectives import from_first_rank
from lockstep.loop.session import components_of, evaluation_weights
from lockstep.models.blocks import repeated_blocks
from lockstep.models.transformers_models import converts_weights, is_transformers_model, own_classes, quiet

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.loop.components import Components
    from lockstep.loop.session import Session
    from lockstep.models.model_tensors import ModelTensors
    from lockstep.sharding.partition import Spec

_log = logging.getLogger("lockstep")
MAX_FILE_BYTES = 5 * 10**9  # the default max_shard_size of the transformers library before version 5


def publish(session: Session, folder: Callable[[], Path]) -> Path:
    """Write the model to a run's folder, whole or not at all; return its path. All ranks together.

    Args:
        folder: Returns the run's folder; called on the first rank.

    Raises:
        RunFailed: On all ranks: tensors are missing, or a disk is full or not writable.
    """
    components = components_of(session)
    axis, state = components.world.axis, components.sharding.state
    target, new = from_first_rank(axis, partial(_begin, folder))
    try:
        specs = state.specs()
        shapes = {name: shape for name, (shape, _) in specs.items()}
        listed = components.tensors
        listed.refuse_incomplete(shapes, listed.shapes, f"{target}: nothing was published: the gathered weights")
        files = plan_files(_groups(state.model, specs), specs)
        if listed.adapter is not None:
            files = {ADAPTER_FILE: list(specs)}
        hashes: dict[str, str] = {}
        with evaluation_weights(session):
            for name, names in files.items():
                wanted = frozenset(names if axis.rank == 0 else ())
                tensors = dict(state.weights(wanted=wanted.__contains__, names=names))
                hashes[name] = from_first_rank(axis, partial(_write, components, new / name, names, tensors, target))
                tensors.clear()
        from_first_rank(axis, partial(_complete, components, hashes, sum(map(bytes_of, specs.values())), new, target))
    finally:
        if axis.rank == 0:
            shutil.rmtree(new, ignore_errors=True)
    return target / FILE if {*files} == {FILE} and not is_transformers_model(state.model) else target


def _begin(folder: Callable[[], Path]) -> tuple[Path, Path]:
    """Make the new folder; return the path of the published one, and of the new one."""
    target = folder() / MODEL
    new = temporary(target, "new")
    with _as_run_failed(target):
        for stale in target.parent.glob(f".{MODEL}.*"):  # of a process that was killed; the folder is locked
            shutil.rmtree(stale, ignore_errors=True)
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
        new.mkdir(parents=True)
    return target, new


def plan_files(groups: Sequence[Sequence[str]], specs: Mapping[str, Spec]) -> dict[str, list[str]]:
    """Divide a model into files of about equal bytes; return the tensors of each by its name. Groups stay together."""
    sizes = [sum(bytes_of(specs[name]) for name in group) for group in groups]
    total, before = sum(sizes), 0.0
    number = max(1, -(-total // MAX_FILE_BYTES))
    members: list[list[str]] = [[] for _ in range(number)]
    for group, size in zip(groups, sizes, strict=True):
        middle = (before + size / 2) / max(total, 1)
        members[min(int(middle * number), number - 1)] += group
        before += size
    filled = [names for names in members if names] or [[]]
    if len(filled) == 1:
        return {FILE: filled[0]}
    return {f"model-{at:05d}-of-{len(filled):05d}.safetensors": names for at, names in enumerate(filled, 1)}


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


def _write(
    components: Components, file: Path, names: Sequence[str], tensors: Mapping[str, Tensor], target: Path
) -> str:
    with _as_run_failed(target):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        what = f"{target}: nothing was published: the gathered weights"
        components.tensors.refuse_incomplete(shapes, names, what)
        write_file(components.sharding.state.model, components.tensors, file, dict(tensors))
        return checksums.hash_of(file)


def write_file(model: Any, expected: ModelTensors, file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of the model's tensors, and beside it config.json and others of a transformers model."""
    if expected.adapter is not None:
        save_adapter(expected.adapter, tensors, file.parent)
    elif is_transformers_model(model):
        own = file.with_name(f".{file.name}")
        with quiet(), own_classes(model):
            model.save_pretrained(own, state_dict=expected.with_tied_names(tensors), max_shard_size="1000TB")
        (own / FILE).rename(file)
        for other in own.iterdir():
            other.replace(file.with_name(other.name))
        own.rmdir()
    else:
        write_tensors(tensors, file)
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors makes it readable only by its owner
    flush(file)


def _complete(components: Components, hashes: Mapping[str, str], size: int, new: Path, target: Path) -> None:
    """Check what was written; add the index, the list of hashes and the tokenizer; exchange the folders."""
    model: Any = components.sharding.state.model
    with _as_run_failed(target):
        if len(hashes) > 1:
            weight_map = {name: file for file in hashes for name in shapes_in(new / file)}
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (new / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        tokenizer = tokenizer_of(components.config.model, components.config.data.train)
        if components.tensors.adapter is not None:
            add_tokenizer(tokenizer, new)
        elif is_transformers_model(model):
            complete_for_transformers(model, components.tensors, new, target, tokenizer)
        checksums.record_folder(new, hashes)
        for path in (*sorted(new.iterdir()), new):
            flush(path)
        replace_folder(target, new)


@contextmanager
def _as_run_failed(target: Path) -> Iterator[None]:
    try:
        yield
    except RunFailed:
        raise
    except Exception as error:  # safetensors has an exception of its own for a full disk
        raise RunFailed(f"{target}: the trained weights could not be written: {error}") from error


def write_report(folder: Path) -> None:
    """Write the run's page. One that can't be written must not fail a run that is finished."""
    try:
        importlib.import_module("lockstep.report").write_report(folder)  # by name: it is in a layer above this one
    except Exception as error:  # for example, an installation that was replaced meanwhile
        _log.warning("the report could not be written: %s: %s", type(error).__name__, error)

"""The weights that a run leaves: RUN/model.

    model.safetensors                        under the model's own names, tied ones once
    of transformers, besides: config.json    a folder that `from_pretrained` loads,
      generation_config.json, tokenizer      with the names that the library gives its files
    XXH128SUMS                               a hash of each file of tensors, checked when it is read

Nothing in it depends on how many ranks there were, and loading it executes nothing.

Files and folders appear whole or not at all: they are written beside the target under another name, flushed, renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.config.approval import approved
from lockstep.core import checksums
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.files import flush
from lockstep.monitor.folder import is_finished

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config
    from lockstep.models.model_tensors import ModelTensors


MODEL = "model"
FILE = "model.safetensors"
_OURS = ("use_cache",)
"""Keys that Lockstep sets in a transformers config for training alone."""


def save_weights(
    model: nn.Module, expected: ModelTensors, tensors: Mapping[str, Tensor], folder: Path, tokenizer: str | None = None
) -> Path:
    """Write the weights into a run's folder, whole or not at all; return their place.

    Args:
        model: may hold only a part of them, as a stage of a pipeline does.
        expected: the full list of the whole model's tensors.
        tensors: parameters and saved buffers by name, whole, tied ones once.
        tokenizer: folder or hub name of the one whose tokens the model knows.

    Raises:
        RunFailed: the tensors aren't all of the model's, or the disk is full or not writable.
    """
    from lockstep.models.transformers_models import is_transformers_model

    target = folder / MODEL if is_transformers_model(model) else folder / MODEL / FILE
    expected.refuse_incomplete(tensors, f"{target}: nothing was published: the gathered weights")
    try:
        if is_transformers_model(model):
            save_for_transformers(model, expected, tensors, target, tokenizer)
        else:
            save_tensors(tensors, target)
    except RunFailed:
        raise
    except Exception as error:  # safetensors has an exception of its own for a full disk
        raise RunFailed(f"{target}: the trained weights could not be written: {error}") from error
    return target


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load a run's weights into its model, which must have exactly these parameters.

    Raises:
        ConfigError: the run left none.
        RunFailed: the file is damaged, or of another model.
    """
    from lockstep.models.weight_files import holds_weights, read_weights
    from lockstep.models.weight_matching import match_weights

    place = folder / MODEL
    if not holds_weights(place):
        export = f"take those of its newest checkpoint (lockstep export {folder} --to {place})"
        if is_finished(folder):
            raise ConfigError(f"{folder}: the weights that this run left ({Path(MODEL, FILE)}) are gone; {export}")
        raise ConfigError(
            f"{folder}: this run left no weights ({Path(MODEL, FILE)}); only a finished run does: "
            f"finish it (lockstep train {folder}), or {export}"
        )
    try:
        fit = match_weights(model, read_weights(place))
        if not fit.whole:
            raise ConfigError(fit.mismatches().rstrip())
    except ConfigError as error:
        raise RunFailed(f"{place}: these are not the weights of the run's model: {error}") from error
    fit.put()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers on the CPU, tied ones once under their first name."""
    from lockstep.models.weight_matching import slots_of

    return {slot.name: slot.tensor.detach().cpu() for slot in slots_of(model)}


def save_tensors(tensors: Mapping[str, Tensor], target: Path) -> None:
    """Write a safetensors file; with its hash beside it where it has the name of a folder's only file.

    Raises what the disk and safetensors raise."""
    from safetensors.torch import save_file

    with whole_file(target) as partial:
        save_file(_without_views(tensors), partial, metadata={"format": "pt"})
        checksums.forget(target)
    if target.name == FILE:
        checksums.record([target])


def _without_views(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, copied where they share memory: safetensors has no views."""
    holders = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    return {
        name: tensor.clone().contiguous() if holders[tensor.untyped_storage().data_ptr()] > 1 else tensor.contiguous()
        for name, tensor in tensors.items()
    }


def save_for_transformers(
    model: Any, expected: ModelTensors, tensors: Mapping[str, Tensor], target: Path, tokenizer: str | None
) -> None:
    """Write a folder for `from_pretrained`. Raises what the disk, transformers and safetensors raise.

    Args:
        model, expected, tensors: as of `save_weights`.

    Raises:
        RunFailed: what transformers has written isn't all of the model.
    """
    from lockstep.models.transformers_models import never_written, own_classes, quiet

    with whole_folder(target) as partial, quiet(), own_classes(model):
        model.save_pretrained(partial, state_dict=expected.with_tied_names(tensors))
        written = f"{target}: nothing was published: the files that transformers has written"
        expected.refuse_incomplete_file(_shapes_in(partial), never_written(model), written)
        for file in partial.glob("*config.json"):
            values = json.loads(file.read_text(encoding="utf-8"))  # generation uses the cache, training doesn't
            kept = {key: value for key, value in values.items() if key not in _OURS}
            file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        checksums.record(sorted(partial.glob("*.safetensors")))
        if tokenizer is not None:
            _save_tokenizer(tokenizer, partial)


def _shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in its safetensors files; only their headers are read."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        with cast("Any", safe_open)(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _save_tokenizer(name: str, folder: Path) -> None:
    """Save the tokenizer, if it is on this machine."""
    from lockstep.data.hub import load_tokenizer

    try:
        load_tokenizer(name).save_pretrained(folder)
    except ConfigError:
        return


def tokenizer_of(config: Config) -> str | None:
    """Return the transformers tokenizer of a run's data: folder or hub name; None if it has none."""
    data, model = config.data.train, config.model
    if data.kind == "huggingface":
        return data.tokenizer or (model.pretrained if model.kind == "huggingface" else None)
    if data.kind != "tokens":
        return None
    from lockstep.data.tokens import tokenizer_name

    try:
        name = tokenizer_name(Path(data.folder), data.split)
    except ConfigError:
        return None
    return None if name == "bytes" else name


def to_rebuild(loaded: LoadedConfig, *, trusted: bool) -> Config:
    """Return the config with which a run's model is made again, for the weights that the run left.

    Raises:
        ConfigError: it names code, belongs to another user's run, and is not trusted.
    """
    config = approved(loaded, trusted=trusted)
    section = config.model.model_copy(update={"init_from": None, "init_partial": False})
    return config.model_copy(update={"model": section})


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield the path to write to; then replace the file that is there."""
    partial = _beside(target, "new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors lets nobody else read
        flush(partial)
        partial.replace(target)
        flush(target.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to write to; then replace the folder that is there."""
    partial, old = _beside(target, "new"), _beside(target, "old")
    try:
        _remove(partial)
        partial.mkdir(parents=True)
        mode = partial.stat().st_mode & 0o666
        yield partial
        for path in (*partial.rglob("*"), partial):
            if path.is_file():
                path.chmod(mode)
            flush(path)
        _exchange(target, partial, old)
        flush(target.parent)
    finally:
        _remove(partial)
        _remove(old)


def _exchange(target: Path, new: Path, old: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{what}")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)

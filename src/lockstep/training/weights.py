"""The trained weights in a run's folder: RUN/model.

    model.safetensors                        with the model's own names, tied ones once
    for a transformers model: config.json    a folder that `from_pretrained` loads,
      generation_config.json, tokenizer      with the library's names for files
    XXH128SUMS                               a hash of each file of tensors, checked when it is read

They don't depend on the number of ranks, and loading them executes no code. Files and folders are written under another
name in the same folder, flushed, and renamed: they exist whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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
    from lockstep.config.schema import Config, DataSource, Model
    from lockstep.models.model_tensors import ModelTensors


MODEL = "model"
FILE = "model.safetensors"
_TRAINING_KEYS = ("use_cache",)  # that Lockstep sets in a transformers config, for training alone


def save_weights(
    model: nn.Module, expected: ModelTensors, tensors: Mapping[str, Tensor], folder: Path, tokenizer: str | None = None
) -> Path:
    """Write the weights to a run's folder, whole or not at all; return their path.

    Args:
        model: may hold only a part of them, as a stage of a pipeline does.
        expected: the tensors of the whole model.
        tensors: parameters and saved buffers by name, whole, tied ones once.
        tokenizer: folder or hub name of the model's tokenizer.

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
    """Write a safetensors file, and a file with its hash if it is called `model.safetensors`.

    Raises what the disk and safetensors raise.
    """
    from safetensors.torch import save_file

    users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    separate = {  # safetensors has no views
        name: tensor.clone().contiguous() if users[tensor.untyped_storage().data_ptr()] > 1 else tensor.contiguous()
        for name, tensor in tensors.items()
    }
    with whole_file(target) as partial:
        save_file(separate, partial, metadata={"format": "pt"})
        checksums.forget(target)
    if target.name == FILE:
        checksums.record([target])


def save_for_transformers(
    model: Any, expected: ModelTensors, tensors: Mapping[str, Tensor], target: Path, tokenizer: str | None
) -> None:
    """Write a folder for `from_pretrained`; arguments are those of `save_weights`.

    Raises RunFailed if transformers hasn't written all of the model, and what the disk and the libraries raise.
    """
    from lockstep.data.hub import load_tokenizer
    from lockstep.models.transformers_models import never_written, own_classes, quiet

    with whole_folder(target) as partial, quiet(), own_classes(model):
        model.save_pretrained(partial, state_dict=expected.with_tied_names(tensors))
        written = f"{target}: nothing was published: the files that transformers has written"
        expected.refuse_incomplete_file(_shapes_in(partial), never_written(model), written)
        for file in partial.glob("*config.json"):
            values = json.loads(file.read_text(encoding="utf-8"))  # generation uses the cache, training doesn't
            kept = {key: value for key, value in values.items() if key not in _TRAINING_KEYS}
            file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        checksums.record(sorted(partial.glob("*.safetensors")))
        if tokenizer is not None:
            with suppress(ConfigError):  # it isn't on this machine
                load_tokenizer(tokenizer).save_pretrained(partial)


def _shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in the folder's safetensors files; only their headers are read."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        with cast("Any", safe_open)(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def tokenizer_of(model: Model, data: DataSource) -> str | None:
    """Return the folder or hub name of the transformers tokenizer of a run's data; None if it has none."""
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
    """Return the config from which a run's model is built again, for its trained weights.

    Raises:
        ConfigError: it names code, belongs to another user's run, and is not trusted.
    """
    config = approved(loaded, trusted=trusted)
    section = config.model.model_copy(update={"init_from": None, "init_partial": False})
    return config.model_copy(update={"model": section})


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield the path to write to; then replace the target."""
    partial = _temporary(target, "new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors makes it readable by its owner alone
        flush(partial)
        partial.replace(target)
        flush(target.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to write to; then replace the target."""
    partial, old = _temporary(target, "new"), _temporary(target, "old")
    try:
        shutil.rmtree(partial, ignore_errors=True)
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
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


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


def _temporary(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{suffix}")

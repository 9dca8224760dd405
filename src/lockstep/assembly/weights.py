"""The trained weights in a run's folder: RUN/model.

    model.safetensors                        with the model's own names, tied ones once; a large model's in several
                                             files with an index (`publishing`)
    for a transformers model: config.json    a folder that `from_pretrained` loads,
      generation_config.json, tokenizer      with the library's names for files
    XXH128SUMS                               a hash of each of these files

Files and folders are written under another name, flushed, and renamed: they exist whole or not at all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.config.trust import approved
from lockstep.core import checksums
from lockstep.core.adapters import ADAPTER_CONFIG, ADAPTER_FILE, Adapter, adapter_of
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.files import replacing_file, replacing_folder
from lockstep.core.hub import at_revision
from lockstep.core.terminal import command_line
from lockstep.data.hub import Processor
from lockstep.monitor.folder import is_finished

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config, DataSource, Model
    from lockstep.models.model_tensors import ModelTensors


MODEL = "model"
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_TRAINING_KEYS = ("use_cache",)  # that Lockstep sets in a transformers config, only for training


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load a run's weights into its model, which must have exactly these parameters.

    Raises:
        ConfigError: the run left none.
        RunFailed: the file is damaged, or of another model.
    """
    from lockstep.models.weight_files import holds_weights, read_weights
    from lockstep.models.weight_matching import match_weights

    place, adapter = folder / MODEL, adapter_of(model)
    if not holds_weights(place):
        export = f"take its newest checkpoint's: {command_line('lockstep', 'export', folder, '--to', place)}"
        why = "are gone" if is_finished(folder) else "don't exist before it is finished"
        raise ConfigError(f"{folder}: the weights of this run ({Path(MODEL, FILE)}) {why}; {export}")
    try:
        fit = match_weights(model, read_weights(place, adapters=adapter is not None))
        if not fit.whole:
            raise ConfigError(fit.mismatches().rstrip())
    except ConfigError as error:
        raise RunFailed(f"{place}: these are not the weights of the run's model: {error}") from error
    fit.put(model)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers on the CPU, tied ones once under their first name."""
    from lockstep.models.weight_matching import slots_of

    return {slot.name: slot.tensor.detach().cpu() for slot in slots_of(model)}


def save_tensors(tensors: Mapping[str, Tensor], target: Path) -> None:
    """Write a safetensors file, and a file with its hash if it is called `model.safetensors`."""
    with replacing_file(target) as partial:
        write_tensors(tensors, partial)
        checksums.forget(target)
    if target.name == FILE:
        checksums.record([target])


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file in place."""
    from safetensors.torch import save_file

    users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    separate = {  # safetensors has no views
        name: tensor.clone().contiguous() if users[tensor.untyped_storage().data_ptr()] > 1 else tensor.contiguous()
        for name, tensor in tensors.items()
    }
    save_file(separate, file, metadata={"format": "pt"})


def save_adapter(adapter: Adapter, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write an adapter's tensors, by their names in the model, in peft's format into a folder that exists."""
    write_tensors({adapter.files[name]: tensor for name, tensor in tensors.items()}, folder / ADAPTER_FILE)
    config = json.dumps(adapter.config, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(f"{config}\n", encoding="utf-8")


def save_for_transformers(
    model: Any,
    expected: ModelTensors,
    tensors: Mapping[str, Tensor],
    target: Path,
    tokenizer: Processor | None,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Write a folder for `from_pretrained`. Raises RunFailed if transformers hasn't written all of the model.

    Args:
        expected: The tensors of the whole model.
        tensors: Parameters and saved buffers by name, whole, tied ones once.
        tokenizer: The model's tokenizer or image processor.
        also: Writes further files.
    """
    from lockstep.models.transformers_models import own_classes, quiet

    with replacing_folder(target) as partial, quiet(), own_classes(model):
        model.save_pretrained(partial, state_dict=expected.with_tied_names(tensors))
        complete_for_transformers(model, expected, partial, target, tokenizer)
        if also is not None:
            also(partial)
        checksums.record_folder(partial, {})


def complete_for_transformers(
    model: Any, expected: ModelTensors, folder: Path, target: Path, tokenizer: Processor | None
) -> None:
    """Check that transformers has written all of a model to a folder; add its tokenizer. Raises RunFailed."""
    from lockstep.models.transformers_models import never_written

    shapes: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        shapes |= shapes_in(path)
    written = f"{target}: nothing was published: the files that transformers has written"
    expected.refuse_incomplete_file(shapes, never_written(model), written)
    for file in folder.glob("*config.json"):
        values = json.loads(file.read_text(encoding="utf-8"))  # generation uses the cache, training doesn't
        kept = {key: value for key, value in values.items() if key not in _TRAINING_KEYS}
        file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    add_tokenizer(tokenizer, folder)


def add_tokenizer(tokenizer: Processor | None, folder: Path) -> None:
    """Add a tokenizer, as of `tokenizer_of`, to a folder, if it is on this machine."""
    if tokenizer is not None:
        with suppress(ConfigError):
            tokenizer.load().save_pretrained(folder)


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a safetensors file; only its header is read."""
    from safetensors import safe_open

    with cast("Any", safe_open)(file, framework="pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def tokenizer_of(model: Model, data: DataSource) -> Processor | None:
    """Return the transformers tokenizer, or image processor, of a run's data; None if it has none."""
    if data.kind == "huggingface":
        own = at_revision(model.pretrained, model.revision) if model.kind == "huggingface" else None
        name = data.tokenizer or own
        return None if name is None else Processor(name, data.chat_template, data.image is not None)
    if data.kind != "tokens":
        return None
    from lockstep.data.tokens import tokenizer_name

    try:
        name = tokenizer_name(data.folder, data.split)
    except ConfigError:
        return None
    return None if name == "bytes" else Processor(name)


def to_rebuild(loaded: LoadedConfig, *, trusted: bool) -> Config:
    """Return the config to build a run's model from again. Raises ConfigError if its code isn't trusted."""
    config = approved(loaded, trusted=trusted)
    if config.model.adapter is not None:  # the base is needed
        return config
    return config.with_values(model={"init_from": None, "init_partial": False})

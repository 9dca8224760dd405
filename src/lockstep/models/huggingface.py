"""Models of the transformers library.

    architecture   keys of a config           random weights, keyed by the names of the modules
    pretrained     a folder, or a cached name  its weights; what they lack (a new head, new tokens) as above

    task                      inputs                                 outputs.logits
    causal-lm                 input_ids, attention_mask              [B, T, V]
    masked-lm                 input_ids, attention_mask              [B, T, V]
    sequence-classification   input_ids, attention_mask              [B, C]
    seq2seq                   the same; the decoder's are made of    [B, length of the target, V]
                              the labels
    token-classification      input_ids, attention_mask              [B, T, C]
    multiple-choice           the same, for each choice              [B, choices]
    question-answering        the same, and start_positions,         start_logits, end_logits [B, T]
                              end_positions
    image-classification      pixel_values                           [B, C]
    audio-classification      input_values or input_features         [B, C]
    speech-seq2seq            the same                               [B, length of the target, V]
    ctc                       the same, and labels                   loss

Models are in fp32 and keep no cache of keys and values. A hub name is looked up in the local cache where there is no
network (`lockstep data fetch` fills it).

How the head of a model uses a batch's labels is in `heads`.
"""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import HuggingFaceModel
from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.hub import missing, needs_hub
from lockstep.core.out_of_memory import out_of_memory_cause
from lockstep.core.records import DataFacts
from lockstep.models.blocks import repeated_blocks
from lockstep.models.config_keys import check_keys, override, taken
from lockstep.models.initialization import generators_keyed, reset_modules
from lockstep.models.meta_model import (
    MetaModel,
    is_unset,
    parameters_without_values,
    reset_by_block,
    resets_stay_in_blocks,
)
from lockstep.models.transformers_models import quiet
from lockstep.models.weight_files import read_weights, refuse_damaged
from lockstep.models.weight_matching import match_weights

_LOG = logging.getLogger(__name__)
_AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "token-classification": "AutoModelForTokenClassification",
    "multiple-choice": "AutoModelForMultipleChoice",
    "question-answering": "AutoModelForQuestionAnswering",
    "image-classification": "AutoModelForImageClassification",
    "audio-classification": "AutoModelForAudioClassification",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "ctc": "AutoModelForCTC",
}
_CLASSIFIERS = ("sequence-classification", "token-classification", "image-classification", "audio-classification")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_huggingface(section: HuggingFaceModel, facts: DataFacts, seed: int, *, trust_remote_code: bool) -> nn.Module:
    """Return the model on the CPU, in fp32, with its values.

    Raises:
        ConfigError: an unknown key or type, weights that are not on this machine, code that isn't trusted, or a model
            too small for the data.
    """
    with _refusals_as_config_errors(section), _quiet():
        config = _config(section, facts, trust_remote_code)
        if section.pretrained is None:
            model = _from_config(section, config, trust_remote_code)
            _reset(model, seed, list(_parameters(model)))
        else:
            model, absent = _from_pretrained(section, config, trust_remote_code)
            _reset(model, seed, absent)
            _fit_vocabulary(model, facts, seed)
    module: nn.Module = model.train()
    return module


def build_meta_huggingface(
    section: HuggingFaceModel, facts: DataFacts, seed: int, *, trust_remote_code: bool
) -> MetaModel | None:
    """Return the same model without values, which come block by block; None where only all can be had at once.

    Raises:
        ConfigError: as `build_huggingface`.
    """
    with _refusals_as_config_errors(section), _quiet():
        config = _config(section, facts, trust_remote_code)
        with parameters_without_values():
            model = _from_config(section, config, trust_remote_code)
        sketch = copy.deepcopy(model)
        if not resets_stay_in_blocks(sketch, _resets(sketch, list(_parameters(sketch))), repeated_blocks(sketch)):
            return None
    construct = partial(_constructed, section, config, seed, trust_remote_code)
    if section.pretrained is None:
        return MetaModel(model.train(), partial(_drawn, sketch, seed, list(_parameters(sketch)), construct))
    weights = _weights_by_name(section.pretrained, sketch, facts)
    return None if weights is None else MetaModel(model.train(), partial(_read, sketch, weights, seed, construct))


def _drawn(
    sketch: Any, seed: int, names: Collection[str], construct: Callable[[], Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the named values, by transformers' rules; those without a rule (a weight norm's) are the constructor's."""
    constructed: Mapping[str, Tensor] | None = None
    wanted = set(names)
    for name, value in reset_by_block(sketch, seed, _resets(sketch, names), repeated_blocks(sketch)):
        if name not in wanted:
            continue
        if is_unset(value):
            constructed = construct() if constructed is None else constructed
            value = constructed[name]
        yield name, value


def _constructed(section: HuggingFaceModel, config: Any, seed: int, trust_remote_code: bool) -> Mapping[str, Tensor]:
    """Return the values that a constructor gives all parameters."""
    with generators_keyed(seed, "construction"), _quiet():
        model = _from_config(section, copy.deepcopy(config), trust_remote_code)
    return {name: parameter.detach() for name, parameter in _parameters(model).items()}


def _read(
    sketch: Any, weights: Mapping[str, Tensor], seed: int, construct: Callable[[], Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights there are; what they lack is drawn."""
    yield from weights.items()
    absent = [name for name in _parameters(sketch) if name not in weights]
    if absent:
        yield from _drawn(sketch, seed, absent, construct)


def _weights_by_name(place: str, sketch: Any, facts: DataFacts) -> Mapping[str, Tensor] | None:
    """Return parameters and buffers as they are in the files; None where the library changes them while it loads."""
    from transformers.utils import cached_file

    folder = Path(place)
    if not folder.is_dir():
        folder = Path(cached_file(place, "config.json")).parent
    try:
        fit = match_weights(sketch, read_weights(folder), translate=False)
    except (ConfigError, RunFailed):
        return None
    rows = sketch.get_input_embeddings().weight.shape[0]
    if fit.reshaped or (fit.left and fit.missing) or (facts.vocabulary or 0) > rows:
        return None
    return {slot.name: tensor for slot, tensor in fit.pairs}


def sketch_huggingface(section: HuggingFaceModel, facts: DataFacts, *, trust_remote_code: bool) -> nn.Module:
    """Return the same module without values, for the meta device. No weights are read.

    Raises:
        ConfigError: as `build_huggingface`.
    """
    with _refusals_as_config_errors(section), _quiet():
        config = _config(section, facts, trust_remote_code)
        if facts.vocabulary is not None:
            config.vocab_size = max(config.vocab_size, facts.vocabulary)
        module: nn.Module = _from_config(section, config, trust_remote_code)
    return module


# --- the config ---------------------------------------------------------------------------------------------------


def _config(section: HuggingFaceModel, facts: DataFacts, trust_remote_code: bool) -> Any:
    """Return transformers' config: what was configured, and what the data has."""
    from transformers import AutoConfig

    overrides = dict(section.architecture or {})
    kind = overrides.pop("model_type", None)
    if section.pretrained is None:
        default = AutoConfig.for_model(kind)
        check_keys(default, overrides)
        config = AutoConfig.for_model(kind, **taken(default, overrides))
        _adopt_vocabulary(config, overrides, facts)
    else:
        config = AutoConfig.from_pretrained(section.pretrained, trust_remote_code=trust_remote_code)
        check_keys(config, overrides)
        if kind not in (None, config.model_type):
            raise _problem("architecture.model_type", f"{kind!r}, but {section.pretrained} is a {config.model_type}")
        override(config, overrides)
    config.use_cache = False
    if facts.padding is not None:
        config.pad_token_id = facts.padding
    if section.task in _CLASSIFIERS:
        _adopt_classes(config, section, facts)
    if section.task in ("seq2seq", "speech-seq2seq") and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # T5's convention
    return config


def _adopt_vocabulary(config: Any, overrides: Collection[str], facts: DataFacts) -> None:
    """Give random weights as many tokens as the data has, unless more were configured."""
    if facts.vocabulary is None:
        return
    if "vocab_size" in overrides and config.vocab_size < facts.vocabulary:
        raise _problem(
            "architecture.vocab_size",
            f"{config.vocab_size} is too few: the data has {facts.vocabulary} token ids; give that, or leave it out",
        )
    if "vocab_size" not in overrides:
        config.vocab_size = facts.vocabulary
    for name in _SPECIAL_TOKENS:  # the type's defaults belong to its tokenizer
        token = getattr(config, name, None)
        if name not in overrides and isinstance(token, int) and token >= config.vocab_size:
            setattr(config, name, None)


def _adopt_classes(config: Any, section: HuggingFaceModel, facts: DataFacts) -> None:
    given = {"num_labels", "id2label"} & set(section.architecture or {})
    own = config.num_labels if given or section.pretrained is not None else None
    classes = section.classes or (own if given else None) or facts.classes or own
    if classes is None:
        raise _problem("classes", "the data does not say how many classes it has; give the number")
    if facts.classes is not None and classes < facts.classes:
        raise _problem(
            "classes", f"{classes} is too few: the data has {facts.classes} classes; give that, or leave it out"
        )
    if classes < 2 and config.problem_type != "regression":
        why = (
            f"{classes}: a classifier tells at least 2 classes apart; numbers are architecture.problem_type: regression"
        )
        raise _problem("classes", why)
    if section.task == "sequence-classification" and config.pad_token_id is None:
        raise _problem(
            "architecture.pad_token_id",
            f"a classifier of type {config.model_type} finds the end of each text by it; give the tokenizer's padding "
            "token",
        )
    if classes != config.num_labels:
        config.num_labels = classes


# --- the module ---------------------------------------------------------------------------------------------------


def _from_config(section: HuggingFaceModel, config: Any, trust_remote_code: bool) -> Any:
    return _auto_class(section).from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


def _from_pretrained(section: HuggingFaceModel, config: Any, trust_remote_code: bool) -> tuple[Any, list[str]]:
    """Return the model, and the names of the parameters that the weights lack."""
    assert section.pretrained is not None
    try:
        refuse_damaged(Path(section.pretrained))
    except RunFailed as error:
        raise _problem("pretrained", str(error)) from error
    model, report = _auto_class(section).from_pretrained(
        section.pretrained,
        config=config,
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    mismatched = [key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]]
    absent = sorted({*report["missing_keys"], *mismatched} & set(_parameters(model)))
    if absent:
        _LOG.warning("%s lacks %s, which start at random values", section.pretrained, _listed(absent))
    return model, absent


def _reset(model: Any, seed: int, names: Collection[str]) -> None:
    """Draw the named parameters anew, by transformers' rules, each module under its key."""
    wanted = set(names)
    kept = {parameter for name, parameter in _parameters(model).items() if name not in wanted}
    reset_modules(model, seed, _resets(model, names), keep=kept)


def _resets(model: Any, names: Collection[str]) -> dict[str, Callable[[], object]]:
    """Return transformers' rules for the modules that own the named parameters."""
    from transformers import PreTrainedModel

    parameters, wanted = _parameters(model), set(names)
    owners = {name.rpartition(".")[0] for name in wanted}
    everything = len(wanted) == len(parameters)
    resets: dict[str, Callable[[], object]] = {}
    for name, module in model.named_modules():
        if everything or name in owners:
            root = _nearest(model, name, PreTrainedModel)
            resets[name] = partial(root._init_weights, module)
    return resets


def _nearest(model: nn.Module, name: str, kind: type) -> Any:
    """Return the module of that kind at or above `name`."""
    nearest, module = model, model
    for part in name.split(".") if name else ():
        module = module.get_submodule(part)
        nearest = module if isinstance(module, kind) else nearest
    return nearest


def _fit_vocabulary(model: Any, facts: DataFacts, seed: int) -> None:
    """Add rows for the tokens that the weights lack (a padding token was added to the tokenizer, say)."""
    rows = model.get_input_embeddings().weight.shape[0]
    if facts.vocabulary is None or facts.vocabulary <= rows:
        return
    _LOG.warning("the data has %d token ids, the weights %d: embedding resized", facts.vocabulary, rows)
    with generators_keyed(seed, "new tokens"):
        model.resize_token_embeddings(facts.vocabulary, mean_resizing=False)


def _auto_class(section: HuggingFaceModel) -> Any:
    import transformers

    return getattr(transformers, _AUTO_CLASSES[section.task])


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


# --- errors -------------------------------------------------------------------------------------------


@contextmanager
def _quiet() -> Iterator[None]:
    """Mute transformers within the block; raise ConfigError if it isn't installed."""
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            Problem("", "model.kind", f"huggingface needs the extra `hf`: {pip_install('hf')}")
        ) from error
    with quiet():
        yield


@contextmanager
def _refusals_as_config_errors(section: HuggingFaceModel) -> Iterator[None]:
    """Raise what transformers raises within the block as errors of the config."""
    if section.pretrained is not None and not Path(section.pretrained).is_dir():
        needs_hub()
    try:
        yield
    except OSError as error:
        if section.pretrained is None or Path(section.pretrained).is_dir():
            raise _problem("pretrained", f"can't be loaded: {' '.join(str(error).split())[:300]}") from error
        raise missing("model", section.pretrained, error) from error
    except Exception as error:
        if isinstance(error, ConfigError) or out_of_memory_cause(error):
            raise
        raise _explained(section, error) from error


def _explained(section: HuggingFaceModel, error: Exception) -> ConfigError:
    text = " ".join(str(error).split())
    kind = (section.architecture or {}).get("model_type")
    if "trust_remote_code" in text:
        return _problem(
            "pretrained",
            f"{section.pretrained} brings Python code, which is not run unless --trust-remote-code is given",
        )
    if text.startswith("Unrecognized model identifier"):
        from transformers import CONFIG_MAPPING

        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING.keys()), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return _problem("architecture.model_type", f"transformers has no type {kind!r}{hint}")
    if text.startswith("Unrecognized configuration class"):
        return _problem("task", f"{kind or section.pretrained} has no model for {section.task}; another task or type")
    return _problem("architecture", f"transformers refuses it: {type(error).__name__}: {text[:300]}")


def _problem(key: str, message: str) -> ConfigError:
    return ConfigError(Problem("", f"model.{key}", message))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more

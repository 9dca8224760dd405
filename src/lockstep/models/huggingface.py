"""Models of the transformers library, in fp32 and without a cache of keys and values.

    architecture   keys of a config            random weights, keyed by the names of the modules
    pretrained     a folder, or a cached name  its weights; missing ones (a new head, new tokens) as above

Without a network, a hub name is looked up in the local cache, which `lockstep data fetch` fills. `heads` describes how
the head of a model uses labels.
"""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import HuggingFaceModel
from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.hub import commit_of, missing, needs_hub, snapshot
from lockstep.core.near_runs import peer_checkpoint
from lockstep.core.out_of_memory import out_of_memory_cause
from lockstep.core.records import DataFacts
from lockstep.core.tasks import TASKS
from lockstep.models.blocks import repeated_blocks
from lockstep.models.config_keys import check_keys, effective_keys, override
from lockstep.models.initialization import generators_keyed, reset_modules
from lockstep.models.meta_model import MetaModel, parameters_without_values, reset_by_block, resets_stay_in_blocks
from lockstep.models.transformers_models import WITH_REPORT, ignored_names, quiet
from lockstep.models.weight_files import Weights, read_weights, refuse_damaged
from lockstep.models.weight_matching import DEQUANTIZE, PARTIAL, Slot, WeightMatch, match_weights, problems_of

_LOG = logging.getLogger(__name__)
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_huggingface(section: HuggingFaceModel, facts: DataFacts, seed: int, *, trust_remote_code: bool) -> nn.Module:
    """Return the model on the CPU, in fp32, with its values.

    Raises:
        ConfigError: An unknown key or type, weights that are not on this machine, code that isn't trusted, or a model
            too small for the data.
    """
    with _refusals_as_config_errors(section):
        config = _config(section, facts, trust_remote_code)
        if section.pretrained is None:
            model = _from_config(section, config, trust_remote_code)
            random = set(_parameters(model))
        else:
            model, random = _from_pretrained(section, config, trust_remote_code)
        kept = {parameter for name, parameter in _parameters(model).items() if name not in random}
        reset_modules(model, seed, _resets(model, random), keep=kept)
        rows = 0
        if section.pretrained is not None and facts.vocabulary is not None:  # images have no table of embeddings
            rows = model.get_input_embeddings().weight.shape[0]
        if rows and (facts.vocabulary or 0) > rows:  # such as for a padding token added to the tokenizer
            _LOG.warning("the data has %d token ids, the weights %d: embedding resized", facts.vocabulary, rows)
            with generators_keyed(seed, "new tokens"):
                model.resize_token_embeddings(facts.vocabulary, mean_resizing=False)
            _fill_with_mean(model, rows)
    module: nn.Module = model.train()
    return module


def _fill_with_mean(model: Any, rows: int) -> None:
    """Give new tokens the mean of the others: random ones would be likelier than most of them.

    Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021.
    """
    head = model.get_output_embeddings()
    tensors = [model.get_input_embeddings().weight]
    tensors += [] if head is None else [head.weight, *([head.bias] if getattr(head, "bias", None) is not None else [])]
    with torch.no_grad():
        for tensor in tensors:
            if len(tensor) > rows:
                tensor[rows:] = tensor[:rows].mean(0)


def build_meta_huggingface(
    section: HuggingFaceModel, facts: DataFacts, seed: int, *, trust_remote_code: bool
) -> MetaModel | None:
    """Return the same model without values, which are made block by block; None if all must be made at once."""
    with _refusals_as_config_errors(section):
        config = _config(section, facts, trust_remote_code)
        with parameters_without_values():
            model = _from_config(section, config, trust_remote_code)
        sketch = copy.deepcopy(model)
        if not resets_stay_in_blocks(sketch, _resets(sketch, list(_parameters(sketch))), repeated_blocks(sketch)):
            return None
    weights = {} if section.pretrained is None else _weights_by_name(section, sketch, facts)
    if weights is None:
        return None

    def constructed() -> Mapping[str, Tensor]:
        with generators_keyed(seed, "construction"), _quiet():
            whole = _from_config(section, copy.deepcopy(config), trust_remote_code)
        return {name: parameter.detach() for name, parameter in _parameters(whole).items()}

    return MetaModel(model.train(), partial(_values, sketch, weights, seed, constructed))


def _values(
    sketch: Any,
    weights: Mapping[str, Tensor],
    seed: int,
    constructed: Callable[[], Mapping[str, Tensor]],
    names: Container[str],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights among `names`, then the missing values, drawn by transformers' rules.

    Those without a rule, such as a weight norm's, are the constructor's.
    """
    yield from ((name, tensor) for name, tensor in weights.items() if name in names)
    absent = {name for name in _parameters(sketch) if name not in weights}
    wanted = {name for name in absent if name in names}
    if not wanted:
        return
    constructor_values: Mapping[str, Tensor] | None = None
    for name, value in reset_by_block(sketch, seed, _resets(sketch, absent), repeated_blocks(sketch), wanted):
        if value is None:
            constructor_values = constructor_values or constructed()
            value = constructor_values[name]
        yield name, value


def _weights_by_name(section: HuggingFaceModel, sketch: Any, facts: DataFacts) -> Mapping[str, Tensor] | None:
    """Return the parameters and buffers in the files; None if the library changes them when it loads them."""
    match = _matched(sketch, _read(section))
    grows = facts.vocabulary is not None and facts.vocabulary > sketch.get_input_embeddings().weight.shape[0]
    if match.reshaped or (match.unexpected and match.missing) or grows:
        return None
    _judge(section, sketch, match)
    return {slot.name: tensor for slot, tensor in match.pairs}


def _read(section: HuggingFaceModel) -> Weights:
    assert section.pretrained is not None
    folder = Path(section.pretrained)
    if not folder.is_dir():
        folder = snapshot(section.pretrained, section.revision)
    with problems_of("pretrained"):
        refuse_damaged(folder)
        return read_weights(folder)


def _matched(model: Any, weights: Weights) -> WeightMatch:
    """Match the files' tensors with the model, without those that the library ignores. Raises ConfigError."""
    with problems_of("pretrained"):
        match = match_weights(model, weights, translate=False)
    ignored = ignored_names(model, match.unexpected)
    unexpected = {name: tensor for name, tensor in match.unexpected.items() if name not in ignored}
    return replace(match, unexpected=unexpected)


def _judge(section: HuggingFaceModel, model: Any, match: WeightMatch) -> None:
    """Note what of a head differs. Raises ConfigError for another shape, and for layers that differ."""
    base = model.base_model
    lists = tuple(f"{name}." for name, each in base.named_modules() if isinstance(each, nn.ModuleList))
    prefix = "" if base is model else f"{model.base_model_prefix}."
    names = (*(slot.name for slot in match.missing), *match.unexpected)
    differs = match.reshaped or any(name.removeprefix(prefix).startswith(lists) for name in names)
    if differs and not section.init_partial:
        raise _problem("pretrained", f"{match.mismatches()}{PARTIAL}")
    for note in match.notes():
        _LOG.warning(note)


def sketch_huggingface(section: HuggingFaceModel, facts: DataFacts, *, trust_remote_code: bool) -> nn.Module:
    """Return the same module without values, for the meta device. No weights are read."""
    with _refusals_as_config_errors(section):
        config = _config(section, facts, trust_remote_code)
        if facts.vocabulary is not None:
            config.vocab_size = max(config.vocab_size, facts.vocabulary)
        module: nn.Module = _from_config(section, config, trust_remote_code)
    return module


# --- the config ---------------------------------------------------------------------------------------------------


def _config(section: HuggingFaceModel, facts: DataFacts, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    overrides = dict(section.architecture or {})
    kind = overrides.pop("model_type", None)
    if section.pretrained is None:
        default = AutoConfig.for_model(kind)
        check_keys(default, overrides)
        config = AutoConfig.for_model(kind, **effective_keys(default, overrides))
        _adopt_vocabulary(config, overrides, facts)
    else:
        config = AutoConfig.from_pretrained(
            section.pretrained, trust_remote_code=trust_remote_code, revision=commit_of(section.revision) or "main"
        )
        check_keys(config, overrides)
        if kind not in (None, config.model_type):
            raise _problem("architecture.model_type", f"{kind!r}, but {section.pretrained} is a {config.model_type}")
        override(config, overrides)
        if getattr(config, "quantization_config", None) is not None:
            raise _problem("pretrained", f"{section.pretrained} is quantized, and can't be trained; {DEQUANTIZE}")
    _refuse_looking_ahead(section, config)
    config.use_cache = False
    if facts.padding is not None:
        config.pad_token_id = facts.padding
    if TASKS[section.task].classifies:
        _adopt_classes(config, section, facts)
    if section.task in ("seq2seq", "speech-seq2seq") and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # T5's convention
    return config


def _refuse_looking_ahead(section: HuggingFaceModel, config: Any) -> None:
    """Raise ConfigError for a model of masked texts as a causal one: it would see the tokens that it has to predict."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    causal = any(getattr(config, key, False) for key in ("is_encoder_decoder", "is_decoder", "causal"))
    if section.task == "causal-lm" and type(config) in MODEL_FOR_MASKED_LM_MAPPING and not causal:
        why = f"{config.model_type} is made for masked-lm: as causal-lm it sees the tokens that it has to predict"
        key = "is_decoder" if getattr(config, "causal", None) is None else "causal"
        raise _problem("task", f"{why}; set masked-lm, or architecture.{key}: true")


def _adopt_vocabulary(config: Any, overrides: Collection[str], facts: DataFacts) -> None:
    if facts.vocabulary is None:
        return
    if "vocab_size" not in overrides:
        config.vocab_size = facts.vocabulary
    elif config.vocab_size < facts.vocabulary:
        few = f"{config.vocab_size} is too few: the data has {facts.vocabulary} token ids"
        raise _problem("architecture.vocab_size", f"{few}; set that number, or remove it")
    for name in _SPECIAL_TOKENS:  # the type's defaults belong to its tokenizer
        token = getattr(config, name, None)
        if name not in overrides and isinstance(token, int) and token >= config.vocab_size:
            setattr(config, name, None)


def _adopt_classes(config: Any, section: HuggingFaceModel, facts: DataFacts) -> None:
    configured = {"num_labels", "id2label"} & set(section.architecture or {})
    own = config.num_labels if configured or section.pretrained is not None else None
    classes = section.num_classes or (own if configured else None) or facts.classes or own
    if classes is None:
        raise _problem("classes", "the data doesn't determine the number of classes; set it")
    if facts.classes is not None and classes < facts.classes:
        few = f"{classes} is too few: the data has {facts.classes} classes"
        raise _problem("classes", f"{few}; set that number, or remove it")
    if facts.numbers and classes == 1 and config.problem_type is None:
        config.problem_type = "regression"
    if classes < 2 and config.problem_type != "regression" and not facts.pairs:
        remedy = "for numbers set architecture.problem_type: regression"
        raise _problem("classes", f"{classes}, but a classifier has 2 or more classes; {remedy}")
    if section.task == "sequence-classification" and config.pad_token_id is None:
        why = f"a classifier of type {config.model_type} finds the end of each text by it"
        raise _problem("architecture.pad_token_id", f"{why}; set the tokenizer's padding token")
    if classes != config.num_labels:
        config.num_labels = classes
    names = section.class_names or facts.class_names
    if len(names) != classes:
        return
    before = [config.id2label[number] for number in range(classes)]
    if not section.class_names and before != list(names) and sorted(before) == sorted(names):
        raise _problem("classes", f"the data's are {names}, and pretrained has {before}; write classes: {before}")
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}


# --- the module ---------------------------------------------------------------------------------------------------


def _from_config(section: HuggingFaceModel, config: Any, trust_remote_code: bool) -> Any:
    return _auto_class(section).from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


def _from_pretrained(section: HuggingFaceModel, config: Any, trust_remote_code: bool) -> tuple[Any, set[str]]:
    weights = _read(section)
    given = {
        "config": config,
        "trust_remote_code": trust_remote_code,
        "revision": commit_of(section.revision) or "main",
    }
    model, report = _auto_class(section).from_pretrained(section.pretrained, **given, **WITH_REPORT)
    match, own = _matched(model, weights), model.state_dict()
    shapes = [(name, torch.empty(shape, device="meta")) for name, shape, _ in report["mismatched_keys"]]
    reshaped = [(Slot((name,), own[name]), other) for name, other in shapes]
    missing = [Slot((name,), own[name]) for name in sorted(report["missing_keys"] & own.keys())]
    unexpected = {name: match.unexpected.get(name, torch.empty(0)) for name in sorted(report["unexpected_keys"])}
    _judge(section, model, WeightMatch(match.place, match.pairs, missing, reshaped, unexpected))
    absent = {slot.name for slot in (*missing, *(slot for slot, _ in reshaped))}
    return model, absent & set(_parameters(model))


def _resets(model: Any, names: Collection[str]) -> dict[str, Callable[[], object]]:
    from transformers import PreTrainedModel

    owners = {name.rpartition(".")[0] for name in names}
    everything = len(names) == len(_parameters(model))
    roots = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    resets: dict[str, Callable[[], object]] = {}
    for name, module in model.named_modules():
        if everything or name in owners:
            prefixes = [root for root in roots if not root or f"{name}.".startswith(f"{root}.")]
            resets[name] = partial(roots[max(prefixes, key=len)]._init_weights, module)
    return resets


def _auto_class(section: HuggingFaceModel) -> Any:
    import transformers

    return getattr(transformers, f"AutoModel{TASKS[section.task].head}")


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


# --- errors -------------------------------------------------------------------------------------------


@contextmanager
def _quiet() -> Iterator[None]:
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise _problem("kind", f"huggingface needs the extra `hf`: {pip_install('hf')}") from error
    with quiet():
        yield


@contextmanager
def _refusals_as_config_errors(section: HuggingFaceModel) -> Iterator[None]:
    """Mute transformers within the block, and raise its errors as errors of the config."""
    is_folder = section.pretrained is not None and Path(section.pretrained).is_dir()
    if section.pretrained is not None and not is_folder:
        needs_hub()
    try:
        with _quiet():
            yield
    except OSError as error:
        if section.pretrained is None or is_folder:
            raise _problem("pretrained", f"can't be loaded: {' '.join(str(error).split())[:300]}") from error
        raise missing("model", section.pretrained, error) from error
    except Exception as error:
        if isinstance(error, ConfigError) or out_of_memory_cause(error):
            raise
        raise _explained(section, error) from error


def _explained(section: HuggingFaceModel, error: Exception) -> ConfigError:
    text = " ".join(str(error).split())
    kind = (section.architecture or {}).get("model_type")
    if text.startswith("Unrecognized model in ") and section.pretrained is not None:
        what = peer_checkpoint(Path(section.pretrained), "WEIGHTS") or "has no config.json with a model_type"
        return _problem("pretrained", f"{section.pretrained} {what}")
    if "trust_remote_code" in text:
        what = f"{section.pretrained} contains Python code"
        return _problem("pretrained", f"{what}; give --trust-remote-code if you trust it")
    if text.startswith("Unrecognized model identifier"):
        from transformers import CONFIG_MAPPING

        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING.keys()), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return _problem("architecture.model_type", f"transformers has no type {kind!r}{hint}")
    if text.startswith("Unrecognized configuration class"):
        return _problem("task", f"{kind or section.pretrained} has no model for {section.task}; set another of both")
    return _problem("architecture", f"transformers refuses it: {type(error).__name__}: {text[:300]}")


def _problem(key: str, message: str) -> ConfigError:
    return ConfigError(Problem("", f"model.{key}", message))

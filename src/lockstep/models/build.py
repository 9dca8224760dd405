"""Build a module from the config's `model` section.

build_model         construct -> initial values, keyed by name -> freeze
build_meta_model    construct without values -> freeze                 values follow, block by block
sketch_model        construct on the meta device -> freeze             for planning, which only needs shapes
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from torch import nn

from lockstep.config.schema import (
    CustomModel,
    GivenModel,
    HuggingFaceModel,
    ImageClassifierModel,
    Model,
    TextClassifierModel,
    TransformerModel,
)
from lockstep.core.adapters import quantized_of
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.extensions import construct
from lockstep.core.modes import in_training
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.distributed.shard_boxes import dtype_name
from lockstep.models import classifiers, transformer
from lockstep.models.adapters import meta_with_adapter, with_adapter
from lockstep.models.huggingface import build_huggingface, build_meta_huggingface, sketch_huggingface
from lockstep.models.initialization import RuleOf, generators_keyed, initial_values, initialize, shapes_alone
from lockstep.models.meta_model import MetaModel, parameters_without_values
from lockstep.models.parameters import freeze

OwnModel = TransformerModel | TextClassifierModel | ImageClassifierModel


def build_model(section: Model, facts: DataFacts, seed: int, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the model on the CPU in fp32, initialized by name, with `freeze` applied, in training mode.

    Args:
        facts: Properties of the training data, such as vocabulary and classes that the section doesn't set.

    Raises:
        ConfigError: The section and the data contradict each other, or something it names is missing.
    """
    if isinstance(section, GivenModel):
        raise _no_module()
    with generators_keyed(seed, "construction"):
        if isinstance(section, HuggingFaceModel):
            module = build_huggingface(section, facts, seed, trust_remote_code=trust_remote_code)
        else:
            module = _construct(section, facts)
            if not isinstance(section, CustomModel):  # which keeps its constructor's values
                initialize(module, seed, _rule_of(section))
    module = with_adapter(module, section, seed)
    freeze(module, section.freeze)
    return in_training(module)


def build_meta_model(
    section: Model, facts: DataFacts, seed: int, *, trust_remote_code: bool = False
) -> MetaModel | None:
    """Return the same model without values; None for a user's: its constructor makes all values at once."""
    if isinstance(section, GivenModel | CustomModel):
        return None
    with generators_keyed(seed, "construction"):
        if isinstance(section, HuggingFaceModel):
            meta_model = build_meta_huggingface(section, facts, seed, trust_remote_code=trust_remote_code)
        else:
            with parameters_without_values():
                module = _construct(section, facts)
            meta_model = MetaModel(module, initial_values(module, seed, _rule_of(section)))
    meta_model = meta_with_adapter(meta_model, section, seed)
    if meta_model is not None:
        freeze(meta_model.model, section.freeze)
    return meta_model


def sketch_model(section: Model, facts: DataFacts, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the same module on the meta device, or on the CPU if a user's constructor reads values."""
    if isinstance(section, GivenModel):
        raise _no_module()
    with generators_keyed(0, "sketch"):
        try:
            with shapes_alone():
                if isinstance(section, HuggingFaceModel):
                    module = sketch_huggingface(section, facts, trust_remote_code=trust_remote_code)
                else:
                    module = _construct(section, facts)
        except ConfigError:
            if not isinstance(section, CustomModel):
                raise
            module = _construct(section, facts)
        with shapes_alone() if next(module.parameters()).is_meta else nullcontext():
            module = with_adapter(module, section, 0)
    freeze(module, section.freeze)
    return module


def _no_module() -> ConfigError:
    return ConfigError(Problem("", "model.kind", "`given` needs a module from the Python API, but there is none"))


def _construct(section: OwnModel | CustomModel, facts: DataFacts) -> nn.Module:
    vocabulary = partial(_size, "vocabulary", "token ids", in_data=facts.vocabulary)
    classes = partial(_size, "classes", "classes", in_data=facts.classes)
    match section:
        case TransformerModel():
            return transformer.Transformer(section, vocabulary(section.vocabulary))
        case TextClassifierModel():
            return classifiers.TextClassifier(section, vocabulary(section.vocabulary), classes(section.classes))
        case ImageClassifierModel():
            return classifiers.ImageClassifier(section, classes(section.classes))
        case CustomModel():
            module = construct("models", section.target, section.arguments)
            if not isinstance(module, nn.Module):
                kind = type(module).__name__
                raise ConfigError(f"model.target {section.target} returned a {kind}, not a torch.nn.Module")
            return module


def _rule_of(section: OwnModel) -> RuleOf:
    match section:
        case TransformerModel():
            return partial(transformer.rule_of, section.layers)
        case TextClassifierModel():
            return classifiers.text_rule
        case ImageClassifierModel():
            return classifiers.image_rule


def _size(key: str, what: str, configured: int | None, in_data: int | None) -> int:
    number = configured if configured is not None else in_data
    if number is None:
        raise ConfigError(Problem("", f"model.{key}", f"the data doesn't determine the number of {what}; set it"))
    if in_data is not None and number < in_data:
        reason = f"{number} is too few: the data has {in_data} {what}; set {in_data}, or remove it"
        raise ConfigError(Problem("", f"model.{key}", reason))
    return number


def parameter_facts(module: nn.Module) -> list[ParameterFacts]:
    """Return the facts of every parameter once; of a tied one under its first name."""
    stored = quantized_of(module)
    return [
        ParameterFacts(
            name, (*each.shape,), each.element_size(), each.requires_grad, dtype_name(each.dtype), stored.get(name, 0.0)
        )
        for name, each in module.named_parameters()
    ]


def count_parameters(module: nn.Module, *, trainable: bool = False) -> int:
    """Return the number of elements of all (or all trainable) parameters, tied ones once."""
    return sum(facts.elements for facts in parameter_facts(module) if facts.trainable or not trainable)


def describe_model(section: Model, facts: DataFacts, *, trust_remote_code: bool = False) -> list[ParameterFacts]:
    """Return the facts of the parameters of `build_model`, without building them.

    Raises:
        ConfigError: As for `build_model`.
    """
    return parameter_facts(sketch_model(section, facts, trust_remote_code=trust_remote_code))

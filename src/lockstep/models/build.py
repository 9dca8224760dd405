"""Builds a module from the config's `model` section.

build_model     construct -> initial values, keyed by name -> freeze
build_meta_model     construct without values -> freeze                 values follow, block by block
sketch_model    construct on the meta device -> freeze              for planning

Planning needs its parameters' facts: shapes, without values.
"""

from __future__ import annotations

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
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.extensions import construct
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.models import classifiers, transformer
from lockstep.models.huggingface import build_huggingface, build_meta_huggingface, sketch_huggingface
from lockstep.models.initialization import RuleOf, generators_keyed, initial_tensors, initialize, shapes_alone
from lockstep.models.meta_model import MetaModel, parameters_without_values
from lockstep.models.parameters import freeze

_NOT_GIVEN = "`given` takes a module handed over in Python; there is none here"
OwnModel = TransformerModel | TextClassifierModel | ImageClassifierModel


def build_model(section: Model, facts: DataFacts, seed: int, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the model on the CPU in fp32, initialized by name, `freeze` applied, in training mode.

    Args:
        facts: of the training data; they give the vocabulary and the classes where the section doesn't.
        trust_remote_code: run a Python file that lies beside pretrained weights.

    Raises:
        ConfigError: the section and the data contradict each other, or something it names can't be had.
    """
    if isinstance(section, GivenModel):
        raise ConfigError(Problem("", "model.kind", _NOT_GIVEN))
    with generators_keyed(seed, "construction"):
        if isinstance(section, HuggingFaceModel):
            module = build_huggingface(section, facts, seed, trust_remote_code=trust_remote_code)
        else:
            module = _construct(section, facts)
            if not isinstance(section, CustomModel):  # whose constructor's values stand
                initialize(module, seed, _rule_of(section))
    freeze(module, section.freeze)
    return module.train()


def build_meta_model(
    section: Model, facts: DataFacts, seed: int, *, trust_remote_code: bool = False
) -> MetaModel | None:
    """Return the model that `build_model` would make, `freeze` applied, in training mode, without values yet.

    None: a user's constructor makes them, all at once.

    Raises:
        ConfigError: as `build_model`.
    """
    if isinstance(section, GivenModel | CustomModel):
        return None
    with generators_keyed(seed, "construction"):
        if isinstance(section, HuggingFaceModel):
            blank = build_meta_huggingface(section, facts, seed, trust_remote_code=trust_remote_code)
        else:
            with parameters_without_values():
                module = _construct(section, facts)
            blank = MetaModel(module, partial(initial_tensors, module, seed, _rule_of(section)))
    if blank is None:
        return None
    freeze(blank.model, section.freeze)
    blank.model.train()
    return blank


def sketch_model(section: Model, facts: DataFacts, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the module that `build_model` would make, `freeze` applied, on the meta device: no memory, no values.

    A user's module that can't be built there (its constructor looks at values) is built on the CPU.

    Raises:
        ConfigError: as `build_model`.
    """
    if isinstance(section, GivenModel):
        raise ConfigError(Problem("", "model.kind", _NOT_GIVEN))
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
            module = _construct(section, facts)  # its constructor looks at values
    freeze(module, section.freeze)
    return module


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
                raise ConfigError(f"model.target {section.target} gave a {kind}, not a torch.nn.Module")
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
    """Return the configured number, or the data's; never fewer than the data has."""
    if configured is None and in_data is None:
        raise ConfigError(Problem("", f"model.{key}", f"the data does not say how many {what} it has; give the number"))
    if configured is not None and in_data is not None and configured < in_data:
        raise ConfigError(
            Problem(
                "",
                f"model.{key}",
                f"{configured} is too few: the data has {in_data} {what}; give {in_data}, or leave it out",
            )
        )
    number = configured if configured is not None else in_data
    assert number is not None
    return number


def parameter_facts(module: nn.Module) -> list[ParameterFacts]:
    """Return every parameter once; a tied one under its first name."""
    return [
        ParameterFacts(name, tuple(parameter.shape), parameter.element_size(), parameter.requires_grad)
        for name, parameter in module.named_parameters()
    ]


def count_parameters(module: nn.Module, *, trainable: bool = False) -> int:
    """Return the number of elements of all parameters, tied ones once; with `trainable`, of those that are trained."""
    return sum(facts.elements for facts in parameter_facts(module) if facts.trainable or not trainable)


def describe_model(section: Model, facts: DataFacts, *, trust_remote_code: bool = False) -> list[ParameterFacts]:
    """Return the parameters that `build_model` would make, without making them.

    Raises:
        ConfigError: as `build_model`.
    """
    return parameter_facts(sketch_model(section, facts, trust_remote_code=trust_remote_code))

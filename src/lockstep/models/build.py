"""From the config's `model` section to a module.

build_model     construct -> initial values, keyed by name -> freeze
build_meta_model     construct without values -> freeze                 values follow, part by part
sketch_model    construct on the meta device -> freeze              what planning counts
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
from lockstep.core.records import DataFacts
from lockstep.models import image_classifier, text_classifier, transformer
from lockstep.models.custom import construct_custom, sketch_custom
from lockstep.models.freezing import freeze
from lockstep.models.huggingface import build_huggingface, build_meta_huggingface, sketch_huggingface
from lockstep.models.initialization import RuleOf, generators_keyed, initial_tensors, initialize, shapes_alone
from lockstep.models.meta_model import MetaModel, parameters_without_values

OwnModel = TransformerModel | TextClassifierModel | ImageClassifierModel


def build_model(section: Model, facts: DataFacts, seed: int, *, trust_remote_code: bool = False) -> nn.Module:
    """The model on the CPU in fp32, initialised by name, `freeze` applied, in training mode.

    Args:
        facts: of the training data; they say the vocabulary and the classes where the section doesn't.
        trust_remote_code: run a Python file that lies beside pretrained weights.

    Raises:
        ConfigError: the section and the data contradict each other, or something it names can't be had.
    """
    if isinstance(section, GivenModel):
        raise _not_given()
    with generators_keyed(seed, "construction"):
        if isinstance(section, HuggingFaceModel):
            module = build_huggingface(section, facts, seed, trust_remote_code=trust_remote_code)
        else:
            module = _construct(section, facts)
            _initialize(module, section, seed)
    freeze(module, section.freeze)
    return module.train()


def build_meta_model(
    section: Model, facts: DataFacts, seed: int, *, trust_remote_code: bool = False
) -> MetaModel | None:
    """The model that `build_model` would make, `freeze` applied, in training mode, its values still to come.

    None: they can't come part by part, since a constructor of the user's own makes them.

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
    """The module that `build_model` would make, `freeze` applied, on the meta device: no memory, no values.

    A module of the user's own that can't be built there (its constructor looks at values) is built on the CPU.

    Raises:
        ConfigError: as `build_model`.
    """
    if isinstance(section, GivenModel):
        raise _not_given()
    with generators_keyed(0, "sketch"):
        module = _sketch(section, facts, trust_remote_code)
    freeze(module, section.freeze)
    return module


def _sketch(section: OwnModel | CustomModel | HuggingFaceModel, facts: DataFacts, trust_remote_code: bool) -> nn.Module:
    with shapes_alone():
        if isinstance(section, HuggingFaceModel):
            return sketch_huggingface(section, facts, trust_remote_code=trust_remote_code)
        if not isinstance(section, CustomModel):
            return _construct(section, facts)
    return sketch_custom(section)


def _construct(section: OwnModel | CustomModel, facts: DataFacts) -> nn.Module:
    match section:
        case TransformerModel():
            return transformer.Transformer(section, _vocabulary(section.vocabulary, facts))
        case TextClassifierModel():
            vocabulary, classes = _vocabulary(section.vocabulary, facts), _classes(section.classes, facts)
            return text_classifier.TextClassifier(section, vocabulary, classes)
        case ImageClassifierModel():
            return image_classifier.ImageClassifier(section, _classes(section.classes, facts))
        case CustomModel():
            return construct_custom(section)


def _initialize(module: nn.Module, section: OwnModel | CustomModel, seed: int) -> None:
    if not isinstance(section, CustomModel):  # whose constructor's values stand
        initialize(module, seed, _rule_of(section))


def _rule_of(section: OwnModel) -> RuleOf:
    match section:
        case TransformerModel():
            return partial(transformer.rule_of, section.layers)
        case TextClassifierModel():
            return text_classifier.rule_of
        case ImageClassifierModel():
            return image_classifier.rule_of


def _not_given() -> ConfigError:
    return ConfigError(Problem("", "model.kind", "`given` takes a module handed over in Python; there is none here"))


def _vocabulary(asked: int | None, facts: DataFacts) -> int:
    return _size("vocabulary", "token ids", asked, facts.vocabulary)


def _classes(asked: int | None, facts: DataFacts) -> int:
    return _size("classes", "classes", asked, facts.classes)


def _size(key: str, what: str, asked: int | None, found: int | None) -> int:
    """What was asked for, or what the data says; never fewer than the data has."""
    if asked is None and found is None:
        raise ConfigError(Problem("", f"model.{key}", f"the data does not say how many {what} it has; give the number"))
    if asked is not None and found is not None and asked < found:
        raise ConfigError(
            Problem(
                "", f"model.{key}", f"{asked} is too few: the data has {found} {what}; give {found}, or leave it out"
            )
        )
    number = asked if asked is not None else found
    assert number is not None
    return number

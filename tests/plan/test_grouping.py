"""Parameter groups from rules over names and shapes."""

import pytest
from kit.failures import fails, gives

from lockstep.config.schema import Optim, ParameterRule
from lockstep.core.errors import ConfigError
from lockstep.core.records import ParameterFacts
from lockstep.plan.optimizers import group_parameters, is_hidden_matrix


def facts(name, *shape, trainable=True):
    return ParameterFacts(name, shape, 4, trainable)


MODEL = [
    facts("embedding.weight", 100, 8),
    facts("layers.0.norm.weight", 8),
    facts("layers.0.mlp.weight", 8, 8),
    facts("layers.0.mlp.bias", 8),
    facts("head.weight", 10, 8, trainable=False),
]


def groups(**optim):
    grouped = group_parameters(MODEL, Optim(weight_decay=0.1, **optim))
    return {(group.lr_scale, group.weight_decay): list(group.names) for group in grouped}


def test_matrices_decay_and_vectors_do_not():
    assert groups() == {
        (1.0, 0.1): ["embedding.weight", "layers.0.mlp.weight"],
        (1.0, 0.0): ["layers.0.norm.weight", "layers.0.mlp.bias"],
    }


def test_all_parameters_decay_with_decay_all():
    assert groups(decay="all") == {(1.0, 0.1): [parameter.name for parameter in MODEL[:4]]}


def test_the_first_matching_rule_wins_and_keeps_the_decay_that_it_leaves_out():
    rules = (
        ParameterRule(match=("*.norm.*", "*.bias"), lr_scale=2.0),
        ParameterRule(match=("layers.*",), lr_scale=0.5, weight_decay=0.3),
    )
    assert groups(rules=rules) == {
        (1.0, 0.1): ["embedding.weight"],
        (2.0, 0.0): ["layers.0.norm.weight", "layers.0.mlp.bias"],
        (0.5, 0.3): ["layers.0.mlp.weight"],
    }


def test_a_rule_may_match_only_frozen_parameters():
    assert "head.weight" not in str(groups(rules=(ParameterRule(match=("head.*",), lr_scale=2.0),)))


def test_all_rules_that_match_nothing_are_refused_with_the_nearest_names():
    rules = (ParameterRule(match=("layer.*.norm",)), ParameterRule(match=("*",)), ParameterRule(match=("heads.*",)))
    with pytest.raises(ConfigError) as error:
        groups(rules=rules)
    first, second = error.value.problems
    assert (first.key, second.key) == ("optim.rules.0.match", "optim.rules.2.match")
    assert gives(first.message, "'layer.*.norm'", "layers.0.norm.weight")
    assert "head.weight" in second.message


def test_nothing_to_train_is_refused():
    with fails(ConfigError, 1, key="model.freeze"):
        group_parameters(MODEL[-1:], Optim())
    with pytest.raises(ConfigError, match=r"^model: "):
        group_parameters([], Optim())


@pytest.mark.parametrize(
    ("name", "shape", "hidden"),
    [
        ("layers.0.attention.query.weight", (8, 8), True),
        ("bert.encoder.layer.0.output.dense.weight", (8, 8), True),
        ("embedding.weight", (100, 8), False),
        ("transformer.wte.weight", (100, 8), False),
        ("bert.embeddings.word_embeddings.weight", (100, 8), False),
        ("lm_head.weight", (100, 8), False),
        ("classifier.weight", (2, 8), False),
        ("layers.0.mlp.bias", (8,), False),
        ("convolution.weight", (8, 8, 3), False),
    ],
)
def test_hidden_matrices_are_recognized_by_name_and_shape(name, shape, hidden):
    assert is_hidden_matrix(facts(name, *shape)) is hidden

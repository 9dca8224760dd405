"""Initial values depend only on the seed and the name."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.config.schema import CustomModel, ImageClassifierModel, TextClassifierModel, TransformerModel
from lockstep.core.records import DataFacts
from lockstep.models.build import build_model
from lockstep.models.initialization import (
    constant,
    generators_keyed,
    initialize,
    normal,
    reset_modules,
)

FACTS = DataFacts(100, 32, vocabulary=61, classes=5)
OWN = [
    TransformerModel(kind="transformer", layers=2, width=16, heads=2),
    TransformerModel(kind="transformer", layers=2, width=16, heads=2, tie_embeddings=False),
    TextClassifierModel(kind="text-classifier", layers=2, width=16),
    ImageClassifierModel(kind="image-classifier", layers=2, width=16),
]


@pytest.mark.parametrize("section", OWN, ids=lambda section: section.kind)
def test_values_are_the_same_for_a_seed_and_differ_between_seeds(section):
    first, repeated, other = (dict(build_model(section, FACTS, seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_more_layers_do_not_change_the_values_of_the_first():
    small = build_model(TransformerModel(kind="transformer", layers=2, width=16, heads=2), FACTS, 1)
    large = build_model(TransformerModel(kind="transformer", layers=4, width=16, heads=2), FACTS, 1)
    of_large = dict(large.named_parameters())
    for name, parameter in small.named_parameters():
        scale = (2 / 4) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
        torch.testing.assert_close(of_large[name], parameter * scale)


def _draws():
    return random.random(), np.random.random(), float(torch.rand(()))


def test_keyed_generators_draw_the_same_for_a_key_and_differ_between_keys():
    def draws_of(*key):
        with generators_keyed(*key):
            return _draws()

    assert draws_of(1, "module", "a") == draws_of(1, "module", "a")
    keys = [(1, "module", "a"), (2, "module", "a"), (1, "module", "b"), (1, "construction")]
    assert len({number for key in keys for number in draws_of(*key)}) == 3 * len(keys)


def _fail_with_key(*key):
    with generators_keyed(*key):
        _draws()
        raise KeyError


def test_keyed_generators_are_restored_after_nesting_and_errors():
    with generators_keyed(1, "expected"):
        expected = [_draws(), _draws()]
    with generators_keyed(1, "expected"):
        first = _draws()
        with pytest.raises(KeyError):
            _fail_with_key(1, "nested")
        assert [first, _draws()] == expected


class _Pair(nn.Module):
    def __init__(self, backwards: bool) -> None:
        super().__init__()
        for name in ("b", "a") if backwards else ("a", "b"):
            self.add_module(name, nn.Linear(3, 3))


def test_the_order_of_construction_does_not_matter():
    forwards, backwards = _Pair(False), _Pair(True)
    for pair in (forwards, backwards):
        initialize(pair, 7, lambda name, tensor: normal(1.0))
    assert all(torch.equal(forwards.state_dict()[name], value) for name, value in backwards.state_dict().items())
    for pair in (forwards, backwards):
        reset_modules(pair, 8, {name: child.reset_parameters for name, child in pair.named_children()})
    assert all(torch.equal(forwards.state_dict()[name], value) for name, value in backwards.state_dict().items())
    assert not torch.equal(forwards.a.weight, forwards.b.weight)


def test_the_value_of_a_parameter_does_not_depend_on_the_others():
    model = nn.ModuleDict({"up": nn.Linear(4, 8), "gate": nn.Linear(4, 8)})
    alone = nn.ModuleDict({"gate": nn.Linear(4, 8)})
    for module in (alone, model):
        initialize(module, 5, lambda *_: normal(0.02))
    assert torch.equal(alone["gate"].weight, model["gate"].weight)
    assert not torch.equal(model["up"].weight, model["gate"].weight)


def test_a_tied_weight_is_set_once_under_its_first_name():
    module = nn.ModuleDict({"first": nn.Embedding(5, 3), "last": nn.Linear(3, 5, bias=False)})
    module["last"].weight = module["first"].weight
    initialize(module, 3, lambda name, tensor: constant(1.0) if name.startswith("first") else constant(2.0))
    assert torch.equal(module["last"].weight, torch.ones(5, 3))
    resets = {name: child.reset_parameters for name, child in module.named_children()}
    reset_modules(module, 3, resets)
    tied = module["first"].weight.clone()
    alone = nn.ModuleDict({"first": nn.Embedding(5, 3)})
    reset_modules(alone, 3, {"first": alone["first"].reset_parameters})
    assert torch.equal(tied, alone["first"].weight)


def test_the_generators_of_the_process_are_not_advanced():
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    build_model(OWN[0], FACTS, 1)
    build_model(
        CustomModel(kind="custom", target="torch.nn:Linear", arguments={"in_features": 2, "out_features": 2}), FACTS, 1
    )
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_the_values_of_a_custom_module_depend_only_on_the_seed():
    section = CustomModel(kind="custom", target="torch.nn:Linear", arguments={"in_features": 4, "out_features": 4})
    first = build_model(section, FACTS, 1)
    torch.rand(10)
    assert torch.equal(build_model(section, FACTS, 1).weight, first.weight)
    assert not torch.equal(build_model(section, FACTS, 2).weight, first.weight)

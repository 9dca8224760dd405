"""Parameter groups follow the rules of the config."""

import pytest
import torch
from kit.failures import fails
from torch import nn

from lockstep.config.schema import Optim, ParameterRule
from lockstep.core.errors import ConfigError
from lockstep.optim.groups import parameter_groups


def test_groups_have_torchs_keys_and_parameter_names():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].requires_grad_(False)
    rules = (ParameterRule(match=("2.*",), lr_scale=0.5),)
    groups = parameter_groups(model.named_parameters(), Optim(lr=0.1, weight_decay=0.3, rules=rules))
    assert [{key: value for key, value in group.items() if key != "params"} for group in groups] == [
        {"names": ["0.weight"], "lr": 0.1, "lr_scale": 1.0, "weight_decay": 0.3},
        {"names": ["0.bias"], "lr": 0.1, "lr_scale": 1.0, "weight_decay": 0.0},
        {"names": ["2.weight"], "lr": 0.05, "lr_scale": 0.5, "weight_decay": 0.3},
        {"names": ["2.bias"], "lr": 0.05, "lr_scale": 0.5, "weight_decay": 0.0},
    ]
    parameters = dict(model.named_parameters())
    for group in groups:
        assert all(
            parameters[name] is parameter for name, parameter in zip(group["names"], group["params"], strict=True)
        )
    torch.optim.Adagrad(groups)


def test_a_tied_parameter_is_listed_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    groups = parameter_groups(model.named_parameters(), Optim())
    assert [group["names"] for group in groups] == [["0.weight"], ["0.bias", "1.bias"]]


def test_unmatched_rules_and_frozen_models_are_refused():
    model = nn.Linear(2, 2)
    with fails(ConfigError, "'weights'", "weight"):
        parameter_groups(model.named_parameters(), Optim(rules=(ParameterRule(match=("weights",)),)))
    with pytest.raises(ConfigError, match=r"^model\.freeze: "):
        parameter_groups(model.requires_grad_(False).named_parameters(), Optim())

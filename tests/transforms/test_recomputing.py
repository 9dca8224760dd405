"""Every mode of activation checkpointing, and offload: bitwise identical gradients, for less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.peak import peak_of
from torch import Tensor, nn
from transforms.test_activation_checkpointing import held_for_the_backward

import lockstep
from lockstep.config.schema import ActivationCheckpointing, TransformerModel
from lockstep.core.records import DataFacts
from lockstep.models.build import build_model
from lockstep.models.transformer import Attention, SwiGLU
from lockstep.transforms.activation_checkpointing import RecomputeBlocks
from lockstep.transforms.activation_offload import ActivationsOnHost

CPU = torch.device("cpu")
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "every 2nd": {"every": 2},
    "selective": {"mode": "selective"},
}


def own(layers: int = 4) -> nn.Module:
    section = TransformerModel(kind="transformer", layers=layers, width=32, heads=4, dropout=0.2)
    return build_model(section, DataFacts(100, 64, vocabulary=64), 1)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.2}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False)).train()


def sequential() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)))


class Plain(nn.Module):
    """Passes its blocks further inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Named() for _ in range(4)])
        self.scale = nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=self.scale, debug="on")
        return x


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, *, scale: Tensor, debug: str) -> Tensor:
        return x + torch.nn.functional.dropout(torch.tanh(self.linear(x)) * scale, 0.3, self.training)


TOKENS = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(0))
POINTS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Return the gradients of two forwards."""
    torch.manual_seed(3)
    for _ in range(2):
        outputs = model(inputs)
        logits: Tensor = getattr(outputs, "logits", outputs)
        logits.float().pow(2).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("make", "inputs"), [(own, TOKENS), (llama, TOKENS), (sequential, POINTS), (Plain, POINTS)])
def test_gradients_are_bitwise_identical(make: Callable[[], nn.Module], inputs: Tensor) -> None:
    model = make()
    expected = gradients(copy.deepcopy(model), inputs)
    for name, options in MODES.items():
        other = copy.deepcopy(model)
        lockstep.checkpoint_activations(other, **options)
        assert list(other.state_dict()) == list(model.state_dict())
        again = gradients(other, inputs)
        assert all(torch.equal(left, right) for left, right in zip(again, expected, strict=True)), name


# --- memory ---------------------------------------------------------------------------------------------------------


def held(options: dict[str, Any] | None, layers: int = 8) -> int:
    """Return the bytes alive between the second forward and its backward."""
    model = own(layers)
    if options is not None:
        lockstep.checkpoint_activations(model, **options)
    held_for_the_backward(model)
    return held_for_the_backward(model)


def test_each_mode_holds_less() -> None:
    bytes_of = {name: held(options) for name, options in MODES.items()}
    everything = held(None)
    assert bytes_of["full"] < bytes_of["every 2nd"] < everything
    assert bytes_of["full"] < bytes_of["selective"] < 0.8 * everything


def test_full_holds_one_block_and_the_inputs_of_all() -> None:
    """The peak of forward and backward grows by an input a block; without checkpointing by a whole block."""
    grows = {}
    for name, options in (("full", MODES["full"]), ("none", None)):
        peaks = []
        for layers in (4, 12):
            model = own(layers)
            if options is not None:
                lockstep.checkpoint_activations(model)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)  # only activations are counted
            peaks.append(peak_of(lambda model=model: model(TOKENS).sum().backward(), CPU))
        grows[name] = (peaks[1] - peaks[0]) / 8
    inputs = TOKENS.numel() * 32 * 4
    state_of_the_draws = 5056  # of torch's generator, kept for each block
    assert inputs <= grows["full"] < 1.3 * (inputs + state_of_the_draws)
    assert grows["none"] > 10 * inputs


# --- which modules --------------------------------------------------------------------------------------------------


def test_attention_and_mlp_can_be_chosen_by_class() -> None:
    model = own(2)
    made = lockstep.checkpoint_activations(model, [Attention, SwiGLU])
    assert made.blocks == ("blocks.0.attention", "blocks.0.mlp", "blocks.1.attention", "blocks.1.mlp")
    assert str(made) == (
        "activation checkpointing, full: blocks.0.attention, blocks.0.mlp, blocks.1.attention and 1 more"
    )
    chosen = ActivationCheckpointing(mode="full", modules=("Attention",))
    assert RecomputeBlocks(chosen, ["blocks.0"]).applied(own(2)).blocks == ("blocks.0.attention", "blocks.1.attention")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": [nn.Conv1d]}, "a Transformer has no module of class Conv1d; it has Embedding"),
        ({"blocks": ["Block"]}, "blocks are classes of modules"),
        ({"blocks": [Attention, type(own(2).get_submodule("blocks.0"))]}, "blocks.0.attention is in blocks.0"),
        ({"mode": "ful"}, "mode 'ful' is none of full, selective"),
        ({"mode": "budget"}, "mode 'budget' is none of full, selective"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(lockstep.ConfigError) as refusal:
        lockstep.checkpoint_activations(own(), **options)
    assert message in str(refusal.value)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_second_call_for_the_same_blocks_is_refused(mode: Any) -> None:
    model = own()
    lockstep.checkpoint_activations(model, mode=mode)
    message = r"blocks\.0 is computed again already, by an earlier call; leave one of the two out"
    for other in (model, copy.deepcopy(model)):
        with pytest.raises(lockstep.ConfigError, match=message):
            lockstep.checkpoint_activations(other)
        with pytest.raises(lockstep.ConfigError, match=r"blocks\.0 is computed again already"):
            lockstep.checkpoint_activations(other, Attention)


def test_a_second_call_may_be_for_other_modules() -> None:
    model, once = own(), own()
    lockstep.checkpoint_activations(model, Attention)
    lockstep.checkpoint_activations(model, SwiGLU)
    lockstep.checkpoint_activations(once, [Attention, SwiGLU])
    assert held_for_the_backward(model) == held_for_the_backward(once)
    with pytest.raises(lockstep.ConfigError, match=r"blocks\.0\.attention is computed again already"):
        lockstep.checkpoint_activations(model)


def test_a_cache_of_keys_is_refused() -> None:
    model = llama()
    model.config.use_cache = True
    with pytest.raises(lockstep.ConfigError, match="use_cache = False"):
        lockstep.checkpoint_activations(model)


# --- offload --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputes", [False, True])
def test_offloaded_activations_come_back(recomputes: bool) -> None:
    """On the CPU they are copied within the host, by the same code as from a GPU."""
    model = own()
    expected = gradients(copy.deepcopy(model), TOKENS)
    if recomputes:
        lockstep.checkpoint_activations(model)
    torch.manual_seed(3)
    for _ in range(2):
        with ActivationsOnHost(least_bytes=1) as _:
            outputs = model(TOKENS)
        outputs.float().pow(2).sum().backward()
    again = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(left, right) for left, right in zip(again, expected, strict=True))


def test_weights_and_small_tensors_are_not_offloaded() -> None:
    big, weight = torch.randn(300, 300, requires_grad=True), nn.Linear(300, 300, bias=False)
    hooks = ActivationsOnHost(least_bytes=1000)
    with hooks:
        torch.tanh(weight(big)).sum()
    assert hooks.bytes == 2 * 300 * 300 * 4, "the input and what tanh returned, not the weight"

"""Operations are counted where no formula fits, and a meter ends no run."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import families, heads, small
from kit.failures import gives
from kit.worlds import in_world
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

import lockstep
from lockstep.assembly import flops
from lockstep.assembly.flops import counted_flops, training_flops
from lockstep.config.schema import TransformerModel
from lockstep.core.records import Batch, DataFacts
from lockstep.loop.session import components_of
from lockstep.models.transformer import Transformer, flops_per_token

IMAGES = 2


def _images(kind: str, **keys: Any) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, num_labels=3, num_channels=1, **keys)
    model: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
    return model


def _convnext() -> nn.Module:
    return _images("convnext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2)


def _resnet() -> nn.Module:
    return _images("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")


class Items:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pixels = torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(index))
        return {"pixel_values": pixels, "labels": torch.tensor(index % 3)}


@pytest.mark.parametrize("make", [_convnext, _resnet])
def test_models_without_width_or_layers_train(make: Any) -> None:
    config = {"batch": {"global_size": 4}, "run": {"steps": 2}, "precision": {"compute": "fp32"}}
    with lockstep.session(config, model=make(), train_dataset=Items()) as session:
        assert len(list(session)) == 2


@pytest.mark.parametrize("make", [_convnext, _resnet, lambda: heads.made("vit classes")])
def test_the_count_is_that_of_a_real_update(make: Any) -> None:
    model = make()
    size = 8 if model.config.model_type == "vit" else 32
    inputs = {"pixel_values": torch.randn(IMAGES, 1, size, size)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = counted_flops(model, Batch(inputs, None, IMAGES, IMAGES))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(**inputs).logits.sum().backward()
    assert found == counter.get_total_flops() / IMAGES > 0
    assert flops_per_token(model, DataFacts(8, None)) is None  # a token of text is no image


class Convolutions(nn.Module):
    def __init__(self, saves_memory: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 4 * 4, 3)
        self._saves_memory = saves_memory

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = checkpoint(self.inner, pixels, use_reentrant=False) if self._saves_memory else self.inner(pixels)
        return self.head(hidden)


@pytest.mark.parametrize("saves_memory", [False, True])
def test_what_checkpointing_computes_again_is_not_counted(saves_memory: bool) -> None:
    pixels = torch.randn(IMAGES, 1, 8, 8)
    per_image = counted_flops(Convolutions(saves_memory), Batch((pixels,), None, IMAGES, IMAGES))
    first, second, head = 2 * 6 * 6 * 4 * 9, 2 * 4 * 4 * 8 * 4 * 9, 2 * 128 * 3
    assert per_image == 3 * (first + second + head) - first  # no gradient for the pixels


IN, HIDDEN, STEPS = 16, 32, 5


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
@pytest.mark.parametrize("layers", [1, 2])
def test_recurrent_layers_are_counted_though_a_cpu_fuses_them(kind: type[nn.RNNBase], gates: int, layers: int) -> None:
    inputs = torch.randn(IMAGES, STEPS, IN)
    enabled = torch.backends.mkldnn.enabled
    found = counted_flops(kind(IN, HIDDEN, layers, batch_first=True), Batch((inputs,), None, IMAGES, IMAGES))
    assert torch.backends.mkldnn.enabled == enabled
    of_state, of_inputs = 2 * gates * HIDDEN * HIDDEN, 2 * gates * HIDDEN * IN
    first = STEPS * (3 * of_state + 2 * of_inputs) - of_state  # no gradient for the inputs and the first state
    assert found == first + (layers - 1) * (6 * STEPS - 1) * of_state


class Small(nn.Module):
    """A perceptron that counts for more than its layers: a product of what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers(inputs)
        return torch.einsum("bi,bj->bij", hidden, hidden).flatten(1)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Small(), (IN,)),
        (nn.Sequential(nn.ConvTranspose2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3)), (1, 8, 8)),
        (nn.Sequential(nn.Conv1d(4, 8, 3, groups=4, stride=2), nn.BatchNorm1d(8), nn.Flatten()), (4, 16)),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), (5, 16)),
    ],
    ids=["products", "transposed", "grouped", "encoder"],
)
def test_any_module_is_counted_as_torch_does(model: nn.Module, shape: tuple[int, ...]) -> None:
    inputs = torch.randn(IMAGES, *shape)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(inputs).sum().backward()
    assert counted_flops(model, Batch((inputs,), None, IMAGES, IMAGES)) == counter.get_total_flops() / IMAGES > 0


LENGTH = 32
SIZES = {
    "vocab_size": 128, "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
    "num_key_value_heads": 1,
}  # fmt: skip


def _own(**keys: Any) -> nn.Module:
    return Transformer(TransformerModel(kind="transformer", layers=3, width=64, heads=4, **keys), 128)


def _decoder(kind: str, **keys: Any) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **keys)
    config.use_cache = False
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: _own(tie_embeddings=True),
        lambda: _own(tie_embeddings=False),
        lambda: _own(kv_heads=1),
        lambda: _decoder("llama", **SIZES),
        lambda: _decoder("qwen3", **SIZES, head_dim=48, tie_word_embeddings=True),
        lambda: _decoder("gpt2", vocab_size=128, n_layer=3, n_embd=64, n_head=4, n_positions=LENGTH),
        lambda: _decoder("mixtral", **SIZES, num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=["tied", "untied", "own-gqa", "llama-gqa", "head-width", "gpt2", "experts"],
)
def test_the_formula_is_what_torch_counts(make: Any) -> None:
    model, tokens = make(), torch.randint(128, (IMAGES, LENGTH))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        outputs = model(tokens)
        getattr(outputs, "logits", outputs).sum().backward()
    per_token = counter.get_total_flops() / (IMAGES * LENGTH)
    assert flops_per_token(model, DataFacts(8, LENGTH)) == per_token


def test_a_sliding_window_is_as_wide_as_it_is() -> None:
    keys = {**SIZES, "head_dim": 16, "sliding_window": 8}
    whole, half = (
        flops_per_token(_decoder("gemma3_text", **keys, layer_types=[kind] * 3), DataFacts(8, LENGTH))
        for kind in ("full_attention", "sliding_attention")
    )
    assert whole is not None
    assert half is not None
    assert whole - half == 3 * 12 * 64 * (LENGTH - 8)


def divided(parallels: list[dict[str, int]]) -> list[tuple[float | None, int]]:
    facts = []
    with small.in_group():
        for parallel in parallels:
            llama = copy.deepcopy(families.family("llama"))
            llama["model"]["architecture"]["num_key_value_heads"] = 2  # which two ranks can divide
            keys = {**llama, "parallel": parallel, "batch": {"global_size": 4, "micro_size": 2}}
            config = small.config(objective={})
            checkpointing = {"activation_checkpointing": {"mode": "full"}}
            with lockstep.session({**config, **keys, "run": {"steps": 1}, "memory": checkpointing}) as session:
                reports = list(session)
                facts.append((components_of(session).flops_per_token, reports[-1].tokens))
    return facts


def test_each_way_to_divide_a_model_counts_the_whole_of_it() -> None:
    """With the tokens of a global batch, which no rank counts twice, and with activation checkpointing."""
    parallels = [{"data": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}]
    for first, *others in in_world(2, divided, parallels):
        assert first[0] is not None
        assert others == [first] * 3


def test_two_sequences_and_models_without_values_are_counted() -> None:
    with torch.device("meta"):
        blank = heads.made("t5 seq2seq")
    batch = default_collate(list(heads.Samples("pairs", 4)))
    tokens = 4 * heads.LENGTH
    labels = batch.pop("labels").clamp(min=0)
    batch["decoder_input_ids"] = labels
    found = counted_flops(blank, Batch(batch, labels, 4, tokens))
    assert found == counted_flops(heads.made("t5 seq2seq"), Batch(batch, labels, 4, tokens)) > 0
    assert flops_per_token(blank, DataFacts(8, None)) is None


def test_experts_are_not_all_met() -> None:
    mixture = heads.made("mixtral balanced")
    known = flops_per_token(mixture, DataFacts(8, None))
    mixture.config.num_experts_per_tok = 1
    fewer = flops_per_token(mixture, DataFacts(8, None))
    assert known is not None
    assert fewer is not None
    assert fewer < known
    mixture.config = SimpleNamespace(**{**vars(mixture.config), "num_experts_per_tok": None})
    assert flops_per_token(mixture, DataFacts(8, None)) is None
    assert flops_per_token(heads.made("llama causal"), DataFacts(8, None)) is not None


class _Source:
    """Of points."""

    def __init__(self) -> None:
        self._points = small.points(8)
        self.facts, self.fingerprint, self.draws = DataFacts(8, None), "", False

    def fetch(self, indices: Any) -> Batch:
        inputs, classes = self._points[torch.from_numpy(indices)]
        return Batch((inputs,), classes, len(indices), len(indices))


def test_a_gpu_is_counted_for_and_a_cpu_is_not() -> None:
    model, source = small.Net(), _Source()
    assert training_flops(model, source, torch.device("cpu")) is None
    layers = 2 * (4 * 8 + 8 * 3)
    assert training_flops(model, source, torch.device("cuda")) == 3 * layers - 2 * 4 * 8  # none for the inputs


def test_whatever_happens_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> float:
        raise AttributeError("no hidden_size")

    monkeypatch.setattr(flops, "flops_per_token", broken)
    monkeypatch.setattr(flops, "counted_flops", broken)
    assert training_flops(small.Net(), _Source(), torch.device("cuda")) is None
    assert len(_reports(small.CrossEntropy())) == 2


class OfTheirOwn(small.CrossEntropy):
    def metrics(self, loss_sum: float, count: float, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": loss_sum / count, "share": sums["right"]}


def _reports(objective: Any) -> list[Any]:
    config = small.config(run={"steps": 2})
    del config["objective"]
    with lockstep.session(config, objective=objective) as session:
        found: list[Any] = list(session)
        [evaluation] = session.evaluate()
    assert evaluation.metrics.keys() == {"loss"}
    return found


def test_metrics_that_raise_cost_all_but_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(_reports(OfTheirOwn())) == 2
    assert gives(capsys.readouterr().out, "held-out", "KeyError: 'right'")

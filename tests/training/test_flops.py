"""Operations are counted where no formula fits, and a meter ends no run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import heads, small
from torch import Tensor, nn
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

import lockstep
from lockstep.core.records import Batch, DataFacts
from lockstep.models.transformer import flops_per_token
from lockstep.training import flops
from lockstep.training.flops import counted_flops, training_flops

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
    assert flops_per_token(heads.made("mixtral balanced"), DataFacts(8, None)) is None
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
    assert "metrics of held-out can't be computed, but for the loss: KeyError: 'right'" in capsys.readouterr().out

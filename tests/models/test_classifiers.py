"""Classifiers of texts and images."""

from __future__ import annotations

import pytest
import torch

from lockstep.config.schema import ImageClassifierModel, TextClassifierModel
from lockstep.core.errors import ConfigError
from lockstep.core.records import DataFacts
from lockstep.models.build import build_model
from lockstep.models.building_objectives import coupling

FACTS = DataFacts(100, None, vocabulary=256, classes=4)


@pytest.fixture
def text_model():
    section = TextClassifierModel(kind="text-classifier", layers=2, width=16, dropout=0.0)
    model = build_model(section, FACTS, 1)
    with torch.no_grad():  # a block begins as the identity, which would hide an effect of padding
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    return model


def _texts(samples, length):
    return torch.randint(0, 256, (samples, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_padding_does_not_change_logits(text_model, length):
    text = _texts(1, length)
    alone = text_model(text)
    for padding in (1, 2, 3, 30):
        padded = torch.cat((text, _texts(1, padding)), dim=1)
        mask = torch.arange(length + padding)[None] < length
        torch.testing.assert_close(text_model(padded, mask), alone)
    assert not torch.allclose(text_model(torch.cat((text, text), dim=1)), alone)


def test_the_logits_of_an_empty_text_are_finite(text_model):
    mask = torch.tensor([[False] * 5, [True] * 5])
    assert text_model(_texts(2, 5), mask).isfinite().all()


@pytest.mark.parametrize("width", [8, 12, 32])
def test_logits_do_not_depend_on_other_samples(width):
    model = build_model(ImageClassifierModel(kind="image-classifier", layers=2, width=width), FACTS, 1)
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(images)[:2], model(images[:2]))
    assert model(images).shape == (6, 4)
    assert coupling(model) is None


def test_the_digits_are_learned_in_seconds():
    datasets = pytest.importorskip("sklearn.datasets")
    images, classes = datasets.load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    classes = torch.tensor(classes)
    held_out = torch.arange(len(classes)) % 5 == 0
    model = build_model(
        ImageClassifierModel(kind="image-classifier", layers=2, width=16), DataFacts(1438, None, classes=10), 1
    )
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, fused=True)
    order = torch.randperm(int((~held_out).sum()), generator=torch.Generator().manual_seed(0)).repeat(3)
    for chosen in order.split(64):
        loss = torch.nn.functional.cross_entropy(model(images[~held_out][chosen]), classes[~held_out][chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    right = (model(images[held_out]).argmax(1) == classes[held_out]).float().mean()
    assert right > 0.9


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (DataFacts(10, None, vocabulary=256), "model.classes: the data doesn't determine the number of classes"),
        (DataFacts(10, None, vocabulary=256, classes=9), "model.classes: 3 is too few: the data has 9 classes; set 9"),
    ],
)
def test_classes_come_from_the_data_or_the_config(facts, message):
    classes = 3 if facts.classes else None
    with pytest.raises(ConfigError, match=message):
        build_model(TextClassifierModel(kind="text-classifier", classes=classes), facts, 1)

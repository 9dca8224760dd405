import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.failures import fails

from lockstep.config.schema import Digits, StdlibFunctions, StdlibText
from lockstep.core.errors import ConfigError
from lockstep.data import noise
from lockstep.data.sources import open_source
from lockstep.data.stdlib import stdlib_files


def opened(section, task=None):
    return open_source(section, task=task, tokenizer=None)


def test_stdlib_text_is_the_library_without_every_20th_file():
    train = opened(StdlibText(kind="stdlib-text", length=100))
    held_out = opened(StdlibText(kind="stdlib-text", split="held-out", length=100))
    files = [Path(path).read_bytes() for _, path in stdlib_files()]
    text = b"".join(data for number, data in enumerate(files) if number % 20 != 19)
    assert train.facts.samples == (len(text) - 1) // 100
    assert held_out.facts.samples == (sum(map(len, files[19::20])) - 1) // 100
    assert (train.facts.vocabulary, train.facts.bytes_per_token, train.facts.tokens_per_sample) == (256, 1.0, 100)
    last = train.facts.samples - 1
    batch = train.fetch(np.array([0, last]))
    assert bytes(batch.inputs["tokens"][1].tolist()) == text[last * 100 : last * 100 + 100]
    assert bytes(batch.targets[1].tolist()) == text[last * 100 + 1 : last * 100 + 101]
    assert train.fingerprint != held_out.fingerprint


def test_stdlib_text_can_be_limited_to_its_first_samples():
    source = opened(StdlibText(kind="stdlib-text", samples=7))
    assert source.facts.samples == 7
    with fails(ConfigError, 10**9, "null"):
        opened(StdlibText(kind="stdlib-text", samples=10**9))


def test_stdlib_text_excludes_tests_and_installed_packages():
    names = [name for name, _ in stdlib_files()]
    assert names == sorted(names)
    assert not [name for name in names if re.search(r"(^|/)(site-packages|test|tests)/", name)]


def test_stdlib_functions_do_not_contain_their_packages_name():
    train = opened(StdlibFunctions(kind="stdlib-functions"))
    held_out = opened(StdlibFunctions(kind="stdlib-functions", split="held-out"))
    assert len(train.packages) == train.facts.classes == 9
    assert train.facts.samples > 2000
    assert 0.07 < held_out.facts.samples / (train.facts.samples + held_out.facts.samples) < 0.13
    texts = []
    for source in (train, held_out):
        batch = source.fetch(np.arange(source.facts.samples))
        tokens, mask = batch.inputs["tokens"], batch.inputs["mask"]
        assert tokens.shape[1] == mask.sum(1).max() <= 512
        assert batch.tokens == mask.sum()
        assert (tokens[~mask] == 0).all()
        assert batch.targets.unique().tolist() == list(range(9))
        texts.append({bytes(row[: int(length)].tolist()) for row, length in zip(tokens, mask.sum(1), strict=True)})
    names = re.compile("|".join(train.packages).encode(), re.IGNORECASE)
    assert not any(names.search(text) for text in texts[0] | texts[1])
    small = held_out.fetch(np.array([4, 2]))
    assert small.inputs["tokens"].shape[1] == int(small.inputs["mask"].sum(1).max())


def test_digits_are_images_in_0_to_1_with_every_5th_held_out():
    train, held_out = opened(Digits(kind="digits")), opened(Digits(kind="digits", split="held-out"))
    assert (train.facts.samples, held_out.facts.samples, train.facts.classes) == (1438, 359, 10)
    assert not train.draws
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().images / 16, dtype=torch.float32)
    batch = held_out.fetch(np.array([0, 358]))
    assert torch.equal(batch.inputs["images"][:, 0], images[[4, 1794]])
    assert batch.targets.tolist() == load_digits().target[[4, 1794]].tolist()
    assert torch.equal(train.fetch(np.array([4])).inputs["images"][0, 0], images[5])


def test_digits_are_shifted_by_whole_pixels_that_differ_by_epoch():
    plain, shifting = opened(Digits(kind="digits")), opened(Digits(kind="digits", shift=2))
    assert shifting.draws
    indices = np.arange(200)
    images = torch.nn.functional.pad(plain.fetch(indices).inputs["images"], (2, 2, 2, 2))
    shifts = set()
    epochs = []
    for epoch in range(2):
        noise.use_epoch(epoch)
        epochs.append(shifting.fetch(indices).inputs["images"])
        for image, shifted in zip(images, epochs[-1], strict=True):
            crops = {(r, c): image[:, r : r + 8, c : c + 8] for r in range(5) for c in range(5)}
            matches = [corner for corner, crop in crops.items() if torch.equal(crop, shifted)]
            assert matches
            shifts.update(matches[:1])
    assert len(shifts) == 25
    assert not torch.equal(epochs[0], epochs[1])
    noise.use_epoch(0)
    assert torch.equal(shifting.fetch(indices[50:60]).inputs["images"], epochs[0][50:60])


def test_digits_without_scikit_learn_are_refused_with_the_command_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lockstep-torch\[digits\]'"):
        opened(Digits(kind="digits"))

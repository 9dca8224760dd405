"""A dataset by weights: the expected number of draws, the same on any number of ranks and after a resume."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from index_sources import make_loader
from torch.utils.data import DataLoader

import lockstep
from lockstep.config.data_sections import BadSamples
from lockstep.core.progress import Progress
from lockstep.data import noise
from lockstep.data.custom import adapt_dataset
from lockstep.data.sources import skipping

WEIGHTS = [0.0, 1.0, 2.5, 0.25, 6.25]
ITEMS = [torch.tensor(index) for index in range(5)]


def drawn(dataset: lockstep.WeightedDataset, epochs: int) -> list[list[int]]:
    draws = []
    for epoch in range(epochs):
        noise.use_epoch(epoch)
        draws.append([int(dataset[draw]) for draw in range(len(dataset))])
    return draws


def test_each_epoch_has_a_sample_as_often_as_its_weight_says_up_to_one_draw():
    epochs = [Counter(draws) for draws in drawn(lockstep.WeightedDataset(ITEMS, WEIGHTS), 2000)]
    for sample, weight in enumerate(WEIGHTS):
        numbers = [epoch[sample] for epoch in epochs]
        assert set(numbers) <= {int(weight / 2), int(weight / 2) + 1}
        assert np.mean(numbers) == pytest.approx(weight / 2, abs=0.05)


def test_equal_weights_draw_each_sample_once_and_an_epoch_may_have_other_sizes():
    assert drawn(lockstep.WeightedDataset(ITEMS, torch.ones(5)), 3) == [[0, 1, 2, 3, 4]] * 3
    assert len(drawn(lockstep.WeightedDataset(ITEMS, WEIGHTS, samples=12), 1)[0]) == 12


def samples_of(ranks: int, workers: int = 0, after: int = 0) -> list[list[int]]:
    """The samples of updates 1 to 6, of 4 draws; an epoch has 10."""
    source = adapt_dataset(lockstep.WeightedDataset([torch.tensor(i) for i in range(10)], np.arange(10.0)))
    updates: list[list[int]] = [[] for _ in range(6 - after)]
    for rank in range(ranks):
        loader = make_loader(source, 4, ranks=ranks, rank=rank, workers=workers)
        progress = Progress(after, [0, 4, 8, 10, 14, 18][after], 0)
        for number, update in enumerate(islice(loader.updates(progress), len(updates))):
            updates[number] += [
                int(value) for batch in update.micro_batches if batch.samples for value in batch.inputs[0]
            ]
        loader.close()
    return [sorted(update) for update in updates]


def test_the_draws_are_the_same_on_any_number_of_ranks_in_workers_and_after_a_resume():
    whole = samples_of(1)
    assert samples_of(2) == whole
    assert samples_of(1, workers=1, after=2) == whole[2:]
    assert whole[:3] != whole[3:]


def test_weights_are_a_part_of_the_datas_identity_and_samples_cannot_be_left_out_by_draws():
    one, other = (adapt_dataset(lockstep.WeightedDataset(ITEMS, weights)) for weights in (WEIGHTS, [1, *WEIGHTS[1:]]))
    noise.use_epoch(7)
    assert adapt_dataset(lockstep.WeightedDataset(ITEMS, WEIGHTS)).fingerprint == one.fingerprint != other.fingerprint
    with pytest.raises(lockstep.ConfigError, match="weight 0"):
        skipping(one, BadSamples(policy="skip"))


@pytest.mark.parametrize("weights", [[1.0], [1, 1, 1, 1, -1], [0] * 5, [float("nan")] * 5])
def test_wrong_weights_are_refused(weights):
    with pytest.raises(lockstep.ConfigError, match="weights"):
        lockstep.WeightedDataset(ITEMS, weights)


def test_a_loader_is_refused_with_what_keeps_its_order():
    with pytest.raises(lockstep.ConfigError, match=r"train_dataset=loader\.dataset, .*WeightedDataset"):
        adapt_dataset(DataLoader(ITEMS))

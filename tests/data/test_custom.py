from itertools import islice

import numpy as np
import pytest
import torch
from index_sources import make_loader
from kit.failures import fails
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lockstep.config.schema import CustomData
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.progress import Progress
from lockstep.core.records import Batch
from lockstep.data.custom import adapt_dataset
from lockstep.data.sources import open_source
from lockstep.models.building_objectives import adapt_objective

INDICES = np.array([4, 1, 2])


class Items(Dataset):
    """A dataset whose items are a function of the index."""

    def __init__(self, make):
        self._make = make

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self._make(index)


def test_the_labels_of_a_mapping_are_the_targets():
    for name in ("label", "labels", "target", "targets"):
        source = adapt_dataset(Items(lambda index, name=name: {"x": torch.full((2,), index), name: index % 3}))
        batch = source.fetch(INDICES)
        assert list(batch.inputs) == ["x"]
        assert batch.inputs["x"].tolist() == [[4, 4], [1, 1], [2, 2]]
        assert batch.targets.tolist() == [1, 1, 2]
        assert (batch.samples, batch.tokens) == (3, 3)
    assert source.draws
    assert source.facts.samples == 10


def test_the_last_of_a_tuple_is_the_target():
    batch = adapt_dataset(Items(lambda index: (torch.tensor(index), index * 1.0, index + 100))).fetch(INDICES)
    assert [part.tolist() for part in batch.inputs] == [[4, 1, 2], [4.0, 1.0, 2.0]]
    assert batch.targets.tolist() == [104, 101, 102]


def test_a_tuple_of_one_is_an_input_without_target():
    batch = adapt_dataset(Items(lambda index: (torch.tensor([index]),))).fetch(INDICES)
    assert [part.tolist() for part in batch.inputs] == [[[4], [1], [2]]]
    assert (batch.targets, batch.samples) == (None, 3)


def test_a_single_tensor_is_an_input_without_target():
    batch = adapt_dataset(Items(lambda index: torch.tensor([index]))).fetch(INDICES)
    assert batch.inputs[0].tolist() == [[4], [1], [2]]
    assert batch.targets is None


FILTERED = {
    "tuple": lambda kept: (torch.zeros(len(kept), 5), torch.tensor(kept)),
    "mapping": lambda kept: {"x": torch.zeros(len(kept), 5), "labels": torch.tensor(kept)},
    "images and boxes": lambda kept: ([torch.zeros(3, 4) for _ in kept], [{"boxes": torch.zeros(9, 4)} for _ in kept]),
    "a tensor": lambda kept: torch.zeros(len(kept), 5),
}


@pytest.mark.parametrize("form", FILTERED)
def test_the_samples_of_a_batch_are_those_that_its_collate_function_has_left(form):
    source = adapt_dataset(Items(lambda index: index), lambda items: FILTERED[form]([i for i in items if i != 1]))
    batch = source.fetch(INDICES)
    assert (batch.samples, batch.tokens) == (2, 2)
    if form == "tuple":
        counted = [adapt_objective(loss).count(batch) for loss in (torch.nn.MSELoss(reduction="sum"), lambda out, b: 0)]
        assert counted == [2, 2]


def test_a_collate_function_that_returns_none_is_named_with_the_way_to_leave_samples_out():
    with pytest.raises(RunFailed, match="policy: skip"):
        adapt_dataset(Items(lambda index: index), lambda items: None).fetch(INDICES)


def test_tokens_are_counted_without_padding():
    items = Items(lambda index: {"input_ids": torch.arange(4), "attention_mask": torch.tensor([1, 1, 1, 0])})
    assert adapt_dataset(items).fetch(INDICES).tokens == 9


def test_a_collate_function_may_return_a_batch():
    def collate(items):
        return Batch({"numbers": torch.tensor(items)}, None, len(items), 7)

    assert adapt_dataset([5, 6, 7, 8, 9], collate).fetch(INDICES).tokens == 7


def test_getitems_is_used_if_the_class_defines_it():
    class BatchedItems(Items):
        def __getitems__(self, indices):
            return [index + 1000 for index in indices]

    assert adapt_dataset(BatchedItems(lambda index: index)).fetch(INDICES).inputs[0].tolist() == [1004, 1001, 1002]


def test_a_tensor_dataset_gives_the_same_batch_as_collated_items():
    tensors = torch.randn(10, 3), torch.randn(10), torch.arange(10)
    gathered = adapt_dataset(TensorDataset(*tensors))
    collated = adapt_dataset(Items(lambda index: tuple(tensor[index] for tensor in tensors)))
    assert not gathered.draws
    batch, expected = gathered.fetch(INDICES), collated.fetch(INDICES)
    assert all(torch.equal(a, b) for a, b in zip(batch.inputs, expected.inputs, strict=True))
    assert torch.equal(batch.targets, expected.targets)
    assert adapt_dataset(TensorDataset(tensors[0])).fetch(INDICES).targets is None


def test_random_items_are_the_same_with_and_without_workers():
    source = adapt_dataset(Items(lambda index: (torch.rand(()), index)))
    drawn = []
    for workers in (0, 2):
        loader = make_loader(source, 4, workers=workers)
        drawn.append([update.micro_batches[0].inputs[0].tolist() for update in islice(loader.updates(Progress()), 5)])
        loader.close()
    assert drawn[0] == drawn[1]
    assert len({number for batch in drawn[0] for number in batch}) > 10


def test_the_fingerprint_depends_on_the_content():
    def of(values):
        return adapt_dataset(TensorDataset(torch.tensor(values))).fingerprint

    assert of([1.0, 2.0]) == of([1.0, 2.0])
    assert len({of([1.0, 2.0]), of([1.0, 3.0]), of([1.0, 2.0, 2.0])}) == 3
    assert adapt_dataset([1, 2]).fingerprint != adapt_dataset([1, 3]).fingerprint
    noisy = Items(lambda index: torch.rand(2))
    assert adapt_dataset(noisy).fingerprint == adapt_dataset(noisy).fingerprint


def test_the_fingerprint_of_earlier_versions_is_the_same():
    assert adapt_dataset([(float(index), index % 2) for index in range(40)]).fingerprint == (
        "6b41442d82aa35402d27d440c9bfa2ad"
    )


def test_other_objects_than_map_style_datasets_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1])

    with fails(ConfigError, "Stream", "IterableDataset", "map-style"):
        adapt_dataset(Stream())
    with fails(ConfigError, "object", "__len__", "__getitem__"):
        adapt_dataset(object())
    with pytest.raises(RunFailed, match="labels and target"):
        adapt_dataset(Items(lambda index: {"labels": 1, "target": 2})).fetch(INDICES)


def test_a_dataset_from_a_users_file(tmp_path):
    path = tmp_path / "my_data.py"
    path.write_text(
        "import torch\n"
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __init__(self, number): self.number = number\n"
        "    def __len__(self): return self.number\n"
        "    def __getitem__(self, index): return {'x': torch.tensor(float(index)), 'target': index ** 2}\n"
        "def collate(items): return {'x': torch.stack([i['x'] for i in items]), 'target': torch.tensor(0)}\n"
    )
    section = CustomData(kind="custom", target=f"{path}:Squares", arguments={"number": 5})
    assert open_source(section, task=None, tokenizer=None).fetch(INDICES).targets.tolist() == [16, 1, 4]
    with_collate = section.model_copy(update={"collate": f"{path}:collate"})
    assert open_source(with_collate, task=None, tokenizer=None).fetch(INDICES).targets.item() == 0
    with pytest.raises(ConfigError, match="can't take arguments"):
        open_source(section.model_copy(update={"arguments": {"size": 3}}), task=None, tokenizer=None)

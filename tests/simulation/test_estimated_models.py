"""Memory of models and layouts that once was not estimated, or wrongly: many parameters, recurrence, stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulation.test_peak_memory import decoder, estimator
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from lockstep.assembly.user_objects import user_objects
from lockstep.simulation import repeats
from lockstep.simulation.estimate import estimator_of
from lockstep.simulation.execution import _Chunks
from lockstep.simulation.memory import MemoryLedger, Watched, resizes_seen
from lockstep.simulation.updates import peak_of_rank, run_updates
from lockstep.training.api import resolved
from lockstep.training.job import opened

CLASSIFIER: dict[str, Any] = {
    "objective": {"kind": "classification"},
    "batch": {"global_size": 8},
    "optim": {"name": "adamw", "lr": 0.1},
    "precision": {"compute": "fp32"},
    "run": {"steps": 3},
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0].mean(1))  # type: ignore[no-any-return]


def sequences() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.randn(32, 12, 16), torch.randint(4, (32,)))


def test_repeated_operations_make_what_torch_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = decoder(parallel={"strategy": "fsdp"}, launch={"device": "auto"}, precision={"compute": "bf16"})
    repeated = estimator(config, 4).peak(config)
    monkeypatch.setattr(repeats, "key_of", lambda *unused: None)
    assert estimator(config, 4).peak(config) == repeated


def test_ddp_sends_the_order_of_the_buckets_of_hundreds_of_parameters() -> None:
    """DDP's C++ reads them back after the first update; a tensor without values ended in an internal assertion."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(192, 4), *(nn.Linear(4, 4) for _ in range(140))]
    config = {**CLASSIFIER, "parallel": {"strategy": "ddp"}}
    given = user_objects({"model": nn.Sequential(*layers), "train_dataset": sequences()})
    row = next(estimator_of(resolved(config, given), 2, None, given).estimates())
    assert row.peak is not None, row.note


@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 12), st.integers(0, 1))
def test_chunks_that_are_made_when_read_are_torchs(length: int, width: int, number: int, dim: int) -> None:
    tensor = torch.arange(length * width).view(length, width)
    made, torchs = _Chunks(tensor, number, dim), _chunk_with_empty(tensor, number, dim)
    assert all(torch.equal(made[index], torchs[index]) for index in range(number))


def test_a_stage_with_tensor_parallelism_under_fsdp_is_planned() -> None:
    """The check of tensor parallelism lists the parameters of each module, as a penalty over a whole model would."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    llama = {"model_type": "llama", "vocab_size": 256, **sizes}
    model = {"kind": "huggingface", "task": "causal-lm", "architecture": llama}
    parallel = {"strategy": "fsdp", "tensor": 2, "pipeline": 2}
    [row, *_] = estimator(decoder(model=model, parallel=parallel, launch={"device": "auto"}), 8).estimates("planned")
    assert row.peak is not None
    assert row.note == ""


def test_the_workspace_of_recurrent_layers_counts() -> None:
    """torch takes oneDNN's workspace for empty where tensors have no data: half of the peak."""
    given = user_objects({"model": Recurrent(), "train_dataset": sequences()})
    config = resolved({**CLASSIFIER, "launch": {"device": "cpu"}}, given)
    ledger = MemoryLedger("cpu")
    with opened(config, given) as session, Watched(ledger), resizes_seen(ledger):
        run_updates(session, ledger, 3)
    assert peak_of_rank(config, 1, 0, given, 3, "cpu").bytes == ledger.peak().bytes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_takes_the_data_of_parameters_on_the_cpu(stage: int) -> None:
    """Of the smallest ones, too, which have values there: a head's bias."""
    given = user_objects({"model": Recurrent(), "train_dataset": sequences()})
    parallel = {"strategy": "deepspeed", "deepspeed": {"zero_stage": stage}}
    config = resolved({**CLASSIFIER, "parallel": parallel, "launch": {"device": "cpu"}}, given)
    plain = peak_of_rank(config.with_values(parallel={"strategy": "ddp"}), 2, 0, given, 2, "cpu")
    peak = peak_of_rank(config, 2, 0, given, 2, "cpu")
    assert 0.4 < peak.by_category["optimizer"] / plain.by_category["optimizer"] < 1


def test_the_fullest_stage_of_a_pipeline_is_its_peak() -> None:
    config = decoder(parallel={"strategy": "ddp", "pipeline": 2}, launch={"device": "auto"})
    described = estimator(config, 2)
    row = next(described.estimates())
    assert row.peak is not None, row.note
    elements = sum(fact.elements for fact in described.parameters)
    assert 0.4 < row.peak.by_category["optimizer"] / (8 * elements) < 0.7

from __future__ import annotations

import pytest

from lockstep.config.schema import Launch
from lockstep.core.errors import ConfigError
from lockstep.launch import devices


@pytest.mark.parametrize(
    ("visible", "present", "count"),
    [
        (None, 4, 4),
        ("", 4, 0),
        ("-1", 4, 0),
        ("0", 4, 1),
        ("2, 0", 4, 2),
        ("0,7,1", 4, 1),  # CUDA stops at the first invalid one
        ("1,1", 4, 0),
        ("GPU-8932f937,GPU-d1f1a5b2", 4, 2),
        ("MIG-1f,MIG-2f", 4, 1),
        ("0,1", 0, 0),
    ],
)
def test_cuda_visible_devices_limits_the_count(visible: str | None, present: int, count: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert devices.visible_gpus(environ, present) == count


@pytest.mark.parametrize(
    ("section", "gpus", "ranks"),
    [({}, 0, 1), ({}, 4, 4), ({"ranks": 3}, 4, 3), ({"device": "cpu"}, 4, 1), ({"ranks": 3, "device": "cpu"}, 4, 3)],
)
def test_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, section: dict[str, object], gpus: int, ranks: int
) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: gpus)
    assert devices.choose_ranks(Launch.model_validate(section)) == ranks


@pytest.mark.parametrize(
    ("ranks", "gpus", "message"),
    [
        (2, 0, "launch.backend: nccl needs a GPU for each of the 2 ranks, and there are 0; use gloo"),
        (2, 1, "launch.backend: nccl needs a GPU for each of the 2 ranks, and there is 1; start 1 rank, or use gloo"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch, ranks: int, gpus: int, message: str) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: gpus)
    with pytest.raises(ConfigError) as caught:
        devices.check_ranks(ranks, Launch(backend="nccl"))
    assert str(caught.value) == message


def test_too_many_ranks_for_the_cores_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_cores", lambda: 2)
    assert devices.check_ranks(2, Launch()) is None
    assert devices.check_ranks(3, Launch()) == "3 ranks share 2 cores: they take turns, and each is slower"


def test_cores_are_shared_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_cores", lambda: 16)
    assert [devices.threads_per_rank(ranks) for ranks in (1, 2, 3, 16, 64)] == [16, 8, 5, 1, 1]


def test_counting_gpus_makes_no_cuda_context() -> None:
    import torch

    before = torch.cuda.is_initialized()
    assert devices.count_gpus() == (torch.cuda.device_count() if torch.version.cuda else 0)
    assert torch.cuda.is_initialized() == before

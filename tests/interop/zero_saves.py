"""Checkpoints as DeepSpeed alone writes them, by its own engine, and what the engine held when it wrote them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

TAG = "global_step2"


@dataclass(frozen=True)
class Asked:
    """Attributes:
    zero: further keys of DeepSpeed's `zero_optimization`.
    top: further keys of its config.
    width: of the model; none of the sizes of its parameters is even.
    """

    name: str
    stage: int
    compute: str = "fp32"
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    width: int = 5


class Sentences(Dataset[Any]):
    """Ids, and what follows them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([at % 7, 2]), torch.tensor([2, at % 5])


class Net(nn.Module):
    """With a tied parameter, frozen ones, and buffers."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.still = nn.Linear(width, width).requires_grad_(False)
        self.body = nn.Linear(width, width)
        self.register_buffer("offset", torch.linspace(-1, 1, width))
        self.register_buffer("seen", torch.tensor(3))
        self.head = nn.Linear(width, 7)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.still(self.embedding(ids)))
        found: Tensor = self.head(hidden + self.offset.to(hidden.dtype))
        return found


def save_all(asked: list[Asked], folder: Path) -> None:
    """On each rank: one engine after the other. The values that they held go into NAME.held."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    for one in asked:
        held = _save(one, folder / one.name)
        if torch.distributed.get_rank() == 0:
            torch.save(held, folder / f"{one.name}.held")


def _save(asked: Asked, folder: Path) -> dict[str, Tensor]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    torch.manual_seed(0)
    net = Net(asked.width)
    trained = [one for one in net.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() == 1], "weight_decay": 0.0},
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": asked.stage, **asked.zero},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **({asked.compute: {"enabled": True}} if asked.compute != "fp32" else {}),
        **asked.top,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config)
    for step in range(2):
        torch.manual_seed(10 * step + engine.global_rank)
        ids = torch.randint(0, 7, (2,))
        engine.backward(nn.functional.cross_entropy(engine(ids).float(), ids))
        engine.step()
    engine.save_checkpoint(str(folder), tag=TAG, client_state={"mine": [1, "two"]})
    held = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and asked.stage > 0:
            held[name] = safe_get_full_fp32_param(parameter)
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=asked.stage == 3):
                held[name] = parameter.detach().clone()
    return {**held, **dict(engine.module.named_buffers()), **_moments(engine, asked)}


def _moments(engine: Any, asked: Asked) -> dict[str, Tensor]:
    """Entry and name, by DeepSpeed's own way to them."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if asked.stage == 0:
        return {}
    if asked.stage < 3 and hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False  # it was linked before torch's optimizer had any
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {
        f"{entry} {name}": safe_get_full_optimizer_state(parameter, entry)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
        for entry in ("exp_avg", "exp_avg_sq")
    }

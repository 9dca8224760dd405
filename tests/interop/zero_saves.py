"""Checkpoints that DeepSpeed's engine writes, and the values that the engine held at that time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

TAG = "global_step2"


@dataclass(frozen=True)
class Save:
    """A checkpoint to write.

    Attributes:
        zero: Further keys of DeepSpeed's `zero_optimization`.
        top: Further keys of its config.
        width: Width of the model; with an odd one no parameter has an even size.
    """

    name: str
    stage: int
    compute: str = "fp32"
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    width: int = 5


class Sentences(Dataset[Any]):
    """Token ids and their targets."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([at % 7, 2]), torch.tensor([2, at % 5])


class Net(nn.Module):
    """A model with a tied parameter, frozen ones, and buffers."""

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
        logits: Tensor = self.head(hidden + self.offset.to(hidden.dtype))
        return logits


def save_all(saves: list[Save], folder: Path) -> None:
    """Write all checkpoints, one engine after the other, and the values that they held to NAME.held; on each rank."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    for save in saves:
        held = _save(save, folder / save.name)
        if torch.distributed.get_rank() == 0:
            torch.save(held, folder / f"{save.name}.held")


def _save(save: Save, folder: Path) -> dict[str, Tensor]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    torch.manual_seed(0)
    net = Net(save.width)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": save.stage, **save.zero},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **({save.compute: {"enabled": True}} if save.compute != "fp32" else {}),
        **save.top,
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
        if parameter.requires_grad and save.stage > 0:
            held[name] = safe_get_full_fp32_param(parameter)
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=save.stage == 3):
                held[name] = parameter.detach().clone()
    return {**held, **dict(engine.module.named_buffers()), **_moments(engine, save)}


def _moments(engine: Any, save: Save) -> dict[str, Tensor]:
    """Return the moments by entry and name, as DeepSpeed's API returns them."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if save.stage == 0:
        return {}
    if save.stage < 3 and hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False  # it was linked before torch's optimizer had any
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {
        f"{entry} {name}": safe_get_full_optimizer_state(parameter, entry)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
        for entry in ("exp_avg", "exp_avg_sq")
    }

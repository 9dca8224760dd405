"""The contestants of strategies.py: each strategy by hand and under Lockstep.

By hand is with the feature of torch or DeepSpeed on which the strategy is built; under Lockstep all safety is on.
Both take the same samples in the same order, fp32, AdamW at a constant rate, and clip at the same norm.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from step_loops import Task, adamw, loader, loader_of_rank, ranks
from step_work import CLIP_NORM, GPT, WEIGHT_DECAY, Work, loss_of, text
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

LENGTH = 128
WORK = Work(
    "a GPT-2-shaped model of 3.3M parameters, 4 x 128 tokens a rank",
    partial(GPT, layers=4, width=256, heads=4, length=LENGTH),
    partial(text, length=LENGTH),
    batch=4, steps=70, warm_up=15, rate=1e-3, objective="next-token",
)  # fmt: skip


# --- by hand ------------------------------------------------------------------------------------------------------


def by_hand_ddp(task: Task) -> None:
    module = DistributedDataParallel(task.model)
    _loop(task, module, adamw(task))


def by_hand_fsdp(task: Task, reshard: bool, replicas: int = 1) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (replicas, ranks() // replicas) if replicas > 1 else (ranks(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "parts")[-len(shape) :])
    for block in task.model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(task.model, mesh=mesh, reshard_after_forward=False)
    _loop(task, task.model, adamw(task))


def _loop(task: Task, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in loader_of_rank(task):
        optimizer.zero_grad()
        loss_of(module(x), y).backward()
        clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()


def by_hand_zero(task: Task, stage: int) -> None:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": task.work.batch,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=task.model, optimizer=adamw(task), config=config)
    for x, y in loader_of_rank(task):
        engine.backward(loss_of(engine(x), y))
        engine.step()
    engine.destroy()


def by_hand_tensor(task: Task) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (ranks(),))
    for block in task.model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    kinds = [[p for p in task.model.parameters() if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    groups = [{"params": group} for group in kinds]  # torch's kernels take one kind at a time
    optimizer = torch.optim.AdamW(groups, lr=task.work.rate, weight_decay=WEIGHT_DECAY, fused=True)
    for x, y in islice(loader(task), task.steps):
        optimizer.zero_grad()
        loss_of(task.model(x), y).backward()
        norms = [nn.utils.get_total_norm([parameter.grad for parameter in group]) for group in kinds]
        whole = torch.stack([norms[0].full_tensor(), norms[1]]).norm()
        for group in kinds:
            nn.utils.clip_grads_with_norm_(group, CLIP_NORM, whole)
        optimizer.step()


# --- under Lockstep -----------------------------------------------------------------------------------------------


def under_lockstep(task: Task, parallel: dict[str, Any]) -> None:
    import lockstep

    config = {
        "objective": {"kind": task.work.objective},
        "data": {"shuffle": False},
        "batch": {"global_size": task.work.batch * (1 if "tensor" in parallel else ranks())},
        "optim": {"lr": task.work.rate, "weight_decay": WEIGHT_DECAY, "decay": "all", "clip_norm": CLIP_NORM},
        "schedule": {"kind": "constant"},
        "precision": {"compute": "fp32"},
        "parallel": parallel,
        "monitor": {"every": 10, "tensorboard": True, "progress": "none"},
        "run": {"steps": task.steps, "folder": os.path.join(task.folder, "run")},
    }
    lockstep.train(config, model=task.model, train_dataset=TensorDataset(*task.data))


def _fsdp(sharding: str, **degrees: int) -> dict[str, Any]:
    return {"strategy": "fsdp", "fsdp": {"sharding_strategy": sharding}, **degrees}


def _zero(stage: int) -> dict[str, Any]:
    return {"strategy": "deepspeed", "deepspeed": {"zero_stage": stage}}


_TENSOR = {
    "strategy": "ddp",
    "tensor": 2,
    "tensor_parallel": {"plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}},
}

PAIRS: dict[str, tuple[Callable[[Task], None], dict[str, Any]]] = {
    "ddp": (by_hand_ddp, {"strategy": "ddp"}),
    "fsdp FULL_SHARD": (partial(by_hand_fsdp, reshard=True), _fsdp("FULL_SHARD")),
    "fsdp SHARD_GRAD_OP": (partial(by_hand_fsdp, reshard=False), _fsdp("SHARD_GRAD_OP")),
    "fsdp HYBRID_SHARD": (partial(by_hand_fsdp, reshard=True, replicas=2), _fsdp("HYBRID_SHARD", data=2)),
    "tensor, of the MLPs": (by_hand_tensor, _TENSOR),
    "ZeRO-1": (partial(by_hand_zero, stage=1), _zero(1)),
    "ZeRO-2": (partial(by_hand_zero, stage=2), _zero(2)),
    "ZeRO-3": (partial(by_hand_zero, stage=3), _zero(3)),
}


def train(name: str, steps: int) -> dict[str, float]:
    """One round of one contestant (`ddp by hand`, `ddp`): microseconds a step of the first rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    strategy = name.removesuffix(" by hand")
    by_hand, parallel = PAIRS[strategy]
    torch.manual_seed(0)
    model = WORK.model()
    watch = model.watch
    data = WORK.data(steps * WORK.batch * ranks())
    with tempfile.TemporaryDirectory() as folder:
        task = Task(WORK, model, data, steps, folder)
        if strategy == name:
            under_lockstep(task, parallel)
        else:
            dist.init_process_group("gloo")
            by_hand(task)
            dist.barrier()
    assert len(watch.times) == steps, f"{len(watch.times)} forwards in {steps} steps"
    return {"microseconds": watch.microseconds(WORK.warm_up, steps - 1)}

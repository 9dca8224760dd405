"""The contestants of step_overhead.py: each trains as its own documentation shows.

Everything that takes time and is not part of training is turned off for the others, and on for Lockstep. All take the
same samples in the same order, fp32, the same fused AdamW, and clip at the same norm; peers read batches from torch's
DataLoader, their default. Each returns the trained module.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from step_work import CLIP_NORM, WEIGHT_DECAY, Rows, Work, decoded, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass(frozen=True)
class Task:
    """The task of a contestant.

    Attributes:
        model: Trained in place.
        data: Inputs and targets, as many samples as all ranks need for all steps.
        folder: For the files that it writes.
    """

    work: Work
    model: nn.Module
    data: tuple[Tensor, Tensor]
    steps: int
    folder: str

    @property
    def dataset(self) -> Dataset[Any]:
        return self.work.dataset(*self.data)


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch, which has them by name or in order."""
    return batch.values() if isinstance(batch, Mapping) else batch


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def adamw(task: Task, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(task.model.parameters(), lr=task.work.rate, weight_decay=WEIGHT_DECAY, fused=fused or None)


def loader(task: Task) -> DataLoader[Any]:
    """Return a loader for contestants that shard it among the ranks themselves."""
    return DataLoader(task.dataset, batch_size=task.work.batch)


def loader_of_rank(task: Task) -> DataLoader[Any]:
    dataset = task.dataset
    sampler = DistributedSampler(dataset, ranks(), rank(), shuffle=False) if ranks() > 1 else None
    return DataLoader(dataset, batch_size=task.work.batch, sampler=sampler)


# --- plain PyTorch ------------------------------------------------------------------------------------------------


def plain(task: Task) -> None:
    """Train in a loop as a good engineer writes it; differences and ratios are relative to this one."""
    _plain(task, adamw(task))


def plain_default(task: Task) -> None:
    """Train in the same loop with AdamW's default options."""
    _plain(task, adamw(task, fused=False))


def _plain(task: Task, optimizer: torch.optim.Optimizer) -> None:
    with _joined():
        module = DistributedDataParallel(task.model) if ranks() > 1 else task.model
        for batch in loader_of_rank(task):
            x, y = pair(batch)
            optimizer.zero_grad()
            loss_of(module(x), y).backward()
            clip_grad_norm_(module.parameters(), CLIP_NORM)
            optimizer.step()
        del module  # before its group: torch 2.13 hangs now and then if DDP's reducer is the last to hold it


def plain_by_hand(task: Task) -> None:
    """Train without a DataLoader: each batch is one gather, and DDP's buckets are the gradients."""
    x, y = decoded(task.data[0]), task.data[1]
    order = torch.arange(len(y)).view(task.steps, ranks(), task.work.batch)[:, rank()].contiguous()
    parameters, optimizer = list(task.model.parameters()), adamw(task)
    with _joined():
        module = DistributedDataParallel(task.model, gradient_as_bucket_view=True) if ranks() > 1 else task.model
        for rows in order:
            loss_of(module(x.index_select(0, rows)), y.index_select(0, rows)).backward()
            clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        del module


@contextmanager
def _joined() -> Iterator[None]:
    if ranks() == 1:
        yield
        return
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


# --- Lockstep -----------------------------------------------------------------------------------------------------


def lockstep(task: Task) -> None:
    """`lockstep.train` with all that it does by default: guard, metrics.jsonl, TensorBoard, the run's folder."""
    import lockstep

    config = _lockstep_config(task)
    config["monitor"] = {"every": 10, "tensorboard": True, "progress": "none"}
    config["run"]["folder"] = os.path.join(task.folder, "run")
    lockstep.train(config, model=task.model, train_dataset=task.dataset)


def lockstep_own_loop(task: Task) -> None:
    """Train in an own loop over a session: the same updates with their guard, no files."""
    import lockstep

    with lockstep.session(_lockstep_config(task), model=task.model, train_dataset=task.dataset) as session:
        for batch in session.batches():
            session.accumulate(batch)
            session.commit()


def _lockstep_config(task: Task) -> dict[str, Any]:
    return {
        "objective": {"kind": task.work.objective},
        "data": {"shuffle": False},
        "batch": {"global_size": task.work.batch * ranks()},
        "optim": {"lr": task.work.rate, "weight_decay": WEIGHT_DECAY, "decay": "all", "clip_norm": CLIP_NORM},
        "schedule": {"kind": "constant"},
        "precision": {"compute": "fp32"},
        "run": {"steps": task.steps},
    }


# --- peers --------------------------------------------------------------------------------------------------------


def accelerate(task: Task) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    module, optimizer, batches = accelerator.prepare(task.model, adamw(task), loader(task))
    for batch in batches:
        x, y = pair(batch)
        optimizer.zero_grad()
        accelerator.backward(loss_of(module(x), y))
        accelerator.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
    accelerator.end_training()


def fabric(task: Task) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=ranks(), strategy="ddp" if ranks() > 1 else "auto")
    fabric.launch()
    module, optimizer = fabric.setup(task.model, adamw(task))
    for batch in fabric.setup_dataloaders(loader(task)):
        x, y = pair(batch)
        optimizer.zero_grad()
        fabric.backward(loss_of(module(x), y))
        fabric.clip_gradients(module, optimizer, max_norm=CLIP_NORM)
        optimizer.step()


def lightning(task: Task) -> None:
    """Train without logger, checkpoints, progress bar and summary."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            x, y = pair(batch)
            return loss_of(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(task)

    trainer = Trainer(
        accelerator="cpu",
        devices=ranks(),
        strategy="ddp" if ranks() > 1 else "auto",
        max_epochs=1,
        gradient_clip_val=CLIP_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # its own shuffles
    )
    trainer.fit(Module(), loader_of_rank(task))


def hugging_face(task: Task) -> None:
    """Train without logs, checkpoints and progress bar."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=task.folder,
        per_device_train_batch_size=task.work.batch,
        num_train_epochs=1,
        learning_rate=task.work.rate,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_NORM,
        train_sampling_strategy="sequential",
        use_cpu=True,
        ddp_backend="gloo" if ranks() > 1 else None,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model, data = WithLoss(task.model), Rows(*task.data)
    Trainer(model, arguments, train_dataset=data, optimizers=(adamw(task), None)).train()


class WithLoss(nn.Module):
    """The model in the form that Trainer expects: it returns a loss if it gets labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(x)
        return {"loss": loss_of(logits, labels), "logits": logits}


def deepspeed(task: Task) -> None:
    """ZeRO stage 0, which is plain data parallelism."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": task.work.batch,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": {"stage": 0},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=task.model, optimizer=adamw(task), config=config)
    for batch in loader_of_rank(task):
        x, y = pair(batch)
        engine.backward(loss_of(engine(x), y))
        engine.step()


REFERENCE = "plain loop"
CONTESTANTS: dict[str, Callable[[Task], None]] = {
    "plain loop, default AdamW": plain_default,
    REFERENCE: plain,
    "plain loop by hand": plain_by_hand,
    "Lockstep": lockstep,
    "Lockstep, own loop": lockstep_own_loop,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "HF Trainer": hugging_face,
    "Lightning": lightning,
    "DeepSpeed": deepspeed,
}


def train(name: str, work: Work, steps: int) -> dict[str, float]:
    """Run one round of a contestant; return microseconds per step and the final loss on the first 1,024 samples."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    model = work.model()
    x, y = work.data(steps * work.batch * ranks())
    with tempfile.TemporaryDirectory() as folder:
        CONTESTANTS[name](Task(work, model, (x, y), steps, folder))
    assert len(model.watch.times) == steps, f"{len(model.watch.times)} forwards in {steps} steps"
    microseconds = model.watch.microseconds(min(work.warm_up, steps // 2), steps - 1)
    with torch.no_grad():
        return {"microseconds": microseconds, "loss": loss_of(model(decoded(x[:1024])), y[:1024]).item()}

"""The contestants of gpu_steps.py: the same module, samples, order, bf16 autocast and fused AdamW on GPUs.

The stopwatch is in the module: it waits for the GPU at the first and at the last timed forward alone. Peers run with
logs, checkpoints and progress bars off; Lockstep runs as it comes.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from step_loops import Rows, WithLoss
from step_work import CLIP_NORM, WEIGHT_DECAY, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass(frozen=True)
class Work:
    """A model and its batches.

    Attributes:
        decoder: layers, width and heads of the decoder.
        batch: Samples of a rank and step.
        checkpointed: Whether blocks are computed again in the backward.
    """

    title: str
    decoder: tuple[int, int, int]
    length: int
    batch: int
    steps: int
    warm_up: int
    vocabulary: int = 50_304

    def module(self) -> nn.Module:
        from step_work import GPT

        layers, width, heads = self.decoder
        return GPT(layers, width, heads, self.length, self.vocabulary)


WORKS = {
    "host": Work("a decoder so small that the host sets the pace", (4, 96, 4), 256, 16, 300, 50, 256),
    "gpt2": Work("GPT-2 (124M), 16 x 1,024 tokens", (12, 768, 12), 1024, 16, 60, 15),
    "gpt2-large": Work("GPT-2 Large (774M), 4 x 1,024 tokens", (36, 1280, 20), 1024, 4, 40, 10),
}


class Timed(nn.Module):
    """The module with its stopwatch: microseconds of a step, and allocated bytes at the peak of those timed."""

    def __init__(self, module: nn.Module, work: Work) -> None:
        super().__init__()
        self.module = module
        self.work = work
        self.calls = self.held = 0
        self.began = self.microseconds = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        if self.calls in (self.work.warm_up, self.work.steps - 1):
            torch.cuda.synchronize()
            now = time.perf_counter()
            if self.calls == self.work.warm_up:
                torch.cuda.reset_peak_memory_stats()
                self.began = now
            else:
                self.held = torch.cuda.max_memory_allocated()
                self.microseconds = (now - self.began) / (self.work.steps - 1 - self.work.warm_up) * 1e6
        self.calls += 1
        return self.module(tokens)


@dataclass(frozen=True)
class Task:
    """The task of a contestant.

    Attributes:
        data: Tokens and targets [samples, length], as many as all ranks need for all steps.
        folder: For the files that it writes.
    """

    work: Work
    model: Timed
    data: tuple[Tensor, Tensor]
    folder: str


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=WEIGHT_DECAY, fused=True)


def batches_of_rank(task: Task) -> DataLoader[Any]:
    dataset = TensorDataset(*task.data)
    sampler = DistributedSampler(dataset, shuffle=False) if ranks() > 1 else None
    return DataLoader(dataset, task.work.batch, sampler=sampler, pin_memory=True, num_workers=1)


def plain(task: Task) -> None:
    """Train in a loop as a good engineer writes it; ratios are relative to this one."""
    if ranks() > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    model = task.model.cuda()
    module = DistributedDataParallel(model, gradient_as_bucket_view=True) if ranks() > 1 else model
    optimizer = adamw(model)
    for tokens, targets in batches_of_rank(task):
        tokens, targets = tokens.cuda(non_blocking=True), targets.cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(module(tokens), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    del module
    if ranks() > 1:
        dist.destroy_process_group()


def config_of(work: Work, ranks: int, strategy: str | None) -> dict[str, Any]:
    return {
        "objective": {"kind": "next-token"},
        "data": {"shuffle": False},
        "batch": {"global_size": work.batch * ranks, "micro_size": work.batch},
        "optim": {"lr": 3e-4, "weight_decay": WEIGHT_DECAY, "decay": "all", "clip_norm": CLIP_NORM},
        "schedule": {"kind": "constant"},
        "precision": {"compute": "bf16"},
        "parallel": {"strategy": strategy or ("ddp" if ranks > 1 else "single")},
        "run": {"steps": work.steps},
    }


def lockstep(task: Task, strategy: str | None = None) -> None:
    """`lockstep.train` with all that it does by default: guard, metrics.jsonl, TensorBoard, the run's folder."""
    import lockstep

    config = config_of(task.work, ranks(), strategy)
    config["launch"] = {"device": "cuda"}
    config["monitor"] = {"every": 10, "tensorboard": True, "progress": "none"}
    config["run"]["folder"] = os.path.join(task.folder, "run")
    lockstep.train(config, model=task.model, train_dataset=TensorDataset(*task.data))


def predicted(work: Work, gpu: str, ranks: int) -> dict[str, float]:
    """Return the microseconds and bytes of Lockstep's step as `lockstep plan --gpus` predicts them, without a GPU."""
    import lockstep

    samples = torch.zeros(work.batch * ranks * work.steps, work.length, dtype=torch.long)
    objects = {"model": work.module(), "train_dataset": TensorDataset(samples, samples)}
    memory = lockstep.estimate(config_of(work, ranks, None), gpus=f"{gpu}:{ranks}", **objects).memory
    assert memory.time is not None, memory.note
    assert memory.peak is not None, memory.note
    return {"microseconds": memory.time.seconds * 1e6, "bytes": float(memory.peak.bytes)}


def lockstep_ddp(task: Task) -> None:
    lockstep(task, "ddp")


def lockstep_fsdp(task: Task) -> None:
    lockstep(task, "fsdp")


def accelerate(task: Task) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    loader = DataLoader(TensorDataset(*task.data), task.work.batch, pin_memory=True, num_workers=1)
    module, optimizer, batches = accelerator.prepare(task.model, adamw(task.model.cuda()), loader)
    for tokens, targets in batches:
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = loss_of(module(tokens), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
    accelerator.end_training()


def lightning(task: Task) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
            tokens, targets = batch
            return loss_of(self.model(tokens), targets)

        def configure_gradient_clipping(self, optimizer: Any, *how: Any, **named: Any) -> None:
            clip_grad_norm_(self.parameters(), CLIP_NORM)  # its own refuses a fused optimizer under bf16

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(task.model)

    Trainer(
        accelerator="gpu",
        devices=ranks(),
        strategy="ddp" if ranks() > 1 else "auto",
        precision="bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(Module(), batches_of_rank(task))


def hugging_face(task: Task) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=task.folder,
        per_device_train_batch_size=task.work.batch,
        num_train_epochs=1,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_NORM,
        train_sampling_strategy="sequential",
        bf16=True,
        dataloader_num_workers=1,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = WithLoss(task.model).cuda()
    Trainer(model, arguments, train_dataset=Rows(*task.data), optimizers=(adamw(model), None)).train()


REFERENCE = "plain loop"
CONTESTANTS: dict[str, Callable[[Task], None]] = {
    REFERENCE: plain,
    "Lockstep": lockstep,
    "Lockstep, fsdp": lockstep_fsdp,
    "Accelerate": accelerate,
    "HF Trainer": hugging_face,
    "Lightning": lightning,
}


def train(name: str, work: Work) -> dict[str, float]:
    """Run one round of a contestant; return microseconds a step, allocated bytes at the peak, and the final loss."""
    from step_work import text

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(0)
    model = Timed(work.module(), work)
    data = text(min(work.steps * work.batch * ranks(), 2000), work.length)
    repeats = -(-work.steps * work.batch * ranks() // len(data[0]))
    tokens, targets = (part.repeat(repeats, 1)[: work.steps * work.batch * ranks()] for part in data)
    with tempfile.TemporaryDirectory() as folder:
        CONTESTANTS[name](Task(work, model, (tokens, targets), folder))
    assert model.calls == work.steps, f"{model.calls} forwards in {work.steps} steps"
    held = float(model.held)
    with torch.no_grad():
        x, y = tokens[:4].cuda(), targets[:4].cuda()
        return {"microseconds": model.microseconds, "bytes": held, "loss": loss_of(model.module.cuda()(x), y).item()}

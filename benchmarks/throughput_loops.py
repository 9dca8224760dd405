"""The contestants of throughput.py: the default recipe's model, data, batch, optimizer and schedule under each.

    out of the box    fp32, samples one by one through torch's collate function, the trainer's own defaults for the rest
    tuned             bf16 autocast, fused AdamW, a batch fetched as one gather, no logs, checkpoints or progress bar

All of them train Lockstep's Transformer from the same first weights. Peers and the plain loop run under torchrun.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rounds import DidNotRun
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lockstep.config.loading import load
from lockstep.config.recipes import resolve_recipe
from lockstep.config.schema import Config
from lockstep.core.protocols import Source
from lockstep.data.order import Indices, SampleOrder
from lockstep.data.sources import open_source
from lockstep.models.build import build_model
from lockstep.optim.groups import parameter_groups
from lockstep.plan.schedule import learning_rate

RANKS = 2
WARM_UP = 40  # steps that are not timed
HELD_OUT = 512  # samples that the trained models are compared on


# --- what all of them train ---------------------------------------------------------------------------------------


class Timed(nn.Module):
    """The model, noting when each of its forwards began."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.times: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.times.append(time.perf_counter())
        return self.model(tokens)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over targets, in fp32."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Task:
    """The task of a contestant under torchrun.

    Attributes:
        samples: As many as all steps need, in the order of Lockstep's run.
        share: Samples per rank and step.
    """

    config: Config
    samples: Gathered
    model: Timed
    steps: int
    folder: str
    share: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", self.config.batch.global_size // RANKS)

    def optimizer(self, **options: Any) -> torch.optim.Optimizer:
        """Return AdamW with the recipe's groups: only matrices decay."""
        groups = parameter_groups(self.model.model.named_parameters(), self.config.optim)
        settings = self.config.optim
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, **options)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Return the recipe's schedule."""
        optim, schedule, steps = self.config.optim, self.config.schedule, self.steps
        return LambdaLR(
            optimizer, lambda step: learning_rate(optim, schedule, min(step / steps, 1.0), step, steps) / optim.lr
        )


class Gathered(Dataset[Any]):
    """A dataset that fetches a batch as one gather, without a collate function. Samples are in the order `indices`."""

    def __init__(self, source: Source, indices: Indices) -> None:
        self.source = source
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        batch = self.source.fetch(self.indices[indices])
        return batch.inputs["tokens"], batch.targets


class OneByOne(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of single samples, as in tutorials."""

    def __init__(self, whole: Gathered) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self.whole.__getitems__([index])
        return tokens[0], targets[0]


def as_it_is(batch: Any) -> Any:
    return batch


def by_name(batch: Any) -> dict[str, Tensor]:
    """Return the inputs of Trainer's model, from a gathered batch or from single samples."""
    if isinstance(batch, list):
        batch = torch.utils.data.default_collate(batch)
    tokens, targets = batch
    return {"tokens": tokens, "labels": targets}


class WithLoss(nn.Module):
    """The model in the form that Trainer expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(tokens)
        return {"loss": loss_of(logits, labels), "logits": logits}


def of_rank(task: Task, dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """Every other sample, so that the ranks' batches together are Lockstep's global batch."""
    rank = int(os.environ["RANK"])
    sampler = DistributedSampler(dataset, RANKS, rank, shuffle=False)
    return DataLoader(dataset, task.share, sampler=sampler, **options)


# --- contestants under torchrun -----------------------------------------------------------------------------------


def plain(task: Task) -> None:
    """Tuned like the tuned ones."""
    dist.init_process_group("gloo")
    batches = of_rank(task, task.samples, collate_fn=as_it_is)
    module = DistributedDataParallel(task.model, gradient_as_bucket_view=True)
    optimizer = task.optimizer(fused=True)
    schedule = task.schedule(optimizer)
    for tokens, targets in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(module(tokens), targets)
        loss.backward()
        clip_grad_norm_(module.parameters(), task.config.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    del module  # before its group: torch 2.13 hangs now and then if DDP's reducer is the last to hold it
    dist.destroy_process_group()


def hugging_face(task: Task) -> None:
    _hugging_face(task, OneByOne(task.samples), task.optimizer())


def hugging_face_tuned(task: Task) -> None:
    quiet = {"logging_strategy": "no", "report_to": "none", "disable_tqdm": True}
    _hugging_face(task, task.samples, task.optimizer(fused=True), bf16=True, **quiet)


def _hugging_face(task: Task, dataset: Dataset[Any], optimizer: torch.optim.Optimizer, **options: Any) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=task.folder,
        per_device_train_batch_size=task.share,
        max_steps=task.steps,
        max_grad_norm=task.config.optim.clip_norm,
        use_cpu=True,
        ddp_backend="gloo",
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        save_strategy="no",  # it refuses to save a model of another library whose head is tied
        **options,
    )
    Trainer(
        WithLoss(task.model),
        arguments,
        train_dataset=dataset,
        data_collator=by_name,
        optimizers=(optimizer, task.schedule(optimizer)),
    ).train()


def lightning(task: Task) -> None:
    batches = of_rank(task, OneByOne(task.samples))
    _lightning(task, batches, task.optimizer(), tuned=False)


def lightning_tuned(task: Task) -> None:
    batches = of_rank(task, task.samples, collate_fn=as_it_is)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    _lightning(task, batches, task.optimizer(fused=True), tuned=True, precision="bf16-mixed", **quiet)


def _lightning(
    task: Task, batches: DataLoader[Any], optimizer: torch.optim.Optimizer, *, tuned: bool, **options: Any
) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
            tokens, targets = batch
            loss = loss_of(self.model(tokens), targets)
            if not tuned:
                self.log("train_loss", loss)
            return loss

        def configure_gradient_clipping(self, optimizer: Any, *how: Any, **named: Any) -> None:
            if tuned:  # its own refuses a fused optimizer under bf16
                clip_grad_norm_(self.parameters(), task.config.optim.clip_norm)
            else:
                super().configure_gradient_clipping(optimizer, *how, **named)

        def configure_optimizers(self) -> dict[str, Any]:
            schedule = {"scheduler": task.schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_steps=task.steps,
        gradient_clip_val=None if tuned else task.config.optim.clip_norm,
        default_root_dir=task.folder,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(Module(), batches)


LOCKSTEP = "Lockstep"
UNDER_TORCHRUN: dict[str, Callable[[Task], None]] = {
    "plain loop, tuned": plain,
    "HF Trainer, tuned": hugging_face_tuned,
    "Lightning, tuned": lightning_tuned,
    "HF Trainer, out of the box": hugging_face,
    "Lightning, out of the box": lightning,
}
CONTESTANTS = (LOCKSTEP, *UNDER_TORCHRUN)


def train(name: str, steps: int) -> dict[str, float]:
    """One round of one contestant under torchrun."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    config = load([resolve_recipe("stdlib-lm").path]).config
    source = open_source(config.data.train, task=None, tokenizer=None)
    torch.manual_seed(config.run.seed)
    model = Timed(build_model(config.model, source.facts, config.run.seed))
    order = SampleOrder(source.facts.samples, config.run.seed).indices(0, np.arange(steps * config.batch.global_size))
    with tempfile.TemporaryDirectory() as folder:
        UNDER_TORCHRUN[name](Task(config, Gathered(source, order), model, steps, folder))
    times = model.times
    assert len(times) == steps, f"{len(times)} forwards in {steps} steps"
    warm_up = min(WARM_UP, steps // 2)
    tokens = config.batch.global_size * config.data.train.length * (steps - 1 - warm_up)
    rate = tokens / (times[steps - 1] - times[warm_up])
    bits = held_out_bits(config, model.model) if os.environ["RANK"] == "0" else 0.0
    return {"tokens_per_second": rate, "bits_per_byte": bits}


@torch.no_grad()
def held_out_bits(config: Config, model: nn.Module) -> float:
    """Return the bits per byte on the first samples of the recipe's held-out set."""
    section = config.data.evaluation["held-out"].model_copy(update={"samples": HELD_OUT})
    whole = Gathered(open_source(section, task=None, tokenizer=None), np.arange(HELD_OUT))
    losses = []
    for first in range(0, HELD_OUT, 64):
        tokens, targets = whole.__getitems__(list(range(first, first + 64)))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.eval()(tokens)
        losses.append(loss_of(logits, targets).item())
    return sum(losses) / len(losses) / 0.6931471805599453


# --- Lockstep -----------------------------------------------------------------------------------------------------


def lockstep(steps: int) -> dict[str, float]:
    """Run `make train` for as many steps as the others, with one evaluation afterwards and everything it writes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [str(Path(sys.executable).parent / "lockstep"), "train", "stdlib-lm", "--ranks", str(RANKS)]
        overrides = {
            "run.steps": steps,
            "run.folder": run,
            "evaluation.every": "null",
            "data.evaluation.held-out.samples": HELD_OUT,
        }
        command += [f"--{key}={value}" for key, value in overrides.items()]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise DidNotRun((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((run / "summary.json").read_text())
    updates = [line for line in lines if "grad_norm" in line and line["step"] >= min(WARM_UP, steps // 2)]
    first, last = updates[0], updates[-1]
    rate = (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])
    return {"tokens_per_second": rate, "bits_per_byte": summary["evaluation"]["held-out"]["bits_per_byte"]}

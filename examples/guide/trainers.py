"""One thin class for each mode, with the methods that guides give their trainers; Lockstep does the work behind them.

    trainer = FSDPTrainer(config, model=make_model, train_dataset=train, eval_dataset=test, objective=loss)
    trainer.train()                      # all epochs: train_epoch, evaluate, save_checkpoint
    trainer.cleanup()

The methods are the same under every mode, and so is the run: only `strategy` differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.utils.data import Dataset

import lockstep


class _Trainer:
    strategy = "single"

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        model: nn.Module | Callable[[], nn.Module],
        train_dataset: Dataset[Any],
        eval_dataset: Dataset[Any],
        objective: object = None,
        checkpoint_dir: str | None = None,
    ) -> None:
        """Join the other ranks, shard the model, and resume from the newest checkpoint in `checkpoint_dir`, if any."""
        parallel = {**config.get("parallel", {}), "strategy": self.strategy}
        self._opened = ExitStack()
        self.session = self._opened.enter_context(
            lockstep.session(
                {**config, "parallel": parallel},
                model=model,
                train_dataset=train_dataset,
                eval_datasets={"eval": eval_dataset},
                objective=objective,
            )
        )
        self._samples = len(train_dataset)  # type: ignore[arg-type]
        self._checkpoints = self.session.checkpoints(checkpoint_dir) if checkpoint_dir is not None else None
        self._reports = iter(self.session)

    @property
    def effective_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks and micro-batches."""
        return self.session.batch_plan.global_size

    def train(self) -> dict[str, float]:
        """Train the epochs that are left, each followed by an evaluation and a checkpoint; return the last metrics."""
        metrics: dict[str, float] = {}
        while not self.session.finished:
            loss = self.train_epoch()
            metrics = self.evaluate()
            self.log_metrics({"train/loss": loss, **metrics})
            self.save_checkpoint()
        return metrics

    def train_epoch(self) -> float:
        """Train to the end of the epoch; return the mean loss of its steps, the same on all ranks."""
        losses = []
        while not losses or self.session.progress.samples % self._samples:
            losses.append(self.train_step().loss)
        return sum(losses) / len(losses)

    def train_step(self) -> lockstep.extend.StepReport:
        """Make one optimizer step: forwards and backwards of its micro-batches, reduction, clipping, the update."""
        return next(self._reports)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics over the evaluation set, exact over all ranks: each sample counts once."""
        [report] = self.session.evaluate()
        return {f"eval/{name}": value for name, value in report.metrics.items()}

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Print metrics on the main process; replace this by your tracker."""
        if self.session.is_main_process:
            print(f"step {self.session.progress.steps}", dict(metrics), flush=True)

    def save_checkpoint(self) -> None:
        """Save model, optimizer and the position in the data; training continues while the files are written."""
        if self._checkpoints is not None:
            self._checkpoints.save()

    def cleanup(self) -> None:
        """Wait for the last save, and leave the process group."""
        with self._opened:
            if self._checkpoints is not None:
                self._checkpoints.finish()


class DDPTrainer(_Trainer):
    """Every rank holds the model; gradients are averaged."""

    strategy = "ddp"


class FSDPTrainer(_Trainer):
    """Every rank holds a shard of parameters, gradients and optimizer state."""

    strategy = "fsdp"


class DeepSpeedTrainer(_Trainer):
    """DeepSpeed's ZeRO: `config["parallel"]["deepspeed"]` has `zero_stage`, or `config`, a DeepSpeed JSON."""

    strategy = "deepspeed"

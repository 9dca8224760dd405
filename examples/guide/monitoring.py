"""Watch a loop: GPUs, throughput of all ranks, metrics of the model, and a trace of torch's profiler.

torchrun --nproc-per-node 2 monitoring.py [FOLDER OF THE TRACE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from own_trainer import CONFIG, digits, make_model
from torch import Tensor, nn

import lockstep

EVERY, TRACED_FROM, TRACED = 10, 12, 3


class Accuracy(nn.CrossEntropyLoss):
    """A loss that logs: `lockstep.log` takes what a model, a loss or a loop wants to have recorded."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        right = (logits.argmax(-1) == labels).sum()
        lockstep.log.mean("train accuracy", right, len(labels))
        return super().forward(logits, labels)


def main(folder: Path) -> None:
    train, _ = digits()
    speed = lockstep.loops.ThroughputTracker(window=EVERY)
    trace = torch.profiler.profile(
        activities=torch.profiler.supported_activities(),
        schedule=torch.profiler.schedule(wait=TRACED_FROM - 1, warmup=1, active=TRACED, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(folder / f"rank{session.rank}.json")),
    )
    opened = lockstep.session(CONFIG, model=make_model, train_dataset=train, objective=Accuracy(reduction="sum"))
    with opened as session, lockstep.loops.GPUMonitor(seconds=0.5) as gpus, trace:
        logger = lockstep.loops.rank_logger("digits", folder=folder, console=0)
        batch = session.batch_plan
        speed.start()
        for report in session:
            speed.step(batch.micro_size * batch.accumulation)
            trace.step()
            if report.step % EVERY == 0:
                total = lockstep.loops.reduce({"samples/s": speed.average().samples_per_second}, how="sum")
                logged = session.logged().numbers()
                logger.info(
                    "step %d: loss %.4f, %s, %.0f samples/s", report.step, report.loss, logged, total["samples/s"]
                )
        logger.info("%s", gpus)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "trace")
    target.mkdir(parents=True, exist_ok=True)
    main(target)

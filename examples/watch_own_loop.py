"""A loop that watches itself: a logger per rank, throughput, metrics of all ranks, histograms, GPUs.

torchrun --nproc-per-node 2 examples/watch_own_loop.py plain      a plain PyTorch loop
torchrun --nproc-per-node 2 examples/watch_own_loop.py session    the loop of a session
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from squares import Curve, SquaredError, points
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import lockstep

EPOCHS = 3


def plain_loop() -> Iterator[tuple[Tensor, int, torch.nn.Module]]:
    """Train with DDP; yield each step's mean loss, its number of samples and the model."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Curve())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = points(990)
    sampler = DistributedSampler(data)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=25, sampler=sampler):
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach(), len(inputs), model
    dist.destroy_process_group()


def session_loop() -> Iterator[tuple[Tensor, int, torch.nn.Module]]:
    """Train with Lockstep; yield the same."""
    config = {"batch": {"global_size": 50}, "optim": {"lr": 0.01}, "run": {"epochs": EPOCHS}}
    model = Curve()
    with lockstep.session(config, model=model, train_dataset=points(990), objective=SquaredError()) as session:
        for report in session:
            yield torch.tensor(report.loss), 25, model


def main(kind: str) -> None:
    tracker = lockstep.loops.ThroughputTracker(window=20)
    with lockstep.loops.GPUMonitor(seconds=0.5) as gpus:
        for step, (loss, samples, model) in enumerate(plain_loop() if kind == "plain" else session_loop(), start=1):
            if step == 1:  # the process group exists: loggers know their rank
                log = lockstep.loops.rank_logger("curve", folder="logs", console=0)
                settings = lockstep.loops.broadcast({"every": 20})
                tracker.start()
                continue
            tracker.step(samples)
            if step % settings["every"]:
                continue
            mean = lockstep.loops.reduce({"loss": loss}, weight=samples)
            speed = lockstep.loops.reduce({"samples/s": tracker.average().samples_per_second}, how="sum")
            slowest = lockstep.loops.reduce({"step": tracker.percentiles(0.95)[0.95]}, how="max")
            weights = lockstep.loops.merged_histogram(torch.cat([p.detach().flatten() for p in model.parameters()]))
            log.info("step %d: loss %.4f, %.0f samples/s", step, mean["loss"], speed["samples/s"])
            log.info("95 %% of steps take less than %.4f s on each rank", slowest["step"])
            log.info("%d weights in [%.3f, %.3f]", weights.count, weights.low, weights.high)
            log.info("losses of the ranks: %s", lockstep.loops.gather(round(float(loss), 4)))
            tracker.start()  # what was computed here belongs to no step
    log.info("%s", gpus)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "plain")

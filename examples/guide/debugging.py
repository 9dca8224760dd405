"""Answer the questions that come first when ranks disagree, hang or slow down.

torchrun --nproc-per-node 2 debugging.py

    who is where                 a line for each rank: host, process, device, memory
    are the copies equal         checksums of the parameters, compared over ranks
    what does a step cost        the time of each rank's steps; the slowest is named
    who waits for whom           `kill -USR1`, py-spy and `lockstep doctor` need no script: see the README
"""

from __future__ import annotations

import os
import socket

import torch
from own_trainer import CONFIG, digits, make_model
from torch import nn

import lockstep


def show_ranks() -> None:
    """Print where each rank runs."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    own = f"{socket.gethostname()}, pid {os.getpid()}, {device}, {torch.get_num_threads()} threads"
    for rank, line in enumerate(lockstep.loops.gather(own)):
        lockstep.loops.print_once(f"rank {rank}: {line}")


def differing_parameters(model: nn.Module) -> list[str]:
    """Return the parameters whose copies aren't equal on all ranks; for a model that every rank holds (DDP)."""
    sums = {name: value.detach().double().sum().item() for name, value in model.named_parameters()}
    first, *others = lockstep.loops.gather(sums)
    return [name for name in first if any(other[name] != first[name] for other in others)]


def slowest_rank(seconds: float) -> str:
    """Return which rank's steps took longest, and how much longer than those of the fastest."""
    of_ranks = lockstep.loops.gather(seconds)
    slowest = max(range(len(of_ranks)), key=of_ranks.__getitem__)
    return f"rank {slowest}: {1000 * of_ranks[slowest]:.2f} ms a step, the fastest {1000 * min(of_ranks):.2f} ms"


def main() -> None:
    model = make_model()
    speed = lockstep.loops.ThroughputTracker(window=20)
    config = {**CONFIG, "parallel": {"strategy": "ddp"}}
    with lockstep.session(config, model=model, train_dataset=digits()[0], objective=nn.CrossEntropyLoss()) as session:
        show_ranks()
        speed.start()
        for report in session:
            speed.step(session.batch_plan.micro_size)
            if report.step == 20:
                break
        lockstep.loops.print_once(f"parameters that differ: {differing_parameters(model) or 'none'}")
        lockstep.loops.print_once(slowest_rank(speed.average().step_seconds))


if __name__ == "__main__":
    main()

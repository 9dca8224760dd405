"""A custom training loop. The same file runs on several ranks under torchrun.

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
"""

from __future__ import annotations

from squares import Curve, SquaredError, points

import lockstep

CONFIG = {"precision": {"compute": "fp32"}, "batch": {"global_size": 50}, "optim": {"lr": 0.01}, "run": {"epochs": 5}}
HELD_OUT = {"sparse": points(101)}

with lockstep.session(
    CONFIG, model=Curve, train_dataset=points(), eval_datasets=HELD_OUT, objective=SquaredError()
) as session:
    for batch in session.batches():
        session.accumulate(batch)
        session.commit()
    reports = session.evaluate()
    lockstep.loops.print_once({report.name: report.metrics["loss"] for report in reports})

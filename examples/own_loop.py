"""The rooms of a run under a loop of one's own; on several ranks as it stands, under torchrun.

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
"""

from __future__ import annotations

from squares import Curve, SquaredError, points

import lockstep

CONFIG = {"batch": {"global_size": 50}, "optim": {"lr": 0.01}, "run": {"epochs": 5}}

with lockstep.session(
    CONFIG, model=Curve, dataset=points(), evaluation={"sparse": points(101)}, objective=SquaredError()
) as session:
    for batch in session.batches():
        session.accumulate(batch)
        session.commit()
    reports = session.evaluate()
    if session.rooms.world.rank == 0:
        print({report.name: report.metrics["loss"] for report in reports})

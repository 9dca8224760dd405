"""The training loop as a generator: it yields one report per update, and you decide when to stop."""

from __future__ import annotations

from squares import Curve, SquaredError, points

import lockstep

CONFIG = {"batch": {"global_size": 50}, "optim": {"lr": 0.01}, "run": {"epochs": 50}}

with lockstep.session(CONFIG, model=Curve, train_dataset=points(), objective=SquaredError()) as session:
    for report in session:
        if report.loss < 0.05:
            print(f"update {report.step}: loss {report.loss:.3f} after {report.samples} samples")
            break

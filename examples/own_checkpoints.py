"""A custom loop that saves checkpoints and resumes: stop it at any point, and start it again.

python examples/own_checkpoints.py FOLDER
"""

from __future__ import annotations

import random
import sys

from squares import Curve, SquaredError, points

import lockstep

CONFIG = {"batch": {"global_size": 50}, "optim": {"lr": 0.01}, "run": {"steps": 200}}

dice = random.Random(7)
lockstep.register_generator("dice", dice)  # your generator's state is saved and restored too

with lockstep.session(CONFIG, model=Curve, train_dataset=points(), objective=SquaredError()) as session:
    checkpoints = session.checkpoints(sys.argv[1])
    for report in session:
        if report.step % 50 == 0:
            checkpoints.save()  # returns at once; training continues during the write
    checkpoints.save()
    checkpoints.finish()  # waits until the last checkpoint is on disk
    lockstep.loops.print_once(f"update {session.progress.steps}, drawn {dice.random():.3f}")

"""Answers what `auto` takes for a run: `python -m lockstep.simulation.answering FOLDER`."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError
from lockstep.simulation import device
from lockstep.simulation.estimate import estimator_of
from lockstep.simulation.failing import Unpredictable
from lockstep.simulation.search import decide

if TYPE_CHECKING:
    from lockstep.assembly.deciding import Question
    from lockstep.plan.choosing import Decision


def answer(question: Question) -> Decision | str:
    """Return the decision, or why there is none."""
    try:
        estimator = estimator_of(question.config, question.ranks, question.memory, question.given, question.cluster)
        return decide(replace(estimator, device_type="cpu" if question.on_cpu else device.NAME))
    except (ConfigError, Unpredictable) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]


def main() -> None:
    folder = Path(sys.argv[1])
    question = pickle.loads((folder / "question").read_bytes())
    (folder / "answer").write_bytes(pickle.dumps(answer(question)))


if __name__ == "__main__":
    main()

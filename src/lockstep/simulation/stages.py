"""The peaks of a pipeline's stages: a process for each, because stages exchange objects before their first update.

python -m lockstep.simulation.stages FOLDER  -->  forks a process for the first rank of each stage
                                                  a store in the folder connects them
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import FileStore

from lockstep.core.errors import ConfigError
from lockstep.simulation.failing import Unpredictable, explained
from lockstep.simulation.groups import OtherRankFailed
from lockstep.simulation.memory import Peak
from lockstep.simulation.updates import peak_of_rank
from lockstep.training.deciding import ask_process

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.training.user_objects import UserObjects

_MODULE = "lockstep.simulation.stages"  # its classes are pickled by this name
_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Stages:
    """The ranks to simulate.

    Attributes:
        first: The first rank of each stage.
        stage_of: Of each rank.
    """

    config: Config
    given: UserObjects
    first: tuple[int, ...]
    stage_of: tuple[int, ...]
    device_type: str
    updates: int

    def simulated_by(self, rank: int) -> int:
        return self.first[self.stage_of[rank]]


def peaks_of_stages(stages: Stages) -> list[Peak]:
    """Return the peak of the first rank of each stage.

    Raises:
        ConfigError: The run would be refused.
        Unpredictable, NoAnswer: It can't be simulated.
    """
    made = ask_process(_MODULE, stages, _SECONDS)
    if isinstance(made, Unpredictable):
        raise made
    for peak in made:
        if isinstance(peak, ConfigError):
            raise peak
    return list(made)


def _simulate(stages: Stages, rank: int, folder: Path) -> Peak | ConfigError | Unpredictable | None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), len(stages.first))
    ranks, by = len(stages.stage_of), stages.simulated_by
    try:
        return peak_of_rank(
            stages.config,
            ranks,
            rank,
            stages.given,
            stages.updates,
            stages.device_type,
            store=store,
            simulated_by=by,
        )
    except ConfigError as error:
        return error
    except OtherRankFailed:
        return None
    except Exception as error:
        traceback.print_exc()
        return explained(error)


def main() -> None:
    folder = Path(sys.argv[1])
    stages: Stages = pickle.loads((folder / "question").read_bytes())
    children = {}
    for rank in stages.first:
        child = os.fork()
        if child == 0:
            (folder / f"{rank}").write_bytes(pickle.dumps(_simulate(stages, rank, folder)))
            os._exit(0)
        children[rank] = child
    for child in children.values():
        os.waitpid(child, 0)
    answers = [pickle.loads((folder / f"{rank}").read_bytes()) for rank in stages.first]
    reasons = [answer for answer in answers if isinstance(answer, Unpredictable)]
    made = [answer for answer in answers if answer is not None]
    (folder / "answer").write_bytes(pickle.dumps(reasons[0] if reasons else made))


if __name__ == "__main__":
    main()

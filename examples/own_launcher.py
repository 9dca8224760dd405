"""A launcher of your own: the batch queue `at` of this machine.

lockstep launch examples/own_launcher.py:AtQueue --start 22:00 train digits --ranks 2
"""

import re
import shlex
import subprocess
from pathlib import Path

from pydantic import BaseModel

import lockstep


class AtOptions(BaseModel, frozen=True):
    start: str = "now"
    """When the command starts, such as 22:00."""


class AtQueue(lockstep.extend.Launcher):
    options = AtOptions

    def plan(self, command: lockstep.extend.JobCommand, options: AtOptions) -> lockstep.extend.LaunchPlan:
        script = command.folder / "job.sh"
        line = shlex.join(["lockstep", *command.words])
        text = f"cd {shlex.quote(str(Path.cwd()))} && {line} >{shlex.quote(str(command.folder / 'output'))} 2>&1\n"
        return lockstep.extend.LaunchPlan({script: text}, (("at", "-f", str(script), options.start),))

    def submit(self, plan: lockstep.extend.LaunchPlan) -> str:
        for path, text in plan.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        done = subprocess.run(plan.commands[0], capture_output=True, text=True)
        job = re.search(r"job (\d+)", done.stderr)
        if job is None:
            raise lockstep.RunFailed(f"at refuses the job: {done.stderr.strip()}")
        return job[1]

    def status(self, job: lockstep.extend.LaunchedJob) -> lockstep.extend.JobStatus:
        queued = any(line.split()[0] == job.number for line in self._queue().splitlines())
        return lockstep.extend.JobStatus(
            f"job {job.number} is in the queue" if queued else f"job {job.number} has started"
        )

    def follow(self, job: lockstep.extend.LaunchedJob) -> int:
        raise lockstep.RunFailed("at reports no exit codes; see the file `output` in the folder of the job")

    def cancel(self, job: lockstep.extend.LaunchedJob) -> None:
        subprocess.run(["atrm", job.number], check=True)

    def _queue(self) -> str:
        return subprocess.run(["atq"], capture_output=True, text=True, check=True).stdout

"""Submit a sweep to a cluster and wait for it: `python examples/submit_from_python.py [WHERE]`."""

from __future__ import annotations

import sys

import lockstep


def main(where: str) -> int:
    job = lockstep.submit(
        where,
        ["train", "digits", "--ranks", 2, "run.folder=runs/rates"],
        sweep={"optim.lr": [0.1, 0.01]},
        nodes=2,
    )
    print(job.status().text)
    return job.follow()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "slurm"))

"""The table of failures: each kind's meaning, exit code, restarts and remedy.

Launchers, `lockstep doctor` and the docs read the columns; nothing reads a message.
"""

from __future__ import annotations

from enum import Enum

_MEND_SAMPLE = (
    "Mend the sample, or leave it out: lockstep train RUN data.leave_out='[[N, N]]'; data.bad_samples='{policy: skip}' "
    "leaves all such samples out. A sample of an evaluation set is mended, or removed from the set. Mended data may "
    "need --accept-changes."
)
_LESS_MEMORY = (
    "Lower batch.micro_size (the result stays the same), set memory.activation_checkpointing.mode: full, or shard with "
    "parallel.strategy: fsdp; lockstep plan shows what holds the memory."
)


class Retry(Enum):
    """Rules for starting ranks again after a failure, named as in `recovery.budgets`."""

    NEVER = "never"
    MEMORY = "memory"  # with smaller micro-batches, while there are any
    PROGRAM = "program"  # once at the same step: it may have been the host
    TRANSIENT = "transient"
    HANG = "hang"
    HOST = "host"
    ROLLBACK = "rollback"  # always: the ranks count these


class FailureKind(Enum):
    """The kind of a rank's or run's end.

    Attributes:
        exit_code: Of the process, and of the run if this kind is its cause.
        retry: Whether ranks restart.
        title: A few words for it.
        cause: Why it happens, in a sentence.
        remedy: What to do, in the imperative; empty if the message says it.
        weight: An end is explained by any end of a lower weight.
    """

    def __init__(
        self, title: str, cause: str = "", remedy: str = "", retry: Retry = Retry.NEVER, code: int = 1, weight: int = 0
    ) -> None:
        self.title, self.cause, self.remedy = title, cause, remedy
        self.retry, self.exit_code, self.weight = retry, code, weight

    DONE = ("done", "", "", Retry.NEVER, 0)
    PAUSED = ("stopped and saved", "A signal, or a person, stopped the run.", "", Retry.NEVER, 75, 1)
    STOPPED = ("stopped at once", "", "", Retry.TRANSIENT, 130)
    INTERRUPTED = ("stopped before training", "", "", Retry.NEVER, 130)
    ENDED = ("ended by the launcher", "", "", Retry.NEVER, 1, 4)
    CONFIG = ("refused", "The config, or something it refers to, can't be trained.", "", Retry.NEVER, 2)
    OTHER_DATA = (
        "checkpoint of other data",
        "The data, the model or the seed differ from the checkpoint's.",
        "Undo the change, or resume with it: lockstep train RUN --accept-changes; --fresh starts over.",
        Retry.NEVER,
        2,
    )
    WRONG = ("verification failed", "What was verified is wrong.", "", Retry.NEVER, 3)
    FAILED = ("failed", "Lockstep ended the run; the message says why.")
    DEVICE = (
        "connection, disk or device failed",
        "A connection, a disk, a driver or a GPU raised an error.",
        "Look at the host (dmesg, nvidia-smi -q) and its file servers, then resume: lockstep train RUN",
        Retry.TRANSIENT,
    )
    CRASHED = (
        "crash in native code",
        "A library crashed (SIGSEGV, SIGBUS, SIGILL), often one that was built for other versions.",
        "Run lockstep doctor for versions that don't fit, and read the stack in the rank's log.",
        Retry.TRANSIENT,
    )
    KILLED = (
        "a rank was killed",
        "The kernel (out of memory), a scheduler or a person ended the process with SIGKILL.",
        "Run dmesg on its host: if it has `Killed process`, memory ran out, so use fewer data workers or raise the "
        "job's limit; otherwise see what the scheduler recorded (sacct, kubectl describe pod).",
        Retry.TRANSIENT,
    )
    OUT_OF_MEMORY = (
        "out of memory",
        "The state, activations and logits of a rank are larger than its memory.",
        _LESS_MEMORY,
        Retry.MEMORY,
    )
    HOST_MEMORY = (
        "host out of memory",
        "The machine, its container or its job has no memory left; data workers and caches count, too.",
        "Use fewer data workers and a smaller batch.micro_size, or raise the limit of the container or the job.",
        Retry.MEMORY,
    )
    WORKER_DIED = (
        "data worker died",
        "A process that loads data crashed, often in the dataset.",
        f"{_MEND_SAMPLE} If the message has no sample, set data.loader.workers: 0 to see the error.",
    )
    WORKER_KILLED = (
        "data worker killed",
        "A process that loads data was killed, often because memory ran out.",
        "Set fewer data.loader.workers, or a smaller data.loader.prefetch.",
        Retry.TRANSIENT,
    )
    WORKER_MEMORY = (
        "data worker out of memory",
        "The kernel killed a process that loads data, because memory ran out.",
        "Set fewer data.loader.workers, or a smaller data.loader.prefetch.",
        Retry.MEMORY,
    )
    WORKER_EXITED = (
        "data worker exited",
        "The dataset, or a library that it calls, ended its process.",
        _MEND_SAMPLE,
        Retry.PROGRAM,
    )
    SAMPLE = (
        "sample can't be used",
        "The dataset raised an exception for this sample, or returned None or other shapes than for the others.",
        _MEND_SAMPLE,
    )
    BAD_NUMBERS = (
        "bad numbers",
        "The loss or the gradient was not finite, or far above those before.",
        "See the suspected samples in events.jsonl: leave them out (data.leave_out), or let the run do it "
        "(recovery.bad_numbers: nonfinite: rollback); if others follow, lower optim.lr, use bf16, or set "
        "optim.clip_norm: 1.0.",
    )
    NOTHING_LEARNED = (
        "nothing learned",
        "No update of the run's second half changed the weights.",
        "Look at the labels of some samples, and at the loss: are all targets ignored, is it constant?",
    )
    SAVE_FAILED = (
        "last save failed",
        "The newest state could not be written.",
        "Read the reason in the message, and check the disk of checkpoint.folder.",
    )
    DAMAGED = (
        "checkpoint damaged",
        "A file of the checkpoint is torn or was changed.",
        "Run lockstep ckpt verify RUN, and resume from an older checkpoint (lockstep ckpt ls RUN).",
    )
    OTHER_WEIGHTS = (
        "weights of another model",
        "The checkpoint was written for a model with other layers or sizes.",
        "Give the model the config that the weights were saved with, or name other weights.",
        Retry.NEVER,
        2,
    )
    NOT_JOINED = (
        "rendezvous not reached",
        "A firewall drops the connection, the address or the port is wrong, or a host has not started its ranks.",
        "Test it from the other host (nc -vz HOST PORT), open the port in the firewall, and start as many ranks as "
        "WORLD_SIZE.",
    )
    HUNG = (
        "a rank hangs",
        "This rank did not move while others waited for it: it hangs (a lock, a data source, a file server, another "
        "operation in its place), was stopped, or is slow (a compilation).",
        "Read the stacks of all ranks in logs/hangs.txt. If the rank is only slow, raise the limit: recovery.watchdog, "
        "launch.timeout.",
        Retry.HANG,
        124,
    )
    TIMED_OUT = (
        "a rank did not answer",
        "A rank did not reach a collective within launch.timeout.",
        "Look at the end of that rank's log, and run py-spy dump --pid PID when it happens again; if it is "
        "only slow, raise launch.timeout.",
        Retry.HANG,
        1,
        2,
    )
    PEER_FAILED = (
        "peer closed its connection",
        "Another rank ended first, and this one noticed.",
        "Look for the cause in the logs of the other ranks, and on their hosts.",
        Retry.TRANSIENT,
        1,
        3,
    )
    DIVERGED = (
        "copies differ between ranks",
        "A rank holds another copy of the training state than the others: a GPU or its memory is faulty, or code that "
        "only some ranks run changed it.",
        "Take the host of that rank out, or search the program for code that depends on the rank.",
        Retry.TRANSIENT,
    )
    ROLLED_BACK = ("rolled back", "", "", Retry.ROLLBACK, 75)
    LOST = (
        "host lost",
        "A host was cut off from the others, or it, or its launcher, was stopped.",
        "See whether the host runs, what the scheduler recorded, and its network (ip -s link); then resume the run.",
        Retry.HOST,
    )
    EXITED = (
        "a rank exited",
        "The program, or a library that it calls, ended this rank by sys.exit, or by os._exit, which saves nothing and "
        "prints nothing.",
        "Read the end of this rank's log, search the program for exit, and raise an exception instead.",
        Retry.PROGRAM,
    )
    EXCEPTION = (
        "an exception",
        "The program, or a library that it calls, raised an exception on this rank.",
        "Read the last line of the traceback first, then the lowest line of it that is in your code.",
        Retry.PROGRAM,
    )

    @property
    def is_failure(self) -> bool:
        """True if the rank was neither done nor stopped."""
        return self not in _NO_FAILURES

    @property
    def is_stop(self) -> bool:
        """True if the run was stopped, and the next start continues it."""
        return self in _STOPS


_STOPS = {FailureKind.PAUSED, FailureKind.STOPPED, FailureKind.INTERRUPTED, FailureKind.ROLLED_BACK}
_NO_FAILURES = {*_STOPS, FailureKind.DONE, FailureKind.ENDED}

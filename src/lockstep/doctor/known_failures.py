"""The catalog of failures of distributed training: of hosts, of software, of the program, and what ranks see.

What Lockstep itself has ended is recorded with its kind. Patterns are matched against single lines that torch, drivers,
the kernel or other programs have written to logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from lockstep.core.failure_kinds import FailureKind


class Standing(IntEnum):
    """The place of a failure among others that were seen; the lowest explains those above."""

    CAUSE = 0  # a fact about one host or program: port taken, out of memory
    SYMPTOM = 1  # what a cause leads to on that rank: a traceback, an error of NCCL
    CONSEQUENCE = 2  # what other ranks see of it: a timeout, a closed connection
    REMARK = 3  # not by itself the end of a run: a discarded update, a failed save


_STANDINGS = {
    FailureKind.EXCEPTION: Standing.SYMPTOM, FailureKind.EXITED: Standing.SYMPTOM,
    FailureKind.DEVICE: Standing.SYMPTOM, FailureKind.PEER_FAILED: Standing.CONSEQUENCE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A row of the catalog.

    Attributes:
        pattern: Matches a line of another program that shows it; None: no line does.
        file: Where it shows; empty: the ranks' logs.
    """

    name: str
    pattern: re.Pattern[str] | None
    cause: str
    remedy: str
    standing: Standing = Standing.CAUSE
    file: str = ""


def row(
    name: str, pattern: str, cause: str, remedy: str, standing: Standing = Standing.CAUSE, file: str = ""
) -> KnownFailure:
    return KnownFailure(name, re.compile(pattern), cause, remedy, standing, file)


NO_PROGRESS, SAVE_FAILED, DISK_FULL = "no progress", "save failed", "disk full"
_VAGUE = (FailureKind.CRASHED, FailureKind.NOT_JOINED)
_LINES = {
    FailureKind.OUT_OF_MEMORY: r"(CUDA|HIP|XPU) out of memory|torch\.OutOfMemoryError",
    FailureKind.HOST_MEMORY: r"DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|std::bad_alloc|"
    r"\bMemoryError\b|oom-kill|Killed process \d+",
    FailureKind.KILLED: r"Signal 9 \(SIGKILL\)|exitcode *: -9\b",
    FailureKind.CRASHED: r"SIGSEGV|Segmentation fault|exitcode *: -11\b|Fatal Python error",
    FailureKind.WORKER_DIED: r"DataLoader worker \(pid(\(s\))? [\d, ]+\) (exited unexpectedly|is killed by signal: "
    r"(?!Bus))",
    FailureKind.OTHER_WEIGHTS: r"Missing key\(s\) in state_dict|size mismatch for \S+: copying",
    FailureKind.DAMAGED: r"PytorchStreamReader failed|deserializing header|InvalidHeaderDeserialization|"
    r"MetadataIncompleteBuffer",
    FailureKind.NOT_JOINED: r"client socket has (timed out after|failed to connect)|connect\(\) timed out|"
    r"No route to host|Network is unreachable|RendezvousTimeoutError",
    FailureKind.PEER_FAILED: r"[Cc]onnection (closed|reset) by( remote)? peer|ncclRemoteError|remote process exited|"
    r"recvValue failed|[Bb]roken pipe|failed to recv, got 0 bytes",
    FailureKind.EXITED: r"exitcode *: [1-9]",
    FailureKind.EXCEPTION: r"^[\w.]*(Error|Exception)(: |$)",
}
"""Lines of torch and other programs that show one of the kinds."""

_LIMITS = (
    row(
        "shared memory full",
        r"out of shared memory|insufficient shared memory|Bus error|shared memory segment .*failed|"
        r"(fail|[Ee]rror|No space).*/dev/shm/nccl|unable to (mmap|allocate shared)",
        "/dev/shm is full or small (64 MiB in a container); data workers and NCCL pass tensors through it.",
        "Start the container with --shm-size=16g or --ipc=host, or set data.loader.workers: 0.",
    ),
    row(
        DISK_FULL,
        r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]",
        "The disk of the run, of a cache or of temporary files is full, or the quota is used up.",
        "Free space (lockstep ckpt prune RUN), lower checkpoint.keep_last, or give run.folder another disk.",
    ),
    row(
        "too many open files",
        r"Too many open files|\[Errno 24\]|received 0 items of ancdata",
        "The limit of open files is too low for connections, data workers and the tensors that they share.",
        "Raise it: ulimit -n 65536 (limits.conf, LimitNOFILE).",
    ),
)
_NETWORK = (
    row(
        "wrong network interface",
        r"connectFullMesh failed|Unable to find (address|interface) for|[Nn]o socket interface found|"
        r"(remote=|peer )\[?127\.0\.1\.1",
        "gloo or NCCL listens on an interface that other hosts don't reach, such as loopback if the "
        "hostname resolves to it; or a firewall lets them reach only the store.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the hosts (ip route get HOST).",
    ),
    row(
        "port taken",
        r"EADDRINUSE|Address already in use|errno: 98\b",
        "Another process, often an earlier run that still ends, listens on the store's port.",
        "End that process (lockstep doctor shows it), or choose another port; launch.port: 0 takes any free one.",
    ),
    row(
        "hostname not resolved",
        r"^(?!.*IPv6 network addresses).*(gai ?error|Name or service not known|Temporary failure in name resolution)",
        "A host doesn't know the name of another one.",
        "Give MASTER_ADDR, or the rendezvous endpoint, as an IP address, or add the name to /etc/hosts on all hosts.",
    ),
    row(
        "InfiniBand fails",
        r"ibv_(reg_mr|create_qp|modify_qp)\w* failed|Call to ibv_|IBV_WC_RETRY_EXC_ERR|"
        r"Got completion (from peer )?.*(error|status=) ?12",
        "Memory can't be locked, or a link of InfiniBand or RoCE is down or configured otherwise.",
        "Set ulimit -l unlimited; check ibstat on both hosts; to continue without it, set NCCL_IB_DISABLE=1.",
    ),
    row(
        "hub not reached",
        r"([Cc]ouldn't|[Cc]an't) connect to .*huggingface|LocalEntryNotFoundError|"
        r"[Oo]ffline mode is enabled|host='huggingface\.co'",
        "The machine has no network to the Hugging Face hub, and the cache lacks the file.",
        "Run lockstep data fetch RECIPE with a network, copy the cache (HF_HOME), and set HF_HUB_OFFLINE=1.",
    ),
)
_SOFTWARE = (
    row(
        "driver too old",
        r"driver version is insufficient|NVIDIA driver on your system is too old|"
        r"[Dd]river/library version mismatch",
        "The GPU's driver is older than torch's CUDA, or was updated without a restart.",
        "Update the driver, restart the host, or install a torch for an older CUDA.",
    ),
    row(
        "torch built for other GPUs",
        r"no kernel image is available|is not compatible with the current PyTorch installation",
        "This build of torch has no code for this GPU's architecture.",
        "Install a torch with a CUDA version that supports the GPU.",
    ),
    row(
        "packages that don't fit",
        r"operator torchvision::\w+ does not exist|undefined symbol: _Z|"
        r"lib(cudart|cudnn|torch_cuda|c10_cuda)\S* ?: cannot open shared object",
        "An extension, such as torchvision's, was built for another torch or another CUDA.",
        "Install both from one index, with versions that fit: lockstep doctor shows the pair.",
    ),
    row(
        "package missing",
        r"ModuleNotFoundError: No module named",
        "The interpreter of this rank doesn't have the package, perhaps on one host only; or a module of your own is "
        "not where Python looks for it.",
        "Install it in the environment of every host, and start the ranks with that interpreter; name a folder of your "
        "own modules in PYTHONPATH.",
    ),
    row(
        "no compiler",
        r"InvalidCxxCompiler|No working C\+\+ compiler|Failed to find C compiler|Ninja is required|"
        r"CUDA_HOME (environment variable )?(is not set|does not exist)",
        "torch.compile, Triton or DeepSpeed's operators need a compiler (DeepSpeed's for GPUs also CUDA's).",
        "Install g++ and ninja (and the CUDA toolkit), or leave compilation and offloading out.",
    ),
)
_PROGRAM = (
    row(
        "label or token out of range",
        r"device-side assert triggered|Target -?\d+ is out of bounds|index out of range in self|"
        r"srcIndex < srcSelectDimSize|`t >= 0 && t < n_classes`",
        "A label or a token is as large as the model's classes or vocabulary, or larger.",
        "Compare the data's largest label with the model's size; start with CUDA_LAUNCH_BLOCKING=1 to see the line.",
    ),
    row(
        "illegal memory access",
        r"illegal memory access|misaligned address|unspecified launch failure|Xid \(.*\): (13|31)\b",
        "A kernel, often a custom one, reads outside of its tensor.",
        "Start with CUDA_LAUNCH_BLOCKING=1 to see the line; leave custom kernels and torch.compile out in turn.",
    ),
    row(
        "GPU broken",
        r"uncorrectable ECC error|fallen off the bus|Xid \(.*\): (48|63|64|74|79|92|94|95|119|120)\b",
        "The GPU, its memory or its slot has a fault.",
        "Take the host out, read dmesg (Xid) and nvidia-smi -q, and reset or replace the GPU.",
    ),
    row(
        "loss not finite",
        r"returned nan values in its|"
        r"[Ll]oss is (NaN|nan|inf)",
        "The learning rate is too high, fp16 overflows, or the data has values that are not finite.",
        "Lower optim.lr, use bf16, set optim.clip_norm: 1.0, and see which step was first in metrics.jsonl.",
    ),
    row(
        "mismatched collectives",
        r"[Mm]ismatch between collectives|mismatched collective|op\.preamble\.length <= op\.nbytes|"
        r"ran (on|collective) .* but .* (ran|is running)",
        "Ranks call other collectives, or with other shapes: code that only some ranks run.",
        "Call collectives on all ranks in the same order; start with TORCH_DISTRIBUTED_DEBUG=DETAIL to see "
        "the first one.",
    ),
    row(
        "parameters without gradient",
        r"Expected to have finished reduction in the prior iteration|"
        r"parameters that were not used in producing loss",
        "Under DDP some parameters took no part in the loss of an update.",
        "Set parallel.ddp.find_unused_parameters: true, or freeze those parameters.",
    ),
    row(
        "file system fails",
        r"Stale file handle|Input/output error|\[Errno (116|5)\]|Transport endpoint is not connected",
        "A file server or a disk stopped answering during the run.",
        "Mount it again, see dmesg, and resume: lockstep train RUN",
    ),
    row(
        "preempted or out of time",
        r"DUE TO (PREEMPTION|TIME LIMIT|NODE FAILURE)|"
        r"Received signal 15|Received 15 death signal|got signal: 15\b",
        "A scheduler, or a person, ended the job.",
        "Resume it: lockstep train RUN; ask for more time, or for a signal some minutes before the end.",
    ),
)
_SEEN_BY_RANKS = (
    KnownFailure(
        NO_PROGRESS,
        None,
        "The run made no progress when it was ended: a rank hangs (a lock, a data source, a file server), or something "
        "is slow (an evaluation, a compilation).",
        "Start again; while nothing is printed, see where each rank is: py-spy dump --pid PID. A lower launch.timeout "
        "ends such a run by itself, and reports the rank.",
    ),
    row(
        "NCCL fails",
        r"nccl(System|Internal|UnhandledCuda|InvalidUsage|InvalidArgument)Error|"
        r"unhandled (system|cuda) error",
        "NCCL could not open a connection or a device; its own warnings say which.",
        "Start again with NCCL_DEBUG=INFO, and read the first line with WARN.",
        Standing.SYMPTOM,
    ),
    row(
        "collective timed out",
        r"Timed out waiting \d+ms for (recv|send)|wait timeout after \d+ms|Application timeout caused pair closure",
        "A rank did not reach a collective within launch.timeout.",
        "Look at the end of that rank's log; if it is only slow, raise launch.timeout.",
        Standing.CONSEQUENCE,
    ),
    row(
        "NCCL timeout",
        r"Watchdog caught collective operation timeout|watchdog (got stuck|thread terminated)",
        "A rank did not reach a collective: it failed, hangs, is slow, or called another one.",
        "Look for the rank without such a line, or with another operation; raise launch.timeout only if it is slow.",
        Standing.CONSEQUENCE,
    ),
    row(
        "updates discarded",
        r'"verdict": ?"(non_finite|overflow)"',
        "A loss or a gradient was not finite, and the update was discarded.",
        "If it happens again and again, look at the suspected samples (bad_numbers in events.jsonl), and lower "
        "optim.lr; fp16 overflows where bf16 doesn't.",
        Standing.REMARK,
        "metrics.jsonl",
    ),
    row(
        SAVE_FAILED,
        r'"saved": ?\d+.*"failure": ?"',
        "A checkpoint could not be written at that step.",
        "Read the reason in that line, and check the disk of checkpoint.folder.",
        Standing.REMARK,
        "events.jsonl",
    ),
)

_LAST = (FailureKind.EXITED, FailureKind.EXCEPTION)  # what any other row explains better
_KINDS = {
    kind: KnownFailure(
        kind.title,
        re.compile(_LINES[kind]) if kind in _LINES else None,
        kind.cause,
        kind.remedy,
        _STANDINGS.get(kind, Standing.CAUSE),
    )
    for kind in sorted(FailureKind, key=_LAST.__contains__)
    if kind.remedy
}
KNOWN: tuple[KnownFailure, ...] = (
    *_LIMITS, *_NETWORK, *_SOFTWARE, *_PROGRAM, *_SEEN_BY_RANKS, *_KINDS.values(),
)  # fmt: skip


def failure_named(name: str) -> KnownFailure:
    """Return the row with this name."""
    return next(failure for failure in KNOWN if failure.name == name)


def failure_in(line: str, file: str = "") -> KnownFailure | None:
    """Return the failure that a line of a log, or of another file of a run, shows: the first in the catalog."""
    return next(
        (row for row in KNOWN if row.file == file and row.pattern is not None and row.pattern.search(line)), None
    )


def failure_of(kind: FailureKind, text: str = "") -> KnownFailure | None:
    """Return the failure of an end that was recorded; what another program wrote says more about some kinds."""
    own = _KINDS.get(kind)
    if own is not None and own.standing is Standing.CAUSE and kind not in _VAGUE:
        return own
    return failure_in(text) or own

"""The catalog: failures of distributed training, how each shows in a log, its cause, and what to do.

A row is a failure. Patterns are matched against single lines of logs. A failure that explains others has a lower rank:

    CAUSE          a fact about one host or program         port taken, out of memory
    SYMPTOM        what a cause leads to on that rank       a traceback, an error of NCCL
    CONSEQUENCE    what other ranks see of it               a timeout, a connection that was closed
    REMARK         not by itself the end of a run           a discarded update, a slow rank
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum


class Standing(IntEnum):
    """The place of a failure among others that were seen, the one to read first lowest."""

    CAUSE = 0
    SYMPTOM = 1
    CONSEQUENCE = 2
    REMARK = 3


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A row of the catalog.

    Attributes:
        name: A few words that name it.
        pattern: Matches a line that shows it.
        cause: Why it happens, in a sentence.
        remedy: What to do, in the imperative.
        file: The name of the file in which it shows; empty: the ranks' logs.
    """

    name: str
    pattern: re.Pattern[str]
    cause: str
    remedy: str
    standing: Standing = Standing.CAUSE
    file: str = ""


def _row(
    name: str, pattern: str, cause: str, remedy: str, standing: Standing = Standing.CAUSE, file: str = ""
) -> KnownFailure:
    return KnownFailure(name, re.compile(pattern), cause, remedy, standing, file)


_MEMORY = (
    _row(
        "GPU out of memory",
        r"(CUDA|HIP|XPU) out of memory|torch\.OutOfMemoryError|"
        r"out of memory in the (forward|backward|update|evaluation)",
        "The state, activations and logits of a rank are larger than its memory.",
        "Lower batch.micro_size (the result stays the same), set memory.activation_checkpointing.mode: full, "
        "or shard with "
        "parallel.strategy: fsdp; lockstep plan shows what holds the memory.",
    ),
    _row(
        "host out of memory",
        r"DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|std::bad_alloc|\bMemoryError\b|"
        r"oom-kill|Killed process \d+",
        "The machine, its container or its job has no memory left; data workers and caches count, too.",
        "Use fewer data workers and a smaller batch.micro_size, or raise the limit of the container or the job.",
    ),
    _row(
        "a rank was killed",
        r"killed by SIGKILL|Signal 9 \(SIGKILL\)|exitcode *: -9\b",
        "The kernel (out of memory), a scheduler or a person killed the process.",
        "Run dmesg on its host; if memory ran out there, use fewer data workers or raise the job's memory limit.",
    ),
    _row(
        "shared memory full",
        r"out of shared memory|insufficient shared memory|Bus error|shared memory segment .*failed|"
        r"(fail|[Ee]rror|No space).*/dev/shm/nccl|unable to (mmap|allocate shared)",
        "/dev/shm, through which data workers and NCCL pass tensors, is full or small (64 MiB in a container).",
        "Start the container with --shm-size=16g or --ipc=host, or set data.loader.workers: 0.",
    ),
    _row(
        "disk full",
        r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]",
        "The disk of the run, of a cache or of temporary files is full, or the quota is used up.",
        "Free space (lockstep ckpt prune RUN), lower checkpoint.keep_last, or give run.folder another disk.",
    ),
    _row(
        "too many open files",
        r"Too many open files|\[Errno 24\]|received 0 items of ancdata",
        "The limit of open files is too low for connections, data workers and the tensors that they share.",
        "Raise it: ulimit -n 65536 (limits.conf, LimitNOFILE).",
    ),
    _row(
        "too many processes",
        r"can't start new thread|pthread_create failed|fork: Resource temporarily unavailable|"
        r"BlockingIOError: \[Errno 11\]",
        "The limit of processes and threads, of the user or of the container, is reached.",
        "Raise it: ulimit -u 65536 (--pids-limit of a container), or use fewer data workers and threads.",
    ),
)
_NETWORK = (
    _row(
        "wrong network interface",
        r"connectFullMesh failed|Unable to find (address|interface) for|[Nn]o socket interface found|"
        r"(remote=|peer )\[?127\.0\.1\.1|_SOCKET_IFNAME\), and reaches the others by",
        "gloo or NCCL listens on an interface that other hosts don't reach, such as loopback, to which the "
        "hostname resolves; or a firewall lets them reach the store alone.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the hosts (ip route get HOST).",
    ),
    _row(
        "port taken",
        r"EADDRINUSE|Address already in use|can't listen on port|errno: 98\b",
        "Another process, often an earlier run that still ends, listens on the store's port.",
        "End that process (lockstep doctor names it), or choose another port; launch.port: 0 takes any free one.",
    ),
    _row(
        "rendezvous not reached",
        r"client socket has (timed out after|failed to connect)|connect\(\) timed out|No route to host|"
        r"Network is unreachable|could not join the other|RendezvousTimeoutError",
        "A firewall drops the connection, the address or the port is wrong, or a host has not started its ranks.",
        "Test it from the other host (nc -vz HOST PORT), open the port in the firewall, and start as many "
        "ranks as WORLD_SIZE.",
    ),
    _row(
        "hostname not resolved",
        r"^(?!.*IPv6 network addresses).*(gai ?error|Name or service not known|Temporary failure in name resolution)",
        "A host doesn't know the name of another one.",
        "Give MASTER_ADDR, or the rendezvous endpoint, as an IP address, or add the name to /etc/hosts on all hosts.",
    ),
    _row(
        "InfiniBand fails",
        r"ibv_(reg_mr|create_qp|modify_qp)\w* failed|Call to ibv_|IBV_WC_RETRY_EXC_ERR|"
        r"Got completion (from peer )?.*(error|status=) ?12",
        "Memory can't be locked, or a link of InfiniBand or RoCE is down or configured otherwise.",
        "Set ulimit -l unlimited; check ibstat on both hosts; to continue without it, set NCCL_IB_DISABLE=1.",
    ),
    _row(
        "host lost",
        r"host .* is lost: |the launcher at the rendezvous has ended",
        "A host was cut off from the others, or it, or its launcher, was stopped.",
        "See whether the host runs, what the scheduler recorded, and its network (ip -s link); then resume the run.",
    ),
    _row(
        "hub not reached",
        r"([Cc]ouldn't|[Cc]an't) connect to .*huggingface|LocalEntryNotFoundError|"
        r"[Oo]ffline mode is enabled|the hub does not answer|host='huggingface\.co'",
        "The machine has no network to the Hugging Face hub, and the cache lacks the file.",
        "Run lockstep data fetch RECIPE with a network, copy the cache (HF_HOME), and set HF_HUB_OFFLINE=1.",
    ),
    _row(
        "hub refuses",
        r"GatedRepoError|401 Client Error|403 Client Error|Cannot access gated repo|RepositoryNotFoundError",
        "The model or dataset is gated or private, and the token is missing or has no access.",
        "Accept its terms on the hub, and set HF_TOKEN on every host.",
    ),
    _row(
        "clock wrong",
        r"RequestTimeTooSkewed|certificate is not yet valid|certificate has expired",
        "The host's clock differs from the server's.",
        "Set it by NTP: timedatectl set-ntp true",
    ),
)
_SOFTWARE = (
    _row(
        "driver too old",
        r"driver version is insufficient|NVIDIA driver on your system is too old|"
        r"[Dd]river/library version mismatch",
        "The GPU's driver is older than the CUDA with which torch is built, or was updated without a restart.",
        "Update the driver, restart the host, or install a torch for an older CUDA.",
    ),
    _row(
        "torch built for other GPUs",
        r"no kernel image is available|is not compatible with the current PyTorch installation",
        "This build of torch has no code for this GPU's architecture.",
        "Install a torch whose CUDA version supports the GPU.",
    ),
    _row(
        "packages that don't fit",
        r"operator torchvision::\w+ does not exist|undefined symbol: _Z|"
        r"lib(cudart|cudnn|torch_cuda|c10_cuda)\S* ?: cannot open shared object",
        "An extension, such as torchvision's, was built for another torch or another CUDA.",
        "Install both from one index, with versions that fit: lockstep doctor names the pair.",
    ),
    _row(
        "package missing",
        r"ModuleNotFoundError: No module named|which is not installed",
        "The interpreter of this rank doesn't have the package, perhaps on one host only.",
        "Install it in the environment of every host, and start the ranks with that interpreter.",
    ),
    _row(
        "no compiler",
        r"InvalidCxxCompiler|No working C\+\+ compiler|Failed to find C compiler|Ninja is required|"
        r"CUDA_HOME (environment variable )?(is not set|does not exist)",
        "torch.compile, Triton or DeepSpeed's operators need a compiler (DeepSpeed's for GPUs also CUDA's).",
        "Install g++ and ninja (and the CUDA toolkit), or leave compilation and offloading out.",
    ),
    _row(
        "CUDA used before a fork",
        r"Cannot re-initialize CUDA in forked subprocess",
        "The program used the GPU before it started ranks or data workers.",
        "Start ranks before the first use of the GPU, and move nothing to it in a dataset.",
    ),
    _row(
        "two ranks on one GPU",
        r"Duplicate GPU detected|have the same device",
        "Ranks chose the same GPU: LOCAL_RANK is wrong, or each host has fewer GPUs than ranks.",
        "Start one rank a GPU, and let each see its own (CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task).",
    ),
)
_PROGRAM = (
    _row(
        "label or token out of range",
        r"device-side assert triggered|Target -?\d+ is out of bounds|index out of range in self|"
        r"srcIndex < srcSelectDimSize|`t >= 0 && t < n_classes`",
        "A label or a token is as large as the model's classes or vocabulary, or larger.",
        "Compare the data's largest label with the model's size; start with CUDA_LAUNCH_BLOCKING=1 to see the line.",
    ),
    _row(
        "illegal memory access",
        r"illegal memory access|misaligned address|unspecified launch failure|Xid \(.*\): (13|31)\b",
        "A kernel, often a custom one, reads outside of its tensor.",
        "Start with CUDA_LAUNCH_BLOCKING=1 to see the line; leave custom kernels and torch.compile out in turn.",
    ),
    _row(
        "GPU broken",
        r"uncorrectable ECC error|fallen off the bus|Xid \(.*\): (48|63|64|74|79|92|94|95|119|120)\b",
        "The GPU, its memory or its slot has a fault.",
        "Take the host out, read dmesg (Xid) and nvidia-smi -q, and reset or replace the GPU.",
    ),
    _row(
        "crash in native code",
        r"SIGSEGV|Segmentation fault|exitcode *: -11\b|Fatal Python error",
        "A library crashed, often one that was built for other versions.",
        "Run lockstep doctor for versions that don't fit, and read the stack in the rank's log (PYTHONFAULTHANDLER=1).",
    ),
    _row(
        "loss not finite",
        r"in a row had a loss or gradient that was not finite|returned nan values in its|"
        r"[Ll]oss is (NaN|nan|inf)",
        "The learning rate is too high, fp16 overflows, or the data has values that are not finite.",
        "Lower optim.lr, use bf16, set optim.clip_norm: 1.0, and see which step was first in metrics.jsonl.",
    ),
    _row(
        "mismatched collectives",
        r"[Mm]ismatch between collectives|mismatched collective|op\.preamble\.length <= op\.nbytes|"
        r"ran (on|collective) .* but .* (ran|is running)",
        "Ranks call other collectives, or with other shapes: code that only some ranks run.",
        "Call collectives on all ranks in the same order; start with TORCH_DISTRIBUTED_DEBUG=DETAIL to see "
        "the first one.",
    ),
    _row(
        "parameters without gradient",
        r"Expected to have finished reduction in the prior iteration|"
        r"parameters that were not used in producing loss",
        "Under DDP some parameters took no part in the loss of an update.",
        "Set parallel.ddp.find_unused_parameters: true, or freeze those parameters.",
    ),
    _row(
        "data worker died",
        r"DataLoader worker \(pid(\(s\))? [\d, ]+\) (exited unexpectedly|is killed by signal: (?!Bus))|"
        r"a data worker died",
        "A process that loads data was killed, often because memory ran out, or crashed in the dataset.",
        "Set data.loader.workers: 0 to see the error in the rank, or use fewer workers.",
    ),
    _row(
        "weights of another model",
        r"Missing key\(s\) in state_dict|size mismatch for \S+: copying|doesn't have the weights of this model",
        "The checkpoint was written for a model with other layers or sizes.",
        "Give the model the config that the weights were saved with, or name other weights.",
    ),
    _row(
        "checkpoint damaged",
        r"PytorchStreamReader failed|deserializing header|has no checkpoint that can be used|"
        r"InvalidHeaderDeserialization|MetadataIncompleteBuffer",
        "A file of the checkpoint is torn or was changed.",
        "Run lockstep ckpt verify RUN, and resume from an older checkpoint (lockstep ckpt ls RUN).",
    ),
    _row(
        "no permission",
        r"PermissionError|Permission denied",
        "The user of the ranks may not read or write a path, perhaps on one host only.",
        "Compare owner and mode on all hosts (ls -ln), and run with the same user id.",
    ),
    _row(
        "file system fails",
        r"Stale file handle|Input/output error|\[Errno (116|5)\]|Transport endpoint is not connected",
        "A file server or a disk stopped answering during the run.",
        "Mount it again, see dmesg, and resume: lockstep train RUN",
    ),
    _row(
        "preempted or out of time",
        r"DUE TO (PREEMPTION|TIME LIMIT|NODE FAILURE)|(stopped|was ended) by SIG(TERM|USR1)|"
        r"Received signal 15|Received 15 death signal|got signal: 15\b",
        "A scheduler, or a person, ended the job.",
        "Resume it: lockstep train RUN; ask for more time, or for a signal some minutes before the end.",
    ),
)
_SEEN_BY_RANKS = (
    _row(
        "NCCL fails",
        r"nccl(System|Internal|UnhandledCuda|InvalidUsage|InvalidArgument)Error|"
        r"unhandled (system|cuda) error",
        "NCCL could not open a connection or a device; its own warnings state which.",
        "Start again with NCCL_DEBUG=INFO, and read the first line with WARN.",
        Standing.SYMPTOM,
    ),
    _row(
        "NCCL timeout",
        r"Watchdog caught collective operation timeout|watchdog (got stuck|thread terminated)",
        "A rank did not reach a collective: it failed, hangs, is slow, or called another one.",
        "Look for the rank whose log has no such line, or another operation; raise launch.timeout only if it is slow.",
        Standing.CONSEQUENCE,
    ),
    _row(
        "collective timed out",
        r"Timed out waiting \d+ms for (recv|send)|did not answer within|wait timeout after \d+ms|"
        r"Application timeout caused pair closure",
        "A rank did not reach a collective within launch.timeout.",
        "Look at the end of the log of the named rank; if it is only slow, raise launch.timeout.",
        Standing.CONSEQUENCE,
    ),
    _row(
        "peer closed its connection",
        r"[Cc]onnection (closed|reset) by( remote)? peer|ncclRemoteError|remote process exited|"
        r"recvValue failed|[Bb]roken pipe|failed to recv, got 0 bytes",
        "Another rank ended first, and this one noticed.",
        "Look for the cause in the logs of the other ranks, and on their hosts.",
        Standing.CONSEQUENCE,
    ),
    _row(
        "slow rank or input",
        r"waited [\d.e+]+ s for rank|suggested max number of worker",
        "A rank reads data more slowly than others train, or starts more data workers than there are cores.",
        "Give each rank as many data workers as it has cores to spare, and put the data on a local disk.",
        Standing.REMARK,
    ),
    _row(
        "updates discarded",
        r'"verdict": ?"(non_finite|overflow)"',
        "A loss or a gradient was not finite, and the update was discarded.",
        "If it happens again and again, lower optim.lr, or use bf16 instead of fp16.",
        Standing.REMARK,
        "metrics.jsonl",
    ),
    _row(
        "save failed",
        r'"saved": ?\d+.*"failure": ?"',
        "A checkpoint could not be written; the run continued.",
        "Read the reason in that line, and check the disk of checkpoint.folder.",
        Standing.REMARK,
        "events.jsonl",
    ),
)

_ANY_OTHER = (
    _row(
        "a rank exited",
        r"ended with exit code [1-9]|called sys\.exit\(|exitcode *: [1-9]",
        "The program, or a library that it calls, ended this rank by sys.exit or os._exit, without an exception.",
        "Read the end of this rank's log, and search the program for exit.",
        Standing.SYMPTOM,
    ),
    _row(
        "an exception",
        r"^[\w.]*(Error|Exception)(: |$)",
        "The program, or a library that it calls, raised an exception on this rank.",
        "Read the last line of the traceback first, then the lowest line of it that is in your code.",
        Standing.SYMPTOM,
    ),
)

KNOWN: tuple[KnownFailure, ...] = (*_MEMORY, *_NETWORK, *_SOFTWARE, *_PROGRAM, *_SEEN_BY_RANKS, *_ANY_OTHER)


def failure_in(line: str, file: str = "") -> KnownFailure | None:
    """Return the failure that a line of a log, or of another file of a run, shows: the first in the catalog."""
    return next((failure for failure in KNOWN if failure.file == file and failure.pattern.search(line)), None)

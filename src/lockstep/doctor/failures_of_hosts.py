"""Failures of a host: its memory, its disks and limits, and its network. Their order is that of the catalog."""

from __future__ import annotations

from lockstep.doctor.catalog import row

DISK_FULL = "disk full"
ONE_SAMPLE, CPU_MEMORY, GPU_MEMORY = "one sample doesn't fit in memory", "out of memory on a CPU", "GPU out of memory"
"""Failures of a rank that has reported how much memory it asked for."""
OUT_OF_MEMORY, KILLED, BY_A_PERSON = "host out of memory", "a rank was killed", "a rank was killed from outside"
"""Failures of a rank that SIGKILL ended: the kernel has recorded it, no record shows it, or it counted none."""

_REPORTED = r"out of memory in the (forward|backward|update|evaluation)"
_LARGER = "The state, activations and logits of a rank are larger than its memory"
_SAVES = (
    "set memory.activation_checkpointing.mode: full, or shard with parallel.strategy: fsdp; lockstep plan shows what "
    "holds the memory."
)
_SMALLER = f"Lower batch.micro_size (the result stays the same), {_SAVES}"

OF_MEMORY = (
    row(
        ONE_SAMPLE,
        rf"{_REPORTED}.*(micro-batches have one sample already|One sample alone would need)",
        f"{_LARGER}, and its micro-batches can't be made smaller.",
        f"Give each rank more memory, use a smaller model or shorter samples, {_SAVES}",
    ),
    row(
        CPU_MEMORY,
        rf"{_REPORTED}.* were free \((the machine's|the control group's|ulimit -v) limit\)",
        f"{_LARGER}, which is that of the machine, of its control group, or of ulimit -v.",
        f"{_SMALLER} Raise a limit that the message names.",
    ),
    row(GPU_MEMORY, rf"(CUDA|HIP|XPU) out of memory|torch\.OutOfMemoryError|{_REPORTED}", f"{_LARGER}.", _SMALLER),
    row(
        OUT_OF_MEMORY,
        r"killed by SIGKILL: out of memory \(|DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|"
        r"std::bad_alloc|\bMemoryError\b|"
        r"oom-kill|Killed process \d+",
        "The machine, its container or its job has no memory left; data workers and caches count, too.",
        "Use fewer data workers and a smaller batch.micro_size, or raise the limit of the container or the job.",
    ),
    row(
        BY_A_PERSON,
        r"killed by SIGKILL: by a person or a scheduler",
        "A person (kill -9), or a scheduler whose time limit was over, ended the process with SIGKILL. "
        "Memory did not run out: the kernel has counted no such kill.",
        "See what the scheduler recorded about the job (sacct, kubectl describe pod), and ask who uses this host; then "
        "resume: lockstep train RUN",
    ),
    row(
        KILLED,
        r"killed by SIGKILL|Signal 9 \(SIGKILL\)|exitcode *: -9\b",
        "The kernel (out of memory), a scheduler or a person ended the process with SIGKILL; nothing here shows which.",
        "Run dmesg on its host: if it has `Killed process`, memory ran out, so use fewer data workers or raise the "
        "job's limit; otherwise see what the scheduler recorded.",
    ),
    row(
        "shared memory full",
        r"out of shared memory|insufficient shared memory|Bus error|shared memory segment .*failed|"
        r"(fail|[Ee]rror|No space).*/dev/shm/nccl|unable to (mmap|allocate shared)",
        "/dev/shm, through which data workers and NCCL pass tensors, is full or small (64 MiB in a container).",
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
    row(
        "too many processes",
        r"can't start new thread|pthread_create failed|fork: Resource temporarily unavailable|"
        r"BlockingIOError: \[Errno 11\]",
        "The limit of processes and threads, of the user or of the container, is reached.",
        "Raise it: ulimit -u 65536 (--pids-limit of a container), or use fewer data workers and threads.",
    ),
)
OF_NETWORK = (
    row(
        "wrong network interface",
        r"connectFullMesh failed|Unable to find (address|interface) for|[Nn]o socket interface found|"
        r"(remote=|peer )\[?127\.0\.1\.1|_SOCKET_IFNAME\), and reaches the others by",
        "gloo or NCCL listens on an interface that other hosts don't reach, such as loopback, to which the "
        "hostname resolves; or a firewall lets them reach the store alone.",
        "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the hosts (ip route get HOST).",
    ),
    row(
        "port taken",
        r"EADDRINUSE|Address already in use|can't listen on port|errno: 98\b",
        "Another process, often an earlier run that still ends, listens on the store's port.",
        "End that process (lockstep doctor names it), or choose another port; launch.port: 0 takes any free one.",
    ),
    row(
        "rendezvous not reached",
        r"client socket has (timed out after|failed to connect)|connect\(\) timed out|No route to host|"
        r"Network is unreachable|could not join the other|RendezvousTimeoutError",
        "A firewall drops the connection, the address or the port is wrong, or a host has not started its ranks.",
        "Test it from the other host (nc -vz HOST PORT), open the port in the firewall, and start as many "
        "ranks as WORLD_SIZE.",
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
        "host lost",
        r"host .* is lost: |the launcher at the rendezvous has ended",
        "A host was cut off from the others, or it, or its launcher, was stopped.",
        "See whether the host runs, what the scheduler recorded, and its network (ip -s link); then resume the run.",
    ),
    row(
        "hub not reached",
        r"([Cc]ouldn't|[Cc]an't) connect to .*huggingface|LocalEntryNotFoundError|"
        r"[Oo]ffline mode is enabled|the hub does not answer|host='huggingface\.co'",
        "The machine has no network to the Hugging Face hub, and the cache lacks the file.",
        "Run lockstep data fetch RECIPE with a network, copy the cache (HF_HOME), and set HF_HUB_OFFLINE=1.",
    ),
    row(
        "hub refuses",
        r"GatedRepoError|401 Client Error|403 Client Error|Cannot access gated repo|RepositoryNotFoundError",
        "The model or dataset is gated or private, and the token is missing or has no access.",
        "Accept its terms on the hub, and set HF_TOKEN on every host.",
    ),
    row(
        "clock wrong",
        r"RequestTimeTooSkewed|certificate is not yet valid|certificate has expired",
        "The host's clock differs from the server's.",
        "Set it by NTP: timedatectl set-ntp true",
    ),
)

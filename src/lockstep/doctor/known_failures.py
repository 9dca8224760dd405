"""The catalog of failures of distributed training: those of hosts, of software, of the program, and what ranks see."""

from __future__ import annotations

from lockstep.doctor.catalog import KnownFailure, Standing, row
from lockstep.doctor.failures_of_hosts import OF_MEMORY, OF_NETWORK
from lockstep.doctor.failures_of_samples import OF_SAMPLES

NO_PROGRESS, SAVE_FAILED = "no progress", "save failed"

_SOFTWARE = (
    row(
        "driver too old",
        r"driver version is insufficient|NVIDIA driver on your system is too old|"
        r"[Dd]river/library version mismatch",
        "The GPU's driver is older than the CUDA with which torch is built, or was updated without a restart.",
        "Update the driver, restart the host, or install a torch for an older CUDA.",
    ),
    row(
        "torch built for other GPUs",
        r"no kernel image is available|is not compatible with the current PyTorch installation",
        "This build of torch has no code for this GPU's architecture.",
        "Install a torch whose CUDA version supports the GPU.",
    ),
    row(
        "packages that don't fit",
        r"operator torchvision::\w+ does not exist|undefined symbol: _Z|"
        r"lib(cudart|cudnn|torch_cuda|c10_cuda)\S* ?: cannot open shared object",
        "An extension, such as torchvision's, was built for another torch or another CUDA.",
        "Install both from one index, with versions that fit: lockstep doctor names the pair.",
    ),
    row(
        "package missing",
        r"ModuleNotFoundError: No module named|which is not installed",
        "The interpreter of this rank doesn't have the package, perhaps on one host only; or a module of your own is "
        "not where Python looks for it.",
        "Install it in the environment of every host, and start the ranks with that interpreter; name a folder of your "
        "own modules in PYTHONPATH.",
    ),
    row(
        "an import fails",
        r"^ImportError: |\bImportError: cannot import name|^(SyntaxError|IndentationError|TabError): |"
        r"partially initialized module",
        "A module doesn't have the name that is imported (another version, or modules that import each other), or is "
        "not valid Python.",
        "Import it alone (python -c 'import MODULE'), and correct the last line of the traceback that is in your code.",
    ),
    row(
        "no compiler",
        r"InvalidCxxCompiler|No working C\+\+ compiler|Failed to find C compiler|Ninja is required|"
        r"CUDA_HOME (environment variable )?(is not set|does not exist)",
        "torch.compile, Triton or DeepSpeed's operators need a compiler (DeepSpeed's for GPUs also CUDA's).",
        "Install g++ and ninja (and the CUDA toolkit), or leave compilation and offloading out.",
    ),
    row(
        "CUDA used before a fork",
        r"Cannot re-initialize CUDA in forked subprocess",
        "The program used the GPU before it started ranks or data workers.",
        "Start ranks before the first use of the GPU, and move nothing to it in a dataset.",
    ),
    row(
        "two ranks on one GPU",
        r"Duplicate GPU detected|have the same device",
        "Ranks chose the same GPU: LOCAL_RANK is wrong, or each host has fewer GPUs than ranks.",
        "Start one rank a GPU, and let each see its own (CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task).",
    ),
)
OTHER_DATA = "checkpoint of other data"
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
        r"illegal memory access|misaligned address|unspecified launch failure|Xid (?:\(.*\):|error) (13|31)\b",
        "A kernel, often a custom one, reads outside of its tensor.",
        "Start with CUDA_LAUNCH_BLOCKING=1 to see the line; leave custom kernels and torch.compile out in turn.",
    ),
    row(
        "GPU broken",
        r"uncorrectable ECC error|fallen off the bus|Xid (?:\(.*\):|error) (48|63|64|74|79|92|94|95|119|120)\b",
        "The GPU, its memory or its slot has a fault.",
        "Take the host out, read dmesg (Xid) and nvidia-smi -q, and reset or replace the GPU.",
    ),
    row(
        "crash in native code",
        r"^(?!lockstep: sample \d).*(SIGSEGV|Segmentation fault|exitcode *: -11\b|Fatal Python error)",
        "A library crashed, often one that was built for other versions.",
        "Run lockstep doctor for versions that don't fit, and read the stack in the rank's log (PYTHONFAULTHANDLER=1).",
    ),
    row(
        "loss not finite",
        r"in a row had a loss or gradient that was not finite|returned nan values in its|"
        r"[Ll]oss is (NaN|nan|inf)",
        "The learning rate is too high, fp16 overflows, or the data has values that are not finite.",
        "Lower optim.lr, use bf16, set optim.clip_norm: 1.0, and see which step was first in metrics.jsonl.",
    ),
    row(
        "bad numbers",
        r"\(recovery\.bad_numbers\.(nonfinite|spike): stop\)|so it is hardly the samples",
        "The loss or the gradient of an update was not finite, or far above those before, and the config ends the run "
        "then.",
        "See the suspected samples in that line and in events.jsonl: leave them out (data.leave_out), or let the run "
        "do it (recovery.bad_numbers: nonfinite: rollback); if other samples follow, lower optim.lr.",
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
        "data worker died",
        r"DataLoader worker \(pid(\(s\))? [\d, ]+\) (exited unexpectedly|is killed by signal: (?!Bus))|"
        r"a data worker died",
        "A process that loads data was killed, often because memory ran out, or crashed in the dataset.",
        "Mend the sample that it was reading, or leave it out (data.leave_out, data.bad_samples). If memory ran out, "
        "set fewer data.loader.workers; if no sample is named, set them to 0, so that the rank shows the error.",
    ),
    row(
        "weights of another model",
        r"Missing key\(s\) in state_dict|size mismatch for \S+: copying|doesn't have the weights of this model",
        "The checkpoint was written for a model with other layers or sizes.",
        "Give the model the config that the weights were saved with, or name other weights.",
    ),
    row(
        OTHER_DATA,
        r"is of a run with other data, model or seed",
        "The data, the model or the seed differ from those with which the checkpoint was made.",
        "Undo the change, or resume with it: lockstep train RUN --accept-changes; --fresh starts over.",
    ),
    row(
        "checkpoint damaged",
        r"PytorchStreamReader failed|deserializing header|has no checkpoint that can be used|"
        r"InvalidHeaderDeserialization|MetadataIncompleteBuffer",
        "A file of the checkpoint is torn or was changed.",
        "Run lockstep ckpt verify RUN, and resume from an older checkpoint (lockstep ckpt ls RUN).",
    ),
    row(
        "no permission",
        r"PermissionError|Permission denied",
        "The user of the ranks may not read or write a path, perhaps on one host only.",
        "Compare owner and mode on all hosts (ls -ln), and run with the same user id.",
    ),
    row(
        "file system fails",
        r"Stale file handle|Input/output error|\[Errno (116|5)\]|Transport endpoint is not connected",
        "A file server or a disk stopped answering during the run.",
        "Mount it again, see dmesg, and resume: lockstep train RUN",
    ),
    row(
        "preempted or out of time",
        r"DUE TO (PREEMPTION|TIME LIMIT|NODE FAILURE)|(stopped|was ended) by SIG(TERM|USR1)|"
        r"Received signal 15|Received 15 death signal|got signal: 15\b",
        "A scheduler, or a person, ended the job.",
        "Resume it: lockstep train RUN; ask for more time, or for a signal some minutes before the end.",
    ),
)
_SEEN_BY_RANKS = (
    row(
        NO_PROGRESS,
        r"^nothing was recorded for .* before the end",
        "The run made no progress when it was ended: a rank hangs (a lock, a data source, a file server), or something "
        "is slow (an evaluation, a compilation).",
        "Start again; while nothing is printed, see where each rank is: py-spy dump --pid PID. A lower launch.timeout "
        "ends such a run by itself, and names the rank.",
    ),
    row(
        "a rank hangs",
        r"\branks? [\d, and]+( more)?( on hosts? .*)? "
        r"(did not answer within|hangs? |(is|are|was|were) stopped \(SIGSTOP)|"
        r"the ranks wait in collectives that don't match",
        "This rank did not move while others waited for it: it hangs (a lock, a data source, a file server, another "
        "operation in its place), was stopped, or is slow (a compilation).",
        "Read the stacks of all ranks in logs/hangs.txt; without that file, start again, and run py-spy dump --pid "
        "PID. If the rank is only slow, raise the limit: recovery.watchdog, launch.timeout.",
    ),
    row(
        "NCCL fails",
        r"nccl(System|Internal|UnhandledCuda|InvalidUsage|InvalidArgument)Error|"
        r"unhandled (system|cuda) error",
        "NCCL could not open a connection or a device; its own warnings state which.",
        "Start again with NCCL_DEBUG=INFO, and read the first line with WARN.",
        Standing.SYMPTOM,
    ),
    row(
        "NCCL timeout",
        r"Watchdog caught collective operation timeout|watchdog (got stuck|thread terminated)",
        "A rank did not reach a collective: it failed, hangs, is slow, or called another one.",
        "Look for the rank whose log has no such line, or another operation; raise launch.timeout only if it is slow.",
        Standing.CONSEQUENCE,
    ),
    row(
        "collective timed out",
        r"Timed out waiting \d+ms for (recv|send)|did not answer within|wait timeout after \d+ms|"
        r"Application timeout caused pair closure",
        "A rank did not reach a collective within launch.timeout.",
        "Look at the end of the log of the named rank; if it is only slow, raise launch.timeout.",
        Standing.CONSEQUENCE,
    ),
    row(
        "peer closed its connection",
        r"[Cc]onnection (closed|reset) by( remote)? peer|ncclRemoteError|remote process exited|"
        r"recvValue failed|[Bb]roken pipe|failed to recv, got 0 bytes",
        "Another rank ended first, and this one noticed.",
        "Look for the cause in the logs of the other ranks, and on their hosts.",
        Standing.CONSEQUENCE,
    ),
    row(
        "slow rank or input",
        r"waited [\d.e+]+ s for rank|suggested max number of worker",
        "A rank reads data more slowly than others train, or starts more data workers than there are cores.",
        "Give each rank as many data workers as it has cores to spare, and put the data on a local disk.",
        Standing.REMARK,
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

_ANY_OTHER = (
    row(
        "a rank exited",
        r"ended with exit code \d|called sys\.exit\(|exitcode *: [1-9]",
        "The program, or a library that it calls, ended this rank by sys.exit, or by os._exit, which saves nothing and "
        "prints nothing.",
        "Read the end of this rank's log, search the program for exit, and raise an exception instead.",
        Standing.SYMPTOM,
    ),
    row(
        "an exception",
        r"^[\w.]*(Error|Exception)(: |$)",
        "The program, or a library that it calls, raised an exception on this rank.",
        "Read the last line of the traceback first, then the lowest line of it that is in your code.",
        Standing.SYMPTOM,
    ),
)

KNOWN: tuple[KnownFailure, ...] = (
    *OF_MEMORY, *OF_NETWORK, *_SOFTWARE, *OF_SAMPLES, *_PROGRAM, *_SEEN_BY_RANKS, *_ANY_OTHER,
)  # fmt: skip


def failure_named(name: str) -> KnownFailure:
    """Return the row with this name."""
    return next(failure for failure in KNOWN if failure.name == name)


def failure_in(line: str, file: str = "") -> KnownFailure | None:
    """Return the failure that a line of a log, or of another file of a run, shows: the first in the catalog."""
    return next((failure for failure in KNOWN if failure.file == file and failure.pattern.search(line)), None)

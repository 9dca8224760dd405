"""The catalog names each failure by what torch, NCCL, the kernel or Lockstep print, made here where that can be."""

from __future__ import annotations

import ast
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from layers.law import SOURCE

from lockstep.core.failure_kinds import FailureKind
from lockstep.doctor.known_failures import KNOWN, failure_in, failure_of
from lockstep.doctor.run import describe_known, known_as_json

# --- made here ----------------------------------------------------------------------------------------------------


def _memory() -> None:
    torch.empty(1 << 50)


def _port() -> None:
    with socket.create_server(("", 0)) as server:
        torch.distributed.TCPStore("127.0.0.1", server.getsockname()[1], 1, True, timeout=timedelta(seconds=2))


def _no_server() -> None:
    torch.distributed.TCPStore("127.0.0.1", 9, 2, False, timeout=timedelta(seconds=0.5))


def _no_such_host() -> None:
    socket.create_connection(("no-such-host.invalid", 1), timeout=1)


def _label() -> None:
    torch.nn.functional.cross_entropy(torch.zeros(1, 3), torch.tensor([7]))


def _token() -> None:
    torch.nn.Embedding(3, 2)(torch.tensor([7]))


def _weights() -> None:
    torch.nn.Linear(2, 2).load_state_dict({"weight": torch.zeros(3, 2)})


def _module() -> None:
    __import__("no_such_package_of_tests")


def _torn_file() -> None:
    torch._C.PyTorchFileReader("/dev/null")


def _full_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def _open_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 8, limits[1]))
    try:
        files = [open(os.devnull) for _ in range(64)]  # noqa: SIM115
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in files:
            file.close()


def _anomaly() -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        tensor = torch.tensor(-1.0, requires_grad=True)
        torch.sqrt(tensor).backward()


def _exception() -> None:
    raise ValueError("the loader gave 3 columns, and the model has 4")


REAL: list[tuple[Callable[[], None], str]] = [
    (_memory, "host out of memory"),
    (_port, "port taken"),
    (_no_server, "rendezvous not reached"),
    (_no_such_host, "hostname not resolved"),
    (_label, "label or token out of range"),
    (_token, "label or token out of range"),
    (_weights, "weights of another model"),
    (_module, "package missing"),
    (_torn_file, "checkpoint damaged"),
    (_full_disk, "disk full"),
    (_open_files, "too many open files"),
    (_anomaly, "loss not finite"),
    (_exception, "an exception"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("fail", "name"), REAL, ids=lambda value: getattr(value, "__name__", None))
def test_a_failure_made_here_is_named(fail: Callable[[], None], name: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        fail()
    lines = f"{type(raised.value).__name__}: {raised.value}".splitlines()
    named = {failure.name for line in lines if (failure := failure_in(line))}
    assert name in named, lines


# --- recorded -----------------------------------------------------------------------------------------------------

RECORDED = {
    "out of memory": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.",
    ],
    "host out of memory": [
        "[4381.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=job_41",
        "Memory cgroup out of memory: Killed process 5120 (python) total-vm:92131244kB",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
    "a rank was killed": [
        "  exitcode  : -9 (pid: 4410)",
        "  traceback : Signal 9 (SIGKILL) received by PID 4410",
    ],
    "shared memory full": [
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "RuntimeError: DataLoader worker (pid 325) is killed by signal: Bus error. It is possible that ...",
        "node1:88:90 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-Xa91bQ to 9637892 bytes",
    ],
    "disk full": ["OSError: [Errno 122] Disk quota exceeded: '/home/a/run/checkpoints'"],
    "too many open files": ["RuntimeError: received 0 items of ancdata"],
    "port taken": [
        "RuntimeError: The server socket has failed to listen on any local address. port: 29500, "
        "code: -98, name: EADDRINUSE, message: address already in use",
    ],
    "rendezvous not reached": [
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to "
        "(10.0.0.7, 29500).",
        "OSError: [Errno 113] No route to host",
    ],
    "illegal memory access": [
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        "NVRM: Xid (PCI:0000:4e:00): 31, pid=4410, name=python, Ch 00000008, MMU Fault",
    ],
    "hostname not resolved": [
        "socket.gaierror: [Errno -2] Name or service not known",
        "[W socket.cpp:697] [c10d] The IPv4 network addresses of (node-1, 29500) cannot be retrieved (gai error: -2 - "
        "Name or service not known).",
    ],
    "wrong network interface": [
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        "node2:77:77 [0] NCCL WARN Bootstrap : no socket interface found",
        "RuntimeError: Connection closed by peer [127.0.1.1]:4410",
        "RuntimeError: [enforce fail at device.cc:65] rp != nullptr. Unable to find address for: eth9",
    ],
    "InfiniBand fails": [
        "node1:7:9 [0] NCCL WARN Call to ibv_reg_mr failed",
        "node1:7:9 [2] NCCL WARN NET/IB : Got completion from peer 10.0.0.9<4791> with status=12 opcode=0 len=0",
    ],
    "hub not reached": [
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
        "ConnectionError: (MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443)\"))",
    ],
    "driver too old": [
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        "Failed to initialize NVML: Driver/library version mismatch",
    ],
    "torch built for other GPUs": [
        "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
        "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.",
    ],
    "packages that don't fit": [
        "RuntimeError: operator torchvision::nms does not exist",
        "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE",
        "OSError: libcudart.so.12: cannot open shared object file: No such file or directory",
    ],
    "package missing": ["ModuleNotFoundError: No module named 'deepspeed'"],
    "no compiler": [
        "torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx",
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable",
        "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)",
        "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
    ],
    "label or token out of range": [
        "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward: block: [0,0,0], thread: [3,0,0] Assertion "
        "`t >= 0 && t < n_classes` failed.",
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
    ],
    "GPU broken": [
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "NVRM: Xid (PCI:0000:4e:00): 79, pid=4410, GPU has fallen off the bus.",
    ],
    "crash in native code": ["Fatal Python error: Segmentation fault"],
    "loss not finite": ["RuntimeError: Function 'SqrtBackward0' returned nan values in its 0th output."],
    "mismatched collectives": [
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=4, OpType=ALLREDUCE), but Rank 1 is running collective: BROADCAST",
        "[enforce fail at ../gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8192 vs 4096",
    ],
    "parameters without gradient": [
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
    ],
    "data worker died": [
        "RuntimeError: DataLoader worker (pid(s) 3216, 3217) exited unexpectedly",
        "RuntimeError: DataLoader worker (pid 3216) is killed by signal: Killed.",
    ],
    "weights of another model": ['\tMissing key(s) in state_dict: "head.weight", "head.bias". '],
    "checkpoint damaged": ["RuntimeError: PytorchStreamReader failed reading zip archive"],
    "file system fails": [
        "OSError: [Errno 116] Stale file handle: '/nfs/run'",
        "OSError: [Errno 5] Input/output error",
    ],
    "preempted or out of time": [
        "slurmstepd: error: *** STEP 41.0 ON n1 AT 2026-11-02T10:00:01 DUE TO TIME LIMIT ***",
        "slurmstepd: error: *** JOB 41 ON n1 AT 2026-11-02T10:00:01 DUE TO PREEMPTION ***",
    ],
    "a rank exited": [
        "  exitcode  : 3 (pid: 16753)",
    ],
    "an exception": ["KeyError: 'labels'", "my_package.errors.NoSensorError"],
    "NCCL fails": [
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    ],
    "NCCL timeout": [
        "[rank0]:[E321 02:07:08 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=4, Timeout(ms)=600000) ran for 600060 milliseconds",
    ],
    "collective timed out": [
        "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation to complete",
    ],
    "peer closed its connection": [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4410",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "[W TCPStore.cpp:106] recvValue failed on SocketImpl(fd=4, addr=[n1]:4410): failed to recv, got 0 bytes",
    ],
}
RECORDED_FILES = {
    "updates discarded": ('{"step": 3, "kept": false, "verdict": "non_finite"}', "metrics.jsonl"),
    "save failed": ('{"saved": 4, "step": 4, "bytes": 0, "failure": "no space"}', "events.jsonl"),
}


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in RECORDED.items() for line in lines])
def test_a_recorded_line_is_named(name: str, line: str) -> None:
    failure = failure_in(line)
    assert failure is not None
    assert failure.name == name


@pytest.mark.parametrize("name", RECORDED_FILES)
def test_a_recorded_record_is_named(name: str) -> None:
    line, file = RECORDED_FILES[name]
    failure = failure_in(line, file)
    assert failure is not None
    assert failure.name == name
    assert failure_in(line) is None


def test_every_failure_of_the_catalog_is_tested() -> None:
    shown = {failure.name for failure in KNOWN if failure.pattern is not None}
    assert shown == {*RECORDED, *RECORDED_FILES}
    assert len({failure.name for failure in KNOWN}) == len(KNOWN)


# --- recorded by Lockstep ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind.remedy], ids=lambda kind: kind.name)
def test_a_kind_has_its_row_whatever_its_message(kind: FailureKind) -> None:
    row = failure_of(kind, "any words")
    assert row is not None
    assert (row.name, row.cause, row.remedy) == (kind.title, kind.cause, kind.remedy)


def test_what_another_program_has_written_explains_an_exception() -> None:
    line = "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"
    for kind in (FailureKind.EXCEPTION, FailureKind.DEVICE, FailureKind.PEER_FAILED):
        row = failure_of(kind, line)
        assert row is not None
        assert row.name == "torch built for other GPUs"


def test_no_pattern_reads_a_sentence_of_lockstep() -> None:
    patterns = [failure.pattern for failure in KNOWN if failure.pattern is not None and not failure.file]
    read = [
        f"{file.name}:{line}: {text}"
        for file in SOURCE.rglob("*.py")
        if file.name not in ("known_failures.py", "failure_kinds.py", "memory_faults.py")  # it plants what torch prints
        for line, text in _sentences(file)
        if any(pattern.search(text) for pattern in patterns)
    ]
    assert not read, "\n".join(read)


def _sentences(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the strings of several words in a file, placeholders left empty, without docstrings."""
    tree = ast.parse(file.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    skipped |= {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "re.compile"
        for part in ast.walk(node)
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            values = [value.value if isinstance(value, ast.Constant) else "" for value in node.values]
            text = "".join(map(str, values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | skipped:
            text = node.value
        else:
            continue
        if text.count(" ") > 3 and id(node) not in skipped:
            yield node.lineno, text


ORDINARY = """\
stdlib-lm
  strategy    ddp on 2 ranks, backend gloo
  batch       16 = 8 x 1 x 2 (micro-batch x accumulation x ranks)
step 1/480  loss 5.21  18.2k tokens/s  71.1 samples/s  4.44 steps/s  grad norm 4.278  lr 1.20e-04  epoch 1  1:48 left
step 480: evaluation held-out: loss 1.444, perplexity 4.236, accuracy 61.78 %, bits per byte 2.083
step 480: saved (5.37 MiB in 0.04 s, training waited 0.02 s)
done: 480 steps, 7,680 samples, 1,966,080 tokens in 1 min 01 s
note: 3 ranks share 2 cores: they take turns, and each is slower
node1:88:90 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>
node1:88:90 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct, /dev/shm/nccl-Xa91bQ
node1:88:90 [0] NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instability or hang!
[W1123 19:29:32.083 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3
[W1123 19:29:32.083 socket.cpp:759] [c10d] The IPv6 network addresses of (n1, 29500) cannot be retrieved (gai error: -2)
{"step": 10, "kept": true, "verdict": "kept", "loss": 3.1}
{"saved": 10, "step": 10, "bytes": 3805184, "seconds": 0.2, "lost_seconds": 0.001}"""


@pytest.mark.parametrize("line", ORDINARY.splitlines())
@pytest.mark.parametrize("file", ["", "metrics.jsonl", "events.jsonl"])
def test_an_ordinary_line_shows_no_failure(line: str, file: str) -> None:
    assert failure_in(line, file) is None


def test_a_hostile_line_takes_no_time() -> None:
    began = time.process_time()
    long_worker = "DataLoader worker (pid(s) " + "1, " * 1300
    for text in ("a" * 4000, "(" * 4000, long_worker, "ran on " * 570):
        failure_in(text)
    assert time.process_time() - began < 10  # backtracking would take hours


def test_the_catalog_is_shown() -> None:
    text = describe_known(80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n{failure.name}\n" in text for failure in KNOWN)
    assert len(known_as_json()) == len(KNOWN)
    assert all(row["cause"] and row["remedy"] for row in known_as_json())

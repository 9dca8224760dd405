"""The catalog names each failure by what torch, NCCL, the kernel or Lockstep print, made here where that can be."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from lockstep.doctor.known_failures import KNOWN, failure_in
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


def _no_permission() -> None:
    raise PermissionError(13, os.strerror(13), "/data/shard-7.bin")


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
    (_no_permission, "no permission"),
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
    "GPU out of memory": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.",
        "lockstep: out of memory in the backward of update 1: 3,221,225,472 bytes were requested",
    ],
    "host out of memory": [
        "[4381.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=job_41",
        "Memory cgroup out of memory: Killed process 5120 (python) total-vm:92131244kB",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
    "a rank was killed": [
        "  exitcode  : -9 (pid: 4410)",
        "  traceback : Signal 9 (SIGKILL) received by PID 4410",
        "rank 1 was killed by SIGKILL",
        "rank 1 was killed by SIGKILL: out of memory, perhaps (the kernel's log, dmesg, would show it)",
    ],
    "a rank was killed from outside": [
        "rank 1 was killed by SIGKILL: by a person or a scheduler; the kernel has counted no out-of-memory kill here",
    ],
    "an import fails": [
        "ImportError: cannot import name 'Net' from 'mine' (/home/a/mine.py)",
        "AttributeError: partially initialized module 'mine' has no attribute 'Net' (most likely due to a circular",
        "SyntaxError: invalid syntax",
    ],
    "bad numbers": [
        "step 12: not finite: loss nan, gradient norm nan; suspected: the whole update, samples 3, 4 "
        "(recovery.bad_numbers.nonfinite: stop); its update was discarded",
        "step 12: a spike: loss 90; suspected: the whole update, sample 3 (recovery.bad_numbers.spike: stop); its",
    ],
    "no progress": ["nothing was recorded for 5 min before the end, since 2026-11-02 10:00:01"],
    "a rank hangs": [
        "rank 1 did not answer within 20 s (launch.timeout), while rank 0 waited in a collective. If a rank hangs",
        "ranks 1, 2 and 5 on hosts a, b did not answer within 20 s (launch.timeout), while the others waited in a",
        "rank 1 hangs in its forward at model.py:33 in forward (update 12, samples 311, 8); the others wait for it",
        "ranks 1 and 2 hang between two updates (update 12); the others wait for them",
        "rank 3 was stopped (SIGSTOP), and killed in its forward (update 12, samples 311, 8)",
        "the ranks wait in collectives that don't match: rank 0 in all_reduce; rank 1 in barrier",
    ],
    "shared memory full": [
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "RuntimeError: DataLoader worker (pid 325) is killed by signal: Bus error. It is possible that ...",
        "node1:88:90 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-Xa91bQ to 9637892 bytes",
    ],
    "disk full": ["OSError: [Errno 122] Disk quota exceeded: '/home/a/run/checkpoints'"],
    "too many open files": ["RuntimeError: received 0 items of ancdata"],
    "too many processes": [
        "RuntimeError: can't start new thread",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 31 of 64: Resource temporarily unavailable",
    ],
    "port taken": [
        "RuntimeError: The server socket has failed to listen on any local address. port: 29500, "
        "code: -98, name: EADDRINUSE, message: address already in use",
        "lockstep: launch.port: can't listen on port 29500 (Address already in use); 0 takes any free port",
    ],
    "rendezvous not reached": [
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to "
        "(10.0.0.7, 29500).",
        "OSError: [Errno 113] No route to host",
        "lockstep: rank 3 could not join the other 7 ranks at 10.0.0.7:29500 in 600 of 600 s: timed out",
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
        "rank 1 could not join the other 1 ranks at 10.0.0.1:29500 in 0.02 of 60 s: Network is unreachable; a uses "
        "eth1, 10.5.0.5 (GLOO_SOCKET_IFNAME), and reaches the others by eth0, 10.0.0.1",
        "RuntimeError: Connection closed by peer [127.0.1.1]:4410",
        "RuntimeError: [enforce fail at device.cc:65] rp != nullptr. Unable to find address for: eth9",
    ],
    "InfiniBand fails": [
        "node1:7:9 [0] NCCL WARN Call to ibv_reg_mr failed",
        "node1:7:9 [2] NCCL WARN NET/IB : Got completion from peer 10.0.0.9<4791> with status=12 opcode=0 len=0",
    ],
    "host lost": ["host b (ranks 4 to 7) is lost: nothing has come from it for 10 s"],
    "hub not reached": [
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
        "ConnectionError: (MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443)\"))",
        "lockstep: model bert-base is neither a folder here nor in the cache, and the hub does not answer",
    ],
    "hub refuses": ["huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-66)"],
    "clock wrong": [
        "An error occurred (RequestTimeTooSkewed) when calling the PutObject operation",
        "ssl.SSLCertVerificationError: certificate verify failed: certificate is not yet valid (_ssl.c:1006)",
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
    "CUDA used before a fork": ["RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with ..."],
    "two ranks on one GPU": [
        "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
        "launch.ranks: ranks 0 and 1 have the same device, and 2 ranks have 1 of cuda; start one rank for each",
    ],
    "label or token out of range": [
        "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward: block: [0,0,0], thread: [3,0,0] Assertion "
        "`t >= 0 && t < n_classes` failed.",
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
    ],
    "GPU broken": [
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "NVRM: Xid (PCI:0000:4e:00): 79, pid=4410, GPU has fallen off the bus.",
        "the GPU of rank 3 on node2 reports Xid error 95 (an uncontained memory error)",
    ],
    "crash in native code": ["Fatal Python error: Segmentation fault", "rank 2 was killed by SIGSEGV"],
    "sample ends its reader": [
        "rank 0 was killed by SIGSEGV; it was reading sample 17",
        "rank 0 ended with exit code 3; it was reading one of samples 4, 17, 9",
        "a data worker died while it read sample 17: DataLoader worker (pid 7) exited unexpectedly with exit code 3",
        "rank 0 hangs fetching data at mine.py:29 in __getitem__ (update 10, sample 17); the other rank waits for it",
        "rank 0 hangs fetching data at fetching.py:160 in _from_workers (update 9, data worker 0 reads sample 17 at x)",
    ],
    "evaluation set ends its reader": [
        "rank 0 was killed by SIGSEGV; it was reading sample 3 of data.evaluation.held-out",
        "rank 0 ended with exit code 3; it was reading one of samples 4, 17, 9 of data.evaluation.held-out",
        "rank 0 hangs at the end of the run at mine.py:19 in read (sample 11 of data.evaluation.held-out)",
    ],
    "evaluation sample can't be used": [
        "rank 0: data.evaluation.held: sample 17 can't be read: OSError: corrupt jpeg (mine.py:47). Mend it",
        "data.evaluation.held-out: samples 1, 17 can each be read, but not put into one batch: RuntimeError: stack",
    ],
    "too many bad samples": [
        "1 sample of data.train can't be used, and data.bad_samples.limit is 0. Mend the data, or"
    ],
    "one sample doesn't fit in memory": [
        "out of memory in the forward of update 1: 1 of 2 GiB were free; micro-batches have one sample already",
    ],
    "out of memory on a CPU": ["out of memory in the backward of update 1: 1 of 2 GiB were free (ulimit -v limit);"],
    "sample can't be used": [
        "rank 0: sample 17 can't be used: the dataset returned None for it; data.bad_samples.policy: skip leaves such",
        "samples 1, 17 can each be read, but not put into one batch: RuntimeError: stack expects each tensor to be ...",
    ],
    "loss not finite": ["lockstep: 25 updates in a row had a loss or gradient that was not finite; lower optim.lr"],
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
    "checkpoint of other data": ["the checkpoint of step 10 is of a run with other data, model or seed: the fingerpr"],
    "checkpoint damaged": ["RuntimeError: PytorchStreamReader failed reading zip archive"],
    "no permission": ["PermissionError: [Errno 13] Permission denied: '/data'"],
    "file system fails": [
        "OSError: [Errno 116] Stale file handle: '/nfs/run'",
        "OSError: [Errno 5] Input/output error",
    ],
    "preempted or out of time": [
        "slurmstepd: error: *** STEP 41.0 ON n1 AT 2026-11-02T10:00:01 DUE TO TIME LIMIT ***",
        "slurmstepd: error: *** JOB 41 ON n1 AT 2026-11-02T10:00:01 DUE TO PREEMPTION ***",
    ],
    "a rank exited": [
        "rank 1 ended with exit code 9",
        "rank 1 ended with exit code 0 before it was done",
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
    "slow rank or input": [
        "rank 0 waited 60 s for rank 1, and waits on",
        "UserWarning: This DataLoader will create 16 worker processes in total. Our suggested max number of worker ...",
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


@pytest.mark.parametrize(
    "line",
    [
        "rank 0 was killed by SIGSEGV; it was reading sample 3 of an evaluation set",
        "rank 0 was killed by SIGSEGV; it was reading one of samples 3, 4 of an evaluation set",
        "rank 0 was killed by SIGSEGV; it was reading sample 3 of data.evaluation.held-out",
        "lockstep: sample 17 of data.train can't be used: reading it has ended the process: left out, 1 of at most 10",
    ],
)
def test_no_training_sample_is_blamed_for_what_it_did_not_do(line: str) -> None:
    failure = failure_in(line)
    assert failure is None or "sample" not in failure.name
    assert failure is None or "leave_out=" not in failure.remedy


def test_every_failure_of_the_catalog_is_tested() -> None:
    assert len(KNOWN) >= 25
    assert {failure.name for failure in KNOWN} == {*RECORDED, *RECORDED_FILES}
    assert len({failure.name for failure in KNOWN}) == len(KNOWN)


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
    for text in ("a" * 4000, "(" * 4000, long_worker, "waited " + "1." * 2000, "ran on " * 570):
        failure_in(text)
    assert time.process_time() - began < 0.5


def test_the_catalog_is_shown() -> None:
    text = describe_known(80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n{failure.name}\n" in text for failure in KNOWN)
    assert len(known_as_json()) == len(KNOWN)
    assert all(row["cause"] and row["remedy"] for row in known_as_json())

"""A real Slurm: munged, slurmctld, and a slurmd for each of two nodes, which are namespaces of this machine.

    this machine          munged   slurmctld   bridge 10.77.X.1
    namespace n1          slurmd               veth   10.77.X.11      network, host name and mounts of its own
    namespace n2          slurmd               veth   10.77.X.12

Needs root, iproute2, and Debian's slurm-wlm and munge; `why_not` returns what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PROGRAMS = (
    "slurmctld",
    "slurmd",
    "munged",
    "sbatch",
    "srun",
    "scontrol",
    "scancel",
    "squeue",
    "ip",
    "nsenter",
    "unshare",
)
_PATIENCE_S = 60
NODES = ("n1", "n2")


def why_not() -> str | None:
    """Why no Slurm can be brought up here; None if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge iproute2"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "needs namespaces, which this machine refuses"


@dataclass(frozen=True)
class Cluster:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: object) -> str:
        """One of Slurm's commands."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            [*map(str, words)], env=environment, text=True, stdout=subprocess.PIPE, check=True, timeout=_PATIENCE_S
        ).stdout

    def state(self, job: object) -> dict[str, str]:
        text = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def start_when_requeued(self, name: str) -> None:
        """Wait until a job of this name is queued again, and let it start at once; Slurm would wait ten seconds."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            job = self.call("squeue", "--noheader", f"--name={name}", "--states=PENDING", "--format=%A").strip()
            if job and self.state(job)["Restarts"] != "0":
                break
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.3)
        time.sleep(1.1)  # the new credential has to be younger than the revoked one, in whole seconds
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def logs(self) -> str:
        """The last lines of the daemons, for a failed test."""
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.folder.glob("*.log")))


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Brings one up in some seconds, and ends it."""
    with ExitStack() as stack:
        subnet = _bridge(stack)
        port = _free_port()
        socket_path = folder / "munge.socket"
        _configure(folder, subnet, port, socket_path)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        munge = [f"--{name}-file={folder / f'munge.{name}'}" for name in ("key", "pid", "log", "seed")]
        _start(stack, folder, "munged", "munged", "--foreground", "--force", f"--socket={socket_path}", *munge)
        _wait(socket_path.exists)
        environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        _start(stack, folder, "slurmctld", "slurmctld", "-D", "-c", **environment)
        for number, node in enumerate(NODES):
            name = _namespace(stack, subnet, number)
            inside = f"hostname {node}; mount --bind {folder}/hosts /etc/hosts; exec slurmd -D -N {node}"
            words = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "sh", "-c", inside]
            _start(stack, folder, f"slurmd-{node}", *words, **environment)
        made = Cluster(folder)
        _wait(lambda: _idle(made), made)
        yield made


def _idle(made: Cluster) -> bool:
    with suppress(subprocess.CalledProcessError):
        return made.call("sinfo", "--noheader", "--format=%D %T").strip() == f"{len(NODES)} idle"
    return False


def _configure(folder: Path, subnet: str, port: int, munge: Path) -> None:
    here = socket.gethostname()
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={node} NodeAddr={subnet}.{11 + number} CPUs=2 RealMemory=1000 State=UNKNOWN"
        for number, node in enumerate(NODES)
    )
    (folder / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={here}({subnet}.1)
SlurmctldPort={port}
SlurmdPort={port + 1}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
ReturnToService=2
KillWait=10
MinJobAge=600
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes={",".join(NODES)} MaxTime=INFINITE State=UP PriorityTier=2
"""
    )
    hosts = "".join(f"{subnet}.{11 + number} {node}\n" for number, node in enumerate(NODES))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{subnet}.1 {here}\n{hosts}")


def _bridge(stack: ExitStack) -> str:
    """A bridge on a network that no other test has; returns the first three numbers of its addresses."""
    number = 1 + os.getpid() % 250
    name = f"lsbr{os.getpid()}"
    _ip(stack, "link", "add", name, "type", "bridge", undo=("link", "del", name))
    _ip(stack, "addr", "add", f"10.77.{number}.1/24", "dev", name)
    _ip(stack, "link", "set", name, "up")
    return f"10.77.{number}"


def _namespace(stack: ExitStack, subnet: str, number: int) -> str:
    """A network namespace with one interface on the bridge."""
    name, bridge, veth = f"ls{os.getpid()}n{number}", f"lsbr{os.getpid()}", f"lsv{os.getpid()}n{number}"
    _ip(stack, "netns", "add", name, undo=("netns", "del", name))
    _ip(stack, "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip(stack, "link", "set", veth, "master", bridge, "up")
    for words in (("addr", "add", f"{subnet}.{11 + number}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
        _ip(stack, "-n", name, *words)
    _ip(stack, "-n", name, "link", "set", "lo", "up")
    return name


def _ip(stack: ExitStack, *words: str, undo: tuple[str, ...] = ()) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=_PATIENCE_S)
    if undo:
        stack.callback(subprocess.run, ["ip", *undo], check=False, capture_output=True, timeout=_PATIENCE_S)


def _start(stack: ExitStack, folder: Path, log: str, *words: str, **environment: str) -> None:
    """Starts a daemon in its own session, all of whose processes are ended with it."""
    with open(folder / f"{log}.log", "wb") as file:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _wait(moment: Callable[[], bool], made: Cluster | None = None) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not moment():
        assert time.monotonic() < deadline, f"Slurm doesn't come up\n{made.logs() if made else ''}"
        time.sleep(0.05)

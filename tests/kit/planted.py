"""Faults planted for real, as far as one machine allows, and the commands of the doctor that must name them.

    FAULTS    name, what is planted, the text that must name it, and the exit code
    plant     plants one in a folder, runs the command, and returns what it printed

Faults between hosts are planted on network namespaces, and need root (`kit.hosts`).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kit.hosts import Network, network

_PATIENCE_S = 120
_LATE_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static int (*next_gettime)(clockid_t, struct timespec *);

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!next_gettime) next_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int result = next_gettime(clock, now);
    if (clock == CLOCK_REALTIME && result == 0) now->tv_sec -= 40;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return result;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return seconds ? (*seconds = now.tv_sec) : now.tv_sec;
}
"""
"""A library that makes the clock of the processes that preload it 40 s late, and leaves the monotonic one alone."""
_RENDEZVOUS = "host-0:29500"


@dataclass(frozen=True)
class Answer:
    """`command`: as a user would type it. `text`: all that it printed, on all hosts."""

    command: str
    code: int
    text: str


@dataclass(frozen=True)
class PlantedFault:
    """`names`: a regular expression that the output must match, on one line. `hosts`: how many it needs."""

    name: str
    planted: str
    plant: Callable[[Path], Answer]
    names: str
    code: int = 3
    hosts: int = 0

    def why_not(self) -> str | None:
        """Return why it can't be planted here; None if it can."""
        if self.hosts and (os.geteuid() != 0 or shutil.which("ip") is None):
            return "network namespaces need root and iproute2's `ip`"
        if self.name == "full /dev/shm" and (os.geteuid() != 0 or shutil.which("unshare") is None):
            return "a mount namespace needs root"
        if self.name == "clock skew" and shutil.which("cc") is None:
            return "needs a C compiler"
        return None


# --- on one host ----------------------------------------------------------------------------------------------------


def _doctor(folder: Path, *words: str, before: str = "", **environment: str) -> Answer:
    """Run `lockstep doctor` in a fresh interpreter. `before`: lines of sh that run first, with mounts of their own."""
    start = [sys.executable, "-m", "lockstep", "doctor", *words]
    if before:
        start = ["unshare", "--mount", "sh", "-c", f'{before}\nexec "$@"', "sh", *start]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    variables = {
        **plain,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "1000",
        **environment,
    }
    done = subprocess.run(
        start, cwd=folder, env=variables, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    shown = " ".join(f"{name}={value.replace(str(folder), '.')}" for name, value in environment.items())
    return Answer(
        " ".join(filter(None, [shown, "lockstep doctor", *words])), done.returncode, done.stdout + done.stderr
    )


def _taken_port(folder: Path) -> Answer:
    with socket.create_server(("", 0)) as server:
        return _doctor(folder, "--port", str(server.getsockname()[1]))


def install(folder: Path, name: str, version: str, *requires: str) -> None:
    """Leave what pip leaves of a package: metadata, and a module with its version."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n\n")
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "__init__.py").write_text(f"from {name}.version import __version__\n")
    (folder / name / "version.py").write_text(f"__version__ = '{version}'\n")


def _wrong_torchvision(folder: Path) -> Answer:
    install(folder / "site", "torchvision", "0.21.0", "torch (==2.6.0)")
    return _doctor(folder, PYTHONPATH=str(folder / "site"))


FULL_SHM = """mount -t tmpfs -o size=64m tmpfs /dev/shm
head -c 63m /dev/zero > /dev/shm/left-over"""


def _full_shared_memory(folder: Path) -> Answer:
    return _doctor(folder, before=FULL_SHM)


def _no_compiler(folder: Path) -> Answer:
    (folder / "bin").mkdir()
    return _doctor(folder, PATH=str(folder / "bin"))


# --- between hosts --------------------------------------------------------------------------------------------------


def on_hosts(
    folder: Path,
    hosts: int,
    prepare: Callable[[Network], object] = lambda net: None,
    *,
    absent: int | None = None,
    timeout: int = 20,
    environment: Mapping[int, Mapping[str, str]] | None = None,
) -> Answer:
    """Run `doctor --ranks 1` on hosts, the variables of `environment` set on some, and one host absent."""
    words = ["doctor", "--ranks", "1", "--nodes", str(hosts), "--rendezvous", _RENDEZVOUS, "--timeout", str(timeout)]
    words += ["--size", "64KiB"]
    program = [sys.executable, "-m", "lockstep"]
    with network(hosts, folder) as net, ExitStack() as stack:
        prepare(net)
        common = {"LOCKSTEP_JOB_TOKEN": "a token", "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "1000"}
        started = {
            host: net.start(
                host, *program, *words, "--node-rank", host, cwd=folder, **common, **(environment or {}).get(host, {})
            )
            for host in range(hosts)
            if host != absent
        }
        stack.callback(lambda: [_end(each.pid) for each in started.values() if each.lives])
        codes = {running.end() for running in started.values()}
        texts = [(folder / f"of-host-{host}" / name).read_text() for host in started for name in ("out", "err")]
    shown = " ".join(f"{name}={value}" for values in (environment or {}).values() for name, value in values.items())
    assert len(codes) == 1, texts
    return Answer(" ".join(filter(None, [shown, "lockstep", *words])), codes.pop(), "".join(texts))


def _end(process: int) -> None:
    os.killpg(process, signal.SIGKILL)


def _second_interface(net: Network) -> None:
    """Give host 0 an interface of another network, of which host 1 knows nothing."""
    for words in (
        "link add eth1 type veth peer name far1",
        "addr add 10.5.0.5/24 dev eth1",
        "link set eth1 up",
        "link set far1 up",
    ):
        subprocess.run(["ip", "-n", f"{net.name}-0", *words.split()], check=True)


def _wrong_interface(folder: Path) -> Answer:
    return on_hosts(folder, 2, _second_interface, timeout=5, environment={0: {"GLOO_SOCKET_IFNAME": "eth1"}})


def _missing_host(folder: Path) -> Answer:
    return on_hosts(folder, 2, absent=1, timeout=5)


def _slow_link(folder: Path) -> Answer:
    return on_hosts(folder, 3, lambda net: net.slow_to(1, 2))


def _slow_host(folder: Path) -> Answer:
    return on_hosts(folder, 3, lambda net: net.slow(2))


def _clock_skew(folder: Path) -> Answer:
    (folder / "late.c").write_text(_LATE_CLOCK)
    library = folder / "late.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "late.c"), "-ldl"], check=True)
    return on_hosts(folder, 2, environment={1: {"LD_PRELOAD": str(library)}})


def _two_versions(folder: Path) -> Answer:
    install(folder / "site", "torch", "2.12.0")
    return on_hosts(folder, 2, environment={1: {"PYTHONPATH": str(folder / "site")}})


FAULTS = (
    PlantedFault(
        "wrong interface",
        "`GLOO_SOCKET_IFNAME` names a network on one of two hosts that the other doesn't reach",
        _wrong_interface,
        r"host-0 uses eth1, 10\.5\.0\.5 \(GLOO_SOCKET_IFNAME\), and reaches the others by eth0, 10\.77\.0\.1",
        hosts=2,
    ),
    PlantedFault(
        "taken port", "another process listens there", _taken_port, r"port \d+ is taken by process \d+ \(.+\)"
    ),
    PlantedFault(
        "a rank missing",
        "one of two hosts never starts",
        _missing_host,
        r"1 of 2 hosts reached host-0:29500 within 5 s .*: host-0; missing: 1 more",
        hosts=2,
    ),
    PlantedFault(
        "slow link",
        "`tc qdisc ... tbf rate 20mbit` from one of three hosts to another",
        _slow_link,
        r"host-1 and host-2: \S+ MiB/s from host-1; the fastest link has ",
        code=0,
        hosts=3,
    ),
    PlantedFault(
        "slow network card",
        "`tc qdisc ... tbf rate 20mbit` on all that one of three hosts sends",
        _slow_host,
        r"all links of host-2 are slow\. host-0 and host-2: \S+ MiB/s from host-2; .*the fastest link",
        code=0,
        hosts=3,
    ),
    PlantedFault(
        "wrong torchvision",
        "torchvision 0.21.0, made for torch 2.6.0, comes first on the path",
        _wrong_torchvision,
        r"torchvision 0\.21\.0 requires torch==2\.6\.0, and torch is \S+",
    ),
    PlantedFault(
        "full /dev/shm",
        "a tmpfs of 64 MiB, with 63 in use, is mounted there",
        _full_shared_memory,
        r"1\.00 MiB of 64\.0 MiB free in /dev/shm",
    ),
    PlantedFault(
        "clock skew",
        "the clock of one of two hosts is 40 s late (a preloaded library)",
        _clock_skew,
        r"the clock of host-1 is (39|40)\.\d s behind host-0",
        hosts=2,
    ),
    PlantedFault(
        "two torch versions on hosts",
        "one of two hosts has another torch",
        _two_versions,
        r"host host-1 differs from host host-0 in torch \(2\.12\.0, not \S+\)",
        code=2,
        hosts=2,
    ),
    PlantedFault("no compiler", "no compiler in `PATH`", _no_compiler, r"no C\+\+ compiler in PATH", code=0),
)

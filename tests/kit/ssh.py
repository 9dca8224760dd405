"""A real sshd for tests: keys only, made for it, on a high port; its hosts are addresses of loopback.

    a   127.0.0.2        b   127.0.0.3        c   127.0.0.4, whose key is unknown        d   127.0.0.5, a closed port

`why_not` returns what is missing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_S = 20
_SSHD = "/usr/sbin/sshd"


def why_not() -> str | None:
    """Why no sshd can be brought up here; None if it can."""
    missing = [name for name in ("ssh", "ssh-keygen", _SSHD) if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install openssh-server"
    if os.geteuid() != 0:
        return "needs root, for sshd's own user"
    return None


@dataclass(frozen=True)
class SshHosts:
    """`option`: what ssh needs to know them."""

    folder: Path

    @property
    def option(self) -> str:
        return f"--ssh=-F{self.folder}/config"


@contextmanager
def ssh_hosts(folder: Path) -> Iterator[SshHosts]:
    """Brings sshd up, and ends it with its connections."""
    Path("/run/sshd").mkdir(exist_ok=True)
    with socket.socket() as probe, socket.socket() as closed:
        probe.bind(("127.0.0.1", 0))
        closed.bind(("127.0.0.1", 0))
        port, closed_port = probe.getsockname()[1], closed.getsockname()[1]
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    (folder / "sshd_config").write_text(
        f"""Port {port}
ListenAddress 127.0.0.1
{"".join(f"ListenAddress 127.0.0.{number}{chr(10)}" for number in (2, 3, 4))}
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
AuthenticationMethods publickey
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
"""
    )
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"[127.0.0.{number}]:{port} {key}\n" for number in (2, 3)))
    names = "".join(f"Host {name}\n  HostName 127.0.0.{number}\n" for number, name in enumerate("abcd", 2))
    (folder / "config").write_text(
        f"""{names}  Port {closed_port}
Host *
  Port {port}
  User root
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
"""
    )
    with open(folder / "sshd.log", "wb") as log:
        server = subprocess.Popen([_SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not _answers(port):
            assert time.monotonic() < deadline, (folder / "sshd.log").read_text()
            assert server.poll() is None, (folder / "sshd.log").read_text()
            time.sleep(0.02)
        yield SshHosts(folder)
    finally:
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.4", port), 1).close()
    except OSError:
        return False
    return True


def processes_in(folder: Path) -> dict[int, str]:
    """Ids and command lines of the processes whose working folder this is."""
    processes = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "cwd").readlink() == folder:
                processes[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return processes

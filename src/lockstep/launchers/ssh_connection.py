"""The program `ssh` to a host, and what its failures mean."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import IO

from lockstep.launchers.host_connection import last_line

_MOST_LINES = 3
_NO_CONNECTION = 255  # exit code of ssh
_NOT_EXECUTABLE, _NOT_THERE = 126, 127  # exit codes of a shell
SSH_OPTIONS = (
    *("-T", "-x", "-oBatchMode=yes", "-oLogLevel=ERROR", "-oConnectTimeout=10"),
    *("-oServerAliveInterval=5", "-oServerAliveCountMax=6", "-oControlMaster=no", "-oControlPath=none"),
)
"""Options with which ssh never asks, notices a lost connection, and shares none with other processes."""

_REMEDIES = {
    "IDENTIFICATION HAS CHANGED": "its host key is not the one in known_hosts: find out why before you remove the old "
    "one with `ssh-keygen -R {host}`",
    "Host key verification failed": "its host key is not known: call `ssh {host}` once and compare the fingerprint",
    "Permission denied": "it refuses your key ({why}): `ssh-copy-id {host}` installs it, `ssh-add` opens one that has "
    "a passphrase",
    "Could not resolve hostname": "there is no such host ({why}): correct its name, or add it to ~/.ssh/config",
}


class SshProcess:
    """The program `ssh`, connected with Lockstep's process on a host."""

    def __init__(self, host: str, words: Sequence[str], program: str) -> None:
        self._ssh = subprocess.Popen(
            words, 0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._host = host
        self._program = program

    @property
    def stdin(self) -> IO[bytes]:
        assert self._ssh.stdin is not None
        return self._ssh.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._ssh.stdout is not None
        return self._ssh.stdout

    @property
    def stderr(self) -> IO[bytes]:
        assert self._ssh.stderr is not None
        return self._ssh.stderr

    def wait(self) -> int:
        """Return its exit code: of the command there, or ssh's own."""
        return self._ssh.wait()

    def kill(self) -> None:
        """End ssh and what it has started."""
        os.killpg(self._ssh.pid, signal.SIGKILL)

    def why_lost(self, errors: str) -> str | None:
        """Return why ssh has ended without an exit code of the command; None: it has one."""
        if self._ssh.returncode == _NO_CONNECTION or self._ssh.returncode < 0:
            return last_line(errors).removeprefix("ssh: ") or f"ssh has ended with {self._ssh.returncode}"
        return None

    def why_ended(self, errors: str) -> str:
        """Return why ssh has ended without an answer, with a remedy."""
        code, host = self._ssh.wait(), self._host
        why = last_line(errors).removeprefix("ssh: ")
        if code == _NO_CONNECTION:
            remedy = next((remedy for words, remedy in _REMEDIES.items() if words in errors), None)
            if remedy is not None:
                return remedy.format(host=host, why=why)
            return f"it can't be reached ({why}); `ssh {host} true` has to work without a question"
        if code in (_NOT_THERE, _NOT_EXECUTABLE):
            return f"{self._program} is not there ({why}); install Lockstep there, or give its path with --program"
        lines = "; ".join(line.strip() for line in errors.splitlines()[-_MOST_LINES:])
        return f"{self._program} has ended with {code}: {lines}; it needs a Lockstep that can be launched by ssh"


def ssh_words(host: str, options: Sequence[str], program: str) -> tuple[str, ...]:
    """Return the command line of ssh to a host."""
    return ("ssh", *options, *SSH_OPTIONS, "--", host, f"{program} launch at-host")

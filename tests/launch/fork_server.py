"""Forks a launcher for each request from a process that has imported torch and the scenarios: once, not for each.

test --- {"scenario": ..., "arguments": ..., "out": ..., "err": ...} ---> fork server ---> launcher in a new session
     <-- {"pid": ...} ... {"pid": ..., "code": ...} --------------------
"""

from __future__ import annotations

import gc
import json
import os
import sys

import launch_scenarios
import round_scenarios
import torch  # noqa: F401

from lockstep.core.stopping import die_with_parent


def main() -> None:
    die_with_parent(os.getppid())  # a test run that is killed leaves no process
    gc.freeze()  # in a launcher, to collect garbage would copy the pages of all that is imported
    fork_server = os.getpid()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "quit" in request:
            return
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            die_with_parent(fork_server)
            _be_launcher(request)
        print(json.dumps({"pid": pid}), flush=True)


def _be_launcher(request: dict[str, object]) -> None:
    os.setsid()
    for descriptor, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        os.dup2(os.open(str(name), os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code = 99
    try:
        scenarios = {**vars(launch_scenarios), **vars(round_scenarios)}
        code = scenarios[str(request["scenario"])](**request["arguments"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

"""What `launch` asks for, where another launcher, or a program, has started the ranks: set, or refused."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from kit import small
from kit.commands import run_script, start_lockstep
from kit.worlds import in_world

import lockstep
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.launch.other_launchers import launch_environment, read_at_start


def _refusals(asked: list[dict[str, Any]]) -> list[str]:
    """On a rank that torchrun or its like has started."""
    found = []
    for launch in asked:
        try:
            with launch_environment(validate(small.config(launch=launch)).config.launch):
                found.append(os.environ.get("GREETING", ""))
        except ConfigError as refusal:
            found.append(str(refusal))
    assert "GREETING" not in os.environ
    return found


def test_what_another_launcher_contradicts_is_refused_and_the_rest_set() -> None:
    asked: list[dict[str, Any]] = [
        {"ranks": 2, "environment": {"GREETING": "hello"}},
        {"ranks": "auto"},
        {"ranks": 3},
        {"port": 29999},
        {"environment": {"LD_PRELOAD": "x.so", "RANK": "1"}},
        {"environment": {"LD_PRELOAD": "x.so"}},
        {"environment": {"PYTHONPATH": "x"}},
    ]
    for said in in_world(2, _refusals, asked):
        assert said[:2] == ["hello", ""]
        assert "launch.ranks: 3, but the launcher of this process has started 2 on this machine; write 2" in said[2]
        assert "launch.port: 29999, but the launcher of this process has its ranks meet on MASTER_PORT" in said[3]
        assert "launch.environment.RANK: is set for each rank" in said[4]
        assert "launch.environment.LD_PRELOAD: is read when a process starts" in said[5]
        assert "launch.environment.PYTHONPATH: ranks look for modules where" in said[6]


def _train_with_another_number() -> str:
    with pytest.raises(ConfigError) as refusal:
        lockstep.train(small.config(), ranks=3)
    return str(refusal.value)


def test_ranks_of_train_are_those_that_were_started() -> None:
    assert set(in_world(2, _train_with_another_number)) == {
        "ranks: 3, but the launcher of this process has started 2 on this machine; write 2 or auto, or start 3 there "
        "(torchrun --nproc-per-node 3)"
    }


def test_ranks_of_a_config_are_not_ignored_in_one_process() -> None:
    with (
        pytest.raises(ConfigError, match=r"launch.ranks: 2 ranks, and this process is one alone: pass ranks=2"),
        lockstep.session(small.config(launch={"ranks": 2})),
    ):
        pass


def test_what_a_process_reads_as_it_starts_is_known() -> None:
    asked = dict.fromkeys(("LD_PRELOAD", "OMP_NUM_THREADS", "OMP_PROC_BIND", "NCCL_DEBUG", "PYTHONHASHSEED"), "1")
    assert read_at_start(asked) == ["LD_PRELOAD", "OMP_PROC_BIND", "PYTHONHASHSEED"]


# --- programs that start ranks -----------------------------------------------------------------------------------

_SCRIPT = """
import sys, threading, time
from kit import small
import lockstep

{before}

def main():
    try:
        lockstep.train({config}, {arguments})
    except lockstep.Failure as failure:
        print(type(failure).__name__, len(getattr(failure, "problems", ())), failure)

{call}
"""
_GUARD = 'if __name__ == "__main__":\n    main()'
_THREAD = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"


def _said(folder: Path, *, config: dict[str, Any], arguments: str, before: str = "", call: str = _GUARD) -> str:
    script = folder / "script.py"
    config = {"run": {"folder": "run", "steps": 1}, "monitor": {"progress": "none"}, **config}
    script.write_text(
        _SCRIPT.format(before=before, config=f"small.config(**{config!r})", arguments=arguments, call=call)
    )
    done = run_script(script, cwd=folder)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr == "" or "logs" not in done.stderr
    return done.stdout + done.stderr


def test_a_program_gets_the_failure_of_its_ranks(tmp_path: Path) -> None:
    config = {"parallel": {"strategy": "fsdp", "pipeline": 3}}
    said = _said(tmp_path, config=config, arguments="ranks=2")
    assert said.startswith("ConfigError ")
    assert "3" in said
    assert "exit code" not in said
    assert not (tmp_path / "run").exists()


def test_a_script_without_guard_is_told_so_once(tmp_path: Path) -> None:
    said = _said(tmp_path, config={}, arguments="ranks=2", before=_THREAD, call="main()")
    assert said.startswith("ConfigError 1 the script starts ranks as it is imported")
    assert said.count("\n") == 1


def test_a_lambda_that_fresh_interpreters_cannot_get_is_told_without_the_config(tmp_path: Path) -> None:
    said = _said(tmp_path, config={}, arguments="ranks=2, schedule=lambda *_: 1.0", before=_THREAD)
    refused = "ConfigError 1 what the ranks need can't be sent to them: "
    assert re.match(rf"{refused}Can't (pickle|get) local object 'main.<locals>", said), said  # by Python's version
    assert "no lambda" in said
    assert "Config(" not in said
    assert len(said) < 600


# --- sockets -----------------------------------------------------------------------------------------------------


def _listening(processes: list[int]) -> set[str]:
    """Addresses, in the kernel's notation, on which one of them listens for TCP connections."""
    sockets = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            name = os.readlink(descriptor)
            if name.startswith("socket:["):
                sockets.add(name[8:-1])
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {fields[1].rpartition(":")[0] for fields in lines if fields[3] == "0A" and fields[9] in sockets}


_LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (2, "fsdp")])
def test_a_run_on_one_machine_listens_on_loopback_alone(ranks: int, strategy: str, tmp_path: Path) -> None:
    import yaml

    run = {"folder": str(tmp_path / "run"), "steps": 10**8}
    file = tmp_path / "config.yaml"
    monitor = {"progress": "none", "tensorboard": False, "every": 1}
    config = small.config(run=run, monitor=monitor, parallel={"strategy": strategy})
    file.write_text(yaml.safe_dump(config))
    running = start_lockstep("train", file, "--ranks", ranks, cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    running.wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    found = _listening([running.pid, *running.ranks])
    running.send(signal.SIGINT)
    assert running.end() == 75
    assert found, "gloo listens somewhere"
    assert found <= _LOOPBACK

"""The section `launch` is applied or refused where another launcher, or a program, has started the ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit import small
from kit.commands import run_script, start_lockstep
from kit.failures import fails, gives
from kit.worlds import in_world

import lockstep
from lockstep.cli.main import main
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.launch.other_launchers import launch_environment, read_at_start


def _refusals(sections: list[dict[str, Any]]) -> list[str]:
    """Return the greeting or the refusal for each section, on a rank that torchrun or another launcher has started."""
    results = []
    for launch in sections:
        try:
            with launch_environment(validate(small.config(launch=launch)).config.launch):
                results.append(os.environ.get("GREETING", ""))
        except ConfigError as refusal:
            results.append(str(refusal))
    assert "GREETING" not in os.environ
    return results


def test_options_that_another_launcher_contradicts_are_refused_and_others_applied() -> None:
    sections: list[dict[str, Any]] = [
        {"ranks": 2, "environment": {"GREETING": "hello"}},
        {"ranks": "auto"},
        {"ranks": 3},
        {"port": 29999},
        {"environment": {"LD_PRELOAD": "x.so", "RANK": "1"}},
        {"environment": {"LD_PRELOAD": "x.so"}},
        {"environment": {"PYTHONPATH": "x"}},
    ]
    for results in in_world(2, _refusals, sections):
        assert results[:2] == ["hello", ""]
        assert gives(results[2], "launch.ranks:", 3, 2, "write 2")
        assert "launch.port: 29999, but MASTER_PORT is" in results[3]
        assert results[4].startswith("launch.environment.RANK: ")
        assert results[5].startswith("launch.environment.LD_PRELOAD: ")
        assert results[6].startswith("launch.environment.PYTHONPATH: ")


def _train_with_another_number() -> str:
    with pytest.raises(ConfigError) as refusal:
        lockstep.train(small.config(), ranks=3)
    return str(refusal.value)


def test_ranks_of_train_must_match_those_that_were_started() -> None:
    (refused,) = set(in_world(2, _train_with_another_number))
    assert gives(refused, "ranks", 3, 2, "auto", "torchrun --nproc-per-node 3")


def test_ranks_of_a_config_are_not_ignored_in_one_process() -> None:
    with (
        fails(ConfigError, 2, 1, key="launch.ranks"),
        lockstep.session(small.config(launch={"ranks": 2})),
    ):
        pass


def test_variables_that_a_process_reads_as_it_starts() -> None:
    variables = dict.fromkeys(("LD_PRELOAD", "OMP_NUM_THREADS", "OMP_PROC_BIND", "NCCL_DEBUG", "PYTHONHASHSEED"), "1")
    assert read_at_start(variables) == ["LD_PRELOAD", "OMP_PROC_BIND", "PYTHONHASHSEED"]


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


def _output(folder: Path, *, config: dict[str, Any], arguments: str, before: str = "", call: str = _GUARD) -> str:
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
    output = _output(tmp_path, config=config, arguments="ranks=2")
    assert output.startswith("ConfigError ")
    assert "3" in output
    assert "exit code" not in output
    assert not (tmp_path / "run").exists()


def test_a_script_without_guard_is_refused_once(tmp_path: Path) -> None:
    output = _output(tmp_path, config={}, arguments="ranks=2", before=_THREAD, call="main()")
    assert output.startswith("ConfigError 1 ")
    assert gives(output, "import", "script")
    assert output.count("\n") == 1


_OWN_TENSORS = """
import copy
from kit import small
import lockstep

if __name__ == "__main__":
    nets = [small.Net()]
    nets.append(copy.deepcopy(nets[0]).share_memory())
    for folder, net in zip("ab", nets):
        config = small.config(run={"folder": folder, "steps": 3}, monitor={"progress": "none"})
        lockstep.train(config, model=net, ranks=2 if net is nets[1] else None)
    one, two = ([*net.state_dict().values()] for net in nets)
    print(*((a - b).abs().max().item() < 1e-6 for a, b in zip(one, two)))
"""


def test_ranks_own_the_tensors_of_a_module_which_has_the_trained_weights_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_OWN_TENSORS)
    done = run_script(tmp_path / "script.py", cwd=tmp_path)
    assert done.stdout.split()[-4:] == ["True"] * 4, done


def test_what_cannot_be_pickled_is_reported_without_the_config(tmp_path: Path) -> None:
    locked = "ranks=2, schedule=lambda *_, lock=threading.Lock(): 1.0"
    output = _output(tmp_path, config={}, arguments=locked, before=_THREAD)
    assert output.startswith("ConfigError 1 "), output
    assert "_thread.lock" in output
    assert "cloudpickle" in output
    assert "Config(" not in output
    assert len(output) < 600


# --- sockets -----------------------------------------------------------------------------------------------------


def _listening(processes: list[int]) -> set[str]:
    """Return the addresses, in the kernel's notation, on which one of the processes listens for TCP connections."""
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
def test_a_run_on_one_machine_listens_only_on_loopback(ranks: int, strategy: str, tmp_path: Path) -> None:
    import yaml

    run = {"folder": str(tmp_path / "run"), "steps": 10**8}
    file = tmp_path / "config.yaml"
    monitor = {"progress": "none", "tensorboard": False, "every": 1}
    config = small.config(run=run, monitor=monitor, parallel={"strategy": strategy})
    file.write_text(yaml.safe_dump(config))
    running = start_lockstep("train", file, "--ranks", ranks, cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    running.wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    addresses = _listening([running.pid, *running.ranks])
    running.send(signal.SIGINT)
    assert running.end() == 75
    assert addresses, "gloo listens somewhere"
    assert addresses <= _LOOPBACK


class CountsThreads(small.Net):
    """Prints the number of threads with which it is trained."""

    def __init__(self) -> None:
        super().__init__()
        print(f"{torch.get_num_threads()} threads")


def test_a_number_of_threads_holds_on_a_single_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    environment = {"environment": {"OMP_NUM_THREADS": "3"}, "device": "cpu"}
    config = {**small.config(launch=environment, run={"steps": 1}), "model": {"kind": "given"}}
    with lockstep.session(config, model=CountsThreads):
        pass
    config["model"] = {"kind": "custom", "target": f"{__file__}:CountsThreads"}
    file = tmp_path / "threads.yaml"
    file.write_text(yaml.safe_dump({**config, "run": {"steps": 1, "folder": str(tmp_path / "run")}}))
    assert main(["train", str(file), "--ranks", "1"]) == 0
    assert capsys.readouterr().out.count("3 threads") >= 2
    assert torch.get_num_threads() == before

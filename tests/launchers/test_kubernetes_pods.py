"""The containers' commands of `launch kubernetes`, executed on hosts whose names are those of pods."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.commands import Running
from kit.hosts import Network, needs_hosts, network

from lockstep.cli.main import main

DRAINED = """
import time
from pathlib import Path
import lockstep

class Drained(lockstep.extend.Monitor):
    def see(self, report):
        if report.step == 5 and not Path("step-5").exists():
            Path("step-5").touch()
            while not Path("signaled").exists():
                time.sleep(0.01)
            time.sleep(0.3)  # until the signal is there: the other rank waits in the next collective
        return ()
"""


def started(net: Network, container: dict[str, Any], folder: Path) -> list[Running]:
    """Run a container on both hosts."""
    variables = {each["name"]: each.get("value", "a secret") for each in container["env"]}
    words = [[word.replace("$(JOB_COMPLETION_INDEX)", str(pod)) for word in container["args"]] for pod in range(2)]
    return [net.start(pod, *words[pod], cwd=folder, **variables) for pod in range(2)]


@needs_hosts
@pytest.mark.drill
def test_a_drained_pod_stops_both_which_start_again_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ["train", "digits", "--ranks", "1", "run.epochs=null", "run.steps=12", "run.folder=run"]
    train += ["launch.device=cpu", "evaluation.at_end=false", "monitors=[{target: drained.py:Drained}]"]
    Path("drained.py").write_text(DRAINED)
    assert main(["launch", "kubernetes", "--dry-run", "--image", "x", "--volume", "w:/w", "--nodes", "2", *train]) == 0
    service, job = yaml.safe_load_all(capsys.readouterr().out)
    [container] = job["spec"]["template"]["spec"]["containers"]
    with network(2, tmp_path, service["metadata"]["name"]) as net:
        pods = started(net, container, tmp_path)
        pods[0].wait_for(Path("step-5").exists)
        pods[1].send(signal.SIGTERM)
        Path("signaled").touch()
        assert [pod.end() for pod in pods] == [75, 75], [pod.output for pod in pods]
        assert not Path("run/summary.json").exists()
        pods = started(net, container, tmp_path)
        assert [pod.end() for pod in pods] == [0, 0], [pod.output for pod in pods]
    assert "resumes from step" in Path("of-host-0/out").read_text()
    assert "is node 0" in pods[0].output
    assert Path("run/summary.json").exists()

"""`lockstep launch WHERE doctor` checks and measures between the nodes of each launcher; Slurm and ssh: their tests."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.commands import Running, run_lockstep
from kit.failures import gives
from kit.hosts import Network, needs_hosts, network
from kit.ray import ray_cluster, why_not
from launchers.test_aws_nodes import site

from lockstep.cli.main import main

MEASURE = ["doctor", "--ranks", "1", "--size", "1KiB", "--timeout", "20"]
RIGHT = "6 operations gave the right values on all ranks"


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", words[0], "--dry-run", *words[1:]]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def of_docker(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Return each container's command and variables."""
    services = yaml.safe_load(dry_run(capsys, "docker", "--image", "x", "--nodes", "2", *words))["services"]
    secret = {"LOCKSTEP_JOB_TOKEN": "a secret"}
    return [(service["command"], {**service["environment"], **secret}) for service in services.values()]


def of_kubernetes(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Return each pod's command and variables."""
    text = dry_run(capsys, "kubernetes", "--image", "x", "--volume", "w:/w", "--nodes", "2", *words)
    _, job = yaml.safe_load_all(text)
    [container] = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "a secret") for each in container["env"]}
    return [
        ([word.replace("$(JOB_COMPLETION_INDEX)", str(pod)) for word in container["args"]], variables)
        for pod in range(2)
    ]


def started(net: Network, nodes: list[tuple[list[str], dict[str, str]]], folder: Path) -> list[Running]:
    own = {"XDG_CACHE_HOME": str(folder), "HOME": str(folder)}
    return [net.start(node, *words, cwd=folder, **{**more, **own}) for node, (words, more) in enumerate(nodes)]


@needs_hosts
def test_the_containers_of_docker_measure_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = of_docker(capsys, MEASURE)
    with network(2, tmp_path, containers="node") as net:
        containers = started(net, nodes, tmp_path)
        assert [container.end() for container in containers] == [0, 0], [each.output for each in containers]
    text = Path("of-host-0/out").read_text()
    assert gives(text, "2 ranks", "2 hosts", "(node0, node1)", "gloo", "cpu")
    assert RIGHT in text
    assert Path("of-host-1/out").read_text() == "", "one of them prints"


@pytest.mark.drill
@needs_hosts
@pytest.mark.parametrize("nodes_of", [of_docker, of_kubernetes])
def test_a_node_that_does_not_come_is_named(
    nodes_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = nodes_of(capsys, [*MEASURE[:-1], "3"])
    with network(2, tmp_path, containers="node") as net:
        text = " ".join(nodes[0][0])
        match = re.search(r"--rendezvous (\S+):", text)
        assert match is not None
        first = [word.replace(match[1], "node0") for word in nodes[0][0]]
        alone = net.start(0, *first, cwd=tmp_path, **nodes[0][1], XDG_CACHE_HOME=str(tmp_path))
        assert alone.end() == 3, alone.output
    assert gives(alone.output, 1, "2 hosts", "node0:29500", "3 s")
    assert "Traceback" not in alone.output


@pytest.mark.drill
@needs_hosts
def test_the_pods_of_kubernetes_measure_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = of_kubernetes(capsys, MEASURE)
    match = re.search(r"--rendezvous (\S+)-0\.", " ".join(nodes[0][0]))
    assert match is not None
    with network(2, tmp_path, match[1]) as net:
        pods = started(net, nodes, tmp_path)
        assert [pod.end() for pod in pods] == [0, 0], [pod.output for pod in pods]
    text = Path("of-host-0/out").read_text()
    assert gives(text, "2 ranks", "2 hosts", f"({match[1]}-0, {match[1]}-1)", "gloo", "cpu")
    assert RIGHT in text


@pytest.mark.drill
@pytest.mark.skipif(why_not() is not None, reason=f"a real Ray: {why_not()}")
def test_the_nodes_of_ray_measure_between_them(tmp_path: Path) -> None:
    planned = run_lockstep(
        "launch", "ray", "--env", "OMP_NUM_THREADS=1", "--dry-run", "--nodes", 2, *MEASURE, cwd=tmp_path
    )
    entrypoint = shlex.split(json.loads(planned.stdout)["entrypoint"])
    with ray_cluster(dashboard=False) as cluster:
        done = run_lockstep(*entrypoint[1:], cwd=tmp_path, RAY_ADDRESS=cluster.nodes, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done
    assert re.search(r"^2 ranks .*gloo on cpu$", done.stdout, re.MULTILINE), done.stdout
    assert RIGHT in done.stdout


@pytest.mark.drill
@needs_hosts
def test_the_instances_of_aws_measure_between_them(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with site(tmp_path) as made:
        launched = made.launch("--source", "none", "--env", f"XDG_CACHE_HOME={tmp_path}", *MEASURE)
        instances = made.boot()
        code = launched.end()
        assert [instance.end() for instance in instances] == [code, code], made.outputs()
        text = (launched._folder / "out").read_text()
        assert code == 0, made.outputs()
    assert re.search(r"^2 ranks .*2 hosts.*gloo on cpu$", text, re.MULTILINE), text
    assert RIGHT in text

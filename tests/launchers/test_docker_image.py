"""The files of `lockstep init docker` for real: an image is built by buildah, and two containers train."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.commands import Running
from kit.hosts import Network, network
from kit.images import Images, pip_config, why_not

from lockstep.cli.main import main

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/lockstep-drill"
CONFIG = {
    "launch": {"ranks": 1, "device": "cpu"},
    "evaluation": {"every": None, "at_end": False},
    "run": {"epochs": None, "steps": 12},
    "precision": {"compute": "fp32"},
    "monitor": {"every": 1},
}
USER = 1000
VARIABLES = {"LOCKSTEP_JOB_TOKEN": "of-the-drill", "OMP_NUM_THREADS": "1"}  # containers share the machine's cores
MANY = 4000  # steps, more than there is time for

pytestmark = [pytest.mark.drill, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with the files that `init docker` has written, and with much that is not for its image."""
    folder = tmp_path_factory.mktemp("project")
    recipe = yaml.safe_load((ROOT / "recipes" / "digits.yaml").read_text())
    (folder / "run.yaml").write_text(yaml.safe_dump({**recipe, **CONFIG}))
    (folder / "constraints.txt").write_text((ROOT / "constraints.txt").read_text())
    (folder / "requirements.txt").write_text("einops\n")
    (folder / "mine.py").write_text("NAME = 'mine'\n")
    (folder / ".env").write_text("PASSWORD=hunter2\n")
    for name in ("data", "runs"):
        (folder / name).mkdir()
        with open(folder / name / "large", "wb") as file:
            file.truncate(2 << 30)
    os.chown(folder / "runs", USER, USER)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "--wheel-dir", str(folder / "wheels"), str(ROOT)], check=True, capture_output=True)
    assert main(["init", "docker", "--folder", str(folder)]) == 0
    compose = folder / "compose.yaml"
    compose.write_text(compose.read_text().replace("train, digits", "train, run.yaml"))
    return folder


@pytest.fixture(scope="module")
def images(project: Path) -> Iterator[Images]:
    folder = Path(tempfile.mkdtemp(prefix="lockstep-images-"))
    try:
        store = Images(folder)
        store.import_base()
        begin = time.monotonic()
        store.build(project, IMAGE)
        print(f"built in {time.monotonic() - begin:.0f} s")
        yield store
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_image_has_the_project_and_no_secret(images: Images, project: Path) -> None:
    container = images.container(IMAGE, {})
    script = "id -u; id -g; pwd; ls -A; lockstep version; python3 -c 'import mine, einops; print(mine.NAME)'"
    uid, gid, folder, *listed, version, name = images.run(container, "sh", "-c", script).splitlines()
    assert (uid, gid, folder, name) == (str(USER), str(USER), "/workspace", "mine")
    assert version.startswith("lockstep ")
    assert set(listed) == {
        ".dockerignore",
        "constraints.txt",
        "data",
        "mine.py",
        "requirements.txt",
        "run.yaml",
        "runs",
        "wheels",
    }
    assert images.run(container, "sh", "-c", "ls -A data runs /etc/pip.conf 2>&1 || true").splitlines() == [
        "ls: cannot access '/etc/pip.conf': No such file or directory", "data:", "", "runs:",
    ]  # fmt: skip
    described = images.inspect(IMAGE)
    assert "hunter2" not in described
    assert not any(line.partition(" = ")[2] in described for line in pip_config().splitlines() if "/" in line)


def test_digits_trains_from_the_image(images: Images) -> None:
    container = images.container(IMAGE, {})
    printed = images.run(container, "lockstep", "train", "digits", "--ranks", "2", "launch.device=cpu")
    print(printed)
    accuracy = re.findall(r"accuracy ([0-9.]+) %", printed)
    assert float(accuracy[-1]) > 95


def default(text: str) -> str:
    """Return what Compose puts for variables that aren't set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def started(images: Images, net: Network, node: int, compose: dict[str, Any], project: Path) -> Running:
    """Run a service of the compose file in a container on a host of its own."""
    service = compose["services"][f"node{node}"]
    container = images.container(IMAGE, {f"node{host}": net.address(host) for host in range(2)})
    volumes = [
        f"--volume={project / default(each['source'])}:{each['target']}:{'ro' if each.get('read_only') else 'rw'}"
        for each in service["volumes"]
    ]
    how = ["--isolation=chroot", f"--user={default(service['user'])}", f"--hostname={service['hostname']}"]
    variables = [f"--env={name}={value}" for name, value in VARIABLES.items()]
    words = images.words("run", *how, *variables, *volumes, container, "--", "lockstep", *service["command"])
    return net.start(node, *words, cwd=project)


def test_two_containers_give_the_losses_of_one_process(images: Images, project: Path, tmp_path: Path) -> None:
    compose = yaml.safe_load((project / "compose.yaml").read_text())
    container = images.container(IMAGE, {})
    images.run(container, "lockstep", "train", "run.yaml", "run.folder=runs/single")
    shown = images.run(container, "cat", "runs/single/metrics.jsonl")
    single = [json.loads(line)["loss"] for line in shown.splitlines()]
    with network(2, tmp_path) as net:
        nodes = [started(images, net, node, compose, project) for node in range(2)]
        assert [node.end() for node in nodes] == [0, 0], [node.output for node in nodes]
    run = project / "runs" / "docker"
    assert {path.stat().st_uid for path in run.rglob("*")} == {USER}
    assert {path.name for path in (run / "logs").glob("*.log")} == {"rank-0.log", "rank-1.log"}
    assert json.loads((run / "environment.json").read_text())
    most = max(abs(two - alone) / alone for two, alone in zip(losses(run), single, strict=True))
    print(f"{len(single)} losses from {single[0]:.4f} to {single[-1]:.4f}, relative difference at most {most:.1e}")
    assert len(single) == 12
    assert most < 1e-6


def below_init(images: Images, net: Network, node: int, compose: dict[str, Any], project: Path) -> Running:
    """Run a service of the compose file in a container whose process 1 passes signals on."""
    service = compose["services"][f"node{node}"]
    assert (service["init"], service["stop_signal"]) == (True, "SIGTERM")
    hosts = project / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{net.address(host)} node{host}\n" for host in range(2)))
    mounts = {hosts: "/etc/hosts"} | {project / default(each["source"]): each["target"] for each in service["volumes"]}
    command = [*service["command"], "run.folder=runs/stopped", f"run.steps={MANY}"]
    service = {**service, "user": default(service["user"]), "command": command}
    words = images.as_docker(IMAGE, service, mounts, VARIABLES)
    return net.start(node, *words, cwd=project)


def test_a_container_that_docker_stops_stops_both_which_resume(images: Images, project: Path, tmp_path: Path) -> None:
    compose = yaml.safe_load((project / "compose.yaml").read_text())
    grace_s = float(compose["services"]["node1"]["stop_grace_period"].removesuffix("s"))
    run = project / "runs" / "stopped"
    metrics = run / "metrics.jsonl"
    with network(2, tmp_path) as net:
        nodes = [below_init(images, net, node, compose, project) for node in range(2)]
        nodes[0].wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") > 20)
        [init] = nodes[1].ranks
        assert Path(f"/proc/{init}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1] == "1"
        begin = time.monotonic()
        os.kill(init, signal.SIGTERM)
        assert [node.end() for node in nodes] == [75, 75], [node.output for node in nodes]
        stopped_s = time.monotonic() - begin
        stopped_at = len(losses(run))
        print(f"stopped and saved after {stopped_at} steps, {stopped_s:.1f} s after SIGTERM, of {grace_s:.0f} s")
        assert stopped_s < grace_s
        assert stopped_at < MANY
        nodes = [below_init(images, net, node, compose, project) for node in range(2)]
        nodes[0].wait_for(lambda: len(losses(run)) > stopped_at)
        assert [line for line in (project / "of-host-0/out").read_text().splitlines() if "resumes from step" in line]
        os.kill(nodes[0].ranks[0], signal.SIGTERM)
        assert [node.end() for node in nodes] == [75, 75], [node.output for node in nodes]

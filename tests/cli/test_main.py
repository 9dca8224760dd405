"""The entry point: verbs, exit codes, and what is not imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kit.failures import gives

from lockstep.cli import main as door
from lockstep.cli.main import main
from lockstep.core.errors import ConfigError, Failure, Problem, RunFailed, Stopped


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def _modules_after(arguments: list[str]) -> tuple[int, set[str]]:
    """Return the exit code and the heavy modules that the command imported."""
    program = (
        "import sys, json\n"
        "from lockstep.cli.main import main\n"
        f"code = main({arguments!r})\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'transformers', 'datasets', 'rich'} & set(sys.modules)\n"
        "print(json.dumps([code, sorted(heavy)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    code, heavy = json.loads(done.stdout.splitlines()[-1])
    return code, set(heavy)


@pytest.mark.parametrize("words", ["--help", "train --help", "data prepare --help", "verify --help", "recipes"])
def test_help_imports_nothing_heavy(words: str) -> None:
    assert _modules_after(words.split()) == (0, set())


def test_a_single_process_imports_no_dtensors() -> None:
    """They take half a second, and so does torch's compiler."""
    code = (
        "import sys, lockstep.training.job, lockstep.assembly.planning; "
        "print({'torch.distributed.tensor', 'torch.distributed.fsdp', 'torch._dynamo'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_config_is_checked_for_a_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    command_line = ["config", "check", "stdlib-lm", "--parallel.context", "2", "--ranks"]
    assert main([*command_line, "4"]) == 0
    assert capsys.readouterr().out == "ok\n"
    assert main([*command_line, "3"]) == 2
    assert gives(capsys.readouterr().err, "data x context = 1 x 2 = 2", 3)


def test_a_wrong_config_is_refused_without_importing_torch() -> None:
    assert _modules_after(["train", "digits", "--optim.lr", "abc"]) == (2, {"pydantic"})


def test_python_m_lockstep() -> None:
    done = subprocess.run([sys.executable, "-m", "lockstep", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("lockstep 0.")
    assert "torch 2." in done.stdout


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {verb} " in text for verb in door.VERBS)
    assert main([]) == 2


def test_train_alone_trains_nothing_and_names_the_first_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    message = capsys.readouterr().err
    for first in ("usage: lockstep train", "lockstep init", "lockstep train run.yaml", "lockstep train stdlib-lm"):
        assert first in message


def test_dir_lists_what_is_imported_when_it_is_used() -> None:
    import lockstep

    assert {"train", "session", "import_config", "__version__"} <= set(dir(lockstep))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "lockstep: there is no verb 'trian'; did you mean train?\n"),
        (["config", "chek"], "lockstep: config has no command 'chek'; did you mean check?\n"),
        (["data", "get"], "lockstep: data has no command 'get'; there are fetch, prepare, show\n"),
        (
            ["train", "digts"],
            "lockstep: 'digts' is neither a recipe nor a file nor a run's folder; did you mean digits?\n",
        ),
        (["train", "--rank", "2"], "lockstep: --rank: there is no such flag; did you mean --ranks?\n"),
        (["train", "--lr", "2"], "lockstep: --lr: Lockstep's key is optim.lr: write `--optim.lr 2`\n"),
        (["train", "--ranks", "0"], "lockstep: --ranks: '0' is not a whole number above 0, or auto\n"),
        (["generate", "x", "y", "--temperature", "-1"], "lockstep: --temperature: '-1' is not a number of 0 or more\n"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(message)


class _Verb:
    """A verb that ends in a certain way."""

    def __init__(self, end: BaseException | int) -> None:
        self._end = end

    def run(self, words: list[str]) -> int:
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end


@pytest.mark.parametrize(
    ("end", "code", "expected"),
    [
        (0, 0, ""),
        (3, 3, ""),
        (RunFailed("no more"), 1, "lockstep: no more\n"),
        (Failure("failed"), 1, "lockstep: failed\n"),
        (Stopped("asked to"), 130, "lockstep: asked to\n"),
        (KeyboardInterrupt(), 130, "lockstep: stopped\n"),
        (ConfigError(Problem("a.yaml:1:2", "x", "is wrong")), 2, "lockstep: a.yaml:1:2: x: is wrong\n"),
        (
            ConfigError([Problem("a", "x", "is wrong"), Problem("--y", "y", "too")]),
            2,
            "lockstep: 2 problems in the config\n  a: x: is wrong\n  --y: too\n",
        ),
    ],
)
def test_exit_codes(
    end: BaseException | int,
    code: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "lockstep.cli.version", _Verb(end))
    assert main(["version"]) == code
    assert capsys.readouterr().err == expected


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lockstep.cli.version", _Verb(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["version"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--local-rank=1", "version"],
        ["--local_rank=1", "version"],
        ["--local_rank", "1", "version"],
        ["version", "--local-rank=1"],
        ["version", "--local-rank", "1"],
    ],
)
def test_a_local_rank_from_the_launcher_is_accepted(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("flag", "environment", "message"),
    [
        ("--local-rank=0", "1", "--local-rank=0 is for launchers, which set LOCAL_RANK too; --ranks N starts ranks"),
        ("--local-rank=x", "1", "--local-rank=x is for launchers, which set LOCAL_RANK too; --ranks N starts ranks"),
        (
            "--local_rank=0",
            None,
            "--local_rank=0 is for launchers, which set LOCAL_RANK too; --ranks N starts ranks",
        ),
    ],
)
def test_a_local_rank_that_contradicts_is_refused(
    flag: str,
    environment: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if environment is not None:
        monkeypatch.setenv("LOCAL_RANK", environment)
    assert main([flag, "version"]) == 2
    assert capsys.readouterr().err == f"lockstep: {message}\n"


def test_a_closed_pipe_causes_no_traceback() -> None:
    program = f"{sys.executable} -m lockstep config schema | head -n 1"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize("verb", ["report", "eval", "explain", "doctor", "compare"])
def test_a_folder_that_is_not_there_is_a_usage_error(
    verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(tmp_path / "nope")]) == 2
    assert str(tmp_path / "nope") in capfd.readouterr().err

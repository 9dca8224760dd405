"""The command's entry point: find the verb, run it, turn failures into exit codes.

Only the verb's file is imported, and heavy packages only inside the functions that need them: `--help` and errors in
configs take 0.2 s.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn, TextIO

from lockstep.core.errors import ConfigError, Failure, Stopped, message_of
from lockstep.core.json_output import json_only
from lockstep.core.out_of_memory import out_of_memory_cause
from lockstep.core.stopping import stop_at_once
from lockstep.core.terminal import echo
from lockstep.launch.outcome import report_to_torchrun

VERBS = {
    "init": ("init", "write a first config with comments, or a Dockerfile and compose.yaml"),
    "recipes": ("recipes", "list the configs that come with Lockstep"),
    "plan": ("plan", "show what a run will be, without starting it; measure what memory it takes"),
    "train": ("train", "train a recipe or a config file"),
    "eval": ("evaluate", "evaluate the model of a run on its evaluation sets"),
    "generate": ("generate", "continue a text with the language model of a run"),
    "export": ("export", "write a run's model for other tools"),
    "ls": ("ls", "list the runs of a folder, and their states"),
    "top": ("top", "show a run live: progress, loss, and what each rank is doing"),
    "report": ("report", "write a run as one HTML page"),
    "compare": ("compare", "compare runs, as one HTML page: curves, figures, configs, seeds"),
    "explain": ("explain", "explain a run: how fast it is, what limits it, what to do next"),
    "profile": ("profile", "record where time and memory of a run go, and explain it; measure its data loader"),
    "verify": ("verify", "check on your model that every strategy trains like a single process"),
    "chaos": ("chaos", "prove that a run recovers from faults, and ends like an undisturbed run"),
    "doctor": ("doctor", "find what is wrong with a machine, its links, or a run"),
    "launch": ("launch", "run a command elsewhere, such as on the nodes of a Slurm cluster"),
    "config": ("config", "show, check, or describe configs"),
    "data": ("data", "fetch what a recipe needs; turn text into tokens"),
    "ckpt": ("ckpt", "list, verify, compare and prune checkpoints"),
    "completion": ("completion", "print a shell's completion script for verbs, flags and keys"),
    "version": ("version", "print versions"),
}

_GROUPS = {"init": "start", "train": "run", "ls": "look", "verify": "prove", "launch": "elsewhere", "config": "files"}
"""Headings of groups of verbs, by the first verb of each."""

_HEAVY_PACKAGES = ("torch", "numpy", "safetensors")
"""Packages that --help and checks of configs don't need."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the arguments after the program's name, and return its exit code."""
    try:
        return _dispatch(_without_local_rank(list(sys.argv[1:] if argv is None else argv)))
    except SystemExit as exit_:  # argparse has printed the error or the help
        return exit_.code if isinstance(exit_.code, int) else 1
    except Failure as failure:
        _flush(sys.stdout)  # output comes before the error
        report_to_torchrun(failure)
        _print_error(_error_text(failure))
        return failure.exit_code
    except ModuleNotFoundError as error:
        if error.name not in _HEAVY_PACKAGES:
            raise
        _print_error(f"{error.name} is required and not installed: pip install {error.name}")
        return 2
    except KeyboardInterrupt:
        _print_error("stopped")
        return Stopped.exit_code
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        _discard(sys.stdout)
        return 1
    except OSError as error:
        if error.filename is None:  # such as a full disk behind stdout
            _discard(sys.stdout)
        _print_error(f"can't use {error.filename or 'the output or the system'}: {error.strerror or error}")
        return 1
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory_cause(error):
            raise
        _print_error(f"out of memory: {message_of(error)}")
        return 1


def command() -> NoReturn:
    """End this process with the exit code of `main`; called by `lockstep.__main__`."""
    stop_at_once(trains=sys.argv[1:2] == ["train"])
    code = main()
    if "torch" in sys.modules:
        from lockstep.launch.rank import leave

        leave(code)
    sys.exit(code)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        echo(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        arguments[0] = "version"
    verb, *rest = arguments
    if verb not in VERBS:
        raise ConfigError(_no_verb(verb))
    with json_only("--json" in rest):
        code = import_module(f"lockstep.cli.{VERBS[verb][0]}").run(rest)
    assert isinstance(code, int)
    if code != 0:
        _flush(sys.stdout)
        return code
    sys.stdout.flush()  # a closed pipe is noticed here, not at exit
    return 0


def _help() -> str:
    width = max(map(len, VERBS))
    lines = ""
    for verb, (_, summary) in VERBS.items():
        lines += f"\n{_GROUPS[verb]}\n" if verb in _GROUPS else ""
        lines += f"  {verb:<{width}}  {summary}\n"
    what = "Distributed PyTorch training where the run stays the same run, whatever the strategy."
    more = "Run lockstep VERB --help for its arguments. Start here: lockstep init"
    return f"usage: lockstep VERB ...\n\n{what}\n{lines}\n{more}"


def _no_verb(word: str) -> str:
    from lockstep.core.closest import did_you_mean

    meant = [answer for words, answer in _VERBS_OF_OTHER_TOOLS.items() if word in words.split()]
    return f"there is no verb {word!r}; {meant[0] if meant else did_you_mean(word, VERBS, 'the verbs are')}"


_VERBS_OF_OTHER_TOOLS = {
    "torchrun spawn": "lockstep train --ranks N starts N ranks, and torchrun your script",
    "run fit finetune fine-tune pretrain start": "lockstep train RECIPE trains",
    "test evaluate validate score": "lockstep eval RUN evaluates the model of a run",
    "predict infer sample complete chat": "lockstep generate RUN continues a text",
    "resume continue": "lockstep train RUN resumes a run; --from and --fork begin from one",
    "save convert merge-weights push": "lockstep export RUN writes a model for other tools",
    "checkpoint checkpoints": "lockstep ckpt ls RUN lists them",
    "memory": "lockstep plan RECIPE shows the memory, and plan RECIPE --measure measures it",
    "estimate-memory dry-run": "lockstep plan shows a run without starting it",
    "tune sweep": "lockstep launch slurm --sweep KEY=A,B train RECIPE trains once for each value",
}


def _error_text(failure: Failure) -> str:
    problems = failure.problems if isinstance(failure, ConfigError) else ()
    if len(problems) > 1:
        return f"{len(problems)} problems in the config\n" + "\n".join(f"  {problem}" for problem in problems)
    return message_of(failure)


def _print_error(text: str) -> None:
    with suppress(OSError):
        echo(f"lockstep: {text}", file=sys.stderr)
    _flush(sys.stderr)


def _flush(stream: TextIO) -> None:
    """Flush; ignore a closed terminal and a full disk."""
    try:
        stream.flush()
    except OSError:
        _discard(stream)


def _discard(stream: TextIO) -> None:
    """Redirect the stream and its buffer to /dev/null, because Python would write the buffer again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# --- torch.distributed.launch and deepspeed ------------------------------------------------------------------------


def _without_local_rank(arguments: list[str]) -> list[str]:
    """Return the arguments without launchers' `--local-rank=N` or `--local_rank=N`, which must equal LOCAL_RANK."""
    kept: list[str] = []
    items = iter(arguments)
    for item in items:
        flag, equals, value = item.partition("=")
        if flag not in ("--local-rank", "--local_rank"):
            kept.append(item)
            continue
        value = value if equals else next(items, "")
        if os.environ.get("LOCAL_RANK") != value:
            raise ConfigError(f"{flag}={value} is for launchers, which set LOCAL_RANK too; --ranks N starts ranks")
    return kept

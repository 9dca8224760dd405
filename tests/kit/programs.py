"""A program that stands in for one that isn't here: it answers what it is given, and records its calls."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

PROGRAM = f"""#!{sys.executable} -S
import json, os, sys, time
of_a_place = ("--namespace=", "--context=", "--file=", "--project-name=")
words = [word for word in sys.argv[1:] if not word.startswith(of_a_place)]
folder = os.path.dirname(os.path.abspath(sys.argv[0]))
stdin = sys.stdin.read() if words[-1].endswith("/dev/stdin") else ""
with open(folder + "/calls", "a") as file:
    file.write(json.dumps([sys.argv[1:], stdin, os.environ.get("LOCKSTEP_JOB_TOKEN", "")]) + "\\n")
with open(folder + "/answers") as file:
    answers = json.load(file)
line = " ".join(words)
for start, given in answers.items():
    if line.startswith(start):
        answer = given.pop(0) if len(given) > 1 else given[0]
        with open(folder + "/answers.new", "w") as file:
            json.dump(answers, file)
        os.replace(folder + "/answers.new", folder + "/answers")
        if answer[0] == "stop":
            os.kill(os.getppid(), int(os.environ["STOP"]))
            time.sleep(1)
        sys.stdout.write(answer[0])
        sys.stderr.write(answer[1])
        sys.exit(1 if answer[1] else 0)
"""


@dataclass(frozen=True)
class Call:
    """A call: its words, what it has read on stdin, and the job's token in its environment."""

    words: str
    stdin: str
    token: str


class Program:
    """A program in a folder, which the test puts on the PATH."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        program = folder / name
        program.write_text(PROGRAM)
        program.chmod(0o755)
        self.answer({})

    def answer(self, answers: dict[str, list[tuple[str, str]]]) -> None:
        """Set stdout and stderr of the calls that start with a text, one after another; the last one is repeated."""
        (self._folder / "answers").write_text(json.dumps(answers))

    def calls(self) -> list[Call]:
        path = self._folder / "calls"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [Call(shlex.join(words), stdin, token) for words, stdin, token in lines]

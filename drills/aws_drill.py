"""Kills `lockstep launch aws --follow` and breaks its calls, and looks for what is left: `python drills/aws_drill.py`.

    calls    each call of a launch is refused, loses its answer, or a SIGINT comes before or after it; each call of
             `follow` at the end is refused: the tests of tests/launchers, which run first
    kills    a process of `launch aws --follow` against moto's server, over HTTP; it is killed when the server has
             got a number of requests that is drawn, by SIGINT, SIGTERM, SIGHUP or SIGKILL
    checked  is anything left?  if the message has that the job continues, or after SIGKILL: does `cancel` end all of
             it, by the identifier or the run's folder, and do the instances end themselves?

Prints a table, writes results/aws_drill.json, and fails (exit code 1) if anything was left. Everything is drawn from
--seed, but the timing is the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attempts import machine
from kit import s3
from kit.aws import BUCKET, Cloud, cloud, ends
from kit.commands import run_lockstep, start_lockstep

RESULTS = Path(__file__).parent / "results" / "aws_drill.json"
TESTS = Path(__file__).parents[1] / "tests" / "launchers"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
LAUNCH_REQUESTS, ALL_REQUESTS = 20, 60  # about as many as a launch makes, and the whole life of a job that ends at once
OPTIONS = (
    "--type", "g6.12xlarge", "--bucket", BUCKET, "--instance-profile", "train", "--source", "none", "--nodes", 2,
    "--program", "lockstep", "--follow",
)  # fmt: skip
TRAIN = ("train", "digits", "--ranks", 1, "run.folder=run")
KINDS = {
    "refused": "a call of a launch is refused",
    "lost": "its answer is lost",
    "never answered": "its answer is lost, and those of its repetitions",
    "stopped before": "SIGINT before it",
    "stopped after": "SIGINT after it",
    "end": "a call of `follow` at the end is refused, and `follow` is repeated",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=36_000, help="stop the kills after this time")
    parser.add_argument("--no-calls", action="store_true", help="only the kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    began = time.perf_counter()
    for number in SIGNALS[:-1]:  # a background job of a shell ignores some, and so would its children
        signal.signal(number, signal.SIG_DFL)
    calls, left = ({}, []) if arguments.no_calls else faults_at_calls()
    with tempfile.TemporaryDirectory(prefix="aws-drill-") as folder, cloud() as moto, s3.proxied(moto.endpoint) as way:
        os.environ.update(moto.environment, AWS_ENDPOINT_URL=way.endpoint)
        del os.environ["AWS_PROFILE"]
        drill = Drill(Path(folder), moto, way, random.Random(arguments.seed))
        until = time.perf_counter() + arguments.seconds
        for number in range(arguments.attempts):
            if time.perf_counter() < until:
                drill.attempt(number)
    kills = f"--attempts {drill.made} --seed {arguments.seed}"
    command = f"python drills/aws_drill.py {kills}{' --no-calls' * arguments.no_calls}"
    results = {
        "command": command,
        "machine": machine(),
        "calls": calls,
        "kills": {name: dict(counts) for name, counts in drill.kills.items()},
        "left": left + drill.left,
        "seconds": round(time.perf_counter() - began, 1),
    }
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    sys.exit(1 if results["left"] else 0)


def faults_at_calls() -> tuple[dict[str, list[int]], list[str]]:
    """Run the tests of faults at single calls; return how many passed, of how many, by kind, and those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "drill or not drill", f"--junitxml={report}"]
        subprocess.run(
            [*words, "-k", "a_fault_at", TESTS / "test_aws.py"], check=False, stdout=sys.stderr, cwd=TESTS.parents[1]
        )
        cases = list(ElementTree.parse(report).iter("testcase"))
    counts: dict[str, list[int]] = {}
    failed = []
    for case in cases:
        name = case.get("name", "")
        kind = "end" if "at_the_end" in name else re.sub(r".*-(.*)\]", r"\1", name)
        passed = case.find("failure") is None and case.find("error") is None
        count = counts.setdefault(kind, [0, 0])
        count[0] += passed
        count[1] += 1
        failed += [] if passed else [name]
    return counts, failed


class Drill:
    """Launches that are killed, one after another."""

    def __init__(self, folder: Path, moto: Cloud, way: s3.Proxy, rng: random.Random) -> None:
        self._folder = folder
        self._moto = moto
        self._way = way
        self._rng = rng
        self.kills: dict[str, Counter[str]] = {number.name: Counter() for number in SIGNALS}
        self.left: list[str] = []
        self.made = 0

    def attempt(self, number: int) -> None:
        """Launch a job, kill the command, and end what it has left."""
        kill = SIGNALS[number % len(SIGNALS)]
        ends_at_once = self._rng.random() < 0.4
        moment = self._rng.randrange(1, ALL_REQUESTS if ends_at_once else LAUNCH_REQUESTS)
        late = self._rng.uniform(0, 0.05)
        folder = self._folder / str(number)
        folder.mkdir()
        self._way.plan()
        command = start_lockstep("launch", "aws", *OPTIONS, "--ami", self._moto.image, *TRAIN, cwd=folder)
        until, has_ended = time.monotonic() + 120, False
        while len(self._way.requests) < moment and command.lives and time.monotonic() < until:
            if ends_at_once and not has_ended and "instances 2 running" in command.output:
                ends(self._moto, job_in(command.output), 0, 0)
                has_ended = True
            time.sleep(0.001)
        time.sleep(late)
        if command.lives:
            command.send(kill)
        code = command.end()
        case = f"{kill.name} at request {moment}, code {code}"
        counts = self.kills[kill.name]
        counts["attempts"] += 1
        self.made += 1
        before = len(self.left)
        outcome = self._judge(case, code, command.output, folder)
        counts[outcome] += 1
        print(f"{number}: {case}: {outcome}", *self.left[before:], file=sys.stderr, flush=True)
        self._moto.clean()

    def _judge(self, case: str, code: int, output: str, folder: Path) -> str:
        if code == 0:
            self._expect_nothing(case)
            return "ended before"
        if code not in (130, -signal.SIGKILL) or "Traceback" in output:
            self.left.append(f"{case}:\n{output[-1500:]}")
        left = self._moto.left()
        named = re.search(r"the job continues|to end the rest of the job: .*cancel us-east-1/", output)
        if code == 130 and "starting AWS job" in output and not named:
            self.left.append(f"{case}: {output}")
        if code == 130 and ("what was created is removed" in output or "starting AWS job" not in output):
            self._expect_nothing(case)
            return "nothing left" if "starting AWS job" in output else "before the first call"
        if not left and code != 130 and not (folder / "run").exists():
            return "before the first call"
        self._expect_self_destruction(case)
        name = job_in(output) if code == 130 else "run"
        asked = run_lockstep("launch", "aws", "status", name, cwd=folder)
        if asked.returncode != 0 and left:
            self.left.append(f"{case}: status: {asked.stderr}")
        ended = run_lockstep("launch", "aws", "cancel", name, cwd=folder)
        if ended.returncode != 0:
            self.left.append(f"{case}: cancel: {ended.stderr}")
        self._expect_nothing(case)
        return "all ended by `cancel`" if left else "nothing left"

    def _expect_nothing(self, case: str) -> None:
        if left := self._moto.left():
            self.left.append(f"{case}: {', '.join(left)}")

    def _expect_self_destruction(self, case: str) -> None:
        """Every instance that runs has a limit of time as the first command of its script, and ends when it stops."""
        import base64

        ec2 = self._moto.client("ec2")
        live = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        for reservation in ec2.describe_instances(Filters=live)["Reservations"]:
            for instance in reservation["Instances"]:
                asked = {"InstanceId": instance["InstanceId"]}
                given = ec2.describe_instance_attribute(**asked, Attribute="userData")["UserData"]["Value"]
                script = base64.b64decode(given).decode()
                if "\nshutdown -h +1440\n" not in script or "trap finish EXIT" not in script:
                    self.left.append(f"{case}: {instance['InstanceId']} does not end itself")


def job_in(output: str) -> str:
    """Return the identifier that a launch has printed first."""
    match = re.search(r"starting AWS job (\S+)", output)
    assert match is not None, output
    return match[1]


def table(results: Mapping[str, Any]) -> str:
    """Return the tables in Markdown, from what results/aws_drill.json holds."""
    lines = ["| fault | attempts | nothing left |", "|---|--:|--:|"] if results["calls"] else []
    for kind, (passed, attempts) in results["calls"].items():
        lines.append(f"| {KINDS[kind]} | {attempts} | {passed} |")
    outcomes = sorted({name for counts in results["kills"].values() for name in counts} - {"attempts"})
    lines += ["", f"| killed by | attempts | {' | '.join(outcomes)} |", f"|---|--:|{'--:|' * len(outcomes)}"]
    for name, counts in results["kills"].items():
        lines.append(f"| {name} | {counts['attempts']} | {' | '.join(str(counts.get(each, 0)) for each in outcomes)} |")
    lines += ["", f"Left in all: **{len(results['left'])}**."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Jobs of AWS Batch, and files for ParallelCluster: what the launcher `aws` does with --kind.

us-east-1/batch:JOBID                a job of Batch: registered and submitted, asked for, ended
us-east-1/parallelcluster:NAME       files alone: a cluster lives longer than a job, so it is created by you
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.jobs import JobCommand, JobStatus, LaunchPlan
from lockstep.core.terminal import echo, plain_line
from lockstep.launchers.aws_calls import AwsCalls, NoAccess, from_command
from lockstep.launchers.aws_files import CLUSTER, DEFINITION, SCRIPT, batch_calls, cluster_files
from lockstep.launchers.aws_options import AwsOptions
from lockstep.launchers.aws_plan import AwsFacts, type_facts
from lockstep.launchers.aws_prices import cost_note
from lockstep.launchers.tools import write_files

KIND_FILE = "aws.json"

_NUMBER = re.compile(r"(?P<region>[a-z]+(-[a-z]+)+-\d)/(?P<kind>batch|parallelcluster):(?P<name>[A-Za-z0-9-]+)")
_POLL_S = 10.0
_UNKNOWN_JOB = "Batch knows no job {}: it forgets jobs a week after their end"


def plan_elsewhere(command: JobCommand, options: AwsOptions, name: str, region: str) -> LaunchPlan:
    """Return the files, and the calls that submit a job of Batch."""
    aws, unknown, facts = AwsCalls(region, options.profile, attempts=2), "", AwsFacts()
    try:
        facts = type_facts(aws, options)
    except NoAccess as failure:
        unknown = str(failure)
        if options.kind == "batch":
            raise ConfigError(f"a job of Batch states CPUs and memory, which AWS knows: {unknown}") from None
    notes = [cost_note(None if unknown else aws, region, str(options.type), options.nodes, spot=options.spot)]
    record = {"region": region, "profile": options.profile, "name": name}
    files = {command.folder / KIND_FILE: json.dumps(record, indent=2) + "\n"}
    if options.kind == "parallelcluster":
        if unknown:
            notes.append(f"AWS wasn't asked for the GPUs and adapters of the instance type: {unknown}")
        return LaunchPlan(files | cluster_files(command, options, name, region, facts), (), tuple(notes))
    calls = batch_calls(command, options, name, region, facts)
    definition = json.dumps(from_command(calls[0])[2], indent=2) + "\n"
    if options.token_secret is None and options.nodes > 1:
        notes.append("any machine of the network that knows the job's id can join this run; give --token-secret")
    return LaunchPlan({**files, command.folder / DEFINITION: definition}, calls, tuple(notes))


def submit_elsewhere(plan: LaunchPlan) -> str:
    """Write the files; register and submit a job of Batch. Return the job's identifier. Raises RunFailed."""
    texts = {path.name: text for path, text in plan.files.items()}
    record = json.loads(texts[KIND_FILE])
    write_files(plan.files)
    if CLUSTER in texts:
        return f"{record['region']}/parallelcluster:{record['name']}"
    aws = AwsCalls(record["region"], record["profile"])
    (_, _, definition), (_, _, job) = map(from_command, plan.commands)
    registered = aws.call("batch", "register_job_definition", **definition)["jobDefinitionArn"]
    try:
        number = aws.call("batch", "submit_job", **job)["jobId"]
    except BaseException:
        aws.call("batch", "deregister_job_definition", jobDefinition=registered)
        raise
    return f"{record['region']}/batch:{number}"


class ElsewhereJob:
    """A job of Batch, or the files for a cluster.

    Args:
        number: Its identifier.
        folder: Folder of its files, if it is known.
    """

    def __init__(self, number: str, folder: Path | None) -> None:
        match = _NUMBER.fullmatch(number)
        if match is None:
            raise ConfigError(f"{number!r} is no job of AWS Batch, such as us-east-1/batch:JOBID")
        self._number, self._name, self._region = number, match["name"], match["region"]
        self._is_batch = match["kind"] == "batch"
        self._folder = folder
        profile = None
        if folder is not None and (folder / KIND_FILE).is_file():
            profile = json.loads((folder / KIND_FILE).read_text()).get("profile")
        self._aws = AwsCalls(self._region, profile) if self._is_batch else None

    @staticmethod
    def owns(number: str) -> bool:
        """Return whether an identifier names such a job."""
        return _NUMBER.fullmatch(number) is not None

    def status(self) -> JobStatus:
        if self._aws is None:
            place = self._folder or "the run's folder"
            steps = f"`pcluster create-cluster` with {CLUSTER}, then `sbatch {SCRIPT}` on the cluster"
            return JobStatus(f"{self._number}: files alone, in {place}; next: {steps}", 0)
        job = self._described(self._name)
        if job is None:
            raise ConfigError(_UNKNOWN_JOB.format(self._name))
        state = str(job["status"])
        why = plain_line(str(job.get("statusReason") or ""))
        code = {"SUCCEEDED": 0, "FAILED": self._exit_code()}.get(state)
        return JobStatus(f"AWS Batch job {self._name}: {state}{f' ({why})' if why else ''}", code)

    def follow(self) -> int:
        """Print changes of state until the job has ended; its log is in CloudWatch."""
        status, shown = self.status(), ""
        while True:
            if status.text != shown:
                shown = status.text
                echo(shown, file=sys.stderr, flush=True)
            if status.code is not None:
                return status.code
            time.sleep(_POLL_S)
            status = self.status()

    def cancel(self) -> None:
        """End the job: Batch sends SIGTERM, and SIGKILL 30 seconds later."""
        if self._aws is None:
            raise ConfigError(f"nothing was started for {self._number}; `pcluster delete-cluster` deletes a cluster")
        self._aws.call("batch", "terminate_job", jobId=self._name, reason="lockstep launch aws cancel")

    def _described(self, number: str) -> Any:
        assert self._aws is not None
        jobs = self._aws.call("batch", "describe_jobs", jobs=[number]).get("jobs", ())
        return jobs[0] if jobs else None

    def _exit_code(self) -> int:
        try:
            node = self._described(f"{self._name}#0") or {}
        except RunFailed:
            node = {}
        return int(node.get("container", {}).get("exitCode") or 1)

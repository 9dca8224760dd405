"""Jobs of AWS Batch, and files for ParallelCluster: what the launcher `aws` does with --kind.

us-east-1/batch:JOBID                a job of Batch: registered and submitted, asked for, ended
us-east-1/parallelcluster:NAME       files alone: a cluster lives longer than a job, so it is created by you
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.core.terminal import echo, plain, plain_line
from lockstep.launchers.aws_calls import AwsCalls, CallFailed, NoAccess, from_command
from lockstep.launchers.aws_files import CLUSTER, DEFINITION, SCRIPT, batch_calls, cluster_files
from lockstep.launchers.aws_options import AwsOptions
from lockstep.launchers.aws_plan import AwsFacts, type_facts
from lockstep.launchers.aws_prices import cost_note
from lockstep.launchers.tools import Patience, write_files

KIND_FILE = "aws.json"

_NUMBER = re.compile(r"(?P<region>[a-z]+(-[a-z]+)+-\d)/(?P<kind>batch|parallelcluster):(?P<name>[A-Za-z0-9-]+)")
_LOG_GROUP = "/aws/batch/job"  # of a job definition that names none
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

    Raises:
        ConfigError: The identifier is another launcher's.
    """

    def __init__(self, job: LaunchedJob) -> None:
        number, folder = job.number, job.folder
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
        code = {"SUCCEEDED": 0}.get(state) if state != "FAILED" else self._exit_code()
        return JobStatus(f"AWS Batch job {self._name}: {state}{f' ({why})' if why else ''}", code)

    def follow(self) -> int:
        """Print state and log of the main node until the job has ended, and return its exit code."""
        shown, patience = "", Patience(self._number, "aws")
        log = None if self._aws is None else _BatchLog(self._aws)
        while True:
            with patience:
                status = self.status()
                if status.text != shown:
                    shown = status.text
                    echo(shown, file=sys.stderr, flush=True)
                if log is not None:
                    log.print_new((self._described(f"{self._name}#0") or {}).get("container", {}))
                if status.code is not None:
                    return status.code
            time.sleep(_POLL_S)

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


class _BatchLog:
    """The log of a job's main node in CloudWatch, printed once; each attempt of the job has a log of its own."""

    def __init__(self, aws: AwsCalls) -> None:
        self._aws = aws
        self._stream = ""
        self._token: dict[str, str] = {}
        self._is_refused = False

    def print_new(self, container: Mapping[str, Any]) -> None:
        """Print what is new.

        Args:
            container: What Batch describes of the main node's container.

        Raises:
            RunFailed: CloudWatch does not answer.
        """
        stream = str(container.get("logStreamName") or "")
        options = container.get("logConfiguration", {}).get("options") or {}
        if not stream or self._is_refused:
            return
        if stream != self._stream:
            self._stream, self._token = stream, {}
        group = options.get("awslogs-group") or _LOG_GROUP
        place = {"logGroupName": group, "logStreamName": stream, "startFromHead": True}
        while True:
            try:
                page = self._aws.call(
                    "logs", "get_log_events", accept=["ResourceNotFoundException"], **place, **self._token
                )
            except CallFailed as failure:
                if not failure.code:  # no answer
                    raise
                self._is_refused = True
                echo(f"note: the log {stream} of {group} isn't printed: {failure}", file=sys.stderr, flush=True)
                return
            for event in page.get("events", ()):
                echo(plain(str(event["message"])), flush=True)
            token = {"nextToken": page["nextForwardToken"]} if page.get("nextForwardToken") else {}
            if not page.get("events") or token == self._token:
                self._token = token or self._token
                return
            self._token = token

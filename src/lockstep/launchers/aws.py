"""Runs a command on instances of EC2 that are started for it, and terminated after it.

plan                      the script of an instance, and all calls with their parameters
submit                    makes the calls, or undoes them: `aws_start`
status, follow, cancel    `aws_follow`
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
from lockstep.launchers.aws_bundle import project_files
from lockstep.launchers.aws_calls import AwsCalls, NoAccess, known_region
from lockstep.launchers.aws_follow import FollowedJob
from lockstep.launchers.aws_names import AwsJob
from lockstep.launchers.aws_options import AwsOptions, bucket_parts, check, checkpoints
from lockstep.launchers.aws_plan import AwsFacts, facts_of, launch_calls, uses_efa
from lockstep.launchers.aws_prices import cost_note, hourly_price
from lockstep.launchers.aws_start import RECORD_FILE, SCRIPT_FILE, start
from lockstep.launchers.aws_user_data import NodeJob, user_data
from lockstep.launchers.tools import job_name, write_files


class AwsLauncher:
    """The launcher `aws`."""

    options = AwsOptions

    def plan(self, command: JobCommand, options: AwsOptions) -> LaunchPlan:
        """Return the script of an instance and the calls; asks AWS for what it can, and changes nothing."""
        check(command, options)
        region = known_region(options.region, options.profile)
        files, notes = project_files(options.source)
        _refuse_missing(command, options, {path.as_posix() for path in files})
        bucket, prefix = bucket_parts(options)
        job = AwsJob(region, bucket, prefix, job_name(command.name, secrets.token_hex(3)))
        aws = AwsCalls(region, options.profile, attempts=2)
        unknown, facts = "", AwsFacts()
        try:
            facts = facts_of(aws, options)
        except NoAccess as failure:
            unknown = str(failure)
            notes.append(
                f"AWS wasn't asked for the image and the instance type, so the calls aren't complete: {unknown}"
            )
        node = NodeJob(job.name, job.place, region, bool(files), uses_efa(options, facts))
        record = {
            "job": job.identifier,
            "profile": options.profile,
            "nodes": options.nodes,
            "run_folder": command.run_folder.as_posix(),
            "boot_minutes": options.boot_minutes,
            "source": options.source,
            "unknown": unknown,
        }
        notes += _notes(command, options)
        price = None if unknown else hourly_price(aws, region, str(options.type))
        notes.append(cost_note(price, options, region))
        return LaunchPlan(
            {
                command.folder / SCRIPT_FILE: user_data(command, options, node),
                command.folder / RECORD_FILE: json.dumps(record, indent=2) + "\n",
            },
            launch_calls(command, options, job, facts, has_project=bool(files)),
            tuple(notes),
            number=job.identifier,
        )

    def submit(self, plan: LaunchPlan) -> str:
        """Make the calls, and wait until the instances run; if anything fails or a signal comes, remove all of it."""
        record = json.loads(next(text for path, text in plan.files.items() if path.name == RECORD_FILE))
        if record["unknown"]:
            raise RunFailed(record["unknown"])
        write_files(plan.files)
        start(plan, record)
        return str(record["job"])

    def status(self, job: LaunchedJob) -> JobStatus:
        """Return the job's state."""
        return FollowedJob(job).status()

    def follow(self, job: LaunchedJob) -> int:
        """Print the job's log until it has ended; fetch the results and remove everything."""
        return FollowedJob(job).follow()

    def cancel(self, job: LaunchedJob) -> None:
        """Have the run saved and stopped, and remove everything."""
        FollowedJob(job).cancel()


AWS = AwsLauncher()


def _notes(command: JobCommand, options: AwsOptions) -> list[str]:
    notes = [
        "when it has ended, the instances, their disks, groups and objects are removed: by `--follow`, `follow` or "
        f"`cancel`; the instances terminate themselves, after {options.max_hours:g} hours at the latest"
    ]
    if command.starts_run and command.in_folder:
        notes.append(f"checkpoints: {checkpoints(command, options)}; they stay there")
    if options.spot:
        notes.append("the second ec2 run-instances is made only if there are no spot instances")
    return notes


def _refuse_missing(command: JobCommand, options: AwsOptions, copied: set[str]) -> None:
    """Raise ConfigError if the command names a file or a folder that the instances don't get."""
    problems = []
    source = Path(options.source).resolve()
    for word in command.words[1:]:
        path = Path(word)
        if word.startswith("-") or "=" in word or not path.exists():
            continue
        is_below = options.source != "none" and path.resolve().is_relative_to(source)
        inside = path.resolve().relative_to(source) if is_below else None
        if inside is None or not any(name == str(inside) or name.startswith(f"{inside}/") for name in copied):
            message = (
                f"{word} is here, and not among the files that are copied to the instances, which are those that git "
                "knows below --source; add it there, or read it from a bucket"
            )
            problems.append(Problem("", "", message))
    if problems:
        raise ConfigError(problems)

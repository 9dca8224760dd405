"""Files for places on AWS that have schedulers of their own: AWS Batch, and ParallelCluster with its Slurm.

batch              job-definition.json, a multi-node job, and the calls that register and submit it
parallelcluster    cluster.yaml, and job.sh, the script of the launcher slurm
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.core.errors import Paused
from lockstep.core.jobs import JobCommand
from lockstep.launchers.aws_calls import as_command
from lockstep.launchers.aws_names import TAG
from lockstep.launchers.aws_options import AwsOptions, bucket_parts, environment, tags, words_there
from lockstep.launchers.aws_plan import AwsFacts, uses_efa
from lockstep.launchers.slurm_script import SlurmOptions, script
from lockstep.launchers.tools import as_comment, bash_array

DEFINITION, CLUSTER, SCRIPT = "job-definition.json", "cluster.yaml", "job.sh"

_SHARED = "/shared"
_MEMORY_LEFT = 0.9  # Batch's agent and the system need the rest
_SHM = 0.5  # of the memory
_ATTEMPTS = 10  # the most that Batch allows; only a run that was stopped and saved uses them

_BATCH = """\
set -euo pipefail
command=({words})
if [ "$AWS_BATCH_JOB_NUM_NODES" -gt 1 ]; then
    # The main node has no variable with its own address.
    main=${{AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-$(hostname -I | cut -d ' ' -f 1)}}
    command+=(--nodes "$AWS_BATCH_JOB_NUM_NODES" --rendezvous "$main:{port}" --node-rank "$AWS_BATCH_JOB_NODE_INDEX")
    command+=(--job-id "${{AWS_BATCH_JOB_ID%%#*}}.${{AWS_BATCH_JOB_ATTEMPT:-1}}")
fi
exec lockstep "${{command[@]}}"
"""


def batch_calls(
    command: JobCommand, options: AwsOptions, name: str, region: str, facts: AwsFacts
) -> tuple[tuple[str, ...], ...]:
    """Return the calls that register and submit a multi-node job of AWS Batch."""
    definition = job_definition(command, options, name, facts)
    job = {"jobName": name, "jobQueue": options.queue, "jobDefinition": name}
    return (
        as_command("batch", "register_job_definition", region, definition),
        as_command("batch", "submit_job", region, job),
    )


def job_definition(command: JobCommand, options: AwsOptions, name: str, facts: AwsFacts) -> dict[str, Any]:
    """Return the job definition."""
    needs = {"VCPU": facts.vcpus, "MEMORY": int(facts.memory * _MEMORY_LEFT)} | (
        {"GPU": facts.gpus} if facts.gpus else {}
    )
    linux: dict[str, Any] = {"sharedMemorySize": max(int(facts.memory * _SHM), 64)}
    if uses_efa(options, facts):
        paths = [f"/dev/infiniband/uverbs{number}" for number in range(min(facts.efa_interfaces, facts.cards))]
        every = ["READ", "WRITE", "MKNOD"]
        linux["devices"] = [{"hostPath": path, "containerPath": path, "permissions": every} for path in paths]
    container: dict[str, Any] = {
        "image": options.image,
        "instanceType": options.type,
        "command": ["bash", "-c", batch_script(command, options)],
        "resourceRequirements": [{"type": kind, "value": str(number)} for kind, number in needs.items()],
        "linuxParameters": linux,
        "ulimits": [{"name": "memlock", "softLimit": -1, "hardLimit": -1}],
        "environment": [{"name": key, "value": value} for key, value in environment(options).items()],
    }
    if options.job_role is not None:
        container["jobRoleArn"] = options.job_role
    if options.execution_role is not None:
        container["executionRoleArn"] = options.execution_role
    if options.token_secret is not None:
        container["secrets"] = [{"name": "LOCKSTEP_JOB_TOKEN", "valueFrom": options.token_secret}]
    again = [
        {"onExitCode": str(Paused.exit_code), "action": "RETRY"},
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
    ]
    return {
        "jobDefinitionName": name,
        "type": "multinode",
        "nodeProperties": {
            "numNodes": options.nodes,
            "mainNode": 0,
            "nodeRangeProperties": [{"targetNodes": f"0:{options.nodes - 1}", "container": container}],
        },
        "retryStrategy": {"attempts": _ATTEMPTS, "evaluateOnExit": [*again, {"onExitCode": "*", "action": "EXIT"}]},
        "timeout": {"attemptDurationSeconds": max(int(options.max_hours * 3600), 60)},
        "tags": {**tags(options), TAG: name},
    }


def batch_script(command: JobCommand, options: AwsOptions) -> str:
    """Return what the container of a node executes."""
    return _BATCH.format(words=bash_array(words_there(command, options)), port=options.port)


# --- ParallelCluster ------------------------------------------------------------------------------------------------


def cluster_files(command: JobCommand, options: AwsOptions, name: str, region: str, facts: AwsFacts) -> dict[Path, str]:
    """Return the configuration of a cluster, and the batch script for its Slurm."""
    config = yaml.safe_dump(cluster(options, region, facts), sort_keys=False)
    about = f"# {as_comment(command.typed)}\n# pcluster create-cluster --cluster-name {name} --region {region} "
    setup = tuple(f"export {key}={json.dumps(value)}" for key, value in environment(options).items())
    slurm = SlurmOptions(
        nodes=options.nodes,
        partition="train",
        exclusive=True,
        gpus_per_node=str(facts.gpus) if facts.gpus else None,
        setup=(*setup, *options.setup),
        program=options.program or "lockstep",
    )
    folder = Path(_SHARED, name)
    there = JobCommand(
        words=tuple(command.words),
        restart_words=command.restart_words,
        typed=command.typed,
        name=command.name,
        folder=folder / command.run_folder / command.folder.name,
        ranks=command.ranks,
        nodes=command.nodes,
        state_bytes=command.state_bytes,
        run_folder=command.run_folder,
    )
    return {
        command.folder / CLUSTER: f"{about}--cluster-configuration {CLUSTER}\n{config}",
        command.folder / SCRIPT: script(there, slurm, folder),
    }


def cluster(options: AwsOptions, region: str, facts: AwsFacts) -> Mapping[str, Any]:
    """Return the configuration of a cluster with one queue, whose nodes exist while there are jobs."""
    nodes: dict[str, Any] = {"Name": "nodes", "InstanceType": options.type, "MinCount": 0, "MaxCount": options.nodes}
    if uses_efa(options, facts):
        nodes["Efa"] = {"Enabled": True}
    queue: dict[str, Any] = {
        "Name": "train",
        "CapacityType": "SPOT" if options.spot or options.spot_only else "ONDEMAND",
        "ComputeResources": [nodes],
        "Networking": {"SubnetIds": [options.subnet], "PlacementGroup": {"Enabled": options.placement}},
    }
    if options.volume_size is not None:
        queue["ComputeSettings"] = {"LocalStorage": {"RootVolume": {"Size": options.volume_size}}}
    if bucket := bucket_parts(options)[0]:
        queue["Iam"] = {"S3Access": [{"BucketName": bucket, "EnableWriteAccess": True}]}
    head: dict[str, Any] = {"InstanceType": "m7i.large", "Networking": {"SubnetId": options.subnet}}
    if options.key_name is not None:
        head["Ssh"] = {"KeyName": options.key_name, "AllowedIps": options.ssh_from or "127.0.0.1/32"}
    shared = {"MountDir": _SHARED, "Name": "shared", "StorageType": "Efs", "EfsSettings": {"Encrypted": True}}
    return {
        "Region": region,
        "Image": {"Os": "ubuntu2404"},
        "HeadNode": head,
        "Scheduling": {"Scheduler": "slurm", "SlurmQueues": [queue]},
        "SharedStorage": [shared],
        "Tags": [{"Key": key, "Value": value} for key, value in tags(options).items()],
    }

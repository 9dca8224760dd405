"""The script that an instance runs when it starts: its user data.

setup       the project and Lockstep from the bucket, the user's lines
meet        each instance puts its address into the bucket, and waits for the others
run         one launcher on each instance, which starts the ranks; instance 0 is node 0
watch       the log goes to the bucket; a request to stop, or the loss of a spot instance, becomes a signal
finish      log, results and exit code go to the bucket, and the instance terminates itself, also when a line fails

An instance can't ask EC2 for the others' addresses without further rights, but every instance may use the bucket. So
they meet there. User data can be read by every process of an instance: the job's token is in the bucket, too.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.core.errors import ConfigError
from lockstep.core.jobs import JobCommand
from lockstep.core.secrets import without_secrets
from lockstep.launchers.aws_bundle import requirement, torch_requirement, wheel_name
from lockstep.launchers.aws_options import AwsOptions, environment, words_there
from lockstep.launchers.tools import bash_array

MOST_BYTES = 16384
"""EC2's limit of user data."""
PROJECT = "project.tar.gz"

_START = """\
# Whatever happens below, this instance ends in {minutes} minutes at the latest, and is not paid for any more.
shutdown -h +{minutes}

# shellcheck disable=SC2329 # called when the script ends
finish() {{
    code=$?
    trap - EXIT
    set +e
    [ -z "$watcher" ] || kill "$watcher"
    send_log || tail -n 50 "$home/log" > /dev/console
    if [ "$node" = 0 ] && [ -d "$run" ]; then
        aws s3 sync --quiet "$run" "$bucket/results"
    fi
    echo "$code" | aws s3 cp --quiet - "$bucket/ends/$node"
    shutdown -h now
}}

# What is new in the log becomes an object, which is named by the byte at which it starts.
send_log() {{
    start=$(cat "$home/sent")
    size=$(stat -c %s "$home/log")
    [ "$size" -gt "$start" ] || return 0
    dd if="$home/log" bs=1M iflag=skip_bytes,count_bytes skip="$start" count="$((size - start))" status=none |
        aws s3 cp --quiet - "$bucket/logs/$node/$(printf %015d "$start")" && echo "$size" > "$home/sent"
}}

metadata() {{
    session=$(curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$imds/api/token")
    curl -sf -H "X-aws-ec2-metadata-token: $session" "$imds/meta-data/$1"
}}

# The run is asked to save and stop when `lockstep launch aws cancel` wants it, and when AWS takes a spot instance back.
watch() {{
    asked=
    while sleep {every}; do
        send_log || true
        if [ -n "$asked" ] || [ ! -s "$home/pid" ]; then
            continue
        elif aws s3 ls "$bucket/stop" > /dev/null 2>&1; then
            asked='lockstep launch aws cancel'
        elif metadata spot/instance-action > /dev/null; then
            asked='AWS, which takes this spot instance back in two minutes'
        else
            continue
        fi
        echo "node $node is asked to stop by $asked"
        kill -TERM "$(cat "$home/pid")"
    done
}}

watcher=
node=unknown
mkdir -p "$home/project"
cd "$home/project"
echo 0 > "$home/sent"
exec > "$home/log" 2>&1
trap finish EXIT
node=$(metadata ami-launch-index)
echo "instance $node has started: $(date -u +%FT%TZ)"
watch &
watcher=$!
"""
_MEET = """\
# The launchers start once all instances are ready, and connect to instance 0. The token keeps strangers out.
metadata local-ipv4 | aws s3 cp --quiet - "$bucket/ready/$node"
until [ "$(aws s3 ls "$bucket/ready/" | wc -l)" = {nodes} ]; do
    if aws s3 ls "$bucket/ends/" > /dev/null 2>&1 || [ "$SECONDS" -gt {patience} ]; then
        echo "not all of the {nodes} instances became ready"
        exit 1
    fi
    sleep 3
done
LOCKSTEP_JOB_TOKEN=$(aws s3 cp --quiet "$bucket/token" -)
export LOCKSTEP_JOB_TOKEN
command+=(--nodes {nodes} --rendezvous "$(aws s3 cp --quiet "$bucket/ready/0" -):{port}" --node-rank "$node")
command+=(--job-id {job})
"""
_RUN = """\
"${program[@]}" "${command[@]}" &
echo $! > "$home/pid"
code=0
wait $! || code=$?
exit $code
"""
_MOST_TYPED = 500  # characters, of 16 KiB in all
_READY_S = 3600
_WATCH_S = 10


@dataclass(frozen=True, slots=True)
class NodeJob:
    """Facts about a job that its instances need.

    Attributes:
        name: Name of the job.
        place: Address of the job's objects, `s3://bucket/prefix/name`.
        region: Region of the bucket and the instances.
        has_project: Whether the project is copied.
        uses_efa: Whether the instances have Elastic Fabric Adapters.
    """

    name: str
    place: str
    region: str
    has_project: bool
    uses_efa: bool


def user_data(command: JobCommand, options: AwsOptions, job: NodeJob) -> str:
    """Return the script. Raises ConfigError if it is too long for user data."""
    every, minutes = _WATCH_S, max(round(60 * options.max_hours), 1)
    parts = [
        "#!/usr/bin/env bash",
        f"# {textwrap.shorten(without_secrets(command.typed), _MOST_TYPED, placeholder=' ...')}",
        "# Runs as root on each instance when it starts. The instance terminates itself afterwards.",
        "set -euo pipefail",
        "",
        f"bucket={job.place}",
        f"run={shlex.quote(command.run_folder.as_posix())}",
        "home=/opt/lockstep",
        "imds=http://169.254.169.254/latest",
        f"export AWS_DEFAULT_REGION={job.region} HOME=/root",
        "",
        _START.format(minutes=minutes, every=every),
        *_setup(options, job),
        *_program(options),
        f"command=({bash_array(words_there(command, options))})",
        "",
    ]
    if options.nodes > 1:
        parts.append(_MEET.format(nodes=options.nodes, patience=_READY_S, port=options.port, job=job.name))
    text = "\n".join([*parts, _RUN])
    size = len(text.encode())
    if size > MOST_BYTES:
        raise ConfigError(
            f"the script of an instance has {size:,} bytes, and EC2 takes {MOST_BYTES:,}; put settings into a config "
            "file, and lines of --setup into a script of the project"
        )
    return text


def _setup(options: AwsOptions, job: NodeJob) -> Iterator[str]:
    if job.has_project:
        yield f'aws s3 cp --quiet "$bucket/{PROJECT}" - | tar -xz'
    if job.uses_efa:
        yield "export FI_PROVIDER=efa"
    yield from (f"export {name}={shlex.quote(value)}" for name, value in environment(options).items())
    yield from options.setup
    if options.image is None and options.program is None:
        wheel = wheel_name()
        yield f'aws s3 cp --quiet "$bucket/{wheel}" "$home/{wheel}"'
        yield 'python3 -m venv "$home/venv" || {'
        yield "    apt-get update -q && apt-get install -qy python3-venv"
        yield '    python3 -m venv --clear "$home/venv"'
        yield "}"
        yield f'"$home/venv/bin/pip" install --quiet {torch_requirement()} "$home/{wheel}{requirement()}"'
    yield ""


def _program(options: AwsOptions) -> Iterator[str]:
    if options.image is None:
        yield f"program=({options.program})" if options.program else 'program=("$home/venv/bin/lockstep")'
        return
    variables = " ".join(
        f"--env {name}" for name in ("LOCKSTEP_JOB_TOKEN", "AWS_DEFAULT_REGION", *environment(options))
    )
    yield "program=(docker run --rm --network host --ipc host --ulimit memlock=-1 --ulimit stack=67108864)"
    yield f'program+=(--volume "$home/project:/work" --workdir /work {variables})'
    yield "if command -v nvidia-smi > /dev/null; then"
    yield "    program+=(--gpus all)"
    yield "fi"
    yield "if [ -e /dev/infiniband ]; then"
    yield "    program+=(--device /dev/infiniband)"
    yield "fi"
    yield f"program+=({shlex.quote(options.image or '')} lockstep)"

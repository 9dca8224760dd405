"""Files that an instance gets: the script that it runs when it starts (its user data), the project, this Lockstep.

Instances meet in the bucket, because asking EC2 for addresses needs further rights. The job's token is there, too:
every process of an instance can read user data.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import tarfile
import textwrap
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import lockstep
from lockstep.config.recipes import recipes_folder
from lockstep.core.distribution import DISTRIBUTION, version_of
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.jobs import JobCommand
from lockstep.core.secrets import without_secrets
from lockstep.launchers.aws_job import AwsJob
from lockstep.launchers.aws_options import AwsOptions
from lockstep.launchers.tools import bash_array, pairs

PROJECT = "project.tar.gz"
LARGEST_PROJECT = 2**28  # bytes
_MOST_BYTES = 16384  # EC2's limit of user data
_SECRET_FILES = (".env", ".netrc", ".npmrc", ".pypirc", "id_rsa", "id_ed25519", "credentials", "credentials.json")
_SECRET_ENDS = (".pem", ".key", ".p12", ".pfx")
_EXTRAS = {"hf": "transformers", "digits": "scikit-learn", "deepspeed": "deepspeed"}
"""Extra -> a package; what is installed here is installed there."""

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

send_log() {{
    aws s3 cp --quiet "$home/log" "$bucket/logs/$node"
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


def user_data(
    command: JobCommand, options: AwsOptions, job: AwsJob, words: Sequence[str], *, has_project: bool, uses_efa: bool
) -> str:
    """Return the script, which runs `words`. Raises ConfigError if it is too long for user data."""
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
        f"export AWS_DEFAULT_REGION={shlex.quote(job.region)} HOME=/root",
        "",
        _START.format(minutes=minutes, every=every),
        *_setup(options, has_project=has_project, uses_efa=uses_efa),
        f"program=({options.program})" if options.program else 'program=("$home/venv/bin/lockstep")',
        f"command=({bash_array(words)})",
        "",
    ]
    if options.nodes > 1:
        parts.append(_MEET.format(nodes=options.nodes, patience=_READY_S, port=options.port, job=job.name))
    text = "\n".join([*parts, _RUN])
    if (size := len(text.encode())) > _MOST_BYTES:
        why = f"the script of an instance has {size:,} bytes, and EC2 takes {_MOST_BYTES:,}"
        raise ConfigError(f"{why}; put settings into a config file, and lines of --setup into a script of the project")
    return text


def _setup(options: AwsOptions, *, has_project: bool, uses_efa: bool) -> Iterator[str]:
    if has_project:
        yield f'aws s3 cp --quiet "$bucket/{PROJECT}" - | tar -xz'
    if uses_efa:
        yield "export FI_PROVIDER=efa"
    yield from (f"export {name}={shlex.quote(value)}" for name, value in pairs(options.env).items())
    yield from options.setup
    if options.program is None:
        wheel = wheel_name()
        yield f'aws s3 cp --quiet "$bucket/{wheel}" "$home/{wheel}"'
        yield 'python3 -m venv "$home/venv" || {'
        yield "    apt-get update -q && apt-get install -qy python3-venv"
        yield '    python3 -m venv --clear "$home/venv"'
        yield "}"
        extras = ",".join(["buckets", *(extra for extra, package in _EXTRAS.items() if version_of(package))])
        torch = f"torch=={version_of('torch').partition('+')[0]}"
        yield f'"$home/venv/bin/pip" install --quiet {torch} "$home/{wheel}[{extras}]"'
    yield ""


# --- the project, and this Lockstep ---------------------------------------------------------------------------------


def project_files(source: str) -> tuple[list[Path], list[str]]:
    """Return the project's files, relative to `source`, and notes about those that are left out. Raises ConfigError."""
    if source == "none":
        return [], []
    tracked = _git(source, "--cached")
    if tracked is None:
        return [], [f"{source} is not in a git repository: none of its files are copied to the instances"]
    new = _git(source, "--others", "--exclude-standard") or []
    secret = [path for path in new if _looks_secret(path)]
    files = [path for path in (*tracked, *new) if path not in secret and Path(source, path).is_file()]
    size = sum(Path(source, path).stat().st_size for path in files)
    if size > LARGEST_PROJECT:
        sizes = f"{size / 2**20:,.0f} MiB, and at most {LARGEST_PROJECT / 2**20:,.0f} are copied"
        remedy = "name data in .gitignore and read it from a bucket, or give another --source"
        raise ConfigError(f"the project in {Path(source).absolute()} has {sizes}; {remedy}")
    left_out = ", ".join(map(str, secret))
    return files, [f"not copied to the instances, because they look like secrets: {left_out}"] if secret else []


def project_archive(source: str) -> bytes:
    """Return the project's files as a compressed archive. Raises RunFailed."""
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
            for path in project_files(source)[0]:
                archive.add(Path(source, path), str(path), recursive=False, filter=_of_root)
    except OSError as error:
        raise RunFailed(f"can't read {error.filename}: {error.strerror}") from None
    return buffer.getvalue()


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    return entry.replace(uid=0, gid=0, uname="", gname="")


def wheel_name() -> str:
    """Return the file name of the wheel."""
    return f"{DISTRIBUTION.replace('-', '_')}-{lockstep.__version__}-py3-none-any.whl"


def wheel() -> bytes:
    """Return this Lockstep as a wheel, which pip installs with what it needs."""
    known = metadata.distribution(DISTRIBUTION)
    root, recipes = Path(lockstep.__file__).parent, recipes_folder()
    files = {f"lockstep/{path.relative_to(root).as_posix()}": path for path in root.rglob("*")}
    if not recipes.is_relative_to(root):  # a checkout has them beside the package
        files |= {f"lockstep/recipes/{path.relative_to(recipes).as_posix()}": path for path in recipes.rglob("*.yaml")}
    files = {name: path for name, path in files.items() if path.is_file() and "__pycache__" not in name}
    about = f"{DISTRIBUTION.replace('-', '_')}-{lockstep.__version__}.dist-info"
    texts = {f"{about}/{name}": known.read_text(name) or "" for name in ("METADATA", "entry_points.txt")}
    texts[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: lockstep\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    texts[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in (*files, *texts, f"{about}/RECORD"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in files.items():
            archive.write(path, name)
        for name, text in texts.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def _git(source: str, *options: str) -> list[Path] | None:
    """Return what `git ls-files` lists; None: this is no repository, or there is no git."""
    try:
        listed = subprocess.check_output(["git", "-C", source, "ls-files", "-z", *options], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [Path(os.fsdecode(name)) for name in listed.split(b"\0") if name]


def _looks_secret(path: Path) -> bool:
    return path.name in _SECRET_FILES or path.name.startswith(".env.") or path.suffix in _SECRET_ENDS

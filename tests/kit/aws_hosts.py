"""Instances of EC2 for tests: hosts in namespaces that execute their user data, beside one that has moto's server.

host 0, host 1    an instance each: metadata at 169.254.169.254, programs `aws` and `shutdown` that stand in for the
                  real ones, and the script that `launch aws` has given to RunInstances
host 2            the cloud, at 10.77.0.3: hands the user data out, and terminates an instance that has shut down
"""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PORT = 5000
_AWS = """#!{python}
import os, sys, boto3
words = [word for word in sys.argv[1:] if word != "--quiet"]
s3 = boto3.client("s3")
split = lambda address: address.removeprefix("s3://").partition("/")[::2]
verb, *given = words[1:]
if verb == "cp" and given[1].startswith("s3://"):
    bucket, key = split(given[1])
    data = sys.stdin.buffer.read() if given[0] == "-" else open(given[0], "rb").read()
    s3.put_object(Bucket=bucket, Key=key, Body=data)
elif verb == "cp":
    bucket, key = split(given[0])
    data = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    sys.stdout.buffer.write(data) if given[1] == "-" else open(given[1], "wb").write(data)
elif verb == "ls":
    bucket, prefix = split(given[0])
    page = s3.list_objects_v2(Bucket=bucket, Prefix=prefix, Delimiter="/")
    lines = [each["Key"] for each in page.get("Contents", ())]
    print(*lines, sep=chr(10), end=chr(10) if lines else "")
    sys.exit(not lines)
elif verb == "sync":
    bucket, prefix = split(given[1])
    for folder, _, names in os.walk(given[0]):
        for name in names:
            path = os.path.join(folder, name)
            s3.upload_file(path, bucket, prefix + "/" + os.path.relpath(path, given[0]))
else:
    sys.exit("unknown: " + verb)
"""
_SHUTDOWN = """#!/bin/sh
echo "$@" >> {folder}/shutdown
case "$*" in *now*) touch {folder}/ended ;; esac
"""


def serve_cloud(folder: Path) -> None:
    """Run moto's server, and do to instances what EC2 does, until the process is killed."""
    from kit.aws import cloud

    with cloud("0.0.0.0", PORT) as made:
        ec2 = made.client("ec2")
        (folder / "image").write_text(made.image)
        while True:
            for reservation in ec2.describe_instances()["Reservations"]:
                for instance in reservation["Instances"]:
                    _attend(ec2, instance, folder / f"instance-{instance['AmiLaunchIndex']}")
            time.sleep(0.2)


def _attend(ec2: Any, instance: Any, folder: Path) -> None:
    name, state = instance["InstanceId"], instance["State"]["Name"]
    if state == "running" and not folder.exists():
        folder.mkdir()
        given = ec2.describe_instance_attribute(InstanceId=name, Attribute="userData")["UserData"]["Value"]
        import base64

        (folder / "script.part").write_bytes(base64.b64decode(given))
        (folder / "script.part").rename(folder / "script")
    if state == "running" and (folder / "ended").exists():
        ec2.terminate_instances(InstanceIds=[name])
    if state == "terminated" and (folder / "script").exists():
        (folder / "terminated").touch()


def be_instance(folder: Path, node: int) -> None:
    """Be an instance from its start to its end."""
    subprocess.run(["ip", "addr", "add", "169.254.169.254/32", "dev", "lo"], check=True)
    for left in Path("/opt/lockstep").iterdir():  # by an instance that was killed
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    programs = folder / "bin"
    programs.mkdir()
    (programs / "aws").write_text(_AWS.format(python=sys.executable))
    (programs / "shutdown").write_text(_SHUTDOWN.format(folder=folder))
    for program in programs.iterdir():
        program.chmod(0o755)
    known = {"ami-launch-index": str(node), "local-ipv4": f"10.77.0.{node + 1}"}

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self._answer("session" if self.path == "/latest/api/token" else None)

        def do_GET(self) -> None:
            answer = known.get(self.path.removeprefix("/latest/meta-data/"))
            if self.path.endswith("/spot/instance-action") and (folder / "taken-back").exists():
                answer = "{}"
            self._answer(answer if self.headers.get("X-aws-ec2-metadata-token") == "session" else None)

        def _answer(self, text: str | None) -> None:
            self.send_response(200 if text is not None else 404)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("169.254.169.254", 80), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    script = subprocess.run(["bash", str(folder / "script")], env=environment, check=False)
    (folder / "log").write_bytes(Path("/opt/lockstep/log").read_bytes())
    sys.exit(script.returncode)

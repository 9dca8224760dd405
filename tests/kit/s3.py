"""A real S3 server on loopback (moto's, over HTTP), and a proxy before it that makes faults.

with serving() as server, proxied(server) as proxy:
    proxy.plan(Fault("PUT .*partNumber=2", "cut", times=1))        cuts the connection in the middle of a part
    proxy.requests                                                  what was asked, as "PUT /bucket/key?partNumber=2"
"""

from __future__ import annotations

import gc
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.request import Request, urlopen

BUCKET = "tests-bucket"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
KEY_ID = "AKIAIOSFODNN7EXAMPLE"
_REPLIES = {
    "500": (b"500 Internal Server Error", "InternalError"),
    "503": (b"503 Slow Down", "SlowDown"),
    "403": (b"403 Forbidden", "AccessDenied"),
}


def environment(endpoint: str) -> dict[str, str]:
    """Variables by which boto3 finds a server and its credentials."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }


def client(endpoint: str) -> Any:
    import boto3

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server that has an empty bucket."""
    import logging

    gc.disable()
    from moto.server import ThreadedMotoServer

    gc.freeze()
    gc.enable()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        urlopen(
            Request(f"http://{host}:{port}/moto-api/reset", method="POST")
        )  # servers of a process share all buckets
        client(f"http://{host}:{port}").create_bucket(Bucket=BUCKET)
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@dataclass
class Fault:
    """What happens to requests whose first line matches a pattern.

    Attributes:
        kind: An answer's status; `cut`: the connection ends in the middle of the request's body; `lost`: the server
            gets the request, and its answer is cut in the middle; `hang`: no answer for some seconds.
        times: To how many requests.
        after: To how many nothing happens before.
    """

    pattern: str
    kind: Literal["500", "503", "403", "cut", "lost", "hang"]
    times: int = 1
    after: int = 0
    made: int = field(default=0, init=False)


class Proxy:
    """Forwards each request on a connection of its own."""

    def __init__(self, server: str, port: int = 0, listener: socket.socket | None = None) -> None:
        host, _, server_port = server.removeprefix("http://").partition(":")
        self._server = (host, int(server_port))
        self._listener = listener or socket.create_server(("127.0.0.1", port))
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self.requests: list[str] = []
        self.hang_seconds = 3.0
        self.is_down = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        address, port = self._listener.getsockname()[:2]
        return f"http://{address}:{port}"

    def plan(self, *faults: Fault) -> None:
        """Make these faults from now on, and no others; forget the requests so far."""
        with self._lock:
            self._faults = list(faults)
            self.requests = []

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            head, rest = _until(connection, b"\r\n\r\n")
            if not head or self.is_down:
                return
            first, headers = _parsed(head)
            fault = self._fault(first)
            if "expect" in headers:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            if fault is not None and fault.kind == "cut":
                wanted = int(headers.get("content-length", "0")) // 2
                while len(rest) < wanted and (more := connection.recv(65536)):
                    rest += more
                return
            body = _body(connection, headers, rest)
            if fault is not None and fault.kind in _REPLIES:
                connection.sendall(_refusal(fault.kind))
                return
            if fault is not None and fault.kind == "hang":
                time.sleep(self.hang_seconds)
                return
            self._forward(connection, _without(head, b"expect", b"connection"), body, fault)

    def _forward(self, connection: socket.socket, head: bytes, body: bytes, fault: Fault | None) -> None:
        with socket.create_connection(self._server) as server:
            server.sendall(head + b"Connection: close\r\n\r\n" + body)
            reply = b"".join(iter(lambda: server.recv(1 << 20), b""))
        if fault is not None and fault.kind == "lost":
            end = reply.find(b"\r\n\r\n") + 4
            connection.sendall(reply[: (end + len(reply)) // 2 if len(reply) > end else end // 2])
            return
        connection.sendall(reply)

    def _fault(self, first: str) -> Fault | None:
        with self._lock:
            self.requests.append(first)
            for fault in self._faults:
                if re.match(fault.pattern, first) is None:
                    continue
                if fault.after:
                    fault.after -= 1
                elif fault.made < fault.times:
                    fault.made += 1
                    return fault
        return None


@contextmanager
def proxied(server: str, listener: socket.socket | None = None) -> Iterator[Proxy]:
    """A proxy, which listens on loopback by default."""
    proxy = Proxy(server, listener=listener)
    try:
        yield proxy
    finally:
        proxy.close()


def _until(connection: socket.socket, end: bytes, data: bytes = b"") -> tuple[bytes, bytes]:
    while end not in data:
        more = connection.recv(65536)
        if not more:
            return b"", b""
        data += more
    head, _, rest = data.partition(end)
    return head + b"\r\n", rest


def _parsed(head: bytes) -> tuple[str, Mapping[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    return lines[0].rpartition(" ")[0], {name.lower(): value for name, value in headers.items()}


def _without(head: bytes, *names: bytes) -> bytes:
    lines = head.split(b"\r\n")[:-1]
    return b"".join(line + b"\r\n" for line in lines if line.partition(b":")[0].lower() not in names)


def _body(connection: socket.socket, headers: Mapping[str, str], body: bytes) -> bytes:
    """What follows the head, as it is sent."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while not body.endswith(b"0\r\n\r\n") and (more := connection.recv(1 << 20)):
            body += more
        return body
    parts, missing = [body], int(headers.get("content-length", "0")) - len(body)
    while missing > 0 and (more := connection.recv(1 << 20)):
        parts.append(more)
        missing -= len(more)
    return b"".join(parts)


def _refusal(kind: str) -> bytes:
    status, code = _REPLIES[kind]
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>planned</Message></Error>".encode()
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status, len(text), text)

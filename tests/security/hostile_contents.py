"""Contents that hostile or damaged files may have, whatever they should be: `CONTENTS`, by name.

A content is bytes, or a function that makes something else of a path. Pickles and YAML tags would create the file that
the environment variable CANARY names, if anything executed them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Content = bytes | Callable[[Path], None]
_TOUCH = "import os; open(os.environ['CANARY'], 'w').close()"


class Evil:
    """Executes code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (_TOUCH,)


def _archive(**members: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/"), content)
    return data.getvalue()


def _safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _bomb() -> bytes:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 10)]
    return "\n".join(lines).encode()


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


_TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
_RUN_KEYS = ("step", "loss", "saved", "resumed", "left_out", "manifest", "format_version", "files", "tensors", "state")
CONTENTS: dict[str, Content] = {
    "nothing": b"",
    "a space": b" ",
    "NUL bytes": bytes(4096),
    "a NUL in text": b'{"step": 1, "a\x00b": "c\x00d"}\n',
    "bytes at random": random.Random(1).randbytes(10_000),
    "not UTF-8": b'{"step": 1, "name": "\xff\xfe\xfa"}\n',
    "lone surrogates": b'{"step": 1, "name": "\\ud800\\udfff"}\n',
    "UTF-16": '{"step": 1}'.encode("utf-16"),
    "a BOM": b'\xef\xbb\xbf{"step": 1}\n',
    "carriage returns": b'{"step": 1}\r{"step": 2}\r\r\n',
    "escapes of a terminal": b'{"step": 1, "\x1b]0;x\x07": "\x1b[2J\x9b31m"}\n',
    "null": b"null",
    "true": b"true",
    "a number": b"7",
    "a text": b'"text"',
    "a list": b"[1, 2, 3]",
    "an empty object": b"{}",
    "lists in lists": b"[" * 100_000 + b"]" * 100_000,
    "objects in objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "open brackets": b"[" * 500_000,
    "a huge number": b'{"step": ' + b"9" * 50_000 + b"}",
    "a large exponent": b'{"step": 1e999999, "loss": -1e999999}',
    "NaN and infinity": b'{"step": NaN, "loss": Infinity, "samples": -Infinity}',
    "negative numbers": json.dumps(dict.fromkeys(_RUN_KEYS, -1)).encode(),
    "large numbers": json.dumps(dict.fromkeys(_RUN_KEYS, 2**63)).encode(),
    "larger numbers": json.dumps(dict.fromkeys(_RUN_KEYS, 10**300)).encode(),
    "texts for numbers": json.dumps(dict.fromkeys(_RUN_KEYS, "../../etc/passwd")).encode(),
    "lists for numbers": json.dumps({key: [[]] for key in _RUN_KEYS}).encode(),
    "objects for numbers": json.dumps({key: {"": {}} for key in _RUN_KEYS}).encode(),
    "nulls for numbers": json.dumps(dict.fromkeys(_RUN_KEYS)).encode(),
    "true for numbers": json.dumps(dict.fromkeys(_RUN_KEYS, True)).encode(),
    "the same key often": b"{" + b'"step": 1, ' * 10_000 + b'"step": 2}',
    "many keys": json.dumps({f"key{number}": number for number in range(50_000)}).encode(),
    "a long text": json.dumps({"step": 1, "text": "x" * 3_000_000}).encode(),
    "many lines": b'{"step": 1}\n' * 50_000,
    "lines out of order": b"".join(b'{"step": %d, "loss": 1}\n' % (-step * 7 % 1000) for step in range(1000)),
    "a torn line": b'{"step": 1, "loss": 1.0}\n{"step": 2, "lo',
    "paths that leave the folder": json.dumps({"../../../evil": "/etc/passwd", "files": {"../x": {}}}).encode(),
    "a YAML bomb": _bomb(),
    "YAML that runs code": b'!!python/object/apply:exec ["' + _TOUCH.replace("'", "\\'").encode() + b'"]\n',
    "YAML that makes an object": b"model: !!python/object/new:os.system [touch $CANARY]\n",
    "YAML of odd keys": b"? [a, b]\n: 1\n? {c: d}\n: 2\nnull: 3\n1.5: 4\ntrue: 5\n",
    "YAML that merges": b"a: &a {b: 1}\nmodel: {<<: [*a, *a, 7]}\n",
    "several YAML documents": b"--- {a: 1}\n--- {b: 2}\n...\n",
    "YAML with tabs": b"model:\n\tkind: digits\n",
    "YAML dates": b"run: {steps: 2001-01-01, seed: 0x7fffffffffffffffffff, folder: ~}\n",
    "a pickle that runs code, protocol 0": pickle.dumps(Evil(), protocol=0),
    "a pickle that runs code, protocol 2": pickle.dumps(Evil(), protocol=2),
    "a pickle that runs code, protocol 5": pickle.dumps({"weight": Evil()}, protocol=5),
    "an archive with a pickle": _archive(archive__data=pickle.dumps(Evil()), archive__version=b"3"),
    "an archive as torch writes it": _archive(archive__data_pkl=b"", **{"archive__data.pkl": pickle.dumps(Evil())}),
    "an archive of names that leave": _archive(**{"..__..__..__evil.pkl": b"x", "__etc__passwd": b"y"}),
    "a torn archive": _archive(a=b"x" * 1000)[:700],
    "safetensors without tensors": _safetensors({}),
    "safetensors, a header beyond the file": struct.pack("<Q", 2**62) + b"{}",
    "safetensors, offsets beyond the file": _safetensors({"a": {**_TENSOR, "data_offsets": [0, 2**60]}}),
    "safetensors, negative offsets": _safetensors({"a": {**_TENSOR, "data_offsets": [-8, 0]}}, bytes(8)),
    "safetensors that overlap": _safetensors({"a": _TENSOR, "b": _TENSOR}, bytes(8)),
    "safetensors, a huge shape": _safetensors({"a": {**_TENSOR, "shape": [2**40, 2**40]}}, bytes(8)),
    "safetensors, a negative shape": _safetensors({"a": {**_TENSOR, "shape": [-2, -1]}}, bytes(8)),
    "safetensors, an unknown dtype": _safetensors({"a": {**_TENSOR, "dtype": "EVIL"}}, bytes(8)),
    "safetensors, a list for a header": _safetensors([1, 2], bytes(8)),
    "safetensors, texts for numbers": _safetensors({"a": {"dtype": 1, "shape": "x", "data_offsets": None}}, bytes(8)),
    "safetensors, names that leave": _safetensors({"../../evil": _TENSOR, "\x00": _TENSOR}, bytes(8)),
    "safetensors, deep": _safetensors(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "GGUF, sizes beyond the file": b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60),
    "an ELF program": b"\x7fELF\x02\x01\x01" + bytes(2000),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link that leads out": _link("/etc/passwd"),
    "a link to endless zeros": _link("/dev/zero"),
    "a link to nothing": _link("no-such-file"),
}

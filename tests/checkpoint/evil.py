"""Attacks on a checkpoint: tables of names, what each does to its folder, and the expected error.

    FILES       bytes, links, pipes, folders where the manifest or a shard should be
    MANIFESTS   an impossible manifest with a matching hash
    GRIDS       an impossible manifest of today's version, or header of a file, with a matching hash
    STATES      an impossible state of the run in the manifest

`Evil` canaries are pickles that would create a file (`CANARY`) if they were unpickled.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import hashing

MANIFEST, SHARD = "manifest.json", "rank-00000.safetensors"
CANARY = "canary"
Act = Callable[[Path], None]
Change = Callable[[dict[str, Any]], Any]


class Evil:
    """Creates the canary in `folder` when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder / CANARY

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self._mark}",)


# --- manifests with matching hashes -------------------------------------------------------------------------------


def sealed(text: str) -> bytes:
    """Return a manifest's bytes with a matching hash."""
    return f'{{"manifest":{text},"xxh3_128":"{hashing.hash_bytes(text.encode())}"}}\n'.encode()


def canonical(manifest: Any) -> str:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"))


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    return manifest


def edit_manifest(change: Change) -> Act:
    """Change the manifest's content; its hash matches."""

    def act(folder: Path) -> None:
        manifest = read_manifest(folder)
        changed = change(manifest)
        (folder / MANIFEST).write_bytes(sealed(canonical(manifest if changed is None else changed)))

    return act


def text(change: Callable[[str], str]) -> Act:
    """Change the manifest's text; its hash matches."""

    def act(folder: Path) -> None:
        (folder / MANIFEST).write_bytes(sealed(change(canonical(read_manifest(folder)))))

    return act


def put(*path: Any) -> Act:
    """Set the value at a path of keys: the last argument."""
    *keys, value = path

    def change(manifest: dict[str, Any]) -> None:
        holder: Any = manifest
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = value

    return edit_manifest(change)


def without(*keys: str) -> Act:
    def change(manifest: dict[str, Any]) -> None:
        holder: Any = manifest
        for key in keys[:-1]:
            holder = holder[key]
        del holder[keys[-1]]

    return edit_manifest(change)


# --- bytes --------------------------------------------------------------------------------------------------------


def _pickle(folder: Path) -> bytes:
    return pickle.dumps(Evil(folder.parent))


def _torch_zip(folder: Path) -> bytes:
    data = io.BytesIO()
    torch.save({"model.inner.weight": Evil(folder.parent)}, data)
    return data.getvalue()


def _numpy(folder: Path) -> bytes:
    import numpy as np

    data = io.BytesIO()
    np.save(data, np.array([Evil(folder.parent)], dtype=object), allow_pickle=True)
    return data.getvalue()


def _tar(folder: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        member = tarfile.TarInfo("../../escaped")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"out"))
    return data.getvalue()


BYTES: dict[str, Callable[[Path], bytes]] = {
    "nothing": lambda folder: b"",
    "a newline": lambda folder: b"\n",
    "zeros": lambda folder: bytes(4096),
    "noise": lambda folder: bytes(range(256)) * 16,
    "a pickle": _pickle,
    "a torch zip": _torch_zip,
    "a numpy array of objects": _numpy,
    "a tar with a way out": _tar,
    "a web page": lambda folder: b"<!DOCTYPE html><html><body>503 Service Unavailable</body></html>",
    "an LFS pointer": lambda folder: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
}

JSONS: dict[str, bytes] = {
    "null": b"null",
    "a number": b"7",
    "a text": b'"manifest"',
    "a list": b"[]",
    "an object": b"{}",
    "lists in lists": b"[" * 100_000,
    "objects in objects": b'{"manifest":' * 100_000,
    "a number of a million digits": b"1" * 1_000_000,
    "another encoding": "{}".encode("utf-16"),
    "a mark of byte order": b"\xef\xbb\xbf{}",
    "half a character": b'{"manifest":"\xff"}',
}


def _bytes(file: str, make: Callable[[Path], bytes]) -> Act:
    return lambda folder: void((folder / file).write_bytes(make(folder)))


def void(_: object) -> None:
    """Discard a value: an act returns nothing."""


def _gzipped(file: str) -> Act:
    return lambda folder: void((folder / file).write_bytes(gzip.compress((folder / file).read_bytes())))


def _header(length: int) -> Act:
    """Make the shard state another length of its header."""

    def act(folder: Path) -> None:
        data = (folder / SHARD).read_bytes()
        (folder / SHARD).write_bytes(length.to_bytes(8, "little") + data[8:])

    return act


# --- not a regular file -------------------------------------------------------------------------------------------


def _link(file: str, target: str) -> Act:
    def act(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).symlink_to(target)

    return act


def _folder(file: str) -> Act:
    def act(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return act


def _pipe(file: str) -> Act:
    def act(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return act


def _socket(file: str) -> Act:
    def act(folder: Path) -> None:
        (folder / file).unlink()
        here = Path.cwd()
        os.chdir(folder)  # the path of a socket must be short
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(file)
        finally:
            os.chdir(here)

    return act


def _unreadable(file: str) -> Act:
    return lambda folder: (folder / file).chmod(0)


def _gone(file: str) -> Act:
    return lambda folder: (folder / file).unlink()


def _sparse(file: str, size: int) -> Act:
    """Make a sparse file of zeros, which takes no space on the disk."""

    def act(folder: Path) -> None:
        (folder / file).write_bytes(b"")
        os.truncate(folder / file, size)

    return act


def _instead_of_it(make: Callable[[Path], object]) -> Act:
    """Replace the checkpoint's folder by something else."""

    def act(folder: Path) -> None:
        folder.rename(folder.with_name("elsewhere"))
        make(folder)

    return act


def _to_itself(path: Path) -> None:
    path.symlink_to(path.name)


NO_JSON = r"manifest\.json: is not a manifest"
NO_FILE = "it is not a file"
SHARDS = r"rank-00000\.safetensors: "
OTHER_SIZE = f"{SHARDS}has [0-9,]+ bytes, and had [0-9,]+ when it was written"

FILES: dict[str, tuple[Act, str]] = {
    **{f"{name}, as manifest": (_bytes(MANIFEST, make), NO_JSON) for name, make in BYTES.items()},
    **{f"{name}, as shard": (_bytes(SHARD, make), OTHER_SIZE) for name, make in BYTES.items()},
    **{f"{name}, as manifest": (_bytes(MANIFEST, lambda _, data=data: data), NO_JSON) for name, data in JSONS.items()},
    "a zipped manifest": (_gzipped(MANIFEST), NO_JSON),
    "a zipped shard": (_gzipped(SHARD), OTHER_SIZE),
    "no manifest": (_gone(MANIFEST), r"manifest\.json: No such file or directory"),
    "no shard": (_gone(SHARD), f"{SHARDS}No such file or directory"),
    **{
        f"a header of {length:,} bytes": (_header(length), f"{SHARDS}its header .* is not what was written")
        for length in (0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
    },
    "a manifest that is a link to passwords": (_link(MANIFEST, "/etc/passwd"), NO_JSON),
    "a manifest that is a link to itself": (_link(MANIFEST, MANIFEST), r"manifest\.json: Too many levels"),
    "a manifest that is a link to nothing": (_link(MANIFEST, "nowhere"), r"manifest\.json: No such file"),
    "a manifest without an end": (_link(MANIFEST, "/dev/zero"), f"manifest.json: {NO_FILE}"),
    "a manifest of random bytes without an end": (_link(MANIFEST, "/dev/urandom"), f"manifest.json: {NO_FILE}"),
    "a manifest that is a terminal": (_link(MANIFEST, "/dev/tty"), r"manifest\.json: (No such device|it is not)"),
    "a manifest that is a folder": (_folder(MANIFEST), f"manifest.json: {NO_FILE}"),
    "a manifest that is a pipe": (_pipe(MANIFEST), f"manifest.json: {NO_FILE}"),
    "a manifest that is a socket": (_socket(MANIFEST), r"manifest\.json: No such device or address"),
    "a manifest of 2 GiB": (_sparse(MANIFEST, 2**31), r"manifest\.json: it has 2,147,483,648 bytes; the limit is"),
    "an unreadable manifest": (_unreadable(MANIFEST), r"manifest\.json: Permission denied"),
    "an unreadable shard": (_unreadable(SHARD), f"{SHARDS}Permission denied"),
    "a shard that is a link to passwords": (_link(SHARD, "/etc/passwd"), OTHER_SIZE),
    "a shard that is a link to itself": (_link(SHARD, SHARD), f"{SHARDS}Too many levels"),
    "a shard that is a link to nothing": (_link(SHARD, "nowhere"), f"{SHARDS}No such file"),
    "a shard without an end": (_link(SHARD, "/dev/zero"), f"{SHARDS}{NO_FILE}"),
    "a shard that is a folder": (_folder(SHARD), f"{SHARDS}{NO_FILE}"),
    "a shard that is a pipe": (_pipe(SHARD), f"{SHARDS}{NO_FILE}"),
    "a shard of 8 TiB": (_sparse(SHARD, 2**43), f"{SHARDS}has 8,796,093,022,208 bytes, and had"),
    "a checkpoint that is an empty folder": (_instead_of_it(Path.mkdir), r"manifest\.json: No such file"),
    "a checkpoint that is a file": (_instead_of_it(Path.touch), r"manifest\.json: Not a directory"),
    "a checkpoint that is a pipe": (_instead_of_it(os.mkfifo), r"manifest\.json: Not a directory"),
    "a checkpoint that is a link to itself": (_instead_of_it(_to_itself), r"manifest\.json: Too many levels"),
}  # fmt: skip


# --- contents of the manifest -------------------------------------------------------------------------------------

WEIGHT = "model.inner.weight"  # float32 [8, 4]
MOMENT = "optimizer.exp_avg.inner.weight"
_INVALID = r"manifest\.json: is invalid: "
_NOT_WHOLE = r"manifest\.json: its hash does not match its contents"


def _another_file(name: str) -> Act:
    """Make every entry refer to a file of this name."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop(SHARD)

    return edit_manifest(change)


def _another_moment(manifest: dict[str, Any]) -> None:
    tensors = manifest["tensors"]
    tensors["optimizer.exp_avg.y"] = tensors.pop("optimizer.exp_avg.inner.weight")


def _renamed(name: str) -> Act:
    return edit_manifest(lambda manifest: manifest["tensors"].update({name: manifest["tensors"].pop(WEIGHT)}))


def _nested(depth: int) -> Act:
    return text(lambda body: body.replace('"state":{', '"state":{"deep":' + "[" * depth + "]" * depth + ",", 1))


def _instead(old: str, new: str) -> Act:
    def change(body: str) -> str:
        assert old in body
        return body.replace(old, new, 1)

    return text(change)


_SHARD_NAME = _INVALID + r"files.*: String should match pattern"
_INTEGER = "Input should be (a valid integer|greater than or equal to|less than)"

MANIFESTS: dict[str, tuple[Act, str]] = {
    "format version 99": (put("format_version", 99), "has format version 99; this Lockstep reads version 2"),
    "format version '1'": (put("format_version", "1"), "has format version '1'"),
    "no format version": (without("format_version"), "has format version None"),
    "format version null": (put("format_version", None), "has format version None"),
    "format version 1.0": (put("format_version", 1.0), "has format version 1.0"),
    "format version true": (put("format_version", True), "has format version True"),
    "a manifest that is a list": (edit_manifest(lambda manifest: [manifest]), "has format version None"),
    "a manifest that is null": (text(lambda body: "null"), "has format version None"),
    "a manifest that is a number": (text(lambda body: "1"), "has format version None"),
    "no run": (without("run"), _INVALID + "run: Field required"),
    "an empty run": (put("run", ""), _INVALID + "run: String should have at least 1"),
    "a run of a million letters": (put("run", "x" * 10**6), _INVALID + "run: String should have at most 4096"),
    "a run that is a number": (put("run", 7), _INVALID + "run: Input should be a valid string"),
    "step -1": (put("step", -1), _INVALID + f"step: {_INTEGER}"),
    "step '8'": (put("step", "8"), _INVALID + f"step: {_INTEGER}"),
    "step 1.5": (put("step", 1.5), _INVALID + f"step: {_INTEGER}"),
    "step 2^63": (put("step", 2**63), _INVALID + f"step: {_INTEGER}"),
    "step true": (put("step", True), _INVALID + f"step: {_INTEGER}"),
    "step 7, in the folder of step 8": (put("step", 7), "is of step 7"),
    "samples -1": (put("samples", -1), _INVALID + f"samples: {_INTEGER}"),
    "tokens of a thousand digits": (put("tokens", 10**1000), _INVALID + f"tokens: {_INTEGER}|is not a manifest"),
    "no ranks": (put("ranks", 0), _INVALID + f"ranks: {_INTEGER}"),
    "written in the year null": (put("written", None), _INVALID + "written: Input should be a valid string"),
    "more than a manifest has": (put("execute", "rm -rf /"), _INVALID + "execute: Extra inputs"),
    "no files": (put("files", {}), "has other files than the 1 ranks"),
    "files that are a list": (put("files", []), _INVALID + "files: Input should be (an object|a valid dictionary)"),
    "a shard above": (_another_file("../rank-00000.safetensors"), _SHARD_NAME),
    "a shard of another step": (_another_file("../step-00000004/rank-00000.safetensors"), _SHARD_NAME),
    "a shard at the root": (_another_file("/etc/passwd"), _SHARD_NAME),
    "a shard in a folder": (_another_file("rank-00000.safetensors/x"), _SHARD_NAME),
    "a shard with a NUL": (_another_file("rank-00000.safetensors\0"), _SHARD_NAME),
    "a shard with a newline": (_another_file("rank-00000.safetensors\n"), _SHARD_NAME),
    "a shard that is the manifest": (_another_file(MANIFEST), _SHARD_NAME),
    "a shard in other digits": (_another_file("rank-٠٠٠٠٠.safetensors"), _SHARD_NAME),
    "a shard of a rank that wasn't": (_another_file("rank-00001.safetensors"), "has other files than the 1 ranks"),
    "a shard without bytes": (put("files", SHARD, "size", 0), "has [0-9,]+ bytes, and had 0"),
    "a shard of -1 bytes": (put("files", SHARD, "size", -1), _INVALID + "files"),
    "a shard of 2^63 bytes": (put("files", SHARD, "size", 2**63), _INVALID + "files"),
    "a shard of 10^15 bytes": (put("files", SHARD, "size", 10**15), "bytes, and had 1,000,000,000,000,000"),
    "a header of -1 bytes": (put("files", SHARD, "header", -1), _INVALID + "files"),
    "a header without bytes": (put("files", SHARD, "header", 0), _INVALID + "files"),
    "a header of 2^62 bytes": (put("files", SHARD, "header", 2**62), _INVALID + "files"),
    "a header into the first tensor": (put("files", SHARD, "header", 10_000), "its header .* is not what was written"),
    "a header's hash in capitals": (put("files", SHARD, "header_hash", "A" * 32), _INVALID + "files"),
    "another header's hash": (put("files", SHARD, "header_hash", "0" * 32), f"{SHARDS}its header"),
    "a tensor without a name": (_renamed(""), _INVALID + "tensors"),
    "a tensor with a name of 5,000 letters": (_renamed("x" * 5000), _INVALID + "tensors"),
    "dtype object": (put("tensors", WEIGHT, "dtype", "object"), _INVALID + "tensors.*dtype"),
    "dtype __class__": (put("tensors", WEIGHT, "dtype", "__class__"), _INVALID + "tensors.*dtype"),
    "dtype float64": (put("tensors", WEIGHT, "dtype", "float64"), "its header contradicts the manifest"),
    "a shape that is a text": (put("tensors", WEIGHT, "shape", "8x4"), _INVALID + "tensors"),
    "a shape of fractions": (put("tensors", WEIGHT, "shape", [8.5, 4]), _INVALID + "tensors"),
    "a shape of -8 x -4": (put("tensors", WEIGHT, "shape", [-8, -4]), _INVALID + "tensors"),
    "a moment of another parameter": (edit_manifest(_another_moment), "it has no optimizer.exp_avg.y"),
    "config that is a list": (put("config", []), _INVALID + "config"),
    "environment that is null": (put("environment", None), _INVALID + "environment"),
    "metrics that are texts": (put("metrics", {"held-out.loss": "low"}), _INVALID + "metrics"),
    "state that is a list": (put("state", []), _INVALID + "state"),
    "state that is null": (put("state", None), _INVALID + "state"),
    "NaN": (_instead('"metrics":{', '"metrics":{"a":NaN,'), NO_JSON),
    "infinity": (_instead('"metrics":{', '"metrics":{"a":-Infinity,'), NO_JSON),
    "1e999": (_instead('"metrics":{', '"metrics":{"a":1e999,'), NO_JSON),
    "a key twice": (_instead('"step":8', '"step":7,"step":8'), _NOT_WHOLE),
    "everything twice": (text(lambda body: f"{body[:-1]},{body[1:]}"), _NOT_WHOLE),
    "half of a pair": (_instead('"run":"', '"run":"\\ud800'), _INVALID),
    "a state a thousand lists deep": (_nested(1000), f"is not a manifest: RecursionError|{_INVALID}|{_NOT_WHOLE}"),
    "a state a hundred thousand lists deep": (_nested(100_000), "is not a manifest: RecursionError"),
}  # fmt: skip

# --- grids, and the headers of files ------------------------------------------------------------------------------


def edit_header(change: Change) -> Act:
    """Change the header of the shard; the manifest has its hash."""

    def act(folder: Path) -> None:
        data, manifest = (folder / SHARD).read_bytes(), read_manifest(folder)
        first = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:first])
        changed = change(header)
        text = json.dumps(header if changed is None else changed, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % 64)
        before = len(text).to_bytes(8, "little") + text
        (folder / SHARD).write_bytes(before + data[first:])
        hasher = hashing.BlockHasher(manifest["run"], manifest["step"], SHARD)
        record = {
            "size": len(before) + len(data) - first,
            "header": len(before),
            "header_hash": hasher.hash_block("", 0, memoryview(before)),
        }
        put("files", SHARD, record)(folder)

    return act


def _in_header(*path: Any) -> Act:
    *keys, value = path

    def change(header: dict[str, Any]) -> None:
        holder: Any = header
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = value

    return edit_header(change)


def _cut(*cuts: Any, ranks: list[Any]) -> Act:
    """Give the weight a grid of its own."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["tensors"][WEIGHT]["grid"] = len(manifest["grids"])
        manifest["grids"].append({"cuts": list(cuts), "ranks": ranks})

    return edit_manifest(change)


def _two_swapped(header: dict[str, Any]) -> None:
    first, second = header["model.inner.weight"], header["optimizer.exp_avg.inner.weight"]
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


_HEADER = SHARDS + "its header contradicts the manifest, or itself: "
_MISPLACED = "has a grid that .* ranks can't have"

GRIDS: dict[str, tuple[Act, str]] = {
    "no grids": (put("grids", []), "has grid 0, and there are 0"),
    "grids that are an object": (put("grids", {}), _INVALID + "grids: Input should be a valid"),
    "a grid of another number": (put("tensors", WEIGHT, "grid", 2**40), "has grid 1099511627776, and there are"),
    "a grid of number -1": (put("tensors", WEIGHT, "grid", -1), _INVALID + rf"tensors\..*grid: {_INTEGER}"),
    "a grid that is a text": (put("tensors", WEIGHT, "grid", "0"), _INVALID + rf"tensors\..*grid: {_INTEGER}"),
    "a tensor without a grid": (without("tensors", WEIGHT, "grid"), _INVALID + r"tensors\..*grid: Field required"),
    "parts beside a grid": (put("tensors", WEIGHT, "parts", []), _INVALID + "tensors.*parts: Extra inputs"),
    "a grid of a rank that wasn't": (_cut(ranks=[1]), _MISPLACED),
    "a grid of no rank": (_cut(ranks=[]), _MISPLACED),
    "a grid of two ranks for one cell": (_cut(ranks=[0, 0]), _MISPLACED),
    "a rank twice": (_cut([0, [0, 4]], ranks=[0, 0]), _MISPLACED),
    "a rank of -1": (_cut(ranks=[-1]), _INVALID + r"grids\.1\.ranks\.0: "),
    "a grid along dim 2": (_cut([2, [0]], ranks=[0]), _MISPLACED),
    "a grid along dim -2": (_cut([-2, [0]], ranks=[0]), _INVALID + r"grids\.1\.cuts\.0\.0: "),
    "a grid along a dim twice": (_cut([0, [0]], [0, [0]], ranks=[0]), _MISPLACED),
    "a grid along elements and a dim": (_cut([-1, [0]], [0, [0]], ranks=[0]), _MISPLACED),
    "a grid that begins late": (_cut([0, [1]], ranks=[0]), _MISPLACED),
    "a grid without a start": (_cut([0, []], ranks=[]), _MISPLACED),
    "a grid that ends late": (_cut([0, [0, 8]], ranks=[0, 1]), _MISPLACED),
    "a cut of three": (_cut([0, [0], 1], ranks=[0]), _INVALID + r"grids\.1\.cuts\.0"),
    "a cut that is a number": (_cut(7, ranks=[0]), _INVALID + r"grids\.1\.cuts\.0"),
    "200,000 grids": (put("grids", [{}] * 200_000), _INVALID),
    "200,000 ranks of a grid": (_cut(ranks=["x"] * 200_000), _INVALID),
    "200,000 starts": (_cut([0, ["x"] * 200_000], ranks=[0]), _INVALID),
    "two ranks, and one file": (put("ranks", 2), "has other files than the 2 ranks wrote"),
    "10^15 ranks": (put("ranks", 10**15), "has other files than the 1,000,000,000,000,000 ranks"),
    "a header that is a list": (edit_header(lambda header: [header]), _HEADER + "(TypeError|AttributeError)"),
    "a header that is null": (edit_header(lambda header: 7), _HEADER + "AttributeError"),
    "a header without hashes": (_in_header("__metadata__", {}), _HEADER + "KeyError"),
    "metadata that are a text": (_in_header("__metadata__", "x"), _HEADER + "TypeError"),
    "hashes that are a list": (_in_header("__metadata__", "xxh3_128", []), _HEADER + "ValueError: .*0 of 512"),
    "too few hashes": (_in_header("__metadata__", "xxh3_128", "0" * 32), _HEADER + "ValueError: .*32 of 512"),
    "other hashes": (
        edit_header(lambda header: void(header["__metadata__"].update(xxh3_128="0" * 32 * (len(header) - 1)))),
        f"{SHARDS}bytes .* are not what was written",
    ),
    "a part that isn't there": (edit_header(lambda header: void(header.update({"x": header.pop(WEIGHT)}))), _HEADER),
    "a part of another dtype": (_in_header(WEIGHT, "dtype", "I32"), _HEADER + f"{WEIGHT} is I32"),
    "a part of another shape": (_in_header(WEIGHT, "shape", [32]), _HEADER + f"{WEIGHT} is F32"),
    "a part of a shape that is a number": (_in_header(WEIGHT, "shape", 7), _HEADER + "TypeError"),
    "a part at -1": (_in_header(WEIGHT, "data_offsets", [-1, 127]), _HEADER + "ValueError"),
    "a part at a text": (_in_header(WEIGHT, "data_offsets", ["0", "128"]), _HEADER + "TypeError"),
    "a part at 2^70": (_in_header(WEIGHT, "data_offsets", [2**70, 2**70 + 128]), _HEADER + "ValueError"),
    "a part without an end": (_in_header(WEIGHT, "data_offsets", [0]), _HEADER + "ValueError"),
    "two parts at each other's place": (edit_header(_two_swapped), _HEADER + "ValueError: bytes"),
    "a header of a hundred thousand lists": (_in_header("x", json.loads("[" * 900 + "]" * 900)), _HEADER),
}  # fmt: skip

_CONTRADICTS = r"its state contradicts it: Progress\(steps="

STATES: dict[str, tuple[Act, str]] = {
    "nothing at all": (put("state", {}), "progress: Field required"),
    **{
        f"no {key}": (without("state", key), f"{key}: Field required")
        for key in ("progress", "loss_scale", "patience", "seconds", "ledger", "sharding", "data")
    },
    "progress of texts": (put("state", "progress", "steps", "8"), "progress.steps: Input should be a valid integer"),
    "progress without samples": (without("state", "progress", "samples"), f"{_CONTRADICTS}8, samples=0"),
    "more than progress has": (put("state", "progress", "epochs", 1), "unexpected keyword argument 'epochs'"),
    "progress of another step": (put("state", "progress", "steps", 7), f"{_CONTRADICTS}7"),
    "progress of -1 samples": (put("state", "progress", "samples", -1), f"{_CONTRADICTS}8, samples=-1"),
    "a loss scale that is a list": (put("state", "loss_scale", []), "loss_scale: Input should be an object"),
    "a loss scale of texts": (put("state", "loss_scale", {"scale": "x", "streak": 0}), "loss_scale.scale: Input"),
    "patience that is null": (put("state", "patience", None), "patience: "),
    "seconds that are a text": (put("state", "seconds", "7"), "seconds: Input should be a valid number"),
    "a ledger that is an object": (put("state", "ledger", {}), "ledger: Input should be a valid"),
    "a ledger of numbers": (put("state", "ledger", [1, 2]), "ledger.0: Input should be an object"),
    "a ledger without order": (without("state", "ledger", 0, "order"), "ledger.0.order: Field required"),
    "sharding that is a text": (put("state", "sharding", "ddp"), "sharding: Input should be"),
    "an optimizer that is a list": (put("state", "sharding", "optimizer", []), "its state is invalid: "),
    "an optimizer of numbers": (put("state", "sharding", "optimizer", {"inner.weight": 7}), "its state is invalid: "),
    "no optimizer": (without("state", "sharding", "optimizer"), "its state is invalid: "),
    "groups that are null": (put("state", "sharding", "groups", None), "its state is invalid: "),
    "data that are a list": (put("state", "data", []), "data: Input should be an object"),
    "a best that is a text": (put("state", "best", "low"), "best: Input should be a valid number"),
}  # fmt: skip

# What may be another run's checkpoint: nothing is loaded, and nothing is moved aside.
REFUSED: dict[str, tuple[Act, str]] = {
    "no tensors": (put("tensors", {}), "it has no inner.weight"),
    "a tensor of another name": (_renamed("model.../../etc/passwd"), "it has no inner.weight"),
    "a tensor too many": (_renamed("optimizer.exp_avg.x"), "it has no inner.weight"),
    "a transposed tensor": (
        put("tensors", WEIGHT, "shape", [4, 8]),
        r"weight is float32 \[4, 8\] in the checkpoint, and float32 \[8, 4\] in",
    ),
    "a moment of 2^62 x 2^62": (put("tensors", MOMENT, "shape", [2**62, 2**62]), "exp_avg.inner.weight is float32"),
    "a moment of another shape": (put("tensors", MOMENT, "shape", [4, 8]), "exp_avg.inner.weight is float32"),
    "weights that are integers": (put("tensors", WEIGHT, "dtype", "int32"), "model.inner.weight is int32"),
    "a config of numbers": (put("config", {"model": 7, "data": 7, "run": []}), "of a run with other data, model"),
    "an optimizer of another model": (put("state", "sharding", "optimizer", {"x": {"momentum": 1.0}}), "also has x"),
    "other data": (put("state", "data", "fingerprint", "x" * 99), "of a run with other data, model or seed"),
}  # fmt: skip

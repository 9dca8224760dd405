"""Files that would fill memory or take forever are refused with one sentence, at once and in little memory."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit.worlds import in_world

from lockstep.core.errors import ConfigError
from lockstep.models.weight_files import read_weights

GOOD = {"model": {"kind": "image-classifier"}, "data": {"train": {"kind": "digits"}}, "run": {"steps": 1}}
_SECONDS = 2.5  # of processor time, on a machine that runs other tests; a second alone
_MEMORY = 200 * 2**20
FILLING = "<filling>"  # of 50 MB, once a file is written: what is forked from a process that has it copies its pages


def _good(**more: object) -> str:
    return json.dumps({**GOOD, **more})


def _aliases(mapping: bool) -> str:
    """Ten lines, 10^9 values."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for level in range(1, 10):
        names = ", ".join([f"*a{level - 1}"] * 10) if not mapping else f"*a{level - 1}"
        body = f"[{names}]" if not mapping else "{" + ", ".join(f"k{i}: {names}" for i in range(10)) + "}"
        lines.append(f"a{level}: &a{level} {body}")
    return "\n".join(lines)


def _chain(length: int) -> str:
    return "".join(f"a{level}: &a{level} [{f'*a{level - 1}' if level else 1}]\n" for level in range(length))


LARGE = r"can't be read: it has [0-9,]+ bytes, and may have 262,144"
DEEP = "lists and mappings are nested more than 64 deep"
MANY = "holds more than 10,000 values, including those that aliases repeat"
CONFIGS: dict[str, tuple[str, str, str]] = {  # what, the file's suffix, the refusal
    "aliases of aliases": ("model: {}\n" + _aliases(mapping=False), "yaml", MANY),
    "aliases of aliases, in mappings": ("model: {}\n" + _aliases(mapping=True), "yaml", MANY),
    "a chain of aliases": ("model: {}\n" + _chain(3000), "yaml", DEEP),
    "50 MB of YAML": ("#" + FILLING, "yaml", LARGE),
    "50 MB of JSON": (_good(description=FILLING), "json", LARGE),
    "2,000 brackets": ("[" * 2000, "yaml", DEEP),
    "200,000 brackets": ("[" * 200_000, "yaml", DEEP),
    "2,000 brackets, closed": ("a: " + "[" * 2000 + "]" * 2000, "yaml", DEEP),
    "2,000 braces": ("{a: " * 2000, "yaml", DEEP),
    "2,000 brackets of JSON": ('{"a": ' + "[" * 2000 + "]" * 2000 + "}", "json", DEEP),
    "200,000 brackets of JSON": ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "json", DEEP),
    "2,000 dashes": ("- " * 2000, "yaml", DEEP),
    "2,000 question marks": ("? " * 2000, "yaml", DEEP),
    "30,000 values": ("a: [" + "1," * 30_000 + "1]", "yaml", MANY),
    "30,000 keys": ("".join(f"k{number}: 1\n" for number in range(30_000)), "yaml", LARGE + "|" + MANY),
    "4,900 unknown keys": (
        _good(**{f"optimm{number}": 1 for number in range(4900)}), "json", "100 problems in the config",
    ),
    "a key of 200,000 letters": (_good(**{"o" * 200_000: 1}), "json", "unknown key|never closed"),
    "a number of 100,000 digits": (_good(run={"steps": 7}).replace("7", "7" * 100_000), "json", "digits|number"),
    "an alias to itself": ("a: &a [*a]", "yaml", "this alias contains itself"),
}  # fmt: skip
VERBS = {
    "check": ["config", "check", "*"],
    "import": ["config", "import", "*"],
    "deepspeed": ["config", "check", "good.json", "parallel.strategy=deepspeed", "--parallel.deepspeed.config=*"],
    "report": ["report", "run"],
}

CHILD = """
import contextlib, io, json, sys, time
from lockstep.cli.main import main

main(["config", "check", "good.json"])  # what is imported once
results = []
for words in json.load(sys.stdin):
    began, output = time.process_time(), io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        code = main(words)
    results.append([code, output.getvalue(), time.process_time() - began])
[line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
peak = 1024 * int(line.split()[1])
print(json.dumps([results, peak]), file=sys.__stdout__)
"""


def _write(file: Path, text: str) -> None:
    file.write_text(text.replace(FILLING, "x" * 50_000_000))


def _done(calls: list[list[str]], folder: Path) -> tuple[list[tuple[int, str, float]], int]:
    (folder / "good.json").write_text(_good())
    child = subprocess.run([sys.executable, "-c", CHILD], input=json.dumps(calls), text=True, cwd=folder, stdout=-1)
    assert child.returncode == 0
    results, peak = json.loads(child.stdout.splitlines()[-1])
    return results, peak


@pytest.mark.parametrize("verb", ["check", pytest.param("import", marks=pytest.mark.drill)])
def test_configs(verb: str, tmp_path: Path) -> None:
    import re

    calls = []
    for number, (text, suffix, _) in enumerate(CONFIGS.values()):
        file = tmp_path / f"{number}.{suffix}"
        _write(file, text)
        calls.append([word.replace("*", file.name) for word in VERBS[verb]])
    results, peak = _done(calls, tmp_path)
    for (name, (_, _, words)), (code, output, seconds) in zip(CONFIGS.items(), results, strict=True):
        assert "Traceback" not in output, name
        assert seconds < _SECONDS, (name, seconds)
        if verb == "check" or words in (LARGE, DEEP, MANY):
            assert code == 2, (name, output[:500])
            assert re.search(words, output), (name, output[:500])
    assert peak < _MEMORY


@pytest.mark.parametrize("name", ["50 MB of JSON", "200,000 brackets of JSON"])
def test_a_config_of_deepspeed(name: str, tmp_path: Path) -> None:
    _write(tmp_path / "ds.json", CONFIGS[name][0])
    [(code, output, seconds)], peak = _done([[word.replace("*", "ds.json") for word in VERBS["deepspeed"]]], tmp_path)
    assert code == 2
    assert "parallel.deepspeed.config: " in output
    assert "recursion depth" in output or "may have 262,144" in output
    assert seconds < _SECONDS
    assert peak < _MEMORY


RUN_FILES: dict[str, tuple[str, str]] = {  # of a run that is reported: the file and its text
    "aliases in its config": ("config.yaml", _aliases(mapping=False)),
    "brackets in its config": ("config.yaml", "[" * 100_000),
    "a config of 1 MB": ("config.yaml", "\n" * 1_000_000),
    "brackets in its environment": ("environment.json", "[" * 100_000),
    "an environment of 50 MB": ("environment.json", '{"a": "' + FILLING + '"}'),
    "a summary of 50 MB": ("summary.json", '{"a": "' + FILLING + '"}'),
    "a line of 50 MB": ("metrics.jsonl", '{"step": 1, "loss": "' + FILLING + '"}\n'),
    "brackets in its metrics": ("metrics.jsonl", "[" * 500_000 + "\n"),
    "a line of 50 MB in its events": ("events.jsonl", '{"step": 1, "text": "' + FILLING + '"}\n'),
}


def test_reports(tmp_path: Path) -> None:
    calls = []
    for number, (file, text) in enumerate(RUN_FILES.values()):
        run = tmp_path / str(number)
        run.mkdir()
        (run / "config.yaml").write_text(_good())
        _write(run / file, text)
        calls += [["report", run.name], ["ckpt", "ls", run.name]]
    results, peak = _done(calls, tmp_path)
    for call, (code, output, seconds) in zip(calls, results, strict=True):
        assert code in (0, 1, 2), call
        assert "Traceback" not in output
        assert seconds < _SECONDS, (call, list(RUN_FILES)[int(call[-1])], seconds)
    assert peak < 2 * _MEMORY  # numpy is imported


# --- weights ------------------------------------------------------------------------------------------------------


def _zip_bomb(file: Path) -> None:
    torch.save({"weight": torch.zeros(2**24)}, (kept := io.BytesIO()))
    with zipfile.ZipFile(kept) as plain, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))


def _overlapping(file: Path) -> None:
    """One member, which the directory names ten thousand times."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data/0", bytes(2**20))
        [entry] = archive.infolist()
        archive.filelist += [entry] * 10_000
    file.write_bytes(data.getvalue())


def _header(file: Path) -> None:
    with file.open("wb") as opened:
        opened.write((80_000_000).to_bytes(8, "little") + b'{"a":' + b" " * 80_000_000 + b"}")


WEIGHTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a zip bomb": ("weights.pt", _zip_bomb, "unpack to 67,[0-9,]+, more than 20 times as many"),
    "members that overlap": ("weights.bin", _overlapping, "unpack to 10,[0-9,]+, more than 20 times as many"),
    "a header of 80 MB": ("weights.safetensors", _header, "a header of 80,000,000 bytes"),
}


def _read(folder: str, name: str) -> tuple[str, int]:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _peak()
    try:
        read_weights(Path(folder) / name)
    except ConfigError as error:
        return str(error), _peak() - before
    return "", _peak() - before


def _peak() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str, tmp_path: Path) -> None:
    import re

    file, make, words = WEIGHTS[name]
    make(tmp_path / file)
    [(error, grown)] = in_world(1, _read, str(tmp_path), file)
    assert re.search(words, error), error
    assert grown < _MEMORY


def test_compressed_weights_are_read(tmp_path: Path) -> None:
    torch.save({"weight": torch.randn(1000)}, (kept := io.BytesIO()))
    with zipfile.ZipFile(kept) as plain, zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    assert list(read_weights(tmp_path / "a.pt").tensors) == ["weight"]

"""`lockstep ckpt`: output for users and scripts, and protection against mistakes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit import small
from kit.failures import gives
from kit.storing import Meeting, rank_states, save, saved, state_of
from torch import Tensor

import lockstep
from lockstep.checkpoint.comparison import tensor_difference
from lockstep.checkpoint.inspection import list_checkpoints, verify_all
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import Manifest, to_bytes
from lockstep.checkpoint.reading import read_manifest
from lockstep.checkpoint.saving import RunMetadata, Saver, StepMetadata
from lockstep.cli.main import main
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume


@dataclass
class Answer:
    code: int
    lines: list[str]
    error: str
    stdout: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


Ask = Callable[..., Answer]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run `lockstep ckpt` in this process."""

    def ask(*words: object) -> Answer:
        capsys.readouterr()  # of a run that the test has made
        code = main(["ckpt", *map(str, words)])
        captured = capsys.readouterr()
        if "--json" not in words:
            return Answer(code, captured.out.splitlines(), captured.err, captured.out)
        lines, mark, error = captured.err.partition("lockstep: ")  # with --json all but the object goes to stderr
        return Answer(code, [*lines.splitlines(), *captured.out.splitlines()], mark + error, captured.out)

    return ask


def _save(folder: Path, step: int, tensors: dict[str, Tensor] | None = None, **of: Any) -> Path:
    """Write a checkpoint of one rank; return its folder."""
    axis, storage = Meeting(1).axis(0), LocalStorage(folder)
    run = of.get("run", storage.run or "run")
    saver = Saver(storage, axis, torch.device("cpu"), RunMetadata(run, of.get("config", {}), {}))
    values = {"sharding": {}, **of.get("state", {})}
    moment = StepMetadata(step, 10 * step, 100 * step, values, of.get("metrics", {}))
    saver.start(state_of({"model.a": torch.arange(6.0)} if tensors is None else tensors), moment)
    saver.finish()
    assert [outcome.failure for outcome in saver.outcomes()] == [None]
    return folder / f"step-{step:08d}"


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 updates that saved every second one."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    checkpoint = {"every": "2 steps", "keep_last": 2, "keep_every": "4 steps", "best": "held-out.loss"}
    lockstep.train(
        small.config(checkpoint=checkpoint, evaluation={"every": "4 steps"}, run={"steps": 8, "folder": str(folder)})
    )
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Copy the run, to damage it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def _names(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir() if entry.is_dir())


# --- ls -----------------------------------------------------------------------------------------------------------


def test_ls_lists_checkpoints_and_why_each_is_kept(ask: Ask, run: Path) -> None:
    answer = ask("ls", run, "--json")
    assert answer.code == 0
    place, head, *rows = answer.lines[:-1]
    assert place == str(run / "checkpoints")
    assert head.split() == ["step", "samples", "written", "size", "kept", "as", "metrics"]
    assert [row.split()[:2] for row in rows] == [["4", "40"], ["6", "66"], ["8", "80"]]
    assert all(" s ago  " in row or " min " in row for row in rows)
    assert "kept for good" in rows[0]
    assert "held-out: loss " in rows[0]
    assert rows[1].endswith("newest")
    assert "newest, best" in rows[2]
    entry = answer.json["checkpoints"][0]
    assert (entry["name"], entry["step"], entry["samples"], entry["ranks"], entry["damaged"]) == (
        "step-00000004",
        4,
        40,
        1,
        None,
    )
    assert entry["stays"] == ["kept for good"]
    assert set(entry["metrics"]) == {"held-out.loss", "held-out.accuracy"}
    assert entry["size"] == (run / "checkpoints/step-00000004/rank-00000.safetensors").stat().st_size
    assert (answer.json["run"], answer.json["folder"], answer.json["aside"]) == (str(run), place, [])


def test_ls_reads_manifests_alone(ask: Ask, run: Path) -> None:
    before = ask("ls", run, "--json").json
    for shard in run.rglob("*.safetensors"):
        shard.unlink()
    assert ask("ls", run, "--json").json == before


def test_ls_marks_damaged_checkpoints_and_those_moved_aside(ask: Ask, run: Path) -> None:
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step-00000004", checkpoints / "superseded-step-00000010")
    shutil.copytree(checkpoints / "step-00000004", checkpoints / "broken-step-00000010-2")
    (checkpoints / ".draft-step-00000012").mkdir()
    _flip(checkpoints / "step-00000006/manifest.json", 40)
    answer = ask("ls", run, "--json")
    assert answer.code == 0
    assert any(gives(line, "step-00000006", "damaged", "manifest.json", "hash") for line in answer.lines)
    assert [line.rpartition(",")[0] for line in answer.lines if line.startswith("moved aside: ")] == [
        "moved aside: broken-step-00000010-2",
        "moved aside: superseded-step-00000010",
    ]
    assert [entry["stays"] for entry in answer.json["checkpoints"]] == [["newest"], ["damaged"], ["newest", "best"]]
    entry = answer.json["checkpoints"][1]
    assert entry.pop("damaged").startswith("manifest.json: ")
    assert entry == {"name": "step-00000006", "step": 6, "stays": ["damaged"]}
    assert answer.json["aside"][1]["name"] == "superseded-step-00000010"
    assert answer.json["aside"][1]["size"] > answer.json["checkpoints"][0]["size"]


def test_ls_of_a_run_without_checkpoints(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    text = "model: {kind: image-classifier}\ndata: {train: {kind: digits}}\nbatch: {global_size: 8}\nrun: {epochs: 1}\n"
    (tmp_path / "config.yaml").write_text(f"{text}checkpoint: {{keep_every: 1 epoch}}\n")
    answer = ask("ls", tmp_path, "--json")
    assert answer.code == 0
    assert gives(answer.lines[0], "no checkpoint", tmp_path / "checkpoints")
    assert answer.json["checkpoints"] == []
    assert ask("prune", tmp_path).lines == ["deleted none (0 B); 0 kept"]


def test_deletable_checkpoints_are_marked(ask: Ask, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        _save(tmp_path, step)
    rows = ask("ls", tmp_path).lines[2:]
    assert ["(deletable)" in row for row in rows] == [True, False, False, False]


# --- which are meant ----------------------------------------------------------------------------------------------


def test_a_run_and_its_folder_of_checkpoints_are_the_same(ask: Ask, run: Path) -> None:
    there = ask("ls", run, "--json").json
    assert {**ask("ls", run / "checkpoints", "--json").json, "run": str(run)} == there


def test_checkpoints_are_found_in_the_folder_of_the_config(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lockstep.train(small.config(checkpoint={"folder": "elsewhere"}, run={"steps": 2, "folder": "run"}))
    assert not Path("run/checkpoints").exists()
    answer = ask("ls", "run", "--json").json
    assert answer["folder"] == str(tmp_path / "elsewhere")
    assert [entry["step"] for entry in answer["checkpoints"]] == [2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ls nowhere", "nowhere doesn't exist; give a run's folder, its folder of checkpoints, or one of them"),
        ("ls run/logs", "run/logs is neither a run's folder, nor a folder of checkpoints, nor a checkpoint"),
        (
            "verify run/config.yaml",
            "run/config.yaml is neither a run's folder, nor a folder of checkpoints, nor a checkpoint",
        ),
        ("show run --step 5", "HERE/run/checkpoints has no checkpoint of step 5; the nearest is of step 4"),
        ("audit run --step 99", "HERE/run/checkpoints has no checkpoint of step 99; the nearest is of step 8"),
        ("diff run --steps 4 7", "HERE/run/checkpoints has no checkpoint of step 7; the nearest is of step 6"),
        (
            "show run/checkpoints/step-00000004 --step 4",
            "--step selects one of several checkpoints, and HERE/run/checkpoints/step-00000004 is one",
        ),
        (
            "ls run/checkpoints/step-00000004",
            "ls lists the checkpoints of a run, but run/checkpoints/step-00000004 is one checkpoint; use run/",
        ),
        (
            "prune run/checkpoints/step-00000004",
            "prune deletes some of the checkpoints of a run, but run/checkpoints/step-00000004 is one checkpoint; "
            "use run/checkpoints",
        ),
        ("diff run", "diff compares two: lockstep ckpt diff A B, or lockstep ckpt diff RUN --steps N M"),
        (
            "diff run run --steps 4 6",
            "diff compares two: lockstep ckpt diff A B, or lockstep ckpt diff RUN --steps N M",
        ),
        ("show empty", "there is no checkpoint in HERE/empty/checkpoints"),
        ("lst run", "ckpt has no command 'lst'; did you mean ls?"),
        ("purge run", "ckpt has no command 'purge'; did you mean prune?"),
        ("prune run --keep-last 0", "--keep-last: '0' is not a whole number above 0"),
        (
            "prune run --keep-every 5min",
            "--keep-every: use steps, samples, tokens or epochs; a checkpoint doesn't record minutes",
        ),
        ("prune run --keep-every often", "--keep-every: 'often' is not an interval; write a number of steps (100)"),
        ("verify run --step 4 --all", "--all: not allowed with argument --step"),
    ],
)
def test_wrong_arguments_are_explained(
    ask: Ask, run: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(run.parent)
    Path("empty").mkdir()
    Path("empty/run.lock").touch()
    before = _names(run)
    answer = ask(*words.split())
    assert answer.code == 2
    assert answer.error.startswith(f"lockstep: {message.replace('HERE', str(run.parent))}")
    assert _names(run) == before


def test_a_broken_config_is_reported_with_its_position(ask: Ask, run: Path) -> None:
    (run / "config.yaml").write_text("run: {steps: many}\n")
    answer = ask("ls", run)
    assert answer.code == 2
    assert gives(answer.error, f"{run}/config.yaml:1:14: run.steps: 'many'")


def test_help_lists_every_command(ask: Ask) -> None:
    text = "\n".join(ask("--help").lines)
    for way in ("ls", "show", "verify", "diff", "prune", "audit", "import"):
        assert f"\n  {way} " in text
        assert ask(way, "--help").code == 0
    assert ask().code == 2


# --- show ---------------------------------------------------------------------------------------------------------


def test_show_prints_the_contents_of_a_manifest(ask: Ask, run: Path) -> None:
    answer = ask("show", run, "--json")
    contents = answer.json
    manifest = read_manifest(LocalStorage(run / "checkpoints"), "step-00000008")
    assert answer.lines[0] == str(run / "checkpoints/step-00000008")
    shown = yaml.safe_load("\n".join(answer.lines[1:-1]))
    assert (shown["run"], shown["step"], shown["config"]["run"]["steps"]) == (manifest.run, 8, 8)
    assert shown["ledger"][0]["attempt"] == 1
    assert shown["tensors"] == {"model": "4 (268 B)", "optimizer": "12 (552 B)"}
    torch_version = metadata.version("torch")  # the package's: torch.__version__ may add +cu130
    assert shown["versions"]["torch"] == torch_version
    assert contents["environment"]["packages"]["torch"] == torch_version
    assert (contents["run_id"], contents["step"], contents["samples"], contents["ranks"]) == (manifest.run, 8, 80, 1)
    assert contents["config"] == manifest.config
    assert contents["state"] == manifest.state
    assert (contents["tensor_count"], contents["tensor_bytes"]) == (16, 268 + 552)
    assert "tensors" not in contents


def test_show_lists_tensors(ask: Ask, tmp_path: Path) -> None:
    _save(tmp_path, 3, {"model.a": torch.zeros(2, 3), "model.b": torch.zeros((), dtype=torch.bfloat16)})
    answer = ask("show", tmp_path, "--tensors", "--json")
    assert answer.lines[-3:-1] == ["  model.a: float32 [2, 3], 24 B", "  model.b: bfloat16 [], 2 B"]
    assert answer.json["tensors"]["model.b"] == {"dtype": "bfloat16", "shape": [], "size": 2}


def test_show_chooses_by_step_or_path(ask: Ask, run: Path) -> None:
    by_step = ask("show", run, "--step", 4, "--json").json
    by_path = ask("show", run / "checkpoints/step-00000004", "--json").json
    assert by_step["step"] == 4
    assert {**by_path, "run": str(run)} == by_step


# --- verify -------------------------------------------------------------------------------------------------------


def test_verify_reads_every_byte(ask: Ask, tmp_path: Path) -> None:
    tensors = {"model.a": torch.randn(5, 3), "model.b": torch.arange(4)}
    saved(tmp_path, rank_states(tensors, 2, 0))
    assert ask("verify", tmp_path).code == 0
    for file in sorted((tmp_path / "step-00000007").iterdir()):
        contents = file.read_bytes()
        for at in range(len(contents)):
            _flip(file, at)
            assert ask("verify", tmp_path).code == 3, (file.name, at)
            file.write_bytes(contents)


def _shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a tensor": (
        lambda folder: _flip(folder / "rank-00000.safetensors", -1),
        "rank-00000.safetensors: bytes 192 to 216, of model.a, are not what was written",
    ),
    "a header": (
        lambda folder: _flip(folder / "rank-00000.safetensors", 9),
        "rank-00000.safetensors: its header (bytes 0 to 192) is not what was written",
    ),
    "an end": (
        lambda folder: _shorten(folder / "rank-00000.safetensors"),
        "rank-00000.safetensors: has 215 bytes, and had 216 when it was written",
    ),
    "a file": (
        lambda folder: (folder / "rank-00000.safetensors").unlink(),
        "rank-00000.safetensors: No such file or directory",
    ),
    "a manifest's contents": (
        lambda folder: _flip(folder / "manifest.json", 60),
        "manifest.json: its hash does not match its contents",
    ),
    "a manifest": (
        lambda folder: _empty(folder / "manifest.json"),
        "manifest.json: is not a manifest: JSONDecodeError",
    ),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: No such file or directory"),
    "another's": (
        lambda folder: shutil.copy(folder.parent / "step-00000001/manifest.json", folder),
        "manifest.json: is of step 1",
    ),
    "another's tensor": (
        lambda folder: shutil.copy(folder.parent / "step-00000001/rank-00000.safetensors", folder),
        "rank-00000.safetensors: its header (bytes 0 to 192) is not what was written",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_with_file_and_position(ask: Ask, tmp_path: Path, damage: str) -> None:
    _save(tmp_path, 1, {"model.a": torch.arange(6.0) + 1})
    folder = _save(tmp_path, 2)
    do, message = DAMAGES[damage]
    do(folder)
    answer = ask("verify", tmp_path, "--json")
    assert answer.code == 3
    assert answer.lines[0].startswith(f"step-00000002  damaged: {message}")
    assert answer.error.startswith(f"lockstep: {folder} is damaged: {message}")
    assert answer.json["ok"] is False
    assert answer.json["checkpoints"][0]["fault"].startswith(message)
    assert ask("verify", folder).code == 3
    assert ask("verify", tmp_path, "--step", 1).code == 0
    assert ask("diff", tmp_path, "--steps", 1, 2).code == 3


def test_verify_reads_published_weights(ask: Ask, run: Path) -> None:
    result = ask("verify", run, "--json")
    assert re.fullmatch(r"model/model\.safetensors  intact: .* in .*", result.lines[1])
    assert [entry["fault"] for entry in result.json["weights"]] == [None]
    assert ask("verify", run, "--step", 4, "--json").json["weights"] == []
    file = run / "model" / "model.safetensors"
    _flip(file, -1)
    answer = ask("verify", run, "--json")
    assert (answer.code, answer.json["ok"]) == (3, False)
    assert gives(answer.error, file, "damaged", "bytes")
    assert ask("verify", run, "--step", 4).code == 0
    file.unlink()
    assert gives(ask("verify", run).error, file, "damaged", "missing")


def test_verify_all_continues_after_a_fault(ask: Ask, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _save(tmp_path, step)
    _flip(tmp_path / "step-00000001/rank-00000.safetensors", -1)
    _flip(tmp_path / "step-00000002/manifest.json", -3)
    answer = ask("verify", tmp_path, "--all", "--json")
    assert answer.code == 3
    assert [line.split(":")[0] for line in answer.lines[:-1]] == [
        "step-00000001  damaged",
        "step-00000002  damaged",
        "step-00000003  intact",
    ]
    assert [entry["fault"] is None for entry in answer.json["checkpoints"]] == [False, False, True]
    assert gives(answer.error.replace("\n", ""), 2, 3, tmp_path, "step-00000001:")


def test_a_checkpoint_moved_aside_can_be_verified(ask: Ask, tmp_path: Path) -> None:
    _save(tmp_path, 1).rename(tmp_path / "superseded-step-00000001-2")
    assert ask("verify", tmp_path / "superseded-step-00000001-2").code == 0
    assert ask("show", tmp_path / "superseded-step-00000001-2").code == 0
    answer = ask("verify", tmp_path)
    assert (answer.code, answer.lines) == (2, [])
    assert gives(answer.error, "no checkpoint", tmp_path)


# --- diff ---------------------------------------------------------------------------------------------------------


def test_equal_checkpoints_compare_as_equal(ask: Ask, tmp_path: Path) -> None:
    """The number of ranks that wrote them doesn't matter."""
    tensors = {"model.a": torch.randn(5, 3), "model.nan": torch.tensor([float("nan"), 1.0])}
    saved(tmp_path / "one", [state_of(tensors)])
    save(LocalStorage(tmp_path / "other"), rank_states(tensors, 3, 0), 7, run="another")
    answer = ask("diff", tmp_path / "one", tmp_path / "other", "--json")
    assert (answer.code, answer.error) == (0, "")
    assert gives(answer.lines[0], "equal", "2 tensors")
    assert answer.json["equal"] is True


def test_diff_prints_the_differences(ask: Ask, tmp_path: Path) -> None:
    a = _save(
        tmp_path / "a",
        7,
        {
            "model.a": torch.tensor([1.0, 2.0, 4.0]),
            "model.b": torch.zeros(2),
            "model.c": torch.zeros(3),
            "model.d": torch.ones(1),
        },
        config={"optim": {"lr": 0.1}, "run": {"folder": "a", "steps": 9}},
        state={"best": 0.5, "seconds": 3.0, "ledger": [1]},
    )
    b = _save(
        tmp_path / "b",
        7,
        {
            "model.a": torch.tensor([1.0, 2.5, 3.0]),
            "model.b": torch.zeros(2).half(),
            "model.c": torch.zeros(3, 1),
            "model.e": torch.ones(1),
        },
        config={"optim": {"lr": 0.2}, "run": {"folder": "b", "steps": 9, "seed": 7}},
        state={"best": 0.25, "seconds": 4.0, "ledger": [2]},
    )
    answer = ask("diff", a, b, "--json")
    assert answer.code == 1
    assert answer.lines[:-1] == [
        f"A  {a}",
        f"B  {b}",
        "1 tensor only in A:",
        "  model.d",
        "1 tensor only in B:",
        "  model.e",
        "2 tensors with another shape or dtype:",
        "  model.b: float32 [2] in A, float16 [2] in B",
        "  model.c: float32 [3] in A, float32 [3, 1] in B",
        "1 tensor with other values (0 are identical):",
        "  model.a: 2 of 3 elements, by at most 1 (0.25 of the value)",
        "2 values of the config:",
        "  optim.lr: 0.1 in A, 0.2 in B",
        "  run.seed: missing in A, 7 in B",
        "1 value of the state:",
        "  best: 0.5 in A, 0.25 in B",
    ]
    assert answer.json == {
        "checkpoints": [str(a), str(b)],
        "equal": False,
        "only_in": [["model.d"], ["model.e"]],
        "kinds": {
            "model.b": [{"dtype": "float32", "shape": [2]}, {"dtype": "float16", "shape": [2]}],
            "model.c": [{"dtype": "float32", "shape": [3]}, {"dtype": "float32", "shape": [3, 1]}],
        },
        "values": {"model.a": {"elements": 3, "differing": 2, "absolute": 1.0, "relative": 0.25, "not_finite": 0}},
        "same": 0,
        "config": {"optim.lr": [0.1, 0.2], "run.seed": [None, 7]},
        "state": {"best": [0.5, 0.25]},
    }


def test_diff_by_steps(ask: Ask, run: Path) -> None:
    answer = ask("diff", run, "--steps", 4, 8, "--json")
    assert answer.code == 1
    assert answer.json["state"]["progress.steps"] == [4, 8]
    assert "model.head.weight" in answer.json["values"]
    assert ask("diff", run, "--steps", 4, 4).code == 0
    assert ask("diff", run, run / "checkpoints/step-00000008").code == 0


def test_many_differences_are_not_all_shown(ask: Ask, tmp_path: Path) -> None:
    a = _save(tmp_path, 1, {f"model.{index:02d}": torch.zeros(1) for index in range(20)})
    b = _save(tmp_path, 2, {f"model.{index:02d}": torch.ones(1) for index in range(20)})
    lines = ask("diff", a, b).lines
    assert gives(lines[2], "20 tensors", 0)
    assert lines[-1] == "  and 8 more"


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, NAN], [1.0, NAN], None),
        ([0.0], [-0.0], (1, 0.0, 0.0, 0)),
        ([1.0, NAN], [1.0, 2.0], (1, None, None, 1)),
        ([1.0, INF, 4.0], [2.0, 1.0, 4.0], (2, 1.0, 0.5, 1)),
        ([-1.0], [1.0], (1, 2.0, 2.0, 0)),
    ],
)
def test_the_size_of_a_difference(first: list[float], second: list[float], expected: tuple[Any, ...] | None) -> None:
    answer = tensor_difference("a", torch.tensor(first), torch.tensor(second))
    if expected is None:
        assert answer is None
        return
    assert answer is not None
    assert (answer.differing, answer.absolute, answer.relative, answer.not_finite) == expected


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ],
    ids=str,
)
def test_tensors_of_every_dtype_are_compared(ask: Ask, tmp_path: Path, dtype: torch.dtype) -> None:
    first, second = torch.tensor([0.0, 1.0, 1.0]).to(dtype), torch.tensor([0.0, 0.0, 1.0]).to(dtype)
    a = _save(tmp_path, 1, {"model.a": first, "model.scalar": first[1], "model.empty": first[:0]})
    b = _save(tmp_path, 2, {"model.a": second, "model.scalar": second[1], "model.empty": second[:0]})
    values = ask("diff", a, b, "--json").json["values"]
    assert values["model.a"] == {"elements": 3, "differing": 1, "absolute": 1.0, "relative": 1.0, "not_finite": 0}
    assert values["model.scalar"]["elements"] == 1
    assert "model.empty" not in values


def test_large_tensors_are_compared_in_parts() -> None:
    first = torch.zeros(2**20 + 5)
    second = first.clone()
    second[0], second[-1] = 0.5, -3.0
    answer = tensor_difference("a", first, second)
    assert answer is not None
    assert (answer.elements, answer.differing, answer.absolute, answer.relative) == (2**20 + 5, 2, 3.0, 1.0)


def test_an_interrupted_run_equals_an_uninterrupted_one(ask: Ask, tmp_path: Path) -> None:
    """Attempts, time and folder aren't compared."""

    def train(folder: Path, until: int) -> None:
        with lockstep.session(small.config(run={"steps": 9, "folder": str(folder)})) as session:
            checkpoints = Checkpoints(session, LocalStorage(folder), {})
            checkpoints.begin(Resume())
            for report in session:
                if report.step == until:
                    checkpoints.save()
                    checkpoints.finish()
                    return

    for until in (5, 9):
        train(tmp_path / "cut", until)
    train(tmp_path / "uncut", 9)
    answer = ask("diff", tmp_path / "cut", tmp_path / "uncut")
    assert (answer.code, answer.error) == (0, ""), answer.lines


# --- prune --------------------------------------------------------------------------------------------------------


def test_prune_keeps_checkpoints_by_the_config(ask: Ask, run: Path) -> None:
    added = _save(run / "checkpoints", 5)
    _save(run / "checkpoints", 7)
    sizes = [(entry / "rank-00000.safetensors").stat().st_size for entry in (added, added.with_name("step-00000006"))]
    assert ask("prune", run, "--json").json == {
        "run": str(run),
        "dry_run": False,
        "deleted": ["step-00000005", "step-00000006"],
        "aside": [],
        "bytes": sum(sizes),
        "stay": ["step-00000004", "step-00000007", "step-00000008"],
        "verified": "step-00000008",
    }
    assert _names(run) == ["step-00000004", "step-00000007", "step-00000008"]


def test_flags_override_the_config(ask: Ask, run: Path) -> None:
    answer = ask("prune", run, "--keep-last", 1, "--keep-every", "6 steps")
    assert answer.code == 0
    assert _names(run) == ["step-00000006", "step-00000008"]
    assert answer.lines[0].startswith("deleted step-00000004, ")
    assert answer.lines[1].startswith("deleted 1 (")
    assert gives(answer.lines[1], 2, "step-00000008", "intact")


def test_a_dry_run_deletes_nothing(ask: Ask, run: Path) -> None:
    before = _names(run)
    answer = ask("prune", run, "--keep-last", 1, "--keep-every", "1000 steps", "--dry-run", "--json")
    assert [line.split(",")[0] for line in answer.lines[:2]] == [
        "would delete step-00000004",
        "would delete step-00000006",
    ]
    assert answer.json["deleted"] == ["step-00000004", "step-00000006"]
    assert answer.json["dry_run"] is True
    assert _names(run) == before


def test_without_a_run_the_newest_manifest_sets_the_retention(ask: Ask, tmp_path: Path) -> None:
    for step in range(1, 6):
        metrics = {"held-out.loss": abs(step - 2.0)}
        _save(tmp_path, step, metrics=metrics, config={"checkpoint": {"keep_last": 2, "best": "held-out.loss"}})
    assert ask("prune", tmp_path, "--json").json["stay"] == ["step-00000002", "step-00000004", "step-00000005"]
    _save(tmp_path, 6, config={"checkpoint": {"keep_lots": 2}})
    answer = ask("prune", tmp_path)
    assert answer.code == 2
    assert gives(answer.error, "checkpoint", "step-00000006")


def test_epochs_are_those_of_the_ledger(ask: Ask, tmp_path: Path) -> None:
    order = {"seed": 1, "shuffle": True, "samples": 25, "epoch_samples": 25, "fingerprint": ""}
    ledger = [{"attempt": 1, "ranks": 1, "first": 0, "last": 10, "digest": 0, "order": order}]
    for step in range(1, 7):
        _save(tmp_path, step, state={"ledger": ledger})
    stay = ask("prune", tmp_path, "--keep-last", 1, "--keep-every", "1 epoch", "--json").json["stay"]
    assert stay == ["step-00000003", "step-00000005", "step-00000006"]
    _save(tmp_path, 7)
    answer = ask("prune", tmp_path, "--keep-every", "1 epoch")
    assert answer.code == 2
    assert gives(answer.error, "keep_every", "1 epoch")


def test_prune_refuses_a_run_in_progress(ask: Ask, run: Path) -> None:
    before = _names(run)
    with open(run / "run.lock", "w") as lock:
        lock.write("process 7 on here\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in (run, run / "checkpoints"):
            answer = ask("prune", path, "--keep-last", 1)
            assert answer.code == 1
            assert gives(answer.error, run, "process 7", "--dry-run")
        assert ask("prune", run, "--keep-last", 1, "--keep-every", 100, "--dry-run", "--json").json["deleted"]
    assert _names(run) == before
    assert ask("prune", run, "--keep-last", 1).code == 0


def test_prune_refuses_a_folder_that_a_process_saves_to(ask: Ask, tmp_path: Path) -> None:
    """A custom loop saves without a run's folder."""
    for step in (1, 2):
        _save(tmp_path, step)
    _save(tmp_path, 3).rename(tmp_path / "broken-step-00000003")
    program = (
        "import pathlib, sys\n"
        "from lockstep.checkpoint.local import LocalStorage\n"
        "print(LocalStorage(pathlib.Path(sys.argv[1])).claim(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as saving:
        assert saving.stdout is not None
        assert saving.stdout.readline() == "True\n"
        for words in (["--keep-last", 1], ["--aside"]):
            answer = ask("prune", tmp_path, *words)
            assert answer.code == 1
            assert gives(answer.error, tmp_path, "--dry-run")
        assert ask("prune", tmp_path, "--keep-last", 1, "--dry-run", "--json").json["deleted"] == ["step-00000001"]
        saving.communicate()
    assert ask("prune", tmp_path, "--keep-last", 1, "--aside", "--json").json["deleted"] == ["step-00000001"]


def test_a_malformed_lock_causes_no_traceback(ask: Ask, run: Path) -> None:
    (run / "run.lock").unlink()
    assert ask("prune", run).code == 0
    (run / "run.lock").mkdir()
    answer = ask("prune", run)
    assert answer.code == 1
    assert gives(answer.error, run / "run.lock", os.strerror(errno.EISDIR))


class _Vanishing(LocalStorage):
    """A run in progress deletes a checkpoint after it was listed."""

    def names(self) -> list[str]:
        answer = super().names()
        shutil.rmtree(Path(self.place) / "step-00000001", ignore_errors=True)
        return answer


def test_a_checkpoint_deleted_after_listing_is_not_reported_as_damaged(tmp_path: Path) -> None:
    for look in (list_checkpoints, verify_all):
        for step in (1, 2):
            shutil.rmtree(tmp_path / f"step-{step:08d}", ignore_errors=True)
            _save(tmp_path, step)
        assert [entry.name for entry in look(_Vanishing(tmp_path))] == ["step-00000002"]


def test_the_newest_checkpoint_that_verifies_is_kept(ask: Ask, tmp_path: Path) -> None:
    """The three newest are damaged, each in another way, so a superfluous one is needed."""
    for step in range(1, 6):
        _save(tmp_path, step)
    _flip(tmp_path / "step-00000005/rank-00000.safetensors", -1)
    (tmp_path / "step-00000004/rank-00000.safetensors").unlink()
    _flip(tmp_path / "step-00000003/manifest.json", 9)
    answer = ask("prune", tmp_path, "--keep-last", 1, "--json").json
    assert answer["verified"] == "step-00000002"
    assert answer["deleted"] == ["step-00000001", "step-00000004"]
    assert answer["stay"] == ["step-00000002", "step-00000003", "step-00000005"]


def test_if_none_verifies_none_is_deleted(ask: Ask, tmp_path: Path) -> None:
    for step in (1, 2):
        _flip(_save(tmp_path, step) / "rank-00000.safetensors", -1)
    _save(tmp_path, 3).rename(tmp_path / "superseded-step-00000003")
    answer = ask("prune", tmp_path, "--keep-last", 1, "--aside")
    assert answer.code == 3
    assert gives(answer.error.replace("\n", ""), tmp_path, "step-00000002: rank-00000.safetensors:")
    assert len(list(tmp_path.iterdir())) == 3


def test_checkpoints_moved_aside_are_deleted_on_request(ask: Ask, tmp_path: Path) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2).rename(tmp_path / "broken-step-00000002")
    _save(tmp_path, 3).rename(tmp_path / "superseded-step-00000003-2")
    (tmp_path / "mine-step").mkdir()
    assert ask("prune", tmp_path, "--json").json["aside"] == []
    assert ask("prune", tmp_path, "--aside", "--dry-run").lines[0].startswith("would delete broken-step-00000002, ")
    answer = ask("prune", tmp_path, "--aside", "--json").json
    assert answer["aside"] == ["broken-step-00000002", "superseded-step-00000003-2"]
    assert answer["bytes"] > 2 * 152
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ["mine-step", "step-00000001"]


# --- audit --------------------------------------------------------------------------------------------------------


def test_audit_of_a_complete_run(ask: Ask, run: Path) -> None:
    answer = ask("audit", run, "--json")
    assert (answer.code, answer.error) == (0, "")
    assert answer.lines[1].split()[:4] == ["1", "1", "0", "80"]
    assert gives(answer.lines[-2], "step 8", "80 samples", "complete")
    contents = answer.json
    assert {key: contents[key] for key in ("run", "step", "samples", "complete", "gaps", "repeats", "mismatches")} == {
        "run": str(run), "step": 8, "samples": 80, "complete": True, "gaps": [], "repeats": [], "mismatches": [],
    }  # fmt: skip
    [segment] = contents["segments"]
    assert segment["digest"] == segment["expected"]
    assert ask("audit", run, "--step", 4, "--json").json["samples"] == 40
    assert ask("audit", run / "checkpoints/step-00000006").code == 0


def _with_ledger(checkpoint: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Rewrite the ledger of a checkpoint with a valid manifest."""
    manifest = read_manifest(LocalStorage(checkpoint.parent), checkpoint.name)
    body = manifest.model_dump(mode="json")
    change(body["state"]["ledger"])
    (checkpoint / "manifest.json").write_bytes(to_bytes(Manifest.model_validate_json(json.dumps(body))))


@pytest.mark.parametrize(
    ("change", "lists", "message"),
    [
        (
            {"first": 13},
            {"gaps": [[0, 13]]},
            "no update used the samples at 0 to 13; samples that the order doesn't have there",
        ),
        ({"digest": 5}, {"mismatches": [[0, 80]]}, "samples that the order doesn't have there were used at 0 to 80"),
        ({"last": 93}, {"repeats": [[80, 93]]}, "more than one update used those at 80 to 93; samples that"),
    ],
)
def test_audit_reports_what_is_wrong(
    ask: Ask, run: Path, change: dict[str, int], lists: dict[str, Any], message: str
) -> None:
    checkpoint = run / "checkpoints/step-00000008"
    _with_ledger(checkpoint, lambda ledger: ledger[0].update(change))
    answer = ask("audit", run, "--json")
    assert answer.code == 3
    assert answer.error.startswith(f"lockstep: {checkpoint}: {message}")
    assert answer.lines[-2].startswith("step 8, 80 samples: NOT complete: ")
    assert answer.json["complete"] is False
    for name, spans in lists.items():
        assert answer.json[name] == spans


def test_audit_needs_a_ledger(ask: Ask, run: Path) -> None:
    checkpoint = run / "checkpoints/step-00000008"
    _with_ledger(checkpoint, lambda ledger: ledger.clear())
    answer = ask("audit", run)
    assert answer.code == 3
    assert gives(answer.error, checkpoint, "no ledger")
    (checkpoint / "manifest.json").unlink()
    answer = ask("audit", run, "--json")
    assert (answer.code, answer.lines) == (3, [])
    assert gives(answer.error, checkpoint, "damaged", "manifest.json", os.strerror(errno.ENOENT))


# --- import, and what is not imported -------------------------------------------------------------------------------


def test_import_makes_a_file_of_weights(ask: Ask, tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2), "b": torch.zeros(3)}, "epoch": 4}, tmp_path / "model.ckpt")
    answer = ask("import", tmp_path / "model.ckpt", tmp_path / "there", "--json")
    assert (answer.code, answer.error) == (0, "")
    assert answer.json["tensors"] == 2
    assert answer.json["skipped"] == ["epoch"]
    assert Path(answer.json["file"]).is_file()
    assert answer.lines[0].startswith(f"{answer.json['file']}: 2 tensors")
    again = ask("import", tmp_path / "model.ckpt", tmp_path / "there")
    assert again.code == 2
    assert gives(again.error, answer.json["file"], "--force")
    assert ask("import", tmp_path / "model.ckpt", tmp_path / "there", "--force").code == 0


@pytest.mark.parametrize(
    "words",
    [["ls"], ["show", "--tensors"], ["verify", "--all"], ["prune", "--keep-last", "1"], ["audit"]],
    ids=lambda words: words[0],
)
def test_reading_commands_do_not_import_torch(run: Path, words: list[str]) -> None:
    program = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        f"code = main({['ckpt', words[0], str(run), *words[1:]]!r})\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

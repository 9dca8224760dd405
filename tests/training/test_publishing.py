"""A large model is published in files of about equal bytes, however long a disk takes, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.families import family
from kit.small import in_group
from kit.worlds import in_world, served
from safetensors.torch import load_file

import lockstep
from lockstep.core import checksums, files
from lockstep.core.files import exchanged
from lockstep.loop.session import components_of
from lockstep.models.weight_files import read_weights
from lockstep.training import publishing
from lockstep.training.publishing import plan_files, publish

FLOAT = torch.float32


def _sizes(number: int, width: int = 250) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {f"layer.{index}": ((width, 1000), FLOAT) for index in range(number)}


@pytest.mark.parametrize(("tensors", "number"), [(10, 1), (64, 7), (200, 20), (11, 2)])
def test_files_have_about_as_many_bytes(tensors: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "MAX_FILE_BYTES", 10**7)
    specs = _sizes(tensors)  # 1 MB each
    planned = plan_files([[name] for name in specs], specs)
    assert len(planned) == number
    assert [name for names in planned.values() for name in names] == list(specs)
    assert max(map(len, planned.values())) - min(map(len, planned.values())) <= 1
    last = f"model-{number:05d}-of-{number:05d}.safetensors" if number > 1 else "model.safetensors"
    assert list(planned)[-1] == last


# --- of several ranks ---------------------------------------------------------------------------------------------

DIVIDED: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "pipeline+fsdp": {"strategy": "fsdp", "pipeline": 2},
    "zero3": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3}},
}  # fmt: skip
OWN = {
    "model": {"kind": "transformer", "layers": 3, "width": 16, "heads": 2},
    "data": {"train": {"kind": "stdlib-text", "length": 16, "samples": 40}},
}
ROWS = [("own", way) for way in DIVIDED] + [("gpt2", "fsdp"), ("gpt2", "pipeline+fsdp"), ("mixtral", "fsdp")]


def _config(name: str, folder: Path, **parallel: Any) -> dict[str, Any]:
    return {
        **(OWN if name == "own" else family(name)),
        "batch": {"global_size": 8},
        "optim": {"name": "sgd", "lr": 1e-2},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "monitor": {"tensorboard": False, "progress": "none"},
        "parallel": parallel,
        "run": {"steps": 1, "folder": str(folder)},
    }


def _train(name: str, way: str, folder: Path) -> None:
    if way != "single":
        publishing.MAX_FILE_BYTES = 10_000
    with in_group():
        lockstep.train(_config(name, folder, **DIVIDED.get(way, {"strategy": "single"})))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of a run, which is trained if a test asks for it."""
    folder = tmp_path_factory.mktemp("sharded")

    @cache
    def run(name: str, way: str) -> Path:
        in_world(1 if way == "single" else 2, _train, name, way, folder / name / way)
        return folder / name / way

    return run


@pytest.mark.parametrize(("name", "way"), ROWS)
def test_files_hold_the_model_once(name: str, way: str, run: Callable[[str, str], Path]) -> None:
    folder = run(name, way) / "model"
    expected = load_file(run(name, "single") / "model" / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("model-*.safetensors"))
    assert {file.name for file in shards} == set(index["weight_map"].values())
    assert len(shards) >= 2
    assert not (folder / "model.safetensors").exists()
    assert index["metadata"]["total_size"] == sum(one.numel() * one.element_size() for one in expected.values())
    every = sorted(file for file in folder.iterdir() if file.name != checksums.LIST)
    assert checksums.listed(folder) == every, "config.json, too"
    assert not any(map(checksums.fault, every))
    mine = read_weights(run(name, way)).tensors
    assert mine.keys() == expected.keys() == index["weight_map"].keys()
    for key, one in mine.items():
        torch.testing.assert_close(one, expected[key], atol=1e-6, rtol=0)
    assert {path.name for path in folder.parent.glob(".model*")} == set()


@pytest.mark.parametrize(("name", "way"), [row for row in ROWS if row[0] != "own"])
def test_from_pretrained_reads_several_files(name: str, way: str, run: Callable[[str, str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(run(name, way) / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    single = AutoModelForCausalLM.from_pretrained(run(name, "single") / "model").state_dict()
    for key, one in model.state_dict().items():
        torch.testing.assert_close(one, single[key], atol=1e-6, rtol=0)


def test_verbs_read_several_files(
    run: Callable[[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.cli.main import main

    assert main(["generate", str(run("own", "fsdp")), "def ", "--tokens", "4", "--temperature", "0"]) == 0
    assert main(["generate", str(run("own", "single")), "def ", "--tokens", "4", "--temperature", "0"]) == 0
    sharded, single = capsys.readouterr().out.splitlines()
    assert sharded == single
    config = _config("own", tmp_path, strategy="single")
    with lockstep.session({**config, "model": {**OWN["model"], "init_from": str(run("own", "fsdp"))}}) as session:
        mine = dict(components_of(session).sharding.state.weights())
    assert all(torch.equal(mine[key], one) for key, one in read_weights(run("own", "fsdp")).tensors.items())


def _held(folder: Path) -> tuple[int, int]:
    """Publish a model; return this rank's bytes in the largest file, and those of the model."""
    publishing.MAX_FILE_BYTES = 20_000
    held = [0]
    original = publishing.write_file

    def write(model: Any, expected: Any, file: Path, tensors: dict[str, torch.Tensor]) -> None:
        held.append(sum(tensor.nbytes for tensor in tensors.values()))
        original(model, expected, file, tensors)

    publishing.write_file = write
    with in_group(), lockstep.session(_config("own", folder, strategy="fsdp")) as session:
        publish(session, lambda: folder)
        specs = components_of(session).sharding.state.specs()
    return max(held), sum(map(publishing.bytes_of, specs.values()))


def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    (first, whole), (second, _) = in_world(2, _held, tmp_path)
    assert 0 < first <= 25_000 < whole / 2
    assert second == 0


# --- slow disks, failures and kills -----------------------------------------------------------------------------------


def _publish_on_a_slow_disk(folder: Path) -> None:
    publishing.MAX_FILE_BYTES = 10_000
    original = publishing.write_file

    def write(model: Any, expected: Any, file: Path, tensors: Any) -> None:
        if file.name.startswith("model-00002"):
            time.sleep(3.0)
        original(model, expected, file, tensors)

    publishing.write_file = write
    config = _config("own", folder, strategy="fsdp")
    with lockstep.session({**config, "launch": {"device": "cpu", "timeout": 1.5}}) as session:
        publish(session, lambda: folder)


def test_a_disk_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    in_world(2, _publish_on_a_slow_disk, tmp_path)
    assert read_weights(tmp_path).tensors


def _publish_on_a_full_disk(folder: Path) -> str:
    publishing.MAX_FILE_BYTES = 10_000
    original = publishing.write_file

    def write(model: Any, expected: Any, file: Path, tensors: Any) -> None:
        if file.name.startswith("model-00002"):
            raise OSError(28, "No space left on device")
        original(model, expected, file, tensors)

    with in_group(), lockstep.session(_config("own", folder, strategy="fsdp")) as session:
        publish(session, lambda: folder)
        publishing.write_file = write
        with pytest.raises(lockstep.RunFailed) as failure:
            publish(session, lambda: folder)
    return str(failure.value)


def test_a_disk_that_is_full_fails_all_ranks_and_leaves_the_old(tmp_path: Path) -> None:
    first, second = in_world(2, _publish_on_a_full_disk, tmp_path)
    assert first == second
    assert os.strerror(errno.ENOSPC) in first
    assert read_weights(tmp_path).tensors
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def _die(*arguments: Any) -> Any:
    os._exit(9)


def _publish_and_die(folder: Path, where: str) -> None:
    publishing.MAX_FILE_BYTES = 10_000
    with lockstep.session(_config("own", folder, strategy="single")) as session:
        state = components_of(session).sharding.state
        with torch.no_grad():
            next(state.model.parameters()).fill_(7.0)
        if where == "after":
            files.exchanged = lambda *paths: exchanged(*paths) and _die()
        else:
            owner, name = {"hash": (checksums, "hash_of"), "list": (checksums, "record_folder")}.get(
                where, (files, "exchanged")
            )
            setattr(owner, name, _die)
        publish(session, lambda: folder)


@pytest.mark.parametrize("where", ["hash", "list", "before", "after"])
def test_a_kill_leaves_the_old_or_the_new(where: str, tmp_path: Path) -> None:
    with lockstep.session(_config("own", tmp_path, strategy="single")) as session:
        first = next(iter(components_of(session).sharding.state.specs()))
        publish(session, lambda: tmp_path)
        process = served().Process(target=_publish_and_die, args=(tmp_path, where))
        process.start()
        process.join(60)
        assert process.exitcode == 9
        is_new = bool((read_weights(tmp_path).tensors[first] == 7.0).all())  # hashes are checked, too
        assert is_new == (where == "after")
        publish(session, lambda: tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").glob("model*")] == ["model.safetensors"]


def test_a_file_system_that_cant_exchange_names_keeps_the_old_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "exchanged", lambda *paths: False)
    for content in ("old", "new"):
        (tmp_path / "next").mkdir()
        (tmp_path / "next" / "file").write_text(content)
        files.replace_folder(tmp_path / "model", tmp_path / "next")
        assert (tmp_path / "model" / "file").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

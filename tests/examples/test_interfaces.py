"""The examples of monitors, transforms and storage: passed in Python, and named in a config."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from kit import small
from kit.worlds import in_world
from torch import nn

import lockstep
from lockstep.cli.main import main
from lockstep.core.extensions import import_target

EXAMPLES = Path(__file__).parents[2] / "examples"
PARTS = ("monitor", "tracker", "transform", "storage")
MONITOR, TRACKER, TRANSFORM, STORAGE = (EXAMPLES / f"own_{name}.py" for name in PARTS)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def _from(file: Path, name: str) -> Any:
    return import_target(f"{file}:{name}")


def _config(folder: Path, steps: int = 4, **sections: Any) -> dict[str, Any]:
    return small.config(run={"steps": steps, "folder": str(folder)}, schedule={"kind": "constant"}, **sections)


def _summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize("file", [MONITOR, TRACKER, TRANSFORM, STORAGE])
def test_an_example_is_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) < 40


def test_a_monitor_sees_updates_restarts_and_the_end_and_can_request(tmp_path: Path) -> None:
    messages: list[str] = []
    monitor = _from(MONITOR, "Messages")(messages.append, below=100.0)
    lockstep.train(_config(tmp_path / "run", evaluation={"at_end": False}), monitors=[monitor])
    assert messages[0].startswith("run: loss ")
    assert messages[-1] == "run: done"
    assert "evaluation" in _summary(tmp_path / "run")
    messages.clear()
    lockstep.train(_config(tmp_path / "run", steps=6), monitors=[monitor], name="again")
    assert messages[0] == "again: attempt 2 resumes from step 4"


def test_a_monitor_by_name_and_one_that_raises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken_monitor.py"
    broken.write_text(
        "import lockstep\nclass Broken(lockstep.extend.Monitor):\n    def see(self, report): raise ValueError('x')\n"
    )
    lockstep.train(
        _config(tmp_path / "run", monitors=[{"target": f"{MONITOR}:Messages"}, {"target": f"{broken}:Broken"}])
    )
    assert "run: done" in capsys.readouterr().out
    assert "Broken failed" in caplog.text
    with pytest.raises(
        lockstep.ConfigError, match=r"monitors\[0\]\.target: .*has no Messagess; did you mean Messages\?"
    ):
        lockstep.train(_config(tmp_path / "other", monitors=[{"target": f"{MONITOR}:Messagess"}]))


def test_a_tracker_records_a_run_that_resumes_as_one(tmp_path: Path) -> None:
    table, run = tmp_path / "losses.txt", tmp_path / "run"
    named = {"trackers": [{"target": f"{TRACKER}:Table", "arguments": {"path": str(table)}}], "every": 1}
    lockstep.train(_config(run, steps=4, monitor=named))
    lockstep.train(_config(run, steps=6, monitor=named))
    head, *lines = table.read_text().splitlines()
    assert head.startswith("# ")
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4", "#", "5", "6"]
    assert lines[4].endswith("repeats what follows step 4")
    whole = tmp_path / "whole.txt"
    lockstep.train(
        _config(tmp_path / "whole", steps=6, monitor={"every": 1}), trackers=[_from(TRACKER, "Table")(str(whole))]
    )
    assert whole.read_text().splitlines()[1:] == [line for line in lines if line[0] != "#"]
    with pytest.raises(
        lockstep.ConfigError, match=r"monitor\.trackers\[0\]\.target: .*has no Tables; did you mean Table\?"
    ):
        lockstep.train(_config(tmp_path / "other", monitor={"trackers": [{"target": f"{TRACKER}:Tables"}]}))


def test_a_transform_changes_what_is_trained_and_is_part_of_the_run(tmp_path: Path) -> None:
    quantized = {"target": f"{TRANSFORM}:QuantizedInputs", "arguments": {"bits": 3}}

    def loss(run: Path, **objects: Any) -> float:
        sections = objects.pop("sections", {})
        return float(lockstep.train(_config(run, **sections), **objects).summary["loss"])

    plain = loss(tmp_path / "plain")
    by_name = loss(tmp_path / "named", sections={"transforms": [quantized]})
    by_object = loss(tmp_path / "object", transforms=[_from(TRANSFORM, "QuantizedInputs")(bits=3)])
    assert by_name == by_object != plain
    with pytest.raises(lockstep.ConfigError, match="transforms"):
        lockstep.train(_config(tmp_path / "named", steps=6))
    assert main(["train", str(tmp_path / "object"), "--run.steps=6"]) == 2


def _transformed() -> list[float]:
    with lockstep.session(small.config(), transforms=[_from(TRANSFORM, "QuantizedInputs")()]) as session:
        return [report.loss for report in session]


def test_a_transform_is_applied_on_every_rank() -> None:
    [alone] = in_world(1, _transformed)
    for losses in in_world(2, _transformed):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_a_run_trains_and_resumes_from_a_storage_in_memory(tmp_path: Path) -> None:
    memory = _from(STORAGE, "Memory")()
    whole = lockstep.train(_config(tmp_path / "whole", steps=6)).summary
    lockstep.train(_config(tmp_path / "run"), storage=memory)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert "step-00000004/manifest.json" in memory.objects
    resumed = lockstep.train(_config(tmp_path / "run", steps=6), storage=memory).summary
    assert resumed["loss"] == whole["loss"]
    with lockstep.session(small.config(run={"steps": 8}, schedule={"kind": "constant"})) as session:
        checkpoints = session.checkpoints(memory, accept_changes=True)
        assert checkpoints.resumed_from == 6


def test_verbs_find_checkpoints_in_a_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory, target = _from(STORAGE, "MEMORY"), {"target": f"{STORAGE}:MEMORY"}
    memory.objects.clear()
    checkpoint = {"storage": target, "every": "2 steps", "keep_last": 2}
    run = tmp_path / "run"
    lockstep.train(_config(run, steps=6, checkpoint=checkpoint))
    capsys.readouterr()
    assert main(["ckpt", "ls", str(run)]) == 0
    listed = capsys.readouterr().out
    assert listed.startswith("memory")
    assert "\n   6 " in listed
    assert main(["ckpt", "verify", str(run)]) == 0
    assert main(["export", str(run), "--to", str(tmp_path / "model.safetensors")]) == 0
    assert main(["ckpt", "show", str(run)]) == 0
    assert main(["ckpt", "prune", str(run), "--keep-last", "1"]) == 0
    assert {name.partition("/")[0] for name in memory.objects} == {"owner.json", "step-00000006"}
    file = "step-00000006/rank-00000.safetensors"
    memory.objects[file] = memory.objects[file][:-1] + bytes([memory.objects[file][-1] ^ 1])
    capsys.readouterr()
    assert main(["ckpt", "verify", str(run)]) == 3
    assert "memory/step-00000006 is damaged" in capsys.readouterr().err


def test_a_storage_and_a_folder_exclude_each_other(tmp_path: Path) -> None:
    both = {"folder": str(tmp_path), "storage": {"target": f"{STORAGE}:MEMORY"}}
    with pytest.raises(lockstep.ConfigError, match="exclude each other"):
        lockstep.train(_config(tmp_path / "run", checkpoint=both))


ENTRY_POINTS = """[lockstep.monitors]
messages = own_monitor:Messages
[lockstep.trackers]
table = own_tracker:Table
[lockstep.transforms]
quantized = own_transform:QuantizedInputs
[lockstep.storage]
memory = own_storage:MEMORY
"""


def test_an_installed_package_registers_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "own-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)
    for folder in (tmp_path, EXAMPLES):
        monkeypatch.syspath_prepend(str(folder))
    memory = import_target("own_storage:MEMORY")
    memory.objects.clear()
    tracker = {"target": "table", "arguments": {"path": str(tmp_path / "losses.txt")}}
    sections = {
        "monitors": [{"target": "messages"}],
        "monitor": {"trackers": [tracker]},
        "transforms": [{"target": "quantized"}],
    }
    lockstep.train(_config(tmp_path / "run", checkpoint={"storage": {"target": "memory"}}, **sections))
    assert "run: done" in capsys.readouterr().out
    assert (tmp_path / "losses.txt").exists()
    assert "step-00000004/manifest.json" in memory.objects
    with pytest.raises(lockstep.ConfigError, match=r"monitors\[0\]\.target: 'mesages' .* lockstep\.monitors"):
        lockstep.train(_config(tmp_path / "other", monitors=[{"target": "mesages"}]))


class Sees:
    def see(self, report: object) -> tuple[()]:
        return ()


class AddsScale(lockstep.extend.Transform):
    name = "scale"

    def apply(self, model: Any) -> Any:
        model.inner = nn.Sequential(model.inner)
        return model


class Forgets(lockstep.extend.Transform):
    name = "forgets"

    def apply(self, model: Any) -> Any:
        model.train()


class Nameless(lockstep.extend.Transform):
    def apply(self, model: Any) -> Any:
        return model


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"transforms": [Forgets()]}, r"forgets: apply returned None; return the module"),
        ({"transforms": [Nameless()]}, r"transforms: \[0\] is of type Nameless, which lacks name; subclass"),
        ({"schedule": lambda step: 1.0}, r"schedule: can't be called with \(step, steps\): too many"),
        ({"monitors": [Sees()]}, r"monitors: \[0\] is of type Sees, which lacks .*start; subclass lockstep\.Monitor"),
        ({"monitors": [Sees]}, r"monitors: \[0\] is the class Sees; pass an object of it: Sees\("),
        ({"monitors": Sees()}, r"monitors: is of type Sees; pass a list of lockstep\.Monitor objects"),
        ({"transforms": [str.upper]}, r"transforms: \[0\] is of type method_descriptor, which lacks after, apply"),
        ({"storage": {}}, r"storage: is of type dict, which lacks delete, .*; subclass lockstep\.ObjectStore"),
        ({"transforms": [AddsScale()]}, r"scale: .* must keep their names.*; added inner\.0\.bias, .*lost inner\.bias"),
    ],
)
def test_objects_that_do_not_implement_their_protocol_are_refused(
    tmp_path: Path, objects: dict[str, Any], message: str
) -> None:
    with pytest.raises(lockstep.ConfigError, match=message):
        lockstep.train(_config(tmp_path / "run"), **objects)
    named = {"monitors": [{"target": f"{__file__}:Sees"}]}
    with pytest.raises(lockstep.ConfigError, match=r"monitors\[0\]\.target: .*:Sees is of type Sees, which lacks"):
        lockstep.train(_config(tmp_path / "named", **named))


class Logs(lockstep.extend.Monitor):
    """A monitor that returns nothing from `see`."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def see(self, report: lockstep.extend.StepReport) -> None:  # type: ignore[override]
        self.steps.append(report.step)


class Misanswers(Logs):
    def see(self, report: lockstep.extend.StepReport) -> Any:
        super().see(report)
        return "save"


def test_a_monitor_may_return_none_and_one_that_returns_something_else_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs, misanswers = Logs(), Misanswers()
    assert lockstep.train(_config(tmp_path / "run"), monitors=[logs, misanswers]).summary["steps"] == 4
    assert logs.steps == [1, 2, 3, 4]
    assert misanswers.steps == [1]
    assert "Misanswers.see returned 'save'; return a list of lockstep.extend.Request, or None" in caplog.text


def test_a_store_without_all_methods_cannot_be_made(tmp_path: Path) -> None:
    class Half(lockstep.extend.ObjectStore):
        place = "half"

        def names(self, prefix: str) -> list[str]:
            return []

    with pytest.raises(TypeError, match=r"Half.*delete.*read.*size.*write"):
        Half()  # type: ignore[abstract]


def test_a_store_whose_client_raises_its_own_errors_costs_a_save_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = _from(STORAGE, "Memory")()
    write = memory.write

    def refuses_the_first(name: str, data: memoryview) -> None:
        if name.startswith("step-00000002"):
            raise RuntimeError("the bucket is closed")
        write(name, data)

    memory.write = refuses_the_first
    lockstep.train(_config(tmp_path / "run", checkpoint={"every": "2 steps"}), storage=memory)
    assert "step 2: NOT saved: OSError: RuntimeError: the bucket is closed" in capsys.readouterr().out
    assert "step-00000004/manifest.json" in memory.objects


def test_a_loss_that_is_not_summed_is_refused(tmp_path: Path) -> None:
    class Losses:
        def count(self, batch: lockstep.Batch) -> int:
            return len(batch.targets)

        def loss_sum(self, outputs: Any, batch: lockstep.Batch) -> Any:
            return outputs.float().square()

    with pytest.raises(lockstep.ConfigError, match=r"loss_sum returned a tensor of shape \[.*\]; return its sum"):
        lockstep.train(_config(tmp_path / "run"), objective=Losses())


def test_a_target_without_a_name_gets_a_hint(tmp_path: Path) -> None:
    for target in ("own.py", "torch.nn.Linear"):
        with pytest.raises(lockstep.ConfigError, match=r"write package\.module:Name"):
            lockstep.train(_config(tmp_path / "run", monitors=[{"target": target}]))

"""Another user's run: its code runs only with the user's permission, and its keys are named."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.commands import Done, run_lockstep
from kit.failures import fails, gives

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.cli.main import main
from lockstep.config import trust
from lockstep.config.loading import load, validate
from lockstep.config.schema import Config
from lockstep.config.shape import ValueShape, fields, root
from lockstep.config.trust import REACHES, approved, reaching
from lockstep.core.errors import ConfigError
from lockstep.training.exporting import ExportArguments

FOREIGN = """
from pathlib import Path
Path(__file__).with_name("executed").touch()

import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

class Loss:
    def count(self, batch):
        return batch.samples
    def loss_sum(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.float(), batch.targets, reduction="sum")

def points():
    return torch.utils.data.TensorDataset(torch.eye(4), torch.tensor([0, 1, 2, 0]))

def collate(items):
    return torch.utils.data.default_collate(items)
"""


RELATIVE = {
    "model": {"kind": "custom", "target": "foreign.py:Net"},
    "objective": {"kind": "custom", "target": "foreign.py:Loss"},
    "data": {"train": {"kind": "digits"}},
    "run": {"steps": 1},
}
_PLAIN = RELATIVE | {"objective": {}, "model": {"kind": "image-classifier"}}
CONFIG_OF_RELATIVE = validate(RELATIVE).config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a file's model, objective and data."""
    folder = tmp_path_factory.mktemp("foreign")
    file = folder / "foreign.py"
    file.write_text(FOREIGN)
    data = {"kind": "custom", "target": f"{file}:points", "collate": f"{file}:collate"}
    config = {
        "model": {"kind": "custom", "target": f"{file}:Net"},
        "objective": {"kind": "custom", "target": f"{file}:Loss"},
        "data": {"train": data, "evaluation": {"same": data}},
        "batch": {"global_size": 4},
        "launch": {"device": "cpu"},
        "monitor": {"tensorboard": False, "progress": "none"},
        "run": {"steps": 2, "folder": str(folder / "run")},
        "profile": {"steps": "2..2"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    done = run_lockstep("train", folder / "config.json")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(finished: Path) -> Path:
    """Remove the mark that the file's code leaves. The run belongs to this user."""
    (finished.parent / "executed").unlink(missing_ok=True)
    return finished


@pytest.fixture
def stranger(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same run for a user who didn't start it here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return run


# What each verb would do with a run; `*` is its folder.
VERBS: dict[str, tuple[str, ...]] = {
    "train": ("train", "*", "run.steps=3"),
    "train --fork": ("train", "*", "--fork", "fork", "run.steps=3"),
    "train, its config named": ("train", "*/config.yaml", "run.folder=elsewhere"),
    "train, its config merged over a recipe": ("train", "digits", "*/config.yaml", "run.folder=elsewhere"),
    "plan": ("plan", "*"),
    "plan, its config named": ("plan", "*/config.yaml", "--peak", "none"),
    "verify": ("verify", "*", "--ranks", "1"),
    "plan --measure": ("plan", "*", "--measure", "--peak", "none"),
    "profile data": ("profile", "data", "*", "--seconds", "1"),
    "profile memory": ("profile", "memory", "*"),
    "eval": ("eval", "*"),
    "generate": ("generate", "*", "def "),
    "export": ("export", "*", "--format", "hf"),
    "export, its checkpoints named": ("export", "*/checkpoints", "--format", "hf"),
}
LOOKS: dict[str, tuple[str, ...]] = {
    "config show": ("config", "show", "*"),
    "config check": ("config", "check", "*"),
    "report": ("report", "*"),
    "compare": ("compare", "*", "copy", "--output", "compare.html"),
    "explain": ("explain", "*"),
    "ls": ("ls", "*"),
    "top": ("top", "*", "--once"),
    "profile": ("profile", "*", "--show"),
    "ckpt ls": ("ckpt", "ls", "*"),
    "ckpt show": ("ckpt", "show", "*"),
    "ckpt verify": ("ckpt", "verify", "*"),
    "ckpt audit": ("ckpt", "audit", "*"),
    "ckpt prune": ("ckpt", "prune", "*", "--dry-run"),
    "export": ("export", "*", "--to", "weights.safetensors"),
}


def _run(words: tuple[str, ...], run: Path, cwd: Path, *more: str) -> Done:
    return run_lockstep(*(word.replace("*", str(run)) for word in words), *more, cwd=cwd)


@pytest.mark.parametrize("verb", VERBS)
def test_code_of_another_users_run_is_named_and_not_executed(stranger: Path, tmp_path: Path, verb: str) -> None:
    done = _run(VERBS[verb], stranger, tmp_path)
    file = stranger.parent / "foreign.py"
    assert done.returncode == 2
    first, *lines, last = [line for line in done.stderr.splitlines() if "kind is now" not in line]
    assert first.startswith(f"lockstep: {stranger}/")
    assert gives(first, "not started here")
    assert lines == [
        f"  model.target: {file}:Net",
        f"  objective.target: {file}:Loss",
        f"  data.train.target: {file}:points",
        f"  data.train.collate: {file}:collate",
        f"  data.evaluation.same.target: {file}:points",
        f"  data.evaluation.same.collate: {file}:collate",
    ]
    assert gives(last, "--trust-run", "trust_run=True")
    assert not (stranger.parent / "executed").exists()
    assert {entry.name for entry in tmp_path.iterdir()} <= {"state"}


def test_reading_commands_need_no_trust(stranger: Path, tmp_path: Path) -> None:
    shutil.copytree(stranger, tmp_path / "copy")
    for verb, words in LOOKS.items():
        done = _run(words, stranger, tmp_path)
        assert done.returncode == 0, (verb, done.stderr)
    assert not (stranger.parent / "executed").exists()


def test_the_python_api_needs_trust_too(stranger: Path, tmp_path: Path) -> None:
    def evaluated(config: str, *, trust_run: bool) -> None:
        with lockstep.session(config, trust_run=trust_run) as session:
            session.evaluate()

    for config in (str(stranger), str(stranger / "config.yaml")):
        for call in (lockstep.train, lockstep.verify, partial(evaluated, trust_run=False)):
            with fails(ConfigError, stranger / "config.yaml", "not started here", "trust_run=True"):
                call(config)
    with pytest.raises(ConfigError, match=r"objective\.target"):  # what isn't handed over
        lockstep.train(str(stranger), model=torch.nn.Linear(4, 3))
    assert not (stranger.parent / "executed").exists()
    evaluated(str(stranger), trust_run=True)
    assert (stranger.parent / "executed").exists()


def test_the_users_own_run_needs_no_trust(run: Path, tmp_path: Path) -> None:
    for verb in ("eval", "plan", "train --fork"):
        done = _run(VERBS[verb], run, tmp_path)
        assert done.returncode == 0, (verb, done.stderr)
    again = _run(("train", "fork", "run.steps=4"), run, tmp_path)  # the fork belongs to the user, too, in any folder
    (tmp_path / "fork").rename(tmp_path / "moved")
    moved = _run(("eval", "moved"), run, tmp_path)
    assert (again.returncode, moved.returncode) == (0, 0), again.stderr + moved.stderr


def test_a_trusted_run_is_executed(stranger: Path, tmp_path: Path) -> None:
    done = _run(VERBS["eval"], stranger, tmp_path, "--trust-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("same: loss ")
    assert (stranger.parent / "executed").exists()


def test_a_linked_copied_or_changed_run_is_not_trusted(run: Path, tmp_path: Path) -> None:
    """Only the run that was started is trusted, not one that looks like it."""
    (tmp_path / "link").symlink_to(run)
    assert _run(("plan", "link", "--peak", "none"), run, tmp_path).returncode == 0
    (tmp_path / "config.yaml").symlink_to(run / "config.yaml")
    assert _run(("plan", "config.yaml", "--peak", "none"), run, tmp_path).returncode == 0
    copy = shutil.copytree(run, tmp_path / "copy")
    assert _run(("plan", "copy", "--peak", "none"), run, tmp_path).returncode == 0, "the same id, config and code"
    (copy / "notes").mkdir()
    shutil.copy(copy / "config.yaml", copy / "notes" / "own.yaml")
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("foreign.py:Net", "foreign.py:Net2"))
    for words in (
        ("plan", "copy", "--peak", "none"),
        ("plan", "copy/config.yaml", "--peak", "none"),
        ("plan", "copy/notes/own.yaml", "--peak", "none"),
    ):
        done = _run(words, run, tmp_path)
        assert done.returncode == 2, words
        assert gives(done.stderr, "not started here")
    (copy / "config.yaml").write_text(text)
    environment = json.loads((copy / "environment.json").read_text())
    (copy / "environment.json").write_text(json.dumps(environment | {"run": "0" * 32}))
    assert gives(_run(("plan", "copy", "--peak", "none"), run, tmp_path).stderr, "not started here")


def test_code_at_another_path_is_not_trusted(tmp_path: Path) -> None:
    """A stranger may return the user's run with another file under the name in its config."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "foreign.py").write_text(FOREIGN)
    trust.recorded(CONFIG_OF_RELATIVE, "f" * 32)
    with chdir(mine):
        text = trust.recorded(CONFIG_OF_RELATIVE, "f" * 32)
    for folder in (mine, theirs):
        (folder / "config.yaml").write_text(text)
        (folder / "environment.json").write_text(json.dumps({"run": "f" * 32}))
    with chdir(mine):
        assert approved(load(["config.yaml"], of_runs=[Path("config.yaml")]), trusted=False) == CONFIG_OF_RELATIVE
    with chdir(theirs), pytest.raises(ConfigError) as caught:
        approved(load(["config.yaml"], of_runs=[Path("config.yaml")]), trusted=False)
    assert gives(str(caught.value), "foreign.py:Net", f"{mine}/foreign.py")


def test_the_users_own_config_is_trusted(tmp_path: Path) -> None:
    """The same holds under the name of a run's config, in a folder with checkpoints."""
    (tmp_path / "foreign.py").write_text(FOREIGN)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(json.dumps(RELATIVE))
    with chdir(tmp_path):
        assert approved(load(["config.yaml"]), trusted=False) == CONFIG_OF_RELATIVE
        with fails(ConfigError, "not started here"):
            approved(load(["config.yaml"], of_runs=[Path("config.yaml")]), trusted=False)


def test_code_named_on_the_command_line_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    (tmp_path / "config.yaml").write_text(json.dumps(_PLAIN))
    loaded = load([tmp_path / "config.yaml"], ["model.kind=custom", "model.target=mine:Net"])
    assert approved(loaded, trusted=False).model.target == "mine:Net"


def test_tensors_are_exported_without_trust(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--to", str(tmp_path / "model.pt")]) == 0
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == {"weight", "bias"}
    assert not (run.parent / "executed").exists()
    assert len(LocalStorage(run / "checkpoints").names()) == 1


def test_a_custom_model_is_not_loaded_by_transformers(run: Path) -> None:
    done = run_lockstep("export", run, "--format", "hf", "--trust-run")
    assert done.returncode == 2
    assert gives(done.stderr, "--format hf", "Net")
    assert not (run / "export").exists()


# --- what reaches out of a run's folder ---------------------------------------------------------------------------


def _config(**sections: Any) -> Config:
    config = {
        "model": {"kind": "image-classifier"},
        "data": {"train": {"kind": "digits"}},
        "run": {"steps": 1},
    }
    return validate({**config, **sections}).config


def _named(**sections: Any) -> tuple[str, ...]:
    return tuple(one.place for one in reaching(_config(**sections), Path("run")))


def _takes_text(shape: ValueShape, key: str) -> Iterator[str]:
    """Yield the keys below this one that take a text."""
    for section in shape.sections():
        for name, inner in fields(section).items():
            yield from _takes_text(inner, f"{key}.{name}".removeprefix("."))
    for free in filter(None, (shape.values, shape.items)):
        below = {"data.evaluation": "data.train"}.get(key, f"{key}.*" if free is shape.values else key)
        yield from _takes_text(free, below)
    if shape.text or shape.anything:
        yield key


def test_each_key_of_the_schema_that_takes_a_text_is_classified() -> None:
    """A new key asks until somebody has decided what it reaches, and fails here."""
    assert set(_takes_text(root(), "")) | {"parallel.strategy"} == REACHES.keys()


def test_a_key_that_is_not_classified_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"description": "x", "data": {"train": {"kind": "digits"}, "evaluation": {"v1.5": DATASET}}}
    keys = ("description", "data.evaluation.v1.5.label", "data.evaluation.v1.5.name", "data.evaluation.v1.5.text")
    for key in ("description", "data.train.label", "data.train.text"):
        monkeypatch.delitem(REACHES, key)
    assert sorted(_named(**config)) == sorted(keys)


CUSTOM = {"kind": "custom", "target": "a:B"}
DATASET = {"kind": "huggingface", "name": "imdb", "label": "label"}
REACHING: dict[str, dict[str, Any]] = {  # key -> sections in which it alone reaches out
    "model.target": {"model": CUSTOM},
    "objective.target": {"objective": CUSTOM},
    "data.train.target": {"data": {"train": CUSTOM}},
    "data.evaluation.x.target": {"data": {"train": {"kind": "digits"}, "evaluation": {"x": CUSTOM}}},
    "data.train.name": {"data": {"train": DATASET}},
    "data.train.folder": {"data": {"train": {"kind": "tokens", "folder": "s3://attacker/books"}}},
    "model.init_from": {"model": {"kind": "image-classifier", "init_from": "/home/me/private.pt"}},
    "monitor.trackers[0].target": {"monitor": {"trackers": [{"target": "mlflow"}]}},
    "monitor.prometheus.address": {"monitor": {"prometheus": {"address": "0.0.0.0"}}},
    "recovery.notice": {"recovery": {"notice": "http://attacker/ask"}},
    "parallel.deepspeed.config": {"parallel": {"deepspeed": {"config": "../ds.json"}}},
    "parallel.deepspeed.config.aio.path": {"parallel": {"deepspeed": {"config": {"aio": {"path": "/home/me"}}}}},
    "parallel.strategy": {"parallel": {"strategy": "evil.py:STRATEGY"}},
    "launch.environment.LD_PRELOAD": {"launch": {"environment": {"OMP_NUM_THREADS": "2", "LD_PRELOAD": "evil.so"}}},
    "launch.rendezvous": {"launch": {"nodes": 2, "rendezvous": "attacker:1"}},
    "launch.job_id": {"launch": {"job_id": "x/../../home"}},
    "checkpoint.folder": {"checkpoint": {"folder": "~/.ssh"}},
    "checkpoint.storage.target": {"checkpoint": {"storage": {"target": "evil:Store"}}},
}


@pytest.mark.parametrize("key", REACHING)
def test_what_reaches_out_is_named(key: str) -> None:
    assert _named(**REACHING[key]) == (key,)


def test_what_stays_in_the_folder_is_not_named() -> None:
    inside = {"kind": "tokens", "folder": "run/books", "split": "train"}
    assert _named(
        data={"train": inside},
        launch={"environment": {"OMP_NUM_THREADS": "2"}, "nodes": "2:4", "job_id": "7"},
        monitor={"prometheus": {"port": 0}},
        checkpoint={"folder": "run/saved"},
        evaluation={"prompt": "/etc/passwd"},
    ) == ()  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "named"),
    [
        ({"auto_map": {"AutoModel": "evil.py--Net"}}, "model.architecture.auto_map.AutoModel"),
        ({"attn_implementation": "evil/kernels"}, "model.architecture.attn_implementation"),
        (
            {"text_config": {"_attn_implementation": "evil/kernels"}},
            "model.architecture.text_config._attn_implementation",
        ),
        ({"use_kernels": True}, "model.architecture.use_kernels"),
        ({"backbone": "resnet50"}, "model.architecture.backbone"),
        ({"attn_implementation": "sdpa", "transformers_version": "5.0.0", "use_cache": True}, None),
    ],
)
def test_keys_by_which_transformers_loads(architecture: dict[str, Any], named: str | None) -> None:
    model = {"kind": "huggingface", "task": "causal-lm", "architecture": {"model_type": "llama", **architecture}}
    assert _named(model=model) == ((named,) if named else ())


def test_names_with_control_characters_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(RELATIVE | {"model": {"kind": "custom", "target": "a:B\x1b[2J"}}))
    loaded = load([tmp_path / "config.yaml"], of_runs=[tmp_path / "config.yaml"])
    with pytest.raises(ConfigError, match=r"model\.target: a:B\\x1b\[2J\n"):
        approved(loaded, trusted=False)


def test_an_override_of_a_list_is_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    (tmp_path / "config.yaml").write_text(json.dumps(_PLAIN))
    override = 'monitor.trackers=[{"target": "mlflow"}]'
    loaded = load([tmp_path / "config.yaml"], [override])
    assert approved(loaded, trusted=False).monitor.trackers[0].target == "mlflow"


def test_a_home_that_cannot_be_written_is_said_at_the_start_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    config = validate(RELATIVE).config
    [note] = trust.unremembered(config, tmp_path)
    assert note.startswith("/dev/null/lockstep can't be written: ")
    assert trust.unremembered(validate(_PLAIN).config, tmp_path) == [], "nothing will be asked"


def test_the_flag_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r").mkdir()
    calls: list[Any] = []
    stand_in = SimpleNamespace(
        evaluate_run=lambda *args, **options: (calls.append(options["trust_run"]), (0, None))[1],
        generate_text=lambda *args, **options: (calls.append(options["trust_run"]), [""])[1],
    )
    monkeypatch.setitem(sys.modules, "lockstep.training.finished_run", stand_in)
    for words in (["eval", "r"], ["generate", "r", "p"]):
        assert main(words) == 0
        assert main([*words, "--trust-run"]) == 0
    assert calls == [False, True, False, True]
    assert ExportArguments().trust_run is False

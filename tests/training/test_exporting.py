"""Published and exported weights are bitwise identical, in formats that other tools read; whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit import small, storing
from kit.failures import fails, gives
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lockstep
from lockstep.assembly.sources import make_model, open_sources
from lockstep.assembly.user_objects import UserObjects
from lockstep.assembly.weights import (
    load_weights,
    save_for_transformers,
    save_tensors,
    tensors_of,
    to_rebuild,
)
from lockstep.cli.main import main
from lockstep.config.loading import validate
from lockstep.config.writing import plain_yaml, to_plain
from lockstep.core import files
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.files import replacing_file, replacing_folder
from lockstep.data.hub import Processor
from lockstep.interop.peers import import_weights
from lockstep.loop.session import components_of
from lockstep.models.model_tensors import model_tensors
from lockstep.models.transformers_models import is_transformers_model
from lockstep.resuming.locations import loaded_config, run_config
from lockstep.training.exporting import ExportArguments, export
from lockstep.training.publishing import publish

LINES = {"kind": "stdlib-text", "length": 16, "samples": 40}


def _save(model: Any, folder: Path, tokenizer: str | None = None) -> None:
    if is_transformers_model(model):
        save_for_transformers(
            model, model_tensors(model), tensors_of(model), folder / "model", tokenizer and Processor(tokenizer)
        )
    else:
        save_tensors(tensors_of(model), folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with tied weights, saved at steps 2, 4 and 5; the best is that of step 2."""
    folder = tmp_path_factory.mktemp("own") / "run"
    lockstep.train(
        {
            "model": {"kind": "transformer", "layers": 1, "width": 16, "heads": 2},
            "data": {"train": LINES, "evaluation": {"same": LINES}},
            "batch": {"global_size": 8},
            "launch": {"device": "cpu"},
            "evaluation": {"every": "2 steps"},
            "checkpoint": {"every": "2 steps", "best": "same.loss", "best_is": "highest"},
            "monitor": {"tensorboard": False, "progress": "none"},
            "run": {"steps": 5, "folder": str(folder)},
        }
    )
    return folder


def built(run: Path) -> nn.Module:
    """The run's model, without its weights."""
    config = to_rebuild(loaded_config(run), trusted=True)
    return make_model(config, open_sources(config, UserObjects())[0].facts, UserObjects())


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what a run leaves ------------------------------------------------------------------------------------------------


def _usual_mode(folder: Path) -> int:
    (folder / "probe").touch()
    return (folder / "probe").stat().st_mode & 0o777


def test_a_run_leaves_its_own_names(run: Path) -> None:
    assert contents(run / "model").keys() == {"model.safetensors", "XXH128SUMS"}
    assert {path.stat().st_mode & 0o777 for path in (run / "model").iterdir()} == {_usual_mode(run)}
    model = built(run)
    load_weights(model, run)
    left = load_file(run / "model" / "model.safetensors")
    assert left.keys() == {name for name, _ in model.named_parameters()}
    assert_same(left, dict(model.named_parameters()))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _save(small.Net(), tmp_path)
    with fails(RunFailed, "missing: spare.weight [4, 4]"):
        load_weights(small.WithSpare(), tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"torn")
    (tmp_path / "model" / "XXH128SUMS").unlink()
    with pytest.raises(RunFailed, match="isn't a safetensors file, or is damaged"):
        load_weights(small.Net(), tmp_path)
    with fails(ConfigError, tmp_path / "none", "lockstep export", "--to"):
        load_weights(small.Net(), tmp_path / "none")


def test_weights_that_have_changed_since_are_refused(tmp_path: Path) -> None:
    """Until others are written in their place."""
    _save(small.Net(), tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    _flip(file, "weight")
    with fails(RunFailed, "model.safetensors", "damaged", "lockstep export RUN --to"):
        load_weights(small.Net(), tmp_path)
    file.unlink()
    (tmp_path / "summary.json").write_text("{}")
    with fails(ConfigError, tmp_path, "gone", "--to"):
        load_weights(small.Net(), tmp_path)
    _save(small.Net(), tmp_path)
    load_weights(small.Net(), tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with (
        lockstep.session(small.config()) as session,
        pytest.raises(RunFailed, match=r"trained weights .*Not a directory"),
    ):
        publish(session, lambda: tmp_path)
    assert contents(tmp_path) == {"model": b"mine"}


# --- which checkpoint, to where ---------------------------------------------------------------------------------------


def test_the_newest_is_what_the_run_has_left(run: Path, tmp_path: Path) -> None:
    made = export(run, ExportArguments(to=tmp_path / "out"))
    assert (made.step, made.form, made.target) == (5, "safetensors", tmp_path / "out" / "model.safetensors")
    assert contents(tmp_path / "out") == contents(run / "model")
    assert (made.tensors, made.broken) == (len(load_file(made.target)), {})
    assert made.elements == sum(parameter.numel() for parameter in built(run).parameters())


@pytest.mark.parametrize(("asked", "step"), [({"step": 4}, 4), ({"best": True}, 2), ({}, 5)])
def test_a_state_dict_for_torch(run: Path, tmp_path: Path, asked: dict[str, Any], step: int) -> None:
    """Loads into the model as it stands, tied names too."""
    made = export(run, ExportArguments(**asked, to=tmp_path / "weights.pt"))
    assert (made.step, made.form, Path(made.checkpoint).name) == (step, "torch", f"step-{step:08d}")
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    built(run).load_state_dict(state, strict=True)
    left = load_file(run / "model" / "model.safetensors")
    assert torch.equal(left["norm.weight"], state["norm.weight"]) == (step == 5)


def test_one_checkpoint_without_its_run(run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "elsewhere" / "step-00000004"
    alone.parent.mkdir()
    alone.symlink_to(run / "checkpoints" / "step-00000004")
    with fails(ConfigError, "step-00000004", "--to"):
        export(alone, ExportArguments())
    made = export(alone, ExportArguments(to=tmp_path / "four.safetensors"))
    assert made.step == 4
    with fails(ConfigError, "step-00000004", "--step", "--best"):
        export(alone, ExportArguments(step=4, to=tmp_path / "four.pt"))


def test_what_a_run_is_to_end_with(run: Path, tmp_path: Path) -> None:
    folder = _copied(run, tmp_path / "run")
    text = (folder / "config.yaml").read_text()
    assert "end_with: last" in text
    (folder / "config.yaml").write_text(text.replace("end_with: last", "end_with: best"))
    assert export(folder, ExportArguments()).step == 2
    assert (folder / "export" / "step-00000002" / "model.safetensors").is_file()


def _copied(run: Path, folder: Path) -> Path:
    for name, data in contents(run).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_damaged_checkpoint_is_never_exported(run: Path, tmp_path: Path) -> None:
    folder = _copied(run, tmp_path / "run")
    _flip(folder / "checkpoints" / "step-00000005" / "rank-00000.safetensors")
    with fails(RunFailed, "step-00000005", "rank-00000.safetensors"):
        export(folder, ExportArguments(step=5))
    made = export(folder, ExportArguments())
    assert made.step == 4
    assert list(made.broken) == ["step-00000005"]
    for step in (2, 4):
        _flip(folder / "checkpoints" / f"step-0000000{step}" / "rank-00000.safetensors")
    with fails(RunFailed, *(f"step-0000000{step}: rank-00000.safetensors" for step in (5, 4, 2))):
        export(folder, ExportArguments(to=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_damage_to_optimizer_state_is_not_looked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _copied(run, tmp_path / "run")
    _flip(folder / "checkpoints" / "step-00000005" / "rank-00000.safetensors", of="optimizer.")
    assert export(folder, ExportArguments()).step == 5
    assert main(["ckpt", "verify", str(folder), "--step", "5"]) == 3
    assert main(["export", "--help"]) == 0
    said = capsys.readouterr().out
    assert "verifying every byte of the model" in " ".join(said.split())
    assert gives(" ".join(said.split()), "Optimizer state", "lockstep ckpt verify RUN")


def _flip(file: Path, of: str = "model.") -> None:
    """A bit in the first tensor whose name begins so."""
    data = bytearray(file.read_bytes())
    begins = 8 + int.from_bytes(data[:8], "little")
    places = {name: entry["data_offsets"][0] for name, entry in json.loads(data[8:begins]).items() if of in name}
    data[begins + min(places.values()) + 1] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, name: str) -> None:
    """Files may have 4 KB at most here, as if the disk ended there."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        "import sys; from lockstep.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "export", str(run), "--to", str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert gives(done.stderr, name)
    assert "File too large" in done.stderr
    assert contents(tmp_path) == {}


def test_a_full_disk_leaves_what_was_there_with_its_hash(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(run, ExportArguments(step=2, to=tmp_path))
    before = contents(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with fails(RunFailed, os.strerror(errno.ENOSPC)):
        export(run, ExportArguments(to=tmp_path, force=True))
    assert contents(tmp_path) == before
    assert before.keys() == {"model.safetensors", "XXH128SUMS"}


def test_what_is_there_stays(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.safetensors").write_text("precious")
    with fails(ConfigError, "mine.safetensors", "--force"):
        export(run, ExportArguments(to=tmp_path / "mine.safetensors"))
    assert (tmp_path / "mine.safetensors").read_text() == "precious"
    export(run, ExportArguments(to=tmp_path / "mine.safetensors", force=True))
    assert contents(tmp_path) == {"mine.safetensors": (run / "model" / "model.safetensors").read_bytes()}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"step": 3}, "no checkpoint of step 3; the nearest is of step 2"),
        (
            {"format": "torch", "to": Path("x.safetensors")},
            "--format torch contradicts the file name x.safetensors",
        ),
        ({"format": "hf"}, "--format hf is for models of the transformers library, and this is a model of kind"),
    ],
)
def test_what_cannot_be_exported(run: Path, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        export(run, ExportArguments(**asked))


def test_a_model_that_was_handed_over_lies_in_the_run(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config | {"model": {"kind": "given"}}))
    with fails(ConfigError, "Python", "model/"):
        export(tmp_path / "run", ExportArguments(format="hf"))


def test_places_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="doesn't exist"):
        export(tmp_path / "nowhere", ExportArguments())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(plain_yaml(to_plain(validate(small.config()).config)))
    with pytest.raises(ConfigError, match="has no checkpoint"):
        export(tmp_path / "run", ExportArguments())


def test_best_without_a_metric(tmp_path: Path) -> None:
    folder = _with_checkpoint(tmp_path, {"model.inner.bias": torch.ones(2)}, ranks=1)
    with fails(ConfigError, "--best", "checkpoint.best"):
        export(folder, ExportArguments(best=True))


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_model_is_built_and_parts_are_put_together(tmp_path: Path, ranks: int) -> None:
    """The config's code can't even be imported; the checkpoint is of several ranks' shards."""
    tensors = {
        "model.weight": torch.randn(7, 3),
        "model.count": torch.tensor(5),
        "optimizer.exp_avg.weight": torch.ones(7, 3),
    }
    folder = _with_checkpoint(tmp_path, tensors, ranks)
    export(folder, ExportArguments(to=tmp_path / "out.safetensors"))
    found = load_file(tmp_path / "out.safetensors")
    assert_same(found, {"weight": tensors["model.weight"], "count": tensors["model.count"]})


def _with_checkpoint(tmp_path: Path, tensors: dict[str, Tensor], ranks: int) -> Path:
    folder = tmp_path / "run"
    whole = {name: tensor for name, tensor in tensors.items() if not tensor.dim()}
    states = storing.rank_states({name: tensor for name, tensor in tensors.items() if tensor.dim()}, ranks, dim=0)
    storing.saved(folder / "checkpoints", [storing.state_of({**state.tensors, **whole}) for state in states])
    config = small.config()
    config["model"]["target"] = "no.such.module:Net"
    (folder / "config.yaml").write_text(plain_yaml(to_plain(validate(config).config)))
    return folder


def test_the_verb(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "a.pt"
    assert main(["export", str(run), "--best", "--to", str(target), "--json"]) == 0
    found = capsys.readouterr()
    assert f"{target}: step 2, " in found.err
    assert json.loads(found.out)["step"] == 2
    assert json.loads(found.out)["to"] == str(target)
    assert main(["export", str(run), "--best", "--step", "2"]) == 2
    assert "not allowed with" in capsys.readouterr().err


# --- transformers -----------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
KINDS = {
    "gpt2": ("causal-lm", {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2}),
    "bert": ("sequence-classification", {"model_type": "bert", **SMALL}),
    "bert-mlm": ("masked-lm", {"model_type": "bert", **SMALL}),
    "mixtral": ("causal-lm", {"model_type": "mixtral", **SMALL, "num_key_value_heads": 1, "num_local_experts": 2}),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of text with classes, and a tokenizer of ten words."""
    pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("texts")
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat"]
    numbers = {word: number for number, word in enumerate(["<eos>", "<unk>", "<mask>", *words])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"eos_token": "<eos>", "unk_token": "<unk>", "mask_token": "<mask>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder / "tokenizer")
    rows = [{"text": " ".join(words[n % 3 : 3 + n % 6]), "label": n % 2} for n in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def trained(texts: Path, request: pytest.FixtureRequest) -> Path:
    """A finished run of a Hugging Face model."""
    task, architecture = KINDS[request.param]
    source = {"kind": "huggingface", "name": str(texts / "rows.jsonl"), "tokenizer": str(texts / "tokenizer")}
    if task == "sequence-classification":
        source["label"] = "label"
    config = {
        "model": {"kind": "huggingface", "task": task, "architecture": architecture},
        "data": {"train": source},
        "batch": {"global_size": 8},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "checkpoint": {"every": "1 steps"},
        "monitor": {"tensorboard": False, "progress": "none"},
        "run": {"steps": 2, "folder": str(texts / request.param)},
    }
    return lockstep.train(config).folder


def logits(model: nn.Module) -> Tensor:
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    return found


def loaded(folder: Path, run: Path) -> nn.Module:
    """Load it without Lockstep."""
    import transformers

    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, kind).from_pretrained(folder)


def test_what_a_run_leaves_loads_and_answers_alike(trained: Path) -> None:
    ours = built(trained)
    usual = logits(ours)
    load_weights(ours, trained)
    assert not torch.equal(logits(ours), usual)
    assert torch.equal(logits(loaded(trained / "model", trained)), logits(ours))


def test_an_export_is_what_the_run_leaves(trained: Path, tmp_path: Path, texts: Path) -> None:
    made = export(trained, ExportArguments(to=tmp_path / "out"))
    assert (made.form, made.step) == ("hf", 2)
    exported, left = contents(tmp_path / "out"), contents(trained / "model")
    assert {name: exported[name] for name in left} == left
    ours = built(trained)
    load_weights(ours, trained)
    assert torch.equal(logits(loaded(tmp_path / "out", trained)), logits(ours))
    earlier = export(trained, ExportArguments(step=1, to=tmp_path / "earlier"))
    assert not torch.equal(logits(loaded(earlier.target, trained)), logits(ours))


def test_who_reads_the_run_reads_its_weights(trained: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in (trained / "model").iterdir()} == {_usual_mode(trained)}


def test_the_tokenizer_comes_along(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    export(trained, ExportArguments(to=tmp_path / "out"))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("the cat") == [3, 5]
    _save(built(trained), tmp_path / "run", str(tmp_path / "no tokenizer"))
    assert "model.safetensors" in contents(tmp_path / "run" / "model")


def test_nothing_of_training_stays_in_the_configs(trained: Path) -> None:
    for file in (trained / "model").glob("*config.json"):
        assert "use_cache" not in json.loads(file.read_text())
        assert str(trained.parent) not in file.read_text()


def test_a_run_starts_from_another(trained: Path, tmp_path: Path) -> None:
    config = run_config(trained)
    section = config.model.model_copy(update={"init_from": str(trained)})
    with lockstep.session(config.model_copy(update={"model": section})) as session:
        ours = built(trained)
        load_weights(ours, trained)
        assert_same(components_of(session).sharding.state.model.state_dict(), ours.state_dict())


@pytest.mark.parametrize("key", ["init_from", "pretrained"])
def test_no_run_starts_from_what_has_changed(trained: Path, tmp_path: Path, key: str) -> None:
    shutil.copytree(trained / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    _flip(file, "weight")
    config = run_config(trained).model_dump(mode="json")
    config["model"] |= {"architecture": None, "pretrained": str(trained / "model"), key: str(tmp_path / "model")}
    with fails(ConfigError, "model.safetensors", "damaged", key=f"model.{key}"), lockstep.session(config):
        pass


def test_own_names_of_a_model_of_transformers(trained: Path, tmp_path: Path) -> None:
    """Without building it; then they start a run all the same."""
    export(trained, ExportArguments(to=tmp_path / "own.safetensors"))
    found = load_file(tmp_path / "own.safetensors")
    ours = built(trained)
    load_weights(ours, trained)
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in found.items())


def test_a_folder_that_holds_more_stays(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with fails(ConfigError, tmp_path / "mine", "--format hf"):
        export(trained, ExportArguments(to=tmp_path / "mine", force=True))
    for force, said in ((False, "--force replaces it"), (True, "holds more than a model: --force doesn't delete it")):
        with pytest.raises(ConfigError, match=said):
            export(trained, ExportArguments(to=tmp_path, force=force))
    assert contents(tmp_path) == {"mine": b"precious"}
    export(trained, ExportArguments(step=1, to=tmp_path / "out"))
    before = contents(tmp_path / "out")
    export(trained, ExportArguments(to=tmp_path / "out", force=True))
    assert contents(tmp_path / "out").keys() == before.keys()
    assert contents(tmp_path / "out") != before


# --- whole or not at all ----------------------------------------------------------------------------------------------


def test_a_file_that_is_not_finished_never_was(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "file"
    with pytest.raises(OSError, match="full"), replacing_file(target) as partial:
        _begin_and_fail(partial)
    assert contents(tmp_path) == {}
    with replacing_file(target) as partial:
        partial.write_text("whole")
        assert not target.exists()
    assert contents(tmp_path) == {"folder/file": b"whole"}


def _begin_and_fail(file: Path) -> None:
    file.write_text("ha")
    raise OSError("full")


def test_a_folder_that_is_not_finished_never_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "folder"
    for text in ("old", "new"):
        with replacing_folder(target) as partial:
            (partial / text).write_text(text)
    assert contents(tmp_path) == {"folder/new": b"new"}
    with pytest.raises(OSError, match="full"), replacing_folder(target) as partial:
        _begin_and_fail(partial / "more")
    assert contents(tmp_path) == {"folder/new": b"new"}
    real = Path.rename

    def refuse(path: Path, to: Path) -> Path:
        if to == target and path.name.endswith(".new"):
            raise OSError("no")
        return real(path, to)

    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr(files, "exchanged", lambda *paths: False)  # as on NFS
    with pytest.raises(OSError, match="no"), replacing_folder(target) as partial:
        (partial / "more").write_text("ha")
    assert contents(tmp_path) == {"folder/new": b"new"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


# --- weights from elsewhere -------------------------------------------------------------------------------------------


def _state(seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return dict(small.Net().state_dict())


def test_a_lightning_file_is_imported(tmp_path: Path) -> None:
    state = _state()
    kept = {"state_dict": {f"net.{name}": tensor for name, tensor in state.items()}}
    others = {
        "epoch": 3,
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}],
        "hyper_parameters": {"a": 1},
    }
    torch.save({**others, **kept, "loops": {}}, tmp_path / "last.ckpt")
    made = import_weights(tmp_path / "last.ckpt", tmp_path / "imported")
    assert (made.file, made.tensors) == (tmp_path / "imported" / "model.safetensors", 4)
    assert made.skipped == ("epoch", "optimizer_states", "hyper_parameters", "loops")
    assert "4 tensors; skipped: epoch, optimizer_states" in str(made)
    config = small.config()
    config["model"]["init_from"] = str(tmp_path / "imported")
    with lockstep.session(config) as session:
        assert_same(components_of(session).sharding.state.model.state_dict(), state)


def test_a_sharded_folder_is_imported(tmp_path: Path) -> None:
    state = _state()
    names = list(state)
    files = {"pytorch_model-1.bin": names[:2], "pytorch_model-2.bin": names[2:]}
    for file, held in files.items():
        torch.save({f"module.{name}": state[name] for name in held}, tmp_path / file)
    places = {f"module.{name}": file for file, held in files.items() for name in held}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    assert import_weights(tmp_path, tmp_path / "out").skipped == ()
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), state)


def test_tied_views_and_strides_are_imported(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    state = {"a": flat[:6].view(2, 3), "b": flat[6:], "c": flat[:6].view(2, 3), "turned": torch.randn(3, 2).t()}
    torch.save(state, tmp_path / "weights.pt")
    import_weights(tmp_path / "weights.pt", tmp_path)
    assert_same(load_file(tmp_path / "model.safetensors"), state)


class Hostile:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def test_a_hostile_file_is_not_imported(tmp_path: Path) -> None:
    torch.save({"state_dict": _state(), "callbacks": Hostile(tmp_path / "executed")}, tmp_path / "last.ckpt")
    with fails(ConfigError, "posix.system"):
        import_weights(tmp_path / "last.ckpt", tmp_path / "out")
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["__metadata__", "a\x1b[2J"])
def test_names_that_a_file_cannot_have(tmp_path: Path, name: str) -> None:
    torch.save({**_state(), name: torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="can't be the name of a tensor"):
        import_weights(tmp_path / "weights.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_import_overwrites_nothing(tmp_path: Path) -> None:
    save_file(_state(1), tmp_path / "one.safetensors")
    torch.save(_state(2), tmp_path / "two.pt")
    import_weights(tmp_path / "one.safetensors", tmp_path / "out")
    with fails(ConfigError, "model.safetensors", "--force"):
        import_weights(tmp_path / "two.pt", tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), _state(1))
    import_weights(tmp_path / "two.pt", tmp_path / "out", force=True)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), _state(2))


# --- transforms ---------------------------------------------------------------------------------------------------


class Sharper(lockstep.extend.Transform):
    name = "sharper"

    def apply(self, model: nn.Module) -> nn.Module:
        model.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
        return model


class Softer(Sharper):
    name = "softer"


def test_transforms_are_named_at_the_start_and_at_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = {"target": f"{__file__}:Softer"}
    config = small.config(run={"steps": 2, "folder": str(tmp_path / "run")}, transforms=[named])
    lockstep.train(config, transforms=[Sharper()])
    assert f"transforms of the model: {named['target']}, sharper" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["transforms"] == [named["target"], "sharper"]
    assert f"({named['target']}, sharper)" in printed.err
    with lockstep.session(small.config(transforms=[named]), transforms=[Sharper()]) as session:
        checkpoints = session.checkpoints(tmp_path / "saves")
        checkpoints.save()
        checkpoints.finish()
    made = export(tmp_path / "saves", ExportArguments(to=tmp_path / "model.pt"))
    assert made.transforms == [named["target"], "one that was passed in Python"]

"""Weights of all kinds of files and names are loaded; mismatches are reported; no code is executed."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import fails, gives
from safetensors.torch import save_file
from torch import nn

import lockstep
from lockstep.config.schema import CustomModel
from lockstep.core.adapters import adapter_of
from lockstep.core.errors import ConfigError
from lockstep.core.failure_kinds import FailureKind
from lockstep.interop.peers import read_peer
from lockstep.loop.attempt import run_info
from lockstep.loop.session import components_of
from lockstep.models.adapters import with_adapter
from lockstep.models.weight_files import read_weights
from lockstep.models.weight_matching import match_initial_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight


class Pair(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))


def made(seed: int, kind: type[nn.Module] = small.WithBatchNorm) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def started(model: nn.Module, place: Path | str, partial: bool = False) -> tuple[str, ...]:
    fit = match_initial_weights(
        model, CustomModel(kind="custom", target="a:b", init_from=str(place), init_partial=partial)
    )
    assert fit is not None
    fit.put(model)
    return fit.notes()


def refusal(model: nn.Module, place: Path | str, partial: bool = False, kind: FailureKind | None = None) -> str:
    """Return the message, after a check that the model hasn't changed."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError) as refused:
        started(model, place, partial)
    assert_same(model, before)
    assert kind in (None, refused.value.kind)
    message = str(refused.value)
    assert message.startswith("model.init_from: ")
    return message


def assert_same(model: nn.Module, tensors: Any) -> None:
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    different = [name for name in state if not torch.equal(state[name], tensors[name])]
    assert different == []


# --- adapters ---------------------------------------------------------------------------------------------------------


def adapted(seed: int, of: type[nn.Module], **keys: Any) -> nn.Module:
    adapter = {"kind": "lora", "targets": ("0", "1"), **keys}
    section = CustomModel.model_validate({"kind": "custom", "target": "a:b", "adapter": adapter})
    return with_adapter(made(seed, of), section, seed)


@pytest.mark.parametrize("names", [["embedding.weight"], ["embedding.weight", "head.weight"]])
@pytest.mark.parametrize("keys", [{"targets": ("embedding",), "modules_to_save": ("head",)}, {"targets": ("head",)}])
def test_a_tied_base_of_an_adapter_is_read(names: list[str], keys: dict[str, Any], tmp_path: Path) -> None:
    model, saved = adapted(0, Tied, **keys), made(1, Tied).state_dict()
    save_file({name: saved[name].clone() for name in (*names, "head.bias")}, tmp_path / "base.safetensors")
    started(model, tmp_path / "base.safetensors")
    read = [value for name, value in model.state_dict().items() if name.endswith("weight") and "lora" not in name]
    assert len(read) >= 2
    assert all(torch.equal(value, saved["embedding.weight"]) for value in read)


def test_weights_are_not_replaced_where_dora_has_begun(tmp_path: Path) -> None:
    save_file(made(1, Pair).state_dict(), tmp_path / "base.safetensors")
    assert "DoRA" in refusal(adapted(0, Pair, use_dora=True), tmp_path / "base.safetensors")


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("lora_alpha", 8),
        ("use_rslora", True),
        ("use_dora", True),
        ("alpha_pattern", {"0": 3}),
        ("fan_in_fan_out", True),
        ("feedforward_modules", ["0"]),
    ],
)
def test_an_adapter_that_would_compute_something_else_is_refused(key: str, other: object, tmp_path: Path) -> None:
    keys = {"kind": "ia3", "feedforward_modules": ("0", "1")} if key == "feedforward_modules" else {}
    model = adapted(0, Pair, **keys)
    saved, config = adapter_of(model), tmp_path / "adapter_config.json"
    assert saved is not None
    tensors = {name: model.state_dict()[own] for own, name in saved.files.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    section = CustomModel.model_validate(
        {"kind": "custom", "target": "a:b", "adapter": {"kind": "lora"}, "init_from": str(tmp_path)}
    )
    with fails(ConfigError, config.name, key="model.init_from"):
        match_initial_weights(model, section)
    config.write_text(json.dumps(saved.config))
    assert match_initial_weights(model, section) is not None
    config.write_text(json.dumps({**saved.config, key: other}))
    with fails(ConfigError, key, other, saved.config[key], key="model.init_from"):
        match_initial_weights(model, section)


# --- files and names --------------------------------------------------------------------------------------------------

NESTINGS: dict[str, Any] = {
    "plain": lambda state: state,
    "ordered": OrderedDict,
    "model_state_dict": lambda state: {"epoch": 3, "model_state_dict": state, "optimizer": {"state": {0: {}}}},
    "MODEL_STATE": lambda state: {"MODEL_STATE": state, "EPOCHS_RUN": 2},
    "state_dict": lambda state: {"state_dict": state, "optimizer_states": [{"lr": 0.1}], "loops": {"fit": {"a": 1}}},
    "model": lambda state: {"model": state, "step": torch.tensor(7)},
    "net": lambda state: {"net": state, "epoch": 4},
    "model/state_dict": lambda state: {"model": {"state_dict": state, "name": "net"}, "version": "2"},
}
PREFIXES = ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module.")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_every_nesting_and_prefix(tmp_path: Path, nesting: str, prefix: str) -> None:
    source, model = made(1), made(2)
    state = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    content = NESTINGS[nesting](state)
    torch.save(content, tmp_path / "weights.pt")
    notes, others = started(model, tmp_path / "weights.pt"), content.keys() - state.keys() - NESTINGS.keys() - {"MODEL"}
    assert all(key in "".join(notes) for key in others)
    assert len(notes) == bool(others)
    assert_same(model, source.state_dict())


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
@pytest.mark.parametrize("zipped", [True, False], ids=["new", "old"])
def test_every_kind_of_torch_file(tmp_path: Path, suffix: str, zipped: bool) -> None:
    source, model, file = made(1), made(2), tmp_path / f"weights{suffix}"
    torch.save(source.state_dict(), file, _use_new_zipfile_serialization=zipped)
    assert started(model, file) == ()
    assert_same(model, source.state_dict())


def test_a_compressed_archive_is_loaded(tmp_path: Path) -> None:
    """Compressed bytes can't be mapped: they would be read as values."""
    source, model = made(1), made(2)
    torch.save(source.state_dict(), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as old, zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert started(model, tmp_path / "packed.pt") == ()
    assert_same(model, source.state_dict())


def test_safetensors_and_a_runs_folder(tmp_path: Path) -> None:
    source = made(1)
    (tmp_path / "run" / "model").mkdir(parents=True)
    file = tmp_path / "run" / "model" / "model.safetensors"
    save_file(source.state_dict(), file)
    for place in (file, tmp_path / "run", tmp_path / "run" / "model"):
        model = made(2)
        assert started(model, place) == ()
        assert_same(model, source.state_dict())


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_folder_of_shards(tmp_path: Path, kind: str) -> None:
    source, model = made(1), made(2)
    shards = _shards(source, tmp_path, kind)
    assert len(shards) == 2
    assert started(model, tmp_path) == ()
    assert_same(model, source.state_dict())
    shards[1].unlink()
    assert "names a file" in refusal(made(2), tmp_path)


def _shards(model: nn.Module, folder: Path, kind: str) -> list[Path]:
    stem = "model" if kind == "safetensors" else "pytorch_model"
    files, names = [], {}
    items = list(model.state_dict().items())
    for number, part in enumerate((items[:3], items[3:])):
        file = folder / f"{stem}-0000{number}.{kind}"
        (save_file if kind == "safetensors" else torch.save)(dict(part), file)
        names |= {name: file.name for name, _ in part}
        files.append(file)
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return files


def test_wrappers_within_names_and_in_the_model(tmp_path: Path) -> None:
    """Load a compiled submodule, and a model whose names begin with a wrapper's prefix."""

    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = small.Net()

    source, model, wrapping = made(1, small.Net), made(2, small.Net), made(2, Wrapping)
    state = source.state_dict()
    torch.save({name.replace(".", "._orig_mod.", 1): tensor for name, tensor in state.items()}, tmp_path / "inner.pt")
    assert started(model, tmp_path / "inner.pt") == ()
    assert_same(model, state)
    assert started(wrapping, tmp_path / "inner.pt") == ()
    assert_same(wrapping.module, state)
    torch.save(wrapping.state_dict(), tmp_path / "wrapping.pt")
    assert started(made(3, Wrapping), tmp_path / "wrapping.pt") == ()
    assert started(made(3, small.Net), tmp_path / "wrapping.pt") == ()


def test_one_prefix_for_all_names(tmp_path: Path) -> None:
    """Load a .ckpt of Lightning, where the model is an attribute of its module."""
    source, model = made(1, small.Net), made(2, small.Net)
    state = {f"net.body.{name}": tensor for name, tensor in source.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    [note] = started(model, tmp_path / "last.ckpt")
    assert gives(note, "net.body.", tmp_path / "last.ckpt")
    assert_same(model, source.state_dict())
    torch.save({"state_dict": {**state, "loss.weight": torch.ones(3)}}, tmp_path / "more.ckpt")
    assert "unexpected: loss.weight [3]" in refusal(made(2, small.Net), tmp_path / "more.ckpt")
    assert len(started(made(2, small.Net), tmp_path / "more.ckpt", partial=True)) == 2


def test_two_equally_good_prefixes_match_nothing(tmp_path: Path) -> None:
    state = made(1, small.Net).state_dict()
    both = {f"{who}.{name}": tensor for who in ("student", "teacher") for name, tensor in state.items()}
    torch.save(both, tmp_path / "both.pt")
    refusal(made(2, small.Net), tmp_path / "both.pt", partial=True, kind=FailureKind.OTHER_WEIGHTS)


# --- mismatches -------------------------------------------------------------------------------------------------------


@pytest.fixture
def misfit(tmp_path: Path) -> Path:
    """Save weights with a misspelled name, an unexpected tensor and another shape."""
    state = made(1, small.Net).state_dict()
    state["haed.weight"] = state.pop("head.weight")
    state["inner.weight"] = torch.ones(16, 4)
    state["spare"] = torch.ones(2)
    torch.save(state, tmp_path / "misfit.pt")
    return tmp_path / "misfit.pt"


def test_all_mismatches_are_reported_together(misfit: Path) -> None:
    assert refusal(made(2, small.Net), misfit) == (
        f"model.init_from: {misfit} doesn't have the weights of this model\n"
        "  missing: head.weight [3, 8]\n"
        "  unexpected: haed.weight [3, 8], spare [2] (is it haed.weight for head.weight?)\n"
        "  of another shape: inner.weight [16, 4] where the model has [8, 4]\n"
        "set model.init_partial: true to initialize missing tensors, and tensors of another shape, as usual"
    )


def test_init_partial_loads_the_tensors_that_match(misfit: Path) -> None:
    source, model, usual = made(1, small.Net), made(2, small.Net), made(2, small.Net)
    notes = started(model, misfit, partial=True)
    assert notes == (
        f"{misfit}: missing: head.weight [3, 8]",
        f"{misfit}: unexpected: haed.weight [3, 8], spare [2] (is it haed.weight for head.weight?)",
        f"{misfit}: of another shape: inner.weight [16, 4] where the model has [8, 4]",
    )
    expected = {**source.state_dict(), **{name: usual.state_dict()[name] for name in ("head.weight", "inner.weight")}}
    assert_same(model, expected)


@pytest.mark.parametrize("partial", [False, True])
def test_weights_without_a_match_are_always_refused(tmp_path: Path, partial: bool) -> None:
    torch.save({"inner_weight": torch.ones(8, 4)}, tmp_path / "other.pt")
    message = refusal(made(2, small.Net), tmp_path / "other.pt", partial, FailureKind.OTHER_WEIGHTS)
    assert "missing: inner.weight [8, 4], inner.bias [8], head.weight [3, 8], head.bias [3]" in message
    assert gives(message, "inner_weight [8, 4]", "inner.weight?")
    torch.save({"inner.weight": torch.ones(2)}, tmp_path / "shapes.pt")
    assert gives(refusal(made(2, small.Net), tmp_path / "shapes.pt", partial), "inner.weight [2]", "[8, 4]")


def test_a_missing_buffer_is_missing(tmp_path: Path) -> None:
    state = made(1).state_dict()
    del state["norm.running_mean"]
    torch.save(state, tmp_path / "weights.pt")
    assert "missing: norm.running_mean [4]" in refusal(made(2), tmp_path / "weights.pt")


def test_dtypes_are_the_models(tmp_path: Path) -> None:
    source, model = made(1), made(2)
    torch.save({name: t.bfloat16() if t.is_floating_point() else t for name, t in source.state_dict().items()},
               tmp_path / "half.pt")  # fmt: skip
    assert started(model, tmp_path / "half.pt") == ()
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    expected = {n: t.bfloat16().float() if t.is_floating_point() else t for n, t in source.state_dict().items()}
    assert_same(model, expected)
    torch.save({**source.state_dict(), "norm.num_batches_tracked": torch.tensor(1.5)}, tmp_path / "float.pt")
    assert "num_batches_tracked is torch.float32" in refusal(made(2), tmp_path / "float.pt")


@pytest.mark.parametrize("kept", [("embedding.weight",), ("head.weight",), ("embedding.weight", "head.weight")])
def test_tied_weights_by_one_name_or_both(tmp_path: Path, kept: tuple[str, ...]) -> None:
    source, model = made(1, Tied), made(2, Tied)
    state = {n: t.clone() for n, t in source.state_dict().items() if n in (*kept, "head.bias")}
    torch.save(state, tmp_path / "tied.pt")
    assert started(model, tmp_path / "tied.pt") == ()
    assert_same(model, source.state_dict())
    assert model.head.weight is model.embedding.weight


def test_different_values_for_tied_weights_are_refused(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in made(1, Tied).state_dict().items()}
    state["head.weight"] += 1
    torch.save(state, tmp_path / "untied.pt")
    message = refusal(made(2, Tied), tmp_path / "untied.pt", partial=True)
    assert gives(message, "embedding.weight and head.weight", tmp_path / "untied.pt")


# --- unreadable files -------------------------------------------------------------------------------------------------


def test_wrong_files_and_folders_are_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = made(1, small.Net)
    torch.save(model.state_dict(), "weights.pt")
    assert gives(refusal(model, "weihgts.pt"), "weihgts.pt", "weights.pt?")
    assert gives(refusal(model, "google/bert"), "model.pretrained")
    Path("folder").mkdir()
    Path("folder/unet.safetensors").touch()
    assert gives(refusal(model, "folder"), "unet.safetensors")
    Path("run/checkpoints/step-00000002").mkdir(parents=True)
    Path("run/config.yaml").touch()
    assert "no weights yet" in refusal(model, "run")
    Path("run/checkpoints/step-00000002/manifest.json").touch()
    assert gives(refusal(model, "run/checkpoints"), "lockstep export run/checkpoints --to")
    assert "`lockstep export run/checkpoints/step-00000002" in refusal(model, "run/checkpoints/step-00000002")
    Path("notes.txt").touch()
    assert gives(refusal(model, "notes.txt"), "notes.txt", "suffix")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "isn't a file of torch.save, or is damaged: it isn't a zip archive"),
        (b"these are words, not weights", "isn't a file of torch.save, or is damaged"),
        (pickle.dumps({"a": 1}, protocol=4), "isn't a file of tensors by torch.save: it isn't a zip archive"),
        ([1, 2], "contains a list, not tensors by name"),
        ({"weights": {"a": torch.ones(2)}, "epoch": 3}, "doesn't have the weights of this model"),
        ({"a": torch.ones(1).expand(10**6, 10**6)}, "a has shape [1000000, 1000000], but too few bytes"),
        ({"a": torch.ones(2, 2).to_sparse()}, "a isn't a plain tensor"),
        ({"a": torch.ones(2, device="meta")}, "a isn't a plain tensor"),
        ({"a\x1b[2J": torch.ones(2, 2).to_sparse()}, r"'a\x1b[2J' isn't a plain tensor"),
    ],
)
def test_files_without_named_tensors_are_refused(tmp_path: Path, content: object, message: str) -> None:
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    assert message in refusal(made(1, small.Net), file)


CUT = {
    "weights.pt": (torch.save, "it is cut: the end of the zip archive is missing"),
    "older.pt": (partial(torch.save, _use_new_zipfile_serialization=False), "unexpected EOF"),
    "weights.safetensors": (save_file, "is damaged or cut"),
}


@pytest.mark.parametrize("name", CUT)
def test_a_truncated_file_is_refused(tmp_path: Path, name: str) -> None:
    save, reason = CUT[name]
    save(made(1, small.Net).state_dict(), tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) * 3 // 4])
    message = refusal(made(1, small.Net), tmp_path / name)
    assert reason in message
    assert "first bytes" not in message


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(tmp_path: Path, kind: torch.dtype) -> None:
    state = made(1, small.Net).state_dict()
    torch.save({**state, "inner.weight": state["inner.weight"].to(kind)}, tmp_path / "weights.pt")
    message = refusal(made(1, small.Net), tmp_path / "weights.pt", partial=True)
    assert f"inner.weight is {kind}" in message
    assert "dequantize" in message


FOREIGN: dict[str, tuple[str, str]] = {
    "a folder of HF Trainer's": ("checkpoint-5/model.safetensors", "name one, {place}/checkpoint-5"),
    "peft": ("adapter_config.json", "merge_and_unload"),
    "peft's file": ("adapter_model.safetensors", "merge_and_unload"),
    "DeepSpeed": ("latest", "`lockstep ckpt import {place} WEIGHTS` converts it"),
    "DeepSpeed's model": ("global_step2/mp_rank_00_model_states.pt", "name its folder, {place}/global_step2"),
    "DeepSpeed's optimizer": ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "name its folder, {place}"),
    "DCP": (".metadata", "`lockstep ckpt import {place} WEIGHTS` converts it"),
    "FSDP": ("pytorch_model_fsdp_0/.metadata", "`lockstep ckpt import {place} WEIGHTS` converts it"),
    "an optimizer": ("optimizer.pt", "has no weights: name its folder, {place}"),
    "Trainer's arguments": ("training_args.bin", "has no weights: name its folder, {place}"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_other_programs_save_beside_weights_is_recognized(tmp_path: Path, kind: str) -> None:
    name, remedy = FOREIGN[kind]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    if file.suffix == ".pt":
        torch.save({"module": made(1, small.Net).state_dict()}, file)
    is_file = file.suffix in (".pt", ".bin", ".safetensors") and "checkpoint-5" not in name
    assert remedy.format(place=tmp_path) in refusal(made(1, small.Net), file if is_file else tmp_path)
    with pytest.raises(ConfigError) as refused:
        read_peer(file if is_file else tmp_path)
    if kind not in ("DeepSpeed", "DCP", "FSDP"):
        assert remedy.format(place=tmp_path) in str(refused.value)


def test_what_is_not_read_beside_weights_is_noted(tmp_path: Path) -> None:
    save_file(made(1, small.Net).state_dict(), tmp_path / "model.safetensors")
    for name in ("optimizer.pt", "trainer_state.json"):
        (tmp_path / name).touch()
    [note] = started(made(2, small.Net), tmp_path)
    assert gives(note, "optimizer.pt, trainer_state.json", "lockstep ckpt import")


@pytest.mark.parametrize("named", ["../weights.pt", "/etc/passwd", "pytorch_model.bin.index.json", "gone.bin", "."])
def test_an_index_may_only_name_weights_in_its_folder(tmp_path: Path, named: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save(made(1, small.Net).state_dict(), tmp_path / "weights.pt")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"inner.weight": named}}))
    message = refusal(made(1, small.Net), folder)
    assert gives(message, "same folder") or gives(message, "suffix")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": 3}'])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "isn't an index of weights" in refusal(made(1, small.Net), tmp_path)


# --- code -------------------------------------------------------------------------------------------------------------


class Hostile:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize("zipped", [True, False], ids=["new", "old"])
def test_a_hostile_pickle_is_refused_and_not_executed(tmp_path: Path, zipped: bool) -> None:
    mark, file = tmp_path / "executed", tmp_path / "weights.pt"
    state = {**made(1, small.Net).state_dict(), "hidden": Hostile(mark)}
    torch.save(state, file, _use_new_zipfile_serialization=zipped)
    message = refusal(made(2, small.Net), file, partial=True)
    assert gives(message, "posix.system")
    assert not mark.exists()
    torch.load(file, weights_only=False)
    assert mark.exists(), "unpickling the file runs code"


@pytest.mark.parametrize("whole", [False, True], ids=["a state dict", "a pickled module"])
def test_what_needs_more_than_tensors_is_refused_with_the_remedy(tmp_path: Path, whole: bool) -> None:
    source = made(1, small.Net)
    content = source if whole else {"state_dict": source.state_dict(), "args": argparse.Namespace(lr=1)}
    torch.save(content, tmp_path / "it's.pt")
    message = refusal(made(2, small.Net), tmp_path / "it's.pt")
    assert ("kit.small.Net" if whole else "argparse.Namespace") in message
    assert "save_file as it's.safetensors" in message


def test_torchscript_is_refused(tmp_path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    assert gives(refusal(made(1, small.Net), tmp_path / "script.pt"), "TorchScript")


# --- transformers -----------------------------------------------------------------------------------------------------

SHAPE = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 20}


def _of_transformers(kind: str, seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    special = {"mixtral": {"num_key_value_heads": 1, "num_local_experts": 2}, "gpt2": {"n_embd": 16, "n_head": 2}}
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **special.get(kind, {})})
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("size", ["50GB", "10KB"], ids=["one file", "shards"])
def test_folders_of_transformers(tmp_path: Path, kind: str, size: str) -> None:
    """Load folders of transformers, including mixtral, whose experts have other names in files."""
    source, model = _of_transformers(kind, 1), _of_transformers(kind, 2)
    source.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors").exists() == (size == "50GB")
    renamed = set(read_weights(tmp_path).tensors) - set(source.state_dict())
    assert bool(renamed) == (kind == "mixtral")
    assert started(model, tmp_path) == ()
    assert_same(model, source.state_dict())


def test_names_that_only_transformers_knows(tmp_path: Path) -> None:
    """Load files like those of GPT-2: without the prefix of the base, and with masks that are no longer weights."""
    source, model = _of_transformers("gpt2", 1), _of_transformers("gpt2", 2)
    old = {name.removeprefix("transformer."): t for name, t in source.state_dict().items() if name != "lm_head.weight"}
    torch.save({**old, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "pytorch_model.bin")
    assert started(model, tmp_path) == ()
    assert_same(model, source.state_dict())
    old["h.0.mlp.c_fc.wieght"] = old.pop("h.0.mlp.c_fc.weight")
    torch.save(old, tmp_path / "pytorch_model.bin")
    generators = torch.get_rng_state()
    message = refusal(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), generators), "a generator of the process was advanced"
    assert "missing: transformer.h.0.mlp.c_fc.weight [16, 64]" in message
    assert "c_fc.wieght [16, 64]" in message


# --- in a run -----------------------------------------------------------------------------------------------------


def _config(place: Path, **section: Any) -> dict[str, Any]:
    config = small.config()
    config["model"] |= {"init_from": str(place), **section}
    return config


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_no_session_starts_from_weights_that_are_not_finite(tmp_path: Path, value: float, frozen: bool) -> None:
    state = made(1, small.Net).state_dict()
    state["inner.bias"][3] = value
    torch.save(state, tmp_path / "weights.pt")
    with fails(ConfigError, "inner.bias", "NaN", key="model.init_from"):
        open_and_close(_config(tmp_path / "weights.pt", freeze=["inner.*"] if frozen else []))


def test_a_session_starts_from_weights(tmp_path: Path) -> None:
    source = made(1, small.Net)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    with lockstep.session(_config(tmp_path / "weights.pt", freeze=["head.*"])) as session:
        assert_same(components_of(session).sharding.state.model, source.state_dict())
        assert run_info(session, "run", "").notes == ()
        trained = [
            name for name, p in components_of(session).sharding.state.model.named_parameters() if p.requires_grad
        ]
        assert trained == ["inner.weight", "inner.bias"]


def test_missing_tensors_are_noted_at_the_start(tmp_path: Path) -> None:
    torch.save({"inner.weight": torch.ones(8, 4)}, tmp_path / "weights.pt")
    with lockstep.session(_config(tmp_path / "weights.pt", init_partial=True)) as session:
        [note] = run_info(session, "run", "").notes
    assert "missing: inner.bias [8], head.weight [3, 8], head.bias [3]" in note
    with pytest.raises(ConfigError, match=r"(?s)model\.init_from: .*missing: inner\.bias \[8\]"):
        open_and_close(_config(tmp_path / "weights.pt"))


def open_and_close(config: dict[str, Any]) -> None:
    with lockstep.session(config):
        pass


def test_a_module_from_the_python_api_starts_from_weights(tmp_path: Path) -> None:
    source, model = made(1, small.Net), made(2, small.Net)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    with lockstep.session(_config(tmp_path / "weights.pt"), model=model):
        assert_same(model, source.state_dict())


def test_init_partial_without_init_from_is_refused() -> None:
    config = small.config()
    config["model"]["init_partial"] = True
    with pytest.raises(ConfigError, match="init_partial needs init_from"):
        open_and_close(config)

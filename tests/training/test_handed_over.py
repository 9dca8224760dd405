"""Objects and batches in an unexpected form: they work, or a message states what to do."""

from __future__ import annotations

from collections import UserList
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit import small
from kit.failures import fails, gives
from kit.families import family
from kit.runs import differences, recorded_all
from kit.worlds import in_world
from torch import nn
from torch.utils.data import DataLoader

import lockstep


def _sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


CLOSURE = (
    "optimizer: LBFGS evaluates the loss several times in a step (its step needs a closure), but an update has "
    "one gradient; take an optimizer with a step() that needs no closure, such as torch.optim.AdamW"
)
WRONG = {
    "optimizer object": (
        lambda: {"optimizer": _sgd()},
        "optimizer: is an object of SGD, but a strategy may replace its parameters; pass "
        "optimizer=lambda groups: SGD(groups, lr=...)",
    ),
    "optimizer class that needs a closure": (lambda: {"optimizer": torch.optim.LBFGS}, CLOSURE),
    "optimizer object that needs a closure": (
        lambda: {"optimizer": torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])}, CLOSURE,
    ),
    "optimizer of parameters that needs a closure": (
        lambda: {"optimizer": lambda groups: torch.optim.LBFGS([one for group in groups for one in group["params"]])},
        CLOSURE,
    ),
    "optimizer without groups": (
        lambda: {"optimizer": lambda groups: torch.optim.LBFGS(groups)},
        "optimizer: LBFGS doesn't support per-parameter options (parameter groups); take one that has groups",
    ),
    "optimizer by name": (
        lambda: {"optimizer": "sgd"},
        "optimizer: is the text 'sgd'; pass",
    ),
    "scheduler object": (
        lambda: {"schedule": torch.optim.lr_scheduler.StepLR(_sgd(), 1)},
        "schedule: is a StepLR, and its state would not be saved; pass a function (step, steps) -> share of optim.lr",
    ),
    "scheduler class": (
        lambda: {"schedule": torch.optim.lr_scheduler.StepLR},
        "schedule: is a StepLR, and its state would not be saved; pass a function (step, steps) -> share of optim.lr",
    ),
    "loader": (
        lambda: {"train_dataset": DataLoader(small.points())},
        "a DataLoader isn't a dataset; pass train_dataset=loader.dataset",
    ),
    "splits": (
        lambda: {"train_dataset": {"train": small.points(), "test": small.points()}},
        "dict is a mapping of splits (train, test); pass one of them: splits['train']",
    ),
    "dataset by name": (
        lambda: {"train_dataset": "wikitext"},
        "the dataset is the text 'wikitext'; for a name, set data.train.kind: huggingface",
    ),
    "evaluation without a name": (
        lambda: {"eval_datasets": small.points()},
        "eval_datasets: is of type TensorDataset; pass datasets by name: {'held-out': dataset}",
    ),
    "collate": (lambda: {"collate": 3}, "collate: is of type int; pass a function: list of items -> batch"),
    "model by name": (
        lambda: {"model": "gpt2"},
        "model: is the text 'gpt2'; pass a torch.nn.Module",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_of_another_kind_is_refused_with_what_to_hand_over(case: str, tmp_path: Path) -> None:
    arguments, message = WRONG[case]
    config = {**small.config(), "run": {"steps": 1, "folder": str(tmp_path / "run")}}
    del config["objective"]
    usual = {"train_dataset": small.points(), "objective": nn.CrossEntropyLoss(reduction="sum")}
    with pytest.raises(lockstep.ConfigError) as refused:
        lockstep.train(config, **{**usual, **arguments()})
    assert str(refused.value).startswith(message)


GIVEN: dict[str, Any] = {"model": small.Net, "train_dataset": small.points(), "objective": nn.CrossEntropyLoss()}
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "model": ({"model": {"kind": "given", "freze": ["x"]}}, {}, ["model.freze"]),
    "no kind": ({"model": {"freze": ["x"]}}, {}, ["model.freze"]),
    "replaced model": ({"model": {"kind": "transformer", "layers": 2, "freze": ["x"]}}, {}, ["model.freze"]),
    "data": ({"data": {"train": {"kind": "given", "sampler": "x"}}}, {}, ["data.train.sampler"]),
    "evaluation": (
        {"data": {"evaluation": {"held-out": {"kind": "given", "limit": 3}}}},
        {"eval_datasets": {"held-out": small.points(5)}},
        ["data.evaluation.held-out.limit"],
    ),
    "objective": ({"objective": {"kind": "given", "label_smoothin": 0.1}}, {}, ["objective.label_smoothin"]),
    "replaced objective": ({"objective": {"kind": "next-token", "smoothing": 0.1}}, {}, ["objective.smoothing"]),
    "its option": ({"objective": {"kind": "given", "label_smoothing": 0.1}}, {}, ["objective"]),
    "optimizer": ({"optim": {"lrr": 0.1}}, {"optimizer": torch.optim.SGD}, ["optim.lrr"]),
    "its momentum": ({"optim": {"name": "given", "momentum": 0.5}}, {"optimizer": torch.optim.SGD}, ["optim"]),
    "named optimizer": ({"optim": {"target": "torch.optim:SGD", "momentum": 0.5}}, {}, ["optim"]),
    "schedule": ({"schedule": {"warmup": 5}}, {"schedule": lambda step, steps: 1.0}, ["schedule.warmup"]),
    "its warmup": (
        {"schedule": {"kind": "given", "warmup_steps": 5}}, {"schedule": lambda step, steps: 1.0}, ["schedule"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_keys_without_effect_beside_objects_are_refused(case: str) -> None:
    sections, objects, keys = BESIDE[case]
    config = {**{name: small.config()[name] for name in ("batch", "run", "launch")}, **sections}
    with pytest.raises(lockstep.ConfigError) as refused, lockstep.session(config, **GIVEN, **objects):
        pass
    assert [problem.key for problem in refused.value.problems] == keys


def test_objects_replace_what_a_config_names_and_keep_what_holds_for_any() -> None:
    config = {
        **small.config(),
        "model": {"kind": "transformer", "layers": 2, "freeze": ["inner.*"]},
        "objective": {"kind": "next-token", "label_smoothing": 0.1},
        "optim": {"name": "muon", "momentum": 0.5, "lr": 0.1, "clip_norm": None},
        "schedule": {"kind": "linear", "warmup_steps": 4},
    }
    objects = {
        "optimizer": torch.optim.SGD,
        "schedule": lambda step, steps: 1.0,
        "eval_datasets": {"own": small.points(5)},
    }
    with lockstep.session(config, **GIVEN, **objects) as session:
        assert [next(iter(session)).lr] == [0.1]
        assert [report.name for report in session.evaluate()] == ["held-out", "own"]


def test_rows_of_lists_and_renamed_inputs_are_the_run_of_tensors(tmp_path: Path) -> None:
    """Every strategy that passes inputs on differently, and a plain dataset of the datasets library."""
    renamed = {"kind": "custom", "target": "kit.small:Renamed", "inputs": {"points": "x", "name": None}}
    tensors = {**small.config("Renamed"), "evaluation": {"at_end": False}}
    rows = {**tensors, "model": renamed, "data": {"train": {"kind": "custom", "target": "kit.small:Rows"}}}
    parallel: list[dict[str, Any]] = [
        {"strategy": "ddp"}, {"strategy": "fsdp"}, {"strategy": "ddp", "pipeline": 2},
    ]  # fmt: skip
    [oracle] = recorded_all([{**tensors, "data": {"train": tensors["data"]["train"]}}])
    for run in recorded_all([{**rows, "parallel": one} for one in parallel], ranks=2):
        assert differences(run, oracle) == []


def test_a_plain_data_set_of_the_datasets_library_is_taken() -> None:
    datasets = pytest.importorskip("datasets")
    items = [small.Rows()[index] for index in range(40)]
    plain = datasets.Dataset.from_list(items).remove_columns(["name"])
    config = {**small.config(), "data": {}}
    with lockstep.session(config, model=small.Net, train_dataset=plain) as session:  # its name is the forward's
        losses = [report.loss for report in session]
    assert losses[-1] < losses[0]


def test_a_run_is_resumed_by_its_own_config_with_the_optimizer_that_was_handed_over(tmp_path: Path) -> None:
    """The config states every default, and a default would contradict what the optimizer was made with."""

    def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.05, momentum=0.5, weight_decay=0.1)

    config = {**small.config(), "evaluation": {"at_end": False}, "schedule": {"kind": "constant"}}
    del config["optim"]

    def trained(folder: Path, steps: int, by: Any = config) -> dict[str, Any]:
        asked = {**by, "run": {**by["run"], "steps": steps, "folder": str(folder)}}
        return lockstep.train(asked, optimizer=sgd).summary

    trained(tmp_path / "halted", 2)
    own = yaml.safe_load((tmp_path / "halted" / "config.yaml").read_text())
    assert (own["optim"]["lr"], own["optim"]["weight_decay"]) == (0.05, 0.1)
    assert trained(tmp_path / "halted", 4, own)["loss"] == trained(tmp_path / "whole", 4)["loss"]
    own["optim"]["lr"] = 0.01
    with fails(lockstep.ConfigError, 0.01, 0.05, key="optim.lr"):
        trained(tmp_path / "halted", 6, own)


def test_a_run_is_not_continued_without_the_objects_that_were_handed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config can't state them; what stood in it in their place trained on in silence."""
    from lockstep.cli.main import main

    run = tmp_path / "run"
    config = {**small.config(), "evaluation": {"at_end": False}, "run": {"steps": 2, "folder": str(run)}}
    objects: dict[str, Any] = {
        "optimizer": lambda groups: torch.optim.AdamW(groups, betas=(0.5, 0.9)), "schedule": lambda step, steps: 0.5,
    }  # fmt: skip
    data = {"train_dataset": small.points(), "collate": torch.utils.data.default_collate}
    lockstep.train(config, **objects, **data)

    arguments = "train_dataset=..., collate=..., optimizer=..., schedule=..."
    keys = ("data.train.kind", "data.train.collate", "optim.name", "schedule.kind")
    fork = ["train", str(run), "--fork", str(tmp_path / "fork")]
    for words in (
        ["train", str(run), "--run.steps=4"],
        fork,
        ["plan", str(run), "--peak", "none"],
        ["verify", str(run)],
    ):
        assert main(words) == 2
        message = capsys.readouterr().err
        assert gives(message, f'lockstep.train("{run}", {arguments})', "optim.name: adamw")
        assert all(f"  {key}: `given` " in message for key in keys)
    with pytest.raises(lockstep.ConfigError) as refused:
        lockstep.train(run, train_dataset=data["train_dataset"])
    missing = ["data.train.collate", "optim.name", "schedule.kind"]
    assert [line.split(":")[0] for line in str(refused.value).splitlines()] == missing

    longer = {**config, "run": {"steps": 4, "folder": str(run)}}
    with pytest.raises(lockstep.ConfigError) as refused:
        lockstep.train(longer, train_dataset=data["train_dataset"])
    for key in ("data.train.collate", "optim.name", "schedule.kind"):
        assert f'\n  {key}: "given" then, ' in str(refused.value)
    assert lockstep.train(longer, **objects, **data).summary["steps"] == 4


def test_an_evaluation_without_evaluation_sets_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It printed nothing and exited with 0."""
    from lockstep.cli.main import main

    run = tmp_path / "run"
    config = small.config(run={"steps": 1, "folder": str(run)})
    lockstep.train({**config, "data": {"train": config["data"]["train"]}})
    for words in (["eval", str(run)], ["eval", str(run), "--json"]):
        assert main(words) == 2
        assert gives(capsys.readouterr().err, "data.evaluation:")


NAMES = {
    "a name": (None, "model.inputs: Renamed has forward(x), and the data gives points, name; add to "
               "model.inputs: {points: x, name: null} (null leaves an input out)"),
    "one more": ({"points": "x"}, "model.inputs: Renamed has forward(x), and the data gives x, "
                 "name; add to model.inputs: {name: null} (null leaves an input out)"),
    "one that the forward lacks": ({"points": "y", "name": None}, "model.inputs: {points: y}, but Renamed has "
                                   "forward(x); write model.inputs: {points: x, name: null} (null leaves an input "
                                   "out)"),
    "one that isn't there": ({"tokens": "x"}, "model.inputs: the data has no input tokens; it has points, name"),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMES)
def test_names_that_the_forward_does_not_have_are_named(case: str) -> None:
    inputs, message = NAMES[case]
    model = {"kind": "custom", "target": "kit.small:Renamed", **({"inputs": inputs} if inputs else {})}
    rows = {"train": {"kind": "custom", "target": "kit.small:Rows"}}
    assert small.refusal({**small.config(), "model": model, "data": rows}) == message


def texts(names: dict[str, str], data: str, **parallel: Any) -> dict[str, Any]:
    """A model of the transformers library whose forward takes anything by `**kwargs`."""
    model = {**family("llama")["model"], "inputs": names}
    model["architecture"] = {**model["architecture"], "num_key_value_heads": 2}
    train = {"kind": "custom", "target": "kit.small:Texts", "arguments": {"inputs": data}}
    sections = {**small.config(), "model": model, "data": {"train": train}, "parallel": parallel}
    return {**sections, "objective": {"kind": "next-token"}, "batch": {"global_size": 4, "micro_size": 1}}


CUTS: list[dict[str, Any]] = [{"strategy": "ddp", key: 2} for key in ("pipeline", "context", "tensor")]


def test_renamed_inputs_of_the_library_are_the_same_run_however_the_model_is_cut() -> None:
    pytest.importorskip("transformers")
    [oracle] = recorded_all([texts({}, "input_ids")])
    for run in recorded_all([texts({"words": "input_ids"}, "words", **cut) for cut in CUTS], ranks=2):
        assert differences(run, oracle) == []


def test_wrong_names_are_reported_alike_whatever_divides_the_model() -> None:
    """A pipeline's dry run blamed the blocks; for names that `**kwargs` accepts, the library's own error was shown."""
    pytest.importorskip("transformers")
    own = {**small.config("Renamed"), "data": {"train": {"kind": "custom", "target": "kit.small:Rows"}}}
    ways = [{"strategy": "fsdp"}, *CUTS]
    first, second = in_world(
        2, small.refusals, [{**own, "parallel": CUTS[0]}, *(texts({}, "words", **one) for one in ways)]
    )
    assert first == second
    assert first[0] == NAMES["a name"][1]
    (renamed,) = set(first[1:])
    assert renamed.startswith("model.inputs: ")
    assert gives(renamed, "LlamaForCausalLM", "input_ids", "words", "model.inputs: {words: input_ids}")


def test_a_forward_without_an_input_is_named() -> None:
    message = r"Empty has forward\(self_made=1\), and the data gives 2 inputs"
    with (
        lockstep.session(small.config(), model=Empty(), train_dataset=_Pairs()) as session,
        pytest.raises(lockstep.ConfigError, match=message),
    ):
        next(iter(session))


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, self_made=1):  # type: ignore[no-untyped-def]
        return self.layer(torch.ones(1, 1))


class _Pairs:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.ones(1), torch.ones(1), 0


@pytest.mark.parametrize("betas", [UserList([0.9, 0.95]), (0.9, 0.95), torch.tensor([0.5, 0.75]).numpy()])
def test_lists_of_other_libraries_are_lists(betas: Any) -> None:
    from lockstep.config.loading import validate

    asked = {**small.config(), "optim": {"betas": betas}}
    assert validate(asked).config.optim.betas == tuple(float(one) for one in betas)


def test_what_reads_a_run_does_not_ask_for_data_that_it_does_not_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.cli.main import main

    pytest.importorskip("transformers")
    architecture = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    run = tmp_path / "run"
    config = {
        "model": {"kind": "huggingface", "task": "causal-lm", "architecture": architecture},
        "data": {"evaluation": {"held-out": {"kind": "stdlib-text", "split": "held-out", "length": 8, "samples": 4}}},
        "batch": {"global_size": 4}, "precision": {"compute": "fp32"}, "launch": {"device": "cpu", "ranks": 1},
        "monitor": {"tensorboard": False, "progress": "none"}, "run": {"steps": 1, "folder": str(run)},
    }  # fmt: skip
    lockstep.train(config, train_dataset=[{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8)
    assert main(["export", str(run), "--format", "hf", "--to", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "config.json").exists()
    capsys.readouterr()
    assert main(["eval", str(run), "--ranks", "1"]) == 0

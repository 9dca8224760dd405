"""Which layer wins, where a value came from, and what a change of kind does."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import small

from lockstep.config.loading import DEFAULT, LoadedConfig, load, validate, values
from lockstep.config.override import Override
from lockstep.config.schema import Config, CustomModel, StdlibText, TransformerModel
from lockstep.core.errors import ConfigError

BASE = """\
model: {kind: transformer, layers: 2}
data:
  train: {kind: stdlib-text}
optim:
  lr: 1e-3
  name: sgd
run: {steps: 10}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return _file(tmp_path / "base.yaml", BASE)


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_later_layers_win_key_by_key(base: Path, tmp_path: Path) -> None:
    more = _file(tmp_path / "more.yaml", "optim: {lr: 2e-3}\nbatch: {global_size: 8}\n")
    environ = {"LOCKSTEP_OPTIM__LR": "3e-3", "LOCKSTEP_BATCH__GLOBAL_SIZE": "16", "LOCKSTEP_RUN__SEED": "7"}
    assert load([base], environ={}).config.optim.lr == 1e-3
    assert load([base, more], environ={}).config.optim.lr == 2e-3
    assert load([more, base], environ={}).config.optim.lr == 1e-3
    assert load([base, more], environ=environ).config.optim.lr == 3e-3
    loaded = load([base, more], ["optim.lr=4e-3", "--optim.eps=1e-6", "optim.lr=5e-3"], environ)
    assert loaded.config.optim.lr == 5e-3
    assert loaded.config.optim.eps == 1e-6
    assert loaded.config.optim.name == "sgd"
    assert (loaded.config.batch.global_size, loaded.config.run.seed) == (16, 7)


def test_every_value_says_where_it_came_from(base: Path) -> None:
    loaded = load([base], ["--batch.micro_size=4"], {"LOCKSTEP_RUN__SEED": "7"})
    assert loaded.origins["optim.lr"] == f"{base}:5:7"
    assert loaded.origins["model.layers"] == f"{base}:1:36"
    assert loaded.origins["run.seed"] == "LOCKSTEP_RUN__SEED"
    assert loaded.origins["batch.micro_size"] == "--batch.micro_size"
    assert loaded.origins["optim.eps"] == DEFAULT
    assert loaded.origins.keys() == values(loaded.config).keys()


def test_an_override_meets_the_recipes_kind(base: Path) -> None:
    model = load([base], ["--model.layers=6"], {}).config.model
    assert isinstance(model, TransformerModel)
    assert model.layers == 6


def test_a_new_kind_leaves_out_the_old_ones_keys_with_a_note(base: Path) -> None:
    loaded = load([base], ["model.kind=custom", "model.target=a:b", "model.freeze=[x]"], {})
    assert loaded.config.model == CustomModel(kind="custom", target="a:b", freeze=("x",))
    assert loaded.notes == (
        "model.kind is now custom (--model.kind); left out, as only transformer has them: model.layers",
    )


def test_keys_of_the_old_kind_beside_the_new_one_are_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.layers: only other kinds"):
        load([base], ["model.kind=custom", "model.target=a:b", "model.layers=3"], {})


def test_another_length_replaces_the_earlier_one(base: Path) -> None:
    loaded = load([base], ["run.epochs=2"], {})
    assert (loaded.config.run.steps, loaded.config.run.epochs) == (None, 2)
    assert loaded.notes == ("run.epochs (--run.epochs) replaces run.steps",)


def test_a_flag_alone_switches_on(base: Path) -> None:
    assert load([base], [Override("model.compile", None)], {}).config.model.compile is True


def test_text_stays_as_written(base: Path) -> None:
    loaded = load([base], ["run.folder=1_0", "launch.environment.OMP_NUM_THREADS=1", "description="], {})
    assert loaded.config.run.folder == "1_0"
    assert loaded.config.launch.environment == {"OMP_NUM_THREADS": "1"}
    assert loaded.config.description == ""


def test_an_empty_section_has_its_defaults(base: Path, tmp_path: Path) -> None:
    empty = _file(tmp_path / "empty.yaml", "optim:\nbatch:\n")
    assert load([base, empty], environ={}).config == load([base], environ={}).config


def test_null_empties_a_mapping_of_names(base: Path) -> None:
    assert load([base], ["data.evaluation={a: {kind: digits}}"], {}).config.data.evaluation.keys() == {"a"}
    assert (
        load([base], ["data.evaluation={a: {kind: digits}}", "data.evaluation=null"], {}).config.data.evaluation == {}
    )


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("monitor.early_stopping", "{metric: held-out.loss}"),
        ("monitor.prometheus", "{port: 9470}"),
        ("checkpoint.storage", "{target: 'examples/own_storage.py:Memory'}"),
    ],
)
def test_null_leaves_out_a_section_that_an_earlier_layer_has(base: Path, tmp_path: Path, key: str, given: str) -> None:
    section, name = key.split(".")
    sets = "data: {evaluation: {held-out: {kind: digits}}}\nevaluation: {every: 10 steps}\n"
    has = _file(tmp_path / "has.yaml", f"{section}: {{{name}: {given}}}\n{sets}")
    assert getattr(getattr(load([base, has], environ={}).config, section), name) is not None
    without = _file(tmp_path / "without.yaml", f"{section}: {{{name}: null}}\n")
    for loaded in (load([base, has], [f"{key}=null"], {}), load([base, has, without], environ={})):
        assert getattr(getattr(loaded.config, section), name) is None
    assert getattr(getattr(load([base, without, has], environ={}).config, section), name) is not None


def test_names_in_variables_find_their_spelling(base: Path, tmp_path: Path) -> None:
    more = _file(tmp_path / "more.yaml", "data: {evaluation: {held-out: {kind: stdlib-text}}}\n")
    loaded = load([base, more], environ={"LOCKSTEP_DATA__EVALUATION__HELD_OUT__LENGTH": "64"})
    section = loaded.config.data.evaluation["held-out"]
    assert isinstance(section, StdlibText)
    assert section.length == 64


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("LOCKSTEP_OPTIM__LRR", "LOCKSTEP_OPTIM__LRR: optim.lrr: unknown key; did you mean lr?"),
        (
            "LOCKSTEP_OPTIM_LR",
            "LOCKSTEP_OPTIM_LR: has no effect; two underscores separate the keys: write LOCKSTEP_OPTIM__LR",
        ),
        (
            "LOCKSTEP_OPTIM_WEIGHT_DECY",
            "LOCKSTEP_OPTIM_WEIGHT_DECY: has no effect; two underscores separate the keys: write "
            "LOCKSTEP_OPTIM__WEIGHT_DECAY",
        ),
    ],
)
def test_a_misspelled_variable_is_refused(base: Path, variable: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([base], environ={variable: "1"})
    assert str(caught.value) == message


def test_other_variables_are_ignored(base: Path) -> None:
    assert load([base], environ={"LOCKSTEP_CACHE": "x", "HOME": "/"}).config == load([base], environ={}).config


def test_python_values_are_checked_alike() -> None:
    plain = {"model": {"kind": "transformer"}, "data": {"train": {"kind": "digits"}}, "run": {"steps": 1e1}}
    loaded = validate({**plain, "optim": {"betas": [0.9, 0.95]}}, {"run": {"seed": 1}})
    assert loaded.config.run.steps == 10
    assert loaded.config.optim.betas == (0.9, 0.95)
    assert (loaded.origins["optim.betas"], loaded.origins["run.folder"]) == ("Python", "default")
    assert (loaded.config.run.seed, loaded.config.run.steps) == (1, 10)
    with pytest.raises(ConfigError, match=r"Python: run\.steps: '3' is not a whole number above 0, or null"):
        validate({**plain, "run": {"steps": "3"}})


def test_a_config_of_python_keeps_its_values() -> None:
    config = Config.model_validate(
        {"model": {"kind": "transformer"}, "data": {"train": {"kind": "digits"}}, "run": {"steps": 1}}
    )
    assert validate(config) == LoadedConfig(config, {**validate(config).origins})
    assert validate(config, {"run": {"epochs": 2}}).config.run.epochs == 2


def test_several_unreadable_files_are_named_together(tmp_path: Path) -> None:
    first, second = _file(tmp_path / "a.yaml", "a: [1\n"), tmp_path / "missing.yaml"
    with pytest.raises(ConfigError) as caught:
        load([first, second], environ={})
    assert [problem.where for problem in caught.value.problems] == [f"{first}:1:4", str(second)]


@pytest.mark.parametrize(
    ("section", "selector", "other"), [("optim", "name", "sgd"), ("objective", "kind", "next-token")]
)
def test_a_target_implies_custom_and_contradicts_another_choice(section: str, selector: str, other: str) -> None:
    config = validate({**small.config(), section: {"target": "m:N"}}).config
    assert getattr(getattr(config, section), selector) == "custom"
    with pytest.raises(ConfigError, match=f"{selector} is {other}, and `target` names code of your own"):
        validate({**small.config(), section: {"target": "m:N", selector: other}})
    with pytest.raises(ConfigError, match=f"{selector} custom needs `target`"):
        validate({**small.config(), section: {selector: "custom"}})

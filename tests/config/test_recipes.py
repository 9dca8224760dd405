"""The configs that ship, and how they are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.loading import load
from lockstep.config.recipes import DEFAULT_RECIPE, recipes, resolve_all, resolve_recipe
from lockstep.config.schema import HuggingFaceData, HuggingFaceModel
from lockstep.core.errors import ConfigError


def test_every_recipe_loads_and_says_what_it_is() -> None:
    found = recipes()
    assert found[0].name == DEFAULT_RECIPE == "stdlib-lm"
    assert {recipe.name for recipe in found} >= {"stdlib-lm", "stdlib-classify", "digits", "bert-imdb"}
    for recipe in found:
        config = load([recipe.path], environ={}).config
        assert recipe.description == config.description
        assert recipe.path.read_text().startswith("# yaml-language-server: $schema=../docs/config.schema.json\n")


def test_the_network_recipe_is_the_usual_fine_tuning() -> None:
    config = load([resolve_recipe("bert-imdb").path], environ={}).config
    assert isinstance(config.model, HuggingFaceModel)
    assert isinstance(config.data.train, HuggingFaceData)
    assert (config.model.pretrained, config.data.train.max_length) == ("bert-base-uncased", 512)
    assert (config.batch.global_size, config.batch.micro_size, config.run.epochs) == (256, 16, 3)
    assert (config.optim.lr, config.optim.weight_decay, config.optim.decay) == (2e-5, 0.01, "matrices")
    assert (config.optim.clip_norm, config.schedule.kind, config.schedule.warmup_ratio) == (1.0, "linear", 0.1)
    assert config.monitor.every == 100
    assert "lockstep data fetch bert-imdb" in config.description


def test_a_recipe_and_files_over_it(tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("run: {seed: 3}\n")
    name, files = resolve_all(["digits", str(more)])
    assert name == "digits"
    assert load(files, environ={}).config.run.seed == 3
    assert resolve_all([])[0] == DEFAULT_RECIPE
    assert resolve_recipe(str(more)).name == "more"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("digit", "'digit' is neither a recipe nor a file nor a run's folder; did you mean digits?"),
        (
            "xyz",
            "'xyz' is neither a recipe nor a file nor a run's folder; "
            "the recipes are stdlib-lm, bert-imdb, digits, stdlib-classify",
        ),
        ("recipes/digitz.yaml", "there is no file recipes/digitz.yaml; did you mean recipes/digits.yaml?"),
    ],
)
def test_an_unknown_name_is_answered(asked: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(asked)
    assert str(caught.value) == message

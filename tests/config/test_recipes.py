"""The configs that ship, and how they are resolved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.config.loading import load
from lockstep.config.recipes import DEFAULT_RECIPE, overlays, recipes, resolve_all, resolve_recipe
from lockstep.config.schema import HuggingFaceData, HuggingFaceModel
from lockstep.core.errors import ConfigError
from lockstep.interop.foreign import read_foreign


def test_every_recipe_loads_and_has_a_description() -> None:
    resolved = recipes()
    assert resolved[0].name == DEFAULT_RECIPE == "stdlib-lm"
    assert {recipe.name for recipe in resolved} >= {"stdlib-lm", "stdlib-classify", "digits", "bert-imdb"}
    for recipe in resolved:
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


def test_the_large_recipe_is_sharded_and_recomputed() -> None:
    config = load([resolve_recipe("llama2-wikitext").path], environ={}).config
    assert isinstance(config.model, HuggingFaceModel)
    assert isinstance(config.data.train, HuggingFaceData)
    assert config.model.pretrained == "meta-llama/Llama-2-7b-hf"
    data = config.data.train
    assert (data.configuration, data.packed, data.max_length) == ("wikitext-2-raw-v1", True, 2048)
    assert (config.batch.global_size, config.batch.micro_size, config.run.epochs) == (128, 2, 1)
    assert (config.optim.lr, config.optim.betas, config.optim.weight_decay) == (1e-5, (0.9, 0.95), 0.1)
    fsdp = config.parallel.fsdp
    assert (config.parallel.strategy, fsdp.sharding_strategy) == ("fsdp", "FULL_SHARD")
    assert (fsdp.backward_prefetch, fsdp.forward_prefetch) == ("BACKWARD_PRE", True)
    assert (fsdp.mixed_precision.param_dtype, fsdp.mixed_precision.reduce_dtype) == ("bf16", "fp32")
    assert (config.memory.activation_checkpointing.mode, config.memory.activation_checkpointing.every) == ("full", 1)


def test_the_large_recipe_by_deepspeed() -> None:
    config = load([resolve_recipe("llama2-wikitext-zero3").path], environ={}).config
    zero = config.parallel.deepspeed
    assert (config.parallel.strategy, zero.zero_stage, zero.pin_memory) == ("deepspeed", 3, True)
    assert (zero.offload_optimizer, zero.offload_param) == ("cpu", "cpu")
    assert (config.batch.global_size, config.batch.micro_size, config.schedule.warmup_ratio) == (128, 1, 0.1)
    assert (config.monitor.every, str(config.evaluation.every), str(config.checkpoint.every)) == (
        100, "500 steps", "500 steps",
    )  # fmt: skip
    assert (config.checkpoint.keep_last, config.checkpoint.best) == (3, "validation.loss")
    assert (config.run.epochs, config.run.end_with) == (1, "best")


def test_an_overlay_has_a_name_and_is_not_a_recipe() -> None:
    names = [overlay.name for overlay in overlays()]
    assert names == [
        "tiny/bert", "tiny/chat", "tiny/distill", "tiny/dpo", "tiny/kto", "tiny/llama2", "tiny/token-classification",
        "tiny/vit",
    ]  # fmt: skip
    assert not {recipe.name for recipe in recipes()} & set(names)
    resolved = resolve_all(["llama2-wikitext", "tiny/llama2"])
    config = load([recipe.path for recipe in resolved], environ={}).config
    assert (resolved[0].name, config.model.kind, config.run.steps, config.batch.global_size) == (
        "llama2-wikitext", "huggingface", 4, 128,
    )  # fmt: skip


def test_a_recipe_and_files_over_it(tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("run: {seed: 3}\n")
    resolved = resolve_all(["digits", str(more)])
    assert resolved[0].name == "digits"
    assert load([recipe.path for recipe in resolved], environ={}).config.run.seed == 3
    assert resolve_all([])[0].name == DEFAULT_RECIPE
    assert resolve_recipe(str(more)).name == "more"


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"run\.yaml is not a file"):
        resolve_recipe(str(tmp_path / "run.yaml"))
    with pytest.raises(ConfigError, match="can't be read: "):
        read_foreign(tmp_path / "run.yaml", None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit", "'digit' is neither a recipe nor a file nor a run's folder; did you mean digits?"),
        (
            "xyz",
            "'xyz' is neither a recipe nor a file nor a run's folder; "
            "the recipes are stdlib-lm, bert-imdb, chat, chat-full-bf16, chat-lora, chat-qlora, digits, distill, dpo, "
            "image-classification, kto, llama2-lora-wikitext, llama2-wikitext, llama2-wikitext-zero3, stdlib-classify, "
            "token-classification",
        ),
        ("tiny/lama", "'tiny/lama' is neither a recipe nor a file nor a run's folder; did you mean tiny/llama2?"),
        ("recipes/digitz.yaml", "there is no file recipes/digitz.yaml; did you mean recipes/digits.yaml?"),
    ],
)
def test_an_unknown_name_is_refused_with_a_hint(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(name)
    assert str(caught.value) == message

"""A model that is divided before it has values begins with the very values of the single process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.layouts import VARIANTS
from kit.runs import Arrays
from kit.worlds import in_world
from training.test_families import config
from training.test_same_run import config as ours

import lockstep
from lockstep.loop.session import components_of

DIVIDED = {
    "fsdp": 2,
    "pipeline-1f1b": 2,
    "pipeline-zbv": 2,
    "tensor": 2,
    "pipeline-1f1b+fsdp": 4,
    "tensor+fsdp": 4,
    "pipeline-1f1b+tensor": 4,
}
"""Variants, and the ranks they are tried on."""
OURS = {"kind": "transformer", "layers": 4, "width": 24, "heads": 2, "vocabulary": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Sections `model` and `data` (for Lockstep's models: all others, too), by where the values come from."""
    place = tmp_path_factory.mktemp("weights")
    torch.save({f"module.{name}": value for name, value in _other_values(ours(6, model=OURS)).items()}, place / "a.pt")
    tied = ours(6, model={**OURS, "tie_embeddings": True})
    partial = {**OURS, "init_from": str(_without(_other_values(ours(6, model=OURS)), "blocks.3", place / "b.pt"))}
    _save_pretrained(place / "llama")
    return {
        "drawn, untied": ours(6, model={**OURS, "tie_embeddings": False}),
        "drawn, tied": tied,
        "from a file": ours(6, model={**OURS, "init_from": str(place / "a.pt")}),
        "from a part of a file": ours(6, model={**partial, "init_partial": True}),
        "a Llama, drawn": _four_blocks("llama"),
        "a Qwen, drawn, tied": _four_blocks("qwen"),
        "a Llama, pretrained": _pretrained(place / "llama"),
        "a Llama, drawn and from a file": _from_file(place / "llama"),
    }


def _four_blocks(name: str) -> dict[str, Any]:
    """Zero-bubble's V has two stages a rank."""
    asked = config(name)
    asked["model"] = {
        **asked["model"],
        "architecture": {
            **asked["model"]["architecture"],
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
    }
    return asked


def _pretrained(place: Path) -> dict[str, Any]:
    asked = _four_blocks("llama")
    asked["model"] = {"kind": "huggingface", "task": "causal-lm", "pretrained": str(place)}
    return asked


def _from_file(place: Path) -> dict[str, Any]:
    asked = _four_blocks("llama")
    asked["model"] = {**asked["model"], "init_from": str(place)}
    return asked


def _save_pretrained(place: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    architecture = _four_blocks("llama")["model"]["architecture"]
    LlamaForCausalLM(LlamaConfig(**{**architecture, "vocab_size": 64})).save_pretrained(place)


def _other_values(asked: dict[str, Any]) -> dict[str, torch.Tensor]:
    """None of which a seed would draw."""
    values = first_weights([asked])[0]
    return {name: torch.from_numpy(value) + 0.5 for name, value in values.items()}


def _without(values: dict[str, torch.Tensor], block: str, place: Path) -> Path:
    torch.save({name: value for name, value in values.items() if not name.startswith(block)}, place)
    return place


@pytest.fixture(scope="module")
def alone(models: dict[str, dict[str, Any]]) -> list[Arrays]:
    return first_weights([{**asked, "parallel": {"strategy": "single"}} for asked in models.values()])


def _rows() -> Iterator[Any]:
    """Of products, half of the models, not the same half of each: what they multiply has all; the drill the others."""
    for number, variant in enumerate(DIVIDED):
        if "+" in variant:
            yield pytest.param(variant, slice(number % 2, None, 2), id=f"half of {variant}")
        yield pytest.param(variant, slice(None), id=variant, marks=pytest.mark.drill if "+" in variant else ())


@pytest.mark.parametrize(("variant", "part"), list(_rows()))
def test_first_weights_are_the_single_process(
    variant: str, part: slice, models: dict[str, dict[str, Any]], alone: list[Arrays]
) -> None:
    names = list(models)[part]
    divided = [{**models[name], "parallel": dict(VARIANTS[variant])} for name in names]
    for of_rank in in_world(DIVIDED[variant], first_weights, divided):
        for name, found, expected in zip(names, of_rank, alone[part], strict=True):
            assert found.keys() == expected.keys(), name
            off = [key for key in expected if not np.array_equal(found[key], expected[key])]
            assert off == [], f"{name}: other values of {off}"


def first_weights(configs: list[dict[str, Any]]) -> list[Arrays]:
    """That a run begins with, one after the other."""
    return [_first_weights(asked) for asked in configs]


def _first_weights(asked: dict[str, Any]) -> Arrays:
    with lockstep.session(asked) as session:
        return {name: value.clone().numpy() for name, value in components_of(session).sharding.state.weights()}


def test_parts_may_be_uneven() -> None:
    """Widths that three ranks don't divide."""
    model = {**OURS, "width": 20, "tie_embeddings": False}
    asked = [ours(6, model=model, parallel={"strategy": strategy}) for strategy in ("single", "fsdp")]
    alone = first_weights(asked[:1])[0]
    for (found,) in in_world(3, first_weights, asked[1:]):
        assert found.keys() == alone.keys()
        assert all(np.array_equal(found[name], alone[name]) for name in found)


# --- memory -------------------------------------------------------------------------------------------------------

LARGE = {"kind": "transformer", "layers": 6, "width": 512, "heads": 4, "vocabulary": 512}


@pytest.mark.parametrize(
    ("variant", "ranks", "held"), [("fsdp", 4, 0.25), ("pipeline-1f1b", 3, 0.35), ("tensor", 2, 0.51)]
)
def test_no_rank_ever_holds_the_whole_model(variant: str, ranks: int, held: float) -> None:
    """Peak of each rank's memory while the model is made: what it keeps, and a block at a time."""
    asked = ours(4, model=LARGE, optim={"name": "sgd", "momentum": 0.0}, parallel=dict(VARIANTS[variant]))
    for whole, peak in in_world(ranks, _peak_of_making, asked):
        assert whole > 75e6
        assert peak < (held + 0.45) * whole, f"{peak / whole:.2f} of the model"


def _peak_of_making(asked: dict[str, Any]) -> tuple[int, int]:
    small = {**asked["model"], "width": 24, "heads": 2}
    with lockstep.session({**asked, "model": small}):  # what is imported and kept for good
        pass
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    with lockstep.session(asked) as session:
        return components_of(session).plan.parameters * 4, _resident("VmHWM") - before


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024

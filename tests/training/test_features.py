"""Every cell of the table strategy x feature holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache, partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.layouts import DRILLED, HYBRID, LAYOUTS, VARIANTS, asking_for, is_partitioned
from kit.runs import Trajectory, differences, record_all, recorded, recorded_all
from kit.worlds import in_world
from training.test_same_run import config

from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.plan.features import FEATURES, cell
from lockstep.plan.plan import make_plan
from lockstep.strategies.record import PACKAGED

SEEN_ELSEWHERE = {
    "export": "test_checkpoint_pairs exports what each strategy has saved",
    "compile": "below, on a smaller model",
}
ASKS: dict[str, dict[str, Any]] = {
    "accumulation": {"batch": {"global_size": 12, "micro_size": 2}},
    "uneven batches": {"batch": {"global_size": 13, "micro_size": 3}},
    "bf16": {"precision": {"compute": "bf16"}},
    "fp16": {"precision": {"compute": "fp16"}},
    "bf16 parameters": {"precision": {"parameters": "bf16"}, "optim": {"name": "adamw", "lr": 1e-3}},
    "activation checkpointing": {"memory": {"activation_checkpointing": {"mode": "full"}}},
    "selective checkpointing": {"memory": {"activation_checkpointing": {"mode": "selective"}}},
    "activation offload": {"memory": {"activation_offload": "cpu"}},
    "chunked loss": {"memory": {"loss_chunk": 17}},
    "frozen parameters": {"model": {**config(12)["model"], "freeze": ["embedding.*", "*.query.*"]}},
    "averaged weights": {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "ema": {"decay": 0.5}}},
    "adapters": {"model": {**config(12)["model"], "adapter": {"kind": "lora", "rank": 4}}},
    "companion": {  # not evaluated: the divergence of almost equal models is what rounding leaves
        "objective": {"kind": "distill", "companion": "initial"},
        "data": {"train": config(12)["data"]["train"]},
    },
    **{
        f"{kind} base": {
            "model": {
                **config(12)["model"],
                "width": 64,
                "adapter": {"kind": "lora", "rank": 4},
                "quantization": {"kind": kind},
            }
        }
        for kind in ("nf4", "int8")
    },
    "loss parallel": {"loss": True},
    "offload": {"offload": True},
}
UPDATES = 2
SGD = {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}  # it doesn't blow noise up
TOLERANCE = {
    "bf16": 2e-3,
    "bf16 parameters": 2e-3,
    "fp16": 2e-4,
    "int8 base": 1e-4,
    "muon": 1e-4,
    "adamw-8bit": 1e-3,
}  # of the loss, where products round
# they don't go with accumulation or a chunked loss, or make another model of it
ALONE = {*TOLERANCE, "companion", "nf4 base"}
OPTIMIZERS = 1e-5  # of the loss: most divide a gradient by its size, noise too


def asked(variant: str, feature: str, ranks: int) -> dict[str, Any]:
    """`feature`: by name; or an empty one, for nothing but the strategy."""
    sections: dict[str, Any] = deepcopy({**SGD, **ASKS.get(feature, {})})
    if feature and feature not in ASKS:
        sections = {"optim": {"name": feature, "lr": 1e-3}}
    parallel = asking_for(variant, ranks)
    if feature == "companion" and "tensor" in parallel:  # its loss takes whole logits
        parallel = {**parallel, "tensor_parallel": {**parallel["tensor_parallel"], "loss_parallel": False}}
    if sections.pop("loss", False):
        parallel = {**parallel, "tensor_parallel": {**parallel.get("tensor_parallel", {}), "loss_parallel": True}}
    if sections.pop("offload", False) and parallel["strategy"] == "deepspeed":
        parallel = {**parallel, "deepspeed": {**parallel["deepspeed"], "offload_optimizer": "cpu"}}
    elif feature == "offload":
        parallel = {**parallel, "fsdp": {**parallel.get("fsdp", {}), "cpu_offload": True}}
    found = config(12, parallel=parallel, **sections)
    return {**found, "model": {**found["model"], "layers": _layers(variant, feature)}}


def _layers(variant: str, feature: str) -> int:
    """As few as there can be: one to a stage, and what is computed again must be repeated."""
    if variant in ("pipeline-interleaved-1f1b", "pipeline-zero-bubble", "pipeline-zbv"):
        return 4
    return 2 if "pipeline" in variant or "checkpoint" in feature else 1


def _ranks(variant: str) -> int:
    return 1 if variant in ("single", "dp") else 4 if variant in HYBRID or "+" in variant else 2


OPTIMIZED_AS = {
    "fsdp-grad-op": "fsdp",
    "fsdp-hybrid-grad-op": "fsdp-hybrid",
    "zero0": "ddp",
    "zero2": "zero1",
    **{f"pipeline-{schedule}": "pipeline-1f1b" for schedule in ("gpipe", "interleaved-1f1b", "zero-bubble", "zbv")},
    "tensor-sequence": "tensor",
    "context": "ddp",
    "context+fsdp": "fsdp",
    "pipeline-1f1b+fsdp": "fsdp",
    "tensor+fsdp": "tensor",
    "pipeline-1f1b+tensor": "tensor",
}
"""Strategies that hand their optimizer the same parameters and gradients as another one does: only in what they do
before do they differ."""
RULES = {feature.name for feature in FEATURES if feature.key == "optim.name"}


def variants(standing: str) -> list[tuple[str, list[str]]]:
    """Features that stand so, by strategy."""
    names = [feature.name for feature in FEATURES if feature.name not in SEEN_ELSEWHERE]
    found = []
    for variant in VARIANTS:
        features = [name for name in names if cell(LAYOUTS[variant], name).standing == standing]
        if standing == "cpu" and variant in OPTIMIZED_AS:
            features = [name for name in features if name not in RULES]
        if features:
            found.append((variant, features))
    return found


def test_the_single_process_is_the_oracle_of_all_that_it_does() -> None:
    """So a run of it beside itself would show nothing."""
    seen = {name for variant, features in BESIDE_IT for name in features}
    assert set(dict(variants("cpu"))["single"]) <= seen


def test_strategies_with_one_optimizer_go_with_the_same_rules() -> None:
    for variant, other in OPTIMIZED_AS.items():
        same = RULES - set(PACKAGED) if variant == "zero0" else RULES  # DeepSpeed takes none of other packages
        assert all(cell(LAYOUTS[variant], rule).standing == cell(LAYOUTS[other], rule).standing for rule in same), (
            variant
        )


Config = dict[str, Any]


def combined(variant: str, features: Sequence[str], ranks: int) -> Config | None:
    """A run that asks for all of them; None: two of them ask for the same key, or one is compared otherwise."""
    if len(features) == 1:
        return asked(variant, features[0], ranks)
    if any(name not in ASKS or name in ALONE for name in features):
        return None
    found = asked(variant, "", ranks)
    for name in features:
        for key, value in _leaves(asked(variant, name, ranks)).items():
            if value == _leaves(asked(variant, "", ranks)).get(key):
                continue
            if _leaves(found).get(key) not in (value, _leaves(asked(variant, "", ranks)).get(key)):
                return None
            _put(found, key, value)
    return found


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: value for name, branch in tree.items() for key, value in _leaves(branch, (*path, name)).items()}


def _put(tree: Any, path: tuple[str, ...], value: Any) -> None:
    *branches, leaf = path
    for name in branches:
        tree = tree.setdefault(name, {})
    tree[leaf] = value


def rounds(variant: str, features: Sequence[str]) -> list[list[str]]:
    """Pack them into as few runs as possible."""
    found: list[list[str]] = []
    for name in features:
        fits = (one for one in found if combined(variant, [*one, name], _ranks(variant)) is not None)
        one = next(fits, None)
        if one is None:
            found.append([name])
        else:
            one.append(name)
    return found


@cache
def oracle(features: tuple[str, ...], layers: int) -> Trajectory:
    single = combined("single", features, 1)
    assert single is not None
    return recorded({**single, "model": {**single["model"], "layers": layers}}, updates=UPDATES)


BESIDE_IT = [(variant, features) for variant, features in variants("cpu") if variant != "single"]
MIXED = {"dp", "fsdp-hybrid", "zero1", "pipeline-zbv", "context"}
"""Of what ddp, fsdp, zero3 and pipeline-1f1b do, and those are asked for every feature."""
HALVED = [variant for variant, _ in BESIDE_IT if ("+" in variant or variant in MIXED) and variant not in DRILLED]
WHOLE = slice(None)


def _rows() -> Iterator[Any]:
    """Of products and of MIXED, half of the runs, not the same half of each: alone, what they consist of is in all; the
    drill has the others."""
    for variant, features in BESIDE_IT:
        if variant in HALVED:
            half = slice(HALVED.index(variant) % 2, None, 2)
            yield pytest.param(variant, features, half, id=f"half of {variant}")
        is_drilled = variant in DRILLED or variant in HALVED
        yield pytest.param(variant, features, WHOLE, id=variant, marks=pytest.mark.drill if is_drilled else ())


@pytest.mark.parametrize(("variant", "features", "part"), list(_rows()))
def test_what_is_tested_is_the_single_process(variant: str, features: list[str], part: slice) -> None:
    ranks = _ranks(variant)
    together = rounds(variant, features)[part]
    configs = [combined(variant, names, ranks) or {} for names in together]
    runs = recorded_all(configs, ranks, updates=UPDATES)
    for names, run_config, run in zip(together, configs, runs, strict=True):
        expected, first = oracle(tuple(names), run_config["model"]["layers"]), names[0]
        if first in ASKS and first not in TOLERANCE:
            assert differences(run, expected) == [], names
        else:
            assert run.losses == pytest.approx(expected.losses, rel=TOLERANCE.get(first, OPTIMIZERS)), names
            for key, value in expected.weights.items():
                off = np.sqrt(np.mean((run.weights[key] - value) ** 2))  # lion goes by signs, and some are noise's
                most = 0.1 * UPDATES * 1e-3 if first != "bf16 parameters" else 1e-3  # whose next number is 4e-3 away
                assert off <= most, f"{names} {key}"


def test_features_share_runs_and_none_is_left_out() -> None:
    features = dict(variants("cpu"))["fsdp"]
    together = rounds("fsdp", features)
    assert sorted(name for names in together for name in names) == sorted(features)
    shared = [
        "accumulation",
        "activation checkpointing",
        "chunked loss",
        "frozen parameters",
        "averaged weights",
        "adapters",
    ]
    assert shared in together
    for names in together:
        found, plain = _leaves(combined("fsdp", names, 2)), _leaves(asked("fsdp", "", 2))
        for name in names:
            for key, value in _leaves(asked("fsdp", name, 2)).items():
                assert found[key] == value or plain.get(key) == value, (name, key)


@pytest.mark.parametrize("standing", ["refused", "untested"])
def test_what_is_not_tested_says_so(standing: str) -> None:
    """Known before any process exists."""
    for variant, features in variants(standing):
        for name in features:
            wanted = validate(asked(variant, name, _ranks(variant))).config
            with pytest.raises(ConfigError) as refusal:
                make_plan(wanted, _ranks(variant), DataFacts(40, None), [ParameterFacts("weight", (8, 8), 4, True)])
            said = str(refusal.value)
            assert cell(LAYOUTS[variant], name).why in said, (variant, name)
            if standing == "untested":
                assert said.endswith("--allow-untested tries it")


@pytest.mark.parametrize(
    ("ranks", "names", "backend"),
    [
        (2, ("ddp", "fsdp"), "aot_eager"),
        *(pytest.param(ranks, VARIANTS, "inductor", marks=pytest.mark.drill) for ranks in (1, 2, 4)),
    ],
    ids=["2 of a kind", "1", "2", "4"],
)
def test_a_compiled_model_is_the_single_process(ranks: int, names: Sequence[str], backend: str) -> None:
    """In the drill with the default backend, which calls a C++ compiler for 20 seconds."""
    names = [
        name
        for name in names
        if cell(LAYOUTS[name], "compile").standing == "cpu" and _ranks(name) == ranks and not is_partitioned(name)
    ]
    compiled = {"kind": "custom", "target": "kit.small:Net", "compile": True}
    configs = [{**small.config(parallel=asking_for(name, ranks)), "model": compiled} for name in names]
    for runs, traced in in_world(ranks, _compiled, configs, backend):
        assert not traced, "messages between ranks are part of a compiled model"
        for name, run in zip(names, runs, strict=True):
            assert differences(run, recorded(small.config(), updates=2)) == [], name


def _compiled(configs: list[dict[str, Any]], backend: str) -> tuple[list[Trajectory], bool]:
    """Return the runs, and whether the compiler has seen the communication of fsdp's ranks."""
    from lockstep.sharding.collective_order import NumberExchange

    plain, seen = NumberExchange.exchange, []

    def exchange(ranks: Any, number: int) -> list[int]:
        seen.append(torch.compiler.is_compiling())
        return plain(ranks, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumberExchange, "exchange", exchange)
        patch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=backend))
        return record_all(configs, updates=2), any(seen)


def test_every_feature_is_asked_for_here() -> None:
    for feature in FEATURES:
        assert feature.name in ASKS or feature.name in SEEN_ELSEWHERE or feature.key == "optim.name", feature.name

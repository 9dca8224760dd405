"""A companion makes the same run under every strategy, is sharded, counted, named by checkpoints, and not saved."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.commands import run_script
from kit.failures import fails
from kit.layouts import asking_for
from kit.runs import Trajectory, differences, recorded, recorded_all
from kit.worlds import in_world
from torch.nn import functional as F

import lockstep
from lockstep.assembly.companion import companion_facts
from lockstep.checkpoint.local import LocalStorage
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.core.records import Batch, DataFacts, ParameterFacts
from lockstep.engine.companion import Companion
from lockstep.loop.session import components_of
from lockstep.plan.plan import make_plan
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume

ROOT = Path(__file__).parents[2]
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
Config = dict[str, Any]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with preferences and a tokenizer."""
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("preferences")
    assert run_script(ROOT / "examples" / "chat_data.py", cwd=folder).returncode == 0
    rows = [json.loads(line) for line in (folder / "chat" / "preferences.jsonl").read_text().splitlines()]
    texts = [{name: parts[0]["content"] for name, parts in row.items()} for row in rows]
    whole = [
        {name: [*row["prompt"], *row[name]] for name in ("chosen", "rejected")} for row in rows
    ]  # with the prompt in both
    rated = [
        {"prompt": row["prompt"], "completion": row["chosen" if number % 3 else "rejected"], "label": number % 3 > 0}
        for number, row in enumerate(rows)
    ]
    plain = [
        {"prompt": row["prompt"][0]["content"], "completion": row["completion"][0]["content"], "label": row["label"]}
        for row in rated
    ]
    said = [{"messages": row["prompt"] + row["completion"], "label": int(row["label"])} for row in rated]
    files = {"texts": texts, "whole": whole, "rated": rated, "rated_texts": plain, "rated_chats": said}
    for name, lines in files.items():
        (folder / "chat" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "chat"


def config(chat: Path, kind: str, **sections: Any) -> Config:
    """Pairs of conversations, in fp32."""
    data = {"kind": "huggingface", "tokenizer": str(chat / "tokenizer"), "max_length": 96}
    columns: Config = {
        "name": str(chat / "preferences.jsonl"),
        "messages": "prompt",
        "label": "chosen",
        "rejected": "rejected",
    }
    if kind == "kto":
        columns = {**columns, "name": str(chat / "rated.jsonl"), "label": "completion", "rejected": None}
        columns["desirable"] = "label"
    model = {"kind": "huggingface", "task": "causal-lm", "architecture": LLAMA}
    if kind == "reward":
        model = {**model, "task": "sequence-classification", "architecture": {**LLAMA, "pad_token_id": 0}}
    asked = {
        "model": model,
        "objective": {"kind": kind},
        "data": {
            "train": {**data, **columns, "split": "train[:21]"},
            "evaluation": {"test": {**data, **columns, "split": "train[21:26]"}},
        },
        "batch": {"global_size": 7},
        "optim": {"name": "sgd", "lr": 0.5, "momentum": 0.9},
        "precision": {"compute": "fp32"},
        "run": {"steps": 3},
    }
    return {**asked, **sections}


def alone(kind: str, chat: Path) -> Trajectory:
    return recorded(config(chat, kind), updates=3)


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_the_first_loss_is_the_one_of_two_equal_models(kind: str, chat: Path) -> None:
    run = alone(kind, chat)
    assert run.losses[0] == pytest.approx({"dpo": np.log(2), "ipo": 25.0}[kind], rel=1e-6)
    assert run.losses[1:] != [run.losses[0]] * 2
    assert run.counts == [7.0] * 3
    assert {"loss", "accuracy", "margin", "rewards_chosen", "rewards_rejected"} == set(run.evaluations[0])
    rewards = run.evaluations[0]
    assert rewards["margin"] == pytest.approx(rewards["rewards_chosen"] - rewards["rewards_rejected"], abs=1e-6)


KINDS = ("dpo", "kto", "ipo", "orpo", "simpo", "reward")
REFERENCED = ("dpo", "kto", "ipo")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3", "zero2", "tensor", "pipeline-1f1b"])
def test_pairs_are_the_same_run(strategy: str, chat: Path) -> None:
    parallel, partitioned = asking_for(strategy, 2), strategy in ("tensor", "pipeline-1f1b")
    kinds = [kind for kind in KINDS if kind not in REFERENCED or not strategy.startswith("pipeline")]
    kinds = kinds if strategy in ("fsdp", "pipeline-1f1b") else kinds[:2]
    batch = {
        "global_size": 7,
        "micro_size": 3 if partitioned else 2,
    }  # three or four micro-batches, one of them padding
    configs = [config(chat, kind, parallel=parallel, batch=batch) for kind in kinds]
    for kind, run in zip(kinds, recorded_all(configs, ranks=2, updates=3), strict=True):
        expected = alone(kind, chat)
        for name, value in expected.evaluations[0].items():  # margins are small differences of large numbers
            assert run.evaluations[0][name] == pytest.approx(value, rel=1e-5, abs=1e-5), (kind, name)
        assert differences(replace(run, evaluations=expected.evaluations), expected) == [], kind


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_pipeline_refuses_a_companion(kind: str, chat: Path) -> None:
    asked = validate(config(chat, kind, parallel={"pipeline": 2})).config
    with fails(lockstep.ConfigError, "pipeline-1f1b", key="objective.companion"):
        make_plan(asked, 2, DataFacts(40, None), [ParameterFacts("weight", (8, 8), 4, True)])


def test_the_three_forms_of_pairs_are_the_same_data(chat: Path) -> None:
    """Messages with a prompt, whole conversations, and texts with the template's marks as their prompts."""
    train = config(chat, "dpo")["data"]["train"]
    whole = {**train, "name": str(chat / "whole.jsonl"), "messages": "chosen", "label": None}
    runs = [recorded(config(chat, "simpo", data={"train": data}), updates=1) for data in (train, whole)]
    assert runs[0].losses == runs[1].losses
    texts = {key: value for key, value in train.items() if key != "messages"}
    texts |= {"name": str(chat / "texts.jsonl"), "text": "prompt"}
    run = recorded(config(chat, "dpo", data={"train": texts}), updates=1)
    assert run.counts == [7.0]
    assert run.losses[0] == pytest.approx(np.log(2), rel=1e-6)


def test_kl_is_of_the_whole_update_and_the_first_loss_is_known(chat: Path) -> None:
    """A micro-batch of one sample has the same kl; desirable and undesirable answers have their weights."""
    weighted = {"kind": "kto", "undesirable_weight": 1.5, "beta": 0.5}
    runs = [
        recorded(config(chat, "kto", objective=weighted, batch={"global_size": 7, "micro_size": size}), updates=3)
        for size in (7, 1)
    ]
    assert differences(runs[1], runs[0]) == []
    good = [row["label"] for row in map(json.loads, (chat / "rated.jsonl").read_text().splitlines()[:21])]
    assert sum(runs[0].losses) < 3 * 1.5
    assert 0.5 <= runs[0].losses[0] <= 0.75  # all log-ratios are 0, and so is kl
    assert not all(good)
    assert {"loss", "margin", "rewards_chosen", "rewards_rejected", "kl"} == set(runs[0].evaluations[0])
    assert runs[0].evaluations[0]["kl"] >= 0


def test_the_three_forms_of_rated_answers_are_the_same_data(chat: Path) -> None:
    train = config(chat, "kto")["data"]["train"]
    said = {**train, "name": str(chat / "rated_chats.jsonl"), "messages": "messages", "label": None}
    runs = [recorded(config(chat, "kto", data={"train": data}), updates=2) for data in (train, said)]
    assert runs[0].losses == runs[1].losses
    texts = {key: value for key, value in train.items() if key != "messages"}
    texts |= {"name": str(chat / "rated_texts.jsonl"), "text": "prompt", "max_length": 20}  # some are cut
    assert recorded(config(chat, "kto", data={"train": texts}), updates=1).counts == [7.0]


def test_a_rating_is_true_or_false(chat: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False, "good")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    data = {**config(chat, "kto")["data"]["train"], "name": str(tmp_path / "rows.jsonl"), "split": "train"}
    with (
        fails(lockstep.ConfigError, "row 1", "good", "label"),
        lockstep.session(config(chat, "kto", data={"train": data})),
    ):
        pass


# --- the base of an adapter -------------------------------------------------------------------------------------------

LORA = {"kind": "lora", "rank": 4, "targets": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}


def adapted(chat: Path, kind: str, adapter: Config, **sections: Any) -> Config:
    asked = config(chat, kind, **sections)
    return {**asked, "model": {**asked["model"], "adapter": adapter}}


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_the_reference_of_an_adapter_is_its_base(kind: str, chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are those of a copy of the model as the run begins, and there is none."""
    asked = adapted(chat, kind, {**LORA, "dropout": 0.1})
    with lockstep.session(asked) as session:
        engine: Any = components_of(session).engine
        prepare = engine._ahead._companion if kind == "kto" else engine._prepare
        assert prepare._model is components_of(session).sharding.state.model
    run = recorded(asked, updates=3)
    assert len(set(run.losses)) == 3
    monkeypatch.setattr("lockstep.assembly.companion.is_base", lambda config: False)
    copied = recorded(asked, updates=3)
    assert run.losses == copied.losses
    assert run.evaluations == copied.evaluations


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_a_reference_without_the_adapter_is_the_same_run(strategy: str, chat: Path) -> None:
    batch = {"global_size": 7, "micro_size": 2}
    kinds: list[tuple[str, Config]] = [
        ("dpo", LORA),
        ("kto", LORA),
        ("dpo", {"kind": "ia3", "targets": ["q_proj"], "feedforward_modules": []}),
    ]
    runs = [adapted(chat, *each, parallel=asking_for(strategy, 2), batch=batch) for each in kinds]
    for each, run in zip(kinds, recorded_all(runs, ranks=2, updates=3), strict=True):
        expected = recorded(adapted(chat, *each), updates=3)
        for name, value in expected.evaluations[0].items():
            assert run.evaluations[0][name] == pytest.approx(value, rel=1e-5, abs=1e-5), (each, name)
        assert differences(replace(run, evaluations=expected.evaluations), expected) == [], each


@pytest.mark.parametrize(
    ("adapter", "companion", "held"),
    [(LORA, None, False), ({**LORA, "bias": "all"}, None, True), (LORA, "teacher", True)],
)
def test_plan_counts_no_copy_of_a_base(
    adapter: Config, companion: str | None, held: bool, chat: Path, tmp_path: Path
) -> None:
    teacher(tmp_path / "teacher", seed=1)
    objective = {"kind": "dpo", "companion": companion and str(tmp_path / companion)}
    asked = validate(adapted(chat, "dpo", adapter, objective=objective)).config
    own = [ParameterFacts("weight", (8, 8), 4, False)]
    assert bool(companion_facts(asked, DataFacts(40, None, vocabulary=1024), own, trust_remote_code=False)) is held


# --- computed before training -----------------------------------------------------------------------------------------


def once(kind: str, **more: Any) -> Config:
    return {"kind": kind, "precompute": True, **more}


@pytest.mark.parametrize("kind", REFERENCED)
def test_a_reference_computed_once_is_the_same_run(kind: str, chat: Path) -> None:
    batch = {"global_size": 7, "micro_size": 2}
    kept = {**config(chat, kind)["data"], "leave_out": [[3, 4]], "bad_samples": {"policy": "skip"}}
    for sections in ({}, {"data": kept}):
        expected = recorded(config(chat, kind, batch=batch, **sections), updates=4)
        asked = config(chat, kind, objective=once(kind), batch=batch, **sections)
        run = recorded(asked, updates=4)
        assert run.losses == pytest.approx(expected.losses, rel=1e-6)
        assert run.evaluations[0] == pytest.approx(expected.evaluations[0], rel=1e-5, abs=1e-6)
        with lockstep.session(asked) as session:
            assert components_of(session).engine._prepare is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3", "tensor"])
def test_a_reference_computed_once_is_the_same_under_each_strategy(strategy: str, chat: Path) -> None:
    batch = {"global_size": 7, "micro_size": 3}
    asked = [
        make(chat, kind, *more, parallel=asking_for(strategy, 2), batch=batch, objective=once(kind))
        for make, kind, *more in ((config, "dpo"), (config, "kto"), (adapted, "dpo", LORA))
        if make is config or strategy != "tensor"
    ]
    expected = [alone("dpo", chat), alone("kto", chat), recorded(adapted(chat, "dpo", LORA), updates=3)]
    for run, alike in zip(recorded_all(asked, ranks=2, updates=3), expected, strict=False):
        for name, value in alike.evaluations[0].items():
            assert run.evaluations[0][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        assert differences(replace(run, evaluations=alike.evaluations), alike) == []


def test_a_resumed_run_reads_what_was_computed(chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.assembly import companion

    teacher(tmp_path / "teacher", seed=1)
    constant = {"kind": "constant"}
    asked = config(chat, "dpo", objective=once("dpo", companion=str(tmp_path / "teacher")), schedule=constant)
    computed: list[int] = []
    original = companion._computed

    def counting(source: Any, *rest: Any) -> torch.Tensor:
        computed.append(source.facts.samples)
        return original(source, *rest)

    monkeypatch.setattr(companion, "_computed", counting)
    losses = []
    for steps in (2, 4):
        run = {"steps": steps, "folder": str(tmp_path / "run")}
        lockstep.train({**asked, "run": run, "launch": {"device": "cpu"}, "monitor": {"every": 1}})
        losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(computed) == [5, 21]  # the evaluation set and the training data, in the first run
    plain = {**asked, "objective": {**asked["objective"], "precompute": False}, "run": {"steps": 4}}
    assert losses == pytest.approx(recorded(plain, updates=4).losses, rel=1e-6)


def test_only_a_run_writes_what_was_computed(chat: Path, tmp_path: Path) -> None:
    asked = config(chat, "dpo", objective=once("dpo"), run={"steps": 1, "folder": str(tmp_path / "moved")})
    with lockstep.session(asked) as session:
        session.evaluate()
    assert not list(tmp_path.rglob("reference*"))


def test_a_reference_that_is_computed_once_has_no_parameters_to_plan_for(chat: Path) -> None:
    own, facts = [ParameterFacts("weight", (64, 64), 4, True)], DataFacts(40, None, vocabulary=1024, pairs=True)
    for objective, has in ((once("dpo"), False), ({"kind": "dpo"}, True)):
        asked = validate(config(chat, "dpo", objective=objective)).config
        assert bool(companion_facts(asked, facts, own, trust_remote_code=False)) is has


def test_numbers_of_samples_that_may_differ_in_each_epoch_are_refused() -> None:
    asked = {**small.config(), "objective": once("dpo")}
    asked["data"] = {"train": {"kind": "custom", "target": "kit.small:Rows"}}
    with fails(ConfigError, "epoch", key="objective.precompute"), lockstep.session(asked):
        pass


# --- where it is ------------------------------------------------------------------------------------------------------


def bytes_held(asked: Config) -> dict[str, int]:
    """Bytes of the companion's parameters on this rank, and whether its first block is whole during its forward."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        with lockstep.session(asked) as session:
            engine: Any = components_of(session).engine
            model = engine._prepare._model
            first, last = model.model.layers
            whole = [False]
            last.register_forward_hook(
                lambda *unused: whole.append(not all(hasattr(each, "_local_tensor") for each in first.parameters()))
            )
            for report in session:
                if report.step == 2:
                    break
            held = [getattr(each, "_local_tensor", each) for each in model.parameters()]
            saved = [name for name in session.state().tensors if "companion" in name]
            trained = sum(each.requires_grad for each in model.parameters())
            bytes_of_rank = sum(each.nbytes for each in held)
            return {"bytes": bytes_of_rank, "saved": len(saved), "trained": trained, "whole": any(whole)}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("strategy", "part"), [("ddp", 1.0), ("fsdp", 0.5), ("fsdp-grad-op", 0.5), ("zero3", 0.5)])
def test_it_is_sharded_as_parameters_are(strategy: str, part: float, chat: Path) -> None:
    whole = in_world(1, bytes_held, config(chat, "dpo"))[0]["bytes"]
    for rank in in_world(2, bytes_held, config(chat, "dpo", parallel=asking_for(strategy, 2))):
        assert rank["bytes"] == pytest.approx(part * whole, rel=0.01)
        assert (rank["saved"], rank["trained"]) == (0, 0)
        assert rank["whole"] is (part == 1.0)  # a block is, when the next one is computed


def test_plan_counts_it() -> None:
    asked = {**small.config(), "objective": {"kind": "custom", "target": "x:Y"}, "parallel": {"strategy": "fsdp"}}
    own = [ParameterFacts("weight", (64, 64), 4, True)]
    second = [ParameterFacts("weight", (64, 64), 4, False)]
    single = make_plan(validate(asked).config, 2, DataFacts(40, None), own)
    both = make_plan(validate(asked).config, 2, DataFacts(40, None), own, companion=second)
    rows = {row.strategy: row for row in single.placements}
    for row in both.placements:
        before = rows[row.strategy]
        assert (row.gradients, row.optimizer) == (before.gradients, before.optimizer)
        assert row.parameters > before.parameters
    assert both.placement.parameters == 2 * single.placement.parameters
    assert (both.parameters, both.frozen) == (single.parameters, single.frozen)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def trained(asked: Config, folder: Path, resume: bool) -> dict[str, bytes]:
    with lockstep.session(asked) as session:
        checkpoints = Checkpoints(session, LocalStorage(folder), {})
        checkpoints.begin(Resume())
        assert checkpoints.resumed_from == (2 if resume else None)
        for report in session:
            if report.step == 2 and not resume:
                checkpoints.save()
        checkpoints.finish()
        return {name: tensor.detach().numpy().tobytes() for name, tensor in session.state().tensors.items()}


def teacher(folder: Path, seed: int, tokens: int = 1024) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**LLAMA, vocab_size=tokens)).save_pretrained(folder)


def test_a_teacher_of_another_vocabulary_is_refused_before_the_start(chat: Path, tmp_path: Path) -> None:
    teacher(tmp_path / "teacher", seed=1, tokens=2048)
    asked = config(chat, "dpo", objective={"kind": "distill", "companion": str(tmp_path / "teacher")})
    asked["data"] = {"train": {**asked["data"]["train"], "rejected": None}}
    with fails(ConfigError, "2,048", "1,024", key="objective.companion"), lockstep.session(asked):
        pass


@pytest.mark.parametrize("kind", ["dpo", "kto", "distill"])
def test_a_resumed_run_has_the_same_companion(kind: str, chat: Path, tmp_path: Path) -> None:
    teacher(tmp_path / "teacher", seed=1)
    asked = config(chat, kind, objective={"kind": kind, "companion": str(tmp_path / "teacher")})
    if kind == "distill":
        asked["data"] = {"train": {**asked["data"]["train"], "rejected": None}}
    uncut = trained(asked, tmp_path / "saved", resume=False)
    assert trained(asked, tmp_path / "saved", resume=True) == uncut
    teacher(tmp_path / "teacher", seed=2)
    with fails(lockstep.ConfigError, "objective.companion", "hash"):
        trained(asked, tmp_path / "saved", resume=True)


# --- an objective of a user ----------------------------------------------------------------------------------------


class Imitation:
    """Squared distance from the companion's outputs."""

    def count(self, batch: Batch) -> int:
        return batch.samples

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.mse_loss(outputs, batch.companion, reduction="sum") + F.cross_entropy(
            outputs, batch.targets, reduction="sum"
        )


def test_a_module_that_its_run_has_trained_is_no_companion_of_it(tmp_path: Path) -> None:
    target = {"kind": "custom", "target": f"{__name__}:Imitation", "companion": "initial"}
    asked = {name: section for name, section in small.config().items() if name != "model"} | {"objective": target}
    module = small.Net()
    fresh = copy.deepcopy(module)

    def train(model: torch.nn.Module, steps: int) -> None:
        run = {"steps": steps, "folder": str(tmp_path / "run")}
        lockstep.train({**asked, "run": run, "launch": {"device": "cpu"}}, model=model)

    train(module, 2)
    with pytest.raises(ConfigError, match="companion"):
        train(module, 4)
    train(fresh, 4)


class OneNumber(Imitation):
    """Keeps the largest output of each sample only."""

    def from_companion(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return outputs.amax(1)

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        assert batch.companion.shape == (batch.samples,)
        return F.mse_loss(outputs.amax(1), batch.companion, reduction="sum") + F.cross_entropy(
            outputs, batch.targets, reduction="sum"
        )


@pytest.mark.parametrize("objective", [Imitation, OneNumber])
def test_a_custom_objective_has_a_companion(objective: type[Imitation]) -> None:
    target = {"kind": "custom", "target": f"{__name__}:{objective.__name__}", "companion": "initial"}
    asked = {**small.config(), "objective": target}
    plain = recorded({**small.config()}, updates=3)
    expected = recorded(asked, updates=3)
    assert expected.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)  # the distance is zero
    assert expected.losses[2] != pytest.approx(plain.losses[2], rel=1e-6)
    for strategy in ("ddp", "fsdp"):
        run = recorded({**asked, "parallel": {"strategy": strategy}}, ranks=2, updates=3)
        assert differences(run, expected) == []


def test_a_loss_of_torch_has_no_companion() -> None:
    asked = {**small.config(), "objective": {"kind": "custom", "target": "CrossEntropyLoss", "companion": "initial"}}
    with fails(lockstep.ConfigError, "TorchLoss", key="objective.companion"), lockstep.session(asked):
        pass


@pytest.mark.parametrize(
    ("objective", "data", "words"),
    [
        ({"kind": "dpo"}, {"rejected": None}, ("dpo", "rejected")),
        ({"kind": "next-token"}, {}, ("rejected", "next-token")),
        ({"kind": "orpo", "companion": "initial"}, {}, ("companion", "orpo")),
        ({"kind": "dpo", "margin": 2.0}, {}, ("margin", "simpo", "dpo")),
        ({"kind": "ipo", "label_smoothing": 0.1}, {}, ("label_smoothing", "ipo")),
        ({"kind": "distill"}, {"rejected": None}, ("distill", "companion")),
        ({"kind": "dpo"}, {"train_on": "all"}, ("answers", "train_on")),
        ({"kind": "dpo"}, {"messages": None, "label": None}, ("rejected", "label")),
        ({"kind": "kto"}, {}, ("desirable", "kto")),
        ({"kind": "kto"}, {"desirable": "good"}, ("desirable", "rejected")),
        ({"kind": "dpo"}, {"desirable": "good", "rejected": None}, ("desirable", "kto", "dpo")),
        ({"kind": "kto"}, {"desirable": "good", "rejected": None, "packed": True}, ("packed",)),
        ({"kind": "dpo", "desirable_weight": 2.0}, {}, ("desirable_weight", "kto", "dpo")),
        ({"kind": "orpo", "precompute": True}, {}, ("precompute", "dpo", "orpo")),
    ],
)
def test_what_would_be_ignored_is_refused(
    objective: Config, data: Config, words: tuple[str, ...], tmp_path: Path
) -> None:
    asked = config(tmp_path, "dpo", objective=objective)
    asked["data"] = {"train": {**asked["data"]["train"], **data}}
    with fails(lockstep.ConfigError, *words):
        validate(asked)


def test_it_leaves_no_graph(chat: Path) -> None:
    with lockstep.session(config(chat, "dpo")) as session:
        engine: Any = components_of(session).engine
        assert isinstance(engine._prepare, Companion)
        [batch, *_] = next(iter(session.batches())).micro_batches
        seen = engine._prepare(batch).companion
        assert (seen.shape, seen.requires_grad) == ((2 * batch.samples,), False)

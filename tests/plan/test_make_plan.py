"""The whole plan of a run."""

import json
import sys

import pytest
from kit.failures import fails, gives

from lockstep.config.schema import Config
from lockstep.core.errors import ConfigError
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.plan.choosing import choose_strategy
from lockstep.plan.plan import Machine, as_json, describe, make_plan

FACTS = DataFacts(samples=1000, tokens_per_sample=16)
PARAMETERS = [
    ParameterFacts("embedding.weight", (10, 4), 4, False),
    ParameterFacts("layers.0.weight", (6, 4), 4, True),
    ParameterFacts("layers.0.bias", (6,), 4, True),
]


def config(**sections):
    values = {
        "model": {"kind": "transformer"},
        "data": {"train": {"kind": "stdlib-text"}},
        "batch": {"global_size": 48},
        "run": {"epochs": 2.0},
    }
    return Config.model_validate({**values, **sections})


BF16 = {"precision": {"compute": "bf16"}}


def plan(ranks=1, facts=FACTS, parameters=PARAMETERS, **sections):
    return make_plan(config(**sections), ranks, facts, parameters)


def test_a_plan_derives_every_number():
    planned = plan(2, batch={"global_size": 48, "micro_size": 8})
    assert (planned.strategy, planned.ranks) == ("ddp", 2)
    assert (planned.batch.micro_size, planned.batch.accumulation) == (8, 3)
    assert (planned.steps, planned.epoch_steps, planned.epoch_samples) == (42, 21, 1000)
    assert (planned.samples, planned.tokens) == (2000, 32000)
    assert (planned.parameters, planned.trainable, planned.frozen) == (70, 30, 40)
    assert [group.names for group in planned.groups] == [("layers.0.weight",), ("layers.0.bias",)]
    assert planned.warnings == ()


def test_a_checkpoint_holds_parameters_and_optimizer_state():
    whole, adapter = plan(), plan(model={"kind": "transformer", "adapter": {"kind": "lora"}})
    assert whole.checkpoint_bytes == 4 * (70 + 2 * 30 + 2), "two moments, and the steps of two parameters"
    assert adapter.checkpoint_bytes == 4 * (3 * 30 + 2), "without the base"
    assert as_json(whole)["checkpoint_seconds"] == whole.checkpoint_bytes / 1e9
    assert "528 B" in describe(whole)


@pytest.mark.parametrize(
    ("memory", "sections", "strategy", "why"),
    [
        (None, {}, "ddp", "a rank's memory isn't known here; set it by plan --memory 80GiB"),
        (2000, {}, "ddp", "the training state takes 648 B of the 1.95 KiB that a rank has"),
        (1000, {}, "fsdp", "the training state takes 648 B of the 1000 B that a rank has"),
        (600, {"optim": {"name": "muon"}}, "fsdp", "the training state takes 548 B of the 600 B that a rank has"),
    ],
)
def test_auto_takes_what_fits_and_states_the_reason(memory, sections, strategy, why):
    planned = make_plan(config(**sections), 2, FACTS, PARAMETERS, Machine(memory=memory))
    assert (planned.strategy, planned.why) == (strategy, why)
    assert f"auto took {strategy}: {why}" in describe(planned)


def test_auto_takes_nothing_that_the_run_refuses():
    int8 = {"kind": "transformer", "adapter": {"kind": "lora"}, "quantization": {"kind": "int8"}}
    planned = make_plan(config(model=int8), 2, FACTS, PARAMETERS, Machine(memory=600))
    assert planned.strategy == "ddp"
    assert gives(planned.why, "600 B", "int8 base", "fsdp")
    assert {row.strategy for row in planned.placements} == {"single", "ddp"}


@pytest.mark.parametrize(
    ("ema", "values"),
    [
        ({"decay": 0.999}, ["90%", "step 0", "0.9772"]),  # of 100 steps
        ({"decay": 0.9, "every": 200}, ["100%", "step 0", "0.1"]),
        ({"start": 100}, ["optim.ema.start 100", "100 steps"]),
    ],
)
def test_an_average_that_stays_near_its_start_is_warned_about(ema, values):
    [warning] = plan(optim={"ema": ema}, run={"steps": 100}).warnings
    assert gives(warning, *values)
    assert plan(optim={"ema": {"decay": 0.95}}, run={"steps": 100}).warnings == ()


def test_strategies_that_the_run_refuses_are_not_counted():
    planned = plan(2, precision={"parameters": "bf16"})
    assert {row.strategy for row in planned.placements} == {"single", "ddp", "fsdp", "fsdp-grad-op", "fsdp-no-shard"}


def test_auto_leaves_out_what_refuses_the_optimizer():
    asked = config(optim={"name": "muon"}, parallel={"tensor": 2})
    choice = choose_strategy(asked, 4, PARAMETERS, memory=300)
    assert choice.strategy.name == "ddp"
    assert gives(choice.why, "274 B", "300 B", "muon", "fsdp", "adamw", "parallel.tensor")


@pytest.mark.parametrize(
    ("memory", "strategy", "ranks", "warning"),
    [
        (400, "ddp", 2, "648 B of the 400 B of a rank: it doesn't fit. To train it, start 3 ranks under fsdp."),
        (600, "ddp", 2, "648 B of the 600 B of a rank: it doesn't fit. To train it, set parallel.strategy: fsdp."),
        (200, "auto", 2, "324 B of the 200 B of a rank: it doesn't fit. To train it, start 6 ranks under fsdp."),
        (648, "ddp", 2, None),
        (None, "ddp", 2, None),
    ],
)  # fmt: skip
def test_a_warning_states_that_the_training_state_does_not_fit(memory, strategy, ranks, warning):
    planned = make_plan(config(parallel={"strategy": strategy}), ranks, FACTS, PARAMETERS, Machine(memory=memory))
    assert [text.removeprefix("The training state takes ") for text in planned.warnings if "doesn't fit" in text] == (
        [warning] if warning else []
    )


def test_samples_of_a_run_that_ends_within_an_epoch():
    assert plan(run={"steps": 22}).samples == 1000 + 48
    dropped = plan(run={"steps": 22}, data={"train": {"kind": "stdlib-text"}, "drop_last": True})
    assert (dropped.epoch_samples, dropped.samples) == (960, 960 + 2 * 48)


def test_the_length_of_a_token_budget_over_ragged_samples_is_unknown():
    planned = plan(facts=DataFacts(1000, None), run={"tokens": 5000})
    assert (planned.steps, planned.samples, planned.tokens) == (None, None, None)
    assert "unknown in advance" in describe(planned)


def test_tokens_are_left_out_where_the_data_has_none():
    assert "\ntokens " not in describe(plan(facts=DataFacts(1000, None, classes=10)))
    assert "\ntokens        unknown " in describe(plan(facts=DataFacts(1000, None, vocabulary=256)))
    assert "\ntokens " in describe(plan(facts=DataFacts(1000, 16)))


@pytest.mark.parametrize(
    ("name", "ranks", "strategy"), [("auto", 1, "single"), ("auto", 4, "ddp"), ("ddp", 1, "ddp"), ("dp", 1, "dp")]
)
def test_the_planned_strategy(name, ranks, strategy):
    assert plan(ranks, parallel={"strategy": name}).strategy == strategy


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("single", "parallel.strategy: single is one process, but there are 3 ranks; start 1 rank, or take ddp"),
        (
            "dp",
            "parallel.strategy: dp is one process over all its GPUs, but there are 3 ranks; start 1 rank, or take ddp",
        ),
    ],
)
def test_strategies_of_one_process_refuse_more(strategy, message):
    with pytest.raises(ConfigError) as error:
        plan(3, parallel={"strategy": strategy})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("optim", "state"),
    [
        ({"name": "adamw"}, 30 * 8 + 2 * 4),
        ({"name": "adam"}, 30 * 8 + 2 * 4),
        ({"name": "sgd"}, 30 * 4),
        ({"name": "sgd", "momentum": 0.0}, 0),
        ({"name": "lion"}, 30 * 4),
        ({"name": "muon"}, 24 * 4 + 6 * 8 + 4),
        ({"name": "adafactor"}, (6 + 4) * 4 + 6 * 4 + 2 * 4),
    ],
)
def test_bytes_per_rank_count_no_state_for_frozen_parameters(optim, state):
    planned = plan(2, optim=optim)
    for row in planned.placements:
        stage = int(row.strategy[-1]) if row.strategy.startswith("zero") else 0
        parts = 2 if row.strategy in ("fsdp", "fsdp-grad-op") else 1
        of_parameters, of_gradients, of_state = (
            2 if stage >= least else parts for least in (3, 2, 1)
        )  # what ZeRO's stages shard
        masters = 30 * 4 if stage else 0
        kept_whole = 70 * 4 if stage == 3 else 0  # all are small
        assert row.parameters == 70 * 4 / of_parameters + kept_whole
        assert row.gradients == 30 * 4 / of_gradients
        whole = 4 * 4 if optim["name"] == "adafactor" else 0  # the factor of columns
        assert row.optimizer == (state - whole + masters) / of_state + whole
        assert row.total == row.parameters + row.gradients + row.optimizer
    zero = set() if optim["name"] in ("muon", "adafactor") else {"zero1", "zero2", "zero3"}  # refused there
    assert {row.strategy for row in planned.placements} == zero | {
        "single", "dp", "ddp", "fsdp", "fsdp-grad-op", "fsdp-no-shard", "zero0",
    }  # fmt: skip
    assert planned.placement.strategy == "ddp"


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({}, 70),
        ({"stage3_param_persistence_threshold": 0}, 0),
        ({"param_persistence_threshold": 23}, None),
        ({"stage3_param_persistence_threshold": "auto"}, 70),
        ({"stage3_model_persistence_threshold": 0}, 0),
    ],
)
def test_parameters_that_stage_3_keeps_whole_follow_its_config(keys, kept):
    deepspeed = {"zero_stage": 3, "config": {"zero_optimization": {"stage": 3, **keys}}}
    planned = plan(2, parallel={"strategy": "deepspeed", "deepspeed": deepspeed})
    smallest = sum(fact.elements for fact in PARAMETERS if fact.elements <= 23)
    assert planned.placement.parameters == 70 * 4 / 2 + 4 * (smallest if kept is None else kept)
    assert plan(1, parallel={"strategy": "deepspeed", "deepspeed": deepspeed}).placement.parameters == 70 * 4


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (3, 2)])
def test_weights_in_bf16_take_two_bytes_beside_the_fp32_values_that_are_updated(stage, ranks):
    rows = [
        plan(2, parallel={"strategy": "deepspeed", "deepspeed": {"zero_stage": stage, **keys}}, **BF16).placement
        for keys in ({}, {"bf16_weights": True})
    ]
    whole = [row.parameters for row in rows]
    assert (whole[1], rows[1].optimizer, rows[1].gradients) == (whole[0] / 2, rows[0].optimizer, rows[0].gradients)
    assert whole[1] >= 70 * 2 / ranks


@pytest.mark.parametrize(("strategy", "parts", "name"), [("ddp", 1, "context"), ("fsdp", 4, "context+fsdp")])
def test_context_ranks_hold_replicas_or_shards_as_the_strategy_does(strategy, parts, name):
    planned = plan(4, parallel={"strategy": strategy, "context": 2})
    rows = {row.strategy: row for row in planned.placements}
    assert rows[name].parameters == -(-rows["single"].parameters // parts)
    assert gives(rows[name].note, "1/2")
    assert planned.batch.ranks == 2


def test_buckets_that_are_not_views_hold_the_gradients_twice():
    planned = plan(2, parallel={"ddp": {"gradient_as_bucket_view": False}})
    gradients = {row.strategy: row.gradients for row in planned.placements}
    assert (gradients["single"], gradients["ddp"]) == (120, 240)


@pytest.mark.parametrize(
    ("ranks", "sections", "warning"),
    [
        (
            3,
            {"batch": {"global_size": 10, "micro_size": 2}},
            "batch.global_size 10 does not fill 3 x 2 micro-batches of 2 (ranks x accumulation): 16.7% of the ranks' "
            "time is spent on padding or waiting. A batch.global_size of 6 or 12 fills them all.",
        ),
        (
            1,
            {"batch": {"global_size": 10, "micro_size": 4}},
            "batch.global_size 10 does not fill 1 x 3 micro-batches of 4 (ranks x accumulation). "
            "A batch.global_size of 8 or 12 fills them all.",
        ),
        (
            4,
            {"batch": {"global_size": 2}},
            "batch.global_size 2 does not fill 4 x 1 micro-batches of 1 (ranks x accumulation): 50.0% of the ranks' "
            "time is spent on padding or waiting. A batch.global_size of 4 fills them all.",
        ),
        (
            1,
            {"batch": {"global_size": 2048}},
            "An epoch has 1,000 samples, fewer than batch.global_size 2,048: each update sees 1,000.",
        ),
        (
            1,
            {"schedule": {"warmup_steps": 50}},
            "schedule.warmup_steps 50 is not less than the 42 steps of the run: "
            "the learning rate never reaches its peak.",
        ),
        (
            1,
            {"schedule": {"kind": "warmup-stable-decay", "warmup_steps": 40}},
            "schedule.warmup_steps 40 reaches into the last 20% of 42 steps, where the learning rate decays: "
            "it never reaches its peak.",
        ),
    ],
)
def test_warnings_state_the_cost_and_a_better_value(ranks, sections, warning):
    assert plan(ranks, **sections).warnings == (warning,)


def test_mistakes_are_refused_without_a_process():
    with pytest.raises(ConfigError, match=r"optim\.rules\.0\.match"):
        plan(optim={"rules": ({"match": ("nothing.like.it",)},)})
    with fails(ConfigError, "no samples", key="data.train"):
        plan(facts=DataFacts(0, None))
    with pytest.raises(ConfigError, match=r"2\^62 samples"):
        plan(facts=DataFacts(sys.maxsize, None))


@pytest.mark.parametrize("untested", [False, True])
def test_features_of_gpus_are_refused_on_the_cpu(untested: bool) -> None:
    sections = {"memory": {"activation_offload": "cpu"}, "run": {"epochs": 2.0, "allow_untested": untested}}
    for machine, launch in ((Machine(device="cpu"), {}), (Machine(), {"device": "cpu"})):
        with fails(ConfigError, "CPU", "GPUs", key="memory.activation_offload"):
            make_plan(config(**sections, launch=launch), 1, FACTS, PARAMETERS, machine)
    if untested:
        make_plan(config(**sections), 1, FACTS, PARAMETERS, Machine(device="cuda"))


def test_the_description_has_every_number_and_marks_the_strategy():
    text = describe(plan(2, batch={"global_size": 10, "micro_size": 2}))
    lines = text.splitlines()
    assert "strategy      ddp on 2 ranks" in lines
    assert "global batch  10 < 2 x 3 x 2 (micro-batch x accumulation x ranks) samples per update" in lines
    assert "steps         200 (100 an epoch, so 2 epochs)" in lines
    assert "parameters    70 (30 trained, 40 frozen)" in lines
    assert [line for line in lines if line.endswith("<-")] == [
        "ddp                  280 B      120 B      248 B  648 B  <-"
    ]
    assert lines[-1].startswith("warning: batch.global_size 10 does not fill")
    assert max(map(len, lines[:-1])) <= 100


def test_the_json_is_plain_and_complete():
    planned = plan(2)
    values = json.loads(json.dumps(as_json(planned)))
    assert values["steps"] == 42
    assert values["batch"] == {
        "global_size": 48, "micro_size": 24, "accumulation": 1, "ranks": 2, "fixed": False, "even": True, "waste": 0
    }  # fmt: skip
    assert [row["total"] for row in values["placements"]] == [row.total for row in planned.placements]


INVARIANT = {"batch": {"global_size": 64, "micro_size": 8}, "run": {"steps": 1, "determinism": "invariant"}}


def test_an_invariant_run_holds_partial_sums():
    """Eight micro-batches in a row: what autograd made, three levels of the tree, and what is being filled."""
    on_one_rank = plan(1, **INVARIANT)
    assert on_one_rank.batch.fixed
    assert on_one_rank.placement.gradients == 5 * plan(1).placement.gradients
    assert plan(8, **INVARIANT).placement.gradients == 2 * plan(1).placement.gradients


def test_auto_never_shards_an_invariant_run():
    planned = make_plan(config(**INVARIANT), 4, FACTS, PARAMETERS, Machine(None, 1))
    assert planned.strategy == "ddp"
    assert gives(planned.why, "run.determinism invariant")


def test_a_warning_names_options_of_other_strategies():
    idle = plan(2, parallel={"strategy": "ddp", "deepspeed": {"config": "nope.json"}, "fsdp": {"wrap": "root"}})
    fsdp, deepspeed = (warning for warning in idle.warnings if "no effect" in warning)
    assert gives(fsdp, "parallel.fsdp", "ddp")
    assert gives(deepspeed, "parallel.deepspeed", "ddp")
    both = plan(2, parallel={"strategy": "fsdp", "ddp": {"find_unused_parameters": True}})
    assert both.warnings == ()

"""What `auto` takes, and what an out-of-memory error suggests, is what simulated updates show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.failures import fails
from kit.layouts import variant_of
from simulation.test_peak_memory import NOTHING, decoder, estimator
from simulation.test_step_time import cluster, large

from lockstep.assembly import deciding
from lockstep.assembly.deciding import NoAnswer, Question, ask
from lockstep.core.formatting import size
from lockstep.core.out_of_memory import Phase, note_location
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.launch.ends import end_of_exception
from lockstep.loop.components import Purpose
from lockstep.loop.out_of_memory import explain, memory_factors
from lockstep.plan.choosing import USABLE, Decision
from lockstep.plan.gpus import known_gpu
from lockstep.plan.plan import Machine, make_plan
from lockstep.simulation.answering import answer
from lockstep.simulation.estimate import estimator_of, under
from lockstep.simulation.search import Candidate, _decision, decide

MIB = 1 << 20
WEIGHT = [ParameterFacts("weight", (4, 4), 4, True)]
FACTS = "rank 1: out of memory in the backward pass of micro-batch 1 of 1, update 3; this rank's peak was 6.80 GiB."
ADVICE = "Set batch.micro_size to 4 (it is 8)."
SAVED = "update 2 was saved"
MESSAGE = f"{FACTS} {ADVICE}\n{SAVED}"


def automatic(**sections: Any) -> Any:
    sections = {"parallel": {"strategy": "auto"}, "batch": {"global_size": 16}, "launch": {"device": "auto"}} | sections
    return decoder(**sections)


def peak(config: Any, decision: Decision, ranks: int) -> int:
    batch = config.batch.model_copy(update={"micro_size": decision.micro_size})
    strategy, variant = variant_of("fsdp" if decision.strategy == "fsdp" else "ddp")
    return estimator(config, ranks).peak(under(config.model_copy(update={"batch": batch}), strategy, variant)).bytes


def test_the_reason_compares_with_the_fastest_of_a_strategy_that_fits() -> None:
    best, *others = (
        Candidate({}, layout, samples, "none", seconds, gib << 30, fits)
        for layout, samples, seconds, gib, fits in (
            ("fsdp", 2, 1.0, 70, True), ("ddp", 2, 1.1, 75, True), ("ddp", 8, 0.9, 200, False)
        )
    )  # fmt: skip
    assert "ddp is 10% slower" in _decision(best, others, estimator(automatic(), 4, 80 << 30)).why


def test_auto_takes_the_largest_micro_batch_that_fits_and_shards_only_where_it_must() -> None:
    config = automatic()
    plenty, tight = (decide(estimator(config, 4, memory)) for memory in (64 * MIB, 5 * MIB))
    assert (plenty.strategy, plenty.micro_size) == ("ddp", 4)
    assert tight.strategy == "ddp"
    assert tight.micro_size == 2
    assert peak(config, tight, 4) <= USABLE * 5 * MIB
    assert peak(config, replace(tight, micro_size=4), 4) > 5 * MIB
    state = peak(config, Decision("ddp", 1, ""), 4)
    sharded = decide(estimator(config, 4, state))
    assert sharded.strategy == "fsdp"
    assert peak(config, sharded, 4) <= USABLE * state
    assert decide(estimator(config, 4, state)) == sharded, "another start decides the same"


@pytest.mark.parametrize("share", [1.0, 0.97, 0.6])
def test_what_auto_takes_on_unknown_devices_was_simulated_with_all_its_blocks(share: int) -> None:
    """Of many blocks alike, too, which shallow models would stand for."""
    config = automatic(
        model={"kind": "transformer", "vocabulary": 256, "layers": 10, "heads": 2, "width": 64},
        precision={"compute": "bf16"},
    )

    def on_cpu(decision: Decision) -> int:
        batch = {"micro_size": decision.micro_size}
        chosen = under(config.with_values(batch=batch), *variant_of(decision.strategy))
        return replace(estimator(config, 4), device_type="cpu").peak(chosen).bytes

    memory = int(share * on_cpu(Decision("ddp", 4, "")) / USABLE) + 1
    decision = decide(replace(estimator(config, 4, memory), device_type="cpu"))
    assert on_cpu(decision) <= USABLE * memory
    assert ((decision.strategy, decision.micro_size) == ("ddp", 4)) is (share == 1)
    assert "nothing that auto may choose" not in decision.why


def test_on_known_gpus_auto_takes_the_fastest_of_what_reserves_no_more_than_they_have() -> None:
    sizes = {"kind": "transformer", "vocabulary": 4096, "layers": 2, "heads": 8, "width": 1024}
    config = large(2, "auto", model=sizes, batch={"global_size": 128, "micro_size": "auto"})
    gpus = cluster(per_node=2, memory=4 << 30)
    own = estimator_of(config, 2, gpus.gpu.memory, NOTHING, gpus)
    decision = decide(own)
    assert 1 < decision.micro_size < 64
    times = {}
    for name in ("ddp", "fsdp"):
        for samples in (decision.micro_size, 64):
            values = {"parallel": {"strategy": name}, "batch": {"micro_size": samples}}
            peak, time = own.simulated(config.with_values(**values))
            assert peak.reserved is not None
            assert time is not None
            times[name, samples] = time.seconds
            fits = peak.reserved.total <= 4 << 30
            assert fits == own.fits(peak) == (samples < 64)
            if (name, samples) == (decision.strategy, decision.micro_size):
                assert f"{size(peak.reserved.total)} of 4.00 GiB" in decision.why
    fastest = min(time for (_, samples), time in times.items() if samples < 64)
    assert times[decision.strategy, decision.micro_size] <= 1.02 * fastest
    question = Question(config, 2, gpus.gpu.memory, NOTHING, on_cpu=False, cluster=gpus)
    assert answer(question) == decision, "a run decides as a plan does"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(device: str, name: str | None) -> None:
    gpu = known_gpu(device)
    assert (None if gpu is None else gpu.name) == name


def test_what_fits_nowhere_is_said() -> None:
    assert decide(estimator(automatic(), 2, MIB)).why.endswith("and nothing that auto may choose takes less")


def test_a_plan_follows_the_decision_and_says_why() -> None:
    decision = Decision("fsdp", 4, "with micro-batches of 4 a simulated update takes 7.00 GiB")
    plan = make_plan(automatic(), 4, DataFacts(640, None), WEIGHT, Machine(decision=decision))
    assert (plan.strategy, plan.batch.micro_size, plan.why) == ("fsdp", 4, decision.why)
    reason = Machine(undecided="a simulation takes longer than 60 s")
    (warning,) = (
        text for text in make_plan(automatic(), 4, DataFacts(640, None), WEIGHT, reason).warnings if "60 s" in text
    )
    assert "by the training state" in warning


class FourRanks:
    """A rank of four, which gets what the first has."""

    def __init__(self, rank: int, first: list[Any]) -> None:
        self.rank, self.size, self.machine_ranks, self.first = rank, 4, 4, first
        self.axis, self.device = self, torch.device("cpu")

    def barrier(self) -> None: ...

    def gather(self, value: Any) -> list[Any]:
        if self.rank == 0:
            self.first.append(value)
            return [value] * 4
        return [self.first.pop(0)] + [value] * 3


@pytest.mark.parametrize("fails", [False, True], ids=["decides", "can't"])
def test_only_the_first_rank_asks_and_all_ranks_get_its_answer(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    asked, config = [], automatic()

    def answered(question: Question) -> Decision:
        asked.append(question)
        if fails:
            raise NoAnswer("a simulation takes longer than 60 s")
        return Decision("fsdp", 4, "it fits")

    monkeypatch.setattr(deciding, "ask", answered)
    monkeypatch.setattr(deciding, "rank_memory", lambda *unused: 16 * MIB)
    facts, first = estimator(config, 4).facts, []
    source: Any = type("Source", (), {"facts": facts})
    made = [deciding.machine_of(config, FourRanks(rank, first), NOTHING, source, Purpose.TRAIN) for rank in (0, 1)]
    assert made[0] == made[1]
    assert len(asked) == 1
    assert made[0].decision == (None if fails else Decision("fsdp", 4, "it fits"))
    assert ("60 s" in made[0].undecided) is fails


def test_a_run_that_is_small_beside_the_memory_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "ask", lambda question: pytest.fail("it was asked"))
    monkeypatch.setattr(deciding, "rank_memory", lambda *unused: 80 << 30)
    source: Any = type("Source", (), {"facts": estimator(automatic(), 4).facts})
    machine = deciding.machine_of(automatic(), FourRanks(0, []), NOTHING, source, Purpose.TRAIN)
    assert machine.decision is None
    assert machine.undecided == ""


def test_a_process_answers_and_is_not_waited_for_longer_than_it_may_take() -> None:
    question = Question(decoder(), 1, 80 << 30, NOTHING, on_cpu=True)
    assert ask(question, seconds=300) == answer(question)
    with fails(NoAnswer, "0 s"):
        ask(question, seconds=0.01)
    with fails(NoAnswer, "objects"):
        ask(Question(decoder(), 1, 80 << 30, replace(NOTHING, schedule=lambda *unused: 1.0), on_cpu=True))


@pytest.mark.parametrize(
    "place",
    [
        ("backward", "in the backward pass of micro-batch 1 of 1, update 1"),
        ("update", "in the optimizer's step of update 1"),
        None,
        ("evaluation", "in the evaluation on held-out"),
        ("checkpoint", "in the save after update 3"),
    ],
)
def test_the_advice_ends_the_message_and_goes_with_it(place: tuple[Phase, str] | None) -> None:
    error = MemoryError()
    if place is not None:
        note_location(error, *place)
    failure = explain(error, memory_factors(decoder(), 1), torch.device("cpu"))
    assert failure is not None
    end = end_of_exception(failure, 0.0, None)
    assert end.advice == failure.advice
    assert end.advice
    assert str(failure).endswith(end.advice)
    assert "; this rank's peak was " in end.text


def test_one_sample_that_is_too_large_needs_no_smaller_micro_batches() -> None:
    error = MemoryError("unable to allocate 1024 TiB")
    note_location(error, "forward", "in the forward pass of micro-batch 1 of 1, update 1")
    failure = explain(error, memory_factors(decoder(), 1), torch.device("cpu"))
    assert failure is not None
    assert "make the samples or the model smaller" in str(failure)
    assert not failure.too_large

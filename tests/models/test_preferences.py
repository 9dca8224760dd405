"""The losses of pairs of answers, and of a teacher, are those of the papers' formulas, answer by answer.

TRL 1.16's DPOTrainer gave the same losses and rewards on the same weights and batch, to 2e-6 (sigmoid, ipo; by hand),
and its KTOTrainer the same losses, rewards and kl over four updates of a set that is one batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from kit.failures import fails

from lockstep.core.errors import RunFailed
from lockstep.core.records import IGNORED, Batch
from lockstep.models.objectives import TargetLoss
from lockstep.models.preferences import DistillLoss, PairLoss, RatedLoss, unlogged

BETA, MARGIN, SMOOTHING = 0.3, 0.7, 0.1
LENGTHS = [(2, 3), (4, 1)]  # of the chosen and the rejected answer
WIDTH, VOCABULARY = 7, 11


def draws(seed: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def batch() -> Batch:
    ids = torch.randint(VOCABULARY, (4, WIDTH), generator=torch.Generator().manual_seed(2))
    targets = torch.full_like(ids, IGNORED)
    for row, length in enumerate([length for pair in LENGTHS for length in pair]):
        targets[row, 2 : 2 + length] = ids[row, 2 : 2 + length]
    return Batch({"input_ids": ids}, targets, 2, ids.numel())


def log_probability(logits: torch.Tensor, batch: Batch, row: int) -> float:
    """Token by token: position t - 1 predicts the token at t."""
    total = 0.0
    for place, token in enumerate(batch.targets[row].tolist()):
        if token != IGNORED:
            scores = logits[row, place - 1].double()
            total += float(scores[token]) - math.log(float(scores.exp().sum()))
    return total


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value))


def expected(kind: str, batch: Batch) -> tuple[float, list[float]]:
    """Loss and rewards by the formulas."""
    loss, rewards = 0.0, []
    for pair, lengths in enumerate(LENGTHS):
        own = [log_probability(draws(0), batch, 2 * pair + n) for n in range(2)]
        ratios = [value - log_probability(draws(1), batch, 2 * pair + n) for n, value in enumerate(own)]
        means = [value / length for value, length in zip(own, lengths, strict=True)]
        match kind:
            case "dpo":
                swung = BETA * (ratios[0] - ratios[1])
                loss -= (1 - SMOOTHING) * log_sigmoid(swung) + SMOOTHING * log_sigmoid(-swung)
                rewards += [BETA * ratio for ratio in ratios]
            case "ipo":
                loss += (ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * BETA)) ** 2
                rewards += [BETA * ratio for ratio in ratios]
            case "simpo":
                loss -= log_sigmoid(BETA * (means[0] - means[1]) - MARGIN)
                rewards += [BETA * mean for mean in means]
            case "orpo":
                odds = [mean - math.log(1 - math.exp(mean)) for mean in means]
                loss -= means[0] + BETA * log_sigmoid(odds[0] - odds[1])
                rewards += [BETA * mean for mean in means]
    return loss, rewards


@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo", "orpo"])
def test_the_loss_of_pairs_is_the_formula(kind: str, batch: Batch) -> None:
    logged: dict[str, float] = {}

    def log(name: str, total: torch.Tensor, weight: int) -> None:
        logged[name] = float(total) / weight

    smoothing, margin = (SMOOTHING if kind == "dpo" else 0.0), (MARGIN if kind == "simpo" else 0.0)
    objective = PairLoss(kind, beta=BETA, margin=margin, label_smoothing=smoothing, shift=True, log=log)
    batch = replace(batch, companion=objective.from_companion({"logits": draws(1)}, batch))
    loss, rewards = expected(kind, batch)
    assert objective.count(batch) == 2
    assert float(objective.loss_sum({"logits": draws(0)}, batch)) == pytest.approx(loss, rel=1e-5)
    sums = {name: float(value) for name, value in objective.metric_sums({"logits": draws(0)}, batch).items()}
    chosen, rejected = rewards[0::2], rewards[1::2]
    assert sums["rewards_chosen"] == pytest.approx(sum(chosen), rel=1e-5)
    assert sums["rewards_rejected"] == pytest.approx(sum(rejected), rel=1e-5)
    assert sums["margin"] == pytest.approx(sum(chosen) - sum(rejected), rel=1e-4)
    assert sums["accuracy"] == sum(first > second for first, second in zip(chosen, rejected, strict=True))
    assert logged == pytest.approx({name: value / 2 for name, value in sums.items()})
    assert objective.metrics(loss, 2, sums)["loss"] == loss / 2
    assert objective.metrics(1.0, 1.0, defaultdict(float)).keys() == {"loss", *sums}  # known before an evaluation


def test_a_reward_is_the_output_of_its_row(batch: Batch) -> None:
    outputs = {"logits": torch.tensor([[1.0], [0.5], [-1.0], [2.0]])}
    objective = PairLoss("reward", beta=1.0, shift=True, log=unlogged)
    assert float(objective.loss_sum(outputs, batch)) == pytest.approx(-log_sigmoid(0.5) - log_sigmoid(-3.0))
    assert float(objective.metric_sums(outputs, batch)["accuracy"]) == 1


def test_a_pair_is_never_divided(batch: Batch) -> None:
    objective = PairLoss("simpo", beta=1.0, shift=True, log=unlogged)
    with fails(RunFailed, "4 rows for 4 samples"):
        objective.loss_sum({"logits": draws(0)}, replace(batch, samples=4))


@pytest.mark.parametrize("divided", [False, True])
def test_the_loss_of_rated_answers_is_the_formula(divided: bool, batch: Batch) -> None:
    """`kl` is over all micro-batches. Rows 0 and 2 are the answers, and rows 1 and 3 have another sample's."""
    logged: dict[str, tuple[float, float]] = {}

    def log(name: str, total: torch.Tensor, weight: int | torch.Tensor) -> None:
        before = logged.get(name, (0.0, 0.0))
        logged[name] = before[0] + float(total), before[1] + float(weight)

    objective = RatedLoss(beta=BETA, weights=(1.0, 1.5), shift=True, log=log)
    rated = {"answers": batch.targets, "desirable": torch.tensor([True, False])}
    ratios = [log_probability(draws(0), batch, row) - log_probability(draws(1), batch, row) for row in range(4)]
    kl = max(0.0, (ratios[1] + ratios[3]) / 2)
    assert kl > 0
    good, bad = (1 / (1 + math.exp(-sign * BETA * (ratios[row] - kl))) for sign, row in ((1, 0), (-1, 2)))

    batch = replace(batch, targets=rated)
    whole = replace(batch, companion=objective.from_companion(draws(1), batch))
    parts, logits = [whole], [draws(0)]
    if divided:
        parts, logits = [part(whole, number) for number in range(2)], [*draws(0).split(2)]
    ahead = [objective.sums_ahead(each[1::2], objective.ahead(one)) for one, each in zip(parts, logits, strict=True)]
    ready = [objective.completed(each, sum(ahead[1:], ahead[0])) for each in parts]
    outputs = [each[0::2] for each in logits]
    loss = sum(float(objective.loss_sum(each, one)) for each, one in zip(outputs, ready, strict=True))
    assert loss == pytest.approx((1 - good) + 1.5 * (1 - bad), rel=1e-5)
    assert {name: total / weight for name, (total, weight) in logged.items()} == pytest.approx(
        {"rewards_chosen": BETA * ratios[0], "rewards_rejected": BETA * ratios[2], "kl": kl}, rel=1e-4
    )
    sums: dict[str, float] = defaultdict(float)
    for each, one in zip(outputs, ready, strict=True):
        for name, value in objective.metric_sums(each, one).items():
            sums[name] += float(value)
    metrics = objective.metrics(loss, sum(map(objective.count, ready)), sums)
    assert metrics["margin"] == pytest.approx(BETA * (ratios[0] - ratios[2]), rel=1e-4)
    assert (metrics["loss"], metrics["kl"]) == (pytest.approx(loss / 2), pytest.approx(kl, rel=1e-4))


def part(batch: Batch, number: int) -> Batch:
    """One of the two samples."""
    rows = slice(2 * number, 2 * number + 2)
    targets = {
        "answers": batch.targets["answers"][rows], "desirable": batch.targets["desirable"][number : number + 1],
    }  # fmt: skip
    inputs = {name: value[rows] for name, value in dict(batch.inputs).items()}
    return replace(batch, inputs=inputs, targets=targets, samples=1, companion=batch.companion[rows])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_loss_of_a_teacher_is_the_formula(temperature: float, batch: Batch) -> None:
    targets = TargetLoss(language=True, shift=True)
    objective = DistillLoss(targets, temperature=temperature, soft=0.25)
    divergence, entropy = 0.0, 0.0
    for row in range(4):
        entropy -= log_probability(draws(0), batch, row)
        for place, token in enumerate(batch.targets[row].tolist()):
            if token != IGNORED:
                own, teacher = (torch.softmax(draws(n)[row, place - 1].double() / temperature, 0) for n in range(2))
                divergence += float((teacher * (teacher / own).log()).sum())
    batch = replace(batch, companion=objective.from_companion({"logits": draws(1)}, batch))
    loss = float(objective.loss_sum({"logits": draws(0)}, batch))
    assert loss == pytest.approx(0.25 * temperature**2 * divergence + 0.75 * entropy, rel=1e-5)
    sums = {name: float(value) for name, value in objective.metric_sums({"logits": draws(0)}, batch).items()}
    metrics = objective.metrics(loss, 10, sums)
    assert metrics["divergence"] == pytest.approx(divergence / 10, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(entropy / 10), rel=1e-5)

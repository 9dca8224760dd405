"""Objectives of two models or of two answers: preferences, ratings, rewards, and distillation.

    kind     loss of a pair; d = s(chosen) - s(rejected)      s: score of an answer y
    dpo      -log sigmoid(beta d)                             log p(y) - log p of the companion
    ipo      (d - 1 / (2 beta))^2                             the same / |y|
    simpo    -log sigmoid(beta d - margin)                    log p(y) / |y|
    orpo     -s(chosen) - beta log sigmoid(d of log odds)     log p(y) / |y|
    reward   -log sigmoid(d)                                  the model's output
    kto      1 - sigmoid(+- beta (s - kl))  of an answer      log p(y) - log p of the companion
    distill  soft T^2 KL(companion || model) + (1 - soft) CE  of a target; logits / T in the divergence

dpo: Rafailov et al. 2023 (arXiv:2305.18290), equation 7; with label smoothing, Mitchell's conservative one. ipo: Azar
et al. 2023 (arXiv:2310.12036), equation 17, by token as in TRL. simpo: Meng et al. 2024 (arXiv:2405.14734), equation 6.
orpo: Hong et al. 2024 (arXiv:2403.07691), equation 6. reward: Ouyang et al. 2022 (arXiv:2203.02155), equation 1.
kto: Ethayarajh et al. 2024 (arXiv:2402.01306), equation 7. distill: Hinton et al. 2015 (arXiv:1503.02531), section 2.

A pair is one sample: rows 2 n and 2 n + 1 of a batch are its chosen and its rejected answer. So is a rated answer: in
its second row, the prompt has another sample's answer, for the estimate of kl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.errors import RunFailed
from lockstep.core.records import IGNORED, Batch
from lockstep.models.objectives import TargetLoss
from lockstep.models.outputs import logits_of
from lockstep.models.vocab_parallel_loss import full_logits

_SUMS = ("accuracy", "margin", "rewards_chosen", "rewards_rejected")
Log = Callable[[str, Tensor, int | Tensor], None]
"""Logs a mean: (name, sum, number of values)."""


def unlogged(name: str, total: Tensor, weight: int | Tensor) -> None:
    """Log nothing."""


class PairLoss:
    """The loss of pairs of answers, and the rewards of both.

    Args:
        beta: As in the table. Rewards are scores x beta; those of ipo are dpo's.
        shift: Targets are aligned with the input tokens.
        log: Receives the sums of `metric_sums` of each forward.
    """

    decomposes = True

    def __init__(
        self, kind: str, *, beta: float, margin: float = 0.0, label_smoothing: float = 0.0, shift: bool, log: Log
    ) -> None:
        self._kind = kind
        self._beta = beta
        self._margin = margin
        self._smoothing = label_smoothing
        self._shift = shift
        self._log = log

    def count(self, batch: Batch) -> int:
        return batch.samples

    def from_companion(self, outputs: object, batch: Batch) -> Tensor:
        """Return the companion's log-probabilities of all answers, [rows]."""
        return _log_probabilities(outputs, batch.targets, self._shift)[0]

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        scores, rewards = self._scored(outputs, batch)
        for name, total in _sums(rewards.detach()).items():
            self._log(name, total, batch.samples)
        chosen, rejected = scores.unbind(1)
        match self._kind:
            case "ipo":
                losses = (chosen - rejected - 1 / (2 * self._beta)) ** 2
            case "orpo":
                odds = scores - torch.log(-torch.expm1(scores))
                losses = -chosen - self._beta * F.logsigmoid(odds[:, 0] - odds[:, 1])
            case _:
                difference = self._beta * (chosen - rejected) - self._margin
                losses = -F.logsigmoid(difference) * (1 - self._smoothing)
                if self._smoothing:
                    losses = losses - F.logsigmoid(-difference) * self._smoothing
        return losses.sum()

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        return _sums(self._scored(outputs, batch)[1])

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": loss_sum / count, **{name: sums[name] / count for name in _SUMS}}

    def _scored(self, outputs: object, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the scores and the rewards of the pairs, [pairs, 2] each: of the chosen answer, and the rejected."""
        if self._kind == "reward":
            scores = rewards = logits_of(outputs).float().flatten()
        else:
            scores, lengths = _log_probabilities(outputs, batch.targets, self._shift)
            if self._kind in ("dpo", "ipo"):
                scores = scores - batch.companion
            rewards = self._beta * scores
            if self._kind != "dpo":
                scores = scores / lengths
            if self._kind in ("orpo", "simpo"):
                rewards = self._beta * scores
        if len(scores) != 2 * (batch.samples or 1):  # padding has no samples, and is computed
            rows = f"{len(scores)} rows for {batch.samples} samples"
            raise RunFailed(f"{rows}; give two rows for each pair, the chosen answer before the rejected one")
        return scores.view(-1, 2), rewards.view(-1, 2)


def _log_probabilities(outputs: object, targets: Tensor, shift: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of the log-probabilities of each row's targets, and their number, [rows] each; fp32."""
    logits = full_logits(logits_of(outputs))
    if shift:
        targets = F.pad(targets[:, 1:], (0, 1), value=IGNORED)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(targets.shape).sum(1), (targets != IGNORED).sum(1)


def _sums(rewards: Tensor) -> dict[str, Tensor]:
    chosen, rejected = rewards.unbind(1)
    values = (chosen > rejected, chosen - rejected, chosen, rejected)
    return {name: value.sum() for name, value in zip(_SUMS, values, strict=True)}


class RatedLoss:
    """The loss of answers that are desirable or not (kto).

    The divergence of the model from the companion, kl, is the mean over all samples of the update, or of the evaluation
    set, of the log-ratio of another sample's answer, and at least 0. It has no gradient.

    Args:
        weights: Of desirable and of undesirable answers.
        shift, log: As for `PairLoss`.
    """

    decomposes = True

    def __init__(self, *, beta: float, weights: tuple[float, float], shift: bool, log: Log) -> None:
        self._beta = beta
        self._weights = weights
        self._shift = shift
        self._log = log

    def count(self, batch: Batch) -> int:
        return batch.samples

    def from_companion(self, outputs: object, batch: Batch) -> Tensor:
        """Return the companion's log-probabilities of all answers, [rows]."""
        return _log_probabilities(outputs, batch.targets["answers"], self._shift)[0]

    def ahead(self, batch: Batch) -> Batch:
        return _every_second(batch, 1)

    def sums_ahead(self, outputs: object, batch: Batch) -> Tensor:
        """Return the sum of the other answers' log-ratios, and their number; fp64."""
        ratios = self.from_companion(outputs, batch) - batch.companion
        return torch.stack([ratios.double().sum(), torch.ones_like(ratios, dtype=torch.float64).sum()])

    def completed(self, batch: Batch, sums: Tensor) -> Batch:
        own, kl = _every_second(batch, 0), (sums[0] / sums[1]).clamp(min=0).float()
        return replace(own, companion=(own.companion, kl))

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        losses, sums = self._losses(outputs, batch)
        for name, number in (("rewards_chosen", "desirable"), ("rewards_rejected", "undesirable")):
            self._log(name, sums[name], sums[number])
        self._log("kl", sums["kl"], batch.samples)
        return losses

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        return self._losses(outputs, batch)[1]

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        chosen = sums["rewards_chosen"] / (sums["desirable"] or 1)
        rejected = sums["rewards_rejected"] / (sums["undesirable"] or 1)
        rewards = {"margin": chosen - rejected, "rewards_chosen": chosen, "rewards_rejected": rejected}
        return {"loss": loss_sum / count, **rewards, "kl": sums["kl"] / count}

    def _losses(self, outputs: object, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the losses, and what metrics are made of."""
        desirable, (reference, kl) = batch.targets["desirable"], batch.companion
        ratios = self.from_companion(outputs, batch) - reference
        signs, (good, bad) = desirable * 2.0 - 1, self._weights
        losses = torch.sigmoid(signs * self._beta * (kl - ratios)) * torch.where(
            desirable, good, bad
        )  # 1 - sigmoid(-x)
        rewards = self._beta * ratios.detach()
        chosen, rejected = (rewards * desirable).sum(), (rewards * ~desirable).sum()
        numbers = {"desirable": desirable.sum(), "undesirable": (~desirable).sum(), "kl": kl * len(ratios)}
        return losses.sum(), {"rewards_chosen": chosen, "rewards_rejected": rejected, **numbers}


def _every_second(batch: Batch, first: int) -> Batch:
    """Return the first rows of all samples, or the second ones."""
    inputs = {name: value[first::2] for name, value in dict(batch.inputs).items()}
    targets = {**batch.targets, "answers": batch.targets["answers"][first::2]}
    return replace(batch, inputs=inputs, targets=targets, companion=batch.companion[first::2])


class DistillLoss:
    """The divergence from the companion's outputs, where there are targets, and the cross-entropy of the targets.

    Args:
        targets: The objective without a teacher.
        soft: Weight of the divergence.
    """

    decomposes = True

    def __init__(self, targets: TargetLoss, *, temperature: float, soft: float) -> None:
        self._targets = targets
        self._temperature = temperature
        self._soft = soft
        self.count = targets.count

    def from_companion(self, outputs: object, batch: Batch) -> Tensor:
        """Return the teacher's logits."""
        return full_logits(logits_of(outputs))

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        loss = self._targets.loss_sum(outputs, batch) * (1 - self._soft)
        return loss + self._divergence(outputs, batch) * self._soft * self._temperature**2

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        plain = self._targets.loss_sum(outputs, batch)
        sums = self._targets.metric_sums(outputs, batch)
        return {**sums, "plain_loss": plain, "divergence": self._divergence(outputs, batch)}

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        return {**self._targets.metrics(loss_sum, count, sums), "divergence": sums["divergence"] / count}

    def _divergence(self, outputs: object, batch: Batch) -> Tensor:
        logits, teacher = full_logits(logits_of(outputs)), batch.companion
        valid = (self._targets.targets_of(batch) != IGNORED).unsqueeze(-1)
        own, other = (torch.log_softmax(each.float() / self._temperature, -1) for each in (logits, teacher))
        return (F.kl_div(own, other, reduction="none", log_target=True) * valid).sum()

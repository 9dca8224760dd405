"""An objective that compares the model with a companion, a frozen second model that `objective.companion` names.

    objective: {kind: custom, target: examples/own_companion.py:CloseToTeacher, companion: Qwen/Qwen2.5-1.5B-Instruct}

Targets are aligned with the input tokens, as for models of the transformers library.
"""

from __future__ import annotations

from torch import Tensor


class CloseToTeacher:
    """Squared distance between the log-probabilities of model and teacher, at the answers' tokens."""

    def count(self, batch) -> int:
        return int((batch.targets[:, 1:] != -100).sum())

    def from_companion(self, outputs, batch) -> Tensor:
        targets = batch.targets[:, 1:]
        scores = outputs["logits"][:, :-1].float().log_softmax(-1)
        return scores.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)

    def loss_sum(self, outputs, batch) -> Tensor:
        return (self.from_companion(outputs, batch) - batch.companion).square().sum()

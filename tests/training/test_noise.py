"""Of noise nothing can be learned: no loss of a language model falls below the entropy of random tokens, whatever the
model, the way in which it came, and the position that labels are at."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import heads
from torch import Tensor, nn

import lockstep

TOKENS, LENGTH, BATCH, UPDATES = 8, 16, 16, 40
ENTROPY = math.log(TOKENS)
SLACK = 0.1  # of the mean over an update's 240 targets


class Noise:
    """Each sample is seen once.

    Args:
        name: of the model's input.
        aligned: labels are the inputs themselves; otherwise the tokens that follow.
    """

    def __init__(self, name: str = "input_ids", aligned: bool = True) -> None:
        draws = torch.Generator().manual_seed(5)
        self._tokens = torch.randint(TOKENS, (BATCH * UPDATES, LENGTH + 1), generator=draws)
        self._name = name
        self._aligned = aligned

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._tokens[index]
        labels = tokens[:-1] if self._aligned else tokens[1:]
        mask = {"attention_mask": torch.ones(LENGTH, dtype=torch.long)} if self._name == "input_ids" else {}
        return {self._name: tokens[:-1], **mask, "labels": labels}


class Pairs(Noise):
    """An answer that has nothing to do with the question."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "labels": self._tokens[-1 - index][1:]}


class Own(nn.Module):
    """Sees each token and the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.head = nn.Linear(32, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = self.embedding(tokens)
        return self.head(torch.cat([seen, seen.roll(1, 1)], -1))


class Wrapped(nn.Module):
    """A model of the library's inside of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = heads.made("llama causal")

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)


def _of_head(name: str) -> dict[str, Any]:
    return {"model": heads.section(heads.HEADS[name])}


_NEXT = {"objective": {"kind": "next-token"}}
_TRANSFORMER = {"model": {"kind": "transformer", "layers": 1, "width": 16, "heads": 2, "vocabulary": TOKENS}}
ROWS: dict[str, tuple[Callable[[], nn.Module] | None, dict[str, Any], Noise]] = {
    "llama, an object": (lambda: heads.made("llama causal"), {}, Noise()),
    "llama, a config": (None, _of_head("llama causal"), Noise()),
    "llama, labels shifted before": (lambda: heads.made("llama causal"), {}, Noise(aligned=False)),
    "t5, an object": (lambda: heads.made("t5 seq2seq"), {}, Pairs()),
    "bart, a config": (None, _of_head("bart seq2seq"), Pairs()),
    "llama in a module": (Wrapped, _NEXT, Noise()),
    "own, aligned": (Own, _NEXT, Noise("tokens")),
    "own, shifted before": (Own, _NEXT, Noise("tokens", aligned=False)),
    "transformer, aligned": (None, _TRANSFORMER, Noise("tokens")),
    "transformer, shifted before": (None, _TRANSFORMER, Noise("tokens", aligned=False)),
}


@pytest.mark.parametrize("row", ROWS)
def test_no_loss_is_below_the_entropy(row: str) -> None:
    model, sections, data = ROWS[row]
    torch.manual_seed(0)
    config = {
        **sections,
        "batch": {"global_size": BATCH},
        "optim": {"lr": 0.01},
        "schedule": {"kind": "constant"},
        "precision": {"compute": "fp32"},
        "run": {"epochs": 1},
    }
    given = {} if model is None else {"model": model()}
    with lockstep.session(config, train_dataset=data, eval_datasets={"same": data}, **given) as session:
        losses = [report.loss for report in session]
        [evaluation] = session.evaluate()
    assert min(losses) > ENTROPY - SLACK
    assert min(losses) < ENTROPY + 0.5  # it has learned which tokens there are
    assert evaluation.metrics["loss"] > ENTROPY - SLACK

"""Answers that the model generates to the prompts of an evaluation set, compared with the targets.

inputs   What is 2 + 2 ?  4 END        prompt: what comes before the last run of targets
targets  .    .  . . . .  4 END        wanted: these targets           --> generate --> answer --> metrics of texts

An encoder's inputs are the prompt. Under strategies that gather weights for a forward, all ranks run as many of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.formatting import counted
from lockstep.core.records import IGNORED
from lockstep.data.loader import first_batch
from lockstep.models.generation import Sampling, generate
from lockstep.models.heads import head_of
from lockstep.models.metrics import TEXTS, EvaluationMetrics, Outcome
from lockstep.monitor import metric_log
from lockstep.optim.precision import autocast_context, resolve_compute
from lockstep.strategies.registry import find_strategy
from lockstep.training.text import codec_of

if TYPE_CHECKING:
    from torch import nn

    from lockstep.config.schema import Config
    from lockstep.core.protocols import Axis, Source
    from lockstep.core.records import Batch
    from lockstep.plan.plan import Plan
    from lockstep.training.text import Codec

_KEY = "evaluation.generate"
_ROWS = 8  # shown
_COLUMNS = ("prompt", "answer", "wanted")


class Answers:
    """Generates the answers of a run; `metrics` compares them."""

    def __init__(
        self, config: Config, plan: Plan, model: nn.Module, sets: Mapping[str, Source], device: torch.device
    ) -> None:
        section = config.evaluation.generate
        assert section is not None, "answers are wanted"
        head = head_of(model)
        if head is None or head.labels not in ("next-token", "seq2seq"):
            raise ConfigError(
                Problem("", _KEY, "only language models of the transformers library answer; leave it out")
            )
        shards = find_strategy(plan.strategy).variant(config.parallel).state.parameters
        divided = [axis for axis in ("pipeline", "tensor", "context") if getattr(plan.mesh, axis) > 1]
        if divided:
            size = getattr(plan.mesh, divided[0])
            why = f"no rank can generate with a part of the model, and parallel.{divided[0]} is {size}"
            raise ConfigError(Problem("", _KEY, f"{why}; write 1, or leave evaluation.generate out"))
        if shards and head.labels == "seq2seq":
            why = f"generation calls the encoder by itself, and {plan.strategy} gathers weights for the whole model"
            raise ConfigError(Problem("", _KEY, f"{why}; take ddp or deepspeed with zero_stage 2, or leave it out"))
        data = next(iter(config.data.evaluation.values()), config.data.train)
        self._section, self._encodes = section, head.labels == "seq2seq"
        self._codec: Codec = codec_of(config.model, data if data.kind == "huggingface" else config.data.train)
        self._synced = shards and plan.mesh.shares > 1
        compute = resolve_compute(config.precision.compute, device)
        self._autocast = autocast_context(compute, device, keeps_casts=False)
        for name, source in sets.items():
            if not any(self._prompts(first_batch(source, min(_ROWS, source.facts.samples)), name)[0]):
                why = f"the samples of data.evaluation.{name} have no prompt before their targets"
                remedy = "give the set a `label` column, or targets of -100 for the prompt, or leave generate out"
                raise ConfigError(Problem("", _KEY, f"{why}; {remedy}"))
        self.metrics = EvaluationMetrics(section.metrics, Outcome(TEXTS, None), device)

    def samples_of(self, source: Source) -> int:
        """Return how many samples of a set are answered."""
        return min(source.facts.samples, self._section.samples or source.facts.samples)

    def evaluate(
        self, name: str, model: nn.Module, batches: Iterable[Batch], seeds: Iterable[int], axis: Axis
    ) -> tuple[dict[str, float], list[str]]:
        """Return the metrics of the answers on a set, the same on all ranks, and why others can't be computed.

        The first answers are logged.

        Args:
            batches: This rank's; as many on all ranks.
            seeds: Of the draws in each batch.
        """
        shown: list[tuple[str, ...]] = []
        skipped = 0
        self.metrics.reset()
        for batch, seed in zip(batches, seeds, strict=True):
            prompts, wanted = self._prompts(batch, name)
            sampling = Sampling(self._section.temperature, top_p=self._section.top_p, seed=seed)
            options: dict[str, Any] = {"ends": self._codec.ends, "synced": self._synced}
            with self._autocast():
                some = [prompt or [0] for prompt in prompts]  # all ranks run as many forwards
                made = generate(model, some, self._section.tokens, sampling, **options)
            if not batch.samples:
                continue
            rows = [tuple(map(self._codec.decode, row)) for row in zip(prompts, made, wanted, strict=True) if row[0]]
            skipped += len(prompts) - len(rows)
            self.metrics.add([answer for _, answer, _ in rows], [text for *_, text in rows])
            shown += rows[: _ROWS - len(shown)]
        metric_log.table(f"answers/{name}", _COLUMNS, shown)
        values, failures = self.metrics.values(axis, counts=True)
        if number := int(axis.sum(torch.tensor([skipped], dtype=torch.float64)).item()):
            failures.append(f"{counted(number, 'sample')} without a prompt, not answered")
        return values, failures

    def _prompts(self, batch: Batch, name: str) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of prompts, which may have none, and of what should follow."""
        inputs: Any = batch.inputs
        if "input_ids" not in inputs or batch.targets is None:
            raise ConfigError(Problem("", _KEY, f"data.evaluation.{name} has no input_ids with labels; leave it out"))
        ids, targets = inputs["input_ids"].tolist(), batch.targets.tolist()
        if "position_ids" in inputs:
            raise ConfigError(Problem("", _KEY, f"data.evaluation.{name} is packed; set its packed to false"))
        mask = inputs["attention_mask"].tolist() if "attention_mask" in inputs else [[1] * len(row) for row in ids]
        prompts, wanted = [], []
        answers = len(ids) // (batch.samples or 1)  # of a pair, the chosen one is first
        for row, seen, goal in zip(ids[::answers], mask[::answers], targets[::answers], strict=True):
            if self._encodes:
                first, last, kept = 0, len(goal), [token for token, valid in zip(row, seen, strict=True) if valid]
            else:
                first, last = _last_run(goal)
                kept = [token for token, valid in zip(row[:first], seen, strict=False) if valid]
            prompts.append(kept)
            wanted.append([token for token in goal[first:last] if token != IGNORED])
        return prompts, wanted


def _last_run(targets: Sequence[int]) -> tuple[int, int]:
    """Return where the last run of valid targets begins and ends."""
    last = next((at + 1 for at in reversed(range(len(targets))) if targets[at] != IGNORED), 0)
    first = last
    while first and targets[first - 1] != IGNORED:
        first -= 1
    return first, last

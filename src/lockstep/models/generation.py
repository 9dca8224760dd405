"""Text from a language model, one token after the other.

    prompt -> model -> logits of the last position -> temperature -> top k -> draw -> append -> model -> ...

The last `context` tokens are run again for each token: there is no cache that could disagree with training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature

import torch
from torch import Tensor, nn

from lockstep.core.errors import RunFailed
from lockstep.models.outputs import logits_of
from lockstep.models.vocab_parallel_loss import full_logits


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Sequence[int],
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    context: int = 256,
) -> Iterator[int]:
    """Yield `tokens` further ids after the prompt.

    Args:
        model: tokens (or input_ids) [1, T] -> logits [1, T, V]. It is in evaluation mode while it runs.
        prompt_ids: at least one.
        temperature: 0 takes the likeliest token always.
        top_k: draw among the likeliest k alone; None: among all.
        generator: on the CPU, where tokens are drawn.
        context: tokens that the model sees at most; what it was trained on.

    Raises:
        RunFailed: the logits are not finite.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty; give the model at least one token to continue from")
    device = next(model.parameters()).device
    name = "input_ids" if "input_ids" in signature(model.forward).parameters else "tokens"
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)  # of the transformers library
    context = min(context, int(limit or context))
    ids = list(prompt_ids)
    for _ in range(tokens):
        window = torch.tensor([ids[-context:]], device=device)
        ids.append(_draw(_last_logits(model, {name: window}), temperature, top_k, generator))
        yield ids[-1]


def _last_logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return [V] fp32 on the CPU; the training mode is put back before the caller can see the model."""
    was_training = model.training
    model.eval()
    try:
        return full_logits(logits_of(model(**inputs)))[0, -1].float().cpu()
    finally:
        model.train(was_training)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> int:
    if not torch.isfinite(logits.max()):  # the maximum is NaN if one is; -inf alone forbids a token
        raise RunFailed("the model's logits aren't finite: its weights are damaged, or it diverged")
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    probabilities = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))

"""Generate text with a language model, one token after the other.

    prompt -> model -> logits of the last position -> temperature -> top k -> draw -> append -> model -> ...

The last `context` tokens are computed again for each token: there is no cache that could differ from training.
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
    """Yield the ids of `tokens` tokens that continue the prompt.

    Args:
        model: Maps tokens (or input_ids) [1, T] to logits [1, T, V]. It runs in evaluation mode.
        prompt_ids: One id or more.
        temperature: 0 always selects the most likely token.
        top_k: Draw only from the k most likely tokens; None: from all.
        generator: A generator on the CPU.
        context: The most tokens that the model gets, such as the length it was trained on.

    Raises:
        RunFailed: The logits aren't finite.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty; give at least one token to continue from")
    device = next(model.parameters()).device
    name = "input_ids" if "input_ids" in signature(model.forward).parameters else "tokens"
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)  # of the transformers library
    context = min(context, int(limit or context))
    ids = list(prompt_ids)
    for _ in range(tokens):
        window = torch.tensor([ids[-context:]], device=device)
        was_training = model.training
        model.eval()
        try:
            logits = full_logits(logits_of(model(**{name: window})))[0, -1].float().cpu()
        finally:  # before the caller can see the model
            model.train(was_training)
        ids.append(_draw(logits, temperature, top_k, generator))
        yield ids[-1]


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> int:
    if not torch.isfinite(logits.max()):  # NaN if any logit is; single logits may be -inf, to forbid a token
        raise RunFailed("the model's logits aren't finite: its weights are damaged, or it has diverged")
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    probabilities = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))

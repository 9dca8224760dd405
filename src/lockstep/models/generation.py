"""Generate text with a language model, until its end token.

The transformers library does it for its models; others run forwards of the last `context` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lockstep.core.errors import RunFailed
from lockstep.core.modes import evaluation_mode
from lockstep.models.outputs import logits_of
from lockstep.models.transformers_models import is_transformers_model, quiet
from lockstep.models.vocab_parallel_loss import full_logits


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Sequence[int],
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    context: int = 256,
    end: int | None = None,
    *,
    is_whole: bool = True,
) -> list[int]:
    """Return the ids of at most `tokens` tokens that continue the prompt, without the end token.

    Args:
        model: Maps tokens (or input_ids) [1, T] to logits [1, T, V]. It runs in evaluation mode.
        temperature: 0 always selects the most likely token.
        top_k: Draw only from the k most likely tokens; None: from all.
        context: The most tokens that the model gets. The library's generation has the model's own limit.
        end: The token that ends a text; None: there is none.
        is_whole: Whether this rank has the whole model and its weights.

    Raises:
        RunFailed: The logits aren't finite.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty; give at least one token to continue from")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)  # of the transformers library
    with evaluation_mode(model):
        if is_whole and is_transformers_model(model) and cast("Any", model).can_generate():
            kept = prompt_ids if limit is None else prompt_ids[-max(1, limit - tokens) :]
            tokens = tokens if limit is None else min(tokens, limit - len(kept))
            return _by_the_library(model, kept, tokens, _Choice(temperature, top_k, seed, end))
        context = min(context, int(limit or context))
        return _by_forwards(model, prompt_ids, tokens, context, _Choice(temperature, top_k, seed, end))


class _Choice(NamedTuple):
    temperature: float
    top_k: int | None
    seed: int
    end: int | None


def _by_the_library(model: Any, prompt_ids: Sequence[int], tokens: int, choice: _Choice) -> list[int]:
    temperature, top_k, seed, end = choice
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    sampling = {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0} if temperature else {}
    end = model.config.eos_token_id if end is None else end
    devices = [] if ids.device.type == "cpu" else [ids.device]
    with quiet(), torch.random.fork_rng(devices, device_type=ids.device.type if devices else "cuda"):
        torch.manual_seed(seed)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=temperature > 0,
            eos_token_id=end,
            pad_token_id=model.config.pad_token_id or 0,  # of one text, nothing is padded
            use_cache=True,
            logits_processor=[_refuse_damaged],
            **sampling,
        )
    ends = end if isinstance(end, list) else [end]
    return [token for token in made[0, len(prompt_ids) :].tolist() if token not in ends]


def _refuse_damaged(ids: Tensor, logits: Tensor) -> Tensor:
    if not torch.isfinite(logits.max()):  # NaN if any logit is; single logits may be -inf, to forbid a token
        raise RunFailed("the model's logits aren't finite: its weights are damaged, or it has diverged")
    return logits


def _by_forwards(model: nn.Module, prompt_ids: Sequence[int], tokens: int, context: int, choice: _Choice) -> list[int]:
    device, draws = next(model.parameters()).device, torch.Generator().manual_seed(choice.seed)
    name = "input_ids" if "input_ids" in signature(model.forward).parameters else "tokens"
    ids = list(prompt_ids)
    while len(ids) < len(prompt_ids) + tokens:
        window = torch.tensor([ids[-context:]], device=device)
        logits = full_logits(logits_of(model(**{name: window})))[0, -1].float().cpu()
        token = _draw(_refuse_damaged(window, logits), choice.temperature, choice.top_k, draws)
        if token == choice.end:
            break
        ids.append(token)
    return ids[len(prompt_ids) :]


def _draw(logits: Tensor, temperature: float, top_k: int | None, draws: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=draws))

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


class Sampling(NamedTuple):
    """The way tokens are drawn.

    Attributes:
        temperature: Of the softmax; 0 always selects the most likely token.
        top_k: Draw only from the k most likely tokens; None: from all.
        top_p: Draw only from the most likely tokens that together have this probability.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    context: int = 256,
    ends: Sequence[int] = (),
    *,
    is_whole: bool = True,
    synced: bool = False,
) -> list[list[int]]:
    """Return the ids of at most `tokens` tokens that continue each prompt, without the end token.

    Args:
        model: Maps tokens (or input_ids) [1, T] to logits [1, T, V]. It runs in evaluation mode.
        context: The most tokens that the model gets. The library's generation has the model's own limit.
        ends: The tokens that end a text; without any, those of a model of the transformers library.
        is_whole: Whether this rank has the whole model, perhaps gathered for each forward.
        synced: All ranks run as many forwards, since each gathers the weights.

    Raises:
        RunFailed: The logits aren't finite.
    """
    if not all(prompts):
        raise ValueError("the prompt is empty; give at least one token to continue from")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)  # of the transformers library
    with evaluation_mode(model):
        if is_whole and is_transformers_model(model) and cast("Any", model).can_generate():
            return _by_the_library(model, prompts, tokens, sampling, limit, ends, synced=synced)
        context = min(context, int(limit or context))
        return [_by_forwards(model, prompt, tokens, context, sampling, ends) for prompt in prompts]


def _by_the_library(
    model: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    limit: int | None,
    ends: Sequence[int],
    *,
    synced: bool,
) -> list[list[int]]:
    encodes = bool(model.config.is_encoder_decoder)  # the prompt and the answer have positions of their own
    if limit is not None:
        prompts = [prompt[-max(1, limit - tokens * (not encodes)) :] for prompt in prompts]
    width, pad = max(map(len, prompts)), model.config.pad_token_id or 0
    if limit is not None:
        tokens = min(tokens, limit - width * (not encodes))
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p}
    own = model.config.eos_token_id
    ends = ends or (own if isinstance(own, list) else [own])
    devices = [] if ids.device.type == "cpu" else [ids.device]
    with quiet(), torch.random.fork_rng(devices, device_type=ids.device.type if devices else "cuda"):
        torch.manual_seed(sampling.seed)
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=sampling.temperature > 0,
            eos_token_id=None if ends == [None] else list(ends),
            pad_token_id=pad,
            use_cache=True,
            logits_processor=[_refuse_damaged],
            synced_gpus=synced,
            **(drawn if sampling.temperature else {}),
        )
    rows = made[:, 1 if encodes else width :].tolist()
    return [row[: next((at for at, token in enumerate(row) if token in ends), len(row))] for row in rows]


def _refuse_damaged(ids: Tensor, logits: Tensor) -> Tensor:
    if not torch.isfinite(logits.amax(-1)).all():  # NaN if any logit is; single ones may be -inf, to forbid a token
        raise RunFailed("the model's logits aren't finite: its weights are damaged, or it has diverged")
    return logits


def _by_forwards(
    model: nn.Module, prompt_ids: Sequence[int], tokens: int, context: int, sampling: Sampling, ends: Sequence[int]
) -> list[int]:
    device, draws = next(model.parameters()).device, torch.Generator().manual_seed(sampling.seed)
    name = "input_ids" if "input_ids" in signature(model.forward).parameters else "tokens"
    ids = list(prompt_ids)
    while len(ids) < len(prompt_ids) + tokens:
        window = torch.tensor([ids[-context:]], device=device)
        logits = full_logits(logits_of(model(**{name: window})))[0, -1].float().cpu()
        token = _draw(_refuse_damaged(window, logits), sampling, draws)
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt_ids) :]


def _draw(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    shares, order = torch.softmax(logits / sampling.temperature, dim=0).sort(descending=True)
    shares[shares.cumsum(0) - shares >= sampling.top_p] = 0.0  # what those before it don't have already
    return int(order[torch.multinomial(shares, 1, generator=draws)])

"""Text generation with a run's language model, with the tokenizer of its training data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.strategies.registry import find_strategy
from lockstep.training.session import components_of, evaluation_weights

if TYPE_CHECKING:
    from lockstep.config.schema import DataSource, Model
    from lockstep.core.records import DataFacts
    from lockstep.training.session import Session

_SAMPLE_TOKENS = 200
_BY_YOURSELF = "load the weights in `model` of the run's folder into your module, and generate with that"


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec of text and token ids, as in training.

    Attributes:
        end: The token that ends a text; None: there is none.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end: int | None


_BYTES = Codec(
    encode=lambda text: list(text.encode()),
    decode=lambda tokens: bytes(tokens).decode(errors="replace"),
    end=256,
)


def _tokenizer(name: str, *, begins: bool = False) -> Codec:
    """Return the codec of a transformers tokenizer, from a folder or the local cache.

    Args:
        begins: Whether a text has the tokenizer's begin token, if there is one.
    """
    from lockstep.data.hub import begin_tokens, end_token, load_tokenizer

    tokenizer = load_tokenizer(name)
    begin = begin_tokens(tokenizer) if begins else []
    return Codec(
        encode=lambda text: begin + list(tokenizer.encode(text, add_special_tokens=False)),
        decode=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
        end=end_token(tokenizer),
    )


def codec_of(model: Model, data: DataSource) -> Codec:
    """Return the codec of a run's training data.

    Raises:
        ConfigError: the model is no language model, or the data has no known tokenizer.
    """
    if not (model.kind == "transformer" or (model.kind == "huggingface" and model.task == "causal-lm")):
        raise ConfigError(
            "only models of kind transformer, and of kind huggingface with task: causal-lm, generate text here; this "
            f"one is of kind {model.kind}: {_BY_YOURSELF}"
        )
    if data.kind == "stdlib-text":
        return _BYTES
    if data.kind == "tokens":
        from lockstep.data.tokens import tokenizer_name

        name = tokenizer_name(data.folder, data.split)
        return _BYTES if name == "bytes" else _tokenizer(name)
    if data.kind == "huggingface" and model.kind == "huggingface":
        tokenizer = data.tokenizer or model.pretrained
        if tokenizer is not None:
            return _tokenizer(tokenizer, begins=not data.packed)
    raise ConfigError(f"data of kind {data.kind} has no known tokenizer, so no prompt can be continued: {_BY_YOURSELF}")


def sample(session: Session, prompt: str) -> str:
    """Return the prompt with the model's continuation, or with why there is none; all ranks together, same result."""
    from lockstep.models.generation import generate

    components, config = components_of(session), components_of(session).config
    codec, plan = codec_of(config.model, config.data.train), components.plan
    if plan.mesh.pipeline > 1:
        return f"{prompt}: no stage of a pipeline has the whole model; `lockstep generate` continues it"
    shards = find_strategy(plan.strategy).variant(config.parallel).state.parameters
    try:
        with evaluation_weights(session):
            tokens = generate(
                components.sharding.state.model,
                codec.encode(prompt),
                _SAMPLE_TOKENS,
                temperature=0.8,
                seed=config.run.seed,
                context=context_of(components.source.facts),
                end=codec.end,
                is_whole=not shards and plan.mesh.tensor * plan.mesh.context == 1,
            )
    except RunFailed as failure:  # must not fail a run that is finished
        return f"{prompt}: {failure}"
    return prompt + codec.decode(tokens)


def context_of(facts: DataFacts) -> int:
    """Return the number of tokens that the model was trained to attend to."""
    return facts.tokens_per_sample or 1024

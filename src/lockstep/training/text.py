"""Text to token ids and back, as the training data of a run had them."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.training.session import components_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.config.schema import Config
    from lockstep.core.records import DataFacts
    from lockstep.training.session import Session


SAMPLE_TOKENS = 200


class Codec(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """A token is a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")  # 256 ends a document


class Tokenizer:
    """A tokenizer of the transformers library, from a folder or the local cache."""

    def __init__(self, name: str) -> None:
        from lockstep.data.hub import load_tokenizer

        self._tokenizer = load_tokenizer(name)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def sample(session: Session, prompt: str) -> str:
    """The prompt and what the session's model makes of it, or why nothing; every rank runs it, and gets the same."""
    import torch

    from lockstep.models.generation import generate

    config, model = components_of(session).config, whole_model(session)
    codec, was_training = codec_of(config), model.training
    model.eval()
    draws = torch.Generator().manual_seed(config.run.seed)
    tokens = generate(
        model,
        codec.encode(prompt),
        SAMPLE_TOKENS,
        temperature=0.8,
        generator=draws,
        context=context_of(components_of(session).source.facts),
    )
    try:
        return prompt + codec.decode(list(tokens))
    except RunFailed as failure:  # no reason to fail a run that is done
        return f"{prompt}: {failure}"
    finally:
        model.train(was_training)


def whole_model(session: Session) -> nn.Module:
    """The session's, to be asked by all ranks together: what is spread over stages answers everywhere."""
    bare = components_of(session).sharding.state.model
    return bare if components_of(session).place.pipeline.size == 1 else _stages(session, bare)


def _stages(session: Session, bare: nn.Module) -> nn.Module:
    from torch import nn

    from lockstep.models.outputs import logits_of

    class Stages(nn.Module):
        """Goes through all stages; the logits of the last position, everywhere."""

        def __init__(self) -> None:
            super().__init__()
            self.piece = bare
            self.config = getattr(bare, "config", None)

        @wraps(bare.forward)
        def forward(self, **inputs: Any) -> Tensor:  # type: ignore[override]
            outputs = components_of(session).engine.outputs(inputs)
            mine = None if outputs is None else logits_of(outputs)[:, -1:].cpu()
            everywhere = cast("list[Tensor | None]", components_of(session).place.pipeline.gather(mine))
            return next(one for one in everywhere if one is not None)

    return Stages()


def context_of(facts: DataFacts) -> int:
    """Tokens that the model was trained to look back on."""
    return facts.tokens_per_sample or 1024


def codec_of(config: Config) -> Codec:
    """That of the training data.

    Raises:
        ConfigError: the run's model makes no text, or its data doesn't say how text becomes tokens.
    """
    model, data = config.model, config.data.train
    writes = model.kind == "transformer" or (model.kind == "huggingface" and model.task == "causal-lm")
    if not writes:
        raise ConfigError(f"a model of kind {model.kind} continues no text; `generate` is for language models")
    if data.kind == "stdlib-text":
        return Bytes()
    if data.kind == "tokens":
        from lockstep.data.tokens import tokenizer_name

        name = tokenizer_name(Path(data.folder), data.split)
        return Bytes() if name == "bytes" else Tokenizer(name)
    if data.kind == "huggingface" and model.kind == "huggingface":
        tokenizer = data.tokenizer or model.pretrained
        if tokenizer is not None:
            return Tokenizer(tokenizer)
    raise ConfigError(f"data of kind {data.kind} doesn't say how text becomes tokens, so no prompt can be continued")

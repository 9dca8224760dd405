"""Text to token ids and back, as the training data of a run had them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lockstep.core.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.schema import Config


class Codec(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """A token is a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Tokenizer:
    """A tokenizer of the transformers library, from a folder or the local cache."""

    def __init__(self, name: str) -> None:
        from lockstep.data.tokenizers import load_tokenizer

        self._tokenizer = load_tokenizer(name)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


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
        name = data.tokenizer or model.pretrained
        if name is not None:
            return Tokenizer(name)
    raise ConfigError(f"data of kind {data.kind} doesn't say how text becomes tokens, so no prompt can be continued")

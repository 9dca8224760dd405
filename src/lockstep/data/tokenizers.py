"""Tokenizers of the transformers library, ready for padding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError
from lockstep.core.hub import missing, needs_hub


def load_tokenizer(name: str) -> Any:
    """From a folder or the local cache; one without a padding token pads with its end token.

    Raises:
        ConfigError: it is not here, or it has no token to pad with.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and forked workers don't go together
    if not Path(name).expanduser().is_dir():
        needs_hub()
    import_transformers()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # None asks, for 15 s, on the terminal
    except (OSError, ValueError) as error:
        raise missing("tokenizer", name, error) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(f"tokenizer {name} has no token to pad with: neither pad, eos, sep nor unk")
    return tokenizer


def import_transformers() -> None:
    """Raises ConfigError that says how to install it."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"this needs the transformers library, which is not installed: {pip_install('hf')}"
        ) from error

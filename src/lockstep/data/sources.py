"""From the config's words to a source: the one place that knows all kinds."""

from __future__ import annotations

from lockstep.config.schema import (
    CustomData,
    DataSource,
    Digits,
    HuggingFaceData,
    StdlibFunctions,
    StdlibText,
    Tokens,
)
from lockstep.core.protocols import Source
from lockstep.data.tasks import OWN, refuse_task


def open_source(section: DataSource, *, task: str | None, tokenizer: str | None) -> Source:
    """The data that `section` describes.

    Args:
        task: of a model of the transformers library, which then names the inputs (`input_ids`); `tasks.OWN` for
            a language model of ours; None for any other.
        tokenizer: the model's, for sections that name none.

    Raises:
        ConfigError: there is no such data here, or it doesn't suit the task.
    """
    refuse_task(section, task)
    aligned = task not in (None, OWN)
    match section:
        case StdlibText():
            from lockstep.data.stdlib_text import StdlibTextSource

            return StdlibTextSource(section, aligned=aligned)
        case StdlibFunctions():
            from lockstep.data.stdlib_functions import StdlibFunctionsSource

            return StdlibFunctionsSource(section, aligned=aligned)
        case Digits():
            from lockstep.data.digits import DigitsSource

            return DigitsSource(section)
        case Tokens():
            from lockstep.data.tokens import open_tokens

            return open_tokens(section, aligned=aligned)
        case HuggingFaceData():
            from lockstep.data.huggingface import open_huggingface

            return open_huggingface(section, task=task, tokenizer=tokenizer)
        case CustomData():
            from lockstep.data.custom import open_custom

            return open_custom(section)
    raise AssertionError(f"{section.kind}: data handed over in Python is not opened but adapted")

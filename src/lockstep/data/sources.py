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
from lockstep.core.errors import ConfigError
from lockstep.core.protocols import Source


def open_source(section: DataSource, *, task: str | None, tokenizer: str | None) -> Source:
    """The data that `section` describes.

    Args:
        task: of a model of the transformers library, which then names the inputs (`input_ids`); None for any other.
        tokenizer: the model's, for sections that name none.

    Raises:
        ConfigError: there is no such data here, or it doesn't suit the task.
    """
    _refuse_task(section, task)
    match section:
        case StdlibText():
            from lockstep.data.stdlib_text import StdlibTextSource

            return StdlibTextSource(section, aligned=task is not None)
        case StdlibFunctions():
            from lockstep.data.stdlib_functions import StdlibFunctionsSource

            return StdlibFunctionsSource(section, task=task)
        case Digits():
            from lockstep.data.digits import DigitsSource

            return DigitsSource(section)
        case Tokens():
            from lockstep.data.tokens import open_tokens

            return open_tokens(section, aligned=task is not None)
        case HuggingFaceData():
            from lockstep.data.huggingface import open_huggingface

            return open_huggingface(section, task=task, tokenizer=tokenizer)
        case CustomData():
            from lockstep.data.custom import open_custom

            return open_custom(section)
    raise AssertionError(f"{section.kind}: data handed over in Python is not opened but adapted")


_TASKS = {
    "stdlib-text": ("causal-lm",),
    "stdlib-functions": ("sequence-classification",),
    "digits": (),
    "tokens": ("causal-lm",),
    "huggingface": ("causal-lm", "masked-lm", "sequence-classification", "seq2seq"),
}
"""Of models of the transformers library, that a kind of data has batches for."""


def _refuse_task(section: DataSource, task: str | None) -> None:
    tasks = _TASKS.get(section.kind)
    if task is None or tasks is None or task in tasks:
        return
    known = f"for {', '.join(tasks)}" if tasks else "for no model of the transformers library"
    raise ConfigError(
        f"data of kind {section.kind} has batches {known}, and this model is made for {task}; take a data set of your "
        "own (kind: custom), whose items have the keys that the model's forward takes"
    )

"""What data are for: the tasks of models of the transformers library, and one of our own."""

from __future__ import annotations

from lockstep.config.schema import DataSource
from lockstep.core.errors import ConfigError

OWN = "language-model"
"""The task of our own language models."""
_TASKS = {
    "stdlib-text": ("causal-lm",),
    "stdlib-functions": ("sequence-classification",),
    "digits": (),
    "tokens": ("causal-lm",),
    "huggingface": ("causal-lm", "masked-lm", "sequence-classification", "seq2seq"),
}
"""Of models of the transformers library, that a kind of data has batches for."""


def refuse_task(section: DataSource, task: str | None) -> None:
    """Raises ConfigError: there are no such batches of the data for a model of the transformers library."""
    tasks = _TASKS.get(section.kind)
    if task in (None, OWN) or tasks is None or task in tasks:
        return
    known = f"for {', '.join(tasks)}" if tasks else "for no model of the transformers library"
    raise ConfigError(
        f"data of kind {section.kind} has batches {known}, and this model is made for {task}; take a data set of your "
        "own (kind: custom), whose items have the keys that the model's forward takes"
    )

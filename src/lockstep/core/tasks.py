"""The tasks of transformers models: what differs from one to another, a row each.

model.task --> class of the model, kind of its objective --> columns of a dataset, labels --> export, model card
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TaskName = Literal[
    "causal-lm", "masked-lm", "sequence-classification", "seq2seq", "token-classification", "multiple-choice",
    "question-answering", "image-classification", "audio-classification", "speech-seq2seq", "ctc",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """A task of transformers models.

    Attributes:
        head: Class of the model, after `AutoModel`.
        kind: Kind of its objective, and of its labels.
        pipeline: The hub's and transformers' name of its pipeline.
        reads: Columns that data of kind huggingface needs for it, with their content; None: it has no such batches.
        peft: peft's name of the task, if it has one.
    """

    head: str
    kind: str
    pipeline: str
    reads: Mapping[str, str] | None = None
    peft: str | None = None

    @property
    def classifies(self) -> bool:
        """Return whether the head is as large as the number of classes."""
        return self.kind in ("classification", "token-classification")


_CLASS = "the class"
TASKS: Mapping[str, Task] = {
    "causal-lm": Task("ForCausalLM", "next-token", "text-generation", {}, "CAUSAL_LM"),
    "masked-lm": Task("ForMaskedLM", "masked-lm", "fill-mask", {}),
    "sequence-classification": Task(
        "ForSequenceClassification", "classification", "text-classification", {"label": _CLASS}, "SEQ_CLS"
    ),
    "seq2seq": Task("ForSeq2SeqLM", "seq2seq", "text2text-generation", {"label": "the target text"}, "SEQ_2_SEQ_LM"),
    "token-classification": Task(
        "ForTokenClassification", "token-classification", "token-classification", {"label": "a tag for each word"},
        "TOKEN_CLS",
    ),
    "multiple-choice": Task(
        "ForMultipleChoice", "multiple-choice", "multiple-choice",
        {"text_pair": "the choices", "label": "the number of the right choice"},
    ),
    "question-answering": Task(
        "ForQuestionAnswering", "question-answering", "question-answering",
        {"text_pair": "the context", "label": "the answers"}, "QUESTION_ANS",
    ),
    "image-classification": Task(
        "ForImageClassification", "classification", "image-classification", {"image": "the images", "label": _CLASS}
    ),
    "audio-classification": Task("ForAudioClassification", "classification", "audio-classification"),
    "speech-seq2seq": Task("ForSpeechSeq2Seq", "seq2seq", "automatic-speech-recognition"),
    "ctc": Task("ForCTC", "model", "automatic-speech-recognition"),
}  # fmt: skip


def task_of_class(name: str, kind: str) -> str:
    """Return the task of a class of the transformers library with labels of a kind."""
    alike = [task for task, row in TASKS.items() if row.kind == kind]
    return next((task for task in alike if name.endswith(TASKS[task].head)), alike[0] if alike else kind)

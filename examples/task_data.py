"""Writes small datasets about Python's standard library for tasks other than language models, and a tokenizer.

    python examples/task_data.py FOLDER
    lockstep train token-classification tiny/token-classification

The folder is `tasks` by default, where the recipe tiny/token-classification looks for it. Nothing comes from a network.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import keyword
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MODULES = "random statistics string textwrap shutil heapq bisect copy json csv fractions glob calendar"
KINDS = {tokenize.OP: "operator", tokenize.NUMBER: "number", tokenize.STRING: "text"}
SPECIAL = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
}  # fmt: skip


def functions() -> Iterator[tuple[str, str, Any]]:
    """Yield each documented Python function with its name and the first sentence of its documentation."""
    for module in MODULES.split():
        for name, function in inspect.getmembers(importlib.import_module(module), inspect.isfunction):
            text = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
            if not name.startswith("_") and text:
                yield f"{module}.{name}", text.split(". ")[0].rstrip(".") + ".", function


def tags() -> Iterator[dict[str, list[str]]]:
    """Yield lines of source as words, each tagged: keyword, name, operator, number or text."""
    for _, _, function in functions():
        words: list[str] = []
        kinds: list[str] = []
        for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(inspect.getsource(function))).readline):
            if token.type in (tokenize.NAME, *KINDS):
                words.append(token.string[:20])
                kinds.append("keyword" if keyword.iskeyword(token.string) else KINDS.get(token.type, "name"))
            elif token.type == tokenize.NEWLINE:
                yield {"words": words, "tags": kinds}
                words, kinds = [], []


def questions() -> Iterator[dict[str, Any]]:
    """Yield questions with a context and the span of the answer in it, as in SQuAD."""
    for name, sentence, function in functions():
        context = f"{name}({', '.join(inspect.signature(function).parameters)}): {sentence} It is written in Python."
        answers = {"text": [sentence], "answer_start": [context.index(sentence)]}
        yield {"question": f"What does {name} do?", "context": context, "answers": answers}


def choices() -> Iterator[dict[str, Any]]:
    """Yield questions with four choices, and the number of the right one."""
    known = list(functions())
    for number, (name, sentence, _) in enumerate(known):
        others = [known[(number + step) % len(known)][1] for step in (1, 2, 3)]
        right = number % 4
        yield {"text": f"What does {name} do?", "choices": [*others[:right], sentence, *others[right:]], "right": right}


def texts() -> Iterator[dict[str, Any]]:
    """Yield texts with a class, several classes, and a number."""
    for name, sentence, _ in functions():
        letters = [letter for letter in "xyz" if letter in sentence]
        yield {"text": sentence, "module": name.split(".")[0], "letters": letters, "words": len(sentence.split()) / 10}


def vocabulary(pre_tokenizer: pre_tokenizers.PreTokenizer, text: str) -> dict[str, int]:
    """Return the ids of characters and of the most frequent words: the same each time, unlike a WordPieceTrainer's."""
    counts = Counter(word for word, _ in pre_tokenizer.pre_tokenize_str(text))
    characters = sorted({character for word in counts for character in word})
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    pieces = dict.fromkeys([*SPECIAL.values(), *characters, *(f"##{each}" for each in characters), *frequent])
    return {piece: number for number, piece in enumerate([*pieces][:1024])}


def main(folder: Path) -> None:
    """Write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Iterable[Any]] = {"tags": tags(), "questions": questions(), "choices": choices(), "texts": texts()}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "".join((folder / f"{name}.jsonl").read_text() for name in ("tags", "texts"))
    words = pre_tokenizers.BertPreTokenizer()
    tokenizer = Tokenizer(models.WordPiece(vocabulary(words, text), unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = words
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder / "tokenizer")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tasks"))

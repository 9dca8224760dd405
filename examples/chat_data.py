"""Writes conversations, preferences and rated answers about Python's standard library, and a tokenizer with a template.

    python examples/chat_data.py FOLDER
    lockstep train chat tiny/chat

The folder is `chat` by default, where the recipe tiny/chat looks for it. Nothing comes from a network.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MODULES = (
    "math cmath statistics random string textwrap os.path shutil itertools functools operator heapq bisect copy json "
    "csv fractions glob colorsys calendar"
)
SPECIAL = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else -%}
{{ message['content'] + '<|im_end|>' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def functions() -> Iterator[tuple[str, str, str]]:
    """Yield the name of each documented function, the first sentence of its documentation, and its parameters."""
    for module in MODULES.split():
        for name, value in inspect.getmembers(importlib.import_module(module), callable):
            text = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
            if not name.startswith("_") and text:
                yield f"{module}.{name}", text.split(". ")[0].rstrip(".") + ".", _parameters(value)


def _parameters(function: object) -> str:
    try:
        names = list(inspect.signature(function).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "I don't know."
    return ", ".join(names) + "." if names else "None."


def conversations() -> Iterator[list[dict[str, str]]]:
    """Yield conversations of two and of four messages, some of them with a system text."""
    for number, (name, sentence, parameters) in enumerate(functions()):
        system = [{"role": "system", "content": "You are a Python teacher."}] if number % 3 == 0 else []
        ask = [{"role": "user", "content": f"What does {name} do?"}, {"role": "assistant", "content": sentence}]
        more = [{"role": "user", "content": "And its parameters?"}, {"role": "assistant", "content": parameters}]
        yield [*system, *ask, *(more if number % 2 else [])]


def preferences() -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield prompts with two answers: the right one, and another function's."""
    known = list(functions())
    for (name, sentence, _), (_, other, _) in zip(known, [*known[1:], known[0]], strict=True):
        answers = {"chosen": sentence, "rejected": other}
        messages = {key: [{"role": "assistant", "content": text}] for key, text in answers.items()}
        yield {"prompt": [{"role": "user", "content": f"What does {name} do?"}], **messages}


def rated() -> Iterator[dict[str, Any]]:
    """Yield prompts with one answer each, and whether it is the right one."""
    for number, row in enumerate(preferences()):
        is_right = number % 2 == 0
        yield {"prompt": row["prompt"], "completion": row["chosen" if is_right else "rejected"], "label": is_right}


def write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    """Write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = list(conversations())
    write(folder / "chats.jsonl", ({"messages": chat} for chat in chats))
    write(folder / "preferences.jsonl", preferences())
    write(folder / "rated.jsonl", rated())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((message["content"] for chat in chats for message in chat), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=special[1:2], **SPECIAL)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "tokenizer")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "chat"))

"""Custom text data: prompts with completions for a language model, and source with target texts for a seq2seq model.

python examples/own_text_data.py prompts
python examples/own_text_data.py seq2seq      needs the extra `hf`
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import lockstep

PAIRS = [(f"{a} + {b} =", f" {a + b}\n") for a in range(40) for b in range(40)]


def ids(text: str) -> Tensor:
    return torch.tensor(list(text.encode()))


class Prompts:
    """A map-style dataset: any object with a length that can be indexed."""

    def __len__(self) -> int:
        return len(PAIRS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        prompt, completion = map(ids, PAIRS[index])
        text = torch.cat([prompt, completion])
        labels = text.clone()
        labels[: len(prompt)] = -100  # the prompt is not a target
        return {"tokens": text[:-1], "labels": labels[1:]}  # each position predicts the next token


class Sums(Prompts):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source, target = map(ids, PAIRS[index])
        return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target}


def pad(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate: pad inputs with 0 and labels with -100, so that padding is no target either."""
    return {
        name: pad_sequence([item[name] for item in items], True, -100 if name == "labels" else 0) for name in items[0]
    }


def small_t5() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    )


def main(kind: str) -> None:
    config: dict[str, Any] = {"batch": {"global_size": 32}, "optim": {"lr": 0.003}, "run": {"steps": 30}}
    if kind == "prompts":
        config["model"] = {"kind": "transformer", "layers": 2, "width": 32, "heads": 4, "vocabulary": 256}
        finished = lockstep.train(config, train_dataset=Prompts(), collate=pad)
    else:
        finished = lockstep.train(config, model=small_t5, train_dataset=Sums(), collate=pad)
    print(f"{kind}: loss {finished.summary['loss']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1])

"""Models of different families, tiny: what each is made of, and data that it reads.

llama, gpt2, qwen     decoders: rotary or learnt positions, tied or untied heads, norms of queries and keys
mixtral               each token goes through two of four experts
t5                    encoder and decoder; a bias of relative positions in the first block of each
bert                  an encoder with a class for each text
vit                   an encoder with a class for each image
own                   none of these: recurrent, a layer used twice, a single parameter, sizes that no rank count divides
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from kit.ragged import PADDING
from lockstep.core.records import Batch

_SMALL = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 2,
    "intermediate_size": 20,
}
_CAUSAL = {
    "llama": {"model_type": "llama", **_SMALL, "num_key_value_heads": 1},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 64, "n_layer": 2, "n_embd": 24, "n_head": 2, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "qwen": {"model_type": "qwen3", **_SMALL, "num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True},
    "mixtral": {
        "model_type": "mixtral", **_SMALL, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip
_T5 = {
    "model_type": "t5", "vocab_size": 64, "num_layers": 2, "d_model": 24, "num_heads": 2, "d_kv": 9, "d_ff": 20,
    "dropout_rate": 0.0, "pad_token_id": PADDING, "decoder_start_token_id": PADDING,
}  # fmt: skip
_BERT = {
    "model_type": "bert", **_SMALL, "max_position_embeddings": 32, "pad_token_id": PADDING,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def family(name: str) -> dict[str, Any]:
    """The sections `model`, `objective` and `data` of a config."""
    if name in _CAUSAL:
        return {"model": _huggingface("causal-lm", _CAUSAL[name]), "data": _data("kit.ragged:collate_aligned")}
    if name == "t5":
        return {"model": _huggingface("seq2seq", _T5), "data": _data("kit.families:collate_pairs")}
    if name == "bert":
        model = {**_huggingface("sequence-classification", _BERT), "classes": 3}
        return {"model": model, "data": _data("kit.families:collate_classes")}
    own = {"kind": "custom", "target": f"kit.families:{'tiny_vit' if name == 'vit' else 'Odd'}"}
    source = {"kind": "custom", "target": "kit.families:images"}
    held_out = {"held-out": {**source, "arguments": {"samples": 11}}}
    return {"model": own, "objective": {"kind": "classification"}, "data": {"train": source, "evaluation": held_out}}


FAMILIES = (*_CAUSAL, "t5", "bert", "vit", "own")


def _huggingface(task: str, architecture: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "huggingface", "task": task, "architecture": architecture}


def _data(collate: str) -> dict[str, Any]:
    ragged = {"kind": "custom", "target": "kit.ragged:Ragged", "collate": collate}
    return {"train": ragged, "evaluation": {"held-out": {**ragged, "arguments": {"samples": 11}}}}


# --- data -----------------------------------------------------------------------------------------------------------


def collate_pairs(texts: list[Tensor]) -> Batch:
    """A text, and what it is to become: itself, backwards, without its first byte."""
    ids, mask = _padded(texts, PADDING)
    labels, _ = _padded([text.flip(0)[1:] for text in texts], -100)
    return Batch({"input_ids": ids, "attention_mask": mask, "labels": labels}, labels, len(texts), int(mask.sum()))


def collate_classes(texts: list[Tensor]) -> Batch:
    """A text's class is what its sum leaves when divided by three."""
    ids, mask = _padded(texts, PADDING)
    classes = torch.stack([text.sum() % 3 for text in texts])
    return Batch({"input_ids": ids, "attention_mask": mask}, classes, len(texts), int(mask.sum()))


def _padded(texts: list[Tensor], filler: int) -> tuple[Tensor, Tensor]:
    longest = max(len(text) for text in texts)
    ids, mask = torch.full((len(texts), longest), filler), torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return ids, mask


def images(samples: int = 40) -> TensorDataset:
    """Images [samples, 1, 8, 8]: one of five patterns, and noise."""
    draws = torch.Generator().manual_seed(5)
    patterns = torch.randn(5, 1, 8, 8, generator=draws)
    classes = torch.randint(5, (samples,), generator=draws)
    return TensorDataset(patterns[classes] + 0.5 * torch.randn(samples, 1, 8, 8, generator=draws), classes)


# --- models ---------------------------------------------------------------------------------------------------------


def tiny_vit() -> nn.Module:
    """A vision transformer of the transformers library."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5,
    )  # fmt: skip
    return ViTForImageClassification(config)


class Odd(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))  # fewer rows than ranks
        self.mix = nn.Linear(8, 8, bias=False)
        self.rows = nn.GRU(8, 7, batch_first=True)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.heads = nn.ModuleDict({"first": nn.Linear(7, 5), "second": nn.Linear(3, 5)})

    def forward(self, images: Tensor) -> Tensor:
        rows = self.mix(torch.tanh(self.mix(images.squeeze(1) * self.scale)))
        states, _ = self.rows(rows)
        hidden = self.norm(self.frozen(states[:, -1]))
        return self.heads["first"](hidden) + self.heads["second"](images[:, 0, 0, :3])

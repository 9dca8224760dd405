"""A model of the transformers library for each kind of head, tiny, and batches as its documentation has them.

HEADS --> {"task", "architecture", "samples", ...} --> a config, or an object and its data
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCABULARY, CLASSES, LENGTH, SAMPLES = 40, 3, 12, 6
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {"model_type": "bert", **_SIZES, **_NO_DROPOUT}
_LLAMA = {"model_type": "llama", **_SIZES, "num_key_value_heads": 1}
_BART = {
    "model_type": "bart", "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2, "forced_eos_token_id": 2, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
_T5 = {
    "model_type": "t5", "vocab_size": VOCABULARY, "num_layers": 2, "d_model": 16, "num_heads": 2, "d_kv": 8, "d_ff": 24,
    "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
_SOUND = {
    **{key: value for key, value in _SIZES.items() if key != "max_position_embeddings"},
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0, "conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 8],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0, "apply_spec_augment": False, "classifier_proj_size": 8,
}  # fmt: skip
_VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, **_NO_DROPOUT,
}  # fmt: skip
_WHISPER = {
    "model_type": "whisper", "vocab_size": VOCABULARY, "num_mel_bins": 4, "d_model": 16, "encoder_layers": 1,
    "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_source_positions": 10, "max_target_positions": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip


class Row(NamedTuple):
    """Attributes:
    samples: which of `Samples`.
    classes: of a classifier.
    pipeline: whether its blocks can be stages.
    coupled: its loss is no sum over samples, so that only one process with one micro-batch has the library's.
    unused: it has parameters that no gradient reaches.
    """

    task: str
    architecture: dict[str, Any]
    samples: str
    classes: int | None = None
    pipeline: bool = False
    coupled: bool = False
    unused: bool = False


HEADS: dict[str, Row] = {
    "llama causal": Row("causal-lm", _LLAMA, "text", pipeline=True),
    "bart causal": Row("causal-lm", _BART, "text", unused=True),
    "mixtral balanced": Row(
        "causal-lm",
        {**_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True},
        "text",
        coupled=True,
    ),
    "bert masked": Row("masked-lm", _BERT, "hidden", pipeline=True),
    "bart seq2seq": Row("seq2seq", _BART, "pairs"),
    "t5 seq2seq": Row("seq2seq", _T5, "pairs"),
    "bert classes": Row("sequence-classification", _BERT, "classes", CLASSES, pipeline=True),
    "llama classes": Row("sequence-classification", _LLAMA, "classes", CLASSES, pipeline=True),
    "bart classes": Row("sequence-classification", _BART, "endings", CLASSES),
    "bert several": Row("sequence-classification", _BERT, "several", CLASSES),
    "bert numbers": Row("sequence-classification", {**_BERT, "problem_type": "regression"}, "numbers", 1),
    "bert tokens": Row("token-classification", _BERT, "tokens", CLASSES, pipeline=True),
    "llama tokens": Row("token-classification", {**_LLAMA, "classifier_dropout": 0.0}, "tokens", CLASSES),
    "bert choices": Row("multiple-choice", _BERT, "choices"),
    "bert answers": Row("question-answering", _BERT, "answers", pipeline=True),
    "vit classes": Row("image-classification", _VIT, "images", CLASSES, pipeline=True),
    "wav2vec2 text": Row(
        "ctc", {"model_type": "wav2vec2", **_SOUND, "ctc_loss_reduction": "mean"}, "speech", unused=True
    ),
    "wav2vec2 text, sum": Row(
        "ctc", {"model_type": "wav2vec2", **_SOUND, "ctc_loss_reduction": "sum"}, "speech", unused=True
    ),
    "wav2vec2 classes": Row(
        "audio-classification", {"model_type": "wav2vec2", **_SOUND}, "sounds", CLASSES, unused=True
    ),
    "whisper text": Row("speech-seq2seq", _WHISPER, "mel"),
}


class Samples:
    """Noise. Valid targets are spread unevenly over the samples, so that a mean of means is another number."""

    def __init__(self, kind: str, samples: int = SAMPLES) -> None:
        draws = torch.Generator().manual_seed(7)
        self._items = [_item(kind, number, draws) for number in range(samples)]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._items[index]


def _item(kind: str, number: int, draws: torch.Generator) -> dict[str, Tensor]:
    def drawn(*shape: int, low: int = 3, high: int = VOCABULARY) -> Tensor:
        return torch.randint(low, high, shape, generator=draws)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws)

    ids, length = drawn(LENGTH), LENGTH - 2 * (number % 4)
    real = torch.arange(LENGTH) < length
    text = {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long()}
    one = torch.tensor(number % CLASSES)
    match kind:
        case "text":
            return {**text, "labels": ids.masked_fill(~real, -100)}
        case "hidden":
            hidden = real & (noise(LENGTH) > 0)
            return {**text, "labels": ids.masked_fill(~hidden, -100)}
        case "pairs":
            answer = drawn(LENGTH - 3)
            answer[LENGTH - 4 - number % 3 :] = -100
            return {**text, "labels": answer}
        case "classes":
            return {**text, "labels": one}
        case "endings":  # of BART, which classifies by the last end token
            ids[-1] = 2
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": one}
        case "several":
            return {**text, "labels": (noise(CLASSES) > 0).float()}
        case "numbers":
            return {**text, "labels": noise(1)[0]}
        case "tokens":
            return {**text, "labels": drawn(LENGTH, low=0, high=CLASSES).masked_fill(~real, -100)}
        case "choices":
            return {name: torch.stack([value, value.flip(0)]) for name, value in text.items()} | {"labels": one % 2}
        case "answers":
            places = drawn(2, low=0, high=length)
            if number == 1:  # cut off
                places = places + LENGTH
            return {**text, "start_positions": places[0], "end_positions": places[1]}
        case "images":
            return {"pixel_values": noise(1, 8, 8), "labels": one}
        case "speech":
            spoken = drawn(4)
            spoken[3 - number % 2 :] = -100
            return {"input_values": noise(400), "labels": spoken}
        case "sounds":
            return {"input_values": noise(400), "labels": one}
    assert kind == "mel", kind
    return {"input_features": noise(4, 20), "labels": drawn(5)}


def section(row: Row) -> dict[str, Any]:
    """The config's section `model`."""
    classes = {} if row.classes is None else {"classes": row.classes}
    return {"kind": "huggingface", "task": row.task, "architecture": row.architecture, **classes}


def made(name: str) -> nn.Module:
    """The model as a user would make it: a function of no arguments, for `model.target`."""
    import transformers

    from lockstep.core.tasks import TASKS

    row = HEADS[name]
    kind, keys = row.architecture["model_type"], {**row.architecture}
    del keys["model_type"]
    labels = {} if row.classes is None else {"num_labels": row.classes}
    config = transformers.AutoConfig.for_model(kind, **keys, **labels)
    config.use_cache = False
    torch.manual_seed(3)
    model: nn.Module = getattr(transformers, f"AutoModel{TASKS[row.task].head}").from_config(config)
    return model

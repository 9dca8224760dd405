"""Families of the transformers library, tiny, built from configs alone: which head, which data, which sizes.

head          inputs                                   targets
causal        input_ids, attention_mask                the inputs, shifted by the objective
causal-left   the same, with padding before the texts
masked        input_ids, attention_mask                tokens at every third position
sequence      input_ids, attention_mask                a class for each text
token         input_ids, attention_mask                a class for each token
answer        input_ids, attention_mask                where an answer starts and ends
choice        input_ids [B, choices, T], ...           which of the texts it is
seq2seq       input_ids, attention_mask, labels        another text
image         pixel_values                             a class for each image
pixels        pixel_values                             a class for each patch of an image
sound         input_values                             a class for each sound
ctc           input_values                             a transcript
speech2text   input_features, labels                   a text
pairs         input_ids, attention_mask, pixel_values  which text belongs to which image
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kit.families import collate_classes, collate_pairs
from kit.ragged import PADDING, Ragged, collate_aligned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lockstep.core.records import Batch

_TEXT = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_FALCON = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_hidden_size": 20,
}  # fmt: skip
_ENCODER = {
    **_TEXT, "max_position_embeddings": 40, "pad_token_id": PADDING, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_GPT = {"vocab_size": 64, "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 40}
_UNDROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BART = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 40,
    "dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "scale_embedding": False,
}  # fmt: skip
_T5 = {
    "vocab_size": 64, "num_layers": 2, "d_model": 16, "num_heads": 2, "d_kv": 8, "d_ff": 20, "dropout_rate": 0.0,
    "pad_token_id": PADDING, "decoder_start_token_id": PADDING,
}  # fmt: skip
_VISION = {
    "image_size": 8, "patch_size": 4, "num_channels": 3, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 20, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_SOUND = {
    "vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
    "conv_dim": (8, 8), "conv_kernel": (8, 4), "conv_stride": (4, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "activation_dropout": 0.0,
    "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0,
    "apply_spec_augment": False, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LABELS = {"num_labels": 3}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("causal", _GROUPED),
    "gpt2": ("causal", {**_GPT, **_UNDROPPED}),
    "gpt_neo": ("causal", {
        "vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 40,
        "attention_types": [[["global", "local"], 1]], "window_size": 8, "intermediate_size": 20,
        "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0,
    }),
    "gpt_neox": ("causal", {**_TEXT, "max_position_embeddings": 40, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "gptj": ("causal", {**_GPT, **_UNDROPPED, "rotary_dim": 4}),
    "codegen": ("causal", {**_GPT, **_UNDROPPED, "n_head": 4, "n_ctx": 40, "rotary_dim": 4}),
    "gpt_bigcode": ("causal", {**_GPT, **_UNDROPPED}),
    "openai-gpt": ("causal", {**_GPT, **_UNDROPPED}),
    "opt": ("causal", {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 20,
        "max_position_embeddings": 40, "word_embed_proj_dim": 16, "dropout": 0.0, "attention_dropout": 0.0,
        "layerdrop": 0.0, "pad_token_id": PADDING,
    }),
    "opt-left": ("causal-left", {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 20,
        "max_position_embeddings": 40, "word_embed_proj_dim": 16, "dropout": 0.0, "attention_dropout": 0.0,
        "layerdrop": 0.0, "pad_token_id": PADDING,
    }),
    "llama-left": ("causal-left", _GROUPED),
    "gpt2-left": ("causal-left", {**_GPT, **_UNDROPPED}),
    "bloom": ("causal", {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "falcon": ("causal", {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-alibi": ("causal", {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False}),
    "mpt": ("causal", {"vocab_size": 64, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 40}),
    "mistral": ("causal", {**_GROUPED, "sliding_window": None}),
    "mistral-window": ("causal", {**_GROUPED, "sliding_window": 8}),
    "qwen2": ("causal", _GROUPED),
    "qwen3": ("causal", {**_GROUPED, "head_dim": 8, "tie_word_embeddings": True}),
    "gemma": ("causal", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("causal", {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64}),
    "gemma3_text": ("causal", {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64}),
    "phi": ("causal", _GROUPED),
    "phi3": ("causal", {**_GROUPED, "pad_token_id": PADDING}),
    "stablelm": ("causal", _GROUPED),
    "stablelm-normed": ("causal", {**_GROUPED, "qk_layernorm": True, "use_parallel_residual": True}),
    "olmo": ("causal", _GROUPED),
    "olmo2": ("causal", _GROUPED),
    "starcoder2": ("causal", _GROUPED),
    "cohere": ("causal", _GROUPED),
    "granite": ("causal", _GROUPED),
    "glm": ("causal", {**_GROUPED, "head_dim": 8, "pad_token_id": PADDING}),
    "smollm3": ("causal", {**_GROUPED, "pad_token_id": PADDING}),
    "persimmon": ("causal", _TEXT),
    "nemotron": ("causal", _GROUPED),
    "helium": ("causal", {**_GROUPED, "head_dim": 8}),
    "biogpt": ("causal", {
        **_ENCODER, "hidden_dropout_prob": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0,
    }),
    "xglm": ("causal", {
        "vocab_size": 64, "d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 20, "dropout": 0.0,
        "attention_dropout": 0.0, "layerdrop": 0.0, "max_position_embeddings": 40,
    }),
    "mixtral": ("causal", {**_GROUPED, **_EXPERTS}),
    "mixtral-balanced": ("causal-balanced", {**_GROUPED, **_EXPERTS, "output_router_logits": True}),
    "qwen3_moe": ("causal", {
        **_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "decoder_sparse_step": 1,
    }),
    "olmoe": ("causal", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("causal", {
        **_GROUPED, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 12,
        "first_k_dense_replace": 1, "n_shared_experts": 1,
    }),
    "mamba": ("causal", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    "rwkv": ("causal", {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16, "context_length": 40,
    }),
    "bert": ("masked", _ENCODER),
    "roberta": ("masked", {**_ENCODER, "pad_token_id": PADDING}),
    "distilbert": ("masked", {
        "vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 20, "max_position_embeddings": 40,
        "dropout": 0.0, "attention_dropout": 0.0,
    }),
    "albert": ("masked", {**_ENCODER, "embedding_size": 8, "classifier_dropout_prob": 0.0}),
    "electra": ("masked", {**_ENCODER, "embedding_size": 8}),
    "deberta-v2": ("masked", {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "modernbert": ("masked", {
        **_TEXT, "max_position_embeddings": 40, "pad_token_id": PADDING, "attention_dropout": 0.0, "mlp_dropout": 0.0,
    }),
    "esm": ("masked", {**_ENCODER, "position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": False}),
    "fnet": ("masked", {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 20,
        "hidden_dropout_prob": 0.0, "max_position_embeddings": 40, "pad_token_id": PADDING,
    }),
    "mpnet": ("sequence", _ENCODER),
    "xlnet": ("sequence", {
        "vocab_size": 64, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 20, "dropout": 0.0,
        "summary_last_dropout": 0.0,
        "pad_token_id": PADDING,
    }),
    "llama-classes": ("sequence", {**_GROUPED, "pad_token_id": PADDING}),
    "roberta-tokens": ("token", _ENCODER),
    "distilbert-answers": ("answer", {
        "vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 20, "max_position_embeddings": 40,
        "dropout": 0.0, "attention_dropout": 0.0, "qa_dropout": 0.0,
    }),
    "bert-choices": ("choice", _ENCODER),
    "t5": ("seq2seq", _T5),
    "mt5": ("seq2seq", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "switch_transformers": ("seq2seq", {
        **_T5, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
        "num_experts": 4, "router_jitter_noise": 0.0,
    }),
    "bart": ("seq2seq", _BART),
    "mbart": ("seq2seq", _BART),
    "pegasus": ("seq2seq", _BART),
    "marian": ("seq2seq", {**_BART, "decoder_vocab_size": 64, "share_encoder_decoder_embeddings": True}),
    "vit": ("image", _VISION),
    "deit": ("image", _VISION),
    "beit": ("image", {**_VISION, "drop_path_rate": 0.0}),
    "dinov2": ("image", _VISION),
    "swin": ("image", {
        "image_size": 16, "patch_size": 2, "num_channels": 3, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2],
        "window_size": 4, "drop_path_rate": 0.0,
    }),
    "convnext": ("image", {"num_channels": 3, "patch_size": 2, "hidden_sizes": [8, 16], "depths": [1, 1],
                           "num_stages": 2}),
    "resnet": ("image", {"num_channels": 3, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
                         "layer_type": "basic"}),
    "mobilevit": ("image", {
        "image_size": 32, "patch_size": 2, "hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 8, 8, 12, 16, 16, 20],
        "num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
    }),
    "poolformer": ("image", {
        "num_channels": 3, "depths": [1, 1], "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "patch_sizes": [3, 3],
        "strides": [2, 2], "padding": [1, 1], "drop_path_rate": 0.0,
    }),
    "segformer": ("pixels", {
        "num_channels": 3, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
        "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
        "decoder_hidden_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0,
    }),
    "wav2vec2": ("ctc", _SOUND),
    "hubert": ("sound", {**_SOUND, "classifier_proj_size": 8}),
    "ast": ("spectrogram", {
        **{key: value for key, value in _VISION.items() if key not in ("image_size", "num_channels")},
        "num_mel_bins": 8, "max_length": 16, "frequency_stride": 4, "time_stride": 4,
    }),
    "whisper": ("speech2text", {
        **{key: value for key, value in _BART.items() if key != "max_position_embeddings"}, "num_mel_bins": 8,
        "max_source_positions": 16, "max_target_positions": 40, "activation_dropout": 0.0,
    }),
    "clip": ("pairs", {
        "text_config": {**_ENCODER, "projection_dim": 8, "eos_token_id": 2, "bos_token_id": 1},
        "vision_config": {**_VISION, "projection_dim": 8},
        "projection_dim": 8,
    }),
    "qwen3_next": ("causal", {
        **_GROUPED, "num_hidden_layers": 4, "head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }),
    "nemotron_h": ("causal", {
        **_GROUPED, "num_hidden_layers": 4, "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1,
        "ssm_state_size": 4, "chunk_size": 4, "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 12,
    }),
    "lfm2": ("causal", {
        **_GROUPED, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    }),
    "granitemoehybrid": ("causal", {
        **_GROUPED, "num_hidden_layers": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
        "mamba_d_state": 4, "mamba_chunk_size": 4, "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 12,
    }),
    "bamba": ("causal", {
        **_GROUPED, "num_hidden_layers": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
        "mamba_d_state": 4, "mamba_chunk_size": 4, "attn_layer_indices": [1, 3],
    }),
    "jamba": ("causal", {
        **_GROUPED, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4,
        "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False,
        "pad_token_id": PADDING,
    }),
    "olmo3": ("causal", {**_GROUPED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "cohere2": ("causal", {**_GROUPED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "glm4": ("causal", {**_GROUPED, "head_dim": 8, "pad_token_id": PADDING}),
    "exaone4": ("causal", {**_GROUPED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "ernie4_5": ("causal", {**_GROUPED, "head_dim": 8}),
    "hunyuan_v1_dense": ("causal", {**_GROUPED, "head_dim": 8}),
    "gpt_oss": ("causal", {
        **_GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    }),
    "ministral": ("causal", {
        **_GROUPED, "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "mamba2": ("causal", {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "n_groups": 1,
        "state_size": 4, "chunk_size": 4,
    }),
    "falcon_mamba": ("causal", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    "falcon_h1": ("causal", {
        **_GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4,
        "mamba_chunk_size": 4,
    }),
    "zamba2": ("causal", {
        **_GROUPED, "num_hidden_layers": 4, "mamba_d_state": 4, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 4,
        "mamba_headdim": 8, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1,
        "use_mamba_kernels": False, "pad_token_id": PADDING,
    }),
    "recurrent_gemma": ("causal", {
        **_GROUPED, "num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 8, "pad_token_id": PADDING,
        "block_types": ["recurrent", "recurrent", "attention"],
    }),
    "glm4_moe": ("causal", {**_GROUPED, "moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "ernie4_5_moe": ("causal", {
        **_GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_layer_start_index": 1,
    }),
    "seed_oss": ("causal", {**_GROUPED, "head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "minimax": ("causal", {**_GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"]}),
    "granitemoe": ("causal", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("causal", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12}),
    "convnextv2": ("image", {
        "num_channels": 3, "patch_size": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2,
    }),
    "dinov2_with_registers": ("image", {**_VISION, "num_register_tokens": 2}),
    "swinv2": ("image", {
        "image_size": 16, "patch_size": 2, "num_channels": 3, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2],
        "window_size": 4, "drop_path_rate": 0.0,
    }),
    "olmo_hybrid": ("causal", {
        **_GROUPED, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
        "pad_token_id": PADDING,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }),
    # A batch of 14 tokens or fewer makes its attention full for good, by other modules
    "big_bird": ("masked", {**_ENCODER, "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}),
    # It convolves over padding
    "convbert": ("masked", {**_ENCODER, "embedding_size": 8, "head_ratio": 1, "conv_kernel_size": 3}),
    "roformer": ("masked", {**_ENCODER, "embedding_size": 8}),
    "longformer": ("sequence", {**_ENCODER, "attention_window": 4}),
    "mobilebert": ("masked", {**_ENCODER, "embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8}),
    "deberta": ("masked", {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "eurobert": ("masked", {**_GROUPED, "max_position_embeddings": 40, "pad_token_id": PADDING}),
}  # fmt: skip
"""Head and keys of the config, by the name in the table."""

_TYPES = {
    "falcon-alibi": "falcon", "opt-left": "opt", "llama-left": "llama", "gpt2-left": "gpt2",
    "stablelm-normed": "stablelm", "mistral-window": "mistral", "mixtral-balanced": "mixtral", "llama-classes": "llama",
    "roberta-tokens": "roberta", "distilbert-answers": "distilbert", "bert-choices": "bert",
    "ast": "audio-spectrogram-transformer",
}  # fmt: skip
"""The library's name of the model type, where it differs."""

_UNUSED = {
    "esm": ["esm.contact_head.*"],
    "xlnet": ["transformer.mask_emb", "*.r_s_bias", "*.seg_embed"],
    "fnet": ["fnet.pooler.*"],
    "dinov2": ["dinov2.embeddings.mask_token"],
    "wav2vec2": ["wav2vec2.masked_spec_embed"],
    "hubert": ["hubert.masked_spec_embed"],
    "dinov2_with_registers": ["dinov2_with_registers.embeddings.mask_token"],
    "big_bird": ["bert.pooler.*"],
}
"""Parameters that these heads never use; they are frozen, as the refusal recommends."""

_SKIPPING = ("switch_transformers",)
"""Families whose experts are modules of their own, which a batch without a token for them leaves out."""

_TASKS = {
    "causal": "causal-lm", "causal-left": "causal-lm", "causal-balanced": "causal-lm", "masked": "masked-lm",
    "sequence": "sequence-classification", "seq2seq": "seq2seq",
}  # fmt: skip
_OTHER_HEADS = {
    "token": "AutoModelForTokenClassification",
    "answer": "AutoModelForQuestionAnswering",
    "choice": "AutoModelForMultipleChoice",
    "image": "AutoModelForImageClassification",
    "pixels": "AutoModelForSemanticSegmentation",
    "sound": "AutoModelForAudioClassification",
    "spectrogram": "AutoModelForAudioClassification",
    "ctc": "AutoModelForCTC",
    "speech2text": "AutoModelForSpeechSeq2Seq",
    "pairs": "AutoModel",
}
"""Heads without a task in the config: a custom function builds the model."""

_OBJECTIVES: dict[str, dict[str, Any]] = {
    "causal-balanced": {"kind": "custom", "target": "compatibility.families:Balanced"},
    "token": {"kind": "classification"},
    "answer": {"kind": "custom", "target": "compatibility.families:Answers"},
    "choice": {"kind": "classification"},
    "image": {"kind": "classification"},
    "pixels": {"kind": "custom", "target": "compatibility.families:Pixels"},
    "sound": {"kind": "classification"},
    "spectrogram": {"kind": "classification"},
    "ctc": {"kind": "custom", "target": "compatibility.families:Transcripts"},
    "speech2text": {"kind": "seq2seq"},
    "pairs": {"kind": "custom", "target": "compatibility.families:Matches"},
}


def sections(name: str) -> dict[str, Any]:
    """Return the sections `model`, `objective` and `data` of a config."""
    head, architecture = FAMILIES[name]
    return {
        "model": {**_model(name, head, architecture), "freeze": _UNUSED.get(name, [])},
        **({"objective": _OBJECTIVES[head]} if head in _OBJECTIVES else {}),
        "data": {"train": _data(name, head)},
        **({"parallel": {"ddp": {"find_unused_parameters": True}}} if name in _SKIPPING else {}),
    }


def _model(name: str, head: str, architecture: dict[str, Any]) -> dict[str, Any]:
    if head in _OTHER_HEADS:
        return {"kind": "custom", "target": "compatibility.families:other_head", "arguments": {"name": name}}
    architecture = {"model_type": _TYPES.get(name, name), **architecture}
    classes = {"classes": 3} if head == "sequence" else {}
    return {"kind": "huggingface", "task": _TASKS[head], "architecture": architecture, **classes}


def other_head(name: str) -> nn.Module:
    """Return the model of a family whose head has no task in the config."""
    import transformers

    head, architecture = FAMILIES[name]
    classes = _LABELS if head in ("token", "image", "pixels", "sound", "spectrogram") else {}
    config = transformers.AutoConfig.for_model(_TYPES.get(name, name), **architecture, **classes)
    if head == "pairs":
        return _Paired(config)
    if name == "deit":
        return transformers.DeiTForImageClassification(config)
    model: nn.Module = getattr(transformers, _OTHER_HEADS[head]).from_config(config)
    if head == "speech2text":
        config.use_cache = False
    return model


class _Paired(nn.Module):
    """CLIP with similarities as outputs, which an objective can sum; the library's loss is a mean."""

    def __init__(self, config: Any) -> None:
        import transformers

        super().__init__()
        self.clip = transformers.AutoModel.from_config(config)

    def forward(self, **inputs: Tensor) -> Tensor:
        logits: Tensor = self.clip(**inputs).logits_per_image
        return logits


# --- data -----------------------------------------------------------------------------------------------------------


def _data(name: str, head: str) -> dict[str, Any]:
    if head in _COLLATED:
        texts = "compatibility.families:EqualFirst" if head == "causal-left" else "kit.ragged:Ragged"
        return {"kind": "custom", "target": texts, "collate": f"compatibility.families:{_COLLATED[head]}"}
    return {"kind": "custom", "target": "compatibility.families:Made", "arguments": {"name": name}}


_COLLATED = {
    "causal": "causal", "causal-left": "causal_left", "causal-balanced": "causal", "masked": "masked",
    "sequence": "classes", "token": "tokens", "answer": "answers", "choice": "choices", "seq2seq": "pairs",
}  # fmt: skip
causal, classes, pairs = collate_aligned, collate_classes, collate_pairs


def causal_left_predicted(texts: list[Tensor]) -> Batch:
    """Collate like `causal_left`, but let the last padding token predict the first token of the text."""
    batch = causal_left(texts)
    assert isinstance(batch.inputs, dict)
    targets = batch.inputs["input_ids"].masked_fill(batch.inputs["attention_mask"] == 0, -100)
    return Batch(batch.inputs, targets, batch.samples, batch.tokens)


class EqualFirst(Ragged):
    """Texts whose first samples have equal lengths, so they show no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.texts[:4] = [torch.arange(1, 21) + shift for shift in range(4)]


def causal_left(texts: list[Tensor]) -> Batch:
    """Collate with padding before the texts, which predicts nothing."""
    batch = collate_aligned([text.flip(0) for text in texts])
    assert isinstance(batch.inputs, dict)
    inputs = {key: tensor.flip(1) for key, tensor in batch.inputs.items()}
    first = inputs["attention_mask"].cumsum(1) == 1
    return Batch(inputs, batch.targets.flip(1).masked_fill(first, -100), batch.samples, batch.tokens)


def masked(texts: list[Tensor]) -> Batch:
    """Collate with every third token masked by token 3."""
    batch = collate_aligned(texts)
    assert isinstance(batch.inputs, dict)
    ids = batch.inputs["input_ids"].clone()
    hidden = (torch.arange(ids.shape[1]) % 3 == 1) & (batch.targets != -100)
    targets = batch.targets.masked_fill(~hidden, -100)
    return Batch({**batch.inputs, "input_ids": ids.masked_fill(hidden, 3)}, targets, batch.samples, batch.tokens)


def tokens(texts: list[Tensor]) -> Batch:
    batch = collate_aligned(texts)
    return Batch(batch.inputs, batch.targets.where(batch.targets == -100, batch.targets % 3), len(texts), batch.tokens)


def answers(texts: list[Tensor]) -> Batch:
    """Collate with the answer between the first third of a text and its end."""
    batch = collate_aligned(texts)
    spans = torch.tensor([[len(text) // 3, len(text) - 1] for text in texts])
    return Batch(batch.inputs, spans, len(texts), batch.tokens)


def choices(texts: list[Tensor]) -> Batch:
    """Collate each text with its reverse."""
    batch = collate_aligned(texts)
    assert isinstance(batch.inputs, dict)
    turned = collate_aligned([text.flip(0) for text in texts])
    assert isinstance(turned.inputs, dict)
    both = {key: torch.stack([tensor, turned.inputs[key]], dim=1) for key, tensor in batch.inputs.items()}
    right = torch.tensor([int(text[0] > text[-1]) for text in texts])
    return Batch(both, right, len(texts), 2 * batch.tokens)


class Made(Dataset[dict[str, Tensor]]):
    """Images and sounds of noise, with targets."""

    def __init__(self, name: str, samples: int = 24) -> None:
        head, architecture = FAMILIES[name]
        draws = torch.Generator().manual_seed(3)
        self.samples = [_MADE[head](architecture, draws) for _ in range(samples)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


Architecture = dict[str, Any]


def _image(architecture: Architecture, draws: torch.Generator) -> dict[str, Tensor]:
    size = architecture.get("image_size", 8)
    return {"pixel_values": torch.randn(3, size, size, generator=draws), "labels": _number(3, draws)}


def _pixels(architecture: Architecture, draws: torch.Generator) -> dict[str, Tensor]:
    shown = torch.randn(3, 16, 16, generator=draws)
    return {"pixel_values": shown, "labels": torch.randint(3, (8, 8), generator=draws)}


def _sound(architecture: Architecture, draws: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(200, generator=draws), "labels": _number(3, draws)}


def _spectrogram(architecture: Architecture, draws: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(16, 8, generator=draws), "labels": _number(3, draws)}


def _transcript(architecture: Architecture, draws: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(1, 12, (5,), generator=draws)
    labels[int(_number(3, draws)) + 3 :] = -100
    return {"input_values": torch.randn(200, generator=draws), "labels": labels}


def _dictated(architecture: Architecture, draws: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(3, 64, (6,), generator=draws)
    features = torch.randn(8, 32, generator=draws)
    return {
        "input_features": features,
        "decoder_input_ids": torch.cat([torch.tensor([2]), labels[:-1]]),
        "labels": labels,
    }


def _titled(architecture: Architecture, draws: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (6,), generator=draws)
    ids[-1] = 2
    shown = torch.randn(3, 8, 8, generator=draws)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": shown, "labels": torch.tensor(0)}


_MADE: dict[str, Callable[[Architecture, torch.Generator], dict[str, Tensor]]] = {
    "image": _image, "pixels": _pixels, "sound": _sound, "spectrogram": _spectrogram, "ctc": _transcript,
    "speech2text": _dictated, "pairs": _titled,
}  # fmt: skip


def _number(most: int, draws: torch.Generator) -> Tensor:
    return torch.randint(most, (), generator=draws)


# --- objectives -----------------------------------------------------------------------------------------------------


class Balanced:
    """Next-token loss with the experts' balancing loss, weighted as in transformers.

    The balancing loss is one of a batch, so a run depends on how batches are split.
    """

    decomposes = False

    def count(self, batch: Batch) -> int:
        return int((batch.targets[:, 1:] != -100).sum())

    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        logits = outputs["logits"][:, :-1].flatten(0, 1).float()
        plain = F.cross_entropy(logits, batch.targets[:, 1:].flatten(), reduction="sum")
        return plain + 0.001 * outputs["aux_loss"] * self.count(batch)


class Answers:
    """Loss of the start and end of an answer."""

    def count(self, batch: Batch) -> int:
        return batch.samples

    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        start = F.cross_entropy(outputs["start_logits"].float(), batch.targets[:, 0], reduction="sum")
        return start + F.cross_entropy(outputs["end_logits"].float(), batch.targets[:, 1], reduction="sum")


class Pixels:
    """Loss of a class for each position of logits [B, C, H, W]."""

    def count(self, batch: Batch) -> int:
        return int(batch.targets.numel())

    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs["logits"].float(), batch.targets, reduction="sum")


class Transcripts:
    """CTC loss over logits [B, T, V] of sounds of one length."""

    def count(self, batch: Batch) -> int:
        return int((batch.targets != -100).sum())

    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        logs = outputs["logits"].float().log_softmax(-1).transpose(0, 1)
        valid = batch.targets != -100
        lengths = torch.full((logs.shape[1],), logs.shape[0])
        return F.ctc_loss(logs, batch.targets[valid], lengths, valid.sum(1), reduction="sum", zero_infinity=True)


class Matches:
    """Contrastive loss within a micro-batch, so a run depends on how batches are split."""

    decomposes = False

    def count(self, batch: Batch) -> int:
        return batch.samples

    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs, torch.arange(len(outputs)), reduction="sum")

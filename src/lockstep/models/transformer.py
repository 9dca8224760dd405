"""A decoder-only transformer.

    tokens [B, T] -> embedding -> blocks -> norm -> head -> logits [B, T, V]

    block:   x + attention(norm(x))        rotary positions (Su et al. 2021, arXiv:2104.09864), causal,
             x + mlp(norm(x))              grouped queries (Ainslie et al. 2023, arXiv:2305.13245);
                                           SwiGLU (Shazeer 2020, arXiv:2002.05202); RMS norm

Every projection is a separate Linear, so that tensor parallelism shards by whole heads and an optimizer of matrices
gets matrices; one fused projection wasn't faster.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.schema import TransformerModel
from lockstep.core.records import DataFacts
from lockstep.distributed.forward_mode import current_sequences, positions
from lockstep.models.initialization import Rule, constant, normal

_SHORT = 512
"""The most tokens for bf16 products to be faster than the CPU's flash kernel, with its slow backward."""
_QUERIES = 64
"""Number of queries in such a product."""

TENSOR_PLAN = {
    "embedding": "rowwise",
    "blocks.*.attention": "shared_input",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp": "shared_input",
    "blocks.*.mlp.gate": "colwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "colwise_gather_output",
}
"""The tensor-parallel plan of the matrices, by whole heads, in the styles of `transforms.tensor_plans`."""
SEQUENCE_PLAN = {
    **TENSOR_PLAN,
    "embedding": "rowwise_sequence",
    "blocks.*.attention_norm": "sequence",
    "blocks.*.attention": "gather_sequence",
    "blocks.*.attention.out": "rowwise_sequence",
    "blocks.*.mlp_norm": "sequence",
    "blocks.*.mlp": "gather_sequence",
    "blocks.*.mlp.down": "rowwise_sequence",
    "norm": "sequence",
}
"""The same with sequence parallelism between the matrices."""


class Transformer(nn.Module):
    """A decoder-only transformer with the shape in `section`."""

    def __init__(self, section: TransformerModel, vocabulary: int) -> None:
        super().__init__()
        self.head_width = section.width // section.heads
        self.rope_base = section.rope_base
        self.embedding = nn.Embedding(vocabulary, section.width)
        self.dropout = nn.Dropout(section.dropout)
        self.blocks = nn.ModuleList(Block(section) for _ in range(section.layers))
        self.norm = nn.RMSNorm(section.width, eps=1e-6)
        self.head = nn.Linear(section.width, vocabulary, bias=False)
        if section.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, V] for tokens [B, T] int64."""
        rotation = rotary_angles(positions(tokens.shape[1], tokens.device), self.head_width, self.rope_base)
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """A layer; x [B, T, W] -> [B, T, W]."""

    def __init__(self, section: TransformerModel) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(section.width, eps=1e-6)
        self.attention = Attention(section.width, section.heads, section.kv_heads or section.heads)
        self.mlp_norm = nn.RMSNorm(section.width, eps=1e-6)
        # as many weights as a plain MLP of 4 widths
        default_width = math.ceil(8 * section.width / 3 / 32) * 32
        self.mlp = SwiGLU(section.width, section.mlp_width or default_width)
        self.dropout = nn.Dropout(section.dropout)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        changed: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return changed


class Attention(nn.Module):
    """Causal self-attention; each of `kv_heads` keys and values serves a group of queries."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        mixed_BHTD = causal_attention(rotate(query, rotation), rotate(key, rotation), value)
        mixed: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        """Return [B, T, heads * D] as [B, heads, T, D], for the heads of this rank."""
        samples, length, width = x.shape
        return x.view(samples, length, width // self.head_width, self.head_width).transpose(1, 2)


class SwiGLU(nn.Module):
    """The gated MLP, down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, mlp_width, bias=False)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        narrowed: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return narrowed


def rotary_angles(places: Tensor, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, D], fp32, for `rotate` at these positions [T].

    Position t rotates pair i, (x[i], x[i + D/2]), by t * base^(-2i/D). They are computed in every forward (40 us), so
    that there is no buffer to move, to shard or to save.
    """
    frequencies = base ** (torch.arange(0, head_width, 2, device=places.device, dtype=torch.float32) / -head_width)
    angles = torch.outer(places.float(), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs of [B, heads, T, D] in fp32; return them in the dtype of x."""
    cos, sin = rotation
    turned: Tensor = x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
    return turned.to(x.dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return softmax(query key' / sqrt(D)) value over past and present positions.

    query [B, H, T, D]; key and value [B, K, T, D], K a divisor of H -> [B, H, T, D].
    """
    short = query.device.type == "cpu" and query.dtype is torch.bfloat16 and query.shape[2] <= _SHORT
    if short and current_sequences() is None:
        return _short_attention(query, key, value)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def _short_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the same by matrix products of a few queries and the keys that they attend to.

    Forward and backward take 9 ms instead of 25, for B 8, H 4, T 256, D 24 in bf16 on one core. The queries of a group
    are concatenated, so that keys need no copies.
    """
    samples, heads, length, width = query.shape
    kv_heads = key.shape[1]
    group, batch = heads // kv_heads, samples * kv_heads
    queries = query.reshape(batch, group, length, width)
    keys = key.reshape(batch, length, width).transpose(1, 2)
    values = value.reshape(batch, length, width)
    future = torch.full((length, length), -math.inf, dtype=query.dtype, device=query.device).triu(1)
    mixed = []
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        scores = torch.baddbmm(
            future[start:end, :end].repeat(group, 1).expand(batch, -1, -1),
            queries[:, :, start:end].reshape(batch, group * (end - start), width),
            keys[:, :, :end],
            alpha=width**-0.5,
        )
        part = torch.softmax(scores, dim=-1) @ values[:, :end]
        mixed.append(part.view(samples, heads, end - start, width))
    return torch.cat(mixed, dim=2)


def rule_of(layers: int, name: str, tensor: Tensor) -> Rule:
    """Return the rule of a parameter's initial values.

    Matrices are normal with std 0.02, or 0.02/sqrt(2 layers) if they write into the residual stream, so that its
    variance doesn't grow with depth (Radford et al. 2019, GPT-2, section 2.3); norms are one.
    """
    if tensor.dim() < 2:
        return constant(1.0)
    if name.endswith((".out.weight", ".down.weight")):
        return normal(0.02 / math.sqrt(2 * layers))
    return normal(0.02)


def flops_per_token(module: nn.Module, facts: DataFacts) -> float | None:
    """Return the floating-point operations of forward and backward for each token; None if they aren't known.

    6 N + 12 sum over layers of W T (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B), for N weights in matrix
    products (with the output head), attention of width W, and T tokens of a sample, or of a layer's sliding window. Of
    experts, N has those that a token goes through. Recomputation and causality don't count; a frozen weight counts
    4.
    """
    shape = _attention_widths(module)
    used = _share_of_experts(module)
    if shape is None or used is None:
        return None
    weights: dict[nn.Parameter, float] = {}
    for name, child in module.named_modules():
        if not isinstance(child, nn.Embedding):
            share = used if ".experts" in f".{name}" else 1.0
            weights |= {parameter: share for parameter in child.parameters(recurse=False) if parameter.dim() > 1}
    products = sum(share * weight.numel() * (6 if weight.requires_grad else 4) for weight, share in weights.items())
    tokens = facts.tokens_per_sample or 0
    return float(products + sum(12 * width * min(tokens, window or tokens) for width, window in shape))


def _attention_widths(module: nn.Module) -> list[tuple[int, int]] | None:
    """Return each layer's width of attention, and the tokens of its window: 0 for all; None if they aren't known."""
    if isinstance(module, Transformer):
        return [(module.embedding.embedding_dim, 0)] * len(module.blocks)
    config = getattr(module, "config", None)  # a transformers model's
    reads_text = getattr(module, "main_input_name", None) == "input_ids"
    if not reads_text or getattr(config, "is_encoder_decoder", True):
        return None
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if not isinstance(layers, int) or not isinstance(width, int):
        return None
    heads, of_head = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    if isinstance(heads, int) and isinstance(of_head, int):
        width = heads * of_head
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    windows = [window if kind == "sliding_attention" and isinstance(window, int) else 0 for kind in kinds or ()]
    return [(width, limit) for limit in windows] if len(windows) == layers else [(width, 0)] * layers


def _share_of_experts(module: nn.Module) -> float | None:
    """Return the share of a model's experts that a token goes through; 1 without experts, None if it isn't known."""
    if not any(name.endswith(".experts") for name, _ in module.named_modules()):
        return 1.0
    config = getattr(module, "config", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    number = next((size for name in names if isinstance(size := getattr(config, name, None), int)), 0)
    used = getattr(config, "num_experts_per_tok", None)
    return used / number if isinstance(used, int) and number else None

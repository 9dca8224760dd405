"""Models whose matrices a plan of a user's own divides."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 16, 4


class Block(nn.Module):
    """Attention whose queries and keys are normed by head, and a feed-forward net. [B, T, WIDTH] -> the same."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.of_heads = nn.LayerNorm(WIDTH // HEADS)
        self.before = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (one(x).unflatten(-1, (-1, WIDTH // HEADS)) for one in (self.query, self.key, self.value))
        return self.of_heads(query).transpose(1, 2), self.of_heads(key).transpose(1, 2), value.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = F.scaled_dot_product_attention(*self.heads(self.norm(x)), is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.before(x)))))


class Fused(Block):
    """Queries, keys and values in one matrix, and nothing in what comes behind it, as residual branches may begin."""

    def __init__(self, drop: float) -> None:
        super().__init__(drop)
        del self.query, self.key, self.value
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        nn.init.zeros_(self.out.weight)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            one.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in self.mixed(x).chunk(3, dim=-1)
        )
        return query, key, value


class Decoder(nn.Module):
    """tokens [B, T] -> logits [B, T, 64]."""

    def __init__(self, block: type[Block] = Block, drop: float = 0.3) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(block(drop) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def fused() -> Decoder:
    return Decoder(Fused)


def tied(drop: float) -> Decoder:
    model = Decoder(drop=drop)
    model.head.weight = model.table.weight
    return model


def by_keyword() -> Decoder:
    """Calls its head so."""
    model = Decoder()
    head = model.head

    def forward(tokens: Tensor) -> Tensor:
        x = model.table(tokens)
        for layer in model.layers:
            x = layer(x)
        logits: Tensor = head(input=model.norm(x))
        return logits

    model.forward = forward  # type: ignore[method-assign]
    return model

"""Models, objectives, optimizers and datasets as users write them, each passed as the documentation describes.

CUSTOM[name]  -->  sections of a config, and objects (`lockstep.session(config, **objects)`)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from kit.small import Averaged
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import lockstep
from lockstep.core.records import Batch

WIDTH, CLASSES, TOKENS = 8, 3, 32


@dataclass(frozen=True)
class Custom:
    """A user's model with its data.

    Attributes:
        model, data: Functions that make them.
        objective: A section of the config, or an object.
        optimizer, collate, schedule: Arguments of `lockstep.session`.
        sections: Further sections of the config.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    objective: Any = field(default_factory=lambda: {"kind": "classification"})
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    schedule: Callable[[int, int | None], float] | None = None
    sections: dict[str, Any] = field(default_factory=dict)


def config_and_objects(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return sections of a config, and the arguments of `lockstep.session`."""
    custom = CUSTOM[name]
    objects = {name: getattr(custom, name) for name in ("model", "collate", "schedule", "optimizer")}
    objects["train_dataset"] = custom.data()
    if isinstance(custom.objective, dict):
        return {**custom.sections, "objective": custom.objective}, objects
    return dict(custom.sections), {**objects, "objective": custom.objective}


# --- data -----------------------------------------------------------------------------------------------------------


def _draws() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def points() -> TensorDataset:
    draws = _draws()
    return TensorDataset(torch.randn(24, WIDTH, generator=draws), torch.randint(CLASSES, (24,), generator=draws))


def images() -> TensorDataset:
    draws = _draws()
    return TensorDataset(torch.randn(24, 3, 8, 8, generator=draws), torch.randint(CLASSES, (24,), generator=draws))


def texts() -> TensorDataset:
    ids = torch.randint(TOKENS, (24, 13), generator=_draws())
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def series() -> TensorDataset:
    draws = _draws()
    return TensorDataset(torch.randn(24, 6, WIDTH, generator=draws), torch.randint(CLASSES, (24,), generator=draws))


def measured() -> TensorDataset:
    draws = _draws()
    return TensorDataset(torch.randn(24, WIDTH, generator=draws), torch.randn(24, 1, generator=draws))


def tagged() -> TensorDataset:
    draws = _draws()
    tags = torch.randint(2, (24, CLASSES), generator=draws).float()
    return TensorDataset(torch.randn(24, WIDTH, generator=draws), tags)


def unlabeled() -> TensorDataset:
    return TensorDataset(torch.randn(24, WIDTH, generator=_draws()))


class Triplets(Dataset[tuple[Tensor, ...]]):
    """An anchor, a similar and a dissimilar sample, and a target that isn't used."""

    def __init__(self) -> None:
        self.values = torch.randn(24, 3, WIDTH, generator=_draws())

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return (*self.values[index], torch.tensor(0))


class Named(Dataset[dict[str, Any]]):
    """Nested items by name, with a text that `collate` drops."""

    def __init__(self) -> None:
        self.inner = points()

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict[str, Any]:
        values, label = self.inner[index]
        return {"left": values[:4], "right": values[4:], "label": label}


class Sentences(Dataset[tuple[list[int], int]]):
    """Lists of unequal lengths, which need a collate function."""

    def __init__(self) -> None:
        draws = _draws()
        self.items = [
            (
                torch.randint(1, TOKENS, (int(torch.randint(2, 9, (), generator=draws)),), generator=draws).tolist(),
                int(torch.randint(CLASSES, (), generator=draws)),
            )
            for _ in range(24)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return self.items[index]


def pad(items: list[tuple[list[int], int]]) -> dict[str, Tensor]:
    """Ids padded with 0, lengths, and labels."""
    lengths = torch.tensor([len(ids) for ids, _ in items])
    padded = torch.zeros(len(items), int(lengths.max()), dtype=torch.long)
    for row, (ids, _) in enumerate(items):
        padded[row, : len(ids)] = torch.tensor(ids)
    return {"ids": padded, "lengths": lengths, "labels": torch.tensor([label for _, label in items])}


def without_first_class(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Fewer samples than there are items, perhaps none."""
    values, labels = (torch.stack(part) for part in zip(*items, strict=True))
    return values[labels > 0], labels[labels > 0]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A dataset without access by index."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(points())


class Endless(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of samples that are drawn, with the largest length that there is."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return points()[index % 24]


def listed() -> list[tuple[Tensor, int]]:
    """A plain list as a dataset."""
    values, labels = points().tensors
    return [(values[index], int(labels[index])) for index in range(24)]


# --- models ---------------------------------------------------------------------------------------------------------


def mlp(norm: Callable[[], nn.Module] = nn.Identity, out: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), norm(), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, out))


class Residual(nn.Module):
    """Blocks in a chain, which a pipeline can partition."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(_ResidualBlock() for _ in range(4))
        self.leave = nn.Linear(16, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.enter(points)
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(hidden)


class _ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden))


class Decoder(nn.Module):
    """A small language model: its head is its embedding, by an attribute or by F.linear."""

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.places = nn.Parameter(0.02 * torch.randn(12, 16))
        layer = [nn.TransformerEncoderLayer(16, 2, 20, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layer)
        self.head = None if functional else nn.Linear(16, TOKENS, bias=False)
        if self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids) + self.places[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden) if self.head is not None else F.linear(hidden, self.embedding.weight)


class Recurrent(nn.Module):
    def __init__(self, kind: str, both_ways: bool = False) -> None:
        super().__init__()
        self.rows = getattr(nn, kind)(WIDTH, 8, num_layers=2, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(16 if both_ways else 8, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        states, _ = self.rows(series)
        return self.head(states.mean(dim=1))


class Packed(nn.Module):
    """Texts of unequal lengths, packed for a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8, padding_idx=0)
        self.rows = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        embedded = self.embedding(ids)
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, last = self.rows(packed)
        return self.head(last[-1])


class Bag(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(TOKENS, 8, mode="mean", padding_idx=0, sparse=sparse)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.bag(ids))


class Convolutional(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), norm(8),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        down = torch.relu(self.down(images))
        joined = torch.cat([down, torch.relu(self.deep(down))], dim=1)
        return self.head(self.up(joined).mean(dim=(2, 3)))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return 2 * value * gradient


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(_Square.apply(self.first(points)))


class Counting(nn.Module):
    """A model whose outputs depend on a buffer that each training forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, points: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.inner(points) * 1.0


class RunningMean(nn.Module):
    """A running mean that each micro-batch changes: a run depends on how batches are split."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, points: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * points.detach().mean(dim=0)
        return self.inner(points - self.mean)


class Twice(nn.Module):
    """One layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(points)))))


class Scaled(nn.Module):
    """Parameters without modules: a scalar, a list, a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.many = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(WIDTH))})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(points * self.scale * self.many[0] * self.many[1] + self.named["shift"])


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(points) + self.up(self.down(points))))


class FrozenPart(nn.Module):
    """A backbone that isn't trained, in evaluation mode, whose running means stay and whose dropout does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.backbone.requires_grad_(False).eval()
        self.head = nn.Linear(16, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(torch.tanh(self.backbone(points)))


class Parametrized(nn.Module):
    def __init__(self, how: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.head = how(nn.Linear(WIDTH, 16)), nn.Linear(16, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(points)))


class Experts(nn.Module):
    """Each point goes through one of two layers; with `always` both are part of each graph."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self._always = always

    def forward(self, points: Tensor) -> Tensor:
        high = points[:, 0] > (0 if self._always else 1.2)
        mixed = torch.zeros_like(points)
        for chosen, expert in zip((high, ~high), self.experts, strict=True):
            if self._always or chosen.any():
                mixed = mixed + expert(points) * chosen[:, None]
        return self.head(torch.tanh(mixed))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(points) * self.filter, n=WIDTH))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.LazyLinear(16), nn.LazyLinear(CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(points)))


class TwoHeads(nn.Module):
    """A model that returns a dictionary: a class and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(points))
        return {"kind": self.kind(hidden), "size": self.size(hidden)}


@dataclass
class Coded:
    decoded: Tensor
    mean: Tensor
    spread: Tensor


class Autoencoder(nn.Module):
    """A variational model without sampling, which returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)

    def forward(self, points: Tensor) -> Coded:
        mean, spread = self.encode(points).chunk(2, dim=-1)
        return Coded(self.decode(mean), mean, spread)


class Adversaries(nn.Module):
    """A generator and a discriminator in one module: each of two losses trains its half."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.generator(points.flip(0))
        fixed = F.linear(made, self.discriminator.weight.detach(), self.discriminator.bias.detach())
        return self.discriminator(points), self.discriminator(made.detach()), fixed


class Embedded(nn.Module):
    """The same network for an anchor, a similar and a dissimilar sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4, bias=False)
        )  # distances cancel a bias

    def forward(self, anchor: Tensor, like: Tensor, unlike: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.net(anchor), self.net(like), self.net(unlike)


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.left(left) + self.right(right)


class Graph(nn.Module):
    """Messages along the edges of a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        ring = torch.eye(6).roll(1, 0) + torch.eye(6).roll(-1, 0)
        self.register_buffer("edges", ring, persistent=False)

    def forward(self, nodes: Tensor) -> Tensor:
        for _ in range(2):
            nodes = torch.relu(self.edges @ self.message(nodes))
        return self.head(nodes.mean(dim=1))


class Normalized(nn.Module):
    """A flow's first layer, whose parameters a first batch sets (ActNorm)."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.shift, self.is_set = nn.Parameter(torch.zeros(WIDTH)), False
        self.by_data = by_data

    def forward(self, points: Tensor) -> Tensor:
        if not self.is_set and self.by_data:
            self.shift.data = -points.mean(dim=0)
        elif not self.is_set:
            with torch.no_grad():
                self.shift.copy_(-points.mean(dim=0))
        self.is_set = True
        return points + self.shift


class Clipped(nn.Module):
    """Parameters of another module that a forward keeps in bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, points: Tensor) -> Tensor:
        for parameter in self.inner.parameters():
            parameter.data.clamp_(-0.05, 0.05)
        return self.inner(points)


def masked(when: str) -> nn.Module:
    """A weight of which half isn't trained, by a hook on its gradient."""
    model = Residual()
    mask = (torch.arange(16) % 2).float()
    weight = model.blocks[1].inner.weight
    if when == "before":
        weight.register_hook(lambda gradient: gradient * mask)
    else:
        weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", parameter.grad * mask))
    return model


class Thawing(nn.Module):
    """A backbone that is trained from the second update on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(WIDTH, 16).requires_grad_(False), nn.Linear(16, CLASSES)
        self.forwards = 0

    def forward(self, points: Tensor) -> Tensor:
        self.forwards += self.training
        if self.forwards > 2:
            self.backbone.requires_grad_(True)
        return self.head(self.backbone(points))


class SharedInBlocks(nn.Module):
    """Blocks that have one module in common."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(_ResidualBlock() for _ in range(3))
        shared = nn.Linear(16, 16)
        for block in self.blocks:
            block.shared = shared
        self.leave = nn.Linear(16, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.enter(points)
        for block in self.blocks:
            hidden = block(block.shared(hidden))
        return self.leave(hidden)


class ByForward(Residual):
    """Calls `block.forward`, which runs no hooks."""

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.enter(points)
        for block in self.blocks:
            hidden = block.forward(hidden)
        return self.leave(hidden)


class Guided(Residual):
    """Blocks that are also called with other weights, which a buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("guide", torch.full((16, 16), 0.1))

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.enter(points)
        for block in self.blocks:
            hidden = block(hidden) + torch.func.functional_call(block, {"inner.weight": self.guide}, (hidden,))
        return self.leave(hidden)


class Penalized(Residual):
    """Returns a penalty on weights, which other modules use."""

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().forward(points), 0.01 * len(points) * penalty


class Forces(Residual):
    """Returns an energy and its gradient, as models of molecules do."""

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        points = points.detach().requires_grad_()
        with torch.enable_grad():
            energies = super().forward(points)
            (forces,) = torch.autograd.grad(energies.sum(), points, create_graph=True)
        return energies, forces.square().sum()


class TiedByMemory(nn.Module):
    """Two parameters, one of which is the transposed other: `nn.Parameter` copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, CLASSES, bias=False), nn.Linear(CLASSES, WIDTH, bias=False)
        self.leave.weight = nn.Parameter(self.enter.weight.t())

    def forward(self, points: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(points)))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        mixed, _ = self.attention(series, series, series, need_weights=False)
        return self.head(mixed.mean(dim=1))


# --- objectives -----------------------------------------------------------------------------------------------------


class _OfSamples:
    def count(self, batch: Batch) -> int:
        return batch.samples


class BothHeads(_OfSamples):
    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        kind = F.cross_entropy(outputs["kind"], batch.targets, reduction="sum")
        return kind + F.mse_loss(outputs["size"].squeeze(1), batch.targets.float(), reduction="sum")


class Reconstruction(_OfSamples):
    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        (points,) = batch.inputs
        prior = (outputs.mean**2 + outputs.spread.exp() - outputs.spread - 1).sum() / 2
        return F.mse_loss(outputs.decoded, points, reduction="sum") + 0.1 * prior


class Adversarial(_OfSamples):
    """Both losses in one sum: the gradient of the other half is zero."""

    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        real, made, fixed = outputs
        one, zero = torch.ones_like(real), torch.zeros_like(made)
        losses = (F.binary_cross_entropy_with_logits(*pair, reduction="sum") for pair in ((real, one), (made, zero)))
        return sum(losses, F.binary_cross_entropy_with_logits(fixed, one, reduction="sum"))


class Summed(_OfSamples):
    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        logits, more = outputs
        return F.cross_entropy(logits, batch.targets, reduction="sum") + more


class Triplet(_OfSamples):
    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        return F.triplet_margin_loss(*outputs, reduction="sum")


class InBatch(_OfSamples):
    """InfoNCE: a sample is contrasted with the others of its micro-batch."""

    decomposes = False

    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        anchor, like, _ = (F.normalize(one, dim=-1) for one in outputs)
        return F.cross_entropy(anchor @ like.T / 0.1, torch.arange(len(anchor)), reduction="sum")


def focal(outputs: Tensor, batch: Batch) -> Tensor:
    """An objective as a plain function."""
    logs = F.cross_entropy(outputs, batch.targets, reduction="none")
    return ((1 - torch.exp(-logs)) ** 2 * logs).sum()


class Tokens:
    """An objective that counts targets, not samples."""

    def count(self, batch: Batch) -> int:
        return int(batch.targets.numel())

    def loss_sum(self, outputs: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch.targets.flatten(), reduction="sum")


class SoftInPlace(Tokens):
    """Changes the logits that the forward returned, as a temperature does."""

    def loss_sum(self, outputs: Tensor, batch: Batch) -> Tensor:
        return super().loss_sum(outputs.div_(2.0), batch)


def changed_in_place() -> nn.Sequential:
    layers = nn.Linear(WIDTH, 16), nn.ReLU(inplace=True), nn.Linear(16, TOKENS)  # what they return are views
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), *layers)


# --- all of them ----------------------------------------------------------------------------------------------------


def _by(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    return lambda groups: kind(groups, **options)


def _weight_norm(layer: nn.Module) -> nn.Module:
    return parametrizations.weight_norm(layer)


def _spectral_norm(layer: nn.Module) -> nn.Module:
    return parametrizations.spectral_norm(layer)


def _next_token() -> dict[str, str]:
    return {"kind": "next-token"}


CUSTOM: dict[str, Custom] = {
    "a chain of blocks": Custom(Residual, points),
    "a Sequential": Custom(mlp, points),
    "a Sequential of float64": Custom(
        lambda: mlp().double(), lambda: TensorDataset(points()[:][0].double(), points()[:][1])
    ),
    "a Sequential of bfloat16": Custom(lambda: mlp().bfloat16(), points),
    "a first batch sets parameters": Custom(lambda: nn.Sequential(Normalized(by_data=False), mlp()), points),
    "a first batch replaces data": Custom(lambda: nn.Sequential(Normalized(by_data=True), mlp()), points),
    "a forward clips weights": Custom(Clipped, points),
    "a weight masked by a hook": Custom(lambda: masked("before"), points),
    "a weight masked after accumulation": Custom(lambda: masked("after"), points),
    "a backbone that thaws": Custom(Thawing, points),
    "blocks that share a module": Custom(SharedInBlocks, points),
    "block.forward": Custom(ByForward, points),
    "blocks called with other weights": Custom(Guided, points),
    "a penalty on all weights": Custom(Penalized, points, Summed()),
    "forces of energies": Custom(Forces, points, Summed()),
    "weights tied by memory": Custom(TiedByMemory, points),
    "a tied head": Custom(Decoder, texts, _next_token()),
    "a tied head by F.linear": Custom(lambda: Decoder(functional=True), texts, _next_token()),
    "outputs changed in place": Custom(changed_in_place, texts, SoftInPlace()),
    "a layer used twice": Custom(Twice, points),
    "bare parameters": Custom(Scaled, points),
    "an adapter beside a frozen layer": Custom(Adapted, points),
    "a frozen part in evaluation mode": Custom(FrozenPart, points),
    "weight_norm": Custom(lambda: Parametrized(_weight_norm), points),
    "spectral_norm": Custom(lambda: Parametrized(_spectral_norm), points),
    "a custom autograd function": Custom(CustomFunction, points),
    "a counter in a buffer": Custom(Counting, points),
    "a running mean in a buffer": Custom(RunningMean, points),
    "layer norm": Custom(lambda: mlp(lambda: nn.LayerNorm(16)), points),
    "batch norm": Custom(lambda: mlp(lambda: nn.BatchNorm1d(16)), points),
    "convolutions, group norm": Custom(lambda: Convolutional(lambda width: nn.GroupNorm(2, width)), images),
    "convolutions, batch norm": Custom(lambda: Convolutional(nn.BatchNorm2d), images),
    "convolutions, channels last": Custom(
        lambda: Convolutional(lambda width: nn.GroupNorm(2, width)).to(memory_format=torch.channels_last), images
    ),
    "a U-Net": Custom(UNet, images),
    "an LSTM": Custom(lambda: Recurrent("LSTM"), series),
    "a GRU both ways": Custom(lambda: Recurrent("GRU", both_ways=True), series),
    "packed sequences": Custom(Packed, Sentences, collate=pad),
    "an EmbeddingBag": Custom(Bag, Sentences, collate=pad),
    "sparse embeddings": Custom(lambda: Bag(sparse=True), Sentences, collate=pad),
    "attention of torch's": Custom(Attending, series),
    "a graph": Custom(Graph, series),
    "experts, all in each graph": Custom(lambda: Experts(always=True), points),
    "experts that batches skip": Custom(
        lambda: Experts(always=False), points, sections={"parallel": {"ddp": {"find_unused_parameters": True}}}
    ),
    "complex parameters": Custom(Complex, points),
    "lazy layers": Custom(Lazy, points),
    "a dictionary of outputs": Custom(TwoHeads, points, BothHeads()),
    "a dataclass of outputs": Custom(Autoencoder, unlabeled, Reconstruction()),
    "adversaries in one module": Custom(Adversaries, points, Adversarial()),
    "triplets": Custom(Embedded, Triplets, Triplet()),
    "an in-batch loss": Custom(Embedded, Triplets, InBatch()),
    "regression": Custom(lambda: mlp(out=1), measured, nn.MSELoss(reduction="sum")),
    "robust regression": Custom(lambda: mlp(out=1), measured, nn.HuberLoss(reduction="sum")),
    "several tags": Custom(Residual, tagged, nn.BCEWithLogitsLoss(reduction="sum")),
    "a mean as objective": Custom(mlp, points, nn.CrossEntropyLoss()),
    "a function as objective": Custom(Residual, points, focal),
    "a dataset by weights": Custom(Residual, lambda: lockstep.WeightedDataset(points(), points()[:][1] + 0.2)),
    "a collate function that filters": Custom(Residual, points, focal, collate=without_first_class),
    "custom token counts": Custom(Decoder, texts, Tokens()),
    "items by name": Custom(Sides, Named),
    "a plain list": Custom(mlp, listed),
    "items of one tensor": Custom(Autoencoder, lambda: Subset(unlabeled(), range(24)), Reconstruction()),
    "a dataset without end": Custom(mlp, Endless),
    "an iterable dataset": Custom(mlp, Stream),
    "Adagrad": Custom(Residual, points, optimizer=_by(torch.optim.Adagrad)),
    "RMSprop": Custom(Residual, points, optimizer=_by(torch.optim.RMSprop)),
    "NAdam": Custom(Residual, points, optimizer=_by(torch.optim.NAdam)),
    "RAdam": Custom(Residual, points, optimizer=_by(torch.optim.RAdam)),
    "Adamax": Custom(Residual, points, optimizer=_by(torch.optim.Adamax)),
    "Adadelta": Custom(Residual, points, optimizer=_by(torch.optim.Adadelta)),
    "ASGD": Custom(Residual, points, optimizer=_by(torch.optim.ASGD)),
    "Rprop": Custom(Residual, points, optimizer=_by(torch.optim.Rprop)),
    "AMSGrad": Custom(Residual, points, optimizer=_by(torch.optim.AdamW, amsgrad=True)),
    "Nesterov": Custom(Residual, points, optimizer=_by(torch.optim.SGD, momentum=0.9, nesterov=True)),
    "an optimizer with modes": Custom(Residual, points, optimizer=_by(Averaged)),
    "LBFGS": Custom(Residual, points, optimizer=_by(torch.optim.LBFGS)),
    "a custom schedule": Custom(Residual, points, schedule=lambda step, steps: math.cos(step)),
}

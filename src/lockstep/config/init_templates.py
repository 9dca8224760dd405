"""First configs, with comments, for `lockstep init`.

text         pretrain a language model on your own text      finetune     go on training a Hugging Face model
classifier   fine-tune one to tell classes apart             own          a module and a Dataset of your own
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

CONFIG = "run.yaml"
_YAML_CONSTANTS = ("null", "true", "false", "yes", "no", "on", "off")


@dataclass(frozen=True, slots=True)
class InitTemplate:
    """One way to begin.

    Attributes:
        summary: what is trained.
        config: text of the config; `{model}` and `{data}` stand for what the user names.
        model, data: what is taken if nothing is named; None: the template has no such thing.
        prepare: commands to run before training.
        files: further files to write, by name.
    """

    summary: str
    config: str
    model: str | None = None
    data: str | None = None
    prepare: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    def filled_config(self, model: str | None, data: str | None) -> str:
        """Return the config with what the user has named, or with the template's own."""
        named = {"model": model or self.model, "data": data or self.data}
        text = self.config
        for place, name in named.items():
            text = text.replace(f"{{{place}}}", _yaml_quoted(name or ""))
        return text

    def filled_commands(self, data: str | None) -> list[str]:
        """Return the commands to run before training, as a shell takes them."""
        return [command.replace("{data}", shlex.quote(data or self.data or "")) for command in self.prepare]


def _yaml_quoted(name: str) -> str:
    plain = re.fullmatch(r"[A-Za-z][\w./-]*", name) and name.lower() not in _YAML_CONSTANTS
    return name if plain else "'" + name.replace("'", "''") + "'"


_REST = """
checkpoint:
  every: 15 minutes         # the same command goes on from the newest one; also: 500 steps, 1 epoch
  keep_last: 3

run:
{length}
  seed: 42
  folder: run               # config, metrics, checkpoints, and the trained model
"""


def _rest(length: str) -> str:
    return _REST.replace("{length}", length)


_TEXT = """# Pretrains a small language model on your own text. Every key: lockstep config show run.yaml
model:
  kind: transformer         # RoPE, RMSNorm, SwiGLU
  layers: 4
  width: 128
  heads: 4

data:
  train: {kind: tokens, folder: tokens, length: 128}             # made by `lockstep data prepare`
  # evaluation:             # with several documents: lockstep data prepare ... --held-out 20
  #   held-out: {kind: tokens, folder: tokens, split: held-out, length: 128}

batch:
  global_size: 32           # samples per update, over all ranks: the result doesn't depend on how many there are
  # micro_size: 8           # samples per forward of a rank: less if memory runs out; the run stays the same

optim: {name: adamw, lr: 3e-3, weight_decay: 0.1}
schedule: {kind: cosine, warmup_ratio: 0.05, final_ratio: 0.1}
""" + _rest("  steps: 1000               # or samples, tokens, epochs")

_FINETUNE = """# Goes on training a Hugging Face language model on your texts. Every key: lockstep config show run.yaml
model:
  kind: huggingface
  task: causal-lm
  pretrained: {model}       # a folder, or a name on the hub

data:
  train:
    kind: huggingface
    name: {data}            # .jsonl, .json, .csv, .parquet, .txt, a folder, or a name on the hub
    text: text              # the column with the text
    packed: true            # texts are joined and cut into full samples; false: one text a sample, padded
    max_length: 128         # tokens per sample

batch:
  global_size: 16           # samples per update, over all ranks
  # micro_size: 1           # samples per forward of a rank: less if memory runs out; the run stays the same

optim: {name: adamw, lr: 2e-5, weight_decay: 0.01}
schedule: {kind: cosine, warmup_ratio: 0.1}

# parallel: {strategy: fsdp}                       # divides model and optimizer over GPUs; by default chosen for you
# memory: {activation_checkpointing: {mode: full}} # saves memory, costs time
""" + _rest("  epochs: 1                 # or steps, samples, tokens")

_CLASSIFIER = """# Fine-tunes a Hugging Face model to tell classes apart. Every key: lockstep config show run.yaml
model:
  kind: huggingface
  task: sequence-classification
  pretrained: {model}       # a folder, or a name on the hub
  classes: 2                # how many there are

data:
  train:
    kind: huggingface
    name: {data}            # .jsonl, .json, .csv, .parquet, a folder, or a name on the hub
    text: text              # the column with the text
    label: label            # the column with the class: 0, 1, ...
    max_length: 128         # tokens; longer texts are cut
  # evaluation:
  #   test: {kind: huggingface, name: test.jsonl, text: text, label: label, max_length: 128}

batch:
  global_size: 32           # samples per update, over all ranks
  # micro_size: 8           # samples per forward of a rank: less if memory runs out; the run stays the same

optim: {name: adamw, lr: 2e-5, weight_decay: 0.01}
schedule: {kind: linear, warmup_ratio: 0.1}
""" + _rest("  epochs: 3                 # or steps, samples")

_OWN = """# Trains the module and the data set in own.py. Every key: lockstep config show run.yaml
model:
  kind: custom
  target: own.py:Model      # FILE:CLASS, or package.module:Class
  arguments: {width: 32}    # its keyword arguments

objective: {kind: classification}   # cross-entropy; `custom` names one of your own

data:
  train: {kind: custom, target: "own.py:Points", arguments: {number: 1000, seed: 0}}
  evaluation:
    held-out: {kind: custom, target: "own.py:Points", arguments: {number: 200, seed: 1}}

batch:
  global_size: 50           # samples per update, over all ranks
  # micro_size: 25          # samples per forward of a rank: less if memory runs out; the run stays the same

optim: {name: adamw, lr: 1e-2}
""" + _rest("  epochs: 5                 # or steps, samples")

_OWN_PY = '''"""A model and a data set: is a point inside the circle?"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Model(nn.Module):
    """Points [samples, 2] in, logits of two classes out. The arguments are those of the items, in their order."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, points: Tensor) -> Tensor:
        return self.layers(points)


class Points(Dataset):
    """Items are (inputs, target). Any item can be asked for at any time, so that a run can stop and resume."""

    def __init__(self, number: int, seed: int) -> None:
        self.points = torch.rand(number, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self.classes = (self.points.norm(dim=1) < 0.8).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.classes[index]
'''

STARTS: Mapping[str, InitTemplate] = {
    "text": InitTemplate(
        "pretrain a language model on your own text",
        _TEXT,
        data="corpus.txt",
        prepare=("lockstep data prepare {data} --tokenizer bytes --output tokens",),
    ),
    "finetune": InitTemplate("fine-tune a Hugging Face language model", _FINETUNE, model="gpt2", data="texts.jsonl"),
    "classifier": InitTemplate(
        "fine-tune a Hugging Face model as a classifier", _CLASSIFIER, model="bert-base-uncased", data="train.jsonl"
    ),
    "own": InitTemplate("train a module and a Dataset of your own", _OWN, files={"own.py": _OWN_PY}),
}

"""The section `model`: one class for each kind."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lockstep.strategies.section import Fraction, PathText, Positive, Section


class ModelSection(Section):
    """The keys of every kind of model."""

    freeze: tuple[str, ...] = ()
    """Patterns (`embedding.*`) of parameter names that are not trained: no gradient, no optimizer state."""
    compile: bool = False
    """Compile the model with torch.compile."""
    inputs: dict[str, str | None] = {}
    """The data's names of inputs, and the names of the arguments of the model's `forward`, such as
    `{tokens: input_ids}`; null: the input is left out."""
    init_from: PathText | None = None
    """Weights to start from, by name: an HF folder, a run's folder, .safetensors, or a torch file of tensors; null:
    random ones."""
    init_partial: bool = False
    """Initialize at random what `init_from` lacks, or has in another shape; false: refuse. Also for `pretrained`, where
    a new head needs no key."""

    @model_validator(mode="after")
    def _partial_needs_init_from(self) -> ModelSection:
        if self.init_partial and self.init_from is None and getattr(self, "pretrained", None) is None:
            raise ValueError("init_partial needs init_from: the weights that may be incomplete")
        return self


class TransformerModel(ModelSection):
    """A decoder-only transformer: RoPE, RMSNorm, SwiGLU, grouped-query attention."""

    kind: Literal["transformer"]
    layers: Positive = 4
    """Number of transformer blocks."""
    width: Positive = 128
    """Hidden size; an even multiple of `heads`."""
    heads: Positive = 4
    """Attention heads per block, each of size `width` / `heads`."""
    kv_heads: Positive | None = None
    """Key-value heads, a divisor of `heads`; null: as many as `heads`."""
    mlp_width: Positive | None = None
    """Inner width of the SwiGLU; null: 8/3 of `width`, rounded up to a multiple of 32."""
    vocabulary: Positive | None = None
    """Number of token ids; null: that of the data."""
    tie_embeddings: bool = True
    """Input embedding and output head share one weight."""
    dropout: Fraction = 0.0
    """Dropout probability in training, after embedding, attention and MLP; 0: none."""
    rope_base: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary position embedding's wavelengths (theta); larger for longer texts."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TransformerModel:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} must be an even multiple of heads {self.heads} (rotary embedding turns pairs); "
                f"the nearest width is {max(1, round(self.width / (2 * self.heads))) * 2 * self.heads}"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}: one of {divisors}")
        return self


class TextClassifierModel(ModelSection):
    """A convolutional classifier of byte or token sequences."""

    kind: Literal["text-classifier"]
    layers: Positive = 2
    """Number of convolutional blocks."""
    width: Positive = 128
    """Channels of each convolution, and size of an embedding."""
    kernel: Positive = 5
    """Kernel size of each convolution, in positions."""
    vocabulary: Positive | None = None
    """Number of token ids; null: that of the data."""
    classes: Positive | None = None
    """Number of classes; null: that of the data."""
    dropout: Fraction = 0.1
    """Dropout probability of the head's inputs in training; 0: none."""


class ImageClassifierModel(ModelSection):
    """A small residual convolutional classifier of images."""

    kind: Literal["image-classifier"]
    layers: Positive = 3
    """Number of residual blocks."""
    width: Positive = 32
    """Channels of every block."""
    classes: Positive | None = None
    """Number of classes; null: that of the data."""
    dropout: Fraction = 0.0
    """Dropout probability of the head's inputs in training; 0: none."""


class HuggingFaceModel(ModelSection):
    """A model of the transformers library, from a folder, from the local cache, or from a config alone."""

    kind: Literal["huggingface"]
    task: Literal[
        "causal-lm", "masked-lm", "sequence-classification", "seq2seq", "token-classification", "multiple-choice",
        "question-answering", "image-classification", "audio-classification", "speech-seq2seq", "ctc",
    ]  # fmt: skip
    """Task of the model's head, under its name in the transformers library; it determines the meaning of labels."""
    pretrained: PathText | None = None
    """Folder or hub name whose weights to start from."""
    architecture: dict[str, Any] | None = None
    """Keys of a transformers config (with `model_type`), for random weights; with `pretrained`, overrides."""
    classes: Positive | None = None
    """Number of classes; null: that of the data."""

    @model_validator(mode="after")
    def _has_origin(self) -> HuggingFaceModel:
        if self.pretrained is None and "model_type" not in (self.architecture or {}):
            raise ValueError("needs `pretrained`, or an `architecture` with `model_type` (such as bert, gpt2, llama)")
        return self


class CustomModel(ModelSection):
    """A custom module, by name."""

    kind: Literal["custom"]
    target: PathText
    """`package.module:Name` or `path/to/file.py:Name` of a class or function that returns a module."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of `target`."""


class GivenModel(ModelSection):
    """A module passed in Python: `lockstep.train(config, model=...)`."""

    kind: Literal["given"]


Model = Annotated[
    TransformerModel | TextClassifierModel | ImageClassifierModel | HuggingFaceModel | CustomModel | GivenModel,
    Field(discriminator="kind"),
]

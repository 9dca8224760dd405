"""The config's schema, from which the JSON Schema, the reference page and every check are derived.

    Config
    ├── model         what is trained              ├── launch       how its processes start
    ├── objective     what for                     ├── evaluation   how it is judged, and when
    ├── data          on what                      ├── checkpoint   what is saved, and when
    ├── batch         how many samples an update   ├── monitor      what is written down
    ├── optim         by which rule                └── run          how long, from which seed, where to
    ├── schedule      at which rate
    ├── precision     in which arithmetic
    ├── parallel      divided how
    └── memory        what is kept for the backward, and where

Frozen, complete, and nothing derived: what follows from it (accumulation, steps, ranks) lives in `plan`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from lockstep.config.every import Every
from lockstep.core.closest import closest_match
from lockstep.strategies.ddp import DDP as DDP
from lockstep.strategies.deepspeed import DeepSpeed as DeepSpeed
from lockstep.strategies.fsdp import FSDP as FSDP
from lockstep.strategies.fsdp import FSDPPrecision as FSDPPrecision
from lockstep.strategies.partitions import PipelineParallel as PipelineParallel
from lockstep.strategies.partitions import TensorParallelOptions as TensorParallelOptions
from lockstep.strategies.registry import StrategyName, checked_options
from lockstep.strategies.section import Auto, Fraction, PathText, Positive, Section

# --- model ------------------------------------------------------------------------------------------------------


class ModelSection(Section):
    """The keys that every kind of model has."""

    freeze: tuple[str, ...] = ()
    """Patterns (`embedding.*`) of parameter names that are not trained: no gradient, no optimizer state."""
    compile: bool = False
    """Compile the model with torch.compile."""
    inputs: dict[str, str | None] = {}
    """The data's names of inputs, and those that the model's `forward` has for them, such as `{tokens: input_ids}`;
    null: the input is left out."""
    init_from: PathText | None = None
    """Weights to start from, by name: an HF folder, a run's folder, .safetensors, or a torch file of tensors; null: the
    usual first ones."""
    init_partial: bool = False
    """Start what `init_from` lacks, or has in another shape, with its usual first weights; false: refuse."""

    @model_validator(mode="after")
    def _partial_of_something(self) -> ModelSection:
        if self.init_partial and self.init_from is None:
            raise ValueError("init_partial says how much of init_from must be there; give init_from too")
        return self


class TransformerModel(ModelSection):
    """A decoder-only transformer: RoPE, RMSNorm, SwiGLU, grouped-query attention."""

    kind: Literal["transformer"]
    layers: Positive = 4
    """Number of transformer blocks, one behind the other."""
    width: Positive = 128
    """Features of each position's hidden state; an even multiple of `heads`."""
    heads: Positive = 4
    """Attention heads per block; each has `width` / `heads` features."""
    kv_heads: Positive | None = None
    """Key-value heads, a divisor of `heads`; null: as many as `heads`."""
    mlp_width: Positive | None = None
    """Inner width of the SwiGLU; null: 8/3 of `width`, rounded up to a multiple of 32."""
    vocabulary: Positive | None = None
    """Number of token ids; null: what the data says."""
    tie_embeddings: bool = True
    """Input embedding and output head share one weight."""
    dropout: Fraction = 0.0
    """Share of activations that are set to zero in training, after embedding, attention and MLP; 0: none."""
    rope_base: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary position embedding's wavelengths (theta); larger for longer texts."""

    @model_validator(mode="after")
    def _heads_divide(self) -> TransformerModel:
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
    """Positions that a convolution looks at."""
    vocabulary: Positive | None = None
    """Number of token ids; null: what the data says."""
    classes: Positive | None = None
    """Number of classes; null: what the data says."""
    dropout: Fraction = 0.1
    """Share of the head's inputs that are set to zero in training; 0: none."""


class ImageClassifierModel(ModelSection):
    """A small residual convolutional classifier of images."""

    kind: Literal["image-classifier"]
    layers: Positive = 3
    """Number of residual blocks."""
    width: Positive = 32
    """Channels of every block."""
    classes: Positive | None = None
    """Number of classes; null: what the data says."""
    dropout: Fraction = 0.0
    """Share of the head's inputs that are set to zero in training; 0: none."""


class HuggingFaceModel(ModelSection):
    """A model of the transformers library, from a folder, from the local cache, or from a config alone."""

    kind: Literal["huggingface"]
    task: Literal[
        "causal-lm",
        "masked-lm",
        "sequence-classification",
        "seq2seq",
        "token-classification",
        "multiple-choice",
        "question-answering",
        "image-classification",
        "audio-classification",
        "speech-seq2seq",
        "ctc",
    ]
    """Task of the model's head, as the transformers library has it; it determines what labels mean."""
    pretrained: PathText | None = None
    """Folder or hub name whose weights to start from."""
    architecture: dict[str, Any] | None = None
    """Keys of a transformers config (with `model_type`), for random weights; beside `pretrained`, overrides."""
    classes: Positive | None = None
    """Number of classes; null: what the data says."""

    @model_validator(mode="after")
    def _has_origin(self) -> HuggingFaceModel:
        if self.pretrained is None and "model_type" not in (self.architecture or {}):
            raise ValueError("needs `pretrained`, or an `architecture` with `model_type` (such as bert, gpt2, llama)")
        return self


class CustomModel(ModelSection):
    """A module of your own."""

    kind: Literal["custom"]
    target: PathText
    """`package.module:Name` or `path/to/file.py:Name` of a class or function that returns a module."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of `target`."""


class GivenModel(ModelSection):
    """A module handed over in Python: `lockstep.train(config, model=...)`."""

    kind: Literal["given"]


Model = Annotated[
    TransformerModel | TextClassifierModel | ImageClassifierModel | HuggingFaceModel | CustomModel | GivenModel,
    Field(discriminator="kind"),
]


class ObjectiveConfig(Section):
    """The objective of the training."""

    kind: Literal["auto", "next-token", "masked-lm", "classification", "seq2seq", "custom", "given"] = "auto"
    """`auto`: what the model is made for; `given`: an object handed over in Python."""
    label_smoothing: Fraction = 0.0
    """Share of a target's probability that is spread evenly over all classes or tokens; 0: none."""
    target: PathText | None = None
    """For `custom`: `package.module:Name`, `path/to/file.py:Name` or the registered name of a class with `count` and
    `loss_sum`; or a loss of torch, such as `CrossEntropyLoss`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `target`."""

    @model_validator(mode="after")
    def _target_where_custom(self) -> ObjectiveConfig:
        if (self.kind == "custom") != (self.target is not None):
            raise ValueError("`target` and `kind: custom` belong together: give both or neither")
        return self


# --- data -------------------------------------------------------------------------------------------------------


class StdlibText(Section):
    """Source text of the running Python's standard library, as bytes. Every 20th file is held out."""

    kind: Literal["stdlib-text"]
    split: Literal["train", "held-out"] = "train"
    """`train`: all files but every 20th; `held-out`: those."""
    length: Positive = 256
    """Bytes per sample."""
    samples: Positive | None = None
    """Only the first so many samples; null: all."""


class StdlibFunctions(Section):
    """Functions of the standard library; the class is the package that a function comes from."""

    kind: Literal["stdlib-functions"]
    split: Literal["train", "held-out"] = "train"
    """`train`, or the functions that are held out for evaluation."""
    length: Positive = 512
    """Bytes of a function at most; longer ones are cut."""


class Digits(Section):
    """scikit-learn's 1,797 images of handwritten digits, 8 x 8 pixels. Every 5th is held out."""

    kind: Literal["digits"]
    split: Literal["train", "held-out"] = "train"
    """`train`: all images but every 5th; `held-out`: those."""
    shift: Annotated[int, Field(ge=0, le=3)] = 0
    """Augmentation: move images by up to so many pixels, at random."""


class Tokens(Section):
    """Token ids in a memory-mapped file, made by `lockstep data prepare`."""

    kind: Literal["tokens"]
    folder: PathText
    """Folder that `lockstep data prepare --output` has written."""
    split: str = "train"
    """Name of a split in `folder`."""
    length: Positive = 1024
    """Tokens per sample."""
    documents: Literal["joined", "whole"] = "joined"
    """joined: samples are cut from one stream, wherever documents end; whole: documents are packed into samples, and
    only one longer than a sample is cut."""


class HuggingFaceData(Section):
    """A data set of the datasets library, map-style, from a folder or the local cache."""

    kind: Literal["huggingface"]
    name: PathText
    """Folder, file (.json, .jsonl, .csv, .parquet, .txt), or name on the hub."""
    configuration: str | None = None
    """Configuration (subset) of a data set that has several, such as `wikitext-2-raw-v1`."""
    split: str = "train"
    """Name of a split, with slices such as `train[:1000]`."""
    text: str = "text"
    """Column with the text."""
    text_pair: str | None = None
    """Column with a second text, encoded behind the first; null: there is none."""
    label: str | None = None
    """Column with the class (classification; floats for regression, a list of 0 and 1 for several classes), the target
    text (seq2seq), or the completion of the prompt in `text` (language models), which alone is trained on."""
    train_on_prompt: bool = False
    """Language models with `label`: the prompt's tokens are targets, too."""
    tokenizer: PathText | None = None
    """Folder or hub name; null: that of the model."""
    max_length: Positive = 512
    """Tokens of a sample at most. A prompt that is too long with its completion loses its beginning."""
    packed: bool = False
    """Language models: join documents and cut them into full samples, instead of padding."""
    mask_probability: Fraction = 0.15
    """Masked language models: share of tokens to guess."""


class CustomData(Section):
    """A map-style torch Dataset of your own."""

    kind: Literal["custom"]
    target: PathText
    """`package.module:Name` or `path/to/file.py:Name` of a class or function that returns a Dataset."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `target`."""
    collate: PathText | None = None
    """`package.module:Name` or `path/to/file.py:Name` of a collate function; null: torch's."""


class GivenData(Section):
    """A Dataset handed over in Python: `lockstep.train(config, train_dataset=...)`."""

    kind: Literal["given"]
    collate: Literal["given"] | None = None
    """`given`: a collate function handed over in Python, too; null: torch's."""


DataSource = Annotated[
    StdlibText | StdlibFunctions | Digits | Tokens | HuggingFaceData | CustomData | GivenData,
    Field(discriminator="kind"),
]


class Loader(Section):
    """How samples reach the rank."""

    workers: Annotated[int, Field(ge=0)] = 0
    """Worker processes per rank; 0 fetches in the rank itself, which is fastest for small samples."""
    prefetch: Positive = 2
    """Micro-batches that each worker holds ready."""
    persistent_workers: bool = True
    """Keep workers from epoch to epoch."""
    pin_memory: bool | Auto = "auto"
    """Page-locked memory, for faster copies to a GPU; auto: on a GPU."""


class Data(Section):
    """The data for training and evaluation."""

    train: DataSource
    """Training data; `kind` selects which of these."""
    evaluation: dict[str, DataSource] = {}
    """Evaluation sets by name."""
    shuffle: bool = True
    """A new order each epoch, a function of seed, epoch and position alone."""
    drop_last: bool = False
    """Leave out the last samples of an epoch that don't fill a global batch; false: a smaller last update."""
    loader: Loader = Loader()


# --- batch, optim, schedule, precision -----------------------------------------------------------------------------


class BatchConfig(Section):
    """How many samples an update sees. Ranks and accumulation don't change it."""

    global_size: Positive = 32
    """Samples per update, over all ranks."""
    micro_size: Positive | Auto = "auto"
    """Samples per forward and backward of a rank, at most; auto: the rank's whole share at once."""


class ParameterRule(Section):
    """Settings for the parameters that match; the first rule that matches a parameter wins."""

    match: tuple[str, ...]
    """Patterns of parameter names, such as `*.bias` or `head.*`."""
    lr_scale: Annotated[float, Field(ge=0)] = 1.0
    """Factor on the learning rate of these parameters; 0: they don't move."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Null: as for all."""


class Optim(Section):
    """The optimizer and its settings."""

    name: Literal["adamw", "adam", "sgd", "muon", "adafactor", "lion", "custom", "given"] = "adamw"
    """The optimizer. `muon` updates matrices, and all other parameters by AdamW; `custom`: that of `target`; `given`:
    one handed over in Python."""
    target: PathText | None = None
    """For `custom`: `package.module:Name`, `path/to/file.py:Name` or the registered name of a torch optimizer, which is
    called with parameter groups."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `target`."""
    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Peak learning rate; the schedule scales it."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the moments' running means; of adam, adamw and lion, and of muon for what is no matrix."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator; of adam and adamw, and of muon for what is no matrix."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay of the parameters that `decay` selects; decoupled, but with adam and sgd part of the gradient."""
    momentum: Fraction = 0.9
    """Share of the last update's direction that is kept; of sgd and muon."""
    nesterov: bool = False
    """Nesterov's momentum; of sgd, since muon always uses it."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters with weight decay: those of two or more dims (no biases, no norms), or all."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The gradient's global 2-norm is scaled down to this; null: never."""
    rules: tuple[ParameterRule, ...] = ()
    """Other settings for some parameters; the first rule that matches a parameter wins."""
    in_backward: bool = False
    """Update each parameter as soon as the backward has its gradient, and let that go: gradients take little memory.
    For `single`, without clipping, fp16 and accumulation; nothing can be discarded: a gradient that isn't finite ends
    the run."""

    @model_validator(mode="after")
    def _fits_the_rule(self) -> Optim:
        if (self.name == "custom") != (self.target is not None):
            raise ValueError("`target` and `name: custom` belong together: give both or neither")
        if self.in_backward and self.clip_norm is not None:
            raise ValueError(
                f"in_backward applies gradients before the norm of all is known, and clip_norm {self.clip_norm:g} "
                "needs it; write clip_norm: null, or in_backward: false"
            )
        if self.nesterov and self.name == "sgd" and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; the usual one is 0.9")
        if self.nesterov and self.name != "sgd":
            raise ValueError(f"nesterov is an option of sgd; {self.name} would ignore it")
        return self


class Schedule(Section):
    """Learning rate as a function of progress: warm-up, then the kind's curve down to `final_ratio` of the peak."""

    kind: Literal["constant", "linear", "cosine", "warmup-stable-decay", "given"] = "cosine"
    """Curve of the learning rate after the warm-up; `constant` stays at the peak; `given`: a function handed over in
    Python, which replaces the whole schedule."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Updates over which the rate rises to its peak; null: by `warmup_ratio`, or none."""
    warmup_ratio: Fraction | None = None
    """Share of the run's steps; instead of `warmup_steps`."""
    warmup_type: Literal["linear", "log"] = "linear"
    """How the rate rises: in equal steps, or as DeepSpeed's logarithmic warm-up does, fast at first."""
    decay_ratio: Fraction = 0.2
    """warmup-stable-decay: share of the run that decays, at its end."""
    final_ratio: Fraction = 0.0
    """Learning rate at the end, as a share of the peak."""

    @model_validator(mode="after")
    def _one_warmup(self) -> Schedule:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio say the same thing twice; keep one")
        if self.kind == "warmup-stable-decay" and (self.warmup_ratio or 0.0) + self.decay_ratio > 1:
            raise ValueError(
                f"warmup_ratio {self.warmup_ratio} + decay_ratio {self.decay_ratio} is more than the whole run; "
                f"decay_ratio can be {1 - (self.warmup_ratio or 0.0):g} at most"
            )
        return self


class LossScale(Section):
    """Dynamic loss scaling of fp16."""

    initial: Annotated[float, Field(gt=0)] = 65536.0
    """Factor on the loss at the start."""
    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    """Factor by which the scale grows."""
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor by which the scale shrinks after an overflow; that update is discarded."""
    growth_interval: Positive = 2000
    """Updates without overflow after which the scale grows."""


class Precision(Section):
    """Precision of the arithmetic. Parameters, optimizer state and losses are fp32 under each."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of forward and backward; auto: bf16 where the processor has it, otherwise fp32."""
    tf32: bool = True
    """Let fp32 matrix products use TF32 on NVIDIA GPUs."""
    loss_scale: LossScale = LossScale()
    """Loss scale of runs whose gradients pass through fp16: `compute: fp16`, or fp16 in
    `parallel.fsdp.mixed_precision`."""


# --- memory, parallel, launch -----------------------------------------------------------------------------------------


class ActivationCheckpointing(Section):
    """Activation checkpointing: what a forward keeps for the backward.

    The gradient is the same to the bit under each mode; what a block draws must come from torch's own generators.
    """

    mode: Literal["none", "full", "selective", "segments", "budget", "adaptive"] = "none"
    """none: all that it needs; full: of a block its inputs alone, from which it is computed again: less memory, a third
    more arithmetic; selective: what matrix products and attention made, too, and only the rest is computed again;
    segments: of each run of blocks the input of its first alone, the last run kept; budget: as many blocks whole, the
    last ones, as `budget` has room for; adaptive: none, until a rank's memory passes `threshold`, from then on full."""
    every: Positive = 1
    """full, selective, adaptive: each so-many-th of the modules, beginning with the first; 1: all of them."""
    modules: Literal["blocks"] | tuple[str, ...] = "blocks"
    """Modules that are recomputed as a unit: the model's repeated blocks, or the modules of these classes, such as
    `[Attention, SwiGLU]`."""
    segments: Annotated[int, Field(ge=2)] = 4
    """segments: into how many each list of blocks is cut."""
    budget: Fraction = 0.5
    """budget: share of what all blocks would hold for the backward, measured in the first forward; under
    `model.compile` torch's own budget, which chooses operations instead of blocks."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """adaptive: share of a rank's memory, at its peak; on the CPU resident memory, of what the machine or container
    has for each rank."""
    look_every: Positive = 100
    """adaptive: updates from one look to the next."""

    @model_validator(mode="after")
    def _said_of_its_mode(self) -> ActivationCheckpointing:
        if self.every != 1 and self.mode == "none":
            raise ValueError(f"every {self.every} says of which blocks; say what, too: mode: full, or leave it out")
        for name, modes in _OPTIONS_OF_MODES.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and self.mode not in modes:
                raise ValueError(
                    f"{name} {value} is an option of mode {' or '.join(modes)}; {self.mode} would ignore it"
                )
        return self


_OPTIONS_OF_MODES = {
    "every": ("full", "selective", "adaptive"),
    "modules": ("full", "selective", "budget", "adaptive"),
    "segments": ("segments",),
    "budget": ("budget",),
    "threshold": ("adaptive",),
    "look_every": ("adaptive",),
}


class Memory(Section):
    """How memory is saved."""

    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    activation_offload: Literal["none", "cpu"] = "none"
    """cpu: what is kept for the backward waits in the host's memory, and with checkpointing so do the inputs that it
    keeps; for GPUs."""
    loss_chunk: Positive | None = None
    """Language models: the loss is computed for so many positions at a time, so that all logits are never there at
    once; null: for all at once."""


class Parallel(Section):
    """How the work is divided."""

    model_config = ConfigDict(extra="allow")  # for the options of strategies that users register

    strategy: StrategyName = "auto"
    """auto: single on one rank; on more ddp if the training state fits in a rank's memory, otherwise fsdp. Besides
    those listed, a strategy that is registered, or `module:Name` of one."""
    data: Positive | Auto = "auto"
    """Replicas of the training state; auto: what `shard` leaves of the ranks."""
    shard: Positive | Auto = "auto"
    """Parts that each replica is divided into; auto: all ranks, or of HYBRID_SHARD those of one machine."""
    pipeline: Positive | Auto = 1
    """Ranks, one behind the other, over which each replica's layers are spread; auto: what the others leave."""
    context: Positive | Auto = 1
    """Ranks over which the positions of each sequence are spread, by ring attention; auto: what the others leave."""
    tensor: Positive | Auto = 1
    """Ranks, next to each other, over which each matrix is spread; auto: what the others leave."""
    pipeline_parallel: PipelineParallel = PipelineParallel()
    tensor_parallel: TensorParallelOptions = TensorParallelOptions()
    ddp: DDP = DDP()
    fsdp: FSDP = FSDP()
    deepspeed: DeepSpeed = DeepSpeed()

    @model_validator(mode="after")
    def _options_of_registered(self) -> Parallel:
        if self.model_extra:
            self.model_extra.update(checked_options(self.strategy, self.model_extra))
        return self


class Launch(Section):
    """How the run's processes start and find each other."""

    ranks: Positive | Auto = "auto"
    """Processes on this machine; auto: one a GPU, or one without a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one, otherwise the CPU."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on GPUs, otherwise gloo."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a collective may take before the run is declared hung."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the store at which ranks meet; 0: any free one."""
    environment: dict[str, str] = {}
    """Environment variables for every rank."""


# --- evaluation, monitor, run -----------------------------------------------------------------------------------


class Evaluation(Section):
    """When the model is evaluated on every set of `data.evaluation`."""

    every: Every | None = None
    """Null: only at the end."""
    micro_size: Positive | Auto = "auto"
    """Samples per forward of a rank; auto: as in training."""
    at_end: bool = True
    """Evaluate once more when the run is done."""
    prompt: str | None = None
    """Language models: go on with this text at the end, and show what comes."""


class Extension(Section):
    """Code of a user's or of an installed package."""

    target: PathText
    """`package.module:Name`, `path/to/file.py:Name`, or a name that a package registers; `given`: an object passed in
    Python."""
    arguments: dict[str, Any] = {}
    """Keyword arguments to call it with, if it is a class or function."""


class Checkpoint(Section):
    """Checkpoints: when the run's state is saved, and which are kept."""

    every: Every | None = Every(15, "minutes")
    """Null: only when the run is stopped or done."""
    folder: PathText | None = None
    """Folder that all ranks can see; null: `checkpoints` in the run's folder."""
    storage: Extension | None = None
    """Object store that holds the checkpoints in place of a folder (`lockstep.ObjectStore`)."""
    keep_last: Positive = 3
    """So many of the newest."""
    keep_every: Every | None = None
    """Also keep the first checkpoint of each such interval."""
    best: str | None = None
    """Also keep the checkpoint with the best metric of an evaluation set, such as `held-out.loss`; it is saved when
    found."""
    best_is: Literal["auto", "lowest", "highest"] = "auto"
    """auto: highest for accuracy, lowest for all others."""
    asynchronous: bool = True
    """Save while training goes on; false: training waits until the checkpoint exists."""

    @model_validator(mode="after")
    def _keeps_by_progress(self) -> Checkpoint:
        if self.keep_every is not None and self.keep_every.unit == "minutes":
            raise ValueError("keep_every counts steps, samples, tokens or epochs; minutes aren't in a checkpoint")
        if self.storage is not None and self.folder is not None:
            raise ValueError("checkpoint.folder and checkpoint.storage exclude each other; leave one out")
        if self.best is not None and "." not in self.best:
            raise ValueError(f"best {self.best!r} names an evaluation set and a metric of it, such as held-out.loss")
        return self


class MonitorConfig(Section):
    """What a run shows and logs."""

    every: Positive = 10
    """Steps between the lines of metrics.jsonl."""
    tensorboard: bool = True
    """Write event files for TensorBoard into the run's folder."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """auto: a live display on a terminal, otherwise plain lines."""


class Run(Section):
    """How long, from which seed, where to. One of steps, samples, tokens and epochs."""

    steps: Positive | None = None
    """Length as a number of updates, discarded ones included."""
    samples: Positive | None = None
    """Length as a number of samples, over all ranks."""
    tokens: Positive | None = None
    """Length as a number of tokens, over all ranks; padding doesn't count."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length as passes over the training data; may be a fraction."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Seed of initial weights, order of samples, dropout and augmentation. The same seed gives the same run."""
    folder: PathText | None = None
    """Folder that the run writes to; null: runs/RECIPE-DATE-TIME."""
    end_with: Literal["last", "best"] = "last"
    """Weights that the run leaves; best: those of `checkpoint.best`."""
    allow_untested: bool = False
    """Try what was never tested together (docs/strategies.md)."""
    determinism: Literal["default", "deterministic", "invariant"] = "default"
    """deterministic: torch's deterministic algorithms, so that the same machine gives the same bits. invariant: so does
    any number of data ranks, dropout included; for `single` and `ddp` with a `batch.micro_size`."""

    @model_validator(mode="after")
    def _one_length(self) -> Run:
        given = [name for name in ("steps", "samples", "tokens", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            many = f"{' and '.join(given)} contradict each other" if given else "nothing says how long the run is"
            raise ValueError(f"{many}; give exactly one of steps, samples, tokens, epochs")
        return self


_METRICS = ("loss", "perplexity", "accuracy", "bits_per_byte")
"""Of Lockstep's own objectives; which of them has which, is known when a run starts."""


class Config(Section):
    """A whole run."""

    description: str = ""
    """One line for `lockstep recipes`."""
    model: Model
    """The model; `kind` selects which of these."""
    objective: ObjectiveConfig = ObjectiveConfig()
    data: Data
    batch: BatchConfig = BatchConfig()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    memory: Memory = Memory()
    launch: Launch = Launch()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    monitor: MonitorConfig = MonitorConfig()
    monitors: tuple[Extension, ...] = ()
    """Further monitors, which see each report on the first rank (`lockstep.Monitor`)."""
    transforms: tuple[Extension, ...] = ()
    """Transforms of the model, applied before it is sharded (`lockstep.Transform`)."""
    run: Run

    @model_validator(mode="after")
    def _nothing_to_discard(self) -> Config:
        if self.optim.in_backward and self.precision.compute == "fp16":
            raise ValueError(
                "optim.in_backward applies gradients before it is known whether they are finite, and fp16 discards "
                "updates that overflow; write precision.compute: bf16, or in_backward: false"
            )
        if self.optim.in_backward and self.run.determinism == "invariant":
            raise ValueError(
                "optim.in_backward applies gradients before they are added over ranks, in the order that "
                "run.determinism invariant is about; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _not_compiled(self) -> Config:
        mode = self.memory.activation_checkpointing.mode
        if self.model.compile and mode in ("segments", "adaptive"):
            raise ValueError(
                f"memory.activation_checkpointing.mode {mode} changes from call to call what a block does, which was "
                "not tried compiled; take full, selective or budget, or leave out model.compile"
            )
        if self.memory.loss_chunk is not None and self.model.compile:
            raise ValueError(
                "memory.loss_chunk and model.compile don't go together: the head is told the targets from outside of "
                "what is compiled; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _best_is_known(self) -> Config:
        if self.run.end_with == "best" and self.checkpoint.best is None:
            raise ValueError("run.end_with best needs checkpoint.best: a metric such as held-out.loss")
        if self.checkpoint.best is not None:
            evaluation, _, metric = self.checkpoint.best.partition(".")
            if evaluation not in self.data.evaluation:
                known = ", ".join(self.data.evaluation) or "there is none"
                raise ValueError(
                    f"checkpoint.best names the evaluation set {evaluation!r}; data.evaluation has: {known}"
                )
            users = self.objective.kind in ("custom", "given") or self.model.kind in ("custom", "given")
            if not users and metric not in _METRICS:
                near = closest_match(metric, _METRICS)
                meant = f"did you mean {evaluation}.{near}?" if near else f"metrics are {', '.join(_METRICS)}"
                raise ValueError(f"checkpoint.best names the metric {metric!r}, which no evaluation has; {meant}")
        return self

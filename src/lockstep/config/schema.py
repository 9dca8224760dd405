"""The config's schema: source of the JSON Schema, the reference page and every check.

Frozen, complete, and nothing derived: what follows from it (accumulation, steps, ranks) is in `plan`. This module
exports all sections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from lockstep.config.data_sections import (
    CustomData,
    Data,
    DataSource,
    Digits,
    HuggingFaceData,
    Loader,
    StdlibFunctions,
    StdlibText,
    Tokens,
)
from lockstep.config.devices import BackendName, DeviceName
from lockstep.config.every import Every
from lockstep.config.training_sections import (
    PAIRS,
    ActivationCheckpointing,
    BatchConfig,
    LossScale,
    Memory,
    ObjectiveConfig,
    Optim,
    ParameterRule,
    Precision,
    ProfileConfig,
    Recovery,
    Schedule,
    WeightAverage,
)
from lockstep.core.closest import did_you_mean, hint
from lockstep.core.metric_names import metric_classes, metric_names, plain
from lockstep.core.nodes import checked_address, checked_nodes
from lockstep.core.tasks import TaskName
from lockstep.strategies.ddp import DDP
from lockstep.strategies.deepspeed import DeepSpeed
from lockstep.strategies.fsdp import FSDP
from lockstep.strategies.partitions import PipelineParallel, TensorParallelOptions
from lockstep.strategies.registry import StrategyName, checked_options, names, option_sections
from lockstep.strategies.section import Auto, Fraction, PathText, PlaceText, Positive, RunPlaceText, Section

__all__ = [
    "DDP", "FSDP", "ActivationCheckpointing", "AdapterSection", "BatchConfig", "Checkpoint", "Config",
    "CustomData", "CustomModel", "DataSource", "DeepSpeed", "Digits", "Extension", "GivenModel",
    "HuggingFaceData", "HuggingFaceModel", "IA3Adapter", "ImageClassifierModel", "Launch", "Loader",
    "LoraAdapter", "LossScale", "Memory", "Model", "ModelSection", "ObjectiveConfig", "Optim", "Parallel",
    "ParameterRule", "PipelineParallel", "Run", "Schedule", "StdlibFunctions", "StdlibText",
    "TensorParallelOptions", "TextClassifierModel", "Tokens", "TransformerModel", "WeightAverage",
]  # fmt: skip
GIVEN = "given"
"""Stands in a config for an object that is passed in Python."""


class AdapterSection(Section):
    """The keys of every kind of adapter."""

    targets: Literal["all-linear"] | tuple[str, ...] | None = "all-linear"
    """Modules that get an adapter: all linear layers, except the head; or names, such as `[q_proj, v_proj]`; null:
    peft's choice for the architecture."""
    exclude_modules: tuple[str, ...] | None = None
    """Modules that get none."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole, and saved with the adapter, such as `[lm_head]`."""
    fan_in_fan_out: bool = False
    """Weights are stored transposed. peft corrects it for the layers that it knows."""


class LoraAdapter(AdapterSection):
    """Low-rank adapters (LoRA, arXiv:2106.09685) by peft: W x + alpha / rank B A x."""

    kind: Literal["lora"]
    rank: Positive = 16
    """Rank of the update (peft: r)."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Scale of the update, divided by the rank (peft: lora_alpha)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's input (peft: lora_dropout)."""
    use_rslora: bool = False
    """Divide alpha by the square root of the rank (arXiv:2312.03732)."""
    use_dora: bool = False
    """Also train the magnitude of each row (DoRA, arXiv:2402.09353)."""
    init_lora_weights: Literal["uniform", "gaussian"] = "uniform"
    """Initial distribution of A: Kaiming's uniform one (peft: true), or gaussian. B is 0."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Also train biases: all, or those of layers with an adapter."""
    layers_to_transform: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Numbers of the layers that get adapters; null: all."""
    rank_pattern: dict[str, Positive] = {}
    """Other ranks, by patterns of module names."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Other alphas, by patterns of module names."""


class IA3Adapter(AdapterSection):
    """Learned factors of activations (IA3, arXiv:2205.05638) by peft."""

    kind: Literal["ia3"]
    targets: tuple[str, ...] | None = None
    """Modules that get an adapter, by name; null: peft's choice for the architecture."""
    feedforward_modules: tuple[str, ...] | None = None
    """Targets with a scaled input instead of a scaled output; null: peft's choice."""


class Quantization(Section):
    """The format in which bitsandbytes stores the linear layers of an adapter's frozen base."""

    kind: Literal["nf4", "int8"]
    """nf4: QLoRA's 4 bits, with quantized constants (arXiv:2305.14314); int8: LLM.int8() (arXiv:2208.07339)."""


class ModelSection(Section):
    """The keys of every kind of model."""

    adapter: Annotated[LoraAdapter | IA3Adapter, Field(discriminator="kind")] | None = None
    """Train an adapter of the peft library instead of the model, which is frozen. Checkpoints hold the adapter."""
    quantization: Quantization | None = None
    """Quantize the linear layers in the blocks of an adapter's base; the head and the embedding stay as they are."""
    freeze: tuple[str, ...] = ()
    """Patterns (`embedding.*`) of parameters to freeze: no gradient, no optimizer state."""
    compile: bool = False
    """Compile the model with torch.compile."""
    inputs: dict[str, str | None] = {}
    """Renames inputs of the data to arguments of `forward`, such as `{tokens: input_ids}`; null drops an input."""
    init_from: PathText | None = None
    """Initial weights: an HF folder, a run's folder, .safetensors or a torch file; null: random."""
    init_partial: bool = False
    """Initialize weights at random that are missing or have another shape; false: refuse. Not needed for a new head on
    `pretrained`."""

    def _contradictions(self) -> Iterator[str]:
        if self.init_partial and self.init_from is None and getattr(self, "pretrained", None) is None:
            yield "init_partial needs init_from: the weights that may be incomplete"
        if self.quantization is not None and self.adapter is None:
            yield "quantization needs an adapter: quantized weights can't be trained; add adapter: {kind: lora}"
        lora = self.adapter if isinstance(self.adapter, LoraAdapter) and self.quantization is not None else None
        if lora is not None and (lora.use_dora or lora.bias != "none"):
            yield "quantization takes adapters that don't read weights or train biases; use_dora: false, bias: none"


class TransformerModel(ModelSection):
    """A decoder-only transformer: RoPE, RMSNorm, SwiGLU, grouped-query attention."""

    kind: Literal["transformer"]
    layers: Positive = 4
    """Number of transformer blocks."""
    width: Positive = 128
    """Hidden size, an even multiple of `heads`."""
    heads: Positive = 4
    """Attention heads per block."""
    kv_heads: Positive | None = None
    """Key-value heads, a divisor of `heads`; null: as many as `heads`."""
    mlp_width: Positive | None = None
    """Inner size of the SwiGLU; null: 8/3 of `width`, rounded up to a multiple of 32."""
    vocabulary: Positive | None = None
    """Number of token ids; null: from the data."""
    tie_embeddings: bool = True
    """Share the weight of input embedding and output head."""
    dropout: Fraction = 0.0
    """Dropout after embedding, attention and MLP."""
    rope_base: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary position embedding (theta); larger for longer sequences."""

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.width % (2 * self.heads):
            yield (
                f"width {self.width} must be an even multiple of heads {self.heads} (rotary embedding turns pairs); "
                f"the nearest width is {max(1, round(self.width / (2 * self.heads))) * 2 * self.heads}"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            yield f"kv_heads {self.kv_heads} must divide heads {self.heads}: one of {divisors}"


class TextClassifierModel(ModelSection):
    """A convolutional classifier of byte or token sequences."""

    kind: Literal["text-classifier"]
    layers: Positive = 2
    """Number of convolutional blocks."""
    width: Positive = 128
    """Channels of each convolution, and embedding size."""
    kernel: Positive = 5
    """Kernel size of each convolution."""
    vocabulary: Positive | None = None
    """Number of token ids; null: from the data."""
    classes: Positive | None = None
    """Number of classes; null: from the data."""
    dropout: Fraction = 0.1
    """Dropout before the head."""


class ImageClassifierModel(ModelSection):
    """A small residual convolutional classifier of images."""

    kind: Literal["image-classifier"]
    layers: Positive = 3
    """Number of residual blocks."""
    width: Positive = 32
    """Channels of every block."""
    classes: Positive | None = None
    """Number of classes; null: from the data."""
    dropout: Fraction = 0.0
    """Dropout before the head."""


class HuggingFaceModel(ModelSection):
    """A model of the transformers library, from a folder, from the local cache, or from a config only."""

    kind: Literal["huggingface"]
    task: TaskName
    """Task of the head, as transformers names it; it determines what labels mean."""
    pretrained: PathText | None = None
    """Folder or hub name of pretrained weights."""
    revision: str | None = None
    """Branch, tag or commit of `pretrained` on the hub; null: main. A run keeps the commit that it begins with."""
    architecture: dict[str, Any] | None = None
    """Keys of a transformers config, with `model_type`, for random weights; with `pretrained`, overrides."""
    classes: Positive | tuple[str, ...] | None = None
    """Number of classes, or their names in order; null: the data's."""

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if len(set(self.class_names)) < len(self.class_names):
            yield "classes has a name twice; remove one of them"
        if self.pretrained is None and "model_type" not in (self.architecture or {}):
            yield "needs `pretrained`, or an `architecture` with `model_type` (such as bert, gpt2, llama)"
        if self.revision is not None and self.pretrained is None:
            yield f"revision {self.revision} is of `pretrained`, which is null; remove one"

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classes if isinstance(self.classes, tuple) else ()

    @property
    def num_classes(self) -> int | None:
        return len(self.classes) if isinstance(self.classes, tuple) else self.classes


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


def _only_known_keys(schema: dict[str, Any]) -> None:
    """Refuse unknown keys in the JSON Schema, except in sections of a strategy that has to be imported first."""
    schema["additionalProperties"] = {"type": "object"}
    schema["if"] = {"properties": {"strategy": {"enum": [*names()]}}}
    schema["then"] = {"propertyNames": {"enum": [*dict.fromkeys([*schema["properties"], *option_sections()])]}}


class Parallel(Section):
    """The strategy, and the degrees of parallelism."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_only_known_keys)  # options of users' strategies

    strategy: StrategyName = "auto"
    """auto: single on one rank; on more, ddp if a step fits in memory, otherwise fsdp; on known GPUs the faster of the
    two. Also a registered strategy, or `module:Name`."""
    data: Positive | Auto = "auto"
    """Replicas of the training state; auto: what `shard` leaves of the ranks."""
    shard: Positive | Auto = "auto"
    """Shards of each replica; auto: all ranks, or with HYBRID_SHARD the ranks of one host."""
    pipeline: Positive | Auto = 1
    """Ranks that share each replica's layers, as pipeline stages; auto: what the other degrees leave."""
    context: Positive | Auto = 1
    """Ranks that share each sequence, by ring attention; auto: what the other degrees leave."""
    tensor: Positive | Auto = 1
    """Consecutive ranks that share each matrix; auto: what the other degrees leave."""
    pipeline_parallel: PipelineParallel = PipelineParallel()
    tensor_parallel: TensorParallelOptions = TensorParallelOptions()
    ddp: DDP = DDP()
    fsdp: FSDP = FSDP()
    deepspeed: DeepSpeed = DeepSpeed()

    @model_validator(mode="after")
    def _check_registered_options(self) -> Parallel:
        if self.model_extra:
            self.model_extra.update(checked_options(self.strategy, self.model_extra))
        return self


class Launch(Section):
    """Start of the run's processes, and how they connect."""

    ranks: Positive | Auto = "auto"
    """Processes on this host; auto: one per visible accelerator, or 1."""
    device: DeviceName = "auto"
    """auto: the accelerator that torch finds, otherwise the CPU. Also any device of a torch plugin."""
    backend: BackendName = "auto"
    """auto: the device's default, such as nccl or gloo. Also any backend registered with `torch.distributed`."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds before a collective fails. Waiting for data and disks has no limit."""
    grace: Annotated[float, Field(gt=0)] | None = None
    """Seconds between a scheduler's signal and its kill. Ranks that are still busy after 80 % of it are ended, and
    their newest in-memory snapshot is saved."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the rendezvous store; 0: any free port."""
    environment: dict[str, str] = {}
    """Environment variables for every rank."""
    nodes: Annotated[Positive | str, AfterValidator(checked_nodes)] = 1
    """Number of hosts, each with the same command; MIN:MAX, such as `2:4`, also runs while some are missing."""
    nodes_wait: Annotated[float, Field(ge=0)] = 30.0
    """MIN:MAX `nodes`: seconds to wait for all hosts before starting without some."""
    rendezvous: Annotated[str, AfterValidator(checked_address)] | None = None
    """HOST:PORT of node 0, where several `nodes` meet."""
    node_rank: Annotated[int, Field(ge=0)] | None = None
    """Rank of this host; null: node 0 is the host of `rendezvous`, the others are numbered as they join."""
    job_id: str | None = None
    """Id shared by all hosts of one job. The run's folder is then runs/RECIPE-ID."""
    interface: str | None = None
    """Network interface for gloo and NCCL; null: loopback on one host, else the one on the route to `rendezvous`."""


class Metric(Section):
    """A metric of the torchmetrics library."""

    kind: str
    """Class of torchmetrics for classification or regression, such as F1Score, or short: `f1`, `auroc`, `mse`."""
    name: str | None = None
    """Name in reports; null: `kind`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class; `task`, `num_classes`, `num_labels` and `num_outputs` follow from the run."""

    @property
    def title(self) -> str:
        """The name in reports."""
        return self.name or self.kind

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        names = metric_names()  # empty without torchmetrics, which may be installed where the run is
        if names and plain(kind) not in names:
            raise ValueError(f"torchmetrics has no metric {kind!r}{hint(kind, [*names, *metric_classes()])}")
        return kind


def _named(metric: object) -> object:
    return {"kind": metric} if isinstance(metric, str) else metric


Metrics = tuple[Annotated[Metric, BeforeValidator(_named, json_schema_input_type=str | Metric)], ...]


class Generation(Section):
    """Answers that the model generates to the prompts of evaluation sets."""

    tokens: Positive = 128
    """Most tokens of an answer; it ends with the end token."""
    metrics: Metrics = ()
    """Metrics of texts, by torchmetrics: `[exact_match, rouge, bleu]`, or with arguments. Needs the extra `metrics`."""
    samples: Positive | None = None
    """Use only the first N samples of each set; null: all."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Temperature of the softmax; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""


class Evaluation(Section):
    """Evaluation on every set of `data.evaluation`."""

    every: Every | None = None
    """Interval of evaluations; null: only at the end."""
    micro_size: Positive | Auto = "auto"
    """Samples per forward of a rank; auto: as in training."""
    at_end: bool = True
    """Evaluate at the end of the run."""
    metrics: Metrics = ()
    """Further metrics, by torchmetrics: `[f1, auroc]`, or with arguments. Needs the extra `metrics`."""
    generate: Generation | None = None
    """Language models: generate answers to the prompts of each set, and compare them with the targets; null: no."""
    prompt: str | None = None
    """Language models: continue this text at the end, and print the result."""

    def _contradictions(self) -> Iterator[str]:
        titles = [metric.title for metric in (*self.metrics, *(self.generate.metrics if self.generate else ()))]
        if twice := next((title for title in titles if titles.count(title) > 1), None):
            yield f"two metrics are called {twice}; give one of them a `name`"
        if own := next((metric.name for metric in self.metrics if metric.name in _METRICS), None):
            yield f"{own} is a metric of objectives; give the other one another `name`"

    @property
    def further(self) -> tuple[Metric, ...]:
        """The metrics beside the objective's own, such as accuracy."""
        return tuple(metric for metric in self.metrics if metric.title not in _METRICS or metric.arguments)


class Extension(Section):
    """Code of a user or of an installed package."""

    target: PathText
    """`package.module:Name`, `path/to/file.py:Name`, or a name that a package registers; `given`: an object passed in
    Python."""
    arguments: dict[str, Any] = {}
    """Keyword arguments, if it is a class or function."""


class Checkpoint(Section):
    """Checkpoints: when they are saved, and which are kept."""

    every: Every | None = Every(15, "minutes")
    """Interval of checkpoints; null: only when the run stops or ends."""
    folder: PlaceText | None = None
    """Folder that all ranks can see, or an object store such as `s3://bucket/digits`; null: `checkpoints` in the run's
    folder."""
    retry_seconds: Annotated[float, Field(ge=0)] = 60.0
    """Seconds to retry a save or load when the file system or bucket doesn't answer. A full disk fails at once."""
    storage: Extension | None = None
    """Object store to use instead of a folder (`lockstep.extend.ObjectStore`)."""
    keep_last: Positive = 3
    """Number of newest checkpoints to keep."""
    keep_every: Every | None = None
    """Also keep the first checkpoint of each interval."""
    best: str | None = None
    """Also keep the checkpoint with the best evaluation metric, such as `held-out.loss`. It is saved after the
    evaluation."""
    best_is: Literal["auto", "lowest", "highest"] = "auto"
    """auto: lowest for a loss or error, highest for an accuracy or score, by the metric's name."""
    asynchronous: bool = True
    """Save while training continues; false: wait for each save."""

    def _contradictions(self) -> Iterator[str]:
        if self.keep_every is not None and self.keep_every.unit == "minutes":
            yield "keep_every counts steps, samples, tokens or epochs; minutes aren't in a checkpoint"
        if self.storage is not None and self.folder is not None:
            yield "checkpoint.folder and checkpoint.storage exclude each other; leave one out"
        if self.best is not None and "." not in self.best:
            yield f"best {self.best!r} is not SET.METRIC, such as held-out.loss"


class EarlyStoppingConfig(Section):
    """Ends a run when its evaluations no longer improve."""

    metric: str
    """Metric of an evaluation set, such as `held-out.loss`."""
    patience: Positive = 3
    """Evaluations in a row without an improvement before the run ends."""
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Smallest change that counts as an improvement."""
    mode: Literal["auto", "min", "max"] = "auto"
    """auto: min for a loss or error, max for an accuracy or score, by the metric's name."""

    def _contradictions(self) -> Iterator[str]:
        if "." not in self.metric:
            yield f"metric {self.metric!r} is not SET.METRIC, such as held-out.loss"


class PrometheusConfig(Section):
    """Endpoint for Prometheus, on rank 0's host."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9470
    """Port of `/metrics`; 0: any free port. If it is taken, the run continues with a warning."""
    address: str = "127.0.0.1"
    """Address to listen on; with 0.0.0.0 any host can read the metrics."""


class MonitorConfig(Section):
    """Display and logs of a run."""

    every: Positive = 10
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    trackers: tuple[Extension, ...] = ()
    """Experiment trackers: `wandb`, `mlflow`, `trackio`, or your own (`lockstep.extend.Tracker`)."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """auto: live display on a terminal, otherwise and in CI plain lines."""
    meter_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Seconds between lines of ranks.jsonl (times, memory, GPU and host of each rank); 0: off."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop when evaluations no longer improve; null: never."""
    prometheus: PrometheusConfig | None = None
    """Endpoint for Prometheus; null: none. Needs the extra `prometheus`."""


class Run(Section):
    """Length, seed and folder of the run. Set one of steps, samples, tokens and epochs."""

    steps: Positive | None = None
    """Length in steps, discarded ones included."""
    samples: Positive | None = None
    """Length in samples, over all ranks."""
    tokens: Positive | None = None
    """Length in tokens, over all ranks, without padding."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length in passes over the training data; may be a fraction."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 42
    """Seed of initial weights, sample order, dropout and augmentation."""
    folder: RunPlaceText | None = None
    """Folder of the run; null: runs/RECIPE-DATE-TIME."""
    end_with: Literal["last", "best"] = "last"
    """Final weights: of the last step, or of `checkpoint.best`."""
    allow_untested: bool = False
    """Allow combinations that were never tested (docs/strategies.md)."""
    determinism: Literal["default", "deterministic", "invariant"] = "default"
    """deterministic: bitwise identical on the same machine. invariant: also on any number of data ranks; for `single`
    and `ddp` with a `batch.micro_size`."""

    def _contradictions(self) -> Iterator[str]:
        given = [name for name in ("steps", "samples", "tokens", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            many = f"{' and '.join(given)} contradict each other" if given else "the length of the run is missing"
            yield f"{many}; give exactly one of steps, samples, tokens, epochs"


_METRICS = (
    "loss", "perplexity", "accuracy", "bits_per_byte", "margin", "rewards_chosen", "rewards_rejected", "kl",
)  # fmt: skip
"""Metrics of Lockstep's own objectives; which of them a run has is known when it starts."""


class Config(Section):
    """A whole run."""

    description: str = ""
    """One line for `lockstep recipes`."""
    model: Model
    """The model to train."""
    objective: ObjectiveConfig = ObjectiveConfig()
    data: Data
    batch: BatchConfig = BatchConfig()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    memory: Memory = Memory()
    launch: Launch = Launch()
    recovery: Recovery = Recovery()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    monitor: MonitorConfig = MonitorConfig()
    profile: ProfileConfig = ProfileConfig()
    monitors: tuple[Extension, ...] = ()
    """Further monitors, which receive each report on rank 0 (`lockstep.extend.Monitor`)."""
    transforms: tuple[Extension, ...] = ()
    """Transforms of the model, applied before sharding (`lockstep.extend.Transform`)."""
    run: Run

    def with_values(self, **sections: Mapping[str, Any]) -> Config:
        """Return the config with other values in sections, unchecked: `with_values(batch={"micro_size": 4})`."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)

    def _contradictions(self) -> Iterator[str]:
        if self.optim.name == "schedule-free":  # its average replaces the decay
            if "kind" not in self.schedule.model_fields_set:  # the config is frozen, and not yet anyone's
                object.__setattr__(self, "schedule", self.schedule.model_copy(update={"kind": "constant"}))
            if self.schedule.kind not in ("constant", "given"):
                yield f"schedule.kind is {self.schedule.kind}, and optim.name schedule-free needs none: write constant"
        if self.optim.ema is not None and (self.precision.parameters == "bf16" or self.optim.name == "schedule-free"):
            is_narrow = self.precision.parameters == "bf16"
            why = "precision.parameters bf16 would round its moves away" if is_narrow else "schedule-free has its own"
            yield f"optim.ema averages the parameters, and {why}; leave one of them out"
        if self.precision.parameters == "bf16" and self.optim.name not in ("adamw", "adam"):
            yield f"precision.parameters bf16 is for optim.name adamw or adam, not {self.optim.name}; write fp32"
        if self.memory.activation_checkpointing.mode == "budget" and not self.model.compile:
            yield "memory.activation_checkpointing.mode budget needs model.compile: true"
        if self.memory.loss_chunk is not None and self.model.compile:
            yield "memory.loss_chunk and model.compile don't go together; leave one out"
        if self.memory.loss_chunk is not None and (self.evaluation.further or self.evaluation.generate):
            key = "metrics" if self.evaluation.further else "generate"
            yield f"evaluation.{key} needs all logits, which memory.loss_chunk never has at a time; leave one out"
        for name, source in {"train": self.data.train, **self.data.evaluation}.items():
            yield from _unpaired(name, source, self.objective.kind)
        if self.objective.kind == "kto" and self.run.determinism == "invariant":
            yield "run.determinism invariant: kto's divergence is a sum over ranks in any order; take deterministic"
        if self.objective.kind == "kto" and self.evaluation.generate:
            yield "evaluation.generate compares answers with wanted ones, and those of kto are rated; leave it out"
        if self.run.end_with == "best" and self.checkpoint.best is None:
            yield "run.end_with best needs checkpoint.best: a metric such as held-out.loss"
        if self.checkpoint.best is not None:
            yield from self._unknown_metric("checkpoint.best", self.checkpoint.best)
        watched = {"monitor.early_stopping": self.monitor.early_stopping, "schedule.plateau": self.schedule.plateau}
        for key, section in watched.items():
            if section is not None:
                yield from self._unknown_metric(f"{key}.metric", section.metric)
                if self.evaluation.every is None:
                    yield f"{key} needs evaluation.every, for example `100 steps`"

    def _unknown_metric(self, key: str, name: str) -> Iterator[str]:
        sets = [evaluation for evaluation in self.data.evaluation if name.startswith(f"{evaluation}.")]
        if not sets:
            known = ", ".join(self.data.evaluation) or "none"
            yield f"{key} {name} is not in data.evaluation, which has: {known}"
            return
        metric = name.removeprefix(f"{max(sets, key=len)}.")
        custom = self.objective.kind in ("custom", "given") or self.model.kind in ("custom", "given")
        generated = self.evaluation.generate.metrics if self.evaluation.generate else ()
        titles = [section.title for section in (*self.evaluation.further, *generated)]
        if not custom and metric not in _METRICS and not metric.startswith((*titles,)):  # several values: rouge1_recall
            yield f"{key}: no evaluation has the metric {metric!r}; {did_you_mean(metric, [*_METRICS, *titles])}"


def _unpaired(name: str, source: DataSource, kind: str) -> Iterator[str]:
    """Yield why an objective and the data of a set don't go together: one has pairs, and the other doesn't."""
    rejected, desirable = getattr(source, "rejected", None), getattr(source, "desirable", None)
    if (kind == "kto") != (desirable is not None):
        remedy = (
            "set kto, or remove it"
            if desirable
            else "take kind huggingface, and name the column that has true for desirable answers"
        )
        yield f"data {name}: desirable is for objective.kind kto, and needed there; it is {kind}: {remedy}"
    if rejected is not None and kind not in (*PAIRS, "custom", "given"):
        yield f"data {name}: rejected is for pairs, and objective.kind is {kind}; set one of {', '.join(PAIRS)}"
    if kind in PAIRS and rejected is None and source.kind not in ("custom", "given"):
        yield f"data {name}: objective.kind {kind} needs pairs; name the column with the other answer as rejected"

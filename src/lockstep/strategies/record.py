"""The record of a strategy. Plan, mesh, feature table, `verify` and the docs' tables are folds over all of them.

Strategy      fsdp: options, how it is built, which axes it combines with
  Variant     fsdp-grad-op: the options that select it, mesh, sharded state, refusals
Partition     pipeline-1f1b: how a model or its sequences are partitioned along one more axis of the mesh
RunLayout     pipeline-1f1b+fsdp: the partitions and the variant of one run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from lockstep.core.closest import did_you_mean
from lockstep.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from lockstep.config.schema import Parallel
    from lockstep.strategies.section import Section

MeshKind = Literal["one process", "replicas", "shards", "hybrid"]
"""The mesh axes that a variant arranges ranks on: none; `data`; `shard`; or both."""
Standing = Literal["cpu", "untested", "refused", "none"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table strategy x feature.

    Attributes:
        standing: `cpu`: tested on the CPU against the single process; `none`: the strategy has no such option.
        gpu: Where and when it was tested on a GPU: `H200, 2026-11-20, 1a2b3c4`.
        on_cpu: The problem to report on the CPU, for features of GPUs.
    """

    standing: Standing
    why: str = ""
    gpu: str = ""
    on_cpu: Problem | None = None

    def __str__(self) -> str:
        standing = {"cpu": "CPU", "none": "-"}.get(self.standing, self.standing)
        return f"{standing}: {self.why}" if self.why else f"{standing}, {self.gpu}" if self.gpu else standing


CPU, NONE = Cell("cpu"), Cell("none")


WHOLE_MATRICES = "whole matrices"
"""The cell of all optimizers that look at whole matrices."""


PACKAGED = ("adamw-8bit", "schedule-free")
"""Features of optimizers that other packages define."""


def refused(why: str) -> Cell:
    return Cell("refused", why)


ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class StateSharding:
    """The parts of the training state that are sharded by the mesh's shard axis; the rest is whole on each rank.

    Attributes:
        note: What it means, in a sentence.
        stays_gathered: Sharded parameters are whole on each rank from the forward to the backward.
        masters: Each rank holds a second copy of the values that it updates.
        gradient_copies: Copies of gradients on a rank, given the options.
        kept_whole: `module:function`: (options, elements of each parameter) -> which ones are also whole on each rank.
    """

    note: str
    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False
    masters: bool = False
    gradient_copies: Callable[[Any], int] = lambda options: 1
    kept_whole: str = ""
    stays_gathered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One setting of a strategy's options, under its name in tables, `plan` and `verify`.

    Attributes:
        options: Options that select it.
        cells: Features that differ from the strategy's.
        title: Its name in messages; empty: the strategy's name.
        replicated: The option, `KEY: VALUE`, that does the same with several replicas, if any.
        implied: It needs no mention in the name of a product.
    """

    name: str
    mesh: MeshKind
    state: StateSharding
    options: Mapping[str, Any] = field(default_factory=dict)
    cells: Mapping[str, Cell] = field(default_factory=dict)
    title: str = ""
    replicated: str = ""
    implied: bool = False

    @property
    def divides(self) -> bool:
        """True if ranks hold shards of the state."""
        return self.mesh in ("shards", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combinations:
    """Axes, partitions and options that a strategy combines with; the plan reads them.

    Attributes:
        axes, verified_axes: Mesh axes (pipeline, context, tensor) that it combines with; that `verify` combines.
        conflicts: Partitions that it doesn't combine with: name -> (key, why).
        automatic: `parallel.strategy: auto` may choose it, in the order of the registry.
        one_process: A description of its one process, for a strategy that has no further ranks.
        whole_model: The subject of its options, if they apply only to a model that isn't partitioned.
        finds_unused: It can leave out parameters without gradient (`parallel.ddp.find_unused_parameters`).
        heeds: Options of other strategies that apply to it, such as {"ddp": "find_unused_parameters"}.
    """

    axes: tuple[str, ...] = ()
    verified_axes: tuple[str, ...] = ()
    conflicts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    automatic: bool = False
    one_process: str = ""
    whole_model: str = ""
    finds_unused: bool = False
    heeds: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Equality of its numbers with a single process; `verify` and `run.determinism: invariant` read it.

    Attributes:
        reference: It is the single process that every other strategy must reproduce.
        invariant: Its runs can be bitwise identical on any number of ranks (`run.determinism: invariant`).
        varying_options: Options that make bits depend on ranks: name -> why, with {value} and {why}.
        rounding: Options that make a run in fp32 round: a verification in fp32 leaves them out.
        rounds_to_fp16: Whether gradients pass through fp16, which needs a loss scale.
        lossy: How the options lose bits of a gradient, in a sentence, if they do.
    """

    reference: bool = False
    invariant: bool = False
    varying_options: Mapping[str, str] = field(default_factory=dict)
    rounding: tuple[str, ...] = ()
    rounds_to_fp16: Callable[[Any], bool] = lambda options: False
    lossy: Callable[[Any], str | None] = lambda options: None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory that a strategy holds and gathers; the estimate of memory and the start of a rank read it.

    Attributes:
        holds_everything: Each rank has the whole training state.
        offloads: Whether the options ask for offloading.
        offloading: Options that do: what is then on the host -> name -> value; the fast ones first.
        accumulates_whole: Whether, given the options, an update of several micro-batches keeps its gradients whole.
        saves_memory: Options that save memory in a step of several micro-batches: name -> value.
        rounds: Options that save memory where the forward computes in bf16, and round: name -> value.
        element_bytes: Bytes of an element of what is gathered (None: as used), and reduced.
        in_fp32: Frozen parameters are in fp32, too.
    """

    holds_everything: bool = False
    offloads: Callable[[Any], bool] = lambda options: False
    offloading: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    accumulates_whole: Callable[[Any], bool] = lambda options: False
    saves_memory: Mapping[str, str] = field(default_factory=dict)
    rounds: Mapping[str, Any] = field(default_factory=dict)
    element_bytes: Callable[[Any], tuple[int | None, int]] = lambda options: (4, 4)
    in_fp32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Checks and imports of a strategy, each as `module:function`.

    Attributes:
        check: (config, plan) -> warnings; raises ConfigError.
        check_alone: (config): the same without ranks, data and model.
        check_model: (model, config): raises ConfigError for unsuitable modules.
        values: (config, keys that the user has set) -> values by further keys, of its own config.
        import_on_cpu: Imports what ranks need, in a launcher that forks them; starts no threads.
    """

    check: str = ""
    check_alone: str = ""
    check_model: str = ""
    values: str = ""
    import_on_cpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A strategy, complete: a new one is this record, and a line in the registry.

    Attributes:
        build: A `sharding.context.Builder`, which builds the strategy on a rank; or `module:NAME` of one.
        variants: The first is the default.
        family: The heading of its table in docs/strategies.md.
        options, key: The section of its options, under `parallel.KEY`; empty: its name.
        cells: Features that differ from the table's defaults.
        needs_optimizer: It takes a model only together with its optimizer.
        remarks: What else the start of a run prints about the options.
        unwrapped: Printed if the strategy has left the model as it was.
    """

    name: str
    build: Any
    variants: tuple[Variant, ...]
    family: str = "Data parallel"
    options: type[Section] | None = None
    key: str = ""
    cells: Mapping[str, Cell] = field(default_factory=dict)
    needs_optimizer: bool = False
    remarks: Callable[[Any], tuple[str, ...]] = lambda options: ()
    unwrapped: str = ""
    combines: Combinations = Combinations()
    exactness: Exactness = Exactness()
    memory: MemoryUse = MemoryUse()
    hooks: Hooks = Hooks()

    @property
    def section(self) -> str:
        return self.key or self.name.replace("-", "_")

    @property
    def divides(self) -> bool:
        """True if ranks hold shards of the state under any of its variants."""
        return any(variant.divides for variant in self.variants)

    def options_of(self, parallel: Parallel) -> Any:
        """Return the checked options; None if the strategy has none. Raises ConfigError."""
        if self.options is None:
            return None
        written = dict(parallel).get(self.section, {})
        if isinstance(written, self.options):
            return written
        try:
            return self.options.model_validate(written)
        except ValidationError as error:
            problems = [_problem(("parallel", self.section), self.options, each) for each in error.errors()]
            raise ConfigError(problems) from error

    def variant(self, parallel: Parallel) -> Variant:
        """Return the variant that the options select."""
        options = self.options_of(parallel)
        for variant in self.variants:
            if all(getattr(options, name) == value for name, value in variant.options.items()):
                return variant
        return self.variants[0]


def _problem(section: tuple[str, ...], options: type[Section], error: ErrorDetails) -> Problem:
    """Return pydantic's error about an option, as it reads for a key of the config."""
    key = ".".join(map(str, (*section, *error["loc"])))
    if error["type"] != "extra_forbidden":
        return Problem("", key, error["msg"])
    return Problem("", key, f"unknown key; {did_you_mean(str(error['loc'][-1]), options.model_fields)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A way to partition the model or its sequences along one axis of the mesh.

    Attributes:
        axis: pipeline, context or tensor.
        parallel: The keys of section `parallel` that select it.
        cells: Features that differ from the strategy's.
        divides_model: The model itself is partitioned, not its sequences.
        product: `verify` runs it with strategies that shard, and with other partitions of the model.
    """

    name: str
    axis: str
    family: str
    parallel: Mapping[str, Any]
    cells: Mapping[str, Cell] = field(default_factory=dict)
    divides_model: bool = True
    product: bool = False


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The partitions and the variant of one run, under a name such as `pipeline-1f1b+fsdp`."""

    partitions: tuple[Partition, ...]
    strategy: Strategy
    variant: Variant

    @property
    def name(self) -> str:
        names = [partition.name for partition in self.partitions]
        return "+".join(names if names and self.variant.implied else [*names, self.variant.name])

    @property
    def family(self) -> str:
        """The heading of its table in docs/strategies.md."""
        return self.partitions[0].family if self.partitions else self.strategy.family

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of its partitions and, last, of its variant."""
        return (*(partition.name for partition in self.partitions), self.variant.name)

    @property
    def parallel(self) -> dict[str, Any]:
        """The keys of section `parallel` that select it, without degrees that follow from the ranks."""
        keys: dict[str, Any] = {"strategy": self.strategy.name}
        if self.variant.options:
            keys[self.strategy.section] = dict(self.variant.options)
        for partition in self.partitions:
            keys |= partition.parallel
        return keys


def resolved(target: Any) -> Any:
    """Return the object that a record names as `module:NAME`, or holds itself."""
    if not isinstance(target, str):
        return target
    from lockstep.core.extensions import import_target

    return import_target(target)

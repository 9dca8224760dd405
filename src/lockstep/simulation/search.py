"""The fastest config that fits on a cluster, or the one that takes least memory, out of those that train the same run.

layouts      strategies and products of degrees on these GPUs
modes        of a layout: activation checkpointing, and the strategy's own options that save memory
micro-batch  the largest that fits

arithmetic   the training state alone doesn't fit; or the operations and the bubble take longer than the best
simulation   of two shallow models, for the bytes and the seconds of a block: they grow with the number of blocks
the found    is simulated whole, and the next one if it doesn't fit
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lockstep.config.schema import HuggingFaceModel, Parallel, TransformerModel
from lockstep.core.errors import ConfigError
from lockstep.core.formatting import aligned, differing, size
from lockstep.plan.choosing import TOKEN_BYTES, USABLE, Decision, is_plenty
from lockstep.simulation.estimate import Estimator, StrategyMemory, estimator_of, even, side_by_side, taken, under
from lockstep.simulation.failing import Unpredictable
from lockstep.strategies.registry import AUTO, REFERENCE, find_strategy, strategies

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.plan.gpus import GPUCluster
    from lockstep.plan.plan import Plan
    from lockstep.simulation.timing import Share

Goal = Literal["time", "cost", "memory"]

_DEPTH = 4  # blocks of the shallow model, and twice as many of the other; with fewer, FSDP has gathered others ahead
_LONG = 16384  # tokens of a sequence from which on it may be sharded
_EXPOSED = 0.1  # of a step; where less is left to hide, a pipeline's bubble takes what it saves
_EXPOSED_PARTS: tuple[Share, ...] = ("communication", "host", "bubble")
_COMPUTING: tuple[Share, ...] = ("matmul", "attention", "memory")
_WORTH = 0.98  # of the best time; what saves less isn't looked at more closely
_DEPTH_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SHOWN = 5
_HALF = 0.5  # of a sample; where less seems to fit, nothing is simulated


@dataclass(frozen=True, slots=True)
class Candidate:
    """A config that was considered.

    Attributes:
        overlay: What it changes, as a config file.
        layout: The layout's name and degrees.
        seconds, reserved: Of a step, and of the GPU's bytes; None: it wasn't simulated. Bounds of what wasn't taken
            further.
        fits: None: unknown.
        why: Why it isn't the found one; what that needs beside the GPU.
    """

    overlay: Mapping[str, Any]
    layout: str
    micro_size: int
    checkpointing: str
    seconds: float | None
    reserved: int | None
    fits: bool | None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "overlay": self.overlay, "layout": self.layout, "micro_size": self.micro_size,
            "activation_checkpointing": self.checkpointing, "step_seconds": self.seconds,
            "reserved_bytes": self.reserved, "fits": self.fits, "why": self.why,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search: the best config, if any fits, with its plan and memory; and all others, best first."""

    best: Candidate | None
    candidates: Sequence[Candidate]
    simulations: int
    plan: Plan | None = None
    memory: StrategyMemory | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it for programs, the best one first among the candidates."""
        all_of = [*([] if self.best is None else [self.best]), *self.candidates]
        return {"candidates": [each.as_json() for each in all_of], "simulations": self.simulations}


def search(
    estimator: Estimator, goal: Goal = "time", show: Callable[[str, float, int], None] = lambda *unused: None
) -> Found:
    """Return the best config on the estimator's cluster, where the cheapest is the fastest.

    Args:
        show: Gets the name, the seconds of a step and the reserved bytes of each config that is simulated.

    Raises:
        ConfigError: No layout can train the config.
    """
    assert estimator.cluster is not None, "there are GPUs to search on"
    finder = _Search(estimator, _usable(estimator), goal, show=show)
    length = estimator.facts.tokens_per_sample or 0
    for name, config in _layouts(estimator.config, estimator.cluster, length, finder.seen):
        finder.look_at(name, config)
    result = finder.result()
    if result.best is None and _on_gpus(estimator):
        finder.best = float("inf")  # the line of shallow models may have promised more
        for name, config in _offloaded(estimator.config):
            if finder.best == float("inf"):
                finder.look_at(name, config)
        result = finder.result()
    if not finder.seen:
        raise finder.refusal or ConfigError("no strategy can train this config")
    return result


def _layouts(
    config: Config, cluster: GPUCluster, length: int, seen: Sequence[tuple[Config, Candidate]]
) -> Iterator[tuple[str, Config]]:
    """Yield the strategies and the products of degrees on a cluster, the simple ones first.

    Args:
        seen: The candidates so far, to which the search adds: what shards as one that was simulated is left out.
    """
    base = _without_axes(config)
    ranks = cluster.ranks
    own = [each for each in strategies() if bool(each.combines.one_process) == (ranks == 1)]
    known = set[tuple[object, ...]]()
    for strategy in own:
        for variant in strategy.variants:
            state, offloads = variant.state, strategy.memory.offloads(strategy.options_of(base.parallel))
            widths = strategy.memory.element_bytes(strategy.options_of(under(base, strategy, variant).parallel))
            sharded = (variant.mesh, state.parameters, state.gradients, state.optimizer, state.stays_gathered)
            kind = (*sharded, offloads, widths)
            if kind in known:
                continue  # another that shards the same computes and sends the same
            if variant.mesh != "hybrid":
                yield variant.name, under(base, strategy, variant)
                known |= {kind for _, each in seen if each.layout == variant.name and each.reserved}
            elif cluster.nodes > 1:
                yield variant.name, _with_parallel(under(base, strategy, variant), {"shard": cluster.per_node})
    degrees = [each for each in (2, 4, 8, 16) if ranks % each == 0]
    products: list[dict[str, int]] = [{"tensor": each} for each in degrees if each <= cluster.per_node]
    products += [{"context": each} for each in degrees if length >= _LONG]
    products += [{"pipeline": each} for each in degrees]
    products += [{"tensor": 8, "pipeline": each} for each in degrees if cluster.per_node == 8 and ranks >= 8 * each]
    for product in products:
        for strategy in own:
            if all(axis in strategy.combines.axes for axis in product):
                name = "".join(f"{axis} {degree} x " for axis, degree in product.items()) + strategy.name
                yield name, _with_parallel(under(base, strategy, strategy.variants[0]), product)


def _offloaded(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield what holds parts of the training state on the host, slower and slower, for where nothing else fits.

    Only the variant that shards most: for 7B on one A100, ZeRO-1 and 2 are predicted 4 and 32 % slower than ZeRO-3.
    """
    for strategy in strategies():
        last = strategy.variants[-1]
        for what, options in strategy.memory.offloading.items():
            both = replace(last, options={**last.options, **options})
            yield f"{last.name}, {what}", under(_without_axes(config), strategy, both)


_AXES = ("pipeline", "context", "tensor")


def _without_axes(config: Config) -> Config:
    written = config.parallel.model_dump(exclude_unset=True)
    plain = {key: value for key, value in written.items() if key not in ("data", "shard", *_AXES)}
    return config.model_copy(update={"parallel": Parallel.model_validate(plain)})


def _with_parallel(config: Config, keys: Mapping[str, Any]) -> Config:
    parallel = {**config.parallel.model_dump(exclude_unset=True), **keys}
    return config.model_copy(update={"parallel": Parallel.model_validate(parallel)})


_Kind = tuple[str, frozenset[str]]
"""A layout without its degrees: its strategy, and the axes that it has beside the data."""


class _Step(NamedTuple):
    seconds: float
    reserved: int
    exposed: float  # seconds in which nothing computes
    computing: float  # seconds of operations, without the optimizer's


def _step_of(estimator: Estimator, config: Config) -> _Step:
    config = config.model_copy(update={"model": estimator.config.model})
    peak, time = replace(estimator, config=config, memory=None).simulated(config)
    if time is None:  # on unknown devices fewer micro-batches are faster
        return _Step(float(estimator.planned(config).batch.accumulation), taken(peak), 0.0, 0.0)
    exposed, computing = (sum(time.parts[part] for part in of) for of in (_EXPOSED_PARTS, _COMPUTING))
    return _Step(time.seconds, taken(peak), exposed, computing)


@dataclass(slots=True)
class _Search:
    estimator: Estimator
    memory: int
    goal: Goal
    automatic: bool = False  # what the config sets stays
    whole: bool = False  # nothing is read off shallow models
    show: Callable[[str, float, int], None] = lambda *unused: None
    seen: list[tuple[Config, Candidate]] = field(default_factory=list)
    best: float = float("inf")
    exposed: float = 1.0  # of the best step: the share in which nothing computes
    computing: dict[tuple[str, int], float] = field(default_factory=dict)  # seconds by mode and micro-batch
    simulations: int = 0
    refusal: ConfigError | None = None
    _at_depth: dict[int, Estimator | None] = field(default_factory=dict)
    _known: dict[str, _Step] = field(default_factory=dict)
    _lines: dict[tuple[str, bool], tuple[float, float]] = field(default_factory=dict)
    """Bytes beside the state, and for a sample, by mode and by whether parameters are sharded."""
    _slow: set[_Kind] = field(default_factory=set)

    def look_at(self, name: str, config: Config) -> None:
        """Simulate a layout's modes as far as they may be better than the best."""
        try:
            config = config if self.automatic else config.with_values(batch={"micro_size": AUTO})
            plan = self.estimator.planned(config)
        except ConfigError as refusal:
            self.refusal = self.refusal or refusal
            return
        share = plan.batch.micro_size
        strategy = find_strategy(plan.strategy)
        if not self.automatic and (why := self.estimator.too_large(config)):
            self._note(name, config, share, None, plan.placement.total, why)
            return
        axes = frozenset(axis for axis in _AXES if getattr(config.parallel, axis) != 1)
        kind = plan.strategy if axes else name, axes
        if self.goal != "memory" and (why := self._cannot_win(kind, plan)):
            self._note(name, config, share, None, None, why)
            return
        modes = [(config, config)]
        if not self.automatic:
            modes = _modes(config, strategy.memory.saves_memory, strategy.section)
        try:
            if self.goal == "memory":
                for _, each in reversed(modes):  # a model without repeated blocks isn't checkpointed
                    with suppress(ConfigError):
                        self._evaluate(name, each, 1)
                        break
            else:
                self._modes(name, config, plan, modes)
                if all(
                    each.seconds is None or each.seconds > self.best for _, each in self.seen if each.layout == name
                ):
                    self._slow.add(kind)
        except Unpredictable as reason:
            self._note(name, config, share, None, None, str(reason))
        except ConfigError as refusal:
            self.refusal = self.refusal or refusal

    def _cannot_win(self, kind: _Kind, plan: Plan) -> str:
        """Return why a layout can't be faster than the best; empty: it may be."""
        if kind in self._slow or any(set() < axes < kind[1] for _, axes in self._slow):
            return "slower: with a smaller degree, or without its second axis, it was"
        stages = plan.mesh.pipeline
        waits = (stages - 1) / (-(-plan.batch.global_size // plan.mesh.shares) + stages - 1)
        if self._least("none", plan.batch.micro_size // plan.mesh.pieces) / (1 - waits) >= _WORTH * self.best:
            return "slower, even if it only computed" + " and waited for its stages" * (stages > 1)
        if stages > 1 and self.best < float("inf") and self.exposed < _EXPOSED:
            return f"not simulated: of the best step, only {self.exposed:.0%} is left to save by it"
        return ""

    def _least(self, mode: str, samples: int) -> float:
        """Return the least seconds that operations take in micro-batches of at most this size, or of any."""
        known = {size: seconds for (other, size), seconds in self.computing.items() if other == mode}
        larger = [seconds for size, seconds in known.items() if size >= samples]
        return max(larger, default=min(known.values(), default=0.0))

    def _modes(self, name: str, config: Config, plan: Plan, modes: Sequence[tuple[Config, Config]]) -> None:
        """Find the largest micro-batch that fits of each mode that may be better than the best."""
        share, state, strategy = plan.batch.micro_size, plan.placement.total, find_strategy(plan.strategy)
        is_plain = plan.mesh.pieces * plan.mesh.context == 1
        is_plain = is_plain and not strategy.memory.offloads(strategy.options_of(config.parallel))
        fixed: dict[bool, float] = {}  # where nothing is computed again, casts of weights wait for the backward
        reached = 0
        exposed = 0.0  # in the largest micro-batches; smaller ones communicate no less
        for plain, config in modes:
            mode = config.memory.activation_checkpointing.mode
            reached = 0 if plain is config else reached
            sharded = strategy.variant(config.parallel).state.parameters
            # sharded parameters' line is a lower bound for whole ones, which autocast copies in bf16; not the other way
            line = self._lines.get((mode, sharded)) or self._lines.get((mode, True)) if is_plain else None
            if self._least(mode, share // plan.mesh.pieces) + exposed >= _WORTH * self.best:
                return  # smaller micro-batches and further modes take longer
            if line is None:
                whole = self._evaluate(name, plain, share)
                exposed = exposed or whole.exposed
                if whole.reserved <= self.memory or whole.seconds >= _WORTH * self.best:
                    return  # smaller micro-batches and further modes take longer
                if share == 1:
                    continue
                if plain.batch.micro_size != AUTO:
                    return
                if (again := mode != "none") not in fixed:  # with what saves most beside the mode: nothing accumulates
                    saving = [each for first, each in modes if first == plain][-1]
                    least = self._evaluate(name, saving, 1).reserved
                    fixed[again] = least - (whole.reserved - least) / (share - 1)
                line = fixed[again] - state, (whole.reserved - fixed[again]) / share
                if is_plain:
                    self._lines[mode, sharded] = line
            most = (self.memory - state - line[0]) / max(line[1], 1.0)
            if most < _HALF:
                more = int(state + line[0] + line[1])
                self._note(name, config, 1, None, more, "")
                continue
            samples = even(share, max(1, int(most)))
            if why := self.estimator.too_large(config.with_values(batch={"micro_size": samples})):
                self._note(name, config, samples, None, None, why)
                continue
            if plain is not config and samples <= reached:
                continue  # what saves memory beside the mode only takes time
            if is_plain and self._least(mode, samples) + exposed >= _WORTH * self.best:
                self._note(name, config, samples, None, None, "slower, even if it only computed")
            elif (reached := self._largest(name, config, share, samples, line[1])) == share:
                return

    def _largest(self, name: str, config: Config, share: int, samples: int, slope: float) -> int:
        """Return the largest micro-batch that fits, near a guess; 0 if none does."""
        tried = set[int]()
        while True:
            tried.add(samples)
            left = self.memory - self._evaluate(name, config, samples).reserved
            if left < 0:
                if samples == 1:
                    return 0
                following = even(share, max(1, min(samples * 3 // 4, int(samples + left / max(slope, 1.0)))))
            else:
                following = even(share, int(samples + left / max(slope, 1.0)))
            if following in tried or (left >= 0 and following < samples):
                return min(samples, following) if left < 0 else samples
            samples = following

    def _evaluate(self, name: str, config: Config, samples: int) -> _Step:
        """Return the seconds of a step and the bytes of a GPU, and remember them."""
        config = config.with_values(batch={"micro_size": samples})
        key = config.model_dump_json(include={"parallel", "batch", "memory"})
        if key not in self._known:
            self._known[key] = step = self._simulated(config)
            plan = self.estimator.planned(config)
            if plan.mesh.pieces * plan.mesh.context == 1:
                mode = config.memory.activation_checkpointing.mode
                self.computing[mode, samples] = min(step.computing, self.computing.get((mode, samples), step.computing))
            self._note(name, config, samples, step.seconds, step.reserved, "")
            self.show(title(self.seen[-1][1]), step.seconds, step.reserved)
            if step.reserved <= self.memory and step.seconds < self.best:
                self.best, self.exposed = step.seconds, step.exposed / step.seconds
        return self._known[key]

    def _simulated(self, config: Config) -> _Step:
        """Return a step; if all blocks are alike, on the line through models of 4 and 8 (of a stage: two and four)."""
        stages = self.estimator.planned(config).mesh.pipeline
        depth = max(_DEPTH, 2 * stages)
        first, second = self._estimator(depth), self._estimator(2 * depth)
        if first is not None and second is not None and not self.whole:
            elements = [sum(each.elements for each in model.parameters) for model in (first, second, self.estimator)]
            more, rest = divmod((elements[2] - elements[0]) * depth, elements[1] - elements[0])
            if not rest and more > depth:
                self.simulations += 2
                steps = side_by_side([partial(_step_of, each, config) for each in (first, second)])
                pairs = zip(*steps, strict=True)
                seconds, reserved, *others = (low + (high - low) * more / depth for low, high in pairs)
                return _Step(seconds, int(reserved), *(max(0.0, each) for each in others))
        self.simulations += 1
        return _step_of(self.estimator, config)

    def _estimator(self, depth: int) -> Estimator | None:
        if depth not in self._at_depth:
            config, own = _with_depth(self.estimator.config, depth), self.estimator
            try:
                self._at_depth[depth] = (
                    None
                    if config is None or own.given.model is not None
                    else estimator_of(config, own.ranks, None, own.given, own.cluster)
                )
            except ConfigError:
                self._at_depth[depth] = None
        return self._at_depth[depth]

    def _note(
        self, name: str, config: Config, samples: int, seconds: float | None, reserved: int | None, why: str
    ) -> None:
        config = config.with_values(batch={"micro_size": samples})
        fits = None if reserved is None else reserved <= self.memory
        mode = config.memory.activation_checkpointing.mode
        overlay = overlay_of(self.estimator.config, config)
        self.seen.append((config, Candidate(overlay, name, samples, mode, seconds, reserved, fits, why)))

    def result(self) -> Found:
        """Simulate the best ones whole until one fits, and say why the others fell."""
        unknown = float("inf")
        waiting = [pair for pair in self.seen if pair[1].seconds is not None]
        best: Candidate | None = None
        plan: Plan | None = None
        memory: StrategyMemory | None = None
        others: list[Candidate] = []
        while waiting:
            waiting.sort(key=lambda pair: (not pair[1].fits, self._rank(pair[1])))
            config, candidate = pair = waiting.pop(0)
            if best is None and candidate.fits and not candidate.why:
                self.simulations += 1  # a deeper model may peak at another moment, above the line of shallow ones
                peak, time = replace(self.estimator, config=config).simulated(config)
                fits = self.estimator.fits(peak) and not (peak.reserved and peak.reserved.releases)
                known = replace(candidate, seconds=time.seconds if time else None, reserved=taken(peak))
                if fits:
                    memory = StrategyMemory(candidate.layout, True, peak, True, time=time)
                    plan = self.estimator.planned(config)
                    best = replace(known, why=_on_host(config, plan))
                    continue
                candidate = replace(known, fits=False)
                self.seen[self.seen.index(pair)] = config, candidate
                waiting += self._smaller(config, candidate)
            others.append(candidate)
        others += [candidate for _, candidate in self.seen if candidate.seconds is None]
        others = [replace(each, why=each.why or self._why(each, best)) for each in others]
        others.sort(key=lambda each: (not each.fits, (each.reserved if best is None else each.seconds) or unknown))
        return Found(best, others, self.simulations, plan, memory)

    def _smaller(self, config: Config, candidate: Candidate) -> Sequence[tuple[Config, Candidate]]:
        """Return the next smaller micro-batch, unless it is among those seen or the config sets its size."""
        known, written = len(self.seen), self.estimator.config.batch.micro_size
        if candidate.micro_size > 1 and (written == AUTO or not self.automatic):
            share = self.estimator.planned(config.with_values(batch={"micro_size": AUTO})).batch.micro_size
            self._evaluate(candidate.layout, config, even(share, candidate.micro_size - 1))
        return self.seen[known:]

    def _rank(self, candidate: Candidate) -> float:
        assert candidate.seconds is not None
        return float(candidate.reserved or 0) if self.goal == "memory" else candidate.seconds

    def _why(self, candidate: Candidate, best: Candidate | None) -> str:
        if not candidate.fits and candidate.reserved is not None:
            more = candidate.reserved - self.memory
            return f"doesn't fit: {size(more)} too much" if more > 0 else "fits only with an allocator that waits"
        if best is None or best.seconds is None or candidate.seconds is None or not best.reserved:
            return ""
        if self.goal == "memory":
            return f"takes {size((candidate.reserved or 0) - best.reserved)} more"
        return f"{candidate.seconds / best.seconds - 1:.0%} slower"


def _on_host(config: Config, plan: Plan) -> str:
    strategy = find_strategy(plan.strategy)
    offloads = strategy.memory.offloads(strategy.options_of(config.parallel))
    return f"and up to {size(plan.placement.total)} of the host's memory for each rank" if offloads else ""


def _modes(config: Config, saves: Mapping[str, str], section: str) -> list[tuple[Config, Config]]:
    """Return the config with each way to save memory, the fast ones first, after the one without the strategy's own."""
    modes = []
    for checkpointing in ("none", "selective", "full"):
        memory = config.memory.activation_checkpointing.model_copy(update={"mode": checkpointing})
        plain = config.with_values(memory={"activation_checkpointing": memory})
        modes.append((plain, plain))
        if saves:
            modes.append((plain, _with_parallel(plain, {section: {**_options(plain, section), **saves}})))
    return modes


def _options(config: Config, section: str) -> dict[str, Any]:
    return dict(config.parallel.model_dump(exclude_unset=True).get(section) or {})


def _with_depth(config: Config, blocks: int) -> Config | None:
    """Return the config of a model with N blocks; None if the config doesn't say how many it has."""
    match config.model:
        case TransformerModel():
            return config.with_values(model={"layers": blocks})
        case HuggingFaceModel(pretrained=None, architecture=dict(keys)):
            name = next((each for each in _DEPTH_NAMES if each in keys), _DEPTH_NAMES[0])
            return config.with_values(model={"architecture": {**keys, name: blocks}})
    return None


def overlay_of(config: Config, changed: Config) -> dict[str, Any]:
    """Return the sections of a config file that make the one of the other."""
    sections = {"parallel", "batch", "memory"}
    before, after = (each.model_dump(mode="json", include=sections) for each in (config, changed))
    overlay: dict[str, Any] = {}
    for key, (_, new) in differing(before, after).items():
        *path, last = key.split(".")
        place = overlay
        for name in path:
            place = place.setdefault(name, {})
        place[last] = new
    return overlay


def describe(result: Found, goal: Goal) -> str:
    """Return the result for people: the overlay, and the table of the best ones."""
    if result.best is None:
        head = "no config fits"
    else:
        least = "takes the least memory" if goal == "memory" else "is the fastest that fits"
        head = f"{title(result.best)} {least}. Write this to a file, and name it after the recipe:\n\n"
        head += as_yaml(result.best.overlay)
    rows: list[tuple[str, ...]] = [("config", "ms", "reserved", "")]
    best_of: dict[str, Candidate] = {}
    for candidate in result.candidates:
        best_of.setdefault(candidate.layout + candidate.checkpointing, candidate)
    shown = [*([result.best] if result.best else []), *best_of.values()]
    for each in shown[: _SHOWN + 1] if result.best else shown:
        seconds = "" if each.seconds is None else f"{1000 * each.seconds:,.1f}"
        marked = "<- " * (each is result.best) + each.why
        rows.append((title(each), seconds, "" if each.reserved is None else size(each.reserved), marked.strip()))
    hidden = len(result.candidates) + bool(result.best) - len(rows) + 1
    lines = aligned(rows, left={0, 3})
    return "\n".join([head, "", *lines, f"{hidden} others; {result.simulations} simulations"])


def as_yaml(overlay: Mapping[str, Any]) -> str:
    """Return an overlay as the text of a config file."""
    import yaml

    return str(yaml.safe_dump(overlay, sort_keys=False)).rstrip()


def title(candidate: Candidate) -> str:
    """Return a config in short: its layout, micro-batch and activation checkpointing."""
    return config_title(candidate.layout, candidate.micro_size, candidate.checkpointing)


def config_title(layout: str, samples: int, checkpointing: str) -> str:
    """Return a config in short."""
    mode = f", checkpointing {checkpointing}" if checkpointing != "none" else ""
    return f"{layout}, micro-batch {samples}{mode}"


# --- auto ---------------------------------------------------------------------------------------------------------


def decide(estimator: Estimator) -> Decision:
    """Return the strategy and the micro-batch that `auto` takes; what the config sets stays.

    They are the fastest that fit where the GPU's speed is known and memory is scarce, else the first that fit.
    May raise ConfigError, Unpredictable.
    """
    assert estimator.memory is not None, "without a limit everything fits"
    tokens = (estimator.facts.tokens_per_sample or 0) * TOKEN_BYTES
    facts = estimator.config, estimator.ranks, estimator.parameters
    by_time = _on_gpus(estimator) and not (tokens and is_plenty(*facts, tokens, estimator.memory))
    choices = list(_choices(estimator.config, estimator.ranks))
    finder = _Search(estimator, _usable(estimator), "time", automatic=True)
    for name, config in choices if by_time else ():
        finder.look_at(name, config)
    if by_time and (result := finder.result()).best is not None:
        return _decision(result.best, result.candidates, estimator)
    finder = _Search(estimator, _usable(estimator), "time", automatic=True, whole=True)
    for name, config in choices:
        finder.look_at(name, config)
        if fitting := [each for _, each in finder.seen if each.fits]:
            best = max(fitting, key=lambda each: each.micro_size)
            return _decision(best, [each for _, each in finder.seen if each is not best], estimator)
    known = [each for _, each in finder.seen if each.reserved is not None]
    if not known:
        raise finder.refusal or Unpredictable(next((each.why for _, each in finder.seen), "nothing can be simulated"))
    least = min(known, key=lambda each: each.reserved or 0)
    decision = _decision(least, [each for each in known if each is not least], estimator)
    return replace(decision, why=f"{decision.why}, and nothing that auto may choose takes less")


def _usable(estimator: Estimator) -> int:
    """Return the bytes of a rank to compare with `taken`; `Estimator.fits` compares the same."""
    assert estimator.memory is not None, "a GPU's is known"
    return estimator.memory if _on_gpus(estimator) else int(USABLE * estimator.memory)


def _on_gpus(estimator: Estimator) -> bool:
    return estimator.cluster is not None and estimator.cluster.gpu.device == "gpu"


def _choices(config: Config, ranks: int) -> Iterator[tuple[str, Config]]:
    if config.parallel.strategy != AUTO:
        yield config.parallel.strategy, config
    elif ranks == 1:
        yield REFERENCE.name, under(config, REFERENCE, REFERENCE.variants[0])
    else:
        for strategy in strategies():
            if strategy.combines.automatic:
                yield strategy.name, under(config, strategy, strategy.variants[0])


def _decision(best: Candidate, others: Sequence[Candidate], estimator: Estimator) -> Decision:
    """Return it with the reason: what fits, the next larger micro-batch, and each other strategy, in a line."""
    assert estimator.memory is not None, "`decide` asserts it"
    takes = "reserve" if _on_gpus(estimator) else "take"
    parts = [f"micro-batches of {best.micro_size} {takes} {size(best.reserved or 0)} of {size(estimator.memory)}"]
    known = sorted((each for each in others if each.reserved), key=lambda each: each.reserved or 0)
    larger = [each for each in known if each.layout == best.layout and each.micro_size > best.micro_size]
    parts += [f"{each.micro_size} would {takes} {size(each.reserved or 0)}" for each in larger[:1]]
    least = {each.layout: each for each in reversed(known) if each.layout != best.layout}
    for layout, each in least.items():
        fitting = [other.seconds for other in known if other.layout == layout and other.fits and other.seconds]
        if best.seconds and fitting:
            parts.append(f"{layout} is {min(fitting) / best.seconds - 1:.0%} slower")
        else:
            parts.append(f"{layout} needs {size(each.reserved or 0)}")
    return Decision(best.layout, best.micro_size, "; ".join(parts))

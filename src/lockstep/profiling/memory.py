"""Shows what the tensors of a run hold at the peak, by category and module, beside the prediction of its plan.

Three updates are made in new ranks of this machine, and each of their operations is watched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.core.formatting import counted, size
from lockstep.plan.modules import joined, list_of, row_of
from lockstep.simulation.memory import CATEGORIES, Category, Peak
from lockstep.simulation.planning import measured_beside_predicted
from lockstep.training.user_objects import refuse_given

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig

_NO_MODULE = "(no module)"  # batches, the loss, the vote
_MOST_MODULES = 20
_CLOSE = 0.02
_HEADS: Mapping[Category, str] = {"parameters": "params", "gradients": "grads", "communication": "comm."}


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """The memory of the rank that needs most.

    Attributes:
        source: What was measured.
        predicted: None: it can't be predicted.
        unpredictable: Why it can't be.
        reserved: Bytes that are held in all: of the process on the CPU, of torch's allocator on a GPU.
    """

    source: str
    measured: Peak
    predicted: Peak | None
    unpredictable: str
    reserved: int
    on_cpu: bool

    def differences(self) -> dict[Category, int]:
        """Return measured minus predicted bytes of each category; nothing without a prediction."""
        predicted = self.predicted
        if predicted is None:
            return {}
        return {name: self.measured.by_category[name] - predicted.by_category[name] for name in CATEGORIES}

    def record(self) -> dict[str, Any]:
        """Return it for programs."""
        return {**asdict(self), "differences": self.differences()}


def memory_of_recipe(loaded: LoadedConfig, *, trust_remote_code: bool) -> MemoryProfile:
    """Measure three updates in ranks of this machine.

    Raises:
        ConfigError: The run is refused.
        RunFailed: It doesn't fit here, or the ranks ended without a result.
    """
    refuse_given(loaded)
    memory = measured_beside_predicted(loaded, trust_remote_code=trust_remote_code)
    where = "the CPU" if memory.on_cpu else "the accelerators"
    source = f"three updates of {counted(memory.ranks, 'rank')} on {where} of this machine"
    return MemoryProfile(source, memory.measured, memory.predicted, memory.unpredictable, memory.held, memory.on_cpu)


# --- text ---------------------------------------------------------------------------------------------------------


def memory_lines(profile: MemoryProfile) -> Iterator[str]:
    """Yield the profile for people: by category beside the plan, by module, and what differs."""
    measured, predicted = profile.measured, profile.predicted
    yield f"peak of a rank: {size(measured.bytes)} of tensors, in {profile.source}"
    yield ""
    yield f"{'':<14}{'measured':>12}{'share':>8}{'predicted':>12}{'difference':>12}"
    differences = profile.differences()
    for name in CATEGORIES:
        expected = predicted.by_category[name] if predicted is not None else 0
        if measured.by_category[name] or expected:
            yield _category_row(name, measured.by_category[name], measured.bytes, expected, differences.get(name))
    total = None if predicted is None else measured.bytes - predicted.bytes
    yield _category_row("all", measured.bytes, measured.bytes, predicted.bytes if predicted else 0, total)
    yield ""
    yield from _module_lines(measured)
    yield ""
    rest = size(max(0, profile.reserved - measured.bytes))
    if profile.on_cpu:
        yield f"the process holds {size(profile.reserved)} in all: {rest} are Python, libraries, data, freed memory"
    else:
        yield f"torch's allocator has reserved {size(profile.reserved)} of the GPU: {rest} more than the tensors' peak"
    yield _verdict(profile)


def _category_row(name: str, held: int, whole: int, expected: int, difference: int | None) -> str:
    cells = f"{name:<14}{size(held):>12}{held / max(whole, 1):>8.1%}"
    if difference is None:
        return f"{cells}{'-':>12}"
    sign = "+" if difference > 0 else "-" if difference < 0 else ""
    return f"{cells}{size(expected):>12}{sign + size(abs(difference)):>12}"


def _module_lines(peak: Peak) -> Iterator[str]:
    rows = module_rows(peak)
    names = [name for name in CATEGORIES if any(row[name] for _, row in rows)]
    width = max(len(module) for module, _ in rows) + 2 if rows else 0
    yield f"{'module':<{width}}" + "".join(f"{_HEADS.get(name, name):>13}" for name in names) + f"{'all':>13}"
    for module, row in rows[:_MOST_MODULES]:
        cells = "".join(f"{size(row[name]) if row[name] else '-':>13}" for name in names)
        yield f"{module:<{width}}{cells}{size(row.total()):>13}"
    if len(rows) > _MOST_MODULES:
        rest = sum(row.total() for _, row in rows[_MOST_MODULES:])
        yield f"{len(rows) - _MOST_MODULES} more hold {size(rest)}"


def module_rows(peak: Peak) -> list[tuple[str, Counter[Category]]]:
    """Return bytes by category of the modules that a plan lists, the largest first; those alike are one row."""
    rows: dict[str, Counter[Category]] = {}
    for module, sizes in peak.by_module.items():
        name = module if module.startswith("(") or ":" in module else row_of(module)
        rows.setdefault(name or _NO_MODULE, Counter()).update(sizes)
    alike: dict[tuple[str, tuple[tuple[str, int], ...]], list[str]] = {}
    for name, sizes in rows.items():
        listed = list_of(name) if name.rpartition(".")[2].isdecimal() else name
        alike.setdefault((listed, tuple(sorted(sizes.items()))), []).append(name)
    merged = []
    for names in alike.values():
        total: Counter[Category] = Counter()
        for name in names:
            total.update(rows[name])
        merged.append((joined(names) if len(names) > 1 else names[0], total))
    return sorted(merged, key=lambda row: -row[1].total())


def _verdict(profile: MemoryProfile) -> str:
    predicted = profile.predicted
    if predicted is None:
        return f"the plan can't predict it: {profile.unpredictable}"
    differences = profile.differences()
    most = max(CATEGORIES, key=lambda name: abs(differences[name]))
    total = profile.measured.bytes - predicted.bytes
    if abs(total) <= _CLOSE * predicted.bytes and abs(differences[most]) <= _CLOSE * predicted.bytes:
        return "it is as the plan predicts"
    more = "more" if differences[most] > 0 else "less"
    ratio = profile.measured.bytes / max(predicted.bytes, 1)
    return f"it is {ratio:.2f} times what the plan predicts, above all in {most}: {size(abs(differences[most]))} {more}"

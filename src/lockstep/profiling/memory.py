"""Shows the memory of a run's tensors at the peak, by category and module, beside the plan's prediction.

Three updates are made in new ranks of this machine, and each of their operations is watched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lockstep.assembly.user_objects import refuse_given
from lockstep.core.formatting import aligned, counted, size
from lockstep.plan.modules import joined, list_of, row_of
from lockstep.simulation.memory import CATEGORIES, HEADS, Category, Peak
from lockstep.simulation.planning import MeasuredMemory, measured_beside_predicted

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig

_NO_MODULE = "(no module)"  # batches, the loss, the vote
_MOST_MODULES = 20
_CLOSE = 0.02


def memory_of_recipe(loaded: LoadedConfig, *, trust_remote_code: bool) -> MeasuredMemory:
    """Measure three updates in ranks of this machine.

    Raises:
        ConfigError: The run is refused.
        RunFailed: It doesn't fit here, or the ranks ended without a result.
    """
    refuse_given(loaded)
    return measured_beside_predicted(loaded, trust_remote_code=trust_remote_code)


def memory_record(memory: MeasuredMemory) -> dict[str, Any]:
    """Return the profile for programs."""
    return {**asdict(memory), "differences": _differences(memory)}


def _differences(memory: MeasuredMemory) -> dict[Category, int]:
    if memory.predicted is None:
        return {}
    return {name: memory.measured.by_category[name] - memory.predicted.by_category[name] for name in CATEGORIES}


# --- text ---------------------------------------------------------------------------------------------------------


def memory_lines(memory: MeasuredMemory) -> Iterator[str]:
    """Yield the profile for people: by category beside the plan, by module, and what differs."""
    measured, predicted = memory.measured, memory.predicted
    where = "the CPU" if memory.on_cpu else "the accelerators"
    source = f"three updates of {counted(memory.ranks, 'rank')} on {where} of this machine"
    yield f"peak of a rank: {size(measured.bytes)} of tensors, in {source}"
    yield ""
    rows = [["", "measured", "share", "predicted", "difference"]]
    for name in CATEGORIES:
        expected = predicted.by_category[name] if predicted is not None else None
        if measured.by_category[name] or expected:
            rows.append(_row(name, measured.by_category[name], measured.bytes, expected))
    rows.append(_row("all", measured.bytes, measured.bytes, predicted.bytes if predicted is not None else None))
    yield from aligned(rows, left={0})
    yield ""
    yield from _module_lines(measured)
    yield ""
    rest = size(max(0, memory.held - measured.bytes))
    if memory.on_cpu:
        yield f"the process holds {size(memory.held)} in all: {rest} are Python, libraries, data, freed memory"
    else:
        yield f"torch's allocator has reserved {size(memory.held)} of the GPU: {rest} more than the tensors' peak"
    yield _verdict(memory)


def _row(name: str, held: int, whole: int, expected: int | None) -> list[str]:
    cells = [name, size(held), f"{held / max(whole, 1):.1%}"]
    if expected is None:
        return [*cells, "-", "-"]
    sign = "+" if held > expected else "-" if held < expected else ""
    return [*cells, size(expected), sign + size(abs(held - expected))]


def _module_lines(peak: Peak) -> Iterator[str]:
    rows = module_rows(peak)
    names = [name for name in CATEGORIES if any(row[name] for _, row in rows)]
    table = [["module", *(HEADS.get(name, name) for name in names), "all"]]
    for module, row in rows[:_MOST_MODULES]:
        table.append([module, *(size(row[name]) if row[name] else "-" for name in names), size(row.total())])
    yield from aligned(table, left={0})
    if len(rows) > _MOST_MODULES:
        rest = sum(row.total() for _, row in rows[_MOST_MODULES:])
        yield f"{len(rows) - _MOST_MODULES} more hold {size(rest)}"


def module_rows(peak: Peak) -> list[tuple[str, Counter[Category]]]:
    """Return bytes by category of the modules that a plan lists, the largest first; equal ones are one row."""
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


def _verdict(memory: MeasuredMemory) -> str:
    predicted, differences = memory.predicted, _differences(memory)
    if predicted is None:
        return f"the plan can't predict it: {memory.unpredictable}"
    most = max(CATEGORIES, key=lambda name: abs(differences[name]))
    total = memory.measured.bytes - predicted.bytes
    if max(abs(total), abs(differences[most])) <= _CLOSE * predicted.bytes:
        return "it is as the plan predicts"
    more = "more" if differences[most] > 0 else "less"
    ratio = memory.measured.bytes / max(predicted.bytes, 1)
    return f"it is {ratio:.2f} times what the plan predicts, above all in {most}: {size(abs(differences[most]))} {more}"

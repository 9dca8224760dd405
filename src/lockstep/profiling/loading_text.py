"""The profile of a data loader as text."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.core import formatting
from lockstep.core.formatting import short_time
from lockstep.profiling.loading import DataProfile, LoaderSpeed, SampleCost

_COLUMNS = (7, 12, 12, 16, 14)


def data_lines(profile: DataProfile) -> Iterator[str]:
    """Yield the profile for people: what a sample costs, a table of settings, the recommendation."""
    shared = f", shared by {profile.ranks:,} ranks" if profile.ranks > 1 else ""
    yield (
        f"data of kind {profile.kind}, {profile.samples:,} samples, in micro-batches of {profile.micro_size:,}; "
        f"{profile.cpus} CPU{'s' * (profile.cpus != 1)}{shared}"
    )
    yield from _cost_lines(profile.cost)
    if profile.settings:
        yield ""
        yield _row("workers", "samples/s", "tokens/s", "first batch in", "each holds")
    for speed in profile.settings:
        mark = "  <- data.loader.workers" if speed.workers == profile.configured else ""
        yield _row(*_cells(speed)) + mark
    yield ""
    if profile.unmeasured:
        yield profile.unmeasured
    if profile.needed is not None:
        yield f"the model's updates need {formatting.short(profile.needed)} samples/s on this rank"
    if profile.recommended is not None:
        yield f"recommended: data.loader.workers: {profile.recommended} ({profile.reason})"


def _cost_lines(cost: SampleCost) -> Iterator[str]:
    mean, slow, slowest = short_time(cost.mean), short_time(cost.slow), short_time(cost.slowest)
    if cost.by_sample:
        yield f"a sample: {mean} on average with its part of its micro-batch, over {cost.samples:,}"
        yield (
            f"its reading alone: {short_time(cost.read)} on average; 95 % take at most {slow}; the slowest, sample "
            f"{cost.slowest_index}, {slowest}"
        )
    else:
        average = f"{mean} on average, over {cost.samples:,}"
        yield f"a sample, as the mean of its micro-batch: {average}; 95 % take at most {slow}"
        yield f"the slowest: the micro-batch that begins with sample {cost.slowest_index}, {slowest}"
    if cost.stages:
        rest = 1 - sum(cost.stages.values())
        stages = {**cost.stages, **({"other": rest} if rest > 0.005 else {})}
        yield "the time: " + ", ".join(f"{name} {share:.0%}" for name, share in stages.items())


def _cells(speed: LoaderSpeed) -> tuple[str, ...]:
    return (
        str(speed.workers),
        formatting.short(speed.samples),
        formatting.short(speed.tokens),
        short_time(speed.first),
        formatting.size(speed.memory) if speed.memory is not None else "-",
    )


def _row(*cells: str) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _COLUMNS, strict=True))

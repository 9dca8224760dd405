"""Measures what a save costs a training: 302 MB of state (25.2 M parameters with Adam's moments), steps of about 60 ms.

    python benchmarks/saving.py [--rounds 5]     prints the tables, writes results/saving.json

The figure is the training time lost, not the time until a call returns: stretches of steps with a save at their start
alternate with stretches without, in one process; a stretch is longer than a save takes to finish in the background.
Each contestant runs in its own process with one thread, so that the second core is free for a background save.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounds import Spread, about_here, in_processes, interleaved, markdown, provenance, report, save

from lockstep.loop.session import components_of

PACKAGES = ("torch", "safetensors", "xxhash")
WIDTH, LAYERS, BATCH = 2048, 6, 4
STRETCH, PAIRS = 10, 10  # steps of a stretch; stretches with a save
LOADS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contestant", metavar="NAME", help="run this one for one round")
    parser.add_argument("--contestants", nargs="+", help="by name, instead of all")
    arguments = parser.parse_args()
    if arguments.contestant:
        report(be_contestant(arguments.contestant))
        return
    results = measure(arguments.rounds, arguments.contestants or [*SAVERS, *LOADERS])
    if arguments.contestants is None and arguments.rounds >= 3:
        save("saving", results)
    print(table(results))


def measure(rounds: int, names: list[str]) -> dict[str, Any]:
    """Return the results in the form of results/saving.json."""

    def run(name: str) -> Mapping[str, float]:
        return in_processes(__file__, ["--contestant", name], 1)

    machine = about_here(PACKAGES)
    runs, refused = interleaved(names, rounds, run)
    rows = {
        name: {figure: Spread.over([run[figure] for run in rounds_]) for figure in rounds_[0]}
        for name, rounds_ in runs.items()
    }
    return {
        "command": f"python benchmarks/saving.py --rounds {rounds}",
        "rounds": rounds,
        "machine": machine,
        "rows": rows,
        "refused": refused,
    }


def be_contestant(name: str) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="saving-"))
    try:
        return LOADERS[name](folder) if name in LOADERS else SAVERS[name](folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- training -----------------------------------------------------------------------------------------------------


def make_model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def make_data() -> tuple[Any, Any]:
    import torch

    draws = torch.Generator().manual_seed(1)
    samples = BATCH * 64
    x = torch.randn(samples, WIDTH, generator=draws)
    return x, torch.randint(WIDTH, (samples,), generator=draws)


def plain() -> tuple[Any, Any, Callable[[], None]]:
    """Model, optimizer, and a step."""
    import itertools

    import torch
    from torch.nn import functional as F

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = itertools.cycle(zip(*(part.split(BATCH) for part in make_data()), strict=True))

    def step() -> None:
        x, y = next(batches)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _nothing() -> None: ...


def _yes() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Save:
    """A save that has begun.

    Attributes:
        wait: Waits until it is done.
        is_done: Returns whether it is done, without waiting.
    """

    wait: Callable[[], object] = _nothing
    is_done: Callable[[], bool] = _yes


def lost(step: Callable[[], None], begin: Callable[[int], Save]) -> dict[str, float]:
    """Return the milliseconds of training that a save costs, and until it is done while the training continues.

    Args:
        begin: Starts the save with this number.
    """
    for number in range(2):  # memory is allocated once, caches are warm
        _stretch(step, None)
        begin(number).wait()
    differences, done = [], []
    for number in range(2, 2 + PAIRS):
        without = _stretch(step, None)
        saves: list[Save] = []
        with_save = _stretch(step, lambda number=number, saves=saves: saves.append(begin(number)))
        saves[0].wait()
        differences.append(with_save - without)
    for number in range(2 + PAIRS, 5 + PAIRS):
        began = time.perf_counter()
        save = begin(number)
        while not save.is_done():
            step()
        done.append(time.perf_counter() - began)
        save.wait()
    return {
        "lost_ms": 1e3 * statistics.median(differences),
        "done_ms": 1e3 * statistics.median(done),
        "step_ms": 1e3 * without / STRETCH,
    }


def _stretch(step: Callable[[], None], at_start: Callable[[], None] | None) -> float:
    began = time.perf_counter()
    if at_start is not None:
        at_start()
    for _ in range(STRETCH):
        step()
    return time.perf_counter() - began


# --- contestants --------------------------------------------------------------------------------------------------


def _in_call(write: Callable[[dict[str, Any], Path], None]) -> Callable[[Path], dict[str, float]]:
    """Return a contestant whose save is done when its call returns."""

    def contestant(folder: Path) -> dict[str, float]:
        model, optimizer, step = plain()

        def begin(number: int) -> Save:
            write({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / str(number))
            if number:
                _remove(folder / str(number - 1))
            return Save()

        return lost(step, begin)

    return contestant


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def nothing(folder: Path) -> dict[str, float]:
    """Save nothing, to measure the noise of the method."""
    _, _, step = plain()
    return lost(step, lambda number: Save())


def copies(folder: Path) -> dict[str, float]:
    """Copy the bytes to memory that is allocated already, and no more."""
    import torch

    model, optimizer, step = plain()
    step()
    tensors = [*model.parameters(), *(value for entries in optimizer.state.values() for value in entries.values())]
    sources = [tensor.detach() for tensor in tensors]
    targets = [torch.empty_like(tensor) for tensor in sources]

    def begin(number: int) -> Save:
        torch._foreach_copy_(targets, sources)
        return Save()

    return lost(step, begin)


def _torch_save(state: dict[str, Any], path: Path) -> None:
    import torch

    torch.save(state, path)


def _safetensors(state: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    moments = {
        f"{index}.{name}": value
        for index, entries in state["optimizer"]["state"].items()
        for name, value in entries.items()
    }
    save_file({**state["model"], **moments}, path)


def _dcp(state: dict[str, Any], path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=path, no_dist=True)


def _dcp_async(staged: bool) -> Callable[[Path], dict[str, float]]:
    def contestant(folder: Path) -> dict[str, float]:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo")
        options = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_non_blocking_copy=False)
        stager = DefaultStager(options) if staged else None
        model, optimizer, step = plain()

        def begin(number: int) -> Save:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            response = dcp.async_save(state, checkpoint_id=folder / str(number), async_stager=stager)
            upload = response.upload_completion if staged else response
            if staged:
                response.staging_completion.result()  # before the next step changes what is being copied
            if number:
                _remove(folder / str(number - 1))
            return Save(upload.result, upload.done)

        figures = lost(step, begin)
        dist.destroy_process_group()
        return figures

    return contestant


def lockstep(folder: Path) -> dict[str, float]:
    """Save as in a custom loop: hashed, flushed, published atomically, three kept."""
    import lockstep

    with lockstep.session(_config(), **_objects()) as session:
        checkpoints = session.checkpoints(folder)
        batches = session.batches()

        def step() -> None:
            session.accumulate(next(batches))
            session.commit()

        def begin(number: int) -> Save:
            checkpoints.save()
            published = folder / f"step-{session.progress.steps:08d}"

            def wait() -> None:
                [*_, last] = checkpoints.finish()
                assert last.failure is None, last.failure

            return Save(wait, published.exists)

        return lost(step, begin)


def _config() -> dict[str, Any]:
    return {
        "batch": {"global_size": BATCH},
        "optim": {"clip_norm": None, "lr": 1e-3},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "run": {"steps": 10**9},
    }


def _objects() -> dict[str, Any]:
    from torch import nn
    from torch.utils.data import TensorDataset

    return {
        "model": make_model(),
        "train_dataset": TensorDataset(*make_data()),
        "objective": nn.CrossEntropyLoss(reduction="sum"),
    }


SAVERS: dict[str, Callable[[Path], dict[str, float]]] = {
    "nothing": nothing,
    "a copy in memory": copies,
    "Lockstep": lockstep,
    "torch.save": _in_call(_torch_save),
    "safetensors": _in_call(_safetensors),
    "dcp.save": _in_call(_dcp),
    "dcp.async_save": _dcp_async(staged=False),
    "dcp.async_save, its stager": _dcp_async(staged=True),
}


# --- loading ------------------------------------------------------------------------------------------------------


def load_with_torch(folder: Path) -> dict[str, float]:
    """Call `torch.load`, then both `load_state_dict`; nothing is verified."""
    import torch

    model, optimizer, step = plain()
    step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state")
    times = []
    for _ in range(LOADS):
        began = time.perf_counter()
        state = torch.load(folder / "state", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        times.append(time.perf_counter() - began)
        del state
    return {"load_ms": 1e3 * statistics.median(times)}


def load_with_lockstep(folder: Path) -> dict[str, float]:
    """Check the manifest, hash every byte, let all ranks agree (one here), then restore."""
    import lockstep
    from lockstep.checkpoint.loading import load_newest
    from lockstep.checkpoint.local import LocalStorage

    with lockstep.session(_config(), **_objects()) as session:
        checkpoints = session.checkpoints(folder)
        session.accumulate(next(session.batches()))
        session.commit()
        checkpoints.save()
        checkpoints.finish()
        times = []
        for _ in range(LOADS):
            began = time.perf_counter()
            checkpoint = load_newest(LocalStorage(folder), components_of(session).world.axis, session.state())
            assert checkpoint is not None
            session.restore(checkpoint.state)
            times.append(time.perf_counter() - began)
            del checkpoint
    return {"load_ms": 1e3 * statistics.median(times)}


LOADERS: dict[str, Callable[[Path], dict[str, float]]] = {
    "load: torch.load": load_with_torch,
    "load: Lockstep, all verified": load_with_lockstep,
}


# --- tables -------------------------------------------------------------------------------------------------------


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `measure` returned or results/saving.json holds."""
    rows = {
        name: {figure: value if isinstance(value, Spread) else Spread(**value) for figure, value in row.items()}
        for name, row in results["rows"].items()
    }
    saving = [
        [name, row["lost_ms"].text(), row["done_ms"].text(), f"{row['step_ms'].median:.0f}"]
        for name, row in rows.items()
        if "lost_ms" in row
    ]
    loading = [[name.removeprefix("load: "), row["load_ms"].text()] for name, row in rows.items() if "load_ms" in row]
    refused = [[name, f"did not run: {why}", "", ""] for name, why in results["refused"].items()]
    return "\n\n".join(
        [
            markdown(["", "training lost per save, ms", "ms until it is done", "a step, ms"], [*saving, *refused]),
            markdown(["", "load, ms"], loading),
            provenance(results),
        ]
    )


if __name__ == "__main__":
    main()

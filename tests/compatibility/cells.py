"""Cells of the table: a model under a strategy, compared with the same model on one process.

    single, in one process      -->  the trajectory of each model, and its published weights       on disk
    a strategy, on its ranks    -->  every model, one after the other, in one world
                                     same      losses, gradients, and published weights match the single process
                                     varies    they differ by design: the loss depends on how batches are split
                                     refused   all ranks report the reason
                                     failed    anything else: a deviation, a traceback, a hang

A cell that crashes or hangs ends its world; the remaining cells run in a new one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from compatibility import custom, families
from kit.runs import differences, recorded_session
from kit.worlds import in_world

import lockstep
from lockstep.loop.session import components_of
from lockstep.models.transformers_models import is_transformers_model, quiet
from lockstep.models.weight_files import read_weights
from lockstep.training.publishing import publish

Status = Literal["same", "varies", "refused", "failed"]
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"parallel": {"strategy": "single"}}),
    "ddp": (2, {"parallel": {"strategy": "ddp"}}),
    "fsdp": (2, {"parallel": {"strategy": "fsdp"}}),
    "zero3": (2, {"parallel": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3}}}),
    "pipeline": (2, {"parallel": {"strategy": "ddp", "pipeline": 2, "pipeline_parallel": {"schedule": "1f1b"}}}),
    "tensor": (2, {"parallel": {"strategy": "ddp", "tensor": 2}}),
    "context": (2, {"parallel": {"strategy": "ddp", "context": 2}}),
    "checkpointing": (
        1, {"parallel": {"strategy": "single"}, "memory": {"activation_checkpointing": {"mode": "full"}}},
    ),
}  # fmt: skip
"""Ranks and sections of the config, by strategy."""

DATA_PARALLEL = ("ddp", "fsdp", "zero3")
BATCH_DEPENDENT = {
    "gpt2-left", "mixtral-balanced", "clip", "fnet", "xlnet", "distilbert-answers", "resnet", "mobilevit", "segformer",
    "convbert",
    "batch norm", "convolutions, batch norm", "a running mean in a buffer", "spectral_norm", "an in-batch loss",
    "adversaries in one module",
}  # fmt: skip
"""Models whose loss depends on how batches are split and padded, by design."""
UPDATES = 2
_TIMEOUT_S = 60.0  # of a cell
_GRACE_S = 8.0  # between the first and the last rank's result of a cell
_NOISE = 1e-7  # the gradient of a bias before a softmax over positions is rounding; 2e-8 was seen
_CLOSE = 3e-5  # of published weights, relative to their norm or to the step


@dataclass(frozen=True)
class Cell:
    """The result of one model under one strategy.

    Attributes:
        message: The refusal, the error, or the first difference.
        seconds: Duration on the first rank.
    """

    status: Status
    message: str = ""
    seconds: float = 0.0


def all_names() -> list[str]:
    return [*families.FAMILIES, *custom.CUSTOM]


def run(strategies: Sequence[str], names: Sequence[str]) -> dict[tuple[str, str], Cell]:
    """Return every cell by (name, strategy), including `single`, the reference of all others."""
    results: dict[tuple[str, str], Cell] = {}
    with tempfile.TemporaryDirectory(prefix="compatibility-") as folder:
        for strategy in dict.fromkeys(("single", *strategies)):
            cells = _run_strategy(strategy, list(names), Path(folder))
            results |= {(name, strategy): cell for name, cell in cells.items()}
    return results


def _run_strategy(strategy: str, names: list[str], folder: Path) -> dict[str, Cell]:
    ranks, _ = STRATEGIES[strategy]
    place = folder / strategy
    place.mkdir()
    cells: dict[str, Cell] = {}
    while remaining := [name for name in names if name not in cells]:
        with suppress(AssertionError):  # a rank that died: its result is in the folder
            in_world(ranks, _run_on_rank, strategy, remaining, folder, patience=2 * _TIMEOUT_S * len(remaining))
        done = {name: cell for name in remaining if (cell := _read_cell(place, name, ranks)) is not None}
        cells |= done or {remaining[0]: Cell("failed", "the ranks ended without a result")}
    return cells


def _read_cell(place: Path, name: str, ranks: int) -> Cell | None:
    """Combine the results of the ranks; None: they did not reach the cell."""
    results = [json.loads(path.read_text()) for rank in range(ranks) if (path := _file(place, name, rank)).exists()]
    if not results:
        return None
    errors = [result for result in results if result["status"] == "failed"]
    if errors:
        worst = min(
            errors, key=lambda error: ("closed by peer" in error["message"], error["message"].startswith("hangs"))
        )
        return Cell("failed", worst["message"])
    refusals = [result for result in results if result["status"] == "refused"]
    if refusals and len(refusals) < ranks:
        return Cell("failed", f"refused on one rank only, while others hang: {refusals[0]['message']}")
    if len(results) < ranks:
        return Cell("failed", "a rank ended without a result")
    if len({result["losses"] for result in results}) > 1:
        return Cell("failed", "ranks report different losses")
    return Cell(results[0]["status"], results[0]["message"], results[0]["seconds"])


def _file(place: Path, name: str, rank: int) -> Path:
    return place / f"{file_name(name)}.{rank}.json"


# --- on a rank ------------------------------------------------------------------------------------------------------


def _run_on_rank(strategy: str, names: list[str], folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name in names:
        began = time.monotonic()
        with _watched(_file(folder / strategy, name, rank)):
            result = _run_cell(strategy, name, folder, rank)
        _write(_file(folder / strategy, name, rank), {**result, "seconds": round(time.monotonic() - began, 2)})
        if not _ranks_agree(folder / strategy, name, rank, ranks):
            os._exit(1)  # others may wait for this one in a collective
    dist.destroy_process_group()


def _run_cell(strategy: str, name: str, folder: Path, rank: int) -> dict[str, Any]:
    try:
        config, objects = config_of(name, strategy)
        with lockstep.session(config, **objects) as session:
            trajectory = recorded_session(session, UPDATES)
            published = _published(session, folder / strategy)
    except lockstep.ConfigError as refusal:
        return {"status": "refused", "message": str(refusal), "losses": ""}
    except BaseException as error:
        if os.environ.get("COMPATIBILITY_TRACEBACKS"):
            traceback.print_exc()
        return {"status": "failed", "message": f"{type(error).__name__}: {str(error).strip()}", "losses": ""}
    losses = repr(trajectory.losses)
    if rank > 0:
        return {"status": "same", "message": "", "losses": losses}
    reference = folder / "single" / f"{file_name(name)}.pickle"
    if strategy == "single":
        reference.write_bytes(pickle.dumps((trajectory, published)))
        finite = np.isfinite(trajectory.losses).all() and np.isfinite(trajectory.norms).all()
        message = "" if finite else f"losses {trajectory.losses}, norms {trajectory.norms}"
        return {"status": "same" if finite else "failed", "message": message, "losses": losses}
    if not reference.exists():
        return {"status": "failed", "message": "runs, but the single process doesn't", "losses": losses}
    reference_trajectory, expected = pickle.loads(reference.read_bytes())
    deviations = [*differences(trajectory, reference_trajectory, _NOISE), *_published_differences(published, expected)]
    varies = deviations and name in BATCH_DEPENDENT and strategy in DATA_PARALLEL
    status = "varies" if varies else ("failed" if deviations else "same")
    return {"status": status, "message": deviations[0] if deviations and not varies else "", "losses": losses}


def file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9_.-]", "-", name.lower())


def config_of(name: str, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of a cell, and the objects for `lockstep.session`."""
    _, sections = STRATEGIES[strategy]
    model, objects = (families.sections(name), {}) if name in families.FAMILIES else custom.config_and_objects(name)
    config = {
        "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "clip_norm": 1.0},
        **model,
        **sections,
        "parallel": {**model.get("parallel", {}), **sections["parallel"]},
        "batch": {
            "global_size": 8 if name in BATCH_DEPENDENT else 7,
            "micro_size": 2 if strategy in DATA_PARALLEL else 4,
        },
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "run": {"steps": UPDATES},
    }
    return config, objects


def _published(session: Any, folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of the files that a run publishes, on the first rank. All ranks take part."""
    weights = dict(components_of(session).sharding.state.weights())
    with tempfile.TemporaryDirectory(dir=folder) as place:  # the first rank's is used
        where = publish(session, lambda: Path(place))
        if components_of(session).world.rank > 0:
            return {}
        tensors = {name: tensor.clone() for name, tensor in read_weights(where).tensors.items()}
        if folder.name == "single" and is_transformers_model(components_of(session).sharding.state.model):
            _check_from_pretrained(session, where, weights)
    return {name: tensor.float().numpy() for name, tensor in tensors.items() if not tensor.is_complex()}


def _check_from_pretrained(session: Any, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Check that `from_pretrained` loads every published weight with the same values."""
    with quiet():
        loaded, info = type(components_of(session).sharding.state.model).from_pretrained(
            folder, output_loading_info=True
        )
    assert not info["missing_keys"], f"from_pretrained finds no {sorted(info['missing_keys'])}"
    assert not info["mismatched_keys"], f"from_pretrained can't fit {info['mismatched_keys']}"
    state = loaded.state_dict()
    for name, tensor in weights.items():
        assert torch.equal(state[name], tensor), f"from_pretrained loads other values of {name}"


def _published_differences(run: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    if run.keys() != expected.keys():
        name = min(run.keys() ^ expected.keys())
        return [f"{len(run)} of {len(expected)} tensors are published; {name} is not in both files"]
    for name, reference in expected.items():
        if run[name].shape != reference.shape:
            return [f"{name} is published as {list(run[name].shape)}, not {list(reference.shape)}"]
        difference = float(np.linalg.norm(run[name] - reference))
        if not difference <= _CLOSE * (float(np.linalg.norm(reference)) + 1e-3):
            return [f"{name} is published with other values: they differ by {difference:.1e}"]
    return []


@contextmanager
def _watched(file: Path) -> Iterator[None]:
    """End the process with a result if the block takes too long."""

    def give_up() -> None:
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks, all_threads=True)
            stacks.seek(0)
            frames = [line.strip() for line in stacks if "lockstep" in line]
        where = frames[0] if frames else ""
        _write(file, {"status": "failed", "message": f"hangs ({where})", "losses": "", "seconds": _TIMEOUT_S})
        os._exit(1)

    timer = threading.Timer(_TIMEOUT_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ranks_agree(place: Path, name: str, rank: int, ranks: int) -> bool:
    """Return whether all ranks ended a cell alike, with outputs or a refusal, so that they can run the next."""
    files = [_file(place, name, rank) for rank in range(ranks)]
    own = json.loads(files[rank].read_text())["status"]
    until = time.monotonic() + (_GRACE_S if own in ("failed", "refused") else 2 * _TIMEOUT_S)
    while not all(file.exists() for file in files):
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    statuses = [json.loads(file.read_text())["status"] for file in files]
    return all(status == "refused" for status in statuses) or all(status in ("same", "varies") for status in statuses)


def _write(path: Path, result: dict[str, Any]) -> None:
    """Write a result atomically."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.replace(path)

"""Cells of the table: a model under a strategy, beside the same model on one process.

    single, in one process      -->  what each model did, and the weights that it published       on disk
    a strategy, on its ranks    -->  every model, one after the other, in one world
                                     same      losses, gradients, and published weights are the single process's
                                     cut       not, and mustn't be: its loss depends on how batches are cut
                                     refused   all ranks say why
                                     open      anything else: another run, a traceback, a hang

A cell that crashes or hangs ends its world; the cells after it are run in a new one.
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
from kit.runs import Trajectory, differences, recorded_session
from kit.worlds import in_world
from outsiders import families, own

import lockstep
from lockstep.models.transformers_models import is_transformers_model, quiet
from lockstep.models.weight_files import read_weights
from lockstep.training.job import publish, whole_weights
from lockstep.training.session import components_of

Status = Literal["same", "cut", "refused", "open"]
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
"""Ranks, and sections of a config."""

DIVIDE_SAMPLES = ("ddp", "fsdp", "zero3")
CUT = {
    "gpt2-left", "mixtral-balanced", "clip", "fnet", "xlnet", "distilbert-answers", "resnet", "mobilevit", "segformer",
    "batch norm", "convolutions, batch norm", "a running mean in a buffer", "spectral_norm", "an in-batch loss",
    "adversaries in one module",
}  # fmt: skip
"""Models whose loss, by design, depends on how batches are cut and padded: where they are cut otherwise it differs."""
UPDATES = 2
_PATIENCE_S = 60.0  # for a cell
_GRACE_S = 8.0  # between the first and the last rank's word of a cell
_NOISE = 1e-7  # a bias before a softmax over positions has no gradient but rounding; 2e-8 was seen
_CLOSE = 3e-5  # of published weights: of their norm, or of the step


@dataclass(frozen=True)
class Cell:
    """Attributes:
    said: the refusal, the error, or the first difference.
    seconds: that it took on the first rank.
    """

    status: Status
    said: str = ""
    seconds: float = 0.0


def all_names() -> list[str]:
    return [*families.FAMILIES, *own.OWN]


def run(strategies: Sequence[str], names: Sequence[str]) -> dict[tuple[str, str], Cell]:
    """Every cell by (name, strategy); `single`, which all others are compared with, among them."""
    found: dict[tuple[str, str], Cell] = {}
    with tempfile.TemporaryDirectory(prefix="outsiders-") as folder:
        for strategy in ("single", *(one for one in strategies if one != "single")):
            cells = _strategy(strategy, list(names), Path(folder))
            found |= {(name, strategy): cell for name, cell in cells.items()}
    return found


def _strategy(strategy: str, names: list[str], folder: Path) -> dict[str, Cell]:
    ranks, _ = STRATEGIES[strategy]
    place = folder / strategy
    place.mkdir()
    found: dict[str, Cell] = {}
    while left := [name for name in names if name not in found]:
        with suppress(AssertionError):  # a rank that died: what it said lies in the folder
            in_world(ranks, _be_a_rank, strategy, left, folder, patience=2 * _PATIENCE_S * len(left))
        done = {name: cell for name in left if (cell := _told(place, name, ranks)) is not None}
        found |= done or {left[0]: Cell("open", "the ranks ended without a word")}
    return found


def _told(place: Path, name: str, ranks: int) -> Cell | None:
    """What the ranks said of a cell; None: they didn't come to it."""
    words = [json.loads(path.read_text()) for rank in range(ranks) if (path := _file(place, name, rank)).exists()]
    if not words:
        return None
    errors = [word for word in words if word["status"] == "open"]
    if errors:
        worst = min(errors, key=lambda word: ("closed by peer" in word["said"], word["said"].startswith("hangs")))
        return Cell("open", worst["said"])
    refusals = [word for word in words if word["status"] == "refused"]
    if refusals and len(refusals) < ranks:
        return Cell("open", f"refused on one rank alone, while others hang: {refusals[0]['said']}")
    if len(words) < ranks:
        return Cell("open", "a rank ended without a word")
    if len({word["losses"] for word in words}) > 1:
        return Cell("open", "ranks report different losses")
    return Cell(words[0]["status"], words[0]["said"], words[0]["seconds"])


def _file(place: Path, name: str, rank: int) -> Path:
    return place / f"{re.sub(r'[^a-z0-9_.-]', '-', name.lower())}.{rank}.json"


# --- on a rank ------------------------------------------------------------------------------------------------------


def _be_a_rank(strategy: str, names: list[str], folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name in names:
        began = time.monotonic()
        with _watched(_file(folder / strategy, name, rank)):
            word = _attempt(strategy, name, folder, rank)
        _put(_file(folder / strategy, name, rank), {**word, "seconds": round(time.monotonic() - began, 2)})
        if not _all_well(folder / strategy, name, rank, ranks):
            os._exit(1)  # others may wait for this one in a collective
    dist.destroy_process_group()


def _attempt(strategy: str, name: str, folder: Path, rank: int) -> dict[str, Any]:
    try:
        config, given = config_of(name, strategy)
        with lockstep.session(config, **given) as session:
            seen = recorded_session(session, UPDATES)
            published = _published(session, folder / strategy)
    except lockstep.ConfigError as refusal:
        return {"status": "refused", "said": str(refusal), "losses": ""}
    except BaseException as error:
        if os.environ.get("OUTSIDERS_TRACEBACKS"):
            traceback.print_exc()
        return {"status": "open", "said": f"{type(error).__name__}: {str(error).strip()}", "losses": ""}
    losses = repr(seen.losses)
    if rank > 0:
        return {"status": "same", "said": "", "losses": losses}
    reference = folder / "single" / f"{names_file(name)}.pickle"
    if strategy == "single":
        reference.write_bytes(pickle.dumps((seen, published)))
        finite = np.isfinite(seen.losses).all() and np.isfinite(seen.norms).all()
        said = "" if finite else f"losses {seen.losses}, norms {seen.norms}"
        return {"status": "same" if finite else "open", "said": said, "losses": losses}
    if not reference.exists():
        return {"status": "open", "said": "runs, and the single process doesn't", "losses": losses}
    oracle, expected = pickle.loads(reference.read_bytes())
    off = [*differences(seen, oracle, _NOISE), *_differences_published(published, expected, oracle)]
    cut = off and name in CUT and strategy in DIVIDE_SAMPLES
    status = "cut" if cut else ("open" if off else "same")
    return {"status": status, "said": off[0] if off and not cut else "", "losses": losses}


def names_file(name: str) -> str:
    return re.sub(r"[^a-z0-9_.-]", "-", name.lower())


def config_of(name: str, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of a cell, and what is handed over beside it."""
    _, sections = STRATEGIES[strategy]
    asked, given = (families.sections(name), {}) if name in families.FAMILIES else own.config_and_given(name)
    config = {
        "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "clip_norm": 1.0},
        **asked,
        **sections,
        "parallel": {**asked.get("parallel", {}), **sections["parallel"]},
        "batch": {"global_size": 8 if name in CUT else 7, "micro_size": 2 if strategy in DIVIDE_SAMPLES else 4},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "run": {"steps": UPDATES},
    }
    return config, given


def _published(session: Any, folder: Path) -> dict[str, np.ndarray]:
    """What a run would leave: the tensors of its files, on the first rank. All ranks together."""
    weights = whole_weights(session)
    if components_of(session).world.rank > 0:
        return {}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        where = publish(session, weights, Path(place))
        tensors = {name: tensor.clone() for name, tensor in read_weights(where).tensors.items()}
        if folder.name == "single" and is_transformers_model(components_of(session).sharding.state.model):
            _refuse_missing(session, where, weights)
    return {name: tensor.float().numpy() for name, tensor in tensors.items() if not tensor.is_complex()}


def _refuse_missing(session: Any, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """The library finds every weight in what was published, and the same values."""
    with quiet():
        again, found = type(components_of(session).sharding.state.model).from_pretrained(
            folder, output_loading_info=True
        )
    assert not found["missing_keys"], f"from_pretrained finds no {sorted(found['missing_keys'])}"
    assert not found["mismatched_keys"], f"from_pretrained can't fit {found['mismatched_keys']}"
    loaded = again.state_dict()
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor), f"from_pretrained makes something else of {name}"


def _differences_published(mine: dict[str, Any], expected: dict[str, Any], oracle: Trajectory) -> list[str]:
    if mine.keys() != expected.keys():
        apart = sorted(mine.keys() ^ expected.keys())
        return [f"{len(mine)} of {len(expected)} tensors are published; {apart[0]} is not in both files"]
    for name, there in expected.items():
        if mine[name].shape != there.shape:
            return [f"{name} is published as {list(mine[name].shape)}, not {list(there.shape)}"]
        off = float(np.linalg.norm(mine[name] - there))
        if not off <= _CLOSE * (float(np.linalg.norm(there)) + 1e-3):
            return [f"{name} is published with other values: off by {off:.1e}"]
    return []


@contextmanager
def _watched(file: Path) -> Iterator[None]:
    """Ends the process if it takes too long."""

    def give_up() -> None:
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks, all_threads=True)
            stacks.seek(0)
            frames = [line.strip() for line in stacks if "lockstep" in line]
        where = frames[0] if frames else ""
        _put(file, {"status": "open", "said": f"hangs ({where})", "losses": "", "seconds": _PATIENCE_S})
        os._exit(1)

    timer = threading.Timer(_PATIENCE_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _all_well(place: Path, name: str, rank: int, ranks: int) -> bool:
    """Whether all ranks came to the end of a cell, all with outputs or all with a refusal, fit for the next."""
    files = [_file(place, name, rank) for rank in range(ranks)]
    mine = json.loads(files[rank].read_text())["status"]
    until = time.monotonic() + (_GRACE_S if mine in ("open", "refused") else 2 * _PATIENCE_S)
    while not all(file.exists() for file in files):
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    kinds = [json.loads(file.read_text())["status"] for file in files]
    return all(kind == "refused" for kind in kinds) or all(kind in ("same", "cut") for kind in kinds)


def _put(path: Path, word: dict[str, Any]) -> None:
    """A file that appears whole."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(word))
    part.replace(path)

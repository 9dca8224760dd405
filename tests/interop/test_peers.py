"""Checkpoints that other programs write continue here, and those of a run continue there: the next losses are equal."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from interop import peer_saves
from interop.peer_saves import DECAY, DONE, NEXT, RATE, SAMPLES, Saved
from kit import small
from kit.chains import Chain
from kit.failures import fails, gives
from kit.worlds import in_world
from training.test_checkpoint_pairs import STRATEGIES, asked, ranks_of

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.interop.peers import import_weights
from lockstep.interop.runs import import_run
from lockstep.loop.session import components_of
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume
from lockstep.training.exporting import ExportArguments, export


def config(**sections: Any) -> dict[str, Any]:
    train = {"kind": "custom", "target": "kit.small:points", "arguments": {"samples": SAMPLES}}
    own = {
        "data": {"train": train},
        "batch": {"global_size": SAMPLES},
        "optim": {"name": "adamw", "lr": RATE, "weight_decay": DECAY, "decay": "matrices", "betas": [0.9, 0.999],
                  "clip_norm": None},
        "schedule": {"kind": "linear", "final_ratio": 0.0},
        "run": {"steps": DONE + NEXT},
    }  # fmt: skip
    return {**small.config(), **own, **sections}


def continued(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return weights and moments with which a run resumes, and the losses of its next updates."""
    with lockstep.session(validate(settings).config) as session:
        checkpoints = Checkpoints(session, LocalStorage(folder / "checkpoints"), {})
        checkpoints.begin(Resume())
        assert (session.progress.steps, session.progress.samples) == (DONE, DONE * SAMPLES)
        held = {**components_of(session).sharding.state.model.state_dict(), **session.state().tensors}
        weights = {name: value.detach().clone() for name, value in held.items()}
        return weights, [report.loss for report in session]


PEERS: dict[str, tuple[str, Callable[[Path], Saved]]] = {
    "plain": ("last.pt", peer_saves.plain),
    "net": ("last.pth", peer_saves.under_net),
    "accelerate": ("state", peer_saves.accelerate),
    "dcp": ("step-2", partial(peer_saves.dcp, flat=False)),
    "torchtitan": ("step-2", partial(peer_saves.dcp, flat=True, top=True)),
    "torchtitan-2024": ("step-2", partial(peer_saves.dcp, flat=True)),
    "dcp-2.2": ("step-2", peer_saves.older_dcp),
    "accelerate-fsdp-sharded": ("state", partial(peer_saves.accelerate_of_two_ranks, form="SHARDED")),
    "accelerate-fsdp-full": ("state", partial(peer_saves.accelerate_of_two_ranks, form="FULL")),
    "lightning": ("last.ckpt", peer_saves.lightning),
    **{f"deepspeed-{stage}": ("saved", partial(peer_saves.deepspeed_of_two_ranks, stage=stage)) for stage in (1, 2, 3)},
}


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_s_checkpoint_continues_with_the_peer_s_losses(peer: str, tmp_path: Path) -> None:
    program = peer.partition("-")[0]
    if program in ("accelerate", "lightning", "deepspeed") and find_spec(program) is None:
        pytest.skip(f"{program} is not installed")
    name, save = PEERS[peer]
    weights, losses = save(tmp_path / name)
    settings = config()
    imported = import_run(tmp_path / name, tmp_path / "run", validate(settings).config, "mine")
    assert imported.steps == DONE
    assert not [note for note in imported.notes if "in the checkpoint" in note]
    held, continued_losses = continued(tmp_path / "run", settings)
    assert all(torch.equal(held[key], value) for key, value in weights.items())
    assert continued_losses == pytest.approx(losses, rel=1e-5)


CONTINUED: dict[str, tuple[Literal["torch", "dcp"], str, Callable[..., list[float]]]] = {
    "plain": ("torch", "model.pt", peer_saves.from_plain),
    "accelerate": ("torch", "model.pt", peer_saves.from_accelerate),
    "torchtitan": ("dcp", "step-2", partial(peer_saves.from_dcp, top=True)),
    "torchtitan-2024": ("dcp", "step-2", partial(peer_saves.from_dcp, top=False)),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of all updates with a checkpoint after two of them, and the losses of the later ones."""
    folder = tmp_path_factory.mktemp("own") / "run"
    settings = config(checkpoint={"every": f"{DONE} steps", "keep_last": 9})
    settings["run"] = {**settings["run"], "folder": str(folder)}
    lockstep.train({**settings, "monitor": {**settings["monitor"], "every": 1}})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row and row.get("step", 0) > DONE]
    assert len(losses) == NEXT
    return folder, losses


@pytest.mark.parametrize("peer", CONTINUED)
def test_a_peer_continues_an_exported_checkpoint(peer: str, own: tuple[Path, list[float]], tmp_path: Path) -> None:
    if peer == "accelerate" and find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    run, losses = own
    form, name, continues = CONTINUED[peer]
    export(run, ExportArguments(step=DONE, to=tmp_path / name, format=form, optimizer=True))
    assert continues(tmp_path / name) == pytest.approx(losses, rel=1e-5)


OUT = [peer for peer in CONTINUED if peer != "accelerate" or find_spec("accelerate") is not None]
LAYOUTS = [name for name in STRATEGIES if name != "single"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_peers_continue_what_any_strategy_saved(layout: str, tmp_path: Path) -> None:
    settings = config(model={"kind": "custom", "target": "kit.chains:Chain"}, parallel=asked(layout)["parallel"])
    losses = in_world(ranks_of(layout, 2), peer_saves.run_of_rank, settings, tmp_path / "run")[0]
    for peer in OUT:
        form, name, continues = CONTINUED[peer]
        asked_for = ExportArguments(step=DONE, to=tmp_path / name, format=form, optimizer=True, force=True)
        export(tmp_path / "run", asked_for)
        assert continues(tmp_path / name, Chain) == pytest.approx(losses, rel=1e-6), peer


OF_TRAINER: dict[str, Any] = {
    "model": {"kind": "huggingface", "architecture": peer_saves.LLAMA, "task": "causal-lm"},
    "data": {"train": {"kind": "custom", "target": "interop.peer_saves:Texts"}},
    "objective": {"kind": "auto"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer_continues_what_any_strategy_saved(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    parallel = {key: value for key, value in asked(layout)["parallel"].items() if key != "tensor_parallel"}
    settings = config(**OF_TRAINER, parallel=parallel)
    losses = in_world(ranks_of(layout, 2), peer_saves.run_of_rank, settings, tmp_path / "run")[0]
    asked_for = ExportArguments(step=DONE, to=tmp_path / "out", format="hf", optimizer=True, trust_run=True)
    export(tmp_path / "run", asked_for)
    assert peer_saves.trainer(tmp_path / "again", tmp_path / "out")[-NEXT:] == pytest.approx(losses, abs=1e-4)


def test_a_trainer_s_checkpoint_continues_and_is_continued(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    losses = peer_saves.trainer(tmp_path / "out")[DONE:]
    settings = config(**OF_TRAINER)
    imported = import_run(tmp_path / "out" / f"checkpoint-{DONE}", tmp_path / "run", validate(settings).config, "mine")
    assert imported.steps == DONE
    assert not [note for note in imported.notes if "in the checkpoint" in note]
    assert continued(tmp_path / "run", settings)[1] == pytest.approx(losses, abs=1e-4)  # Trainer rounds its losses
    export(tmp_path / "run", ExportArguments(step=DONE, to=tmp_path / "out2", format="hf", optimizer=True))
    assert peer_saves.trainer(tmp_path / "again", tmp_path / "out2")[-NEXT:] == pytest.approx(losses, abs=1e-4)


# --- refused, and chosen ------------------------------------------------------------------------------------------


class Hostile:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def test_metadata_of_dcp_runs_no_code(tmp_path: Path) -> None:
    peer_saves.dcp(tmp_path / "saved", flat=True)
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps({"a": Hostile(tmp_path / "executed")}))
    with fails(ConfigError, "posix.system"):
        import_weights(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "executed").exists()


def test_a_dcp_checkpoint_without_one_rank_s_part_is_refused(tmp_path: Path) -> None:
    peer_saves.dcp(tmp_path / "saved", flat=True)
    next((tmp_path / "saved").glob("*.distcp")).unlink()
    with pytest.raises(ConfigError, match=r"lacks __0_0\.distcp"):
        import_weights(tmp_path / "saved", tmp_path / "out")


def test_numbers_that_fit_several_orders_are_refused(tmp_path: Path) -> None:
    net, optimizer, _ = peer_saves.made()
    optimizer = torch.optim.AdamW([[*net.parameters()][index] for index in (3, 1, 2, 0)], lr=RATE)
    peer_saves.update(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    with fails(ConfigError, "order", "parameters"):
        import_run(tmp_path / "last.pt", tmp_path / "run", validate(config()).config, "mine")
    assert not (tmp_path / "run").exists()


def test_a_run_begins_where_it_is_asked_to_and_lists_what_differs(tmp_path: Path) -> None:
    peer_saves.plain(tmp_path / "last.pt")
    settings = config(optim={"name": "adamw", "lr": RATE, "weight_decay": 0.3, "decay": "matrices"})
    settings["run"] = {"steps": 9}
    imported = import_run(tmp_path / "last.pt", tmp_path / "run", validate(settings).config, "mine", step=4, sample=16)
    assert (imported.progress.steps, imported.progress.samples) == (4, 16)
    notes = "\n".join(imported.notes)
    assert gives(notes, 0.1, 0.3, "2 parameters (inner.weight, head.weight)")
    assert gives(notes, "2 steps", "step 4")
    assert gives(notes, "epoch, scheduler, loss")


Groups = Callable[[torch.nn.Module], torch.optim.Optimizer]
OTHER_SETTINGS: dict[str, tuple[Groups, str]] = {
    "decay of all": (
        lambda net: torch.optim.AdamW(net.parameters(), RATE, weight_decay=DECAY),
        "inner.bias, head.bias",
    ),
    "decay of one": (
        lambda net: torch.optim.AdamW(
            [
                {"params": [(n, p) for n, p in net.named_parameters() if n != "head.weight"], "weight_decay": 0.0},
                {"params": [("head.weight", net.get_parameter("head.weight"))], "weight_decay": 0.3},
            ],
            RATE,
        ),
        "inner.weight",
    ),
    "adam": (
        lambda net: torch.optim.Adam(
            [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in peer_saves.groups(net)],
            RATE,
        ),
        "inner.weight, head.weight",
    ),
    "rate and betas": (
        lambda net: torch.optim.AdamW(peer_saves.groups(net), 0.07, (0.8, 0.99)),
        "inner.weight, head.weight, inner.bias, head.bias",
    ),
}


@pytest.mark.parametrize("row", OTHER_SETTINGS)
def test_settings_that_differ_are_named_with_their_parameters(row: str, tmp_path: Path) -> None:
    make, names = OTHER_SETTINGS[row]
    net, _, _ = peer_saves.made()
    optimizer = make(net)
    for _ in range(DONE):
        peer_saves.update(net, optimizer)
    content = {"model_state_dict": net.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 2}
    torch.save(content, tmp_path / "last.pt")
    settings = validate(config(schedule={"kind": "constant"})).config
    notes = import_run(tmp_path / "last.pt", tmp_path / "run", settings, "mine").notes
    assert any("in the checkpoint" in note and f"({names}); set optim." in note for note in notes)


@pytest.mark.parametrize(("key", "value"), [("lr", "fast"), ("betas", 0.9), ("eps", [1, 2]), ("weight_decay", None)])
def test_a_setting_that_is_no_number_counts_as_not_recorded(key: str, value: object, tmp_path: Path) -> None:
    net, optimizer, _ = peer_saves.made()
    peer_saves.update(net, optimizer)
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = value
    torch.save({"model": net.state_dict(), "optimizer": saved}, tmp_path / "last.pt")
    imported = import_run(tmp_path / "last.pt", tmp_path / "run", validate(config()).config, "mine")
    assert not any(note.startswith(key) and "inner.weight" in note for note in imported.notes)
    saved["param_groups"][0]["param_names"] = ["inner.weight"]
    torch.save({"model": net.state_dict(), "optimizer": saved}, tmp_path / "last.pt")
    with fails(ConfigError, "torch's format"):
        import_run(tmp_path / "last.pt", tmp_path / "again", validate(config()).config, "mine")


def test_a_prefix_imports_weights_alone_and_says_so(tmp_path: Path) -> None:
    net, optimizer, _ = peer_saves.made()
    peer_saves.update(net, optimizer)
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    torch.save({"model": {**state, "other": torch.ones(2)}, "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    imported = import_run(tmp_path / "last.pt", tmp_path / "run", validate(config()).config, "mine", prefix="net.")
    assert imported.steps is None
    assert any(gives(note, "optimizer, other") for note in imported.notes)


def test_a_key_and_a_prefix_choose_a_model(tmp_path: Path) -> None:
    state = {f"body.{name}": value for name, value in small.Net().state_dict().items()}
    torch.save({"net": {**state, "extra": torch.ones(2)}, "ema": state}, tmp_path / "last.pt")
    with fails(ConfigError, "net, ema", "--key net"):
        import_weights(tmp_path / "last.pt", tmp_path / "out")
    imported = import_weights(tmp_path / "last.pt", tmp_path / "out", key="net", prefix="body.")
    assert imported.tensors == len(state)
    assert imported.skipped == ("ema", "extra")

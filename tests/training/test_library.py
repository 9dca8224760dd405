"""Lockstep from Python: a whole run, the loop as a generator, and a custom loop, on one rank and on two."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import plain_script
import pytest
import torch
from kit import small
from kit.commands import run_script
from kit.failures import gives
from kit.worlds import in_process, in_world
from torch import nn

import lockstep
from lockstep.checkpoint.local import LocalDraft
from lockstep.loop.session import components_of

SCRIPT = Path(plain_script.__file__)


def _train_here(folder: Path, **changes: Any) -> tuple[Any, nn.Module, dict[str, Any]]:
    """Trains a module in place; also returns its weights of before."""
    torch.manual_seed(0)
    model = small.Net()
    before = small.weights(model)
    config = small.config(run={"steps": 6, "folder": str(folder)}, monitor={"every": 1, "progress": "none"})
    del config["objective"], config["model"]
    finished = lockstep.train(
        config,
        model=model,
        train_dataset=small.points(),
        objective=nn.CrossEntropyLoss(reduction="sum"),
        optimizer=plain_script.make_optimizer,
        schedule=plain_script.halves,
        **changes,
    )
    return finished, model, before


def _lines(folder: Path) -> list[dict[str, Any]]:
    names = ("metrics.jsonl", "events.jsonl")
    return [json.loads(line) for name in names for line in (folder / name).read_text().splitlines()]


def test_a_module_is_trained_in_place(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    finished, model, before = _train_here(tmp_path / "run")
    assert finished.folder == tmp_path / "run"
    assert finished.summary["steps"] == 6
    assert finished.summary["evaluation"]["held-out"].keys() == {"loss"}
    after = small.weights(model)
    assert all(not np.array_equal(before[name], after[name]) for name in before)
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(np.array_equal(saved[name].numpy(), after[name]) for name in after)
    assert [line["lr"] for line in _lines(tmp_path / "run") if "lr" in line] == [0.01] * 3 + [0.005] * 3


def test_a_finished_run_is_reported_and_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, trained, _ = _train_here(tmp_path / "run")
    files = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    capsys.readouterr()
    again, model, _ = _train_here(tmp_path / "run")
    assert f"the run in {tmp_path / 'run'} is finished" in capsys.readouterr().out
    assert again == first
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == files
    expected, weights = small.weights(trained), small.weights(model)
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("ranks", [None, 1, 2])
def test_a_finished_run_trains_again_if_it_is_made_longer_or_fresh(tmp_path: Path, ranks: int | None) -> None:
    in_process(_trains_again, tmp_path, ranks)


def _trains_again(tmp_path: Path, ranks: int | None) -> None:
    config = small.config(run={"steps": 3, "folder": str(tmp_path / "run")})
    first = lockstep.train(config, ranks=ranks)
    assert lockstep.train(config, ranks=ranks) == first
    assert lockstep.train(first.folder) == first
    longer = {**config, "run": {"steps": 5, "folder": str(tmp_path / "run")}}
    assert lockstep.train(longer, ranks=ranks).summary["steps"] == 5
    assert lockstep.train(config, ranks=ranks).summary["steps"] == 5
    with pytest.raises(lockstep.ConfigError, match=r"optim\.lr: 0\.01 then, 0\.02 now\n.*fresh=True"):
        lockstep.train({**longer, "optim": {"lr": 0.02}})
    assert lockstep.train(config, ranks=ranks, fresh=True).summary["steps"] == 3


def _first_loss(config: dict[str, Any], **objects: Any) -> float:
    with lockstep.session(config, **objects) as session:
        return next(iter(session)).loss


def test_a_function_and_a_target_give_the_same_initial_weights() -> None:
    config = small.config()
    assert _first_loss(config) == _first_loss(config, model=small.Net)
    assert _first_loss(config) != _first_loss({**config, "run": {"steps": 8, "seed": 1}}, model=small.Net)
    state = torch.get_rng_state()
    module = small.Net()
    torch.set_rng_state(state)
    assert _first_loss(config, model=module) != _first_loss(config)


def test_a_plain_script_starts_its_ranks(tmp_path: Path) -> None:
    """With data workers in the ranks, or without, it is the same run."""
    losses = []
    for workers in (0, 1):
        folder = tmp_path / f"run-{workers}"
        done = run_script(SCRIPT, folder, workers, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout.splitlines()[-1])
        assert (summary["folder"], summary["ranks"], summary["samples"]) == (str(folder), 2, 60)
        lines = [line for line in _lines(folder) if "lr" in line]
        assert [line["lr"] for line in lines] == [0.01] * 3 + [0.005] * 3
        losses.append([line["loss"] for line in lines])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_a_mean_of_torch_is_made_a_sum_and_a_count(tmp_path: Path) -> None:
    config = small.config(run={"steps": 2, "folder": str(tmp_path / "run")})
    losses = [
        lockstep.train(config, objective=nn.CrossEntropyLoss(reduction=reduction), fresh=True).summary["loss"]
        for reduction in ("mean", "sum")
    ]
    assert losses[0] == losses[1]


def test_given_without_an_object_is_refused() -> None:
    config = {**small.config(), "model": {"kind": "given"}}
    with pytest.raises(lockstep.ConfigError, match=r"torch\.nn\.Module"), lockstep.session(config):
        pass


# --- sessions -------------------------------------------------------------------------------------------------------


def _by_generator() -> tuple[list[float], dict[str, np.ndarray], dict[str, float]]:
    with lockstep.session(small.config()) as session:
        losses = [report.loss for report in session]
        [evaluation] = session.evaluate()
        return losses, small.weights(components_of(session).sharding.state.model), dict(evaluation.metrics)


def _by_own_loop() -> tuple[list[float], dict[str, np.ndarray], dict[str, float]]:
    losses = []
    with lockstep.session(small.config()) as session:
        for batch in session.batches():
            session.accumulate(batch)
            losses.append(session.commit().result().loss)
        [evaluation] = session.evaluate()
        return losses, small.weights(components_of(session).sharding.state.model), dict(evaluation.metrics)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_generator_and_an_own_loop_are_one_run(ranks: int) -> None:
    runs = [*in_world(ranks, _by_generator), *in_world(ranks, _by_own_loop)]
    first_losses, first_weights, first_metrics = runs[0]
    assert len(first_losses) == 8
    assert first_losses[-1] < first_losses[0]
    for losses, weights, metrics in runs[1:]:
        assert losses == first_losses
        assert metrics == first_metrics
        assert all(np.array_equal(weights[name], first_weights[name]) for name in weights)


class Logging(nn.CrossEntropyLoss):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        lockstep.log.mean("label", labels.sum(), len(labels))
        return super().forward(logits, labels)


def _what_a_loop_may_ask() -> tuple[list[Any], list[dict[str, float]]]:
    config = small.config()
    del config["objective"]
    numbers = []
    with lockstep.session(config, objective=Logging(reduction="sum")) as session:
        for report in session:
            lockstep.log.scalar("rank", session.rank)
            if report.step in (2, 3):
                numbers.append(session.logged().numbers())
        batch = session.batch_plan
        asked = [session.rank, session.world_size, session.is_main_process, session.evaluate()[0].step]
    assert batch.micro_size * batch.accumulation * batch.ranks >= batch.global_size == config["batch"]["global_size"]
    return [*asked, batch.ranks], numbers


def test_an_own_loop_knows_its_rank_and_reads_what_was_logged() -> None:
    [(alone, expected)] = in_world(1, _what_a_loop_may_ask)
    assert alone == [0, 1, True, 8, 1]
    two = in_world(2, _what_a_loop_may_ask)
    assert [asked for asked, _ in two] == [[0, 2, True, 8, 2], [1, 2, False, 8, 2]]
    for _, numbers in two:
        assert [logged["rank"] for logged in numbers] == [0.5, 0.5]
        assert [logged["label"] for logged in numbers] == [logged["label"] for logged in expected]
    assert lockstep.log.current().empty


def _forget_to_commit() -> None:
    with lockstep.session(small.config()) as session:
        for batch in session.batches():
            session.accumulate(batch)


def test_a_batch_that_is_not_committed_is_told() -> None:
    with pytest.raises(RuntimeError, match="one commit"):
        _forget_to_commit()


def _two_sessions() -> list[list[float]]:
    return [_by_generator()[0], _by_generator()[0]]


def _two_in_a_group() -> list[list[float]]:
    with small.in_group():
        return _two_sessions()


def test_two_sessions_after_one_another() -> None:
    first, second = _two_sessions()
    assert first == second
    for sessions in (_two_in_a_group, _two_sessions):
        for first, second in in_world(2, sessions):
            assert first == second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": []}, "did you mean train_dataset"),
        ({"evaluation": {}}, "did you mean eval_datasets"),
        ({"modl": None}, "there is no argument modl; did you mean model?"),
    ],
)
def test_unknown_arguments_are_answered(arguments: dict[str, Any], message: str) -> None:
    for call in (lockstep.train, lockstep.verify):
        with pytest.raises(TypeError, match=re.escape(message)):
            call(small.config(), **arguments)
    with pytest.raises(TypeError, match=re.escape(message)), lockstep.session(small.config(), **arguments):
        pass


def _save_again(folder: Path) -> tuple[list[str | None], list[str | None], list[str | int]]:
    def gone(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with lockstep.session(small.config(run={"steps": 3})) as session:
        checkpoints = session.checkpoints(folder)
        assert len(list(session)) == 3
        with pytest.MonkeyPatch.context() as patch:
            if os.environ.get("RANK", "0") == "0":
                patch.setattr(LocalDraft, "publish", gone)
            checkpoints.save()
            first = [report.failure for report in checkpoints.finish()]
        checkpoints.finish()
        checkpoints.save()
        checkpoints.save()  # while the one before is in progress
        second = [report.failure for report in checkpoints.finish()]
        checkpoints.save()  # which has nothing to do
        return first, second, [*checkpoints.storage.names(), *(report.step for report in checkpoints.finish())]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_failed_is_made_again_at_the_same_update(ranks: int, tmp_path: Path) -> None:
    for first, second, saved in in_world(ranks, _save_again, tmp_path / "checkpoints"):
        assert first == ["Input/output error"]
        assert (second, saved) == ([None], ["step-00000003"])


class WithOptimizers(small.Net):
    """Like a LightningModule, or nanoGPT's model."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        raise AssertionError("it isn't called")


def test_an_optimizer_of_the_model_s_own_is_not_ignored_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small.config(run={"steps": 1, "folder": str(tmp_path / "run")})
    lockstep.train(config, model=WithOptimizers())
    assert gives(capsys.readouterr().out, "note", "configure_optimizers", "optim.name")
    config = small.config(run={"steps": 1, "folder": str(tmp_path / "own")})
    lockstep.train(config, model=WithOptimizers(), optimizer=torch.optim.SGD)
    assert "configure_optimizers" not in capsys.readouterr().out


def test_a_refusal_is_raised_by_one_frame() -> None:
    with pytest.raises(lockstep.ConfigError, match=r"optim\.lrr") as refused:
        lockstep.train(small.config(optim={"lrr": 0.1}))
    assert [Path(entry.path).name for entry in refused.traceback] == ["test_library.py", "api.py"]

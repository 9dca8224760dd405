"""Parameters that are updated during the backward: the same weights, without all gradients at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kit.failures import fails
from kit.peak import peak_of
from kit.runs import recorded_all
from kit.small import config as small_config
from training.test_same_run import config

import lockstep
from lockstep.loop.session import components_of

CPU = torch.device("cpu")


def optim(name: str, *, in_backward: bool) -> dict[str, Any]:
    return {"name": name, "lr": 1e-3, "clip_norm": None, "in_backward": in_backward}


def test_weights_are_those_of_updates_after_the_backward() -> None:
    """Tied embeddings among them: their gradient is whole before it is applied."""
    names = ("adamw", "sgd", "lion", "muon", "adafactor")
    runs = recorded_all([config(8, optim=optim(name, in_backward=where)) for name in names for where in (False, True)])
    for name, after, during in zip(names, runs[::2], runs[1::2], strict=True):
        assert during.losses == after.losses, name
        assert during.norms == pytest.approx(after.norms, rel=1e-6), name
        assert during.gradients == [{}] * 4, "they are gone"
        for parameter, values in after.weights.items():
            np.testing.assert_array_equal(during.weights[parameter], values, err_msg=f"{name}: {parameter}")


def test_gradients_are_not_all_there_at_once() -> None:
    peaks = {}
    for where in (False, True):
        model = {"kind": "transformer", "layers": 2, "width": 256, "heads": 4, "vocabulary": 64}
        with lockstep.session(config(2, optim=optim("sgd", in_backward=where), model=model)) as session:
            batches = iter(session.batches())

            def update(session: Any = session, batches: Any = batches) -> None:
                session.accumulate(next(batches))
                session.commit()

            update()
            peaks[where] = peak_of(update, CPU)
            size = sum(one.numel() for one in components_of(session).sharding.state.model.parameters()) * 4
    assert peaks[False] - peaks[True] > 0.5 * size


def test_a_checkpoint_goes_on_under_either(tmp_path: Any) -> None:
    """What is saved while the next update is on its way is what was there."""
    weights = []
    for where in (False, True, None):
        folder = tmp_path / str(where)
        asked = config(8, optim=optim("adamw", in_backward=bool(where) if where is not None else True))
        with lockstep.session(asked) as session:
            saves = session.checkpoints(folder)
            for report in session:
                if report.step == 2:
                    saves.save()
                if report.step == 4:
                    break
            saves.finish()
        with lockstep.session(config(8, optim=optim("adamw", in_backward=where is None))) as session:
            assert session.checkpoints(folder).resumed_from is not None
            weights.append(dict(components_of(session).sharding.state.weights()))
    for other in weights[1:]:
        assert all(torch.equal(other[name], value) for name, value in weights[0].items())


def test_what_can_not_be_discarded_ends_the_run() -> None:
    with lockstep.session(small_config(optim=optim("sgd", in_backward=True))) as session:
        for batch in session.batches():
            with torch.no_grad():
                components_of(session).sharding.state.model.inner.weight.fill_(float("nan"))
            session.accumulate(batch)
            with fails(lockstep.RunFailed, "corrupt"):
                session.commit()
            break


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optim": {"in_backward": True}}, "clip_norm 1 needs it; write clip_norm: null"),
        ({"precision": {"compute": "fp16"}}, "fp16 discards steps that overflow"),
        (
            {"run": {"steps": 2, "determinism": "invariant"}},
            "run.determinism: invariant adds gradients over ranks",
        ),
        ({"batch": {"global_size": 8, "micro_size": 2}}, "an update has 4 micro-batches; write batch.micro_size: 8"),
        ({"parallel": {"strategy": "ddp"}}, "optimizer in backward doesn't go with ddp: gradients are reduced"),
        ({"parallel": {"strategy": "fsdp"}}, "optimizer in backward doesn't go with fsdp: gradients are reduced"),
    ],
)
def test_what_needs_all_gradients_is_refused(sections: dict[str, Any], said: str) -> None:
    asked = {**small_config(optim=optim("sgd", in_backward=True)), **sections}
    with pytest.raises(lockstep.ConfigError) as refusal, lockstep.session(asked):
        pass
    assert said in str(refusal.value)

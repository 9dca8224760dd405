"""FSDP with its state in the host's memory: the same run, and no collective gets a tensor of the CPU."""

from __future__ import annotations

from typing import Any

import torch
from kit import small

from lockstep.assembly.user_objects import UserObjects
from lockstep.config.schema import Config
from lockstep.loop.session import components_of
from lockstep.simulation.ranks import simulated_rank
from lockstep.training.assemble import assemble


def run(*, offload: bool) -> dict[str, Any]:
    """Make two clipped updates as the last of three ranks, whose shards are padded."""
    sections = {
        "launch": {"device": "auto"},
        "batch": {"global_size": 12, "micro_size": 2},
        "optim": {"name": "adamw", "lr": 0.1, "clip_norm": 0.5},
        "parallel": {"strategy": "fsdp", "fsdp": {"cpu_offload": offload}},
        "run": {"steps": 8, "allow_untested": True},
    }
    with simulated_rank(2, 3) as rank:
        session = assemble(Config.model_validate(small.config(**sections)), rank.world, UserObjects())
        state = components_of(session).sharding.state
        before = {name: local(value).clone() for name, value in state.model.named_parameters()}
        for batch in session.batches():
            session.accumulate(batch)
            gathered = {name: value.device.type for name, value in components_of(session).sharding.gradients()}
            session.commit()
            if session.progress.steps == 2:
                break
        after = {name: local(value) for name, value in state.model.named_parameters()}
        moments = {name: local(value) for name, value in state.live_state().tensors.items() if "exp_avg" in name}
        weights = {name: value.device.type for name, value in state.weights()}
        session.close()
        return {
            "parameters": {value.device.type for value in after.values()},
            "moments": {value.device.type for value in moments.values()},
            "gathered": set(gathered.values()) | set(weights.values()),
            "changed": [name for name in after if not torch.equal(after[name].cpu(), before[name].cpu())],
            "values": {name: value.tolist() for name, value in after.items()},
        }


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor.detach()


def test_the_host_holds_the_state_and_updates_what_forwards_gather() -> None:
    """FSDP2 pins and pads parameters in its first forward: the optimizer must update that memory."""
    host, device = run(offload=True), run(offload=False)
    assert host["parameters"] == host["moments"] == host["gathered"] == {"cpu"}
    assert device["parameters"] == device["moments"] == {"simulated"}
    assert host["changed"] == device["changed"]
    assert set(host["changed"]) >= {"inner.weight", "head.weight"}
    for name, values in device["values"].items():
        assert torch.allclose(torch.tensor(host["values"][name]), torch.tensor(values), atol=1e-6), name

"""Models of 7B to 405B parameters at their full width, of two layers, on 8 to 1,024 simulated ranks.

A rank holds 16 bytes for each of its parameters, and one block at a time of all others.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit.cells import allowed

from lockstep.config.schema import Config
from lockstep.loop.session import components_of
from lockstep.plan.stated_facts import facts_of_config
from lockstep.simulation.estimate import readable
from lockstep.simulation.memory import MemoryLedger, resizes_seen
from lockstep.simulation.sessions import simulated_session
from lockstep.simulation.updates import run_updates


def llama(width: int, inner: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 32000, **more,
    }  # fmt: skip


EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "7B on 8": (8, llama(4096, 11008, 32, 32)),
    "70B on 64": (64, llama(8192, 28672, 64, 8)),
    "experts on 64": (64, llama(4096, 14336, 32, 8, **EXPERTS)),
    "405B on 1,024": (1024, llama(16384, 53248, 128, 8)),
}


def config(architecture: dict[str, Any], ranks: int) -> Config:
    return Config.model_validate(
        {
            "model": {"kind": "huggingface", "task": "causal-lm", "architecture": architecture},
            "data": {"train": {"kind": "tokens", "folder": "not-on-this-machine", "length": 1024}},
            "batch": {"global_size": ranks, "micro_size": 1},
            "optim": {"name": "adamw", "lr": 1e-4},
            "precision": {"compute": "bf16"},
            "parallel": {"strategy": "fsdp"},
            "memory": {"activation_checkpointing": {"mode": "full"}},
            "run": {"steps": 3},
        }
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_holds_its_share_and_waits_for_nothing(size: str) -> None:
    ranks, architecture = SIZES[size]
    asked = config(architecture, ranks)
    facts = facts_of_config(asked)
    assert facts is not None
    with simulated_session(readable(asked, facts), rank=ranks - 1, ranks=ranks) as (session, simulated):
        ledger = MemoryLedger("simulated")
        simulated.execution.watchers.append(ledger.see)
        with resizes_seen(ledger):
            run_updates(session, ledger, 5)
            simulated.execution.syncs.clear()
            run_updates(session, ledger, 6)
        assert {str(sync) for sync in simulated.execution.syncs} <= set(allowed("fsdp", ""))
        held = ledger.peak().by_category
        elements = sum(parameter.numel() for parameter in components_of(session).sharding.state.model.parameters())
    share, block = elements / ranks, _block(architecture)
    assert held["parameters"] == pytest.approx(4 * share, rel=0.02)
    assert held["optimizer"] == pytest.approx(8 * share, rel=0.02)
    assert held["gradients"] <= 4 * share + 6 * block  # its own; and a block's, in bf16 and in fp32
    assert held["communication"] <= 17 * block  # gathered, prefetched, and a gradient of the same on its way
    assert held["casts"] <= block  # of shards; those of all weights would take 2 bytes each


def _block(sizes: dict[str, Any]) -> int:
    """The largest number of parameters that is gathered at once: of a layer, or of the embedding and the head."""
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    attention = 2 * width * width * (1 + sizes["num_key_value_heads"] / sizes["num_attention_heads"])
    mlp = 3 * width * inner * sizes.get("num_local_experts", 1)
    return max(int(attention + mlp), 2 * sizes["vocab_size"] * width)

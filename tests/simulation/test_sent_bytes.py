"""A simulated update gathers the bytes that docs/choosing.md has for it, in bf16 too."""

from __future__ import annotations

from typing import Any

import pytest
from plan.test_traffic import GATHERED, STAGE_3
from simulation.test_peak_memory import NOTHING, decoder, estimator

from lockstep.simulation.ranks import simulated_rank
from lockstep.training.assemble import assemble

RANKS = 4
MODEL = {"kind": "transformer", "vocabulary": 256, "layers": 2, "heads": 2, "width": 64, "tie_embeddings": False}
PARALLELS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "fsdp-grad-op": {"strategy": "fsdp", "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
    "zero3": {"strategy": "deepspeed", "deepspeed": STAGE_3},
}


@pytest.mark.parametrize(
    ("name", "compute", "options"),
    [
        *((name, compute, {}) for name in PARALLELS for compute in ("fp32", "bf16")),
        ("zero3", "bf16", {"bf16_weights": True}),
    ],
)
def test_a_simulated_update_gathers_the_bytes_of_the_formula(name: str, compute: str, options: dict[str, Any]) -> None:
    precision, parallel = {"compute": compute}, PARALLELS[name]
    if options:
        parallel = {**parallel, "deepspeed": {**parallel["deepspeed"], **options}}
    config = decoder(model=MODEL, parallel=parallel, precision=precision, launch={"device": "auto"})
    facts = estimator(config, RANKS).parameters
    with simulated_rank(0, RANKS) as simulated:
        session = assemble(config, simulated.world, NOTHING)
        for _, batch in zip(range(3), session.batches(), strict=False):
            simulated.collectives.clear()
            session.accumulate(batch)
            session.commit()
        issued = [collective for collective in simulated.collectives if collective.ranks == RANKS]
        session.close()
    gathered = sum(each.bytes for each in issued if each.name == "all_gather") * (RANKS - 1)
    lowered = {fact.name for fact in facts if len(fact.shape) == 2 and fact.name != "embedding.weight"}
    root = {fact.name for fact in facts if not fact.name.startswith("blocks.")}
    narrow = {fact.name for fact in facts} if options else lowered if compute == "bf16" else set[str]()
    sizes = {fact.name: fact.elements * (2 if fact.name in narrow else 4) for fact in facts}
    expected = GATHERED[name](1, sum(sizes.values()), sum(sizes[each] for each in root))
    assert gathered == pytest.approx(expected * (RANKS - 1) / RANKS, rel=0.01)

"""What must be asked for so that any number of ranks gives the same bits (`run.determinism: invariant`).

micro-batches that don't depend on ranks --> the same kernels on the same numbers --> gradients added in one order
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from lockstep.config.schema import Config

STRATEGIES = ("single", "ddp")


def refuse_variable(config: Config, strategy: str, ranks: int) -> None:
    """Raises:
    ConfigError: something was asked for that makes bits depend on the ranks, or that has no part in an invariant run.
    """
    problems = [Problem("", key, message) for key, message in _problems(config, strategy, ranks).items()]
    if problems:
        raise ConfigError(problems)


def _problems(config: Config, strategy: str, ranks: int) -> dict[str, str]:
    """By key."""
    found, ddp = {}, config.parallel.ddp
    why = "under run.determinism invariant"
    if config.batch.micro_size == "auto":
        size = -(-config.batch.global_size // ranks)
        found["batch.micro_size"] = (
            f"auto cuts an update by the number of ranks; {why} give a number, the same for all: "
            f"{size} is what auto comes to on {ranks} {'rank' if ranks == 1 else 'ranks'}"
        )
    if strategy not in STRATEGIES:
        found["parallel.strategy"] = (
            f"{strategy} adds gradients in an order that depends on the ranks; {why} take ddp, or single on one rank"
        )
    if ddp.compression != "none":
        found["parallel.ddp.compression"] = (
            f"{ddp.compression} rounds what each rank sends, so that the sum depends on the ranks; {why} take none"
        )
    if ddp.sync_batchnorm:
        found["parallel.ddp.sync_batchnorm"] = f"adds over ranks in their order; {why} it can't be had: take false"
    if ddp.static_graph:
        found["parallel.ddp.static_graph"] = f"is for DDP's own reduction, which {why} is not used: take false"
    if not ddp.gradient_as_bucket_view:
        found["parallel.ddp.gradient_as_bucket_view"] = (
            f"false is for DDP's own reduction, which {why} is not used; gradients lie in one piece: take true"
        )
    if config.model.compile:
        found["model.compile"] = (
            f"compiles for the shapes that a rank sees first, so that kernels depend on the ranks; {why} take false"
        )
    return found

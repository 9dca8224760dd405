"""tmp"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.config.schema import Config


def engine_config(config: Config, facts: Any) -> dict[str, Any]:
    options = config.parallel.deepspeed
    zero = {"stage": options.zero_stage, "reduce_bucket_size": 500000}
    return {
        "train_micro_batch_size_per_gpu": facts.batch.micro_size,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }

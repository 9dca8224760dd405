"""What ranks import sooner or later, which takes seconds: the server that they are forked from does it once.

Frozen, garbage collection in the ranks leaves all of it alone; to look at an object is to copy its page.
"""

import contextlib
import gc
import importlib

_FAMILIES = ("llama", "gpt2", "qwen3", "mixtral", "t5", "bert", "vit")
_MODULES = (
    "torch", "torch.distributed", "torch.distributed.checkpoint", "torch._dynamo", "torch._inductor.compile_fx",
    "networkx", "numpy.ma", "deepspeed", "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3",
    "transformers.modeling_utils", *(f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES),
    "lockstep.training.api", "lockstep.training.assemble", "lockstep.training.job", "lockstep.engine.pipeline",
    "lockstep.engine.in_context", "lockstep.sharding.fsdp", "lockstep.sharding.deepspeed", "lockstep.sharding.replicas",
    "lockstep.transforms.tensor_parallel", "lockstep.transforms.tensor_plans", "lockstep.checkpoint.saving", "kit.runs",
)  # fmt: skip

for _module in _MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(_module)
gc.collect()
gc.freeze()

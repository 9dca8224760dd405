"""What ranks import sooner or later, which takes seconds: the server that they are forked from does it once.

Frozen, garbage collection in the ranks leaves all of it alone; to look at an object is to copy its page.
"""

import contextlib
import gc
import importlib
import os
import pkgutil
from pathlib import Path

import pytest

import kit

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when its library is imported
_FAMILIES = ("llama", "gpt2", "qwen3", "mixtral", "t5", "bert", "vit")
_MODULES = (
    "torch", "torch.distributed", "torch.distributed.checkpoint", "torch._dynamo", "torch._inductor.compile_fx",
    "networkx", "numpy.ma", "hypothesis", "deepspeed", "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3", "deepspeed.runtime.zero.muon.muon_optimizer", "distutils.ccompiler",
    "deepspeed.module_inject.auto_ep_config", "deepspeed.module_inject.auto_ep_layer",
    "transformers.modeling_utils", *(f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES),
    "lockstep.training.api", "lockstep.training.assemble", "lockstep.training.job", "lockstep.engine.pipeline",
    "lockstep.engine.stages", "lockstep.engine.context_parallel",
    "lockstep.sharding.fsdp", "lockstep.sharding.deepspeed",
    "lockstep.sharding.replicas", "lockstep.transforms.tensor_parallel", "lockstep.transforms.tensor_plans",
    "lockstep.checkpoint.saving", *(f"kit.{found.name}" for found in pkgutil.iter_modules(kit.__path__)),
)  # fmt: skip


def _tests_with_ranks() -> list[str]:
    """Runs the functions of ranks."""
    found = sorted(Path(__file__).parents[1].glob("*/test_*.py"))
    return [f"{path.parent.name}.{path.stem}" for path in found if "kit.worlds" in path.read_text(encoding="utf-8")]


for _module in (*_MODULES, *_tests_with_ranks()):
    with contextlib.suppress(ImportError, pytest.skip.Exception):
        importlib.import_module(_module)
gc.collect()
gc.freeze()

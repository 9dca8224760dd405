"""What ranks import sooner or later, which takes seconds: the server that they are forked from does it once.

Frozen, garbage collection in the ranks leaves all of it alone; to look at an object is to copy its page. In huge pages,
400 MB are 200 entries of the page table to copy and to drop for each rank, not 100,000: 10 ms instead of 30.
"""

import contextlib
import ctypes
import gc
import importlib
import linecache
import os
import pkgutil
import sys
from pathlib import Path

import pytest

import kit
import lockstep.cli
from kit import sharding_memory
from kit.s3 import client
from lockstep.core.errors import ConfigError

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when its library is imported
_HUGE = 2 << 20
_MADV_COLLAPSE = 25
_FAMILIES = ("llama", "gpt2", "qwen3", "mixtral", "t5", "bert", "vit")
_MODULES = (
    "torch", "torch.distributed", "torch.distributed.checkpoint", "torch._dynamo", "torch._inductor.compile_fx",
    "networkx", "numpy.ma", "hypothesis", "boto3", "deepspeed", "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3", "deepspeed.runtime.zero.muon.muon_optimizer", "distutils.ccompiler",
    "deepspeed.module_inject.auto_ep_config", "deepspeed.module_inject.auto_ep_layer",
    "transformers.modeling_utils", *(f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES),
    "peft", "lockstep.training.api", "lockstep.training.assemble", "lockstep.training.job", "lockstep.engine.pipeline",
    "lockstep.engine.stages", "lockstep.engine.context_parallel",
    "lockstep.sharding.fsdp", "lockstep.sharding.deepspeed",
    "lockstep.sharding.replicas", "lockstep.transforms.tensor_parallel", "lockstep.transforms.tensor_plans",
    "lockstep.checkpoint.saving", "lockstep.report.page",
    *(f"lockstep.cli.{found.name}" for found in pkgutil.iter_modules(lockstep.cli.__path__)),
    *(f"kit.{found.name}" for found in pkgutil.iter_modules(kit.__path__)),
)  # fmt: skip


def _tests_with_ranks() -> list[str]:
    """Runs the functions of ranks."""
    found = sorted(Path(__file__).parents[1].glob("*/test_*.py"))
    return [f"{path.parent.name}.{path.stem}" for path in found if "kit.worlds" in path.read_text(encoding="utf-8")]


def _read_descriptions() -> None:
    """Of the services that ranks are clients of."""
    client("http://127.0.0.1:1")


def _do_what_every_run_does() -> None:
    """Build the schema, read a recipe, compile the templates of reports, load digits and the standard library's text: a
    tenth of a second of a run."""
    from lockstep.config.loading import load
    from lockstep.config.recipes import resolve_recipe
    from lockstep.data import digits, stdlib
    from lockstep.monitor import environment
    from lockstep.report import html

    load([resolve_recipe("digits").path], environ={"LOCKSTEP_CACHE": ""})
    digits._load()
    for held_out in (False, True):
        stdlib.text_of(held_out=held_out)
    environment.short_description()
    for template in html._HERE.glob("*.html"):
        html._environment(html._HERE).get_template(template.name)
    for name, module in tuple(sys.modules.items()):  # torch keeps the stack of each call that seeds it
        if name.startswith(("lockstep.training.", "lockstep.launch.", "kit.", "multiprocessing.")):
            linecache.getlines(module.__file__ or "")


def _gather_in_huge_pages() -> None:
    """Ask the kernel to; one that can't (before Linux 6.1, or not Linux) leaves memory as it is."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, access, _, _, _, *names = line.split(maxsplit=5)
        first, end = (int(address, 16) for address in addresses.split("-"))
        first, end = -(-first // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if access == "rw-p" and names in ([], ["[heap]"]) and first < end:
            madvise(first, end - first, _MADV_COLLAPSE)


gc.disable()
for _module in (*_MODULES, *_tests_with_ranks()):
    with contextlib.suppress(ImportError, pytest.skip.Exception):
        importlib.import_module(_module)
with contextlib.suppress(ImportError):
    _read_descriptions()
with contextlib.suppress(ImportError, ConfigError):
    _do_what_every_run_does()
sharding_memory.remember_results()
gc.collect()
gc.freeze()
gc.enable()
if sys.platform == "linux":
    _gather_in_huge_pages()

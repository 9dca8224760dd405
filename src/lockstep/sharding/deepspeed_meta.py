"""Stage 3 of a model on the meta device: at no time a rank holds more than one whole parameter.

    weight on the meta device   -->  whole, without values   -->  this rank's shard     and so the next one
                                     partitioned by DeepSpeed     values follow: drawn, or read from a checkpoint

DeepSpeed partitions a model that exists: it sends every parameter of the first rank to all others. Its `zero.Init` is
a context in which modules are constructed, with values from torch's generators; here values depend on names alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def partition(model: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Partition all parameters, which are on the meta device; shards have no values yet.

    Args:
        config: The `config` argument of `deepspeed.initialize`.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import Init

    comm.init_distributed(get_accelerator().communication_backend_name(), verbose=False, dist_init_required=False)
    init: Any = Init(config_dict_or_path=dict(config))
    if init.mem_efficient_linear:
        init._enable_mem_efficient_linear()
    for parameter in model.parameters():
        whole = torch.empty(parameter.shape, dtype=init.dtype, device=device)
        swap_tensors: Any = torch.utils.swap_tensors
        swap_tensors(parameter, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]


def restore_functions() -> None:
    """Restore what was replaced for stage 3: torch's linear function, and DeepSpeed's comparison of gathers."""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, utils

    partitioned_param_coordinator.assert_ints_same_as_other_ranks = utils.assert_ints_same_as_other_ranks
    if nn.functional.linear is partition_parameters.zero3_linear_wrap:  # it saves the parameter for the backward
        nn.functional.linear = partition_parameters.InsertPostInitMethodToModuleSubClasses.linear_bk

"""The same program under any launcher: it starts ranks itself unless it is one."""

from __future__ import annotations

import os
import sys

from lockstep.config.schema import Launch
from lockstep.core.ranks import RankEnvironment, names_a_rank
from lockstep.launch.local import launch


def main() -> int:
    if names_a_rank(os.environ):
        return train()
    return launch(train, 2, Launch(), None).show()


def train() -> int:
    import torch
    import torch.distributed as dist

    me = RankEnvironment.read(os.environ)
    store = dist.TCPStore(me.master_addr, me.master_port, me.world_size, me.keeps_store, master_listen_fd=me.store_fd)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    line = f"rank {me.rank} of {me.world_size}, local {me.local_rank} of {me.local_world_size}: {ones.item():.0f}\n"
    sys.stdout.write(line)  # in one piece: both ranks write to one pipe
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

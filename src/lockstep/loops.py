"""Helpers for training loops that don't use Lockstep: collectives by name, a GPU's meters, throughput, logs by rank."""

from __future__ import annotations

from lockstep.distributed.user_collectives import broadcast as broadcast
from lockstep.distributed.user_collectives import gather as gather
from lockstep.distributed.user_collectives import print_once as print_once
from lockstep.distributed.user_collectives import reduce as reduce
from lockstep.monitor.metric_log import merged_histogram as merged_histogram
from lockstep.monitor.own_loop import GPUMonitor as GPUMonitor
from lockstep.monitor.own_loop import ThroughputTracker as ThroughputTracker
from lockstep.monitor.own_loop import rank_logger as rank_logger

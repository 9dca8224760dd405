"""The strategies: each is one record in one file, and one line in the registry.

section     the base of every section of a config
record      what a record states: options, mesh, memory, traffic, refusals, how it is built
single, dp, ddp, fsdp, deepspeed      the records
partitions  the mesh axes along which a model or its sequences are partitioned: pipeline, context, tensor
registry    all records, those of users too, and what combines with what
"""

from lockstep.strategies.record import Cell as Cell
from lockstep.strategies.record import StateSharding as StateSharding
from lockstep.strategies.record import Strategy as Strategy
from lockstep.strategies.record import Traffic as Traffic
from lockstep.strategies.record import Update as Update
from lockstep.strategies.record import Variant as Variant
from lockstep.strategies.record import gradients_all_reduced as gradients_all_reduced
from lockstep.strategies.registry import register_strategy as register_strategy
from lockstep.strategies.section import Section as Section

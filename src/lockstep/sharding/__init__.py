"""How gradients are reduced and parameters updated, one file a strategy; and the state of the model, once for all.

The names below are public: a strategy of your own is built from them.
"""

from lockstep.sharding.buffers import SyncedBuffers as SyncedBuffers
from lockstep.sharding.context import Builder as Builder
from lockstep.sharding.context import Sharding as Sharding
from lockstep.sharding.context import ShardingContext as ShardingContext
from lockstep.sharding.model_state import ModelState as ModelState
from lockstep.sharding.single import LocalStep as LocalStep
from lockstep.sharding.single import present_gradients as present_gradients
from lockstep.sharding.single import trainable_parameters as trainable_parameters

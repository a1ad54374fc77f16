"""DenseNets, and the parts they are made of."""

from ..ops.sync_batch_norm import SyncBatchNorm
from .densenet import DenseNet, densenet121, densenet161, densenet169, densenet201, densenet264, densenet_bc
from .functional import dense_block
from .layers import MODES, BlockPlan, DenseBlock, DenseLayer, Transition

__all__ = [
    "MODES", "BlockPlan", "DenseBlock", "DenseLayer", "DenseNet", "SyncBatchNorm", "Transition",
    "dense_block", "densenet121", "densenet161", "densenet169", "densenet201", "densenet264", "densenet_bc",
]  # fmt: skip

"""Memory-efficient DenseNets: the numbers of the plain model in a fraction of its memory."""

from .conversion import execution_plan, make_efficient, restore
from .models import (
    DenseNet, SyncBatchNorm, dense_block, densenet121, densenet161, densenet169, densenet201, densenet264, densenet_bc,
)  # fmt: skip

__version__ = "0.1.0"
__all__ = [
    "DenseNet", "SyncBatchNorm", "make_efficient", "restore", "execution_plan", "dense_block",
    "densenet121", "densenet161", "densenet169", "densenet201", "densenet264", "densenet_bc",
]  # fmt: skip

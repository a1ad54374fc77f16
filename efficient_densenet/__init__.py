"""Memory-efficient DenseNets: the numbers of the plain model in a fraction of its memory."""

from .models import (
    DenseNet, SyncBatchNorm, densenet121, densenet161, densenet169, densenet201, densenet264, densenet_bc,
)  # fmt: skip

__version__ = "0.1.0"
__all__ = [
    "DenseNet", "SyncBatchNorm",
    "densenet121", "densenet161", "densenet169", "densenet201", "densenet264", "densenet_bc",
]  # fmt: skip

"""DenseNets, and the parts they are made of."""

from .densenet import DenseNet, densenet121, densenet161, densenet169, densenet201, densenet264, densenet_bc
from .layers import MODES, BlockPlan, DenseBlock, DenseLayer, Transition

__all__ = [
    "MODES", "BlockPlan", "DenseBlock", "DenseLayer", "DenseNet", "Transition",
    "densenet121", "densenet161", "densenet169", "densenet201", "densenet264", "densenet_bc",
]  # fmt: skip

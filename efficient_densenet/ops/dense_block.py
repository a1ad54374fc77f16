"""A whole dense block, and what closes it, as one autograd function on one buffer; its plain reference beside it.

Forward, for every layer ``l`` with ``m = N·H·W`` rows and ``C_l`` channels before it::

    z = relu(scale1 X_l + shift1)        X_l: the first C_l columns of the buffer F, a view
    b = z W1ᵀ                            (m, 4k)
    a = relu(scale2 b + shift2)
    y = conv3x3(a, W2)                   written behind X_l

``fused`` keeps F and every b; ``lean`` keeps F alone. z and a are rebuilt in the backward pass, in tiles that never leave
the cache; in ``fused`` no convolution is run again. The batch statistics of a channel are taken once, when it is written,
and serve every layer that reads it.

Backward, with ``dz`` the masked gradient at a BatchNorm's output, its input's gradient is

    dx = scale dz + slope x + level,     slope = -r² (gamma dgamma) / m,     level = -scale dbeta / m - slope mean,

(slope = level = 0 for running statistics). Only ``scale dz`` is added into the gradient buffer G layer by layer. Slope and
level are vectors; they are summed over the layers that read a channel and applied once, when its own layer is about to
use the gradient: one pass over the rows per layer instead of two.

Since ``dW = dbᵀ z`` is there anyway, ``Σ_o W[o,c] dW[o,c] = Σ dz z = gamma dgamma + beta dbeta`` gives ``gamma dgamma``
without a pass over the rows; where that cancels (gamma small against beta, half precision) or ``dW`` is not wanted,
``dgamma = r Σ dz (x - mean)`` is taken directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batch_norm import (
    FeatureStatistics, FoldedNorm, RunningStatistics, Statistics, merge_statistics, move_running_statistics,
    row_statistics, uses_batch_statistics,
)  # fmt: skip
from .neighbourhood import NeighbourhoodConv
from .storage import FeatureBuffer, append, as_rows, channels_last_empty
from .tiles import Scratch, image_tiles, row_tiles

_masked = torch.ops.aten.threshold_backward.grad_input


@dataclass(frozen=True)
class NormCall:
    """How one BatchNorm is to run in this forward; its affine parameters travel as tensors."""

    eps: float
    batch: bool  # the batch's statistics, else the running ones
    running: Statistics | None

    @classmethod
    def of(cls, norm: nn.Module) -> NormCall:
        batch = uses_batch_statistics(norm)
        return cls(norm.eps, batch, None if batch else RunningStatistics(norm))

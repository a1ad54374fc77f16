"""What the passes hand each other besides matrices: vectors with a value per channel.

All of them are in the type sums are taken in, :func:`wide_type`: float32, or float64 where the features are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """What statistics and sums are taken in: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


class Partial(NamedTuple):
    """Batch statistics as far as a pass over the rows has them: for each of P parts of the rows.

    Args:
        values: ``(P, 2, C)``: mean and biased variance of each part.
        rows: how many rows a part has; the last one has what is left.
        count: m, all rows.
    """

    values: Tensor
    rows: int
    count: int


def merge(new: Partial, mean: Tensor, var: Tensor) -> None:
    """Write the statistics of all rows, from those of parts of them, by Chan, Golub and LeVeque's formula."""
    means, variances = new.values.unbind(1)
    share = torch.full((1, len(means)), new.rows / new.count, dtype=means.dtype, device=means.device)
    share[:, -1:].fill_(1 - (len(means) - 1) * new.rows / new.count)
    torch.mv(means.t(), share[0], out=mean)
    torch.mv((variances + (means - mean).square_()).t(), share[0], out=var)


class FoldedNorm:
    """A BatchNorm with its statistics, folded into one scale and one shift per channel: ``relu(scale x + shift)``.

    Args:
        mean: ``(C,)``, what is subtracted.
        r: ``1 / sqrt(var + eps)``.
        scale, shift: ``gamma r`` and ``beta - mean scale``.
        gamma, beta: the affine parameters themselves, in any type, or ``None`` for one and zero.
        batch: whether the statistics are the data's own, so that gradients flow through them.
    """

    __slots__ = ("batch", "beta", "gamma", "mean", "r", "scale", "shift")

    def __init__(
        self, mean: Tensor, r: Tensor, scale: Tensor, shift: Tensor, gamma: Tensor | None, beta: Tensor | None,
        batch: bool,
    ):  # fmt: skip
        self.mean, self.r, self.scale, self.shift = mean, r, scale, shift
        self.gamma, self.beta, self.batch = gamma, beta, batch


class Correction(NamedTuple):
    """What turns ``scale dz`` into the gradient through the statistics: ``+ slope (x - mean) + level``.

    Several norms that read the same channels add to the same slope and level; the mean is theirs in common.
    """

    slope: Tensor
    level: Tensor
    mean: Tensor

    def slice(self, start: int, stop: int) -> Correction:
        return Correction(self.slope[start:stop], self.level[start:stop], self.mean[start:stop])


class Need(NamedTuple):
    """What a backward pass has to find besides the gradient of what it read.

    Args:
        sums: the norm's ``Σ dz`` and ``Σ dz (x - mean)``.
        weight: the convolution's dW.
        bias: the gradient of the convolution's bias.
        short_cut: that ``Σ dz (x - mean)`` may be left out, since ``gamma dgamma = Σ W dW - beta dbeta`` is exact enough.
    """

    sums: bool
    weight: bool = False
    bias: bool = False
    short_cut: bool = False


class Rebuild(NamedTuple):
    """A 1x1 convolution that is to be run again: arguments of ``conv1x1_forward``, of which no statistics are asked."""

    x: Tensor
    norm: FoldedNorm
    weight: Tensor
    bias: Tensor | None
    out: Tensor


class Gradients(NamedTuple):
    """Of a norm and the convolution behind it: in the types, and the weight's in the strides, of the parameters."""

    gamma: Tensor | None = None
    beta: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


Pending = Any  # a backward pass's sums as its implementation has them, good for one call of its own ``finish_backward``

"""BatchNorm taken apart: statistics of a channel, running statistics, and the normalise-and-rectify pass.

In training mode the batch mean and variance of a channel do not depend on the layer that reads it, so a dense block
takes them once, when the channel is written. Each layer then only scales and shifts,

    r = 1 / sqrt(var + eps),   z = relu(gamma r x + (beta - mean gamma r)),

with its own ``gamma, beta, eps``, and moves its own running statistics with its own momentum, once per forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .storage import as_rows, channels_last_empty
from .tiles import row_tiles, scratch_for

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def uses_batch_statistics(norm: nn.Module) -> bool:
    """Whether this BatchNorm normalises with the batch's statistics (else with its running ones)."""
    return norm.training or norm.running_mean is None


@dataclass(frozen=True)
class Statistics:
    """Mean and biased variance of some channels, in float32 or wider; both of shape ``(C,)``."""

    mean: Tensor
    var: Tensor


def batch_statistics(x: Tensor) -> Statistics:
    """Batch mean and biased variance of every channel of ``x``, ``(N, C, *spatial)``.

    In float32 for half precision, and from squares of differences: as good as torch's for data with a large mean.
    """
    rows = as_rows(x.detach())
    dtype = torch.promote_types(x.dtype, torch.float32)
    var, mean = torch.var_mean(rows.to(dtype), dim=0, correction=0)
    return Statistics(mean, var)


class FeatureStatistics:
    """The batch statistics of a buffer's channels, each taken once, when the first layer asks for them."""

    def __init__(self, features: Tensor):
        self._features = features
        self._parts: list[Statistics] = []
        self._known = 0

    def first(self, channels: int) -> Statistics:
        """The statistics of the first ``channels`` channels, which must have been written by now."""
        if self._known < channels:
            x = self._features.narrow(1, self._known, channels - self._known)
            if x.numel() == x.shape[1]:
                raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
            self._parts.append(batch_statistics(x))
            self._known = channels
        whole = Statistics(torch.cat([p.mean for p in self._parts]), torch.cat([p.var for p in self._parts]))
        self._parts = [whole]
        return whole

def move_running_statistics(norm: nn.Module, batch: Statistics, count: int) -> None:
    """What a BatchNorm's forward does to its buffers: once per forward in training mode, nothing otherwise.

        running = (1 - f) running + f batch,   var unbiased by count / (count - 1),

    with ``f`` the momentum, or ``1 / num_batches_tracked`` where the momentum is ``None``.
    """
    if not norm.training or norm.running_mean is None:
        return
    factor = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(norm.num_batches_tracked)
    factor = 0.0 if factor is None else factor
    unbiased = batch.var * (count / max(count - 1, 1))
    norm.running_mean.lerp_(batch.mean.to(norm.running_mean.dtype), factor)
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), factor)


def norm_relu_reference(x: Tensor, gamma: Tensor, beta: Tensor, statistics: Statistics, eps: float, batch: bool) -> Tensor:
    """``relu(batch_norm(x))`` by torch; the same arguments as :func:`norm_relu`."""
    mean, var = statistics.mean.to(x.dtype), statistics.var.to(x.dtype)
    return F.relu(F.batch_norm(x, None if batch else mean, None if batch else var, gamma, beta, batch, 0.0, eps))


class _NormReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, mean, var, eps, batch):
        r = (var + eps).rsqrt_()
        scale = r if gamma is None else r * gamma
        shift = -mean * scale if beta is None else beta - mean * scale
        z = channels_last_empty(x, x.shape[1])
        rows, z_rows = as_rows(x), as_rows(z)
        for tile in row_tiles(z_rows):
            torch.addcmul(shift, rows[tile], scale, out=z_rows[tile]).relu_()
        ctx.save_for_backward(x, gamma, beta, mean, var, z)
        ctx.eps, ctx.batch = eps, batch
        return z

    @staticmethod
    def backward(ctx, dz):
        x, gamma, beta, mean, var, z = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: differentiate the plain formula instead
            wanted = [t for t, needed in zip((x, gamma, beta), ctx.needs_input_grad, strict=False) if needed]
            y = norm_relu_reference(x, gamma, beta, Statistics(mean, var), ctx.eps, ctx.batch)
            grads = iter(torch.autograd.grad(y, wanted, dz, create_graph=True))
            return *(next(grads) if needed else None for needed in ctx.needs_input_grad[:3]), None, None, None, None

        r = (var + ctx.eps).rsqrt_()
        scale = r if gamma is None else r * gamma
        need_x, need_gamma, need_beta = ctx.needs_input_grad[:3]
        need_sums = need_gamma or need_beta or ctx.batch
        dx = channels_last_empty(x, x.shape[1])
        rows, z_rows, dz_rows, dx_rows = as_rows(x), as_rows(z), as_rows(dz), as_rows(dx)
        tiles = list(row_tiles(dx_rows))
        centred = scratch_for(dx_rows, tiles, mean.dtype) if need_sums else None
        sum_dz = torch.zeros_like(mean)  # Σ dz
        sum_dz_x = torch.zeros_like(mean)  # Σ dz (x - mean)
        masked = torch.ops.aten.threshold_backward.grad_input
        for tile in tiles:
            t = masked(dz_rows[tile], z_rows[tile], 0, grad_input=dx_rows[tile])
            if need_sums:
                sum_dz += t.sum(0, dtype=mean.dtype)
                c = torch.sub(rows[tile], mean, out=centred[: t.shape[0]])
                sum_dz_x += c.mul_(t).sum(0)
        dgamma = (sum_dz_x * r).to(gamma.dtype) if need_gamma else None
        dbeta = sum_dz.to(beta.dtype) if need_beta else None
        if not need_x:
            return None, dgamma, dbeta, None, None, None, None
        if ctx.batch:
            count = dx_rows.shape[0]
            slope = -scale * r * r * sum_dz_x / count
            level = -scale * sum_dz / count - slope * mean
        for tile in tiles:
            dx_rows[tile].mul_(scale)
            if ctx.batch:
                dx_rows[tile].addcmul_(rows[tile], slope).add_(level)
        return dx, dgamma, dbeta, None, None, None, None


def norm_relu(x: Tensor, gamma: Tensor, beta: Tensor, statistics: Statistics, eps: float, batch: bool) -> Tensor:
    """``relu(gamma (x - mean) / sqrt(var + eps) + beta)`` with given statistics, in tiles that stay in the cache.

    Equivalent to :func:`norm_relu_reference`; works on a slice of channels of a wider channels-last tensor at full speed.

    Args:
        x: the features.
        gamma, beta: ``(C,)`` each, or ``None`` for one and zero.
        statistics: mean and variance of x, or running ones.
        eps: added to the variance.
        batch: whether the statistics are those of ``x`` itself, so that gradients flow through them.

    Shape:
        - x: ``(N, C, *spatial)``
        - returns: the same, channels-last
    """
    return _NormReLU.apply(x, gamma, beta, statistics.mean, statistics.var, eps, batch)

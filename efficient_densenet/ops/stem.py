"""The stem's BN-ReLU-max-pool: plain, and as one function that keeps only what the convolution gave it.

Autograd keeps the convolution's output, its normalised and rectified copy, and an int64 index for every pooled value.
Here normalising, rectifying and choosing the maxima are done again in the backward pass, in tiles of whole images.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batch_norm import (
    FeatureStatistics, FoldedNorm, Statistics, masked_gradient, move_running_statistics, norm_relu_reference,
    synchronised_over, uses_batch_statistics,
)  # fmt: skip
from .conv3x3 import as_images
from .layout import gradient_in_format, in_format, is_channels_last
from .modules import MAX_POOLS
from .overrides import overridable
from .rebuild import must_rebuild, rebuilt_gradients
from .storage import as_rows, channels_last_empty
from .tiles import fit, parts, tile_rows

_WITH_INDICES = {4: torch.ops.aten.max_pool2d_with_indices, 5: torch.ops.aten.max_pool3d_with_indices}
_BACKWARD = {
    4: torch.ops.aten.max_pool2d_with_indices_backward.grad_input,
    5: torch.ops.aten.max_pool3d_with_indices_backward.grad_input,
}


def norm_relu_max_pool_reference(x, gamma, beta, statistics, eps, exchange, window) -> Tensor:
    """The same by torch's own operations, with the same arguments as the function below."""
    pool = F.max_pool2d if x.dim() == 4 else F.max_pool3d
    return pool(norm_relu_reference(x, gamma, beta, statistics, eps, exchange), *window)


class _NormReLUMaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, mean, var, eps, exchange, window):
        norm = FoldedNorm(gamma, beta, Statistics(mean, var), eps, exchange is not None)
        sizes = tuple(x.shape[2:])
        rows = as_rows(x)
        step = tile_rows(rows.shape[0], rows.shape[1] * x.element_size(), x.device, math.prod(sizes))
        scratch = torch.empty((step, rows.shape[1]), dtype=x.dtype, device=x.device)
        pool = F.max_pool2d if x.dim() == 4 else F.max_pool3d
        pooled = [
            pool(as_images(norm.relu(tile, out=fit(scratch, tile.shape[0])), sizes), *window)
            for tile in parts(rows, step)
        ]
        ctx.save_for_backward(x, gamma, beta, mean, var)
        ctx.eps, ctx.exchange, ctx.window = eps, exchange, window
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled)

    @staticmethod
    def backward(ctx, grad):
        x, gamma, beta, mean, var = ctx.saved_tensors
        need_x, need_gamma, need_beta = ctx.needs_input_grad[:3]
        if must_rebuild(grad):
            arguments = (Statistics(mean, var), ctx.eps, ctx.exchange, ctx.window)
            gradients = rebuilt_gradients(
                lambda *tensors: norm_relu_max_pool_reference(*tensors, *arguments),
                (x, gamma, beta), (need_x, need_gamma, need_beta), grad,
            )  # fmt: skip
            return *gradients, *(None,) * 5

        norm = FoldedNorm(gamma, beta, Statistics(mean, var), ctx.eps, ctx.exchange is not None)
        sizes = tuple(x.shape[2:])
        rows = as_rows(x)
        step = tile_rows(rows.shape[0], rows.shape[1] * x.element_size(), x.device, math.prod(sizes))
        scratch = torch.empty((step, rows.shape[1]), dtype=x.dtype, device=x.device)
        dx = channels_last_empty(x, x.shape[1])
        images_per_tile = step // math.prod(sizes)
        tiles = (parts(rows, step), grad.split(images_per_tile), dx.split(images_per_tile))
        sum_dz, sum_dz_x = torch.zeros_like(mean), torch.zeros_like(mean)  # Σ dz and Σ dz (x - mean)
        for x_tile, grad_tile, dx_images in zip(*tiles, strict=True):
            z = norm.relu(x_tile, out=fit(scratch, x_tile.shape[0]))
            images = as_images(z, sizes)
            _, indices = _WITH_INDICES[x.dim()](images, *ctx.window)
            _BACKWARD[x.dim()](grad_tile, images, *ctx.window, indices, grad_input=dx_images)
            dz = as_rows(dx_images)
            masked_gradient(dz, z, 0, grad_input=dz)
            sum_dz += dz.sum(0, dtype=mean.dtype)
            centred = torch.sub(x_tile, mean, out=z if z.dtype == mean.dtype else None)
            sum_dz_x += centred.mul_(dz).sum(0)
        del scratch, z, images, indices, centred  # as large as whole images
        sum_dz_x *= norm.r
        if need_x:
            correction = None
            if ctx.exchange is not None:
                correction = norm.correction(sum_dz, sum_dz_x * norm.gamma, ctx.exchange)
            norm.complete_gradient(rows, as_rows(dx), correction)
        dgamma = sum_dz_x.to(gamma.dtype) if need_gamma else None
        dbeta = sum_dz.to(beta.dtype) if need_beta else None
        return dx if need_x else None, dgamma, dbeta, *(None,) * 5


@overridable
def norm_relu_max_pool(x: Tensor, norm: nn.Module, pool: nn.Module) -> Tensor:
    """``max_pool(relu(norm(x)))``, keeping x alone; the running statistics move once.

    Equivalent to :func:`norm_relu_max_pool_reference`.

    Args:
        x: what the stem's convolution gave.
        norm, pool: modules for which :func:`~.modules.why_no_stem` has no objection.

    Shape:
        - x: ``(N, C, *spatial)``
        - returns: ``(N, C, *pooled)``, channels-last
    """
    dims = MAX_POOLS[type(pool)]
    one_d = dims == 1
    window = [
        tuple(v) if isinstance(v, (tuple, list)) else (v,) * dims
        for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    ]
    if one_d:  # one row of pixels
        x = x.unsqueeze(2)
        window = [(rest, *v) for v, rest in zip(window, (1, 1, 0, 1), strict=True)]
    x = in_format(gradient_in_format(x, is_channels_last(x)), channels_last=True)
    exchange = None
    if uses_batch_statistics(norm):
        over = FeatureStatistics(x.detach(), synchronised_over(norm))
        statistics, exchange = over.first(x.shape[1]), over.exchange
        move_running_statistics([(norm, statistics)], exchange.count)
    else:
        statistics = Statistics.running(norm)
    out = _NormReLUMaxPool.apply(
        x, norm.weight, norm.bias, statistics.mean, statistics.var, norm.eps, exchange, (*window, pool.ceil_mode)
    )
    return out.squeeze(2) if one_d else out

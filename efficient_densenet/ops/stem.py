"""The stem's BN-ReLU-max-pool: plain, and as one function that keeps only what the convolution gave it.

Autograd keeps the convolution's output, its normalised and rectified copy, and an int64 index for every pooled value.
Here normalising, rectifying and choosing the maxima are done again in the backward pass, in tiles of whole images.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batch_norm import (
    FeatureStatistics, Statistics, move_running_statistics, norm_relu_gradients, norm_relu_reference,
    synchronised_over, uses_batch_statistics,
)  # fmt: skip
from .layout import gradient_in_format, in_format, is_channels_last
from .modules import MAX_POOLS
from .overrides import overridable
from .passes import Need, implementation
from .rebuild import must_rebuild, rebuilt_gradients
from .storage import as_rows, channels_last_empty
from .tiles import Scratch


def norm_relu_max_pool_reference(x, gamma, beta, statistics, eps, exchange, window) -> Tensor:
    """The same by torch's own operations, with the same arguments as the function below."""
    pool = F.max_pool2d if x.dim() == 4 else F.max_pool3d
    return pool(norm_relu_reference(x, gamma, beta, statistics, eps, exchange), *window)


class _NormReLUMaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, mean, var, eps, exchange, window):
        passes, scratch = implementation(x.device, x.dtype), Scratch(x.device)
        norm = passes.fold(mean, var, gamma, beta, eps, exchange is not None, None, 0, scratch)
        sizes = tuple(x.shape[2:])
        pooled = _pooled(sizes, window)
        out = torch.empty((x.shape[0], *pooled, x.shape[1]), dtype=x.dtype, device=x.device).movedim(-1, 1)
        passes.norm_relu_max_pool(as_rows(x), norm, window, sizes, out, scratch)
        ctx.save_for_backward(x, gamma, beta, mean, var)
        ctx.eps, ctx.exchange, ctx.window = eps, exchange, window
        return out

    @staticmethod
    def backward(ctx, grad):
        x, gamma, beta, mean, var = ctx.saved_tensors
        exchange, batch = ctx.exchange, ctx.exchange is not None
        need_x, need_gamma, need_beta = ctx.needs_input_grad[:3]
        if must_rebuild(grad):
            arguments = (Statistics(mean, var), ctx.eps, ctx.exchange, ctx.window)
            gradients = rebuilt_gradients(
                lambda *tensors: norm_relu_max_pool_reference(*tensors, *arguments),
                (x, gamma, beta), (need_x, need_gamma, need_beta), grad,
            )  # fmt: skip
            return *gradients, *(None,) * 5

        passes, scratch = implementation(x.device, x.dtype), Scratch(x.device)
        norm = passes.fold(mean, var, gamma, beta, ctx.eps, batch, None, 0, scratch)
        dx, rows = channels_last_empty(x, x.shape[1]), as_rows(x)
        dx_rows = as_rows(dx)
        need = Need(need_gamma or need_beta or (need_x and batch))
        pending = passes.norm_relu_max_pool_backward(
            rows, norm, ctx.window, tuple(x.shape[2:]), grad, dx_rows, need, scratch
        )
        scratch.clear()  # as large as whole images
        dgamma, dbeta = norm_relu_gradients(rows, norm, pending, dx_rows, exchange, need_x, scratch)
        return (
            dx if need_x else None, dgamma if need_gamma else None, dbeta if need_beta else None, *(None,) * 5
        )  # fmt: skip


def _pooled(sizes: tuple[int, ...], window: tuple) -> tuple[int, ...]:
    """The sizes max-pooling leaves."""
    *of_sizes, ceil_mode = window

    def pooled(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
        room = size + 2 * padding - dilation * (kernel - 1) - 1
        found = (-(-room // stride) if ceil_mode else room // stride) + 1
        # The last window has to start within the image or the padding before it.
        return found - 1 if ceil_mode and (found - 1) * stride >= size + padding else found

    return tuple(map(pooled, sizes, *of_sizes))


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

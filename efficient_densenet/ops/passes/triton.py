"""The passes by Triton kernels, :mod:`.triton_kernels`; see :class:`~.Passes`. Importing this imports no Triton.

A pass whose kernel has not proved itself on the device (:mod:`.proof`), or whose case no kernel was made for, is that
of :mod:`.tiles`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..storage import as_rows
from . import launch, proof, reference
from . import tiles as plain
from .launch import cdiv
from .vectors import Correction, FoldedNorm, Gradients, Need, Partial, wide_type

LARGEST_PRODUCT = 256  # output channels of a 1x1 convolution whose gradient a program can hold


_here = sys.modules[__name__]


class _Sums(NamedTuple):
    """What a backward pass leaves: partial sums, the parts first."""

    need: Need
    norm: Tensor | None  # (parts, 2, C)
    convolution: Tensor | None  # (parts, K · taps · C [+ K])


def _pass(function: Callable) -> Callable:
    """The pass, or that of the tiles where its kernels do not hold good."""
    name = function.__name__

    @functools.wraps(function)
    def run(x: Tensor, *args, **kwargs):
        if proof.holds(name, _here, x.device, x.dtype):
            try:
                return function(x, *args, **kwargs)
            except launch.Failed as failure:
                proof.fails(name, x.device, x.dtype, failure)
        return getattr(plain, name)(x, *args, **kwargs)

    return run


def _parts(kernel: str, x: Tensor, rows: int, columns: int, inner: int, scratch) -> Partial:
    """Where a kernel leaves the statistics of its blocks of rows."""
    block = launch.tile(kernel, x.dtype, columns, inner, x.device).rows
    parts = cdiv(rows, block)
    values = scratch.take("partial", parts, 2 * columns, wide_type(x.dtype)).view(parts, 2, columns)
    return Partial(values, block, rows)


def _kernel_rows(weight: Tensor) -> Tensor:
    """A kernel ``(K, C, *taps)`` as ``(K, *taps, C)``, contiguous; a view of a channels-last one."""
    return weight.movedim(1, -1).contiguous()


def _three(correction: Correction | None) -> tuple[Tensor | None, ...]:
    return (None,) * 3 if correction is None else (correction.slope, correction.level, correction.mean)


@_pass
def statistics(x, statistics, scratch):
    new = _parts("statistics", x, *x.shape, 0, scratch)
    launch.statistics(x, new.values)
    return new


def fold(mean, var, gamma, beta, eps, batch, new, at, scratch):
    dtype = wide_type(mean.dtype)
    if not proof.holds("fold", _here, mean.device, dtype):
        return plain.fold(mean, var, gamma, beta, eps, batch, new, at, scratch)
    count = mean.shape[0]
    # Rows of a multiple of 16 bytes, so that what reads them in vectors may read past their end.
    vectors = torch.empty((3 if batch else 4, cdiv(count, 4) * 4), dtype=dtype, device=mean.device)
    r, scale, shift, *copy = vectors[:, :count]
    values, rows, total = (None, 1, 1) if new is None else new
    try:
        launch.fold(mean, var, gamma, beta, values, copy[0] if copy else None, r, scale, shift, total, rows, at, eps)
    except launch.Failed as failure:
        proof.fails("fold", mean.device, dtype, failure)
        return plain.fold(mean, var, gamma, beta, eps, batch, new, at, scratch)
    return FoldedNorm(copy[0] if copy else mean, r, scale, shift, gamma, beta, batch)


@_pass
def conv1x1_forward(x, norm, weight, bias, out, statistics, scratch):
    rows, columns = out.shape
    new = None
    if statistics is not None:
        new = _parts("norm_relu_product", x, rows, columns, x.shape[1], scratch)
    weight = weight.flatten(1).contiguous()
    launch.norm_relu_product(
        x, norm.scale, norm.shift, weight, bias, out, None if new is None else new.values, [1], [1]
    )
    return new


@_pass
def conv3x3_forward(x, norm, weight, bias, factor, sizes, out, statistics, scratch):
    rows, columns = out.shape
    new = None
    if statistics is not None:
        new = _parts("norm_relu_conv", x, rows, columns, x.shape[1], scratch)
    launch.norm_relu_conv(
        x, norm.scale, norm.shift, _kernel_rows(weight), bias, _per_row(factor, sizes), out,
        None if new is None else new.values, sizes,
    )  # fmt: skip
    return new


def _per_row(factor: Tensor | None, sizes: tuple[int, ...]) -> Tensor | None:
    return None if factor is None else factor.expand(-1, math.prod(sizes), -1)


@_pass
def conv3x3_backward(x, norm, weight, y, grad, correction, factor, sizes, out, first, need, scratch):
    rows, channels = x.shape
    k, dtype = grad.shape[1], wide_type(x.dtype)
    sums, convolution, each = None, None, rows
    if need.weight or need.bias:
        tile = launch.tile("conv_weight_gradient", x.dtype, channels, k, x.device)
        chunks = math.prod(weight.shape[2:]) * cdiv(channels, tile.columns) * cdiv(k, tile.inner)
        parts, each = launch.splits(rows, chunks, tile, x.device)
        width = weight.numel() * need.weight + k * need.bias
        convolution = scratch.take("convolution sums", parts, width, dtype)
    if need.sums or out is not None:
        tile = launch.tile("conv_input_gradient", x.dtype, channels, k, x.device)
        parts = cdiv(rows, tile.rows)
        sums = scratch.take("norm sums", parts, 2 * channels, dtype).view(parts, 2, channels)
    if sums is None and convolution is None:
        return _Sums(need, None, None)
    launch.conv_gradient(
        grad, y, *_three(correction), _per_row(factor, sizes), _kernel_rows(weight), x, norm.scale, norm.shift,
        norm.mean, out, sums, convolution, sizes, first or 0, first is not None, each, need.weight, need.bias,
    )  # fmt: skip
    return _Sums(need, sums, convolution)


@_pass
def conv1x1_backward(x, norm, weight, b, dz2, norm2, correction2, g, first, need, scratch):
    (rows, channels), k = x.shape, b.shape[1]
    if k > LARGEST_PRODUCT:
        return plain.conv1x1_backward(x, norm, weight, b, dz2, norm2, correction2, g, first, need, scratch)
    dtype = wide_type(x.dtype)
    tile = launch.tile("product_gradient", x.dtype, channels, k, x.device)
    parts, each = launch.splits(rows, cdiv(channels, tile.columns), tile, x.device)
    sums = convolution = None
    if need.sums or g is not None:
        sums = scratch.take("norm sums", parts, 2 * channels, dtype).view(parts, 2, channels)
    if need.weight or need.bias:
        width = weight.numel() * need.weight + k * need.bias
        convolution = scratch.take("convolution sums", parts, width, dtype)
    slope, level, mean = _three(correction2)
    launch.product_gradient(
        x, g, b, dz2, weight.flatten(1).contiguous(), norm.scale, norm.shift, norm.mean, norm2.scale, slope, level,
        mean, convolution, sums, first, each, need.weight, need.bias,
    )  # fmt: skip
    return _Sums(need, sums, convolution)


def finish_backward(pending, norm, weight, count, correction, scratch, rebuild=None):
    if not isinstance(pending, _Sums):
        return plain.finish_backward(pending, norm, weight, count, correction, scratch, rebuild)
    need, sums, convolution = pending
    if not (need.sums or need.weight or need.bias):
        if rebuild is not None:
            conv1x1_forward(*rebuild, None, scratch)
        return Gradients()
    dgamma = dbeta = dweight = dbias = slope = level = None
    if need.sums:
        dgamma, dbeta = (torch.empty_like(norm.r if p is None else p) for p in (norm.gamma, norm.beta))
        if correction is not None:
            slope, level = correction
    strides = (0, 0, 0)
    if need.weight:
        dweight = torch.empty_like(weight)
        strides = (dweight.stride(0), dweight.stride(-1), dweight.stride(1))
    if need.bias:
        dbias = torch.empty(weight.shape[0], dtype=weight.dtype, device=weight.device)
    arguments = (
        sums if need.sums else None, norm.r, norm.scale, dgamma, dbeta, slope, level, convolution, dweight, dbias,
        count, 0 if weight is None else weight.shape[0], strides,
    )  # fmt: skip
    try:
        if rebuild is None:
            launch.finish_gradient(*arguments)
        else:
            x, of, kernel, bias, out = rebuild
            kernel = kernel.flatten(1).contiguous()
            launch.finish_and_product(*arguments, x, of.scale, of.shift, kernel, bias, out)
    except launch.Failed:
        if rebuild is not None:
            conv1x1_forward(*rebuild, None, scratch)
        return reference.finish_backward(_added_up(pending, weight), norm, weight, count, correction, scratch)
    return Gradients(
        None if norm.gamma is None else dgamma, None if norm.beta is None else dbeta, dweight, dbias
    )


def _added_up(pending: _Sums, weight: Tensor | None) -> reference.Sums:
    """The sums as the reference has them."""
    need, sums, convolution = pending
    dz = dz_x = dw = db = None
    if need.sums:
        dz, dz_x = sums.sum(0)
    if convolution is not None:
        total = convolution.sum(0)
        if need.weight:
            k, channels, *taps = weight.shape
            dw = total[: weight.numel()].view(k, *taps, channels).movedim(-1, 1)
        if need.bias:
            db = total[-weight.shape[0] :]
    return reference.Sums(need, dz, dz_x, dw, db)


@_pass
def correct(x, g, scale, correction, out, scratch):
    launch.correct(x, g, scale, *_three(correction), out)


@_pass
def norm_relu(x, norm, out, scratch):
    launch.norm_relu(x, norm.scale, norm.shift, out)


@_pass
def norm_relu_backward(x, norm, grad, out, first, need, scratch):
    return _Sums(need, _norm_relu_gradient(x, norm, grad, None, None, out, first, scratch), None)


def _norm_relu_gradient(x, norm, grad, pool, sizes, out, first, scratch) -> Tensor:
    channels, rows = x.shape[1], grad.shape[0] * grad.shape[1]
    tile = launch.tile("norm_relu_gradient", x.dtype, channels, 0, x.device)
    parts, each = launch.splits(rows, cdiv(channels, tile.columns), tile, x.device)
    sums = scratch.take("norm sums", parts, 2 * channels, wide_type(x.dtype)).view(parts, 2, channels)
    launch.norm_relu_gradient(
        x, norm.scale, norm.shift, norm.mean, grad, out, sums, sizes or [1], pool or [1], first or 0, each,
        first is not None, pool is not None,
    )  # fmt: skip
    return sums


@_pass
def transition_forward(x, norm, weight, bias, pool, sizes, out, scratch):
    weight = weight.flatten(1).contiguous()
    launch.norm_relu_product(x, norm.scale, norm.shift, weight, bias, out, None, sizes, pool)


@_pass
def transition_backward(x, norm, weight, grad, pool, sizes, out, first, need, scratch):
    if out is not None and any(size % step for size, step in zip(sizes, pool, strict=True)):
        out.zero_()  # no window covers the rest
    (n, image, k), channels, dtype = grad.shape, x.shape[1], wide_type(x.dtype)
    dout = grad.flatten(0, 1)
    dp = torch.mm(dout, weight.flatten(1).to(x.dtype), out=scratch.take("gradients", n * image, channels, x.dtype))
    sums = _norm_relu_gradient(x, norm, dp.view(n, image, channels), pool, sizes, out, first, scratch)
    convolution = None
    if need.weight or need.bias:
        size = weight.numel() * need.weight
        convolution = scratch.take("convolution sums", 1, size + k * need.bias, dtype)
        if need.weight:  # dp is now what was pooled
            dw = convolution[0, :size].view(k, channels)
            if dtype == x.dtype:
                torch.mm(dout.t(), dp, out=dw)
            else:
                dw.copy_(torch.mm(dout.t(), dp))
        if need.bias:
            torch.sum(grad, (0, 1), dtype=dtype, out=convolution[0, size:])
    return _Sums(need, sums, convolution)


@_pass
def norm_relu_max_pool(x, norm, window, sizes, out, scratch):
    *window, _ = window
    launch.norm_relu_max_pool(x, norm.scale, norm.shift, as_rows(out), sizes, out.shape[2:], *window)


@_pass
def norm_relu_max_pool_backward(x, norm, window, sizes, grad, out, need, scratch):
    *window, _ = window
    channels, pooled = x.shape[1], grad.shape[2:]
    dp = as_rows(grad)
    if dp.stride(1) != 1:
        dp = dp.contiguous()
    tile = launch.tile("norm_relu_max_pool_gradient", x.dtype, channels, 0, x.device)
    parts, each = launch.splits(x.shape[0], cdiv(channels, tile.columns), tile, x.device)
    sums = scratch.take("norm sums", parts, 2 * channels, wide_type(x.dtype)).view(parts, 2, channels)
    launch.norm_relu_max_pool_gradient(
        x, norm.scale, norm.shift, norm.mean, dp, out, sums, sizes, pooled, *window, each
    )
    return _Sums(need, sums, None)


def short_cuts(norms, dtype):
    """None: the direct sums cost a kernel nothing."""
    return set()

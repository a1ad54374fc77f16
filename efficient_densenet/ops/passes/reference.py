"""The passes by plain torch operations on whole matrices: no tiles, no short cuts. See :class:`~.Passes`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .vectors import Correction, FoldedNorm, Gradients, Need, merge, wide_type


class Sums(NamedTuple):
    need: Need
    dz: Tensor | None = None
    dz_x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def _images(rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return rows.reshape(-1, *sizes, rows.shape[1]).movedim(-1, 1)


def _rows(images: Tensor) -> Tensor:
    return images.movedim(1, -1).flatten(0, -2)


def _normalised(x: Tensor, norm: FoldedNorm) -> Tensor:
    return (x * norm.scale + norm.shift).relu().to(x.dtype)


def _corrected(grad: Tensor, x: Tensor, correction: Correction | None) -> Tensor:
    if correction is None:
        return grad
    return grad + correction.slope * (x - correction.mean) + correction.level


def _convolution(images: Tensor, weight: Tensor) -> Tensor:
    conv = F.conv2d if images.dim() == 4 else F.conv3d
    return conv(images, weight.to(images.dtype), padding=tuple(t // 2 for t in weight.shape[2:]))


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _masked(dz: Tensor, z: Tensor) -> Tensor:
    return torch.where(z <= 0, torch.zeros((), dtype=dz.dtype, device=dz.device), dz)


def _summed(need: Need, norm: FoldedNorm, x: Tensor, dz: Tensor, weight: Tensor | None, grad: Tensor | None) -> Sums:
    """The sums over ``dz``; and of a convolution its gradients: its weight's, and its bias's from the rows ``grad``."""
    wide = wide_type(x.dtype)
    return Sums(
        need,
        dz.sum(0, dtype=wide) if need.sums else None,
        (dz * (x - norm.mean)).sum(0, dtype=wide) if need.sums else None,
        weight if need.weight else None,
        grad.sum(0, dtype=wide) if need.bias else None,
    )


def _write(out: Tensor | None, dz: Tensor, norm: FoldedNorm, first: int | None, add: bool) -> None:
    if out is None:
        return
    if first is None:
        out.copy_(dz)
        return
    columns = slice(first, first + out.shape[1])
    scaled = norm.scale[columns] * dz[:, columns]
    out.copy_(out + scaled if add else scaled)


def _moments(rows: Tensor, out: Tensor | None) -> None:
    if out is not None:
        wide = rows.to(out.dtype)
        out[0] = wide.mean(0)
        out[1] = (wide - out[0]).square().mean(0)


def statistics(x, statistics, scratch):
    _moments(x, statistics)


def fold(mean, var, gamma, beta, eps, batch, new, at, scratch):
    if new is not None:
        merge(new, mean[at : at + new.values.shape[2]], var[at : at + new.values.shape[2]])
    wide = wide_type(mean.dtype)
    if not batch:
        mean = mean.to(wide, copy=True)
    r = (var.to(wide) + eps).rsqrt()
    scale = r if gamma is None else gamma * r
    shift = -mean * scale if beta is None else beta - mean * scale
    return FoldedNorm(mean, r, scale, shift, gamma, beta, batch)


def conv1x1_forward(x, norm, weight, bias, out, statistics, scratch):
    out.copy_(_with_bias(_normalised(x, norm) @ weight.flatten(1).t().to(x.dtype), bias))
    _moments(out, statistics)


def conv3x3_forward(x, norm, weight, bias, factor, sizes, out, statistics, scratch):
    y = _with_bias(_rows(_convolution(_images(_normalised(x, norm), sizes), weight)), bias)
    if factor is not None:
        y = (y.view(factor.shape[0], -1, y.shape[1]) * factor).flatten(0, 1)
    out.copy_(y)
    _moments(out, statistics)


def conv3x3_backward(x, norm, weight, y, grad, correction, factor, sizes, out, first, need, scratch):
    dy = _corrected(grad, y, correction).to(x.dtype)
    if factor is not None:
        dy = (dy.reshape(factor.shape[0], -1, dy.shape[1]) * factor).flatten(0, 1)
    a = _normalised(x, norm)
    da, dweight = _gradients(
        lambda a, w: _convolution(_images(a, sizes), w), a, weight.to(x.dtype), grad=_images(dy, sizes)
    )
    dz = _masked(da, a)
    _write(out, dz, norm, first, add=True)
    return _summed(need, norm, x, dz, dweight, dy)


def conv1x1_backward(x, norm, weight, b, dz2, norm2, correction2, g, first, need, scratch):
    db = _corrected(norm2.scale * dz2, b, correction2).to(x.dtype)
    z = _normalised(x, norm)
    dz = _masked(db @ weight.flatten(1).to(x.dtype), z)
    _write(g, dz, norm, first, add=True)
    return _summed(need, norm, x, dz, db.t() @ z, db)


def finish_backward(pending, norm, weight, count, correction, scratch, rebuild=None):
    if rebuild is not None:
        conv1x1_forward(*rebuild, None, scratch)
    dgamma = dbeta = dweight = dbias = None
    if pending.need.sums:
        dbeta, dgamma = pending.dz, norm.r * pending.dz_x
        if correction is not None:
            correction[0] -= norm.r * norm.scale * dgamma / count
            correction[1] -= norm.scale * dbeta / count
        dgamma, dbeta = (
            None if p is None else d.to(p.dtype) for d, p in ((dgamma, norm.gamma), (dbeta, norm.beta))
        )  # fmt: skip
    if pending.need.weight:
        dweight = torch.empty_like(weight).copy_(pending.weight.view(weight.shape))
    if pending.need.bias:
        dbias = pending.bias.to(weight.dtype)
    return Gradients(dgamma, dbeta, dweight, dbias)


def correct(x, g, scale, correction, out, scratch):
    out.copy_(_corrected(g if scale is None else scale * g, x, correction))


def norm_relu(x, norm, out, scratch):
    out.copy_(_normalised(x, norm))


def norm_relu_backward(x, norm, grad, out, first, need, scratch):
    dz = _masked(grad.reshape(x.shape), _normalised(x, norm))
    _write(out, dz, norm, first, add=False)
    return _summed(need, norm, x, dz, None, None)


def _pooled(z: Tensor, pool: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    images = _images(z, sizes)
    return _rows((F.avg_pool2d if images.dim() == 4 else F.avg_pool3d)(images, pool))


def transition_forward(x, norm, weight, bias, pool, sizes, out, scratch):
    z = _normalised(x, norm)
    out.copy_(_with_bias(_pooled(z, pool, sizes) @ weight.flatten(1).t().to(x.dtype), bias))


def transition_backward(x, norm, weight, grad, pool, sizes, out, first, need, scratch):
    z, dout = _normalised(x, norm), grad.flatten(0, 1)
    dp = dout @ weight.flatten(1).to(x.dtype)
    (dz,) = _gradients(lambda z: _pooled(z, pool, sizes), z, grad=dp)
    dz = _masked(dz, z)
    _write(out, dz, norm, first, add=False)
    return _summed(need, norm, x, dz, dout.t() @ _pooled(z, pool, sizes), dout)


def _max_pooled(z: Tensor, window: tuple, sizes: tuple[int, ...]) -> Tensor:
    images = _images(z, sizes)
    return (F.max_pool2d if images.dim() == 4 else F.max_pool3d)(images, *window)


def norm_relu_max_pool(x, norm, window, sizes, out, scratch):
    out.copy_(_max_pooled(_normalised(x, norm), window, sizes))


def norm_relu_max_pool_backward(x, norm, window, sizes, grad, out, need, scratch):
    z = _normalised(x, norm)
    (dz,) = _gradients(lambda z: _max_pooled(z, window, sizes), z, grad=grad)
    dz = _masked(dz, z)
    out.copy_(dz)
    return _summed(need, norm, x, dz, None, None)


def _gradients(function: Callable[..., Tensor], *inputs: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of ``function(*inputs)`` by autograd."""
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in inputs]
        return torch.autograd.grad(function(*inputs), inputs, grad)


def short_cuts(norms, dtype):
    return set()

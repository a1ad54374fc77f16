"""The passes by torch operations on tiles that stay in the cache, on any device. See :class:`~.Passes`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..conv3x3 import ConvBackward, ConvForward, add_product, as_images, as_kernel
from ..overrides import is_fake
from ..tiles import Scratch, as_type, fit, parts, tile_rows, tiles
from .vectors import Correction, FoldedNorm, Gradients, Need, Partial, merge, wide_type

masked_gradient = torch.ops.aten.threshold_backward.grad_input  # (dz, z, 0, grad_input=out): dz where z > 0, else 0
_max_pool_with_indices = {4: torch.ops.aten.max_pool2d_with_indices, 5: torch.ops.aten.max_pool3d_with_indices}
_max_pool_backward = {
    4: torch.ops.aten.max_pool2d_with_indices_backward.grad_input,
    5: torch.ops.aten.max_pool3d_with_indices_backward.grad_input,
}

# gamma dgamma = Σ W dW - beta dbeta loses log2(|beta dbeta| / |gamma dgamma|) bits; beyond this, it is summed directly.
LEAST_GAMMA_OVER_BETA = 0.02


def _step(rows: Tensor, width: int, unit: int = 1) -> int:
    return tile_rows(rows.shape[0], width * rows.element_size(), rows.device, unit)


def _normalised(x: Tensor, norm: FoldedNorm, out: Tensor) -> Tensor:
    return torch.addcmul(norm.shift, x, norm.scale, out=out).relu_()


# Statistics and norms


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of a tile's columns, from differences to a mean: as good as torch's for a large mean."""
    count, width = rows.shape
    dtype = wide_type(rows.dtype)
    if rows.device.type != "cpu" or count == 1:
        var, mean = torch.var_mean(as_type(rows, dtype), dim=0, correction=0)
        return mean, var
    if width % 8 == 0 and rows.is_contiguous() and dtype == rows.dtype:
        return torch.batch_norm_update_stats(rows, None, None, 0.0)
    # narrow or strided: two products with a row of ones beat torch's reductions
    rows = as_type(rows, dtype)
    share = rows.new_full((1, count), 1.0 / count)
    near = torch.mm(share, rows)
    centred = rows - near
    rest = torch.mm(share, centred)
    var = torch.mm(share, centred.square_()).addcmul_(rest, rest, value=-1)[0]
    return (near + rest.nan_to_num_())[0], var  # from an infinite mean nothing differs by a number


def _complete(found: Sequence[tuple[Tensor, Tensor]], step: int, rows: Tensor, statistics: Tensor) -> Partial | None:
    """The tiles' statistics as what a forward pass returns; of each as many channels as there is place for."""
    width = statistics.shape[1]
    if len(found) == 1:
        for own, new in zip(statistics.unbind(0), found[0], strict=True):
            own.copy_(new if new.shape[0] == width else new[:width])
        return None
    values = torch.stack([vector for tile in found for vector in tile])
    return Partial(values.view(len(found), 2, -1)[:, :, :width], step, rows.shape[0])


def statistics(x, statistics, scratch):
    step = _step(x, x.shape[1])
    return _complete([_moments(tile) for (tile,) in tiles(step, x)], step, x, statistics)


def fold(mean, var, gamma, beta, eps, batch, new, at, scratch):
    if new is not None:
        stop = at + new.values.shape[2]
        merge(new, mean[at:stop], var[at:stop])
    if not batch:
        wide = wide_type(mean.dtype)
        mean, var = mean.to(wide, copy=True), as_type(var, wide)
    r = (var + eps).rsqrt_()
    scale = r if gamma is None else gamma * r
    shift = -mean * scale if beta is None else torch.addcmul(beta, mean, scale, value=-1)
    return FoldedNorm(mean, r, scale, shift, gamma, beta, batch)


# A layer forward


def _product(z: Tensor, transposed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(z, transposed, out=out)
    else:
        torch.addmm(bias, z, transposed, out=out)


def _transposed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A 1x1 kernel as the matrix ``(C, K)``, a view where the type fits."""
    weight = as_type(weight, dtype)
    return weight.as_strided((weight.shape[1], weight.shape[0]), (weight.stride(1), weight.stride(0)))


def conv1x1_forward(x, norm, weight, bias, out, statistics, scratch):
    width = x.shape[1]
    transposed = _transposed(weight, x.dtype)
    bias = bias if bias is None else as_type(bias, x.dtype)
    step = _step(x, width)
    activations = scratch.take("activations", step, width, x.dtype)
    found = []
    for x_tile, out_tile in tiles(step, x, out):
        _product(_normalised(x_tile, norm, fit(activations, x_tile.shape[0])), transposed, bias, out_tile)
        if statistics is not None:
            found.append(_moments(out_tile))
    return None if statistics is None else _complete(found, step, x, statistics)


def conv3x3_forward(x, norm, weight, bias, factor, sizes, out, statistics, scratch):
    width, k, dtype = x.shape[1], weight.shape[0], x.dtype
    conv = ConvForward(as_type(weight, dtype), bias if bias is None else as_type(bias, dtype), sizes)
    image = math.prod(sizes)
    step = _step(x, width, image)
    activations = scratch.take("activations", step, width, dtype)
    found = []
    for (x_tile, out_tile), factors in zip(tiles(step, x, out), _images_of(factor, step // image), strict=False):
        y = conv(_normalised(x_tile, norm, fit(activations, x_tile.shape[0])))
        kept = y if y.shape[1] == k else y[:, :k]
        if factors is not None:
            kept.view(*factors.shape[:1], image, k).mul_(factors)
        out_tile.copy_(kept)
        if statistics is not None:
            found.append(_moments(y))  # contiguous and hot, unlike out
        del y, kept  # before the next tile's is made
    return None if statistics is None else _complete(found, step, x, statistics)


def _images_of(images: Tensor | None, step: int) -> Sequence[Tensor | None]:
    """Something with a row per image in tiles of that many."""
    return itertools.repeat(None) if images is None else parts(images, step)


# A layer backward


class _Sums:
    """What a backward pass finds, summed over its tiles."""

    __slots__ = ("_mean", "bias", "dbeta", "direct", "need", "weight")

    def __init__(self, norm: FoldedNorm, need: Need):
        self.need, self._mean = need, norm.mean
        self.dbeta = self.direct = self.weight = self.bias = None

    def add(self, dz: Tensor, x: Tensor, z: Tensor) -> None:
        """A tile's masked gradient, the rows the norm read, and what it gave, whose memory is free now if not dz's."""
        dbeta = dz.sum(0, dtype=self._mean.dtype)
        self.dbeta = dbeta if self.dbeta is None else self.dbeta.add_(dbeta)
        if not self.need.short_cut:
            free = z is not dz and z.dtype == self._mean.dtype
            direct = torch.sub(x, self._mean, out=z if free else None).mul_(dz).sum(0)
            self.direct = direct if self.direct is None else self.direct.add_(direct)

    def add_bias(self, grad: Tensor) -> None:
        """A tile of the gradient of what the convolution gave, channels last."""
        bias = grad.sum(tuple(range(grad.dim() - 1)), dtype=self._mean.dtype)
        self.bias = bias if self.bias is None else self.bias.add_(bias)


def _with_level(correction: Correction) -> tuple[Tensor, Tensor]:
    """``slope`` and ``level - slope mean``."""
    return correction.slope, torch.addcmul(correction.level, correction.slope, correction.mean, value=-1)


def conv3x3_backward(x, norm, weight, y, grad, correction, factor, sizes, out, first, need, scratch):
    width, image = x.shape[1], math.prod(sizes)
    need_input = need.sums or out is not None
    conv = ConvBackward(as_type(weight, x.dtype), sizes, scratch, need_input, need.weight)
    sums = _Sums(norm, need)
    if correction is not None:
        slope, level = _with_level(correction)
    step = _step(x, width, image)
    activations = scratch.take("activations", step, width, x.dtype)
    factors = _images_of(factor, step // image)
    for (x_tile, y_tile, grad_tile, place), some in zip(tiles(step, x, y, grad, out), factors, strict=False):
        dy = conv.output_gradient(x_tile.shape[0] // image)
        if correction is None:  # nothing to add, and zero times an infinite feature would not be nothing
            dy.copy_(grad_tile.view(dy.shape))
        else:
            torch.addcmul(level, y_tile.view(dy.shape), slope, out=dy).add_(grad_tile.view(dy.shape))
        if some is not None:
            dy.mul_(some.unflatten(1, sizes if some.shape[1] == image else (1,) * len(sizes)))
        if need.bias:
            sums.add_bias(dy)
        a = _normalised(x_tile, norm, fit(activations, x_tile.shape[0]))
        da = conv.input_gradient(a)
        if da is None:
            continue
        dz = masked_gradient(da, a, 0, grad_input=a if first is not None or place is None else place)
        if need.sums:
            sums.add(dz, x_tile, a)
        if first is not None and place is not None:
            _add_scaled(place, dz, norm, first)
        del da, dz  # before the next tile's are made
    if need.weight:
        sums.weight = conv.weight()
    return sums


def _add_scaled(place: Tensor, dz: Tensor, norm: FoldedNorm, first: int) -> None:
    stop = first + place.shape[1]
    if stop - first == dz.shape[1]:
        place.addcmul_(dz, norm.scale)
    else:
        place.addcmul_(dz[:, first:stop], norm.scale[first:stop])


def conv1x1_backward(x, norm, weight, b, dz2, norm2, correction2, g, first, need, scratch):
    width, dtype = x.shape[1], x.dtype
    matrix = as_type(weight, dtype).flatten(1)
    step = _step(x, width)
    activations = scratch.take("activations", step, width, dtype)
    gradients = scratch.take("gradients", step, width, dtype)
    outputs = scratch.take("db", step, b.shape[1], dtype)
    sums, total = _Sums(norm, need), None
    if correction2 is not None:
        slope, level = _with_level(correction2)
    for x_tile, b_tile, dz2_tile, place in tiles(step, x, b, dz2, g):
        rows = x_tile.shape[0]
        db = fit(outputs, rows)
        if correction2 is None:
            torch.mul(dz2_tile, norm2.scale, out=db)
        else:
            torch.addcmul(level, b_tile, slope, out=db).addcmul_(dz2_tile, norm2.scale)
        if need.bias:
            sums.add_bias(db)
        z = _normalised(x_tile, norm, fit(activations, rows))
        if need.weight:
            total = add_product(total, z.t(), db)
        if not need.sums and place is None:
            continue
        dz = torch.mm(db, matrix, out=fit(gradients, rows))
        masked_gradient(dz, z, 0, grad_input=dz)
        if need.sums:
            sums.add(dz, x_tile, z)
        if place is not None:
            _add_scaled(place, dz, norm, first)
    if need.weight:
        sums.weight = total.t().contiguous()  # the product is faster the other way round
    return sums


def finish_backward(pending, norm, weight, count, correction, scratch, rebuild=None):
    if rebuild is not None:
        conv1x1_forward(*rebuild, None, scratch)
    need, dbeta = pending.need, pending.dbeta
    dgamma = dweight = dbias = None
    if need.weight:
        dweight = pending.weight
    if need.sums:
        if need.short_cut:
            product = dweight * (weight.view(dweight.shape) if dweight.dim() == 2 else weight)
            product = product.sum(tuple(d for d in range(product.dim()) if d != 1))
            gamma_dgamma = product.addcmul_(norm.beta, dbeta, value=-1)
            dgamma = gamma_dgamma / norm.gamma
        else:
            dgamma = pending.direct.mul_(norm.r)
            gamma_dgamma = dgamma if norm.gamma is None else norm.gamma * dgamma
        if correction is not None:
            slope, level = correction.unbind(0)
            slope.addcmul_(norm.r * norm.r, gamma_dgamma, value=-1.0 / count)
            level.addcmul_(norm.scale, dbeta, value=-1.0 / count)
        dgamma = None if norm.gamma is None else as_type(dgamma, norm.gamma.dtype)
        dbeta = None if norm.beta is None else as_type(dbeta, norm.beta.dtype)
    if dweight is not None:
        dweight = as_type(dweight, weight.dtype)
        dweight = as_kernel(dweight, weight) if dweight.dim() == 2 else dweight
    if need.bias:
        dbias = as_type(pending.bias, weight.dtype)
    return Gradients(dgamma, dbeta, dweight, dbias)


def correct(x, g, scale, correction, out, scratch):
    if correction is None:
        if scale is not None:
            torch.mul(g, scale, out=out)
        elif g is not out:
            out.copy_(g)
        return
    slope, level = _with_level(correction)
    step = _step(x, x.shape[1])
    added = None
    if g is out or x.dtype != slope.dtype:  # else the sum grows where it goes
        added = scratch.take("added", step, x.shape[1], slope.dtype)
    for x_tile, g_tile, out_tile in tiles(step, x, g, out):
        place = out_tile if added is None else fit(added, x_tile.shape[0])
        torch.addcmul(level, x_tile, slope, out=place)
        if scale is not None:
            torch.addcmul(place, g_tile, scale, out=out_tile)
        else:
            torch.add(place, g_tile, out=out_tile)


# What stands before and behind the blocks


def norm_relu(x, norm, out, scratch):
    for x_tile, out_tile in tiles(_step(x, x.shape[1]), x, out):
        _normalised(x_tile, norm, out_tile)


def norm_relu_backward(x, norm, grad, out, first, need, scratch):
    width, unit = x.shape[1], grad.shape[1]  # images, so that no copy of the whole gradient is made
    if grad.shape[0] == 1 or grad.stride(0) == unit * grad.stride(1):
        grad, unit = grad.flatten(0, 1), 1
    step = _step(x, width, unit)
    activations = scratch.take("activations", step, width, x.dtype)
    sums = _Sums(norm, need)
    for (x_tile, place), some in zip(tiles(step, x, out), _images_of(grad, step // unit), strict=True):
        z = _normalised(x_tile, norm, fit(activations, x_tile.shape[0]))
        dz = z if first is not None or place is None else place
        masked_gradient(some.reshape(z.shape), z, 0, grad_input=dz)
        if need.sums:
            sums.add(dz, x_tile, z)
        if first is not None and place is not None:
            _write_scaled(place, dz, norm, first)
    return sums


def _write_scaled(place: Tensor, dz: Tensor, norm: FoldedNorm, first: int) -> None:
    stop = first + place.shape[1]
    torch.mul(dz[:, first:stop], norm.scale[first:stop], out=place)


class _Pooling:
    """Average pooling without overlap on the rows of whole images."""

    def __init__(self, pool: tuple[int, ...], sizes: tuple[int, ...], scratch: Scratch):
        self._sizes, self._pool, self._scratch = sizes, pool, scratch
        self.sizes = tuple(s // p for s, p in zip(sizes, pool, strict=True))
        self.window = math.prod(pool)
        self.covers_all = all(s % p == 0 for s, p in zip(sizes, pool, strict=True))

    def windows(self, z: Tensor) -> list[Tensor]:
        """Views of the rows ``z``, one for every place in the window: ``(n, *pooled sizes, C)`` each."""
        views = [z.view(-1, *self._sizes, z.shape[1])]
        for dim, (size, step) in enumerate(zip(self.sizes, self._pool, strict=True), start=1):
            views = [
                v.narrow(dim, 0, size * step).unflatten(dim, (size, step)).select(dim + 1, place)
                for v in views
                for place in range(step)
            ]
        return views

    def means(self, z: Tensor) -> Tensor:
        """The mean over each window, as rows; in float32 or wider until it is one, as a sum may be no half number."""
        first, *others = self.windows(z)
        if not others:
            return z
        sums = self._scratch.take("pooled", first[..., 0].numel(), z.shape[1], wide_type(z.dtype))
        images = sums.view(first.shape)
        torch.add(first, others[0], out=images)
        for other in others[1:]:
            images.add_(other)
        return as_type(sums.mul_(1 / self.window), z.dtype)

    def mask_gradient(self, dp: Tensor, z: Tensor) -> Tensor:
        """``dz`` in the place of ``z``: the gradient of each window's sum where z is positive, else zero."""
        if not self.covers_all:
            rest = z.view(-1, *self._sizes, z.shape[1])
            for dim, (size, step) in enumerate(zip(self.sizes, self._pool, strict=True), start=1):
                rest.narrow(dim, size * step, rest.shape[dim] - size * step).zero_()
        windows = self.windows(z)
        dp = dp.view(windows[0].shape)
        for window in windows:
            masked_gradient(dp, window, 0, grad_input=window)
        return z


def transition_forward(x, norm, weight, bias, pool, sizes, out, scratch):
    pooling, image = _Pooling(pool, sizes, scratch), math.prod(sizes)
    transposed = _transposed(weight, x.dtype)
    bias = bias if bias is None else as_type(bias, x.dtype)
    step = _step(x, x.shape[1], image)
    activations = scratch.take("activations", step, x.shape[1], x.dtype)
    pooled = step // image * math.prod(pooling.sizes)
    for (x_tile,), (out_tile,) in zip(tiles(step, x), tiles(pooled, out), strict=True):
        z = _normalised(x_tile, norm, fit(activations, x_tile.shape[0]))
        _product(pooling.means(z), transposed, bias, out_tile)


def transition_backward(x, norm, weight, grad, pool, sizes, out, first, need, scratch):
    pooling, image, width = _Pooling(pool, sizes, scratch), math.prod(sizes), x.shape[1]
    matrix = as_type(weight, x.dtype).flatten(1) / pooling.window
    sums, total = _Sums(norm, need), None
    step = _step(x, width, image)
    activations = scratch.take("activations", step, width, x.dtype)
    for (x_tile, place), some in zip(tiles(step, x, out), _images_of(grad, step // image), strict=True):
        z = _normalised(x_tile, norm, fit(activations, x_tile.shape[0]))
        dout = some.reshape(-1, some.shape[2])
        if need.weight:
            total = add_product(total, dout.t(), pooling.means(z))
        if need.bias:
            sums.add_bias(dout)
        if not need.sums and place is None:
            continue
        dp = torch.mm(dout, matrix, out=scratch.take("gradients", dout.shape[0], width, x.dtype))
        dz = pooling.mask_gradient(dp, z)
        if need.sums:
            sums.add(dz, x_tile, z)
        if place is not None:
            _write_scaled(place, dz, norm, first)
    if need.weight:
        sums.weight = total
    return sums


def norm_relu_max_pool(x, norm, window, sizes, out, scratch):
    image = math.prod(sizes)
    step = _step(x, x.shape[1], image)
    activations = scratch.take("activations", step, x.shape[1], x.dtype)
    pool = F.max_pool2d if len(sizes) == 2 else F.max_pool3d
    for (x_tile,), out_tile in zip(tiles(step, x), _images_of(out, step // image), strict=True):
        z = _normalised(x_tile, norm, fit(activations, x_tile.shape[0]))
        out_tile.copy_(pool(as_images(z, sizes), *window))


def norm_relu_max_pool_backward(x, norm, window, sizes, grad, out, need, scratch):
    image, dims = math.prod(sizes), len(sizes) + 2
    step = _step(x, x.shape[1], image)
    activations = scratch.take("activations", step, x.shape[1], x.dtype)
    sums = _Sums(norm, need)
    for (x_tile, dz), grad_tile in zip(tiles(step, x, out), _images_of(grad, step // image), strict=True):
        z = _normalised(x_tile, norm, fit(activations, x_tile.shape[0]))
        images = as_images(z, sizes)
        _, indices = _max_pool_with_indices[dims](images, *window)
        _max_pool_backward[dims](grad_tile, images, *window, indices, grad_input=as_images(dz, sizes))
        del images, indices  # as large as whole images
        masked_gradient(dz, z, 0, grad_input=dz)
        if need.sums:
            sums.add(dz, x_tile, z)
    return sums


# How the sums are to be found


def short_cuts(norms, dtype):
    # On an accelerator the wait would be long, and the direct sums cost it little.
    norms = [norm for norm in norms if norm.gamma is not None and norm.beta is not None]
    if not norms or norms[0].scale.device.type != "cpu" or dtype != wide_type(dtype):
        return set()
    if is_fake(norms[0].scale):  # which has no answer; most real ones have this
        return set(norms)
    gamma, beta = torch.cat([norm.gamma for norm in norms]), torch.cat([norm.beta for norm in norms])
    doubtful = torch.nonzero(gamma.abs() <= beta.abs() * LEAST_GAMMA_OVER_BETA).flatten()
    if doubtful.numel() == 0:
        return set(norms)
    ends = torch.tensor(list(itertools.accumulate(norm.gamma.shape[0] for norm in norms)))
    excluded = set(torch.bucketize(doubtful, ends, right=True).unique().tolist())
    return {norm for i, norm in enumerate(norms) if i not in excluded}

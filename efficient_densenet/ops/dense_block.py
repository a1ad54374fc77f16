"""A whole dense block, and what closes it, as one autograd function on one buffer; its plain reference beside it.

Forward, for every layer ``l`` with ``m = N·H·W`` rows and ``C_l`` channels before it::

    z = relu(scale1 X_l + shift1)        X_l: the first C_l columns of the buffer F, a view
    b = z W1ᵀ                            (m, 4k)
    a = relu(scale2 b + shift2)
    y = conv3x3(a, W2)                   written behind X_l

``fused`` keeps F and every b; ``lean`` keeps F alone. z and a are rebuilt in the backward pass, in tiles that stay in
the cache; in ``fused`` no convolution is run again. The batch statistics of a channel are taken once, when it is
written, and serve every layer that reads it.

Backward, with ``dz`` the masked gradient at a BatchNorm's output, its input's gradient is

    dx = scale dz + slope x + level,     slope = -r² (gamma dgamma) / m,     level = -scale dbeta / m - slope mean,

(slope = level = 0 for running statistics). Only ``scale dz`` is added into the gradient buffer G layer by layer. Slope
and level are vectors; they are summed over the layers that read a channel and applied once, when its own layer is about
to use the gradient: one pass over the rows per layer instead of two.

Since ``dW = dbᵀ z`` is there anyway, ``Σ_o W[o,c] dW[o,c] = Σ dz z = gamma dgamma + beta dbeta`` gives ``gamma dgamma``
without a pass over the rows; where that cancels (gamma small against beta, half precision) or dW is not wanted,
``dgamma = r Σ dz (x - mean)`` is taken directly.

What closes the block belongs to the function, so that G is the only block-sized gradient: a transition, with its
pooling moved before its convolution (both are linear, and the product then has a quarter of the rows), or a final
BN-ReLU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .batch_norm import (
    Exchange, FeatureStatistics, FoldedNorm, Moments, Statistics, batch_norm_reference, check_count, masked_gradient,
    move_running_statistics, synchronised_over, uses_batch_statistics,
)  # fmt: skip
from .conv3x3 import ConvBackward, add_product, as_images, as_kernel, conv_forward, forward_weight
from .modules import part, tensor
from .overrides import is_fake, overridable
from .rebuild import must_rebuild, rebuilt_gradients
from .storage import FeatureBuffer, append, as_rows, channels_last_empty, columns
from .tiles import Scratch, as_type, fit, parts, tile_rows

# gamma dgamma = Σ W dW - beta dbeta loses log2(|beta dbeta| / |gamma dgamma|) bits; beyond this, it is summed directly.
LEAST_GAMMA_OVER_BETA = 0.02


@dataclass(frozen=True)
class NormCall:
    """How one BatchNorm runs in this forward; its affine parameters travel as tensors."""

    module: nn.Module  # its running statistics are read and moved in the forward pass only
    eps: float
    batch: bool
    group: dist.ProcessGroup | None  # the processes whose batches count as one

    @classmethod
    def of(cls, norm: nn.Module) -> NormCall:
        return cls(norm, norm.eps, uses_batch_statistics(norm), synchronised_over(norm))

    @property
    def groups(self) -> set[dist.ProcessGroup | None]:
        """What it asks of the block's other norms: nothing where it takes no batch statistics."""
        return {self.group} if self.batch else set()

    def fold(self, gamma: Tensor, beta: Tensor, statistics: Statistics | None) -> FoldedNorm:
        if statistics is None:
            statistics = Statistics.running(self.module)
        return FoldedNorm(gamma, beta, statistics, self.eps, self.batch)


@dataclass(frozen=True)
class LayerCall:
    """One dense layer in this forward: BN-ReLU-conv1x1-BN-ReLU-conv3x3, or BN-ReLU-conv3x3 where ``norm2`` is None."""

    norm1: NormCall
    norm2: NormCall | None
    drop_rate: float

    @property
    def num_parameters(self) -> int:
        return 3 if self.norm2 is None else 6


@dataclass(frozen=True)
class TailCall:
    """What closes the block: BN-ReLU, and with ``pool``, its window, a transition's AvgPool ∘ conv1x1 behind it.

    Without, the output leaves the library and is written in the format that is asked for.
    """

    norm: NormCall
    pool: tuple[int, ...] | None
    channels_last: bool = True


@dataclass(frozen=True)
class BlockCall:
    layers: tuple[LayerCall, ...]
    tail: TailCall | None
    keep_conv1: bool

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes over which its norms, all of them, take their batch statistics."""
        norms = [norm for layer in self.layers for norm in (layer.norm1, layer.norm2)]
        norms.append(self.tail and self.tail.norm)
        return next((norm.group for norm in norms if norm is not None and norm.batch), None)

    def split(self, parameters: Sequence) -> tuple[list[Sequence], Sequence]:
        """The parameters by layer, and the tail's: gamma, beta, weight of one norm and convolution after another."""
        groups, start = [], 0
        for layer in self.layers:
            groups.append(parameters[start : start + layer.num_parameters])
            start += layer.num_parameters
        return groups, parameters[start:]


def dense_block_reference(x: Tensor, call: BlockCall, parameters: Sequence[Tensor], folded: _Kept) -> Tensor:
    """The block and its tail by torch's own operations, given statistics and dropout; differentiable again and again.

    Args:
        x: ``(N, C_0, *spatial)``.
        call: the layers.
        parameters: as in :meth:`BlockCall.split`.
        folded: what the forward pass left: running statistics where they were used, and the state dropout drew from.
    """

    def norm_relu(x: Tensor, norm: NormCall, gamma: Tensor, beta: Tensor, used: FoldedNorm) -> Tensor:
        statistics = None if norm.batch else Statistics(used.mean, used.r.square().reciprocal() - norm.eps)
        return F.relu(batch_norm_reference(x, gamma, beta, statistics, norm.eps, norm.group))

    conv = F.conv2d if x.dim() == 4 else F.conv3d
    groups, tail_parameters = call.split(parameters)
    features = [x]
    for layer, p, kept in zip(call.layers, groups, folded.layers, strict=True):
        y = norm_relu(torch.cat(features, 1), layer.norm1, *p[:2], kept.norm1)
        if layer.norm2 is not None:
            y = norm_relu(conv(y, p[2].to(x.dtype)), layer.norm2, *p[3:5], kept.norm2)
        weight = p[-1].to(x.dtype)
        y = conv(y, weight, padding=tuple(t // 2 for t in weight.shape[2:]))
        if layer.drop_rate:
            y = y * _dropout_noise(y.shape, y.dtype, y.device, layer.drop_rate, kept.random_state)
        features.append(y)
    out = torch.cat(features, 1)
    if call.tail is not None:
        out = norm_relu(out, call.tail.norm, *tail_parameters[:2], folded.tail)
        if call.tail.pool is not None:
            pool = F.avg_pool2d if x.dim() == 4 else F.avg_pool3d
            out = pool(conv(out, tail_parameters[2].to(x.dtype)), call.tail.pool)
    return out


def _random_devices(device: torch.device) -> list[torch.device]:
    """The device, if dropout on it draws from a generator of its own; without CUDA its tensors have no data to draw."""
    return [device] if device.type == "cuda" and torch.cuda.is_initialized() else []


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if _random_devices(device) else torch.get_rng_state()


def _dropout_noise(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, rate: float, state: Tensor | None
) -> Tensor:
    """Dropout's factors, 0 or 1 / (1 - rate), drawn in contiguous order as by the plain layer; or as before."""
    ones = torch.ones(shape, dtype=dtype, device=device)
    if state is None:
        return F.dropout(ones, rate)
    devices = _random_devices(device)
    with torch.random.fork_rng(devices):
        torch.cuda.set_rng_state(state, device) if devices else torch.set_rng_state(state)
        return F.dropout(ones, rate)


@dataclass
class _KeptLayer:
    """What a layer's forward leaves besides tensors of the size of its features."""

    norm1: FoldedNorm
    norm2: FoldedNorm | None = None
    conv1: Tensor | None = None
    random_state: Tensor | None = None


@dataclass
class _Kept:
    exchange: Exchange
    layers: list[_KeptLayer]
    tail: FoldedNorm | None = None


class _Pass:
    """Geometry and working memory of one pass over a block's buffer."""

    def __init__(self, features: Tensor):
        self.features = features
        self.rows = as_rows(features)
        self.sizes = tuple(features.shape[2:])
        self.image = math.prod(self.sizes)
        self.dtype, self.device = features.dtype, features.device
        self.scratch = Scratch(features.device)

    def step(self, width: int, unit: int = 1) -> int:
        """Rows of a tile for a pass that works on ``width`` channels."""
        return tile_rows(self.rows.shape[0], width * self.features.element_size(), self.device, unit)

    def image_step(self, width: int) -> int:
        """The same for whole images."""
        return self.step(width, self.image)

    def take(self, name: str, rows: int, width: int) -> Tensor:
        return self.scratch.take(name, rows, width, self.dtype)

    def cast(self, weight: Tensor) -> Tensor:
        return as_type(weight, self.dtype)


def _conv1_forward(
    run: _Pass, x: Tensor, norm: FoldedNorm, weight: Tensor, out: Tensor, moments: Moments | None
) -> None:
    """``out = relu(norm(x)) W1ᵀ``."""
    transposed = run.cast(weight).flatten(1).t()
    step = run.step(x.shape[1])
    scratch = run.take("activations", step, x.shape[1])
    for x_tile, b_tile in zip(parts(x, step), parts(out, step), strict=True):
        z = norm.relu(x_tile, out=fit(scratch, x_tile.shape[0]))
        torch.mm(z, transposed, out=b_tile)
        if moments is not None:
            moments.add(b_tile)


def _forward(buffer: FeatureBuffer, channels: int, call: BlockCall, parameters: Sequence[Tensor], keep: bool):
    """Fill the buffer behind its first ``channels`` channels; returns the output and what the backward needs."""
    run = _Pass(buffer.tensor)
    rows, count = run.rows, run.rows.shape[0]
    statistics = FeatureStatistics(buffer.tensor, call.group)
    exchange = statistics.exchange
    moves = []

    def fold(norm: NormCall, gamma: Tensor, beta: Tensor, moments: Moments | None = None) -> FoldedNorm:
        used = None
        if norm.batch:
            check_count(exchange.count, tuple(buffer.tensor.shape))
            used = statistics.first(channels) if moments is None else exchange.statistics(moments.statistics())
            moves.append((norm.module, used))
        return norm.fold(gamma, beta, used)

    readers = [layer.norm1 for layer in call.layers] + ([call.tail.norm] if call.tail else [])
    last_reader = max((i for i, norm in enumerate(readers) if norm.batch), default=0)
    kept = _Kept(exchange, [])
    groups, tail_parameters = call.split(parameters)
    for i, (layer, p) in enumerate(zip(call.layers, groups, strict=True)):
        layer_kept = _KeptLayer(fold(layer.norm1, p[0], p[1]))
        source, norm = columns(rows, 0, channels), layer_kept.norm1
        if layer.norm2 is not None:
            width = p[2].shape[0]
            if keep and call.keep_conv1:
                b = layer_kept.conv1 = torch.empty((count, width), dtype=run.dtype, device=run.device)
            else:
                b = run.take("b", count, width)
            moments = Moments() if layer.norm2.batch else None
            _conv1_forward(run, source, norm, p[2], b, moments)
            layer_kept.norm2 = fold(layer.norm2, p[3], p[4], moments)
            source, norm = b, layer_kept.norm2

        k, width = p[-1].shape[:2]
        step = run.image_step(width)
        noise = itertools.repeat(None)
        if layer.drop_rate:
            if keep:
                layer_kept.random_state = _random_state(run.device)
            shape = (run.features.shape[0], k, *run.sizes)
            noise = as_rows(_dropout_noise(shape, run.dtype, run.device, layer.drop_rate, None))
            noise = parts(noise, step)
        weight = forward_weight(run.cast(p[-1]))
        scratch = run.take("activations", step, width)
        new = columns(rows, channels, channels + k)
        moments = Moments() if i < last_reader and not layer.drop_rate else None
        for x, y, factor in zip(parts(source, step), parts(new, step), noise):  # noqa: B905 - noise may repeat
            a = norm.relu(x, out=fit(scratch, x.shape[0]))
            conv = conv_forward(a, weight, run.sizes)
            if factor is None:
                y.copy_(columns(conv, 0, k))
                if moments is not None:
                    moments.add(conv)  # contiguous and hot, unlike y
            else:
                torch.mul(columns(conv, 0, k), factor, out=y)
            del conv  # before the next tile's is made
        if moments is not None:
            statistics.extend(channels, k, moments.statistics())
        channels += k
        kept.layers.append(layer_kept)

    if call.tail is not None:
        kept.tail = fold(call.tail.norm, *tail_parameters[:2])
    move_running_statistics(moves, exchange.count)
    if call.tail is None:
        return buffer.first(channels), kept
    if call.tail.pool is None and not call.tail.channels_last:
        out = torch.empty(run.features.shape, dtype=run.dtype, device=run.device)
        step = run.image_step(channels)
        scratch = run.take("activations", step, channels)
        for x, images in zip(parts(rows, step), out.split(step // run.image), strict=True):
            images.copy_(as_images(kept.tail.relu(x, out=fit(scratch, x.shape[0])), run.sizes))
        return out, kept
    if call.tail.pool is None:
        out = channels_last_empty(run.features, channels)
        out_rows = as_rows(out)
        step = run.step(channels)
        for x, z in zip(parts(rows, step), parts(out_rows, step), strict=True):
            kept.tail.relu(x, out=z)
        return out, kept
    pooling = _Pooling(run, call.tail.pool)
    weight = run.cast(tail_parameters[2]).flatten(1).t() / pooling.window
    out = torch.empty(
        (run.features.shape[0], *pooling.sizes, weight.shape[1]), dtype=run.dtype, device=run.device
    ).movedim(-1, 1)
    out_rows = as_rows(out)
    step = run.image_step(channels)
    scratch = run.take("activations", step, channels)
    for x, y in zip(parts(rows, step), parts(out_rows, pooling.pooled(step)), strict=True):
        z = kept.tail.relu(x, out=fit(scratch, x.shape[0]))
        torch.mm(pooling.sums(z), weight, out=y)
    return out, kept


class _Pooling:
    """Average pooling without overlap on the rows of whole images, as sums; the division is folded into the weight."""

    def __init__(self, run: _Pass, pool: tuple[int, ...]):
        self._run, self._pool = run, pool
        self.sizes = tuple(s // p for s, p in zip(run.sizes, pool, strict=True))
        self.image = math.prod(self.sizes)
        self.window = math.prod(pool)
        self.covers_all = all(s % p == 0 for s, p in zip(run.sizes, pool, strict=True))

    def pooled(self, rows: int) -> int:
        """How many rows that many rows of whole images become."""
        return rows // self._run.image * self.image

    def windows(self, z: Tensor) -> list[Tensor]:
        """Views of the rows ``z``, one for every place in the window: ``(n, *pooled sizes, C)`` each."""
        views = [z.view(-1, *self._run.sizes, z.shape[1])]
        for dim, (size, step) in enumerate(zip(self.sizes, self._pool, strict=True), start=1):
            views = [
                v.narrow(dim, 0, size * step).unflatten(dim, (size, step)).select(dim + 1, place)
                for v in views
                for place in range(step)
            ]
        return views

    def sums(self, z: Tensor) -> Tensor:
        """The sum over each window, as rows, added up in float32 or wider."""
        first, *others = self.windows(z)
        if not others:
            return z
        wide = torch.promote_types(z.dtype, torch.float32)
        sums = self._run.scratch.take("pooled", first[..., 0].numel(), z.shape[1], wide)
        images = sums.view(first.shape)
        torch.add(first, others[0], out=images)
        for other in others[1:]:
            images.add_(other)
        return as_type(sums, z.dtype)

    def mask_gradient(self, dp: Tensor, z: Tensor) -> Tensor:
        """``dz`` in the place of ``z``: the gradient of each window's sum where z is positive, else zero."""
        if not self.covers_all:
            rest = z.view(-1, *self._run.sizes, z.shape[1])
            for dim, (size, step) in enumerate(zip(self.sizes, self._pool, strict=True), start=1):
                rest.narrow(dim, size * step, rest.shape[dim] - size * step).zero_()
        windows = self.windows(z)
        dp = dp.view(windows[0].shape)
        for window in windows:
            masked_gradient(dp, window, 0, grad_input=window)
        return z


class _GradientSums:
    """``dbeta`` and ``gamma dgamma`` of one BatchNorm, summed over the tiles."""

    def __init__(self, norm: FoldedNorm, short_cut: bool):
        self._norm, self._short_cut = norm, short_cut
        self.dbeta: Tensor | None = None
        self._direct: Tensor | None = None

    def add(self, dz: Tensor, x: Tensor) -> None:
        """A tile's masked gradient, and the rows the norm read."""
        dbeta = dz.sum(0, dtype=self._norm.mean.dtype)
        self.dbeta = dbeta if self.dbeta is None else self.dbeta.add_(dbeta)
        if not self._short_cut:
            direct = torch.sub(x, self._norm.mean).mul_(dz).sum(0)
            self._direct = direct if self._direct is None else self._direct.add_(direct)

    def finish(self, product: Tensor | None) -> tuple[Tensor, Tensor]:
        """``dgamma`` and ``gamma dgamma``, given ``Σ W dW`` per channel for the short cut."""
        gamma = self._norm.gamma
        if self._direct is not None:
            dgamma = self._direct.mul_(self._norm.r)
            return dgamma, gamma * dgamma
        gamma_dgamma = product.addcmul(self._norm.beta, self.dbeta, value=-1)
        return gamma_dgamma / gamma, gamma_dgamma


def _accurate_short_cuts(run: _Pass, norms: Sequence[FoldedNorm]) -> set[FoldedNorm]:
    """The norms whose ``gamma dgamma`` may come from the weight's gradient; asked once, as answers are waited for."""
    # On an accelerator the wait would be long, and the direct sums cost it little.
    if run.device.type != "cpu" or run.dtype not in (torch.float32, torch.float64):
        return set()
    if is_fake(run.features):  # no values, hence none in doubt: what runs is what mostly does
        return set(norms)
    gamma, beta = torch.cat([n.gamma for n in norms]), torch.cat([n.beta for n in norms])
    doubtful = gamma.abs() <= beta.abs() * LEAST_GAMMA_OVER_BETA
    if not doubtful.any():
        return set(norms)
    ends = torch.tensor(list(itertools.accumulate(n.gamma.shape[0] for n in norms)))
    excluded = set(torch.bucketize(torch.nonzero(doubtful).flatten(), ends, right=True).unique().tolist())
    return {norm for i, norm in enumerate(norms) if i not in excluded}


class _Backward:
    """The backward pass of one block, from its tail to its first layer.

    Args:
        features: F, as the forward pass left it.
        channels: C_0.
        call: the layers.
        parameters: their tensors.
        kept: what the forward pass left.
        needed: for the input and for every parameter, whether its gradient is wanted.
    """

    def __init__(self, features, channels, call, parameters, kept, needed):
        self.run = _Pass(features)
        self.call, self.kept = call, kept
        self.groups, self.tail_parameters = call.split(parameters)
        self.needs, self.tail_needs = call.split(needed[1:])
        # Gradients of features are wanted from the first one that depends on something trainable: the input, or the
        # output of the first layer with a parameter to train. Columns before it have no place in G.
        self.first = 0
        starts = [channels]
        for p in self.groups:
            starts.append(starts[-1] + p[-1].shape[0])
        self.starts = starts
        if not needed[0]:
            trainable = [start for start, need in zip(starts, self.needs, strict=False) if any(need)]
            self.first = trainable[0] if trainable else starts[-1]
        total = starts[-1]
        self.G = channels_last_empty(features, total - self.first)
        self.g_rows = as_rows(self.G)
        dtype = torch.promote_types(features.dtype, torch.float32)
        self.slope = torch.zeros(total, dtype=dtype, device=features.device)
        self.level = torch.zeros_like(self.slope)
        norms = [n for k in kept.layers for n in (k.norm1, k.norm2) if n is not None]
        readers = [norm for norm in (*(k.norm1 for k in kept.layers), kept.tail) if norm is not None and norm.batch]
        # Batch means of the channels; of those that no norm has read there is none, and no correction.
        self.mean = max((norm.mean for norm in readers), key=len, default=None)
        self.accurate = _accurate_short_cuts(self.run, norms if kept.tail is None else [*norms, kept.tail])

    def gradient(self, start: int, stop: int) -> Tensor:
        """The columns of G for these channels."""
        return columns(self.g_rows, start - self.first, stop - self.first)

    def defer(self, norm: FoldedNorm, sums: _GradientSums, gamma_dgamma: Tensor) -> None:
        """Note BatchNorm's correction for the channels it read; :meth:`write_gradient` applies it."""
        if norm.batch:
            slope, level = self.slope[: len(norm.mean)], self.level[: len(norm.mean)]
            norm.add_correction(slope, level, sums.dbeta, gamma_dgamma, self.kept.exchange.count)

    def write_gradient(self, start: int, stop: int, step: int) -> Iterator[Callable[[Tensor], Tensor]]:
        """For every tile, what writes the complete gradient of channels whose readers are done to a given place."""
        corrects = self.mean is not None and stop <= self.mean.shape[0]
        if corrects:
            slope, level = self.kept.exchange.sums(self.slope[start:stop], self.level[start:stop])
            level.addcmul_(slope, self.mean[start:stop], value=-1)
        for x, g in zip(
            parts(columns(self.run.rows, start, stop), step), parts(self.gradient(start, stop), step), strict=True
        ):

            def write(out: Tensor, x: Tensor = x, g: Tensor = g) -> Tensor:
                if not corrects:  # nothing to add, and zero times an infinite feature would not be nothing
                    return out.copy_(g.view(out.shape))
                return torch.addcmul(level, x.view(out.shape), slope, out=out).add_(g.view(out.shape))

            yield write

    def tail(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Fill G from the gradient of what the tail gave; returns the tail's parameter gradients."""
        run, call, total = self.run, self.call.tail, self.starts[-1]
        if call is None:
            self.G.copy_(grad[:, self.first :])
            return ()
        norm = self.kept.tail
        need_gamma, need_beta, *need_weight = self.tail_needs
        need_dx = self.first < total
        grad_rows = as_rows(grad)
        pooling = None
        dw = None
        if call.pool is not None:
            pooling = _Pooling(run, call.pool)
            weight = run.cast(self.tail_parameters[2]).flatten(1) / pooling.window
        need_sums = need_gamma or need_beta or (need_dx and norm.batch)
        sums = _GradientSums(norm, any(need_weight) and norm in self.accurate) if need_sums else None
        step = run.image_step(total)
        scratch = run.take("activations", step, total)
        grad_step = step if pooling is None else pooling.pooled(step)
        for x, g, dout in zip(
            parts(run.rows, step), parts(self.g_rows, step), parts(grad_rows, grad_step), strict=True
        ):
            z = norm.relu(x, out=fit(scratch, x.shape[0]))
            if pooling is None:
                dz = masked_gradient(dout, z, 0, grad_input=z)
            else:
                if need_weight[0]:
                    dw = add_product(dw, dout.t(), pooling.sums(z))
                if not (need_sums or need_dx):
                    continue
                dp = torch.mm(dout, weight, out=run.take("gradients", dout.shape[0], total))
                dz = pooling.mask_gradient(dp, z)
            if sums is not None:
                sums.add(dz, x)
            if need_dx:
                torch.mul(dz[:, self.first :], norm.scale[self.first :], out=g)
        gradients = [None, None]
        if sums is not None:
            dgamma, gamma_dgamma = sums.finish(None if dw is None else (dw * weight).sum(0))
            gradients = [dgamma if need_gamma else None, sums.dbeta if need_beta else None]
            if need_dx:
                self.defer(norm, sums, gamma_dgamma)
        if pooling is not None:
            gradients.append(None if dw is None else as_kernel(dw / pooling.window, self.tail_parameters[2]))
        return tuple(gradients)

    def layer(self, i: int) -> tuple[Tensor | None, ...]:
        """One layer, whose readers are all done: adds into G what its input gets; returns its parameters' gradients."""
        run, call, kept, p = self.run, self.call.layers[i], self.kept.layers[i], self.groups[i]
        start = self.starts[i]
        need_dx = self.first < start
        need = list(self.needs[i])
        if not (need_dx or any(need)):
            return (None,) * len(need)
        if call.norm2 is None:
            return self._neighbourhood(i, columns(run.rows, 0, start), kept.norm1, p, need, need_dx, sink=None)

        width = p[2].shape[0]
        b = kept.conv1
        if b is None:
            b = run.take("b", run.rows.shape[0], width)
            _conv1_forward(run, columns(run.rows, 0, start), kept.norm1, p[2], b, None)
        need_db = need_dx or any(need[:3])
        da = run.take("da", run.rows.shape[0], width) if need_db else None
        second = self._neighbourhood(i, b, kept.norm2, p[3:], need[3:], need_db, sink=da)
        first = self._conv1(start, kept.norm1, p[:3], need[:3], need_dx, kept.norm2, b, da) if need_db else (None,) * 3
        return first + second

    def _neighbourhood(self, i, source, norm, p, need, need_dx, sink) -> tuple[Tensor | None, ...]:
        """``conv3x3(relu(norm(source)))`` backwards.

        If the source is the buffer itself, ``scale dz`` is added into G. Else ``dz`` is written to ``sink``, and what
        :meth:`_conv1` needs to complete it is left in ``self.correction2``.
        """
        run, call = self.run, self.call.layers[i]
        gamma, beta, weight = p
        need_gamma, need_beta, need_weight = need
        k, width = weight.shape[:2]
        need_sums = need_gamma or need_beta or (need_dx and norm.batch)
        need_input = need_sums or need_dx
        conv = ConvBackward(run.cast(weight), run.sizes, run.scratch, need_input)
        sums = _GradientSums(norm, need_weight and norm in self.accurate) if need_sums else None
        step = run.image_step(width)
        noise = itertools.repeat(None)
        if call.drop_rate:
            shape = (run.features.shape[0], k, *run.sizes)
            state = self.kept.layers[i].random_state
            noise = as_rows(_dropout_noise(shape, run.dtype, run.device, call.drop_rate, state))
            noise = parts(noise, step)
        scratch = run.take("activations", step, width)
        # Where dz goes, tile by tile: to the sink, or, scaled, into G.
        places = itertools.repeat(None)
        if sink is not None or need_dx:
            places = parts(self.gradient(self.first, width) if sink is None else sink, step)
        write_own = self.write_gradient(self.starts[i], self.starts[i + 1], step)
        for x, write, factor, place in zip(parts(source, step), write_own, noise, places):  # noqa: B905 - some repeat
            dy, inside = conv.bordered(x.shape[0] // run.image)
            write(inside)
            if factor is not None:
                inside.mul_(factor.view(inside.shape))
            a = norm.relu(x, out=fit(scratch, x.shape[0]))
            if need_weight:
                conv.add_weight(dy, a)
            if not need_input:
                continue
            da = conv.input(dy, inside, a)
            dz = masked_gradient(da, a, 0, grad_input=a if sink is None else place)
            if sums is not None:
                sums.add(dz, x)
            if sink is None and need_dx:
                place.addcmul_(dz[:, self.first :], norm.scale[self.first :])
            del da, dz  # before the next tile's are made
        dweight = conv.weight() if need_weight else None
        dgamma = gamma_dgamma = None
        if sums is not None:
            product = None
            if need_weight:
                product = (dweight * weight).sum(tuple(d for d in range(weight.dim()) if d != 1))
            dgamma, gamma_dgamma = sums.finish(product)
            if need_dx:
                if sink is None:
                    self.defer(norm, sums, gamma_dgamma)
                elif norm.batch:
                    self.correction2 = norm.correction(sums.dbeta, gamma_dgamma, self.kept.exchange)
        return dgamma if need_gamma else None, sums.dbeta if need_beta else None, dweight

    def _conv1(self, start, norm, p, need, need_dx, norm2, b, da) -> tuple[Tensor | None, ...]:
        """``conv1x1(relu(norm(X)))`` backwards, from ``da``, the masked gradient at the second BatchNorm's output."""
        run = self.run
        gamma, beta, weight = p
        need_gamma, need_beta, need_weight = need
        need_sums = need_gamma or need_beta or (need_dx and norm.batch)
        matrix = run.cast(weight).flatten(1)
        dw = None
        sums = _GradientSums(norm, need_weight and norm in self.accurate) if need_sums else None
        width, first = matrix.shape[0], self.first
        step = run.step(start)
        z_scratch, dz_scratch = run.take("activations", step, start), run.take("gradients", step, start)
        db_scratch = run.take("db", step, width)
        places = parts(self.gradient(first, start), step) if need_dx else itertools.repeat(None)
        sources = (parts(columns(run.rows, 0, start), step), parts(b, step), parts(da, step), places)
        for x, b_tile, da_tile, g in zip(*sources):  # noqa: B905 - places may repeat
            rows = x.shape[0]
            db = fit(db_scratch, rows)
            if norm2.batch:
                slope, level = self.correction2
                torch.addcmul(level, b_tile, slope, out=db).addcmul_(da_tile, norm2.scale)
            else:
                torch.mul(da_tile, norm2.scale, out=db)
            z = norm.relu(x, out=fit(z_scratch, rows))
            if need_weight:
                dw = add_product(dw, z.t(), db)
            if not (need_sums or need_dx):
                continue
            dz = torch.mm(db, matrix, out=fit(dz_scratch, rows))
            masked_gradient(dz, z, 0, grad_input=dz)
            if sums is not None:
                sums.add(dz, x)
            if need_dx:
                g.addcmul_(dz[:, first:] if first else dz, norm.scale[first:])
        if need_weight:
            dw = dw.t().contiguous()  # the product is faster the other way round
        dgamma = None
        if sums is not None:
            product = (dw * matrix).sum(0) if need_weight else None
            dgamma, gamma_dgamma = sums.finish(product)
            if need_dx:
                self.defer(norm, sums, gamma_dgamma)
        return (
            dgamma if need_gamma else None,
            sums.dbeta if need_beta else None,
            as_kernel(dw, weight) if need_weight else None,
        )

    def input(self) -> Tensor:
        """The complete gradient of the block's input."""
        dx = channels_last_empty(self.run.features, self.starts[0])
        step = self.run.step(self.starts[0])
        for write, out in zip(self.write_gradient(0, self.starts[0], step), parts(as_rows(dx), step), strict=True):
            write(out)
        return dx


class _DenseBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer, call, *parameters):
        with torch.autocast(x.device.type, enabled=False):
            out, kept = _forward(buffer, x.shape[1], call, parameters, keep=True)
        conv1 = [layer.conv1 for layer in kept.layers]
        for layer in kept.layers:
            layer.conv1 = None  # saved as tensors, where hooks on saved tensors see them
        # The finished block leaves the library's hands as an output. Whoever edits it in place edits what the backward
        # pass reads; kept as a saved tensor, autograd notices.
        exposed = out if call.tail is None else None
        ctx.save_for_backward(x, buffer.tensor, exposed, *parameters, *conv1)
        ctx.call, ctx.kept = call, kept
        return out

    @staticmethod
    def backward(ctx, grad):
        x, features, _, *saved = ctx.saved_tensors
        layers = ctx.kept.layers
        parameters, conv1 = saved[: -len(layers)], saved[-len(layers) :]
        needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        if must_rebuild(grad):

            def reference(x, *parameters):
                with torch.autocast(x.device.type, enabled=False):
                    return dense_block_reference(x, ctx.call, parameters, ctx.kept)

            dx, *rest = rebuilt_gradients(reference, (x, *parameters), needed, grad)
            return dx, None, None, *rest

        layers = [_KeptLayer(k.norm1, k.norm2, b, k.random_state) for k, b in zip(layers, conv1, strict=True)]
        kept = _Kept(ctx.kept.exchange, layers, ctx.kept.tail)
        with torch.autocast(x.device.type, enabled=False):
            run = _Backward(features, x.shape[1], ctx.call, parameters, kept, needed)
            tail = run.tail(grad)
            del grad
            run.run.scratch.clear()  # a tail works on all channels of whole images, the layers on less
            rest = []
            for i in reversed(range(len(layers))):
                rest[:0] = run.layer(i)
            dx = run.input() if needed[0] else None
        gradients = [
            None if g is None else as_type(g, p.dtype) for g, p in zip((*rest, *tail), parameters, strict=True)
        ]
        return dx, None, None, *gradients


@overridable
def fused_block(x: Tensor, call: BlockCall, parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A dense block and its tail as one function; equivalent to :func:`dense_block_reference`.

    Args:
        x: the block's input.
        call: its layers and tail, and whether conv1's outputs are kept (fused) or rebuilt (lean).
        parameters: gamma, beta, weight of every norm and convolution, in order.
        dtype: what the features are stored and the products computed in.

    Shape:
        - x: ``(N, C_0, H, W)`` or ``(N, C_0, D, H, W)``
        - returns: ``(N, C_0 + L k, …)``, or what the tail makes of it
    """
    groups, _ = call.split(parameters)
    buffer = FeatureBuffer(x, x.shape[1] + sum(p[-1].shape[0] for p in groups), dtype)
    first = append(None, x, buffer)
    if torch.is_grad_enabled() and (first.requires_grad or any(p.requires_grad for p in parameters)):
        return _DenseBlock.apply(first, buffer, call, *parameters)
    with torch.autocast(x.device.type, enabled=False):
        return _forward(buffer, x.shape[1], call, parameters, keep=False)[0]


def layer_call(layer: nn.Module) -> tuple[LayerCall, list[Tensor]]:
    """How a dense layer runs just now, and its parameters."""

    def parameters(norm: nn.Module, conv: nn.Module) -> list[Tensor]:
        return [tensor(norm, "weight"), tensor(norm, "bias"), tensor(conv, "weight")]

    drop_rate = layer.drop_rate if layer.training and layer.drop_rate > 0 else 0.0
    norm, conv = part(layer, "norm1"), part(layer, "conv1")
    first, taken = NormCall.of(norm), parameters(norm, conv)
    if not layer.has_bottleneck:
        return LayerCall(first, None, drop_rate), taken
    norm, conv = part(layer, "norm2"), part(layer, "conv2")
    return LayerCall(first, NormCall.of(norm), drop_rate), taken + parameters(norm, conv)

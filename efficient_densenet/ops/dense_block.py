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

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .batch_norm import (
    Exchange, Statistics, batch_norm_reference, check_count, move_running_statistics, synchronised_over,
    uses_batch_statistics,
)  # fmt: skip
from .conv3x3 import as_images
from .device import products_as_convolutions
from .layout import copy_in_format
from .modules import Parts, tensor
from .overrides import overridable
from .passes import (
    Correction, FoldedNorm, Gradients, Need, Partial, Pending, Rebuild, implementation, merge, wide_type,
)  # fmt: skip
from .rebuild import must_rebuild, rebuilt_gradients
from .storage import FeatureBuffer, aligned_empty, append, as_rows, channels_last_empty, columns
from .tiles import Scratch, tile_rows


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


@dataclass(frozen=True)
class LayerCall:
    """One dense layer in this forward: BN-ReLU-conv1x1-BN-ReLU-conv3x3, or BN-ReLU-conv3x3 where ``norm2`` is None."""

    norm1: NormCall
    norm2: NormCall | None
    drop_rate: float
    factor: Tensor | None = None  # dropout's factors, ``(N, k, *spatial)``, where they have been drawn already
    channel_wise: bool = False  # whether dropout drops whole channels of an image
    channels_last: bool = False  # whether its factors are drawn in the order of such memory

    @property
    def num_parameters(self) -> int:
        return 4 if self.norm2 is None else 8


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
    """A dense block in this forward.

    ``new_first``: new features stand before all that a layer has read, not behind. ``new_only``: the input is no part
    of what the block gives; without a tail.
    """

    layers: tuple[LayerCall, ...]
    tail: TailCall | None
    keep_conv1: bool
    new_first: bool = False
    new_only: bool = False

    @property
    def norms(self) -> list[NormCall]:
        """Its norms in order, the tail's included."""
        norms = [norm for layer in self.layers for norm in (layer.norm1, layer.norm2) if norm is not None]
        return norms if self.tail is None else [*norms, self.tail.norm]

    @property
    def batch_norms(self) -> list[NormCall]:
        """Those of its norms that take batch statistics."""
        return [norm for norm in self.norms if norm.batch]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes over which its norms, all of them, take their batch statistics."""
        return next((norm.group for norm in self.batch_norms), None)

    @property
    def last_reader(self) -> int:
        """The last layer that reads the block's features through batch statistics, the tail counting as one; or -1."""
        readers = [layer.norm1 for layer in self.layers] + ([self.tail.norm] if self.tail else [])
        return max((i for i, norm in enumerate(readers) if norm.batch), default=-1)

    def split(self, parameters: Sequence) -> tuple[list[Sequence], Sequence]:
        """The parameters by layer, and the tail's: gamma, beta, weight, bias of a norm and a convolution each.

        A tail without convolution has two; what a norm or convolution lacks is None.
        """
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

    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(x.dtype)
        return conv(x, weight.to(x.dtype), bias, padding=tuple(t // 2 for t in weight.shape[2:]))

    groups, tail_parameters = call.split(parameters)
    features = [x]
    for layer, p, kept in zip(call.layers, groups, folded.layers, strict=True):
        y = norm_relu(torch.cat(features, 1), layer.norm1, *p[:2], kept.norm1)
        if layer.norm2 is not None:
            y = norm_relu(convolved(y, *p[2:4]), layer.norm2, *p[4:6], kept.norm2)
        y = convolved(y, *p[-2:])
        if layer.drop_rate:
            y = y * draw_dropout(layer, y.shape, y.dtype, y.device, kept.random_state)
        elif layer.factor is not None:
            y = y * layer.factor
        features.insert(0 if call.new_first else len(features), y)
    if call.new_only:
        features.pop(-1 if call.new_first else 0)
    out = torch.cat(features, 1)
    if call.tail is not None:
        out = norm_relu(out, call.tail.norm, *tail_parameters[:2], folded.tail)
        if call.tail.pool is not None:
            pool = F.avg_pool2d if x.dim() == 4 else F.avg_pool3d
            out = pool(convolved(out, *tail_parameters[2:]), call.tail.pool)
    return out


def _random_devices(device: torch.device) -> list[torch.device]:
    """The device, if dropout on it draws from a generator of its own; without CUDA its tensors have no data to draw."""
    return [device] if device.type == "cuda" and torch.cuda.is_initialized() else []


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if _random_devices(device) else torch.get_rng_state()


def draw_dropout(
    layer: LayerCall, shape: Sequence[int], dtype: torch.dtype, device: torch.device, state: Tensor | None = None
) -> Tensor:
    """Dropout's factors, 0 or 1 / (1 - rate), drawn as by the plain layer; or as before.

    Args:
        layer: says how.
        shape: of the new features, ``(N, k, *spatial)``.
        dtype: of these.
        device: of these.
        state: the generator's, from which they were drawn before.

    Shape:
        - returns: ``(N, k, *spatial)``, or ``(N, k, 1, …)`` of whole channels
    """
    rate = layer.drop_rate
    if layer.channel_wise:
        shape = (*shape[:2], *(1 for _ in shape[2:]))
    ones = torch.ones(shape, dtype=dtype, device=device)
    if layer.channels_last and not layer.channel_wise:
        ones = copy_in_format(ones, True)
    if state is None:
        return F.dropout(ones, rate)
    devices = _random_devices(device)
    with torch.random.fork_rng(devices):
        torch.cuda.set_rng_state(state, device) if devices else torch.set_rng_state(state)
        return F.dropout(ones, rate)


def with_factors(call: BlockCall, x: Tensor, parameters: Sequence[Tensor], dtype: torch.dtype) -> BlockCall:
    """The same call with dropout's factors drawn, so that nobody has to draw them again; the same values."""
    layers = tuple(
        dataclasses.replace(
            layer, drop_rate=0.0,
            factor=draw_dropout(layer, (x.shape[0], p[-2].shape[0], *x.shape[2:]), dtype, x.device),
        ) if layer.drop_rate else layer
        for layer, p in zip(call.layers, call.split(parameters)[0], strict=True)
    )  # fmt: skip
    return dataclasses.replace(call, layers=layers)


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being made, in which a generator's state can be neither read nor set."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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
    statistics: Tensor  # mean and variance of the block's channels, and behind them of every conv1's
    tail: FoldedNorm | None = None


class _Geometry:
    """A block's buffer as a matrix, and which of its columns, or of the statistics', belong to whom.

    The features of a layer stand behind what it has read; with ``new_first`` before it, the input at the end.
    """

    def __init__(self, features: Tensor, channels: int, call: BlockCall, groups: Sequence[Sequence[Tensor]]):
        self.features, self.rows = features, as_rows(features)
        self.sizes = tuple(features.shape[2:])
        self.dtype, self.device = features.dtype, features.device
        self.passes = implementation(self.device, self.dtype)
        self.scratch = Scratch(self.device)
        self._read = list(itertools.accumulate((p[-2].shape[0] for p in groups), initial=channels))
        self.total, self._new_first = self._read[-1], call.new_first
        widths = (0 if layer.norm2 is None else p[2].shape[0] for layer, p in zip(call.layers, groups, strict=True))
        self._inner = list(itertools.accumulate(widths, initial=self.total))
        self.channels = self._inner[-1]
        # The channels that norms read through the batch's statistics.
        self.through_statistics = self.read(call.last_reader) if call.last_reader >= 0 else (0, 0)

    def read(self, i: int) -> tuple[int, int]:
        """The channels that layer ``i`` reads; the tail counts as a layer."""
        return (self.total - self._read[i], self.total) if self._new_first else (0, self._read[i])

    def own(self, i: int) -> tuple[int, int]:
        """The channels that layer ``i`` writes."""
        start, stop = self._read[i], self._read[i + 1]
        return (self.total - stop, self.total - start) if self._new_first else (start, stop)

    def new(self) -> tuple[int, int]:
        """The channels that layers write."""
        return (0, self.read(0)[0]) if self._new_first else (self._read[0], self.total)

    def has_statistics(self, start: int, stop: int) -> bool:
        """Whether norms read these channels of the block's features through the batch's statistics."""
        first, end = self.through_statistics
        return first <= start and stop <= end

    def inner(self, i: int) -> tuple[int, int]:
        """The channels between its convolutions, which stand behind the block's in its statistics."""
        return self._inner[i], self._inner[i + 1]

    def matrix(self, name: str, width: int) -> Tensor:
        """Working memory with a row for every row of the buffer."""
        return self.scratch.take(name, self.rows.shape[0], width, self.dtype)

    def factor(self, i: int, layer: LayerCall, state: Tensor | None) -> Tensor | None:
        """Dropout's factors for what layer ``i`` writes, as the passes take them, ``(n, hw, k)`` or ``(n, 1, k)``."""
        factor = layer.factor
        if layer.drop_rate:
            start, stop = self.own(i)
            shape = (self.features.shape[0], stop - start, *self.sizes)
            factor = draw_dropout(layer, shape, self.dtype, self.device, state)
        return None if factor is None else factor.flatten(2).transpose(1, 2)


class _Forward:
    """The forward pass of one block, from its first layer to its tail.

    Args:
        buffer: holds the input in its first channels; the layers' outputs are written behind.
        channels: C_0.
        call: the layers.
        parameters: their tensors.
        keep: whether a backward pass will follow.
    """

    def __init__(self, buffer: FeatureBuffer, channels: int, call: BlockCall, parameters: Sequence[Tensor], keep: bool):
        self.buffer, self.call, self.keep = buffer, call, keep
        self.groups, self.tail_parameters = call.split(parameters)
        self.of = of = _Geometry(buffer.tensor, channels, call, self.groups)
        self.exchange = Exchange(call.group, of.rows.shape[0], of.device)
        channels = of.channels if call.batch_norms else 0
        self.statistics = torch.empty((2, channels), dtype=wide_type(of.dtype), device=of.device)
        self.new: tuple[int, Partial] | None = None  # statistics that :meth:`fold` is to finish, and where they are
        self.moves: list[tuple[nn.Module, Statistics]] = []
        self.kept = _Kept(self.exchange, [], self.statistics)

    def run(self) -> Tensor:
        of = self.of
        start, stop = of.read(0)
        if of.has_statistics(start, stop):
            place = self.statistics[:, start:stop]
            self.take(start, place, of.passes.statistics(columns(of.rows, start, stop), place, of.scratch))
        for i, (layer, p) in enumerate(zip(self.call.layers, self.groups, strict=True)):
            self.kept.layers.append(self.layer(i, layer, p))
        return self.tail()

    def layer(self, i: int, layer: LayerCall, p: Sequence[Tensor]) -> _KeptLayer:
        """Layer ``i``, from the columns it reads to those it writes."""
        of, passes = self.of, self.of.passes
        (start, stop), (own_start, own_stop) = of.read(i), of.own(i)
        source, y = columns(of.rows, start, stop), columns(of.rows, own_start, own_stop)
        kept = _KeptLayer(self.fold(layer.norm1, p[0], p[1], start, stop))
        norm = kept.norm1
        if layer.norm2 is not None:
            start, stop = of.inner(i)
            if self.keep and self.call.keep_conv1:
                b = kept.conv1 = torch.empty((of.rows.shape[0], stop - start), dtype=of.dtype, device=of.device)
            else:
                b = of.matrix("b", stop - start)
            place = self.statistics[:, start:stop] if layer.norm2.batch else None
            self.take(start, place, passes.conv1x1_forward(source, norm, *p[2:4], b, place, of.scratch))
            kept.norm2 = norm = self.fold(layer.norm2, p[4], p[5], start, stop)
            source = b
        if layer.drop_rate and self.keep:
            kept.random_state = _random_state(of.device)
        factor = of.factor(i, layer, None)
        place = self.statistics[:, own_start:own_stop] if of.has_statistics(own_start, own_stop) else None
        new = passes.conv3x3_forward(source, norm, *p[-2:], factor, of.sizes, y, place, of.scratch)
        self.take(own_start, place, new)
        return kept

    def tail(self) -> Tensor:
        """What the block gives: its features, or what the tail makes of them."""
        of, tail = self.of, self.call.tail
        if tail is not None:
            start, stop = of.read(len(self.groups))
            norm = self.kept.tail = self.fold(tail.norm, *self.tail_parameters[:2], start, stop)
        move_running_statistics(self.moves, self.exchange.count)
        if self.call.new_only:
            start, stop = of.new()
            return channels_last_empty(of.features, stop - start).copy_(of.features.narrow(1, start, stop - start))
        if tail is None:
            return self.buffer.first(of.total)
        if tail.pool is None and not tail.channels_last:
            out = torch.empty(of.features.shape, dtype=of.dtype, device=of.device)
            image = math.prod(of.sizes)
            step = tile_rows(of.rows.shape[0], of.total * of.rows.element_size(), of.device, image)
            for x, images in zip(of.rows.split(step), out.split(step // image), strict=True):
                z = of.scratch.take("activations", x.shape[0], of.total, of.dtype)
                of.passes.norm_relu(x, norm, z, of.scratch)
                images.copy_(as_images(z, of.sizes))
            return out
        if tail.pool is None:
            out = channels_last_empty(of.features, of.total)
            of.passes.norm_relu(of.rows, norm, as_rows(out), of.scratch)
            return out
        weight, bias = self.tail_parameters[2:]
        pooled = (size // window for size, window in zip(of.sizes, tail.pool, strict=True))
        shape = (of.features.shape[0], *pooled, weight.shape[0])
        out = torch.empty(shape, dtype=of.dtype, device=of.device)
        rows = out.view(-1, weight.shape[0])
        of.passes.transition_forward(of.rows, norm, weight, bias, tail.pool, of.sizes, rows, of.scratch)
        return out.movedim(-1, 1)

    def take(self, start: int, place: Tensor | None, new: Partial | None) -> None:
        """A pass has taken statistics: they stand in ``place``, from ``start`` on, or ``new`` is still to be merged."""
        if self.exchange.group is not None and place is not None:
            if new is not None:
                merge(new, *place.unbind(0))
            self.exchange.statistics(place)
        elif new is not None:
            self.new = start, new

    def fold(self, norm: NormCall, gamma: Tensor, beta: Tensor, start: int, stop: int) -> FoldedNorm:
        """The norm of the channels whose statistics stand there, with the newest of them finished."""
        of, (at, new) = self.of, self.new or (start, None)
        self.new = None
        if not norm.batch:
            if new is not None:
                merge(new, *self.statistics[:, at : at + new.values.shape[2]].unbind(0))
            mean, var = norm.module.running_mean, norm.module.running_var
            return of.passes.fold(mean, var, gamma, beta, norm.eps, False, None, 0, of.scratch)
        if self.exchange.count <= 1:
            flat = tuple(self.groups[0][-2].shape[2:]) == (1, 3) if self.groups else self.call.tail.pool == (1, 2)
            sizes = of.sizes[1:] if flat else of.sizes  # what the block was given
            check_count(self.exchange.count, (of.features.shape[0], stop - start, *sizes))
        mean, var = self.statistics[:, start:stop].unbind(0)
        if norm.module is not None:
            self.moves.append((norm.module, Statistics(mean, var)))
        return of.passes.fold(mean, var, gamma, beta, norm.eps, True, new, at - start, of.scratch)


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
        self.call, self.kept, self.needed = call, kept, needed
        self.groups, self.tail_parameters = call.split(parameters)
        self.needs, self.tail_needs = call.split(needed[1:])
        self.of = of = _Geometry(features, channels, call, self.groups)
        # Gradients of features are wanted from the first one that depends on something trainable: the input, or the
        # output of the first layer with a parameter to train. Columns before it have no place in G.
        self.first = 0
        if not (needed[0] or call.new_first):
            trainable = (of.own(i)[0] for i, need in enumerate(self.needs) if any(need))
            self.first = next(trainable, of.total)
        self.G = aligned_empty(features, of.total - self.first)
        self.g_rows = as_rows(self.G)
        self.correction = torch.zeros_like(kept.statistics)  # slope and level of every channel
        norms = [norm for layer in kept.layers for norm in (layer.norm1, layer.norm2)]
        norms = [norm for norm in (*norms, kept.tail) if norm is not None]
        self.short_cuts = of.passes.short_cuts(norms, of.dtype)
        self.rebuilt: Tensor | None = None  # conv1's output in the next layer, if it has been run again already

    def run(self, grad: Tensor) -> list[Tensor | None]:
        """The gradients of the input and of all parameters, ``None`` where it is not wanted."""
        gradients = list(self.tail(grad))
        self.of.scratch.clear()  # a tail works on all channels of whole images, the layers on less
        for i in reversed(range(len(self.groups))):
            gradients[:0] = self.layer(i)
        gradients.insert(0, self.input() if self.needed[0] else None)
        return [g if need else None for g, need in zip(gradients, self.needed, strict=True)]

    def tail(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Fill G from the gradient of what the tail gave; returns the tail's parameter gradients."""
        of, call, norm = self.of, self.call.tail, self.kept.tail
        if self.call.new_only:
            (start, stop), first = of.new(), self.first
            self.G.zero_()  # what nobody has been given
            if first < stop:
                at = max(start, first)
                self.G[:, at - first : stop - first].copy_(grad[:, at - start :])
            return ()
        if call is None:
            self.G.copy_(grad[:, self.first :])
            return ()
        grad = grad.flatten(2).transpose(1, 2)
        channels = of.read(len(self.groups))
        g, first = self.gradient(*channels)
        need = self.need(norm, g is not None, *self.tail_needs)
        weight = None
        if call.pool is None:
            pending = of.passes.norm_relu_backward(of.rows, norm, grad, g, first, need, of.scratch)
        else:
            weight = self.tail_parameters[2]
            pending = of.passes.transition_backward(
                of.rows, norm, weight, grad, call.pool, of.sizes, g, first, need, of.scratch
            )
        return self.finish(pending, norm, weight, channels, g is not None)[: len(self.tail_needs)]

    def layer(self, i: int) -> tuple[Tensor | None, ...]:
        """One layer, whose readers are all done: adds into G what its input gets; returns its parameters' gradients."""
        of, passes, p, needs = self.of, self.of.passes, self.groups[i], self.needs[i]
        call, kept = self.call.layers[i], self.kept.layers[i]
        norm1, norm2 = kept.norm1, kept.norm2
        read, own, inner = of.read(i), of.own(i), of.inner(i)
        g, first = self.gradient(*read)
        if g is None and not any(needs):
            return (None,) * len(needs)
        x, y, (dy, _) = columns(of.rows, *read), columns(of.rows, *own), self.gradient(*own)
        correction = self.correction_of(*own)
        factor = of.factor(i, call, kept.random_state)
        if norm2 is None:
            pending = passes.conv3x3_backward(
                x, norm1, p[2], y, dy, correction, factor, of.sizes, g, first,
                self.need(norm1, g is not None, *needs), of.scratch,
            )  # fmt: skip
            return self.finish(pending, norm1, p[2], read, g is not None)

        b = kept.conv1 if self.rebuilt is None else self.rebuilt
        self.rebuilt = None
        if b is None:
            again = self.rebuild(i)
            passes.conv1x1_forward(*again, None, of.scratch)
            b = again.out
        need_b = g is not None or any(needs[:4])
        dz2 = of.matrix("dz2", b.shape[1]) if need_b else None
        pending = passes.conv3x3_backward(
            b, norm2, p[6], y, dy, correction, factor, of.sizes, dz2, None,
            self.need(norm2, need_b, *needs[4:]), of.scratch,
        )  # fmt: skip
        second = self.finish(pending, norm2, p[6], inner, need_b)
        if not need_b:
            return (*(None,) * 4, *second)
        correction2 = self.correction_of(*inner) if norm2.batch else None
        pending = passes.conv1x1_backward(
            x, norm1, p[2], b, dz2, norm2, correction2, g, first,
            self.need(norm1, g is not None, *needs[:4]), of.scratch,
        )  # fmt: skip
        again = self.rebuild(i - 1)  # into b's memory, which is free by now
        self.rebuilt = None if again is None else again.out
        return (*self.finish(pending, norm1, p[2], read, g is not None, again), *second)

    def rebuild(self, i: int) -> Rebuild | None:
        """What gives conv1's output in layer ``i``, where the backward pass needs it and it was not kept."""
        if i < 0 or self.call.layers[i].norm2 is None or self.kept.layers[i].conv1 is not None:
            return None
        of, (start, stop), (inner_start, inner_stop) = self.of, self.of.read(i), self.of.inner(i)
        if self.gradient(start, stop)[0] is None and not any(self.needs[i]):
            return None
        b = of.matrix("b", inner_stop - inner_start)
        return Rebuild(columns(of.rows, start, stop), self.kept.layers[i].norm1, *self.groups[i][2:4], b)

    def input(self) -> Tensor:
        """The complete gradient of the block's input."""
        of, (start, stop) = self.of, self.of.read(0)
        dx = channels_last_empty(of.features, stop - start)
        g, _ = self.gradient(start, stop)
        correction = self.correction_of(start, stop)
        of.passes.correct(columns(of.rows, start, stop), g, None, correction, as_rows(dx), of.scratch)
        return dx

    def gradient(self, start: int, stop: int) -> tuple[Tensor | None, int]:
        """The columns of G for those of these channels whose gradient is wanted, and the first of them."""
        first = max(start, self.first)
        return (columns(self.g_rows, first - self.first, stop - self.first) if first < stop else None), first - start

    def need(
        self, norm: FoldedNorm, need_input: bool, need_gamma: bool, need_beta: bool, need_weight: bool = False,
        need_bias: bool = False,
    ) -> Need:  # fmt: skip
        sums = need_gamma or need_beta or (need_input and norm.batch)
        return Need(sums, need_weight, need_bias, sums and need_weight and norm in self.short_cuts)

    def finish(
        self, pending: Pending, norm: FoldedNorm, weight: Tensor | None, channels: tuple[int, int], need_input: bool,
        rebuild: Rebuild | None = None,
    ) -> Gradients:  # fmt: skip
        """The parameters' gradients; the norm's correction is added to that of the channels it read."""
        of, (start, stop) = self.of, channels
        correction = self.correction[:, start:stop] if need_input and norm.batch else None
        count = self.kept.exchange.count
        return of.passes.finish_backward(pending, norm, weight, count, correction, of.scratch, rebuild)

    def correction_of(self, start: int, stop: int) -> Correction | None:
        """The complete correction of channels whose readers are done, over all processes; ``None`` where none is due."""
        if stop <= self.of.total and not self.of.has_statistics(start, stop):
            return None
        correction = self.correction[:, start:stop]
        self.kept.exchange.sums(correction)
        return Correction(*correction.unbind(0), self.kept.statistics[0, start:stop])


@contextlib.contextmanager
def as_it_says(device: torch.device) -> Iterator[None]:
    """Within it every operation is computed in the type its tensors have."""
    with torch.autocast(device.type, enabled=False), products_as_convolutions(device):
        yield


class _DenseBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer, call, *parameters):
        with as_it_says(x.device):
            run = _Forward(buffer, x.shape[1], call, parameters, keep=True)
            out, kept = run.run(), run.kept
        conv1 = [layer.conv1 for layer in kept.layers]
        for layer in kept.layers:
            layer.conv1 = None  # saved as tensors, where hooks on saved tensors see them
        # The finished block leaves the library's hands as an output. Whoever edits it in place edits what the backward
        # pass reads; kept as a saved tensor, autograd notices.
        exposed = out if call.tail is None and not call.new_only else None
        ctx.save_for_backward(x, buffer.tensor, exposed, *parameters, *conv1)
        ctx.call, ctx.kept = call, kept
        return out

    @staticmethod
    def backward(ctx, grad):
        x, features, _, *saved = ctx.saved_tensors
        layers = ctx.kept.layers
        end = len(saved) - len(layers)
        parameters, conv1 = saved[:end], saved[end:]
        needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        if must_rebuild(grad):

            def reference(x, *parameters):
                with torch.autocast(x.device.type, enabled=False):
                    return dense_block_reference(x, ctx.call, parameters, ctx.kept)

            dx, *rest = rebuilt_gradients(reference, (x, *parameters), needed, grad)
            return dx, None, None, *rest

        layers = [_KeptLayer(k.norm1, k.norm2, b, k.random_state) for k, b in zip(layers, conv1, strict=True)]
        kept = dataclasses.replace(ctx.kept, layers=layers)
        with as_it_says(x.device):
            dx, *rest = _Backward(features, x.shape[1], ctx.call, parameters, kept, needed).run(grad)
        return dx, None, None, *rest


@overridable
def fused_block(x: Tensor, call: BlockCall, parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A dense block and its tail as one function; equivalent to :func:`dense_block_reference`.

    Args:
        x: the block's input.
        call: its layers and tail, and whether conv1's outputs are kept (fused) or rebuilt (lean).
        parameters: gamma, beta, weight, bias of every norm and convolution, in order, as :meth:`BlockCall.split` says.
        dtype: what the features are stored and the products computed in.

    Shape:
        - x: ``(N, C_0, H, W)`` or ``(N, C_0, D, H, W)``
        - returns: ``(N, C_0 + L k, …)``, with ``new_only`` ``(N, L k, …)``, or what the tail makes of it
    """
    groups, _ = call.split(parameters)
    new = sum(p[-2].shape[0] for p in groups)
    if _is_captured(x.device):
        call = with_factors(call, x, parameters, dtype)
    if not groups and x.dtype == dtype and x.movedim(1, -1).is_contiguous():  # nothing to write beside it
        buffer, first = FeatureBuffer.of(x), x
    else:
        buffer = FeatureBuffer(x, x.shape[1] + new, dtype, alone=call.tail is not None or call.new_only)
        first = append(None, x, buffer, new_first=call.new_first)
    if torch.is_grad_enabled() and (first.requires_grad or any(p is not None and p.requires_grad for p in parameters)):
        return _DenseBlock.apply(first, buffer, call, *parameters)
    with as_it_says(x.device):
        return _Forward(buffer, x.shape[1], call, parameters, keep=False).run()


def layer_call(layer: Parts, channels_last: bool = False) -> tuple[LayerCall, list[Tensor]]:
    """How a dense layer runs just now, and its parameters.

    Args:
        layer: its modules.
        channels_last: whether its last convolution gives that in the plain model.
    """
    parameters = [
        parameter for norm, conv in zip(layer.norms, layer.convs, strict=True)
        for parameter in (tensor(norm, "weight"), tensor(norm, "bias"), tensor(conv, "weight"), tensor(conv, "bias"))
    ]  # fmt: skip
    second = None if layer.norm2 is None else NormCall.of(layer.norm2)
    channels_last = channels_last and layer.as_laid_out
    call = LayerCall(NormCall.of(layer.norm1), second, layer.drop_rate, None, layer.channel_wise, channels_last)
    return call, parameters

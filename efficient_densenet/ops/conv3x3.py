"""The 3x3 convolution of a dense layer on rows of images, in the forms that run fastest; 3x3x3 and 1x3 as well.

With ``y[p] = Σ_t a[p + t - 1] W[t]`` over the taps ``t`` of the kernel, the gradients are

    da[q] = Σ_t dy[q - t + 1] W[t],        dW[t] = Σ_q dy[q - t + 1] ⊗ a[q].

A dense layer has few output channels (k), so its *output gradient* is the cheap side to unfold: ``(m, taps·k)``
instead of ``(m, taps·4k)``. Unfolded once from a zero-bordered copy, dW is one matrix product with the rows of ``a``.
Where torch's own kernel is faster than that, :attr:`~.device.Description.unfolds` says so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .device import describe
from .tiles import Scratch, as_type, parts

_convolution = torch.convolution
_convolution_backward = torch.ops.aten.convolution_backward.default


def as_images(rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """``(n·hw, C)`` rows as ``(n, C, *sizes)`` images, a channels-last view."""
    return rows.view(-1, *sizes, rows.shape[1]).movedim(-1, 1)


def as_rows(images: Tensor) -> Tensor:
    """The other way round; a copy where the images are not channels-last."""
    return images.movedim(1, -1).reshape(-1, images.shape[1])


def _channels_last(weight: Tensor) -> Tensor:
    return weight.contiguous(memory_format=torch.channels_last if weight.dim() == 4 else torch.channels_last_3d)


class _Geometry:
    """Arguments of torch's convolution for a kernel with these taps."""

    def __init__(self, taps: tuple[int, ...]):
        self.ones, self.zeros = (1,) * len(taps), (0,) * len(taps)
        self.padding = tuple(t // 2 for t in taps)


class ConvForward:
    """The convolution of tiles of whole images.

    Args:
        weight: ``(k, C, *taps)``.
        bias: ``(k,)`` or ``None``.
        sizes: the spatial sizes of an image.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...]):
        self._sizes, self._geometry = sizes, _Geometry(tuple(weight.shape[2:]))
        filled = -weight.shape[0] % 8  # output channels are filled up with zeros to a multiple of 8, a vector
        if filled:
            weight = torch.constant_pad_nd(weight, [0, 0] * (weight.dim() - 1) + [0, filled])
            bias = bias if bias is None else torch.constant_pad_nd(bias, [0, filled])
        self._weight, self._bias = _channels_last(weight), bias

    def __call__(self, a: Tensor) -> Tensor:
        """``y`` of the rows ``a``, ``(n·hw, C)``: ``(n·hw, k)``, and perhaps columns behind that nobody wants."""
        g = self._geometry
        images = as_images(a, self._sizes)
        return as_rows(_convolution(images, self._weight, self._bias, g.ones, g.padding, g.ones, False, g.zeros, 1))


class ConvBackward:
    """Both gradients of the convolution, tile of images by tile of images.

    Args:
        weight: ``(k, C, *taps)``, in the type the products are computed in.
        sizes: the spatial sizes of an image.
        scratch: working memory.
        need_input: whether the input's gradient will be asked for.
        need_weight: whether the weight's will be.
    """

    def __init__(self, weight: Tensor, sizes: tuple[int, ...], scratch: Scratch, need_input: bool, need_weight: bool):
        self._k, self._channels, *taps = weight.shape
        self._taps, self._sizes = tuple(taps), sizes
        self._geometry = _Geometry(self._taps)
        self._scratch, self._dtype = scratch, weight.dtype
        self._device = describe(weight.device)
        self._weight, self._need_input, self._need_weight = weight, need_input, need_weight
        self._unfolds = need_weight and self._device.unfolds
        self._flipped = None
        if need_input and len(sizes) == 2:
            self._flipped = _channels_last(weight.flip(tuple(range(2, weight.dim()))).transpose(0, 1))
        self._total: Tensor | None = None  # dW; unfolded, the taps first

    def output_gradient(self, n: int) -> Tensor:
        """Where to write ``dy`` of the next ``n`` images: ``(n, *sizes, k)``, the inside of a zero-bordered buffer."""
        grown = tuple(s + t - 1 for s, t in zip(self._sizes, self._taps, strict=True))
        self._bordered = self._scratch.take_zeroed(f"dy of {n}", (n, *grown, self._k), self._dtype)
        inside = self._bordered
        for dim, (s, t) in enumerate(zip(self._sizes, self._taps, strict=True), start=1):
            if t > 1:
                inside = inside.narrow(dim, t // 2, s)
        self._inside = inside
        return inside

    def input_gradient(self, a: Tensor) -> Tensor | None:
        """This tile's part of dW is added; returns its ``da`` as rows, ``(n·hw, C)``, if wanted.

        Args:
            a: the rows the convolution read.
        """
        if self._unfolds:
            self._add_unfolded(a)
        elif self._need_weight:
            self._add(self._by_torch(a, False, True)[1])
        if not self._need_input:
            return None
        if self._flipped is not None:  # no padding is left to do
            g = self._geometry
            dy = self._bordered.movedim(-1, 1)
            return as_rows(_convolution(dy, self._flipped, None, g.ones, g.zeros, g.ones, False, g.zeros, 1))
        # torch runs this as a convolution of single volumes several times slower than as a gradient
        return as_rows(self._by_torch(a, True, False)[0])

    def _by_torch(self, a: Tensor, need_input: bool, need_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
        g = self._geometry
        return _convolution_backward(
            self._inside.movedim(-1, 1), as_images(a, self._sizes), self._weight, None,
            g.ones, g.padding, g.ones, False, g.zeros, 1, (need_input, need_weight, False),
        )  # fmt: skip

    def _add(self, part: Tensor) -> None:
        part = as_type(part, torch.promote_types(part.dtype, torch.float32))
        self._total = part if self._total is None else self._total.add_(part)

    def _add_unfolded(self, a: Tensor) -> None:
        dy = self._bordered
        lines, *rest = self._sizes  # lines of pixels, or planes of voxels: what can be unfolded alone
        line, width = math.prod(rest), math.prod(self._taps) * self._k
        fitting = max(self._device.unfolded_bytes // (line * width * dy.element_size()), 1)
        images = _even_parts(dy.shape[0], fitting // lines)
        step = _even_parts(lines, fitting)
        for part, rows in zip(parts(dy, images), parts(a, images * lines * line), strict=True):
            for first in range(0, lines, step):
                count = min(step, lines - first)
                within = part.narrow(1, first, count + self._taps[0] - 1)
                some = rows if count == lines else rows.narrow(0, first * line, count * line)
                unfolded = self._scratch.take("gradients", some.shape[0], width, dy.dtype)
                shape, strides = (part.shape[0], count, *rest, *self._taps, self._k), within.stride()
                windows = within.as_strided(shape, (*strides[:-1], *strides[1:-1], 1), within.storage_offset())
                unfolded.view(shape).copy_(windows)
                self._total = add_product(self._total, unfolded.t(), some)

    def weight(self) -> Tensor:
        """dW, ``(k, C, *taps)`` in the weight's layout, in float32 or wider, when all tiles have been added."""
        d = len(self._taps)
        total = self._total
        if self._unfolds:
            taps_first = total.view(*self._taps, self._k, self._channels).flip(tuple(range(d)))
            total = taps_first.permute(d, d + 1, *range(d))
        elif total.stride() == self._weight.stride():
            return total
        return torch.empty_like(self._weight, dtype=total.dtype).copy_(total)


def _even_parts(total: int, most: int) -> int:
    """The size of equal parts of ``total`` that are at most ``most``, and at least one, long."""
    return math.ceil(total / math.ceil(total / max(most, 1)))


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """``total + left @ right``, in place and in float32 or wider; None is zero."""
    if total is None:
        return as_type(torch.mm(left, right), torch.promote_types(left.dtype, torch.float32))
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total.add_(torch.mm(left, right))


def as_kernel(matrix: Tensor, like: Tensor) -> Tensor:
    """``(O, C)`` as a 1x1 kernel in the strides of ``like``: DDP compares them, also of sides of length one."""
    strides = like.stride()
    return matrix.as_strided(like.shape, strides) if strides[:2] == matrix.stride() else matrix.view(like.shape)

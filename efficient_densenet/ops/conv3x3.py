"""The 3x3 convolution of a dense layer on rows of images, in the forms that run fastest; 3x3x3 and 1x3 as well.

With ``y[p] = Σ_t a[p + t - 1] W[t]`` over the taps ``t`` of the kernel, the gradients are

    da[q] = Σ_t dy[q - t + 1] W[t],        dW[t] = Σ_q dy[q - t + 1] ⊗ a[q].

A dense layer has few output channels (k), so its *output gradient* is the cheap side to unfold: ``(m, taps·k)``
instead of ``(m, taps·4k)``. Unfolded once from a zero-bordered copy, dW is one matrix product with the rows of ``a``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .tiles import Scratch, as_type, parts

UNFOLDED_BYTES = 2**22  # of scratch for unfolded gradients

_CONVOLUTIONS = {4: F.conv2d, 5: F.conv3d}


def as_images(rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """``(n·hw, C)`` rows as ``(n, C, *sizes)`` images, a channels-last view."""
    return rows.view(-1, *sizes, rows.shape[1]).movedim(-1, 1)


def _channels_last(weight: Tensor) -> Tensor:
    return weight.contiguous(memory_format=torch.channels_last if weight.dim() == 4 else torch.channels_last_3d)


def forward_weight(weight: Tensor) -> Tensor:
    """The kernel for :func:`conv_forward`: output channels filled up with zeros to a multiple of 8, a vector."""
    filled = -weight.shape[0] % 8
    if filled:
        weight = F.pad(weight, [0, 0] * (weight.dim() - 1) + [0, filled])
    return _channels_last(weight)


def conv_forward(a: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """``y`` of the rows ``a``, ``(n·hw, C)``, of whole images; ``weight`` by :func:`forward_weight`."""
    padding = tuple(t // 2 for t in weight.shape[2:])
    y = _CONVOLUTIONS[weight.dim()](as_images(a, sizes), weight, padding=padding)
    return y.movedim(1, -1).reshape(a.shape[0], -1)


class ConvBackward:
    """Both gradients of the convolution, tile of images by tile of images.

    Args:
        weight: ``(k, C, *taps)``.
        sizes: the spatial sizes of an image.
        scratch: working memory.
        need_input: whether the input's gradient will be asked for.
    """

    def __init__(self, weight: Tensor, sizes: tuple[int, ...], scratch: Scratch, need_input: bool):
        self._k, self._channels, *self._taps = weight.shape
        self._sizes, self._scratch, self._dtype = sizes, scratch, weight.dtype
        self._weight, self._flipped = weight, None
        if need_input and len(sizes) == 2:
            self._flipped = _channels_last(weight.flip(tuple(range(2, weight.dim()))).transpose(0, 1))
        self._unfolded: Tensor | None = None  # dW, the taps first

    def bordered(self, n: int) -> tuple[Tensor, Tensor]:
        """A zero-bordered buffer for ``dy`` of ``n`` images, ``(n, *(s + t - 1), k)``, and its inside, to write to."""
        grown = tuple(s + t - 1 for s, t in zip(self._sizes, self._taps, strict=True))
        buffer = self._scratch.take_zeroed(f"dy of {n}", (n, *grown, self._k), self._dtype)
        inside = buffer
        for dim, (s, t) in enumerate(zip(self._sizes, self._taps, strict=True), start=1):
            inside = inside.narrow(dim, t // 2, s)
        return buffer, inside

    def add_weight(self, dy: Tensor, a: Tensor) -> None:
        """Add this tile's part of dW; ``dy`` bordered, ``a`` the rows the convolution read."""
        lines, *rest = self._sizes  # lines of pixels, or planes of voxels: what can be unfolded alone
        line, width = math.prod(rest), math.prod(self._taps) * self._k
        fitting = max(UNFOLDED_BYTES // (line * width * dy.element_size()), 1)
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
                self._unfolded = add_product(self._unfolded, unfolded.t(), some)

    def input(self, dy: Tensor, inside: Tensor, a: Tensor) -> Tensor:
        """``da`` of this tile as rows, ``(n·hw, C)``; ``dy`` bordered, so that in 2-D no padding is left to do."""
        if self._flipped is not None:
            da = F.conv2d(dy.movedim(-1, 1), self._flipped)
        else:  # torch runs this as a convolution of single volumes several times slower than as a gradient
            da, _, _ = torch.ops.aten.convolution_backward(
                inside.movedim(-1, 1), as_images(a, self._sizes), self._weight, None,
                (1, 1, 1), tuple(t // 2 for t in self._taps), (1, 1, 1), False, (0, 0, 0), 1, (True, False, False),
            )  # fmt: skip
        return da.movedim(1, -1).reshape(-1, self._channels)

    def weight(self) -> Tensor:
        """dW, ``(k, C, *taps)`` in the weight's layout, in float32 or wider, when all tiles have been added."""
        d = len(self._taps)
        taps_first = self._unfolded.view(*self._taps, self._k, self._channels).flip(tuple(range(d)))
        dweight = torch.empty_like(self._weight, dtype=self._unfolded.dtype)
        return dweight.copy_(taps_first.permute(d, d + 1, *range(d)))


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

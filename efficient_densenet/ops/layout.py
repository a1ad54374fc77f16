"""The memory format of what leaves the library: the one that the plain model gives for the same weights and input.

Between the library's own parts everything is channels-last, whatever comes in. What others can see, outputs, gradients,
what hooks get, what replaced modules are called with, has the strides the plain model would give it, of all sides
longer than one. (Of a side of length one they mean nothing; a kernel's gradient has those of the kernel.) The functions
below say which format that is, from one operation of the plain model to the next:

* a concatenation is channels-last where everything in it is (:func:`is_channels_last`), else contiguous;
* normalisation, rectifier and dropout keep the format of what they read (:func:`behind_pointwise`), the gradient of
  what they read has its format too;
* a convolution is channels-last, and so are its gradients, where its input or its kernel is, if torch's code for these
  sizes can be (:func:`behind_convolution`);
* average pooling of volumes is contiguous, all other pooling keeps the format.

With fewer than two spatial dimensions everything is contiguous. A block passes the gradient of its input on in the
format of its output, which is that of the gradient it gets unless somebody makes it otherwise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .overrides import overridable
from .rebuild import in_a_transform, is_many

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """Whether torch takes ``x`` for channels-last, by its own rule: strides that grow from the channels outward.

    A shape that could be both (one channel, one pixel) is what its strides say, as for torch.
    """
    dims = x.dim()
    if dims not in _FORMATS:
        return False
    sizes, strides = x.shape, x.stride()
    if strides[1] == 0:
        return False
    least = 0
    for d in (1, 3, 2, 0) if dims == 4 else (1, 4, 3, 2, 0):
        if sizes[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * sizes[d]
    return True


def _memory_format(x: Tensor, channels_last: bool) -> torch.memory_format:
    return _FORMATS[x.dim()] if channels_last else torch.contiguous_format


def copy_in_format(x: Tensor, channels_last: bool) -> Tensor:
    """A copy of ``x`` in the given format."""
    return x.clone(memory_format=_memory_format(x, channels_last))


def in_format(x: Tensor, channels_last: bool) -> Tensor:
    """``x``, copied where its format is another one; the gradient passes as it comes."""
    dense = x.is_contiguous(memory_format=_memory_format(x, channels_last))
    return x if dense and is_channels_last(x) == channels_last else copy_in_format(x, channels_last)


class _GradientInFormat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, channels_last: Callable[[], bool]) -> Tensor:
        ctx.channels_last = channels_last
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        if in_a_transform() or is_many(grad):  # strides of a batch of gradients are torch's affair
            return grad, None
        return in_format(grad, ctx.channels_last()), None


@overridable
def gradient_in_format(x: Tensor, channels_last: bool | Callable[[], bool]) -> Tensor:
    """``x`` as it is; its gradient arrives in the given format, or in the one that is known by then."""
    if torch.compiler.is_compiling() or not (x.requires_grad and torch.is_grad_enabled()):  # the compiler's affair
        return x
    return _GradientInFormat.apply(x, channels_last if callable(channels_last) else lambda: channels_last)


def behind_pointwise(channels_last: bool, shape: Sequence[int]) -> bool:
    """Whether normalisation, rectifier or dropout give channels-last: as they read, but contiguous where it is both."""
    return channels_last and shape[1] > 1 and math.prod(shape[2:]) > 1


def behind_convolution(channels_last: bool, shape: Sequence[int], weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a convolution that keeps the spatial sizes gives channels-last, in its output and in its gradients.

    Args:
        channels_last: of its input.
        shape: of its input.
        weight: its kernel.
        dtype: what it computes in.
    """
    if weight.dim() not in _FORMATS or not (channels_last or is_channels_last(weight)):
        return False
    if torch.compiler.is_compiling():  # which asks by itself
        return True
    return _can_be_channels_last(tuple(shape), tuple(weight.shape), dtype, weight.device, torch.get_num_threads())


@functools.lru_cache(maxsize=1024)
def _can_be_channels_last(
    shape: tuple[int, ...], kernel: tuple[int, ...], dtype: torch.dtype, device: torch.device, threads: int
) -> bool:
    """Whether torch's code for these sizes can (of volumes some cannot); ``threads``: it also chooses by them."""
    dims = len(kernel) - 2
    one = torch.empty((), dtype=dtype, device=device)
    try:
        ones, padding = [1] * dims, [side // 2 for side in kernel[2:]]
        code = torch._C._select_conv_backend(
            one.expand(shape), one.expand(kernel), None, ones, padding, ones, False, [0] * dims, 1, None
        )
        some = one.expand((2,) * len(kernel)).clone(memory_format=_FORMATS[len(kernel)])
        return torch._C._conv_determine_backend_memory_format(some, some, code) != torch.contiguous_format
    except (AttributeError, TypeError, RuntimeError):  # no public function tells
        return True
